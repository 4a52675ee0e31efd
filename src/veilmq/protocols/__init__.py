"""The wire protocols: pure codecs from bytes to commands, and from outcomes to bytes. Here are the two HTTP values of
every codec: a complete Request, and the Response to it.

Strategy: each protocol has its own room and knows no other. They share these two values, the strict XML and the caches.
Everything is bytes. Header names are in lower case and unique, values have no surrounding blanks, and the target is as
the client sent it, so that a signature is computed over the bytes on the wire. There is no engine, no store, no clock
and no I/O here.
"""

from urllib.parse import urlsplit

import msgspec


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
    """

    status: int
    content_type: bytes | None
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    close: bool = False
