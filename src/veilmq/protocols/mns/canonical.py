"""The signed texts: the string of V2, and the canonical request and string of V4.

Strategy: pure functions of the bytes on the wire. V2 signs the target as sent. V4 encodes path and query again, and
Java's signer does so from values that may or may not have been encoded for the wire: `queries` returns both readings,
and either is accepted. Source: docs/mns.md, "Signatures and errors".
"""

from typing import Final, NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

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
