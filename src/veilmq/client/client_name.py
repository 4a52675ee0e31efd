"""How this process names itself to servers: with each request, and so in the history of each message.

Strategy: one name for the process, read when a connection or a request is made. By default it says host and process, so
that a history tells which of many workers held a message; `name_client` says something else, or nothing.
"""

import os
import re
import socket
from typing import Final

from veilmq import __version__
from veilmq.model.errors import ParameterInvalid

_NAME: Final = re.compile(r"[ -~]{0,100}")
_OF_HOST: Final = re.compile(r"[^A-Za-z0-9._-]")
_HOST_CHARACTERS_MAX: Final = 63


class _Naming:
    """What was said last; None: host and process."""

    name: str | None = None


def name_client(name: str | None) -> None:
    """What is told of this process from now on: up to 100 printable ASCII characters, an empty text for nothing but the
    release; None: host and process, as before any call. Raises ParameterInvalid."""
    if name is not None and (type(name) is not str or not _NAME.fullmatch(name)):
        raise ParameterInvalid(parameter="name", reason="must be of up to 100 printable ASCII characters")
    _Naming.name = name


def client_name() -> str:
    """`veilmq/VERSION (HOST; pid N)`, or what `name_client` was told."""
    name = _Naming.name
    if name is None:
        host = _OF_HOST.sub("-", socket.gethostname())[:_HOST_CHARACTERS_MAX]
        name = f"{host}; pid {os.getpid()}"
    return f"veilmq/{__version__} ({name})" if name else f"veilmq/{__version__}"
