"""Parses the bytes of one connection into complete requests, or into the one refusal that ends it.

Strategy: a request that is one plain piece of input is read at once (plain.py). llhttp (through httptools) parses
everything else, decides alone what is malformed, and refuses what RFC 9112 forbids. This module adds the limits, and
rules where two parsers could read the same bytes differently. Input is fed in slices, and none is fed while requests
wait, so a burst of tiny requests is never expanded at once. Nothing here knows a socket or a clock.

`HeaderCaseIntake` keeps the case of Azure's metadata header names: Azure "preserves the case with which they were
created" of names that begin with `x-ms-meta-`. Only the Azure port uses it, so other ports do not pay for it.

Before changing it: two parsers must not read the same bytes differently (request smuggling).

Source: RFC 9112; "Setting and retrieving properties and metadata" in the Storage REST API.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import httptools

from veilmq.protocols import Request, absolute_form
from veilmq.server.http import CLOSE, HEAD, KEEP_ALIVE, Limits
from veilmq.server.http.intake.plain import OWN_CASE, is_host, read_plain

SLICE_BYTES: Final = 16 * 1024
_CHUNK_OVERHEAD_MAX: Final = 16
"""A chunk of one byte takes six on the wire; more overhead than this is an attack."""
_METHODS: Final = {name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")}
_SINGLE: Final = frozenset({b"host", b"authorization", b"x-amz-date", b"content-length", b"transfer-encoding"})
"""If one of these comes twice, a proxy in front may have used the other one."""
_NO_DUPLICATES: Final[frozenset[bytes]] = frozenset()
_OTHER_PROTOCOLS: Final = {
    b"\x16\x03": "the client speaks TLS and this port plain HTTP: its URL needs http://",
    b"PRI * HTTP/2.0": "the client speaks HTTP/2 and this port only HTTP/1.1",
}
"""How a connection of each begins: the handshake record of RFC 8446, 5.1, and the preface of RFC 9113, 3.4."""


def other_protocol(data: bytes) -> str | None:
    """What a client speaks instead of HTTP/1.1, if its first bytes, or those of a request, show it."""
    return next((reason for start, reason in _OTHER_PROTOCOLS.items() if data.startswith(start)), None)


class Refusal(Exception):
    """A refused request: the status, and the reason for the client.

    request: without its body, if its headers were read; they decide the form of the response.
    """

    def __init__(self, status: int, reason: str, request: Request | None = None) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason
        self.request = request


class Intake:
    """The parser of one connection.

    ready: complete requests, each with the flags of its answer (CLOSE, KEEP_ALIVE, HEAD).
    refusal: set once; it comes after the requests that are ready, and nothing is parsed any more.
    in_body: headers are complete, the body is not. expects: the client waits for 100 Continue before it sends one.
    fed_bytes: input held for a request that is not complete.
    """

    __slots__ = (
        "_authority", "_begun", "_body", "_body_fed", "_chunked", "_doubled", "_duplicates", "_flags", "_headers",
        "_headers_taken", "_idle_bytes", "_limits", "_method", "_next_id", "_parser", "_peer", "_repeats", "_replaying",
        "_secure", "_target", "_unmeasured_bytes_max", "_upgrading", "expects", "fed_bytes", "in_body", "ready",
        "refusal",
    )  # fmt: skip

    def __init__(self, limits: Limits, peer: str, secure: bool, next_id: Callable[[], str]) -> None:
        self._limits = limits
        self._peer = peer
        self._secure = secure
        self._next_id = next_id
        # Headers within so many bytes plus one slice need not be measured.
        self._unmeasured_bytes_max = limits.header_bytes_max - SLICE_BYTES
        self.ready: deque[tuple[Request, int]] = deque()
        self.refusal: Refusal | None = None
        self.in_body = False
        self.expects = False
        self.fed_bytes = 0
        self._begun = False
        self._replaying = False
        self._upgrading = False
        self._chunked = False
        self._method = ""
        self._flags = 0
        self._target = b""
        self._authority: bytes | None = None
        self._duplicates = _NO_DUPLICATES
        self._repeats = 0
        self._doubled: bytes | None = None
        self._headers: dict[bytes, bytes] = {}
        self._headers_taken: dict[bytes, bytes] = {}
        self._body: bytes | bytearray = b""
        self._body_fed = 0
        self._idle_bytes = 0
        """Bytes of a chunked request since its body last grew to `_body_fed` bytes: trailers, mostly."""
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> bytes:
        """Read until a request is ready or the data is used up; return the rest for the next call."""
        if self.ready or self.refusal is not None:
            return data
        request = self.read_plain(data)
        if request is None:
            return self.parse(data)
        self.ready.append((request, 0))
        return b""

    def read_plain(self, data: bytes) -> Request | None:
        """The request, if the data is one plain request and nothing unfinished came before it.

        Only while no request is ready and none was refused. Its answer needs no flags.
        """
        if self._begun or self.fed_bytes or len(data) > SLICE_BYTES:
            return None
        return read_plain(data, self._limits, self._peer, self._secure, self._next_id)

    def parse(self, data: bytes) -> bytes:
        """The same as `feed` for what is no plain request."""
        while data and not self.ready and self.refusal is None:
            if len(data) <= SLICE_BYTES:
                data = self._feed_slice(data)
            else:
                data = self._feed_slice(data[:SLICE_BYTES]) + data[SLICE_BYTES:]
        return data

    def end(self) -> None:
        """End of input. Drops the parser, which holds this object's methods, to break the reference cycle."""
        self.ready.clear()
        del self._parser

    def drop_body(self) -> None:
        """Free what a refused request sent. Nothing is parsed any more."""
        self._body = b""
        self.fed_bytes = 0

    def _feed_slice(self, data: bytes) -> bytes:
        rest = b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            self._pass_over_upgrade()
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, Refusal):
                raise
            self.refusal = error.__context__
        except httptools.HttpParserError as error:
            spoken = None if self.fed_bytes else other_protocol(data)
            self.refusal = Refusal(400, spoken or f"malformed request: {error}")
        if not self.ready:
            self._measure(len(data) - len(rest))
        return rest

    def _measure(self, size: int) -> None:
        self.fed_bytes += size
        if self.refusal is not None:
            return
        header_bytes_max = self._limits.header_bytes_max
        if not self.in_body:
            if self.fed_bytes > header_bytes_max:
                self.refusal = Refusal(431, f"request line and headers exceed {header_bytes_max} bytes")
        elif self._chunked:
            grown, self._body_fed = len(self._body) > self._body_fed, len(self._body)
            self._idle_bytes = 0 if grown else self._idle_bytes + size
            if self._idle_bytes > header_bytes_max:  # httptools joins the pieces of a header in quadratic time
                self.refusal = Refusal(400, f"trailers exceed {header_bytes_max} bytes")
            elif self.fed_bytes > _CHUNK_OVERHEAD_MAX * self._body_fed + 2 * header_bytes_max:
                self.refusal = Refusal(400, "chunk extensions and trailers outweigh the body")

    def _pass_over_upgrade(self) -> None:
        """Continue after a request for a protocol upgrade, which RFC 9110, 7.8 allows to ignore.

        llhttp treats it as complete after its headers. Its body, if any, is read by a new parser that gets only the
        framing.
        """
        self._parser = httptools.HttpRequestParser(self)
        if not self._upgrading:
            return
        self._upgrading = False
        self._replaying = True
        if self._chunked:
            framing = b"Transfer-Encoding: chunked"
        else:
            framing = b"Content-Length: " + self._headers_taken[b"content-length"]
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)
        self._replaying = False

    # Callbacks of httptools. An exception raised here ends the parsing and is the context of feed_data's exception.

    def on_message_begin(self) -> None:
        self._begun = True

    def on_url(self, part: bytes) -> None:
        if not self._replaying:
            self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        headers = self._headers
        if name in headers:
            self._repeat(name, value)
        else:
            headers[name] = value.strip()

    def _repeat(self, name: bytes, value: bytes) -> None:
        self._repeats += 1
        if name in _SINGLE:
            self._doubled = name  # refused when all headers are read: they decide the form of the response
            return
        if self._repeats > self._limits.header_count_max:
            return  # refused then, too
        if len(self._headers[name]) > self._limits.header_bytes_max:
            raise Refusal(431, f"request line and headers exceed {self._limits.header_bytes_max} bytes")
        self._headers[name] += b", " + value.strip()
        self._duplicates |= {name}

    def on_headers_complete(self) -> None:
        headers = self._headers
        self._headers = {}  # trailers go here and are dropped
        if self._replaying:
            return
        parser = self._parser
        method = _METHODS.get(parser.get_method())
        if method is None:
            raise Refusal(501, "method not implemented")
        self._method = method
        # Without a Connection header only HTTP/1.1 stays open.
        stays_open = b"connection" not in headers and parser.should_keep_alive()
        self._flags = 0 if stays_open else self._uncommon_flags(headers)
        if method == "HEAD":
            self._flags |= HEAD
        if self._target[0] != 0x2F:
            self._split_absolute_form()
        self._headers_taken = headers
        if self._repeats or len(headers) > self._limits.header_count_max or b"host" not in headers:
            self._check_names(headers)
        if not is_host(headers.get(b"host", b"")) or not is_host(self._authority or b""):
            raise self._refusal(400, "the host of a request is a name or an address, with or without a port")
        if self.fed_bytes > self._unmeasured_bytes_max:
            self._measure_headers(headers)
        self.in_body = True
        if b"content-length" in headers:
            try:
                too_long = int(headers[b"content-length"]) > self._limits.body_bytes_max
            except ValueError:  # thousands of leading zeros, which llhttp accepts
                raise Refusal(400, "the content-length has too many digits") from None
            if too_long:
                raise self._body_too_long()
        elif b"transfer-encoding" in headers:
            self._begin_chunked(headers[b"transfer-encoding"])
        if b"expect" in headers:
            self._expect(headers)
        if b"upgrade" in headers and parser.should_upgrade():
            self._upgrading = self._chunked or int(headers.get(b"content-length", b"0")) > 0

    def _uncommon_flags(self, headers: dict[bytes, bytes]) -> int:
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise Refusal(505, f"HTTP/{version} is not spoken here")
        if version == "1.0" and b"transfer-encoding" in headers:
            raise Refusal(400, "HTTP/1.0 has no transfer-encoding")
        if not self._parser.should_keep_alive():
            return CLOSE
        return KEEP_ALIVE if version == "1.0" else 0

    def _check_names(self, headers: dict[bytes, bytes]) -> None:
        if self._doubled is not None:
            raise self._refusal(400, f"more than one {self._doubled.decode()} header")
        if len(headers) + self._repeats > self._limits.header_count_max:
            raise self._refusal(431, f"more than {self._limits.header_count_max} headers")
        if b"host" not in headers and self._parser.get_http_version() == "1.1":
            raise self._refusal(400, "HTTP/1.1 requires a host header")

    def _measure_headers(self, headers: dict[bytes, bytes]) -> None:
        # A repeated header counts 2 bytes for its comma instead of its name; the bytes fed are bounded anyway.
        size = len(self._authority or b"") + len(self._target)
        size += sum(len(name) + len(value) + 4 for name, value in headers.items())
        if size > self._limits.header_bytes_max:
            raise self._refusal(431, f"request line and headers exceed {self._limits.header_bytes_max} bytes")

    def _split_absolute_form(self) -> None:
        target = self._target
        if target == b"*" and self._method == "OPTIONS":
            return
        parts = absolute_form(target)
        if parts is None or parts[0].lower() not in (b"http", b"https"):
            raise Refusal(400, "the target of a request is a path, or a URL of http or https")
        _, authority, target = parts
        if not authority or b"@" in authority:
            raise Refusal(400, "the URL in the request line needs a host, and no user")
        self._authority = authority
        self._target = target if target.startswith(b"/") else b"/" + target

    def _begin_chunked(self, coding: bytes) -> None:
        if coding.lower() != b"chunked":
            raise Refusal(501, "the only transfer-encoding spoken here is chunked")
        self._chunked = True

    def _expect(self, headers: dict[bytes, bytes]) -> None:
        if headers[b"expect"].lower() != b"100-continue":
            raise self._refusal(417, "the only expectation met here is 100-continue")
        self.expects = self._parser.get_http_version() == "1.1"  # RFC 9110, 10.1.1: ignored in HTTP/1.0

    def on_body(self, part: bytes) -> None:
        body = self._body
        if not body:
            self._body = part
        elif isinstance(body, bytearray):
            body += part
        else:
            self._body = bytearray(body) + part
        if len(self._body) > self._limits.body_bytes_max:
            raise self._body_too_long()

    def _body_too_long(self) -> Refusal:
        return self._refusal(413, f"body exceeds {self._limits.body_bytes_max} bytes")

    def _refusal(self, status: int, reason: str) -> Refusal:
        """A refusal of a request whose headers are read."""
        return Refusal(status, reason, self._request(b""))

    def _request(self, body: bytes) -> Request:
        return Request(
            self._method,
            self._target,
            self._headers_taken,
            body,
            self._peer,
            self._secure,
            self._next_id(),
            self._authority,
            self._duplicates,
        )

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        body = self._body
        request = self._request(body if type(body) is bytes else bytes(body))
        self.ready.append((request, self._flags))
        # llhttp refuses what follows a connection's last request: nothing after it is read plainly.
        self._begun = self._flags & CLOSE != 0
        self.in_body = self.expects = self._chunked = False
        self._target = self._body = b""
        self.fed_bytes = self._body_fed = self._idle_bytes = 0
        if self._headers:
            self._headers = {}
        if self._authority is not None:
            self._authority = None
        if self._repeats:
            self._repeats = 0
            self._doubled = None  # of a trailer
            self._duplicates = _NO_DUPLICATES


class HeaderCaseIntake(Intake):
    """Fills `Request.header_case`."""

    __slots__ = ("_header_case",)

    def __init__(self, limits: Limits, peer: str, secure: bool, next_id: Callable[[], str]) -> None:
        self._header_case: dict[bytes, bytes] = {}
        super().__init__(limits, peer, secure, next_id)

    def on_header(self, name: bytes, value: bytes) -> None:
        """As `Intake` has it."""
        small = name.lower()
        if small.startswith(OWN_CASE):
            self._header_case[small] = name
        super().on_header(small, value)

    def on_message_complete(self) -> None:
        """As `Intake` has it."""
        super().on_message_complete()
        if self._header_case and not self._upgrading:
            self.ready[-1][0].header_case = self._header_case
            self._header_case = {}
