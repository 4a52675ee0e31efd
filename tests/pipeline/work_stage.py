"""Workers at the real store under a manual clock: the history that comes of it, and what truly happened.

Strategy: the clock moves from one thing that happens to the next: a message comes, a worker is done or dies, a lease
ends. A worker that is free receives at once what is visible. One that is done deletes; one that dies is never heard of
again, and another takes its place at once. What a message's n-th run is like follows from the seed, the message and n
alone, so the same work can be done under other settings.
"""

import heapq
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
from tests.support.contract.stage import TESTER, Stage, sending
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.model.commands import Delete, Extend, Receive
from veilmq.model.messages import Extras
from veilmq.model.outcomes import Received
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.pipeline.events import ARROW_SCHEMA

S = 1_000_000
_MEMORY: Final = Path("/dev/shm")
"""Where the machine has it: nothing is killed here, and the disk is not what is tested."""
_COMES, _OVER, _ENDS, _EXTENDS = range(4)


class Work(NamedTuple):
    """One type of messages. `takes` draws so many seconds."""

    type: str | None
    arrivals: Sequence[float]
    """Seconds, ascending."""
    takes: Callable[[np.random.Generator, int], Any]
    crashes_per_second: float = 0.0
    keeps: bool = True
    """A message takes as long each time."""


class Under(NamedTuple):
    """Settings. Seconds."""

    timeout: float
    workers: int = 10_000
    extend: float | None = None
    receives_max: int | None = None


@dataclass
class Happened:
    """What is true of all messages, in the words of `whatif`."""

    messages: int = 0
    duplicates: int = 0
    recovery: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    extensions: int = 0
    dead_letters: int = 0

    def figures(self) -> dict[str, float]:
        """As the columns of `whatif`, with the usual costs."""
        recovery = sum(self.recovery)
        return {
            "duplicates": self.duplicates / self.messages,
            "recovery_s": recovery / len(self.recovery) if self.recovery else float("nan"),
            "wait_s": float(np.mean(self.wait)),
            "wait_p95_s": float(np.quantile(self.wait, 0.95)),
            "cost": (recovery + 120 * self.duplicates + 0.01 * self.extensions) / self.messages,
            "dead_letters": float(self.dead_letters),
        }

    def started(self, job: "_Job", now: float, came: float) -> None:
        """Count what the next run of a job means."""
        if not job.taken:
            self.wait.append(now - came)
        self.duplicates += job.alive_until > now
        if job.died < now:
            self.recovery.append(now - job.died)


class _Job:
    def __init__(self, work: Work, number: int, seed: int) -> None:
        self.work = work
        self._seed = [seed, number]
        self._own = float(work.takes(np.random.default_rng(self._seed), 1)[0])
        self.taken = 0
        self.alive_until = -1.0
        self.died = float("nan")

    def run(self) -> tuple[float, bool]:
        """Seconds of the next run, and whether the worker dies then."""
        self.taken += 1
        random = np.random.default_rng([*self._seed, self.taken])
        takes = self._own if self.work.keeps else float(self.work.takes(random, 1)[0])
        rate = self.work.crashes_per_second
        crash = float(random.exponential(1 / rate)) if rate else float("inf")
        return min(takes, crash), crash < takes

    def started(self, now: float) -> tuple[float, bool]:
        """The next run, from now on."""
        busy, dies = self.run()
        self.died = now + busy if dies else float("nan")
        self.alive_until = max(self.alive_until, now + busy)
        return busy, dies


class Shift:
    """The work of one queue, until every message is gone."""

    def __init__(self, stage: Stage, queue: QueueKey, works: Sequence[Work], under: Under, seed: int) -> None:
        self._stage, self._queue, self._under = stage, queue, under
        self._zero = stage.now
        self._free = under.workers
        self._waiting: dict[int, None] = {}
        self._jobs = [
            _Job(work, 1_000_000 * at + n, seed) for at, work in enumerate(works) for n in range(len(work.arrivals))
        ]
        times = [at for work in works for at in work.arrivals]
        self._came = dict(enumerate(times))
        self._events: list[tuple[float, int, int, str]] = [(at, _COMES, number, "") for number, at in enumerate(times)]
        heapq.heapify(self._events)
        self.happened = Happened(messages=len(times))

    def run(self) -> Happened:
        """Until nothing happens any more."""
        while self._events:
            now = self._events[0][0]
            self._stage.later(max(round(now * S) - (self._stage.now - self._zero), 0))
            while self._events and self._events[0][0] <= now:
                self._happen(*heapq.heappop(self._events))
            while self._free and self._take(now):
                pass
        return self.happened

    def _happen(self, now: float, what: int, number: int, handle: str) -> None:
        if what == _COMES:
            job = self._jobs[number]
            self._stage.batch([sending(self._queue, str(number), extras=Extras(type=job.work.type))])
        elif what == _OVER:
            self._free += 1
            if handle:
                self._stage.batch([Delete(queue=self._queue, origin=TESTER, handle=handle, arrived=self._stage.now)])
        elif what == _EXTENDS:
            self._extend(now, handle)
        else:
            self._stage.sweep()

    def _extend(self, now: float, handle: str) -> None:
        us = round(self._under.timeout * S)
        self._stage.batch(
            [Extend(queue=self._queue, origin=TESTER, handle=handle, lease_us=us, arrived=self._stage.now)]
        )
        self.happened.extensions += 1
        heapq.heappush(self._events, (now + self._under.timeout + 1e-5, _ENDS, 0, ""))

    def _take(self, now: float) -> bool:
        """Whether a worker found something."""
        (outcome,) = self._stage.batch([Receive(queue=self._queue, origin=TESTER, count_max=1)]).outcomes
        assert isinstance(outcome, Received), outcome
        if not outcome.messages:
            return False
        delivery = outcome.messages[0]
        number = int(delivery.body)
        job = self._jobs[number]
        self.happened.started(job, now, self._came[number])
        busy, dies = job.started(now)
        self._free -= 1
        heapq.heappush(self._events, (now + busy, _OVER, number, "" if dies else delivery.handle))
        step = self._under.extend
        for place in range(1, int(busy / step) + 1 if step else 1):
            heapq.heappush(self._events, (now + place * step, _EXTENDS, number, delivery.handle))  # type: ignore[operator]
        heapq.heappush(self._events, (now + self._under.timeout + 1e-5, _ENDS, number, ""))
        return True


def worked(works: Sequence[Work], under: Under, seed: int) -> tuple[pa.Table, Happened]:
    """Do the work at a store of its own; its history, and what happened."""
    with tempfile.TemporaryDirectory(prefix="veilmq-work-", dir=_MEMORY if _MEMORY.is_dir() else None) as place:
        stage = Stage(SqliteFactory(Path(place) / "data", SMALL))
        more: dict[str, Any] = {}
        if under.receives_max is not None:
            more["redrive"] = RedrivePolicy(stage.create("dead"), under.receives_max)
        queue = stage.create(visibility_timeout_us=round(under.timeout * S), **more)
        happened = Shift(stage, queue, works, under, seed).run()
        events = stage.events()
        stage.store.close()
    happened.dead_letters = sum(event.kind == "dead_lettered" for event in events)
    rows = [msgspec.to_builtins(event) for event in events]
    for row in rows:
        row["detail"] = None if row["detail"] is None else msgspec.json.encode(row["detail"]).decode()
    return pa.Table.from_pylist(rows, ARROW_SCHEMA), happened


def sketched(works: Sequence[Work], under: Under, seed: int) -> "tuple[pd.DataFrame, Happened]":
    """What `worked` gives, in a hundredth of its time: no server, its rules are written down here again.

    Gives the leases (rows as `whatif` hands them to a task) instead of events. Leases are not extended.
    """
    jobs = [_Job(work, 1_000_000 * at + n, seed) for at, work in enumerate(works) for n in range(len(work.arrivals))]
    came = [at for work in works for at in work.arrivals]
    events: list[tuple[float, int, int, int]] = [(at, _COMES, number, 0) for number, at in enumerate(came)]
    heapq.heapify(events)
    visible: list[tuple[float, int]] = []
    gone, free, happened = set[int](), under.workers, Happened(messages=len(jobs))
    # Of each lease: message, attempt, when it was visible and granted, how it ended, how long the work took.
    leases: list[list[Any]] = []
    while events:
        now, what, number, lease = heapq.heappop(events)
        if what == _OVER:
            free += 1
            if leases[lease][4] is None:
                in_time = leases[lease][1] == jobs[number].taken and number not in gone
                leases[lease][4] = "deleted" if in_time else "redone"
                gone |= {number} if in_time else set()
        elif number not in gone:
            heapq.heappush(visible, (now, number))
        if events and events[0][0] <= now:
            continue
        while free and visible:
            since, number = heapq.heappop(visible)
            job = jobs[number]
            if number in gone:
                continue
            if job.taken == under.receives_max:
                gone.add(number)
                happened.dead_letters += 1
                continue
            happened.started(job, now, came[number])
            busy, dies = job.started(now)
            free -= 1
            leases.append([number, job.taken, since, now, "crashed" if dies else None, busy])
            heapq.heappush(events, (now + busy, _OVER, number, len(leases) - 1))
            heapq.heappush(events, (now + under.timeout + 1e-5, _ENDS, number, 0))
    return _frame(jobs, came, leases, under), happened


def _frame(jobs: Sequence[_Job], came: Sequence[float], leases: list[list[Any]], under: Under) -> pd.DataFrame:
    """The columns that a task of `whatif` gets, with a row of attempt 0 for each message that was sent."""
    message, attempt, since, granted, outcome, busy = map(np.array, zip(*leases, strict=True))
    types = np.array([job.work.type for job in jobs], object)
    sent, lease_us = np.round(np.array(came) * S), round(under.timeout * S)
    exact = outcome != "crashed"
    granted_us, over_us = (np.round(each.astype(float) * S) for each in (granted, granted + busy))
    one = pd.DataFrame({
        "sequence": message, "attempt": attempt, "type": types[message], "sent": sent[message],
        "visible_since": np.round(since * S), "granted": granted_us, "lease_us": lease_us, "outcome": outcome,
        "exact": exact, "held_us": np.where(exact, over_us - granted_us, 0), "lease_end_us": lease_us,
    })  # fmt: skip
    two = pd.DataFrame({"sequence": np.arange(len(jobs)), "attempt": 0, "type": types, "sent": sent})
    two = two.assign(visible_since=sent, exact=False)
    rows = pd.concat([one, two.astype(object)], ignore_index=True).infer_objects()
    named = {"account": "000000000000", "region": "us-east-1", "queue": "jobs", "incarnation": 2}
    return rows.assign(**named, extensions=0, watched_us=np.nan, renewed_share=np.nan, receives_max=under.receives_max)
