"""Writes a Response as the bytes of an HTTP/1.1 response, in one piece.

Strategy: status line, Date and Content-Type are one cached prefix per (status, content type), dropped when the second
of the Date changes. Each response then costs one formatting of its length and its own headers.
"""

from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from veilmq.protocols.http import Response

# How a response must be written: a sum of these flags.
CLOSE: Final = 1
KEEP_ALIVE_TOLD: Final = 2  # HTTP/1.0 closes the connection unless it is told to keep it
HEAD: Final = 4

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_CONNECTION: Final = (b"", b"\r\nConnection: close", b"\r\nConnection: keep-alive", b"\r\nConnection: close")
_BODYLESS: Final = frozenset({204, 304})
_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
_PREFIXES_MAX: Final = 256


class Answers:
    """Writes responses with the current Date; `tick` updates it."""

    __slots__ = ("_date", "_prefixes")

    def __init__(self) -> None:
        self._date = b""
        self._prefixes: dict[tuple[int, bytes | None], bytes] = {}
        self.tick()

    def tick(self) -> None:
        date = formatdate(usegmt=True).encode()
        if date != self._date:
            self._date = date
            self._prefixes.clear()

    def write(self, response: Response, form: int) -> bytes:
        """The whole response. Raises ValueError if a header contains a line break."""
        status = response.status
        prefix = self._prefixes.get((status, response.content_type))
        if prefix is None:
            prefix = self._prefix(status, response.content_type)
        own = response.headers
        fields = b"\r\n%b: %b" % own[0] if len(own) == 1 else b"".join([b"\r\n%b: %b" % pair for pair in own])
        if fields.count(b"\n") != len(own) or fields.count(b"\r") != len(own):
            raise ValueError(f"line break in a header of an answer: {own!r}")
        if form:
            fields += _CONNECTION[form & 3]
        if status in _BODYLESS:
            return b"%b%b\r\n\r\n" % (prefix, fields)
        body = response.body
        return b"%b%d%b\r\n\r\n%b" % (prefix, len(body), fields, b"" if form & HEAD else body)

    def _prefix(self, status: int, content_type: bytes | None) -> bytes:
        prefix = b"HTTP/1.1 %d %b\r\nDate: %b" % (status, _PHRASES.get(status, b"Unknown"), self._date)
        if content_type is not None:
            if b"\n" in content_type or b"\r" in content_type:
                raise ValueError(f"line break in the content type of an answer: {content_type!r}")
            prefix += b"\r\nContent-Type: " + content_type
        if status not in _BODYLESS:
            prefix += b"\r\nContent-Length: "
        if len(self._prefixes) >= _PREFIXES_MAX:
            self._prefixes.clear()
        self._prefixes[status, content_type] = prefix
        return prefix
