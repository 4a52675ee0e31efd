"""Workers on a real queue whose hours pass in seconds, and what happened to them.

Strategy: the server's own clock is moved from one thing that happens to the next: a message arrives, a worker is done
or dies, somebody looks whether a lease ended. Workers name no lease, so the queue's timeout or the server's plan
decides; one that is done deletes, one that dies is never heard of again. There are always enough of them. The same
seed gives the same work, whatever the leases are.
"""

import heapq
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from laws import Kind

from veilmq.client.messages import Message, Received
from veilmq.client.queue import Queue
from veilmq.model.errors import LeaseTaken, MessageGone, VeilError
from veilmq.testing import chance
from veilmq.testing.local import LocalServer

RECEIVES_MAX = 4
"""Then a message goes to the dead-letter queue: one that takes longer than its lease each time is never deleted."""
LOOK_EVERY_S = 1.0
"""So late at most is an ended lease seen."""
ARRIVE_WITHIN_S = 600.0
_RECEIVE_MAX = 10


@dataclass
class Measured:
    """Of one type; recovery: seconds from each death to the message's next receive."""

    attempts: int = 0
    crashed: int = 0
    redelivered: int = 0
    """Received while an earlier worker was still at it."""
    recovery: list[float] = field(default_factory=list)

    @property
    def recovery_mean(self) -> float:
        """Seconds; 0 if nobody died."""
        return sum(self.recovery) / len(self.recovery) if self.recovery else 0.0


@dataclass
class _Attempt:
    ends: float
    dies: bool
    handle: str


class Clock:
    """Seconds by the server, known without a request for each: its clock moves with ours, and by what we let pass."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._zero = time.perf_counter()

    def now(self) -> float:
        """Seconds since this clock was made."""
        return time.perf_counter() - self._zero

    def go_to(self, instant: float) -> None:
        """Let the time until then pass, if it is not past."""
        left = instant - self.now()
        if left > 0:
            self._server.advance(seconds=left)
            self._zero -= left


class Shift:
    """One run of the workload until the queue is empty."""

    def __init__(self, server: LocalServer, queue: Queue, kinds: Sequence[Kind], each: int, seed: int) -> None:
        """each: messages of each type."""
        self._queue = queue
        self._clock = Clock(server)
        self._kinds = {kind.name: kind for kind in kinds}
        self.measured = {kind.name: Measured() for kind in kinds}
        order = chance(seed)
        jobs = [f"{kind.name} {number}" for kind in kinds for number in range(each)]
        self._own: dict[str, float] = {}
        self._chances = {job: chance(hash_of(job, seed)) for job in jobs}
        self._arrivals = sorted(((order.uniform(0, ARRIVE_WITHIN_S), job) for job in jobs), reverse=True)
        self._open = set(jobs)
        self._under_way: dict[str, list[_Attempt]] = {job: [] for job in jobs}
        self._ends: list[tuple[float, str, str]] = []

    def run(self) -> float:
        """Until every message is deleted or a dead letter; seconds that passed."""
        look = 0.0
        while self._open:
            if self._ends and self._ends[0][0] <= look:
                ends, job, handle = heapq.heappop(self._ends)
                self._clock.go_to(ends)
                self._finish(job, handle)
                continue
            self._clock.go_to(look)
            self._look()
            look += LOOK_EVERY_S
        return self._clock.now()

    def _look(self) -> None:
        now = self._clock.now()
        due = []
        while self._arrivals and self._arrivals[-1][0] <= now:
            job = self._arrivals.pop()[1]
            due.append(Message(job, type=job.split()[0]))
        for answer in self._queue.send_batch(due) if due else []:
            if isinstance(answer, VeilError):
                raise answer
        while came := self._queue.receive(_RECEIVE_MAX):
            for received in came:
                self._start(received)

    def _start(self, received: Received) -> None:
        job, now = received.body, self._clock.now()
        kind = self._kinds[job.split()[0]]
        measured, before = self.measured[kind.name], self._under_way[job]
        if any(attempt.ends > now for attempt in before):
            measured.redelivered += 1
        elif before and before[-1].dies:
            measured.recovery.append(now - before[-1].ends)
        chance = self._chances[job]
        takes = self._own.setdefault(job, kind.takes(chance)) if kind.keeps else kind.takes(chance)
        dies_after = kind.dies_after(chance)
        dies, ends = dies_after < takes, now + min(takes, dies_after)
        measured.attempts += 1
        measured.crashed += dies
        before.append(_Attempt(ends, dies, received.handle))
        heapq.heappush(self._ends, (ends, job, "" if dies else received.handle))

    def _finish(self, job: str, handle: str) -> None:
        """A worker is done, or died if it has no handle."""
        with suppress(LeaseTaken, MessageGone):
            if handle:
                self._queue.delete(handle)
                self._open.discard(job)
        if len(self._under_way[job]) == RECEIVES_MAX and self._under_way[job][-1].ends <= self._clock.now():
            self._open.discard(job)


def hash_of(job: str, seed: int) -> int:
    """A seed of its own for each message; the same in every run."""
    return int.from_bytes(f"{seed} {job}".encode(), "big")
