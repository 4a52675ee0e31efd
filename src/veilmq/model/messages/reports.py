"""What a client reports with an extend: it is still working, or it gives the message back for a retry, and why.

On the wire it is one request header, the same on every protocol (docs/veil-protocol.md, "What became of the work"):

    x-veilmq-outcome: retry;reason=raised;type=ValueError;error=bad%20zip%20code

Strategy: the value is a word and parameters, percent-encoded like a URL's query, so that any language can write it. The
header only adds to the history, so a malformed or too long one is ignored and the request is carried out without it.
Writing cuts text that is too long; reading refuses it.
"""

import re
from enum import StrEnum
from typing import Final
from urllib.parse import quote, unquote_to_bytes

import msgspec

REPORT_HEADER: Final = b"x-veilmq-outcome"
HEADER_BYTES_MAX: Final = 4_096
REASON_CHARACTERS_MAX: Final = 32
TYPE_CHARACTERS_MAX: Final = 80
ERROR_CHARACTERS_MAX: Final = 256
_REASON: Final = re.compile(rf"[a-z][a-z0-9-]{{0,{REASON_CHARACTERS_MAX - 1}}}")
_HEADER: Final = re.compile(
    rb"(?P<outcome>[a-z]+)(?P<parameters>(?:[ \t]*;[ \t]*[a-z]+=(?:[A-Za-z0-9._~-]|%[0-9A-Fa-f]{2})*)*)"
)
_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class Reported(StrEnum):
    """The purpose of an extend."""

    WORKING = "working"
    """The sender keeps working, even if the lease gets shorter: if it expires, the worker is gone."""
    RETRY = "retry"
    """The sender gives the message back, to be tried again when the lease ends."""


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why a message is given back. Unknown fields are empty. One line each, without bodies."""

    reason: str = ""
    """`raised` (the handler did), `asked` (it asked for a retry), `busy` (another worker has the key), `released`
    (given back unworked) or another word of lower-case letters, digits and hyphens."""
    error_type: str = ""
    error: str = ""
    """First line of the error's text."""


NO_FAILURE: Final = Failure()


class Report(msgspec.Struct, frozen=True, gc=False):
    """The contents of a valid header."""

    reported: Reported
    failure: Failure = NO_FAILURE


def failure_of(reason: str, error_type: str = "", text: str = "") -> Failure:
    """A failure within the bounds: the first non-empty line of the text, without control characters."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return Failure(reason, _cut(error_type, TYPE_CHARACTERS_MAX), _cut(line, ERROR_CHARACTERS_MAX))


WORKING: Final = Report(Reported.WORKING)
RELEASED: Final = Failure("released")
"""Given back without a known failure."""


def report_of(delay: float, failure: Failure | None) -> Report | None:
    """What a client reports with a release; nothing without a delay or failure."""
    if failure is None:
        return Report(Reported.RETRY, RELEASED) if delay else None
    return Report(Reported.RETRY, failure)


def write_header(reported: Reported, failure: Failure = NO_FAILURE) -> str:
    """The header's value, in ASCII. An invalid reason is left out; text that is too long is cut."""
    parts = [reported.value]
    if _REASON.fullmatch(failure.reason):
        parts.append(f"reason={failure.reason}")
    for name, text, most in (
        ("type", failure.error_type, TYPE_CHARACTERS_MAX),
        ("error", failure.error, ERROR_CHARACTERS_MAX),
    ):
        if cut := _cut(text, most):
            parts.append(f"{name}={quote(cut, safe='', errors='replace')}")
    return ";".join(parts)


def read_header(value: bytes | None) -> Report | None:
    """Parse the header; None if it is missing, malformed, too long or of an unknown outcome."""
    if value is None or len(value) > HEADER_BYTES_MAX:
        return None
    found = _HEADER.fullmatch(value)
    if found is None:
        return None
    try:
        reported = Reported(found["outcome"].decode())
        given = _parameters(found["parameters"])
    except ValueError:  # another outcome, or no UTF-8
        return None
    if given is None:
        return None
    failure = Failure(given.get(b"reason", ""), given.get(b"type", ""), given.get(b"error", ""))
    if failure.reason and not _REASON.fullmatch(failure.reason):
        return None
    for text, most in ((failure.error_type, TYPE_CHARACTERS_MAX), (failure.error, ERROR_CHARACTERS_MAX)):
        if len(text) > most or _CONTROLS.search(text):
            return None
    return Report(reported, failure if reported is Reported.RETRY else NO_FAILURE)


def _parameters(text: bytes) -> dict[bytes, str] | None:
    """The parameters by name; None if one repeats. Unknown ones are ignored. Raises UnicodeDecodeError."""
    given: dict[bytes, str] = {}
    for part in text.split(b";")[1:]:
        name, _, value = part.strip(b" \t").partition(b"=")
        if name in given:
            return None
        given[name] = unquote_to_bytes(value).decode()
    return given


def _cut(text: str, most: int) -> str:
    """The text without control characters and lone surrogates, cut to `most` characters."""
    text = text[: 4 * most].encode("utf-8", "replace").decode()
    return _CONTROLS.sub(" ", text).strip()[:most]
