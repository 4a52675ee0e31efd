"""The asyncio shell around the engine: owns the loop, reads the clock and runs the committer.

Strategy: calls collect in the engine during a commit, and after it as long as more arrive (`Gathering`). Then they are
applied as one batch on the loop and committed by the committer (committer.py), and their answers are sent. A store
whose state is unknown ends the shell: every call in the batch gets the error, `failed` is set, and nothing more is
written.

`Gathering` decides whether to read the sockets once more before a batch is taken: the more calls share a commit, the
less each costs, and right after a commit the next calls of the clients just answered are on their way. So the shell
waits while turns of the loop bring more calls, for a few turns that bring none, and never beyond a full batch or a few
milliseconds (docs/decisions/0012-gathering.md). A commit to a log takes longer, so there it waits longer for as many
calls as may come from the clients just answered, and gives the processor away meanwhile. After a stall it waits
longer, too: commands that arrived during the stall must run before leases that ended during it are granted anew, and a
loop runs its timers before it reads its sockets.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, sleep, thread_time
from typing import Final, Protocol

from veilmq.cluster import Calls, Clock, Ticket
from veilmq.engine.engine import Answer, Batch, Engine
from veilmq.model.commands import Peek, Receive, Sweep
from veilmq.model.errors import StoreFailed, StoreUnknown, VeilError
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Applied, Outcome, Received, Swept
from veilmq.model.wording import counted
from veilmq.server.shell.committer import Committer
from veilmq.store import RollbackLog, Store

_QUIET_TURNS: Final = 3
"""After so many turns without a new call, several calls become a batch. A single call waits for one turn."""
_GATHER_US: Final = 5_000
"""No call waits longer for others."""
_CALLS_MAX: Final = 128
"""With this many calls, a batch does not wait for more."""
_COMMIT_PART: Final = 4
"""For calls that are expected, wait a quarter of the time of a commit to a log after the last call that came."""
_REST_S: Final = 20e-6
"""Sleep between two looks at the sockets in that time; the kernel makes it 70 us. uvloop's timers have whole ms."""
_QUIET_TURNS_AFTER_STALL: Final = 8
"""`_QUIET_TURNS` after a stall: by then all that arrived during it is read. A new connection takes four turns."""
_TURNS_AFTER_STALL_MAX: Final = 2_000
LATENCY_BUCKETS_US: Final = (100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)
"""Upper bounds of a histogram of latencies."""
_SLOW_COMMIT_US: Final = 250_000
_QUERY_THREADS: Final = 2
_IDLE_S_MAX: Final = 1.0
_STALL_US: Final = 1_500_000
_ADVANCE_STEPS_MAX: Final = 2_000
_LEASE_ENDED: Final = "this server's lease of the shard has ended"

logger = logging.getLogger("veilmq.shell")


class Gathering:
    """How long one shell waits for the calls of its next batch."""

    __slots__ = ("_backlog", "_came", "_expected", "_patience_us", "_quiet", "_since", "_turns", "rests")

    def __init__(self) -> None:
        self.rests = False
        """After `goes_on`: whether the next turn is only for calls that are expected, so there is time to sleep."""
        self._since = self._came = Instant(0)
        self._expected = self._patience_us = 0
        self._end()

    def expect(self, calls: int, commit_us: int) -> None:
        """Expect that many calls: their clients were answered just now. commit_us: how long the commit took."""
        self._expected, self._patience_us = calls, commit_us // _COMMIT_PART

    def _end(self) -> None:
        self._turns = self._quiet = self._backlog = 0

    def goes_on(self, now: Instant, backlog: int, *, full: bool, stalled: bool) -> bool:
        """Whether to wait for another turn of the loop. After False the next call starts a new wait.

        backlog: pending calls. full: they fill a batch. stalled: the loop did not turn for long.
        """
        if not self._turns:
            self._since = now
        self._turns += 1
        if backlog > self._backlog:
            self._quiet, self._came = 0, now
        else:
            self._quiet += 1
        self._backlog, self.rests = backlog, False
        if stalled:
            more = self._quiet < _QUIET_TURNS_AFTER_STALL and self._turns < _TURNS_AFTER_STALL_MAX
        elif full or backlog >= _CALLS_MAX or now - self._since >= _GATHER_US:
            more = False
        else:
            more = self._quiet < (_QUIET_TURNS if backlog > 1 else 1)
            self.rests = not more and 0 < backlog < self._expected and now - self._came < self._patience_us
            more = more or self.rests
        if not more:
            self._end()
        return more


class MovableClock(Clock, Protocol):
    """A lease clock that tests may move."""

    def advance(self, duration_us: int) -> None:
        """Jump forward."""


class Latencies:
    """A histogram."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_US) + 1)
        """One count per bucket of `LATENCY_BUCKETS_US`, and one for what took longer."""
        self.total_us = 0

    def add(self, elapsed_us: int) -> None:
        """Count what took that long."""
        self.total_us += elapsed_us
        for place, bound in enumerate(LATENCY_BUCKETS_US):
            if elapsed_us <= bound:
                self.counts[place] += 1
                return
        self.counts[-1] += 1


class Stats:
    """Counters since the shell's start."""

    def __init__(self) -> None:
        self.batches = 0
        self.rolled_back = 0
        """Batches whose commit failed."""
        self.commands = 0
        self.commits = 0
        self.commit_latencies = Latencies()
        self.followers: set[asyncio.Event] = set()
        """Set at each commit, for readers that wait for news."""
        self.dismissed = False
        """Readers must not wait for news any longer."""

    def dismiss_followers(self) -> None:
        """Answer all readers that wait for news, because their port closes."""
        self.dismissed = True
        for follower in self.followers:
            follower.set()

    def committed(self, elapsed_us: int) -> None:
        """Count a commit that took that long."""
        self.commits += 1
        self.commit_latencies.add(elapsed_us)
        for follower in self.followers:
            follower.set()


class Shell(Calls):
    """Runs one engine on the running loop, from `start` to `stop`. See `Calls`."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        clock: Clock,
        stopwatch: Callable[[], float] = perf_counter,
        cpu_time: Callable[[], float] = thread_time,
        committer: type[Committer] = Committer,
        holds: Callable[[], bool] | None = None,
    ) -> None:
        """stopwatch: the committer's clock for durations, in seconds. cpu_time: CPU seconds of the loop's thread.

        A simulation gives both, and a committer without a thread, so that it can repeat itself (tests/simulation).
        holds: in a cluster, whether this server's lease runs. What was not committed is answered only while it does.
        """
        self.engine = engine
        self.store = store
        self.stats = Stats()
        self.broken: StoreUnknown | None = None
        self._clock = clock
        self._stopwatch, self._cpu_time = stopwatch, cpu_time
        self._committer_class = committer
        self._gathering = Gathering()
        self._committing: Batch | None = None
        self._logged = False
        """Whether a log takes the batch that is being committed."""
        self._applied: Applied | None = None
        self._rollbacks = RollbackLog(logger)
        """Counts rolled-back batches, and knows when the next log line about them may come."""
        self._turn_pending = False
        self._may_work_ahead = False
        """A batch was committed, and the next one has not begun."""
        self._timer: asyncio.TimerHandle | None = None
        self._turned = Instant(0)
        self._moved = False
        """The clock is being moved; do not treat that as a stall."""
        self._stopping = False
        self._holds = holds
        self._queries = ThreadPoolExecutor(_QUERY_THREADS, thread_name_prefix="veilmq-query")

    def start(self) -> None:
        """Start taking batches. Call on the loop."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._turned = self._clock.now()
        self._idle = asyncio.Event()
        self._idle.set()
        self.engine.unread.on_room = self._soon
        self._committer = self._committer_class(self._loop, self._committed, self._stopwatch)
        self._soon()

    def now(self) -> Instant:
        return self._clock.now()

    def arrived(self, now: Instant | None = None) -> Instant:
        """An instant no later than the arrival of the bytes being handled: after a stall, the last turn before it.

        now: the current instant, if the caller has read the clock already.
        """
        now = self._clock.now() if now is None else now
        return self._turned if now - self._turned > _STALL_US else now

    def submit(self, ticket: Ticket, now: Instant) -> None:
        if self.broken is not None:
            ticket.answer([self.broken] * len(ticket.commands))
            return
        self.engine.submit(ticket, ticket.commands, now)
        if self._committing is None and not self._turn_pending:
            self._soon()

    def cancel(self, ticket: Ticket) -> None:
        self.engine.cancel(ticket)

    def answer_soon(self, ticket: Ticket) -> None:
        self.engine.answer_soon(ticket)
        self._soon()

    def undeliver(self, command: Receive, outcome: Received) -> None:
        self.engine.undeliver(command, outcome, self._clock.now())
        self._soon()

    async def query(self, command: Peek) -> Outcome:
        """Answer from committed state, on a thread."""
        try:
            outcome = await self._loop.run_in_executor(self._queries, self.store.query, command, self._clock.now())
        except Exception as error:  # one that fails must not stop the others
            logger.exception("a query failed")
            return StoreFailed(reason=str(error))
        return outcome if self._holds is None or self._holds() else StoreFailed(reason=_LEASE_ENDED)

    def abort(self, reason: str) -> None:
        """Answer nobody any more but with an error, and write nothing: another server owns the data. A commit under way
        ends first."""
        if self.broken is None and self._committing is None:
            self._break(Batch([], []), StoreUnknown(reason=reason))

    def answer_parked(self) -> None:
        """At shutdown: answer the parked receives, and park none from now on."""
        self._deliver_unwritten(self.engine.drain_waiters())

    async def stop(self, deadline_s: float) -> None:
        """Answer the parked receives, finish the current batch and the submitted calls, and stop.

        The store stays open; its opener closes it. Returns after `deadline_s` even if a commit hangs.
        """
        self.answer_parked()
        self._committer.leave_loop()
        if self.broken is None:
            self.engine.flush_polls(self._clock.now())
            self._soon()
        try:
            async with asyncio.timeout(deadline_s):
                while self.broken is None and self._at_work:
                    await self._idle.wait()
                    await asyncio.sleep(0)
        except TimeoutError:
            logger.error("shut-down: a commit did not end within %.1f s", deadline_s)
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        await self._committer.stop(deadline_s)
        self._queries.shutdown(wait=False)

    async def advance(self, clock: MovableClock, duration_us: int) -> None:
        """Move the clock forward. Everything that becomes due happens in order, before this returns.

        The clock goes from one due instant to the next, in at most `_ADVANCE_STEPS_MAX` steps; due instants closer
        together than a step happen together.
        """
        target = Instant(clock.now() + duration_us)
        step_us = duration_us // _ADVANCE_STEPS_MAX + 1
        await self._catch_up()
        self._moved = True
        try:
            while (now := clock.now()) < target:
                due = self.engine.next_wake()
                following = target if due is None else Instant(min(max(due, now + step_us), target))
                clock.advance(max(0, following - now))
                await self._catch_up()
        finally:
            self._moved = False

    async def _catch_up(self) -> None:
        """Sweep until nothing is left, and wait until the woken receives are answered."""
        more = True
        while more:
            (outcome,) = await self.call(Sweep())
            more = isinstance(outcome, Swept) and outcome.more
        while self.broken is None and (self._at_work or self.engine.waking):
            await self._idle.wait()
            await asyncio.sleep(0)

    @property
    def _at_work(self) -> bool:
        return self.engine.busy or self._committing is not None or self._turn_pending

    def _soon(self) -> None:
        if not self._turn_pending and self._committing is None and self.broken is None:
            self._turn_pending = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Apply the next batch and start its commit; without one, sleep until something is due."""
        self._turn_pending = False
        if self._committing is not None or self.broken is not None or self._stopping:
            return
        if self._may_work_ahead and self._committer.on_loop:  # while clients that were answered send their next calls
            self._may_work_ahead = False
            if self.store.work_ahead():
                self._soon()
                return
        engine = self.engine
        now = self._clock.now()
        stalled = now - self._turned > _STALL_US and not self._moved
        if not stalled:
            self._turned = now
        gathering = self._gathering
        if gathering.goes_on(now, engine.backlog, full=engine.fills_a_batch, stalled=stalled):
            if gathering.rests:
                sleep(_REST_S)
            self._soon()
            return
        self._turned = now
        self._deliver_unwritten(engine.expire_waiters(now))
        batch = engine.take_batch(now)
        if batch is None:
            self._idle.set()
            self._sleep(now)
            return
        self._idle.clear()
        begun = self._cpu_time()
        try:
            applied = self.store.apply(batch.commands, now)
        except StoreUnknown as error:
            self._break(batch, error)
            return
        except Exception as error:  # a bug; its calls must still be answered
            logger.exception("apply")
            self._break(batch, StoreUnknown(reason=str(error)))
            return
        engine.paced(int((self._cpu_time() - begun) * 1e6))
        self.stats.batches += 1
        self.stats.commands += len(batch.commands)
        if applied.wrote:
            self._committing = batch
            self._applied = applied
            store = self.store
            descriptor = store.begin_commit()
            self._logged = descriptor is not None
            if descriptor is None:
                self._committer.commit(store.commit, takes_long=store.commit_takes_long)
            else:
                self._committer.end_commit(descriptor, store.commit_confirmed, store.commit)
        else:
            self._deliver_unwritten(engine.committed(batch, applied))
            self._soon()

    @property
    def rolled_back(self) -> str:
        """See `RollbackLog.lately`."""
        return self._rollbacks.lately(self._stopwatch())

    def _sleep(self, now: Instant) -> None:
        due = self.engine.next_due(now)
        if due is not None and due <= now:
            self._soon()
            return
        delay_s = _IDLE_S_MAX if due is None else min((due - now) / 1e6, _IDLE_S_MAX)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._soon)

    def _committed(self, error: StoreFailed | StoreUnknown | None, retried: Applied | None, elapsed_us: int) -> None:
        batch, applied = self._committing, retried or self._applied
        assert batch is not None
        assert applied is not None
        if isinstance(error, StoreFailed):
            self.stats.rolled_back += 1
            self._rollbacks.note(error, self._stopwatch())
            commands, at = batch.commands, applied.at
            self._committer.run_apart(lambda: self.store.apply_each(commands, at))
            return
        self._committing = self._applied = None
        if error is not None:
            self._break(batch, error)
            return
        self.stats.committed(elapsed_us)
        if self._logged:
            self._gathering.expect(len(batch.calls) + self.engine.backlog, elapsed_us)
        if elapsed_us > _SLOW_COMMIT_US:
            logger.warning("slow commit: %.0f ms for %s", elapsed_us / 1e3, counted(len(batch.commands), "command"))
        self._deliver(self.engine.committed(batch, applied))
        self._may_work_ahead = True
        self._soon()

    def _break(self, batch: Batch, error: VeilError) -> None:
        """The store's state is unknown, or another server's: fail all calls, and write no more."""
        assert isinstance(error, StoreUnknown)
        if self._holds is None or self._holds():
            logger.critical("the store failed and its state is unknown: %s", error.reason)
        else:
            text = "no longer serving the queues: %s; calls under way end with an error that clients may try again"
            logger.warning(text, error.reason)
        self.broken = error
        self._idle.set()
        self._deliver(self.engine.failed(batch, error))
        self._deliver(self.engine.drain_waiters())
        while (rest := self.engine.take_batch(self._clock.now())) is not None:
            self._deliver(self.engine.failed(rest, error))
            if not self.engine.busy:
                break
        if not self.failed.done():
            self.failed.set_result(None)

    def _deliver_unwritten(self, answers: list[Answer]) -> None:
        """Send answers that no commit confirmed. If the lease has ended, another server may have changed what they say:
        then their clients are to ask again."""
        if answers and self._holds is not None and not self._holds():
            ended = StoreFailed(reason=_LEASE_ENDED)
            answers = [(ticket, [ended] * len(outcomes)) for ticket, outcomes in answers]
        self._deliver(answers)

    def _deliver(self, answers: list[Answer]) -> None:
        for ticket, outcomes in answers:
            ticket.answer(outcomes)
