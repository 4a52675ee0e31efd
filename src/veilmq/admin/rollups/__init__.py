"""What happened to a queue, by minute or hour: counts, estimated times, and what the queue held.

Strategy: the store has rows only for minutes in which something happened, and of each minute whether the server ran.
Here every step is shown: with nulls if the server did not run, with zeros if nothing happened. What the queue held is
carried on from the step before, because it changes only when something happens. Minutes that are not stored yet are
taken from memory on the loop first, and the stored ones read after that, so none is missed; one that is in both counts
once.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta

from veilmq.admin.api.inputs import STEPS, ListInput, RollupsInput
from veilmq.admin.api.views import shown_key
from veilmq.model.errors import QueueMissing
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.settings.queue import QueueInfo, QueueKey
from veilmq.store import Reader, View
from veilmq.store.reader import QueueState
from veilmq.store.rollups import COUNTS, Rollup, State, StoredRollups

RATED_MINUTES_MAX: Final = 60
RATED_MAX: Final = 100
"""Queues of a list with their rates."""
_RATE_MINUTES: Final = 5
"""A rate is of the present minute and of those before, so many in all."""
_MINUTES_AN_HOUR: Final = HOUR_US // MINUTE_US
_NOTHING: Final = Rollup()
_RATED: Final = COUNTS[:3]
"""Sent, received, deleted."""
_TIMES: Final = ("wait_us", "hold_us")
_HELD: Final = ("depth", "in_flight", "oldest_age_us")


class LivePart(NamedTuple):
    """What only memory knows of a queue."""

    queue: QueueState
    now: int
    minutes: dict[int, Rollup]
    """The minutes that are not stored."""
    depth: int
    in_flight: int
    lines: list[int]


def live_part(reader: Reader, key: QueueKey, now: int) -> LivePart:
    """Call it on the loop. Raises QueueMissing."""
    queue = reader.queues.get(key)
    if queue is None:
        raise QueueMissing(queue=str(key))
    depth = queue.visible + queue.delayed + queue.in_flight
    return LivePart(queue, now, reader.unstored(queue.incarnation), depth, queue.in_flight, list(queue.ready))


def rollup_page(reader: Reader, live: LivePart, wanted: RollupsInput) -> dict[str, Any]:
    """The queue's minutes or hours: {account, region, name, incarnation, step, step_us, rollups}, oldest first, none
    from before the queue was made. Blocks. Raises ParameterInvalid."""
    step_us = STEPS[wanted.step][0]
    asked, info = wanted.span(live.now), live.queue.info()
    span = range(max(asked.start, info.created // step_us), asked.stop)
    with reader.look() as view:
        oldest = view.oldest_sent([(live.queue, live.lines)]).get(info.incarnation)
        present = State(live.depth, live.in_flight, oldest)
        found = _found(view, live, wanted.step, span) if span else StoredRollups({}, set(), None)
    shown = [_shown(*each, step_us, live.now) for each in _steps(found, span, live.now // step_us, present)]
    head = shown_key(info.key) | {"incarnation": info.incarnation, "step": wanted.step, "step_us": step_us}
    return head | {"rollups": shown}


def _found(view: View, live: LivePart, step: str, span: range) -> StoredRollups:
    """The stored rollups with those that are not stored."""
    hours, incarnation = step == "hour", live.queue.incarnation
    stored = view.rollups(incarnation, hours, span.start, span.stop - 1)
    if not live.minutes:
        return stored
    twice = view.rollups(incarnation, False, min(live.minutes), max(live.minutes)).found
    for minute in sorted(live.minutes.keys() - twice.keys()):
        period = minute // _MINUTES_AN_HOUR if hours else minute
        if period in span:
            stored.found.setdefault(period, Rollup()).merge(live.minutes[minute])
            stored.ran.add(period)
    return stored


Step = tuple[int, Rollup | None, State | None, bool]
"""Number of the step; what happened, None: the server did not run; what the queue held at its end; is it over?"""


def _steps(found: StoredRollups, span: range, present: int, state: State) -> list[Step]:
    """Every step. present: number of the one that is not over; state: what the queue holds now."""
    steps: list[Step] = []
    held = found.before
    if held is None and not found.found and present in span:
        held = state
    for number in span:
        rollup = found.found.get(number)
        if rollup is not None:
            held = rollup.state or state
        if number == present:
            held = state
        elif rollup is None and number not in found.ran:
            steps.append((number, None, None, True))
            continue
        steps.append((number, rollup or _NOTHING, held, number != present))
    return steps


def _shown(
    number: int, rollup: Rollup | None, held: State | None, over: bool, step_us: int, now: int
) -> dict[str, Any]:
    at = number * step_us
    if rollup is None:
        return {"at": at, "ran": False, "complete": True, **dict.fromkeys((*COUNTS, *_TIMES, *_HELD))}
    shown: dict[str, Any] = {"at": at, "ran": True, "complete": over}
    shown |= {name: rollup.numbers.get(key, 0) for key, name in enumerate(COUNTS)}
    shown |= {"wait_us": rollup.times("waits"), "hold_us": rollup.times("holds")}
    if held is None:
        return shown | dict.fromkeys(_HELD)
    age_us = None if held.oldest is None else max(0, min(at + step_us, now) - held.oldest)
    return shown | {"depth": held.depth, "in_flight": held.in_flight, "oldest_age_us": age_us}


class QueuesInput(ListInput):
    """Which queues, and of how many minutes their rates; then a page has at most `RATED_MAX`."""

    minutes: Annotated[int, Meta(ge=0, le=RATED_MINUTES_MAX)] = 0

    @property
    def count_max(self) -> int:
        """How many queues a page has."""
        return min(self.limit, RATED_MAX) if self.minutes else self.limit


class LiveRates(NamedTuple):
    """What only memory knows of some queues."""

    now: int
    minutes: dict[int, dict[int, Rollup]]
    """Those that are not stored, by incarnation."""
    created: dict[int, int]

    @classmethod
    def of(cls, reader: Reader, queues: Sequence[QueueInfo], now: int) -> "LiveRates":
        """Call it on the loop."""
        minutes = {each.incarnation: reader.unstored(each.incarnation) for each in queues}
        return cls(now, minutes, {each.incarnation: each.created for each in queues})


def rates_of(reader: Reader, live: LiveRates, minutes: int) -> dict[int, dict[str, Any]]:
    """By incarnation, of each of the last minutes how many messages were sent, received and deleted (null: the server
    did not run), and how many a second in the last few: {from, sent, received, deleted, per_second}. Blocks."""
    present = live.now // MINUTE_US
    span = range(present - minutes + 1, present + 1)
    with reader.look() as view:
        stored = view.minutes(list(live.minutes), span.start, span.stop - 1)
    idle = [0 if each in stored.ran or each == present else None for each in span]
    shown = {}
    for incarnation, unstored in live.minutes.items():
        found = unstored | stored.found.get(incarnation, {})
        columns = {name: idle.copy() for name in _RATED}
        for minute in found.keys() & span:
            for key, column in enumerate(columns.values()):
                column[minute - span.start] = found[minute].numbers.get(key, 0)
        ran = [each for each in span[-_RATE_MINUTES:] if columns[_RATED[0]][each - span.start] is not None]
        ends = [(each * MINUTE_US, min((each + 1) * MINUTE_US, live.now)) for each in ran]
        time_us = sum(max(0, end - max(begin, live.created[incarnation])) for begin, end in ends)
        sums = {name: sum(each or 0 for each in column[-_RATE_MINUTES:]) for name, column in columns.items()}
        per_second = {name: round(count * SECOND_US / max(time_us, SECOND_US), 3) for name, count in sums.items()}
        shown[incarnation] = {"from": span.start * MINUTE_US, "per_second": per_second} | columns
    return shown
