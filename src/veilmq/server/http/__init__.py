"""HTTP/1.1 of the data ports: from the bytes of a connection to a complete request, and from a response to bytes. Here
are the limits of a listener, since everything that a client can make grow or last is bounded, and the bytes of a
response, in one piece.

Strategy: `listener.Listener` is one port; each `connection.Connection` passes one request at a time to its handler. A
request that came whole and plain is read at once, every other one by llhttp (intake). Nothing here knows a protocol.
"""

from email.utils import formatdate
from http import HTTPStatus
from typing import Final

import msgspec

from veilmq.protocols import Response


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one listener. Deadlines are exact to one tick.

    header_bytes_max: request line and headers together, so the longest target too. More: 431.
    header_count_max: header lines. More: 431.
    body_bytes_max: body without its transfer coding; a message of 1 MiB can be 6 MiB of JSON escapes. More: 413.
    header_deadline_s: from the first byte of a request to the end of its headers. Longer: 408.
    body_deadline_s: for the body, and one second more for each `rate_bytes_per_s_min` received. Longer: 408.
    answer_deadline_s: for the client to read an answer, extended in the same way. Longer: the connection is dropped.
    idle_s: a connection without a request; above the 60 s of the usual load balancers, so that they close first.
    linger_s: after a refusal, input is read and thrown away this long, so that the client gets to see the refusal. With
        TLS a client also has this long to close its side, after it has read everything.
    connections_max: beyond it the oldest connection goes that has had no request with a valid key. If each has had one,
        the newcomer is answered 503 and closed.
    held_bytes_max: of unfinished and not yet parsed requests of all connections together. More: 503 for the request
        that has been arriving for longest, on a connection without a valid key if there is one.
    pipeline_bytes_max: of one connection while a request of it is being answered; then nothing more is read.
    pipeline_requests_max: requests of one connection that are handed over in one turn of the loop, before others' are.
    write_buffer_bytes_max: unread answers of one connection; then its next request waits until the client has read.
    accept_backlog: connections that the kernel completes before they are accepted.
    tick_s: how often deadlines are checked.
    """

    header_bytes_max: int = 64 * 1024
    header_count_max: int = 100
    body_bytes_max: int = 7 * 1024 * 1024
    header_deadline_s: float = 10.0
    body_deadline_s: float = 60.0
    answer_deadline_s: float = 30.0
    rate_bytes_per_s_min: int = 16 * 1024
    idle_s: float = 75.0
    linger_s: float = 2.0
    connections_max: int = 10_000
    held_bytes_max: int = 128 * 1024 * 1024
    pipeline_bytes_max: int = 64 * 1024
    pipeline_requests_max: int = 32
    write_buffer_bytes_max: int = 64 * 1024
    accept_backlog: int = 1024
    tick_s: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0, not {getattr(self, name)}")


# How a response must be written: `flags` is a sum of these.
CLOSE: Final = 1
KEEP_ALIVE: Final = 2  # in HTTP/1.0 the connection is closed unless the response says keep-alive
HEAD: Final = 4

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_CONNECTION: Final = (b"", b"\r\nConnection: close", b"\r\nConnection: keep-alive", b"\r\nConnection: close")
_BODYLESS: Final = frozenset({204, 304})
_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
_PREFIXES_MAX: Final = 256


class Answers:
    """Writes responses with the current Date, which `tick` updates, and with this Server, if it is not empty."""

    __slots__ = ("_begins", "_date", "_prefixes", "_server")

    def __init__(self, server: bytes = b"") -> None:
        self._server = b"\r\nServer: " + server if server else b""
        self._date = b""
        self._begins: dict[bytes, bytes] = {}
        """By a header's name (codecs use only a few): the bytes before its value."""
        self._prefixes: dict[tuple[int, bytes | None, bytes], bytes] = {}
        self.tick()

    def tick(self) -> None:
        date = formatdate(usegmt=True).encode()
        if date != self._date:
            self._date = date
            self._prefixes.clear()

    def write(self, response: Response, flags: int) -> bytes:
        """The whole response. Raises ValueError if a header contains a line break."""
        status = response.status
        start = status, response.content_type, response.phrase
        prefix = self._prefixes.get(start) or self._prefix(*start)
        own = response.headers
        if len(own) == 1:
            ((name, value),) = own
            fields = (self._begins.get(name) or self._begin(name)) + value
            broken = b"\n" in value or b"\r" in value
        else:
            fields = b"".join([b"\r\n%b: %b" % pair for pair in own])
            broken = fields.count(b"\n") != len(own) or fields.count(b"\r") != len(own)
        if broken:
            raise ValueError(f"line break in a header of an answer: {own!r}")
        if flags:
            fields += _CONNECTION[flags & 3]
        if status in _BODYLESS:
            return b"%b%b\r\n\r\n" % (prefix, fields)
        body = response.body
        return b"".join((prefix, b"%d" % len(body), fields, b"\r\n\r\n", b"" if flags & HEAD else body))

    def _begin(self, name: bytes) -> bytes:
        if b"\n" in name or b"\r" in name:
            raise ValueError(f"line break in the name of a header of an answer: {name!r}")
        begin = self._begins[name] = b"\r\n%b: " % name
        return begin

    def _prefix(self, status: int, content_type: bytes | None, phrase: bytes) -> bytes:
        prefix = b"HTTP/1.1 %d %b\r\nDate: %b" % (status, phrase or _PHRASES.get(status, b"Unknown"), self._date)
        prefix += self._server
        if content_type is not None:
            if b"\n" in content_type or b"\r" in content_type:
                raise ValueError(f"line break in the content type of an answer: {content_type!r}")
            prefix += b"\r\nContent-Type: " + content_type
        if status not in _BODYLESS:
            prefix += b"\r\nContent-Length: "
        if len(self._prefixes) >= _PREFIXES_MAX:
            self._prefixes.clear()
        self._prefixes[status, content_type, phrase] = prefix
        return prefix
