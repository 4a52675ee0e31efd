"""Who sent a request to SQS: verifies Signature Version 4, in the Authorization header or in the query string.

Strategy: the parts that a client repeats (key, scope, names of signed headers) are parsed once, together with the
derived signing key, and cached under the bytes of the Authorization header before the signature. They are cached only
after a correct signature, so strangers fill no cache. A request then costs one SHA-256 of its payload, one of the
canonical request and one HMAC from two prepared states (veilmq.protocols). What the caller may do is decided
beside it: `authorize.authorized` checks a call against the queue's policy (policy.py) before it goes to the engine;
most calls need no such check.

Before changing it: header values are first checked as sent; if that fails, with blanks normalised as specified, and
with the path as clients of a prefix-stripping proxy know it. An unknown key takes the same path with a stand-in secret
and is refused at the end. The payload's hash is always computed here, so UNSIGNED-PAYLOAD
cannot match. Source: AWS IAM User Guide, "Signature Version 4 for API requests".
"""

import re
from hashlib import sha256
from hmac import compare_digest
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import msgspec

from veilmq.accelerator import shortcut
from veilmq.model.commands import CLIENT_NAME_CHARACTERS_MAX, Origin
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.access import DEVELOPMENT_ACCOUNT, AccessKey, Keyring
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols import Bounded, Keyed, Request, address_used
from veilmq.protocols.sqs import errors
from veilmq.protocols.sqs.addresses import region_of_host
from veilmq.protocols.sqs.auth.signature_parts import (
    OLD_SCHEMES,
    SERVICE,
    SKEW_US,
    TERMINATOR,
    canonical_path,
    canonical_query,
    check_stamp,
    claimed,
    normal_values,
    parse_authorization,
    parse_credential,
    parse_parameters,
    query_pairs,
    seconds_of,
    show,
    stamp_of,
    term_of,
    too_old,
)
from veilmq.protocols.sqs.errors import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SIGNATURE_HEX: Final = 64
_SCHEMES_MAX: Final = 1_024
_SCHEME_BYTES_MAX: Final = 1_024
_SIGNING_KEYS_MAX: Final = 1_024
_CALLERS_MAX: Final = 256
_VEIL_TARGET: Final = b"VeilMQ."
"""Prefix of X-Amz-Target for VeilMQ operations."""
_SHAPES_MAX: Final = 64
_SHAPE_BYTES_MAX: Final = 2_048
_QUEUES_MAX: Final = 4_096
_QUEUES_FEW: Final = 64
_PLACES_MAX: Final = 64
_STAMPS_MAX: Final = 128
_UNUSED: Final = Keyed(b"")
_NAME: Final = re.compile(rb"[a-z0-9!#$&'*+.^_`|~-]+\Z")
_MISMATCH: Final = (
    "The request signature we calculated does not match the signature you provided. Check your AWS Secret Access Key "
    "and signing method. Consult the service documentation for details."
)
_OTHER_HOST: Final = "The host in the request line is not the one in the signed Host header."
_BAD_TOKEN: Final = "The security token included in the request is invalid."


class Caller(msgspec.Struct, gc=False):
    """The verified sender of a request; one object for all requests of a key and client."""

    key: AccessKey
    region: str
    verified: bool
    """The signature was checked, so the caller may name only the key's account."""
    origin: Origin
    queues: "Bounded[str, QueueKey]"
    """Resolved queue URLs of this key."""


class _Scheme(msgspec.Struct, gc=False):
    """An Authorization header without its signature, prepared for checking one."""

    key: AccessKey
    known: bool
    day: bytes
    region: str
    scope: bytes
    names: tuple[bytes, ...]
    values: "Callable[[dict[bytes, bytes]], tuple[bytes, ...]]"
    rest: bytes
    """Template of the canonical request from the headers on: `%b` for each value and the payload's hash."""
    root: bytes
    """The template of the whole request, for POST to `/`."""
    mac: Keyed
    signing_key: bytes
    shapes: "Bounded[tuple[bytes, ...], bool]"
    """Sequences of header names known to contain all headers that must be signed."""
    callers: "Bounded[bytes, Caller]"
    veil_callers: "Bounded[bytes, Caller]"
    """Callers of VeilMQ operations, which the history records separately from SQS's."""
    queues: "Bounded[str, QueueKey]"


_PLAIN_SCHEME: Final = shortcut(
    "plain_scheme", Request, _Scheme, "POST", SKEW_US, b"authorization", b"x-amz-date", b"x-amz-security-token"
)
"""(request, wall, schemes, stamps): the scheme by which a POST to `/` is signed, if all but the signature was seen."""


class Verifier:
    """Verifies the requests of one listener. Its only state is caches."""

    def __init__(
        self,
        keyring: Keyring,
        base_domain: str | None,
        stand_in: str,
        external_path: bytes = b"",
        sole_region: str | None = None,
    ) -> None:
        """`stand_in`: a random secret for requests with unknown keys, which never match. `external_path`: the prefix
        that a proxy strips from the path that clients sign. `sole_region`: in development mode that of all callers."""
        self._sole_region = sole_region
        self._keyring = keyring
        self._base_domain = base_domain
        self._external_path = external_path
        self._stand_in = stand_in
        self._schemes: Bounded[bytes, _Scheme] = Bounded(_SCHEMES_MAX)
        self._signing_keys: Bounded[tuple[str, bytes, bytes], Keyed] = Bounded(_SIGNING_KEYS_MAX)
        self._stamps: Bounded[bytes, int] = Bounded(_STAMPS_MAX)
        self._queues: dict[tuple[str, str], Bounded[str, QueueKey]] = {}

    def verify(self, request: Request, wall: Instant) -> Caller:
        """The sender of the request. Raises Refusal with AWS's code if the signature is wrong."""
        if _PLAIN_SCHEME is not None and self._base_domain is None and self._keyring.checks:
            seen: _Scheme | None = _PLAIN_SCHEME(request, wall, self._schemes, self._stamps)
            if seen is not None and self._keyring.find(seen.key.id) is seen.key and seen.key.session_token is None:
                return _caller(seen, request.headers)
        authorization = request.headers.get(b"authorization")
        if not self._keyring.checks:
            return self._unchecked(request, authorization)
        if authorization is None:
            if b"X-Amz-" in request.query:
                return self._verify_query(request, wall)
            if any(b"AWSAccessKeyId=" in given for given in (request.query, request.body)):
                raise too_old()
            # yavosh/pail, sqs-auth-errors; the words as in DanielDaCosta/apiGateway-sqs-lambda #1.
            shown = show(address_used(request, False).encode() + request.path)
            raise Refusal(errors.ACCESS_DENIED, f"Access to the resource {shown} is denied.")
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
            seconds = self._stamps.keep(stamp, seconds_of(stamp))
        skew = wall - seconds * SECOND_US
        if not -SKEW_US <= skew <= SKEW_US or stamp[:8] != scheme.day:
            check_stamp(stamp, seconds, scheme.day, wall)
        self._check(request, scheme, stamp, authorization[-_SIGNATURE_HEX:])
        if scheme.key.session_token is not None or b"x-amz-security-token" in headers:
            _check_token(scheme.key, headers.get(b"x-amz-security-token"))
        return _caller(scheme, headers)

    def _verify_new(self, request: Request, wall: Instant, authorization: bytes) -> Caller:
        headers = request.headers
        if authorization.startswith(OLD_SCHEMES):
            raise too_old()
        credential, names, signature = parse_authorization(authorization)
        stamp = stamp_of(headers)
        seconds = seconds_of(stamp)
        scheme = self._scheme(credential, names, stamp)
        check_stamp(stamp, seconds, scheme.day, wall)
        self._check(request, scheme, stamp, signature)
        _check_token(scheme.key, headers.get(b"x-amz-security-token"))
        self._keep(authorization, scheme)
        return _caller(scheme, headers)

    def _keep(self, authorization: bytes, scheme: _Scheme) -> None:
        """Cache the scheme if the signature is the last part of the header."""
        prefix = authorization[:-_SIGNATURE_HEX]
        if len(prefix) <= _SCHEME_BYTES_MAX and prefix.endswith(b"Signature="):
            self._schemes.keep(prefix, scheme)
            # Shared by all schemes of an account and region: one each could need gigabytes.
            place = scheme.key.account, scheme.region
            if len(self._queues) < _PLACES_MAX or place in self._queues:
                scheme.queues = self._queues.setdefault(place, Bounded(_QUEUES_MAX))

    def _verify_query(self, request: Request, wall: Instant) -> Caller:
        """Query-string authentication: all parts are parameters, valid for X-Amz-Expires seconds or 15 minutes."""
        pairs = query_pairs(request.query)
        named = parse_parameters(pairs)
        stamp = named[b"X-Amz-Date"]
        seconds = seconds_of(stamp)
        term_s = term_of(named.get(b"X-Amz-Expires"))
        names = tuple(named[b"X-Amz-SignedHeaders"].lower().split(b";"))
        scheme = self._scheme(named[b"X-Amz-Credential"], names, stamp)
        check_stamp(stamp, seconds, scheme.day, wall, term_s)
        query = canonical_query([pair for pair in pairs if pair[0] != b"X-Amz-Signature"])
        self._check(request, scheme, stamp, named[b"X-Amz-Signature"], query)
        header = request.headers.get(b"x-amz-security-token")
        _check_token(scheme.key, named.get(b"X-Amz-Security-Token", header))
        return _caller(scheme, request.headers)

    def _scheme(self, credential: bytes, names: tuple[bytes, ...], stamp: bytes) -> _Scheme:
        key_id, day, region = parse_credential(credential, stamp)
        if b"host" not in names:
            text = "'Host' or ':authority' must be a 'SignedHeader' in the AWS Authorization."
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, text)
        if not all(_NAME.match(name) for name in names) or list(names) != sorted(set(names)):
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, "'SignedHeaders' must be lower-case header names in order.")
        found = self._keyring.find(key_id)
        key = found or AccessKey(id=key_id, secret=self._stand_in, account=DEVELOPMENT_ACCOUNT)
        rest = b"".join(name + b":%b\n" for name in names) + b"\n" + b";".join(names) + b"\n%b"
        getter = itemgetter(*names)
        mac = self._signing_key(key.secret, day, region)
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
            mac=mac,
            signing_key=mac.key,
            shapes=Bounded(_SHAPES_MAX),
            callers=Bounded(_CALLERS_MAX),
            veil_callers=Bounded(_CALLERS_MAX),
            queues=Bounded(_QUEUES_FEW),
        )

    def _signing_key(self, secret: str, day: bytes, region: bytes) -> Keyed:
        known = self._signing_keys.get((secret, day, region))
        if known is not None:
            return known
        key = b"AWS4" + secret.encode()
        for part in (day, region, SERVICE, TERMINATOR):
            key = Keyed(key).digest(part)
        return self._signing_keys.keep((secret, day, region), Keyed(key))

    def _check(
        self, request: Request, scheme: _Scheme, stamp: bytes, signature: bytes, query: bytes | None = None
    ) -> None:
        """Check the signature of this request; `query` is canonical already, if given."""
        headers = request.headers
        payload = sha256(request.body).hexdigest().encode()
        try:
            values = scheme.values(headers)
        except KeyError as absent:
            text = f"The signed header {show(absent.args[0])} is not in the request."
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, text) from None
        if request.target == b"/" and request.method == "POST":
            canonical = scheme.root % (*values, payload)
            start = b"POST\n/\n\n"
        else:
            if query is None:
                query = canonical_query(query_pairs(request.query))
            start = _start(request.method, request.path, query)
            canonical = start + scheme.rest % (*values, payload)
        matches = _matches(scheme, stamp, canonical, signature)
        if not matches:
            normal = normal_values(scheme.names, values, request.duplicates)
            for begun, given in product(self._starts(request, start, query or b""), (values, normal)):
                matches |= _matches(scheme, stamp, begun + scheme.rest % (*given, payload), signature)
        if not scheme.known:
            raise Refusal(errors.INVALID_CLIENT_TOKEN_ID, _BAD_TOKEN)
        if not matches:
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, _MISMATCH)
        if request.authority is not None and request.authority.lower() != headers[b"host"].lower():
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, _OTHER_HOST)
        shape = tuple(headers)
        if shape not in scheme.shapes:
            _check_signed(scheme.names, headers)
            if sum(map(len, shape)) <= _SHAPE_BYTES_MAX:
                scheme.shapes.keep(shape, True)
        if self._base_domain is not None:
            region = region_of_host(self._base_domain, request.host.decode("latin-1"))
            if region is not None and region != scheme.region:
                text = f"Credential should be scoped to a valid region, not '{scheme.region}'."
                raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, text)

    def _starts(self, request: Request, start: bytes, query: bytes) -> "Iterator[bytes]":
        """Possible starts of the canonical request: as received, and as signed by a client outside the proxy."""
        yield start
        if self._external_path:
            yield _start(request.method, self._external_path + request.path, query)
            if request.path == b"/":
                yield _start(request.method, self._external_path, query)

    def _unchecked(self, request: Request, authorization: bytes | None) -> Caller:
        """Development mode: accept any credentials, or none. Readable parts name the key and the region."""
        if authorization is not None:
            scheme = self._schemes.get(authorization[:-_SIGNATURE_HEX])
            if scheme is not None:
                return _caller(scheme, request.headers)
        key_id, region = claimed(request, authorization)
        if region is None and self._base_domain is not None:
            region = region_of_host(self._base_domain, request.host.decode("latin-1"))
        region = self._sole_region or region
        key = self._keyring.find(key_id) or AccessKey(key_id, "", DEVELOPMENT_ACCOUNT)
        scheme = _unsigned_scheme(key, region or key.home_region)
        if authorization is not None and region is not None:
            self._keep(authorization, scheme)
        return _caller(scheme, request.headers)


def _start(method: str, path: bytes, query: bytes) -> bytes:
    """A canonical request up to its headers; `query` is canonical already."""
    return b"%b\n%b\n%b\n" % (method.encode(), canonical_path(path), query)


def _matches(scheme: _Scheme, stamp: bytes, canonical: bytes, signature: bytes) -> bool:
    digest = sha256(canonical).hexdigest().encode()
    text = b"AWS4-HMAC-SHA256\n%b\n%b\n%b" % (stamp, scheme.scope, digest)
    return compare_digest(scheme.mac.digest(text).hex().encode(), signature)


def _caller(scheme: _Scheme, headers: dict[bytes, bytes]) -> Caller:
    client = headers.get(b"user-agent", b"")[:CLIENT_NAME_CHARACTERS_MAX]
    is_veil = headers.get(b"x-amz-target", b"").startswith(_VEIL_TARGET)
    callers = scheme.veil_callers if is_veil else scheme.callers
    caller = callers.get(client)
    if caller is None:
        origin = Origin("veil" if is_veil else "sqs", scheme.key.id, client.decode("utf-8", "replace"))
        caller = callers.keep(client, Caller(scheme.key, scheme.region, scheme.scope != b"", origin, scheme.queues))
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
        mac=_UNUSED,
        signing_key=b"",
        shapes=Bounded(0),
        callers=Bounded(_CALLERS_MAX),
        veil_callers=Bounded(_CALLERS_MAX),
        queues=Bounded(_QUEUES_FEW),
    )


def _check_token(key: AccessKey, token: bytes | None) -> None:
    """Check the session token of temporary credentials; a long-lived key has none."""
    if key.session_token is None and token is None:
        return
    wanted = (key.session_token or "").encode()
    if not wanted or token is None or not compare_digest(wanted, token):
        raise Refusal(errors.INVALID_CLIENT_TOKEN_ID, _BAD_TOKEN)


def _check_signed(names: "Sequence[bytes]", headers: dict[bytes, bytes]) -> None:
    for name in headers:
        if name.startswith(b"x-amz-") and name not in names:
            text = f"'{show(name)}' must be a 'SignedHeader' in the AWS Authorization."
            raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, text)
