"""Verifies the sender of a request: signature V2 (HMAC-SHA1) and V4 (HMAC-SHA256); in development mode anybody.

Strategy: a key is prepared once and cached until the keyring returns another object for its id. A date too far off is
refused before any computation. In development mode no signature is checked, and every key is account 000000000000,
or that of an ElasticMQ file (docs/mns.md): the readable part of the Authorization header only names the principal.

The signed texts are pure functions of the bytes on the wire. V2 signs the target as sent. V4 encodes path and query
again, and Java's signer does so from values that may or may not have been encoded for the wire: `queries` returns both
readings, and either is accepted. Source: docs/mns.md, "Signatures and errors".
"""

import hmac
import re
from base64 import b64encode
from calendar import timegm
from functools import lru_cache
from hashlib import sha1
from itertools import product
from typing import Final, NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec

from veilmq.model.commands import CLIENT_NAME_CHARACTERS_MAX, Origin
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.access import DEVELOPMENT_ACCOUNT, EVERYTHING, HOME_REGION_DEFAULT, AccessKey, Keyring
from veilmq.protocols import Bounded, Keyed, Request, remembered
from veilmq.protocols.mns import errors, limits
from veilmq.protocols.mns.errors import Refusal

_PREFIX: Final = b"x-mns-"
_SIGNED_BY_V4: Final = (b"content-md5", b"content-type")


class Form(NamedTuple):
    """The constants of V4, in the public cloud or in a private one."""

    algorithm: bytes
    secret_prefix: bytes
    terminator: bytes


PUBLIC: Final = Form(b"MNS4-HMAC-SHA256", b"aliyun_v4", b"aliyun_v4_request")
PRIVATE: Final = Form(b"APSARA-MNS4-HMAC-SHA256", b"apsara_v4", b"apsara_v4_request")
FORMS: Final = {form.algorithm: form for form in (PUBLIC, PRIVATE)}


def string_v2(method: bytes, headers: dict[bytes, bytes], date: bytes, target: bytes) -> bytes:
    """The text that V2 signs. headers: by lower-case name."""
    names = [name for name in headers if name.startswith(_PREFIX)]
    if len(names) > 1:
        names.sort()
    lines = b"".join([b"%b:%b\n" % (name, headers[name]) for name in names])
    get = headers.get
    return b"%b\n%b\n%b\n%b\n%b%b" % (
        method,
        get(b"content-md5", b""),
        get(b"content-type", b""),
        date,
        lines,
        target,
    )


def encoded(raw: bytes, safe: str = "") -> str:
    """Percent-encoded, except `A-Z a-z 0-9 - _ . ~`."""
    return quote_from_bytes(raw, safe + "~")


def query_v4(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Names in lower case, everything encoded, sorted by name.

    No parameter may hide another: `a=1&a%20=2` would be signed as one `a` and read as two parameters.
    """
    lines = sorted((encoded(name.lower().strip()), encoded(value.strip())) for name, value in pairs)
    return "&".join(f"{name}={value}" if value else name for name, value in lines).encode()


def queries(query: bytes) -> list[bytes]:
    """The canonical queries of the pairs as sent, and of the same pairs decoded."""
    pairs = [(name, value) for name, _, value in (part.partition(b"=") for part in query.split(b"&") if part)]
    read = [query_v4(pairs)]
    if b"%" in query:
        read.append(query_v4([(unquote_to_bytes(name), unquote_to_bytes(value)) for name, value in pairs]))
    if b"+" in query:
        read.append(query_v4([(_form_decoded(name), _form_decoded(value)) for name, value in pairs]))
    return read


def _form_decoded(text: bytes) -> bytes:
    return unquote_to_bytes(text.replace(b"+", b" "))


def path_v4(path: bytes) -> bytes:
    """The path, decoded and encoded again."""
    return encoded(unquote_to_bytes(path), "/").encode()


def request_v4(method: bytes, path: bytes, query: bytes, headers: dict[bytes, bytes]) -> bytes:
    """The canonical request; path and query are canonical already. It ends with an empty line: no body is signed."""
    names = sorted(name for name in headers if name in _SIGNED_BY_V4 or name.startswith(_PREFIX))
    lines = b"".join(b"%b:%b\n" % (name, headers[name].strip()) for name in names)
    return b"%b\n%b\n%b\n%b\n" % (method, path, query, lines)


def scope_v4(form: Form, day: bytes, region: bytes) -> bytes:
    """`day/region/mns/aliyun_v4_request`."""
    return b"%b/%b/mns/%b" % (day, region, form.terminator)


def string_v4(form: Form, stamp: bytes, region: bytes, canonical: bytes) -> bytes:
    """The text that V4 signs: it contains the canonical request itself, not its hash."""
    return b"%b\n%b\n%b\n%b" % (form.algorithm, stamp, scope_v4(form, stamp[:8], region), canonical)


_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_RFC1123: Final = re.compile(
    rb"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), ([0-3]?[0-9]) ([A-Z][a-z]{2}) ([12][0-9]{3}) "
    rb"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9]|60) (?:GMT|UTC|\+0000)\Z"
)
_DATE_BYTES_MAX: Final = 31
_MONTH_DAYS: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@remembered(_DATE_BYTES_MAX)
def read_date(text: bytes) -> Instant | None:
    """The instant of a date; None if it is no date. All requests of a second have the same text."""
    found = _RFC1123.match(text)
    if found is None or found[2].decode() not in _MONTHS:
        return None
    month = _MONTHS.index(found[2].decode()) + 1
    day, year, hour, minute, second = (int(found[place]) for place in (1, 3, 4, 5, 6))
    if not 1 <= day <= _MONTH_DAYS[month - 1]:
        return None
    return Instant(timegm((year, month, day, hour, minute, second)) * SECOND_US)


@lru_cache(1_024)
def compact(text: bytes) -> bytes:
    """A date that `read_date` takes, as `yyyyMMddTHHmmssZ`."""
    found = _RFC1123.match(text)
    assert found is not None
    month = _MONTHS.index(found[2].decode()) + 1
    return b"%b%02d%02dT%b%b%bZ" % (found[3], month, int(found[1]), found[4], found[5], found[6])


_SKEW_US: Final = limits.SKEW_SECONDS_MAX * SECOND_US
_SCHEMES_MAX: Final = 1_024
_CALLERS_MAX: Final = 64
_V2: Final = re.compile(rb"MNS ([A-Za-z0-9_.+=@-]{1,128}):([A-Za-z0-9+/=]{1,64})\Z")
_V4: Final = re.compile(
    rb"((?:APSARA-)?MNS4-HMAC-SHA256) Credential=([A-Za-z0-9_.+=@-]{1,128})/([0-9]{8})/([A-Za-z0-9-]{1,64})/mns/"
    rb"([a-z0-9_]{1,32}), ?Signature=([0-9a-f]{64})\Z"
)
_CLAIMED: Final = re.compile(rb"[A-Z0-9-]+ (?:Credential=)?([A-Za-z0-9_.+=@-]{1,128})(?:[:/]|\Z)")
_TOKENS: Final = (b"security-token", b"x-mns-security-token")
"""Headers of a session token: most SDKs', and the Android SDK's, which signs it."""
ANYBODY: Final = "anonymous"
"""The principal of a request without a key in development mode."""


class Caller(msgspec.Struct, frozen=True, eq=False):
    """The sender of a request."""

    key: AccessKey
    origin: Origin


class _Scheme(msgspec.Struct, frozen=True, eq=False):
    """A prepared key."""

    key: AccessKey
    secret: bytes
    v2: Keyed
    callers: Bounded[bytes, Caller]
    signing_keys: Bounded[tuple[bytes, bytes, bytes], Keyed]
    """Signing keys of V4, by algorithm, day and region."""


class Verifier:
    """Verifies signatures with one keyring."""

    def __init__(self, keyring: Keyring, external_path: bytes = b"") -> None:
        """`external_path`: the prefix that a proxy strips from the path that clients sign."""
        self._keyring = keyring
        self._outsides = (b"", external_path) if external_path else (b"",)
        self._schemes: Bounded[bytes, _Scheme] = Bounded(_SCHEMES_MAX)

    def verify(self, request: Request, wall: Instant) -> Caller:
        """The signer of the request. Raises Refusal."""
        headers = request.headers
        authorization = headers.get(b"authorization")
        version = headers.get(b"x-mns-version")
        if version is not None and version != limits.VERSION:
            raise Refusal(errors.INVALID_VERSION_HEADER)
        if not self._keyring.checks:
            return self._unchecked(headers, authorization)
        if not authorization:
            raise Refusal(errors.MISSING_AUTHORIZATION_HEADER)
        date = _date(headers, wall)
        if version is None:
            raise Refusal(errors.MISSING_VERSION_HEADER)
        found = _V2.match(authorization)
        if found is not None:
            key_id, signature = found.groups()
            scheme = self._scheme(key_id)
            good = False
            for outside in self._outsides:
                text = string_v2(request.method.encode(), headers, date, outside + request.target)
                good |= hmac.compare_digest(b64encode(scheme.v2.digest(text)), signature)
        else:
            scheme, good = self._verify_v4(request, authorization, date)
        if not good:
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH)
        token = scheme.key.session_token
        if token is not None and not hmac.compare_digest(token.encode(), _token(headers)):
            shown = f"{errors.ACCESS_DENIED.message} The security-token header does not fit the key."
            raise Refusal(errors.ACCESS_DENIED, shown)
        return _caller(scheme, headers)

    def _verify_v4(self, request: Request, authorization: bytes, date: bytes) -> tuple[_Scheme, bool]:
        found = _V4.match(authorization)
        if found is None:
            raise Refusal(errors.INVALID_AUTHORIZATION_HEADER)
        algorithm, key_id, day, region, terminator, signature = found.groups()
        form = FORMS[algorithm]
        stamp = compact(date)
        if terminator != form.terminator:
            raise Refusal(errors.INVALID_AUTHORIZATION_HEADER)
        if day != stamp[:8]:
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, "The day of the credential is not that of the Date header.")
        scheme = self._scheme(key_id)
        key = scheme.signing_keys.get((algorithm, day, region))
        if key is None:
            key = signing_key_v4(form, scheme.secret, day, region)
            scheme.signing_keys.keep((algorithm, day, region), key)
        method, good = request.method.encode(), False
        for outside, query in product(self._outsides, queries(request.query)):
            path = path_v4(outside + request.path)
            text = request_v4(method, path, query, request.headers)
            good |= hmac.compare_digest(signature_v4(form, key, stamp, region, text), signature)
        return scheme, good

    def _scheme(self, key_id: bytes) -> _Scheme:
        key = self._keyring.find(key_id.decode())
        if key is None:
            raise Refusal(errors.INVALID_ACCESS_KEY_ID)
        known = self._schemes.get(key_id)
        if known is not None and known.key is key:
            return known
        secret = key.secret.encode()
        scheme = _Scheme(key, secret, Keyed(secret, sha1), Bounded(_CALLERS_MAX), Bounded(_CALLERS_MAX))
        return self._schemes.keep(key_id, scheme)

    def _unchecked(self, headers: dict[bytes, bytes], authorization: bytes | None) -> Caller:
        """Development mode: accept any credentials, or none."""
        found = _CLAIMED.match(authorization or b"")
        key_id = ANYBODY.encode() if found is None else found[1]
        scheme = self._schemes.get(key_id)
        if scheme is None:
            known = self._keyring.find(ANYBODY)
            account, region = (
                (DEVELOPMENT_ACCOUNT, HOME_REGION_DEFAULT) if known is None else (known.account, known.home_region)
            )
            key = AccessKey(key_id.decode(), "", account, region, EVERYTHING)
            scheme = self._schemes.keep(key_id, _Scheme(key, b"", Keyed(b"", sha1), Bounded(_CALLERS_MAX), Bounded(0)))
        return _caller(scheme, headers)


def _token(headers: dict[bytes, bytes]) -> bytes:
    """The session token of the request; empty if there is none."""
    return next((headers[name] for name in _TOKENS if name in headers), b"")


def _date(headers: dict[bytes, bytes], wall: Instant) -> bytes:
    """The date of the signature. Raises Refusal if it is missing or too far from `wall`."""
    date = headers.get(b"x-mns-date") or headers.get(b"date")
    if not date:
        raise Refusal(errors.MISSING_DATE_HEADER)
    instant = read_date(date)
    if instant is None:
        raise Refusal(errors.INVALID_DATE_HEADER)
    if abs(instant - wall) > _SKEW_US:
        raise Refusal(errors.TIME_EXPIRED)
    return date


def _caller(scheme: _Scheme, headers: dict[bytes, bytes]) -> Caller:
    client = headers.get(b"user-agent", b"")[:CLIENT_NAME_CHARACTERS_MAX]
    caller = scheme.callers.get(client)
    if caller is None:
        origin = Origin("mns", scheme.key.id, client.decode("utf-8", "replace"))
        caller = scheme.callers.keep(client, Caller(scheme.key, origin))
    return caller


def signing_key_v4(form: Form, secret: bytes, day: bytes, region: bytes) -> Keyed:
    """The key derived from a secret for one day and region."""
    key = form.secret_prefix + secret
    for part in (day, region, b"mns", form.terminator):
        key = Keyed(key).digest(part)
    return Keyed(key)


def signature_v4(form: Form, key: Keyed, stamp: bytes, region: bytes, request: bytes) -> bytes:
    """The signature over a canonical request, in lower-case hex."""
    return key.digest(string_v4(form, stamp, region, request)).hex().encode()
