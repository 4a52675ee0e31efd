"""Signing in and out, and who is signed in: sessions, links that sign in once, and the delay of those who guess.

Strategy: a valid secret (the admin token, a key, or a link that `veilmq console` asked for) opens a session with the
rights of that secret, as a cookie that no script sees and no other site's page sends. The secret itself is in no
cookie, address or log. Each wrong attempt delays the next one of its address; a link needs no delay, for it cannot be
guessed.

No clock; everything has a bound. A secret of a session or a link is 32 random bytes that the browser alone has: here is
its hash. A session is void when it was not used for `IDLE_US`, at `AGE_US`, when its key was taken away or when the
server has another token. A browser's own session id is never taken over (fixation). Sessions are rows of the store, so
a restart ends none. Of a row nobody can guess the token or a key's secret: its proof needs the session's.

Before changing it: links, wrong attempts, what acts did and what was sent (`Session.acts`, `sent`) are in memory. After
a restart the API knows an act by its key.
"""

import asyncio
import re
import secrets
from collections import OrderedDict
from hashlib import blake2b
from hmac import compare_digest
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from veilmq.admin.access import Access, Caller, key_of, with_token
from veilmq.admin.api import Refused
from veilmq.console import HOME
from veilmq.console.showing import duration, page
from veilmq.model.errors import VeilError
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US, Instant
from veilmq.model.settings.access import (
    SESSIONS_MAX,
    AccessKey,
    CloseSession,
    OpenSession,
    StoredSession,
    UseSession,
)
from veilmq.server.cluster.admin import KEEP_PLACE
from veilmq.server.config.settings import Settings
from veilmq.server.service import Service

IDLE_US: Final = HOUR_US
AGE_US: Final = 12 * HOUR_US
STORED_US: Final = MINUTE_US
"""How often the store learns that a session is in use."""
LINK_US: Final = 2 * MINUTE_US
LINKS_MAX: Final = 100
SENT_MAX: Final = 10
SENT_CHARACTERS_MAX: Final = 32_768
"""Of all messages that a session keeps to be filled in again."""
ACTS_MAX: Final = 200
"""Acts that a session remembers."""
FREE_FAILURES: Final = 3
"""So many wrong attempts of an address cost nothing."""
FREE_FAILURES_OF_ALL: Final = 50
DELAY_US_MAX: Final = MINUTE_US
ADDRESSES_MAX: Final = 1_000
_FORGIVEN_US: Final = 15 * MINUTE_US
"""An address without an attempt for so long begins anew."""
_EVERYBODY: Final = "*"


def hashed(secret: str) -> bytes:
    """What is kept of a secret of full entropy."""
    return _derived(secret, b"veilmq console")


def _derived(secret: str, purpose: bytes) -> bytes:
    """A digest of the secret that says nothing of its digests for other purposes."""
    return blake2b(secret.encode("utf-8", "surrogatepass"), digest_size=32, person=purpose).digest()


class Done(NamedTuple):
    """What an act of a session did: the text to show, and the page to show it on. asked: a digest of its form."""

    text: str
    location: str
    asked: bytes = b""


class Session:
    """One browser that is signed in."""

    def __init__(self, caller: Caller, secret: str, opened: Instant, used: Instant) -> None:
        self.caller = caller
        self.csrf = _derived(secret, b"veilmq csrf").hex()
        self.opened = opened
        self.used = self.stored = used
        """When it was used last; and what the store has of that."""
        self.acts: OrderedDict[str, Done] = OrderedDict()
        self.sent: list[dict[str, str]] = []
        """What was typed of the messages that were sent last, newest first; only in memory."""
        self.turn = asyncio.Lock()
        """Acts of one session follow each other, so that a second click meets what the first one did."""

    def remember(self, once: str, done: Done) -> None:
        """Keep what the act with that key did, so that it is not done again."""
        self.acts[once] = done
        while len(self.acts) > ACTS_MAX:
            self.acts.popitem(last=False)

    def keep_sent(self, typed: dict[str, str]) -> None:
        """Keep what was sent, and of earlier messages as many as there is room for."""
        kept: list[dict[str, str]] = []
        left = SENT_CHARACTERS_MAX
        for each in [typed, *(one for one in self.sent if one != typed)][:SENT_MAX]:
            characters = sum(map(len, each.values()))
            if characters <= left:
                kept.append(each)
                left -= characters
        self.sent = kept

    @property
    def ends(self) -> Instant:
        """When it is over, unless somebody uses it; no earlier than a use that is not stored yet would make it."""
        return Instant(min(self.used + IDLE_US + STORED_US, self.opened + AGE_US))

    def is_over(self, now: Instant) -> bool:
        """Whether it was unused for too long, or is too old."""
        return now - self.used >= IDLE_US or now - self.opened >= AGE_US


class Sessions:
    """All sessions: rows of the store; and in memory, by the digest of their secrets, those that this server met."""

    def __init__(self, service: Service, token: str) -> None:
        self._service = service
        self._token = token
        self._met: OrderedDict[bytes, Session] = OrderedDict()
        self._turn = asyncio.Lock()
        """So that no look-up brings back a session that is being closed."""

    async def open(self, caller: Caller, now: Instant, before: str | None) -> str:
        """Open a session and end the one `before`; returns the new secret. Beyond `SESSIONS_MAX` the one that was
        unused for longest ends. Raises VeilError."""
        secret = secrets.token_urlsafe(32)
        session, digest = Session(caller, secret, now, now), hashed(secret)
        if before is not None:
            await self.close(before)
        key = None if caller.key is None else caller.key.id
        signed_in = (self._proof(secret, caller.key), key, caller.client, caller.reads_only)
        row = StoredSession(digest, *signed_in, opened=now, used=now, ends=session.ends)
        (outcome,) = await self._service.shell.call(OpenSession(session=row))
        if isinstance(outcome, VeilError):
            raise outcome
        self._keep(digest, session)
        return secret

    async def find(self, secret: str, now: Instant, *, is_used: bool) -> Session | None:
        """The session of a secret, with its key's grants of now; None if there is none any more. is_used: by a person,
        and not by a page that looks for news."""
        digest = hashed(secret)
        session = self._met.get(digest) or await self._stored(secret, digest)
        if session is None:
            return None
        try:
            session.caller = session.caller.after_waiting(self._service.keyring)
        except Refused:
            await self.close(secret)
            return None
        if session.is_over(now):
            await self.close(secret)
            return None
        if is_used:
            session.used = now
            self._keep(digest, session)
            if now - session.stored >= STORED_US:
                session.stored = now
                await self._service.shell.call(UseSession(digest=digest, used=now, ends=session.ends))
        return session

    async def close(self, secret: str) -> None:
        """End a session."""
        digest = hashed(secret)
        async with self._turn:
            self._met.pop(digest, None)
            await self._service.shell.call(CloseSession(digest=digest))

    def _keep(self, digest: bytes, session: Session) -> None:
        self._met[digest] = session
        self._met.move_to_end(digest)
        while len(self._met) > SESSIONS_MAX:
            self._met.popitem(last=False)

    async def _stored(self, secret: str, digest: bytes) -> Session | None:
        """The session as the store has it, if what signed in is still valid."""
        async with self._turn:
            row = await run_in_threadpool(self._row, digest)
            if row is None or digest in self._met:
                return self._met.get(digest)
            keyring = self._service.keyring
            key = None if row.key is None or not keyring.checks else keyring.find(row.key)
            if (key is None) != (row.key is None) or not compare_digest(row.proof, self._proof(secret, key)):
                await self._service.shell.call(CloseSession(digest=digest))
                return None
            caller = with_token(row.client, keyring) if key is None else Caller(key, row.client, key.account)
            session = Session(caller._replace(reads_only=row.reads_only), secret, row.opened, row.used)
            self._keep(digest, session)
            return session

    def _row(self, digest: bytes) -> StoredSession | None:
        with self._service.reader.look() as view:
            return view.session(digest)

    def _proof(self, secret: str, key: AccessKey | None) -> bytes:
        """What only the holder of the secret can compare with the token or the key that signed in."""
        with_key = "" if key is None else f"{key.id} {key.account} {key.secret}"
        given = f"{self._token}\n{with_key}".encode("utf-8", "surrogatepass")
        return blake2b(given, digest_size=32, key=_derived(secret, b"veilmq proof")).digest()


class Links:
    """Codes that sign in once, soon."""

    def __init__(self) -> None:
        self._links: OrderedDict[bytes, tuple[Caller, Instant]] = OrderedDict()

    def make(self, caller: Caller, now: Instant) -> str:
        """A code for the caller. Of more than `LINKS_MAX` the oldest is void."""
        code = secrets.token_urlsafe(32)
        self._links[hashed(code)] = (caller, now)
        while len(self._links) > LINKS_MAX:
            self._links.popitem(last=False)
        return code

    def take(self, code: str, now: Instant) -> Caller | None:
        """The caller of a code, which is void from now on."""
        caller, made = self._links.pop(hashed(code), (None, now))
        return caller if now - made < LINK_US else None


class Attempts:
    """Wrong attempts, by address and of all: each beyond the free ones doubles the wait until the next is looked at."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[int, Instant]] = OrderedDict()

    def wait_us(self, address: str, now: Instant) -> int:
        """How long this address must wait; 0: its attempt is looked at."""
        return max(
            self._left_us(address, FREE_FAILURES, DELAY_US_MAX, now),
            self._left_us(_EVERYBODY, FREE_FAILURES_OF_ALL, SECOND_US, now),
        )

    def _left_us(self, name: str, free: int, delay_us_max: int, now: Instant) -> int:
        count, last = self._failures.get(name, (0, now))
        if count < free or now - last >= _FORGIVEN_US:
            return 0
        delay_us = min(SECOND_US << min(count - free, 16), delay_us_max)
        return max(0, last + delay_us - now)

    def failed(self, address: str, now: Instant) -> None:
        """Count a wrong attempt."""
        for name in (address, _EVERYBODY):
            count, last = self._failures.pop(name, (0, now))
            self._failures[name] = (1 if now - last >= _FORGIVEN_US else count + 1, now)
        while len(self._failures) > ADDRESSES_MAX:
            oldest = next(each for each in self._failures if each != _EVERYBODY)
            del self._failures[oldest]

    def succeeded(self, address: str) -> None:
        """Forget the wrong attempts of an address."""
        self._failures.pop(address, None)


FORM_BYTES_MAX: Final = 6 * 1024 * 1024 + 64 * 1024
"""A message of 1 MiB, of which a form makes at most six times as much (a line feed is `%0D%0A`), and the other
fields."""
SIGN_IN_BYTES_MAX: Final = 16 * 1024
SIGN_IN_S: Final = 10.0
"""How long a form may take that anybody may send."""
_FIELDS_MAX: Final = 100
_AT_ONCE_BYTES: Final = 64 * 1024
SIGN_IN: Final = "/console/sign-in"
SIGN_OUT: Final = "/console/sign-out"
_PAGE: Final = re.compile(r"/console/[!-\[\]-~]{0,2000}")
"""Where a sign-in may lead: a path of ours, without a backslash."""
_CODE_CHARACTERS_MAX: Final = 100
_WRONG: Final = "That is no secret of this server."
_OVER: Final = "The session is over. Sign in again and go on where you were."

_OVER_FORM: Final = (
    "The session is over: what you sent was not done, and what you typed is lost. Sign in and do it again."
)


class SignInNeeded(Exception):
    """There is no session. is_over: there was one."""

    def __init__(self, is_over: bool = False) -> None:
        super().__init__()
        self.is_over = is_over


async def form_of(request: Request, bytes_max: int = FORM_BYTES_MAX, seconds: float | None = None) -> dict[str, str]:
    """The fields of a form. seconds: how long it may take to arrive; None: for ever. Raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Refused(400, "no_form", "expected a form")
    raw = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                raw += part
                if len(raw) > bytes_max:
                    raise Refused(413, "body_too_large", f"this form has at most {bytes_max} bytes")
    except TimeoutError:
        raise Refused(408, "body_incomplete", f"the form did not arrive within {seconds:g} s") from None
    except ClientDisconnect:
        raise Refused(400, "body_incomplete", "the connection ended within the form") from None
    try:
        # A large one takes a second.
        return await run_in_threadpool(_fields, raw) if len(raw) > _AT_ONCE_BYTES else _fields(raw)
    except ValueError:
        raise Refused(400, "no_form", "the form is not UTF-8, or has too many fields") from None


def _fields(raw: bytearray) -> dict[str, str]:
    return dict(parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_FIELDS_MAX))


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
        request.scope[KEEP_PLACE]()
        return session

    async def form(self, request: Request) -> Response:
        """GET: the page of the sign-in. With `code`, of a link, it has one button, so that what only fetches a link
        does not use it up."""
        members = request.query_params
        why = (_OVER_FORM if members["over"] == "form" else _OVER) if "over" in members else ""
        return self._page(_next(members.get("next", HOME)), why, code=members.get("code", "")[:_CODE_CHARACTERS_MAX])

    async def enter(self, request: Request) -> Response:
        """POST: open a session."""
        given = await form_of(request, SIGN_IN_BYTES_MAX, SIGN_IN_S)
        now, address = self._service.clock.now(), _address(request)
        target = _next(given.get("next", HOME))
        kept = {"key": given.get("key", ""), "reads_only": "reads_only" in given}
        if given.get("code"):
            caller = self._links.take(given["code"], now)
            if caller is None:
                why = "The link was used, or is older than two minutes: ask for another."
                return self._page(target, why, 403, **kept)
            return await self._open(request, caller, given, target)
        wait_us = self._attempts.wait_us(address, now)
        if wait_us:
            why = f"Too many wrong attempts: try again in {duration(wait_us)}."
            response = self._page(target, why, 429, **kept)
            response.headers["retry-after"] = str(-(-wait_us // 1_000_000))
            return response
        caller = self._caller(given)
        if caller is None:
            self._attempts.failed(address, now)
            return self._page(target, _WRONG, 403, **kept)
        self._attempts.succeeded(address)
        return await self._open(request, caller, given, target)

    def _page(self, target: str, why: str, status: int = 200, **given: Any) -> Response:
        """given: what the form has already."""
        shown = {"code": "", "key": "", "reads_only": False, "checks": self._service.keyring.checks} | given
        return page("sign-in.html", status, next=target, why=why, **shown)

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
        return (forwarded or request.scope["scheme"]).partition(",")[0].strip() == "https"

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
