"""Requests that wait: pipelining, clients that hang up, and the end of a listener."""

import asyncio
import gc
import socket
from functools import partial
from typing import Any

import pytest

from veilmq.protocols import Request, Response
from veilmq.server.http.connection import Connection
from veilmq.server.http.exchange import Exchange
from veilmq.server.http.intake import Intake
from veilmq.testing.for_each import for_each

GET = b"GET /q HTTP/1.1\r\nHost: h\r\n\r\n"
TEXT = b"text/plain"
OK = Response(200, TEXT, b"ok")


def numbered(number: int) -> bytes:
    return b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number


def echo(request: Request, exchange: Exchange) -> None:
    exchange.respond(Response(200, TEXT, request.target))


class Gone:
    """Counts its calls, and lets a test wait for the first."""

    def __init__(self) -> None:
        self.calls = 0
        self.event = asyncio.Event()

    def __call__(self) -> None:
        self.calls += 1
        self.event.set()

    async def wait(self) -> None:
        async with asyncio.timeout(20):
            await self.event.wait()


async def test_a_closed_connection_leaves_nothing_to_the_garbage_collector(serve):
    port = await serve()

    def all_alive() -> list[Any]:
        return [each for each in gc.get_objects() if isinstance(each, Connection | Intake)]

    def alive() -> int:
        return sum(id(each) not in others for each in all_alive())

    gc.collect()
    kept = all_alive()  # of other tests' servers in this process
    others = {id(each) for each in kept}
    gc.disable()
    try:
        client = await port.client()
        await client.send(GET)
        (await port.next()).respond(OK)
        await client.answer()
        assert alive() == 2
        client.writer.close()
        await port.left()
        await asyncio.sleep(0)  # connection_lost itself returns
        assert alive() == 0
    finally:
        gc.enable()


async def test_a_pipelined_burst_is_answered_in_order(serve):
    client = await (await serve(echo)).client()
    count = 5000
    await client.send(b"".join(map(numbered, range(count))))
    for number in range(count):
        assert (await client.answer()).body == b"/%d" % number


async def test_one_connection_has_one_request_at_the_handler(serve):
    port = await serve()
    client = await port.client()
    await client.send(b"".join(map(numbered, range(300))))
    for number in range(300):
        exchange = await port.next()
        assert port.arrived.empty()
        assert exchange.request.target == b"/%d" % number
        if number % 3 == 0:  # some answers after more input has come
            await client.send(numbered(300 + number // 3))
        assert exchange.respond(Response(200, TEXT, exchange.request.target))
    for number in range(400):
        if number >= 300:
            exchange = await port.next()
            exchange.respond(Response(200, TEXT, exchange.request.target))
        assert (await client.answer()).body == b"/%d" % number


async def test_the_next_handler_does_not_run_inside_respond(serve):
    port = await serve()
    client = await port.client()
    await client.send(GET + GET)
    exchange = await port.next()
    exchange.respond(OK)
    assert port.arrived.empty()
    await port.next()


async def test_a_long_burst_lets_other_connections_have_their_turn(serve):
    order: list[bytes] = []
    held_bytes: list[int] = []

    def record(request: Request, exchange: Exchange) -> None:
        order.append(request.path)
        held_bytes.append(port.listener.held_bytes)
        echo(request, exchange)

    port = await serve(record, limits={"pipeline_requests_max": 4})
    greedy, modest = await port.client(), await port.client()
    greedy.writer.write(GET * 1000)
    modest.writer.write(b"GET /modest HTTP/1.1\r\nHost: h\r\n\r\n")
    for _ in range(1000):
        await greedy.answer()
    await modest.answer()
    assert order.index(b"/modest") < 90
    assert max(held_bytes) > 10_000


async def test_pipelined_input_is_held_only_up_to_a_bound(serve):
    port = await serve(limits={"pipeline_bytes_max": 10_000})
    client = await port.client()
    await client.send(numbered(0))
    exchange = await port.next()
    count = 20_000
    client.writer.write(b"".join(map(numbered, range(1, count))))
    await port.until(lambda: exchange._connection._reading_paused)
    most = port.listener.held_bytes
    assert 10_000 < most <= 10_000 + 256 * 1024
    received = 0

    async def answer_all() -> None:
        waiting = exchange
        for number in range(count):
            assert waiting.request.target == b"/%d" % number
            waiting.respond(Response(204, None, b""))
            if number < count - 1:
                waiting = await port.next()

    async def read_all() -> None:
        nonlocal received
        while received < count:
            received += (await client.reader.read(1 << 20)).count(b"HTTP/1.1 204")

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(answer_all())
        tasks.create_task(read_all())
    assert received == count


async def test_a_client_that_only_ends_its_sending_is_answered(serve):
    port = await serve()
    client = await port.client()
    await client.send(GET + GET)
    client.end_sending()
    for text in (b"one", b"two"):
        exchange = await port.next()
        (connection,) = port.listener.connections
        await port.until(lambda: connection.input_ended)  # noqa: B023
        assert not exchange.gone
        assert exchange.respond(Response(200, TEXT, text))
        assert (await client.answer()).body == text
    assert await client.rest() == b""


async def test_a_half_closed_client_may_be_answered_at_once(serve):
    client = await (await serve(echo)).client()
    client.writer.write(GET)
    client.end_sending()
    received = await client.rest()
    assert received.endswith(b"\r\n\r\n/q")


async def test_input_that_ends_in_the_middle_of_a_request_closes(serve):
    port = await serve()
    for part in (b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n12345"):
        client = await port.client()
        client.writer.write(part)
        client.end_sending()
        assert await client.rest() == b""
    assert port.arrived.empty()


async def test_a_parked_request_whose_client_is_lost_is_told_once(serve):
    port = await serve()
    client = await port.client()
    await client.send(GET + GET)
    exchange = await port.next()
    gone = exchange.on_gone = Gone()
    client.reset()
    await gone.wait()
    assert exchange.gone
    assert not exchange.respond(OK)
    await port.left()
    assert gone.calls == 1
    assert port.arrived.empty()


@for_each("end", ["close", "end_sending"])
async def test_a_parked_request_whose_client_ends_its_input_is_told_once_and_answered(serve, end):
    port = await serve()
    client = await port.client()
    await client.send(GET)
    exchange = await port.next()
    gone = exchange.on_gone = Gone()
    {"close": client.writer.close, "end_sending": client.end_sending}[end]()
    await gone.wait()
    assert not exchange.gone
    assert exchange.respond(Response(200, TEXT, b"late"))
    if end == "end_sending":
        assert (await client.answer()).body == b"late"
        assert await client.rest() == b""
    await port.left()
    assert gone.calls == 1


async def test_a_half_closed_client_has_all_its_requests_answered(serve):
    port = await serve()
    client = await port.client()
    await client.send(numbered(0) + numbered(1) + numbered(2))
    client.end_sending()
    for _ in range(3):
        exchange = await port.next()
        exchange.on_gone = partial(exchange.respond, Response(200, TEXT, exchange.request.target))
        assert (await client.answer()).body == exchange.request.target
    assert await client.rest() == b""


@for_each("end", ["end_sending", "reset"])
async def test_a_request_that_parks_after_its_client_left_is_told(serve, end):
    port = await serve()
    client = await port.client()
    await client.send(GET)
    exchange = await port.next()
    (connection,) = port.listener.connections
    getattr(client, end)()
    await port.until(lambda: connection.input_ended or exchange.gone)
    gone = exchange.on_gone = Gone()
    assert gone.calls == 0  # not inside the assignment
    await gone.wait()
    assert exchange.respond(OK) == (end == "end_sending")
    await port.left()
    assert gone.calls == 1


async def test_an_answered_request_is_not_told(serve):
    port = await serve()
    client = await port.client()
    await client.send(GET)
    exchange = await port.next()
    gone = exchange.on_gone = Gone()
    assert exchange.on_gone is gone
    exchange.respond(OK)
    await client.answer()
    client.reset()
    await port.left()
    assert gone.calls == 0
    assert not exchange.gone


async def test_a_withdrawn_on_gone_is_not_called(serve):
    port = await serve()
    client = await port.client()
    await client.send(GET)
    exchange = await port.next()
    gone = exchange.on_gone = Gone()
    exchange.on_gone = None
    client.reset()
    await port.left()
    assert gone.calls == 0
    assert not exchange.respond(OK)


async def test_a_graceful_close_of_an_idle_listener_closes_idle_clients(serve):
    port = await serve(echo)
    fresh, used = await port.client(), await port.client()
    await used.ask(GET)
    async with asyncio.timeout(20):
        await port.listener.close_gracefully(15)
    assert await fresh.rest() == b""
    assert await used.rest() == b""


async def test_a_graceful_close_lets_the_requests_under_way_be_answered(serve):
    port = await serve()
    parked, sending, doubled = await port.client(), await port.client(), await port.client()
    await parked.send(GET)
    exchange = await port.next()
    await doubled.send(GET + GET)
    double = await port.next()
    await sending.send(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert (await sending.answer()).status == 100
    address = port.listener.address
    closing = asyncio.create_task(port.listener.close_gracefully(15))
    await port.until(lambda: port.listener.closing)
    with socket.socket() as late, pytest.raises(ConnectionRefusedError):
        late.connect(address)
    await sending.send(b"ok")
    for waiting, client in ((exchange, parked), (double, doubled), (await port.next(), sending)):
        assert waiting.respond(OK)
        assert (await client.answer()).headers["Connection"] == "close"
        assert await client.rest() == b""
    async with asyncio.timeout(20):
        await closing
    assert port.arrived.empty()


async def test_a_graceful_close_drops_in_the_end_what_is_still_parked(serve, caplog):
    port = await serve()
    client = await port.client()
    await client.send(GET)
    exchange = await port.next()
    gone = exchange.on_gone = Gone()
    async with asyncio.timeout(20):
        await port.listener.close_gracefully(0.05)
    assert gone.calls == 1
    assert await client.rest() == b""
    assert not exchange.respond(OK)
    assert "connections dropped at the end of the grace period: 1" in caplog.text
