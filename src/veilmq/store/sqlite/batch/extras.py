"""What only some messages carry, as it is stored, and whether a message is as it was stored."""

from hashlib import md5 as md5_of
from typing import Final

import msgspec

from veilmq.model.message import NO_EXTRAS, Extras

_decode: Final = msgspec.msgpack.Decoder(Extras).decode
pack_extras: Final = msgspec.msgpack.Encoder().encode
"""The column `extras` of a message that has some; NULL stands for `NO_EXTRAS`."""
_FAILURE: Final = msgspec.msgpack.Decoder(tuple[str, str]).decode


def read_extras(packed: bytes | None) -> Extras | None:
    """The stored extras, or the shared empty ones; None if they are damaged."""
    if packed is None:
        return NO_EXTRAS
    try:
        return _decode(packed)
    except (ValueError, RecursionError):  # msgspec's own errors, and that of a text which is no UTF-8 any more
        return None


def intact(body: bytes, md5: bytes, packed: bytes | None) -> Extras | None:
    """The extras of a message that is as it was stored; None if its body lost its MD5, or its extras are damaged."""
    return read_extras(packed) if md5_of(body, usedforsecurity=False).digest() == md5 else None


def pack_failure(error_type: str, error: str) -> bytes:
    """`lease.failure`."""
    return pack_extras((error_type, error))


def with_failure(extras: Extras, packed: bytes) -> Extras:
    """The extras, with the error that the lease's row has."""
    error_type, error = _FAILURE(packed)
    return msgspec.structs.replace(extras, error_type=error_type, error=error)
