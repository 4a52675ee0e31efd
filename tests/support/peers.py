"""Servers with peer ports on loopback: owners with a real engine and store, callers, and peers that misbehave.

Strategy: a test is a coroutine that takes `peers`, a `Peers`: what it opens is closed after it. It runs on one loop, so
that a step can be put between two turns. An exception that reaches the loop fails the test.
"""

import asyncio
import inspect
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from tests.support.clock import EPOCH
from tests.support.contract.stage import TESTER
from tests.support.sqlite import SqliteFactory

from veilmq.cluster import Ticket
from veilmq.cluster.peer import Identity, Limits
from veilmq.cluster.peer.caller import Caller
from veilmq.cluster.peer.connection import Connection
from veilmq.cluster.peer.frames import ENCODER, FROM_CALLER, FROM_OWNER
from veilmq.cluster.peer.handshake import Handshake, Role
from veilmq.cluster.peer.port import PeerPort
from veilmq.engine.engine import Engine
from veilmq.model.commands import AnyCommand, CreateQueue
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome
from veilmq.model.settings.queue import QueueKey
from veilmq.server.shell import Shell

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
try:
    import uvloop
except ImportError:  # not to be had on every platform: the server then runs on asyncio's own loop
    pass
else:
    LOOPS["uvloop"] = uvloop.new_event_loop

WAIT_S: Final = 20.0
QUEUE: Final = QueueKey("000000000000", "us-east-1", "jobs")
SECRET: Final = b"a secret of all servers"
CLUSTER: Final = "5f1c"
OWNER: Final = Identity(CLUSTER, "owner")
OTHER: Final = Identity(CLUSTER, "other")
THIRD: Final = Identity(CLUSTER, "third")
FRAME: Final = msgspec.msgpack.Decoder()


class StillClock:
    """Stands still until it is set."""

    def __init__(self, instant: Instant = EPOCH) -> None:
        self.instant = instant

    def now(self) -> Instant:
        return self.instant


class Owner:
    """A server that owns the shard."""

    def __init__(self, path: Path, clock: StillClock, limits: Limits) -> None:
        self.clock = clock
        self.store = SqliteFactory(path).open()
        self.shell = Shell(Engine(), self.store, clock)
        self.port = PeerPort(OWNER, SECRET, limits)

    async def open(self, **options: Any) -> None:
        self.shell.start()
        await self.shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
        await self.port.open("127.0.0.1", 0, **options)
        self.port.lead(self.shell, self.shell.engine.unread)

    @property
    def parked(self) -> int:
        return len(self.shell.engine.waiting)

    async def close(self) -> None:
        await self.port.close()
        await self.shell.stop(5)
        assert self.shell.engine._gone == set()
        assert self.shell.engine.unread.bytes == 0
        self.store.close()


class Asked:
    """A ticket that keeps its answer."""

    def __init__(self, *commands: AnyCommand) -> None:
        self.commands = commands
        self.outcomes: list[Outcome] | None = None
        self.came = asyncio.Event()

    def answer(self, outcomes: list[Outcome]) -> None:
        assert self.outcomes is None, "a second answer"
        self.outcomes = outcomes
        self.came.set()

    async def answered(self) -> list[Outcome]:
        async with asyncio.timeout(WAIT_S):
            await self.came.wait()
        assert self.outcomes is not None
        return self.outcomes


class RawPeer(Connection):
    """A peer whose frames the test sends itself. `frames`: what came."""

    def __init__(self, role: Role, identity: Identity, limits: Limits | None = None, secret: bytes = SECRET) -> None:
        decoder = FROM_OWNER if role is Role.CALLER else FROM_CALLER
        super().__init__(Handshake(role, identity, secret), limits or Limits(), decoder)
        self.frames: list[Any] = []
        self.came = asyncio.Event()
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()

    def proved(self) -> None:
        self.ready.set()

    def received(self, frame: Any) -> None:
        self.frames.append(frame)
        self.came.set()

    def lost(self) -> None:
        self.gone.set()
        self.ready.set()

    async def close(self) -> None:
        self.transport.abort()
        await self.gone.wait()

    async def next(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            while not self.frames:
                self.came.clear()
                await self.came.wait()
        return self.frames.pop(0)


class Peers:
    """Opens servers for one test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: list[Any] = []
        self._servers: list[asyncio.Server] = []
        self.returned: list[tuple[Ticket, Instant, str | None, bool]] = []

    async def owner(self, limits: Limits | None = None, clock: StillClock | None = None, **options: Any) -> Owner:
        owner = Owner(self._path / "owner", clock or StillClock(), limits or Limits())
        self._open.append(owner)
        await owner.open(**options)
        return owner

    def caller(
        self, address: tuple[str, int], identity: Identity = OTHER, *, secret: bytes = SECRET, **options: Any
    ) -> Caller:
        """A caller that connects."""
        clock = options.pop("clock", None) or StillClock()
        caller = Caller(address, identity, secret, clock, lambda *returned: self.returned.append(returned), **options)
        self._open.append(caller)
        caller.start()
        return caller

    async def connected(self, address: tuple[str, int], identity: Identity = OTHER, **options: Any) -> Caller:
        """A caller that is connected."""
        caller = self.caller(address, identity, **options)
        await self.until(lambda: caller.connected)
        return caller

    async def raw_caller(
        self, address: tuple[str, int], limits: Limits | None = None, sock: socket.socket | None = None
    ) -> RawPeer:
        """A caller whose frames the test sends itself. sock: connected already."""
        peer = RawPeer(Role.CALLER, THIRD, limits)
        self._open.append(peer)
        if sock is None:
            sock = socket.create_connection(address)
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: peer, sock=sock)
        async with asyncio.timeout(WAIT_S):
            await peer.ready.wait()
        return peer

    async def raw_owner(self) -> tuple[tuple[str, int], asyncio.Queue[RawPeer]]:
        """The address of an owner that answers nothing by itself, and its connections."""
        arrived: asyncio.Queue[RawPeer] = asyncio.Queue()

        def accept() -> RawPeer:
            peer = RawPeer(Role.OWNER, OWNER)
            self._open.append(peer)
            arrived.put_nowait(peer)
            return peer

        server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        host, port = server.sockets[0].getsockname()
        return (host, port), arrived

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop turn until a condition holds that no event tells."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for each in reversed(self._open):
            await each.close()


async def stranger_gets(address: tuple[str, int], *sends: bytes) -> list[Any]:
    """What a connection that sends these frames gets, until it is closed: frames, decoded without their length."""
    reader, writer = await asyncio.open_connection(*address)
    for each in sends:
        writer.write(each)
    async with asyncio.timeout(WAIT_S):
        try:
            received = await reader.read()
        except ConnectionError:
            received = b""
    writer.close()
    frames = []
    while received:
        size = int.from_bytes(received[:4], "big")
        frames.append(FRAME.decode(received[4 : 4 + size]))
        received = received[4 + size :]
    return frames


def framed(frame: Any) -> bytes:
    """Any value as a frame with its length."""
    packed = frame if isinstance(frame, bytes) else ENCODER.encode(frame)
    return len(packed).to_bytes(4, "big") + packed


_EACH_LOOP = [pytest.param(name, marks=[] if name == [*LOOPS][-1] else [pytest.mark.slow]) for name in LOOPS]


@pytest.fixture(params=_EACH_LOOP)
def peers(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any], None]:
    """Runs a coroutine function with a `Peers`: use it through `on_a_loop`."""
    escaped: list[dict[str, Any]] = []
    factory = LOOPS[request.param]

    def run(scenario: Any) -> None:
        async def guarded() -> None:
            opened = Peers(tmp_path)
            try:
                await scenario(opened)
            finally:
                await opened.close()

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.get_loop().set_exception_handler(lambda loop, context: escaped.append(context))
            runner.run(asyncio.wait_for(guarded(), 2 * WAIT_S))
        assert escaped == []

    return run


def on_a_loop(scenario: Any) -> Any:
    """Make a test of a coroutine function whose first parameter is a `Peers`; further ones are fixtures."""
    parameters = list(inspect.signature(scenario).parameters.values())

    def test(peers: Any, **fixtures: Any) -> None:
        peers(lambda opened: scenario(opened, **fixtures))

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    first = parameters[0].replace(name="peers")
    test.__signature__ = inspect.Signature([first, *parameters[1:]])  # type: ignore[attr-defined]
    return test
