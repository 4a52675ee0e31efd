"""What the queue carries instead of a large body, the handles of such messages, and how a receiver gets the bodies.

    {"veilmq.pointer":1,"url":"s3://bucket/large/orders/...","bytes":52428800,"sha256":"9f86d0..."}

Strategy: two forms, each a pair of pure functions. Ours is recognised by the start of the body. Any other body that
starts like this is stored too, however small, so that no user's text is taken for a pointer. AWS's form is recognised
by a reserved attribute and has neither a hash nor a scheme (amazon-sqs-java-extended-client-lib, "ExtendedPayloadSize";
older versions "SQSLargePayloadSize"). A pointer may be forged, so it is followed only below the configured URL.

Handles say where the object is:

    P.HANDLE                   a plain message
    o.KEY.HANDLE               a large one; KEY in base64url, followed by a colon and the reader of a shared object
    -..s3BucketName..-B-..s3BucketName..--..s3Key..-K-..s3Key..-HANDLE      AWS's form; a plain message has HANDLE alone

Nothing is remembered, so any process can extend and delete with a handle, and an extension that returns another inner
handle keeps the object. Handles come from the caller, so their key is checked like a pointer's.

Reading objects (`Fetcher`): one after the other, in pieces; a piece that fails is read again alone, so that a transfer
resumes. Between pieces the leases of the receive's messages are extended when half of what was left of them is over:
nobody else can do it, because the application does not have the messages yet. An error in one message never stops
another. If the store cannot be reached, that is no fault of the message, so it is released.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable
from enum import StrEnum
from functools import cache, partial
from typing import Any, Final, NamedTuple

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.errors import ObjectDamaged, ObjectMissing, ObjectStoreFailed, PointerRefused, Unreadable
from veilmq.client.messages import AttributeValue, Extension, Message, Peeked, Received
from veilmq.client.queue import Queue
from veilmq.client.records import ObjectStore, is_key
from veilmq.client.shared import checks
from veilmq.client.shared.threads import DaemonPool
from veilmq.client.unreadable import PAUSE_SECONDS, Policy, give_back, log, set_aside
from veilmq.model.errors import LeaseError, ParameterInvalid, ReceiptInvalid, VeilError

BEGINNING: Final = '{"veilmq.pointer":'
SIZE_ATTRIBUTE: Final = "ExtendedPayloadSize"
SIZE_ATTRIBUTES: Final = (SIZE_ATTRIBUTE, "SQSLargePayloadSize")
AWS_CLASS: Final = "software.amazon.payloadoffloading.PayloadS3Pointer"
AWS_CLASSES: Final = (AWS_CLASS, "com.amazon.sqs.javamessaging.MessageS3Pointer")
SHARED_BODY: Final = "body"
"""Last part of a shared object's key (`large.queue.SharedBodies`)."""
BODY_BYTES_MAX: Final = 4_096
"""The longest pointer."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")
READER: Final = re.compile(r"[A-Za-z0-9._-]{1,120}\Z")


class PointerFormat(StrEnum):
    """The form that is written, and the only one that is read."""

    OWN = "own"
    AWS = "aws"


class Pointer(msgspec.Struct, frozen=True):
    """An object: where it is, and its expected size and hash."""

    key: str
    """Key in the configured store."""
    size_bytes: int | None
    sha256: str | None
    reader: str | None = None
    """For a shared object: the reader that this copy of the pointer belongs to (`large.queue.SharedBodies`)."""


def written(pointer: Pointer, message: Message, store: ObjectStore, form: PointerFormat) -> Message:
    """The message with the pointer instead of its body."""
    if form is PointerFormat.AWS:
        place = {"s3BucketName": store.bucket, "s3Key": store.prefix + pointer.key}
        body = json.dumps([AWS_CLASS, place], separators=(",", ":"))
        attributes = {**message.attributes, SIZE_ATTRIBUTE: pointer.size_bytes}
        return msgspec.structs.replace(message, body=body, attributes=attributes)
    value = {"veilmq.pointer": 1, "url": f"{store.url}/{pointer.key}", "bytes": pointer.size_bytes}
    value["sha256"] = pointer.sha256
    if pointer.reader is not None:
        value["reader"] = pointer.reader
    return msgspec.structs.replace(message, body=json.dumps(value, separators=(",", ":")))


def must_be_stored(body: str, form: PointerFormat) -> bool:
    """Whether the body could be mistaken for one of our pointers."""
    return form is PointerFormat.OWN and body.startswith(BEGINNING)


def check_attributes(message: Message, form: PointerFormat) -> None:
    """Raises ParameterInvalid for an attribute that AWS's form reserves."""
    for name in SIZE_ATTRIBUTES:
        if form is PointerFormat.AWS and name in message.attributes:
            raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="the name is reserved for pointers")


def read(message: Peeked, store: ObjectStore, form: PointerFormat) -> Pointer | None:
    """The message's pointer, or None for a plain message. Raises PointerRefused."""
    if form is PointerFormat.AWS:
        name = next((name for name in SIZE_ATTRIBUTES if name in message.attributes), None)
        return None if name is None else _aws(message, message.attributes[name], store)
    return _own(message, store) if message.body.startswith(BEGINNING) else None


def without_reserved(attributes: Any, form: PointerFormat) -> dict[str, AttributeValue]:
    """The sender's own attributes."""
    reserved = SIZE_ATTRIBUTES if form is PointerFormat.AWS else ()
    return {name: value for name, value in attributes.items() if name not in reserved}


def stated_bytes(message: Peeked, form: PointerFormat) -> int:
    """The size that the message's pointer states, whether or not it can be followed; 0 for any other message."""
    size: Any = None
    try:
        if form is PointerFormat.AWS:
            size = _size(
                next((message.attributes[name] for name in SIZE_ATTRIBUTES if name in message.attributes), None)
            )
        elif message.body.startswith(BEGINNING):
            size = _json(message, dict).get("bytes")
    except PointerRefused:
        pass
    return size if type(size) is int and size > 0 else 0


def _size(value: Any) -> int | None:
    """Of an attribute, which a history of messages has as a text."""
    if type(value) is str and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def _own(message: Peeked, store: ObjectStore) -> Pointer:
    value = _json(message, dict)
    size_bytes, sha256, reader = value.get("bytes"), value.get("sha256"), value.get("reader")
    if value["veilmq.pointer"] != 1:
        raise PointerRefused(message=message.id, reason="it is of another version")
    if type(size_bytes) is not int or size_bytes < 0:
        raise PointerRefused(message=message.id, reason="it has no size")
    if type(sha256) is not str or not _SHA256.match(sha256):
        raise PointerRefused(message=message.id, reason="it has no SHA-256")
    if reader is not None and (type(reader) is not str or not READER.match(reader)):
        raise PointerRefused(message=message.id, reason="its reader has no name")
    url = value.get("url")
    key = store.key_of(url) if type(url) is str else None
    if key is None:
        raise PointerRefused(message=message.id, reason="it leads out of the configured store")
    if reader is not None and not key.endswith(f"/{SHARED_BODY}"):
        raise PointerRefused(message=message.id, reason="its object is none that is shared")
    return Pointer(key, size_bytes, sha256, reader)


def _aws(message: Peeked, size: AttributeValue, store: ObjectStore) -> Pointer:
    value = _json(message, list)
    if len(value) != 2 or value[0] not in AWS_CLASSES or type(value[1]) is not dict:
        raise PointerRefused(message=message.id, reason="it is none of the extended client's")
    bucket, key = value[1].get("s3BucketName"), value[1].get("s3Key")
    if bucket != store.bucket or type(key) is not str or not key.startswith(store.prefix):
        raise PointerRefused(message=message.id, reason="it leads out of the configured store")
    found = store.key_of(f"{store.url}/{key[len(store.prefix) :]}")
    if found is None:
        raise PointerRefused(message=message.id, reason="it leads out of the configured store")
    return Pointer(found, _size(size), None)


def _json(message: Peeked, kind: type) -> Any:
    try:
        value = json.loads(message.body) if len(message.body) <= BODY_BYTES_MAX else None
    except (ValueError, RecursionError):
        value = None
    if type(value) is not kind:
        raise PointerRefused(message=message.id, reason="it is malformed")
    return value


_BUCKET: Final = "-..s3BucketName..-"
_KEY: Final = "-..s3Key..-"


class HandleParts(NamedTuple):
    """The parts of a handle."""

    handle: str
    """The inner queue's handle."""
    key: str | None = None
    reader: str | None = None


def join(handle: str, pointer: Pointer | None, store: ObjectStore, form: PointerFormat) -> str:
    """The handle that the caller gets."""
    key, reader = (None, None) if pointer is None else (pointer.key, pointer.reader)
    return joined(HandleParts(handle, key, reader), store, form)


def joined(parts: HandleParts, store: ObjectStore, form: PointerFormat) -> str:
    """The reverse of `split`."""
    if form is PointerFormat.AWS:
        if parts.key is None:
            return parts.handle
        return f"{_BUCKET}{store.bucket}{_BUCKET}{_KEY}{store.prefix}{parts.key}{_KEY}{parts.handle}"
    if parts.key is None:
        return f"p.{parts.handle}"
    text = parts.key if parts.reader is None else f"{parts.key}:{parts.reader}"
    return f"o.{base64.urlsafe_b64encode(text.encode()).decode()}.{parts.handle}"


def split(handle: Any, store: ObjectStore, form: PointerFormat) -> HandleParts:
    """Take a handle apart. Raises ReceiptInvalid."""
    text = checks.handle(handle)
    return _split_aws(text, store) if form is PointerFormat.AWS else _split(text)


def _split(handle: str) -> HandleParts:
    kind, _, rest = handle.partition(".")
    if kind == "p":
        return HandleParts(rest)
    encoded, dot, inner = rest.partition(".")
    if kind != "o" or not dot:
        raise ReceiptInvalid(reason="it is not from a queue of large messages")
    try:
        text = base64.b64decode(encoded.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise ReceiptInvalid(reason="its object is malformed") from None
    key, _, reader = text.partition(":")
    if not is_key(key) or (reader and not (is_key(reader) and key.endswith(f"/{SHARED_BODY}"))):
        raise ReceiptInvalid(reason="its object is malformed")
    return HandleParts(inner, key, reader or None)


def _split_aws(handle: str, store: ObjectStore) -> HandleParts:
    if not handle.startswith(_BUCKET):
        return HandleParts(handle)
    buckets = handle[len(_BUCKET) :].split(_BUCKET, 1)
    rest = buckets[-1].split(_KEY, 2)
    if len(buckets) != 2 or len(rest) != 3 or rest[0]:
        raise ReceiptInvalid(reason="its object is malformed")
    bucket, (_, key, inner) = buckets[0], rest
    relative = key[len(store.prefix) :]
    if bucket != store.bucket or not key.startswith(store.prefix) or not is_key(relative):
        raise ReceiptInvalid(reason="its object is not of the configured store")
    return HandleParts(inner, relative)


PIECE_BYTES: Final = 8 << 20
USUAL_LEASE_SECONDS: Final = 30.0
"""The visibility timeout of a queue that does not report its own: SQS's, MNS's and Azure's default."""

STATS_SECONDS_MAX: Final = 5.0
"""How long the extension of a lease waits for the queue's visibility timeout."""


class _Waiting:
    """A message that is still to be read, or is done and waits for the others."""

    def __init__(self, message: Received, left: float) -> None:
        self.message = message
        self.left = left
        """Seconds that its lease had when it came, or was last extended."""
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
        self._asking = DaemonPool(None, "veilmq large")

    def received(self, came: list[Received], lease: float | None) -> list[Received]:
        """The messages with their bodies, without unreadable ones and those whose lease was lost meanwhile.

        lease: what they were received with. Extensions are for as long; with None for the queue's visibility timeout,
        or longer if a message's own lease is. What is left of it is less, or nothing, where the adapter counts from the
        beginning of a long poll.

        Raises ObjectStoreFailed if the store could not be reached and no message is left to return.
        """
        now = self._clock.monotonic()
        waiting = [_Waiting(message, message.lease_end - now) for message in came]
        keep = partial(self._keep, waiting, lease, cache(self._usual_lease))
        failure: ObjectStoreFailed | None = None
        try:
            for each in waiting:
                keep()
                if each.is_lost:
                    continue
                try:
                    if failure is not None and not failure.refused and self._points(each.message):
                        raise failure
                    each.done = self._whole(each.message, keep)
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
        whole: Peeked = self._whole(message, lambda: None)
        return whole

    def _set_aside(self, each: _Waiting, error: Unreadable) -> None:
        # Stop extending it first: from here on the lease is the policy's.
        each.is_lost = True
        set_aside(self._policy, self._inner, each.message, error)

    def _points(self, message: Received) -> bool:
        return read(message, self._store, self._form) is not None

    def _give_back(self, each: _Waiting, error: ObjectStoreFailed) -> None:
        log.warning("queue %s: message %s goes back: %s", self._inner.name, each.message.id, error)
        each.is_lost = True
        give_back(self._inner, [each.message.handle], PAUSE_SECONDS)

    def _given(self, each: _Waiting, done: Received) -> Received:
        """The message with its newest handle, which also names its object."""
        found = read(each.message, self._store, self._form)
        handle = join(each.message.handle, found, self._store, self._form)
        return msgspec.structs.replace(done, handle=handle, lease_end=each.message.lease_end)

    def _whole(self, message: Any, keep: Callable[[], None]) -> Any:
        found = read(message, self._store, self._form)
        if found is None:
            return message
        raw = self._content(message.id, found, keep)
        try:
            body = raw.decode()
        except UnicodeError:
            raise ObjectDamaged(message=message.id, key=found.key, reason="it is not UTF-8") from None
        attributes = without_reserved(message.attributes, self._form)
        return msgspec.structs.replace(message, body=body, attributes=attributes)

    def _content(self, message: str, found: Pointer, keep: Callable[[], None]) -> bytes:
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
            keep()
        if found.sha256 is not None and digest.hexdigest() != found.sha256:
            raise ObjectDamaged(message=message, key=found.key, reason="its SHA-256 is not the pointer's")
        return b"".join(pieces)

    def _check_size(self, message: str, size_bytes: int) -> None:
        if size_bytes > self._body_bytes_max:
            raise PointerRefused(message=message, reason=f"its {size_bytes} bytes exceed {self._body_bytes_max}")

    def _usual_lease(self) -> float:
        """The queue's visibility timeout. A server that hangs is not waited for: the leases must be extended."""
        asked = self._asking.submit(self._inner.stats)
        try:
            return asked.result(STATS_SECONDS_MAX).visibility_timeout or USUAL_LEASE_SECONDS
        except (VeilError, TimeoutError) as error:
            reason = str(error) or f"no answer in {STATS_SECONDS_MAX:g} s"
            log.warning("queue %s: its visibility timeout is not known: %s", self._inner.name, reason)
            return USUAL_LEASE_SECONDS

    def _keep(self, waiting: list[_Waiting], lease: float | None, usual: Callable[[], float]) -> None:
        """Extend the leases that are half over."""
        now = self._clock.monotonic()
        due = [each for each in waiting if not each.is_lost and each.message.lease_end - now < each.left / 2]
        if not due:
            return
        try:
            lengths = [max(each.left, usual()) if lease is None else lease for each in due]
            now = self._clock.monotonic()
            answers = self._inner.extend_batch(
                [Extension(each.message.handle, length) for each, length in zip(due, lengths, strict=True)]
            )
        except VeilError as error:
            log.warning("queue %s: leases could not be extended: %s", self._inner.name, error)
            return
        for each, length, answer in zip(due, lengths, answers, strict=True):
            if isinstance(answer, LeaseError):
                each.is_lost = True
                log.warning("queue %s: message %s was lost: %s", self._inner.name, each.message.id, answer)
            elif isinstance(answer, str):
                each.left = length
                each.message = msgspec.structs.replace(each.message, handle=answer, lease_end=now + length)
            else:
                log.warning("queue %s: message %s was not extended: %s", self._inner.name, each.message.id, answer)
