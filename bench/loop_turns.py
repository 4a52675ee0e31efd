"""Which turns of a server's loop are long, and what stands behind them, asked of the living process.

Strategy: in a server that was started within `soak_memory.watched(directory, "loop_turns")` this module takes the place
of uvloop by asyncio's own loop, whose turns have a beginning and an end: from the sockets' news to the next look at
them. Each is timed by the clock and by the CPU of the thread, with the functions of `PARTS` and the garbage collector
in it; the longest are kept until the word `turns` asks for them. CPU is what a turn costs; the clock has the sync of a
commit in it, waits for other threads and whatever else the machine does.
"""

import asyncio
import gc
import importlib
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import soak_memory

KEPT = 64
NAMED_FROM_S = 0.001
"""Of CPU: a callback of the loop that takes longer is a part, by its own name."""
PARTS: dict[str, tuple[str, ...]] = {
    "requests in": ("veilmq.server.http.connection:Connection.data_received",),
    "batch": ("veilmq.store.sqlite.store:SqliteStore.apply",),
    "settlement": tuple(
        f"veilmq.store.sqlite.{place}:flush"
        for place in ("store", "handlers", "messages.groups", "leases.claims", "leases.expiry")
    ),
    "log into tables": ("veilmq.store.sqlite.batch:Writer._apply_log",),
    "commit": ("veilmq.store.sqlite.store:SqliteStore.commit",),
    "commit: record": ("veilmq.store.sqlite.disk.redo.file:_PastCache._write",),
    "commit: noted": ("veilmq.store.sqlite.disk.redo.last_commit:LastCommit.note",),
    "checkpoint": ("veilmq.store.sqlite.disk:Checkpointer.committed",),
    "disk": ("veilmq.store.sqlite.store:SqliteStore._look_at_disk",),
    "sweep": ("veilmq.store.sqlite.upkeep:sweep",),
    "sweep: garbage": ("veilmq.store.sqlite.upkeep:_collect",),
    "sweep: returns": ("veilmq.store.sqlite.upkeep:_return_all",),
    "sweep: expiry": ("veilmq.store.sqlite.upkeep:_expire_all",),
    "sweep: trimming": ("veilmq.store.sqlite.upkeep.trimming:trim",),
    "sweep: origins": ("veilmq.store.sqlite.upkeep.trimming:Origins.step",),
    "sweep: snapshot": ("veilmq.store.sqlite.upkeep.snapshots:Snapshots.step",),
    "sweep: rollups": ("veilmq.store.sqlite.upkeep.rollups:Rolling.step",),
    "sweep: jobs": ("veilmq.store.sqlite.upkeep.jobs:carry_on", "veilmq.store.sqlite.upkeep.jobs.move_tasks:carry_on"),
    "sweep: pages": ("veilmq.store.sqlite.upkeep:_give_back",),
    "rollups": ("veilmq.store.sqlite.batch:Writer.begin",),
    "history": ("veilmq.store.sqlite.batch:Writer.finish",),
    "next batch": ("veilmq.engine.engine:Engine.take_batch",),
    "answers": ("veilmq.server.shell:Shell._deliver",),
    "log line": ("logging:Handler.handle",),
}
"""What is timed within a turn, by the name under which it is shown: parts may be within parts."""


class Turns:
    """The longest turns since the last question."""

    def __init__(self) -> None:
        self.thread = 0
        self.parts: dict[str, list[float]] = {}
        self.batch: Any = ()
        self._begun = self._spent = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.longest: list[tuple[float, float, dict[str, Any]]] = []
        self.count, self.wall_over, self.cpu_over = 0, Counter[int](), Counter[int]()

    def begin(self) -> None:
        """The sockets were looked at."""
        self.parts.clear()
        self.batch = ()
        self._begun, self._spent = time.perf_counter(), time.thread_time()

    def end(self) -> None:
        """The turn's last callback ran."""
        wall, cpu = (time.perf_counter() - self._begun) * 1e3, (time.thread_time() - self._spent) * 1e3
        parts, self.parts = self.parts, {}  # the garbage collector may run at any time, and add itself
        self.count += 1
        for over in (1, 2, 5, 10, 20, 50):
            if wall > over:
                self.wall_over[over] += 1
            if cpu > over:
                self.cpu_over[over] += 1
        if len(self.longest) == KEPT and cpu <= self.longest[-1][1] and wall <= self.longest[-1][0]:
            return
        kinds = Counter(type(command).__name__ for command in self.batch)
        told = {name: [round(value * 1e3, 2) for value in both] for name, both in parts.items()}
        self.longest.append((wall, cpu, {"parts": told, "batch": dict(kinds)}))
        self.longest.sort(key=lambda turn: -turn[1])
        by_wall = sorted(self.longest, key=lambda turn: -turn[0])[: KEPT // 2]
        self.longest = self.longest[: KEPT // 2] + [turn for turn in by_wall if turn not in self.longest[: KEPT // 2]]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which counts as a part of the turn that runs it."""

        def run(*given: Any, **named: Any) -> Any:
            if threading.get_ident() != self.thread:
                return function(*given, **named)
            if name == "batch":
                self.batch = given[1]
            begun, spent = time.perf_counter(), time.thread_time()
            try:
                return function(*given, **named)
            finally:
                self.add(name, time.perf_counter() - begun, time.thread_time() - spent)

        return run

    def add(self, name: str, wall: float, cpu: float) -> None:
        """Count seconds of a part."""
        both = self.parts.setdefault(name, [0.0, 0.0])
        both[0] += wall
        both[1] += cpu

    def told(self) -> dict[str, Any]:
        """The answer to `turns`."""
        found = {
            "count": self.count,
            "wall_over": dict(self.wall_over),
            "cpu_over": dict(self.cpu_over),
            "longest": [{"wall_ms": wall, "cpu_ms": cpu} | more for wall, cpu, more in self.longest],
        }
        self.reset()
        return found


def _timed_callback(handle: asyncio.Handle, run: Callable[[asyncio.Handle], None] = asyncio.Handle._run) -> None:
    begun, spent = time.perf_counter(), time.thread_time()
    run(handle)
    cpu = time.thread_time() - spent
    if cpu > NAMED_FROM_S:
        callback: Any = handle._callback  # type: ignore[attr-defined]
        owner = getattr(callback, "__self__", None)
        called = owner.get_coro() if isinstance(owner, asyncio.Task) else callback
        TURNS.add(f"({getattr(called, '__qualname__', called)})", time.perf_counter() - begun, cpu)


class _Marking(selectors.EpollSelector):
    def select(self, timeout: float | None = None) -> Any:
        found = super().select(timeout)
        TURNS.begin()
        return found


class TimedLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, each turn timed."""

    def __init__(self) -> None:
        super().__init__(_Marking())
        TURNS.thread = threading.get_ident()
        _wrap()

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        TURNS.end()


def _wrap() -> None:
    for name, places in PARTS.items():
        for place in places:
            module, _, path = place.partition(":")
            *owners, attribute = path.split(".")
            owner = importlib.import_module(module)
            for each in owners:
                owner = getattr(owner, each)
            setattr(owner, attribute, TURNS.timed(name, getattr(owner, attribute)))
    begun: list[tuple[float, float]] = []

    def collected(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            begun.append((time.perf_counter(), time.thread_time()))
        elif begun:
            wall, cpu = begun.pop()
            if threading.get_ident() == TURNS.thread:
                TURNS.add("garbage collector", time.perf_counter() - wall, time.thread_time() - cpu)

    gc.callbacks.append(collected)
    asyncio.Handle._run = _timed_callback  # type: ignore[method-assign]


TURNS = Turns()


def begin() -> None:
    """Time the loop of this process, a server."""
    import uvloop

    soak_memory.WORDS["turns"] = TURNS.told
    uvloop.Loop = TimedLoop  # type: ignore[misc,assignment]
