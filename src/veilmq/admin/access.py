"""Access control: checks Host, Origin and credentials before any route sees the request.

Strategy: pure ASGI, so that a streamed response is not delayed. A request gets a `Caller` in its scope: the bearer
token may do everything, an access key (Basic, KEY_ID:SECRET) what it was granted on the queues of its own account.
Health needs neither, nor does /metrics for a loopback peer and Host without proxy headers. No response has CORS
headers, and a request with a foreign Origin is refused, so that no web page can drive a developer's queues.
"""

import base64
import binascii
import logging
import secrets
from collections.abc import Callable, Sequence
from hmac import compare_digest
from ipaddress import ip_address
from typing import Final, NamedTuple

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from veilmq.admin.api import Refused
from veilmq.model.commands import CLIENT_NAME_CHARACTERS_MAX, Origin
from veilmq.model.errors import ParameterInvalid
from veilmq.model.settings.access import AccessKey, Action, Keyring
from veilmq.server.auth import Keys, is_loopback_name
from veilmq.server.cluster.admin import KEEP_PLACE
from veilmq.server.http.intake.plain import is_host
from veilmq.server.logs import RefusalLog

REFUSALS: Final = "veilmq.refusals"
"""In the state of the scope: the RefusalLog of the port."""
CALLER: Final = "veilmq.caller"
"""In the scope: the Caller. A request of the console, within this process, comes with it."""
KEYRING: Final = "veilmq.keyring"
"""In the scope: returns the keys of now."""
READING: Final = frozenset(
    {
        Action.PEEK,
        Action.DESCRIBE_QUEUE,
        Action.LIST_QUEUES,
        Action.DESCRIBE_TOPICS,
        Action.EVENTS,
        Action.SETTINGS,
    }
)
"""Actions of a caller that only reads."""
_ONLY_READS: Final = "this session only reads: to change something, sign in again without `Only look`"
logger = logging.getLogger("veilmq.admin")

_FORWARDED: Final = (b"forwarded", b"x-forwarded-for")
_CREDENTIALS_BYTES_MAX: Final = 4_096
_PATH_CHARACTERS: Final = 200
"""How much of a path the log shows."""


_HOST_REFUSED: Final = (
    "in development mode the admin port answers to loopback names and those of --dev-host, not to %s: use 127.0.0.1 or "
    "localhost, or add that name to --dev-host"
)
_HOST_CHARACTERS_SHOWN: Final = 100


class _SecretWrong(Refused):
    """Unknown key or wrong secret. key_id: only of an existing key; any other id may be a misplaced secret."""

    def __init__(self, key_id: str | None) -> None:
        super().__init__(401, "not_authenticated", "the access key is unknown, or its secret is another")
        self.key_id = key_id


class Caller(NamedTuple):
    """The authenticated caller. Without a key: the holder of the bearer token, or a peer that needs none."""

    key: AccessKey | None = None
    client: str = ""
    home: str | None = None
    """The default account: the key's, or else the only one; None if there are several."""
    bodies: bool = True
    """Whether anybody may read bodies here (`admin_bodies`)."""
    reads_only: bool = False
    """Whether it may do no more than `READING`, whatever its key was granted."""

    def may(self, action: Action, account: str | None = None, queue: str | None = None) -> bool:
        """Whether the caller may do the action on that account's queue (None: on no particular queue)."""
        if self.reads_only and action not in READING:
            return False
        if self.key is None:
            return True
        return account in (None, self.key.account) and self.key.allows(action, queue)

    def check(self, action: Action, account: str | None = None, queue: str | None = None) -> None:
        """Raises Refused (403) if the caller may not."""
        if not self.may(action, account, queue):
            if self._replace(reads_only=False).may(action, account, queue):
                raise Refused(403, "not_granted", _ONLY_READS)
            what = action if queue is None else f"{action} on {account}/{queue}"
            raise Refused(403, "not_granted", f"the key was not granted {what}")

    def check_change(self, action: Action) -> None:
        """The same for a change by an action that may also read."""
        self.check(action)
        if self.reads_only:
            raise Refused(403, "not_granted", _ONLY_READS)

    def check_bodies(self) -> None:
        """Raises Refused (403) if nobody may read bodies here."""
        if not self.bodies:
            raise Refused(403, "bodies_off", "nobody may read bodies of messages at this port (admin_bodies)")

    def after_waiting(self, keyring: Keyring) -> "Caller":
        """The caller with its key's current grants: the credentials may have been reloaded since the request began.
        Raises Refused (401) for a removed key.
        """
        if self.key is None:
            return self
        found = keyring.find(self.key.id)
        if found is None or not self.key.is_still(found):
            raise Refused(401, "not_authenticated", "the access key has been taken away since the request began")
        return self._replace(key=found)

    def whose(self, wanted: str | None) -> str:
        """The requested account, or the caller's default. Raises ParameterInvalid."""
        account = wanted or self.home
        if account is None:
            raise ParameterInvalid(parameter="account", reason="must be given: this server has several accounts")
        return account

    @property
    def origin(self) -> Origin:
        """The origin of the caller's commands, for the history."""
        return Origin("admin", "admin" if self.key is None else self.key.id, self.client)


def with_token(client: str, keyring: Keys) -> Caller:
    """A caller with the bearer token."""
    sole = keyring.sole_account
    return Caller(None, client, None if sole is None else sole.id)


class Access:
    """ASGI middleware. `keyring` is read at each request, because credentials are reloaded."""

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        keyring: Callable[[], Keys],
        base_domain: str | None = None,
        origins: Sequence[str] = (),
        names: Sequence[str] = (),
        *,
        bodies: bool = True,
    ) -> None:
        if len(token) < 16:
            raise ValueError("the admin token has less than 16 characters")
        self._app = app
        self._token = token.encode()
        self._bodies = bodies
        self._keyring = keyring
        self._names = frozenset(name.lower() for name in names)
        self._suffixes = () if base_domain is None else (f".{base_domain.lower()}",)
        self._origins = {origin.encode() for origin in origins if origin != "*"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(8)
        try:
            caller = scope[CALLER].after_waiting(self._keyring()) if CALLER in scope else self.caller(scope)
        except Refused as refused:
            refusals: RefusalLog = scope["state"][REFUSALS]
            if refusals.takes(f"{refused.status} {refused.error}"):
                described = asked(scope, refused.key_id if isinstance(refused, _SecretWrong) else None)
                extra = {"request": request_id}
                logger.info("%s: refused with %d: %s", described, refused.status, refused.message, extra=extra)
            await _refuse(send, refused, request_id)
            return
        scope[CALLER], scope[KEYRING] = caller._replace(bodies=self._bodies), self._keyring
        scope["veilmq.request_id"] = request_id
        await self._app(scope, receive, send)

    def caller(self, scope: Scope) -> Caller:
        """Who sent a request. Raises Refused."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        keyring = self._keyring()
        _check_hosts(scope, headers)
        if sum(name == b"authorization" for name, _ in scope["headers"]) > 1:
            # A proxy in front may have judged the other one.
            raise Refused(400, "authorization_refused", "more than one Authorization header")
        # Load balancers ask for the health in HTTP/1.0 without a Host; browsers always send one.
        if b"host" in headers or not scope["path"].startswith("/health/"):
            self._check_host(headers, keyring)
        client = headers.get(b"user-agent", b"").decode("latin-1")[:CLIENT_NAME_CHARACTERS_MAX]
        if self._needs_nothing(scope, headers):
            return with_token(client, keyring)
        caller = self._known(headers.get(b"authorization", b""), client, keyring)
        scope[KEEP_PLACE]()
        return caller

    def _known(self, authorization: bytes, client: str, keyring: Keys) -> Caller:
        scheme, _, given = authorization.strip().partition(b" ")
        given = given.strip()
        if scheme.lower() == b"bearer":
            if compare_digest(given, self._token):
                return with_token(client, keyring)
            raise Refused(401, "not_authenticated", "the bearer token is not this server's")
        if scheme.lower() == b"basic":
            key = _key_in(given, keyring)
            return Caller(key, client, key.account)
        words = "this is the admin port: send `Authorization: Bearer TOKEN`, the token from the server's data directory"
        raise Refused(401, "not_authenticated", words)

    def _check_host(self, headers: dict[bytes, bytes], keyring: Keys) -> None:
        """Development mode accepts only loopback names (DNS rebinding); a foreign Origin is refused in every mode."""
        given = headers.get(b"host", b"")
        name = given.decode("latin-1")
        if not keyring.checks and not is_loopback_name(name, self._suffixes, self._names):
            raise Refused(403, "host_refused", _HOST_REFUSED % (name[:_HOST_CHARACTERS_SHOWN] or "an empty Host"))
        origin = headers.get(b"origin")
        if origin is not None and origin not in self._origins and origin.partition(b"://")[2] != given:
            raise Refused(403, "origin_refused", "pages of this Origin may not call this server")

    def _needs_nothing(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        path = scope["path"]
        if path.startswith("/health/"):
            return True
        if path != "/metrics" or any(each in headers for each in _FORWARDED) or not _is_loopback(scope.get("client")):
            return False
        # A page whose name points at loopback comes from a loopback peer, too.
        return is_loopback_name(headers.get(b"host", b"").decode("latin-1"))


def _check_hosts(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """The rules of RFC 9112, 3.2, as on the data ports. Raises Refused (400)."""
    if sum(name == b"host" for name, _ in scope["headers"]) > 1:
        raise Refused(400, "host_refused", "more than one Host header")
    if b"host" not in headers and scope["http_version"] != "1.0":
        raise Refused(400, "host_refused", "HTTP/1.1 requires a host header")
    if not is_host(headers.get(b"host", b"")):
        raise Refused(400, "host_refused", "the host of a request is a name or an address, with or without a port")


def _key_in(given: bytes, keyring: Keyring) -> AccessKey:
    """The access key of Basic credentials (RFC 7617)."""
    try:
        if len(given) > _CREDENTIALS_BYTES_MAX:
            raise ValueError
        key_id, _, secret = base64.b64decode(given, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise Refused(401, "not_authenticated", "Basic credentials are KEY_ID:SECRET in base64") from None
    return key_of(key_id, secret, keyring)


def key_of(key_id: str, secret: str, keyring: Keyring) -> AccessKey:
    """The access key of that id, if this is its secret. Raises Refused."""
    if not keyring.checks:
        raise Refused(401, "not_authenticated", "development mode has no keys: use the bearer token")
    key = keyring.find(key_id)
    expected = b"\0" if key is None else key.secret.encode()
    is_right = compare_digest(secret.encode("utf-8", "surrogatepass"), expected)
    if not is_right or key is None or key.session_token is not None:
        raise _SecretWrong(None if key is None else key_id)
    return key


def asked(scope: Scope, key_id: str | None) -> str:
    """Describe the request and its caller for the log."""
    peer = scope.get("client")
    who = (f" from {peer[0]}" if peer else "") + (f" by {key_id}" if key_id else "")
    return f"{scope['method']} {scope['path'][:_PATH_CHARACTERS]}{who}"


def _is_loopback(peer: tuple[str, int] | None) -> bool:
    try:
        return peer is not None and ip_address(peer[0]).is_loopback
    except ValueError:
        return False


async def _refuse(send: Send, refused: Refused, request_id: str) -> None:
    body = msgspec.json.encode(
        {
            "error": refused.error,
            "field": None,
            "message": refused.message,
            "data": refused.data,
            "request_id": request_id,
        }
    )
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="veilmq"'))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
