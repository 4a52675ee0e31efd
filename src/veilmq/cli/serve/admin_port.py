"""The admin port: runs the ASGI application of admin/ on uvicorn, in the service's loop, with bounded connections.

Strategy: uvicorn gets an open socket (`AdminEntry`). It must not set up logs or signal handlers: both belong to the
server. It must not cancel requests at shutdown, because it logs a traceback for each; slow requests lose their
connection here instead, as if the client had hung up.

uvicorn on httptools bounds neither the size of a request's head nor its time, and joins input in quadratic time: one
endless header would stop the loop, which the data ports share. So `Connection` counts the bytes that neither end a head
nor belong to a body (trailers, too), and a connection that owes a head has a deadline, from its start and after each
response. Bodies need neither: they are read behind access control, within `answers.BODY_BYTES_MAX`; that of a sign-in,
which anybody may send, has bounds of its own. Trailers are dropped, or they would count as headers. Beyond
`CONNECTIONS_MAX` a connection is answered 503, so that strangers cannot take the open files that the data ports need.

A client that ends its input after a request gets its answer, as on the data ports; a receive that waits for it is
answered empty at once (`INPUT_ENDED`), because it looks the same as one that was killed. With TLS the event loop closes
such a connection.

While another server owns the queues, or this one's lease has ended, health and metrics are this server's own, and the
rest is passed on to the owner, but for events that the own copy has, if the client asks for them with
`VeilMQ-Read: stale-ok`.

Before changing it: uvicorn writes chunks to an HTTP/1.0 client, which knows none (RFC 9112, 6.1): see `_Unframed`.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, cast
from urllib.parse import parse_qsl

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from veilmq.admin.access import CALLER, INPUT_ENDED, REFUSALS, Caller
from veilmq.admin.api import Refused
from veilmq.admin.app import create_copy_app, create_own_app, of_one_copy
from veilmq.admin.history.feed import PATH, READ_HEADER, reads_copy
from veilmq.admin.metrics import of_a_follower
from veilmq.cli.serve import BACKLOG, AdminEntry
from veilmq.cli.serve.without_owner import shown_to_browsers
from veilmq.console import application
from veilmq.model.errors import VeilError
from veilmq.protocols import absolute_form
from veilmq.server.cluster.admin import CLIENT_HEADER, PASSED_ON, passing_on, while_owner
from veilmq.server.config.settings import Address, Settings
from veilmq.server.http.handshakes import Factory, Handshakes
from veilmq.server.logs import RefusalLog
from veilmq.server.service import Service
from veilmq.store import Store
from veilmq.store.log import Follower

HEAD_BYTES_MAX: Final = 64 * 1024
"""Request line and headers, or trailers; not counting what arrives in the same read as their beginning or end."""
HEAD_S: Final = 10.0
"""Deadline for a request's head, and for the first request of a connection to begin."""
CONNECTIONS_MAX: Final = 1_000
_TOLD_FULL_MAX: Final = 64
"""Connections beyond them that hear so over TLS; more are dropped before their handshake."""
_HANDSHAKES_MAX: Final = CONNECTIONS_MAX // 4
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"  # it has asked for nothing
)
_FRAMING: Final = (b"content-length", b"transfer-encoding")
_NO_LINGER: Final = struct.pack("ii", 1, 0)


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
        self._input_ended = asyncio.Event()
        self._application, self.app = self.app, self._answer
        # All connections of a server share this.
        self.app_state.setdefault(REFUSALS, RefusalLog("admin", logging.getLogger("veilmq.admin")))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            self._refused(503, f"more than {CONNECTIONS_MAX} connections")
            transport.write(_FULL)
            transport.close()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_no_more()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._went_on = False
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except HttpParserError:
            self._refused(400, "no HTTP request")
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
        scope[INPUT_ENDED] = self._input_ended
        super().on_headers_complete()
        if scope["http_version"] == "1.0":
            self.cycle.__class__ = _Unframed

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. If an answer to an HTTP/1.0 client fails or ends on the way, the connection is reset, or
        the client would take it for whole."""
        exchange: Any = cast(Any, receive).__self__  # `self.cycle` may be of a request that came right behind
        try:
            await self._application(scope, receive, send)
        finally:
            if scope["http_version"] == "1.0" and not exchange.response_complete:
                with suppress(OSError):
                    connected = self.transport.get_extra_info("socket")
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)

    def _refused(self, status: int, reason: str) -> None:
        refusals: RefusalLog = self.app_state[REFUSALS]
        refusals.write(self.client[0] if self.client else "a client", status, reason)

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


_GRACE_S: Final = 2
"""How long current requests may take at shutdown."""
_LEAVE_S: Final = 0.1
"""How long a handler has to notice its lost connection."""
log = logging.getLogger("veilmq.serve")


class _Server(uvicorn.Server):
    _handshakes: Handshakes | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave SIGTERM and SIGINT to the service."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's own, but with bounds for TLS handshakes."""
        await super().startup(sockets=[])
        loop, factory = asyncio.get_running_loop(), cast(Factory, self._connection)
        if self.config.ssl is not None:
            self._handshakes = Handshakes(self.config.ssl, "admin", HEAD_S, self._handshakes_max)
            factory = self._handshakes.before(factory)
        self.servers = [await loop.create_server(factory, sock=each, backlog=BACKLOG) for each in sockets or []]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's own; handshakes end at once."""
        if self._handshakes is not None:
            self._handshakes.drop_all()
        await super().shutdown(sockets)

    def _handshakes_max(self) -> int:
        if self.should_exit:
            return 0
        return min(_HANDSHAKES_MAX, CONNECTIONS_MAX + _TOLD_FULL_MAX - len(self.server_state.connections))

    def _connection(self, kind: type[Connection] = Connection) -> asyncio.Protocol:
        return kind(self.config, self.server_state, self.lifespan.state)

    def passed_on(self) -> asyncio.Protocol:
        """What serves a request that another server passes on."""
        return self._connection(PassedOn)


def _cancellable(app: ASGIApp) -> ASGIApp:
    """The same application; a cancelled request ends without an error, because its connection is lost already."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return answered


class AdminPort:
    """Serves while its context is entered."""

    def __init__(self, service: Service, settings: Settings, entry: AdminEntry) -> None:
        """entry: already open; its opener closes it."""
        config = uvicorn.Config(
            _cancellable(by_role(service, entry, partial(application, service, settings))),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            http=Connection,
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=int(HEAD_S),
        )
        config.load()
        if service.certificate is not None:
            config.ssl = service.certificate.context()
        self._server = _Server(config)
        self._service = service
        self._socket = entry.socket
        host, port = self._socket.getsockname()[:2]
        self.url = f"{'https' if settings.tls_cert else 'http'}://{Address(host, port)}"

    async def __aenter__(self) -> None:
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        if self._service.cluster is not None:
            self._service.cluster.admin = self._server.passed_on

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._service.cluster is not None:
            self._service.cluster.admin = None
        self._server.should_exit = True
        await self._service.turn_away()
        if self._service.leads:
            self._service.shell.stats.dismiss_followers()
        _, late = await asyncio.wait([self._serving], timeout=_GRACE_S)
        if late:
            await self._cut_off()
        await self._serving

    async def _cut_off(self) -> None:
        """Cut off the connections that did not end in time."""
        state = self._server.server_state
        log.warning("admin: connections cut off, not done within %d s: %d", _GRACE_S, len(state.connections))
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(_LEAVE_S)
        for task in list(state.tasks):
            task.cancel()
        self._server.force_exit = True


def by_role(service: Service, entry: AdminEntry, build: Callable[[str], ASGIApp]) -> ASGIApp:
    """The application that fits. build: makes the one over the service's store, which each time as the owner has
    another, with the bearer token."""
    built: tuple[Store, str, ASGIApp] | None = None

    def here() -> ASGIApp | None:
        """None: another server owns the queues, or may by now."""
        nonlocal built
        cluster = service.cluster
        if not service.leads or (cluster is not None and not cluster.holds()):
            return None
        if built is None or built[0] is not service.store or built[1] != entry.bearer:
            app = build(entry.bearer)
            built = service.store, entry.bearer, app if cluster is None else while_owner(cluster.holds, app)
        return built[2]

    elsewhere = None if service.cluster is None else _elsewhere(service, entry, here)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found = here()
        if found is not None and service.cluster is not None:
            receive = _while_token_stays(entry, scope, receive)
        found = found or elsewhere
        assert found is not None
        await found(scope, receive, send)

    cluster = service.cluster
    if cluster is None:
        return app
    return shown_to_browsers(app, service.settings, lambda: cluster.holds() or cluster.following.ready)


def _while_token_stays(entry: AdminEntry, scope: Scope, receive: Receive) -> Receive:
    """The same; but if the token was replaced, no body arrives any more, unless a key sends it. Keys have a check of
    their own (`answers.body_of`). A GET has no body: its answer receives, to notice that the client leaves."""
    if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
        return receive
    bearer = entry.bearer

    async def receiving() -> Message:
        message = await receive()
        if entry.bearer != bearer and message["type"] == "http.request":
            caller: Caller | None = scope.get(CALLER)  # None: at the console
            if caller is None or caller.key is None:
                raise Refused(401, "not_authenticated", "the bearer token has been replaced since the request began")
        return message

    return receiving


def _from_copy(service: Service, entry: AdminEntry) -> Callable[[Scope], Awaitable[ASGIApp | None]]:
    """What answers a request from this server's copy; None: the owner has to."""
    built: tuple[Follower, str, ASGIApp] | None = None

    async def found(scope: Scope) -> ASGIApp | None:
        nonlocal built
        copy = None if service.cluster is None else service.cluster.copy
        if scope["path"] != PATH or scope["method"] != "GET" or (READ_HEADER, b"stale-ok") not in scope["headers"]:
            return None
        members = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        with suppress(VeilError):
            if copy is None or not await run_in_threadpool(reads_copy, copy, members):
                return None
            if built is None or built[:2] != (copy, entry.bearer):
                app = create_copy_app(copy, lambda: service.keyring, service.settings, entry.bearer)
                built = copy, entry.bearer, app
            return built[2]
        return None

    return found


def _elsewhere(service: Service, entry: AdminEntry, here: Callable[[], ASGIApp | None]) -> ASGIApp:
    async def live(request: Request) -> Response:
        """200 while the loop runs."""
        return JSONResponse({"live": True})

    async def ready(request: Request) -> Response:
        """200 if calls reach the owner."""
        state = service.following()
        copy = {"copy": f"it does not follow the log: {state.copy}"} if state.ready and state.copy else {}
        return JSONResponse(
            {
                "ready": state.ready,
                "reasons": {} if state.ready else {"cluster": state.trouble},
                "warnings": copy | of_one_copy(service.settings),
            },
            200 if state.ready else 503,
        )

    async def metrics(request: Request) -> Response:
        """Of its ports, and of its part in the cluster."""
        return await of_a_follower(request, service)

    assert service.cluster is not None
    passed_on = passing_on(service.cluster.reach_admin, here)
    routes = [
        Route("/health/live", live, methods=["GET"]),
        Route("/health/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    built: tuple[str, ASGIApp] | None = None

    def own() -> ASGIApp:
        nonlocal built
        if built is None or built[0] != entry.bearer:
            app = create_own_app(routes, lambda: service.keyring, service.settings, entry.bearer)
            built = entry.bearer, app
        return built[1]

    from_copy = _from_copy(service, entry)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if PASSED_ON in scope:  # and it finds this server to be the owner no more
            state = service.following()
            text = f"{f'server {state.owner} owns the queues now' if state.owner else state.trouble}: try again"
            answer = JSONResponse({"error": "NotOwner", "field": None, "message": text, "data": {}}, 503)
            await answer(scope, receive, send)
        elif scope["path"] in {"/health/live", "/health/ready", "/metrics"}:
            await own()(scope, receive, send)
        else:
            await (await from_copy(scope) or passed_on)(scope, receive, send)

    return app
