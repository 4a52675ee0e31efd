"""The canonical request of Signature Version 4: path, query, header values.

Strategy: pure functions of bytes. Percent-encoding is decoded and encoded again in the one form of the specification,
so that it does not matter which characters a client escapes. Source: AWS IAM User Guide, "Create a signed AWS API
request".
"""

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

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
