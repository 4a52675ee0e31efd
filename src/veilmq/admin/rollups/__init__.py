"""What happened to a queue, by minute or hour: counts, estimated times, and what the queue held; and the worst queues
by some measure, of those that a caller may see.

Strategy: the store has rows only for minutes in which something happened, and of each minute whether the server ran.
Here every step is shown: with nulls if the server did not run, with zeros if nothing happened. What the queue held is
carried on from the step before, because it changes only when something happens. Minutes that are not stored yet are
taken from memory on the loop first, and the stored ones read after that, so none is missed; one that is in both counts
once.

The store keeps rankings of each account (`veilmq.store.reader.Worst`), so the first few of the worst are there at once.
If there are too few in them, because many left or because the caller may see few of them, all queues of the account are
walked in a thread, and the ranking is renewed with what was found. The store ranks the oldest messages and blocked
groups by a bound, so more queues than are asked for are then looked at. What that finds of blocked groups becomes the
store's new bound: the next look begins closer to the truth.

A FIFO queue stands still if a group has been blocked for longer than is usual there: twice as long as 99 of 100
messages were held in the last day, or, where too few were, its visibility timeout; and never less than five minutes.
"""

from collections.abc import Callable, Sequence
from heapq import nlargest
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta

from veilmq.admin.api.inputs import STEPS, ListInput, RollupsInput, WorstInput
from veilmq.admin.api.views import shown_counts, shown_key
from veilmq.admin.history import oldest_ages_us
from veilmq.model.errors import QueueMissing
from veilmq.model.instant import FOREVER, HOUR_US, MINUTE_US, SECOND_US, Instant
from veilmq.model.settings.queue import QueueInfo, QueueKey
from veilmq.model.settings.topic import is_hidden
from veilmq.store import Reader, View
from veilmq.store.reader import QueueState, Ranking
from veilmq.store.rollups import COUNTS, DELETED, Rollup, State, StoredRollups

RATED_MINUTES_MAX: Final = 60
RATED_MAX: Final = 100
"""How many queues a page has that shows their rates."""
_RATE_MINUTES: Final = 5
"""A rate covers this many minutes: the present one and those before it."""
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
    stored = view.rollups(incarnation, span.start, span.stop - 1, hours=hours)
    if not live.minutes:
        return stored
    twice = view.rollups(incarnation, min(live.minutes), max(live.minutes), hours=False).found
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


OLDEST: Final = "oldest"
BLOCKED: Final = "blocked"
HELD: Final = frozenset({OLDEST, BLOCKED, "depth", "in_flight"})
"""Measures of what a queue holds now; the others count the present hour and the one before."""
CANDIDATES: Final = 32
"""At least this many queues are looked at for blocked groups, and at least twice as many as were asked for."""
STILL_US_MIN: Final = 5 * MINUTE_US
USUAL_HOURS: Final = 24
USUAL_DELETES_MIN: Final = 20
_Walked = list[tuple[int, QueueState]]
_Unstored = dict[int, list[Rollup]]
"""Rollups of minutes, by incarnation."""


class Wanted(NamedTuple):
    """Which queues."""

    asked: WorstInput
    may: Callable[[QueueKey], bool]
    """Whether the caller may see the queue."""

    def takes(self, queue: QueueState) -> bool:
        """Whether it is in the region, is no hidden queue, and may be seen; of blocked ones, whether anything can block
        it now."""
        if self.asked.by == BLOCKED and not (queue.visible and (queue.in_flight or queue.delayed)):
            return False
        is_wanted = self.asked.region in (None, queue.key.region) and not is_hidden(queue.key.name)
        return is_wanted and self.may(queue.key)

    @property
    def most(self) -> int:
        """How many to look at: more than were asked for if the ranking only has bounds for the order."""
        most = self.asked.limit * 2 if self.asked.by in (OLDEST, BLOCKED) else self.asked.limit
        return max(most, CANDIDATES) if self.asked.by == BLOCKED else most


class Seen(NamedTuple):
    """What was looked up of queues, by incarnation."""

    ages: dict[int, int]
    still: dict[int, dict[str, Any]]
    """Of those with blocked groups: `value`, `blocked` and `still_after_us`."""
    since: dict[int, int]
    """Instants before which nothing was blocked."""


async def worst_page(reader: Reader, account: str, wanted: Wanted, now: Instant) -> dict[str, Any]:
    """{by, since, complete, queues}, worst first. Call on the loop."""
    from starlette.concurrency import run_in_threadpool  # a command on a directory must not load it

    found: _Walked = []
    for each in reader.worst.accounts if account == "*" else [account]:
        ranking = reader.worst.ranking(each, wanted.asked.by)
        part = _ranked(reader, ranking, wanted)
        found += await _renewed(reader, ranking, each, wanted) if part is None else part
    found = _worst(found, wanted)
    lines = [(queue, list(queue.ready)) for _, queue in found]
    complete, hour = wanted.asked.by not in (OLDEST, BLOCKED) or not reader.worst.unseen, reader.worst.hour
    unstored = _unstored(reader, found, wanted)
    seen = await run_in_threadpool(_look, reader, lines, unstored, now)
    if wanted.asked.by == BLOCKED:
        for incarnation, since in seen.since.items():
            reader.worst.set_blocked_bound(incarnation, since)
        complete = complete and _is_certain(found, wanted, seen, now)
    return _page(reader, found, wanted, seen, hour, complete=complete)


async def _renewed(reader: Reader, ranking: Ranking, account: str, wanted: Wanted) -> _Walked:
    """Walk all queues of the account."""
    from starlette.concurrency import run_in_threadpool

    every, ranked = list(reader.queues.values()), None
    ranking.begin_renewal()
    try:
        found, ranked = await run_in_threadpool(_walk, ranking, account, every, wanted)
    finally:
        ranking.end_renewal(ranked)
    return found


def worst_at_once(reader: Reader, account: str, wanted: Wanted, now: Instant) -> dict[str, Any]:
    """The same of a store that nothing else uses; all queues are walked."""
    found: _Walked = []
    every = list(reader.queues.values())
    for each in reader.worst.accounts if account == "*" else [account]:
        found += _walk(reader.worst.ranking(each, wanted.asked.by), each, every, wanted)[0]
    if wanted.asked.by in (OLDEST, BLOCKED):
        found = [(0, queue) for queue in every if account in ("*", queue.key.account) and wanted.takes(queue)]
    lines = [(queue, list(queue.ready)) for _, queue in found]
    seen = _look(reader, lines, _unstored(reader, found, wanted), now)
    return _page(reader, found, wanted, seen, reader.worst.hour, complete=True)


def _ranked(reader: Reader, ranking: Ranking, wanted: Wanted) -> _Walked | None:
    """The worst queues of a ranking; None if it has too few."""
    top, is_all = ranking.top()
    found: _Walked = []
    for value, incarnation in top:
        queue = reader.worst.queue(incarnation)
        if queue is not None and wanted.takes(queue):
            found.append((value, queue))
            if len(found) == wanted.most:
                return found
    return found if is_all else None


def _walk(
    ranking: Ranking, account: str, every: Sequence[QueueState], wanted: Wanted
) -> tuple[_Walked, list[tuple[int, int]]]:
    """The worst queues of an account for this caller, and for the ranking. Blocks."""
    own = [queue for queue in every if queue.key.account == account]
    valued = ((ranking.value_of(queue.incarnation), queue) for queue in own if wanted.takes(queue))
    found = nlargest(wanted.most, (each for each in valued if each[0] > 0), key=_order)
    return found, ranking.walk(queue.incarnation for queue in own)


def _order(valued: tuple[int, QueueState]) -> tuple[int, int]:
    return valued[0], valued[1].incarnation


def _worst(found: _Walked, wanted: Wanted) -> _Walked:
    return sorted(found, key=_order, reverse=True)[: wanted.most]


def _unstored(reader: Reader, found: _Walked, wanted: Wanted) -> _Unstored | None:
    """What no row has of queues in which groups may be blocked; None: that is not asked for. Call on the loop."""
    if wanted.asked.by != BLOCKED:
        return None
    return {queue.incarnation: list(reader.unstored(queue.incarnation).values()) for _, queue in found}


def _look(reader: Reader, lines: list[tuple[QueueState, list[int]]], unstored: _Unstored | None, now: Instant) -> Seen:
    """Look up what the rankings do not say. Blocks."""
    seen = Seen(oldest_ages_us(reader, lines, now), {}, {})
    if unstored is not None:
        with reader.look() as view:
            for queue, _ in lines:
                found = view.blocked(queue, now, 1)
                since = min((each.since for each in found.shown), default=now)
                if found.is_all:
                    seen.since[queue.incarnation] = min(since, now)
                if found.shown:
                    counts = {"messages": found.messages, "groups": found.groups, "complete": found.is_all}
                    still = {"value": max(0, now - since), "blocked": counts}
                    seen.still[queue.incarnation] = still | {
                        "still_after_us": still_after_us(view, queue, unstored[queue.incarnation], now)
                    }
    return seen


def still_after_us(view: View, queue: QueueState, unstored: list[Rollup], now: Instant) -> int:
    """How long a group of the queue may be blocked before the queue counts as standing still."""
    hour, sum_of_all = now // HOUR_US, Rollup()
    stored = view.rollups(queue.incarnation, hour - USUAL_HOURS + 1, hour, hours=True).found
    for each in (*stored.values(), *unstored):
        sum_of_all.merge(each)
    held = sum_of_all.times("holds")
    if held is None or sum_of_all.numbers.get(DELETED, 0) < USUAL_DELETES_MIN:
        return max(STILL_US_MIN, queue.settings.visibility_timeout_us)
    return max(STILL_US_MIN, 2 * held["p99"])


def _is_certain(found: _Walked, wanted: Wanted, seen: Seen, now: Instant) -> bool:
    """Whether no queue that was not looked at could be among the first ones: none has been blocked for longer than the
    last one that was looked at may have been."""
    if len(found) < wanted.most:
        return True
    first = sorted((each["value"] for each in seen.still.values()), reverse=True)[: wanted.asked.limit]
    return len(first) == wanted.asked.limit and now - first[-1] <= FOREVER - found[-1][0]


def _page(reader: Reader, found: _Walked, wanted: Wanted, seen: Seen, hour: int, *, complete: bool) -> dict[str, Any]:
    asked = wanted.asked
    if asked.by == OLDEST:
        found = [(age_us, queue) for _, queue in found if (age_us := seen.ages.get(queue.incarnation)) is not None]
    elif asked.by == BLOCKED:
        found = [(still["value"], queue) for _, queue in found if (still := seen.still.get(queue.incarnation))]
    queues = [
        shown_key(queue.key)
        | {"incarnation": queue.incarnation, "value": value, "counts": shown_counts(queue.info().counts)}
        | {
            "oldest_age_us": seen.ages.get(queue.incarnation),
            "dead_letters_to": _dead_letters_to(reader, wanted, queue),
        }
        | seen.still.get(queue.incarnation, {})
        for value, queue in sorted(found, key=_order, reverse=True)[: asked.limit]
    ]
    since = None if asked.by in HELD else (hour - 1) * HOUR_US
    return {"by": asked.by, "since": since, "complete": complete, "queues": queues}


def _dead_letters_to(reader: Reader, wanted: Wanted, queue: QueueState) -> dict[str, str] | None:
    """Where its dead letters go; None: nowhere, or to a queue that is not there or that the caller may not see."""
    redrive = queue.settings.redrive
    if redrive is None or redrive.target not in reader.queues or not wanted.may(redrive.target):
        return None
    return shown_key(redrive.target)
