"""Which host a request is for, on all three protocols: an absolute form decides (RFC 9112, 3.2.2), nonsense is refused.

A development server answers only loopback names, so its answer shows which host it went by.
"""

import socket
from urllib.parse import urlsplit

import pytest

from veilmq.testing.for_each import for_each
from veilmq.testing.local import ServerProcess

QUEUES = {
    "sqs": (
        b"POST",
        b"/",
        b"X-Amz-Target: AmazonSQS.ListQueues\r\nContent-Type: application/x-amz-json-1.0\r\n",
        b"{}",
    ),
    "azure": (b"GET", b"/devstoreaccount1?comp=list", b"x-ms-version: 2021-02-12\r\n", b""),
    "mns": (b"GET", b"/queues", b"x-mns-version: 2015-06-06\r\n", b""),
}
FORMS = {"sqs": b'"__type":', "azure": b"<Error><Code>InvalidInput</Code>", "mns": b"<Code>InvalidRequestURL</Code>"}
"""What an error of each protocol has."""


def ask(server: ServerProcess, protocol: str, start: bytes, host: bytes) -> bytes:
    """The answer to a request for the queues, whose target begins so."""
    method, target, headers, body = QUEUES[protocol]
    url = urlsplit(getattr(server, protocol))
    with socket.create_connection((url.hostname, url.port or 0), timeout=10) as raw:
        head = b"%b %b%b HTTP/1.1\r\nHost: %b\r\nContent-Length: %d\r\nConnection: close\r\n" % (
            *(method, start, target, host),
            len(body),
        )
        raw.sendall(head + headers + b"\r\n" + body)
        return b"".join(iter(lambda: raw.recv(65_536), b""))


@for_each("protocol", QUEUES)
@pytest.mark.parametrize(
    ("start", "host", "taken"),
    [
        (b"", b"127.0.0.1", True),
        (b"http://127.0.0.1:1", b"evil.example", True),
        (b"http://evil.example", b"127.0.0.1", False),
        (b"http://127.0.0.1.evil.example:1", b"127.0.0.1:1", False),
    ],
)
def test_an_absolute_form_decides_the_host(
    shared: ServerProcess, protocol: str, start: bytes, host: bytes, taken: bool
) -> None:
    # Azure's request is not signed: 401 comes after the look at the host.
    status = (200, 401) if taken else (403,)
    assert int(ask(shared, protocol, start, host).split()[1]) in status


@for_each("protocol", QUEUES)
@pytest.mark.parametrize(("start", "host"), [(b"", b"127.0.0.1/a"), (b"http://[::1", b"h"), (b"http://h", b"a b")])
def test_a_host_that_is_none_is_refused_in_the_protocols_form(
    shared: ServerProcess, protocol: str, start: bytes, host: bytes
) -> None:
    answer = ask(shared, protocol, start, host)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert FORMS[protocol] in answer, answer
