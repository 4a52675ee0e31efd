"""Checks the claims of bearer tokens, and writes the challenge for refused ones.

Strategy: the signature is checked by the holder of the issuer's keys (`Tokens`, an interface given to the codec: this
room imports no cryptography). The claims are checked here: audience, times, and whether the account knows the bearer.
Source: "Authorize with Microsoft Entra ID", its section on the bearer challenge; RFC 7519, 6750.
"""

import re
from typing import Any, Final, Protocol

from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.access import NamedAccount
from veilmq.protocols.azure import errors, limits
from veilmq.protocols.azure.call import Identity
from veilmq.protocols.azure.errors import Refusal

RESOURCE: Final = "https://storage.azure.com"
_APPLICATION: Final = "e406a681-f3d4-42a8-90b6-c2b029497af1"
"""Azure Storage's own application: the audience of tokens requested by its id."""
_SKEW_US: Final = 300 * SECOND_US
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
        ...

    @property
    def audiences(self) -> frozenset[str]:
        """Audiences that are accepted besides Azure Storage's own."""
        ...

    def claims(self, token: str) -> dict[str, Any]:
        """The claims of a genuine token. Raises TokenRefused."""
        ...


def challenge(authority: str, tokens: Tokens) -> tuple[tuple[bytes, bytes], ...]:
    """The header that tells a client where to get a token."""
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
    if wall + _SKEW_US < start * SECOND_US:
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
