"""Requests to a server: signed, and exchanged with their answers over sockets that stay open.

Strategy: raw sockets and a parser for just the HTTP/1.1 answers that occur (a length or chunks), because http.client
costs several times as much. A socket that was used before is checked first: if it is readable, it has ended. Every
failure says whether the request may have been carried out: not before its last byte was given to the kernel. Source:
RFC 9112.

Signing: three headers are signed (host, x-amz-date, x-amz-target). What stays the same is computed once: the signing
key for a day (as two prepared states, veilmq.protocols); everything but the payload's hash and the signature for
a second and operation. A request then costs two SHA-256 and one HMAC. Source: AWS IAM User Guide, "Signature Version 4
for API requests".

Several servers, of a cluster: each endpoint, and each address that its name has, is a place to connect to. A new
connection goes to the place that failed longest ago, so a client stays where it is until that fails.
"""

import errno
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from veilmq.client.adapters.cloud import check_poll, client_name
from veilmq.client.clock import Clock
from veilmq.client.errors import TransportError, advised
from veilmq.client.shared.lifetimes import forget_in_child
from veilmq.model.messages import REPORT_HEADER
from veilmq.protocols import Keyed

_READ_BYTES: Final = 65_536
_HEAD_BYTES_MAX: Final = 65_536
ANSWER_BYTES_MAX: Final = 192 * 1024 * 1024
"""64 messages of 1 MiB, each character of which may take two in JSON."""
_IDLE_MAX: Final = 64
_LEFT_MAX: Final = 1_000
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
_REFUSAL_SECONDS: Final = 0.2
"""How long to wait for an answer if the request could not be sent completely."""
_CLOSED: Final = "the server closed the connection"
_CLOSED_UNSAID: Final = f"{_CLOSED} without a word, as a port with TLS does to a client without (tls=1)"


class Answer(msgspec.Struct, gc=False):
    """One complete answer."""

    status: int
    head: bytes
    body: bytes
    last: bool
    """The server closes the connection after it."""

    def header(self, name: bytes) -> bytes:
        """The value of a header, by its name in lower case; empty if missing."""
        return _header(self.head, name)


def _header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        found, _, value = line.partition(b":")
        if found.lower() == name:
            return value.strip()
    return b""


class Connection:
    """One socket. Used by one thread at a time; `abort` and `finish` by any."""

    __slots__ = (
        "_answered", "_clock", "_deadline", "_limit", "_poll", "_socket", "_timeout", "finished", "place", "used",
    )  # fmt: skip

    def __init__(self, connected: socket.socket, clock: Clock, place: "Place") -> None:
        self.place = place
        self._socket = connected
        self._clock = clock
        self._timeout = connected.gettimeout()
        """The socket's current timeout; None: the connection can no longer be used."""
        self._limit = 0.0
        """Seconds for the current answer."""
        self._deadline = 0.0
        """When that time is over; 0: the clock has not been read yet."""
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self.used = False
        self._answered = isinstance(connected, ssl.SSLSocket)
        """Whether the other side is known to speak our protocol."""
        self.finished = False
        """Nothing more is sent on it."""

    @property
    def ended(self) -> bool:
        """Whether the server closed it or sent something unasked, so that nothing may be sent on it."""
        return bool(self._poll.poll(0))

    def abort(self) -> None:
        """End it while another thread uses it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """Send no more: the server answers a waiting request or closes. An answer on its way still arrives."""
        self.finished = True
        with suppress(OSError):
            # Below TLS, whose own shutdown would leave data that the reader cannot decrypt.
            socket.socket.shutdown(self._socket, socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def exchange(self, request: bytes, timeout: float) -> Answer:
        """The answer to a request, within `timeout` seconds from now. Raises TransportError."""
        self.used = True
        self._limit, self._deadline = timeout, 0.0
        if timeout != self._timeout:
            self._socket.settimeout(timeout)
            self._timeout = timeout
        try:
            self._socket.sendall(request)
        except OSError as error:
            # It was not sent completely, so it was not carried out; but the server may have sent a refusal.
            try:
                return self._refusal()
            except (OSError, ValueError):
                pass
            raise TransportError(reason=f"sending failed: {error}", may_have_happened=False) from error
        try:
            return self._read()
        except TimeoutError as error:
            raise TransportError(reason=f"no answer within {timeout:g} s", may_have_happened=True) from error
        except (OSError, ValueError) as error:
            raise TransportError(reason=f"no whole answer: {error}", may_have_happened=True) from error

    def _refusal(self) -> Answer:
        self._socket.settimeout(_REFUSAL_SECONDS)
        self._limit = _REFUSAL_SECONDS
        answer = self._read()
        answer.last = True
        return answer

    def _read(self) -> Answer:
        """Raises OSError (TimeoutError after a timeout), ValueError for an invalid HTTP/1.1 answer."""
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError(_CLOSED if self._answered else _CLOSED_UNSAID)
        self._answered = True
        end = data.find(b"\r\n\r\n")
        if end < 0 or data[9:10] == b"1":
            data, end = self._rest_of_head(data)
        head = data[:end]
        status = _status(head)
        start = end + 4
        place = head.find(b"\r\nContent-Length: ")
        if place >= 0:
            until = head.find(b"\r\n", place + 18)
            length = _length(head[place + 18 :] if until < 0 else head[place + 18 : until])
        else:
            length = _length_of(head)
            if length < 0:
                return Answer(status, head, self._chunked(data[start:]), last=True)
        lacking = start + length - len(data)
        if lacking > 0:
            body = data[start:] + self._exactly(lacking)
        else:
            body = data[start : start + length]
        return Answer(status, head, body, last=lacking < 0 or _is_last(head))

    def _rest_of_head(self, data: bytes) -> tuple[bytes, int]:
        """At least all data up to the end of the final answer's head, and its position. Skips 1xx (RFC 9110, 15.2)."""
        while True:
            end = data.find(b"\r\n\r\n")
            if end >= 0 and data[9:10] != b"1":
                return data, end
            if end >= 0:
                data = data[end + 4 :]
                continue
            if len(data) > _HEAD_BYTES_MAX:
                raise ValueError("the head of the answer is too long")
            data += self._more()

    def _more(self) -> bytes:
        now = self._clock.monotonic()
        self._deadline = self._deadline or now + self._limit
        left = self._deadline - now
        if left <= 0:
            raise TimeoutError
        self._timeout = None
        self._socket.settimeout(left)
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError(_CLOSED)
        return data

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count > 0:
            data = self._more()
            count -= len(data)
            parts.append(data)
        if count < 0:
            raise ValueError("more data than the answer has")
        return b"".join(parts)

    def _chunked(self, data: bytes) -> bytes:
        """The body of an answer in chunks (RFC 9112, 7.1), which proxies send. Trailers stay unread, so the connection
        is not used again."""
        parts: list[bytes] = []
        total = 0
        while True:
            while b"\r\n" not in data:
                if len(data) > _HEAD_BYTES_MAX:
                    raise ValueError("the size of a chunk is too long")
                data += self._more()
            line, _, data = data.partition(b"\r\n")
            size = int(line.partition(b";")[0].strip(), 16)
            total += size
            if size < 0 or total > ANSWER_BYTES_MAX:
                raise ValueError("the answer is too large")
            if not size:
                return b"".join(parts)
            while len(data) < size + 2:
                data += self._more()
            parts.append(data[:size])
            data = data[size + 2 :]


def _status(head: bytes) -> int:
    if not head.startswith(b"HTTP/1."):
        raise ConnectionError(_CLOSED) if not head else ValueError("this is not HTTP/1.1")
    return int(head[9:12])


def _length(text: bytes) -> int:
    if not text.isdigit():
        raise ValueError("the length of the answer is no number")
    length = int(text)
    if length > ANSWER_BYTES_MAX:
        raise ValueError("the answer is too large")
    return length


def _length_of(head: bytes) -> int:
    """The length of a body whose header is not in our own server's form; -1 for chunks."""
    if _header(head, b"transfer-encoding"):
        return -1
    text = _header(head, b"content-length")
    if text:
        return _length(text)
    if head[9:12] in {b"204", b"304"}:
        return 0
    raise ValueError("the answer has no length")


def _is_last(head: bytes) -> bool:
    return b"lose" in head and b"close" in _header(head, b"connection").lower()


class Endpoint(NamedTuple):
    """A server, or several behind one name."""

    host: str
    port: int
    signer: "Signer"


class Place(NamedTuple):
    """One address of an endpoint."""

    endpoint: Endpoint
    family: int
    address: tuple[Any, ...]


class Pool:
    """Open connections to the endpoints, for any number of threads."""

    def __init__(
        self, endpoints: Sequence[Endpoint], context: ssl.SSLContext | None, connect_timeout: float, clock: Clock
    ) -> None:
        check_poll()
        self._endpoints = endpoints
        self.places_count = len(endpoints)
        """Places to go on to when one fails; grows when a name turns out to have several addresses of one family."""
        self._left: dict[tuple[Any, ...], int] = {}
        """Addresses that failed: the greater, the later."""
        self._context = context
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._idle: deque[Connection] = deque()
        self.closed = False
        forget_in_child(self)  # parent and child would read each other's answers

    def take(self) -> Connection:
        """An open connection, or a new one. Raises TransportError; nothing was sent then."""
        idle = self._idle
        while idle:
            try:
                connection = idle.pop()
            except IndexError:
                break
            if not connection.ended:
                return connection
            connection.close()
        return self.connect()

    def connect(self, late: bool = False) -> Connection:
        """A new one; `late`: even after the close. Raises TransportError; nothing was sent then."""
        if self.closed and not late:
            raise TransportError(reason="the account is closed", may_have_happened=False)
        failed: list[tuple[Endpoint, Exception]] = []
        for place in self._places(failed):
            try:
                return Connection(self._opened(place), self._clock, place)
            except OSError as error:
                failed.append((place.endpoint, error))
                if error.errno in _OURS:
                    break
                self.leave(place)
        endpoint, last = failed[-1]
        raise TransportError(reason=_unreached(endpoint, last), may_have_happened=False) from last

    def _places(self, failed: list[tuple[Endpoint, Exception]]) -> Iterator[Place]:
        """All places, those that failed longest ago first. failed: gets the endpoints whose names have no address."""
        found: list[Place] = []
        for endpoint in self._endpoints:
            try:
                listed = socket.getaddrinfo(endpoint.host, endpoint.port, 0, socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                failed.append((endpoint, error))
            else:
                found += [Place(endpoint, family, address) for family, _, _, _, address in listed]
        families = [place.family for place in found]
        self.places_count = max([len(self._endpoints), *map(families.count, set(families))])
        return iter(sorted(found, key=lambda place: self._left.get(place.address, 0)))

    def _opened(self, place: Place) -> socket.socket:
        connected = socket.socket(place.family, socket.SOCK_STREAM)
        try:
            connected.settimeout(self._connect_timeout)
            connected.connect(place.address)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                return self._context.wrap_socket(connected, server_hostname=place.endpoint.host)
        except OSError:
            connected.close()
            raise
        return connected

    def leave(self, place: Place) -> None:
        """A place failed: others are tried before it, and nothing more is sent on what is open to it."""
        if len(self._left) > _LEFT_MAX:
            self._left.clear()
        self._left[place.address] = max(self._left.values(), default=0) + 1
        for connection in list(self._idle):
            if connection.place.address == place.address:
                connection.finish()  # who takes it closes it

    def give(self, connection: Connection) -> None:
        """Return a connection to the pool."""
        idle = self._idle
        if self.closed or len(idle) >= _IDLE_MAX:
            connection.close()
            return
        idle.append(connection)
        if len(idle) > 1:
            self._look_at_oldest()

    def _look_at_oldest(self) -> None:
        """Drop the oldest connection if the server closed it: the pool takes the last used first, so it would stay
        unnoticed."""
        try:
            oldest = self._idle.popleft()
        except IndexError:
            return
        if oldest.ended:
            oldest.close()
        else:
            self._idle.appendleft(oldest)

    def close(self) -> None:
        """Close all connections; those in use when they are returned."""
        self.closed = True
        self.forget()

    def forget(self) -> None:
        """Close the idle ones."""
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                break


_SERVICE: Final = b"sqs"
_TERMINATOR: Final = b"aws4_request"


class _Day:
    """Values shared by all requests of a day."""

    def __init__(self, secret: bytes, day: bytes, region: bytes) -> None:
        self.day = day
        self.scope = b"/".join((day, region, _SERVICE, _TERMINATOR))
        key = b"AWS4" + secret
        for part in (day, region, _SERVICE, _TERMINATOR):
            key = Keyed(key).digest(part)
        self.mac = Keyed(key)


class _Second:
    """Values shared by all requests of a second."""

    def __init__(self, second: int, stamp: bytes, day: _Day) -> None:
        self.second = second
        self.stamp = stamp
        self.day = day
        self.to_sign = b"AWS4-HMAC-SHA256\n%b\n%b\n" % (stamp, day.scope)
        self.operations: dict[bytes, tuple[Any, bytes]] = {}
        """Target -> (SHA-256 state of the canonical request without the payload's hash, head up to the signature)."""


def _unreached(endpoint: Endpoint, error: Exception) -> str:
    """Why there is no connection; a limit of this machine is not blamed on the server."""
    if isinstance(error, OSError) and error.errno in _OURS:
        return f"this process can open no connection: {error}"
    return advised(f"{endpoint.host}:{endpoint.port} cannot be reached: {error}")


class Signer:
    """Builds requests to one server with one key. Thread-safe: cached values are replaced as a whole."""

    def __init__(self, host: str, key: str, secret: str, region: str, token: str | None, clock: Clock) -> None:
        """`host`: the Host header. `token`: of temporary credentials. Raises UnicodeEncodeError, ValueError."""
        for name, value in (("host", host), ("key", key), ("region", region), ("token", token or "")):
            if not value.isascii() or not (value.isprintable() or not value) or " " in value:
                raise ValueError(f"{name} must be printable ASCII without blanks")
        self._host = host.encode()
        self._key = key.encode()
        self._secret = secret.encode()
        self._region = region.encode()
        self._token = None if token is None else token.encode()
        self._clock = clock
        self._current: _Second | None = None
        self.ahead_s = 0
        """How far the server's clock is ahead of ours; set when it refused a request for that reason."""

    def request(self, target: bytes, body: bytes, report: bytes = b"") -> bytes:
        """A whole request: POST / with that X-Amz-Target and JSON body; `report` is the header of that kind, if any."""
        second = int(self._clock.wall()) + self.ahead_s
        current = self._current
        if current is None or current.second != second:
            current = self._begin(second, current)
        known = current.operations.get(target)
        if known is None:
            known = current.operations[target] = self._prepare(current, target)
        canonical = known[0].copy()
        canonical.update(sha256(body).hexdigest().encode())
        signature = current.day.mac.digest(current.to_sign + canonical.hexdigest().encode()).hex().encode()
        if report:
            signature += b"\r\n%b: %b" % (REPORT_HEADER, report)
        return b"%b%b\r\nContent-Length: %d\r\n\r\n%b" % (known[1], signature, len(body), body)

    def correct(self, theirs: float) -> None:
        """From now on, stamp requests by the server's clock, which shows `theirs` (Unix seconds) now."""
        self.ahead_s = int(theirs) - int(self._clock.wall())

    def _begin(self, second: int, last: _Second | None) -> _Second:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second)).encode()
        if last is not None and last.day.day == stamp[:8]:
            day = last.day
        else:
            day = _Day(self._secret, stamp[:8], self._region)
        self._current = current = _Second(second, stamp, day)
        return current

    def _prepare(self, current: _Second, target: bytes) -> tuple[Any, bytes]:
        names = b"host;x-amz-date"
        signed = b"host:%b\nx-amz-date:%b\n" % (self._host, current.stamp)
        sent = b"Host: %b\r\nX-Amz-Date: %b\r\n" % (self._host, current.stamp)
        more = [(b"x-amz-target", target)]
        if self._token is not None:
            more.insert(0, (b"x-amz-security-token", self._token))
        for name, value in more:
            names += b";" + name
            signed += b"%b:%b\n" % (name, value)
            sent += b"%b: %b\r\n" % (name, value)
        canonical = sha256(b"POST\n/\n\n%b\n%b\n" % (signed, names))
        head = (
            b"POST / HTTP/1.1\r\n%bUser-Agent: %b\r\nContent-Type: application/x-amz-json-1.0\r\n"
            b"Authorization: AWS4-HMAC-SHA256 Credential=%b/%b, SignedHeaders=%b, Signature="
        ) % (sent, client_name().encode(), self._key, current.day.scope, names)
        return canonical, head
