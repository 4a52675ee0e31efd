"""The strings that SharedKey and SharedKeyLite sign.

Strategy: headers as they came, in the two orders in which clients sort them: by bytes, and as the service itself does,
where a hyphen or apostrophe only decides between names that are otherwise equal and punctuation comes before digits
before letters. Source: "Authorize with Shared Key" on learn.microsoft.com.
"""

from typing import Final

from veilmq.protocols.azure import limits
from veilmq.protocols.http import Request

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
_CHARACTERS: Final = "!#$%&*.^_`|~+0123456789abcdefghijklmnopqrstuvwxyz"
_ORDER: Final = {character: place for place, character in enumerate(_CHARACTERS)}


def _service_order(name: bytes) -> tuple[list[int], int, bytes]:
    text = name.decode("latin-1")
    weights = [_ORDER.get(character, 0) for character in text if character not in "-'"]
    hyphens = [place for place, character in enumerate(text) if character in "-'"]
    return weights, -hyphens[0] if hyphens else -len(text), name


def header_orders(headers: dict[bytes, bytes]) -> list[list[bytes]]:
    """The names of the `x-ms-` headers in each order that a client may have signed them in."""
    by_bytes = sorted(name for name in headers if name.startswith(b"x-ms-"))
    by_service = sorted(by_bytes, key=_service_order)
    return [by_bytes] if by_service == by_bytes else [by_bytes, by_service]


def _canonical_headers(headers: dict[bytes, bytes], names: list[bytes]) -> bytes:
    return b"".join([b"%b:%b\n" % (name, headers[name]) for name in names])


def shared_key_text(
    request: Request, account: str, parameters: dict[str, str], version: str, names: list[bytes]
) -> bytes:
    """What SharedKey signs; `names`: the `x-ms-` headers, in order."""
    headers = request.headers
    length = headers.get(b"content-length", b"")
    if length == b"0" and version >= limits.VERSION_EMPTY_LENGTH:
        length = b""
    values = [headers.get(name, b"") for name in _SIGNED]
    if b"x-ms-date" in headers:
        values[2] = b""
    first = b"%b\n%b\n%b\n%b\n" % (
        request.method.encode(),
        headers.get(b"content-encoding", b""),
        headers.get(b"content-language", b""),
        length,
    )
    query = "".join([f"\n{name}:{parameters[name]}" for name in sorted(parameters)])
    return b"%b%b\n%b/%b%b%b" % (
        first,
        b"\n".join(values),
        _canonical_headers(headers, names),
        account.encode(),
        request.path,
        query.encode(),
    )


def shared_key_lite_text(request: Request, account: str, parameters: dict[str, str], names: list[bytes]) -> bytes:
    """What SharedKeyLite signs."""
    headers = request.headers
    date = b"" if b"x-ms-date" in headers else headers.get(b"date", b"")
    comp = parameters.get("comp")
    return b"%b\n%b\n%b\n%b\n%b/%b%b%b" % (
        request.method.encode(),
        headers.get(b"content-md5", b""),
        headers.get(b"content-type", b""),
        date,
        _canonical_headers(headers, names),
        account.encode(),
        request.path,
        b"" if comp is None else b"?comp=" + comp.encode(),
    )
