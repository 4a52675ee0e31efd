"""Reads of many rows: a snapshot, the packed history, lists; beside it pages of messages, traces, events by offset.

Strategy: functions of a `View`, one committed state of the store; they block and belong in a thread, and know nothing
of HTTP: the command line uses them on a directory that no server holds. `Scope` cuts every one of them down to what a
key may see. `feed` has the routes, `copies` bounds how many snapshots and backups are being sent.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any, Final, NamedTuple

import msgspec

from veilmq.admin.api.inputs import Wanted
from veilmq.admin.api.views import shown_instant, shown_key, shown_lease, shown_settings
from veilmq.model.errors import ParameterInvalid
from veilmq.model.events import HeldMessage, HistoryTrimmed, Kind
from veilmq.model.instant import Instant
from veilmq.model.messages import id_text
from veilmq.model.moves import MoveInfo
from veilmq.model.settings.access import AccessKey, Action
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import TopicKey
from veilmq.store import Reader, View
from veilmq.store.reader import QueueState

MOVES_MAX: Final = 10_000
_PIECE_BYTES_MAX: Final = 2_000_000
"""Bound of packed events; decoded, they are twenty times as large."""
_WITH_ERRORS: Final = frozenset({Kind.RELEASED_FOR_RETRY, Kind.DEAD_LETTERED})
_JSON: Final = msgspec.json.Encoder()
_PACKED: Final = msgspec.msgpack.Encoder()
NUMBER: Final = rb"(?:\xcf.{8}|\xce.{4}|\xcd..|\xcc.|[\x00-\x7f])"
"""An unsigned number in MessagePack."""


def packed_beginning(incarnation: int, kinds: Iterable[int] = range(128)) -> bytes:
    """A pattern of the first fields (kind, instant, queue) of a packed event of the queue, to be compiled with DOTALL:
    a commit that has none of them need not be decoded."""
    ones = b"".join(re.escape(_PACKED.encode(int(kind))) for kind in kinds)
    return rb"\xdc\x00.[%b]%b%b" % (ones, NUMBER, re.escape(_PACKED.encode(incarnation)))


class Scope(NamedTuple):
    """What a caller may see: everything without a key, else what the key is granted in its account."""

    key: AccessKey | None = None
    action: Action = Action.EVENTS
    wanted: Wanted = Wanted()
    """The requested filter."""
    bodies: bool = True
    """Whether bodies may be read at all."""

    def covers(self, account: str, name: str) -> bool:
        """Whether that account's queue is in the scope."""
        return self.key is None or (account == self.key.account and self.key.allows(self.action, name))

    def incarnations(self, view: View) -> frozenset[int] | None:
        """All queues in it that the history can name, deleted ones too; None: whatever there is."""
        if self.key is None:
            return None
        account = self.key.account
        named = view.incarnations(account)
        return frozenset(incarnation for incarnation, name in named if self.covers(account, name))

    def errors(self, view: View) -> "Errors":
        """What the key may see of workers' errors: everything, where it may read bodies."""
        if not self.bodies:
            return Errors(frozenset())
        if self.key is None:
            return Errors(None)
        return Errors(self._replace(action=Action.PEEK).incarnations(view))


class Errors(NamedTuple):
    """A worker's error may quote a body, so its text is only for callers that may read the body."""

    readable: frozenset[int] | None
    """Queues whose bodies the caller may read; None: all."""

    def detail(self, kind: int, queue: int | None, detail: dict[str, Any] | None) -> dict[str, Any] | None:
        """An event's detail without text that the caller must not see."""
        if self.readable is None or detail is None or kind not in _WITH_ERRORS or queue in self.readable:
            return detail
        return {name: value for name, value in detail.items() if name != "error"} or None


def event_lines(view: View, start: int, stop: int, scope: Scope) -> bytes:
    """The events of these offsets as JSON lines. Raises HistoryTrimmed."""
    check_offset(view, start)
    permitted = scope.incarnations(view)
    names, chosen, errors = view.names(), scope.wanted.chosen(view), scope.errors(view)
    stored = takewhile(lambda pair: pair[0] < stop, view.events_from(start))
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


def piece_end(view: View, start: int, stop: int) -> int:
    """Where a piece that begins at `start` may end, up to `stop`: events of a snapshot are large, most others small."""
    while stop - start > 1 and view.packed_bytes(start, stop) > _PIECE_BYTES_MAX:
        stop = (start + stop) // 2
    return stop


class Range(NamedTuple):
    """Where a reader starts, and the bounds of the history at that moment."""

    start: int
    first: int
    following: int


def find_start(view: View, wanted: str) -> Range:
    """The range behind an offset, `first`, `snapshot` or `next`.

    `snapshot` is the newest offset from which the events give the state: where a complete snapshot begins, or 0. Raises
    HistoryTrimmed; ParameterInvalid beyond the end: such an offset is from another history, and waiting for it could
    last for ever.
    """
    first, following = view.bounds()
    if wanted in {"first", "next"}:
        return Range(first if wanted == "first" else following, first, following)
    if wanted == "snapshot":
        newest = view.newest_snapshot()
        if newest is None:
            raise HistoryTrimmed(first)
        return Range(newest, first, following)
    start = int(wanted)
    check_offset(view, start)
    if start > following:
        raise ParameterInvalid(parameter="from", reason=f"the history ends at offset {following}")
    return Range(start, first, following)


def check_offset(view: View, start: int) -> tuple[int, int]:
    """First and next offset. Raises HistoryTrimmed if `start` is before the first."""
    first, following = view.bounds()
    if start < first:
        raise HistoryTrimmed(first)
    return first, following


def snapshot_lines(view: View, scope: Scope) -> Iterator[bytes]:
    """A line with the next offset and the clock's mark, one for each queue, one for each message that a queue holds.

    All come from one read transaction: applying the events from that offset on gives every later state.
    """
    clock, offset, epoch = view.head()
    yield _line({"snapshot": {"offset": offset, "at": clock, "epoch": epoch}})
    retention: dict[int, int] = {}
    for found in view.live_queues():
        if not scope.covers(found.key.account, found.key.name):
            continue
        retention[found.incarnation] = found.settings.retention_us
        queue = shown_key(found.key) | {"incarnation": found.incarnation, "created": found.created}
        yield _line({"queue": queue | {"modified": found.modified, "settings": shown_settings(found.settings)}})
    for incarnation, held in view.live_messages():
        if incarnation in retention:
            yield _line({"message": {"incarnation": incarnation} | _live(held, retention[incarnation])})


def _live(held: HeldMessage, retention_us: int) -> dict[str, Any]:
    shown = {
        "sequence": held.sequence,
        "id": id_text(held.id),
        "priority": held.priority,
        "sent": held.sent,
        "expires": shown_instant(held.sent + retention_us if held.own_expiry is None else held.own_expiry),
        "group": held.group,
        "type": held.type,
        "body_bytes": held.body_bytes,
    } | shown_lease(held)
    return shown if held.quarantined is None else shown | {"state": "quarantined"}


def _line(value: dict[str, Any]) -> bytes:
    return _JSON.encode(value) + b"\n"


def oldest_ages_us(reader: Reader, queues: Iterable[tuple[QueueState, list[int]]], now: Instant) -> dict[int, int]:
    """By incarnation, for queues with messages; with each queue its lines, as the loop saw them. Blocks."""
    with reader.look() as view:
        return {incarnation: max(0, now - sent) for incarnation, sent in view.oldest_sent(queues).items()}


def covers(key: TopicKey | QueueKey, account: str, region: str | None, prefix: str) -> bool:
    """Whether the key is requested; account `*` and region None mean all."""
    return account in ("*", key.account) and region in (None, key.region) and key.name.startswith(prefix)


def topics_of(reader: Reader, account: str, region: str | None, prefix: str) -> list[TopicKey]:
    """Topics by their keys; account `*` and region None mean all."""
    return sorted((key for key in reader.topics if covers(key, account, region, prefix)), key=str)


def all_moves(reader: Reader) -> list[MoveInfo]:
    """The latest tasks of all queues, newest first, those of one instant by id. Blocks."""
    with reader.look() as view:
        found = view.moves(MOVES_MAX)
    return sorted(found, key=lambda task: (task.started, task.id), reverse=True)
