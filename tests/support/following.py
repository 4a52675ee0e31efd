"""A SQLite store with three followers: two get the records of its log, the third each batch's commands.

Strategy: the store's log is in memory, and applies each record to a follower as it is appended. The tables of both
files must be equal after each commit that was a transaction, and after every third of the others: until then the
owner's file lacks them. The late follower applies the same records many at a time, as one that is behind does.

The third follower, the twin, is a store of its own. It applies the same commands at the same instants, with the ids
that the owner drew, and must give the same outcomes and the same tables: a batch depends on nothing else.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import apsw
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.model.commands import AnyCommand
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Applied
from veilmq.store import Options, Store
from veilmq.store.log import Diverged, Entry
from veilmq.store.sqlite.batch.memtable import BATCHES_MAX
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.effects import LOCAL
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.store import SqliteStore


class FollowedLog:
    """A log that a follower reads at once. See `veilmq.store.log.Log`."""

    def __init__(self, path: Path, options: Options) -> None:
        self.epoch = 1
        self.follower: SqliteFollower | None = SqliteFollower(path, options)
        self.late = SqliteFollower(_late_of(path), options)
        self.late._applier.merges_from = 2
        self.waiting: list[Entry] = []
        """What the late follower has not applied."""
        self.records = 0
        self.latest = deque[Entry](maxlen=2 * BATCHES_MAX)
        """The last records."""

    def append(self, lsn: int, record: bytes) -> None:
        """See `Log.append`. Raises Diverged too."""
        if self.follower is not None:
            entry = Entry(lsn, self.epoch, record)
            self.follower.apply([entry])
            self.records += 1
            self.latest.append(entry)
            self.waiting.append(entry)

    def send(self, lsn: int, record: bytes) -> int | None:
        """See `Log.send`: `append` does it all."""

    def confirmed(self) -> bool:
        """See `Log.confirmed`."""
        return False

    def compare(self, owner: apsw.Connection) -> None:
        """Raises Diverged if a table differs from the owner's."""
        if self.follower is not None:
            compare(owner, self.follower._connection)
            if len(self.waiting) >= TOGETHER:
                self.late.apply(self.waiting)
                self.waiting = []
                compare(owner, self.late._connection)

    def close(self) -> None:
        """Ship nothing more."""
        if self.follower is not None:
            self.late.apply(self.waiting)
            compare(self.follower._connection, self.late._connection)
            self.late.close()
            self.follower.close()
            self.follower = None


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


TOGETHER: Final = 12
"""Records that the late follower applies at once."""
_IDS: Final = 4_096
"""More than a batch draws."""


class FollowedStore(SqliteStore):
    """Compares the follower after each commit, and the twin after each batch."""

    _within_apply = False

    def __init__(
        self, path: Path, options: Options | None = None, at_point: Callable[[str], None] = lambda point: None
    ) -> None:
        options = options or SMALL
        self.followed = FollowedLog(_follower_of(path), options)
        super().__init__(path, options, at_point, self.followed)
        self.followed.compare(self._writer.connection)
        self._twin: SqliteStore | None = SqliteStore(_copied_directory(path, self._writer.connection), self.options)
        self._rollback = self._writer.rollback
        self._writer.rollback = self._rollback_both  # type: ignore[method-assign]

    def apply(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        """See `Store.apply`; the twin does the same."""
        return self._both(super().apply, SqliteStore.apply, commands, now)

    def apply_each(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        """See `Store.apply_each`. A twin whose batch fails does so by itself."""
        if self._within_apply:
            return super().apply_each(commands, now)
        return self._both(super().apply_each, SqliteStore.apply_each, commands, now)

    def _both(self, ours: Apply, theirs: TwinsApply, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        ids = list(self._writer.ids(_IDS))
        self._within_apply = True
        applied = ours(commands, now)
        self._within_apply = False
        if self._twin is not None:
            self._twin._writer._ids = ids
            assert theirs(self._twin, list(commands), now) == applied
            if not self._writer.open and self._is_whole():
                compare(self._writer.connection, self._twin._writer.connection)
        return applied

    def _is_whole(self) -> bool:
        """Whether the file has all that the log has."""
        if self.followed.records % 3 == 0:
            self.apply_log()
        return not self._writer.redo.unapplied

    def _commit_batch(self) -> None:
        super()._commit_batch()
        if self._is_whole():
            self.followed.compare(self._writer.connection)

    def commit(self) -> None:
        """See `Store.commit`; the twin does the same."""
        super().commit()
        if self._twin is not None and self._twin._writer.open:
            self._twin.commit()
            if self._is_whole():
                compare(self._writer.connection, self._twin._writer.connection)

    def _rollback_both(self) -> None:
        self._rollback()
        if self._twin is not None and self._twin._writer.open:
            self._twin._writer.rollback()

    def close(self) -> None:
        """See `Store.close`; the followers close too."""
        super().close()
        self.followed.close()
        if self._twin is not None:
            self._twin.close()
            self._twin = None


def _follower_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-follower")


def _late_of(follower: Path) -> Path:
    return follower.with_name(f"{follower.name}-late")


def _twin_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-twin")


def _copied_directory(path: Path, connection: apsw.Connection) -> Path:
    """A data directory with the same content that follows no log, unless there is one."""
    twin = _twin_of(path)
    if not twin.exists():
        twin.mkdir(mode=0o700)
        with closing(connect(twin / "veilmq.db")) as target:
            with target.backup("main", connection, "main") as copying:
                copying.step()
            target.execute("DELETE FROM log_position")
    return twin


def bring(path: Path, records: Iterable[Entry]) -> None:
    """Apply what a closed owner's file lacks of these records."""
    with closing(SqliteFollower(path, SMALL)) as owner:
        owner.apply([each for each in records if each.lsn > owner.position.lsn])


class FollowedFactory(SqliteFactory):
    """Opens stores that are followed."""

    kind = FollowedStore

    def kill(self, store: Store) -> None:
        """See `SqliteFactory.kill`. Then the file gets what only the log has, as a server does when it starts."""
        assert isinstance(store, FollowedStore)
        twin, store._twin = store._twin, None
        for path, each in ((self.path, store), (_twin_of(self.path), twin)):
            assert each is not None
            (path / "redo").touch()
            SqliteFactory(path).kill(each)
            (path / "redo").unlink()
        bring(self.path, list(store.followed.latest))

    def damage(self, sequence: int) -> None:
        """See `StoreFactory.damage`: the same bit flips on all disks."""
        self.open().close()  # flushes: a store whose batches are in a log does so when it is opened
        super().damage(sequence)
        with closing(connect(self.path / "veilmq.db")) as owner:
            body = owner.execute("SELECT body FROM message WHERE sequence = ?", (sequence,)).get
        follower = _follower_of(self.path)
        for path in (follower, _late_of(follower), _twin_of(self.path)):
            with closing(connect(path / "veilmq.db")) as other:
                other.execute("UPDATE message SET body = ? WHERE sequence = ?", (body, sequence))
