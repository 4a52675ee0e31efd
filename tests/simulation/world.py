"""One simulated life: a seed in, a verdict out.

Strategy: a server begins, clients call, and at a step of the disk or an instant that the seed draws it is killed, loses
its power, meets an error, or is stopped; then the next one begins on what is left. The last one is healthy. There the
queues are drained, and the history checker decides. After each recovery the store's own check must find nothing. A
start that refuses is a violation too, unless a bit was flipped: then the life ends as told.

The log's clock never runs backwards. Where a start takes a step of wall time (the lease clock starts at the later of
mark and wall), the log's clock takes it too; where the lease clock falls behind, the checker gets that much tolerance.
"""

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import apsw
from tests.simulation.clients import LEASE_US_MAX, Book, Client, Server, making
from tests.simulation.disk import DAMAGED, SimulatedDisk, in_memory
from tests.simulation.loop import Spins, Time, VirtualLoop, committers
from tests.simulation.moving import MovingClient, is_moving, make_topic, misplaced
from tests.simulation.plan import COPIES, DEAD, DEAD_FIFO, FIFO, JOBS, Plan, plan_of
from tests.support.contract.stage import TESTER
from tests.support.faults import FaultDisk, full, io_error

from veilmq.checking import check as decide
from veilmq.checking.log import Grant, Kind
from veilmq.checking.log import Outcome as Known
from veilmq.checking.report import Promises
from veilmq.engine import Limits
from veilmq.engine.directory import open_directory
from veilmq.model.commands import Delete, DescribeQueue, Receive
from veilmq.model.errors import VeilError
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import QueueCreated, QueueDescribed, Received
from veilmq.model.settings.queue import QueueKey
from veilmq.server.clock import ClockWatch, LeaseClock
from veilmq.server.shell import Shell
from veilmq.store import Options
from veilmq.store.directory import DatabaseFailed, DatabaseUnusable, NotOurs, SchemaRefused
from veilmq.testing import Random, chance

_NAMES: Final = count(1)
_STEPS: Final = 60
"""A server's end comes within about so many steps of the disk."""
_STARTS_MAX: Final = 20
_SETTLE_US: Final = 3 * SECOND_US
_LOOK_S: Final = 1.3


class Verdict(NamedTuple):
    """How a life ended."""

    seed: int
    violations: list[str]
    told: str
    """Why the life ended early, after a bit had flipped; "" if it did not."""
    happened: Counter[str]
    """What was done to the server, and how often; with `operations`, `messages` sent and `steps` of the disk."""


class Violated(Exception):
    """A promise was broken; the text says which."""


class Told(Exception):
    """Damage was noticed."""


@contextmanager
def entropy_of(chance: Random) -> Iterator[None]:
    """Ids, keys and runs depend on the seed too."""
    system = os.urandom
    os.urandom = chance.randbytes
    try:
        yield
    finally:
        os.urandom = system


@cache
def empty_database() -> dict[str, bytes]:
    """The files of a server that has created its tables and stopped: to create them costs as much as two starts."""
    disk = FaultDisk("simulated-empty")  # its pages have no checksums, as those that a world writes have none
    with in_memory() as directory, entropy_of(chance(0)):
        _, store = open_directory(directory, options=Options(reserve_bytes=0, redo_bytes=0, disk=disk))
        store.close()
        return {name: path.read_bytes() for name in DAMAGED if (path := directory / name).exists()}


class World:
    """`World(seed, directory).run()`."""

    def __init__(
        self, seed: int, directory: Path, trace: Callable[[str], None] | None = None, *, calls: int = 1
    ) -> None:
        """calls: how many times as many calls as the seed decides."""
        self.seed, self.directory = seed, directory
        self.chance: Random = chance(seed)
        plan = plan_of(seed, self.chance)
        self.plan: Plan = plan._replace(calls=calls * plan.calls)
        self.time = Time()
        self.disk = SimulatedDisk(f"simulated-{next(_NAMES)}", directory, self.time, self.chance)
        self.disk.kind = self.plan.kind
        self.book = Book(self.now)
        self.book.trace = self.tell if trace else None
        self._trace = trace
        self.happened: Counter[str] = Counter()
        self._queues = (JOBS, COPIES) if self.plan.moves else (JOBS, FIFO)
        self._asleep = ""
        self._shift_us = 0
        self._behind_us = 0
        self._calls_left = 0
        self._loop: VirtualLoop | None = None
        self._is_over = True
        self._starts = 0
        self._damaged = ""
        self._halts = False
        self._is_clean = True
        """What the last server left was struck by nothing."""

    def now(self) -> int:
        """The log's clock."""
        return self.time.us + self._shift_us

    def tell(self, text: str) -> None:
        """Add to the story."""
        if self._trace is not None:
            self._trace(f"{self.now() / 1e6:12.6f} {text}".replace(str(self.directory), "data"))

    def run(self) -> Verdict:
        """Live."""
        shutil.rmtree(self.directory, ignore_errors=True)
        if self.plan.has_tables:
            self.directory.mkdir(0o700)
            for name, content in empty_database().items():
                (self.directory / name).write_bytes(content)
        violations: list[str] = []
        told = ""
        self.tell(str(self.plan))
        with entropy_of(self.chance):
            try:
                share = self.plan.calls // (self.plan.ends + 1)
                for number in range(self.plan.ends + 1):
                    self._calls_left = share
                    self._life(is_last=number == self.plan.ends)
                violations = self._decide()
            except Violated as broken:
                violations = [str(broken)]
            except Spins as spinning:
                violations = [f"the server spins: {spinning}"]
            except Told as reason:
                told = str(reason)
            finally:
                self.disk.unregister()
        if told:
            self._happens("ends as told", told)
        done = {"repeated receives": self.book.repeats, "dead letters of groups": self.book.fifo_deaths}
        sent = sum(each.kind is Kind.SEND and each.outcome is Known.OK for each in self.book.log)
        self.happened += Counter(done, operations=len(self.book.log), messages=sent, steps=self.disk.calls.total())
        return Verdict(self.seed, violations, told, self.happened)

    def _happens(self, what: str, more: str = "") -> None:
        self.happened[what] += 1
        self.tell(f"== {what}{': ' if more else ''}{more}")

    def _revive(self, *, power: bool, is_clean: bool = False) -> None:
        if power:
            self._happens("power cuts")
        self._is_clean = is_clean and not power
        self.disk.revive(power=power)

    # A server's life

    def _life(self, *, is_last: bool) -> None:
        disk = self.disk
        loop = self._loop = VirtualLoop(self.time)
        disk.later, disk.died = loop.call_later, self._halt
        disk.slow_us_max = 0
        disk.capacity = 64 << 20
        try:
            engine, store = self._opened()
            clock = LeaseClock(self.time.wall, self.time.boot_ns, lambda: False)
            clock.start(store.mark)
            self._align(clock.now())
            shell = Shell(
                engine, store, clock, self.time.seconds, cpu_time=self._cpu_time,
                committer=committers(self.time, self.chance),
            )  # fmt: skip
            self._is_over = False
            ready = loop.create_task(self._begin(shell, ClockWatch(shell.call, store.reader, clock, trusted=False)))
            ready.add_done_callback(self._halt)
            self._run(loop)
            if not disk.dead:
                ready.result()
                self._work(shell, is_last)
            self._is_over = True
            self._end(shell, store)
        finally:
            self._is_over = True
            tasks = [task for task in loop.tasks if not task.done()]
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()

    def _run(self, loop: VirtualLoop) -> None:
        """Until somebody halts it."""
        self._halts = True
        loop.run_forever()
        self._halts = False

    def _halt(self, _done: object = None) -> None:
        if self._halts and self._loop is not None:
            self._loop.stop()

    def _opened(self) -> tuple[Any, Any]:
        """Open the directory. A start may be killed, or lose its power, and then another comes."""
        disk, plan = self.disk, self.plan
        options = Options(
            reserve_bytes=65_536, floor_bytes=200_000, cache_bytes=1 << 20, redo_bytes=plan.redo_bytes,
            checkpoint_bytes=plan.checkpoint_bytes, disk=disk,
        )  # fmt: skip
        limits = Limits(batch_messages_max=plan.batch_messages_max)
        for attempt in range(_STARTS_MAX):
            self._starts += 1
            if attempt < 3 and self.chance.random() < 0.25:
                disk.dies_in = self.chance.randint(1, 40)
            try:
                engine, store = open_directory(self.directory, limits, options)
            except (NotOurs, DatabaseUnusable, SchemaRefused, apsw.Error, OSError) as error:
                if disk.dead:
                    self._happens("kills in a start")
                    self._revive(power=self.chance.random() < 0.5)
                    continue
                self._refused(f"the start was refused: {type(error).__name__}: {error}")
            if disk.dead:
                self._happens("kills in a start")
                self._close(store)
                self._revive(power=self.chance.random() < 0.5)
                continue
            disk.dies_in = None
            self._happens("starts")
            self._look(store)
            return engine, store
        raise Violated("no start came to an end")

    def _refused(self, why: str) -> NoReturn:
        if self._damaged:
            raise Told(f"{self._damaged}: {why}")
        raise Violated(why)

    def _look(self, store: Any) -> None:
        """The store's own check, after some starts on what a fault has left."""
        if not self._damaged and (self._is_clean or self.chance.random() < 0.7):
            return
        try:
            report = store.reader.check(lambda *_: None)
        except DatabaseFailed as error:
            self._refused(f"the check failed: {error}")
        found = [f"{problem.kind}: {problem.text}" for problem in report.problems]
        if found:
            self._refused(f"the check found: {'; '.join(found)}")

    def _align(self, lease_now: int) -> None:
        ahead = lease_now - self.time.wall() + self.time.us + self.time.step_us - self.now()
        if self._starts == 1 or ahead >= 0:
            self._shift_us += max(0, ahead)
        else:
            self._behind_us += -ahead

    def _cpu_time(self) -> float:
        return self.chance.random() * 0.01

    async def _begin(self, shell: Shell, watch: ClockWatch) -> None:
        shell.start()
        await watch.start()
        queues = (DEAD, DEAD_FIFO, *self._queues)
        for queue, made in zip(queues, await shell.call(*(making(each, self.plan) for each in queues)), strict=True):
            if not isinstance(made, QueueCreated) and shell.broken is None:
                raise Violated(f"{queue.name} could not be made: {made}")
        if self.plan.moves:
            await make_topic(shell)

    def _work(self, shell: Shell, is_last: bool) -> None:
        loop = self._loop
        assert loop is not None
        shell.failed.add_done_callback(self._halt)
        if not is_last:
            self._plan_the_end()
        self.book.waiting.clear()
        server = Server(shell, loop.call_later, lambda: self._is_over or self.disk.dead)
        kind = MovingClient if self.plan.moves else Client
        clients = [
            kind(f"c{number}", server, self.book, self.plan, self.chance, self._another_call)
            for number in range(self.plan.clients)
        ]
        self._plan_mischief(is_last)
        self._watch(shell, frozenset())
        self._run(loop)
        if self._asleep:
            raise Violated(self._asleep)
        if shell.broken is not None and not self.disk.dead and any(client.waits for client in clients):
            raise Violated("the store failed, and not all calls were answered")
        if shell.broken is not None and not self.disk.dead and (is_last or not self.plan.fails):
            self._refused(f"the store failed: {shell.broken}")
        if is_last:
            self._is_over = True
            for client in clients:
                client.leave()
            self._drain(shell)

    def _watch(self, shell: Shell, before: frozenset[object]) -> None:
        """No receive without a cap waits from one look to the next beside a visible message. before: those that did so
        at the last look."""
        engine, queues = shell.engine, shell.store.reader.queues
        beside = set()
        for queue in (JOBS, DEAD, COPIES):
            waiting = engine.waiting._free.get(queue)
            if waiting and queue in queues and queues[queue].visible and not self.plan.fills and not shell._at_work:
                beside.add(waiting[0].ticket)
        if beside & before:
            self._asleep = f"a receive waits beside visible messages: {beside & before}"
            self._halt()
        if not self._is_over and self._loop is not None:
            self._loop.call_later(_LOOK_S, self._watch, shell, frozenset(beside))

    def _another_call(self) -> bool:
        self._calls_left -= 1
        if self._calls_left == 0:
            assert self._loop is not None
            self._loop.call_later(self.chance.random() * 2 * _SETTLE_US / 1e6, self._halt)
        return self._calls_left >= 0

    def _plan_the_end(self) -> None:
        """Draw when this server dies; otherwise it is stopped when its calls are made."""
        if self.chance.random() < 0.8:
            self.disk.dies_in = self.chance.randint(1, _STEPS * (1 + self.plan.calls // 20))

    def _plan_mischief(self, is_last: bool) -> None:
        plan, disk, loop = self.plan, self.disk, self._loop
        assert loop is not None
        disk.slow_us_max = plan.slow_us_max
        if plan.fails and not is_last:
            # SQLite's own VFS never says that a disk is full when it syncs.
            call, error = self.chance.choice((("xWrite", io_error), ("xSync", io_error), ("xWrite", full)))
            disk.fail(call, error, skip=self.chance.randint(0, _STEPS))
            self._happens("errors set up")
        length_s = plan.think_us * plan.calls / plan.clients / 1e6
        if plan.fills:
            loop.call_later(self.chance.random() * length_s, self._fill)
        if plan.steps_clock:
            loop.call_later(self.chance.random() * length_s, self._step_clock)

    def _fill(self) -> None:
        if self._is_over:
            return
        self.disk.capacity = self.disk.used() + self.chance.randint(0, 100_000)
        self._happens("full disks")
        assert self._loop is not None
        self._loop.call_later(self.chance.random(), setattr, self.disk, "capacity", 64 << 20)

    def _step_clock(self) -> None:
        if self._is_over:
            return
        by = int((self.chance.random() * 2 - 0.7) * self.plan.step_us_max)
        self._happens("steps of the clock", f"{by / 1e6:.3f} s")
        self.time.step_us += by

    def _end(self, shell: Shell, store: Any) -> None:
        """The server is dead, broken or stopped: what is left, and how long until the next start."""
        disk, loop = self.disk, self._loop
        assert loop is not None
        if not disk.dead and shell.broken is None and self.chance.random() < 0.7:
            loop.run_until_complete(shell.stop(1.0))
            self._happens("stops")
            with suppress(apsw.Error):
                store.close()
            is_clean = not disk.dead and shell.broken is None
        else:
            is_clean = False
            self._happens("kills at a step" if disk.dead else "failures" if shell.broken else "kills between steps")
            disk.dead = True
            self._close(store)
        power = self.chance.random() < 0.5
        self._revive(power=power, is_clean=is_clean)
        # After a power cut, `committed` may be a second old: a loss in that second goes unnoticed (decision 0017).
        if self.plan.flips and not self._damaged and not power:
            self._damaged = disk.flip()
            self._happens("flipped bits", self._damaged)
        self.time.us += int(self.chance.random() ** 3 * 10 * SECOND_US)

    def _close(self, store: Any) -> None:
        """Let go of a dead server's files."""
        store._broken = "killed"
        with suppress(apsw.Error, OSError):
            store.close()

    # The end

    def _drain(self, shell: Shell) -> None:
        """Healthy and quiet: every message that is there is received."""
        loop, disk = self._loop, self.disk
        assert loop is not None
        disk.capacity, disk.failure, disk.slow_us_max = 64 << 20, None, 0
        loop.run_until_complete(asyncio.sleep(1 + 3 * self.plan.slow_us_max / 1e6))  # what was begun comes to an end
        if self.chance.random() < 0.9:
            self.time.us += LEASE_US_MAX + 2 * SECOND_US  # as after a sleep of the machine
        else:
            loop.run_until_complete(asyncio.sleep(LEASE_US_MAX / 1e6 + 2))
        while self.plan.moves and loop.run_until_complete(is_moving(shell)):
            loop.run_until_complete(asyncio.sleep(1))
        for queues in (self._queues, (DEAD, DEAD_FIFO)):  # dead letters come of the first ones' receives
            loop.run_until_complete(self._drain_queues(shell, queues))

    async def _drain_queues(self, shell: Shell, queues: Sequence[QueueKey]) -> None:
        await asyncio.gather(*(self._drain_queue(shell, queue) for queue in queues))

    async def _drain_queue(self, shell: Shell, queue: QueueKey) -> None:
        book = self.book
        await shell.call(making(queue, self.plan))  # somebody may have deleted it last
        claim = book.begin("drain", Kind.DRAIN, queue)
        waits = True
        while True:
            asked = Receive(
                queue=queue, origin=TESTER, count_max=10, lease_us=3_600 * SECOND_US, wait_us=SECOND_US if waits else 0
            )
            number = book.begin("drain", Kind.RECEIVE, queue, lease_us=asked.lease_us)
            (outcome,) = await shell.call(asked)
            if not isinstance(outcome, Received):
                raise Violated(f"a drain of {queue.name} was refused: {outcome}")
            grants = book.grants(queue, outcome)
            book.end(number, Known.OK, grants=grants)
            if grants and not waits:
                raise Violated(f"a visible message of {queue.name} reached no waiting receiver: {grants[0]}")
            if not grants and not waits:
                break
            waits = bool(grants)
            if grants:
                await self._delete(shell, queue, grants, outcome)
        book.end(claim, Known.OK)
        (described,) = await shell.call(DescribeQueue(queue=queue, origin=TESTER))
        assert isinstance(described, QueueDescribed), described
        counts = described.info.counts
        if counts.visible or counts.in_flight or counts.delayed:
            raise Violated(f"{queue.name} is empty, and is said to hold messages: {counts}")

    async def _delete(self, shell: Shell, queue: QueueKey, grants: Sequence[Grant], outcome: Received) -> None:
        book = self.book
        begun = [book.begin("drain", Kind.DELETE, queue, lease=grant.lease) for grant in grants]
        arrived = shell.arrived()
        gone = await shell.call(
            *(Delete(queue=queue, origin=TESTER, handle=each.handle, arrived=arrived) for each in outcome.messages)
        )
        for number, each in zip(begun, gone, strict=True):
            if isinstance(each, VeilError):
                raise Violated(f"a delete of the drain was refused: {each}")
            book.end(number, Known.OK)

    def _decide(self) -> list[str]:
        if self.plan.moves:
            return misplaced(self.book.log)
        dead = {JOBS.name: DEAD.name} | ({FIFO.name: DEAD_FIFO.name} if self.plan.fifo_dies else {})
        promises = Promises(dead_letters=dead, tolerance_us=1_000 + self._behind_us)
        report = decide(self.book.log, promises)
        found = [str(each) for each in report.violations]
        if found and self._damaged:
            found = [f"after a flip of {self._damaged}, silently: {each}" for each in found]
        return found
