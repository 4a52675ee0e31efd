"""Any bytes: a data port answers 4xx or closes, forgets nothing and never fails, however the bytes are cut."""

import asyncio
import re
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from veilmq.protocols import Request, Response
from veilmq.server.http import Limits
from veilmq.server.http.exchange import Exchange
from veilmq.server.http.intake import Intake
from veilmq.testing.for_each import for_each

FRAGMENTS = [
    *(b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"FOO", b" ", b"/", b"*", b"http://h/p?q", b"?a=%00&b"),
    *(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/2.0\r\n", b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\0", b":", b"\t"),
    *(b"Host: h\r\n", b"Content-Length: 3\r\n", b"Content-Length: 70000\r\n", b"Content-Length: x\r\n", b"X: y\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"Expect: x\r\n", b"Connection: close\r\n"),
    *(b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Authorization: a\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n", b"1;e=f\r\n"),
    *(b"abc", b"ffffffffffffffff\r\n", b"X: " + b"v" * 3000 + b"\r\n", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"),
    b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nT: v\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 3\r\n\r\nabc",
]

anything = st.one_of(
    st.binary(max_size=200),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=4)), max_size=20).map(b"".join),
)

SMALL = {"header_bytes_max": 4096, "body_bytes_max": 2000, "header_count_max": 8}


def echo(request: Request, exchange: Exchange) -> None:
    exchange.respond(Response(200, b"text/plain", request.body))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=anything, ends=st.booleans())
def test_any_bytes_are_answered_or_end_the_connection(serve, data, ends):
    async def scenario() -> None:
        if not serve.ports:
            quick = {"tick_s": 0.01, "idle_s": 0.02, "header_deadline_s": 0.02, "body_deadline_s": 0.02}
            await serve(echo, limits=SMALL | quick)
        (port,) = serve.ports
        client = await port.client()
        client.writer.write(data)
        if ends:
            client.end_sending()
        received = await client.rest()
        client.writer.close()
        port.clients.clear()
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) [A-Z]", received)]
        assert set(statuses) <= {100, 200, 400, 408, 413, 417, 431, 501, 505}
        # A refusal is the last answer.
        assert all(status < 400 for status in statuses[:-1])
        await port.left()
        assert port.listener.failures == 0
        assert port.listener.held_bytes == 0
        assert serve.escaped == []

    serve.run(scenario())


def parse(pieces: list[bytes]) -> tuple[list[tuple[object, ...]], int | None]:
    """What an intake makes of a stream that comes in these pieces: requests, and the status of a refusal."""
    intake = Intake(Limits(**SMALL), "peer", False, lambda: "id")
    requests: list[tuple[object, ...]] = []
    for piece in pieces:
        while piece and intake.refusal is None:
            piece = intake.feed(piece)
            while intake.ready:
                request, flags = intake.ready.popleft()
                requests.append((request, flags))
    return requests, intake.refusal and intake.refusal.status


@settings(max_examples=500)
@given(data=anything, cuts=st.lists(st.integers(0, 4000), max_size=8))
def test_how_the_bytes_are_cut_changes_nothing(data, cuts):
    # A 431 may come before or after the headers are complete: the whole stream stays below that limit here.
    whole = parse([data[:3000]])
    data = data[:3000]
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    assert parse([data[a:b] for a, b in pairwise(edges)]) == whole
    assert parse([data[at : at + 1] for at in range(len(data))]) == whole


def test_what_is_fed_is_counted_once_until_the_request_is_complete():
    intake = Intake(Limits(), "peer", False, lambda: "id")
    begun = b"POST / HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 9\r\n\r\n12345"
    assert intake.feed(begun) == b""
    assert intake.fed_bytes == len(begun)
    assert intake.feed(b"6789GET") == b""
    assert intake.fed_bytes == 0
    assert intake.ready.popleft()[0].body == b"123456789"
    assert intake.feed(b" / HT") == b""
    assert intake.fed_bytes == 5


@for_each("size", [1, 1000, 16 * 1024, 16 * 1024 + 1, 300_000])
def test_a_burst_of_tiny_requests_is_not_expanded_at_once(size):
    intake = Intake(Limits(), "peer", False, lambda: "id")
    tiny = b"GET / HTTP/1.1\r\nHost:\r\n\r\n"
    rest = tiny * (size // len(tiny) + 1)
    count = len(rest) // len(tiny)
    seen = 0
    while rest:
        rest = intake.feed(rest)
        assert 0 < len(intake.ready) <= 16 * 1024 // len(tiny) + 1
        seen += len(intake.ready)
        intake.ready.clear()
    assert seen == count


async def test_many_clients_at_once_with_half_requests(serve):
    port = await serve(echo, limits={"tick_s": 0.01, "header_deadline_s": 0.2, "body_deadline_s": 0.2})
    clients = [await port.client() for _ in range(100)]
    for number, client in enumerate(clients):
        client.writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nabc"[: 10 + number])
    answers = await asyncio.gather(*(client.rest() for client in clients))
    assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
    await asyncio.gather(*(client.writer.wait_closed() for client in clients if client.writer.close() is None))
    await port.left()
    assert port.listener.held_bytes == 0
