"""The leases of one queue, from its newest events.

Strategy: the history is read backwards in blocks, until enough messages are known or a bound is reached, so a busy
queue costs some thousands of events, and a quiet one among busy ones the bound. A packed row is decoded only if a
pattern finds the queue in it. Every event of a lease has its sequence and attempt; backwards, what became of a lease is
known before its grant is met.

Before changing it: the meaning of the events is that of `pipeline/jobs/attempts.py`.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from veilmq.admin.history.reading import packed_beginning
from veilmq.estimate import Ended, Lease
from veilmq.model.commands import LeaseSource
from veilmq.model.events import Event, Kind
from veilmq.model.instant import DAY_US, SECOND_US
from veilmq.store import View

EVENTS_MAX: Final = 300_000
"""So many of the newest events are looked at."""
LEASES_MAX: Final = 20_000
"""So many leases are gathered, those that run on and those of later receives among them."""
MESSAGES_ENOUGH: Final = 2_000
"""Leases that ended on the first receive of their messages."""
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
    Kind.EXPIRED: "stopped",
    Kind.QUARANTINED: "stopped",
    Kind.MOVED: "stopped",
}
"""Of events that may end a lease."""
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
        elif meaning == "done" and "job" in detail:
            meaning = "stopped"
        # Before the last extension the lease had not ended; what a handle tells is true at any time.
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
    elif "expired" in ends and "heard" in ends:
        ended, alive, late = Ended.STOPPED, ends["heard"], True
    elif "expired" in ends:
        ended, until = Ended.SILENT, ends["expired"]
    elif "changed" in ends:
        ended = Ended.STOPPED
    elif until > now:
        ended, alive = Ended.OPEN, now
    else:
        return None
    alive_s, until_s, age_s = ((each - granted) / SECOND_US for each in (alive, until, now))
    key = grant.sequence or 0, grant.attempt or 0
    return Lease(*key, ended, alive_s, until_s, age_s, late, later.extended is not None, grant.type)
