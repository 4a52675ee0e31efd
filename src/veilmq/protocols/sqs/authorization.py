"""Parses a request's signature: scheme, key, scope, names of the signed headers. Nothing here is verified.

Strategy: the Authorization header and the parameters of a signed URL follow the same rules, and errors are in AWS's
words. Source: AWS IAM User Guide, "Signature Version 4 for API requests".
"""

import re
from collections.abc import Sequence
from typing import Final

from veilmq.protocols.http import Request
from veilmq.protocols.sqs import errors, limits
from veilmq.protocols.sqs.canonical import query_pairs
from veilmq.protocols.sqs.errors import Refusal

ALGORITHM: Final = b"AWS4-HMAC-SHA256"
SERVICE: Final = b"sqs"
TERMINATOR: Final = b"aws4_request"
OLD_SCHEMES: Final = (b"AWS ", b"AWS3 ", b"AWS3-HTTPS ")
"""How Authorization headers of earlier signature versions begin."""

_ANONYMOUS: Final = "anonymous"
_KEY_ID_CHARACTERS_MAX: Final = 128
"""Bound of an unchecked key id, because it goes into the history."""
_PARAMETERS: Final = tuple(
    b"X-Amz-" + name for name in (b"Algorithm", b"Credential", b"Signature", b"SignedHeaders", b"Date")
)


def too_old() -> Refusal:
    """Refusal of a signature version that AWS no longer accepts."""
    return Refusal(errors.INVALID_SECURITY, "The request must be signed with AWS Signature Version 4.")


def region_of_host(base_domain: str, host: str) -> str | None:
    """The region that a host of the form `sqs.<region>.<base domain>` names, with or without a port."""
    name, ending = host.partition(":")[0].lower(), "." + base_domain.lower()
    if not name.startswith("sqs.") or not name.endswith(ending):
        return None
    region = name[len("sqs.") : -len(ending)]
    return region if limits.REGION.match(region) else None


def claimed(request: Request, authorization: bytes | None) -> tuple[str, str | None]:
    """Key id and region that a request claims, unverified; an unclaimed region is None."""
    credential = b""
    if authorization is not None:
        found = re.search(rb"Credential=([^,\s]+)", authorization)
        credential = found[1] if found else b""
    elif b"X-Amz-Credential" in request.query:
        credential = dict(query_pairs(request.query)).get(b"X-Amz-Credential", b"")
    parts = credential.decode("utf-8", "replace").rsplit("/", 4)
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
