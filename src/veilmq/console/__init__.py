"""The web console, below /console on the admin port.

Strategy: pages made on the server (Starlette, Jinja) that call `/api/v1` in this process with the rights of the session
(calls.py); every act is a plain form. `application` is the admin application with the console beside it. The console
itself (app.py) is loaded when it is first asked for: templates and pages would make every start a seventh longer.
"""

import asyncio
import re
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from veilmq.admin.app import create_app
from veilmq.admin.service import Service
from veilmq.server.config.settings import Settings

HOME: Final = "/console/"
_HTML: Final = re.compile(r"(^|,)\s*text/html")


def application(service: Service, settings: Settings, token: str) -> ASGIApp:
    """The admin port's application: the API, and the console. `token` may do everything."""
    api = create_app(service, settings, token)
    console = _Later(service, settings, token, api)

    async def either(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == "/console" or path.startswith(HOME)):
            await console(scope, receive, send)
        elif path == "/" and _is_browser(scope):
            await RedirectResponse(HOME, 307)(scope, receive, send)
        else:
            await api(scope, receive, send)

    return either


class _Later:
    """The console, made at its first request."""

    def __init__(self, service: Service, settings: Settings, token: str, api: ASGIApp) -> None:
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


def _is_browser(scope: Scope) -> bool:
    return any(name == b"accept" and _HTML.search(value.decode("latin-1")) for name, value in scope["headers"])
