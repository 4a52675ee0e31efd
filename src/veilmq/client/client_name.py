"""The name under which this process reports to servers: part of each request, and so of each message's history.

Strategy: the process has one name, read when a connection or a request is made. By default it holds host and process
id, so a history shows which of many workers held a message; `name_client` sets another name, or none.
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
    """The name set last; None: host and process id."""

    name: str | None = None


def name_client(name: str | None) -> None:
    """Set the name that this process reports from now on: up to 100 printable ASCII characters. An empty text reports
    the release only; None goes back to the default, host and process id. Raises ParameterInvalid."""
    if name is not None and (type(name) is not str or not _NAME.fullmatch(name)):
        raise ParameterInvalid(parameter="name", reason="must be of up to 100 printable ASCII characters")
    _Naming.name = name


def client_name() -> str:
    """`veilmq/VERSION (HOST; pid N)`, or the name set by `name_client`."""
    name = _Naming.name
    if name is None:
        host = _OF_HOST.sub("-", socket.gethostname())[:_HOST_CHARACTERS_MAX]
        name = f"{host}; pid {os.getpid()}"
    return f"veilmq/{__version__} ({name})" if name else f"veilmq/{__version__}"
