"""Verifies the sender of a request: SharedKey, SharedKeyLite, a shared access signature or a bearer token.

Strategy: `Verifier` picks the way: SharedKey (shared_key.py), a shared access signature (sas.py) or a bearer token.
Each gives one `Caller` (call.py). The Authorization header decides if there is one, else `sig` in the query. Both keys
of an account are tried. An unknown account is treated like one with wrong keys, so that a stranger learns no names; in
development mode, whose account everybody knows, the refusal names it. A request that is signed itself must be fresh:
its date is within 15 minutes of ours.

The signature of a bearer token is checked by the holder of the issuer's keys (`Tokens`, an interface given to the
codec: this room imports no cryptography). The claims are checked here: audience, times, and whether the account knows
the bearer.

Source: "Authorize requests to Azure Storage"; "Authorize with Microsoft Entra ID", its section on the bearer challenge;
RFC 7519, 6750.
"""

import re
from typing import Any, Final, Protocol

from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.access import NamedAccount, NamedAccounts
from veilmq.protocols import Request, external_path, is_secure, show
from veilmq.protocols.azure import errors, limits
from veilmq.protocols.azure.addresses import Endpoint, Place
from veilmq.protocols.azure.auth.sas import SasReader
from veilmq.protocols.azure.auth.shared_key import (
    check_single,
    matches,
    read_signature,
    readings,
    shared_key_lite_text,
    shared_key_text,
)
from veilmq.protocols.azure.call import Caller, Identity, Way, origin_of
from veilmq.protocols.azure.errors import Refusal, unauthenticated
from veilmq.protocols.azure.fields import read_rfc1123

RESOURCE: Final = "https://storage.azure.com"
_APPLICATION: Final = "e406a681-f3d4-42a8-90b6-c2b029497af1"
"""Azure Storage's own application: the audience of tokens requested by its id."""
_TOKEN_SKEW_US: Final = 300 * SECOND_US
_TENANT: Final = re.compile(r"[A-Za-z0-9.-]{1,253}\Z")
_COMMON_TENANT: Final = "common"
_NOBODY: Final = "00000000-0000-0000-0000-000000000000"
"""The bearer of a token without oid and sub, where anybody is allowed: tokens for emulators often have only aud and
exp."""


class TokenRefused(Exception):
    """Why a token is refused."""


class Tokens(Protocol):
    """Verifies tokens."""

    @property
    def tenant(self) -> str | None:
        """The tenant that clients should ask for a token; None: any."""

    @property
    def audiences(self) -> frozenset[str]:
        """Audiences that are accepted besides Azure Storage's own."""

    def claims(self, token: str) -> dict[str, Any]:
        """The claims of a genuine token. Raises TokenRefused."""


def challenge(authority: str, tokens: Tokens) -> tuple[tuple[bytes, bytes], ...]:
    """The header that says where to get a token."""
    tenant = tokens.tenant or _COMMON_TENANT
    value = f"Bearer authorization_uri={authority.rstrip('/')}/{tenant}/oauth2/authorize resource_id={RESOURCE}"
    return ((b"www-authenticate", value.encode()),)


def identify(tokens: Tokens, authority: str, account: NamedAccount | None, token: bytes, wall: Instant) -> Identity:
    """The bearer of the token. Raises Refusal: 401 with a challenge, or 403 for a bearer that the account does not
    know."""
    try:
        if len(token) > limits.TOKEN_BYTES_MAX or not token.isascii():
            raise TokenRefused("the token is malformed")
        claims = tokens.claims(token.decode())
        expiry = _check(claims, tokens.audiences, account, wall)
    except TokenRefused as refused:
        extra = {"AuthenticationErrorDetail": f"{refused}."}
        raise Refusal(errors.INVALID_TOKEN, extra, headers=challenge(authority, tokens)) from None
    object_id, tenant = _object_id(claims, account), _text(claims, "tid")
    key = None if account is None else account.identity(object_id)
    if key is None:
        raise Refusal(errors.AUTHORIZATION_PERMISSION_MISMATCH)
    return Identity(key, object_id, tenant, expiry)


def _check(claims: dict[str, Any], audiences: frozenset[str], account: NamedAccount | None, wall: Instant) -> Instant:
    """The token's expiry. Raises TokenRefused if the audience is wrong or the token is not valid now."""
    allowed = {RESOURCE, _APPLICATION, *audiences}
    if account is not None:
        allowed.add(f"https://{account.name}.queue.core.windows.net")
    named = claims.get("aud")
    given = named if isinstance(named, list) else [named]
    if not any(isinstance(each, str) and each.rstrip("/") in allowed for each in given):
        raise TokenRefused("Issuer or audience validation failed: the token is for another audience")
    if not _object_id(claims, account):
        raise TokenRefused("the token names neither oid nor sub")
    if not _TENANT.match(_text(claims, "tid") or _COMMON_TENANT):
        raise TokenRefused("tid is malformed")
    expiry, start = _time(claims.get("exp")), _time(claims.get("nbf", claims.get("iat", 0)))
    if wall >= expiry * SECOND_US:
        raise TokenRefused("Lifetime validation failed: the token is expired")
    if wall + _TOKEN_SKEW_US < start * SECOND_US:
        raise TokenRefused("Lifetime validation failed: the token is not valid yet")
    return Instant(expiry * SECOND_US)


def _object_id(claims: dict[str, Any], account: NamedAccount | None) -> str:
    """The object id in the token; empty if it is missing but required."""
    named = _text(claims, "oid") or _text(claims, "sub")
    return named or (_NOBODY if account is not None and account.any_identity else "")


def _time(value: Any) -> int:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**40:
        raise TokenRefused("exp or nbf is missing or malformed")
    return int(value)


def _text(claims: dict[str, Any], name: str) -> str:
    value = claims.get(name)
    return value if isinstance(value, str) and len(value) <= 256 and value.isprintable() else ""


_SKEW_US: Final = limits.SKEW_SECONDS_MAX * SECOND_US
_SHARED_KEY: Final = b"sharedkey"
_SHARED_KEY_LITE: Final = b"sharedkeylite"
_BEARER: Final = b"bearer"
_NO_SECRET: Final = (b"",)
_DEVELOPMENT: Final = (
    "In development mode it is devstoreaccount1, as in http://HOST:PORT/devstoreaccount1; others need --credentials."
)


class Verifier:
    """Verifies the requests of one listener. Its only state is caches."""

    def __init__(self, accounts: NamedAccounts, endpoint: Endpoint, tokens: Tokens) -> None:
        self._accounts = accounts
        self._endpoint = endpoint
        self._outside = external_path(endpoint.external_url)
        self._tokens = tokens
        self._sas = SasReader(endpoint)

    def verify(self, request: Request, place: Place, parameters: dict[str, str], version: str, wall: Instant) -> Caller:
        """The sender of the request. Raises Refusal if it cannot be verified."""
        account = self._accounts.find_account(place.account)
        if account is None and not self._accounts.checks:
            raise unauthenticated(f"There is no account '{show(place.account)}' here. {_DEVELOPMENT}")
        authorization = request.headers.get(b"authorization")
        if authorization is None:
            if "sig" in parameters:
                return self._by_sas(request, place, parameters, account, wall, None)
            raise Refusal(
                errors.NO_AUTHENTICATION_INFORMATION, headers=challenge(self._endpoint.authority, self._tokens)
            )
        scheme, _, credentials = authorization.partition(b" ")
        scheme = scheme.lower()
        if scheme in {_SHARED_KEY, _SHARED_KEY_LITE}:
            lite = scheme == _SHARED_KEY_LITE
            secondary = place.secondary and place.path_style
            return self._by_key(request, parameters, version, account, credentials.strip(), wall, lite, secondary)
        if scheme == _BEARER:
            identity = self._by_token(request, account, credentials.strip(), version, wall)
            if "sig" in parameters:
                return self._by_sas(request, place, parameters, account, wall, identity)
            assert account is not None
            origin = origin_of(f"{account.name}/{identity.object_id}", request.headers.get(b"user-agent", b""))
            return Caller(account, identity.key, Way.BEARER, origin, None, identity)
        raise Refusal(errors.INVALID_AUTHENTICATION_INFO)

    def _by_key(
        self,
        request: Request,
        parameters: dict[str, str],
        version: str,
        account: NamedAccount | None,
        credentials: bytes,
        wall: Instant,
        lite: bool,
        secondary: bool,
    ) -> Caller:
        name, colon, signature = credentials.partition(b":")
        if not colon or not name:
            raise Refusal(errors.INVALID_AUTHENTICATION_INFO)
        if account is not None and name.decode("latin-1") != account.name:
            account = None
        _check_fresh(request, wall)
        if request.duplicates:
            check_single(request)
        given = read_signature(signature)
        claimed = name.decode("latin-1")
        headers = request.headers
        text = b""
        for lines, path in readings(request, version, secondary, self._outside):
            if lite:
                read = shared_key_lite_text(request, claimed, parameters, lines, path)
            else:
                read = shared_key_text(request, claimed, parameters, version, lines, path)
            text = text or read
            if matches(_NO_SECRET if account is None else account.secrets, read, given) and account is not None:
                origin = origin_of(account.name, headers.get(b"user-agent", b""))
                return Caller(account, account.key, Way.SHARED_KEY, origin)
        # Azure/azure-storage-python #254.
        found = f"The MAC signature found in the HTTP request '{show(signature.decode('latin-1'))}'"
        detail = f"{found} is not the same as any computed signature. Server used following string to sign"
        raise unauthenticated(f"{detail}: '{text.decode('utf-8', 'replace')}'.")

    def _by_sas(
        self,
        request: Request,
        place: Place,
        parameters: dict[str, str],
        account: NamedAccount | None,
        wall: Instant,
        identity: Identity | None,
    ) -> Caller:
        sas = self._sas.read(parameters, place, account)
        assert account is not None
        self._sas.check(sas, request, wall, identity)
        principal = f"{account.name}/sas"
        if sas.policy is not None:
            principal = f"{account.name}/sas/{sas.policy}"
        elif sas.way is Way.DELEGATION_SAS:
            principal = f"{account.name}/{sas.key.id}/sas"
        origin = origin_of(principal, request.headers.get(b"user-agent", b""))
        return Caller(account, sas.key, sas.way, origin, sas, identity)

    def _by_token(
        self, request: Request, account: NamedAccount | None, token: bytes, version: str, wall: Instant
    ) -> Identity:
        if not is_secure(request, self._endpoint.trusted_proxy):
            raise unauthenticated("Authentication scheme Bearer is only allowed over HTTPS.")
        if version < limits.VERSION_BEARER:
            detail = f"Authentication scheme Bearer is not supported in version {version} of the service."
            raise unauthenticated(detail)
        return identify(self._tokens, self._endpoint.authority, account, token, wall)


def _check_fresh(request: Request, wall: Instant) -> None:
    stamp = request.headers.get(b"x-ms-date") or request.headers.get(b"date")
    if stamp is None:
        raise unauthenticated("Request date header not specified.")
    signed = read_rfc1123(stamp)
    shown = show(stamp.decode("latin-1"))
    if signed is None:
        raise unauthenticated(f"Request date header is not in the format of RFC 1123: '{shown}'.")
    if not -_SKEW_US <= wall - signed <= _SKEW_US:
        age = "old" if wall > signed else "early"
        raise unauthenticated(f"Request date header too {age}: '{shown}'")
