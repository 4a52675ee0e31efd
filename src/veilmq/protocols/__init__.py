"""The wire protocols: pure codecs from bytes to commands, and from outcomes to bytes. Here are the two HTTP values of
every codec: a complete Request, and the Response to it; what codecs keep from one request to the next; and XML, read
with expat into a small tree.

Strategy: each protocol has its own room and knows no other. They share what is here. Everything is bytes. Header names
are in lower case and unique, values have no surrounding blanks, and the target is as the client sent it, so that a
signature is computed over the bytes on the wire. There is no engine, no store, no clock and no I/O here.

A cache is a dictionary that is emptied when it is full. Its values are cheap to compute again, a look-up costs as much
as a dictionary's, and no client can make it grow, neither with many texts nor with long ones.

For HMAC (RFC 2104) with a key that is used many times, the two hash states after the key's blocks are computed once and
copied for each text. That takes a third of the time of hmac.digest, which starts from the key each time
(bench/codec.py).

In XML a document type declaration is refused at once, so that no entity is ever defined. Depth and elements are bounded
here, bytes by the caller. Prefixes are dropped: no protocol here has two elements with one local name. Every error is
one exception with its position, which each protocol turns into its own refusal. Source: XML 1.0.
"""

import re
from collections.abc import Callable
from functools import lru_cache, wraps
from hashlib import sha256
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from xml.parsers import expat

import msgspec

Key = TypeVar("Key")
Value = TypeVar("Value")
_VALUE_CHARACTERS_MAX: Final = 256
_ATTRIBUTES_MAX: Final = 32
"""Of an XML element."""
_PIECE_BYTES: Final = 64 * 1024
"""A larger document is parsed in pieces: expat reads a tag with all its attributes, for seconds, before it calls."""
_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Request(msgspec.Struct, gc=False):
    """One complete request, within all limits of its listener.

    method: upper case, one of GET, HEAD, POST, PUT, DELETE, OPTIONS, PATCH.
    target: path and query as sent, undecoded; `*` for `OPTIONS *`. Of an absolute form (RFC 9112, 3.2.2) only these
        remain here, and the host with its port is in `authority`: see `host`.
    headers: name in lower case -> value. The values of a repeated header are joined by ", " (RFC 9110, 5.2) and its
        name is in `duplicates`; Host, Authorization, X-Amz-Date and the framing headers are never repeated.
    body: complete, without its transfer coding. Trailers are dropped.
    peer: the address of the client, without port. secure: it came over TLS.
    request_id: 36 characters in the form of a UUID, unique.
    header_case: name in lower case -> as it was sent, of headers whose name is a user's own (Azure's metadata).
    """

    method: str
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes
    peer: str
    secure: bool
    request_id: str
    authority: bytes | None = None
    duplicates: frozenset[bytes] = frozenset()
    header_case: dict[bytes, bytes] | None = None

    @property
    def host(self) -> bytes:
        """Host and port that the request is for; empty if it names none.

        An absolute form decides, whatever the Host header says (RFC 9112, 3.2.2).
        """
        return self.authority or self.headers.get(b"host", b"")

    @property
    def path(self) -> bytes:
        """The target before the first `?`, undecoded."""
        return self.target.partition(b"?")[0]

    @property
    def query(self) -> bytes:
        """The target after the first `?`, undecoded; empty without one."""
        return self.target.partition(b"?")[2]


def absolute_form(target: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Scheme, authority, and path with query of a target that is a URL (RFC 9112, 3.2.2); None for another form."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or b"/" in scheme:
        return None
    cut = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
    return scheme, rest[:cut], rest[cut:]


def is_secure(request: Request, trusted_proxy: bool) -> bool:
    """Whether the client used TLS, to us or to the proxy in front of us."""
    forwarded = request.headers.get(b"x-forwarded-proto", b"").partition(b",")[0].strip()
    return request.secure or (trusted_proxy and forwarded == b"https")


def address_used(request: Request, trusted_proxy: bool) -> str:
    """Scheme, host and port as the client addressed us, or the proxy before us; no slash at the end."""
    headers = request.headers
    scheme = b"https" if request.secure else b"http"
    host = request.host or b"localhost"
    if trusted_proxy:
        scheme = headers.get(b"x-forwarded-proto", scheme).partition(b",")[0].strip()
        host = headers.get(b"x-forwarded-host", host).partition(b",")[0].strip()
    return f"{scheme.decode('latin-1')}://{host.decode('latin-1')}"


def external_path(external_url: str | None) -> bytes:
    """The path of the external URL without a final slash; empty if there is none.

    A proxy strips it from the requests that it forwards, but clients have signed it.
    """
    return b"" if external_url is None else urlsplit(external_url).path.rstrip("/").encode()


def source_address(request: Request, trusted_proxy: bool) -> str:
    """The client's address, as seen by us or by the proxy in front of us."""
    forwarded = request.headers.get(b"x-forwarded-for", b"").rpartition(b",")[2].strip()
    return forwarded.decode("latin-1") if trusted_proxy and forwarded else request.peer


class Response(msgspec.Struct, gc=False):
    """One answer. The listener adds Date, Content-Length and Connection.

    status: 200 to 599. With 204 and 304 neither body nor length is written; an answer to HEAD has the length alone.
    headers: further (name, value) pairs. A line break in one of them is a bug: the client gets a 500.
    close: ends the connection after this answer.
    phrase: the reason phrase of the status line, one of a fixed set; empty: HTTP's own.
    """

    status: int
    content_type: bytes | None
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    close: bool = False
    phrase: bytes = b""


def show(value: str) -> str:
    """A client's value, shortened for a response."""
    return value if len(value) <= _VALUE_CHARACTERS_MAX else value[:_VALUE_CHARACTERS_MAX] + "..."


class Bounded(dict[Key, Value]):
    """Holds at most `entries_max` entries."""

    __slots__ = ("_entries_max",)

    def __init__(self, entries_max: int) -> None:
        super().__init__()
        self._entries_max = entries_max

    def keep(self, key: Key, value: Value) -> Value:
        """Store the value, and return it."""
        if len(self) >= self._entries_max:
            self.clear()
        self[key] = value
        return value


Text = TypeVar("Text", bytes, str)


def remembered(longest: int) -> Callable[[Callable[[Text], Value | None]], Callable[[Text], Value | None]]:
    """Decorator that caches a parser's results. A text longer than `longest` gives None and is not cached."""

    def remembering(read: Callable[[Text], Value | None]) -> Callable[[Text], Value | None]:
        known = lru_cache(1_024)(read)

        @wraps(known)
        def short(text: Text) -> Value | None:
            return known(text) if len(text) <= longest else None

        return short

    return remembering


_BLOCK_BYTES: Final = 64
_INNER_PAD: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD: Final = bytes(byte ^ 0x5C for byte in range(256))


class Keyed:
    """One key, for a hash of blocks of 64 bytes (SHA-1, SHA-256)."""

    __slots__ = ("_inner", "_outer", "key")

    def __init__(self, key: bytes, algorithm: "Callable[[bytes], Any]" = sha256) -> None:
        self.key = algorithm(key).digest() if len(key) > _BLOCK_BYTES else key
        block = self.key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = algorithm(block.translate(_INNER_PAD))
        self._outer = algorithm(block.translate(_OUTER_PAD))

    def digest(self, text: bytes) -> bytes:
        """The text's HMAC."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        digest: bytes = outer.digest()
        return digest


class Element(msgspec.Struct, gc=False):
    """An element: its name without prefix, its children, and all of its character data, untouched."""

    name: str
    raw: str
    children: list["Element"]

    @property
    def text(self) -> str:
        """The character data without surrounding blanks."""
        return self.raw.strip()


class DocumentInvalid(Exception):
    """The bytes are not a document, or one that is refused. line and column: 1 and 0 at the beginning."""

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line
        self.column = column


def read_document(body: bytes, depth_max: int, elements_max: int, plain: str = "") -> Element:
    """The outermost element.

    plain: the name of elements that have text alone: markup in them, which nobody reads, is left out but for its text,
    and is as deep as its bytes allow.

    Raises DocumentInvalid.
    """
    top = Element("", "", [])
    opened = [top]
    texts: list[list[str]] = [[]]
    """The character data of each open element, in the pieces between its children."""
    pieces: list[str] = []
    elements = inside = 0
    parser: Any = expat.ParserCreate()
    parser.buffer_text = True

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal elements, inside
        if inside or (plain and opened[-1].name == plain):
            inside += 1
            return
        elements += 1
        if len(opened) > depth_max or elements > elements_max or len(attributes) > _ATTRIBUTES_MAX:
            raise _at(parser, "the document is too deep or has too many elements or attributes")
        if pieces:
            texts[-1].append("".join(pieces))
            pieces.clear()
        element = Element(name.rpartition(":")[2] if ":" in name else name, "", [])
        opened[-1].children.append(element)
        opened.append(element)
        texts.append([])

    def end(name: str) -> None:
        nonlocal inside
        if inside:
            inside -= 1
            return
        ended, before = opened.pop(), texts.pop()
        if pieces or before:
            ended.raw = "".join((*before, *pieces))
            pieces.clear()

    def doctype(*ignored: object) -> None:
        raise _at(parser, "a document type is not allowed")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = pieces.append
    parser.StartDoctypeDeclHandler = doctype
    try:
        parsed = 0
        while len(body) - parsed > _PIECE_BYTES:
            parser.Parse(body[parsed : parsed + _PIECE_BYTES], False)
            parsed += _PIECE_BYTES
            if parsed - parser.CurrentByteIndex >= _PIECE_BYTES:
                raise _at(parser, "a tag or a comment is too long")
        parser.Parse(body[parsed:], True)
    except expat.ExpatError as error:
        raise DocumentInvalid(expat.ErrorString(error.code), error.lineno, error.offset) from None
    except (LookupError, ValueError):
        raise DocumentInvalid("the document's encoding is not supported") from None
    return top.children[0]


def _at(parser: Any, reason: str) -> DocumentInvalid:
    return DocumentInvalid(reason, parser.CurrentLineNumber, parser.CurrentColumnNumber)


def escape(text: str) -> str:
    """The text as character data. A parser reads a bare carriage return as a line feed (XML 1.0, 2.11)."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\r", "&#13;")


def clean(text: str) -> str:
    """`escape`, with characters replaced that XML cannot carry."""
    return escape(_NOT_XML.sub("\ufffd", text))
