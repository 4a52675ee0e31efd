"""An S3 store (moto) in a process of its own, which loses a request or an answer when it is told to.

    python s3_side.py

It prints its port, and serves until its standard input ends. `POST /fault?at=NAME&do=STEP[&pid=PID]` arms one fault,
for the next PUT of a key that ends with NAME: `request` is lost; the `answer` is lost, and the key was written; or the
client `PID` is killed, `kill-before` or `kill-after` the key was written. With `away=1` nobody answers until
the next `/fault`. `POST /fault?overwrites=1`: like a store without conditional writes, it heeds no If-None-Match.

A process of its own: deltalake keeps Python's lock while it lists, and a store in the same process could not answer.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class Quiet(WSGIRequestHandler):
    def log_request(self, *given: Any) -> None:
        """Nothing."""


class Faulty:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.fault: dict[str, str] = {}
        self.is_away = False

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/fault":
            self.fault, self.is_away = dict(parse_qsl(environ["QUERY_STRING"])), False
            start("204 No Content", [])
            return []
        at = self.fault.get("at")
        if "overwrites" in self.fault:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if self.is_away:
            return lose(environ)
        if environ["REQUEST_METHOD"] != "PUT" or at is None or not environ["PATH_INFO"].endswith(at):
            return self.inner(environ, start)  # type: ignore[no-any-return]
        step = self.fault["do"]
        self.is_away, pid = self.fault.get("away") == "1", int(self.fault.get("pid", 0))
        self.fault = {}
        if step in {"answer", "kill-after"}:
            list(self.inner(environ, lambda *given: None))
        if step.startswith("kill"):
            os.kill(pid, signal.SIGKILL)
        return lose(environ)


def lose(environ: dict[str, Any]) -> list[bytes]:
    """As if the network broke."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return []


def main() -> None:
    app = Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
