"""Checks HMAC-SHA256 signatures in base64, by any of an account's keys."""

import binascii
from base64 import b64decode
from functools import lru_cache
from hmac import compare_digest
from typing import Final

from veilmq.protocols.azure.errors import unauthenticated
from veilmq.protocols.keyed import Keyed

_SIGNATURE_BYTES: Final = 32
_keyed = lru_cache(256)(Keyed)


def read_signature(text: bytes) -> bytes:
    """The 32 bytes of a signature. Raises Refusal."""
    try:
        raw = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != _SIGNATURE_BYTES:
        raise unauthenticated("The signature is not 32 bytes in base64.")
    return raw


def matches(secrets: tuple[bytes, ...], text: bytes, signature: bytes) -> bool:
    """Whether one of the secrets gives this signature of the text."""
    return any(compare_digest(_keyed(secret).digest(text), signature) for secret in secrets)
