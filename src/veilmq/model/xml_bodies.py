"""Bodies of queues whose `xml_body` is base64: what XML clients send and get, and what is stored.

Strategy: two functions, one the other's inverse. A body is stored as text, so base64 of anything but the UTF-8 of text
that XML can carry is refused.
"""

import binascii
from base64 import b64encode
from hashlib import md5 as md5_of
from typing import NamedTuple

from veilmq.model.errors import ParameterInvalid
from veilmq.model.message import first_forbidden_character


class StoredBody(NamedTuple):
    """A body as it is stored, with what is stored beside it."""

    body: str
    md5: bytes
    size_bytes: int


def decode_xml_body(text: str) -> StoredBody | ParameterInvalid:
    """What is stored of a body that an XML client sent in base64 (RFC 4648, with padding)."""
    try:
        raw = binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
        body = raw.decode()
    except ValueError:
        return ParameterInvalid(parameter="body", reason="this queue takes base64 of text in UTF-8")
    if first_forbidden_character(body) is not None:
        return ParameterInvalid(parameter="body", reason="the decoded text has a character that XML cannot carry")
    return StoredBody(body, md5_of(raw, usedforsecurity=False).digest(), len(raw))


def encode_xml_body(body: str) -> str:
    """What an XML client gets of a stored body."""
    return b64encode(body.encode()).decode()
