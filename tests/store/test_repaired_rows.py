"""Rows of every table of a database that a repair takes over one by one: it keeps what can be read, tells what may be
missing, and leaves out what a server could not work with.
"""

from contextlib import closing
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec
import pytest
from tests.support.contract.stage import TESTER, Stage
from tests.support.damaged import Lived, live, rows_of
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import CreateQueue
from veilmq.model.errors import StoreFailed
from veilmq.model.moves import Filter
from veilmq.model.settings.queue import PlanState, QueueKey
from veilmq.model.settings.topic import SubscriptionSettings, TopicSettings
from veilmq.store.rollups import Rollup, State
from veilmq.store.sqlite.batch.rollups import HOUR_PERIODS, row_id
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.repair import Repair
from veilmq.store.sqlite.repair.repair import repair
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import NUMBERS, check
from veilmq.store.sqlite.tools.backup import backup_directory
from veilmq.testing.for_each import for_each

PAGE_BYTES: Final = 4096
QUEUE: Final = 2
FIFO: Final = 3
"""Incarnations of `jobs` and `jobs.fifo` (tests/support/damaged.py)."""
ID: Final = bytes(range(16))
MINUTE, HOUR = 28_333_000, 472_216
pack: Final = msgspec.msgpack.Encoder().encode
ROLLUP: Final = Rollup({1: 2}, State(3, 1, None)).packed()
ROWS: Final[dict[str, tuple[Any, ...]]] = {
    "origin": (2, "server", "server", ""),
    "topic": (1, "000000000000", "us-east-1", "news", 5, 6, pack(TopicSettings())),
    "subscription": (1, 1, "mine", 5, 6, pack(SubscriptionSettings(endpoint="http://localhost/"))),
    "receive_attempt": (1, 7, 2, "attempt", pack([])),
    "move_task": (1, ID, QUEUE, pack(QueueKey("0" * 12, "us-east-1", "dead")), 1, "running", None, 1, 5, 6, 7, 0, 1),
    "plan": (QUEUE, pack(PlanState())),
    "retiming": (FIFO, 4, pack([0]), 5, 8, 1),
    "operator_command": (1, "tester", "id", 5, ID, 0, pack([])),
    "rollup_minute": (row_id(MINUTE, QUEUE), ROLLUP),
    "rollup_hour": (row_id(HOUR, QUEUE), ROLLUP),
    "job": (
        1, ID, "delete", QUEUE, None, pack(Filter()), 1, 1, "running", None, 1, 5, None, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0,
    ),
    "console_session": (ID, ID, None, "browser", 0, 5, 6, 1 << 60),
    "send_template": (QUEUE, "bill", b"{}", 5, "tester"),
    "shared": ("admin-token", b"secret"),
}  # fmt: skip
"""A row of each table that has none from the life of messages alone."""
NOT_KEPT: Final = frozenset({"receive_attempt", "console_session", "shared"})
MADE_ANEW: Final = frozenset({"mark", "last_number", "secret", "history", "snapshot", "redo_log", "rollup_mark"})
IN_DOUBT: Final = frozenset(
    {
        "queue", "lease", "garbage", "origin", "history", "topic", "subscription", "deduplication", "move_task", "plan",
        "retiming", "expiry_hold", "operator_command", "job", "send_template",
    }
)  # fmt: skip
"""Tables whose rows follow from nothing else."""
EMPTY: Final = frozenset({"quarantine", "garbage", "snapshot", "memtable", "history_index", "log_position"})


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Lived:
    """Files of a closed store with rows in every table."""
    lived = live(tmp_path_factory.mktemp("filled") / "data", closed=True)
    with closing(connect(lived.directory / "veilmq.db")) as connection:
        for table, row in ROWS.items():
            connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        for period in (MINUTE, HOUR + HOUR_PERIODS):
            connection.execute("INSERT INTO rollup_period VALUES (?, 1, ?)", (period, len(ROLLUP) + 14))
        for kind in NUMBERS.keys() - {"queue"}:
            connection.execute("INSERT INTO last_number VALUES (?, 1)", (kind,))
    lived.rows = rows_of(lived.copy(lived.directory.with_name("filled")) / "veilmq.db")
    assert {name for name, rows in lived.rows.items() if not rows} == EMPTY
    assert check(lived.directory / "veilmq.db").problems == []
    return lived


def zero(directory: Path, name: str) -> Path:
    """Write zeros over the root page of a table or an index."""
    return write(directory, name, bytes(PAGE_BYTES))


def write(directory: Path, name: str, content: bytes) -> Path:
    """Put another page in the place of the root page of a table or an index."""
    with (directory / "veilmq.db").open("r+b") as file:
        file.seek((root(directory, name) - 1) * PAGE_BYTES)
        file.write(content)
    return directory


def root(directory: Path, name: str) -> int:
    database = directory / "veilmq.db"
    with closing(apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)) as connection:
        return int(str(connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (name,)).get))


def page_of(directory: Path, name: str) -> bytes:
    """The root page of a table or an index."""
    at = root(directory, name) * PAGE_BYTES
    return (directory / "veilmq.db").read_bytes()[at - PAGE_BYTES : at]


def change(directory: Path, statement: str) -> Path:
    with closing(connect(directory / "veilmq.db")) as connection:
        connection.execute(statement)
        assert connection.changes()
    return directory


def repaired(source: Path, destination: Path, backup: Path | None = None) -> Repair:
    report = repair(source, destination, backup, lambda stage, done, total: None)
    assert report.problems == []
    return report


def test_each_row_that_can_be_read_is_kept(filled: Lived, tmp_path: Path) -> None:
    """Only an index is damaged. Who was signed in, and what is a cluster's, stay behind."""
    report = repaired(zero(filled.copy(tmp_path / "damaged"), "queue_deleted"), tmp_path / "new")
    assert report.is_whole, report
    found = rows_of(tmp_path / "new" / "veilmq.db")
    assert {name: found[name] for name in NOT_KEPT} == {name: [] for name in NOT_KEPT}
    kept = filled.rows.keys() - NOT_KEPT - MADE_ANEW
    assert {name: found[name] for name in kept} == {name: filled.rows[name] for name in kept}


def test_a_whole_page_of_another_place_or_time_is_told(
    filled: Lived, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checksum is right. SQLite's check looks neither at what an index of no row is, nor for entries too many in an
    index with a condition."""
    empty, entries = page_of(filled.directory, "quarantine"), page_of(filled.directory, "queue_by_name")
    for index, content in (("queue_deleted", empty), ("message_aside", entries)):
        damaged = write(filled.copy(tmp_path / f"damaged {index}"), index, content)
        (problem,) = check(damaged / "veilmq.db").problems
        assert f"index {index}:" in problem.text
        repaired(damaged, tmp_path / f"new {index}")
    for kind in NUMBERS:
        damaged = change(filled.copy(tmp_path / f"old {kind}"), f"DELETE FROM last_number WHERE kind = '{kind}'")
        (problem,) = check(damaged / "veilmq.db").problems
        assert f"given to a {kind} is below" in problem.text
        repaired(damaged, tmp_path / f"new {kind}")
    stage = Stage(SqliteFactory(tmp_path / "old queue", SMALL))
    create = CreateQueue(queue=QueueKey("0" * 12, "us-east-1", "new"), origin=TESTER, change={})
    (outcome,) = stage.store.apply_each([create], stage.now).outcomes
    assert isinstance(outcome, StoreFailed)
    assert "CreateQueue could not be applied (UNIQUE constraint failed" in caplog.text
    stage.store.close()


def test_a_table_that_cannot_be_read_is_told_unless_it_follows_from_others(filled: Lived, tmp_path: Path) -> None:
    for table in sorted(filled.rows):
        report = repaired(zero(filled.copy(tmp_path / f"damaged {table}"), table), tmp_path / f"new {table}")
        assert report.tables_in_doubt == [table] * (table in IN_DOUBT), table
        assert report.is_whole == (table not in IN_DOUBT), (table, report)


def test_a_backup_of_the_same_state_leaves_no_table_in_doubt(filled: Lived, tmp_path: Path) -> None:
    backup = filled.copy(tmp_path / "backup")
    for table in ("queue", "topic", "lease"):
        damaged = zero(filled.copy(tmp_path / f"damaged {table}"), table)
        report = repaired(damaged, tmp_path / f"new {table}", backup)
        assert report.tables_in_doubt == [], table
        assert rows_of(tmp_path / f"new {table}" / "veilmq.db")[table] == filled.rows[table]


def test_an_empty_queue_is_made_again_unless_it_was_deleted(tmp_path: Path) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data", SMALL))
    _, deleted, held, _ = (stage.create(name, wait_us=7) for name in ("empty", "deleted", "held", "last.fifo"))
    stage.send(held, "kept")
    stage.drop(deleted)
    stage.store.close()
    report = repaired(zero(tmp_path / "data", "queue"), tmp_path / "new")
    assert [each.queue.rpartition("/")[2] for each in report.queues] == ["empty", "held", "last.fifo"]
    assert report.of("000000000000/us-east-1/held").visible == 1
    found = SqliteStore(tmp_path / "new", SMALL)
    assert {queue.settings.wait_us for queue in found.reader.queues.values()} == {7}
    assert len({queue.generation for queue in found.reader.queues.values()}) == 3
    found.close()


def test_messages_of_a_lost_journal_are_missing(tmp_path: Path) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data", SMALL))
    queue = stage.create()
    for number in range(3):
        stage.send(queue, str(number))
    backup_directory(store_of(stage).directory.database, tmp_path / "copy")
    stage.take(queue)
    stage.store.close()
    assert rows_of(tmp_path / "copy" / "veilmq.db")["memtable"]
    report = repaired(zero(tmp_path / "copy", "memtable"), tmp_path / "new")
    assert report.missing_count == 3
    report = repaired(zero(tmp_path / "data", "message"), tmp_path / "of the redo log")  # the row of the lease is left
    assert report.is_whole, report
    assert (report.queues[0].visible, report.queues[0].in_flight) == (2, 1)


UNDECODABLE: Final = {
    "plan": "UPDATE plan SET plans = x'c1'",
    "retiming": "UPDATE retiming SET before = x'c1'",
    "move_task": "UPDATE move_task SET destination = x'c1'",
    "move_task's status": "UPDATE move_task SET status = 'rvnning'",
    "job": "UPDATE job SET filter = x'c1'",
    "job's destination": "UPDATE job SET destination = x'c1'",
    "job's status": "UPDATE job SET status = 'rvnning'",
    "job's act": "UPDATE job SET act = 'remove'",
    "lease": "UPDATE lease SET failure = x'c1' WHERE sequence = (SELECT min(sequence) FROM lease)",
    "send_template": "UPDATE send_template SET message = x'c1'",
    "rollup_minute": "UPDATE rollup_minute SET numbers = x'c1'",
    "rollup_hour": "UPDATE rollup_hour SET numbers = x'c1'",
}


@for_each("name", UNDECODABLE)
def test_a_row_that_no_server_can_decode_is_told_and_left_out(filled: Lived, tmp_path: Path, name: str) -> None:
    directory = change(filled.copy(tmp_path / f"damaged {name}"), UNDECODABLE[name])
    (problem,) = check(directory / "veilmq.db").problems
    table = name.partition("'")[0]
    assert table in problem.text
    report = repaired(directory, tmp_path / f"new {name}")
    assert (report.exported, report.is_whole) == (1, False)
    assert f'"table": "{table}"' in Path(report.export).read_text()
    found, before = rows_of(tmp_path / f"new {name}" / "veilmq.db"), rows_of(directory / "veilmq.db")
    assert len(found[table]) == len(before[table]) - (name != "lease")
    assert len(found["message"]) == len(before["message"])
    SqliteStore(tmp_path / f"new {name}", SMALL).close()


def test_the_sizes_of_rollups_are_counted_again(filled: Lived, tmp_path: Path) -> None:
    directory = change(filled.copy(tmp_path / "damaged"), "UPDATE rollup_period SET rows = 5, bytes = 5")
    repaired(directory, tmp_path / "new")
    assert rows_of(tmp_path / "new" / "veilmq.db")["rollup_period"] == filled.rows["rollup_period"]
