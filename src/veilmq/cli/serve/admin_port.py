"""The admin port: runs the ASGI application of admin/ on uvicorn, in the service's loop.

Strategy: uvicorn gets an open socket (admin_entry.py). It must not set up logs or signal handlers: both belong to the
server. It must not cancel requests at shutdown, because it logs a traceback for each; slow requests lose their
connection here instead, as if the client had hung up.
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
from veilmq.cli.serve.admin_connection import HEAD_S, Connection
from veilmq.cli.serve.admin_entry import BACKLOG, AdminEntry
from veilmq.server.config.settings import Address, Settings
from veilmq.server.service import Service

_GRACE_S: Final = 2
"""How long current requests may take at shutdown."""
_LEAVE_S: Final = 0.1
"""How long a handler has to notice its lost connection."""
log = logging.getLogger("veilmq.serve")


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave SIGTERM and SIGINT to the service."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's own, but with a deadline for TLS handshakes."""
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
        """Cut off the connections that did not end in time."""
        state = self._server.server_state
        log.warning("admin: %d connections are cut off: not done within %d s", len(state.connections), _GRACE_S)
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(_LEAVE_S)
        for task in list(state.tasks):
            task.cancel()
        self._server.force_exit = True
