"""The worst queues by some measure, of those that a caller may see.

Strategy: the store keeps rankings of each account (`veilmq.store.reader.Worst`), so the first few are there at once. If
there are too few in them, because many left or because the caller may see few of them, all queues of the account are
walked in a thread, and the ranking is renewed with what was found. The oldest messages are then looked up, because the
store ranks by a bound.
"""

from collections.abc import Callable, Sequence
from heapq import nlargest
from typing import Any, Final, NamedTuple

from veilmq.admin.api.inputs import WorstInput
from veilmq.admin.api.views import shown_counts, shown_key
from veilmq.admin.history.reading import oldest_ages_us
from veilmq.model.instant import HOUR_US, Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Reader
from veilmq.store.reader import QueueState, Ranking

OLDEST: Final = "oldest"
HELD: Final = frozenset({OLDEST, "depth", "in_flight"})
"""Measures of what a queue holds now; the others count the present hour and the one before."""
_Walked = list[tuple[int, QueueState]]


class Wanted(NamedTuple):
    """Which queues."""

    asked: WorstInput
    may: Callable[[QueueKey], bool]
    """Whether the caller may see the queue."""

    def takes(self, queue: QueueState) -> bool:
        """Whether it is in the region, and may be seen."""
        return self.asked.region in (None, queue.key.region) and self.may(queue.key)

    @property
    def most(self) -> int:
        """How many to look at: more of the oldest, whose order is not certain before they are looked up."""
        return self.asked.limit * 2 if self.asked.by == OLDEST else self.asked.limit


async def worst_page(reader: Reader, account: str, wanted: Wanted, now: Instant) -> dict[str, Any]:
    """{by, since, complete, queues}, worst first. Call on the loop."""
    from starlette.concurrency import run_in_threadpool  # a command on a directory must not load it

    found: _Walked = []
    for each in reader.worst.accounts if account == "*" else [account]:
        ranking = reader.worst.ranking(each, wanted.asked.by)
        part = _ranked(reader, ranking, wanted)
        found += await _renewed(reader, ranking, each, wanted) if part is None else part
    lines = [(queue, list(queue.ready)) for _, queue in _worst(found, wanted)]
    complete, hour = wanted.asked.by != OLDEST or not reader.worst.unseen, reader.worst.hour
    ages = await run_in_threadpool(oldest_ages_us, reader, lines, now)
    return _page(_worst(found, wanted), wanted.asked, ages, complete, hour)


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
    if wanted.asked.by == OLDEST:
        found = [(0, queue) for queue in every if account in ("*", queue.key.account) and wanted.takes(queue)]
    lines = [(queue, list(queue.ready)) for _, queue in found]
    ages = oldest_ages_us(reader, lines, now)
    return _page(found, wanted.asked, ages, True, reader.worst.hour)


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


def _page(found: _Walked, asked: WorstInput, ages: dict[int, int], complete: bool, hour: int) -> dict[str, Any]:
    if asked.by == OLDEST:
        found = [(age_us, queue) for _, queue in found if (age_us := ages.get(queue.incarnation)) is not None]
    queues = [
        shown_key(queue.key)
        | {"incarnation": queue.incarnation, "value": value, "counts": shown_counts(queue.info().counts)}
        | {"oldest_age_us": ages.get(queue.incarnation)}
        for value, queue in sorted(found, key=_order, reverse=True)[: asked.limit]
    ]
    since = None if asked.by in HELD else (hour - 1) * HOUR_US
    return {"by": asked.by, "since": since, "complete": complete, "queues": queues}
