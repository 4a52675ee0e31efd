"""Steps of the clock at a start: accepted by themselves where wall time is known to be right, else by an operator."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.contract.stage import Stage
from tests.support.sqlite import SqliteFactory

from veilmq.engine.engine import Engine
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, Instant
from veilmq.server.clock import ClockWatch, LeaseClock
from veilmq.server.shell import Shell
from veilmq.store import Store
from veilmq.store.synchronised import is_synchronised


class Machine:
    """The machine's clock, and its word on whether it is synchronised."""

    def __init__(self, wall: Instant) -> None:
        self.wall = wall
        self.boot_ns = 0
        self.synchronised = False

    def later(self, duration_us: int) -> None:
        self.wall = Instant(self.wall + duration_us)
        self.boot_ns += duration_us * 1_000


class Started:
    """What a started server has of clocks."""

    def __init__(self, store: Store, watch: ClockWatch, clock: LeaseClock, shell: Shell) -> None:
        self.store, self.watch, self.clock, self.shell = store, watch, clock, shell

    @property
    def messages(self) -> int:
        """How many there are, once everything that is due has expired."""
        ((queue),) = self.store.reader.queues.values()
        return queue.visible


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Its data has one message, sent a moment ago."""
    stage = Stage(SqliteFactory(tmp_path / "data"))
    stage.send(stage.create())
    stage.store.close()
    return Machine(stage.now)


@asynccontextmanager
async def started(path: Path, machine: Machine, *, trusted: bool = False) -> AsyncIterator[Started]:
    """A server's store, shell and watch."""
    store = SqliteFactory(path / "data").open(clock_step_us_max=HOUR_US)
    clock = LeaseClock(lambda: machine.wall, lambda: machine.boot_ns, lambda: machine.synchronised)
    clock.start(store.mark)
    shell = Shell(Engine(), store, clock)
    shell.start()
    watch = ClockWatch(shell.call, store.reader, clock, trusted=trusted)
    await watch.start()
    try:
        yield Started(store, watch, clock, shell)
    finally:
        await watch.stop()
        await shell.stop(5)
        store.close()


async def swept(server: Started) -> int:
    """How many messages are left after sweeps of the present."""
    await server.shell._catch_up()
    return server.messages


def test_an_unknown_step_is_kept_and_told(tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        for _ in range(2):
            async with started(tmp_path, machine) as server:
                assert await swept(server) == 1
                assert server.watch.unaccepted_us == 10 * DAY_US
                await server.watch.look()
                assert await swept(server) == 1
                (outcome,) = await server.shell.call(server.clock.accepting())
                assert outcome.accepted_us == 10 * DAY_US  # type: ignore[union-attr]
                assert await swept(server) == 0
                return

    machine.later(10 * DAY_US)
    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "864000 s ahead" in caplog.text


def test_a_second_start_does_not_forget(tmp_path: Path, machine: Machine) -> None:
    async def run() -> None:
        for _ in range(3):
            async with started(tmp_path, machine) as server:
                assert await swept(server) == 1
                assert server.watch.unaccepted_us == 10 * DAY_US

    machine.later(10 * DAY_US)
    asyncio.run(run())


@pytest.mark.parametrize("trusted", [False, True])
def test_a_step_that_is_known_to_be_right_is_accepted_at_the_start(
    tmp_path: Path, machine: Machine, trusted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with started(tmp_path, machine, trusted=trusted) as server:
            assert server.watch.unaccepted_us == 0
            assert await swept(server) == 0

    machine.synchronised = not trusted
    machine.later(10 * DAY_US)
    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    assert "accepted" in caplog.text
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING and "clock" in line.name]


def test_a_clock_that_is_synchronised_later_is_accepted_then(tmp_path: Path, machine: Machine) -> None:
    async def run() -> None:
        async with started(tmp_path, machine) as server:
            await server.watch.look()
            assert await swept(server) == 1
            machine.synchronised = True
            await server.watch.look()
            assert server.watch.unaccepted_us == 0
            assert await swept(server) == 0

    machine.later(10 * DAY_US)
    asyncio.run(run())


def test_a_wrong_clock_that_is_put_right_expires_nothing(tmp_path: Path, machine: Machine) -> None:
    """The data's time cannot go back: the expiry clock stays behind it, with wall time."""

    async def run() -> None:
        async with started(tmp_path, machine):
            pass
        machine.wall = Instant(machine.wall - 10 * DAY_US)
        machine.synchronised = True
        async with started(tmp_path, machine) as server:
            assert server.clock.ahead_us == 10 * DAY_US
            assert server.watch.unaccepted_us == 0
            await server.shell.call(server.clock.accepting())
            assert await swept(server) == 1
        machine.wall = Instant(machine.wall + 4 * DAY_US + HOUR_US)
        async with started(tmp_path, machine) as server:
            assert server.watch.unaccepted_us <= MINUTE_US
            assert await swept(server) == 0

    machine.later(10 * DAY_US)
    asyncio.run(run())


def test_a_short_step_is_nothing(tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with started(tmp_path, machine) as server:
            assert server.watch.unaccepted_us == 0

    machine.later(HOUR_US)
    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    assert "ahead" not in caplog.text


def test_the_system_answers() -> None:
    assert is_synchronised() in {False, True}
