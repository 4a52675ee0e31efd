"""The token and the socket of the admin port.

Strategy: kept apart from the port itself, which takes 0.1 s to load. Both are opened before any data port, so that a
start that fails here has acknowledged nothing.
"""

import os
import re
import secrets
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from veilmq.cli.access import TOKEN_FILE
from veilmq.server.config.settings import Address
from veilmq.store.directory import DirectoryUnsafe

BACKLOG: Final = 128
_TOKEN_BYTES: Final = 32
_TOKEN: Final = re.compile(rb"[!-~]{16,2048}")


def token(directory: Path) -> str:
    """The bearer token of the admin port, made at the first start.

    Raises DirectoryUnsafe if others may read it, or if the token cannot be sent in a header or is easy to guess.
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


class AdminEntry:
    """Token and socket, from `open` to the end of the context."""

    bearer: str
    socket: socket.socket

    def __init__(self, address: Address, directory: Path) -> None:
        self._address, self._directory = address, directory
        self._open = ExitStack()
        self.is_open = False

    def open(self) -> None:
        """Raises OSError if the address or the file is not available; DirectoryUnsafe as `token` does."""
        self.bearer = token(self._directory)
        family, _, _, _, where = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.socket = self._open.enter_context(socket.create_server(where[:2], family=family, backlog=BACKLOG))
        self.is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()
