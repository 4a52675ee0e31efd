"""The trace of one message: all events that name it, and those that concern it without naming it.

Strategy: the history's index says where to look (`View.spans`); the packed id is searched in the packed rows before any
is decoded. Three things are learnt on the way, and each may be found in events that were not looked at yet: other ids
(a move task gives a message a new one), sequences (a refused handle of a message that is gone names nothing else), and
queues (a purge takes the message away without naming it). So the events are read again until no new id is learnt and
there is no other place to look. Sequences and queues are learnt before the events that they find.
"""

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from veilmq.admin.history import NUMBER, Scope
from veilmq.admin.story import shown_story
from veilmq.admin.story.life import TimeoutOf, unknown
from veilmq.model.events import Event, EventRecord, Kind
from veilmq.model.instant import Instant
from veilmq.model.messages import MARK, id_text, marked_id
from veilmq.store import View
from veilmq.store.reader import Span

_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
_PACKED: Final = msgspec.msgpack.Encoder()
_EMPTIED: Final = frozenset({Kind.PURGED, Kind.QUEUE_DELETED})
_GONE: Final = frozenset({Kind.DELETED, Kind.EXPIRED, Kind.QUARANTINE_DROPPED, Kind.DEAD_LETTERED, Kind.MOVED})
_THERE: Final = frozenset(
    {
        Kind.SENT,
        Kind.RECEIVED,
        Kind.EXTENDED,
        Kind.LEASE_RESUMED,
        Kind.RELEASED,
        Kind.RELEASED_FOR_RETRY,
        Kind.RETRY_DUE,
        Kind.LEASE_EXPIRED,
        Kind.EXPIRED_AFTER_CHANGE,
        Kind.UNDELIVERED,
        Kind.CONTENT_UPDATED,
        Kind.QUARANTINED,
    }
)
"""Kinds of events of a message that its queue holds, also in quarantine."""
_BEGINNINGS: Final = frozenset({Kind.SENT, Kind.PUBLISHED})


class Trace(NamedTuple):
    """The events of one message, oldest first; `complete` if they go back to its send or publish."""

    events: list[EventRecord]
    complete: bool
    scanned: int
    """How many events were looked at."""
    places: dict[int, int]
    """Where it is now, by the history: the incarnations of its queues, by its sequences. Dead letters and moves have a
    new sequence."""


def trace(view: View, message: bytes, scan_max: int, scope: Scope) -> Trace:
    """Everything that the history has of the message. At most the newest `scan_max` of the events that the index does
    not cover are looked at."""
    permitted, errors, names = scope.incarnations(view), scope.errors(view), view.names()
    sought = _Sought(message)
    spans, found, whereabouts = _read_all(view, sought, scan_max)
    places = {
        sequence: queue for sequence, queue in whereabouts.queues.items() if permitted is None or queue in permitted
    }
    records = []
    for offset, event in found:
        if permitted is None or event.queue in permitted:
            event.detail = _with_target(view, errors.detail(event.kind, event.queue, event.detail))
            records.append(names.record(offset, event))
    complete = any(event.kind in _BEGINNINGS for _, event in found)
    scanned = sum(span.stop - span.start for span in spans)
    return Trace(records, complete, scanned, places)


SENDS_MAX: Final = 100
"""Sends with one deduplication id that are looked for, the newest first."""


def sends_with(view: View, identity: str, scan_max: int) -> tuple[list[Event], int, bool]:
    """Sends to FIFO queues with this deduplication id, by its mark, newest first, as stored; how many events were
    looked at, and whether the bounds left none out."""
    found, scanned = [], 0
    everywhere = view.spans_of_sends(identity)
    spans, mark = _newest(everywhere, scan_max), marked_id(bytes(16), identity)[MARK]
    for span in reversed(spans):
        scanned += span.stop - span.start
        commits = (packed for _, packed in view.oldest_first(span.start, span.stop) if mark in packed)
        events = [event for packed in commits for event in _EVENTS.decode(packed) if _is_marked(mark, event)]
        found += events[::-1]
        if len(found) >= SENDS_MAX:
            return found[:SENDS_MAX], scanned, False
    return found, scanned, spans == everywhere


def _is_marked(mark: bytes, event: Event) -> bool:
    return event.kind == Kind.SENT and event.message is not None and event.message[MARK] == mark


def _with_target(view: View, detail: dict[str, Any] | None) -> dict[str, Any] | None:
    """The detail, with the name of the queue that a message was moved to."""
    target = None if detail is None or "target" not in detail else view.queue_names(detail["target"])
    return detail if detail is None or target is None else detail | {"target_queue": target[2]}


def shown_trace(
    view: View, message: bytes, scan_max: int, scope: Scope, now: Instant, timeout_of: TimeoutOf = unknown
) -> dict[str, Any]:
    """The trace as `GET /api/v1/trace/ID` shows it, with its story."""
    found = trace(view, message, scan_max, scope)
    story = shown_story(found.events, now, is_complete=found.complete, timeout_of=timeout_of)
    shown = {"complete": found.complete, "scanned": found.scanned, "story": story, "events": found.events}
    return {"message": id_text(message)} | shown


def _read_all(
    view: View, sought: "_Sought", scan_max: int
) -> tuple[list[Span], list[tuple[int, Event]], "_Whereabouts"]:
    """Read until no new id is learnt and there is no other place to look."""
    spans = sought.spans(view, scan_max)
    while True:
        ids, whereabouts = sought.ids.copy(), _Whereabouts(sought)
        found = list(_read(view, spans, sought, whereabouts))
        read, spans = spans, sought.spans(view, scan_max)
        if spans == read and sought.ids == ids:
            return read, found, whereabouts


def _newest(spans: list[Span], scan_max: int) -> list[Span]:
    """The spans, without the oldest events beyond `scan_max` of those that the index does not cover."""
    kept = []
    left = scan_max
    for span in reversed(spans):
        if not span.indexed:
            if left <= 0:
                continue
            span = span._replace(start=max(span.start, span.stop - left))
            left -= span.stop - span.start
        kept.append(span)
    return kept[::-1]


def _read(view: View, spans: list[Span], sought: "_Sought", whereabouts: "_Whereabouts") -> Iterator[tuple[int, Event]]:
    """The events of the message in the spans; what they say of it is added to `sought` and `whereabouts`."""
    for span in spans:
        for first, packed in view.oldest_first(span.start, span.stop):
            if not (sought.may_be_in(packed) or whereabouts.may_end_in(packed)):
                continue
            for place, event in enumerate(_EVENTS.decode(packed)):
                if sought.takes(event):
                    whereabouts.follow(event)
                elif not whereabouts.ends(event):
                    continue
                if event.kind != Kind.SNAPSHOT:
                    yield first + place, event


class _Sought:
    """All ids and sequences of one message, and the queues that ever held it."""

    def __init__(self, message: bytes) -> None:
        self.ids: set[bytes] = set()
        self.sequences: set[int] = set()
        self.queues: set[int] = set()
        self._packed: list[bytes] = []
        """Any of these may be in packed events that concern the message."""
        self._learn({message}, set())

    def _learn(self, ids: set[bytes], sequences: set[int]) -> None:
        self.ids |= ids
        self.sequences |= sequences
        # An id is packed as bytes, but as text in a move's new id; a refusal has only the sequence.
        self._packed = [form for each in self.ids for form in (each, each.hex().encode())]
        self._packed += [_PACKED.encode(each) for each in self.sequences]

    def spans(self, view: View, scan_max: int) -> list[Span]:
        """Where it may be, as far as is known."""
        return _newest(view.spans(self.ids, self.sequences, self.queues), scan_max)

    def may_be_in(self, packed: bytes) -> bool:
        """Whether the packed events may concern the message."""
        for form in self._packed:  # noqa: SIM110 a generator would take longer than the search
            if form in packed:
                return True
        return False

    def takes(self, event: Event) -> bool:
        """Whether the event concerns the message; learns new ids and sequences from it."""
        detail = event.detail or {}
        if event.kind == Kind.SNAPSHOT:
            return self._listed_in(detail.get("messages", ()))
        if event.message is None:
            return event.sequence in self.sequences
        moved = detail.get("target_message")
        ids = {event.message} if moved is None else {event.message, bytes.fromhex(moved)}
        if self.ids.isdisjoint(ids):
            return False
        self._learn(ids, {each for each in (event.sequence, detail.get("target_sequence")) if each is not None})
        return True

    def _listed_in(self, messages: list[list[Any]]) -> bool:
        sequences = {sequence for sequence, message, *_ in messages if message in self.ids}
        self._learn(set(), sequences)
        return bool(sequences)


class _Whereabouts:
    """The queues that hold the message, by its sequences: a published message is in several. Events that empty a queue
    do not name its messages."""

    def __init__(self, sought: _Sought) -> None:
        self._sought = sought
        self.queues: dict[int, int] = {}
        self._emptied: re.Pattern[bytes] | None = None

    def may_end_in(self, packed: bytes) -> bool:
        """Whether the packed events may contain one that empties one of the queues."""
        return self._emptied is not None and self._emptied.search(packed) is not None

    def follow(self, event: Event) -> None:
        """Update the queues from an event of the message."""
        detail = event.detail or {}
        if event.kind == Kind.SNAPSHOT and event.queue is not None:
            listed = (sequence for sequence, *_ in detail["messages"])
            self.queues.update((each, event.queue) for each in listed if each in self._sought.sequences)
        elif event.sequence is not None and event.queue is not None:
            if event.kind in _THERE:
                self.queues[event.sequence] = event.queue
            elif event.kind in _GONE:
                self.queues.pop(event.sequence, None)
        if "target_sequence" in detail:
            self.queues[detail["target_sequence"]] = detail["target"]
        self._watch()

    def ends(self, event: Event) -> bool:
        """Whether the event emptied a queue that held the message, which then is gone from there."""
        if event.kind not in _EMPTIED or event.queue not in self.queues.values():
            return False
        self.queues = {sequence: queue for sequence, queue in self.queues.items() if queue != event.queue}
        self._watch()
        return True

    def _watch(self) -> None:
        """Build the pattern of such an event from its first fields: kind, instant and queue, packed in order."""
        self._sought.queues.update(self.queues.values())
        queues = b"|".join(re.escape(_PACKED.encode(queue)) for queue in set(self.queues.values()))
        kinds = b"".join(_PACKED.encode(int(kind)) for kind in _EMPTIED)
        self._emptied = re.compile(b"[%b]%b(?:%b)" % (kinds, NUMBER, queues), re.DOTALL) if queues else None
