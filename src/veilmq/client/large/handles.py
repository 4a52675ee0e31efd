"""Handles that carry what a delete needs: the inner queue's handle, and which object goes with it.

    p.HANDLE                   a plain message
    o.KEY.HANDLE               a large one; KEY in base64url, behind it a colon and the reader of a shared object
    -..s3BucketName..-B-..s3BucketName..--..s3Key..-K-..s3Key..-HANDLE      AWS's form, and HANDLE alone

Strategy: nothing is remembered, so any process can extend and delete with a handle, and an extension that gives another
inner handle keeps the object. A handle is the caller's to bring back, so its key is checked like a pointer's.
"""

import base64
import binascii
from typing import Any, Final, NamedTuple

from veilmq.client.large.pointer import SHARED_BODY, Pointer, PointerFormat
from veilmq.client.objects import ObjectStore, is_key
from veilmq.model.errors import ReceiptInvalid

_BUCKET: Final = "-..s3BucketName..-"
_KEY: Final = "-..s3Key..-"


class Held(NamedTuple):
    """A handle taken apart."""

    handle: str
    """The inner queue's."""
    key: str | None = None
    reader: str | None = None


def join(handle: str, pointer: Pointer | None, store: ObjectStore, form: PointerFormat) -> str:
    """The handle to give out."""
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
    """Raises ReceiptInvalid."""
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
