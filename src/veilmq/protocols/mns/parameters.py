"""Parses the query string, whole numbers and booleans.

Strategy: names are case-insensitive (SDKs write ReceiptHandle and receiptHandle). Values are percent-decoded and `+`
stays `+`, because three SDKs paste a handle unescaped.
"""

import re
from typing import Final
from urllib.parse import unquote_to_bytes

from veilmq.protocols.mns import limits
from veilmq.protocols.mns.errors import INVALID_QUERY_STRING, Refusal, out_of_range, show

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}\Z")
_BOOLEANS: Final = {"true": True, "false": False}


def read_query(query: bytes) -> dict[str, str]:
    """The parameters by lower-case name. Raises Refusal: InvalidQueryString."""
    if not query:
        return {}
    parameters: dict[str, str] = {}
    parts = query.split(b"&")
    if len(parts) > limits.QUERY_PAIRS_MAX:
        raise Refusal(INVALID_QUERY_STRING, f"A request has at most {limits.QUERY_PAIRS_MAX} parameters.")
    for part in parts:
        if not part:
            continue
        if b"%" in part:
            name, _, value = part.partition(b"=")
            part = unquote_to_bytes(name) + b"=" + unquote_to_bytes(value)
        try:
            given, _, text = part.decode().partition("=")
        except UnicodeDecodeError:
            raise Refusal(INVALID_QUERY_STRING, "The query string is not UTF-8.") from None
        name_lower = given.lower()
        if name_lower in parameters:
            raise Refusal(INVALID_QUERY_STRING, f"The parameter {show(given)} is given more than once.")
        parameters[name_lower] = text
    return parameters


def whole_number(parameters: dict[str, str], name: str, minimum: int, maximum: int, noun: str = "") -> int | None:
    """The parameter's value; None if it is not given. Raises Refusal: not a number, or out of range."""
    text = parameters.get(name.lower())
    if text is None:
        return None
    if not _INTEGER.match(text):
        raise Refusal(INVALID_QUERY_STRING, f"The value of {name} is not a whole number.")
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
        raise Refusal(INVALID_QUERY_STRING, f"The value of {name} is neither true nor false.")
    return value


def boolean(text: str) -> bool | None:
    """`True` (Python) and `true` (Go, Java); None for anything else."""
    return _BOOLEANS.get(text.lower())


def integer(text: str) -> int | None:
    """A whole number, or None."""
    return int(text) if _INTEGER.match(text) else None
