"""The console's application: its routes, what its errors look like, and what every request and answer must pass.

Strategy: every answer passes the guard; every page but the sign-in has a session (sessions.py).

The guard is pure ASGI, around all routes. Host is compared with a list in every mode: a name that points at this
machine (DNS rebinding) is not on it, and a literal address cannot be pointed elsewhere. A POST must bear an Origin, and
that of this very host; browsers always send it, and a program sends its credentials instead. The headers forbid
everything that the pages do not need.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from importlib.resources import files
from ipaddress import ip_address
from typing import Final
from urllib.parse import quote, unquote, urlencode, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from veilmq.admin.access import Access
from veilmq.admin.api import STATUS, Refused, described
from veilmq.console import HOME, ApiRefused, Calls
from veilmq.console.pages import PAGES
from veilmq.console.sessions import SIGN_IN, SIGN_OUT, Entrance, Session, SignInNeeded
from veilmq.console.showing import page
from veilmq.console.visit import Visit
from veilmq.model.errors import VeilError
from veilmq.model.instant import SECOND_US
from veilmq.server.auth import is_loopback_name
from veilmq.server.config.settings import Settings
from veilmq.server.http.intake.plain import is_host
from veilmq.server.service import Service

_FILES: Final = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_BUG: Final = 500
_VISIT: Final = "veilmq.visit"
"""In a request's scope: its visit, so that the page of an error has the head of all pages."""
NEWS_US: Final = 2 * SECOND_US
"""How long an answer to one page's script also serves others; each script asks every three seconds."""
NEWS_MAX: Final = 256
logger = logging.getLogger("veilmq.console")

Shown = Callable[[Visit], Awaitable[Response]]


class KeptNews:
    """The last answers to scripts of open pages, by who asks and what. Ten browsers that watch one page then cost about
    as much as one."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, str], tuple[int, Response]] = {}

    def of(self, asked: tuple[str, str, str], now: int) -> Response | None:
        """The answer, if it is not older than `NEWS_US`."""
        at, answer = self._kept.get(asked, (0, None))
        return answer if 0 <= now - at < NEWS_US else None

    def keep(self, asked: tuple[str, str, str], now: int, answer: Response) -> None:
        """Keep an answer, unless the page is to be loaded again."""
        self._kept.pop(asked, None)
        if "etag" in answer.headers:
            self._kept[asked] = now, answer
        if len(self._kept) > NEWS_MAX:
            del self._kept[next(iter(self._kept))]


def console(service: Service, settings: Settings, token: str, api: Starlette) -> ASGIApp:
    """The application of everything below /console. api: the admin application; `token` may do everything there."""
    access = Access(api, token, lambda: service.keyring, settings.base_domain, names=settings.dev_host)
    entrance = Entrance(service, settings, access, token)
    # It reads them through the admin API.
    shows_bodies = settings.console_bodies and settings.admin_bodies

    def visit_of(request: Request, session: Session) -> Visit:
        calls, now = Calls(api, request, session.caller), service.clock.now()
        in_cluster = service.cluster is not None
        return Visit(request, session, calls, now, shows_bodies=shows_bodies, in_cluster=in_cluster)

    def visited(shown: Shown) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            visit = visit_of(request, await entrance.session_of(request, is_used=True))
            request.scope[_VISIT] = visit
            return await shown(visit)

        return endpoint

    news = KeptNews()

    def polled(shown: Shown) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            session = await entrance.session_of(request, is_used=False)
            key = session.caller.key
            asked = ("" if key is None else key.id, request.url.path, request.url.query)
            visit = visit_of(request, session)
            answer = news.of(asked, visit.now)
            if answer is None:
                answer = await shown(visit)
                news.keep(asked, visit.now, answer)
            return _unless_known(request, answer)

        return endpoint

    async def failed(request: Request, error: Exception) -> Response:
        """A bug: the log has the error, and it is counted as the API's are."""
        logger.error("%s %s: failed", request.method, request.url.path[:200], exc_info=error)
        api.state.count_failure(request)
        return _error(request, _BUG, "The server failed; its log says why.")

    async def leave(visit: Visit) -> Response:
        await visit.checked_form()
        return await entrance.leave(visit.request)

    routes = [
        Route("/console", _home, methods=["GET"]),
        Route(SIGN_IN, entrance.form, methods=["GET"]),
        Route(SIGN_IN, entrance.enter, methods=["POST"]),
        Route("/console/links", entrance.link, methods=["POST"]),
        Route(SIGN_OUT, visited(leave), methods=["POST"]),
        STATIC,
    ]
    for each in PAGES:
        endpoint = polled(each.shown) if each.is_polled else visited(each.shown)
        routes.append(Route(each.path, endpoint, methods=[each.method], name=each.path))
    app = Starlette(
        routes=routes,
        exception_handlers={
            SignInNeeded: _sign_in,
            ApiRefused: _api_refused,
            Refused: _refused,
            VeilError: _veil_error,
            HTTPException: _http_error,
            Exception: failed,
        },
    )
    app.router.redirect_slashes = False
    return guarded(app, settings)


def guarded(app: ASGIApp, settings: Settings) -> ASGIApp:
    """An application of the console, behind the guard."""
    return Guard(app, _hosts(settings), _domains(settings))


def _hosts(settings: Settings) -> list[str]:
    outside = urlsplit(settings.external_url or "").hostname
    return [*settings.console_hosts, *settings.dev_host, *([outside] if outside else [])]


def _domains(settings: Settings) -> list[str]:
    return [] if settings.base_domain is None else [settings.base_domain]


async def _home(request: Request) -> Response:
    return RedirectResponse(HOME, 307)


def _unless_known(request: Request, answer: Response) -> Response:
    """304 if the script has these cells already."""
    headers = {name: answer.headers[name] for name in ("as-of", "etag") if name in answer.headers}
    if "etag" in headers and request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(answer.body, answer.status_code, headers, "application/json")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _FILES:
        return PlainTextResponse("There is no such file.\n", 404)  # also where nobody handles an exception
    return Response((files("veilmq.console") / "static" / name).read_bytes(), media_type=_FILES[name])


STATIC: Final = Route("/console/static/{name}", _static, methods=["GET"])


async def _sign_in(request: Request, error: Exception) -> Response:
    """To the sign-in, and from there back to this page. A page that looks for news gets 401."""
    assert isinstance(error, SignInNeeded)
    if request.headers.get("accept") == "application/json":
        return JSONResponse({"error": "signed_out"}, 401)
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    if request.method == "GET" and request.headers.get("sec-fetch-site") == "cross-site":
        # A link on another site brings no cookie of ours (SameSite=Strict); from our own page it does.
        return page("arriving.html", target=here)
    if request.url.path == SIGN_OUT:  # twice: there is nothing left to do
        return RedirectResponse(SIGN_IN, 303)
    if request.method == "POST":
        members = {"next": _page_of_form(request), "over": "form"}
    else:
        members = {"next": here} | ({"over": "1"} if error.is_over else {})
    return RedirectResponse(f"{SIGN_IN}?{urlencode(members, quote_via=quote)}", 303)


def _page_of_form(request: Request) -> str:
    """Where the form stands that was sent: as the browser says, if that is a page of ours, or as its own path says."""
    # The guard has compared Origin with this host.
    came = request.headers.get("referer", "").removeprefix(request.headers.get("origin", ""))
    path = request.url.path
    for target in (came, path, path.rpartition("/")[0]):
        place = target.partition("?")[0]
        scope = {"type": "http", "method": "GET", "path": unquote(place), "root_path": ""}
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            return target
    return HOME


async def _api_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiRefused)
    return _error(request, error.status, error.words)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _error(request, error.status, error.message, error.error)


async def _veil_error(request: Request, error: Exception) -> Response:
    """What an address names cannot be a queue or a message."""
    assert isinstance(error, VeilError)
    return _error(request, STATUS[type(error)], described(error)["message"])


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "There is no such page.", 405: "This page does not take that method."}
    return _error(request, error.status_code, words.get(error.status_code, error.detail))


def _error(request: Request, status: int, message: str, error: str = "refused") -> Response:
    """As a page; for a program as the API does."""
    if request.headers.get("accept") == "application/json" or "authorization" in request.headers:
        return JSONResponse({"error": error, "field": None, "message": message, "data": {}}, status)
    visit: Visit | None = request.scope.get(_VISIT)
    if visit is None or status == _BUG:
        return page("error.html", status, code=status, message=message, visit=None, back="")
    back = request.url.path.removesuffix("/export") if request.method == "GET" and request.url.query else ""
    if request.method != "GET":
        back = _page_of_form(request)
    return visit.show("error.html", status, code=status, message=message, back=back, nav="")


POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_SAFE: Final = frozenset({"GET", "HEAD"})


class Guard:
    """ASGI middleware. hosts: names beside loopback's, without a port; domains: names below these."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str], domains: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._suffixes = tuple(f".{domain.lower()}" for domain in domains)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        wrong = self._fault(scope)
        app = self._app if wrong is None else PlainTextResponse(wrong + "\n", 403)
        await app(scope, receive, send_guarded)

    def _fault(self, scope: Scope) -> str | None:
        """Why the request is refused; None if it is not."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.takes(hosts[0]):
            return "This Host is not one of this server's: name it in --console-hosts, or use 127.0.0.1."
        if scope["method"] in _SAFE:
            return None
        if "authorization" in headers and "origin" not in headers:  # no page of another site can send that
            return None
        scheme, _, host = headers.get("origin", "").partition("://")
        if scheme not in {"http", "https"} or host != hosts[0]:
            return "Pages of this Origin may not act here."
        return None

    def takes(self, host: str) -> bool:
        """Whether a Host header names this server."""
        if not is_host(host.encode("latin-1")):
            return False
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        return name in self._hosts or is_loopback_name(host, self._suffixes) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
