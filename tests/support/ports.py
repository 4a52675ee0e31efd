"""Ports for servers whose port numbers a test must know before they start, or that keep theirs over restarts.

A port that was chosen and closed again is free: before its server listens there, the kernel may give it to whoever asks
for any port, another test's server or the next choice of the same test. So a port stays bound while it is used. A
socket that is bound and does not listen refuses connections, the kernel gives its port to nobody who asks for any, and
a server that asks for this one gets it, provided that it sets SO_REUSEADDR, as servers do.
"""

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

ANY: Final = tuple(f"--{name}=127.0.0.1:0" for name in ("sqs", "azure", "mns", "admin"))
"""Options of a server that takes free ports: also of one that must not start, for it may look at its ports first."""


@contextmanager
def kept_ports(count: int, *hosts: str) -> Iterator[list[int]]:
    """Free ports, kept for the block's own servers. hosts: free at all of these; 127.0.0.1 if none is given."""
    first, *others = hosts or ("127.0.0.1",)
    with contextlib.ExitStack() as kept:

        def bound(host: str, port: int = 0) -> int:
            each = kept.enter_context(socket.socket())
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind((host, port))
            return int(each.getsockname()[1])

        ports = [bound(first) for _ in range(count)]
        for host in others:
            for port in ports:
                bound(host, port)
        yield ports
