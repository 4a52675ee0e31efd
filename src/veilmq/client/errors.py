"""What can go wrong between a client and its cloud, beyond the errors of the model.

Strategy: the model's errors are what a queue says; these two are about the way to it. `may_have_happened` is what a
caller needs to know before it tries again.
"""

import re
from typing import Final

from veilmq.model import errors as model
from veilmq.model.errors import StoreUnknown, UsageError, VeilError


class TransportError(VeilError):
    """The queue could not be reached, or the answer did not come."""

    reason: str
    may_have_happened: bool
    """False: certainly nothing was done. True: it may have been done, and the answer was lost."""
    summary = "{reason}"


class ForkRefused(TransportError):
    """A forked child used what its parent alone may use: no later call of this process will do better."""

    reason: str
    may_have_happened: bool


STRANGE: Final = (AttributeError, KeyError, RecursionError, TypeError, ValueError)
"""What an SDK raises over an answer that is none of its service's, of a proxy for example."""


_NO_TLS: Final = re.compile("wrong.version.number|record layer failure", re.IGNORECASE)
"""OpenSSL's words for an answer in plain HTTP."""


def advised(reason: str) -> str:
    """Why a call did not come through, with what to do if that is known."""
    if _NO_TLS.search(reason) is None or "proxy" in reason.lower():  # a proxy without TLS says nothing of the service
        return reason
    return f"{reason}: the port speaks no TLS; in a URL say tls=0"


def strange_answer(error: Exception) -> TransportError:
    """What one of `STRANGE`, or an error of the SDK's own reader, says of the call."""
    return TransportError(reason=f"the answer cannot be read: {type(error).__name__}", may_have_happened=True)


def entry_unanswered() -> TransportError:
    """Of an entry that the service forgets in the answer to a batch: it may have happened."""
    return TransportError(reason="the answer does not mention this entry", may_have_happened=True)


class ServiceError(VeilError):
    """The cloud refused with a code for which the model has no word (credentials, throttling, its own faults)."""

    code: str
    status: int
    request_id: str
    message: str
    summary = "{code}: {message} (status {status}, request {request_id})"

    @property
    def retryable(self) -> bool:
        """Throttled, or a fault of the service: the same call may succeed later."""
        return self.status >= 500 or self.status == 429 or "Throttl" in self.code or self.code == "SlowDown"


class QueueRecreated(UsageError):
    """The queue was deleted and created again since its numbers were stored: they mean nothing in it. Reset them."""

    queue: str
    was: str
    found: str
    summary = "queue {queue} was created anew ({found}, the stored numbers are of {was}): reset them"


class StorageHeld(UsageError):
    """Another process, or another object of this one, counts with this storage."""

    storage: str
    holder: str
    summary = "{storage} is held by {holder}"


class StorageLost(VeilError):
    """Another process took the storage over while this one was silent: nothing was written."""

    storage: str
    holder: str
    summary = "{storage} was taken over by {holder}"


class StateInvalid(UsageError):
    """What the storage holds is not what this reader or writer wrote."""

    storage: str
    reason: str
    summary = "{storage}: {reason}"


class GapFound(VeilError):
    """Messages are missing from an ordered queue, and have been for longer than the gap timeout."""

    queue: str
    epoch: int
    first: int
    last: int
    """The numbers `first` to `last` are missing; with last below first, the end of the epoch is."""
    waited: float
    """Seconds."""
    summary = "queue {queue}: numbers {first} to {last} of epoch {epoch} did not come within {waited:.1f} s"


def may_have_happened(error: VeilError) -> bool:
    """Whether the call that raised this may have been done all the same."""
    if isinstance(error, TransportError):
        return error.may_have_happened
    if isinstance(error, ServiceError):
        return error.status >= 500
    return isinstance(error, StoreUnknown)


class Unreadable(VeilError):
    """A received message that a pattern cannot turn into what was sent; it goes to the pattern's policy alone."""


class Undecryptable(Unreadable):
    """Not encrypted for this queue with a key and an algorithm that we hold, or changed on the way."""

    message: str
    """Its id."""
    reason: str
    key_id: str | None
    """What the message names, if it got that far."""
    summary = "message {message} cannot be decrypted: {reason}"


class Undecodable(Unreadable):
    """The body is not in the encoding that the adapter was told to expect."""

    message: str
    """Its id."""
    reason: str
    summary = "message {message} cannot be decoded: {reason}"


class PointerRefused(Unreadable):
    """The pointer of a large message is malformed, or leads out of the configured store."""

    message: str
    reason: str
    summary = "message {message} points nowhere that we go: {reason}"


class ObjectMissing(Unreadable):
    """The object of a large message is not there."""

    message: str
    key: str
    summary = "message {message}: its object {key} is missing"


class ObjectDamaged(Unreadable):
    """The object of a large message is not what the pointer says: its size, its SHA-256 or its encoding."""

    message: str
    key: str
    reason: str
    summary = "message {message}: its object {key} is damaged: {reason}"


class ObjectStoreFailed(VeilError):
    """The object store could not be reached, or refused, after all attempts."""

    operation: str
    reason: str
    refused: bool
    """The store answered, and will not do it: nothing is wrong with the way to it."""
    summary = "object store: {operation}: {reason}"


class KeyFileInvalid(VeilError):
    """A file of keys that cannot be used. Says nothing of what is in it."""

    path: str
    reason: str
    summary = "{path}: {reason}"


TopicMissing = model.TopicMissing
SubscriptionExists = model.SubscriptionExists


class TopicExists(model.TopicExists):
    """A pull topic of that name exists with another definition, or is half made or half deleted."""

    topic: str
    reason: str
    setting = "definition"
    summary = "topic {topic} exists: {reason}"


class PublishIncomplete(VeilError):
    """Some subscriptions did not get the message. Publish it again with the same id, `to` those of `failed`."""

    topic: str
    id: str
    done: tuple[str, ...]
    """Subscriptions that have it."""
    failed: dict[str, VeilError]
    """Subscription to what went wrong there; after a TransportError that may have happened it may have it, too."""
    summary = "topic {topic}: message {id} did not reach {failed}"


class EncodingMismatch(VeilError):
    """A topic's body is wanted in another encoding than it is in."""

    wanted: str
    """`raw` or `base64`."""
    reason: str
    summary = "the body is not {wanted}: {reason}"


class Unordered(Unreadable):
    """A message without a place in the order: it has no number, or one that was given up."""

    message: str
    reason: str
    summary = "message {message} has no place in the order: {reason}"
