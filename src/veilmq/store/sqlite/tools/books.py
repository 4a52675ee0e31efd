"""What the history says of queues and messages: compared with the tables, and, for a repair, about messages whose rows
are in doubt.

Strategy: the books of a queue are two numbers: what was sent or moved into it must equal what is in it now plus what
was deleted, expired, purged, moved or quarantined. They begin at offset 0, or else at the newest complete snapshot.
What an event says of a message that is there must be what its row says; a million messages take 16 MB for that.

For a repair (`Facts`): go through all events that can be read, and remember for the wanted messages whether they are
still there. An event names a message by sequence and id, so one damaged number makes no statement about another
message. Where events are missing, a message counts as there: it is delivered once more rather than lost.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import merge
from typing import Any, Final, NamedTuple

import apsw
import msgspec

from veilmq.model.events import ENDED_BY_ITSELF, Event, HeldMessage, Kind, Part
from veilmq.model.settings.queue import PRIORITY_DEFAULT, QueueSettings
from veilmq.model.wording import counted
from veilmq.store.sqlite.batch.queues import SETTINGS_DECODER
from veilmq.store.sqlite.disk.rows import MessageRow, Unflushed, resumed

_MESSAGES: Final = (
    "SELECT m.sequence, m.id, m.sent, m.expires, m.group_id, m.type, m.priority FROM message m"
    " WHERE m.sequence > ? AND m.sequence NOT IN (SELECT sequence FROM quarantine) ORDER BY m.sequence"
)
_QUEUES: Final = "SELECT incarnation, account, region, name, settings FROM queue WHERE deleted IS NULL"
_QUARANTINE: Final = (
    "SELECT q.incarnation, count(*) FROM quarantine d JOIN queue q ON q.generation = d.generation"
    " WHERE q.deleted IS NULL GROUP BY 1"
)
KEY_PARTS: Final = ("account", "region", "name")
_COMPARED: Final = ("retention_us", "visibility_timeout_us", "delay_us", "message_bytes_max", "wait_us", "fifo")
"""Settings: the history does not record tags and labels."""


class Entered(NamedTuple):
    """A message as the history recorded it when it entered a queue, or a snapshot listed it there."""

    sequence: int
    id: bytes
    sent: int
    own_expiry: int | None
    group: str | None
    type: str | None
    priority: int
    queue: int
    """The queue's incarnation."""

    def mark(self) -> int:
        """A number that tells different ones apart."""
        return hash(self[1:7])


def entered(event: Event) -> list[Entered]:
    """The messages that are in a queue with this event. Raises ValueError for one that says nonsense."""
    try:
        return [*_entered(event)]
    except (LookupError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _entered(event: Event) -> Iterator[Entered]:
    kind, queue, detail = event.kind, event.queue, event.detail or {}
    if queue is None:
        return
    if kind == Kind.SNAPSHOT:
        for each in msgspec.convert(detail.get("messages", []), list[HeldMessage]):
            if each.quarantined is None:
                fields = (each.id, each.sent, each.own_expiry, each.group, each.type, each.priority)
                yield Entered(each.sequence, *fields, queue)
    elif kind == Kind.SENT:
        yield _of_detail(event, event.sequence or 0, event.message or b"", event.sent or 0, queue)
    elif kind == Kind.DEAD_LETTERED:
        sent: int = detail.get("sent", event.sent) or 0
        yield _of_detail(event, detail["target_sequence"], event.message or b"", sent, detail["target"])
    elif kind == Kind.MOVED:
        message = bytes.fromhex(detail["target_message"])
        yield _of_detail(event, detail["target_sequence"], message, event.at, detail["target"])


def _of_detail(event: Event, sequence: int, message: bytes, sent: int, queue: int) -> Entered:
    detail = event.detail or {}
    own_expiry, priority = detail.get("expires"), detail.get("priority", PRIORITY_DEFAULT)
    return Entered(sequence, message, sent, own_expiry, event.group, event.type, priority, queue)


class Recorded:
    """Compares the rows of messages and queues with the events about them."""

    def __init__(self, connection: apsw.Connection, unflushed: Sequence[Unflushed]) -> None:
        self._sequences, self._marks = array("q"), array("q")
        journal = (_row(each.row) for each in sorted(unflushed, key=lambda each: each.row.sequence))
        for row in merge(resumed(connection, _MESSAGES, place=0), journal):
            self._sequences.append(row[0])
            self._marks.append(hash(tuple(row[1:])))
        self._differ: set[int] = set()
        self._queues: dict[int, tuple[list[str], QueueSettings]] = {}
        queues: Any = connection.execute(_QUEUES).fetchall()
        for incarnation, *key, packed in queues:
            with suppress(ValueError, RecursionError):  # what cannot be decoded is reported elsewhere
                self._queues[incarnation] = (key, SETTINGS_DECODER.decode(packed))
        self._settings: dict[int, dict[str, Any]] = {}

    def compare(self, event: Event) -> bool:
        """Compare what the event says of a message; returns whether the row says something else."""
        differs = False
        for each in entered(event):
            at = bisect_left(self._sequences, each.sequence)
            if at < len(self._sequences) and self._sequences[at] == each.sequence and self._marks[at] != each.mark():
                self._differ.add(each.sequence)
                differs = True
        note_settings(self._settings, event)
        return differs

    def messages(self) -> Iterator[str]:
        """One text for each message whose row says something else."""
        for sequence in sorted(self._differ):
            yield f"message {sequence}: its row does not say what was recorded when it came"

    def queues(self) -> Iterator[str]:
        """The same for queues."""
        for incarnation, (key, settings) in self._queues.items():
            known = self._settings.get(incarnation)
            if known is None:
                continue
            if key != [known[part] for part in KEY_PARTS]:
                yield f"queue {'/'.join(key)}: it was created under another name"
            elif any(known["settings"].get(name) != getattr(settings, name) for name in _COMPARED):
                yield f"queue {'/'.join(key)}: its settings are not what was recorded"


def note_settings(known: dict[int, dict[str, Any]], event: Event) -> None:
    """Keep the key and the settings of each queue, by incarnation, as the events record them."""
    kind, queue, detail = event.kind, event.queue, event.detail or {}
    if queue is None:
        return
    key = [detail.get(part) for part in KEY_PARTS]
    if isinstance(detail.get("settings"), dict) and all(isinstance(part, str) for part in key):
        known[queue] = detail | {"settings": dict(detail["settings"])}
    elif kind == Kind.QUEUE_CHANGED and queue in known:
        change = detail.get("change")
        known[queue]["settings"] |= change if isinstance(change, dict) else {}


def _row(row: MessageRow) -> tuple[Any, ...]:
    return row.sequence, row.id, row.sent, row.own_expiry, row.group, row.type, row.priority


_LISTED: Final = (
    "SELECT sequence, generation FROM message INDEXED BY message_line WHERE in_line = 1",
    "SELECT sequence, generation FROM message INDEXED BY message_aside WHERE in_line = 0 AND line > 16",
    "SELECT sequence, generation FROM lease",
)


def listed(connection: apsw.Connection) -> Iterator[tuple[int, int]]:
    """Sequences and generations of the messages that an index or a lease names, as far as those can be read. The table
    of messages is not, so it may lack them."""
    for statement in _LISTED:
        with suppress(apsw.Error):
            rows: Any = connection.cursor().execute(statement)
            yield from rows


class Books:
    """How many messages must be in each queue (by incarnation) and in its quarantine, according to the history."""

    def __init__(self, begin: int | None) -> None:
        """begin: the offset where they begin: 0, or the begin of a complete snapshot."""
        self._balance: Counter[int] = Counter()
        self._quarantined: Counter[int] = Counter()
        """How many damaged messages are in quarantine."""
        self._begin = begin
        self._is_complete = begin == 0
        """Whether the snapshot has ended, if the books begin with one."""
        self._last = self._reached = 0
        """Sequences: the last that the snapshot covers, and the last that it has listed."""

    def add(self, offset: int, event: Event) -> None:
        """Enter an event."""
        kind, queue, detail = event.kind, event.queue, event.detail or {}
        if self._begin is None or offset < self._begin:
            return
        if kind == Kind.SNAPSHOT:
            self._add_snapshot(queue, detail)
        if queue is None:
            return
        if kind == Kind.SENT:
            self._balance[queue] += 1
        elif kind in {Kind.DELETED, Kind.EXPIRED}:
            self._leaves(self._balance, queue, event.sequence)
        elif kind == Kind.QUARANTINED:
            self._leaves(self._balance, queue, event.sequence, into=self._quarantined)
        elif kind == Kind.QUARANTINE_DROPPED:
            self._leaves(self._quarantined, queue, event.sequence)
        elif kind in {Kind.DEAD_LETTERED, Kind.MOVED}:
            self._leaves(self._balance, queue, event.sequence)
            self._balance[detail["target"]] += 1
        elif kind in {Kind.PURGED, Kind.QUEUE_DELETED}:
            # During the snapshot this count includes messages that it has not listed; all of them are gone now.
            self._balance[queue] = self._balance[queue] - detail["count"] if self._is_complete else 0
            self._quarantined[queue] = 0

    def _leaves(self, counts: Counter[int], queue: int, sequence: int | None, into: Counter[int] | None = None) -> None:
        """A message left. What the snapshot has not reached it will list where it is then, or not at all, so that one
        is not counted."""
        if self._is_complete or not self._reached < (sequence or 0) <= self._last:
            counts[queue] -= 1
            if into is not None:
                into[queue] += 1

    def _add_snapshot(self, queue: int | None, detail: dict[str, Any]) -> None:
        if self._is_complete:
            return
        if detail["part"] == Part.BEGIN:
            self._last = detail["last"]
        elif detail["part"] == Part.END:
            self._is_complete = True
        elif detail["part"] == Part.MESSAGES and queue is not None:
            held = msgspec.convert(detail["messages"], list[HeldMessage])
            quarantined = sum(message.quarantined is not None for message in held)
            self._balance[queue] += len(held) - quarantined
            self._quarantined[queue] += quarantined
            self._reached = max(self._reached, held[-1].sequence)

    def differences(self, connection: apsw.Connection, unflushed: Sequence[Unflushed]) -> Iterator[str]:
        """One text for each queue that holds more or fewer messages than it must."""
        rows: Any = connection.execute(
            "SELECT q.incarnation, count(*) FROM queue q JOIN message m ON m.generation = q.generation"
            " WHERE q.deleted IS NULL AND m.sequence NOT IN (SELECT sequence FROM quarantine) GROUP BY 1"
        ).fetchall()
        live: Counter[int] = Counter(dict(rows))
        queues = incarnations(connection)
        live.update(queues[each.row.generation] for each in unflushed if each.row.generation in queues)
        names = dict(connection.execute("SELECT incarnation, account || '/' || region || '/' || name FROM queue"))
        rows = connection.execute(_QUARANTINE).fetchall()
        kept: Counter[int] = Counter(dict(rows))
        for what, expected, found in (("holds", self._balance, live), ("has in quarantine", self._quarantined, kept)):
            for queue in sorted(expected.keys() | found.keys()):
                if expected[queue] != found[queue]:
                    name = names.get(queue, f"number {queue}")
                    count = counted(found[queue], "message")
                    yield f"queue {name}: {what} {count}, by its history {expected[queue]}"


def incarnations(connection: apsw.Connection) -> dict[int, int]:
    """Incarnations of existing queues, by generation."""
    rows: Any = connection.execute("SELECT generation, incarnation FROM queue WHERE deleted IS NULL").fetchall()
    return dict(rows)


_LEAVES = frozenset({Kind.DELETED, Kind.EXPIRED, Kind.DEAD_LETTERED, Kind.MOVED, Kind.QUARANTINE_DROPPED})
_EXTENDS = frozenset({Kind.EXTENDED, Kind.LEASE_RESUMED, Kind.RELEASED_FOR_RETRY})
_GIVES_BACK = frozenset({Kind.RELEASED, Kind.UNDELIVERED, *ENDED_BY_ITSELF})
_EMPTIES = frozenset({Kind.PURGED, Kind.QUEUE_DELETED})


class Received(NamedTuple):
    """The latest lease of a message."""

    at: int
    due: int
    origin: int
    attempt: int


class Facts:
    """What became of the wanted messages."""

    def __init__(self, wanted: Callable[[int], bool], has: Callable[[int], bool | None]) -> None:
        """wanted: whether a sequence is in doubt. has: whether the message has a row, which is then compared with what
        became of it; None: it is not to be compared."""
        self._wanted, self._has = wanted, has
        self.alive: dict[int, Entered] = {}
        """By sequence: those that were in a queue at the end."""
        self.unsure: set[int] = set()
        """Sequences of those among them that may have left where events are missing."""
        self.left: set[tuple[int, bytes]] = set()
        """Sequences and ids of those that had left."""
        self.updated: set[int] = set()
        """Sequences of those that got another body."""
        self.received: dict[int, Received] = {}
        self.has_snapshot = False
        """Whether a snapshot came to its end: it names every message."""
        self.settings: dict[int, dict[str, Any]] = {}
        """By incarnation: the account, region, name and settings of a queue."""
        self.deleted: set[int] = set()
        """Incarnations of deleted queues."""

    def learn(self, events: Iterable[Event]) -> None:
        """Take these events into account, in their order."""
        for event in events:
            self._learn(event)

    def _learn(self, event: Event) -> None:
        kind, sequence = event.kind, event.sequence
        if event.queue is None:
            self.has_snapshot |= kind == Kind.SNAPSHOT and (event.detail or {}).get("part") == Part.END
            return
        note_settings(self.settings, event)
        if kind in _EMPTIES:
            self._empty(event.queue)
            if kind == Kind.QUEUE_DELETED:
                self.deleted.add(event.queue)
        elif sequence is not None and event.message is not None:
            if kind in _LEAVES:
                self.alive.pop(sequence, None)
            if self._wanted(sequence):
                self._note(event, sequence, event.message)
            elif kind in _LEAVES and self._has(sequence):
                self.left.add((sequence, event.message))
            elif kind == Kind.CONTENT_UPDATED and self._has(sequence) is False:
                self.updated.add(sequence)
        for each in entered(event):
            if self._wanted(each.sequence) or self._has(each.sequence) is False:
                self.alive[each.sequence] = each
                self.unsure.discard(each.sequence)

    def forget(self) -> None:
        """Events are missing here: messages that are not wanted, but had no row, may have left by them."""
        self.alive = {sequence: each for sequence, each in self.alive.items() if self._wanted(sequence)}
        self.unsure.update(self.alive)

    def _note(self, event: Event, sequence: int, message: bytes) -> None:
        if event.kind in _LEAVES:
            self.left.add((sequence, message))
        elif event.kind == Kind.CONTENT_UPDATED:
            self.updated.add(sequence)
        elif event.kind == Kind.RECEIVED:
            due = event.at + (event.lease_us or 0)
            self.received[sequence] = Received(event.at, due, event.origin or 0, event.attempt or 1)
        elif (lease := self.received.get(sequence)) and event.kind in _EXTENDS | _GIVES_BACK:
            lease_us = (event.lease_us or 0) if event.kind in _EXTENDS else 0
            self.received[sequence] = lease._replace(due=event.at + lease_us)

    def _empty(self, queue: int) -> None:
        for sequence in [each for each, fact in self.alive.items() if fact.queue == queue]:
            self.left.add((sequence, self.alive.pop(sequence).id))
