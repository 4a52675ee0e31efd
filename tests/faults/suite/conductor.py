"""Rounds of load under one fault each: the seed chooses the kinds, the history checker judges what the clients saw.

Strategy: one server with a queue for each protocol and form, and one that is used over all protocols; the clients of
the driver (`veilmq.driver`) use all of them at the same time. A round strikes, lets the server rest, drains and checks.
The queues live on from round to round, so that what comes back later is seen. A round that needs a small disk has a
server and queues of its own there.
"""

import contextlib
import copy
import subprocess
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from tests.faults.suite.kinds import KINDS, PATTERNS, SMALL_DISK
from tests.faults.suite.proxy import Proxy
from tests.faults.suite.server import Server
from tests.faults.suite.stage import Kind, Stage
from tests.faults.suite.topics import Topics
from tests.faults.suite.transactions import Transactions

from veilmq.client.messages import Message, Received, Sent
from veilmq.client.queue import Account, Queue
from veilmq.client.wrapping import Wrapping
from veilmq.driver import Figures, Plan, Run
from veilmq.driver.recorded import Recording
from veilmq.model.errors import VeilError
from veilmq.testing import Random
from veilmq.testing import chance as seeded

SMALL_DISK_BYTES = 48 * 1024 * 1024
SMALL_DISK_OPTIONS = ("--reserve-bytes", "4194304", "--floor-bytes", "262144")
CLIENTS = 2
"""Of each queue."""
INTERVAL_SECONDS = 0.02
FORMS = (
    ("veil", True, True), ("sqs", False, True), ("sqs", True, True), ("azure", False, False), ("mns", False, False),
)  # fmt: skip
"""Protocol, FIFO, with dead letters: a queue each."""
SHARED = ("veil", "sqs", "azure", "mns")
"""Of one more queue, which a client each uses over these: a lease holds in all of them."""
EXPECTED = {
    "TransportError", "StoreFailed", "StoreUnknown", "DiskLow", "Overloaded",
    "LeaseTaken", "LeaseExpired", "MessageGone", "ReceiptInvalid",
    "ServiceError ServiceUnavailable", "ServiceError InternalError", "ServiceError InternalFailure",
    "ServiceError ServerBusy", "ServiceError InternalServerError",
}  # fmt: skip
"""What clients may be told while a server is in trouble, and by the ends of leases."""


class Tally(msgspec.Struct):
    """The figures of one kind of fault, or of all."""

    rounds: int = 0
    strikes: int = 0
    kills: int = 0
    operations: int = 0
    violations: int = 0

    def add(self, other: "Tally") -> None:
        """Another round's."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Record(msgspec.Struct):
    """A whole run."""

    commit: str
    seed: int
    seconds: float = 0
    total: Tally = msgspec.field(default_factory=Tally)
    kinds: dict[str, Tally] = msgspec.field(default_factory=dict)
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    """Kinds that this machine cannot have, and why."""
    unexpected: dict[str, int] = msgspec.field(default_factory=dict)
    """Errors that no client should have seen."""
    stories: list[str] = msgspec.field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.total.violations or self.unexpected)

    def row(self) -> str:
        """Of the table in docs/reliability.md."""
        total = self.total
        return (
            f"| {self.commit} | {self.seed} | {self.seconds / 60:.0f} min | {total.rounds} | {total.kills:,} "
            f"| {total.strikes:,} | {total.operations:,} | {total.violations} |"
        )


class Conducted(Protocol):
    """What the record of a run has, whatever was struck."""

    skipped: dict[str, str]
    unexpected: dict[str, int]

    @property
    def clean(self) -> bool: ...

    def row(self) -> str: ...


def kept(record: Conducted, path: Path) -> int:
    """Write the record, and print what matters of it. Returns the exit code: 1 if a promise was broken."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    for name, why in record.skipped.items():
        print(f"skipped {name}: {why}")
    for error, count in record.unexpected.items():
        print(f"unexpected: {error} ({count})")
    print(f"{path}\n{record.row()}")
    return 0 if record.clean else 1


def told(runs: Sequence[Run]) -> tuple[Counter[str], list[str]]:
    """What clients were told that they should not have been, and a story for each violation, since the last call."""
    unexpected: Counter[str] = Counter()
    stories: list[str] = []
    for run in runs:
        figures, name = run.figures, run.plan.name
        unexpected.update({error: count for (_, error), count in figures.reasons.items() if error not in EXPECTED})
        if figures.undrained or figures.recreated:
            unexpected[f"{name} {figures.undrained or 'was gone'}"] += 1
        stories += [f"{name}: {each}" for each in figures.report.violations]
        run.figures = Figures(rounds=figures.rounds)
    return unexpected, stories


T = TypeVar("T", Sent, Received)


class SameIds(Wrapping):
    """A queue whose messages have the ids that they have over the other protocols: MNS spells them in its own way."""

    def send(self, message: str | Message) -> Sent:
        return _same(self.inner.send(message))

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        answers = self.inner.send_batch(messages)
        return [each if isinstance(each, VeilError) else _same(each) for each in answers]

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        return [_same(each) for each in self.inner.receive(count_max, lease=lease, wait=wait)]


def _same(answer: T) -> T:
    return msgspec.structs.replace(answer, id=str(uuid.UUID(answer.id)))


class SharedRun(Run):
    """Each client uses the queue by one of the plan's URLs alone: a handle is good in its protocol only."""

    def _client(self, number: int, stop: threading.Event) -> None:
        urls = (self.plan.url, *self.plan.others)
        alone = copy.copy(self)
        alone.plan = msgspec.structs.replace(self.plan, url=urls[number % len(urls)], others=())
        super(SharedRun, alone)._client(number, stop)

    def _reach(self, name: str, accounts: list[Account], chance: Random, stop: threading.Event) -> Queue:
        return SameIds(super()._reach(name, accounts, chance, stop))


class Arena:
    """A server, the proxy before it, and its queues."""

    def __init__(self, directory: Path, log: Path, seed: int, *options: str, patterns: bool = False) -> None:
        """patterns: a topic and transactions in place of plain queues."""
        self.server = Server(directory, log, *options)
        self.proxy = Proxy(self.server.ports, seeded(seed))
        assert self.server.start(), f"the server does not start: {self.server.last_words()}"
        urls = self.server.urls()
        self.patterns: list[Topics | Transactions] = [Topics(urls), Transactions(urls)] if patterns else []
        plans = [
            Plan(
                url=urls[protocol], name=f"{protocol}-{number}", clients=CLIENTS, seed=seed, interval=INTERVAL_SECONDS,
                fifo=fifo, dead_letters=dead_letters,
            )
            for number, (protocol, fifo, dead_letters) in enumerate(() if patterns else FORMS)
        ]  # fmt: skip
        self.runs = [Run(plan, plan.promises(), Recording()) for plan in plans]
        if not patterns:
            url, *others = shared_urls(urls)
            plan = Plan(
                url=url,
                others=tuple(others),
                name="shared",
                clients=len(SHARED),
                seed=seed,
                interval=4 * INTERVAL_SECONDS,
            )
            promises = msgspec.structs.replace(plan.promises(), stale_deletes_refused=False)  # SQS answers them
            self.runs.append(SharedRun(plan, promises, Recording()))
        for each in (*self.runs, *self.patterns):
            each.open()

    def round(self, kind: Kind, chance: Random, seconds: float) -> Tally:
        """One round of this kind."""
        self.server.kill()
        done = sum(each.operations for each in self.patterns)
        stage = Stage(self.server, self.proxy, chance, seconds)
        urls = self.server.urls(self.proxy.ports if kind.proxied else None)
        all_urls = [*([urls[protocol]] for protocol, *_ in FORMS), shared_urls(urls)]
        for run, (url, *others) in zip(self.runs, all_urls, strict=False):
            # Where the clock was moved, a time to live is over at another time than the clients' clocks say.
            run.plan = msgspec.structs.replace(
                run.plan, url=url, others=tuple(others), expiring=kind.place != "moved clock"
            )
        for pattern in self.patterns:
            pattern.use(urls)
        users = [*self.runs, *self.patterns]
        with ThreadPoolExecutor(len(users), "round") as pool:
            rounds = [pool.submit(each.round, seconds) for each in users]
            kind.strike(stage)
            self.server.kill()
            assert self.server.start(), f"after {kind.name}, the server does not start: {self.server.last_words()}"
            for each in rounds:
                each.result()
        reports = [run.figures.report for run in self.runs]
        operations = sum(each.operations for each in (*reports, *self.patterns)) - done
        violations = [*(each.counts.total() for each in reports), *(len(each.violations) for each in self.patterns)]
        return Tally(1, stage.strikes, stage.kills, operations, sum(violations))

    def tell(self, record: Record, kind: Kind) -> None:
        """Add what its queues have done wrong since the last call, in a round of this kind."""
        unexpected, stories = told(self.runs)
        unexpected.update(record.unexpected)
        for pattern in self.patterns:
            stories += [f"{pattern.name}: {violation}" for violation in pattern.violations]
            pattern.violations.clear()
        for story in stories:
            print(f"\n{kind.name}: {story}\n", flush=True)
        record.stories += [f"{kind.name}: {story}" for story in stories]
        record.unexpected = dict(unexpected)

    def close(self) -> None:
        """End server and proxy."""
        for each in (*self.runs, *self.patterns):
            each.close()
        self.proxy.close()
        self.server.close()


def shared_urls(urls: dict[str, str]) -> list[str]:
    """Of the queue that all protocols share: bodies are as they are in all of them."""
    return [f"{urls[protocol]}&base64=0" if protocol in ("azure", "mns") else urls[protocol] for protocol in SHARED]


def conduct(
    directory: Path,
    seed: int,
    minutes: float,
    round_seconds: float,
    kinds: Sequence[Kind] = KINDS,
    *,
    once: bool = False,
) -> Record:
    """Strike until the time is over; `once`: each kind once, and then no more."""
    record = Record(commit(), seed)
    record.skipped = {kind.name: why for kind in kinds if (why := kind.missing())}
    possible = [kind for kind in kinds if kind.name not in record.skipped]
    chance = seeded(seed)
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        arenas: dict[str, Arena] = {}
        for kind in iter(possible) if once else _chosen(possible, chance):
            if not once and time.monotonic() - begun > minutes * 60:
                break
            if kind.place not in arenas:
                arenas[kind.place] = _arena(stack, directory, seed, kind.place)
            tally = arenas[kind.place].round(kind, chance, round_seconds)
            record.total.add(tally)
            record.kinds.setdefault(kind.name, Tally()).add(tally)
            print(f"{time.monotonic() - begun:6.0f} s  {kind.name:<18} {tally}", flush=True)
            arenas[kind.place].tell(record, kind)
    record.seconds = round(time.monotonic() - begun)
    return record


def _chosen(kinds: Sequence[Kind], chance: Random) -> Iterator[Kind]:
    """Each kind once in any order, then by weight."""
    yield from chance.sample(kinds, len(kinds))
    while True:
        yield from chance.choices(kinds, [kind.weight for kind in kinds])


def _arena(stack: contextlib.ExitStack, directory: Path, seed: int, name: str) -> Arena:
    place = directory / name.replace(" ", "-")
    place.mkdir(parents=True)
    options: tuple[str, ...] = ()
    if name.startswith(SMALL_DISK):
        size = f"size={SMALL_DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", place], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", place], check=True)
        options = SMALL_DISK_OPTIONS
    patterns = name.endswith(PATTERNS)
    if patterns:
        options += ("--push-allow", "127.0.0.0/8")
    arena = Arena(place, directory / f"{place.name}.log", seed, *options, patterns=patterns)
    stack.callback(arena.close)
    return arena


def commit() -> str:
    here = Path(__file__).parent
    said = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=here, capture_output=True, text=True)
    return said.stdout.strip() or "?"


def temporary() -> "tempfile.TemporaryDirectory[str]":
    """Where the data lives: a disk, and no tmpfs, where the machine has both."""
    return tempfile.TemporaryDirectory(prefix="veilmq-faults-", dir="/var/tmp")
