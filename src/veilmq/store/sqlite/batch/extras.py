"""Encodes and decodes a message's extras (what only some messages have), and checks a stored message for damage."""

from hashlib import md5 as md5_of
from typing import Final

import msgspec

from veilmq.model.message import NO_EXTRAS, Extras

_decode: Final = msgspec.msgpack.Decoder(Extras).decode
pack_extras: Final = msgspec.msgpack.Encoder().encode
"""Encodes the column `extras` of a message that has some; NULL stands for `NO_EXTRAS`."""
_FAILURE: Final = msgspec.msgpack.Decoder(tuple[str, str]).decode


def read_extras(packed: bytes | None) -> Extras | None:
    """The stored extras, or the shared empty ones; None if they are damaged."""
    if packed is None:
        return NO_EXTRAS
    try:
        return _decode(packed)
    except (ValueError, RecursionError):  # msgspec's errors, and UnicodeDecodeError for text that is no longer UTF-8
        return None


def intact(body: bytes, md5: bytes, packed: bytes | None) -> Extras | None:
    """The extras of an undamaged message; None if its body does not match its MD5, or its extras are damaged."""
    return read_extras(packed) if md5_of(body, usedforsecurity=False).digest() == md5 else None


def pack_failure(error_type: str, error: str) -> bytes:
    """Encode the column `lease.failure`."""
    return pack_extras((error_type, error))


def with_failure(extras: Extras, packed: bytes) -> Extras:
    """The extras, with the error from the column `lease.failure`."""
    error_type, error = _FAILURE(packed)
    return msgspec.structs.replace(extras, error_type=error_type, error=error)
