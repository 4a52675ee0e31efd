"""Reads the rows and the history of one read transaction (`Readers.lend`) for the rooms above; peeks are in peeks.py.

Strategy: pages are found by index seeks; nothing is counted. The history and the rollups are read in history.py.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import merge
from operator import attrgetter, itemgetter
from typing import Any, Final

import apsw

from veilmq.model.events import Event, HeldMessage, LeaseEnding
from veilmq.model.messages import NO_EXTRAS, marked_id
from veilmq.model.messages.states import Blocked, HeldLease
from veilmq.model.moves import JobInfo, MoveInfo
from veilmq.model.settings.access import StoredSession
from veilmq.model.settings.queue import QueueKey
from veilmq.store.reader import (
    DamagedMessage,
    FoundMessage,
    HeldBy,
    HeldByOrigin,
    ListedMessage,
    QueueState,
    Span,
    StoredQueue,
)
from veilmq.store.rollups import FailingRollups, MinutesOfMany, StoredRollups
from veilmq.store.sqlite.batch import history_index
from veilmq.store.sqlite.batch.memtable import replay
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, SETTINGS_DECODER, LiveQueue
from veilmq.store.sqlite.disk.rows import (
    HELD_COLUMNS,
    HELD_LEASE_COLUMNS,
    ORIGINS,
    Unflushed,
    read_extras,
    resumed,
    rows_of,
)
from veilmq.store.sqlite.messages import PRIORITIES, numbers, oldest_sent
from veilmq.store.sqlite.messages.groups import blocked_of
from veilmq.store.sqlite.messages.groups import heads as heads_of
from veilmq.store.sqlite.messages.groups import leases as leases_of
from veilmq.store.sqlite.reading import history
from veilmq.store.sqlite.reading.history import Names, bounds, events_from
from veilmq.store.sqlite.upkeep import jobs, snapshots
from veilmq.store.sqlite.upkeep.jobs import move_tasks

LEASES_LOOKED_AT_MAX: Final = 20_000
"""Messages in flight or delayed that are looked at to find what they hold back."""
_GRANTED: Final = attrgetter("granted")
_COLUMNS: Final = f"{HELD_COLUMNS}, NULL, m.sender, m.extras"
"""What a `ListedMessage` is made of."""
_SEQUENCE: Final = HeldMessage.__struct_fields__.index("sequence")
_DUE: Final = HeldMessage.__struct_fields__.index("due")
_READY: Final = (
    f"SELECT {_COLUMNS} FROM message m LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.generation = ? AND m.line = ? AND m.in_line = 1 AND m.sequence > ? AND l.sequence IS NULL"
    " ORDER BY m.sequence LIMIT ?"
)
_RETURNED: Final = (
    f"SELECT {_COLUMNS} FROM lease l INDEXED BY lease_returned JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND l.hidden = 0 AND l.line = ? AND l.sequence > ? ORDER BY l.sequence LIMIT ?"
)
_HIDDEN: Final = (
    f"SELECT {_COLUMNS} FROM lease l INDEXED BY lease_hidden JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND l.hidden = 1 AND (l.due, l.sequence) > (?, ?) ORDER BY l.due, l.sequence LIMIT ?"
)
_LEASES: Final = (
    f"SELECT {HELD_LEASE_COLUMNS}"
    " FROM lease l INDEXED BY lease_hidden JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND l.hidden = 1 AND (l.due, l.sequence) > (?, ?) ORDER BY l.due, l.sequence LIMIT ?"
)
_LOOKED_AT: Final = (
    "SELECT sequence, generation, origin, granted, due, attempt, ending FROM lease INDEXED BY lease_hidden"
    " WHERE hidden = 1 AND {} LIMIT :limit"
)
_OF_ALL, _OF_ONE = "generation NOT IN (SELECT generation FROM garbage)", "generation = :generation"
_IS_HELD: Final = f"attempt > 0 AND ending <> {LeaseEnding.RETRY:d}"
_HELD_BY: Final = (
    f"SELECT origin, {_IS_HELD} AS leased, count(*), min(granted) FROM ({_LOOKED_AT}) GROUP BY origin, leased"
)
_OLDEST_HELD: Final = (
    "SELECT h.origin, h.generation, m.id, h.granted, h.due, h.attempt FROM ("
    " SELECT *, row_number() OVER (PARTITION BY origin ORDER BY granted, sequence) AS place"
    f" FROM ({_LOOKED_AT}) WHERE {_IS_HELD}) h CROSS JOIN message m ON m.sequence = h.sequence WHERE h.place <= :each"
)
_KEYS: Final = (
    "SELECT generation, account, region, name FROM queue WHERE deleted IS NULL"
    " AND generation IN (SELECT value FROM carray(?))"
)
_LIVE: Final = (
    f"SELECT q.incarnation, {HELD_COLUMNS}, d.at"
    " FROM message m JOIN queue q ON q.generation = m.generation AND q.deleted IS NULL"
    " LEFT JOIN lease l ON l.sequence = m.sequence LEFT JOIN quarantine d ON d.sequence = m.sequence"
    " WHERE m.sequence > ? ORDER BY m.sequence"
)
_OF_GROUPS: Final = (
    f"SELECT {_COLUMNS} FROM ("
    " SELECT sequence FROM message r INDEXED BY message_line WHERE generation = ?1 AND line > ?2 AND in_line = 1"
    " AND sequence > ?3"
    " AND NOT EXISTS (SELECT 1 FROM lease WHERE sequence = r.sequence)"
    " UNION ALL SELECT sequence FROM lease INDEXED BY lease_returned"
    " WHERE generation = ?1 AND hidden = 0 AND line > ?2 AND sequence > ?3 ORDER BY sequence LIMIT ?4) s"
    " CROSS JOIN message m ON m.sequence = s.sequence LEFT JOIN lease l ON l.sequence = s.sequence"
)
_QUEUE: Final = (
    "SELECT account, region, name, generation, settings FROM queue WHERE incarnation = ? AND deleted IS NULL"
)
_MESSAGE: Final = (
    f"SELECT {HELD_COLUMNS}, d.at, m.sender, m.extras, m.md5, m.body, nullif(l.origin, 0), coalesce(l.ending, 0)"
    " FROM message m LEFT JOIN lease l ON l.sequence = m.sequence LEFT JOIN quarantine d ON d.sequence = m.sequence"
    " WHERE m.sequence = ? AND m.generation = ?"
)
_CONTAINING: Final = (
    "SELECT m.sequence FROM carray(?) c CROSS JOIN message m ON m.sequence = c.value WHERE instr(m.body, ?)"
)
_SESSION: Final = "SELECT proof, key, client, reads_only, opened, used, ends FROM console_session WHERE digest = ?"
_QUARANTINE: Final = "SELECT sequence, generation FROM quarantine WHERE sequence > ? ORDER BY sequence"
_QUARANTINED: Final = (
    "SELECT m.sequence, m.id, d.at, m.sent, m.expires, m.priority, m.sender, m.group_id, m.type, m.md5, m.body,"
    " m.extras FROM quarantine d JOIN message m ON m.sequence = d.sequence WHERE d.sequence = ?"
)
_QUARANTINED_COUNT: Final = (
    "SELECT count(*) FROM quarantine WHERE generation IN (SELECT generation FROM queue WHERE deleted IS NULL)"
)


class SqliteView:
    """See `View`."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def visible(self, queue: QueueState, behind: int, limit: int) -> list[ListedMessage]:
        assert isinstance(queue, LiveQueue)
        unflushed = replay(self._connection, queue.generation).values()
        rows = [_listed(each) for each in unflushed if not each.leased and each.row.sequence > behind]
        for line in list(queue.ready):
            start = max(behind, queue.cursors.get(line, 0))
            rows += rows_of(self._connection, _READY, (queue.generation, line, start, limit))
        for priority in PRIORITIES:
            rows += rows_of(self._connection, _RETURNED, (queue.generation, priority, behind, limit))
        if queue.groups is not None:
            rows += rows_of(self._connection, _OF_GROUPS, (queue.generation, PRIORITY_LINES_MAX, behind, limit))
        rows.sort()
        return [_shown(row) for row in rows[:limit]]

    def hidden(self, queue: QueueState, due: int, sequence: int, limit: int) -> list[ListedMessage]:
        assert isinstance(queue, LiveQueue)
        rows = rows_of(self._connection, _HIDDEN, (queue.generation, due, sequence, limit))
        unflushed = replay(self._connection, queue.generation).values()
        rows += [_listed(each) for each in unflushed if each.leased and (each.due, each.row.sequence) > (due, sequence)]
        return [_shown(row) for row in sorted(rows, key=itemgetter(_DUE, _SEQUENCE))[:limit]]

    def leases(self, queue: QueueState, due: int, sequence: int, limit: int) -> list[HeldLease]:
        assert isinstance(queue, LiveQueue)
        rows = rows_of(self._connection, _LEASES, (queue.generation, due, sequence, limit))
        found = [HeldLease(*row) for row in rows]
        for each in replay(self._connection, queue.generation).values():
            row = each.row
            if each.leased and (each.due, row.sequence) > (due, sequence):
                one = (row.sequence, row.id, 1, 0, each.granted, each.granted, row.group, row.type, each.origin, 0)
                found.append(HeldLease(each.due, *one))
        return sorted(found)[:limit]

    def blocked(self, queue: QueueState, now: int, shown_max: int) -> Blocked:
        assert isinstance(queue, LiveQueue)
        return blocked_of(self._connection, queue, now, LEASES_LOOKED_AT_MAX, shown_max)

    def heads(self, queue: QueueState, now: int, groups: set[str]) -> dict[str, HeldLease]:
        assert isinstance(queue, LiveQueue)
        found, _ = heads_of(self._connection.execute, queue, now, LEASES_LOOKED_AT_MAX)
        wanted = {each.sequence: each.group for each in found if each.group in groups}
        leases = leases_of(self._connection, list(wanted))
        return {wanted[sequence]: lease for sequence, lease in leases.items()}

    def held_by_origin(self, limit: int, each_max: int = 0, queue: QueueState | None = None) -> HeldByOrigin:
        generation, among = _generation(queue)
        bound = {"limit": limit, "generation": generation, "each": each_max}
        rows: list[Any] = self._connection.execute(_HELD_BY.format(among), bound).fetchall()
        found = {origin: (count, oldest) for origin, leased, count, oldest in rows if leased}
        unflushed = [each for each in replay(self._connection, generation).values() if each.leased]
        for each in unflushed:
            count, oldest = found.get(each.origin, (0, each.granted))
            found[each.origin] = (count + 1, min(oldest, each.granted))
        shown: dict[int, list[HeldBy]] = {}
        if each_max:
            stored: list[Any] = self._connection.execute(_OLDEST_HELD.format(among), bound).fetchall()
            shown = self._oldest(stored, unflushed, each_max)
        return HeldByOrigin(found, shown, sum(count for _, _, count, _ in rows) < limit)

    def _oldest(self, rows: list[Any], unflushed: list[Unflushed], each_max: int) -> dict[int, list[HeldBy]]:
        rows += [(each.origin, each.row.generation, each.row.id, each.granted, each.due, 1) for each in unflushed]
        if not rows:
            return {}
        keys: Any = self._connection.execute(_KEYS, (numbers(list({row[1] for row in rows})),))
        names = {of: QueueKey(*key) for of, *key in keys}
        found: dict[int, list[HeldBy]] = {}
        for origin, of, *held in rows:
            if of in names:
                found.setdefault(origin, []).append(HeldBy(names[of], *held))
        return {origin: sorted(held, key=_GRANTED)[:each_max] for origin, held in found.items()}

    def containing(self, queue: QueueState, sequences: list[int], text: str) -> set[int]:
        assert isinstance(queue, LiveQueue)
        sought, unflushed = text.encode(), replay(self._connection, queue.generation)
        rows: list[tuple[Any, ...]] = self._connection.execute(_CONTAINING, (numbers(sequences), sought)).fetchall()
        found = {sequence for (sequence,) in rows}
        return found | {each for each in sequences if each in unflushed and sought in unflushed[each].row.body}

    def message(self, incarnation: int, sequence: int) -> FoundMessage | None:
        queue: Any = self._connection.execute(_QUEUE, (incarnation,)).fetchone()
        if queue is None:
            return None
        *key, generation, packed = queue
        unflushed = replay(self._connection, generation).get(sequence)
        row: Any
        if unflushed is None:
            row = next(iter(rows_of(self._connection, _MESSAGE, (sequence, generation))), None)
        else:
            holder = unflushed.origin if unflushed.leased else None
            row = (*_listed(unflushed), unflushed.row.md5, unflushed.row.body, holder, 0)
        if row is None:
            return None
        retention_us = SETTINGS_DECODER.decode(packed).retention_us
        *listed, digest, body, holder, ending = row
        return FoundMessage(QueueKey(*key), retention_us, _shown(tuple(listed)), digest, body, holder, ending)

    def quarantined(
        self, wanted: Callable[[QueueKey], bool], behind: int, limit: int, body_bytes_max: int
    ) -> tuple[list[DamagedMessage], bool]:
        keys: dict[int, QueueKey] = {}
        found: list[DamagedMessage] = []
        body_bytes = 0
        for sequence, generation in self._connection.cursor().execute(_QUARANTINE, (behind,)):
            keys = keys or self._live_keys()  # most often nothing is in quarantine, and there may be 100,000 queues
            key = keys.get(generation)
            if key is None or not wanted(key):
                continue
            if len(found) >= limit or body_bytes >= body_bytes_max:
                return found, True
            for row in rows_of(self._connection, _QUARANTINED, (sequence,)):
                cells: list[Any] = [*row, read_extras(row[-1])]
                found.append(DamagedMessage(key, *cells))
                body_bytes += len(found[-1].body)
        return found, False

    def _live_keys(self) -> dict[int, QueueKey]:
        """Queues by generation."""
        live = self._connection.execute("SELECT generation, account, region, name FROM queue WHERE deleted IS NULL")
        return {generation: QueueKey(*names) for generation, *names in live}

    def quarantined_count(self) -> int:
        return int(self._connection.execute(_QUARANTINED_COUNT).get)

    def oldest_sent(self, queues: Iterable[tuple[QueueState, list[int]]]) -> dict[int, int]:
        """See `View.oldest_sent`: an index seek a line; more only for groups and messages that were given back."""
        found = {}
        execute = self._connection.execute
        unflushed = oldest_unflushed(self._connection)
        for queue, lines in queues:
            assert isinstance(queue, LiveQueue)
            if queue.visible or queue.in_flight:
                returned, grouped = queue.returned > 0, queue.groups is not None
                stored = oldest_sent(execute, queue.generation, lines, returned=returned, grouped=grouped)
                each = (stored, unflushed.get(queue.generation))
                sent = min((instant for instant in each if instant is not None), default=None)
                if sent is not None:
                    found[queue.incarnation] = sent
        return found

    def rollups(self, incarnation: int, first: int, last: int, *, hours: bool) -> StoredRollups:
        """See `View.rollups`: an index seek for each minute or hour."""
        return history.stored(self._connection, incarnation, hours, first, last)

    def minutes(self, incarnations: Sequence[int], first: int, last: int) -> MinutesOfMany:
        return history.of_many(self._connection, incarnations, first, last)

    def failing_rollups(self, first: int, last: int, rows_max: int, limit: int) -> FailingRollups:
        return history.failing(self._connection, first, last, rows_max, limit)

    def moves(self, count_max: int) -> list[MoveInfo]:
        return move_tasks.every(self._connection, count_max)

    def jobs(self) -> list[JobInfo]:
        return jobs.every(self._connection)

    def session(self, digest: bytes) -> StoredSession | None:
        for proof, key, client, reads_only, *instants in rows_of(self._connection, _SESSION, (digest,)):
            return StoredSession(digest, proof, key, client, bool(reads_only), *instants)
        return None

    def job(self, id_: bytes) -> JobInfo | MoveInfo | None:
        return jobs.find(self._connection, id_) or move_tasks.find(self._connection, id_)

    def head(self) -> tuple[int, int, str]:
        rows: Any = self._connection.execute("SELECT clock, offset, lower(hex(epoch)) FROM mark, secret")
        ((clock, offset, epoch),) = rows
        return clock, offset, epoch

    def live_queues(self) -> Iterator[StoredQueue]:
        rows: list[tuple[Any, ...]] = self._connection.execute(
            "SELECT incarnation, account, region, name, created, modified, settings FROM queue WHERE deleted IS NULL"
            " ORDER BY incarnation"
        ).fetchall()
        for incarnation, account, region, name, created, modified, settings in rows:
            key = QueueKey(account, region, name)
            yield StoredQueue(incarnation, key, created, modified, SETTINGS_DECODER.decode(settings))

    def live_messages(self) -> Iterator[tuple[int, HeldMessage]]:
        stored = resumed(self._connection, _LIVE, place=1)
        for incarnation, *held in merge(stored, _live_unflushed(self._connection), key=itemgetter(1)):
            yield incarnation, HeldMessage(*held)

    def incarnations(self, account: str) -> list[tuple[int, str]]:
        rows = self._connection.execute("SELECT incarnation, name FROM queue WHERE account = ?", (account,))
        return [(incarnation, name) for incarnation, name in rows]

    def incarnations_named(self, *key: str) -> list[int]:
        where = "name = ?" if len(key) == 1 else "account = ? AND region = ? AND name = ?"
        return [found for (found,) in self._connection.execute(f"SELECT incarnation FROM queue WHERE {where}", key)]

    def lives(self, key: QueueKey) -> list[tuple[int, int, int | None]]:
        found: list[Any] = self._connection.execute(
            "SELECT incarnation, created, deleted FROM queue WHERE account = ? AND region = ? AND name = ?"
            " ORDER BY incarnation", (key.account, key.region, key.name)
        ).fetchall()  # fmt: skip
        return found

    def bounds(self) -> tuple[int, int]:
        return bounds(self._connection)

    def newest_snapshot(self) -> int | None:
        return snapshots.newest(self._connection)

    def snapshots(self) -> list[tuple[int, int]]:
        return snapshots.complete(self._connection, self.bounds())

    def offset_after(self, instant: int) -> int:
        return history.offset_after(self._connection, instant)

    def commits(self, start: int, stop: int) -> Iterator[tuple[int, int, int, bytes]]:
        return history.commits(self._connection, start, stop)

    def events_from(self, start: int) -> Iterator[tuple[int, Event]]:
        return events_from(self._connection, start)

    def names(self) -> Names:
        return Names(self)

    def spans(self, ids: Collection[bytes], sequences: Iterable[int], emptied: Iterable[int]) -> list[Span]:
        numbers = (*map(history_index.sequence_name, sequences), *map(history_index.emptied_name, emptied))
        return history_index.spans(self._connection, self.bounds(), (*ids, *numbers))

    def spans_of_sends(self, deduplication_id: str) -> list[Span]:
        sought = history_index.deduplication_name(marked_id(bytes(16), deduplication_id))
        return history_index.spans(self._connection, self.bounds(), (sought,))

    def oldest_first(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        rows: Iterator[Any] = self._connection.cursor().execute(
            "SELECT offset, events FROM history WHERE offset >="
            " coalesce((SELECT max(offset) FROM history WHERE offset <= ?), 0) AND offset < ? ORDER BY offset",
            (start, stop),
        )
        return rows

    def packed_bytes(self, start: int, stop: int) -> int:
        found: Any = self._connection.execute(
            "SELECT (SELECT bytes_before FROM history WHERE offset < ?2 ORDER BY offset DESC LIMIT 1)"
            " - (SELECT bytes_before FROM history WHERE offset <= ?1 ORDER BY offset DESC LIMIT 1)", (start, stop)
        ).fetchone()  # fmt: skip
        return found[0] or 0

    def queue_names(self, incarnation: int) -> tuple[Any, ...] | None:
        return self._connection.execute(
            "SELECT account, region, name FROM queue WHERE incarnation = ?", (incarnation,)
        ).fetchone()

    def origin_names(self, number: int) -> tuple[Any, ...] | None:
        return next((names for _, *names in rows_of(self._connection, f"{ORIGINS} WHERE o.id = ?", (number,))), None)


def _generation(queue: QueueState | None) -> tuple[int | None, str]:
    """The queue's generation, and which leases are looked at: its own; None: those of all queues."""
    if queue is None:
        return None, _OF_ALL
    assert isinstance(queue, LiveQueue)
    return queue.generation, _OF_ONE


def _shown(row: tuple[Any, ...]) -> ListedMessage:
    cells: list[Any] = [*row[:-1], read_extras(row[-1]) or NO_EXTRAS]
    return ListedMessage(*cells)


def _listed(unflushed: Unflushed) -> tuple[Any, ...]:
    """An unflushed message, in the form in which the selects return others (`_COLUMNS`)."""
    return (*_held(unflushed), unflushed.row.sender, unflushed.row.packed)


def _held(unflushed: Unflushed) -> tuple[Any, ...]:
    """The values of its `HeldMessage`."""
    row = unflushed.row
    lease = (1, 0, 1, unflushed.due, unflushed.granted, unflushed.granted) if unflushed.leased else (None,) * 6
    message = (row.sequence, row.id, row.priority, row.sent, row.own_expiry, row.group, row.type, len(row.body))
    return (*message, *lease, None)


def oldest_unflushed(connection: apsw.Connection) -> dict[int, int]:
    """When each queue's oldest unflushed message was sent, by generation; `oldest_sent` does not see them."""
    return {unflushed.row.generation: unflushed.row.sent for unflushed in reversed(replay(connection).values())}


def _live_unflushed(connection: apsw.Connection) -> Iterator[tuple[Any, ...]]:
    incarnations = dict(connection.execute("SELECT generation, incarnation FROM queue WHERE deleted IS NULL"))
    for unflushed in replay(connection).values():
        incarnation = incarnations.get(unflushed.row.generation)
        if incarnation is not None:
            yield (incarnation, *_held(unflushed))
