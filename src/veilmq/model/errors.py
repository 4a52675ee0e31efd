"""The typed errors of everything below the protocols.

    VeilError
        UsageError          the caller broke a rule; repeating the command cannot help
            ParameterInvalid, QueueMissing, QueueExists, QueueDeletedRecently, PurgeInProgress, MessageTooLarge,
            ReceiptInvalid, RedriveRefused, TopicMissing, TopicExists, SubscriptionMissing, SubscriptionExists,
            SubscriptionsFull, AttemptNotRetryable
        LeaseError          the normal outcome of a race
            LeaseExpired, LeaseTaken, MessageGone
        CapacityError       a limit that time or an operator lifts: retry later
            InFlightFull, RateExceeded, MovesFull, QueuesFull, TopicsFull, AccountSubscriptionsFull, DiskLow, Overloaded
        StoreError          the store could not do it
            StoreFailed     certainly not done
            StoreUnknown    perhaps done, perhaps not
        CapabilityMissing   this store or protocol cannot do that at all

Strategy: the branches are never raised or returned themselves, only their leaves. Data is in fields; no HTTP status and
no protocol's code appears here: each protocol has one total table from these classes to its wire errors. Errors are
outcomes: a store returns them instead of a result. `as_fields` and `from_fields` carry them across a process boundary.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Final

OTHER_QUEUE: Final = "it is of another queue"
"""Reason of a ReceiptInvalid whose handle is genuine."""
NAME_TAKEN: Final = "name"
"""`setting` of a QueueExists: `queue` is the name or the alias of another queue."""
TARGET_MISSING: Final = "it does not exist"
"""Reason of a RedriveRefused."""


class VeilError(Exception):
    """Root of all expected errors; holds its data in the attributes that its class annotates."""

    fields: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str] = ""
    request_id: str = ""
    """The service's id of the refused request, if the client got one. It is not a field: errors that differ only in it
    are equal."""

    def __init__(self, **values: Any) -> None:
        if set(values) != set(self.fields):
            raise TypeError(f"{type(self).__name__} takes {self.fields}, not {tuple(values)}")
        for name, value in values.items():
            setattr(self, name, value)
        super().__init__(self.summary.format(**values))

    def __init_subclass__(cls) -> None:
        cls.fields = tuple(name for name in cls.__annotations__ if name not in {"fields", "summary"})

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and as_fields(self) == as_fields(other)

    def __hash__(self) -> int:
        return hash((type(self), str(self)))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.fields)
        return f"{type(self).__name__}({values})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Beside the fields: the request id, and the notes, which may say what to do.
        rest = {name: value for name, value in vars(self).items() if name not in self.fields}
        return (_made, (type(self), as_fields(self)), rest or None)


def _made(kind: type[VeilError], values: dict[str, Any]) -> VeilError:
    return kind(**values)


def _seconds(duration_us: int) -> int:
    return -(-duration_us // 1_000_000)


class UsageError(VeilError):
    """The caller broke a rule."""


class LeaseError(VeilError):
    """The normal outcome of a race: another receiver was faster, or the lease ended."""


class CapacityError(VeilError):
    """A limit that time or an operator lifts."""


class StoreError(VeilError):
    """The store could not do it."""


class CapabilityMissing(VeilError):
    """This store, protocol or adapter cannot do that at all."""

    capability: str
    summary = "not supported here: {capability}"


class ParameterInvalid(UsageError):
    """A parameter has a value that is not allowed; the fields say which and why."""

    parameter: str
    reason: str
    summary = "{parameter}: {reason}"


class QueueMissing(UsageError):
    """No queue of that name, or it is not the queue that granted the handle."""

    queue: str
    summary = "no queue {queue}"


class QueueExists(UsageError):
    """A queue of that name exists with another value of the named setting or label; or NAME_TAKEN."""

    queue: str
    setting: str
    summary = "queue {queue} exists with another {setting}"

    def __str__(self) -> str:
        if self.setting == NAME_TAKEN:
            return f"{self.queue} is another queue's name or alias"
        return super().__str__()


class QueueDeletedRecently(UsageError):
    """The name is free again in `wait_us` (SQS: 60 s)."""

    queue: str
    wait_us: int
    summary = "queue {queue} was deleted recently"

    def __str__(self) -> str:
        return f"{super().__str__()}: create it in {_seconds(self.wait_us)} s"


class PurgeInProgress(UsageError):
    """The last purge was less than the cool-down ago (SQS: 60 s)."""

    queue: str
    wait_us: int
    summary = "queue {queue} was purged recently"

    def __str__(self) -> str:
        return f"{super().__str__()}: purge it again in {_seconds(self.wait_us)} s"


class MessageTooLarge(UsageError):
    """Body and attributes exceed the queue's limit."""

    size_bytes: int
    limit_bytes: int
    summary = "message of {size_bytes} bytes exceeds the limit of {limit_bytes} bytes"


class ReceiptInvalid(UsageError):
    """This queue never gave this handle: it does not parse, is forged, or is of another queue or incarnation."""

    reason: str
    summary = "receipt handle is invalid: {reason}"


class RedriveRefused(UsageError):
    """The dead-letter target is missing, of another kind, or does not allow this source."""

    target: str
    reason: str
    summary = "queue {target} cannot take dead letters: {reason}"


class TopicMissing(UsageError):
    """No topic of that name."""

    topic: str
    summary = "no topic {topic}"


class TopicExists(UsageError):
    """A topic of that name exists with another value of the named setting."""

    topic: str
    setting: str
    summary = "topic {topic} exists with another {setting}"


class SubscriptionMissing(UsageError):
    """The topic has no subscription of that name."""

    topic: str
    subscription: str
    summary = "topic {topic} has no subscription {subscription}"


class SubscriptionExists(UsageError):
    """The topic has a subscription of that name with another value of the named setting."""

    topic: str
    subscription: str
    setting: str
    summary = "topic {topic} has a subscription {subscription} with another {setting}"


class SubscriptionsFull(UsageError):
    """The topic has reached its maximum of subscriptions (MNS: 100)."""

    topic: str
    limit: int
    summary = "topic {topic} has {limit} subscriptions already"


class AttemptNotRetryable(UsageError):
    """A receive is retried by its attempt id, but one of its messages was deleted or changed since (SQS FIFO:
    ReceiveRequestAttemptId)."""

    attempt_id: str
    summary = "attempt id {attempt_id}: a message of that receive was deleted or changed since"


class LeaseExpired(LeaseError):
    """The lease ended before the command arrived, and the command may not revive it."""

    sequence: int
    attempt: int
    summary = "the lease has expired"


class LeaseTaken(LeaseError):
    """A newer lease or a newer handle of the same message exists."""

    sequence: int
    attempt: int
    summary = "the message was received again or its handle was replaced"


class MessageGone(LeaseError):
    """The message was deleted, expired, purged or moved."""

    sequence: int
    attempt: int
    summary = "the message is gone"


class InFlightFull(CapacityError):
    """The protocol's cap on messages in flight is reached (SQS: 120,000)."""

    queue: str
    limit: int
    summary = "queue {queue} has {limit} messages in flight"


class RateExceeded(CapacityError):
    """The queue has delivered as many messages as its owner allows per second (MNS: TenantRateLimitPolicy)."""

    queue: str
    limit: int
    summary = "queue {queue} hands out at most {limit} messages a second"


class MovesFull(CapacityError):
    """The account has reached its maximum of running message move tasks (SQS: 100)."""

    account: str
    limit: int
    summary = "account {account} has {limit} message move tasks under way"


class QueuesFull(CapacityError):
    """The account has as many queues as the operator allows; a push subscription needs one, too."""

    account: str
    limit: int
    summary = "account {account} has {limit} queues already"


class TopicsFull(CapacityError):
    """The account has as many topics as the operator allows."""

    account: str
    limit: int
    summary = "account {account} has {limit} topics already"


class AccountSubscriptionsFull(CapacityError):
    """The account has as many subscriptions as the operator allows."""

    account: str
    limit: int
    summary = "account {account} has {limit} subscriptions already"


class DiskLow(CapacityError):
    """Free space is below the soft floor: sends and creates wait, receives and deletes go on."""

    free_bytes: int
    summary = "disk is nearly full: {free_bytes} bytes left"


class Overloaded(CapacityError):
    """More commands wait than the server accepts."""

    limit: int
    summary = "more than {limit} commands are waiting"


class StoreFailed(StoreError):
    """Certainly not done: rolled back."""

    reason: str
    summary = "not done: {reason}"


class StoreUnknown(StoreError):
    """Perhaps done: the store failed at a point where the outcome is unknown."""

    reason: str
    summary = "outcome unknown: {reason}"


def leaves(root: type[VeilError] = VeilError) -> Iterator[type[VeilError]]:
    """Every error class of this file that can occur, for the tests that a protocol's table is total."""
    below = [branch for branch in root.__subclasses__() if branch.__module__ == __name__]
    if not below and root is not VeilError:
        yield root
    for branch in below:
        yield from leaves(branch)


def as_fields(error: VeilError) -> dict[str, Any]:
    """The error's data by field name."""
    return {name: getattr(error, name) for name in error.fields}


def from_fields(name: str, values: dict[str, Any]) -> VeilError:
    """The error that `type(error).__name__` and `as_fields(error)` describe. Raises KeyError for an unknown name."""
    return {leaf.__name__: leaf for leaf in leaves()}[name](**values)
