"""Parses the query string, whole numbers, booleans, and the headers that ask for a page of a list.

Strategy: names are case-insensitive (SDKs write ReceiptHandle and receiptHandle). Values are percent-decoded and `+`
stays `+`, because three SDKs paste a handle unescaped. The marker of a page is its last name in base64, so no state is
kept between pages. Names that MNS does not allow are left out, so a page may be short or empty and still have a next
page.
"""

import re
from base64 import b64decode, urlsafe_b64encode
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from veilmq.protocols.mns import errors, limits
from veilmq.protocols.mns.call import Asked
from veilmq.protocols.mns.errors import Refusal, bad, out_of_range, show

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}\Z")
_BOOLEANS: Final = {"true": True, "false": False}


def read_query(query: bytes) -> dict[str, str]:
    """The parameters by lower-case name. Raises Refusal: InvalidQueryString."""
    if not query:
        return {}
    parameters: dict[str, str] = {}
    parts = query.split(b"&")
    if len(parts) > limits.QUERY_PAIRS_MAX:
        raise Refusal(errors.INVALID_QUERY_STRING, f"A request has at most {limits.QUERY_PAIRS_MAX} parameters.")
    for part in parts:
        if not part:
            continue
        if b"%" in part:
            name, _, value = part.partition(b"=")
            part = unquote_to_bytes(name) + b"=" + unquote_to_bytes(value)
        try:
            given, _, text = part.decode().partition("=")
        except UnicodeDecodeError:
            raise Refusal(errors.INVALID_QUERY_STRING, "The query string is not UTF-8.") from None
        name_lower = given.lower()
        if name_lower in parameters:
            raise Refusal(errors.INVALID_QUERY_STRING, f"The parameter {show(given)} is given more than once.")
        parameters[name_lower] = text
    return parameters


def whole_number(parameters: dict[str, str], name: str, minimum: int, maximum: int, noun: str = "") -> int | None:
    """The parameter's value; None if it is not given. Raises Refusal: not a number, or out of range."""
    text = parameters.get(name.lower())
    if text is None:
        return None
    if not _INTEGER.match(text):
        raise Refusal(errors.INVALID_QUERY_STRING, f"The value of {name} is not a whole number.")
    value = int(text)
    if not minimum <= value <= maximum:
        raise out_of_range(name, minimum, maximum, noun)
    return value


def flag(parameters: dict[str, str], name: str) -> bool:
    """Whether the parameter is present and true. Raises Refusal: neither true nor false."""
    text = parameters.get(name)
    if text is None:
        return False
    value = boolean(text)
    if value is None:
        raise Refusal(errors.INVALID_QUERY_STRING, f"The value of {name} is neither true nor false.")
    return value


def boolean(text: str) -> bool | None:
    """`True` (Python) and `true` (Go, Java); None for anything else."""
    return _BOOLEANS.get(text.lower())


def integer(text: str) -> int | None:
    """A whole number, or None."""
    return int(text) if _INTEGER.match(text) else None


class Page(NamedTuple):
    """The requested part of a list."""

    prefix: str
    after: str
    count_max: int
    with_meta: bool


def read_page(asked: Asked) -> Page:
    """x-mns-prefix, x-mns-marker, x-mns-ret-number and x-mns-with-meta. Raises Refusal: InvalidArgument."""
    count = limits.RET_NUMBER_DEFAULT
    given = asked.header(b"x-mns-ret-number")
    if given:
        value = integer(given)
        if value is None or not 1 <= value <= limits.RET_NUMBER_MAX:
            raise out_of_range("x-mns-ret-number", 1, limits.RET_NUMBER_MAX)
        count = value
    with_meta = boolean(asked.header(b"x-mns-with-meta") or "false")
    if with_meta is None:
        raise bad("x-mns-with-meta", "it is true or false.")
    return Page(asked.header(b"x-mns-prefix"), _read_marker(asked.header(b"x-mns-marker")), count, with_meta)


def _read_marker(text: str) -> str:
    if not text:
        return ""
    try:
        name = b64decode(text.encode("ascii"), b"-_", validate=True).decode()
    except ValueError:
        name = ""
    if not name:
        raise bad("x-mns-marker", "it is not one that a list gave.")
    return name


def marker_of(names: list[str], more: bool) -> str:
    """The element with the next page's marker; empty on the last page."""
    if not more:
        return ""
    return f"<NextMarker>{urlsafe_b64encode(names[-1].encode()).decode()}</NextMarker>"
