"""How values look on Azure's wire: times, and the XML of requests and responses.

Strategy: times are RFC 1123 in headers and messages, ISO 8601 in SAS, policies and keys. Those of the same second
repeat, so formatting and parsing are cached. Everything is integer arithmetic on UTC; nothing here reads a clock.

The tree of a document is `veilmq.protocols`'s, within this protocol's bounds. An element at a place where none may
be is refused; what is not well-formed is refused with line and column. A response is joined strings, without a tree.
Texts are escaped so that a client reads back exactly what was sent: a carriage return is written as a character
reference, because a parser turns a bare one into a line feed (XML 1.0, 2.11).
"""

import calendar
import re
import time
from collections.abc import Sequence
from email.utils import formatdate, parsedate_to_datetime
from functools import lru_cache
from typing import Final

from veilmq.model.instant import SECOND_US, Instant
from veilmq.protocols import DocumentInvalid, Element, clean, escape, remembered
from veilmq.protocols import read_document as read_tree
from veilmq.protocols.azure import errors, limits
from veilmq.protocols.azure.errors import Refusal, bad_xml, too_large

NEVER: Final = "Fri, 31 Dec 9999 23:59:59 GMT"
"""The text of an endless time to live."""
_SECONDS_MIN: Final = -62_135_596_800
_SECONDS_MAX: Final = 253_402_300_799
_ISO: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})(?:T([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,7}))?)?"
    r"(?:Z|([+-])([01][0-9]|2[0-3]):([0-5][0-9]))?)?\Z"
)
_OFFSET: Final = re.compile(r"T.*[+-]")
_TEXT_MAX: Final = 128
"""Longer than any valid time."""


@lru_cache(1_024)
def _print_seconds(seconds: int) -> str:
    return NEVER if seconds >= _SECONDS_MAX else formatdate(seconds, usegmt=True)


def print_rfc1123(instant: Instant) -> str:
    """`Thu, 21 Nov 2026 03:37:00 GMT`, rounded down to the second."""
    return _print_seconds(instant // SECOND_US)


@remembered(_TEXT_MAX)
def read_rfc1123(text: bytes) -> Instant | None:
    """The instant that a Date or x-ms-date header names, or None."""
    try:
        moment = parsedate_to_datetime(text.decode("ascii"))
        return Instant(calendar.timegm(moment.utctimetuple()) * SECOND_US)
    except (ValueError, OverflowError, TypeError, IndexError):
        return None


@remembered(_TEXT_MAX)
def read_iso(text: str) -> Instant | None:
    """The instant of a date, or of a date and time in UTC or with an offset ("Formatting DateTime values"), or None."""
    found = _ISO.match(text)
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(part or 0) for part in found.groups()[:6])
    if not (1 <= month <= 12 and 1 <= day <= calendar.monthrange(max(year, 1), month)[1]):
        return None
    if year < 1 or hour > 23 or minute > 59 or second > 59:
        return None
    fraction_us = int((found[7] or "").ljust(6, "0")[:6])
    offset_s = (int(found[9] or 0) * 60 + int(found[10] or 0)) * 60
    ahead_s = -offset_s if found[8] == "-" else offset_s
    seconds = calendar.timegm((year, month, day, hour, minute, second)) - ahead_s
    return Instant(seconds * SECOND_US + fraction_us) if seconds >= _SECONDS_MIN else None


def read_policy_time(text: str) -> Instant | None:
    """Like `read_iso`, but None for an offset or a fraction without seven digits, as Azure reads stored policies."""
    fraction = text.partition(".")[2].removesuffix("Z")
    return None if _OFFSET.search(text) or (fraction and len(fraction) != 7) else read_iso(text)


def print_policy_time(text: str) -> str:
    """A stored policy's time as Azure answers it, in whatever form it was set: `2026-11-21T03:37:00.0000000Z`."""
    instant, found = read_iso(text), _ISO.match(text)
    fraction = (found and found[7]) or ""
    return text if instant is None else f"{print_iso(instant)[:-1]}.{fraction.ljust(7, '0')}Z"


def print_iso(instant: Instant) -> str:
    """`2026-11-21T03:37:00Z`, rounded down to the second."""
    moment = time.gmtime(instant // SECOND_US)
    return f"{moment.tm_year:04d}{time.strftime('-%m-%dT%H:%M:%SZ', moment)}"  # %Y leaves out zeros


def read_document(body: bytes, root: str, limit_bytes: int, text: str = "") -> Element:
    """The tree of a document whose outermost element has that name.

    text: the name of elements that have no children: markup in them is removed, but its text is kept.

    Raises Refusal: RequestBodyTooLarge, InvalidXmlDocument.
    """
    if len(body) > limit_bytes:
        raise too_large(limit_bytes)
    try:
        element = read_tree(body, limits.XML_DEPTH_MAX, limits.XML_NODES_MAX, text)
    except DocumentInvalid as error:
        raise bad_xml(f"{error.reason[0].upper()}{error.reason[1:]}.", error.line, error.column) from None
    if element.name != root:
        raise bad_xml(f"The document must be a {root}.")
    return element


def only(element: Element, name: str) -> list[Element]:
    """The children, all of which must have that name. Raises Refusal."""
    for child in element.children:
        if child.name != name:
            raise Refusal(errors.UNSUPPORTED_XML_NODE, {"XmlNodeName": child.name})
    return element.children


def members_of(element: Element, names: Sequence[str]) -> dict[str, Element]:
    """The children by name, each at most once and of those names alone. Raises Refusal."""
    found: dict[str, Element] = {}
    for child in element.children:
        if child.name not in names:
            raise Refusal(errors.UNSUPPORTED_XML_NODE, {"XmlNodeName": child.name})
        if child.name in found:
            raise bad_xml(f"{child.name} is given more than once.")
        found[child.name] = child
    return found


DECLARATION: Final = '<?xml version="1.0" encoding="utf-8"?>'
CONTENT_TYPE: Final = b"application/xml"


def escape_attribute(text: str) -> str:
    """The text as the value of an attribute in double quotes."""
    return escape(text).replace('"', "&quot;").replace("\n", "&#10;").replace("\t", "&#9;")


def write_error(code: str, message: str, extra: dict[str, str]) -> bytes:
    """A whole error answer; what XML cannot carry is replaced."""
    more = "".join(f"<{name}>{clean(text)}</{name}>" for name, text in extra.items())
    return f"{DECLARATION}<Error><Code>{code}</Code><Message>{clean(message)}</Message>{more}</Error>".encode()
