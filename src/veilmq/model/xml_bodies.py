"""Converts bodies of queues whose `xml_body` is base64 between what XML clients send and what is stored.

Strategy: two functions, inverse to each other. A body is stored as text, so base64 that does not decode to UTF-8 text
of XML characters is refused.
"""

import binascii
from base64 import b64encode
from hashlib import md5 as md5_of
from typing import NamedTuple

from veilmq.model.errors import ParameterInvalid
from veilmq.model.message import first_forbidden_character


class StoredBody(NamedTuple):
    """A body as stored, with its MD5 and size."""

    body: str
    md5: bytes
    size_bytes: int


def decode_xml_body(text: str) -> StoredBody | ParameterInvalid:
    """Decode a body that an XML client sent in base64 (RFC 4648, with padding)."""
    try:
        raw = binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
        body = raw.decode()
    except ValueError:
        return ParameterInvalid(parameter="body", reason="this queue takes base64 of text in UTF-8")
    if first_forbidden_character(body) is not None:
        return ParameterInvalid(parameter="body", reason="the decoded text has a character that XML cannot carry")
    return StoredBody(body, md5_of(raw, usedforsecurity=False).digest(), len(raw))


def encode_xml_body(body: str) -> str:
    """Encode a stored body for an XML client."""
    return b64encode(body.encode()).decode()
