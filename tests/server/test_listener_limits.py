"""Limits and deadlines of a data port, with clients that are slow, endless, greedy or never read."""

import asyncio
import itertools
import re
import time

import pytest
from tests.server.conftest import Client

from veilmq.protocols import Request, Response
from veilmq.server.http import Limits
from veilmq.server.http.exchange import Exchange
from veilmq.server.http.intake import SLICE_BYTES, Intake
from veilmq.server.logs import LINES_MAX
from veilmq.testing.for_each import for_each

GET = b"GET /q HTTP/1.1\r\nHost: h\r\n\r\n"
KNOWN = GET.replace(b"/q", b"/known")
POST = b"POST / HTTP/1.1\r\nHost: h\r\n"
TEXT = b"text/plain"


def echo(request: Request, exchange: Exchange) -> None:
    exchange.respond(Response(200, TEXT, request.body or request.target))


def known(request: Request, exchange: Exchange) -> None:
    """Some requests have a valid key."""
    if request.path == b"/known":
        exchange.keep_place()
    echo(request, exchange)


def quick(**limits: float) -> dict[str, float]:
    """Limits with a fast tick, and no deadline but those that the test names."""
    return {"tick_s": 0.01, "linger_s": 5.0} | limits


async def test_headers_up_to_the_limit_and_not_beyond(serve):
    port = await serve(echo, limits={"header_bytes_max": 1000, "header_count_max": 10})
    client = await port.client()
    fixed = len(b"/q") + len(b"host: h\r\n") + len(b"x: \r\n") - 2

    def head(size: int) -> bytes:
        return b"GET /q HTTP/1.1\r\nHost: h\r\nX: %b\r\n\r\n" % (b"v" * (size - fixed))

    assert (await client.ask(head(996))).status == 200
    answer = await client.ask(head(1010))
    assert answer.status == 431
    assert b"1000 bytes" in answer.body


@for_each("part", [b"GET /" + b"a" * 20_000, GET[:-2] + b"X: " + b"v" * 20_000, b"\r\n" * 10_000])
async def test_headers_without_end_are_refused(serve, part):
    port = await serve(echo, limits={"header_bytes_max": 50_000})
    client = await port.client()
    for _ in range(3):
        await client.send(part)
        part = b"v" * 20_000 if b"v" in part else part.replace(b"GET /", b"")
    assert (await client.answer()).status == 431
    assert await client.rest() == b""


async def test_a_signed_url_of_60_kb_passes_the_default_limits(serve):
    client = await (await serve(echo)).client()
    target = b"/?" + b"a" * 60_000
    assert (await client.ask(b"GET " + target + b" HTTP/1.1\r\nHost: h\r\n\r\n")).body == target
    assert (await client.ask(b"GET /%b HTTP/1.1\r\nHost: h\r\n\r\n" % (b"a" * 66_000))).status == 431


@for_each("header", [b"X-%d: a\r\n", b"X: %d\r\n"], ids=["different", "repeated"])
async def test_header_lines_are_counted(serve, header):
    port = await serve(echo)

    def request(count: int) -> bytes:
        return b"GET /q HTTP/1.1\r\nHost: h\r\n" + b"".join(header % n for n in range(count - 1)) + b"\r\n"

    client = await port.client()
    assert (await client.ask(request(100))).status == 200
    assert (await client.ask(request(100))).status == 200
    answer = await client.ask(request(101))
    assert (answer.status, b"100 headers" in answer.body) == (431, True)


async def test_bodies_up_to_the_limit_and_not_beyond(serve):
    port = await serve(echo, limits={"body_bytes_max": 50_000})
    body = b"b" * 50_000
    client = await port.client()
    assert (await client.ask(POST + b"Content-Length: 50000\r\n\r\n" + body)).body == body
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    assert (await client.ask(chunked + b"C350\r\n" + body + b"\r\n0\r\n\r\n")).body == body
    assert (await client.ask(chunked + b"C350\r\n" + body + b"\r\n1\r\nb\r\n0\r\n\r\n")).status == 413
    answer = await (await port.client()).ask(POST + b"Content-Length: 50001\r\n\r\n")
    assert (answer.status, b"50000 bytes" in answer.body) == (413, True)
    answer = await (await port.client()).ask(POST + b"Expect: 100-continue\r\nContent-Length: 50001\r\n\r\n")
    assert answer.status == 413
    assert (await (await port.client()).ask(chunked + b"fffffff\r\n" + body + body)).status == 413


@for_each(
    "endless",
    [b"1;" + b"e" * 5000 + b"\r\nb\r\n", b"0\r\nX: " + b"t" * 5000, b"000000001\r\nb\r\n" * 300],
    ids=["extensions", "trailers", "tiny chunks"],
)
async def test_a_chunked_body_of_mostly_framing_ends(serve, endless):
    port = await serve(echo, limits={"header_bytes_max": 20_000, "body_bytes_max": 1000})
    client = await port.client()
    await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    client.writer.write(endless)
    while not (answered := asyncio.ensure_future(client.answer())).done():
        client.writer.write(endless if not endless.startswith(b"0\r") else b"t" * 5000)
        await asyncio.wait([answered], timeout=0.01)
        if answered.done():
            break
        answered.cancel()
        assert port.listener.bytes_received < 1_000_000
    assert answered.result().status in (400, 413)


async def test_trailers_are_bounded_however_long_the_body(serve):
    """The pieces of one header are joined in quadratic time."""
    port = await serve(echo, limits={"header_bytes_max": 20_000, "body_bytes_max": 200_000})
    client = await port.client()
    body = b"30d40\r\n" + b"b" * 200_000 + b"\r\n0\r\nX: "
    await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"t" * 60_000)
    answer = await client.answer()
    assert (answer.status, b"trailers exceed 20000 bytes" in answer.body) == (400, True)
    assert port.listener.bytes_received < 300_000


def test_repeated_headers_beyond_the_limit_are_not_kept():
    """Each one copied those before."""
    intake = Intake(Limits(), "peer", False, lambda: "id")
    names = b"".join(b"%d:\r\n" % number for number in range(2_000))
    intake.feed(b"GET / HTTP/1.1\r\nHost: h\r\n" + names + names + b"\r\n")
    assert intake.refusal is not None
    assert intake.refusal.status == 431
    assert len(intake.refusal.request.duplicates) <= 100


async def test_a_chunk_bomb_of_single_bytes_stays_small_and_is_read(serve):
    client = await (await serve(echo)).client()
    count = 200_000
    await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nb\r\n" * count + b"0\r\n\r\n")
    assert (await client.answer()).body == b"b" * count


async def test_slow_headers_are_refused(serve):
    port = await serve(echo, limits=quick(header_deadline_s=0.05))
    client = await port.client()
    assert (await client.ask(GET)).status == 200
    client.writer.write(b"GET / HTTP/1.1\r\n")
    for number in itertools.count():  # each header in time, the end never
        try:
            async with asyncio.timeout(0.01):
                await client.reader.readuntil(b"\r\n\r\n")
            break
        except TimeoutError:
            client.writer.write(b"X-%d: a\r\n" % number)
    answer = await client.rest()
    assert b"took too long" in answer
    assert port.listener.refusals == 1


async def test_a_slow_body_is_refused(serve):
    port = await serve(echo, limits=quick(body_deadline_s=0.1, rate_bytes_per_s_min=1000))
    client = await port.client()
    client.writer.write(POST + b"Content-Length: 1000000\r\n\r\n")
    head = b""
    while not head:  # about 100 bytes a second
        client.writer.write(b"b")
        try:
            async with asyncio.timeout(0.01):
                head = await client.reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            pass
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"the body took too long" in await client.rest()
    assert port.listener.held_bytes == 0


async def test_a_body_that_keeps_pace_may_take_longer_than_its_deadline(serve):
    port = await serve(echo, limits=quick(body_deadline_s=0.3, rate_bytes_per_s_min=1000))
    client = await port.client()
    client.writer.write(POST + b"Content-Length: 10000\r\n\r\n")
    started = port.listener.loop.time()
    for _ in range(10):  # each part earns a second
        await client.send(b"b" * 1000)
        await port.until(lambda: port.listener.loop.time() > started + 0.6)
    assert (await client.answer()).body == b"b" * 10_000


async def test_idle_connections_are_closed(serve):
    port = await serve(echo, limits=quick(idle_s=0.05))
    fresh, used = await port.client(), await port.client()
    assert (await used.ask(GET)).status == 200
    assert await used.rest() == b""
    assert await fresh.rest() == b""
    assert port.listener.refusals == 0


async def test_a_stall_of_the_loop_is_not_the_clients_fault(serve):
    port = await serve(echo, limits=quick(idle_s=0.5))
    with port.raw_socket() as raw:
        await port.until(lambda: port.listener.connections)
        raw.send(GET)
        time.sleep(0.8)  # noqa: ASYNC251 the stall
        assert (await port.listener.loop.sock_recv(raw, 1000)).startswith(b"HTTP/1.1 200 OK")
        ticked = port.listener.now
        await port.until(lambda: port.listener.now > ticked)
        raw.send(GET)
        assert (await port.listener.loop.sock_recv(raw, 1000)).startswith(b"HTTP/1.1 200 OK")


async def test_a_parked_request_has_no_deadline(serve):
    limits = quick(idle_s=0.02, header_deadline_s=0.02, body_deadline_s=0.02, answer_deadline_s=0.02)
    port = await serve(limits=limits)
    client = await port.client()
    await client.send(GET)
    exchange = await port.next()
    idle = await port.client()
    assert await idle.rest() == b""  # so long that every deadline is over
    assert exchange.respond(Response(200, TEXT, b"late"))
    assert (await client.answer()).body == b"late"


async def test_connections_beyond_the_limit_get_503(serve):
    port = await serve(known, limits={"connections_max": 2})
    first, second = await port.client(), await port.client()
    assert (await first.ask(KNOWN)).status == 200
    assert (await second.ask(KNOWN)).status == 200
    third = await port.client()
    answer = await third.ask(GET)
    assert (answer.status, answer.headers["Connection"]) == (503, "close")
    assert await third.rest() == b""
    third.writer.close()
    assert (await first.ask(GET)).status == 200
    first.writer.close()
    await port.until(lambda: len(port.listener.connections) == 1)
    assert (await (await port.client()).ask(GET)).status == 200


async def test_strangers_make_room_for_others(serve, caplog):
    """At the limit the oldest connection goes that has had no request with a valid key, whatever it does."""
    caplog.set_level("INFO", "veilmq.listener")
    port = await serve(known, limits={"connections_max": 5})
    listener, strangers = port.listener, [await port.client() for _ in range(3)]
    at_work = await port.client()
    assert (await at_work.ask(KNOWN)).status == 200
    assert (await strangers[0].ask(GET)).status == 200
    await strangers[1].send(POST)
    await port.until(lambda: listener.held_bytes)
    newcomers = [await port.client() for _ in range(4)]
    for client in strangers:
        assert await client.rest() == b""
    assert "it was the oldest without a valid key, and the port is full" in caplog.text
    for client in (at_work, *newcomers):
        assert (await client.ask(KNOWN)).status == 200
    assert (listener.strangers, len(listener.connections)) == ({}, 5)
    assert (await (await port.client()).answer()).status == 503


async def test_a_flood_beyond_the_limit_is_dropped(serve):
    port = await serve(known, limits={"connections_max": 1, "linger_s": 30.0})
    clients = [await port.client()]
    assert (await clients[0].ask(KNOWN)).status == 200
    clients += [await port.client() for _ in range(99)]
    received = await asyncio.gather(*(client.rest() for client in clients[1:]))
    assert sum(data.startswith(b"HTTP/1.1 503") for data in received) == 64
    assert received.count(b"") == 35
    assert (await clients[0].ask(GET)).status == 200


async def test_unfinished_requests_of_all_together_are_bounded(serve):
    """Who is refused is the stranger that has been arriving for longest: slow clients cannot keep out the others."""
    port = await serve(known, limits=quick(held_bytes_max=100_000))
    listener = port.listener

    async def begin(size: int, client: Client | None = None):
        client, held_bytes = client or await port.client(), listener.held_bytes
        await client.send(POST + b"Content-Length: 60000\r\n\r\n" + b"b" * size)
        await port.until(lambda: listener.held_bytes > held_bytes + size)
        began = listener.now
        await port.until(lambda: listener.now > began)
        return client

    at_work = await port.client()
    assert (await at_work.ask(KNOWN)).status == 200
    await begin(5_000, at_work)
    slow = await begin(40_000)
    slower = await begin(30_000)
    newest = await port.client()
    await newest.send(POST + b"Content-Length: 60000\r\n\r\n" + b"b" * 40_000)
    refused = await slow.answer()
    assert (refused.status, b"unfinished" in refused.body) == (503, True)
    assert (await newest.ask(b"b" * 20_000)).body == b"b" * 60_000
    assert (await slower.ask(b"b" * 30_000)).body == b"b" * 60_000
    assert (await at_work.ask(b"b" * 55_000)).body == b"b" * 60_000
    assert listener.held_bytes == 0


async def test_input_behind_a_request_that_is_being_answered_makes_room(serve):
    """The answer is written all the same, and what came behind it, later or in one piece with it, is refused after
    it."""
    port = await serve(limits=quick(held_bytes_max=100_000))
    listener = port.listener
    parked, exchanges = [await port.client() for _ in range(2)], []
    behind = GET + POST + b"Content-Length: 60000\r\n\r\n" + b"b" * 40_000
    slice_of_input = GET[:-2] + b"X: " + b"v" * (SLICE_BYTES - len(GET) - 5) + b"\r\n\r\n"
    for client, first, then in zip(parked, (GET, slice_of_input + behind), (behind, b""), strict=True):
        await client.send(first)
        exchanges.append(await port.next())
        await client.send(then)
        held_bytes = 40_000 * len(exchanges)
        await port.until(lambda held_bytes=held_bytes: listener.held_bytes > held_bytes)
        began = listener.now
        await port.until(lambda began=began: listener.now > began)
    newest, received_bytes = await port.client(), listener.bytes_received
    await newest.send(POST + b"Content-Length: 60000\r\n\r\n" + b"b" * 40_000)
    await port.until(lambda: listener.bytes_received > received_bytes + 40_000)
    assert 80_000 < listener.held_bytes < 81_000
    await parked[0].send(b"b" * 20_000)
    await newest.send(b"b" * 20_000)
    newest_exchange = await port.next()
    for exchange in (*exchanges, newest_exchange):
        exchange.respond(Response(200, TEXT, b"a"))
    assert [(await client.answer()).status for client in (newest, *parked)] == [200] * 3
    assert (await parked[0].answer()).status == 503
    assert await parked[0].rest() == b""
    (await port.next()).respond(Response(200, TEXT, b"a"))
    assert (await parked[1].answer()).status == 200
    assert (await parked[1].send(b"b" * 20_000), (await port.next()).request.body) == (None, b"b" * 60_000)
    assert listener.held_bytes == 0


async def test_who_holds_no_input_is_read_on_while_others_hold_too_much(serve):
    """Its next request is answered, and while one waits the server notices that it hangs up."""
    port = await serve(limits=quick(held_bytes_max=100_000))
    listener = port.listener
    for number in range(1, 3):
        holding = await port.client()
        await holding.send(GET)
        (await port.next()).keep_place()
        await holding.send(POST + b"Content-Length: 80000\r\n\r\n" + b"b" * 60_000)
        await port.until(lambda number=number: listener.held_bytes > 60_000 * number)
    assert listener.held_bytes > 100_000
    client, chunked = await port.client(), POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nb\r\n0\r\n\r\n"
    for _ in range(2):
        await client.send(chunked)
        (await port.next()).respond(Response(200, TEXT, b"a"))
        assert (await client.answer()).status == 200
    await client.send(chunked)
    exchange = await port.next()
    gone = asyncio.Event()
    exchange.on_gone = gone.set
    client.writer.transport.abort()
    async with asyncio.timeout(10):
        await gone.wait()


async def test_what_strangers_send_ahead_of_unread_answers_is_bounded(serve):
    """A client that has shown a key may send ahead, too: nothing more is read from it. And a request that arrives
    meanwhile drops no more of them than it needs room for."""

    def large(request: Request, exchange: Exchange) -> None:
        if request.headers.get(b"x-key"):
            exchange.keep_place()
        exchange.respond(Response(200, TEXT, b"a" * (12 * 1024 * 1024 if request.method == "GET" else 1)))

    port = await serve(large, limits=quick(held_bytes_max=100_000, answer_deadline_s=60.0))
    listener = port.listener

    async def sends_ahead(head: bytes) -> Client:
        client, sent = Client(*await asyncio.open_connection(sock=port.raw_socket())), listener.bytes_sent
        port.clients.append(client)
        await client.send(head)
        await port.until(lambda: listener.bytes_sent > sent)
        received = listener.bytes_received
        await client.send(POST + b"Content-Length: 60000\r\n\r\n" + b"b" * 30_000)
        await port.until(lambda: listener.bytes_received > received + 30_000)
        began = listener.now
        await port.until(lambda: listener.now > began)
        return client

    with_key = [await sends_ahead(GET[:-2] + b"X-Key: a\r\n\r\n") for _ in range(2)]
    strangers = [await sends_ahead(GET) for _ in range(2)]
    assert listener.held_bytes < 100_000
    assert len(listener.connections) == 3
    with_key.append(await sends_ahead(GET[:-2] + b"X-Key: a\r\n\r\n"))
    assert listener.held_bytes > 100_000
    newest = await port.client()
    assert (await newest.ask(POST + b"Content-Length: 1000\r\n\r\n" + b"b" * 1_000)).status == 200
    await newest.send(POST + b"Content-Length: 1000\r\n\r\n" + b"b" * 500)
    await port.until(lambda: len(listener.connections) == 3)
    assert 60_000 < listener.held_bytes < 100_000
    for each in (*with_key, *strangers):
        each.writer.transport.abort()


async def test_a_request_at_the_handler_is_not_held_any_more(serve):
    port = await serve()
    client = await port.client()
    await client.send(POST + b"Content-Length: 400000\r\n\r\n" + b"b" * 300_000)
    await port.until(lambda: port.listener.held_bytes > 300_000)
    await client.send(b"b" * 100_000)
    exchange = await port.next()
    assert port.listener.held_bytes == 0
    exchange.respond(Response(200, None, b""))
    assert (await client.answer()).status == 200


async def test_a_lingering_client_is_dropped_in_the_end(serve):
    port = await serve(echo, limits=quick(linger_s=0.05))
    client = await port.client()
    assert (await client.ask(b"nonsense\r\n\r\n")).status == 400
    await port.left()


def big(size: int):
    def answer(request: Request, exchange: Exchange) -> None:
        exchange.respond(Response(200, TEXT, b"a" * size))

    return answer


@for_each("request_bytes", [GET, GET * 3, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")])
async def test_an_answer_that_is_never_read_ends_the_connection(serve, request_bytes):
    port = await serve(big(8_000_000), limits=quick(answer_deadline_s=0.1))
    with port.raw_socket() as raw:
        await port.listener.loop.sock_sendall(raw, request_bytes)
        await port.until(lambda: port.listener.requests)
        assert port.listener.requests == 1  # the next one waits until this answer is read
        await port.left()
    assert port.listener.requests == 1


async def test_a_client_that_sends_but_never_reads_is_dropped(serve):
    limits = quick(answer_deadline_s=0.1, idle_s=30.0, write_buffer_bytes_max=10_000)
    port = await serve(big(1000), limits=limits)
    with port.raw_socket() as raw:

        async def send_on() -> None:
            while True:
                await port.listener.loop.sock_sendall(raw, GET * 1000)

        with pytest.raises(ConnectionError):
            await send_on()
    await port.left()
    assert port.listener.held_bytes == 0


async def test_a_small_unread_answer_does_not_outlive_the_idle_deadline(serve):
    port = await serve(big(4_000_000), limits=quick(idle_s=0.05, write_buffer_bytes_max=50_000_000))
    with port.raw_socket() as raw:
        await port.listener.loop.sock_sendall(raw, GET)
        await port.until(lambda: port.listener.requests)
        await port.left()


async def test_a_slow_reader_that_keeps_pace_gets_all(serve):
    size = 4_000_000
    limits = quick(answer_deadline_s=0.2, rate_bytes_per_s_min=100_000, write_buffer_bytes_max=10_000)
    port = await serve(big(size), limits=limits)
    loop = port.listener.loop
    with port.raw_socket() as raw:
        await loop.sock_sendall(raw, GET)
        received = 0
        started = loop.time()
        while received < size:
            part = await loop.sock_recv(raw, 100_000)
            assert part
            received += len(part)
            # So slow that the kernel takes nothing of the answer from the server for longer than the deadline.
            await port.until(lambda: loop.time() > started + received / 2_000_000)  # noqa: B023
        await loop.sock_sendall(raw, GET)
        assert await loop.sock_recv(raw, 100_000)


@pytest.mark.parametrize("limits", [quick(), {"tick_s": 60}], ids=["quick", "slow"])
async def test_the_date_of_answers_moves_on(serve, limits):
    """With the second, however seldom the listener looks at its connections."""
    port = await serve(echo, limits=limits)
    client = await port.client()
    first = (await client.ask(GET)).headers["Date"]
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", first)
    async with asyncio.timeout(20):
        while (await client.ask(GET)).headers["Date"] == first:
            pass


@for_each("name", Limits.__struct_fields__)
def test_a_limit_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})


async def test_connections_that_send_no_http_do_not_fill_the_log(serve, caplog):
    caplog.set_level("INFO")
    port = await serve(echo)
    for _ in range(3 * LINES_MAX):
        client = await port.client()
        await client.send(b"\x16\x03\x01 no HTTP\r\n\r\n")
        await client.rest()
    lines = [text for text in caplog.messages if ": refused " in text and "more requests" not in text]
    assert 0 < len(lines) < 3 * LINES_MAX
