"""What a transaction changed: taken on the owner, for a log from which followers apply it (follower/applying.py).

Strategy: SQLite's session extension records the rows that a transaction changed. A patchset holds those of the tables
with bodies and events, which are inserted and deleted, but not updated; a changeset would hold each body twice. A
changeset holds the rows of all other tables with their old values, so a follower that differs notices it: SQLite calls
that a conflict, and every conflict ends the follower. Most batches only write a row of history, one of the memtable and
the mark: those are shipped as they are (`Plain`), and the owner's own file gets them later, many in one transaction.
See docs/decisions/0027-effects.md.

Before changing it: a session says nothing about what it skips. It skips a table without a primary key, a row that is
inserted and deleted again, and a `DELETE` without WHERE that was compiled before the connection had any session. And
SQLite skips a table that the follower does not have.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import apsw
import msgspec

from veilmq.store.archive import EPOCH_MIN
from veilmq.store.archive.shipping import Archive, remove_leftovers
from veilmq.store.directory import NotOurs
from veilmq.store.log import Log, Plain, Position, Record, checksum
from veilmq.store.sqlite.disk import schema

BULKY: Final = ("history", "memtable", "message")
"""Tables with bodies and events."""
LOCAL: Final = ("log_position", "redo_log")
"""Tables of one machine; they are not shipped."""
_POSITION: Final = "SELECT lsn, epoch, checksum FROM log_position"
MOVE: Final = "INSERT OR REPLACE INTO log_position VALUES (1, ?, ?, ?)"
_KEYS: Final = "SELECT name FROM pragma_table_info(?) WHERE pk ORDER BY pk"
_ROWS: Final = 500
_ENCODE: Final = msgspec.msgpack.Encoder().encode


def position(connection: apsw.Connection) -> Position | None:
    """How far the file has come in a log; None if it follows none."""
    row = connection.execute(_POSITION).fetchone()
    return None if row is None else Position(*row)


def shipping_of(connection: apsw.Connection, log: Log | None, archive: Archive | None) -> "Shipping | None":
    """For a store that was just opened. Raises NotOurs if its batches are in a log and none is given."""
    if log is not None:
        return Shipping(connection, log)
    found = position(connection)
    if found is not None and found.epoch < EPOCH_MIN:
        directory = Path(connection.filename).parent
        raise NotOurs(
            f"{directory} is a copy that a server of a cluster keeps: start it with --cluster; or it was imported into "
            "a cluster, whose servers begin with empty directories"
        )
    if archive is not None:
        return Archiving(connection, archive, found)
    if found is not None:  # its archive will lack what is written from here on
        connection.execute("DELETE FROM log_position")
        remove_leftovers(Path(connection.filename).parent)
    return None


class Shipping:
    """The owner's side: appends what each batch changes to the log, before its transaction is committed."""

    makes_durable = True
    """Whether a batch is durable by its record, so that the file may get it later."""

    def __init__(self, connection: apsw.Connection, log: Log) -> None:
        """Call before the connection changes any row."""
        self._connection, self._log = connection, log
        self._position = position(connection) or Position(0, 0, 0)
        self._next = self._position
        self._schema = int(connection.pragma("user_version"))
        self._idle = apsw.Session(connection, "main")
        self._sessions: list[apsw.Session] = []
        self._packed: tuple[Position, bytes] | None = None
        """The batch's record, once its append has begun."""
        self._plain: Plain | None = None
        """What the batch changes, if it began no transaction."""

    @property
    def awaits_record(self) -> bool:
        """Whether there must soon be a record, even if nothing changes."""
        return False

    @property
    def is_ahead(self) -> bool:
        """Whether the log has a record that was not committed here."""
        return self._next is not self._position

    def begin(self) -> None:
        """A transaction began."""
        if self._sessions:  # of one that failed
            self.end("ROLLBACK")
        patch, change = apsw.Session(self._connection, "main"), apsw.Session(self._connection, "main")
        patch.table_filter(lambda table: table in BULKY)
        change.table_filter(lambda table: table not in BULKY and table not in LOCAL)
        self._sessions = [patch, change]
        for session in self._sessions:
            session.attach()

    def keep(self, plain: Plain) -> None:
        """Note what the batch changes. It needs no transaction now: `later` writes it."""
        self._plain = plain

    def send(self, clock: int) -> int | None:
        """Begin to append what the transaction changed. Returns and raises as `Log.send`, and apsw.Error.

        clock: the lease clock after the transaction.
        """
        self._packed = self._record(clock)
        return None if self._packed is None else self._log.send(self._packed[0].lsn, self._packed[1])

    def confirmed(self) -> bool | None:
        return self._log.confirmed()

    def append(self, clock: int) -> None:
        """Append what the transaction changed, if it changed anything, or finish what `send` began. Raises as
        `Log.append`, and apsw.Error."""
        packed = self._packed or self._record(clock)
        if packed is not None:
            following, record = packed
            self._log.append(following.lsn, record)
            self._next = following

    def _record(self, clock: int) -> tuple[Position, bytes] | None:
        if self._plain is not None:
            return self._following(clock, b"", b"")
        patch, change = self._sessions
        effects = (patch.patchset(), change.changeset())
        return self._following(clock, *effects) if any(effects) else None

    def migrate(self, version: int) -> None:
        """Migrate older tables, with a record of its own: a follower migrates when it applies the first record of newer
        tables. Raises as `append`."""
        if self._schema >= version:
            return
        with self._connection:
            schema.migrate(self._connection, version)
            self._schema = version
            following, record = self._following(0, b"", b"")
            self._log.append(following.lsn, record)
        self._position = self._next = following

    def _following(self, clock: int, patch: bytes, change: bytes) -> tuple[Position, bytes]:
        last = self._position
        record = _ENCODE(Record(self._schema, clock, last.checksum, patch, change, self._plain))
        following = Position(last.lsn + 1, self._log.epoch, checksum(record))
        if self._plain is None:
            self._connection.execute(MOVE, following)
        return following, record

    def end(self, how: str) -> None:
        """The batch ended, by COMMIT or ROLLBACK."""
        if how == "COMMIT":
            self._position = self._next
        for session in self._sessions:
            session.close()
        self._sessions, self._packed, self._plain = [], None, None

    def close(self) -> None:
        """Call before the connection is closed."""
        self.end("ROLLBACK")
        self._idle.close()

    @contextmanager
    def changes(self, clock: int) -> Iterator[None]:
        """Append what the block changes, in a transaction that has just begun. Raises as `append`."""
        self.begin()
        yield
        self.append(clock)

    @contextmanager
    def later(self, clock: int) -> Iterator[None]:
        """The block writes what committed batches passed to `keep`, in a transaction that has just begun. `applied`
        follows its COMMIT. Raises apsw.Error; as `append` where only this makes a record of them.

        clock: the lease clock.
        """
        yield
        self._connection.execute(MOVE, self._position)

    def applied(self) -> None:
        """What the last `later` wrote is committed."""

    @contextmanager
    def transaction(self, clock: int) -> Iterator[None]:
        """A transaction outside the batches. clock: of the newest batch in it; 0: there is none. Raises as `append`."""
        with self._connection, self.changes(clock):
            yield
        self.end("COMMIT")


class Archiving(Shipping):
    """Appends to an archive: here the transaction makes a batch durable, and its record is uploaded later."""

    makes_durable = False
    is_ahead = False

    def __init__(self, connection: apsw.Connection, archive: Archive, found: Position | None) -> None:
        """found: the position that the database has."""
        connection.execute("INSERT OR IGNORE INTO secret VALUES (1, ?, ?)", schema.fresh_secret())
        lineage: Any = connection.execute("SELECT epoch FROM secret").get
        if (begun := archive.begin(lineage.hex(), found)) != found:
            connection.execute(MOVE, begun)
        super().__init__(connection, archive)
        self._archive = archive

    @property
    def awaits_record(self) -> bool:
        return self._archive.awaits_record

    @contextmanager
    def later(self, clock: int) -> Iterator[None]:
        """See `Shipping.later`: what the redo log had is a record now."""
        with self.changes(clock):
            yield

    def applied(self) -> None:
        self.end("COMMIT")

    def end(self, how: str) -> None:
        if how == "COMMIT":
            if self._next is not self._position:
                self._archive.committed()
        else:
            self._next = self._position
            self._archive.forget()
        super().end(how)


def digest(connection: apsw.Connection, rest: Callable[[float], object] = lambda seconds: None) -> bytes:
    """What the shipped tables hold, row by row in the order of their keys: equal files have equal digests.

    Call in a read transaction. rest: called with the seconds that a part of the work took.
    """
    found = sha256()
    names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name").fetchall()
    for name in (str(name) for (name,) in names):
        if name in LOCAL or name.startswith("sqlite_"):
            continue
        keys = [str(key) for (key,) in connection.execute(_KEYS, (name,))]
        found.update(name.encode())
        rows = connection.execute(f"SELECT * FROM {name} ORDER BY {', '.join(keys)}")
        began = perf_counter()
        while part := list(islice(rows, _ROWS)):
            found.update(_ENCODE(part))
            rest(perf_counter() - began)
            began = perf_counter()
    return found.digest()
