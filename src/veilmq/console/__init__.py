"""The web console, below /console on the admin port.

Strategy: pages made on the server (Starlette, Jinja) that call `/api/v1` in this process with the rights of the session
(`Calls`); every act is a plain form. `application` is the admin application with the console beside it. The console
itself (app.py) is loaded when it is first asked for: templates and pages would make every start a seventh longer.

A call is a request to the admin application that already has its caller in its scope, which no client can put there
(`Access` leaves such a request alone). So a page can show or do nothing that the API would refuse, and what the API
learns to do the console can call. Answers are JSON, so numbers are exact.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from veilmq.admin.access import CALLER, Caller
from veilmq.admin.app import create_app
from veilmq.model.settings.queue import QueueKey
from veilmq.server.cluster.admin import INPUT_ENDED
from veilmq.server.config.settings import Settings
from veilmq.server.service import Service

HOME: Final = "/console/"
_HTML: Final = re.compile(r"(^|,)\s*text/html")
_SHARED: Final = ("type", "asgi", "http_version", "scheme", "client", "server", INPUT_ENDED)


def application(service: Service, settings: Settings, token: str) -> ASGIApp:
    """The admin port's application: the API, and the console. `token` may do everything."""
    api = create_app(service, settings, token)
    console = _Later(service, settings, token, api)

    async def either(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == "/console" or path.startswith(HOME)):
            await console(scope, receive, send)
        elif path == "/" and is_browser(scope):
            await RedirectResponse(HOME, 307)(scope, receive, send)
        else:
            await api(scope, receive, send)

    return either


class _Later:
    """The console, made at its first request."""

    def __init__(self, service: Service, settings: Settings, token: str, api: Starlette) -> None:
        self._given = service, settings, token, api
        self._turn = asyncio.Lock()
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._turn:
            if self._app is None:
                await run_in_threadpool(_load)
                from veilmq.console.app import console

                self._app = console(*self._given)
        await self._app(scope, receive, send)


def _load() -> None:
    """In a thread, for it takes 70 ms, in which the loop would answer nobody."""
    import veilmq.console.app  # noqa: F401


def is_browser(scope: Scope) -> bool:
    """Whether it asks for a page."""
    return any(name == b"accept" and _HTML.search(value.decode("latin-1")) for name, value in scope["headers"])


class ApiRefused(Exception):
    """An answer that is no success: status, the error's name, its message, all of it."""

    def __init__(self, status: int, answer: Mapping[str, Any]) -> None:
        self.status = status
        self.error = str(answer.get("error", ""))
        self.message = str(answer.get("message", ""))
        self.field: str | None = answer.get("field")
        self.data: Mapping[str, Any] = answer.get("data") or {}
        super().__init__(f"{status} {self.error}: {self.message}")

    @property
    def words(self) -> str:
        """The message, behind the name of the field that is wrong."""
        words = self.message or self.error
        return f"{self.field}: {words}" if self.field else words


class Calls:
    """The API as one caller may use it, for one request of a browser."""

    def __init__(self, api: ASGIApp, request: Request, caller: Caller) -> None:
        self._api = api
        self._scope = request.scope
        self.caller = caller

    async def get(self, path: str, **members: Any) -> Any:
        """Members of None are left out. Raises ApiRefused."""
        given = {name: value for name, value in members.items() if value not in (None, "")}
        return await self._ask("GET", path, given, b"", "")

    async def act(self, method: str, path: str, members: Mapping[str, Any], once: str) -> Any:
        """Change something; once: the key by which a repetition is known. Raises ApiRefused."""
        return await self._ask(method, path, {}, msgspec.json.encode(members), once)

    async def _ask(self, method: str, path: str, query: Mapping[str, Any], body: bytes, once: str) -> Any:
        headers = [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())]
        if once:
            headers.append((b"idempotency-key", once.encode("ascii")))
        scope: dict[str, Any] = {name: self._scope[name] for name in _SHARED if name in self._scope}
        scope |= {
            "method": method,
            "path": path,
            "raw_path": quote(path).encode(),
            "root_path": "",
            "query_string": urlencode(query).encode(),
            "headers": headers,
            "state": self._scope["state"],
            CALLER: self.caller,
        }
        status, parts, sent = 0, [], False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._api(scope, receive, send)
        answer = msgspec.json.decode(b"".join(parts) or b"null")
        # A server that is not ready answers its health with 503, and that is the answer.
        if status >= 400 and not (isinstance(answer, dict) and "ready" in answer):
            raise ApiRefused(status, answer if isinstance(answer, dict) else {})
        return answer


def queue_path(key: QueueKey, suffix: str = "") -> str:
    """The API's path of a queue."""
    return f"/api/v1/queues/{key.account}/{key.region}/{key.name}{suffix}"
