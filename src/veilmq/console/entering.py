"""Signing in and out: with the admin token, a key, or a link that `veilmq console` asked for.

Strategy: a valid secret opens a session with the rights of that secret, as a cookie that no script sees and
no other site's page sends. The secret itself is in no cookie, address or log. Each wrong attempt delays the next one
of its address; a link needs no delay, for it cannot be guessed.
"""

import re
from hmac import compare_digest
from ipaddress import IPv6Address, ip_address
from typing import Final
from urllib.parse import parse_qsl, urlencode

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from veilmq.admin.access import Access, Caller, key_of, with_token
from veilmq.admin.api import Refused
from veilmq.admin.service import Service
from veilmq.console import HOME
from veilmq.console.sessions import Attempts, Links, Session, Sessions, hashed
from veilmq.console.showing import duration, page
from veilmq.server.config.settings import Settings

FORM_BYTES_MAX: Final = 2 * 1024 * 1024
"""A body of 1 MiB, as a form encodes most texts."""
_FIELDS_MAX: Final = 100
SIGN_IN: Final = "/console/sign-in"
_PAGE: Final = re.compile(r"/console/[!-\[\]-~]{0,2000}")
"""Where a sign-in may lead: a path of ours, without a backslash."""
_CODE_CHARACTERS_MAX: Final = 100
_WRONG: Final = "That is no secret of this server."
_OVER: Final = "The session is over. Sign in again and go on where you were."


class SignInNeeded(Exception):
    """There is no session. is_over: there was one."""

    def __init__(self, is_over: bool = False) -> None:
        super().__init__()
        self.is_over = is_over


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form. Raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Refused(400, "no_form", "expected a form")
    raw = bytearray()
    try:
        async for part in request.stream():
            raw += part
            if len(raw) > FORM_BYTES_MAX:
                raise Refused(413, "body_too_large", f"a form has at most {FORM_BYTES_MAX} bytes")
    except ClientDisconnect:
        raise Refused(400, "body_incomplete", "the connection ended within the form") from None
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_FIELDS_MAX)
    except ValueError:
        raise Refused(400, "no_form", "the form is not UTF-8, or has too many fields") from None
    return dict(pairs)


class Entrance:
    """The routes, and the way from a request to its session."""

    def __init__(self, service: Service, settings: Settings, access: Access, token: str) -> None:
        self._service = service
        self._access = access
        self._token = token.encode()
        self._trusts_proxy = settings.trusted_proxy
        self._sessions = Sessions(service, token)
        self._links = Links()
        self._attempts = Attempts()
        # Cookies are shared by all ports of a host: the name tells this server's data from another's.
        with service.reader.look() as view:
            self._cookie = f"veilmq-{hashed(view.head()[2]).hex()[:12]}"

    async def session_of(self, request: Request, *, is_used: bool = True) -> Session:
        """The session, with its key's grants of now. Raises SignInNeeded."""
        secret = request.cookies.get(self._name(request))
        if secret is None:
            raise SignInNeeded
        session = await self._sessions.find(secret, self._service.clock.now(), is_used=is_used)
        if session is None:
            raise SignInNeeded(is_over=True)
        return session

    async def form(self, request: Request) -> Response:
        """GET: the page of the sign-in. With `code`, of a link, it has one button, so that what only fetches a link
        does not use it up."""
        members = request.query_params
        why = _OVER if "over" in members else ""
        return self._page(_next(members.get("next", HOME)), why, code=members.get("code", "")[:_CODE_CHARACTERS_MAX])

    async def enter(self, request: Request) -> Response:
        """POST: open a session."""
        given = await form_of(request)
        now, address = self._service.clock.now(), _address(request)
        target = _next(given.get("next", HOME))
        if given.get("code"):
            caller = self._links.take(given["code"], now)
            if caller is None:
                return self._page(target, "The link was used, or is older than two minutes: ask for another.", 403)
            return await self._open(request, caller, given, target)
        wait_us = self._attempts.wait_us(address, now)
        if wait_us:
            response = self._page(target, f"Too many wrong attempts: try again in {duration(wait_us)}.", 429)
            response.headers["retry-after"] = str(-(-wait_us // 1_000_000))
            return response
        caller = self._caller(given)
        if caller is None:
            self._attempts.failed(address, now)
            return self._page(target, _WRONG, 403)
        self._attempts.succeeded(address)
        return await self._open(request, caller, given, target)

    def _page(self, target: str, why: str, status: int = 200, code: str = "") -> Response:
        checks = self._service.keyring.checks
        return page("sign-in.html", status, next=target, why=why, checks=checks, code=code)

    def _caller(self, given: dict[str, str]) -> Caller | None:
        keyring = self._service.keyring
        secret = given.get("secret", "").strip()
        key_id = given.get("key", "").strip()
        if key_id:
            try:
                key = key_of(key_id, secret, keyring)
            except Refused:
                return None
            return Caller(key, "", key.account)
        if compare_digest(secret.encode("utf-8", "surrogatepass"), self._token):
            return with_token("", keyring)
        return None

    async def _open(self, request: Request, caller: Caller, given: dict[str, str], target: str) -> Response:
        client = f"console from {_address(request)}"
        reads_only = caller.reads_only or given.get("reads_only") == "on"
        caller = caller._replace(client=client, reads_only=reads_only)
        before = request.cookies.get(self._name(request))
        secret = await self._sessions.open(caller, self._service.clock.now(), before)
        response = RedirectResponse(target, 303)
        self._set(request, response, secret, None)
        return response

    async def leave(self, request: Request) -> Response:
        """POST: end the session."""
        await self._sessions.close(request.cookies[self._name(request)])
        response = RedirectResponse(SIGN_IN, 303)
        self._set(request, response, "", 0)
        return response

    async def link(self, request: Request) -> Response:
        """POST with a bearer token or a key, as the API: a path that signs in once."""
        caller = self._access.caller(request.scope)
        code = self._links.make(caller, self._service.clock.now())
        return JSONResponse({"path": f"{SIGN_IN}?{urlencode({'code': code})}"})

    def _is_secure(self, request: Request) -> bool:
        forwarded = request.headers.get("x-forwarded-proto") if self._trusts_proxy else None
        return (forwarded or request.scope["scheme"]) == "https"

    def _name(self, request: Request) -> str:
        return f"__Host-{self._cookie}" if self._is_secure(request) else self._cookie

    def _set(self, request: Request, response: Response, secret: str, age_s: int | None) -> None:
        response.set_cookie(
            self._name(request),
            secret,
            max_age=age_s,
            path="/",
            secure=self._is_secure(request),
            httponly=True,
            samesite="strict",
        )


def _next(target: str) -> str:
    return target if _PAGE.fullmatch(target) and "//" not in target.partition("?")[0] else HOME


def _address(request: Request) -> str:
    """Whose attempts are counted together: an address, of IPv6 the network of a customer."""
    peer = request.client
    try:
        address = ip_address("" if peer is None else peer.host)
    except ValueError:
        return "unknown"
    return str(IPv6Address(int(address) >> 64 << 64)) if address.version == 6 else str(address)
