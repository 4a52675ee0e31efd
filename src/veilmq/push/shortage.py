"""What this server itself has run out of (open files, memory, threads), which says nothing about an endpoint."""

import errno
import socket
from typing import Final

_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class Shortage(Exception):
    """No call could be made."""


def shortage_of(error: Exception) -> Shortage | None:
    """What is behind the error, if it is ours."""
    if isinstance(error, socket.gaierror):
        try:  # the resolver does not tell; what has no socket to give could not ask either
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
        except OSError as lacking:
            error = lacking
    if isinstance(error, OSError) and error.errno in _OURS:
        return Shortage(error.strerror or str(error))
    return None
