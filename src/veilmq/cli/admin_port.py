"""The admin port: the ASGI application of admin/ on uvicorn, in the loop of the service.

Strategy: uvicorn gets its socket handed (admin_entry.py). It may neither set up logs nor take the signals: both are the
server's. Nor does it end requests: it would log a traceback of each, so who takes too long at shutdown loses the
connection here, as if the client had hung up.
"""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from veilmq.admin.app import create_app
from veilmq.admin.connection import HEAD_S, Connection
from veilmq.cli.admin_entry import BACKLOG, AdminEntry
from veilmq.server.service import Service
from veilmq.server.settings import Address, Settings

_GRACE_S: Final = 2
"""For requests under way at shutdown."""
_LEAVE_S: Final = 0.1
"""For what serves a lost connection to notice."""

log = logging.getLogger("veilmq.serve")


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave SIGTERM and SIGINT to the service."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, but that a TLS handshake has a deadline."""
        await super().startup(sockets=[])
        secure, loop = self.config.ssl, asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._connection,
                sock=each,
                backlog=BACKLOG,
                ssl=secure,
                ssl_handshake_timeout=HEAD_S if secure else None,
            )
            for each in sockets or []
        ]

    def _connection(self) -> asyncio.Protocol:
        return Connection(self.config, self.server_state, self.lifespan.state)


def _cancellable(app: ASGIApp) -> ASGIApp:
    """The same; a request that is cancelled ends without an error: its connection is lost already."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return answered


class AdminPort:
    """Answers while it is entered."""

    def __init__(self, service: Service, settings: Settings, entry: AdminEntry) -> None:
        """entry: open; whoever opened it closes it."""
        config = uvicorn.Config(
            _cancellable(create_app(service, settings, entry.bearer)),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            http=Connection,
            ws="none",
            proxy_headers=False,
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        await self._service.turn_away()
        self._service.shell.stats.dismiss_followers()
        _, late = await asyncio.wait([self._serving], timeout=_GRACE_S)
        if late:
            await self._cut_off()
        await self._serving

    async def _cut_off(self) -> None:
        """End what did not end by itself."""
        state = self._server.server_state
        log.warning("admin: %d connections are cut off: not done within %d s", len(state.connections), _GRACE_S)
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(_LEAVE_S)
        for task in list(state.tasks):
            task.cancel()
        self._server.force_exit = True
