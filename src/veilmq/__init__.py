"""VeilMQ: a durable message queue built around the visibility timeout.

A received message is veiled from everyone else for a lease; its worker extends the lease while it works and deletes
the message when it is done; a crashed worker's message comes back by itself. This package imports nothing by itself, so
that `import veilmq` costs nothing and works without any extra: import the rooms you need. `veilmq.connect` and
`veilmq.connect_account` import the client when they are first used (PEP 562).
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  where pip was not asked, as in a checkout on the path
    _FOUND = f"{sys.version_info[0]}.{sys.version_info[1]}"
    raise ImportError(f"VeilMQ needs Python 3.11 or later, and this is {_FOUND}: python3.11 -m venv .venv")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from veilmq.client.adapters.connect import connect, connect_account

__version__ = "0.2.0.dev0"
__all__ = ["__version__", "connect", "connect_account"]


if not TYPE_CHECKING:  # a type checker would take each name that is misspelt for one of these

    def __getattr__(name: str) -> "Any":
        if name in {"connect", "connect_account"}:
            from veilmq.client.adapters import connect as door

            return getattr(door, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
