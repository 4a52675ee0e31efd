"""What a browser sees of a cluster's console while no server carries its requests out: a page that says why.

Strategy: a program is refused with JSON, as by the API. For a browser that refusal becomes a page, wherever the request
was refused: at this server, at the owner, or at a server that was the owner. Any other answer is sent as it came, for
of those nobody can say that nothing was changed. A page that only shows something tries again by itself. Its style
sheet is this server's own meanwhile, since no owner can send it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import msgspec
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
        answer = _Answer(send)
        if not is_static or reaches():
            await app(scope, receive, answer.send)
            if answer.refusal is None:
                return
        console = await run_in_threadpool(_console)
        if is_static or answer.refusal is None:
            found: ASGIApp = Router([console.STATIC])
        else:
            found = _page(scope["method"], settings, answer.refusal)
        await console.guarded(found, settings)(scope, receive, send)

    return shown


class _Refusal(msgspec.Struct):
    """That no owner has answered, in JSON. No other answer can be decoded as one."""

    error: Literal["NotOwner", "StoreUnknown"]
    """Of the second nobody knows whether it was carried out."""
    message: str


class _Answer:
    """Keeps an answer that is a refusal, and sends any other."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        """Of an answer that may be a refusal."""
        self._body = b""
        self.refusal: _Refusal | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in {500, 503}:
            self._start = message
            return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        try:
            self.refusal = msgspec.json.decode(self._body, type=_Refusal)
        except msgspec.MsgspecError:  # a page, say, or of a HEAD, which has no body
            await self._send(self._start)
            await self._send({"type": "http.response.body", "body": self._body})


def _console() -> "ModuleType":
    """It is loaded when it is needed, in a thread: see `veilmq.console`."""
    from veilmq.console import app

    return app


def _page(method: str, settings: Settings, refusal: _Refusal) -> ASGIApp:
    from veilmq.console.showing import page

    is_unknown = refusal.error == "StoreUnknown"
    return page(
        "without-owner.html",
        500 if is_unknown else 503,
        message=refusal.message,
        again_s=_AGAIN_S if method in {"GET", "HEAD"} else 0,
        is_unknown=is_unknown,
        server=settings.server_name,
    )
