"""Real listeners and raw clients for the tests of the server room, on uvloop and on asyncio's own loop.

Strategy: a coroutine test that takes `serve` runs on the loop of that fixture, once for each kind. Every wait has a
timeout, so that what hangs fails; and an exception that reached the loop fails the test that caused it.
"""

import asyncio
import inspect
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from veilmq.protocols import Request
from veilmq.server.http import Limits
from veilmq.server.http.exchange import Exchange
from veilmq.server.http.listener import Listener, listen

try:
    import uvloop
except ImportError:  # not to be had on every platform: the server then runs on asyncio's own loop
    uvloop = None

WAIT_S = 20.0

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
if uvloop is not None:
    LOOPS["uvloop"] = uvloop.new_event_loop
USUAL = "asyncio" if uvloop is None else "uvloop"
EACH_LOOP = [pytest.param(name, marks=[] if name == USUAL else [pytest.mark.slow]) for name in LOOPS]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes


class Client:
    """One TCP connection that sends bytes and reads answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        async with asyncio.timeout(WAIT_S):
            await self.writer.drain()

    async def answer(self, to: str = "GET") -> Answer:
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 ")
            lines = head.decode().split("\r\n")[:-2]
            headers = dict(line.split(": ", 1) for line in lines[1:])
            body = b""
            if to != "HEAD":
                body = await self.reader.readexactly(int(headers.get("Content-Length", "0")))
        return Answer(int(lines[0].split(" ")[1]), headers, body, head + body)

    async def ask(self, data: bytes, to: str = "GET") -> Answer:
        await self.send(data)
        return await self.answer(to)

    async def rest(self) -> bytes:
        """All that comes until the server closes; a reset counts as closed."""
        received = b""
        async with asyncio.timeout(WAIT_S):
            try:
                while data := await self.reader.read(65536):
                    received += data
            except ConnectionError:
                pass
        return received

    def end_sending(self) -> None:
        self.writer.write_eof()

    def reset(self) -> None:
        """Send a RST instead of a FIN."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@dataclass
class Port:
    """An open listener with what came to its handler. Without a handler of the test's own every request is parked."""

    listener: Listener
    arrived: asyncio.Queue[Exchange]
    clients: list[Client] = field(default_factory=list)

    async def client(self) -> Client:
        host, port = self.listener.address
        client = Client(*await asyncio.open_connection(host, port))
        self.clients.append(client)
        return client

    def raw_socket(self) -> socket.socket:
        """A connected, non-blocking socket whose receive buffer is as small as the kernel makes it."""
        host, port = self.listener.address
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        raw.connect((host, port))
        raw.setblocking(False)
        return raw

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop run until a condition holds that no event tells."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def left(self) -> None:
        """Until no connection is open."""
        await self.until(lambda: not self.listener.connections)

    async def next(self) -> Exchange:
        async with asyncio.timeout(WAIT_S):
            return await self.arrived.get()


class Serve:
    """Opens listeners on the loop of one test."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.ports: list[Port] = []
        self.escaped: list[dict[str, Any]] = []
        runner.get_loop().set_exception_handler(lambda loop, context: self.escaped.append(context))

    def run(self, scenario: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(scenario, 2 * WAIT_S))

    async def __call__(
        self,
        handler: Callable[[Request, Exchange], None] | None = None,
        *,
        host: str = "127.0.0.1",
        limits: dict[str, Any] | None = None,
        **options: Any,
    ) -> Port:
        arrived: asyncio.Queue[Exchange] = asyncio.Queue()

        def park(request: Request, exchange: Exchange) -> None:
            arrived.put_nowait(exchange)

        listener = await listen(host, 0, handler or park, Limits(**(limits or {})), **options)
        port = Port(listener, arrived)
        self.ports.append(port)
        return port

    async def close(self) -> None:
        for port in self.ports:
            for client in port.clients:
                client.writer.transport.abort()
            async with asyncio.timeout(WAIT_S):
                await port.listener.close_gracefully(0.05)
            assert not port.listener.connections
            assert port.listener.held_bytes == 0


@pytest.fixture(params=EACH_LOOP)
def loop_factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes each loop that the server may run on."""
    return LOOPS[request.param]


@pytest.fixture(params=EACH_LOOP)
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
        serve = Serve(runner)
        yield serve
        runner.run(serve.close())
        assert serve.escaped == []


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    serve = pyfuncitem.funcargs.get("serve")
    if not isinstance(serve, Serve) or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    serve.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
