"""A queue at an instant of the past, and what changed until a later one, from the history.

Strategy: the events of one queue are applied to an empty state, from its creation on or from the newest complete
snapshot before the instant. All events of the store from there on are read, in pieces with no view held between two,
but only commits that may name the queue are decoded. What time alone does (a lease or a delay that ends, an expiry) is
judged by the instant, whether or not a sweep had recorded it. A bound of events or of messages may end the work
earlier: then the answer is about the instant that was reached, and says so.

Before changing it: `veilmq.testing.replaying` does the same for a whole history, and complains of every hole in it.
This one takes events as they come.
"""

from collections import Counter
from collections.abc import Iterator
from heapq import nsmallest
from operator import attrgetter
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from veilmq.admin.api import Refused
from veilmq.admin.api.inputs import INSTANT_MAX, PAGE_MAX, SEQUENCE, STATES, MessageState
from veilmq.admin.api.views import shown_client, shown_instant, shown_key
from veilmq.admin.past.replay import Changes, Message, PastQueue, summary
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.model.events import Event, HistoryTrimmed
from veilmq.model.messages import id_text
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Reader, View

SCAN_MAX: Final = 10_000_000
MESSAGES_MAX: Final = 250_000
"""How many messages the queue may hold, or may change, during a replay: each takes some 300 bytes of memory."""
_PIECE: Final = 8_192
_HOLD_S: Final = 60.0


class PastInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A queue at an instant, and its messages, of one `state` if that is given; with `until`, the messages that
    something happened to between the two instants. An instant of 0 is now, a negative one is so long ago. `scan`: how
    many events are read at most."""

    at: Annotated[int, Meta(ge=-INSTANT_MAX, le=INSTANT_MAX)]
    until: Annotated[int, Meta(ge=-INSTANT_MAX, le=INSTANT_MAX)] | None = None
    state: MessageState = ""
    after: Annotated[str, Meta(pattern=SEQUENCE)] = ""
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 100
    scan: Annotated[int, Meta(ge=1, le=SCAN_MAX)] = 1_000_000

    def __post_init__(self) -> None:
        self.state = self.state.replace("_", " ")


class _Base(NamedTuple):
    """From where a queue's events give its state."""

    offset: int
    at: int
    """The first instant at which they do."""


def _bases(view: View, created: int) -> list[_Base]:
    """All of them, oldest first."""
    first, _ = view.bounds()
    creation = view.offset_after(created - 1)
    found = [_Base(creation, created)] if creation > first or first == 0 else []
    return found + [_Base(begin, at) for begin, at in view.snapshots() if at >= created]


def past_page(reader: Reader, key: QueueKey, wanted: PastInput, now: int) -> dict[str, Any]:
    """The queue as it was: {account, region, name, incarnation, asked, at, until, complete, covers_from, read, then,
    later, changes, became, messages, after}. Blocks.

    Raises QueueMissing if there was no such queue, Refused (410) for an instant before what the history covers,
    ParameterInvalid for one in the future, HistoryTrimmed if trimming outran it.
    """
    wanted = _absolute(wanted, now)
    with reader.look() as view:
        incarnation, created = _life(view, key, wanted.at)
        bases = _bases(view, created)
        usable = [base for base in bases if base.at <= wanted.at]
        if not usable:
            since = min((base.at for base in bases), default=now)
            raise Refused(410, "history_trimmed", "the history does not cover that instant any more", since=since)
        start = usable[-1].offset
        stop_at = view.offset_after(wanted.at)
        stop = stop_at if wanted.until is None else view.offset_after(wanted.until)
    queue = PastQueue(incarnation)
    changes: Changes | None = None
    reached, read = None, 0
    for following, row_at, events in _rows(reader, queue, start, stop):
        if following > stop_at and changes is None:
            changes = Changes(queue, wanted.at)
        for event in events:
            (queue if changes is None else changes).apply(event)
        read = following - start
        if read >= wanted.scan or len(queue.messages) + len(changes.touched if changes else ()) >= MESSAGES_MAX:
            reached = row_at if following < stop else None
            break
    head: dict[str, Any] = {**shown_key(key), "incarnation": incarnation, "covers_from": bases[0].at, "read": read}
    head |= {"asked": {"at": wanted.at, "until": wanted.until}, "complete": reached is None}
    if wanted.until is not None and (reached is None or changes is not None):
        changes = changes or Changes(queue, wanted.at)
        until = reached or wanted.until
        changes.end(until)
        shown = {"at": wanted.at, "until": until, "then": changes.then, "later": summary(queue, until)}
        return head | shown | _changed(reader, changes, wanted)
    at = reached or wanted.at
    shown = {"at": at, "until": None, "then": summary(queue, at), "later": None, "changes": None, "became": None}
    return head | shown | _listed(reader, queue, at, wanted)


def _absolute(wanted: PastInput, now: int) -> PastInput:
    """The same with instants. Raises ParameterInvalid."""
    at, until = (each if each is None or each > 0 else now + each for each in (wanted.at, wanted.until))
    assert at is not None
    if not 0 <= at <= now:
        raise ParameterInvalid(parameter="at", reason="it is not in the past")
    if until is not None and not at <= until <= now:
        raise ParameterInvalid(parameter="until", reason="it is not between `at` and now")
    return msgspec.structs.replace(wanted, at=at, until=until)


def _life(view: View, key: QueueKey, at: int) -> tuple[int, int]:
    """The queue of that name at the instant: incarnation and creation. Raises QueueMissing."""
    for incarnation, created, deleted in view.lives(key):
        if created <= at and (deleted is None or at < deleted):
            return incarnation, created
    raise QueueMissing(queue=str(key))


def _rows(reader: Reader, queue: PastQueue, start: int, stop: int) -> Iterator[tuple[int, int, list[Event]]]:
    """Of each commit in [start, stop): the offset behind it, its instant and its events of the queue. Raises
    HistoryTrimmed."""
    while start < stop:
        left = reader.hold(start, _HOLD_S)
        if left > start:
            raise HistoryTrimmed(left)
        with reader.look() as view:
            rows = list(view.commits(start, min(stop, start + _PIECE)))
        for offset, count, at, packed in rows:
            yield offset + count, at, queue.events_in(packed)
        if not rows:
            return
        start = rows[-1][0] + rows[-1][1]


def _listed(reader: Reader, queue: PastQueue, at: int, wanted: PastInput) -> dict[str, Any]:
    """A page of the messages that were there."""
    states = {wanted.state} if wanted.state else set(STATES)
    found = [each for each in queue.messages.values() if queue.state(each, at) in states]
    page, after = _page(found, wanted)
    holders = _holders(reader, page)
    return {"messages": [_message(queue, each, queue.state(each, at), holders) for each in page], "after": after}


def _changed(reader: Reader, changes: Changes, wanted: PastInput) -> dict[str, Any]:
    """What happened; what became of the messages that were there; and a page of those that it happened to."""
    touched = changes.touched
    found = [each.message for each in touched.values() if not wanted.state or wanted.state in (each.before, each.later)]
    page, after = _page(found, wanted)
    holders = _holders(reader, page)
    shown = [
        _message(changes.queue, each, touched[each.sequence].later, holders)
        | {"before": touched[each.sequence].before, "events": dict(touched[each.sequence].kinds)}
        for each in page
    ]
    became = Counter(each.later for each in touched.values() if each.before is not None)
    counts = {name: count for name, count in sorted(changes.counts.items()) if count}
    return {"changes": counts, "became": dict(became), "messages": shown, "after": after}


def _page(found: list[Message], wanted: PastInput) -> tuple[list[Message], str | None]:
    """The next messages by sequence, and the name of the page behind them."""
    behind = int(wanted.after or 0)
    page = nsmallest(wanted.limit + 1, (each for each in found if each.sequence > behind), attrgetter("sequence"))
    more = len(page) > wanted.limit
    page = page[: wanted.limit]
    return page, str(page[-1].sequence) if more else None


def _holders(reader: Reader, page: list[Message]) -> dict[int, dict[str, Any]]:
    """Those who have, or last had, the messages, by origin."""
    with reader.look() as view:
        named = {each.origin: view.origin_names(each.origin) for each in page if each.origin is not None}
    return {origin: shown_client(*names) for origin, names in named.items() if names is not None}


def _message(queue: PastQueue, message: Message, state: str, holders: dict[int, dict[str, Any]]) -> dict[str, Any]:
    shown = {
        "id": id_text(message.id),
        "sequence": message.sequence,
        "state": state,
        "priority": message.priority,
        "sent": message.sent,
        "expires": shown_instant(queue.expires(message)),
        "receive_count": message.attempt,
        "first_received": message.first,
        "group": message.group,
        "type": message.type,
        "body_bytes": message.body_bytes,
    }
    if state in {"in flight", "delayed"}:
        shown["due"] = message.due
    if state == "in flight":
        shown |= {"granted": message.granted, "holder": holders.get(message.origin or 0)}
    return shown
