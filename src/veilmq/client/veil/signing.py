"""Requests as bytes, with Signature Version 4.

Strategy: three headers are signed (host, x-amz-date, x-amz-target). What stays the same is computed once: the signing
key for a day (as two prepared states, veilmq.protocols.keyed), everything but the payload's hash and the signature for
a second and operation. A request then costs two SHA-256 and one HMAC. Source: AWS IAM User Guide, "Signature Version 4
for API requests".
"""

import time
from hashlib import sha256
from typing import Any, Final

from veilmq.client.client_name import client_name
from veilmq.client.clock import Clock
from veilmq.model.reports import REPORT_HEADER
from veilmq.protocols.keyed import Keyed

_SERVICE: Final = b"sqs"
_TERMINATOR: Final = b"aws4_request"


class _Day:
    """What holds for all requests of a day."""

    def __init__(self, secret: bytes, day: bytes, region: bytes) -> None:
        self.day = day
        self.scope = b"/".join((day, region, _SERVICE, _TERMINATOR))
        key = b"AWS4" + secret
        for part in (day, region, _SERVICE, _TERMINATOR):
            key = Keyed(key).digest(part)
        self.mac = Keyed(key)


class _Second:
    """What holds for all requests of a second."""

    def __init__(self, second: int, stamp: bytes, day: _Day) -> None:
        self.second = second
        self.stamp = stamp
        self.day = day
        self.to_sign = b"AWS4-HMAC-SHA256\n%b\n%b\n" % (stamp, day.scope)
        self.operations: dict[bytes, tuple[Any, bytes]] = {}
        """Target -> (SHA-256 state of the canonical request but the payload's hash, head up to the signature)."""


class Signer:
    """Makes requests to one server with one key. Safe for threads: what it remembers is replaced whole."""

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
        """How far the server's clock is ahead of ours, once it refused a request for that."""

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
        """Stamp by the server's clock, which shows `theirs` (Unix seconds) now."""
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
