"""A SQLite store with two followers: one gets what each commit changed, the other each batch's commands.

Strategy: the effects are taken by SQLite's session extension, as a cluster will ship them: a patchset of the tables
with bodies and events, which are only inserted and deleted, and a changeset of the others, whose old values make every
divergence a conflict. There is no redo log, so every batch is a transaction. After each commit the tables of both
files must be equal. What a start and an end write is shipped too; tables that belong to one machine are not.

The other follower, the twin, is a store of its own. It applies the same commands at the same instants, with the ids
that the owner drew, and must give the same outcomes and the same tables: a batch depends on nothing else.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import apsw
import msgspec
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.model.commands import AnyCommand
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Applied
from veilmq.store import Store
from veilmq.store.options import Options
from veilmq.store.sqlite.disk.rows import add_functions
from veilmq.store.sqlite.store import SqliteStore

BULKY: Final = ("history", "memtable", "message")
"""Their rows are shipped without old values, which would send each body twice."""
LOCAL: Final = ("redo_log",)
"""Tables of one machine."""


class Diverged(Exception):
    """The follower does not hold what the owner held."""


class Record(msgspec.Struct):
    """What one transaction changed."""

    patch: bytes
    change: bytes

    @property
    def changes(self) -> int:
        """How many rows it changes."""
        return sum(sum(1 for _ in apsw.Changeset.iter(each)) for each in (self.patch, self.change) if each)


class Capture:
    """Takes what a connection changes.

    It must be there from the connection's first statement on: a `DELETE` without WHERE that was compiled before is not
    captured.
    """

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._idle = apsw.Session(connection, "main")
        self._sessions: list[apsw.Session] = []
        self.begin()

    def begin(self) -> None:
        """Forget what was changed, and begin anew."""
        self.end()
        patch, change = apsw.Session(self._connection, "main"), apsw.Session(self._connection, "main")
        patch.table_filter(lambda table: table in BULKY)
        change.table_filter(lambda table: table not in BULKY and table not in LOCAL)
        self._sessions = [patch, change]
        for session in self._sessions:
            session.attach()

    def record(self) -> Record:
        """What was changed since `begin`."""
        patch, change = self._sessions
        return Record(patch.patchset(), change.changeset())

    def end(self) -> None:
        """Forget what was changed."""
        for session in self._sessions:
            session.close()
        self._sessions = []

    def close(self) -> None:
        """Before the connection is closed."""
        self.end()
        self._idle.close()


class Follower:
    """The second file."""

    def __init__(self, path: Path) -> None:
        self._connection = apsw.Connection(str(path))
        self._connection.pragma("journal_mode", "WAL")
        self._connection.pragma("synchronous", "OFF")
        add_functions(self._connection)

    def apply(self, record: Record) -> None:
        """Raises Diverged, with nothing changed."""
        before = self._connection.total_changes()
        with self._connection:
            for payload in (record.patch, record.change):
                if payload:
                    apsw.Changeset.apply(payload, self._connection, conflict=_refuse)
            if self._connection.total_changes() - before != record.changes:
                raise Diverged(f"{self._connection.total_changes() - before} changes of {record.changes}")

    def compare(self, owner: apsw.Connection) -> None:
        """Raises Diverged if a table differs from the owner's."""
        compare(owner, self._connection)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def _refuse(reason: int, change: apsw.TableChange) -> int:
    raise Diverged(f"{apsw.mapping_session_conflict[reason]}: {change.op} in {change.name}: {change.old} {change.new}")


def tables(connection: apsw.Connection) -> list[str]:
    """The tables that are shipped."""
    rows = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return [str(name) for (name,) in rows.fetchall() if name not in LOCAL]


def compare(owner: apsw.Connection, follower: apsw.Connection) -> None:
    """Raises Diverged if a table differs."""
    for table in tables(owner):
        statement = f"SELECT * FROM {table}"
        ours, theirs = (each.execute(statement).fetchall() for each in (owner, follower))
        if ours != theirs and Counter(ours) != Counter(theirs):  # not all tables are in the order of their keys
            raise Diverged(f"{table}: {Counter(ours) - Counter(theirs)} != {Counter(theirs) - Counter(ours)}")


Apply = Callable[[Sequence[AnyCommand], Instant], Applied]
TwinsApply = Callable[[SqliteStore, Sequence[AnyCommand], Instant], Applied]


class FollowedStore(SqliteStore):
    """Compares the follower after each commit, and the twin after each batch."""

    _within_apply = False

    def __init__(
        self, path: Path, options: Options | None = None, at_point: Callable[[str], None] = lambda point: None
    ) -> None:
        captures: list[Capture] = []
        with _captured(path / "veilmq.db", captures):
            options = msgspec.structs.replace(options or SMALL, redo_bytes=0, synchronous="OFF")
            super().__init__(path, options, at_point)
        (self._capture,) = captures
        writer = self._writer
        self._begin, self._commit, self._rollback, self._close = (
            writer.begin,
            writer.commit,
            writer.rollback,
            writer.close,
        )
        if not _follower_of(path).exists():
            _copy(writer.connection, _follower_of(path))
            self._capture.begin()
        self._follower: Follower | None = Follower(_follower_of(path))
        self._follow(self._capture.record())
        self._twin: SqliteStore | None = SqliteStore(_copied_directory(path, writer.connection), options)
        self._next_id, self._ids = writer.next_id, deque[bytes]()
        writer.next_id = self._drawn_id  # type: ignore[method-assign]
        self._twin._writer.next_id = self._ids.popleft  # type: ignore[method-assign]
        writer.begin, writer.commit = self._begin_captured, self._commit_shipped  # type: ignore[method-assign]
        writer.rollback, writer.close = self._rollback_captured, self._close_captured  # type: ignore[method-assign]

    def apply(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        """See `Store.apply`; the twin does the same."""
        return self._both(super().apply, SqliteStore.apply, commands, now)

    def apply_each(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        """See `Store.apply_each`. A twin whose batch fails does so by itself."""
        if self._within_apply:
            return super().apply_each(commands, now)
        return self._both(super().apply_each, SqliteStore.apply_each, commands, now)

    def _both(self, ours: Apply, theirs: TwinsApply, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        self._ids.clear()
        self._within_apply = True
        applied = ours(commands, now)
        self._within_apply = False
        if self._twin is not None:
            assert theirs(self._twin, list(commands), now) == applied
            if not self._writer.open:
                compare(self._writer.connection, self._twin._writer.connection)
        return applied

    def _drawn_id(self) -> bytes:
        drawn = self._next_id()
        self._ids.append(drawn)
        return drawn

    def _begin_captured(self, now: Instant) -> None:
        self._capture.begin()
        self._begin(now)

    def _commit_shipped(self) -> None:
        record = self._capture.record()
        self._commit()
        self._follow(record)
        if self._twin is not None and self._twin._writer.open:
            self._twin.commit()
            compare(self._writer.connection, self._twin._writer.connection)

    def _rollback_captured(self) -> None:
        self._rollback()
        self._capture.begin()
        if self._twin is not None and self._twin._writer.open:
            self._twin._writer.rollback()

    def _close_captured(self, how: Callable[[apsw.Connection], None], *, waits: bool) -> None:
        self._capture.close()
        self._close(how, waits=waits)
        self.stop_shipping()
        if self._twin is not None:
            self._twin.close()
            self._twin = None

    def _follow(self, record: Record) -> None:
        if self._follower is None:
            return
        self._follower.apply(record)
        self._follower.compare(self._writer.connection)

    def stop_shipping(self) -> None:
        """Ship nothing more."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None


def _follower_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-follower.db")


def _twin_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-twin")


def _copied_directory(path: Path, connection: apsw.Connection) -> Path:
    """A data directory with the same content, unless there is one."""
    twin = _twin_of(path)
    if not twin.exists():
        twin.mkdir(mode=0o700)
        _copy(connection, twin / "veilmq.db")
    return twin


def _copy(connection: apsw.Connection, path: Path) -> None:
    with closing(apsw.Connection(str(path))) as target, target.backup("main", connection, "main") as copying:
        copying.step()


@contextmanager
def _captured(path: Path, captures: list[Capture]) -> Iterator[None]:
    """Within it, the first connection to the file that may write gets a capture."""

    def capture(connection: apsw.Connection) -> None:
        if not captures and connection.filename == str(path) and not connection.readonly("main"):
            captures.append(Capture(connection))

    apsw.connection_hooks.append(capture)
    try:
        yield
    finally:
        apsw.connection_hooks.remove(capture)


class FollowedFactory(SqliteFactory):
    """Opens stores that are followed."""

    kind = FollowedStore

    def kill(self, store: Store) -> None:
        """See `SqliteFactory.kill`: nobody is shipped what the close writes."""
        assert isinstance(store, FollowedStore)
        store.stop_shipping()
        twin, store._twin = store._twin, None
        for path, each in ((self.path, store), (_twin_of(self.path), twin)):
            assert each is not None
            (path / "redo").touch()
            SqliteFactory(path).kill(each)
            (path / "redo").unlink()

    def damage(self, sequence: int) -> None:
        """See `StoreFactory.damage`: the same bit flips on all disks."""
        super().damage(sequence)
        with closing(apsw.Connection(str(self.path / "veilmq.db"))) as owner:
            body = owner.execute("SELECT body FROM message WHERE sequence = ?", (sequence,)).get
        for path in (_follower_of(self.path), _twin_of(self.path) / "veilmq.db"):
            with closing(apsw.Connection(str(path))) as other:
                other.execute("UPDATE message SET body = ? WHERE sequence = ?", (body, sequence))
