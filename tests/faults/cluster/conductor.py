"""Rounds of load on a cluster under random faults: the seed chooses them, the history checker judges what clients saw.

Strategy: three servers, PostgreSQL with its standby, and a queue for each protocol and form (as in `make faults`), used
by clients of one server each and by one that calls any. A round strikes some times, one fault after another; then
everything is brought back, drained and checked. The queues live on from round to round. Each fault has a sequence of
random numbers of its own, so that the seed gives the same schedule however long things take. Servers write snapshots
as with a large log; after each round those that are there must have what they name.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
from tests.faults.cluster import clocks, network
from tests.faults.cluster.clocks import WallClock
from tests.faults.cluster.databases import Databases
from tests.faults.cluster.kinds import HOUR, KINDS
from tests.faults.cluster.network import Namespaces, Network
from tests.faults.cluster.stage import LEASE_SECONDS, Fault, Member, Stage
from tests.faults.suite.conductor import FORMS, commit, told
from tests.support.ports import kept_ports
from tests.support.postgres import programs

from veilmq.checking.log import Kind, Outcome
from veilmq.cluster.postgres import Postgres
from veilmq.cluster.postgres.schema import init, look
from veilmq.cluster.postgres.snapshots import Snapshots
from veilmq.driver import Plan, Run
from veilmq.driver.recorded import Recording
from veilmq.engine.directory import STATE_FORMAT, open_follower
from veilmq.store import Options
from veilmq.store.directory import DATABASE
from veilmq.store.log import SnapshotBad
from veilmq.store.sqlite.tools import check
from veilmq.testing import Random
from veilmq.testing import chance as seeded

NAMES: Final = ("one", "two", "three")
CLIENTS: Final = 3
"""Of each queue."""
INTERVAL_SECONDS: Final = 0.2
BEHIND_SECONDS: Final = 30.0
"""How late a message may expire. A new owner's lease clock goes on from the last renewal that it saw, which took as
long to reach PostgreSQL as that stood still: at most 10 s a take-over."""
DATABASE_DISK_BYTES: Final = 700 * 1024 * 1024
SERVER_DISK_BYTES: Final = 96 * 1024 * 1024


class Record(msgspec.Struct):
    """A whole run."""

    commit: str
    seed: int
    seconds: float = 0
    rounds: int = 0
    faults: dict[str, int] = msgspec.field(default_factory=dict)
    kills: int = 0
    owners: int = 0
    """How often the shard changed hands, or its owner fenced itself."""
    operations: int = 0
    acknowledged: int = 0
    """Messages whose send was."""
    violations: int = 0
    snapshots: int = 0
    """That were read after a round."""
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    unexpected: dict[str, int] = msgspec.field(default_factory=dict)
    """Errors that no client should have seen, servers that did not come back by themselves, and bad snapshots."""
    stories: list[str] = msgspec.field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.violations or self.unexpected)

    @property
    def struck(self) -> int:
        return sum(self.faults.values())

    def row(self) -> str:
        """Of the table in docs/reliability.md."""
        return (
            f"| {self.commit} | {self.seed} | {self.seconds / 60:.0f} min | {self.struck} | {self.kills} "
            f"| {self.owners} | {self.operations:,} | {self.acknowledged:,} | {self.violations} |"
        )


class Arena:
    """A cluster, its queues and their clients."""

    def __init__(self, stack: contextlib.ExitStack, directory: Path, seed: int, *, whole: bool) -> None:
        """whole: with a network that can be cut, small disks, and clocks that can be set."""
        self._directory = directory
        found = stack.enter_context(programs())
        net: Network = Namespaces() if whole else Network()
        library = clocks.build(found.root) if whole else None
        wall = [WallClock(library, found.root / f"clock-{name}") for name in ("db", *NAMES)] if library else []
        databases = Databases(found, net, wall[0].environment if wall else {}, DATABASE_DISK_BYTES if whole else 0)
        stack.callback(databases.close)
        init(Postgres(databases.dsn), state_format=STATE_FORMAT, lease_us=int(LEASE_SECONDS * 1e6), segment=4096)
        members = []
        for number, name in enumerate(NAMES):
            place = directory / name
            place.mkdir()
            if whole:
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SERVER_DISK_BYTES}", "tmpfs", place], check=True)
                stack.callback(subprocess.run, ["umount", "--lazy", place], check=True)
            clock = wall[number + 1] if wall else None
            if clock is not None:
                clock.set_ahead((0, HOUR, -HOUR)[number])
            admin, peer = stack.enter_context(kept_ports(2))
            log = directory / f"{name}.log"
            members.append(Member(name, net.place(name), place, log, databases.dsn, clock, (admin, peer)))
        self.stage = Stage(databases, net, members, wall[0] if wall else None)
        stack.callback(self.stage.close)
        stack.callback(self._keep_logs, directory)
        self.stage.begin(*members)
        said = self.stage.wait_ready()
        assert not said, "\n".join(said)
        self.runs = []
        for number, (protocol, fifo, dead_letters) in enumerate(FORMS):
            url, *others = (members[(number + step) % 3].urls()[protocol] for step in range(3))
            if protocol == "azure":  # whose requests are refused where the clock is 15 minutes off
                url, others = members[0].urls()[protocol], []
            plan = Plan(
                url=url, others=tuple(others), name=f"{protocol}-{number}", clients=CLIENTS, seed=seed,
                interval=INTERVAL_SECONDS, fifo=fifo, dead_letters=dead_letters,
                behind_s=BEHIND_SECONDS,
            )  # fmt: skip
            run = Run(plan, plan.promises(), Recording())
            run.open()
            stack.callback(run.close)
            self.runs.append(run)

    def _keep_logs(self, directory: Path) -> None:
        kept = Path(os.environ.get("VEILMQ_FAULTS_KEEP", "") or directory / "kept")
        kept.mkdir(exist_ok=True, parents=True)
        for each in (*directory.glob("*.log"), *directory.glob("*.ends")):
            shutil.copy(each, kept)

    def round(self, faults: Sequence[tuple[Fault, Random]], record: Record, say: Callable[[str], None]) -> None:
        """Strike with each of these, bring everything back, drain and check."""
        stop = threading.Event()
        stage = self.stage
        before = stage.kills
        epoch = self._epoch()
        with ThreadPoolExecutor(len(self.runs), "round") as pool:
            rounds = [pool.submit(run.round, None, lambda stop: None, stop) for run in self.runs]
            try:
                time.sleep(1)
                for fault, chance in faults:
                    stage.chance = chance
                    stage.pause(0, 1.5)
                    say(f"strikes: {fault.name}")
                    fault.strike(stage)
                    record.faults[fault.name] = record.faults.get(fault.name, 0) + 1
                left = stage.calm()
                time.sleep(1)
            finally:
                stop.set()
            for each in rounds:
                each.result()
        record.rounds += 1
        record.kills += stage.kills - before
        record.owners += self._epoch() - epoch
        left += stage.ended.elements()
        left += self._judge_snapshots(record)
        for what in left:
            record.unexpected[what] = record.unexpected.get(what, 0) + 1
        stage.ended.clear()
        figures = [run.figures for run in self.runs]
        acknowledged = sum(each.outcomes[Kind.SEND, Outcome.OK] for each in figures)
        operations = sum(each.report.operations for each in figures)
        violations = sum(each.report.counts.total() for each in figures)
        record.acknowledged += acknowledged
        record.operations += operations
        record.violations += violations
        unexpected, stories = told(self.runs)
        for error, count in unexpected.items():
            record.unexpected[error] = record.unexpected.get(error, 0) + count
        names = ", ".join(fault.name for fault, _ in faults)
        record.stories += [f"{names}: {story}" for story in stories]
        for what in (*left, *unexpected):
            say(f"UNEXPECTED {what}")
        for story in stories:
            say(f"VIOLATION {story}")
        say(
            f"round {record.rounds}: {operations} operations, {acknowledged} acknowledged, {violations} violations, "
            f"{record.snapshots} snapshots read so far"
        )

    def _judge_snapshots(self, record: Record) -> Iterator[str]:
        """What is wrong with those that are published."""
        postgres = Postgres(self.stage.databases.dsn)
        with postgres.session() as session:
            snapshots = Snapshots(postgres, look(session).incarnation)
        for found in snapshots.list():
            with TemporaryDirectory(dir=self._directory) as place:
                copy = Path(place, DATABASE)
                try:
                    snapshots.read(found, copy)
                except SnapshotBad:
                    if found in snapshots.list():  # else a newer one has taken its place meanwhile
                        raise
                    continue
                record.snapshots += 1
                if problems := check(copy).problems_count:
                    yield f"the snapshot of record {found.lsn} has {problems} problems"
                with closing(open_follower(Path(place), Options(reserve_bytes=0))) as follower:
                    if follower.position != found.point.position:
                        yield f"the snapshot of record {found.lsn} ends with record {follower.position.lsn}"

    def _epoch(self) -> int:
        for (epoch,) in self.stage.databases.ask("select epoch from veilmq.shard"):
            return int(str(epoch))
        return 0


def conduct(
    directory: Path,
    seed: int,
    *,
    minutes: float = 1e9,
    faults: int = 1_000_000_000,
    in_a_round: int = 6,
    kinds: Sequence[Fault] = KINDS,
    once: bool = False,
    whole: bool = True,
) -> Record:
    """Strike so often, or for so long. once: each kind once. whole: see `Arena`."""
    record = Record(commit(), seed)
    able = {
        "cuts": network.missing() if whole else "no network of its own",
        "disks": network.missing() if whole else "no disks of its own",
        "clocks": clocks.missing() if whole else "no clocks of its own",
    }
    record.skipped = {kind.name: why for kind in kinds if (why := able.get(kind.needs, ""))}
    possible = [kind for kind in kinds if kind.name not in record.skipped]
    begun = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {time.monotonic() - begun:6.0f} s  {what}", flush=True)

    with contextlib.ExitStack() as stack:
        arena = Arena(stack, directory, seed, whole=whole)
        schedule = _schedule(possible, seed, once=once)
        while record.struck < faults and time.monotonic() - begun < minutes * 60:
            chosen = list(itertools.islice(schedule, in_a_round))
            if not chosen:
                break
            arena.round(chosen, record, say)
    record.seconds = round(time.monotonic() - begun)
    return record


def _schedule(kinds: Sequence[Fault], seed: int, *, once: bool) -> Iterator[tuple[Fault, Random]]:
    """Each kind once in any order, then by weight."""
    chance = seeded(seed)
    number = 0

    def chosen() -> Iterator[Fault]:
        yield from chance.sample(list(kinds), len(kinds))
        while not once:
            yield from chance.choices(kinds, [kind.weight for kind in kinds])

    for number, kind in enumerate(chosen()):
        yield kind, seeded(seed * 100_003 + number)
