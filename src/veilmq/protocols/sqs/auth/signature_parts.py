"""Parses and checks the parts of a signature: the header or the signed URL, the scope, the time, the canonical request.

Strategy: pure functions of bytes and of the wall clock's reading; no secret is used here. The Authorization header and
the parameters of a signed URL follow the same rules, and errors are in AWS's words. Percent-encoding is decoded and
encoded again in the one form of the specification, so it does not matter which characters a client escapes.

A header is valid for 15 minutes either way, a signed URL for as long as it says. A wrong clock is reported like a wrong
signature (aws/aws-sdk-php #642); RequestExpired is for a URL past its own term ("Common Errors" in the SQS API
Reference). Source: AWS IAM User Guide, "Signature Version 4 for API requests" and its pages.
"""

import calendar
import re
import time
from collections.abc import Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

from veilmq.model.instant import SECOND_US, Instant
from veilmq.protocols import Request
from veilmq.protocols.sqs import errors, limits
from veilmq.protocols.sqs.errors import Refusal

_PLAIN_PATH: Final = re.compile(rb"(?:/(?!\.\.?(?:/|\Z))[A-Za-z0-9._~-]+)*/?\Z")


def query_pairs(query: bytes) -> list[tuple[bytes, bytes]]:
    """Names and values of a query string or form, decoded, in their order. Raises Refusal for too many."""
    if query.count(b"&") >= limits.FORM_PAIRS_MAX:
        text = f"A request can have at most {limits.FORM_PAIRS_MAX} parameters."
        raise Refusal(errors.MALFORMED_QUERY_STRING, text)
    pairs = []
    for part in query.split(b"&"):
        if part:
            name, _, value = part.partition(b"=")
            pairs.append((_decoded(name), _decoded(value)))
    return pairs


def _decoded(text: bytes) -> bytes:
    if b"+" in text:
        text = text.replace(b"+", b" ")
    return unquote_to_bytes(text) if b"%" in text else text


def canonical_query(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The pairs encoded and sorted by encoded name, then value."""
    encoded = sorted((quote_from_bytes(name, "-_.~"), quote_from_bytes(value, "-_.~")) for name, value in pairs)
    return "&".join(f"{name}={value}" for name, value in encoded).encode()


def canonical_path(path: bytes) -> bytes:
    """The path as sent, without dot segments and empty ones, encoded once more (all services except S3)."""
    if _PLAIN_PATH.match(path):
        return path or b"/"
    kept: list[bytes] = []
    for segment in path.split(b"/"):
        if segment == b"..":
            del kept[-1:]
        elif segment not in {b"", b"."}:
            kept.append(segment)
    normal = b"/" + b"/".join(kept) + (b"/" if kept and path.endswith(b"/") else b"")
    return quote(normal, safe="/~").encode()


def normal_values(names: Sequence[bytes], values: Sequence[bytes], repeated: frozenset[bytes]) -> list[bytes]:
    """Header values with single blanks inside and none around; repeated headers joined by a plain comma."""
    return [
        b" ".join((value.replace(b", ", b",") if name in repeated else value).split())
        for name, value in zip(names, values, strict=True)
    ]


ALGORITHM: Final = b"AWS4-HMAC-SHA256"
SERVICE: Final = b"sqs"
TERMINATOR: Final = b"aws4_request"
OLD_SCHEMES: Final = (b"AWS ", b"AWS3 ", b"AWS3-HTTPS ")
"""How Authorization headers of earlier signature versions begin."""

_SCHEME: Final = re.compile(rb"[A-Za-z0-9-]{1,32}")
_ANONYMOUS: Final = "anonymous"
_KEY_ID_CHARACTERS_MAX: Final = 128
"""Bound of an unchecked key id, because it goes into the history."""
_UNPRINTABLE: Final = re.compile(r"[^ -~]")
"""A claimed id is shown as SenderId, also in XML."""
_PARAMETERS: Final = tuple(
    b"X-Amz-" + name for name in (b"Algorithm", b"Credential", b"Signature", b"SignedHeaders", b"Date")
)


def too_old() -> Refusal:
    """Refusal of a signature version that AWS no longer accepts."""
    return Refusal(errors.INVALID_SECURITY, "The request must be signed with AWS Signature Version 4.")


def claimed(request: Request, authorization: bytes | None) -> tuple[str, str | None]:
    """Key id and region that a request claims, unverified; an unclaimed region is None."""
    credential = b""
    if authorization is not None:
        found = re.search(rb"Credential=([^,\s]+)", authorization)
        credential = found[1] if found else b""
    elif b"X-Amz-Credential" in request.query:
        credential = dict(query_pairs(request.query)).get(b"X-Amz-Credential", b"")
    parts = _UNPRINTABLE.sub("?", credential.decode("utf-8", "replace")).rsplit("/", 4)
    region = parts[2] if len(parts) == 5 and limits.REGION.match(parts[2]) else None
    return parts[0][:_KEY_ID_CHARACTERS_MAX] or _ANONYMOUS, region


def show(value: bytes) -> str:
    """A client's bytes, as text for an error message."""
    text = value.decode("utf-8", "replace")
    return text if len(text) <= 256 else text[:256] + "..."


def parse_authorization(value: bytes) -> tuple[bytes, tuple[bytes, ...], bytes]:
    """Credential, names of the signed headers, signature."""
    algorithm, _, parameters = value.partition(b" ")
    if algorithm != ALGORITHM:
        if not (parameters and _SCHEME.fullmatch(algorithm)):  # it may be a secret, which belongs in no log
            algorithm = b""
        raise Refusal(errors.INCOMPLETE_SIGNATURE, f"Unsupported AWS 'algorithm': '{show(algorithm)}'.")
    named: dict[bytes, bytes] = {}
    for part in parameters.split(b","):
        name, _, text = part.strip().partition(b"=")
        if name in named:
            raise Refusal(errors.INCOMPLETE_SIGNATURE, f"Authorization header repeats '{show(name)}'.")
        named[name] = text
    lacking = [name for name in (b"Credential", b"Signature", b"SignedHeaders") if not named.get(name)]
    if lacking:
        wanted = " ".join(f"Authorization header requires '{show(name)}' parameter." for name in lacking)
        raise Refusal(errors.INCOMPLETE_SIGNATURE, wanted)
    return named[b"Credential"], tuple(named[b"SignedHeaders"].split(b";")), named[b"Signature"]


def parse_parameters(pairs: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The `X-Amz-` parameters of a signed URL: complete, and none given twice."""
    named: dict[bytes, bytes] = {}
    for name, value in pairs:
        if name.startswith(b"X-Amz-"):
            if name in named:
                raise Refusal(errors.INCOMPLETE_SIGNATURE, f"AWS query-string parameter {show(name)} is repeated.")
            named[name] = value
    lacking = [name.decode() for name in _PARAMETERS if not named.get(name)]
    if lacking:
        text = " ".join(f"AWS query-string parameters must include '{name}'." for name in lacking)
        raise Refusal(errors.INCOMPLETE_SIGNATURE, text)
    algorithm = named[b"X-Amz-Algorithm"]
    if algorithm != ALGORITHM:
        raise Refusal(errors.INCOMPLETE_SIGNATURE, f"Unsupported AWS 'algorithm': '{show(algorithm)}'.")
    return named


def parse_credential(credential: bytes, stamp: bytes) -> tuple[str, bytes, bytes]:
    """Key id, day and region of a valid credential scope."""
    parts = credential.rsplit(b"/", 4)
    if len(parts) != 5:
        text = (
            "Credential must have exactly 5 slash-delimited elements, e.g. keyid/date/region/service/term, "
            f"got '{show(credential)}'."
        )
        raise Refusal(errors.INCOMPLETE_SIGNATURE, text)
    key_id, day, region, service, terminator = parts
    wrong = []
    if day != stamp[:8]:
        wrong.append(
            "Date in Credential scope does not match YYYYMMDD from ISO-8601 version of date from HTTP: "
            f"'{show(day)}' != '{show(stamp[:8])}', from '{show(stamp)}'."
        )
    if not limits.REGION.match(show(region)):
        wrong.append(f"Credential should be scoped to a valid region, not '{show(region)}'.")
    if service != SERVICE:
        wrong.append(f"Credential should be scoped to correct service: '{SERVICE.decode()}'.")
    if terminator != TERMINATOR:
        text = f"Credential should be scoped with a valid terminator: 'aws4_request', not '{show(terminator)}'."
        wrong.append(text)
    if wrong:
        raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, " ".join(wrong))
    return key_id.decode("utf-8", "replace"), day, region


SKEW_US: Final = limits.SKEW_SECONDS_MAX * SECOND_US

_STAMP: Final = re.compile(rb"[0-9]{8}T[0-9]{6}Z\Z")


def stamp_of(headers: dict[bytes, bytes]) -> bytes:
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
        moment = parsedate_to_datetime(date.decode("latin-1"))
        if moment.tzinfo is not None:  # `-0000` has none, and is UTC
            moment = moment.astimezone(UTC)
        return moment.strftime("%Y%m%dT%H%M%SZ").encode()
    except (ValueError, OverflowError):
        raise _bad_date(date) from None


def _bad_date(stamp: bytes) -> Refusal:
    text = f"Date must be in ISO-8601 'basic format'. Got '{show(stamp)}'. See http://en.wikipedia.org/wiki/ISO_8601"
    return Refusal(errors.INCOMPLETE_SIGNATURE, text)


def seconds_of(stamp: bytes) -> int:
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


def check_stamp(stamp: bytes, seconds: int, day: bytes, wall: Instant, term_s: int | None = None) -> None:
    """`term_s`: the X-Amz-Expires of a signed URL. Raises SignatureDoesNotMatch if the stamp is too old, too early or
    of another day than the scope, RequestExpired if the URL's term is over."""
    if day != stamp[:8]:
        text = f"Date in Credential scope does not match the request's: '{show(day)}' != '{show(stamp[:8])}'."
        raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, text)
    lasts_s, fault = limits.SKEW_SECONDS_MAX, errors.SIGNATURE_DOES_NOT_MATCH
    if term_s is not None:
        lasts_s, fault = term_s, errors.REQUEST_EXPIRED
    if wall > (seconds + lasts_s) * SECOND_US:
        text = f"Signature expired: {show(stamp)} is now earlier than {_format(wall // SECOND_US - lasts_s)}"
        span = f"{lasts_s} s." if lasts_s % 60 else f"{lasts_s // 60} min."
        raise Refusal(fault, f"{text} ({_format(wall // SECOND_US)} - {span})")
    if wall < seconds * SECOND_US - SKEW_US:
        text = f"Signature not yet current: {show(stamp)} is still later than"
        later = _format(wall // SECOND_US + limits.SKEW_SECONDS_MAX)
        raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, f"{text} {later} ({_format(wall // SECOND_US)} + 15 min.)")


def term_of(value: bytes | None) -> int | None:
    """How many seconds a signed URL is valid, from X-Amz-Expires.

    It is optional: npm's aws4 and aws4fetch omit it, and their URLs are valid as long as a header is.
    """
    if value is None:
        return None
    if not value.isdigit() or len(value) > 9 or not 1 <= int(value) <= limits.PRESIGNED_SECONDS_MAX:
        text = f"X-Amz-Expires must be a number of seconds from 1 to {limits.PRESIGNED_SECONDS_MAX}."
        raise Refusal(errors.INCOMPLETE_SIGNATURE, text)
    return int(value)
