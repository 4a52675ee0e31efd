"""A data port: accepts connections, passes complete requests to one handler, and closes without cutting off a response.

Strategy: `Listener` holds what the connections of one port share: handler, limits, counters, the coarse clock and the
cached Date. One timer ticks once a second, moves that clock and checks every connection's deadline. A scan of 10,000
takes 0.12 ms (measured), and a request sets no timer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from itertools import chain, count
from operator import attrgetter
from typing import Any, Final, TypeAlias

from veilmq.engine.long_polls import Unread
from veilmq.model.instant import SECOND_US
from veilmq.protocols import Request, Response
from veilmq.server.clock import wall
from veilmq.server.http import CLOSE, Answers, Limits
from veilmq.server.http.connection import OVERFLOW_MAX, Connection
from veilmq.server.http.exchange import Exchange
from veilmq.server.http.handshakes import Factory, Handshakes
from veilmq.server.http.intake import Intake, Refusal
from veilmq.server.logs import RefusalLog

_LAST_DIGITS: Final = [f"{number:03x}" for number in range(1 << 12)]
"""The last digits of a request id; the digits before them are formatted once for 4,096 ids."""
log = logging.getLogger("veilmq.listener")

_HELD_FOR: Final = attrgetter("held_for")

Handler: TypeAlias = Callable[[Request, Exchange], None]
"""Called on the loop when a request is complete; answers through the exchange, now or later."""
Refuse: TypeAlias = Callable[[int, str, Request | None, str], Response]
"""(status, reason, the request if its headers were read, request id) -> the response, in the protocol's own form, to
what HTTP or a limit forbids."""
Failure: TypeAlias = Callable[[Request], Response]
"""The answer to a request whose handler raised."""


def refuse_plainly(status: int, reason: str, request: Request | None, request_id: str) -> Response:
    return Response(status, b"text/plain; charset=utf-8", f"{reason} (request {request_id})\n".encode())


def fail_plainly(request: Request) -> Response:
    return Response(500, b"text/plain; charset=utf-8", f"internal error (request {request.request_id})\n".encode())


async def listen(
    host: str,
    port: int,
    handler: Handler,
    limits: Limits | None = None,
    *,
    ssl: ssl.SSLContext | None = None,
    name: str = "http",
    refuse: Refuse = refuse_plainly,
    failure: Failure = fail_plainly,
    intake: type[Intake] = Intake,
    unread: Unread | None = None,
    opened: socket.socket | None = None,
    server: bytes = b"",
) -> Listener:
    """Open a port on the running loop. port 0 takes a free one: see `Listener.address`.

    host: a name or an address, IPv6 without brackets. name: for logs and metrics. intake: the parser of requests.
    unread: counts the answers that clients have not read; None: only this port's.
    opened: a socket that listens already, instead of host and port.
    server: the header Server of all answers; empty: none.
    Raises OSError if the address is not available, for example because the port is in use.
    """
    listener = Listener(handler, limits or Limits(), ssl is not None, name, refuse, failure, intake, unread, server)
    await listener.open(host, port, ssl, opened)
    return listener


class Listener:
    """One open data port, on the loop that opened it.

    connections: the open ones, including those about to close. held_bytes: input of unfinished requests.
    requests, refusals, failures, bytes_received, bytes_sent: counters since the start.
    """

    __slots__ = (
        "_date_timer", "_empty", "_failure", "_refusals", "_refuse", "_server", "_timer", "answers", "bytes_received",
        "bytes_sent", "closing", "connections", "failures", "handler", "handshakes", "held_bytes", "idle_due", "intake",
        "limits", "loop", "name", "next_request_id", "now", "refusals", "requests", "secure", "strangers", "unread",
    )  # fmt: skip

    _server: asyncio.Server
    _timer: asyncio.TimerHandle
    _date_timer: asyncio.TimerHandle

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        secure: bool,
        name: str,
        refuse: Refuse,
        failure: Failure,
        intake: type[Intake],
        unread: Unread | None,
        server: bytes,
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.secure = secure
        self.name = name
        self._refuse = refuse
        self._failure = failure
        self.intake = intake
        self.unread = unread or Unread(limits.held_bytes_max)
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time()
        self.idle_due = self.due(limits.idle_s)
        self.answers = Answers(server)
        self._refusals = RefusalLog(name, log)
        self.connections: set[Connection] = set()
        self.strangers: dict[Connection, None] = {}
        """Those that have had no request with a valid key, the oldest first."""
        self.requests = self.refusals = self.failures = 0
        self.bytes_received = self.bytes_sent = self.held_bytes = 0
        self.handshakes: Handshakes | None = None
        self.closing = False
        self._empty: asyncio.Future[None] | None = None
        # A random half makes it unique, a counter makes it cheap.
        seed = os.urandom(14).hex()
        form = f"{seed[:8]}-{seed[8:12]}-4{seed[12:15]}-8{seed[15:18]}-%09x"
        blocks = (map((form % number).__add__, _LAST_DIGITS) for number in count(int(seed[18:26], 16)))
        self.next_request_id = chain.from_iterable(blocks).__next__

    async def open(self, host: str, port: int, context: ssl.SSLContext | None, opened: socket.socket | None) -> None:
        limits = self.limits
        where: dict[str, Any] = {"host": host, "port": port} if opened is None else {"sock": opened}
        factory: Factory = partial(Connection, self)
        if context is not None:
            deadline_s, bound = limits.header_deadline_s, self._handshakes_max
            # By default it cuts off a last answer that is not read soon; the connections' own deadlines do better.
            self.handshakes = Handshakes(context, self.name, deadline_s, bound, shutdown_s=86_400.0)
            factory = self.handshakes.before(factory)
        self._server = await self.loop.create_server(factory, **where, backlog=limits.accept_backlog)
        self._timer = self.loop.call_later(limits.tick_s, self._tick)
        self._tick_date()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first socket; the port is the one that the system assigned."""
        return self._addresses()[0]

    def _handshakes_max(self) -> int:
        """A quarter of the connections, but at least as many as the loop may accept in one turn, before it reads from
        any of them. All together stay within the open files that the settings count with."""
        if self.closing:
            return 0
        limits = self.limits
        room = limits.connections_max + OVERFLOW_MAX - len(self.connections)
        return min(room, max(limits.accept_backlog, limits.connections_max // 4))

    @property
    def urls(self) -> tuple[str, ...]:
        """One URL for each address of the host name."""
        scheme = "https" if self.secure else "http"
        return tuple(
            f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
            for host, port in self._addresses()
        )

    def _addresses(self) -> list[tuple[str, int]]:
        return [each.getsockname()[:2] for each in self._server.sockets]

    async def close_gracefully(self, deadline_s: float) -> None:
        """Stop accepting, answer current requests with `Connection: close`, and drop the rest at the deadline.

        Returns within deadline_s; then nothing of this listener is left on the loop.
        """
        self.closing = True
        self._server.close()
        if self.handshakes is not None:
            self.handshakes.drop_all()
        for connection in list(self.connections):
            connection.finish()
        await self._emptied(deadline_s)
        if self.connections:
            log.warning("%s: connections dropped at the end of the grace period: %d", self.name, len(self.connections))
            for connection in list(self.connections):
                connection.drop()
            await self._emptied(None)
        self._timer.cancel()
        self._date_timer.cancel()
        await self._server.wait_closed()

    async def _emptied(self, deadline_s: float | None) -> None:
        if self.connections:
            self._empty = self.loop.create_future()
            await asyncio.wait([self._empty], timeout=deadline_s)

    # What the connections call.

    def due(self, after_s: float) -> float:
        """The deadline of something that begins now and may last `after_s`, on the loop's clock."""
        return self.now + after_s + self.limits.tick_s

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.strangers.pop(connection, None)
        if self._empty is not None and not self.connections and not self._empty.done():
            self._empty.set_result(None)

    def make_place(self) -> bool:
        """Drop the oldest connection that has had no request with a valid key. False if there is none.

        No answer to a client that has shown its key is cut off by that, and the newcomer may be such a client. A client
        whose first request is still arriving counts as a stranger, too.
        """
        oldest = next(iter(self.strangers), None)
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.drop()
        reason = "it was the oldest without a valid key, and the port is full"
        if self._refusals.takes(reason):
            log.info("%s: dropped the connection of %s: %s", self.name, oldest.peer, reason)
        return True

    def make_room(self) -> None:
        """Refuse unfinished requests until an eighth of `held_bytes_max` is free: those of strangers, then those of
        clients that have shown a valid key, and of each first those that have been arriving for longest. If the newest
        were refused, a client that sends slowly could keep out all others for minutes."""
        enough_bytes = self.limits.held_bytes_max * 7 // 8
        for connection in sorted((each for each in self.connections if each.holds_input), key=_HELD_FOR):
            if self.held_bytes <= enough_bytes:
                return
            connection.turn_out()

    def fail(self, exchange: Exchange, error: Exception) -> None:
        """The handler raised. This is the one place that catches any exception."""
        self.failures += 1
        request = exchange.request
        log.error("%s: a request failed", self.name, exc_info=error, extra={"request": request.request_id})
        if not exchange.answered:
            exchange.respond(self._failure_of(request))

    def _failure_of(self, request: Request) -> Response:
        try:
            return self._failure(request)
        except Exception as error:
            extra = {"request": request.request_id}
            log.error("%s: the failed request gets a plain answer", self.name, exc_info=error, extra=extra)
            return fail_plainly(request)

    def unwritable(self, request: Request, flags: int, error: ValueError) -> bytes:
        """The response that replaces one that cannot be written."""
        self.failures += 1
        log.error("%s: no answer can be written", self.name, exc_info=error, extra={"request": request.request_id})
        return self.answers.write(fail_plainly(request), flags)

    def refusal_answer(self, refusal: Refusal, peer: str) -> bytes:
        self.refusals += 1
        request = refusal.request
        request_id = self.next_request_id() if request is None else request.request_id
        self._refusals.write(peer, refusal.status, refusal.reason, request_id)
        try:
            return self.answers.write(self._refuse(refusal.status, refusal.reason, request, request_id), CLOSE)
        except Exception as error:
            text, extra = "%s: the refused request gets a plain answer", {"request": request_id}
            log.error(text, self.name, exc_info=error, extra=extra)
            return self.answers.write(refuse_plainly(refusal.status, refusal.reason, request, request_id), CLOSE)

    def _tick_date(self) -> None:
        """Update the Date as a second begins: no Date may be older than the times in the body."""
        self.answers.tick()
        self._date_timer = self.loop.call_later(1 - wall() % SECOND_US / SECOND_US, self._tick_date)

    def _tick(self) -> None:
        now = self.loop.time()
        tick_s = self.limits.tick_s
        self._timer = self.loop.call_later(tick_s, self._tick)
        stalled_s = now - self.now - tick_s
        self.now = now
        self.idle_due = self.due(self.limits.idle_s)
        if stalled_s > 2 * tick_s:
            for connection in self.connections:
                connection.postpone(stalled_s)
        for connection in [each for each in self.connections if each.deadline <= now]:
            connection.expire(now)
