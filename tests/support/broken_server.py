"""A server that accepts a request and does what the test says, for clients whose connection to the server breaks.

Strategy: one step per connection: hang up, or answer with the given bytes. After the last step the port is closed.
"""

import re
import socket
import threading
from collections.abc import Sequence

HANG_UP = b""
_READ_BYTES = 65_536
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_JOIN_SECONDS = 30


def answer(status: int, body: bytes = b"", *headers: str) -> bytes:
    """An HTTP answer after which the connection closes."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def _read_request(connection: socket.socket) -> None:
    """Until the end of its body, or of the connection: a close before that would reset the answer."""
    read = b""
    while part := connection.recv(_READ_BYTES):
        read += part
        head, end, body = read.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if end and len(body) >= (int(length[1]) if length else 0):
            return


class BrokenServer:
    """Answers as many connections as there are steps."""

    def __init__(self, steps: Sequence[bytes]) -> None:
        self.requests = 0
        self._steps = steps
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        if not steps:
            self._listener.close()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for number, step in enumerate(self._steps, 1):
            connection, _ = self._listener.accept()
            if number == len(self._steps):  # before the answer: a client that retries at once finds the port closed
                self._listener.close()
            with connection:
                _read_request(connection)
                self.requests += 1
                connection.sendall(step)

    def close(self) -> None:
        """Wait for the last step."""
        self._thread.join(_JOIN_SECONDS)
        assert not self._thread.is_alive(), "a step is left"
