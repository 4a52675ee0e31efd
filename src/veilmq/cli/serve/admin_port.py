"""The admin port: runs the ASGI application of admin/ on uvicorn, in the service's loop, with bounded connections.

Strategy: uvicorn gets an open socket (`AdminEntry`). It must not set up logs or signal handlers: both belong to the
server. It must not cancel requests at shutdown, because it logs a traceback for each; slow requests lose their
connection here instead, as if the client had hung up.

While another server owns the queues, or this one's lease has ended, health and metrics are this server's own, and the
rest is passed on to the owner, but for events that the own copy has, if the client asks for them with
`VeilMQ-Read: stale-ok`.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Final, cast
from urllib.parse import parse_qsl

import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from veilmq.admin.access import CALLER, Caller
from veilmq.admin.api import Refused
from veilmq.admin.app import create_copy_app, create_own_app, of_one_copy
from veilmq.admin.history.feed import PATH, READ_HEADER, reads_copy
from veilmq.admin.metrics import of_a_follower
from veilmq.cli.serve import BACKLOG, AdminEntry, admin_connection
from veilmq.cli.serve.admin_connection import Connection, PassedOn
from veilmq.cli.serve.without_owner import shown_to_browsers
from veilmq.console import application
from veilmq.model.errors import VeilError
from veilmq.server.cluster.admin import OWN_PATHS, PASSED_ON, passing_on, while_owner
from veilmq.server.config.settings import Address, Settings
from veilmq.server.http.handshakes import Factory, Handshakes
from veilmq.server.service import Service
from veilmq.store import Store
from veilmq.store.log import Follower

_TOLD_FULL_MAX: Final = 64
"""Connections beyond `CONNECTIONS_MAX` that hear so over TLS; more are dropped before their handshake."""
_HANDSHAKES_MAX: Final = admin_connection.CONNECTIONS_MAX // 4
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
            self._handshakes = Handshakes(self.config.ssl, "admin", admin_connection.HEAD_S, self._handshakes_max)
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
        room = admin_connection.CONNECTIONS_MAX + _TOLD_FULL_MAX - len(self.server_state.connections)
        return min(_HANDSHAKES_MAX, room)

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
            timeout_keep_alive=int(admin_connection.HEAD_S),
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
        elif scope["path"] in OWN_PATHS:
            await own()(scope, receive, send)
        else:
            await (await from_copy(scope) or passed_on)(scope, receive, send)

    return app
