"""Signature Version 4, checked: in the Authorization header or in the query string.

Strategy: what a client repeats all day (key, scope, names of signed headers) is parsed and its signing key derived
once, and kept under the bytes of the Authorization header before the signature, but only once a signature was right:
strangers fill no cache. A request then costs one SHA-256 of its payload, one of the canonical request and one HMAC,
made of two prepared SHA-256 states (RFC 2104; measured against hmac.digest and copies of HMAC objects in
bench/codec.py). Values are signed as they came; if that does not match, their blanks are normalised as the
specification has it and checked again. An unknown key goes the same way with a secret of our own, and is refused at
the end. Source: AWS IAM User Guide, "Signature Version 4 for API requests"; the payload's hash is always ours, so
UNSIGNED-PAYLOAD cannot match.
"""

import calendar
import re
import time
from email.utils import parsedate_to_datetime
from hashlib import sha256
from hmac import compare_digest
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from veilmq.model.access import DEVELOPMENT_ACCOUNT, HOME_REGION_DEFAULT, AccessKey, Keyring
from veilmq.model.commands import CLIENT_NAME_CHARACTERS_MAX, Origin
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.queue import QueueKey
from veilmq.protocols.bounded import Bounded
from veilmq.protocols.http import Request
from veilmq.protocols.sqs import errors, limits
from veilmq.protocols.sqs.canonical import canonical_path, canonical_query, normal_values, query_pairs
from veilmq.protocols.sqs.errors import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALGORITHM: Final = b"AWS4-HMAC-SHA256"
SERVICE: Final = b"sqs"
TERMINATOR: Final = b"aws4_request"

_SIGNATURE_HEX: Final = 64
_SCHEMES_MAX: Final = 1_024
_SCHEME_BYTES_MAX: Final = 1_024
_SIGNING_KEYS_MAX: Final = 1_024
_CALLERS_MAX: Final = 64
_SHAPES_MAX: Final = 64
_SHAPE_BYTES_MAX: Final = 2_048
_QUEUES_MAX: Final = 4_096
_QUEUES_FEW: Final = 64
_PLACES_MAX: Final = 64
_STAMPS_MAX: Final = 128
_INNER_PAD: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD: Final = bytes(byte ^ 0x5C for byte in range(256))
_STAMP: Final = re.compile(rb"[0-9]{8}T[0-9]{6}Z\Z")
_NAME: Final = re.compile(rb"[a-z0-9!#$&'*+.^_`|~-]+\Z")
_ANONYMOUS: Final = "anonymous"
_MISMATCH: Final = (
    "The request signature we calculated does not match the signature you provided. Check your AWS Secret Access Key "
    "and signing method. Consult the service documentation for details."
)
_BAD_TOKEN: Final = "The security token included in the request is invalid."


class Caller(msgspec.Struct, gc=False):
    """Who sent a request, once that is certain; one object for all requests of a key and client."""

    key: AccessKey
    region: str
    verified: bool
    """The signature was checked: the key's account is the only one it may name."""
    origin: Origin
    queues: "Bounded[str, QueueKey]"
    """Queue URLs that this key has named, resolved."""


class _Scheme(msgspec.Struct, gc=False):
    """All of an Authorization header but the signature, ready to check one."""

    key: AccessKey
    known: bool
    day: bytes
    region: str
    scope: bytes
    names: tuple[bytes, ...]
    values: "Callable[[dict[bytes, bytes]], tuple[bytes, ...]]"
    rest: bytes
    """Canonical request from the headers on: `%b` for each value and for the payload's hash."""
    root: bytes
    """The same from the start, for POST to `/`."""
    inner: Any
    outer: Any
    shapes: "Bounded[tuple[bytes, ...], bool]"
    """Sequences of header names in which all that must be signed is."""
    callers: "Bounded[bytes, Caller]"
    queues: "Bounded[str, QueueKey]"


class Verifier:
    """Checks requests of one listener. Holds caches and no other state."""

    def __init__(self, keyring: Keyring, base_domain: str | None, stand_in: str) -> None:
        """`stand_in`: a secret nobody knows, by which requests of unknown keys are checked in vain."""
        self._keyring = keyring
        self._base_domain = base_domain
        self._stand_in = stand_in
        self._schemes: Bounded[bytes, _Scheme] = Bounded(_SCHEMES_MAX)
        self._signing_keys: Bounded[tuple[str, bytes, bytes], tuple[Any, Any]] = Bounded(_SIGNING_KEYS_MAX)
        self._stamps: Bounded[bytes, int] = Bounded(_STAMPS_MAX)
        self._queues: dict[tuple[str, str], Bounded[str, QueueKey]] = {}

    def verify(self, request: Request, wall: Instant) -> Caller:
        """Who sent the request. Raises Refusal with AWS's code if that is not certain."""
        authorization = request.headers.get(b"authorization")
        if not self._keyring.checks:
            return self._unchecked(request, authorization)
        if authorization is None:
            if b"X-Amz-" in request.query:
                return self._verify_query(request, wall)
            if any(b"AWSAccessKeyId=" in given for given in (request.query, request.body)):
                raise _too_old()
            raise Refusal(errors.MISSING_AUTHENTICATION_TOKEN, "Request is missing Authentication Token")
        headers = request.headers
        prefix = authorization[:-_SIGNATURE_HEX]
        scheme = self._schemes.get(prefix)
        if scheme is None or self._keyring.find(scheme.key.id) is not scheme.key:
            return self._verify_new(request, wall, authorization)
        stamp = headers.get(b"x-amz-date")
        if stamp is None:
            return self._verify_new(request, wall, authorization)
        seconds = self._stamps.get(stamp)
        if seconds is None:
            seconds = self._stamps.keep(stamp, _seconds(stamp))
        skew = wall - seconds * SECOND_US
        if not -_SKEW_US <= skew <= _SKEW_US or stamp[:8] != scheme.day:
            _check_stamp(stamp, seconds, scheme.day, wall)
        self._check(request, scheme, stamp, authorization[-_SIGNATURE_HEX:])
        if scheme.key.session_token is not None or b"x-amz-security-token" in headers:
            _check_token(scheme.key, headers.get(b"x-amz-security-token"))
        return _caller(scheme, headers)

    def _verify_new(self, request: Request, wall: Instant, authorization: bytes) -> Caller:
        headers = request.headers
        if authorization.startswith(_OLD_SCHEMES):
            raise _too_old()
        credential, names, signature = _parse_authorization(authorization)
        stamp = _stamp_of(headers)
        seconds = _seconds(stamp)
        scheme = self._scheme(credential, names, stamp)
        _check_stamp(stamp, seconds, scheme.day, wall)
        self._check(request, scheme, stamp, signature)
        _check_token(scheme.key, headers.get(b"x-amz-security-token"))
        self._keep(authorization, scheme)
        return _caller(scheme, headers)

    def _keep(self, authorization: bytes, scheme: _Scheme) -> None:
        """Remember the scheme, if the header ends in the signature and nothing but the signature is cut off."""
        prefix = authorization[:-_SIGNATURE_HEX]
        if len(prefix) <= _SCHEME_BYTES_MAX and prefix.endswith(b"Signature="):
            self._schemes.keep(prefix, scheme)
            # One for all schemes of an account and region: each with its own, they would be gigabytes.
            place = scheme.key.account, scheme.region
            if len(self._queues) < _PLACES_MAX or place in self._queues:
                scheme.queues = self._queues.setdefault(place, Bounded(_QUEUES_MAX))

    def _verify_query(self, request: Request, wall: Instant) -> Caller:
        """Query-string authentication: everything in parameters, valid for X-Amz-Expires seconds, or for 15 minutes."""
        pairs = query_pairs(request.query)
        named: dict[bytes, bytes] = {}
        for name, value in pairs:
            if name.startswith(b"X-Amz-"):
                if name in named:
                    raise Refusal(errors.INCOMPLETE_SIGNATURE, f"AWS query-string parameter {_show(name)} is repeated.")
                named[name] = value
        wanted = (b"X-Amz-Algorithm", b"X-Amz-Credential", b"X-Amz-Signature", b"X-Amz-SignedHeaders", b"X-Amz-Date")
        lacking = [name.decode() for name in wanted if not named.get(name)]
        if lacking:
            text = " ".join(f"AWS query-string parameters must include '{name}'." for name in lacking)
            raise Refusal(errors.INCOMPLETE_SIGNATURE, text)
        if named[b"X-Amz-Algorithm"] != ALGORITHM:
            raise Refusal(
                errors.INCOMPLETE_SIGNATURE, f"Unsupported AWS 'algorithm': '{_show(named[b'X-Amz-Algorithm'])}'."
            )
        stamp = named[b"X-Amz-Date"]
        seconds = _seconds(stamp)
        lasts_s = _expires(named.get(b"X-Amz-Expires"))
        names = tuple(named[b"X-Amz-SignedHeaders"].lower().split(b";"))
        scheme = self._scheme(named[b"X-Amz-Credential"], names, stamp)
        _check_stamp(stamp, seconds, scheme.day, wall, lasts_s)
        query = canonical_query([pair for pair in pairs if pair[0] != b"X-Amz-Signature"])
        self._check(request, scheme, stamp, named[b"X-Amz-Signature"], query)
        header = request.headers.get(b"x-amz-security-token")
        _check_token(scheme.key, named.get(b"X-Amz-Security-Token", header))
        return _caller(scheme, request.headers)

    def _scheme(self, credential: bytes, names: tuple[bytes, ...], stamp: bytes) -> _Scheme:
        key_id, day, region = _parse_credential(credential, stamp)
        if b"host" not in names:
            text = "'Host' or ':authority' must be a 'SignedHeader' in the AWS Authorization."
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, text)
        if not all(_NAME.match(name) for name in names) or list(names) != sorted(set(names)):
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, "'SignedHeaders' must be lower-case header names in order.")
        found = self._keyring.find(key_id)
        key = found or AccessKey(id=key_id, secret=self._stand_in, account=DEVELOPMENT_ACCOUNT)
        inner, outer = self._signing_key(key.secret, day, region)
        rest = b"".join(name + b":%b\n" for name in names) + b"\n" + b";".join(names) + b"\n%b"
        getter = itemgetter(*names)
        return _Scheme(
            key=key,
            known=found is not None,
            day=day,
            region=region.decode(),
            scope=b"/".join((day, region, SERVICE, TERMINATOR)),
            names=names,
            values=getter if len(names) > 1 else lambda headers: (headers[b"host"],),
            rest=rest,
            root=b"POST\n/\n\n" + rest,
            inner=inner,
            outer=outer,
            shapes=Bounded(_SHAPES_MAX),
            callers=Bounded(_CALLERS_MAX),
            queues=Bounded(_QUEUES_FEW),
        )

    def _signing_key(self, secret: str, day: bytes, region: bytes) -> tuple[Any, Any]:
        known = self._signing_keys.get((secret, day, region))
        if known is not None:
            return known
        key = b"AWS4" + secret.encode()
        for part in (day, region, SERVICE, TERMINATOR):
            key = _hmac(_prepared(key), part).digest()
        return self._signing_keys.keep((secret, day, region), _prepared(key))

    def _check(
        self, request: Request, scheme: _Scheme, stamp: bytes, signature: bytes, query: bytes | None = None
    ) -> None:
        """The signature over this request; `query` is canonical already, if given."""
        headers = request.headers
        payload = sha256(request.body).hexdigest().encode()
        try:
            values = scheme.values(headers)
        except KeyError as absent:
            text = f"The signed header {_show(absent.args[0])} is not in the request."
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, text) from None
        if request.target == b"/" and request.method == "POST":
            canonical = scheme.root % (*values, payload)
            start = b"POST\n/\n\n"
        else:
            if query is None:
                query = canonical_query(query_pairs(request.query))
            start = b"%b\n%b\n%b\n" % (request.method.encode(), canonical_path(request.path), query)
            canonical = start + scheme.rest % (*values, payload)
        matches = _matches(scheme, stamp, canonical, signature)
        if not matches:
            normal = start + scheme.rest % (*normal_values(scheme.names, values, request.duplicates), payload)
            matches = _matches(scheme, stamp, normal, signature)
        if not scheme.known:
            raise Refusal(errors.INVALID_CLIENT_TOKEN_ID, _BAD_TOKEN)
        if not matches:
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, _MISMATCH)
        shape = tuple(headers)
        if shape not in scheme.shapes:
            _check_signed(scheme.names, headers)
            if sum(map(len, shape)) <= _SHAPE_BYTES_MAX:
                scheme.shapes.keep(shape, True)
        if self._base_domain is not None:
            region = region_of_host(self._base_domain, headers[b"host"])
            if region is not None and region != scheme.region:
                text = f"Credential should be scoped to a valid region, not '{scheme.region}'."
                raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, text)

    def _unchecked(self, request: Request, authorization: bytes | None) -> Caller:
        """Development mode: any credentials, or none. What can be read of them names the key and the region."""
        if authorization is not None:
            scheme = self._schemes.get(authorization[:-_SIGNATURE_HEX])
            if scheme is not None:
                return _caller(scheme, request.headers)
        key_id, region = _claimed(request, authorization)
        if region is None and self._base_domain is not None:
            region = region_of_host(self._base_domain, request.headers.get(b"host", b""))
        key = self._keyring.find(key_id) or AccessKey(key_id, "", DEVELOPMENT_ACCOUNT)
        scheme = _unsigned_scheme(key, region or HOME_REGION_DEFAULT)
        if authorization is not None and region is not None:
            self._keep(authorization, scheme)
        return _caller(scheme, request.headers)


_OLD_SCHEMES: Final = (b"AWS ", b"AWS3 ", b"AWS3-HTTPS ")
"""How requests of earlier signature versions begin."""


def _too_old() -> Refusal:
    return Refusal(errors.INVALID_SECURITY, "The request must be signed with AWS Signature Version 4.")


_SKEW_US: Final = limits.SKEW_SECONDS_MAX * SECOND_US


def _prepared(key: bytes) -> tuple[Any, Any]:
    """The two SHA-256 states of an HMAC with this key (RFC 2104)."""
    block = (sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
    return sha256(block.translate(_INNER_PAD)), sha256(block.translate(_OUTER_PAD))


def _hmac(prepared: tuple[Any, Any], text: bytes) -> Any:
    inner, outer = prepared[0].copy(), prepared[1].copy()
    inner.update(text)
    outer.update(inner.digest())
    return outer


def _matches(scheme: _Scheme, stamp: bytes, canonical: bytes, signature: bytes) -> bool:
    digest = sha256(canonical).hexdigest().encode()
    inner = scheme.inner.copy()
    inner.update(b"AWS4-HMAC-SHA256\n%b\n%b\n%b" % (stamp, scheme.scope, digest))
    outer = scheme.outer.copy()
    outer.update(inner.digest())
    return compare_digest(outer.hexdigest().encode(), signature)


def _caller(scheme: _Scheme, headers: dict[bytes, bytes]) -> Caller:
    client = headers.get(b"user-agent", b"")[:CLIENT_NAME_CHARACTERS_MAX]
    caller = scheme.callers.get(client)
    if caller is None:
        origin = Origin("sqs", scheme.key.id, client.decode("utf-8", "replace"))
        caller = scheme.callers.keep(
            client, Caller(scheme.key, scheme.region, scheme.scope != b"", origin, scheme.queues)
        )
    return caller


def _unsigned_scheme(key: AccessKey, region: str) -> _Scheme:
    return _Scheme(
        key=key,
        known=True,
        day=b"",
        region=region,
        scope=b"",
        names=(),
        values=lambda headers: (),
        rest=b"",
        root=b"",
        inner=None,
        outer=None,
        shapes=Bounded(0),
        callers=Bounded(_CALLERS_MAX),
        queues=Bounded(_QUEUES_FEW),
    )


def region_of_host(base_domain: str, host: bytes) -> str | None:
    """The region that a host of the form `sqs.<region>.<base domain>` names, if it has that form."""
    name, ending = host.partition(b":")[0].decode("latin-1").lower(), "." + base_domain.lower()
    if not name.startswith("sqs.") or not name.endswith(ending):
        return None
    region = name[len("sqs.") : -len(ending)]
    return region if limits.REGION.match(region) else None


def _claimed(request: Request, authorization: bytes | None) -> tuple[str, str | None]:
    """Key id and region that a request claims, unverified; an unclaimed region is None."""
    credential = b""
    if authorization is not None:
        found = re.search(rb"Credential=([^,\s]+)", authorization)
        credential = found[1] if found else b""
    elif b"X-Amz-Credential" in request.query:
        credential = dict(query_pairs(request.query)).get(b"X-Amz-Credential", b"")
    parts = credential.decode("utf-8", "replace").rsplit("/", 4)
    region = parts[2] if len(parts) == 5 and limits.REGION.match(parts[2]) else None
    return parts[0] or _ANONYMOUS, region


def _show(value: bytes) -> str:
    text = value.decode("utf-8", "replace")
    return text if len(text) <= 256 else text[:256] + "..."


def _parse_authorization(value: bytes) -> tuple[bytes, tuple[bytes, ...], bytes]:
    """Credential, names of the signed headers, signature."""
    algorithm, _, parameters = value.partition(b" ")
    if algorithm != ALGORITHM:
        raise Refusal(errors.INCOMPLETE_SIGNATURE, f"Unsupported AWS 'algorithm': '{_show(algorithm)}'.")
    named: dict[bytes, bytes] = {}
    for part in parameters.split(b","):
        name, _, text = part.strip().partition(b"=")
        if name in named:
            raise Refusal(errors.INCOMPLETE_SIGNATURE, f"Authorization header repeats '{_show(name)}'.")
        named[name] = text
    lacking = [name for name in (b"Credential", b"Signature", b"SignedHeaders") if not named.get(name)]
    if lacking:
        wanted = " ".join(f"Authorization header requires '{_show(name)}' parameter." for name in lacking)
        raise Refusal(errors.INCOMPLETE_SIGNATURE, wanted)
    return named[b"Credential"], tuple(named[b"SignedHeaders"].split(b";")), named[b"Signature"]


def _parse_credential(credential: bytes, stamp: bytes) -> tuple[str, bytes, bytes]:
    """Key id, day and region of a credential scope that is right in all its parts."""
    parts = credential.rsplit(b"/", 4)
    if len(parts) != 5:
        text = (
            "Credential must have exactly 5 slash-delimited elements, e.g. keyid/date/region/service/term, "
            f"got '{_show(credential)}'."
        )
        raise Refusal(errors.INCOMPLETE_SIGNATURE, text)
    key_id, day, region, service, terminator = parts
    wrong = []
    if day != stamp[:8]:
        wrong.append(
            "Date in Credential scope does not match YYYYMMDD from ISO-8601 version of date from HTTP: "
            f"'{_show(day)}' != '{_show(stamp[:8])}', from '{_show(stamp)}'."
        )
    if not limits.REGION.match(_show(region)):
        wrong.append(f"Credential should be scoped to a valid region, not '{_show(region)}'.")
    if service != SERVICE:
        wrong.append(f"Credential should be scoped to correct service: '{SERVICE.decode()}'.")
    if terminator != TERMINATOR:
        text = f"Credential should be scoped with a valid terminator: 'aws4_request', not '{_show(terminator)}'."
        wrong.append(text)
    if wrong:
        raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, " ".join(wrong))
    return key_id.decode("utf-8", "replace"), day, region


def _stamp_of(headers: dict[bytes, bytes]) -> bytes:
    """When the request was signed, from X-Amz-Date or Date."""
    stamp = headers.get(b"x-amz-date")
    if stamp is not None:
        return stamp
    date = headers.get(b"date")
    if date is None:
        text = "Authorization header requires existence of either a 'X-Amz-Date' or a 'Date' header."
        raise Refusal(errors.INCOMPLETE_SIGNATURE, text)
    if _STAMP.match(date):
        return date
    try:
        return parsedate_to_datetime(date.decode("latin-1")).strftime("%Y%m%dT%H%M%SZ").encode()
    except (ValueError, OverflowError):
        raise _bad_date(date) from None


def _bad_date(stamp: bytes) -> Refusal:
    text = f"Date must be in ISO-8601 'basic format'. Got '{_show(stamp)}'. See http://en.wikipedia.org/wiki/ISO_8601"
    return Refusal(errors.INCOMPLETE_SIGNATURE, text)


def _seconds(stamp: bytes) -> int:
    """Seconds since 1970 of `20260131T235959Z`."""
    if not _STAMP.match(stamp):
        raise _bad_date(stamp)
    year, month, day = int(stamp[:4]), int(stamp[4:6]), int(stamp[6:8])
    hour, minute, second = int(stamp[9:11]), int(stamp[11:13]), int(stamp[13:15])
    if not (year >= 1970 and 1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second <= 60):
        raise _bad_date(stamp)
    return calendar.timegm((year, month, day, hour, minute, second))


def _format(seconds: int) -> str:
    moment = time.gmtime(seconds)
    return time.strftime("%Y%m%dT%H%M%SZ", moment)


def _check_stamp(stamp: bytes, seconds: int, day: bytes, wall: Instant, lasts_s: int = limits.SKEW_SECONDS_MAX) -> None:
    """Raises RequestExpired if it is too old or too early; SignatureDoesNotMatch for another day's scope."""
    if day != stamp[:8]:
        text = f"Date in Credential scope does not match the request's: '{_show(day)}' != '{_show(stamp[:8])}'."
        raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, text)
    if wall > (seconds + lasts_s) * SECOND_US:
        text = f"Signature expired: {_show(stamp)} is now earlier than {_format(wall // SECOND_US - lasts_s)}"
        span = f"{lasts_s} s." if lasts_s % 60 else f"{lasts_s // 60} min."
        raise Refusal(errors.REQUEST_EXPIRED, f"{text} ({_format(wall // SECOND_US)} - {span})")
    if wall < seconds * SECOND_US - _SKEW_US:
        text = f"Signature not yet current: {_show(stamp)} is still later than"
        later = _format(wall // SECOND_US + limits.SKEW_SECONDS_MAX)
        raise Refusal(errors.REQUEST_EXPIRED, f"{text} {later} ({_format(wall // SECOND_US)} + 15 min.)")


def _expires(value: bytes | None) -> int:
    """SQS does not ask for it: npm's aws4 and aws4fetch leave it out, and are taken for as long as a header is."""
    if value is None:
        return limits.SKEW_SECONDS_MAX
    if not value.isdigit() or len(value) > 9 or not 1 <= int(value) <= limits.PRESIGNED_SECONDS_MAX:
        text = f"X-Amz-Expires must be a number of seconds from 1 to {limits.PRESIGNED_SECONDS_MAX}."
        raise Refusal(errors.INCOMPLETE_SIGNATURE, text)
    return int(value)


def _check_token(key: AccessKey, token: bytes | None) -> None:
    """The session token of temporary credentials; a long-lived key has none."""
    if key.session_token is None and token is None:
        return
    wanted = (key.session_token or "").encode()
    if not wanted or token is None or not compare_digest(wanted, token):
        raise Refusal(errors.INVALID_CLIENT_TOKEN_ID, _BAD_TOKEN)


def _check_signed(names: "Sequence[bytes]", headers: dict[bytes, bytes]) -> None:
    for name in headers:
        if name.startswith(b"x-amz-") and name not in names:
            text = f"'{_show(name)}' must be a 'SignedHeader' in the AWS Authorization."
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, text)
