"""A queue for bodies of any size, over a queue with a size limit.

Strategy: a body above a threshold of transmitted bytes is written to the object store first, and then its pointer is
sent, so no pointer is ever without its object. A delete removes the message first and then the object. A crash in
between leaves at most an extra object, never a missing one, and a sweep removes it. Handles name the object. Source:
the seed documents' BigMessageSizeQueue (setBigMessageSize, setNeedDeleteMessageObjectOnOSSFlag). What the queue
carries, in our form or in AWS's, is in pointer.py, which also reads the objects while it keeps the leases.

Shared by the queues of a topic (`SharedBodies`): one object exists until the last subscriber has deleted its message.

    topic=TOPIC/STAMP/body              the object
    topic=TOPIC/STAMP/for-READER        an empty marker for each subscriber that has not deleted yet

Every subscriber's pointer names its own marker. A delete removes the message, then the marker, and then the body if no
other marker is left; two deletes that see this at once both remove the body, which is harmless. Markers are written
before the body, and the body before any pointer, so no pointer is without them.

Sweeps: an object is old enough when no message can point to it any more: after a message's life in its queue, plus its
life in the dead-letter queues that it moves to, plus an hour for clock differences and for the time between upload and
send. A smaller `older_than` is refused. An object has two ages, by its name and by the store; the younger counts. A
sweep judges objects without their messages, so all that it needs is in the name:

    QUEUE/1767225600-0-5f0c...        sent at that Unix second; lives as long as its queue retains messages
    QUEUE/1767225600-86400-5f0c...    a message with its own time to live
"""

import hashlib
import math
import re
import secrets
from collections.abc import Hashable, Sequence
from typing import Any, Final

import msgspec

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import ObjectStoreFailed, ServiceError, TransportError, Unreadable
from veilmq.client.large import pointer
from veilmq.client.large.pointer import SHARED_BODY, Fetcher, HandleParts, Pointer, PointerFormat
from veilmq.client.messages import Extension, Message, Peeked, Received, Sent
from veilmq.client.queue import ById, Capabilities, Queue, identity_of
from veilmq.client.records import Found, ObjectStore, is_key
from veilmq.client.shared import attempt, checks, send_prepared, through
from veilmq.client.shared.checks import as_message, text_bytes
from veilmq.client.unreadable import Policy, checked_policy, log, receive_readable
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid, StoreUnknown, VeilError
from veilmq.model.messages import Failure

__all__ = ["LargeMessageQueue", "ObjectStore", "PointerFormat", "SharedBodies", "Swept"]

BODY_BYTES_MAX: Final = 2 << 30
"""The default limit, the same as AWS's extended client's."""
_MARKER: Final = "for-"
_CHANCE_BYTES: Final = 16
_STAMP: Final = re.compile(r"(?:\A|/)([0-9]{1,12})-([0-9]{1,12})-[0-9a-f]{32}(?:/|\Z)")
MARGIN: Final = 3_600.0
"""Seconds."""


class Swept(msgspec.Struct, frozen=True):
    """Objects that a sweep removed, and those that it kept because they are too young."""

    objects: int
    size_bytes: int
    left: int


class LargeMessageQueue(Wrapping):
    """A `Queue` for bodies that `inner` could not carry. Thread-safe."""

    changes_handles = True

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
        if not is_key(inner.name):
            reason = f"its name {inner.name!r} cannot be a directory of the store: use A-Z a-z 0-9 . _ = @ + -"
            raise ParameterInvalid(parameter="inner", reason=reason)
        checks.at_least(threshold_bytes, "threshold_bytes", 0)
        if checks.at_least(body_bytes_max, "body_bytes_max", 0) < inner.capabilities.body_bytes_max:
            reason = f"must be {inner.capabilities.body_bytes_max} at least, which the queue takes without a store"
            raise ParameterInvalid(parameter="body_bytes_max", reason=reason)
        self.store = store if isinstance(store, ObjectStore) else ObjectStore(store)
        self._form = checks.choice(pointers, PointerFormat, "pointers")
        if self._form is PointerFormat.AWS and (
            self.store.scheme not in {"s3", "s3a"} or not inner.capabilities.attributes
        ):
            reason = "AWS's form needs an s3:// store and a queue with attributes"
            raise ParameterInvalid(parameter="pointers", reason=reason)
        self.threshold_bytes = threshold_bytes
        """May be changed at any time; so may `delete_object`."""
        self._body_bytes_max = body_bytes_max
        self.delete_object = delete_object
        self._retention = None if retention is None else checks.positive(retention, "retention", may_be_endless=True)
        self._clock = clock
        self._policy = checked_policy(unreadable, inner)
        self._fetcher = Fetcher(inner, self.store, self._form, body_bytes_max, self._policy, clock)

    @property
    def capabilities(self) -> Capabilities:
        """Those of `inner`, except the largest body. AWS's pointers take an attribute, which no extend can replace."""
        inner = self.inner.capabilities
        largest = (self._body_bytes_max + 2) // 3 * 4 if inner.base64_body else self._body_bytes_max
        taken = self._form is PointerFormat.AWS
        return msgspec.structs.replace(
            inner,
            body_bytes_max=largest,
            body_replaceable=inner.body_replaceable and not taken,
            attributes_max=inner.attributes_max - taken,
        )

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
            lambda came: self._fetcher.received(came, lease),
            wait,
            self._clock,
        )

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """See `Queue.extend`. A new body gets a new object if it is large; the old object is removed."""
        if body is not None and not self.capabilities.body_replaceable:
            raise CapabilityMissing(capability="body_replaceable")
        parts = self._split(handle)
        if body is None:
            return self._joined(parts._replace(handle=self.inner.extend(parts.handle, lease)))
        prepared, found = self._prepared(body, self._life_left(parts))
        try:
            extended = self.inner.extend(parts.handle, lease, body=prepared.body)
        except VeilError as error:
            self._forget_unless_sent(found, error)
            raise
        self._remove(parts)
        return pointer.join(extended, found, self.store, self._form)

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        extensions = checks.batch(extensions, "extensions")
        split = [attempt(lambda each: self._split(checks.extension(each).handle), each) for each in extensions]
        answers = through(
            [
                parts if isinstance(parts, VeilError) else Extension(parts.handle, each.lease)
                for parts, each in zip(split, extensions, strict=True)
            ],
            self.inner.extend_batch,
        )
        return [
            self._joined(parts._replace(handle=answer))
            if isinstance(answer, str) and isinstance(parts, HandleParts)
            else answer
            for parts, answer in zip(split, answers, strict=True)
        ]

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.inner.release(self._split(handle).handle, delay, failure=failure)

    def delete(self, handle: str) -> None:
        """See `Queue.delete`. Deletes the message, then its object; if the object stays, a sweep removes it."""
        parts = self._split(handle)
        self.inner.delete(parts.handle)
        self._remove(parts)

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        split = [attempt(self._split, handle) for handle in checks.batch(handles, "handles")]
        inner = [parts if isinstance(parts, VeilError) else parts.handle for parts in split]
        answers = through(inner, self.inner.delete_batch)
        for parts, answer in zip(split, answers, strict=True):
            if answer is None and isinstance(parts, HandleParts):
                self._remove(parts)
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
        life = _longest_life(self.inner, self._retention, dead_letters)
        return _sweep(self.store, self.name, _checked_age(older_than, life), self._clock.wall())

    def _life_left(self, parts: HandleParts) -> float | None:
        """What is left of a message's own time to live, which the name of its object has; None if it has none."""
        made, life = _made_and_life(parts.key or "") or (0.0, 0.0)
        return max(made + life - self._clock.wall(), 1.0) if life else None

    def _prepared(self, given: str | Message, life: float | None = None) -> tuple[Message, Pointer | None]:
        """The message to send, and the pointer to its object if it has one. life: a time to live that is not given."""
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
        key = f"{self.name}/{_new_stamp(self._clock, message.ttl if life is None else life)}"
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
            self._remove(HandleParts("", found.key))
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
            self._remove(HandleParts("", found.key))

    def _remove(self, parts: HandleParts) -> None:
        """Remove the object, if we should. Raises nothing, because the message is gone already."""
        if parts.key is None or not self.delete_object:
            return
        try:
            if parts.reader is None:
                self.store.remove(parts.key)
            else:
                drop(self.store, parts.key, parts.reader)
        except ObjectStoreFailed as error:
            log.warning("queue %s: object %s is left to a sweep: %s", self.name, parts.key, error)

    def _split(self, handle: str) -> HandleParts:
        return pointer.split(handle, self.store, self._form)

    def _joined(self, parts: HandleParts) -> str:
        return pointer.joined(parts, self.store, self._form)


class SharedBodies:
    """Stores a topic's large messages once for all its queues: the `bodies` of a `PullTopic`. Thread-safe."""

    def __init__(
        self, store: str | ObjectStore, topic: str, *, threshold_bytes: int = 45_000, clock: Clock = SYSTEM
    ) -> None:
        """threshold_bytes: UTF-8 bytes above which a body goes to the store; so many fit into 64 KiB as base64, with
        attributes. Raises ParameterInvalid."""
        checks.at_least(threshold_bytes, "threshold_bytes", 0)
        self._store = store if isinstance(store, ObjectStore) else ObjectStore(store)
        # No queue's name has an equals sign, so no queue's sweep removes these objects.
        self._directory = f"topic={checks.text(topic, 'topic')}"
        if not is_key(self._directory):
            raise ParameterInvalid(parameter="topic", reason=f"must be a name, not {topic!r}")
        self._threshold_bytes, self._clock = threshold_bytes, clock

    def __call__(self, given: str | Message, readers: Sequence[str]) -> list[Message]:
        """A message for each reader: the given one if it is small, else one that points to the shared object.

        Raises ParameterInvalid, ObjectStoreFailed.
        """
        message = as_message(given)
        raw = text_bytes(message.body)
        if not readers or (
            len(raw) <= self._threshold_bytes and not pointer.must_be_stored(message.body, PointerFormat.OWN)
        ):
            return [message] * len(readers)
        for reader in readers:
            if not pointer.READER.match(reader):
                reason = f"{reader!r} cannot be the reader of a shared object: use 1 to 120 of A-Z a-z 0-9 . _ -"
                raise ParameterInvalid(parameter="subscriptions", reason=reason)
        directory = f"{self._directory}/{_new_stamp(self._clock, message.ttl)}"
        for reader in readers:
            self._store.put(_marker(directory, reader), b"")
        key = f"{directory}/{SHARED_BODY}"
        self._store.put(key, raw)
        digest = hashlib.sha256(raw).hexdigest()
        return [
            pointer.written(Pointer(key, len(raw), digest, reader), message, self._store, PointerFormat.OWN)
            for reader in readers
        ]

    def sweep(self, older_than: float, queues: Sequence[Queue], dead_letters: Sequence[Queue] = ()) -> Swept:
        """Like `LargeMessageQueue.sweep`, for the topic's objects; `queues`: all that the topic ever published to."""
        published = [checks.queue(each, "queues") for each in checks.batch(queues, "queues")]
        letters = checks.batch(dead_letters, "dead_letters")
        if not published:
            raise ParameterInvalid(parameter="queues", reason="there must be one at least")
        life = max(_longest_life(queue, None, letters) for queue in published)
        age = _checked_age(older_than, life)
        return _sweep(self._store, self._directory, age, self._clock.wall())


def drop(store: ObjectStore, key: str, reader: str) -> None:
    """Release the object for this reader. Raises ObjectStoreFailed; idempotent."""
    directory = key.rpartition("/")[0]
    store.remove(_marker(directory, reader))
    if not any(found.key.rpartition("/")[2].startswith(_MARKER) for found in store.list(directory)):
        store.remove(key)
        store.remove_directory(directory)


def _marker(directory: str, reader: str) -> str:
    return f"{directory}/{_MARKER}{reader}"


def _new_stamp(clock: Clock, ttl: Any) -> str:
    """A name for a new object. Raises ParameterInvalid for a ttl that is not a number of seconds."""
    if ttl is not None and not (isinstance(ttl, int | float) and math.isfinite(ttl) and ttl > 0):
        raise ParameterInvalid(parameter="ttl", reason=f"must be a number of seconds above 0, not {ttl!r}")
    life = 0 if ttl is None else math.ceil(ttl)
    return f"{int(clock.wall())}-{life}-{secrets.token_hex(_CHANCE_BYTES)}"


def _made_and_life(key: str) -> tuple[float, float] | None:
    """Unix seconds of the send, and the message's own time to live or 0, from a key; None if it has another form."""
    found = _STAMP.search(key)
    return None if found is None else (float(found[1]), float(found[2]))


def _longest_life(queue: Queue, retention: float | None, dead_letters: Sequence[Queue]) -> float:
    """Seconds that a message without its own time to live may live, in this queue and those it moves to.

    Raises ParameterInvalid if a queue does not report its retention and none was given.
    """
    life = _retention(queue) if retention is None else retention
    letters = [checks.queue(each, "dead_letters") for each in checks.batch(dead_letters, "dead_letters")]
    return life + sum(map(_retention, letters))


def _checked_age(older_than: float, life: float) -> float:
    """The age. Raises ParameterInvalid if an object of that age may still belong to a live message."""
    if checks.positive(older_than, "older_than", may_be_endless=True) < life + MARGIN:
        reason = (
            f"must be {life + MARGIN:.0f} s at least: messages live {life:.0f} s, and clocks differ; not {older_than}"
        )
        raise ParameterInvalid(parameter="older_than", reason=reason)
    return older_than


def _sweep(store: ObjectStore, below: str, older_than: float, now: float) -> Swept:
    """Remove objects that are older. `now` is Unix seconds. Raises ObjectStoreFailed; can be repeated."""
    objects = size_bytes = left = 0
    for found in store.list(below):
        if not _is_over(found, older_than, now):
            left += 1
            continue
        store.remove(found.key)
        objects += 1
        size_bytes += found.size_bytes
    return Swept(objects, size_bytes, left)


def _is_over(found: Found, older_than: float, now: float) -> bool:
    named = _made_and_life(found.key)
    made = [made for made in (found.modified, named and named[0]) if made is not None]
    if not made:
        return False
    own_life = named[1] + MARGIN if named and named[1] else 0.0
    return now - max(made) > max(older_than, own_life)


def _retention(queue: Queue) -> float:
    retention = queue.stats().retention
    if retention is None:
        raise ParameterInvalid(parameter="retention", reason=f"queue {queue.name} does not tell it: name it")
    return retention
