"""Raw and base64 bodies of a topic.

Strategy: what a subscription gets is settled when it is made, and a base64 body says so in an attribute where there are
any. A reader says which it wants; what is not that is a typed error, never a guess. Source: the documents'
RawTopicMessage and getMessageBodyAsRawString; RFC 4648, section 4.
"""

import base64
import binascii
from enum import StrEnum
from typing import Final

from veilmq.client.errors import EncodingMismatch
from veilmq.client.messages import Peeked
from veilmq.client.prepared import text_bytes

ENCODING_ATTRIBUTE: Final = "veilmq.encoding"


class Encoding(StrEnum):
    """How a subscription gets bodies."""

    RAW = "raw"
    """As they were published."""
    BASE64 = "base64"
    """In base64 of their UTF-8, as MNS's own topics and older SDKs have them."""


def encoded(body: str, encoding: Encoding) -> str:
    """The body as a subscription gets it. Raises ParameterInvalid if it is not text."""
    raw = text_bytes(body)
    return body if encoding is Encoding.RAW else base64.b64encode(raw).decode()


def decoded(message: Peeked, encoding: Encoding | str) -> str:
    """The body as it was published, from a subscription of that encoding. Raises EncodingMismatch."""
    wanted = Encoding(encoding)
    marked = message.attributes.get(ENCODING_ATTRIBUTE, wanted)
    if marked != wanted:
        raise EncodingMismatch(wanted=wanted, reason=f"it is marked as {marked!r}")
    if wanted is Encoding.RAW:
        return message.body
    try:
        return base64.b64decode(message.body.encode("ascii"), validate=True).decode()
    except (UnicodeError, binascii.Error):
        raise EncodingMismatch(wanted=wanted, reason="it is not base64 of text") from None
