"""The worst queues by some measure, of those that a caller may see.

Strategy: the store keeps rankings of each account (`veilmq.store.reader.Worst`), so the first few are there at once. If
there are too few in them, because many left or because the caller may see few of them, all queues of the account are
walked in a thread, and the ranking is renewed with what was found. The store ranks the oldest messages and blocked
groups by a bound, so more queues than are asked for are then looked at. What that finds of blocked groups becomes the
store's new bound: the next look begins closer to the truth.

A FIFO queue stands still if a group has been blocked for longer than is usual there: twice as long as 99 of 100
messages were held in the last day, or, where too few were, its visibility timeout; and never less than five minutes.
"""

from collections.abc import Callable, Sequence
from heapq import nlargest
from typing import Any, Final, NamedTuple

from veilmq.admin.api.inputs import WorstInput
from veilmq.admin.api.views import shown_counts, shown_key
from veilmq.admin.history.reading import oldest_ages_us
from veilmq.model.instant import FOREVER, HOUR_US, MINUTE_US, Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Reader, View
from veilmq.store.reader import QueueState, Ranking
from veilmq.store.rollups import DELETED, Rollup

OLDEST: Final = "oldest"
BLOCKED: Final = "blocked"
HELD: Final = frozenset({OLDEST, BLOCKED, "depth", "in_flight"})
"""Measures of what a queue holds now; the others count the present hour and the one before."""
CANDIDATES: Final = 32
"""So many queues are looked at for blocked groups, or twice as many as were asked for."""
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
        """Whether it is in the region, and may be seen; of blocked ones, whether anything can block it now."""
        if self.asked.by == BLOCKED and not (queue.visible and (queue.in_flight or queue.delayed)):
            return False
        return self.asked.region in (None, queue.key.region) and self.may(queue.key)

    @property
    def most(self) -> int:
        """How many to look at: more of those whose order is not certain before they are looked up."""
        most = self.asked.limit * 2 if self.asked.by in (OLDEST, BLOCKED) else self.asked.limit
        return max(most, CANDIDATES) if self.asked.by == BLOCKED else most


class Seen(NamedTuple):
    """What was looked up of queues, by incarnation."""

    ages: dict[int, int]
    still: dict[int, dict[str, Any]]
    """Of those with blocked groups: `value`, `blocked` and `still_after_us`."""
    since: dict[int, int]
    """Nothing was blocked before."""


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
            reader.worst.saw_blocked(incarnation, since)
        complete = complete and _is_certain(found, wanted, seen, now)
    return _page(found, wanted, seen, complete, hour, reader)


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
    return _page(found, wanted, seen, True, reader.worst.hour, reader)


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
    """For how long a group of the queue may be blocked as long as it moves as usual."""
    hour, sum_of_all = now // HOUR_US, Rollup()
    stored = view.rollups(queue.incarnation, True, hour - USUAL_HOURS + 1, hour).found
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


def _page(found: _Walked, wanted: Wanted, seen: Seen, complete: bool, hour: int, reader: Reader) -> dict[str, Any]:
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
