"""Calls of `/api/v1` in this process: the same routes, checks and errors as over HTTP, without a socket.

Strategy: a call is a request to the admin application that already has its caller in its scope, which no client can put
there (`Access` leaves such a request alone). So a page can show or do nothing that the API would refuse, and what the
API learns to do the console can call. Answers are JSON, so numbers are exact.
"""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message

from veilmq.admin.access import CALLER, INPUT_ENDED, REFUSALS, Caller
from veilmq.model.settings.queue import QueueKey

_SHARED: Final = ("type", "asgi", "http_version", "scheme", "client", "server", INPUT_ENDED)


class ApiRefused(Exception):
    """An answer that is no success: status, the error's name, its message, all of it."""

    def __init__(self, status: int, answer: Mapping[str, Any]) -> None:
        self.status = status
        self.error = str(answer.get("error", ""))
        self.message = str(answer.get("message", ""))
        self.field: str | None = answer.get("field")
        self.data: Mapping[str, Any] = answer.get("data") or {}
        super().__init__(f"{status} {self.error}: {self.message}")


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
            "state": {REFUSALS: self._scope["state"][REFUSALS]},
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
