"""Leases that fit the work: learnt per message type, planned anew when enough was learnt.

Strategy: what happens to attempts goes into a survival curve a type; every so often the cheapest schedule for it is
planned, and swapped in whole, so that readers need no lock. Too many duplicates shut the guard: margins grow until they
cease. A type of which little is known yet plays by what all types together show. See docs/patterns/adaptive-timeout.md.

Published: asked for now and then through `Queue.recommended`, which both our adapters answer; between two questions the
last answer holds, and where nobody published anything a steady heartbeat does. A type's first lease is also the length
of each extension: the pipeline chose it with renewals in mind.
"""

import threading
from typing import Final

import msgspec

from veilmq.client import checked
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Received, Recommended
from veilmq.client.queue import Queue
from veilmq.client.timeouts.schedule import MARGINS, Costs, Schedule, Survival, plan_of
from veilmq.model.errors import ParameterInvalid, VeilError

TYPES_MAX: Final = 256
"""Types that are told apart; what comes after them is learnt together."""
GUARD_SHARE: Final = 0.005
"""Of the attempts, duplicates beyond which margins grow (the promise is one in a hundred)."""
_LEARNT_MIN: Final = 10
"""Attempts of a type before it has a schedule of its own."""
_REPLAN_GROWTH: Final = 1.15
_REPLAN_MAX: Final = 50
"""A schedule is planned anew after 15 % more attempts, but after 50 at the latest."""
_CRASH_SHARE_MIN: Final = 0.1
"""Of the given rate of crashes: no quiet time makes workers look safer than that."""
_CRASH_PRIOR: Final = 3.0
"""Crashes that the given rate is worth before any was seen ..."""
_LATE_PRIOR: Final = 2_000.0
"""... and extensions, for the given share of late ones."""
_GUARD_MEMORY: Final = 400.0


class _Kind:
    """What is known of one type."""

    def __init__(self, half_life: float) -> None:
        self.survival = Survival(half_life)
        self.schedule: Schedule | None = None
        self.replan_at = _LEARNT_MIN


class AdaptiveTimeout:
    """A plan (`veilmq.client.keeper.states.Plan`) that learns. Thread-safe.

    It names a lease for every message, so that no queue's own timeout counts. LeaseKeeper feeds it. Crashes are learnt
    from what they leave: in a fleet of like workers each receives as many messages again, on the average, as it
    causes to be received again, so what comes again beyond its own releases and losses is what crashes brought.
    `vanished` is for whoever knows of a crash itself, and then in the place of `redelivered`.
    """

    def __init__(
        self,
        costs: Costs | None = None,
        *,
        shortest: float = 5.0,
        longest: float = 43_200.0,
        half_life: float = 400.0,
    ) -> None:
        """costs: what things are worth; its rates are where learning starts. shortest, longest: of a lease, seconds.

        half_life: attempts after which one counts half. Raises ParameterInvalid for values that cannot be.
        """
        if checked.positive(shortest, "shortest") >= checked.positive(longest, "longest", may_be_endless=True):
            raise ParameterInvalid(parameter="shortest", reason=f"{shortest!r} is not below longest, {longest!r}")
        self._costs = costs or Costs()
        self._shortest = shortest
        self._longest = longest
        self._half_life = half_life
        self._kinds: dict[str | None, _Kind] = {}
        self._everything = _Kind(half_life)
        self._lock = threading.Lock()
        # Rates are learnt over all types: events and what they are counted against, both with a prior.
        self._crashes = _CRASH_PRIOR
        self._held_s = _CRASH_PRIOR / max(self._costs.crashes_per_second, 1e-9)
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
        # A list first: other threads learn of new types meanwhile.
        schedules = [kind.schedule for kind in list(self._kinds.values()) if kind.schedule is not None]
        return max((schedule.margin for schedule in schedules), default=self.schedule_of(None).margin)

    def first_lease(self, message: Received) -> float:
        """Seconds from the receive."""
        schedule = self.schedule_of(message.type)
        return schedule.first + self.margin - schedule.margin

    def next_lease(self, message: Received, held: float) -> float:
        """Seconds from an extension of a message that was held for `held` seconds."""
        schedule = self.schedule_of(message.type)
        return schedule.lease_at(held) + self.margin - schedule.margin

    def schedule_of(self, type: str | None) -> Schedule:  # noqa: A002 the field's name
        """The schedule of a message type, or of all together while little is known of it."""
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
        """The lease ended under a living worker: a duplicate start."""
        with self._lock:
            self._duplicates += 1
            self._crashes -= 1  # somebody gets it again
            self._guard()
        self._learn(message.type, held, finished=False)

    def redelivered(self, message: Received) -> None:
        """A message came that somebody had before: a worker crashed, or gave it back, or lost it."""
        with self._lock:
            self._crashes += 1

    def given_back(self, message: Received) -> None:
        """A worker of ours released it: somebody gets it again, and none crashed."""
        with self._lock:
            self._crashes -= 1

    def late(self, seconds: float) -> None:
        """An extension took effect; `seconds` after it was due, 0 if it came in time."""
        with self._lock:
            self._extensions += 1
            if seconds > 0:
                self._late += 1
                self._late_s += seconds

    def _learn(self, type: str | None, held: float, *, finished: bool) -> None:  # noqa: A002 as above
        with self._lock:
            self._held_s += held
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
        """Longer margins while too many messages are started twice."""
        if self._duplicates > 1 and self._duplicates / self._attempts > GUARD_SHARE:
            longer = [margin for margin in MARGINS if margin > self._margin_floor]
            if longer:
                self._margin_floor = longer[0]
                self._duplicates = 0.0

    @property
    def costs(self) -> Costs:
        """What things are worth, with the rates as they were learnt so far."""
        return msgspec.structs.replace(
            self._costs,
            crashes_per_second=max(self._crashes / self._held_s, self._costs.crashes_per_second * _CRASH_SHARE_MIN),
            late_share=self._late / self._extensions,
            late_mean=self._late_s / self._late if self._late else self._costs.late_mean,
        )


class PublishedPlan:
    """A plan (`veilmq.client.keeper.states.Plan`) from the server. Any thread."""

    def __init__(
        self, queue: Queue, *, default: float = 30.0, margin: float = 15.0, every: float = 300.0, clock: Clock = SYSTEM
    ) -> None:
        """default: seconds of a lease where nothing is published. margin: seconds before its end at which a lease is
        extended. every: seconds between two questions. Raises ParameterInvalid; what that raises is raised by the
        first question, here, and passed over later.
        """
        if not checked.positive(margin, "margin") < checked.positive(default, "default"):
            raise ParameterInvalid(parameter="margin", reason=f"must be above 0 and below default = {default:g} s")
        checked.positive(every, "every", may_be_endless=True)
        self._queue = queue
        self._default = default
        self._margin = margin
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._found = queue.recommended()
        self._asked = clock.monotonic()

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
        """Seconds; the first lease again."""
        return self.first_lease(message)

    def _current(self) -> Recommended | None:
        now = self._clock.monotonic()
        with self._lock:
            if now - self._asked < self._every:
                return self._found
            self._asked = now
        try:
            self._found = self._queue.recommended()
        except VeilError:
            return self._found  # the plan of before is better than none
        return self._found
