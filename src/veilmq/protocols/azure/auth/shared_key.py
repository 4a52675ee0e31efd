"""The strings that SharedKey and SharedKeyLite sign, and the check of an HMAC by any of an account's keys.

Strategy: headers as sent, in the two orders in which clients sort them: by bytes, and as the service does, where
hyphens and apostrophes only break ties, and punctuation comes before digits before letters. Where the documented text
differs from what was sent (blanks folded to one, empty headers omitted before 2016-05-31, the secondary's path without
its suffix), both texts are accepted, because SDKs differ. Source: "Authorize with Shared Key" on learn.microsoft.com.
"""

import binascii
import re
from base64 import b64decode
from collections.abc import Iterator
from functools import lru_cache
from hmac import compare_digest
from itertools import product
from typing import Final

from veilmq.protocols import Keyed, Request
from veilmq.protocols.azure import errors, limits
from veilmq.protocols.azure.addresses import SECONDARY
from veilmq.protocols.azure.errors import Refusal, bad_header, unauthenticated

_SIGNED: Final = (
    b"content-md5",
    b"content-type",
    b"date",
    b"if-modified-since",
    b"if-match",
    b"if-none-match",
    b"if-unmodified-since",
    b"range",
)
_FIRST: Final = (b"content-encoding", b"content-language", b"content-length")
_BLANKS: Final = re.compile(rb'"[^"]*"|[ \t]{2,}|\t')
_CHARACTERS: Final = "!#$%&*.^_`|~+0123456789abcdefghijklmnopqrstuvwxyz"
_ORDER: Final = {character: place for place, character in enumerate(_CHARACTERS)}


def _service_order(name: bytes) -> tuple[list[int], int, bytes]:
    text = name.decode("latin-1")
    weights = [_ORDER.get(character, 0) for character in text if character not in "-'"]
    hyphens = [place for place, character in enumerate(text) if character in "-'"]
    return weights, -hyphens[0] if hyphens else -len(text), name


def readings(request: Request, version: str, secondary: bool, outside: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """Possible CanonicalizedHeaders and paths that a client signed; the most common first.

    `outside`: the prefix that a proxy strips from the path that clients sign.
    """
    headers, path = request.headers, request.path
    by_bytes = sorted(name for name in headers if name.startswith(b"x-ms-"))
    yield _lines(headers, by_bytes), path
    paths = [path, path.replace(SECONDARY.encode(), b"", 1)] if secondary and SECONDARY.encode() in path else [path]
    if outside:
        paths += [outside + each for each in paths]
    sets = [headers]
    if any(_BLANKS.search(headers[name]) for name in by_bytes):
        sets.append({name: _folded(headers[name]) for name in by_bytes})
    orders = [by_bytes, sorted(by_bytes, key=_service_order)]
    if version < limits.VERSION_PUT_RESULT:
        orders += [[name for name in order if headers[name]] for order in orders]
    seen = {(_lines(headers, by_bytes), path)}
    for values, names, each in product(sets, orders, paths):
        reading = (_lines(values, names), each)
        if reading not in seen:
            seen.add(reading)
            yield reading


def _lines(headers: dict[bytes, bytes], names: list[bytes]) -> bytes:
    return b"".join([b"%b:%b\n" % (name, headers[name]) for name in names])


def _folded(value: bytes) -> bytes:
    """Replace every run of blanks outside quotes by one space."""
    return _BLANKS.sub(lambda found: found[0] if found[0].startswith(b'"') else b" ", value)


def check_single(request: Request) -> None:
    """Raises Refusal if a signed header is repeated: the signed text would be ambiguous."""
    for name in sorted(request.duplicates):
        if name.startswith(limits.METADATA_PREFIX):
            raise Refusal(errors.INVALID_METADATA, {"HeaderName": name.decode("latin-1")})
        if name.startswith(b"x-ms-") or name in _FIRST or name in _SIGNED:
            raise bad_header(name.decode("latin-1"), request.headers[name].decode("latin-1"))


def shared_key_text(
    request: Request, account: str, parameters: dict[str, str], version: str, lines: bytes, path: bytes
) -> bytes:
    """The text that SharedKey signs; `lines` and `path` are one reading of the request."""
    headers = request.headers
    length = headers.get(b"content-length", b"")
    if length == b"0" and version >= limits.VERSION_EMPTY_LENGTH:
        length = b""
    values = [headers.get(name, b"") for name in _SIGNED]
    if b"x-ms-date" in headers:
        values[2] = b""
    encoding, language = (headers.get(name, b"") for name in _FIRST[:2])
    first = b"%b\n%b\n%b\n%b\n" % (request.method.encode(), encoding, language, length)
    query = "".join([f"\n{name}:{parameters[name]}" for name in sorted(parameters)])
    return b"%b%b\n%b/%b%b%b" % (
        first,
        b"\n".join(values),
        lines,
        account.encode(),
        path,
        query.encode(),
    )


def shared_key_lite_text(
    request: Request, account: str, parameters: dict[str, str], lines: bytes, path: bytes
) -> bytes:
    """The text that SharedKeyLite signs."""
    headers = request.headers
    date = b"" if b"x-ms-date" in headers else headers.get(b"date", b"")
    comp = parameters.get("comp")
    return b"%b\n%b\n%b\n%b\n%b/%b%b%b" % (
        request.method.encode(),
        headers.get(b"content-md5", b""),
        headers.get(b"content-type", b""),
        date,
        lines,
        account.encode(),
        path,
        b"" if comp is None else b"?comp=" + comp.encode(),
    )


_SIGNATURE_BYTES: Final = 32
_keyed = lru_cache(256)(Keyed)


def read_signature(text: bytes) -> bytes:
    """The 32 bytes of a signature. Raises Refusal."""
    try:
        raw = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != _SIGNATURE_BYTES:
        raise unauthenticated("The signature is not 32 bytes in base64.")
    return raw


def matches(secrets: tuple[bytes, ...], text: bytes, signature: bytes) -> bool:
    """Whether one of the secrets gives this signature of the text."""
    return any(compare_digest(_keyed(secret).digest(text), signature) for secret in secrets)
