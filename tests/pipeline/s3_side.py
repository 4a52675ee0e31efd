"""An object store in a process of its own, which loses a request or an answer when it is told to.

    python s3_side.py              S3, by moto
    python s3_side.py HOST:PORT    what listens there, such as azurite

It prints its port, and serves until its standard input ends. `POST /fault?at=NAME&do=STEP[&pid=PID]` arms one fault,
for the next PUT of a key that ends with NAME: `request` is lost; the `answer` is lost, and the key was written; it is
held (`hold`) until the next `/fault`; or the client `PID` is killed, `kill-before` or `kill-after` the key was written.
With `away=1` nobody answers until the next `/fault`. `POST /fault?overwrites=1`: like a store without conditional
writes, it heeds no If-None-Match.

A process of its own: deltalake keeps Python's lock while it lists, and a store in the same process could not answer.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from http.client import HTTPConnection
from typing import Any
from urllib.parse import parse_qsl

from werkzeug.serving import WSGIRequestHandler, make_server

_HOP = {"connection", "keep-alive", "transfer-encoding"}


class Quiet(WSGIRequestHandler):
    def log(self, *given: Any) -> None:
        """Nothing: a lost answer is an error to this server."""

    def make_environ(self) -> Any:
        """With the headers as they came: WSGI has none with an underscore."""
        return super().make_environ() | {"headers": self.headers.items()}


class Faulty:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.fault: dict[str, str] = {}
        self.is_away = False
        self.next = threading.Event()
        """The next `/fault` came."""

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/fault":
            self.fault, self.is_away = dict(parse_qsl(environ["QUERY_STRING"])), False
            self.next.set()
            self.next = threading.Event()
            start("200 OK", [])
            return []
        if environ["PATH_INFO"] == "/armed":
            start("200 OK", [])
            return [b"yes" if self.fault else b"no"]
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
        if step == "hold":
            self.next.wait(60)
            return self.inner(environ, start)  # type: ignore[no-any-return]
        if step in {"answer", "kill-after"}:
            list(self.inner(environ, lambda *given: None))
        if step.startswith("kill"):
            os.kill(pid, signal.SIGKILL)
        return lose(environ)


def lose(environ: dict[str, Any]) -> list[bytes]:
    """As if the network broke."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return []


class Forward:
    """What another server answers."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        headers = {name: value for name, value in environ["headers"] if name.lower() not in _HOP}
        length = environ.get("CONTENT_LENGTH")
        stream = environ["wsgi.input"]
        body = stream.read(int(length)) if length else stream.read() if environ.get("HTTP_TRANSFER_ENCODING") else b""
        connection = HTTPConnection(self.upstream, timeout=60)
        try:
            connection.request(environ["REQUEST_METHOD"], environ["RAW_URI"], body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP]
        start(f"{answer.status} {answer.reason}", kept)
        return [content]


def main(upstream: str = "") -> None:
    if upstream:
        inner: Any = Forward(upstream)
    else:
        from moto.server import DomainDispatcherApplication, create_backend_app

        inner = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, Faulty(inner), threaded=True, request_handler=Quiet)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
