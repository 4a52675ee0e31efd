"""Checks a data directory: the file, every body, every lease, and the books of every queue. Beside it the backup, which
is checked before it is kept.

Strategy: read in one transaction, plus what the redo log has beyond it, so that a running server's database is checked
as one committed state. Each page has a checksum, but for files of older releases; a body has an MD5, attributes have a
CRC-32, and the rest is compared with what the history recorded of it (books.py) or with what is possible.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from hashlib import md5
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.instant import DAY_US, HOUR_US, SECOND_US
from veilmq.model.moves import Act, Filter, MoveFailure, MoveStatus
from veilmq.model.settings.queue import PlanState, QueueKey
from veilmq.model.settings.topic import SubscriptionSettings, TopicSettings
from veilmq.store import Options
from veilmq.store.directory import REDO, DatabaseFailed, Progress, Report, SchemaOlder
from veilmq.store.rollups import unpacked
from veilmq.store.sqlite.batch import history_index
from veilmq.store.sqlite.batch.memtable import replay
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, SETTINGS_DECODER
from veilmq.store.sqlite.batch.rollups import HOUR_PERIODS, HOURS, MINUTES, PERIOD_SHIFT
from veilmq.store.sqlite.disk import check_version, is_mismatch, open_reader, own_file, redo, schema, trust_pages
from veilmq.store.sqlite.disk.redo import Entry, last_commit
from veilmq.store.sqlite.disk.rows import Unflushed, is_utf8, read_extras
from veilmq.store.sqlite.messages import PLACES, ROWS_OF_A_MESSAGE
from veilmq.store.sqlite.messages.groups import FIRST_OF_FIFO, FIRST_OF_TENANT
from veilmq.store.sqlite.reading.history import bounds, events_from
from veilmq.store.sqlite.tools.books import Books, Recorded, incarnations
from veilmq.store.sqlite.upkeep.snapshots import newest

_ROWS_STEP: Final = 500
_STEPS: Final = 1_000_000
"""Of SQLite's machine between two looks: some tens of milliseconds."""
_KEY: Final = msgspec.msgpack.Decoder(QueueKey)
_LOADED: Final[tuple[tuple[str, str, Callable[[Any], object]], ...]] = (
    ("queue", "SELECT name, account || region, settings FROM queue", SETTINGS_DECODER.decode),
    ("topic", "SELECT name, account || region, settings FROM topic", msgspec.msgpack.Decoder(TopicSettings).decode),
    (
        "subscription",
        "SELECT name, topic, settings FROM subscription",
        msgspec.msgpack.Decoder(SubscriptionSettings).decode,
    ),
    ("plan", "SELECT incarnation, 0, plans FROM plan", msgspec.msgpack.Decoder(PlanState).decode),
    ("retiming", "SELECT incarnation, 0, before FROM retiming", msgspec.msgpack.Decoder(list[int]).decode),
    ("move_task", "SELECT number, 0, destination FROM move_task WHERE destination IS NOT NULL", _KEY.decode),
    ("move_task", "SELECT number, 0, status FROM move_task", MoveStatus),
    ("move_task", "SELECT number, 0, failure FROM move_task WHERE failure IS NOT NULL", MoveFailure),
    ("job", "SELECT number, 0, filter FROM job", msgspec.msgpack.Decoder(Filter).decode),
    ("job", "SELECT number, 0, destination FROM job WHERE destination IS NOT NULL", _KEY.decode),
    ("job", "SELECT number, 0, act FROM job", Act),
    ("job", "SELECT number, 0, status FROM job", MoveStatus),
    ("job", "SELECT number, 0, failure FROM job WHERE failure IS NOT NULL", MoveFailure),
    ("send_template", "SELECT name, principal, message FROM send_template", msgspec.json.Decoder().decode),
    (
        "lease",
        "SELECT sequence, 0, failure FROM lease WHERE failure IS NOT NULL",
        msgspec.msgpack.Decoder(tuple[str, str]).decode,
    ),
    ("origin", "SELECT id, protocol || principal || client, NULL FROM origin", lambda nothing: nothing),
)
"""What a start, a sweep, a receive or a list decodes: name, other text, content."""
_DAMAGE: Final = (apsw.Error, ValueError, TypeError, LookupError)
"""Errors of reading a damaged file: SQLite notices a torn page, but not a changed value."""


SQLITE: Final = f"{apsw.sqlite_lib_version()} (apsw {apsw.apsw_version()})"
"""Which SQLite reads and writes."""


def _unseen(_stage: str, _done: int, _total: int) -> None:
    """Report progress to nobody."""


def check(database: Path, progress: Progress = _unseen, *, is_owner: bool = False) -> Report:
    """Check everything. Blocks; any process. is_owner: as in `backup`.

    Raises NotOurs, SchemaRefused, DatabaseFailed (cannot open).
    """
    check_version()
    report = Report(problems=[])
    connection, found = _open(database)
    missing = found.missing
    try:
        cut = None if is_owner else own_file.lacks(database, connection)
        if cut is not None:  # what comes next may end with an error that does not say so
            report.add("file", cut)
        if _check_file(database, connection, report, progress):
            unflushed = _unflushed(connection, missing, report)
            _check_bodies(connection, unflushed, report, progress)
            _check_rows(connection, unflushed, report, progress)
            _check_loaded(connection, report)
            _check_history(connection, missing, unflushed, report, progress)
            _check_rollups(connection, report)
        if not is_owner:
            for reason in last_commit.losses(database, connection, found):
                report.add("file", reason)
            if (ahead_us := last_commit.ahead_us(connection, found)) > HOUR_US:
                report.add("file", f"the lease clock is {ahead_us // SECOND_US} s ahead of what was committed last")
        if found.is_damaged:
            report.add("file", f"{database.with_name(REDO)}: {redo.DAMAGED}")
    except _DAMAGE as error:
        report.add("file", f"the database cannot be read to the end: {error}")
    finally:
        connection.close()
    return report


def _open(database: Path) -> tuple[apsw.Connection, last_commit.Found]:
    """A connection in a read transaction on a database of ours, and what lies beside it."""
    try:
        connection = open_reader(database, Options())
        trust_pages(connection)  # all is checked, whatever the pages hold; `_check_file` verifies them
        try:
            version = schema.check_ours(connection)
            if version < schema.OLDEST_SERVED:
                raise SchemaOlder(version, schema.VERSION)
            found = last_commit.find(database, connection)
        except BaseException:
            connection.close()
            raise
    except (*_DAMAGE, msgspec.MsgspecError, OSError) as error:
        raise DatabaseFailed(str(error)) from error
    return connection, found


def _check_file(database: Path, connection: apsw.Connection, report: Report, progress: Progress) -> bool:
    """SQLite's own check of pages, indexes and constraints. Returns whether the tables can be read."""
    progress("file", 0, 1)
    report.page_checksums = schema.has_checksums(connection) and connection.open_vfs == schema.CHECKING

    def go_on() -> bool:
        progress("file", 0, 1)
        return False

    with closing(open_reader(database, Options())) as verifying:
        for each in (verifying, connection):
            each.set_progress_handler(go_on, _STEPS)
        strict = _integrity(verifying)
    found = strict if strict == ["ok"] else _integrity(connection)
    for text in found:
        if text != "ok":
            report.add("file", text)
    for name in schema.strangers(connection):
        report.add("file", f"{name}: its statement in the schema is not the one that created it")
    if found == ["ok"] and not report.problems:
        for name in _indexes_astray(connection):
            report.add("file", f"index {name}: its entries are not those of its table")
    connection.set_progress_handler(None)
    progress("file", 1, 1)
    is_readable = found == ["ok"] and not report.problems
    if strict != found:
        pages = sorted({int(page) for text in strict for page in _MISMATCH.findall(text)})
        for page in pages:
            report.add("file", f"page {page} does not match its checksum: what its rows say may be wrong")
        if not pages:
            report.add("file", "a page does not match its checksum: what its rows say may be wrong")
    return is_readable


_MISMATCH: Final = re.compile(rf"page (\d+): unable to get the page\. error code={apsw.SQLITE_IOERR_DATA}\b")


def _integrity(connection: apsw.Connection) -> list[str]:
    """What SQLite finds wrong: `ok` if nothing is. Its list ends where a page does not match its checksum."""
    found = []
    try:
        for (text,) in connection.execute("PRAGMA integrity_check(100)"):
            found.append(str(text))
    except apsw.IOError as error:
        if not is_mismatch(error):
            raise
    return found


_INDEXES: Final = "SELECT name, tbl_name, ifnull(sql, '') FROM sqlite_schema WHERE type = 'index' ORDER BY tbl_name"


def _indexes_astray(connection: apsw.Connection) -> list[str]:
    """The indexes that have not as many entries as their tables have rows for them. SQLite looks for the entry of each
    row, but not for other entries of an index with a condition, nor at an index of which no row has an entry."""
    astray = []
    indexes: list[tuple[Any, ...]] = connection.execute(_INDEXES).fetchall()
    for table, group in groupby(indexes, key=lambda each: each[1]):
        conditions = {name: statement.partition(" WHERE ")[2] or "TRUE" for name, _, statement in group}
        columns = ", ".join(f"count(*) FILTER (WHERE {condition})" for condition in conditions.values())
        (rows,) = connection.execute(f"SELECT {columns} FROM {table} NOT INDEXED").fetchall()
        for (name, condition), expected in zip(conditions.items(), rows, strict=True):
            try:
                count = _count(connection, f"SELECT count(*) FROM {table} INDEXED BY {name} WHERE {condition}")
            except apsw.CorruptError:
                count = -1
            if count != expected:
                astray.append(name)
    return astray


_JOURNAL_ASTRAY: Final = "SELECT offset FROM memtable WHERE offset NOT IN (SELECT offset FROM history)"


def _unflushed(connection: apsw.Connection, missing: Sequence[Entry], report: Report) -> list[Unflushed]:
    """The messages that have no rows yet."""
    try:
        unflushed = replay(connection, unapplied=missing)
    except (ValueError, RecursionError) as error:
        report.add("message", f"the journal of unflushed messages cannot be read: {error}")
        return []
    for (offset,) in connection.execute(_JOURNAL_ASTRAY):
        report.add(
            "history", f"the journal of unflushed messages has a batch at offset {offset}, and the history has none"
        )
    queues = incarnations(connection)
    last = missing[-1].sequence if missing else _count(connection, "SELECT sequence FROM mark")
    for sequence, each in unflushed.items():
        found = each.row
        if found.generation not in queues:
            report.add("message", f"message {sequence}: in the journal of unflushed messages, but of no queue")
        if connection.execute("SELECT 1 FROM message WHERE sequence = ?", (sequence,)).fetchone():
            report.add("message", f"message {sequence}: in the journal of unflushed messages and in the tables")
        line_is_right = found.line == found.priority and found.in_line == 1 and found.group is None
        line_is_right = line_is_right and 1 <= found.priority <= PRIORITY_LINES_MAX
        if not line_is_right or len(found.md5) != 16 or len(found.id) != 16 or sequence > last:
            report.add("message", f"message {sequence}: impossible values")
    return list(unflushed.values())


_CONTENT: Final = (
    "SELECT sequence, md5, body, extras, CAST(sender AS BLOB), CAST(group_id AS BLOB), CAST(type AS BLOB) FROM message"
    " ORDER BY sequence"
)


def _check_bodies(
    connection: apsw.Connection, unflushed: Sequence[Unflushed], report: Report, progress: Progress
) -> None:
    total = _count(connection, "SELECT count(*) FROM message") + len(unflushed)
    apart: dict[int, int] = dict(connection.execute("SELECT sequence, generation FROM quarantine ORDER BY sequence"))
    queues = incarnations(connection)
    for sequence, generation in apart.items():
        if generation in queues:  # else it was purged, and a sweep takes it away
            text = f"message {sequence} is in quarantine, damaged: see `veilmq quarantine list`"
            report.add("quarantine", text)
    rows = connection.cursor().execute(_CONTENT)
    journal = [(each.sequence, each.md5, each.body, each.packed) for each in (each.row for each in unflushed)]
    for sequence, expected, body, extras, *texts in chain(rows, journal):
        report.messages += 1
        report.body_bytes += len(body)
        if sequence not in apart and md5(body, usedforsecurity=False).digest() != expected:
            report.add("body", f"message {sequence}: its body does not match its MD5")
        elif sequence not in apart and read_extras(extras) is None:
            report.add("message", f"message {sequence}: its attributes cannot be read")
        elif sequence not in apart and not is_utf8(*texts):
            report.add("message", f"message {sequence}: its sender, group or type is not UTF-8")
        if report.messages % _ROWS_STEP == 0:
            progress("bodies", report.messages, total)
    progress("bodies", report.messages, total)


NUMBERS: Final = {
    "queue": "SELECT max(incarnation) FROM queue",
    "topic": "SELECT max(incarnation) FROM topic",
    "subscription": "SELECT max(id) FROM subscription",
    "move_task": "SELECT max(number) FROM move_task",
    "operator_command": "SELECT max(number) FROM operator_command",
    "job": "SELECT max(number) FROM job",
}
"""The highest number that has a row, by the kind in `last_number`."""
_NUMBERS_BEHIND: Final = " UNION ALL ".join(
    f"SELECT '{kind}' WHERE ifnull((SELECT last FROM last_number WHERE kind = '{kind}'), 0) < ({highest})"
    for kind, highest in NUMBERS.items()
)
HIDDEN_US_MAX: Final = 8 * DAY_US
"""No delay and no lease is longer than 7 days."""
_FIFO: Final = "SELECT generation FROM queue WHERE deleted IS NULL AND substr(name, -5) = '.fifo'"
# Each: kind, message for a row, and a query that returns the wrong rows.
_ROWS: Final = (
    ("lease", "lease of {}: there is no such message", "SELECT sequence FROM lease WHERE sequence NOT IN message_of"),
    (
        "lease",
        "lease of message {}: its queue or line is not the message's",
        "SELECT l.sequence FROM lease l JOIN message m USING (sequence)"
        " WHERE l.generation <> m.generation OR l.line <> m.line OR l.in_line <> m.in_line",
    ),
    (
        "lease",
        "lease of message {}: impossible values",
        "SELECT sequence FROM lease WHERE hidden NOT IN (0, 1) OR attempt < 0 OR rotation < 0 OR (attempt > 0) <>"
        " (first IS NOT NULL)",
    ),
    (
        "lease",
        "lease of message {}: it ends later than any can",
        f"SELECT sequence FROM lease WHERE hidden = 1 AND due > (SELECT clock FROM mark) + {HIDDEN_US_MAX}",
    ),
    (
        "lease",
        "lease of message {}: held by an origin that is not known",
        "SELECT sequence FROM lease WHERE origin NOT IN (SELECT id FROM origin)",
    ),
    (
        "message",
        "message {}: its rows are in none of the places of a message: nobody can receive it",
        f"SELECT m.sequence FROM {ROWS_OF_A_MESSAGE}"
        f" WHERE NOT coalesce({' OR '.join(f'({where.rows})' for where in PLACES if where.rows)}, 0)",
    ),
    (
        "message",
        "message {}: passed over in its line: nobody can receive it",
        "WITH cursor AS (SELECT generation, line, max(sequence) AS at FROM lease WHERE in_line = 1 AND line <= 16"
        " GROUP BY 1, 2)"
        " SELECT m.sequence FROM message m INDEXED BY message_line JOIN cursor c ON m.generation = c.generation"
        " AND m.line = c.line AND m.sequence < c.at WHERE m.in_line = 1"
        " AND NOT EXISTS (SELECT 1 FROM lease l WHERE l.sequence = m.sequence)",
    ),
    (
        "message",
        "message {}: it belongs to no queue and is not garbage",
        "SELECT sequence FROM message WHERE generation NOT IN (SELECT generation FROM queue WHERE deleted IS NULL)"
        " AND generation NOT IN (SELECT generation FROM garbage)",
    ),
    (
        "message",
        "message {}: impossible values",
        "SELECT sequence FROM message WHERE length(md5) <> 16 OR length(id) <> 16"
        " OR (line <= 16 AND line <> priority) OR in_line NOT IN (0, 1)"
        " OR sequence > (SELECT sequence FROM mark)",
    ),
    (
        "message",
        "message {}: its group is not known: nobody can receive it",
        "SELECT sequence FROM message m WHERE line > 16"
        " AND generation NOT IN (SELECT generation FROM garbage) AND NOT EXISTS"
        " (SELECT 1 FROM message_group g WHERE g.number = m.line AND g.generation = m.generation"
        " AND g.name = m.group_id)",
    ),
    (
        "group",
        "group {}: it has a row and no messages",
        "SELECT number FROM message_group g WHERE generation NOT IN (SELECT generation FROM garbage)"
        " AND NOT EXISTS (SELECT 1 FROM message WHERE generation = g.generation AND line = g.number AND in_line = 1)"
        " AND NOT EXISTS (SELECT 1 FROM message WHERE generation = g.generation AND line = g.number AND in_line = 0"
        " AND line > 16)",
    ),
    (
        "group",
        "group {}: the number of its messages in flight is wrong",
        "SELECT g.number FROM message_group g LEFT JOIN"
        " (SELECT generation, line, count(*) AS held FROM lease WHERE hidden = 1 AND attempt > 0 GROUP BY 1, 2) l"
        " ON l.generation = g.generation AND l.line = g.number"
        f" WHERE g.held <> iif(g.generation IN ({_FIFO}), 0, ifnull(l.held, 0))"
        " AND g.generation NOT IN (SELECT generation FROM garbage)",
    ),
    (
        "group",
        "group {}: its place among the waiting groups is wrong",
        "SELECT number FROM message_group WHERE generation NOT IN (SELECT generation FROM garbage) AND"
        f" (generation IN ({_FIFO}) AND (free, since, turn) IS NOT ({FIRST_OF_FIFO}) OR generation NOT IN ({_FIFO})"
        f" AND (free, since, turn) IS NOT ({FIRST_OF_TENANT.format(cursor='message_group.cursor')}))",
    ),
    (
        "group",
        "group {}: the message to be claimed next is not visible",
        "SELECT g.number FROM message_group g LEFT JOIN message m ON m.sequence = g.free"
        " LEFT JOIN lease l ON l.sequence = g.free WHERE g.free IS NOT NULL"
        " AND g.generation NOT IN (SELECT generation FROM garbage)"
        " AND (m.generation IS NOT g.generation OR m.line IS NOT g.number OR l.hidden = 1)",
    ),
    (
        "file",
        "the expiry clock is ahead of the lease clock, by {} us",
        "SELECT -held_us FROM expiry_hold WHERE held_us < 0",
    ),
    (
        "file",
        "the last number given to a {} is below one that is in use: the next cannot be created, or replaces another",
        _NUMBERS_BEHIND,
    ),
    (
        "queue",
        "queue {}: its generation was never given",
        "SELECT name FROM queue WHERE generation > (SELECT generation FROM mark)",
    ),
    (
        "queue",
        "queue {}: it exists, and its messages are marked as garbage",
        "SELECT name FROM queue WHERE deleted IS NULL AND generation IN (SELECT generation FROM garbage)",
    ),
    (
        "history",
        "history row {}: does not follow the one before",
        "SELECT offset FROM (SELECT offset, lag(offset + count) OVER (ORDER BY offset) AS expected FROM history)"
        " WHERE offset <> expected",
    ),
)


def _check_rows(
    connection: apsw.Connection, unflushed: Sequence[Unflushed], report: Report, progress: Progress
) -> None:
    report.leases = _count(connection, "SELECT count(*) FROM lease") + sum(each.leased for each in unflushed)
    report.queues = _count(connection, "SELECT count(*) FROM queue WHERE deleted IS NULL")
    for place, (kind, text, query) in enumerate(_ROWS):
        progress("leases", place, len(_ROWS))
        for (found,) in connection.execute(query.replace("message_of", "(SELECT sequence FROM message)")):
            report.add(kind, text.format(found))
    progress("leases", len(_ROWS), len(_ROWS))


def _check_loaded(connection: apsw.Connection, report: Report) -> None:
    for table, query, decode in _LOADED:
        last: Any = ""
        try:
            for name, _, packed in connection.execute(query):
                last = name
                decode(packed)
        except (ValueError, RecursionError) as error:
            report.add("queue", f"{table} {last} or the one behind it cannot be read: {error}")


def _check_history(
    connection: apsw.Connection,
    missing: Sequence[Entry],
    unflushed: Sequence[Unflushed],
    report: Report,
    progress: Progress,
) -> None:
    first, following = bounds(connection)
    following = missing[-1].following if missing else following
    report.history_first_offset = first
    begin = newest(connection)
    books, recorded = Books(begin), Recorded(connection, unflushed)
    last = first - 1
    try:
        events = chain(events_from(connection, first), redo.events(missing))
        for offset, event in history_index.checked(connection, events, partial(report.add, "history")):
            last = offset
            report.events += 1
            books.add(offset, event)
            recorded.compare(event)
            if report.events % _ROWS_STEP == 0:
                progress("history", report.events, following - first)
    except (ValueError, RecursionError) as error:
        report.add("history", f"the row after offset {last} cannot be read: {error}")
        report.books = "not checked: the history is damaged"
        return
    progress("history", report.events, following - first)
    if last != following - 1:
        report.add("history", f"it ends at offset {last}, and the next to be given is {following}")
    for text in chain(recorded.messages(), recorded.queues()):
        report.add("history", text)
    if begin is None:
        report.books = f"not checked: the history begins at offset {first}, and holds no snapshot yet"
        return
    problems = list(books.differences(connection, unflushed))
    for text in problems:
        report.add("books", text)
    report.books = "not balanced" if problems else "balanced"


def _check_rollups(connection: apsw.Connection, report: Report) -> None:
    """Every rollup can be read, and each period has as many as it says."""
    counted: Any = connection.execute("SELECT id, rows FROM rollup_period WHERE rows")
    missing = Counter(dict(counted))
    for table, first_id in ((MINUTES, 0), (HOURS, HOUR_PERIODS)):
        rows: Any = connection.cursor().execute(f"SELECT id, numbers FROM {table}")
        for id_, packed in rows:
            missing[first_id + (id_ >> PERIOD_SHIFT)] -= 1
            if unpacked(packed).state is None:
                report.add("history", f"the rollup {id_} of {table} cannot be read")
    for period, count in missing.items():
        if count:
            report.add("history", f"of period {period} there are {-count:+} rollups more than noted")


def _count(connection: apsw.Connection, query: str) -> int:
    rows: list[tuple[Any, ...]] = connection.execute(query).fetchall()
    return int(rows[0][0])
