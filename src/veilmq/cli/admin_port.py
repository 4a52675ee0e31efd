"""The admin port: the ASGI application of admin/ on uvicorn, in the loop of the service.

Strategy: the socket is opened here, so that a port in use is an OSError like any other's; uvicorn only gets it handed.
It may neither set up logs nor take the signals: both are the server's.
"""

import asyncio
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

import uvicorn

from veilmq.admin.app import create_app
from veilmq.admin.connection import Connection
from veilmq.server.service import Service
from veilmq.server.settings import Address, Settings
from veilmq.store.sqlite.directory import DirectoryUnsafe

TOKEN_FILE: Final = "admin-token"
_TOKEN_BYTES: Final = 32
_TOKEN: Final = re.compile(rb"[!-~]{16,2048}")
_GRACE_S: Final = 2
_BACKLOG: Final = 128


def token(directory: Path) -> str:
    """The bearer token of the admin port, made at the first start.

    Raises DirectoryUnsafe if others may read it, or if the file holds what nobody could send or anybody guess.
    """
    path = directory / TOKEN_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            raise DirectoryUnsafe(f"{path} is open to other users: chmod 600 {path}") from None
        found = path.read_bytes().strip()
        if _TOKEN.fullmatch(found):
            return found.decode()
        if found:
            raise DirectoryUnsafe(f"{path} holds no token of 16 ASCII characters or more: remove it") from None
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    made = secrets.token_urlsafe(_TOKEN_BYTES)
    with open(descriptor, "w") as file:
        file.write(made + "\n")
    return made


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave SIGTERM and SIGINT to the service."""
        yield


class AdminPort:
    """Open from the construction on; answers while it is entered."""

    def __init__(self, service: Service, settings: Settings, bearer: str) -> None:
        """Raises OSError if the address cannot be had."""
        config = uvicorn.Config(
            create_app(service, settings, bearer),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            http=Connection,
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        config.load()
        if service.certificate is not None:
            config.ssl = service.certificate.context()
        self._server = _Server(config)
        self._service = service
        self._socket = _open(settings.admin)
        host, port = self._socket.getsockname()[:2]
        self.url = f"{'https' if settings.tls_cert else 'http'}://{Address(host, port)}"

    async def __aenter__(self) -> None:
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._service.shell.stats.dismiss_followers()
        await self._serving
        self._socket.close()


def _open(address: Address) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(where[:2], family=family, backlog=_BACKLOG)
