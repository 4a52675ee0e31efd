"""A queue for bodies of any size, over a queue with a size limit.

Strategy: a body above a threshold of transmitted bytes is written to the object store first, and then its pointer is
sent, so no pointer is ever without its object. A delete removes the message first and then the object. A crash in
between leaves at most an extra object, never a missing one, and a sweep removes it. Handles name the object. Source:
the seed documents' BigMessageSizeQueue (setBigMessageSize, setNeedDeleteMessageObjectOnOSSFlag).
"""

import hashlib
from collections.abc import Hashable, Sequence
from typing import Final

import msgspec

from veilmq.client import checks
from veilmq.client.batches import attempt, send_prepared, through
from veilmq.client.checks import as_message, text_bytes
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import ObjectStoreFailed, ServiceError, TransportError, Unreadable
from veilmq.client.large import pointer, sweeping
from veilmq.client.large.fetching import Fetcher
from veilmq.client.large.pointer import Held, Pointer, PointerFormat
from veilmq.client.large.shared import drop
from veilmq.client.large.sweeping import Swept, new_stamp
from veilmq.client.messages import Extension, Message, Peeked, Received, Sent
from veilmq.client.queue import ById, Capabilities, Queue, identity_of
from veilmq.client.records.objects import ObjectStore
from veilmq.client.unreadable import Policy, checked_policy, log, receive_readable
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid, StoreUnknown, VeilError
from veilmq.model.reports import Failure

BODY_BYTES_MAX: Final = 2 << 30
"""The default limit, the same as AWS's extended client's."""


class LargeMessageQueue(Wrapping):
    """A `Queue` for bodies that `inner` could not carry. Thread-safe."""

    def __init__(
        self,
        inner: Queue,
        store: str | ObjectStore,
        *,
        unreadable: Policy,
        threshold_bytes: int = 65_536,
        body_bytes_max: int = BODY_BYTES_MAX,
        delete_object: bool = True,
        pointers: PointerFormat | str = PointerFormat.OWN,
        retention: float | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """store: URL of a bucket and prefix, the same in every process that shares the queue; pointers that lead
        elsewhere are refused. unreadable: what to do with a message whose object is missing or damaged, or whose
        pointer is refused: `DeadLetters(queue)`, `keep`, or a function of (inner queue, message, error).
        threshold_bytes: transmitted bytes (`Capabilities.transmitted_bytes`) above which a body goes to the store; at
        most the queue's own limit. body_bytes_max: the largest body; a body is in memory as a whole. delete_object:
        whether a delete also removes the object. pointers: `own`, or `aws` for the form of AWS's extended clients
        (needs s3:// and a queue with attributes). retention: seconds that the queue keeps messages, for `sweep`; None:
        ask the queue.

        Raises ParameterInvalid, ModuleNotFoundError (without the extra `large`).
        """
        super().__init__(inner)
        checks.at_least(threshold_bytes, "threshold_bytes", 0)
        if checks.at_least(body_bytes_max, "body_bytes_max", 0) < inner.capabilities.body_bytes_max:
            reason = f"must be {inner.capabilities.body_bytes_max} at least, which the queue takes without a store"
            raise ParameterInvalid(parameter="body_bytes_max", reason=reason)
        if pointers not in set(PointerFormat):
            raise ParameterInvalid(parameter="pointers", reason=f"must be own or aws, not {pointers!r}")
        self.store = store if isinstance(store, ObjectStore) else ObjectStore(store)
        self._form = PointerFormat(pointers)
        if self._form is PointerFormat.AWS and (
            self.store.scheme not in {"s3", "s3a"} or not inner.capabilities.attributes
        ):
            reason = "AWS's form needs an s3:// store and a queue with attributes"
            raise ParameterInvalid(parameter="pointers", reason=reason)
        self.threshold_bytes = threshold_bytes
        """May be changed at any time; so may `delete_object`."""
        self._body_bytes_max = body_bytes_max
        self.delete_object = delete_object
        self._retention = retention
        self._clock = clock
        self._policy = checked_policy(unreadable, inner)
        self._fetcher = Fetcher(inner, self.store, self._form, body_bytes_max, self._policy, clock)

    @property
    def capabilities(self) -> Capabilities:
        """Those of `inner`, except the largest body. AWS's pointers need an attribute, which no extend can replace."""
        inner = self.inner.capabilities
        largest = (self._body_bytes_max + 2) // 3 * 4 if inner.base64_body else self._body_bytes_max
        replaceable = inner.body_replaceable and self._form is PointerFormat.OWN
        return msgspec.structs.replace(inner, body_bytes_max=largest, body_replaceable=replaceable)

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`: the inner queue, with the store, the form of pointers and the policy."""
        return (
            type(self), identity_of(self.inner), identity_of(self.store), self._form, self._body_bytes_max,
            identity_of(self._policy), ById(self._clock),
        )  # fmt: skip

    def send(self, message: str | Message) -> Sent:
        """See `Queue.send`. Also raises ObjectStoreFailed: then nothing was sent."""
        prepared, found = self._prepared(message)
        try:
            sent = self.inner.send(prepared)
        except VeilError as error:
            self._forget_unless_sent(found, error)
            raise
        return self._sent(sent, found)

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """See `Queue.send_batch`. Uploads the bodies one after another, then sends the pointers."""
        prepared = [attempt(self._prepared, message) for message in checks.batch(messages)]
        try:
            answers = send_prepared(self.inner, [each if isinstance(each, VeilError) else each[0] for each in prepared])
        except VeilError as error:
            for each in prepared:
                if not isinstance(each, VeilError):
                    self._forget_unless_sent(each[1], error)
            raise
        results: list[Sent | VeilError] = []
        for each, answer in zip(prepared, answers, strict=True):
            if isinstance(each, VeilError):
                results.append(each)
            elif isinstance(answer, VeilError):
                self._forget_unless_sent(each[1], answer)
                results.append(answer)
            else:
                results.append(self._sent(answer, each[1]))
        return results

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """See `Queue.receive`. Keeps the leases while it reads objects; unreadable messages go to the policy.

        Raises ObjectStoreFailed if the store cannot be reached; then the messages were released.
        """
        return receive_readable(
            lambda left: self.inner.receive(count_max, lease=lease, wait=left),
            self._fetcher.received,
            wait,
            self._clock,
        )

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """See `Queue.extend`. A new body gets a new object if it is large; the old object is removed."""
        if body is not None and not self.capabilities.body_replaceable:
            raise CapabilityMissing(capability="body_replaceable")
        held = self._split(handle)
        if body is None:
            return self._joined(held._replace(handle=self.inner.extend(held.handle, lease)))
        prepared, found = self._prepared(body)
        try:
            extended = self.inner.extend(held.handle, lease, body=prepared.body)
        except VeilError as error:
            self._forget_unless_sent(found, error)
            raise
        self._remove(held)
        return pointer.join(extended, found, self.store, self._form)

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """See `Queue.extend_batch`."""
        split = [attempt(lambda each: self._split(checks.extension(each).handle), each) for each in extensions]
        answers = through(
            [
                held if isinstance(held, VeilError) else Extension(held.handle, each.lease)
                for held, each in zip(split, extensions, strict=True)
            ],
            self.inner.extend_batch,
        )
        return [
            self._joined(held._replace(handle=answer)) if isinstance(answer, str) and isinstance(held, Held) else answer
            for held, answer in zip(split, answers, strict=True)
        ]

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        """See `Queue.release`."""
        self.inner.release(self._split(handle).handle, delay, failure=failure)

    def delete(self, handle: str) -> None:
        """See `Queue.delete`. Deletes the message, then its object; if the object stays, a sweep removes it."""
        held = self._split(handle)
        self.inner.delete(held.handle)
        self._remove(held)

    def delete_batch(self, given: Sequence[str]) -> list[VeilError | None]:
        """See `Queue.delete_batch`."""
        split = [attempt(self._split, handle) for handle in given]
        inner = [held if isinstance(held, VeilError) else held.handle for held in split]
        answers = through(inner, self.inner.delete_batch)
        for held, answer in zip(split, answers, strict=True):
            if answer is None and isinstance(held, Held):
                self._remove(held)
        return answers

    def peek(self, count_max: int = 1) -> list[Peeked]:
        """See `Queue.peek`. Reads the objects, and leaves out unreadable messages. Raises ObjectStoreFailed."""
        found = []
        for message in self.inner.peek(count_max):
            try:
                found.append(self._fetcher.peeked(message))
            except Unreadable as error:
                log.warning("queue %s: %s", self.name, error)
        return found

    def sweep(self, older_than: float, dead_letters: Sequence[Queue] = ()) -> Swept:
        """Remove this queue's objects that are older than `older_than` seconds, so that no message can point to them.

        dead_letters: queues to which this queue's messages move with their pointers; their retention is added. Raises
        ParameterInvalid if `older_than` is not at least an hour more than a message can live, ObjectStoreFailed.
        """
        life = sweeping.longest_life(self.inner, self._retention, dead_letters)
        return sweeping.sweep(self.store, self.name, sweeping.checked_age(older_than, life), self._clock.wall())

    def _prepared(self, given: str | Message) -> tuple[Message, Pointer | None]:
        """The message to send, and the pointer to its object if it has one."""
        message = as_message(given)
        raw = text_bytes(message.body)
        pointer.check_attributes(message, self._form)
        can = self.inner.capabilities
        threshold_bytes = min(self.threshold_bytes, can.body_bytes_max)
        if can.transmitted_bytes(message.body) <= threshold_bytes and not pointer.must_be_stored(
            message.body, self._form
        ):
            return message, None
        if len(raw) > self._body_bytes_max:
            raise MessageTooLarge(size_bytes=len(raw), limit_bytes=self._body_bytes_max)
        key = f"{self.name}/{new_stamp(self._clock, message.ttl)}"
        digest = hashlib.sha256(raw).hexdigest()
        found = Pointer(key, len(raw), digest)
        prepared = pointer.written(found, message, self.store, self._form)
        pointer_bytes = can.transmitted_bytes(prepared.body)
        if pointer_bytes > can.body_bytes_max:
            raise MessageTooLarge(size_bytes=pointer_bytes, limit_bytes=can.body_bytes_max)
        if can.native_fifo and message.deduplication_id is None:
            # A FIFO queue would hash the body for this (SQS, ContentBasedDeduplication), but no two pointers are equal.
            prepared = msgspec.structs.replace(prepared, deduplication_id=digest)
        self.store.put(key, raw)
        return prepared, found

    def _sent(self, sent: Sent, found: Pointer | None) -> Sent:
        if sent.duplicate and found is not None:
            self._remove(Held("", found.key))
            return sent
        if sent.handle is None:
            return sent
        return msgspec.structs.replace(sent, handle=pointer.join(sent.handle, found, self.store, self._form))

    def _forget_unless_sent(self, found: Pointer | None, error: VeilError) -> None:
        """Remove the object if its message was certainly not sent. If it may have been, leave the object to a sweep."""
        unknown = (
            isinstance(error, StoreUnknown)
            or (isinstance(error, TransportError) and error.may_have_happened)
            or (isinstance(error, ServiceError) and error.status >= 500)
        )
        if found is not None and not unknown:
            self._remove(Held("", found.key))

    def _remove(self, held: Held) -> None:
        """Remove the object, if we should. Raises nothing, because the message is gone already."""
        if held.key is None or not self.delete_object:
            return
        try:
            if held.reader is None:
                self.store.remove(held.key)
            else:
                drop(self.store, held.key, held.reader)
        except ObjectStoreFailed as error:
            log.warning("queue %s: object %s is left to a sweep: %s", self.name, held.key, error)

    def _split(self, handle: str) -> Held:
        return pointer.split(handle, self.store, self._form)

    def _joined(self, held: Held) -> str:
        return pointer.joined(held, self.store, self._form)
