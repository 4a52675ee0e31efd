"""The file: how it is born, that today's code opens every released one, and what it refuses.

Each `fixtures/schema-N.db` was written by the code of its day (fixtures/make.py) with messages in every state, and the
JSON beside it says what the store then showed.
"""

import json
import os
import re
import runpy
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from tests.support.clock import ManualClock
from tests.support.contract.stage import Stage, bodies, expect, refused
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.admin.history import Scope, snapshot_lines
from veilmq.model.errors import LeaseTaken
from veilmq.model.instant import HOUR_US
from veilmq.model.messages import Delivery, Extras
from veilmq.model.outcomes import Deleted, Extended
from veilmq.model.settings.queue import QueueKey
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.store.archive import ArchiveSource, place_at
from veilmq.store.directory import NotOurs, SchemaNewer, SchemaUnreleased
from veilmq.store.log import restore
from veilmq.store.sqlite.disk import connect, schema
from veilmq.store.sqlite.disk.schema import APPLICATION_ID, MIGRATIONS, VERSION, migrate
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check
from veilmq.store.sqlite.tools.backup import set_position
from veilmq.testing.for_each import for_each
from veilmq.testing.replaying import replay, state_of

FIXTURES = Path(__file__).parent / "fixtures"
RELEASED = sorted(FIXTURES.glob("schema-*.db"), key=lambda path: int(path.stem.partition("-")[2]))
MAKE = runpy.run_path(str(FIXTURES / "make.py"))
ORDERS, FAILED, MAIL = QueueKey("000000000000", "us-east-1", "orders"), MAKE["FAILED"], MAKE["MAIL"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """An empty data directory."""
    path = tmp_path / "data"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def born(data: Path) -> Path:
    """A new database, closed."""
    SqliteStore(data, SMALL).close()
    return data / "veilmq.db"


def recorded_of(released: Path) -> Any:
    """What the store said when the file was made, read as today's types."""
    return msgspec.json.decode(released.with_suffix(".json").read_bytes(), type=MAKE["Seen"])


def bring(released: Path, data: Path) -> None:
    """Copy the file, and the redo log that goes with it, into the directory."""
    shutil.copyfile(released, data / "veilmq.db")
    if released.with_suffix(".redo").exists():
        shutil.copyfile(released.with_suffix(".redo"), data / "redo")
        os.truncate(data / "redo", SMALL.redo_bytes)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[Path], Stage]]:
    """Opens a copy of a released file by today's code, at the instant at which the file was made."""
    stages: list[Stage] = []

    def open_copy(released: Path) -> Stage:
        data = tmp_path / released.stem
        data.mkdir(mode=0o700)
        bring(released, data)
        stages.append(Stage(SqliteFactory(data)))
        stages[-1].clock = ManualClock(recorded_of(released).now)
        return stages[-1]

    yield open_copy
    for stage in stages:
        stage.store.close()


of_each_release = for_each("released", RELEASED, lambda path: path.stem)


def pragma(path: Path, name: str) -> Any:
    connection = connect(path)
    try:
        return connection.pragma(name)
    finally:
        connection.close()


def tables(path: Path) -> dict[str, str]:
    """The statement that made each table and index, by name."""
    connection = connect(path)
    try:
        return dict(connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall())
    finally:
        connection.close()


def history_of(data: Path) -> list[bytes]:
    """The packed events of each row."""
    connection = connect(data / "veilmq.db")
    try:
        return [bytes(row[0]) for row in connection.execute("SELECT events FROM history")]
    finally:
        connection.close()


def as_today(visible: dict[str, list[Any]]) -> dict[str, list[Delivery]]:
    """Deliveries as today's type reads them: a field added since has its default."""
    return msgspec.json.decode(msgspec.json.encode(visible), type=dict[str, list[Delivery]])


def test_every_version_has_its_file() -> None:
    assert [path.stem for path in RELEASED] == [f"schema-{version}" for version in range(1, VERSION + 1)]


class TestReleasedFile:
    """A file of a released version."""

    @of_each_release
    def test_everything_is_in_place(self, opened: Callable[[Path], Stage], released: Path) -> None:
        stage = opened(released)
        recorded = recorded_of(released)
        found = MAKE["seen"](stage.store, stage.now, recorded.handles)
        assert found.queues == recorded.queues
        assert as_today(found.visible) == as_today(recorded.visible)
        assert found.events[: len(recorded.events)] == recorded.events
        assert len(found.events) == len(recorded.events)
        assert found.further == recorded.further

    @of_each_release
    def test_it_has_the_tables_of_a_new_file_and_is_in_order(
        self, opened: Callable[[Path], Stage], tmp_path: Path, released: Path
    ) -> None:
        stage = opened(released)
        new = tmp_path / f"new-{released.stem}"
        SqliteStore(new, SMALL).close()
        assert tables(stage.store.directory.database) == tables(new / "veilmq.db")
        assert pragma(stage.store.directory.database, "user_version") == VERSION
        report = check(stage.store.directory.database)
        assert [problem.kind for problem in report.problems] == ["quarantine"], report.problems
        assert report.books == "balanced"

    @of_each_release
    def test_its_history_tells_its_state(self, tmp_path: Path, released: Path) -> None:
        """Settings that came later are not in it, but in a snapshot of today."""
        recorded = recorded_of(released)
        data = tmp_path / released.stem
        data.mkdir(mode=0o700)
        bring(released, data)
        # Half of the bound has passed, so that a snapshot follows, but nothing is trimmed.
        options = msgspec.structs.replace(SMALL, history_bytes_max=sum(map(len, history_of(data))) * 3 // 2)
        stage = Stage(SqliteFactory(data, options))
        stage.clock = ManualClock(recorded.now)
        before = len(stage.events())
        stage.sweep_snapshot()
        assert "snapshot" in {event.kind for event in stage.events()[before:]}
        assert isinstance(stage.store, SqliteStore)
        with stage.store.reader.look() as view:
            shown = state_of([json.loads(line) for line in snapshot_lines(view, Scope())])
        state = replay(stage.events()).at(stage.now)
        stage.store.close()
        assert state.queues == shown.at(stage.now).queues
        assert state.messages == shown.at(stage.now).messages

    @of_each_release
    def test_handles_of_before_are_honoured_as_they_were(self, opened: Callable[[Path], Stage], released: Path) -> None:
        stage = opened(released)
        recorded = recorded_of(released)
        refused(stage.delete(ORDERS, recorded.handles["stale"]), LeaseTaken)
        assert isinstance(stage.extend(ORDERS, recorded.handles["current"], HOUR_US), Extended)
        expect(stage.delete(ORDERS, recorded.handles["current"]), Deleted)
        expect(stage.delete(ORDERS, recorded.handles["released"]), Deleted)
        assert stage.counts(ORDERS) == (3, 1, 0)

    @of_each_release
    def test_every_message_comes_in_its_order_and_time(self, opened: Callable[[Path], Stage], released: Path) -> None:
        stage = opened(released)
        first = stage.receive(ORDERS, 10)
        assert bodies(first) == ["urgent", "released", "plain", "rich: \u00e9 \u20ac \U0001f600 \r\n<&>"]
        assert [message.receive_count for message in first] == [1, 2, 1, 1]
        assert len(first[3].extras.attributes) == 2
        for message in first:
            stage.delete(ORDERS, message.handle)
        (dead,) = stage.receive(FAILED, 10)
        assert (dead.body, dead.receive_count, dead.extras.dead_letter_source) == ("dead-lettered", 2, ORDERS)
        stage.later(HOUR_US)
        # Its two leases are used up: the message in flight is not delivered a third time.
        assert bodies(stage.receive(ORDERS, 10)) == ["delayed"]
        assert "in flight" in bodies(stage.receive(FAILED, 10))
        assert bodies(stage.receive(MAIL, 10)) == ["by the queue's delay"]

    @of_each_release
    def test_groups_go_on_as_they_were(self, opened: Callable[[Path], Stage], released: Path) -> None:
        stage = opened(released)
        recorded = recorded_of(released)
        line, tenants = MAKE["LINE"], MAKE["TENANTS"]
        assert stage.send(line, "c: deleted", extras=Extras(group="c")).duplicate
        assert stage.take(line, attempt_id="again").handle == recorded.handles["attempt"]
        assert stage.receive(line, 10) == []
        expect(stage.delete(line, recorded.handles["attempt"]), Deleted)
        assert bodies(stage.receive(line, 10)) == ["b: second"]
        assert bodies(stage.receive(tenants, 10)) == ["y: visible", "x: visible"]
        stage.later(HOUR_US)
        assert bodies(stage.receive(line, 10)) == ["b: second", "a: in flight", "a: waits"]
        assert "x: delayed" in bodies(stage.receive(tenants, 10))

    @of_each_release
    def test_unflushed_messages_are_where_they_were(self, opened: Callable[[Path], Stage], released: Path) -> None:
        stage = opened(released)
        recorded = recorded_of(released)
        unflushed = MAKE["UNFLUSHED"]
        assert stage.counts(unflushed) == (1, 0, 1)
        (plain,) = stage.receive(unflushed, 10)
        assert (plain.body, plain.extras.type, plain.receive_count) == ("plain", "plain", 1)
        expect(stage.delete(unflushed, recorded.handles["unflushed"]), Deleted)
        expect(stage.delete(unflushed, plain.handle), Deleted)
        stage.reopen()
        assert stage.counts(unflushed) == (0, 0, 0)

    @of_each_release
    def test_what_is_new_goes_on_from_where_it_was(self, opened: Callable[[Path], Stage], released: Path) -> None:
        stage = opened(released)
        recorded = recorded_of(released)
        last = recorded.events[-1]["offset"]
        sent = stage.send(ORDERS, "new")
        assert sent.sequence > max(event.get("sequence") or 0 for event in recorded.events)
        assert [event.offset for event in stage.events(last + 1)] == [last + 1]
        assert stage.create("another").name == "another"
        incarnations = {event.get("incarnation") for event in recorded.events}
        assert stage.events(last + 2)[0].incarnation not in incarnations


def test_archives_and_exported_histories_are_read(tmp_path: Path) -> None:
    """Of the released formats that have them."""
    archives = sorted(FIXTURES.glob("schema-*.archive"))
    assert archives[-1].stem == f"schema-{VERSION}"
    for archive in archives:
        recorded = recorded_of(archive)
        place = tmp_path / archive.stem
        place.mkdir(mode=0o700)
        source = ArchiveSource(place_at(str(archive)), str(archive))
        restored = restore(source, None, place, partial(SqliteFollower, options=SMALL))
        assert (restored.damaged, restored.records) == ([], 1)
        set_position(place / "veilmq.db", None)
        store = SqliteStore(place, SMALL)
        found = MAKE["seen"](store, recorded.now, recorded.handles)
        store.close()
        assert recorded.visible["spare"] == []
        recorded.visible["spare"] = found.visible["spare"]
        assert [each["body"] for each in found.visible["spare"]] == [MAKE["IN_A_RECORD"]]
        assert as_today(found.visible) == as_today(recorded.visible)
        assert found.further == recorded.further
        history = ParquetHistory(str(archive.with_suffix(".export")))
        events = [event for batch in history.read(*history.bounds()) for event in batch.to_pylist()]
        names = ("offset", "kind", "queue", "message", "attempt")
        kept = [[event[name] for name in names] for event in events]
        assert kept[:-1] == [[event[name] for name in names] for event in recorded.events]


class TestBirth:
    """A new file."""

    def test_it_is_ours_and_of_this_version(self, born: Path) -> None:
        assert pragma(born, "application_id") == APPLICATION_ID
        assert pragma(born, "user_version") == VERSION == len(MIGRATIONS)

    def test_it_has_a_wal_and_gives_pages_back(self, born: Path) -> None:
        assert pragma(born, "journal_mode") == "wal"
        assert pragma(born, "auto_vacuum") == 2, "2 is incremental; it cannot be set on a file that has tables"

    def test_every_table_is_strict(self, born: Path) -> None:
        made = {name: sql for name, sql in tables(born).items() if sql.startswith("CREATE TABLE")}
        assert {"message", "lease", "queue", "history", "mark", "secret"} <= made.keys()
        assert [name for name, sql in made.items() if not re.search(r"\) STRICT$", sql)] == []

    def test_every_table_has_a_primary_key_and_none_counts_by_itself(self, born: Path) -> None:
        """A copy that is made statement by statement gives the same numbers."""
        made = {name: sql for name, sql in tables(born).items() if sql.startswith("CREATE TABLE")}
        assert [name for name, sql in made.items() if "PRIMARY KEY" not in sql or "AUTOINCREMENT" in sql] == []

    def test_nobody_else_can_read_it(self, born: Path) -> None:
        assert born.stat().st_mode & 0o777 == 0o600

    def test_an_empty_file_is_one(self, data: Path) -> None:
        (data / "veilmq.db").touch()
        SqliteStore(data, SMALL).close()
        assert pragma(data / "veilmq.db", "user_version") == VERSION

    def test_two_files_have_different_secrets(self, tmp_path: Path) -> None:
        secrets = set()
        for name in ("one", "two"):
            SqliteStore(tmp_path / name, SMALL).close()
            connection = connect(tmp_path / name / "veilmq.db")
            secrets.update(connection.execute("SELECT receipts FROM secret UNION ALL SELECT epoch FROM secret"))
            connection.close()
        assert len(secrets) == 4

    def test_every_commit_is_synced_by_default(self, data: Path) -> None:
        store = SqliteStore(data)
        writer = store._writer.connection
        assert writer.pragma("synchronous") == 2, "2 is FULL: the WAL is synced at every commit"
        assert writer.pragma("mmap_size") == 0
        assert writer.pragma("wal_autocheckpoint") == 0
        store.close()


class TestMigration:
    """From one version to the next."""

    def test_it_is_one_transaction(self, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        connection = connect(data / "veilmq.db")
        monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, "CREATE TABLE extra (id INTEGER); SELECT nothing;"))
        with pytest.raises(apsw.SQLError):
            migrate(connection)
        assert connection.execute("SELECT count(*) FROM sqlite_schema").get == 0
        assert (connection.pragma("user_version"), connection.pragma("application_id")) == (0, 0)
        connection.close()

    def test_only_what_is_missing_runs(self, born: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, "CREATE TABLE extra (id INTEGER PRIMARY KEY) STRICT;"))
        monkeypatch.setattr(schema, "VERSION", VERSION + 1)
        connection = connect(born)
        assert migrate(connection) == VERSION
        assert connection.pragma("user_version") == VERSION + 1
        assert migrate(connection) == VERSION + 1
        connection.close()
        assert "extra" in tables(born)


class TestRefusal:
    """A file that is not for us."""

    def test_a_newer_one_that_was_killed(self, data: Path) -> None:
        """Its WAL and redo log, which are only this release's to read, stay as they are."""
        factory = SqliteFactory(data)
        stage = Stage(factory)
        jobs = stage.create()
        writer = store_of(stage)._writer.connection
        writer.pragma("user_version", VERSION + 1)
        stage.send(jobs, "in the redo log")
        factory.kill(stage.store)
        assert (data / "veilmq.db-wal").stat().st_size
        names = ("veilmq.db", "veilmq.db-wal", "redo", "committed")
        before = {name: sha256((data / name).read_bytes()).digest() for name in names}
        for _ in range(2):  # the refusal let the directory go
            with pytest.raises(SchemaNewer) as refusal:
                SqliteStore(data, SMALL)
            assert refusal.value.found == VERSION + 1
            assert f"schema {VERSION + 1}" in str(refusal.value)
        with pytest.raises(SchemaNewer):
            check(data / "veilmq.db")
        assert {name: sha256((data / name).read_bytes()).digest() for name in names} == before
        connection = connect(data / "veilmq.db")
        connection.pragma("user_version", VERSION)
        connection.close()
        stage.store = factory.open()
        assert bodies(stage.receive(jobs)) == ["in the redo log"]
        stage.store.close()

    def test_one_from_before_the_first_release(self, born: Path) -> None:
        connection = connect(born)
        connection.pragma("application_id", 0x5645494C)
        connection.pragma("user_version", 12)
        connection.close()
        before = sha256(born.read_bytes()).digest()
        for look in (lambda: SqliteStore(born.parent, SMALL), lambda: check(born)):
            with pytest.raises(SchemaUnreleased, match=r"schema 12\).*revision [0-9a-f]{9} can still export it"):
                look()
        assert sha256(born.read_bytes()).digest() == before

    @pytest.mark.parametrize(
        "statement",
        [
            "CREATE TABLE theirs (id INTEGER)",
            "PRAGMA application_id = 7",
            "PRAGMA user_version = 1",
            "PRAGMA user_version = 900",
        ],
        ids=["a table", "an application", "a version", "a high version"],
    )
    def test_another_programs(self, data: Path, statement: str) -> None:
        path = data / "veilmq.db"
        connection = connect(path)
        connection.execute(statement)
        connection.close()
        before = tables(path)
        content = path.read_bytes()
        with pytest.raises(NotOurs):
            SqliteStore(data, SMALL)
        assert tables(path) == before
        assert path.read_bytes() == content

    def test_a_file_that_is_no_database(self, data: Path) -> None:
        path = data / "veilmq.db"
        path.write_bytes(b"something else " * 1_000)
        with pytest.raises(NotOurs):
            SqliteStore(data, SMALL)
        assert path.read_bytes() == b"something else " * 1_000
