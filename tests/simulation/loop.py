"""Virtual time: clocks that are a number, an event loop that never sleeps, and a committer without a thread.

Strategy: the loop is asyncio's own, but where it would sleep until the next timer, time jumps there. What a thread
would do (a slow commit, a checkpoint, the sync of the last commit) is a step of the loop, at an instant that the seed
draws. While such a step runs, the time that the disk takes is not spent on the loop, but before the step is reported.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.clock import EPOCH

from veilmq.model.instant import SECOND_US, Instant
from veilmq.server.shell.committer import Committer
from veilmq.testing import Random

_TURNS_MAX = 2_000
"""Turns of the loop in which no time passes."""


class Time:
    """The world's clocks, in microseconds."""

    def __init__(self) -> None:
        self.us = SECOND_US
        """Since the world began; nobody sets it."""
        self.step_us = 0
        """By how much wall time was set."""
        self._apart: int | None = None

    def wall(self) -> Instant:
        """Wall time."""
        return Instant(EPOCH + self.us + self.step_us)

    def boot_ns(self) -> int:
        """The clock that the lease clock follows."""
        return self.us * 1_000

    def seconds(self) -> float:
        """A stopwatch."""
        return self.us / 1e6

    def spend(self, duration_us: int) -> None:
        """The running step takes so long."""
        if self._apart is None:
            self.us += duration_us
        else:
            self._apart += duration_us

    @contextmanager
    def apart(self) -> Iterator[Callable[[], int]]:
        """What is spent in the block passes later, beside the loop; gives a function that says how much that is."""
        before, self._apart = self._apart, 0
        spent = [0]
        try:
            yield lambda: spent[0]
        finally:
            spent[0], self._apart = self._apart, before


class Spins(Exception):
    """The server goes on and on, and no time passes: it would keep a processor busy."""


class VirtualLoop(asyncio.BaseEventLoop):
    """asyncio's loop, without sockets."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self._virtual = time
        self._selector = self
        self._clock_resolution = 1e-7
        self._turned_us = self._turns = 0
        self.tasks: list[asyncio.Task[Any]] = []
        """All that were begun: `asyncio.all_tasks` looks at those of the loops before, too."""
        self.set_task_factory(self._begun)

    def _begun(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **named)
        self.tasks.append(task)
        return task

    def time(self) -> float:
        """See `asyncio.AbstractEventLoop.time`."""
        return self._virtual.us / 1e6

    def select(self, timeout: float | None) -> list[Any]:
        """What asyncio calls to sleep."""
        assert timeout is not None, "nothing will ever happen"
        if timeout > 0:
            self._virtual.us += math.ceil(timeout * 1e6)
        self._turns = self._turns + 1 if self._virtual.us == self._turned_us else 0
        self._turned_us = self._virtual.us
        if self._turns > _TURNS_MAX:
            raise Spins(f"{self._turns} turns of the loop, and no time has passed")
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """At once."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 as an executor does
            done.set_exception(error)
        return done


def committers(time: Time, chance: Random) -> type[Committer]:
    """The class of committers whose thread is steps of the loop."""

    class VirtualCommitter(Committer):
        def _start(self) -> None:
            pass

        def run_apart(self, job: Callable[[], Any]) -> None:
            self._loop.call_later(chance.random() * 0.002, self._run, job)

        def _run(self, job: Callable[[], Any]) -> None:
            with time.apart() as spent:
                error, result, _ = self._done(job)
            self._loop.call_later(spent() / 1e6, self._report, error, result, spent())

        async def stop(self, deadline_s: float) -> None:
            pass

    return VirtualCommitter
