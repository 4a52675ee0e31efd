"""Bulk reads: pages of a queue's messages, the trace of one message, a snapshot, the packed history.

Strategy: functions of a reading connection (`Readers.lend`); each sees one committed state, blocks, and belongs on a
thread. Pages seek by index and never count. A scan of the history searches the packed rows for the packed id before it
decodes any, and stops at a bound. `Scope` limits every result to what a key may see.
"""

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, Final, NamedTuple

import msgspec

from veilmq.admin.chosen import Wanted
from veilmq.admin.views import shown_extras, shown_instant, shown_key, shown_settings
from veilmq.model.access import AccessKey, Action
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.model.events import Event, EventRecord, HistoryTrimmed, Kind
from veilmq.model.message import NO_EXTRAS, id_text
from veilmq.model.queue import QueueKey
from veilmq.store.sqlite.batch.extras import read_extras
from veilmq.store.sqlite.batch.queues import SETTINGS_DECODER
from veilmq.store.sqlite.reading import rows
from veilmq.store.sqlite.reading.history import Names, bounds, events_from
from veilmq.store.sqlite.reading.rows import Connection, Held
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.upkeep import snapshots

_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
_PACKED: Final = msgspec.msgpack.Encoder()
_PIECE_BYTES_MAX: Final = 2_000_000
"""Bound of packed events; decoded, they are twenty times as large."""
_EVER: Final = 2**62
"""Greater than every offset."""
_EMPTIED: Final = frozenset({Kind.PURGED, Kind.QUEUE_DELETED})
_GONE: Final = frozenset({Kind.DELETED, Kind.EXPIRED, Kind.QUARANTINED, Kind.DEAD_LETTERED, Kind.MOVED})
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
    }
)
"""Kinds of events of a message that its queue holds."""
_WITH_ERRORS: Final = frozenset({Kind.RELEASED_FOR_RETRY, Kind.DEAD_LETTERED})
_PACKED_NUMBER: Final = rb"(?:\xcf.{8}|\xce.{4}|\xcd..|\xcc.|[\x00-\x7f])"
"""An unsigned number in MessagePack; match with DOTALL."""


class Scope(NamedTuple):
    """What a caller may see: everything without a key, else what the key is granted in its account."""

    key: AccessKey | None = None
    action: Action = Action.EVENTS
    wanted: Wanted = Wanted()
    """The requested filter."""

    def covers(self, account: str, name: str) -> bool:
        """Whether that account's queue is in the scope."""
        return self.key is None or (account == self.key.account and self.key.allows(self.action, name))

    def incarnations(self, connection: Connection) -> frozenset[int] | None:
        """All queues of the scope in the history, including deleted ones; None: all queues."""
        if self.key is None:
            return None
        account = self.key.account
        named = rows.incarnations(connection, account)
        return frozenset(incarnation for incarnation, name in named if self.covers(account, name))

    def errors(self, connection: Connection) -> "Errors":
        """Which texts of workers' errors the key may see: those of queues whose bodies it may read."""
        if self.key is None:
            return Errors(None)
        return Errors(self._replace(action=Action.PEEK).incarnations(connection))


class Errors(NamedTuple):
    """A worker's error may quote a body, so its text is only for callers that may read the body."""

    readable: frozenset[int] | None
    """Queues whose bodies the caller may read; None: all."""

    def detail(self, kind: int, queue: int | None, detail: dict[str, Any] | None) -> dict[str, Any] | None:
        """An event's detail without text that the caller must not see."""
        if self.readable is None or detail is None or kind not in _WITH_ERRORS or queue in self.readable:
            return detail
        return {name: value for name, value in detail.items() if name != "error"} or None


def message_page(store: SqliteStore, key: QueueKey, state: str, after: str, limit: int) -> dict[str, Any]:
    """Up to `limit` messages after the page that ended at `after`: visible ones by sequence, hidden ones by due
    instant. {messages, after}: `after` names the next page and is null at the end. Raises QueueMissing."""
    queue = store.queues.by_key.get(key)
    if queue is None:
        raise QueueMissing(queue=str(key))
    leading, _, trailing = after.partition("-")
    with store.readers.lend() as connection:
        if state == "visible":
            found = rows.visible(connection, queue, int(leading or 0), limit)
        else:
            found = rows.hidden(connection, queue, int(leading or -1), int(trailing or 0), limit)
    following = None
    if len(found) >= limit:
        last = found[-1]
        following = str(last.sequence) if state == "visible" else f"{last.due}-{last.sequence}"
    retention_us = queue.settings.retention_us
    return {"messages": [_message(each, retention_us) for each in found], "after": following}


def _message(held: Held, retention_us: int) -> dict[str, Any]:
    return (
        {
            "id": id_text(held.id),
            "sequence": held.sequence,
            "priority": held.priority,
            "sent": held.sent,
            "expires": shown_instant(held.sent + retention_us if held.own_expiry is None else held.own_expiry),
            "sender": held.sender,
            "body_bytes": held.body_bytes,
        }
        | _lease(held.attempt, held.rotation, held.hidden, held.due, held.granted, held.first)
        | shown_extras(read_extras(held.extras) or NO_EXTRAS)
    )


def _lease(
    attempt: int | None,
    rotation: int | None,
    hidden: int | None,
    due: int | None,
    granted: int | None,
    first: int | None,
) -> dict[str, Any]:
    """A message's state, from its row in `lease` or the lack of one."""
    if attempt is None:
        return {"state": "visible", "receive_count": 0}
    state = "visible" if not hidden else ("in flight" if attempt else "delayed")
    shown = {"state": state, "receive_count": attempt, "rotation": rotation, "due": due, "first_received": first}
    return shown | {"granted": granted} if attempt else shown


class Trace(NamedTuple):
    """The events of one message, oldest first; `complete` if they go back to its send or publish."""

    events: list[EventRecord]
    complete: bool
    scanned: int


def trace(connection: Connection, message: bytes, scan_max: int, scope: Scope) -> Trace:
    """Search up to `scan_max` events, newest first, for the message, including ids that it had before a move task gave
    it a new one. Then search forward for what happened to it: its moves, the purge or deletion of its queue, and
    refusals after it was gone, which name only its sequence."""
    permitted = scope.incarnations(connection)
    sought = _Sought(message)
    start, complete, scanned = _find_first(connection, sought, scan_max)
    if start is None:
        return Trace([], complete, scanned)
    names, errors = Names(connection), scope.errors(connection)
    whereabouts = _Whereabouts()
    found: list[EventRecord] = []
    for first, packed in rows.oldest_first(connection, start, _EVER):
        if not (sought.may_be_in(packed) or whereabouts.may_end_in(packed)):
            continue
        for place, event in enumerate(_EVENTS.decode(packed)):
            mine = sought.takes(event) or (event.message is None and event.sequence in sought.sequences)
            if mine:
                whereabouts.follow(event)
            else:
                mine = whereabouts.ends(event)
            if mine and (permitted is None or event.queue in permitted):
                event.detail = errors.detail(event.kind, event.queue, event.detail)
                found.append(names.record(first + place, event))
    return Trace(found, complete, scanned)


class _Sought:
    """All ids and sequences of one message: a move task changes its id, and every move changes its sequence."""

    def __init__(self, message: bytes) -> None:
        self.ids = {message}
        self.sequences: set[int] = set()

    def may_be_in(self, packed: bytes) -> bool:
        """Whether the packed events may concern the message."""
        # An id is packed as bytes, but as text in a move's new id; a refusal has only the sequence.
        named = any(each in packed or each.hex().encode() in packed for each in self.ids)
        return named or any(_PACKED.encode(each) in packed for each in self.sequences)

    def takes(self, event: Event) -> bool:
        """Whether the event concerns the message; learns new ids and sequences from it."""
        detail = event.detail or {}
        moved = detail.get("target_message")
        ids = {each for each in (event.message, None if moved is None else bytes.fromhex(moved)) if each is not None}
        if self.ids.isdisjoint(ids):
            return False
        self.ids |= ids
        self.sequences |= {each for each in (event.sequence, detail.get("target_sequence")) if each is not None}
        return True


class _Whereabouts:
    """The queues that hold the message, by its sequences: a published message is in several. Events that empty a queue
    do not name its messages."""

    def __init__(self) -> None:
        self._queues: dict[int, int] = {}
        self._emptied: re.Pattern[bytes] | None = None

    def may_end_in(self, packed: bytes) -> bool:
        """Whether the packed events may contain one that empties one of the queues."""
        return self._emptied is not None and self._emptied.search(packed) is not None

    def follow(self, event: Event) -> None:
        """Update the queues from an event of the message."""
        detail = event.detail or {}
        if event.sequence is not None and event.queue is not None:
            if event.kind in _THERE:
                self._queues[event.sequence] = event.queue
            elif event.kind in _GONE:
                self._queues.pop(event.sequence, None)
        if "target_sequence" in detail:
            self._queues[detail["target_sequence"]] = detail["target"]
        self._watch()

    def ends(self, event: Event) -> bool:
        """Whether the event emptied a queue that held the message, which then is gone from there."""
        if event.kind not in _EMPTIED or event.queue not in self._queues.values():
            return False
        self._queues = {sequence: queue for sequence, queue in self._queues.items() if queue != event.queue}
        self._watch()
        return True

    def _watch(self) -> None:
        """Build the pattern of such an event from its first fields: kind, instant and queue, packed in order."""
        queues = b"|".join(re.escape(_PACKED.encode(queue)) for queue in set(self._queues.values()))
        kinds = b"".join(_PACKED.encode(int(kind)) for kind in _EMPTIED)
        self._emptied = re.compile(b"[%b]%b(?:%b)" % (kinds, _PACKED_NUMBER, queues), re.DOTALL) if queues else None


def _find_first(connection: Connection, sought: _Sought, scan_max: int) -> tuple[int | None, bool, int]:
    """The earliest row with the message, whether it contains the send, and the number of events searched."""
    start: int | None = None
    scanned = 0
    for offset, count, packed in rows.newest_first(connection):
        scanned += count
        if sought.may_be_in(packed):
            for event in reversed(_EVENTS.decode(packed)):
                if sought.takes(event):
                    start = offset
                    if event.kind in (Kind.SENT, Kind.PUBLISHED):
                        return start, True, scanned
        if scanned >= scan_max:
            break
    return start, False, scanned


def event_lines(connection: Connection, start: int, stop: int, scope: Scope) -> bytes:
    """The events of these offsets as JSON lines. Raises HistoryTrimmed."""
    check_offset(connection, start)
    permitted = scope.incarnations(connection)
    names, chosen, errors = Names(connection), scope.wanted.chosen(connection), scope.errors(connection)
    stored = takewhile(lambda pair: pair[0] < stop, events_from(connection, start))
    records = []
    for offset, event in stored:
        if not visible(permitted, event.kind, event.queue):
            continue
        if chosen is None or chosen.takes(event.kind, event.queue, event.message, event.detail):
            event.detail = errors.detail(event.kind, event.queue, event.detail)
            records.append(names.record(offset, event))
    return _JSON.encode_lines(records)


def visible(permitted: frozenset[int] | None, kind: int, queue: int | None) -> bool:
    """Whether a caller may see such an event; the begin and end of a snapshot reveal nothing about queues."""
    return permitted is None or queue in permitted or (queue is None and kind == Kind.SNAPSHOT)


def piece_end(connection: Connection, start: int, stop: int) -> int:
    """Where a piece from `start` ends, at most at `stop`: events of a snapshot are large, most others small."""
    while stop - start > 1 and rows.packed_bytes(connection, start, stop) > _PIECE_BYTES_MAX:
        stop = (start + stop) // 2
    return stop


class Range(NamedTuple):
    """Where a reader starts, and the bounds of the history at that moment."""

    start: int
    first: int
    following: int


def find_start(connection: Connection, wanted: str) -> Range:
    """The range from an offset, `first`, `snapshot` or `next` on.

    `snapshot` is the newest offset from which the events give the state: where a complete snapshot begins, or 0. Raises
    HistoryTrimmed; ParameterInvalid beyond the end: such an offset is from another history, and waiting for it could
    last for ever.
    """
    first, following = bounds(connection)
    if wanted in {"first", "next"}:
        return Range(first if wanted == "first" else following, first, following)
    if wanted == "snapshot":
        newest = snapshots.newest(connection)
        if newest is None:
            raise HistoryTrimmed(first)
        return Range(newest, first, following)
    start = int(wanted)
    check_offset(connection, start)
    if start > following:
        raise ParameterInvalid(parameter="from", reason=f"the history ends at offset {following}")
    return Range(start, first, following)


def check_offset(connection: Connection, start: int) -> tuple[int, int]:
    """First and next offset. Raises HistoryTrimmed if `start` is before the first."""
    first, following = bounds(connection)
    if start < first:
        raise HistoryTrimmed(first)
    return first, following


_JSON: Final = msgspec.json.Encoder()


def snapshot_lines(connection: Connection, scope: Scope) -> Iterator[bytes]:
    """A line with the next offset and the clock's mark, one per queue, and one per message.

    All come from one read transaction: applying the events from that offset on gives every later state.
    """
    clock, offset, epoch = rows.head(connection)
    yield _line({"snapshot": {"offset": offset, "at": clock, "epoch": epoch}})
    retention: dict[int, int] = {}
    for incarnation, account, region, name, created, modified, settings in rows.live_queues(connection):
        if not scope.covers(account, name):
            continue
        decoded = SETTINGS_DECODER.decode(settings)
        retention[incarnation] = decoded.retention_us
        queue = shown_key(QueueKey(account, region, name)) | {"incarnation": incarnation, "created": created}
        yield _line({"queue": queue | {"modified": modified, "settings": shown_settings(decoded)}})
    for row in rows.live_messages(connection):
        if row[0] in retention:
            yield _line({"message": _live(row, retention[row[0]])})


def _live(row: tuple[Any, ...], retention_us: int) -> dict[str, Any]:
    incarnation, sequence, message, priority, sent, expires, group, kind, body_bytes, *lease, quarantined = row
    shown = {
        "incarnation": incarnation,
        "sequence": sequence,
        "id": id_text(message),
        "priority": priority,
        "sent": sent,
        "expires": shown_instant(sent + retention_us if expires is None else expires),
        "group": group,
        "type": kind,
        "body_bytes": body_bytes,
    } | _lease(*lease)
    return shown if quarantined is None else shown | {"state": "quarantined"}


def _line(value: dict[str, Any]) -> bytes:
    return _JSON.encode(value) + b"\n"
