"""The plans that a keeper or a worker can use: three ways to choose the length of each lease; and what a load test says
about timeouts.

Strategy: what is known of processing times, and the cheapest schedule of leases for it, is in veilmq.estimate; here is
how a plan gets at it, as a function that a LeaseKeeper calls for each message.

Learnt (`AdaptiveTimeout`): the outcome of each attempt goes into its type's survival curve. From time to time the
cheapest schedule for the curve is computed and replaced as a whole, so readers need no lock. If there are too many
duplicates, margins grow until they stop. A type about which little is known uses the schedule of all types together.
See docs/patterns/adaptive-timeout.md.

Published (`PublishedPlan`): read at intervals through `Queue.recommended`, which both our adapters implement. A thread
of its own reads, so that a server that hangs holds up no extension; until it is done, the last answer is used. Where
nothing was published, a steady heartbeat. A type's first lease is also the length of each extension: the pipeline chose
it with renewals in mind.

By a threshold (`ThresholdTimeout`): document 003's rule, unchanged. It counts the deletes that fail because the message
was redelivered. When enough of them failed within a window, it raises the timeout and reports it to the senders. The
timeout is never lowered. Source: document 003, "counting at the worker roles how many times message deletes are failing
... communicate that back to the front-end web roles".

A load test (`calibrate`): the percentiles of its runs, and two recommendations: leases for a keeper that extends them,
and one timeout for a consumer that never extends. A handler that finished is an exact sample; one that failed is
censored. Percentiles are None beyond the range of the samples. Source: document 004 ("perform a series of load tests on
the consumer"); document 003, 1.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Final

import msgspec

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Received, Recommended
from veilmq.client.queue import Queue
from veilmq.client.shared import checks
from veilmq.estimate.schedule import MARGINS, Costs, Schedule, plan_of
from veilmq.estimate.survival import Curve, Sample, Survival, rounded_up
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.model.wording import counted

__all__ = [
    "AdaptiveTimeout",
    "Costs",
    "PublishedPlan",
    "Schedule",
    "Survival",
    "ThresholdTimeout",
    "plan_of",
]

TYPES_MAX: Final = 256
"""Types that are learnt separately; all further types are learnt together."""
GUARD_SHARE: Final = 0.005
"""Share of attempts: with more duplicates than this, margins grow (the promise is one in a hundred)."""
_LEARNT_MIN: Final = 10
"""Attempts of a type before it gets its own schedule."""
_REPLAN_GROWTH: Final = 1.15
_REPLAN_MAX: Final = 50
"""A new schedule is computed after 15 % more attempts, but after 50 at the latest."""
_CRASH_SHARE_MIN: Final = 0.1
"""Of the given crash rate: the learnt rate never falls below this share, however long no crash is seen."""
_CRASH_PRIOR: Final = 3.0
"""The weight of the given crash rate, in crashes ..."""
_LATE_PRIOR: Final = 2_000.0
"""... and of the given share of late extensions, in extensions."""
_GUARD_MEMORY: Final = 400.0


class _Kind:
    """What is known of one type."""

    def __init__(self, half_life: float) -> None:
        self.survival = Survival(half_life)
        self.schedule: Schedule | None = None
        self.replan_at = _LEARNT_MIN


class AdaptiveTimeout:
    """A plan (`veilmq.client.keeper.Plan`) that learns. Thread-safe.

    It names a lease for every message, so a queue's own timeout is never used. LeaseKeeper feeds it. Crashes are learnt
    from redeliveries: in a fleet of similar workers, each worker on average receives as many redeliveries as it causes.
    So the redeliveries beyond its own releases and lost leases are due to crashes, each after as long as work is under
    way at a moment that nothing chose. Callers that detect a crash themselves call `vanished`, in place of
    `redelivered`.
    """

    def __init__(
        self,
        costs: Costs | None = None,
        *,
        shortest: float = 5.0,
        longest: float = 43_200.0,
        half_life: float = 400.0,
    ) -> None:
        """costs: the relative costs; its rates are the starting point of learning. shortest, longest: of a lease,
        seconds.

        half_life: attempts after which an attempt counts half. Raises ParameterInvalid for invalid values.
        """
        if checks.positive(shortest, "shortest") >= checks.positive(longest, "longest", may_be_endless=True):
            raise ParameterInvalid(parameter="shortest", reason=f"{shortest!r} is not below longest, {longest!r}")
        if not isinstance(costs, Costs | None):
            raise ParameterInvalid(parameter="costs", reason=f"must be Costs, not {type(costs).__name__}")
        self._costs = costs or Costs()
        self._shortest = shortest
        self._longest = longest
        self._half_life = half_life
        self._kinds: dict[str | None, _Kind] = {}
        self._everything = _Kind(half_life)
        self._lock = threading.Lock()
        # Rates are learnt over all types, as events and the amount that they are divided by, both with a prior.
        self._crashes = _CRASH_PRIOR
        self._held_s = _CRASH_PRIOR / max(self._costs.crashes_per_second, 1e-9)
        self._unseen = 0.0
        self._work_s = self._work_squares = 0.0
        self._late = _LATE_PRIOR * self._costs.late_share
        self._extensions = _LATE_PRIOR
        self._late_s = self._late * self._costs.late_mean
        self._duplicates = 0.0
        self._attempts = 1.0
        self._margin_floor = min(MARGINS)
        self._plan(self._everything)

    @property
    def margin(self) -> float:
        """Seconds before a lease's end at which it is extended: the longest of any type's schedule."""
        # Copy to a list first: other threads may add types meanwhile.
        kinds = [self._everything, *list(self._kinds.values())]
        return max(kind.schedule.margin for kind in kinds if kind.schedule is not None)

    def first_lease(self, message: Received) -> float:
        """Seconds from the receive."""
        schedule = self.schedule_of(message.type)
        return min(schedule.first + self.margin - schedule.margin, self._longest)

    def next_lease(self, message: Received, held: float) -> float:
        """Seconds from an extension of a message that has been held for `held` seconds."""
        schedule = self.schedule_of(message.type)
        return min(schedule.lease_at(held) + self.margin - schedule.margin, self._longest)

    def schedule_of(self, type: str | None) -> Schedule:  # noqa: A002 the field's name
        """The schedule of a message type, or that of all types while little is known of it."""
        kind = self._kinds.get(type)
        schedule = self._everything.schedule if kind is None or kind.schedule is None else kind.schedule
        assert schedule is not None
        return schedule

    def finished(self, message: Received, held: float) -> None:
        """The handler ended after `held` seconds, and the message was deleted or given back."""
        self._learn(message.type, held, finished=True)

    def vanished(self, message: Received, held: float) -> None:
        """A worker crashed: its lease's last extension was at `held` seconds."""
        with self._lock:
            self._crashes += 1
        self._learn(message.type, held, finished=False)

    def lost(self, message: Received, held: float) -> None:
        """The lease ended while its worker was alive: a duplicate start."""
        with self._lock:
            self._duplicates += 1
            self._unseen -= 1  # it will be redelivered
            self._guard()
        self._learn(message.type, held, finished=False)

    def redelivered(self, message: Received) -> None:
        """A message was received that had been received before: a worker crashed, released it, or lost its lease."""
        with self._lock:
            self._unseen += 1

    def given_back(self, message: Received) -> None:
        """One of our workers released it: it will be redelivered without a crash."""
        with self._lock:
            self._unseen -= 1

    def late(self, seconds: float) -> None:
        """An extension took effect `seconds` after it was due; 0 if it was in time."""
        with self._lock:
            self._extensions += 1
            if seconds > 0:
                self._late += 1
                self._late_s += seconds

    def _learn(self, type: str | None, held: float, *, finished: bool) -> None:  # noqa: A002 as above
        with self._lock:
            self._held_s += held
            if finished:
                self._work_s += held
                self._work_squares += held * held
            self._attempts = 1 + (self._attempts - 1) * (1 - 1 / _GUARD_MEMORY) + 1
            self._duplicates *= 1 - 1 / _GUARD_MEMORY
            kind = self._kinds.get(type)
            if kind is None and len(self._kinds) < TYPES_MAX:
                kind = self._kinds[type] = _Kind(self._half_life)
            for each in (kind, self._everything):
                if each is None:
                    continue
                if finished:
                    each.survival.finished(held)
                else:
                    each.survival.censored(held)
                if each.survival.attempts >= each.replan_at:
                    self._plan(each)

    def _plan(self, kind: _Kind) -> None:
        costs = self.costs
        margins = [margin for margin in MARGINS if margin >= self._margin_floor] or [MARGINS[-1]]
        found = plan_of(kind.survival.curve(), costs, shortest=self._shortest, longest=self._longest, margins=margins)
        kind.schedule = found
        done = kind.survival.attempts
        kind.replan_at = done + min(max(int(done * (_REPLAN_GROWTH - 1)), 1), _REPLAN_MAX)
        if kind.replan_at < _LEARNT_MIN:
            kind.replan_at = _LEARNT_MIN

    def _guard(self) -> None:
        """Increase margins while too many messages are started twice."""
        if self._duplicates > 1 and self._duplicates / self._attempts > GUARD_SHARE:
            longer = [margin for margin in MARGINS if margin > self._margin_floor]
            if longer:
                self._margin_floor = longer[0]
                self._duplicates = 0.0

    @property
    def costs(self) -> Costs:
        """The costs, with the rates learnt so far."""
        # Nobody knows how long a crashed worker worked: take the mean age of work under way (Barlow and Proschan).
        age_s = self._work_squares / (2 * self._work_s) if self._work_s else 0.0
        crashes, held_s = self._crashes + self._unseen, self._held_s + max(self._unseen, 0.0) * age_s
        return msgspec.structs.replace(
            self._costs,
            crashes_per_second=max(crashes / held_s, self._costs.crashes_per_second * _CRASH_SHARE_MIN),
            late_share=self._late / self._extensions,
            late_mean=self._late_s / self._late if self._late else self._costs.late_mean,
        )


class PublishedPlan:
    """A plan (`veilmq.client.keeper.Plan`) from the server. Any thread."""

    def __init__(
        self, queue: Queue, *, default: float = 30.0, margin: float = 15.0, every: float = 300.0, clock: Clock = SYSTEM
    ) -> None:
        """default: seconds of a lease where nothing is published. margin: seconds before its end at which a lease is
        extended. every: seconds between two reads. Raises ParameterInvalid. An error of the first read is raised here;
        errors of later reads are ignored."""
        if not checks.positive(margin, "margin") < checks.positive(default, "default"):
            raise ParameterInvalid(parameter="margin", reason=f"must be above 0 and below default = {default:g} s")
        checks.positive(every, "every", may_be_endless=True)
        self._queue = checks.queue(queue)
        self._default = default
        self._margin = margin
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._found = queue.recommended()
        self._asked = clock.monotonic()
        self._reader = self._new_reader()

    @property
    def margin(self) -> float:
        """Seconds before a lease's end at which it is extended."""
        return self._margin

    def first_lease(self, message: Received) -> float:
        """Seconds."""
        found = self._current()
        lease = None
        if found is not None:
            lease = found.by_type.get(message.type, found.lease) if message.type is not None else found.lease
        return max(self._default if lease is None else lease, self._margin * 2)

    def next_lease(self, message: Received, held: float) -> float:
        """Seconds; the same as the first lease."""
        return self.first_lease(message)

    def _current(self) -> Recommended | None:
        """The last answer. If it is old, a thread reads the next one."""
        now = self._clock.monotonic()
        with self._lock:
            if now - self._asked >= self._every and not self._reader.is_alive():
                self._asked = now
                self._reader = self._new_reader()
                with suppress(RuntimeError):  # "can't start new thread": the machine has no more
                    self._reader.start()
        return self._found

    def _new_reader(self) -> threading.Thread:
        return threading.Thread(target=self._read, name=f"veilmq plan {self._queue.name}", daemon=True)

    def _read(self) -> None:
        with suppress(VeilError):  # an old plan is better than none
            self._found = self._queue.recommended()


class ThresholdTimeout:
    """A plan (`veilmq.client.keeper.Plan`) with one growing timeout. Thread-safe."""

    def __init__(
        self,
        timeout: float = 30,
        *,
        failures: int = 5,
        window: float = 3_600,
        factor: float = 2.0,
        longest: float = 43_200,
        margin: float = 0,
        tell: Callable[[float], object] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """After `failures` failed deletes within `window` seconds, the timeout is multiplied by `factor`.

        timeout, longest, margin: seconds. With a margin of 0 a keeper never extends, as in the document. tell: called
        with each new timeout, in the thread whose delete failed; it passes the timeout to the senders, which set it as
        their messages' `lease_hint`. Raises ParameterInvalid for invalid values.
        """
        if checks.positive(timeout, "timeout") > checks.positive(longest, "longest", may_be_endless=True):
            raise ParameterInvalid(parameter="timeout", reason=f"{timeout!r} is above longest, {longest!r}")
        checks.at_least(failures, "failures", 1)
        checks.positive(window, "window", may_be_endless=True)
        if checks.number(factor, "factor", 1, math.inf) == 1:
            raise ParameterInvalid(parameter="factor", reason=f"{factor!r} is not above 1")
        checks.not_negative(margin, "margin")
        if tell is not None:
            checks.function(tell, "tell")
        self.timeout = timeout
        self._failures_max = failures
        self._window = window
        self._factor = factor
        self._longest = longest
        self._margin = margin
        self._report = tell
        self._clock = clock
        self._failed: deque[float] = deque()
        self._lock = threading.Lock()

    @property
    def margin(self) -> float:
        """Seconds before a lease's end at which it is extended."""
        return self._margin

    def first_lease(self, message: Received) -> float:
        """Seconds; the same for every message."""
        return self.timeout

    def next_lease(self, message: Received, held: float) -> float:
        """Seconds; the same for every extension."""
        return self.timeout

    def finished(self, message: Received, held: float) -> None:
        """Ignored: the delete succeeded."""

    def lost(self, message: Received, held: float) -> None:
        """A delete failed because the message was redelivered."""
        now = self._clock.monotonic()
        with self._lock:
            self._failed.append(now)
            while self._failed[0] < now - self._window:
                self._failed.popleft()
            before = self.timeout
            if len(self._failed) >= self._failures_max:
                self._failed.clear()
                self.timeout = min(self.timeout * self._factor, self._longest)
            raised = self.timeout
        if raised != before and self._report is not None:
            self._report(raised)

    def vanished(self, message: Received, held: float) -> None:
        """Ignored: a crash does not count."""

    def late(self, seconds: float) -> None:
        """Ignored: a late extension does not count."""


SHARES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
SAFETY: Final = 1.5
"""A timeout that is never extended is the longest time seen, multiplied by this."""
SAMPLES_FEW: Final = 100
LEASE_MIN: Final = 5.0
_STEPS: Final = (1.0, 2.0, 5.0)


class Bucket(msgspec.Struct, frozen=True):
    """Runs of more than `over` and up to `upto` seconds."""

    over: float
    upto: float
    finished: int
    failed: int


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The results. Seconds."""

    finished: int
    failed: int
    percentiles: dict[str, float | None]
    """`p50`, `p90`, `p95`, `p99`, `p99.9`; None beyond the range of the samples."""
    longest: float
    """Longest run, finished or not."""
    mean: float | None
    """Of the runs that finished."""
    histogram: tuple[Bucket, ...]
    """Bounds 1, 2, 5, 10, ..., without empty ends."""
    first_lease: float
    """With a keeper: the lease to ask for at receive."""
    renewal_margin: float
    """With a keeper: how long before its end to extend a lease."""
    timeout: float | None
    """Without a keeper; None: the longest runs failed, so nobody knows how long they take."""
    notes: tuple[str, ...]
    """Caveats to read before relying on the numbers."""


def calibrate(samples: Sequence[Sample], costs: Costs | None = None) -> Calibration:
    """Evaluate the samples. Raises ValueError if there are none, or if one is below 0."""
    if not samples:
        raise ValueError("there are no samples")
    if min(each.seconds for each in samples) < 0:
        raise ValueError("a processing time cannot be below 0")
    curve, learnt = Curve(samples), Survival(half_life=None)
    learnt.add(samples)
    finished = sorted(each.seconds for each in samples if each.finished)
    failed = [each.seconds for each in samples if not each.finished]
    plan = plan_of(learnt.curve(), costs, shortest=LEASE_MIN)
    known = bool(finished) and (not failed or max(failed) <= finished[-1])
    timeout = rounded_up(max(finished[-1] * SAFETY, 1.0)) if known else None
    return Calibration(
        finished=len(finished),
        failed=len(failed),
        percentiles={f"p{share * 100:g}": curve.quantile(share).value for share in SHARES},
        longest=max(each.seconds for each in samples),
        mean=sum(finished) / len(finished) if finished else None,
        histogram=histogram(samples),
        first_lease=rounded_up(plan.first),
        renewal_margin=plan.margin,
        timeout=timeout,
        notes=_notes(len(finished), len(failed), known),
    )


def histogram(samples: Sequence[Sample]) -> tuple[Bucket, ...]:
    """Counts in buckets bounded by 1, 2 and 5 times powers of ten, from 1 ms on."""
    bounds = [0.0, 0.001]
    longest = max(each.seconds for each in samples)
    while bounds[-1] < longest:
        step, power = divmod(len(bounds) - 1, 3)[::-1]
        bounds.append(_STEPS[step] * 10.0 ** (power - 3))
    found = [
        Bucket(
            over,
            upto,
            sum(1 for each in samples if each.finished and _within(each.seconds, over, upto)),
            sum(1 for each in samples if not each.finished and _within(each.seconds, over, upto)),
        )
        for over, upto in pairwise(bounds)
    ]
    filled = [place for place, bucket in enumerate(found) if bucket.finished + bucket.failed]
    return tuple(found[filled[0] : filled[-1] + 1])


def _within(seconds: float, over: float, upto: float) -> bool:
    return over < seconds <= upto or (over == 0 and seconds == 0)


def _notes(finished: int, failed: int, known: bool) -> tuple[str, ...]:
    notes = []
    if finished < SAMPLES_FEW:
        notes.append(f"{finished} finished runs say little about the longest ones: measure {SAMPLES_FEW} or more")
    if failed:
        notes.append(f"{counted(failed, 'failed run')} counted as longer than measured")
    if not known:
        notes.append("the longest runs failed: no timeout without extensions can be recommended")
    return tuple(notes)
