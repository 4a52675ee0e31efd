"""Records of a log, applied to a follower's file.

Strategy: many records go into one transaction, and plain rows that follow each other are inserted by one statement. A
follower that is far behind also merges the changesets that follow each other into one, in which a row is once. If that
does not fit, its records are applied one after the other, to find the one that does not. A merged changeset is checked
less: what its records make of a row in between is never compared. So one that keeps up does not merge, nor is a record
merged that did not fit before. See docs/decisions/0027-effects.md.

SQLite skips a table that the file does not have, or has in another form, without an error. So the rows of a table are
counted until it has taken some: then it is there, until the file's schema changes.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple

import apsw
import msgspec

from veilmq.store.log import TOGETHER, Changed, Diverged, Entry, FormatUnknown, Plain, Position, Record, checksum
from veilmq.store.sqlite.disk import DAMAGE, schema
from veilmq.store.sqlite.disk.redo import INSERT_HISTORY, INSERT_MEMTABLE, UPDATE_MARK
from veilmq.store.sqlite.effects import MOVE

_RECORD: Final = msgspec.msgpack.Decoder(Record)
_ALONE_BYTES: Final = 48 * 1024
"""A larger record is not merged with others: that takes 0.9 us a row, and saves 130 us a record."""


class _Step(NamedTuple):
    """A record that continues the one before it."""

    position: Position
    """Where the file is after it."""
    record: Record
    run: tuple[int, bool, int]
    """Neighbours with an equal `run` are written together: (schema, whether plain, the record's number if it is to be
    written alone, else 0)."""


class Applier:
    """Applies records to the file of one connection."""

    def __init__(self, connection: apsw.Connection, position: Position) -> None:
        """position: how far the file has come."""
        self._connection = connection
        self.position = position
        self._taken: set[str] = set()
        """Tables that have taken rows since the schema was changed last."""
        self._schema = 0
        """SQLite's number of that change."""
        self.merges_from = TOGETHER
        """From this many records at once on, the follower is far behind, and merges them."""

    def apply(self, entries: Sequence[Entry], forced: int, alone: Collection[int]) -> Changed:
        """See `Follower.apply`. Raises apsw.Error, too: if SQLite has ended the transaction, nothing is applied."""
        changed = Changed(set(), False)
        steps, error = self._continuing(entries, forced, alone)
        if steps and not self.position.lsn and steps[0].record.schema != self._version():
            schema.begin_anew(self._connection, steps[0].record.schema)
        merges = len(entries) >= self.merges_from
        with self._transaction():
            for (_, _, number), run in groupby(steps, attrgetter("run")):
                changed = self._write_run(list(run), changed, merges=merges, is_forced=0 < number == forced)
            if error is not None:
                raise error
        return changed

    def _version(self) -> int:
        return int(self._connection.pragma("user_version"))

    def _continuing(
        self, entries: Sequence[Entry], forced: int, alone: Collection[int]
    ) -> tuple[list[_Step], Exception | None]:
        """The entries that continue the file, and why the next one does not."""
        steps: list[_Step] = []
        last, version = self.position, self._version()
        for lsn, epoch, packed in entries:
            try:
                record = _RECORD.decode(packed)
            except msgspec.MsgspecError as error:
                return steps, Diverged(f"record {lsn} cannot be read: {error}")
            if record.schema > schema.VERSION:
                return steps, FormatUnknown(lsn, record.schema, schema.VERSION)
            if lsn != last.lsn + 1 or record.before != last.checksum:
                return steps, Diverged(f"record {lsn} does not continue record {last.lsn} of this file")
            if record.schema < version and last.lsn:
                return steps, Diverged(f"record {lsn} is of schema {record.schema}, the file of {version}")
            last, version = Position(lsn, epoch, checksum(packed)), record.schema
            is_alone = lsn == forced or lsn in alone or len(record.patch) + len(record.change) > _ALONE_BYTES
            steps.append(_Step(last, record, (version, record.plain is not None, lsn if is_alone else 0)))
        return steps, None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """What is written up to an error stays, unless SQLite itself has ended the transaction, as on a full disk."""
        connection, before = self._connection, self.position
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            reached, self.position = self.position, before
            if connection.in_transaction:
                if reached != before:
                    connection.execute(MOVE, reached)
                connection.execute("COMMIT")
                self.position = reached

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """The block changes all or nothing. Its error is raised as it is, also if SQLite has ended the transaction."""
        self._connection.execute("SAVEPOINT run")
        try:
            yield
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK TO run")
                self._connection.execute("RELEASE run")
            raise
        self._connection.execute("RELEASE run")

    def _write_run(self, run: Sequence[_Step], changed: Changed, *, merges: bool, is_forced: bool) -> Changed:
        if len(run) > 1 and (merges or run[0].record.plain is not None):
            try:
                return self._write(run, changed, is_forced=is_forced)
            except (Diverged, *DAMAGE):
                if not self._connection.in_transaction:
                    raise
        for step in run:
            changed = self._write([step], changed, is_forced=is_forced)
        return changed

    def _write(self, run: Sequence[_Step], changed: Changed, *, is_forced: bool) -> Changed:
        """Write these records as one, or nothing of them. Raises Diverged; apsw.Error."""
        plain = [step.record.plain for step in run if step.record.plain is not None]
        with self._whole():
            schema.migrate(self._connection, run[0].record.schema)
            if plain:
                self._write_plain(plain, is_forced=is_forced)
            else:
                for effects in ([step.record.patch for step in run], [step.record.change for step in run]):
                    changed = self._write_effects([each for each in effects if each], changed, is_forced=is_forced)
        self.position = run[-1].position
        return changed

    def _write_effects(self, effects: Sequence[bytes], changed: Changed, *, is_forced: bool) -> Changed:
        if not effects:
            return changed
        connection, tables = self._connection, set[str]()
        merged = effects[0] if len(effects) == 1 else _merged(effects)
        before, version = connection.total_changes(), int(connection.pragma("schema_version"))
        if version != self._schema:
            self._taken, self._schema = set(), version

        def found(table: str) -> bool:
            tables.add(table)
            return True

        apsw.Changeset.apply(merged, connection, filter=found, conflict=_override if is_forced else _refuse)
        queues = changed.queues
        if "queue" in tables or not tables <= self._taken:
            rows = list(_rows(merged))
            queues |= {key for table, key in rows if table == "queue"}
            if not is_forced:
                if (written := connection.total_changes() - before) != len(rows):
                    raise Diverged(f"{written} rows of {len(rows)} were changed in {', '.join(sorted(tables))}")
                self._taken |= tables
        return Changed(queues, changed.shared or "shared" in tables)

    def _write_plain(self, rows: Sequence[Plain], *, is_forced: bool) -> None:
        """Write the rows, if the mark is where they begin."""
        connection = self._connection
        insert = "INSERT OR REPLACE" if is_forced else "INSERT"
        journals = [(each.history[0], each.journal) for each in rows if each.journal is not None]
        first, last = rows[0].history[0], rows[-1].mark
        if any(after.history[0] != before.mark[3] for before, after in pairwise(rows)):
            raise Diverged("a record does not begin at the mark of the one before")
        try:
            connection.executemany(INSERT_HISTORY.replace("INSERT", insert), [each.history for each in rows])
            connection.executemany(INSERT_MEMTABLE.replace("INSERT", insert), journals)
            if is_forced:
                connection.execute(UPDATE_MARK, last)
            elif connection.execute(f"{UPDATE_MARK} WHERE offset = ? RETURNING 1", (*last, first)).get is None:
                raise Diverged(f"the mark is not at {first}, where the record begins")
        except (apsw.ConstraintError, apsw.SQLError) as error:  # a row is there already, or a table is not
            raise Diverged(str(error)) from error


def _merged(effects: Sequence[bytes]) -> bytes:
    """One changeset of several, or one patchset."""
    with closing(apsw.ChangesetBuilder()) as builder:  # type: ignore[no-untyped-call]
        for each in effects:
            builder.add(each)
        return builder.output()


def _rows(changeset: bytes) -> Iterator[tuple[str, Any]]:
    """Of each row its table and the first value, which is the key of a queue."""
    for change in apsw.Changeset.iter(changeset):
        row: Any = change.old or change.new
        yield change.name, row[0]


def _refuse(reason: int, change: apsw.TableChange) -> int:
    row: Any = change.new if change.op == "INSERT" else change.old
    key = ", ".join(str(row[column]) for column in sorted(change.pk_columns))
    raise Diverged(f"{apsw.mapping_session_conflict[reason]}: {change.op} in {change.name}, row {key}")


def _override(reason: int, change: apsw.TableChange) -> int:
    is_here = reason in {apsw.SQLITE_CHANGESET_DATA, apsw.SQLITE_CHANGESET_CONFLICT}
    return apsw.SQLITE_CHANGESET_REPLACE if is_here else apsw.SQLITE_CHANGESET_OMIT
