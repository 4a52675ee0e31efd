"""What is known of the queues' timeouts: answers that are kept for a while, and which timeouts are clearly wrong.

Strategy: an answer that took many events costs some 100 ms of CPU, and a minute later it would be about the same: so it
is given again, until it is a minute old or the timeout is another one. One that took few events costs little, and a
single lease may change it: so it is made anew each time. An answer says when it was made (`at`). The page of a queue
and the sentence about one of its messages take the same answer, so they say the same.

Each answer also leaves a verdict. While somebody asks which timeouts are wrong, a few queues a minute are looked at
behind the requests: those in which most leases ran out, whose messages are oldest, and that have most in flight. All
that a wrong timeout does shows there, and the store ranks them while it writes. With nobody who asks nothing is done.
"""

import logging
from asyncio import Task, ensure_future, shield
from collections.abc import Callable, Iterable
from itertools import chain, zip_longest
from threading import Lock
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from veilmq.admin.api.inputs import ACCOUNT_OR_ALL, PAGE_MAX, Region, WorstInput
from veilmq.admin.rollups import Wanted, worst_at_once, worst_page
from veilmq.admin.story import span
from veilmq.admin.timeouts import TimeoutInput, timeout_page
from veilmq.model.instant import MINUTE_US, Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Reader, View
from veilmq.store.reader import QueueState

KEPT_US: Final = MINUTE_US
KEPT_MAX: Final = 64
"""Answers; one has some 10 KiB."""
COSTLY_EVENTS: Final = 2_000
VERDICTS_MAX: Final = 1_000
EVERY_US: Final = MINUTE_US
"""At most this often some queues are looked at."""
A_LOOK_MAX: Final = 5
"""At most this many are looked at together, unless somebody waits for all."""
AGAIN_US: Final = 10 * MINUTE_US
"""Each queue is looked at again after this time."""
_MEASURES: Final = ("lease_expired", "oldest", "in_flight")
_OF_EACH: Final = 20
_SURELY: Final = 0.01
"""Share of messages: a timeout is too short if at least so many are certainly started again."""
_MUCH_LONGER: Final = 4
"""A timeout is too long if after a crash messages wait this many times as long as under the best, and 1 min more."""
_EXTENDING: Final = 0.1
_TODAY: Final = TimeoutInput()

logger = logging.getLogger("veilmq.admin")


class WrongInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of which account (`*`: all) and region (default: all). look: look at queues now, and answer then."""

    account: Annotated[str, Meta(pattern=ACCOUNT_OR_ALL)] | None = None
    region: Region | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 20
    look: bool = False


class Timeouts:
    """What is known of the queues' timeouts. Answers: on any thread, one is made at a time."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._making = Lock()
        self._kept: dict[int, dict[str, Any]] = {}
        """By incarnation, the oldest first; so are the verdicts."""
        self._verdicts: dict[int, dict[str, Any]] = {}
        self._looked: int | None = None
        self._look: Task[None] | None = None

    def page(self, view: View, queue: QueueState, now: int, wanted: TimeoutInput = _TODAY) -> dict[str, Any]:
        """See `timeout_page`. Blocks."""
        with self._making:
            kept = self._kept.get(queue.incarnation)
            if wanted == _TODAY and kept is not None and _holds(kept, queue, now, KEPT_US):
                return kept
            page = timeout_page(view, queue, wanted, now)
            self._keep(page)
            return page

    def of(self, view: View, incarnation: int, now: int) -> dict[str, Any] | None:
        """The same of a queue that may be gone."""
        queue = self._reader.worst.queue(incarnation)
        return None if queue is None else self.page(view, queue, now)

    def _keep(self, page: dict[str, Any]) -> None:
        incarnation = page["incarnation"]
        _put(self._verdicts, incarnation, verdict(page), VERDICTS_MAX)
        self._kept.pop(incarnation, None)
        if page["events"] >= COSTLY_EVENTS:
            _put(self._kept, incarnation, page | {"asked": None}, KEPT_MAX)

    async def wrong(
        self, account: str, wanted: WrongInput, may: Callable[[QueueKey], bool], now: Instant
    ) -> dict[str, Any]:
        """{at, queues}: when queues were looked at last, and those whose timeout is clearly wrong, as far as the caller
        may see them. Call on the loop."""
        if wanted.look and self._look is not None and not self._look.done():
            await shield(self._look)  # perhaps it looks at a few only
        is_due = wanted.look or self._looked is None or not 0 <= now - self._looked < EVERY_US
        if is_due and (self._look is None or self._look.done()):
            self._look = ensure_future(self._looking(now, None if wanted.look else A_LOOK_MAX))
            self._look.add_done_callback(_logged)
        if wanted.look and self._look is not None:
            await shield(self._look)
        found = []
        for incarnation, each in list(self._verdicts.items()):
            queue = self._reader.worst.queue(incarnation)
            if queue is not None and _is_wrong(each, queue, account, wanted.region) and may(queue.key):
                found.append(each)
        return {"at": self._looked, "queues": sorted(found, key=_worst_first)[: wanted.limit]}

    async def _looking(self, now: Instant, most: int | None) -> None:
        from starlette.concurrency import run_in_threadpool  # a command on a directory must not load it

        ranked = []
        for measure in _MEASURES:
            asked = Wanted(WorstInput(by=measure, limit=_OF_EACH), lambda _: True)
            ranked.append((await worst_page(self._reader, "*", asked, now))["queues"])
        due = [queue for queue in self._existing(ranked) if most is None or not self._is_judged(queue, now)]
        due.sort(key=lambda queue: self._verdicts.get(queue.incarnation, {"at": 0})["at"])
        for queue in due[:most]:
            await run_in_threadpool(self._judge, queue, now)
        self._looked = now

    def _existing(self, ranked: Iterable[Iterable[dict[str, Any]]]) -> list[QueueState]:
        """Each queue once, those first that are worst by some measure."""
        places = chain.from_iterable(zip_longest(*ranked))
        queues = {each["incarnation"]: self._reader.worst.queue(each["incarnation"]) for each in places if each}
        return [queue for queue in queues.values() if queue is not None]

    def _is_judged(self, queue: QueueState, now: int) -> bool:
        known = self._verdicts.get(queue.incarnation)
        return known is not None and _holds(known, queue, now, AGAIN_US)

    def _judge(self, queue: QueueState, now: int) -> None:
        with self._reader.look() as view:
            self.page(view, queue, now)

    def wrong_at_once(self, account: str, wanted: WrongInput, now: Instant) -> dict[str, Any]:
        """The same of a store that nothing else uses; the queues are looked at now. Blocks."""
        ranked = []
        for measure in _MEASURES:
            asked = Wanted(WorstInput(by=measure, limit=_OF_EACH, region=wanted.region), lambda _: True)
            ranked.append(worst_at_once(self._reader, account, asked, now)["queues"])
        queues = {queue.incarnation: queue for queue in self._existing(ranked)}
        for queue in queues.values():
            self._judge(queue, now)
        found = [self._verdicts[number] for number in queues if self._verdicts[number]["wrong"] is not None]
        return {"at": now, "queues": sorted(found, key=_worst_first)[: wanted.limit]}


def verdict(page: dict[str, Any]) -> dict[str, Any]:
    """What an answer says about the lease in force, without its numbers; wrong: `too_short`, `too_long` or None."""
    named = ("account", "region", "name", "incarnation", "at", "recommended_us", "at_least_us")
    wrong, why = None, page["why"]
    if _is_too_short(page):
        wrong = "too_short"
    elif (waits := _of_crashes(page)) is not None:
        wrong, why = "too_long", waits
    return {name: page[name] for name in named} | {
        "timeout_us": page["today"]["timeout_us"],
        "lease_us": page["in_force"]["timeout_us"],
        "by": page["in_force"]["by"],
        "wrong": wrong,
        "why": why,
    }


def _best_us(known: dict[str, Any]) -> int | None:
    """None: it is not known, or longer than any timeout."""
    best_us: int | None = known["at_least_us"] if known["recommended_us"] is None else known["recommended_us"]
    return best_us


def _decides(page: dict[str, Any]) -> bool:
    """Whether leases are as long as they were granted."""
    return bool(page["leases"]["extended"] <= _EXTENDING * page["leases"]["ended"])


def _is_too_short(page: dict[str, Any]) -> bool:
    today, best_us = page["in_force"], _best_us(page)
    is_certain = page["leases"]["ran_out"] and today["duplicates"]["low"] >= _SURELY
    is_advised = page["advice"] in ("raise", "extend") and (best_us is None or best_us > today["timeout_us"])
    return bool(is_certain and is_advised and _decides(page))


def _of_crashes(page: dict[str, Any]) -> str | None:
    """How long messages of crashed workers wait, if there were some and that is far too long."""
    best_us, today_us = _best_us(page), page["in_force"]["recovery_us"]
    overdue = page["leases"]["overdue"]
    best = next((each for each in page["curve"] if each["timeout_us"] == best_us), None)
    if best is None or page["advice"] == "keep" or not (page["silent"] or overdue) or not _decides(page):
        return None
    waits_us = best["recovery_us"]
    if today_us < max(_MUCH_LONGER * waits_us, waits_us + MINUTE_US):
        return None
    held = f" {overdue} message{' is' if overdue == 1 else 's are'} held for longer than any work took."
    return (
        f"After a crash a message waits {span(today_us)}; under {span(best['timeout_us'])} it waits {span(waits_us)}."
        + (held if overdue else "")
    )


def _put(kept: dict[int, dict[str, Any]], incarnation: int, value: dict[str, Any], most: int) -> None:
    kept.pop(incarnation, None)
    kept[incarnation] = value
    if len(kept) > most:
        del kept[next(iter(kept))]


def _holds(known: dict[str, Any], queue: QueueState, now: int, kept_us: int) -> bool:
    """Whether an answer or a verdict is still as good as a new one."""
    today_us = known["timeout_us"] if "timeout_us" in known else known["today"]["timeout_us"]
    return 0 <= now - int(known["at"]) < kept_us and bool(today_us == queue.settings.visibility_timeout_us)


def _is_wrong(verdict: dict[str, Any], queue: QueueState, account: str, region: str | None) -> bool:
    is_asked = account in ("*", queue.key.account) and region in (None, queue.key.region)
    is_of_today = verdict["timeout_us"] == queue.settings.visibility_timeout_us
    return verdict["wrong"] is not None and is_asked and is_of_today


def _worst_first(verdict: dict[str, Any]) -> tuple[bool, float]:
    """Too short ones first, by how far they are off."""
    best_us = _best_us(verdict) or 1
    is_short, lease_us = verdict["wrong"] == "too_short", max(verdict["lease_us"], 1)
    return not is_short, -best_us / lease_us if is_short else -lease_us / best_us


def _logged(look: Task[None]) -> None:
    if not look.cancelled() and look.exception() is not None:
        logger.error("looking for wrong timeouts failed", exc_info=look.exception())
