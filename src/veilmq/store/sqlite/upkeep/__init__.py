"""Clean-up in bounded steps: ended leases return, expired messages go, old history is trimmed.

Strategy: correctness never depends on the sweeper (claims and uses of a handle check for themselves). It wakes parked
receives, keeps counts close to the truth, and frees space. Each call processes at most `steps_max` rows, so that no
answer waits behind a million of them. A snapshot in progress gets that many steps in each call, whatever else there is
to do: the history can only be trimmed up to the last complete one.
"""

from typing import Final

import msgspec

from veilmq.model.commands import CheckClock, RecordPeek, RecordPolls, Sweep
from veilmq.model.events import Event, Kind
from veilmq.model.instant import FOREVER, MINUTE_US
from veilmq.model.outcomes import ClockChecked, Outcome, Recorded, Swept
from veilmq.store import MIB, Options
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue
from veilmq.store.sqlite.leases.expiry import expire, return_due
from veilmq.store.sqlite.messages import Place, find_places, numbers
from veilmq.store.sqlite.messages.dead_letters import remove_rows
from veilmq.store.sqlite.messages.groups import FIRST_OF_GROUPS, update_rows
from veilmq.store.sqlite.settings import fifo_delays
from veilmq.store.sqlite.upkeep import jobs, operators, trimming
from veilmq.store.sqlite.upkeep.jobs import move_tasks
from veilmq.store.sqlite.upkeep.rollups import Rolling
from veilmq.store.sqlite.upkeep.snapshots import Snapshots
from veilmq.store.sqlite.upkeep.trimming import Origins, ReadPins

GARBAGE_BYTES_MAX: Final = MIB
"""How many bytes of bodies one step may free: SQLite takes long to free the pages of large ones."""
GENERATIONS_MAX: Final = 256
"""How many deleted or purged queues one step examines."""
SHARES_MAX: Final = 4
"""How many times its steps a step may spend on the rows of many garbage generations (1,024 rows are about 8 ms)."""
_GENERATIONS_A_SHARE: Final = 16
EXPIRED_BYTES_MAX: Final = 8 * MIB
"""How many bytes of expired messages' bodies one step may drop."""
LOOKS_MAX: Final = 64
"""In how many queues one step looks for expired messages: all may be due at once, as after a start."""
_HISTORY_ROWS_MAX: Final = 32
_VACUUM_PAGES: Final = 256
_FREE_PAGES_KEPT: Final = 4096
_WINDOWS: Final = {"deduplication": "sequence", "receive_attempt": "number"}
"""Tables whose rows all live equally long, each with the column that orders them: those first that end first."""
_SIZED: Final = (
    "SELECT json_group_array(json_array(f.sequence, (SELECT length(body) FROM message WHERE sequence = f.sequence)))"
    " FROM ({rows}) f"
)
_GARBAGE: Final = tuple(
    f"SELECT sequence FROM {which} AND generation IN (SELECT value FROM carray(?1)) LIMIT ?2"
    for which in (
        "lease INDEXED BY lease_hidden WHERE hidden = 1",
        "lease INDEXED BY lease_returned WHERE hidden = 0",
        "message INDEXED BY message_line WHERE in_line = 1",
        "quarantine WHERE true",
    )
)
"""Every row of a message is in one of them."""
_SIZED_DECODER: Final = msgspec.json.Decoder(list[tuple[int, int | None]])
_GROUPS: Final = (
    "SELECT json_group_array(number) FROM (SELECT number FROM message_group"
    " WHERE generation IN (SELECT value FROM carray(?)) LIMIT ?)"
)
_GROUPS_DECODER: Final = msgspec.json.Decoder(list[int])
_FIRST_BY_EXPIRY: Final = (
    "SELECT sequence, expires AS ends FROM message INDEXED BY message_expiry"
    " WHERE generation = ? AND expires IS NOT NULL"
    " AND sequence NOT IN (SELECT sequence FROM quarantine) ORDER BY expires LIMIT ?"
)
_FIRST_IN_LINE: Final = (
    "SELECT sequence, coalesce(expires, sent + ?2) AS ends FROM message INDEXED BY message_line"
    " WHERE generation = ?1 AND line = ?3 AND in_line = 1 AND sequence > ?4 ORDER BY sequence LIMIT ?5"
)
_LINES_OF_ALL: Final = f"(VALUES {', '.join(f'({priority})' for priority in range(1, PRIORITY_LINES_MAX + 1))}) p"
_FIRST_RETURNED: Final = (
    "SELECT m.sequence, coalesce(m.expires, m.sent + ?2) AS ends FROM"
    " (SELECT sequence FROM lease INDEXED BY lease_returned"
    "  WHERE generation = ?1 AND hidden = 0 ORDER BY line, sequence LIMIT ?3) l"
    " CROSS JOIN message m ON m.sequence = l.sequence"
    " UNION ALL SELECT m.sequence, coalesce(m.expires, m.sent + ?2) FROM"
    f" {_LINES_OF_ALL} CROSS JOIN message m ON m.sequence = (SELECT sequence FROM lease INDEXED BY lease_returned"
    "  WHERE generation = ?1 AND hidden = 0 AND line = p.column1 ORDER BY sequence LIMIT 1)"
)
"""Some returned messages, and the first of each priority, so that many of one priority do not hide the others."""
_FIRST_OF_LINES: Final = (
    f"SELECT m.sequence, coalesce(m.expires, m.sent + ?2) AS ends FROM {_LINES_OF_ALL}"
    " CROSS JOIN message m ON m.sequence IN (SELECT sequence FROM message INDEXED BY message_line"
    "  WHERE generation = ?1 AND line = p.column1 AND in_line = 1 ORDER BY sequence LIMIT ?3)"
)
"""The first of each priority's line, also those before its cursor: they are in flight, or were returned."""
_HIDDEN: Final = (
    "(SELECT * FROM (SELECT sequence, due FROM lease INDEXED BY lease_hidden"
    "  WHERE generation = ?1 AND hidden = 1 AND due = ?4 AND sequence < ?5 ORDER BY sequence DESC LIMIT ?3)"
    " UNION ALL SELECT * FROM (SELECT sequence, due FROM lease INDEXED BY lease_hidden"
    "  WHERE generation = ?1 AND hidden = 1 AND due < ?4 ORDER BY due DESC, sequence DESC LIMIT ?3) LIMIT ?3)"
)
_ENDS_OF_HIDDEN: Final = (
    "SELECT json_group_array(json_array(m.sequence, coalesce(m.expires, m.sent + ?2), l.due))"
    f" FROM {_HIDDEN} l CROSS JOIN message m ON m.sequence = l.sequence"
)
_HIDDEN_DECODER: Final = msgspec.json.Decoder(list[tuple[int, int, int]])
_ENDS: Final = "SELECT json_group_array(json_array(sequence, ends)) FROM ({rows})"
_ENDS_DECODER: Final = msgspec.json.Decoder(list[tuple[int, int]])


def sweep(
    writer: Writer,
    command: Sweep,
    options: Options,
    snapshots: Snapshots,
    pins: ReadPins,
    origins: Origins,
    rolling: Rolling,
) -> Outcome:
    """Run one bounded step."""
    rolling.step(writer, options)
    left = command.steps_max
    left -= _return_all(writer, left)
    if left > 0:
        # Something is left for the rest, however much garbage there is.
        left -= min(_collect(writer, left), max(1, left * 3 // 4))
    retimed = fifo_delays.carry_on(writer, left) if left > 0 else 0
    left -= retimed
    if left > 0:
        left -= _expire_all(writer, left)
    for table, order in _WINDOWS.items():
        if left > 0:
            left -= _drop_ended(writer, table, order, left)
    if left > 0:
        left -= min(left, operators.drop_old(writer))
    operators.drop_sessions(writer)
    more = left <= 0 or retimed > 0 or writer.read_one("SELECT 1 FROM garbage", ()) is not None
    if left > 0:
        rows_max = min(left, _HISTORY_ROWS_MAX)
        floor = snapshots.floor(writer)
        trimmed = trimming.trim(writer, options, floor, pins, rows_max)
        if trimmed and floor is None:
            snapshots.trimmed(writer)
        left -= trimmed
        forgotten = trimming.forget_queues(writer)
        more = more or trimmed == rows_max or forgotten == trimming.FORGOTTEN_MAX
        origins.step(writer, is_trimming=trimmed == rows_max)
    more = move_tasks.carry_on(writer) or more
    more = jobs.carry_on(writer) or more or writer.queues.expiry.is_due(writer.expiry_now)
    _give_back(writer)
    awaited = writer.shipping is not None and writer.shipping.awaits_record
    writer.wrote = writer.wrote or writer.index.is_full(writer.mark.offset) or awaited
    snapshots.step(writer, options, command.steps_max)
    return Swept(command.steps_max - left, more, snapshots.under_way)


def check_clock(writer: Writer, command: CheckClock) -> Outcome:
    """Report the steps of the clock that nobody has accepted; if it is accepted, let what it kept expire."""
    before_us = writer.held_us
    if command.accept and command.ahead_us < before_us:
        writer.hold(command.ahead_us)
    return ClockChecked(writer.held_us, before_us - writer.held_us)


def record_polls(writer: Writer, command: RecordPolls) -> Outcome:
    """Record the poll counts of a minute."""
    for poll in command.polls:
        queue = writer.queues.by_key.get(poll.queue)
        detail = {"receives": poll.receives, "empty": poll.empty, "refused": poll.refused}
        incarnation = None if queue is None else queue.incarnation
        writer.events.append(Event(Kind.POLLED, writer.now, incarnation, writer.origin(poll.origin), detail=detail))
    return Recorded()


def record_peek(writer: Writer, command: RecordPeek, queue: LiveQueue) -> Outcome:
    """Record who read a body."""
    origin = writer.origin(command.origin)
    event = Event(Kind.PEEKED, writer.now, queue.incarnation, origin, command.message, command.sequence)
    writer.events.append(event)
    return Recorded()


def _return_all(writer: Writer, steps_max: int) -> int:
    steps = 0
    for incarnation in writer.queues.due.due(writer.now):
        queue = writer.queues.by_incarnation.get(incarnation)
        if queue is not None and queue.next_due <= writer.now:
            steps += max(1, return_due(writer, queue, steps_max - steps))
            if steps >= steps_max:
                break
    return steps


def _collect(writer: Writer, steps_max: int) -> int:
    """Delete rows of garbage generations: first those with a lease row, then those in lines, then the rest. Returns how
    many.

    One step takes many generations, for clients that create and delete queues make one of each; and the more there are,
    the more rows.
    """
    found = writer.read("SELECT generation FROM garbage LIMIT ?", (GENERATIONS_MAX,))
    if not found:
        return 0
    generations = [generation for (generation,) in found]
    left = rows_max = steps_max * min(1 + len(generations) // _GENERATIONS_A_SHARE, SHARES_MAX)
    bytes_left = GARBAGE_BYTES_MAX
    for rows in _GARBAGE:
        sized = writer.read_packed(_SIZED.format(rows=rows), (numbers(generations), left), _SIZED_DECODER)
        sequences = _within_bytes(sized, bytes_left)
        if sequences:
            remove_rows(writer, sequences)
            writer.write(
                "DELETE FROM quarantine WHERE sequence IN (SELECT value FROM carray(?))", (numbers(sequences),)
            )
        left -= len(sequences)
        bytes_left -= sum(body_bytes or 0 for _, body_bytes in sized)
        if left <= 0 or bytes_left <= 0:
            return rows_max - left
    groups = writer.read_packed(_GROUPS, (numbers(generations), left), _GROUPS_DECODER)
    if groups:
        writer.write("DELETE FROM message_group WHERE number IN (SELECT value FROM carray(?))", (numbers(groups),))
    left -= len(groups)
    if left > 0:  # nothing of these generations is left
        writer.write("DELETE FROM garbage WHERE generation IN (SELECT value FROM carray(?))", (numbers(generations),))
        left -= len(generations)
    return rows_max - left


def _within_bytes(sized: list[tuple[int, int | None]], bytes_max: int) -> list[int]:
    """As many of the messages (sequence, body bytes) as fit into `bytes_max`, but at least one."""
    total = 0
    sequences: list[int] = []
    for sequence, body_bytes in sized:
        total += body_bytes or 0
        if total > bytes_max and sequences:
            break
        sequences.append(sequence)
    return sequences


def _expire_all(writer: Writer, steps_max: int) -> int:
    steps = looks = 0
    for incarnation in writer.queues.expiry.due(writer.expiry_now):
        queue = writer.queues.by_incarnation.get(incarnation)
        if queue is not None and queue.next_expiry <= writer.expiry_now:
            steps += _expire_queue(writer, queue, steps_max - steps)
            looks += 1
            if steps >= steps_max or looks >= LOOKS_MAX:
                break
    return steps


def _expire_queue(writer: Writer, queue: LiveQueue, steps_max: int) -> int:
    """Expire the first messages of each order in a queue, and find out when to check it next."""
    writer.touch(queue)
    queue.next_expiry = FOREVER
    heads = _heads(writer, queue, steps_max)
    dead = [sequence for sequence, expires in heads.items() if expires <= writer.expiry_now]
    places = find_places(writer, dead[:steps_max]) if dead else {}
    gone: list[Place] = []
    steps = body_bytes = 0
    for place in places.values():
        if place.generation == queue.generation:
            gone.append(place)
            steps += 1
            body_bytes += place.body_bytes
            if body_bytes >= EXPIRED_BYTES_MAX:
                steps = steps_max
                break
    if gone:
        expire(writer, queue, *gone)
        update_rows(writer, queue)
        writer.queues.lower_expiry(queue, writer.expiry_now)  # more may follow the first ones
    elif queue.in_flight or queue.delayed or queue.visible:
        # One bound per check: a second one, days away, would stay in the heap for days.
        following = [expires for expires in heads.values() if expires > writer.expiry_now]
        writer.queues.lower_expiry(queue, min(*following, writer.expiry_now + MINUTE_US, FOREVER))
    return steps


def _heads(writer: Writer, queue: LiveQueue, count: int) -> dict[int, int]:
    """Messages that may have expired, and their expiry: the first by own expiry, of each line, of the returned ones,
    and some of the hidden ones."""
    generation, retention_us = queue.generation, queue.settings.retention_us

    def first(rows: str, *values: int) -> list[tuple[int, int]]:
        return writer.read_packed(_ENDS.format(rows=rows), (generation, *values), _ENDS_DECODER)

    found = first(_FIRST_BY_EXPIRY, count)
    for priority, ready in queue.ready.items():
        if ready:
            cursor = queue.cursors.get(priority, 0)
            found += first(_FIRST_IN_LINE, retention_us, priority, cursor, count)
    if queue.groups is not None:
        found += first(FIRST_OF_GROUPS, retention_us, count)
    if queue.returned:
        found += first(_FIRST_RETURNED, retention_us, count)
    if queue.in_flight or queue.delayed:
        if not queue.settings.fifo:
            found += first(_FIRST_OF_LINES, retention_us, max(1, count // PRIORITY_LINES_MAX))
        found += _hidden(writer, queue, count)
    return dict(found)


def _hidden(writer: Writer, queue: LiveQueue, count: int) -> list[tuple[int, int]]:
    """The next `count` messages in flight or delayed, and their expiry: each look takes others, from the longest lease
    down, since those of short leases come back before they matter."""
    values = (queue.generation, queue.settings.retention_us, count, *queue.looked)
    rows = writer.read_packed(_ENDS_OF_HIDDEN, values, _HIDDEN_DECODER)
    queue.looked = (rows[-1][2], rows[-1][0]) if len(rows) == count else (FOREVER, 0)
    return [(sequence, ends) for sequence, ends, _ in rows]


def _drop_ended(writer: Writer, table: str, order: str, rows_max: int) -> int:
    """Drop ended rows from the front of a table in `_WINDOWS`; returns how many."""
    row = writer.read_one(
        f"SELECT count(*), max({order}) FROM (SELECT {order}, ends FROM {table} ORDER BY {order} LIMIT ?)"
        " WHERE ends <= ?", (rows_max, writer.now)
    )  # fmt: skip
    assert row is not None
    if row[0]:
        writer.write(f"DELETE FROM {table} WHERE {order} <= ?", (row[1],))
    return int(row[0])


def _give_back(writer: Writer) -> None:
    """Return free pages to the file system, a few at a time; keep some to grow into."""
    free = writer.read_one("PRAGMA freelist_count", ())
    if free is not None and free[0] > _FREE_PAGES_KEPT:
        writer.wrote = True
        writer.read(f"PRAGMA incremental_vacuum({min(_VACUUM_PAGES, free[0] - _FREE_PAGES_KEPT)})", ())
