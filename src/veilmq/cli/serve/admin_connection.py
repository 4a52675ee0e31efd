"""One connection of the admin port: uvicorn's own on httptools, with bounds for what strangers may do.

Strategy: httptools bounds neither the size of a request's head nor its time, and joins input in quadratic time: one
endless header would stop the loop, which the data ports share. So `Connection` counts the bytes that neither end a head
nor belong to a body (trailers, too), and a connection that owes a head has a deadline, from its start and after each
response. Bodies need neither: they are read behind access control, within `answers.BODY_BYTES_MAX`; that of a sign-in,
which anybody may send, has bounds of its own. Trailers are dropped, or they would count as headers. uvicorn makes an
exchange of every request that it reads, and reads on with every answer: more than `PIPELINED_MAX` end the connection.
It would stop reading at the first one; with a few it reads on here, or it would not see that the client has gone.

A client that reads nothing of an answer for `UNREAD_S` is dropped; while bytes go out, an answer may take any time.

Beyond `CONNECTIONS_MAX` the oldest connection is dropped that has had no request with a valid token, key or session, as
at the data ports (`KEEP_PLACE`). If each has had one, the newcomer is answered 503.

A client that ends its input after a request gets its answer, as on the data ports; a receive that waits for it is
answered empty at once (`INPUT_ENDED`), because it looks the same as one that was killed. With TLS the event loop closes
such a connection.

Before changing it: uvicorn tells only the newest exchange that the client has gone, not the one that runs; and a write
to a lost connection raises an error in uvloop, which would count as a failure of the server: see `_leave`. uvicorn
writes chunks to an HTTP/1.0 client, which knows none (RFC 9112, 6.1): see `_Unframed`.
"""

import asyncio
import logging
import socket
import struct
from contextlib import suppress
from typing import Any, Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from veilmq.admin.access import REFUSALS
from veilmq.protocols import absolute_form
from veilmq.server.cluster.admin import CLIENT_HEADER, INPUT_ENDED, KEEP_PLACE, KNOWN_HEADER, PASSED_ON
from veilmq.server.http.connection import unread_bytes_of
from veilmq.server.http.intake import other_protocol
from veilmq.server.logs import RefusalLog

HEAD_BYTES_MAX: Final = 64 * 1024
"""Request line and headers, or trailers; not counting what arrives in the same read as their beginning or end."""
HEAD_S: Final = 10.0
"""Deadline for a request's head, and for the first request of a connection to begin."""
CONNECTIONS_MAX: Final = 1_000
PIPELINED_MAX: Final = 32
"""Requests of one connection behind the one that is being answered."""
_READ_ON_MAX: Final = 4
"""Of those, how many do not stop the reading."""
UNREAD_S: Final = 30.0
"""Deadline for a client to take something of an answer that waits for it."""
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"  # it has asked for nothing
)
_FRAMING: Final = (b"content-length", b"transfer-encoding")
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_STRANGERS: Final = "veilmq.strangers"
_DROPS: Final = "veilmq.drops"
log = logging.getLogger("veilmq.admin")


class Connection(HttpToolsProtocol):
    """It is closed without a response when it breaks a bound."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_begun = False
        self._went_on = False
        self._framing = b""
        """The headers that say how long the body is, of a request that asks for another protocol."""
        self._replaying = False
        """Whether a new parser is only given those headers."""
        self._idle_bytes = 0
        """Bytes since a head began or ended, or a part of a body came."""
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_due: asyncio.TimerHandle | None = None
        self._input_ended = asyncio.Event()
        self._running: Any = None
        """The exchange whose answer the application makes; `cycle` may be one that came right behind."""
        self._application, self.app = self.app, self._answer
        # All connections of a server share these.
        self._refusals: RefusalLog = self.app_state.setdefault(REFUSALS, RefusalLog("admin", log))
        self._drops: RefusalLog = self.app_state.setdefault(_DROPS, RefusalLog("admin", log, "dropped", "connection"))
        self._strangers: dict[Connection, None] = self.app_state.setdefault(_STRANGERS, {})
        """Those that have had no request with a valid token, key or session, the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX and not self._make_place():
            self._refused(503, f"more than {CONNECTIONS_MAX} connections")
            transport.write(_FULL)
            transport.close()
            return
        self._strangers[self] = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_no_more()
        self._await_no_reading()
        self._unset_keepalive_if_required()
        self.keep_place()
        self._leave()
        super().connection_lost(exc)

    def _leave(self) -> None:
        """Tell the exchange that runs that its client has gone."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        self._await_no_reading()
        super().resume_writing()

    def _await_reading(self) -> None:
        self._await_no_reading()
        self._unread_due = self.loop.call_later(UNREAD_S, self._expect_reading, unread_bytes_of(self.transport))

    def _expect_reading(self, before_bytes: int) -> None:
        if unread_bytes_of(self.transport) < before_bytes:
            self._await_reading()
        else:
            self.drop(f"it read nothing of an answer for {UNREAD_S:g} s")

    def _await_no_reading(self) -> None:
        if self._unread_due is not None:
            self._unread_due.cancel()
            self._unread_due = None

    def keep_place(self) -> None:
        """It is no stranger's, or not open: do not drop it for a newcomer."""
        self._strangers.pop(self, None)

    def _make_place(self) -> bool:
        """Drop the oldest connection of a stranger. False if there is none."""
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self.connections.discard(oldest)
            oldest.drop("it was the oldest without a valid token, key or session, and the port is full")
        return oldest is not None

    def drop(self, reason: str) -> None:
        """Close without an answer, and without waiting for the client to read what was written."""
        self.keep_place()
        if self._drops.takes(reason):
            log.info("admin: dropped the connection of %s: %s", self._peer, reason)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._went_on = False
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except HttpParserError:
            if not self.transport.is_closing():
                spoken = None if self._running or self._idle_bytes else other_protocol(data)
                self._refused(400, spoken or "no HTTP request")
                self.send_400_response("Invalid HTTP request received.")
        if self.transport.is_closing():
            return
        self._idle_bytes = 0 if self._went_on else self._idle_bytes + len(data)
        if self._idle_bytes > HEAD_BYTES_MAX:
            self.transport.close()
        cycle: Any = self.cycle  # None before the first request
        if self._head_begun or cycle is None or cycle.response_complete:
            self._await_head()

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError."""
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except HttpParserUpgrade as upgrade:
                # It is answered as if the header were not there (RFC 9110, 7.8). llhttp takes it as complete after its
                # headers, and would take its body as the next request.
                rest = rest[upgrade.args[0] :]
                if self._framing:
                    framing, self._framing = self._framing, b""
                    self.parser = HttpRequestParser(self)
                    self._replaying = True
                    self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
                    self._replaying = False

    def eof_received(self) -> bool:  # type: ignore[override] # uvicorn's own closes the connection
        """The client sends nothing more. Returns whether an answer is still owed, and can be written."""
        cycle: Any = self.cycle
        owed = cycle is not None and not cycle.response_complete and not cycle.more_body and not self._head_begun
        if not owed or self.scheme == "https":
            return False
        cycle.keep_alive = False
        self._input_ended.set()
        return True

    def on_message_begin(self) -> None:
        if not self._replaying:
            if len(self.pipeline) >= PIPELINED_MAX:
                self.drop(f"it sent more than {PIPELINED_MAX} requests behind one that is being answered")
                raise HttpParserError("too many requests")
            super().on_message_begin()
            self._head_begun = self._went_on = True

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_begun:
            super().on_header(name, value)

    def on_message_complete(self) -> None:
        if not self._framing:
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._went_on = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        self._head_begun, self._went_on = False, True
        self._await_no_more()
        if self.parser.should_upgrade():
            self._framing = b"".join(b"%b: %b\r\n" % each for each in self.headers if each[0] in _FRAMING)
        parts = absolute_form(self.url)
        if parts is not None:
            _, host, _ = parts  # it replaces the Host header
            self.headers[:] = [each for each in self.headers if each[0] != b"host"] + [(b"host", host)]
        scope: Any = self.scope
        scope[INPUT_ENDED], scope[KEEP_PLACE] = self._input_ended, self.keep_place
        super().on_headers_complete()
        if scope["http_version"] == "1.0":
            self.cycle.__class__ = _Unframed
        if len(self.pipeline) <= _READ_ON_MAX:
            self.flow.resume_reading()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. If an answer to an HTTP/1.0 client fails or ends on the way, the connection is reset, or
        the client would take it for whole."""
        exchange = self._running = cast(Any, receive).__self__
        try:
            await self._application(scope, receive, send)
        finally:
            if scope["http_version"] == "1.0" and not exchange.response_complete:
                with suppress(OSError):
                    connected = self.transport.get_extra_info("socket")
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)

    def _refused(self, status: int, reason: str) -> None:
        self._refusals.write(self._peer, status, reason)

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else "a client"

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _await_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class PassedOn(Connection):
    """Another server of the cluster passes a request on. It has proved itself, and says who the client is."""

    def on_headers_complete(self) -> None:
        scope: Any = self.scope
        given = [value for name, value in self.headers if name == CLIENT_HEADER]
        self.headers[:] = [each for each in self.headers if each[0] != CLIENT_HEADER]
        scope[PASSED_ON] = True
        if given:
            host, _, scheme = given[0].decode("latin-1").rpartition(" ")
            self.client, scope["client"], scope["scheme"] = (host, 0), (host, 0), scheme
        super().on_headers_complete()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same, and tell the other server whether the client is known."""

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start" and self not in self._strangers:
                message = {**message, "headers": [*message.get("headers", ()), (KNOWN_HEADER, b"1")]}
            await send(message)

        await super()._answer(scope, receive, telling)


class _Unframed(RequestResponseCycle):
    """An exchange with an HTTP/1.0 client: an answer without a length ends where its connection does."""

    _ends_with_connection = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            lengths = [value for name, value in message.get("headers", ()) if name.lower() == b"content-length"]
            if not lengths:
                self.chunked_encoding, self._ends_with_connection = False, True
        elif self._ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))  # whatever comes next is as long as expected
        await super().send(message)
