"""The client's own errors, in addition to the model's.

Strategy: the model's errors are a queue's answers. The errors here say what went wrong on the way to it, or in a
pattern. `may_have_happened` tells a caller whether a retry may do the work twice.
"""

import re
from typing import Final

from veilmq.model import errors as model
from veilmq.model.errors import CapacityError, StoreError, StoreUnknown, UsageError, VeilError


class TransportError(VeilError):
    """The queue could not be reached, or its answer did not arrive."""

    reason: str
    may_have_happened: bool
    """False: certainly nothing was done. True: it may have been done, but the answer was lost."""
    summary = "{reason}"


class ForkRefused(TransportError):
    """A forked child used what only its parent may use; no later call of this process can succeed."""

    reason: str
    may_have_happened: bool


STRANGE: Final = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What an SDK raises when it reads an answer that is not from its service, but from a proxy for example."""
_NO_TLS: Final = re.compile("wrong.version.number|record layer failure", re.IGNORECASE)
"""OpenSSL's messages for an answer in plain HTTP."""
_OTHER_HOST: Final = re.compile("(hostname|ip address) mismatch|has expired|not yet valid", re.IGNORECASE)
"""OpenSSL's messages for a certificate of an issuer that it may know."""


def advised(reason: str) -> str:
    """Why a call failed, with advice where we have any."""
    if "proxy" in reason.lower():  # a proxy says nothing about the service
        return f"{reason}: the environment names a proxy; for a host that it cannot reach, export NO_PROXY=HOST"
    if "CERTIFICATE_VERIFY_FAILED" in reason and _OTHER_HOST.search(reason) is None:
        return f"{reason}: for a certificate of your own, export SSL_CERT_FILE=FILE with the certificate of its issuer"
    return f"{reason}: the port speaks no TLS; in a URL say tls=0" if _NO_TLS.search(reason) else reason


def strange_answer(error: Exception) -> TransportError:
    """The error for one of `STRANGE`, or for an error of the SDK's own parser."""
    return TransportError(reason=f"the answer cannot be read: {type(error).__name__}", may_have_happened=True)


def entry_unanswered() -> TransportError:
    """For an entry that is missing in the answer to a batch: it may have been done."""
    return TransportError(reason="the answer does not mention this entry", may_have_happened=True)


class ServiceError(VeilError):
    """The cloud refused with a code that the model has no error for (credentials, throttling, internal errors)."""

    code: str
    status: int
    request_id: str
    message: str
    summary = "{code}: {message} (status {status}, request {request_id})"

    def __str__(self) -> str:
        return super().__str__().replace(", request )", ")")  # a proxy in between gives no id

    @property
    def retryable(self) -> bool:
        """Throttled, or an internal error of the service: the same call may succeed later."""
        return self.status >= 500 or self.status == 429 or "Throttl" in self.code or self.code == "SlowDown"


class QueueRecreated(UsageError):
    """The queue was deleted and created again since its numbers were stored; they mean nothing now. Reset them."""

    queue: str
    was: str
    found: str
    summary = "queue {queue} was created anew ({found}, the stored numbers are of {was}): reset them"


class StorageHeld(UsageError):
    """Another process, or another object of this one, uses this storage for its numbers."""

    storage: str
    holder: str
    summary = "{storage} is held by {holder}"


class StorageLost(VeilError):
    """Another process took over the storage while this one was silent; nothing was written."""

    storage: str
    holder: str
    summary = "{storage} was taken over by {holder}"


class StateInvalid(UsageError):
    """The storage holds something that this reader or writer did not write."""

    storage: str
    reason: str
    summary = "{storage}: {reason}"


class GapFound(VeilError):
    """Messages are missing from an ordered queue, and have been for longer than the gap timeout."""

    queue: str
    epoch: int
    first: int
    last: int
    """The numbers `first` to `last` are missing. If last is below first, the end of the epoch is missing."""
    waited: float
    """Seconds."""
    summary = "queue {queue}: numbers {first} to {last} of epoch {epoch} did not come within {waited:.1f} s"

    def __str__(self) -> str:
        if self.last >= self.first:
            return super().__str__()
        end = f"the end of epoch {self.epoch}, after number {self.last},"
        return f"queue {self.queue}: {end} did not come within {self.waited:.1f} s"


def may_have_happened(error: VeilError) -> bool:
    """Whether the call may have been done although it raised this."""
    if isinstance(error, TransportError):
        return error.may_have_happened
    if isinstance(error, ServiceError):
        return error.status >= 500
    return isinstance(error, StoreUnknown)


def may_succeed_later(error: VeilError) -> bool:
    """Whether the same call may succeed later, so that waiting helps."""
    if isinstance(error, ServiceError):
        return error.retryable
    return isinstance(error, TransportError | CapacityError | StoreError) and not isinstance(error, ForkRefused)


class Unreadable(VeilError):
    """A pattern cannot restore the message that was sent; only the pattern's policy gets it."""


class Undecryptable(Unreadable):
    """Not encrypted for this queue with a key and an algorithm that we have, or changed in transit."""

    message: str
    """Its id."""
    reason: str
    key_id: str | None
    """The key that the message names, if that could be read."""
    summary = "message {message} cannot be decrypted: {reason}"


class Undecodable(Unreadable):
    """The body is not in the encoding that the adapter expects."""

    message: str
    reason: str
    summary = "message {message} cannot be decoded: {reason}"


class PointerRefused(Unreadable):
    """The pointer of a large message is malformed, or leads outside the configured store."""

    message: str
    reason: str
    summary = "message {message}: its pointer is refused: {reason}"


class ObjectMissing(Unreadable):
    """The object of a large message does not exist."""

    message: str
    key: str
    summary = "message {message}: its object {key} is missing"


class ObjectDamaged(Unreadable):
    """The object of a large message differs from its pointer in size, SHA-256 or encoding."""

    message: str
    key: str
    reason: str
    summary = "message {message}: its object {key} is damaged: {reason}"


class ObjectStoreFailed(VeilError):
    """The object store could not be reached, or refused, in all attempts."""

    operation: str
    reason: str
    refused: bool
    """The store answered and refused; the connection works."""
    summary = "object store: {operation}: {reason}"


class KeyFileInvalid(VeilError):
    """A key file that cannot be used. Never quotes its content."""

    path: str
    reason: str
    summary = "{path}: {reason}"


TopicMissing = model.TopicMissing
SubscriptionExists = model.SubscriptionExists


class TopicExists(model.TopicExists):
    """A pull topic of that name exists with another definition, or is partly created or partly deleted."""

    topic: str
    reason: str
    setting = "definition"
    summary = "topic {topic} exists: {reason}"


class PublishIncomplete(VeilError):
    """Some subscriptions did not get the message. Publish it again with the same id, with `failed` as `to`."""

    topic: str
    id: str
    done: tuple[str, ...]
    """Subscriptions that have it."""
    failed: dict[str, VeilError]
    """Errors by subscription. After a TransportError that may have happened, the subscription may have the message."""
    summary = "topic {topic}: message {id} did not reach "

    def __str__(self) -> str:
        return super().__str__() + ", ".join(f"{name} ({error})" for name, error in self.failed.items())


class EncodingMismatch(VeilError):
    """A topic's body is asked for in one encoding but is in the other."""

    wanted: str
    """`raw` or `base64`."""
    reason: str
    summary = "the body is not {wanted}: {reason}"


class Unordered(Unreadable):
    """A message that has no place in the order: it has no number, or a number that was given up."""

    message: str
    reason: str
    summary = "message {message} has no place in the order: {reason}"
