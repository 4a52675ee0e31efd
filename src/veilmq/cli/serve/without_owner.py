"""What a browser sees of a cluster's console while no server carries its requests out: a page that says why.

Strategy: a program is refused with JSON, as by the API. For a browser that refusal becomes a page, wherever the request
was refused: at this server, at the owner, or at a server that was the owner. A page that only shows something tries
again by itself. Its style sheet is this server's own meanwhile, since no owner can send it.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from starlette.concurrency import run_in_threadpool
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from veilmq.console import HOME, is_browser
from veilmq.server.config.settings import Settings

if TYPE_CHECKING:
    from types import ModuleType

_STATIC: Final = f"{HOME}static/"
_AGAIN_S: Final = 5
"""How long a page waits before it tries again."""


def shown_to_browsers(app: ASGIApp, settings: Settings, reaches: Callable[[], bool]) -> ASGIApp:
    """The application of a server of a cluster. reaches: whether this server is the owner, or reaches it."""

    async def shown(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_static = path.startswith(_STATIC)
        if not is_static and not ((path in {"/", "/console"} or path.startswith(HOME)) and is_browser(scope)):
            await app(scope, receive, send)
            return
        refusal = _Refusal(send)
        if not is_static or reaches():
            await app(scope, receive, refusal.send)
            if not refusal.status:
                return
        console = await run_in_threadpool(_console)
        found = Router([console.STATIC]) if is_static else _page(scope["method"], settings, refusal)
        await console.guarded(found, settings)(scope, receive, send)

    return shown


class _Refusal:
    """Keeps an answer that is a refusal in JSON, and sends any other."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        """0: it was sent."""
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in {500, 503}:
            is_json = (b"content-type", b"application/json") in message["headers"]
            self.status = message["status"] if is_json else 0
        if not self.status:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")


def _console() -> "ModuleType":
    """It is loaded when it is needed, in a thread: see `veilmq.console`."""
    from veilmq.console import app

    return app


def _page(method: str, settings: Settings, refusal: _Refusal) -> ASGIApp:
    from veilmq.console.showing import page

    answer = json.loads(refusal.body)
    reads = method in {"GET", "HEAD"}
    return page(
        "without-owner.html",
        refusal.status,
        message=answer["message"],
        again_s=_AGAIN_S if reads else 0,
        is_unknown=answer["error"] == "StoreUnknown",
        server=settings.server_name,
    )
