"""Whether a queue's visibility timeout is right: how long its messages take, what each timeout would do, and advice.

Strategy: the estimate is the client's and the pipeline's (`veilmq.estimate`); here it is shown, and put into one
sentence. Whatever leases were too short to show is said to be unknown. The leases come from the queue's newest events:
the history is read backwards in blocks, until enough messages are known or a bound is reached, so a busy queue costs
some thousands of events, and a quiet one among busy ones the bound. A packed row is decoded only if a pattern finds the
queue in it. Every event of a lease has its sequence and attempt; backwards, what became of a lease is known before its
grant is met.

What is judged is the lease in force: where receives ask for a lease of their own, or a plan does, that one, and not the
queue's timeout, which decides nothing there.

Before changing it: the meaning of the events is that of `pipeline/jobs/attempts.py`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from veilmq.admin.api.views import shown_key
from veilmq.admin.history import packed_beginning
from veilmq.admin.story import span
from veilmq.estimate import FINISHED_MIN, MARGIN, REST_MAX, Effect, Ended, Estimate, Lease
from veilmq.estimate.survival import USUAL, Between, rounded_up
from veilmq.model.commands import LeaseSource
from veilmq.model.events import Event, Kind
from veilmq.model.instant import DAY_US, SECOND_US
from veilmq.model.wording import counted
from veilmq.store import View
from veilmq.store.reader import QueueState

EVENTS_MAX: Final = 300_000
"""How many of the newest events are looked at."""
LEASES_MAX: Final = 20_000
"""How many leases are gathered, with those that still run and those of later receives."""
MESSAGES_ENOUGH: Final = 2_000
"""Reading stops at this many leases that ended on the first receive of their messages."""
BACK_US_MAX: Final = DAY_US
_BLOCK: Final = 8_192
_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
_RECEIVED: Final = int(Kind.RECEIVED)
_EXTENSIONS: Final = (Kind.EXTENDED, Kind.LEASE_RESUMED)
_OF_HANDLES: Final = frozenset({int(Kind.DELETED), int(Kind.DELETE_REFUSED), int(Kind.EXTEND_REFUSED)})
_MEANINGS: Final[dict[int, str]] = {
    Kind.RELEASED: "stopped",
    Kind.RELEASED_FOR_RETRY: "done",
    Kind.UNDELIVERED: "unworked",
    Kind.LEASE_EXPIRED: "expired",
    Kind.EXPIRED_AFTER_CHANGE: "changed",
    Kind.DELETED: "done",
    Kind.DELETE_REFUSED: "done",
    Kind.EXTEND_REFUSED: "heard",
    Kind.EXPIRED: "taken",
    Kind.QUARANTINED: "taken",
    Kind.MOVED: "taken",
}
"""Of events that may end a lease. `taken`: by an operator or the retention, which says nothing about the worker."""
_RELEASES: Final = {"busy": "unworked", "shortage": "unworked", "released": "stopped"}
"""Reasons of a release for a retry without a failure: the handler never ran, or was stopped."""
_OF_LEASES: Final = (Kind.RECEIVED, *_EXTENSIONS, *_MEANINGS)


class Granted(NamedTuple):
    """A lease, and how long it was to be."""

    lease: Lease
    lease_us: int
    source: int
    """`LeaseSource`."""


class Read(NamedTuple):
    """What was found."""

    leases: list[Granted]
    since: int
    """The instant of the oldest event that was looked at."""
    looked_at: int
    """Events, of all queues."""


def read(view: View, incarnation: int, now: int) -> Read:
    """Leases of the queue, newest first. Blocks."""
    first, following = view.bounds()
    since = max(now - BACK_US_MAX, 0)
    found: list[Granted] = []
    later: dict[tuple[int, int], _Later] = {}
    known, oldest, stop = 0, now, following
    while stop > first and known < MESSAGES_ENOUGH and len(found) < LEASES_MAX and oldest > since:
        start = max(first, stop - _BLOCK, following - EVENTS_MAX)
        if start == stop:
            break
        oldest = min(oldest, _begin(view, start) or oldest)
        for event in _backwards(view, incarnation, start, stop):
            key = event.sequence or 0, event.attempt or 0
            if event.kind != _RECEIVED:
                later.setdefault(key, _Later()).note(event)
                continue
            lease = _judged(event, later.pop(key, _Later()), now)
            if lease is not None and event.at >= since:
                found.append(Granted(lease, event.lease_us or 0, event.source or LeaseSource.QUEUE))
                known += lease.attempt == 1 and lease.ended is not Ended.OPEN
        stop = start
    return Read(found, max(oldest, since), following - stop)


def _begin(view: View, start: int) -> int | None:
    """The instant of the event at an offset."""
    for offset, packed in view.oldest_first(start, start + 1):
        events = _EVENTS.decode(packed)
        return int(events[min(start - offset, len(events) - 1)].at)
    return None


def _backwards(view: View, incarnation: int, start: int, stop: int) -> Iterator[Event]:
    """Events about leases of the queue, newest first."""
    sought = re.compile(packed_beginning(incarnation, _OF_LEASES), re.DOTALL)
    rows = [row for row in view.oldest_first(start, stop) if sought.search(row[1])]
    for offset, packed in reversed(rows):
        events = _EVENTS.decode(packed)
        for place in range(min(len(events), stop - offset) - 1, max(start - offset, 0) - 1, -1):
            event = events[place]
            if event.queue == incarnation and event.attempt and event.kind in _OF_LEASES:
                yield event


class _Later:
    """What is known of a lease from later events: the instants of its possible ends, by meaning."""

    __slots__ = ("ends", "extended", "until")

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}
        self.extended: int | None = None
        """When it was extended last, ..."""
        self.until = 0
        """... and until when."""

    def note(self, event: Event) -> None:
        """An event of the lease; those after it are known."""
        kind, detail = event.kind, event.detail or {}
        if kind in _EXTENSIONS:
            if self.extended is None:
                self.extended, self.until = event.at, event.at + (event.lease_us or 0)
            return
        meaning = _MEANINGS[kind]
        if kind == Kind.RELEASED_FOR_RETRY:
            meaning = _RELEASES.get(detail.get("reason", ""), "done")
        elif "job" in detail:
            meaning = "taken"
        # What came before the last extension did not end the lease, but what was done with a handle counts at any time.
        if self.extended is None or kind in _OF_HANDLES:
            self.ends[meaning] = event.at


def _judged(grant: Event, later: _Later, now: int) -> Lease | None:
    """The lease; None if its events do not say how it ended, as after a purge."""
    granted, ends = grant.at, later.ends
    until = granted + (grant.lease_us or 0) if later.extended is None else later.until
    alive = max(later.extended or granted, granted)
    late = False
    if "done" in ends:
        ended, alive = Ended.DONE, ends["done"]
        late = alive > until or "expired" in ends
    elif "unworked" in ends:
        ended = Ended.UNWORKED
    elif "stopped" in ends:
        ended, alive = Ended.STOPPED, ends["stopped"]
    elif not (grant.lease_us or later.extended or "heard" in ends):
        ended = Ended.UNWORKED  # a look: a client without a peek receives for 0 s
    elif "expired" in ends and "heard" in ends:
        ended, alive, late = Ended.STOPPED, ends["heard"], True
    elif "expired" in ends:
        ended, until = Ended.SILENT, ends["expired"]
    elif "changed" in ends:
        ended = Ended.STOPPED
    elif "taken" in ends:
        ended, alive = Ended.STOPPED, max(alive, ends.get("heard", 0))
    elif until > now:
        ended, alive = Ended.OPEN, now
    else:
        return None
    alive_s, until_s, age_s = ((each - granted) / SECOND_US for each in (alive, until, now))
    key = grant.sequence or 0, grant.attempt or 0
    return Lease(*key, ended, alive_s, until_s, age_s, late, later.extended is not None, grant.type)


TYPES_SHOWN_MAX: Final = 10
_EXTENDING: Final = 0.1
"""If the leases of this share of messages are extended, workers count as extending."""
_NEWEST: Final = 100
"""This many of the newest leases say which lease is in force: a worker may have been given another since."""
_GRID_MAX: Final = 3.0
"""The curve ends at this many times the longest lease or work."""
_GRID_S_MIN: Final = 60.0
"""It goes at least to here: people ask what a minute would do."""


class TimeoutInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A timeout to look at."""

    timeout_us: Annotated[int, Meta(ge=0, le=7 * DAY_US)] | None = None


def timeout_page(view: View, queue: QueueState, wanted: TimeoutInput, now: int) -> dict[str, Any]:
    """What the queue's leases say about its timeout; see docs/admin-api.md, "Timeouts". Blocks."""
    found = read(view, queue.incarnation, now)
    today_us = queue.settings.visibility_timeout_us
    estimate = Estimate([each.lease for each in found.leases])
    head = shown_key(queue.key) | {"incarnation": queue.incarnation, "at": now}
    asked = None if wanted.timeout_us is None else _effect(estimate.effect(wanted.timeout_us / SECOND_US))
    force = in_force(found.leases, today_us)
    return (
        head
        | {"since": found.since, "events": found.looked_at}
        | {"today": _effect(estimate.effect(today_us / SECOND_US)), "asked": asked}
        | {"in_force": _effect(estimate.effect(force.lease_us / SECOND_US)) | {"by": force.by.name.lower()}}
        | _shown(estimate)
        | {"leases": _leases(found, today_us)}
        | _advice(estimate, force, today_us)
        | {"curve": _curve(estimate, today_us), "types": _types(found.leases)}
    )


def _shown(estimate: Estimate) -> dict[str, Any]:
    law = estimate.law
    return {
        "messages": estimate.messages,
        "finished": estimate.finished,
        "work_us": {name: _in_us(each) for name, each in estimate.quantiles.items()},
        "silent": estimate.silent,
        "silent_were": estimate.reading,
        "crashes_per_hour": estimate.costs.crashes_per_second * 3_600,
        "length_belongs_to_message": law.longer,
        "received_again": law.again,
        "p50_by_lease_us": _in_us(law.by_attempt),
    }


def _leases(found: Read, today_us: int) -> dict[str, Any]:
    """Counts of all leases, not of messages alone."""
    ended = [each for each in found.leases if each.lease.ended not in (Ended.OPEN, Ended.UNWORKED)]
    today = [each for each in ended if each.source == LeaseSource.QUEUE and each.lease_us == today_us]
    sources = Counter(each.source for each in ended)
    worked_s = max((each.lease.alive_s for each in found.leases if each.lease.ended is Ended.DONE), default=0.0)
    return {
        "ended": len(ended),
        "ran_out": sum(_ran_out(each) for each in ended),
        "extended": sum(each.lease.extended for each in ended),
        "by": {source.name.lower(): sources[source] for source in LeaseSource if source is not LeaseSource.EXTEND},
        "of_today": len(today),
        "of_today_ran_out": sum(_ran_out(each) for each in today),
        "overdue": sum(_is_overdue(each.lease, worked_s) for each in found.leases),
    }


def _is_overdue(lease: Lease, worked_s: float) -> bool:
    """Whether it runs on for so long, without a sign of its worker, that the worker has probably died."""
    return lease.ended is Ended.OPEN and not lease.extended and lease.alive_s > 2 * worked_s > 0


def _ran_out(granted: Granted) -> bool:
    return granted.lease.late or granted.lease.ended is Ended.SILENT


class InForce(NamedTuple):
    """The lease that most messages get, and what decides it."""

    lease_us: int
    by: LeaseSource
    share: float
    """Of the newest leases, those that something else than the queue's timeout decided."""


def in_force(leases: Sequence[Granted], today_us: int) -> InForce:
    """Of leases, the newest first. Where the queue's timeout decides, it is that of today."""
    newest = [each for each in leases if each.lease.ended is not Ended.UNWORKED][:_NEWEST]
    named = [each for each in newest if each.source != LeaseSource.QUEUE]
    share = len(named) / max(len(newest), 1)
    if 2 * len(named) <= len(newest):
        return InForce(today_us, LeaseSource.QUEUE, share)
    by = Counter(each.source for each in named).most_common(1)[0][0]
    return InForce(median_low(each.lease_us for each in named if each.source == by), LeaseSource(by), share)


_DECIDES: Final = {
    LeaseSource.RECEIVE: (
        " {} of the leases were as long as their receive asked for: change it there (`lease=` of a Worker, `--lease`,"
        " VisibilityTimeout of a receive). The queue's own timeout of {} has no effect on them."
    ),
    LeaseSource.PLAN: (
        " {} of the leases were as long as the queue's plan or the message's sender said: `veilmq queues plan` shows"
        " the plan. The queue's own timeout of {} has no effect on them."
    ),
}


def _advice(estimate: Estimate, force: InForce, queue_us: int) -> dict[str, Any]:
    """{advice, why, change_us, recommended_us, at_least_us, extend}."""
    today_us = force.lease_us
    best_s = estimate.recommended_s()
    best_us = None if best_s is None else round(best_s * SECOND_US)
    if not estimate.enough:
        known = "1 message is" if estimate.finished == 1 else f"{estimate.finished} messages are"
        reason = f"{known} known to have been worked on to the end; {FINISHED_MIN} are needed."
        nothing = dict.fromkeys(("change_us", "recommended_us", "at_least_us", "extend"))
        return {"advice": "too_few", "why": reason} | nothing
    schedule = estimate.schedule()
    lease_us, every_us = (round(each) * SECOND_US for each in (schedule.first, schedule.first - schedule.margin))
    at_least_us, at_least_s = None, estimate.curve.longest * MARGIN
    if best_us is None and at_least_s <= USUAL[-1]:
        at_least_us = round(rounded_up(at_least_s) * SECOND_US)
    change_us = at_least_us if best_us is None else best_us
    if estimate.extended >= _EXTENDING * estimate.messages:
        advice, why, change_us = "extend", _of_extending(estimate, lease_us, every_us), lease_us
    elif best_us is None:
        advice, why = "extend", _of_unknown(estimate, at_least_us, every_us)
    elif estimate.is_good(today_us / SECOND_US):
        advice, why, change_us = "keep", _of_kept(estimate, today_us, best_us), None
    else:
        advice, why = ("raise" if best_us > today_us else "lower"), _of_changed(estimate, today_us, best_us)
    if force.by in _DECIDES:
        why += _DECIDES[force.by].format(percent(force.share), span(queue_us))
    if change_us == today_us:
        change_us = None
    extend = {"lease_us": lease_us, "every_us": every_us}
    best = {"recommended_us": best_us, "at_least_us": at_least_us}
    return {"advice": advice, "why": why, "change_us": change_us} | best | {"extend": extend}


def _of_extending(estimate: Estimate, lease_us: int, every_us: int) -> str:
    return (
        f"Workers extended {percent(estimate.extended / estimate.messages)} of the leases, so a lease need not cover"
        " the work: it decides how long the message of a crashed worker waits."
        f" Leases of {span(lease_us)}, extended every {span(every_us)}, are best."
    )


def _of_unknown(estimate: Estimate, at_least_us: int | None, every_us: int) -> str:
    longest = span(round(estimate.curve.longest * SECOND_US))
    if estimate.curve.rest <= REST_MAX:
        longest_s = USUAL[-1] / MARGIN
        return (
            f"{percent(estimate.curve.share_above(longest_s).value or 0)} of the messages take longer than"
            f" {span(round(longest_s * SECOND_US))}: no timeout is long enough for them. Let workers extend their"
            f" leases every {span(every_us)}."
        )
    doubt = ""
    if estimate.reading == "unknown":
        doubt = f", or their workers crashed: {counted(estimate.silent, 'lease')} ran out without a sign of a worker"
    either = "Let" if at_least_us is None else f"Set at least {span(at_least_us)}, or let"
    return (
        f"{percent(estimate.curve.rest)} of the messages take longer than anything that was seen ({longest}){doubt}."
        f" {either} workers extend their leases every {span(every_us)}."
    )


def _of_kept(estimate: Estimate, today_us: int, best_us: int) -> str:
    share = estimate.effect(today_us / SECOND_US).duplicates
    return (
        f"{_started_again(share)} under {span(today_us)}."
        + (f" {span(best_us)} would be about as good." if best_us != today_us else " No other timeout is better.")
    )  # fmt: skip


def _of_changed(estimate: Estimate, today_us: int, best_us: int) -> str:
    today, best = estimate.effect(today_us / SECOND_US), estimate.effect(best_us / SECOND_US)
    waits = [span(round(each.recovery_s * SECOND_US)) for each in (today, best)]
    if best_us > today_us:
        return (
            f"{_started_again(today.duplicates)} under {span(today_us)}; under {span(best_us)} it is"
            f" {_at_most(best.duplicates)}. After a crash a message waits {waits[1]} instead of {waits[0]}."
        )
    return (
        f"After a crash a message waits {waits[0]}; under {span(best_us)} it waits {waits[1]}, and"
        f" {_at_most(best.duplicates)} of the messages are started again while their worker still works."
    )


def _started_again(share: Between) -> str:
    return f"{percent(share.value or 0)} of the messages are started again while their worker still works"


def _at_most(share: Between) -> str:
    return f"{percent(share.value or 0)} (at most {percent(1.0 if share.high is None else share.high)})"


def percent(share: float) -> str:
    """12 %, 1.3 %, 0.25 %; what is smaller than 0.01 % as that."""
    number = share * 100
    if 0 < number < 0.01:
        return "below 0.01 %"
    return f"{number:.0f} %" if number >= 10 else f"{number:.2g} %"


def _curve(estimate: Estimate, today_us: int) -> list[dict[str, Any]]:
    """What each usual timeout would do, up to where nothing changes, or to a minute."""
    if not estimate.finished:
        return []
    last = max(_GRID_MAX * max(estimate.curve.longest, today_us / SECOND_US), _GRID_S_MIN)
    usual = [each for each in USUAL if each <= last] or [USUAL[0]]
    return [_effect(estimate.effect(float(each))) for each in usual]


def _types(leases: Sequence[Granted]) -> list[dict[str, Any]]:
    """The same by type, if there are several, those with the most messages first."""
    by_type: dict[str | None, list[Any]] = {}
    for each in leases:
        by_type.setdefault(each.lease.type, []).append(each.lease)
    if len(by_type) < 2:
        return []
    most = sorted(by_type.items(), key=lambda pair: -len(pair[1]))[:TYPES_SHOWN_MAX]
    shown = []
    for type_, ones in most:
        estimate = Estimate(ones)
        best_s = estimate.recommended_s()
        shown.append(
            {
                "type": type_,
                "messages": estimate.messages,
                "finished": estimate.finished,
                "work_us": {name: _in_us(each) for name, each in estimate.quantiles.items()},
                "recommended_us": None if best_s is None else round(best_s * SECOND_US),
            }
        )
    return shown


def _effect(effect: Effect) -> dict[str, Any]:
    return {
        "timeout_us": round(effect.timeout_s * SECOND_US),
        "duplicates": effect.duplicates._asdict(),
        "recovery_us": round(effect.recovery_s * SECOND_US),
        "seen": effect.seen,
    }


def _in_us(between: Between) -> dict[str, int | None]:
    return {name: None if each is None else round(each * SECOND_US) for name, each in between._asdict().items()}
