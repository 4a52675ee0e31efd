"""The events of one queue, applied one after the other: its state, and what happened to it from an instant on.

Strategy: a message keeps what its last event says, and its state at an instant follows from that: what time alone does
(a lease or a delay that ends, an expiry) needs no event. Events are taken as they come; one of a message that is not
known, as before a snapshot has reported it, changes nothing.
"""

import re
from collections import Counter
from typing import Any, Final

import msgspec

from veilmq.admin.api.inputs import STATES
from veilmq.admin.history import packed_beginning
from veilmq.model.events import ENDED_BY_ITSELF, Event, HeldMessage, Kind, LeaseEnding, Part
from veilmq.model.instant import FOREVER
from veilmq.model.settings.queue import PRIORITY_DEFAULT

_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
_PACKED: Final = msgspec.msgpack.Encoder()
_UNCOUNTED: Final = frozenset({Kind.SNAPSHOT, Kind.POLLED, Kind.PEEKED, Kind.OPERATOR_COMMAND})
_WITHOUT_EFFECT: Final = frozenset({Kind.DELETE_REFUSED, Kind.EXTEND_REFUSED, Kind.DUPLICATE_ABSORBED})
"""They may name a message that has expired."""
_MOVING: Final = frozenset({Kind.DEAD_LETTERED, Kind.MOVED})
_GONE: Final = {
    Kind.DELETED: "deleted",
    Kind.EXPIRED: "expired",
    Kind.QUARANTINE_DROPPED: "dropped from quarantine",
    Kind.DEAD_LETTERED: "dead-lettered",
    Kind.MOVED: "moved",
    Kind.PURGED: "purged",
    Kind.QUEUE_DELETED: "deleted with its queue",
}


class Message(msgspec.Struct, gc=False):
    sequence: int
    id: bytes
    sent: int
    own_expiry: int | None
    priority: int
    group: str | None
    type: str | None
    body_bytes: int | None
    due: int = 0
    attempt: int = 0
    held: bool = False
    """Whether its lease has not ended, as far as the history says."""
    granted: int | None = None
    first: int | None = None
    origin: int | None = None
    ending: int = LeaseEnding.EXPIRED
    quarantined: bool = False


class PastQueue:
    """One queue as far as its events were applied."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.messages: dict[int, Message] = {}
        self.retention_us = self._delay_us = FOREVER
        self._fifo = False
        target = rb"\xa6target" + re.escape(_PACKED.encode(incarnation))
        self._named = re.compile(packed_beginning(incarnation) + b"|" + target, re.DOTALL)

    def events_in(self, packed: bytes) -> list[Event]:
        """Those that concern the queue."""
        if self._named.search(packed) is None:
            return []
        return [event for event in _EVENTS.decode(packed) if event.queue == self.incarnation or self.receives(event)]

    def receives(self, event: Event) -> bool:
        """Whether the event brings a message of another queue."""
        return event.kind in _MOVING and (event.detail or {}).get("target") == self.incarnation

    def expires(self, message: Message, retention_us: int | None = None) -> int:
        """When it expires, by the queue's present retention or another one."""
        if message.own_expiry is not None:
            return message.own_expiry
        return message.sent + (self.retention_us if retention_us is None else retention_us)

    def state(self, message: Message, at: int, retention_us: int | None = None) -> str:
        """At an instant between its last event and the next; `expired` if it is there no more."""
        if message.quarantined:
            return "quarantined"
        if self.expires(message, retention_us) <= at:
            return "expired"
        if message.due > at and (message.held or not message.attempt):
            return "in flight" if message.attempt else "delayed"
        return "visible"

    def named_by(self, event: Event) -> list[Message]:
        """The messages of the queue that the event is about; none for an event that brings a message."""
        if event.kind == Kind.PURGED:
            watermark = (event.detail or {})["watermark"]
            return [each for each in self.messages.values() if each.sequence <= watermark]
        if event.kind == Kind.QUEUE_DELETED:
            return list(self.messages.values())
        found = None if event.queue != self.incarnation else self.messages.get(event.sequence or 0)
        return [] if found is None else [found]

    def apply(self, event: Event) -> None:
        """Apply one that concerns the queue."""
        kind = event.kind
        if self.receives(event):
            self._arrive(event)
        if event.queue != self.incarnation:
            return
        if kind == Kind.SENT:
            self._add(event, event.sequence, event.message, event.sent, event.detail)
        elif kind in {Kind.QUEUE_CREATED, Kind.QUEUE_CHANGED}:
            self._set(event)
        elif kind == Kind.SNAPSHOT:
            self._read_snapshot(event)
        elif kind in _GONE:
            for message in self.named_by(event):
                del self.messages[message.sequence]
        else:
            for message in self.named_by(event):
                _change(message, event)

    def _add(
        self, event: Event, sequence: int | None, message: bytes | None, sent: int | None, given: dict[str, Any] | None
    ) -> None:
        detail = given or {}
        assert sequence is not None
        assert message is not None
        assert sent is not None
        own, priority = detail.get("expires"), detail.get("priority", PRIORITY_DEFAULT)
        added = Message(sequence, message, sent, own, priority, event.group, event.type, event.body_bytes)
        added.due = event.visible_since or 0
        self.messages[sequence] = added

    def _arrive(self, event: Event) -> None:
        detail = event.detail or {}
        anew = event.kind == Kind.MOVED
        message = bytes.fromhex(detail["target_message"]) if anew else event.message
        sent = event.at if anew else detail.get("sent", event.at if self._fifo else event.sent)
        self._add(event, detail["target_sequence"], message, sent, detail)

    def _set(self, event: Event) -> None:
        detail = event.detail or {}
        change = detail.get("settings") or detail.get("change") or {}
        if "change" in detail and "delay_us" in change and (self._fifo or "delay_before_us" in detail):
            self._retime(event.at, detail.get("delay_before_us", self._delay_us), change["delay_us"])
        self.retention_us = change.get("retention_us", self.retention_us)
        self._delay_us = change.get("delay_us", self._delay_us)
        self._fifo = change.get("fifo", self._fifo)

    def _retime(self, at: int, before_us: int, after_us: int) -> None:
        """A FIFO queue's new delay, for its messages but those whose delay was set otherwise."""
        for message in self.messages.values():
            delayed = message.sent + after_us
            if message.attempt or message.quarantined or message.due not in (0, message.sent, message.sent + before_us):
                continue
            if message.due > message.sent or (after_us > before_us and delayed > at):
                message.due = delayed

    def _read_snapshot(self, event: Event) -> None:
        detail = event.detail or {}
        if detail["part"] == Part.QUEUE:
            self._set(event)
        elif detail["part"] == Part.MESSAGES:
            for each in msgspec.convert(detail["messages"], list[HeldMessage]):
                known = self.messages.get(each.sequence)
                if known is None:
                    self.messages[each.sequence] = _of_snapshot(each)


def _of_snapshot(held: HeldMessage) -> Message:
    """Who holds it is not in a snapshot."""
    return Message(
        held.sequence, held.id, held.sent, held.own_expiry, held.priority, held.group, held.type, held.body_bytes,
        due=held.due or 0, attempt=held.attempt or 0, held=bool(held.hidden), granted=held.granted, first=held.first,
        quarantined=held.quarantined is not None,
    )  # fmt: skip


def _change(message: Message, event: Event) -> None:
    """Apply an event of a message that stays."""
    match event.kind:
        case Kind.RECEIVED:
            message.attempt, message.granted, message.origin = event.attempt or 0, event.at, event.origin
            message.due, message.held = event.at + (event.lease_us or 0), True
            message.first = message.first or event.at
            message.ending = LeaseEnding.EXPIRED
        case Kind.EXTENDED | Kind.LEASE_RESUMED:
            due = event.at + (event.lease_us or 0)
            message.ending = LeaseEnding.CHANGED if message.held and due < message.due else LeaseEnding.EXPIRED
            message.due, message.held = due, bool(message.attempt)
        case Kind.RELEASED_FOR_RETRY if event.lease_us:
            message.due, message.held, message.ending = event.at + event.lease_us, True, LeaseEnding.RETRY
        case Kind.RELEASED | Kind.RELEASED_FOR_RETRY | Kind.UNDELIVERED:
            message.due, message.held = event.at, False
        case Kind.LEASE_EXPIRED | Kind.EXPIRED_AFTER_CHANGE | Kind.RETRY_DUE:
            message.held = False
        case Kind.CONTENT_UPDATED:
            message.body_bytes = event.body_bytes
        case Kind.QUARANTINED:
            message.quarantined = True


class Touch(msgspec.Struct, gc=False):
    """A message that something happened to."""

    message: Message
    before: str | None
    """Its state at the first instant; None: it was not there."""
    kinds: Counter[str]
    later: str = ""


class Changes:
    """What happened to a queue from one instant on."""

    def __init__(self, queue: PastQueue, at: int) -> None:
        self.queue = queue
        self.then = summary(queue, at)
        self._at = at
        self._retention_us = queue.retention_us
        self.counts: Counter[str] = Counter()
        self.touched: dict[int, Touch] = {}

    def apply(self, event: Event) -> None:
        """Apply the event and note what it changes."""
        queue, kind = self.queue, event.kind
        before = queue.named_by(event)
        if kind in _UNCOUNTED or self._was_before(event, before):
            queue.apply(event)
            return
        name = _name(kind)
        for message in before:
            was = self._before(message)
            if was is not None or kind not in _WITHOUT_EFFECT:
                self._note(message, was, name, _GONE.get(Kind(kind), ""))
        if kind == Kind.QUEUE_CHANGED:
            self._retimed(event)
        else:
            queue.apply(event)
        self.counts[name] += len(before) if kind in {Kind.PURGED, Kind.QUEUE_DELETED} else 0
        arrived = queue.receives(event)
        self.counts[name] += event.queue == queue.incarnation and kind not in {Kind.PURGED, Kind.QUEUE_DELETED}
        self.counts["arrived"] += arrived
        sequence = (event.detail or {}).get("target_sequence") if arrived else event.sequence
        new = queue.messages.get(sequence or 0)
        if new is not None and (arrived or kind == Kind.SENT):
            self._note(new, None, "arrived" if arrived else name, "")

    def _retimed(self, event: Event) -> None:
        """Apply a change of settings, which may be a new delay for messages that wait."""
        waiting = [(each, each.due, self._before(each)) for each in self.queue.messages.values() if not each.attempt]
        self.queue.apply(event)
        for message, due, before in waiting:
            if message.due != due:
                self._note(message, before, _name(event.kind), "")

    def end(self, until: int) -> None:
        """What time alone did up to then, and the state of each message then."""
        for message in self.queue.messages.values():
            later, kind = self.queue.state(message, until), None
            if later == "expired":
                if self._before(message) is None and message.sequence not in self.touched:
                    continue
                kind = Kind.EXPIRED
            elif message.held and message.attempt and self._at < message.due <= until:
                kind = ENDED_BY_ITSELF[message.ending]
            if kind is not None:
                self.counts[_name(kind)] += 1
                self._note(message, self._before(message), _name(kind), "")
            touched = self.touched.get(message.sequence)
            if touched is not None:
                touched.later = later
            elif self._before(message) != later:
                before = self._before(message)
                self._note(message, before, "delay_over" if before == "delayed" else "queue_changed", later)

    def _was_before(self, event: Event, named: list[Message]) -> bool:
        """Whether it happened by time alone before the first instant, and only its event came later."""
        if event.kind in ENDED_BY_ITSELF and event.at <= self._at:
            return True
        if event.kind not in (Kind.EXPIRED, *ENDED_BY_ITSELF):
            return False
        return all(self._before(each) is None and each.sequence not in self.touched for each in named)

    def _before(self, message: Message) -> str | None:
        """The state at the first instant of a message that nothing happened to since."""
        state = self.queue.state(message, self._at, self._retention_us)
        return None if state == "expired" else state

    def _note(self, message: Message, before: str | None, kind: str, later: str) -> None:
        touch = self.touched.get(message.sequence)
        if touch is None:
            touch = self.touched[message.sequence] = Touch(message, before, Counter())
        touch.kinds[kind] += 1
        touch.later = later


def _name(kind: int) -> str:
    return Kind(kind).name.lower()


def summary(queue: PastQueue, at: int) -> dict[str, Any]:
    """How many messages there are in which state, and when the oldest one that is visible or in flight was sent."""
    counts = dict.fromkeys(STATES, 0)
    oldest: int = FOREVER
    for message in queue.messages.values():
        state = queue.state(message, at)
        if state in counts:
            counts[state] += 1
            oldest = min(oldest, message.sent) if state in {"visible", "in flight"} else oldest
    named: dict[str, Any] = {state.replace(" ", "_"): count for state, count in counts.items()}
    return named | {"oldest_sent": None if oldest == FOREVER else oldest}
