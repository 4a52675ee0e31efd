"""Notifies the service manager that the server is ready or stopping, by systemd's notification protocol.

Strategy: one datagram to the socket that NOTIFY_SOCKET names, as sd_notify(3) sends it. If nobody listens there, that
is logged and the server serves all the same.
"""

import logging
import socket
from typing import Final

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"

log = logging.getLogger("veilmq.serve")


def notify(address: str | None, state: str) -> None:
    """Send the state (sd_notify(3)) to a socket: a path, or @ and an abstract name; nothing without one."""
    if not address:
        return
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.setblocking(False)
            manager.sendto(state.encode(), name)
    except (OSError, ValueError) as error:
        log.warning("NOTIFY_SOCKET %s cannot be told %s: %s", address, state, error)
