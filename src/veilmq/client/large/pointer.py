"""What the queue carries instead of a large body, and the handles of such messages.

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
"""

import base64
import binascii
import json
import re
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec

from veilmq.client.errors import PointerRefused
from veilmq.client.messages import AttributeValue, Message, Peeked
from veilmq.client.records.objects import ObjectStore, is_key
from veilmq.model.errors import ParameterInvalid, ReceiptInvalid

BEGINNING: Final = '{"veilmq.pointer":'
SIZE_ATTRIBUTE: Final = "ExtendedPayloadSize"
SIZE_ATTRIBUTES: Final = (SIZE_ATTRIBUTE, "SQSLargePayloadSize")
AWS_CLASS: Final = "software.amazon.payloadoffloading.PayloadS3Pointer"
AWS_CLASSES: Final = (AWS_CLASS, "com.amazon.sqs.javamessaging.MessageS3Pointer")
SHARED_BODY: Final = "body"
"""Last part of a shared object's key (`large.shared`)."""
BODY_BYTES_MAX: Final = 4_096
"""The longest pointer."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")
_READER: Final = re.compile(r"[A-Za-z0-9._-]{1,120}\Z")


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
    """For a shared object: the reader that this copy of the pointer belongs to (`large.shared`)."""


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


def _own(message: Peeked, store: ObjectStore) -> Pointer:
    value = _json(message, dict)
    size_bytes, sha256, reader = value.get("bytes"), value.get("sha256"), value.get("reader")
    if value["veilmq.pointer"] != 1:
        raise PointerRefused(message=message.id, reason="it is of another version")
    if type(size_bytes) is not int or size_bytes < 0:
        raise PointerRefused(message=message.id, reason="it has no size")
    if type(sha256) is not str or not _SHA256.match(sha256):
        raise PointerRefused(message=message.id, reason="it has no SHA-256")
    if reader is not None and (type(reader) is not str or not _READER.match(reader)):
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
    return Pointer(found, size if type(size) is int and size >= 0 else None, None)


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


class Held(NamedTuple):
    """The parts of a handle."""

    handle: str
    """The inner queue's handle."""
    key: str | None = None
    reader: str | None = None


def join(handle: str, pointer: Pointer | None, store: ObjectStore, form: PointerFormat) -> str:
    """The handle that the caller gets."""
    key, reader = (None, None) if pointer is None else (pointer.key, pointer.reader)
    return joined(Held(handle, key, reader), store, form)


def joined(held: Held, store: ObjectStore, form: PointerFormat) -> str:
    """The reverse of `split`."""
    if form is PointerFormat.AWS:
        if held.key is None:
            return held.handle
        return f"{_BUCKET}{store.bucket}{_BUCKET}{_KEY}{store.prefix}{held.key}{_KEY}{held.handle}"
    if held.key is None:
        return f"p.{held.handle}"
    text = held.key if held.reader is None else f"{held.key}:{held.reader}"
    return f"o.{base64.urlsafe_b64encode(text.encode()).decode()}.{held.handle}"


def split(handle: Any, store: ObjectStore, form: PointerFormat) -> Held:
    """Take a handle apart. Raises ReceiptInvalid."""
    if type(handle) is not str:
        raise ReceiptInvalid(reason=f"it is no str but a {type(handle).__name__}")
    return _split_aws(handle, store) if form is PointerFormat.AWS else _split(handle)


def _split(handle: str) -> Held:
    kind, _, rest = handle.partition(".")
    if kind == "p":
        return Held(rest)
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
    return Held(inner, key, reader or None)


def _split_aws(handle: str, store: ObjectStore) -> Held:
    if not handle.startswith(_BUCKET):
        return Held(handle)
    parts = handle[len(_BUCKET) :].split(_BUCKET, 1)
    rest = parts[-1].split(_KEY, 2)
    if len(parts) != 2 or len(rest) != 3 or rest[0]:
        raise ReceiptInvalid(reason="its object is malformed")
    bucket, (_, key, inner) = parts[0], rest
    relative = key[len(store.prefix) :]
    if bucket != store.bucket or not key.startswith(store.prefix) or not is_key(relative):
        raise ReceiptInvalid(reason="its object is not of the configured store")
    return Held(inner, relative)
