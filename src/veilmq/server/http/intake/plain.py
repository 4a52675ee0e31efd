"""Reads a request that is one plain piece of input, in a few calls in C.

Strategy: almost every request of an SDK is one: a request line with a usual method, headers that come once each, and
exactly the body that Content-Length announces. What repeats from one request to the next is read once and remembered.
`read_plain` accepts less than llhttp does, and refuses nothing: it returns None, and then llhttp decides.

Before changing it: what `read_plain` accepts must give the same request in `Intake` without it, with an answer that
needs no flags. tests/server/test_plain.py and `make fuzz` compare the two.
"""

import re
from collections.abc import Callable
from typing import Final

from veilmq.accelerator import accelerated
from veilmq.protocols import Bounded, Request
from veilmq.server.http import Limits

_REQUEST_LINE: Final = re.compile(rb"(POST|GET|PUT|DELETE) (/[A-Za-z0-9/?&=%._~:@!$'()*+,;-]*) HTTP/1\.1\Z")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([ -~]*)\Z")
_HOST: Final = re.compile(
    rb"(?:\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._~%-]+)?\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?\Z"
)
"""RFC 9110, 7.2: uri-host [ ":" port ]. An IPv6 address may have a zone: RFC 6874, and as older clients write it."""
_LEFT_TO_LLHTTP: Final = frozenset({b"transfer-encoding", b"upgrade", b"expect", b"proxy-connection"})
OWN_CASE: Final = b"x-ms-meta-"
"""Azure's metadata, whose names keep their case (HeaderCaseIntake)."""
_ENTRIES_MAX: Final = 512
_ENTRY_BYTES_MAX: Final = 512

_LINES: Final[Bounded[bytes, tuple[str, bytes]]] = Bounded(_ENTRIES_MAX)
_SIGNATURE_HEX: Final = 64
_SIGNED: Final[Bounded[bytes, tuple[bytes, bytes]]] = Bounded(_ENTRIES_MAX)
"""Authorization lines of AWS without their signature, which ends them."""
_REPEATING: Final = frozenset(
    {
        b"host", b"user-agent", b"content-type", b"content-length", b"connection", b"accept", b"accept-encoding",
        b"x-amz-target", b"x-amz-date", b"x-amzn-query-mode", b"amz-sdk-request", b"x-ms-version", b"x-mns-version",
        b"x-ms-date", b"date",
    }
)  # fmt: skip


def is_host(value: bytes) -> bool:
    """Whether a Host header may have this value (RFC 9112, 3.2); it may be empty."""
    return _HOST.match(value) is not None


@accelerated(Request)
def read_plain(data: bytes, limits: Limits, peer: str, secure: bool, next_id: Callable[[], str]) -> Request | None:
    """The request that `data` is, neither more nor less; None if llhttp has to look at it."""
    head, end, body = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    # A header counts as in the intake: with the blank that it may lack, and the end of its line.
    if not end or len(head) + len(lines) > limits.header_bytes_max or len(body) > limits.body_bytes_max:
        return None
    asked = _LINES.get(first) or _request_line(first)
    if asked is None:
        return None
    try:
        headers = dict(map(_HEADERS.__getitem__, lines))  # no step of Python for a line that was read before
    except KeyError:
        return None
    if len(headers) != len(lines) or len(lines) > limits.header_count_max or b"host" not in headers:
        return None
    if headers.get(b"content-length", b"0") != b"%d" % len(body):
        return None
    return Request(asked[0], asked[1], headers, body, peer, secure, next_id())


def _request_line(line: bytes) -> tuple[str, bytes] | None:
    found = _REQUEST_LINE.match(line)
    if found is None:
        return None
    known = found[1].decode(), found[2]
    return _LINES.keep(line, known) if len(line) <= _ENTRY_BYTES_MAX else known


class _Headers(Bounded[bytes, tuple[bytes, bytes]]):
    """Header lines and what they are; keeps those of names whose values repeat."""

    __slots__ = ()

    def __missing__(self, line: bytes) -> tuple[bytes, bytes]:
        """Name and value of a line. Raises KeyError if llhttp has to look at it."""
        header = _header(line)
        if header is None:
            raise KeyError(line)
        return header


_HEADERS: Final = _Headers(_ENTRIES_MAX)


def _header(line: bytes) -> tuple[bytes, bytes] | None:
    signature = line[-_SIGNATURE_HEX:]
    if len(line) > 2 * _SIGNATURE_HEX:
        known = _SIGNED.get(line[:-_SIGNATURE_HEX])
        if known is not None and signature.isalnum():
            return known[0], known[1] + signature
    found = _HEADER.match(line)
    if found is None:
        return None
    name, value = found[1].lower(), found[2].strip()
    if name in _LEFT_TO_LLHTTP or name.startswith(OWN_CASE):
        return None
    if name == b"host" and not is_host(value):
        return None
    if name == b"connection" and value.lower() != b"keep-alive":
        return None
    if len(line) > _ENTRY_BYTES_MAX:
        pass
    elif name in _REPEATING:
        _HEADERS.keep(line, (name, value))
    elif name == b"authorization" and value.endswith(signature) and value[:-_SIGNATURE_HEX].endswith(b"Signature="):
        _SIGNED.keep(line[:-_SIGNATURE_HEX], (name, value[:-_SIGNATURE_HEX]))
    return name, value
