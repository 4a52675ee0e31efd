"""Reads the objects of received messages, and keeps the leases meanwhile.

Strategy: one object after the other, in pieces; a piece that fails is read again alone, so that a transfer resumes.
Between pieces, every message of the receive whose lease is half over is extended by the same length: nobody else can do
it, because the application does not have the messages yet. An error in one message never stops another. If the store
cannot be reached, that is no fault of the message, so it is released.
"""

import hashlib
from typing import Any, Final

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.errors import ObjectDamaged, ObjectMissing, ObjectStoreFailed, PointerRefused, Unreadable
from veilmq.client.large import pointer
from veilmq.client.large.pointer import Pointer, PointerFormat
from veilmq.client.messages import Extension, Peeked, Received
from veilmq.client.queue import Queue
from veilmq.client.records.objects import ObjectStore
from veilmq.client.unreadable import Policy, give_back, log, set_aside
from veilmq.model.errors import LeaseError, VeilError

PIECE_BYTES: Final = 8 << 20
PAUSE: Final = 10.0
"""Delay in seconds before a message is visible again after the store could not be reached."""


class _Waiting:
    """A message that is still to be read, or is done and waits for the others."""

    def __init__(self, message: Received, lease: float) -> None:
        self.message = message
        self.lease = lease
        self.done: Received | None = None
        self.is_lost = False


class Fetcher:
    """Replaces pointers with bodies, for the messages of one queue."""

    def __init__(
        self, inner: Queue, store: ObjectStore, form: PointerFormat, body_bytes_max: int, policy: Policy, clock: Clock
    ) -> None:
        self._inner, self._store, self._form = inner, store, form
        self._body_bytes_max = body_bytes_max
        self._policy, self._clock = policy, clock

    def received(self, came: list[Received]) -> list[Received]:
        """The messages with their bodies, without unreadable ones and those whose lease was lost meanwhile.

        Raises ObjectStoreFailed if the store could not be reached and no message is left to return.
        """
        now = self._clock.monotonic()
        waiting = [_Waiting(message, message.lease_end - now) for message in came]
        failure: ObjectStoreFailed | None = None
        try:
            for each in waiting:
                self._keep(waiting)
                if each.is_lost:
                    continue
                try:
                    if failure is not None and not failure.refused and self._points(each.message):
                        raise failure
                    each.done = self._whole(each.message, waiting)
                except Unreadable as error:
                    self._set_aside(each, error)
                except ObjectStoreFailed as error:
                    failure = error
                    self._give_back(each, error)
        except BaseException:
            give_back(self._inner, [each.message.handle for each in waiting if not each.is_lost])
            raise
        found = [self._given(each, each.done) for each in waiting if each.done is not None and not each.is_lost]
        if failure is not None and not found:
            raise failure
        return found

    def peeked(self, message: Peeked) -> Peeked:
        """A message without a lease, with its body. Raises Unreadable, ObjectStoreFailed."""
        whole: Peeked = self._whole(message, [])
        return whole

    def _set_aside(self, each: _Waiting, error: Unreadable) -> None:
        # Stop extending it first: from here on the lease is the policy's.
        each.is_lost = True
        set_aside(self._policy, self._inner, each.message, error)

    def _points(self, message: Received) -> bool:
        return pointer.read(message, self._store, self._form) is not None

    def _give_back(self, each: _Waiting, error: ObjectStoreFailed) -> None:
        log.warning("queue %s: message %s goes back: %s", self._inner.name, each.message.id, error)
        each.is_lost = True
        give_back(self._inner, [each.message.handle], PAUSE)

    def _given(self, each: _Waiting, done: Received) -> Received:
        """The message with its newest handle, which also names its object."""
        found = pointer.read(each.message, self._store, self._form)
        handle = pointer.join(each.message.handle, found, self._store, self._form)
        return msgspec.structs.replace(done, handle=handle, lease_end=each.message.lease_end)

    def _whole(self, message: Any, waiting: list[_Waiting]) -> Any:
        found = pointer.read(message, self._store, self._form)
        if found is None:
            return message
        raw = self._content(message.id, found, waiting)
        try:
            body = raw.decode()
        except UnicodeError:
            raise ObjectDamaged(message=message.id, key=found.key, reason="it is not UTF-8") from None
        attributes = pointer.without_reserved(message.attributes, self._form)
        return msgspec.structs.replace(message, body=body, attributes=attributes)

    def _content(self, message: str, found: Pointer, waiting: list[_Waiting]) -> bytes:
        if found.size_bytes is not None:
            self._check_size(message, found.size_bytes)
        size_bytes = self._store.size_bytes(found.key)
        if size_bytes is None:
            raise ObjectMissing(message=message, key=found.key)
        if found.size_bytes is not None and size_bytes != found.size_bytes:
            reason = f"it has {size_bytes} bytes, the pointer says {found.size_bytes}"
            raise ObjectDamaged(message=message, key=found.key, reason=reason)
        self._check_size(message, size_bytes)
        pieces: list[bytes] = []
        digest = hashlib.sha256()
        for start in range(0, size_bytes, PIECE_BYTES):
            piece = self._store.get(found.key, start, min(size_bytes, start + PIECE_BYTES))
            if piece is None:
                raise ObjectMissing(message=message, key=found.key)
            pieces.append(piece)
            digest.update(piece)
            self._keep(waiting)
        if found.sha256 is not None and digest.hexdigest() != found.sha256:
            raise ObjectDamaged(message=message, key=found.key, reason="its SHA-256 is not the pointer's")
        return b"".join(pieces)

    def _check_size(self, message: str, size_bytes: int) -> None:
        if size_bytes > self._body_bytes_max:
            raise PointerRefused(message=message, reason=f"its {size_bytes} bytes exceed {self._body_bytes_max}")

    def _keep(self, waiting: list[_Waiting]) -> None:
        """Extend the leases that are half over."""
        now = self._clock.monotonic()
        due = [each for each in waiting if not each.is_lost and each.message.lease_end - now < each.lease / 2]
        if not due:
            return
        try:
            answers = self._inner.extend_batch([Extension(each.message.handle, each.lease) for each in due])
        except VeilError as error:
            log.warning("queue %s: leases could not be extended: %s", self._inner.name, error)
            return
        for each, answer in zip(due, answers, strict=True):
            if isinstance(answer, LeaseError):
                each.is_lost = True
                log.warning("queue %s: message %s was lost: %s", self._inner.name, each.message.id, answer)
            elif isinstance(answer, str):
                each.message = msgspec.structs.replace(each.message, handle=answer, lease_end=now + each.lease)
