"""The SQLite store: takes batches of commands, returns outcomes.

Strategy: `apply` runs the statements of a batch on the caller's thread, and `commit` ends it in any thread; nothing
uses the writer between the two. An error in the middle of a batch rolls the whole batch back. Its commands are then
applied again one by one, so that a command that cannot succeed does not fail the others.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import apsw
import msgspec

from veilmq.model.commands import AnyCommand, Peek, Sweep
from veilmq.model.errors import StoreError, StoreFailed, StoreUnknown
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import Applied, Outcome
from veilmq.store import Options
from veilmq.store.archive.shipping import Archive
from veilmq.store.directory import DatabaseUnusable, DataDirectory, NotOurs, holds_database
from veilmq.store.log import AppendUnknown, Log, NotAppended, NotOwner
from veilmq.store.sqlite import upkeep
from veilmq.store.sqlite.batch import DELIVERED_BYTES_MAX, Writer
from veilmq.store.sqlite.batch.quarantine import CopyDamaged
from veilmq.store.sqlite.disk import (
    DAMAGE,
    MISMATCH,
    Checkpointer,
    check_version,
    close_last,
    close_unchecked,
    fold,
    is_mismatch,
    open_writer,
    reason_of,
    schema,
    unusable,
    verdict,
)
from veilmq.store.sqlite.disk.readers import Readers
from veilmq.store.sqlite.effects import shipping_of
from veilmq.store.sqlite.handlers import serial_order
from veilmq.store.sqlite.loading import load, open_mending
from veilmq.store.sqlite.messages import flush, groups
from veilmq.store.sqlite.reader import SqliteReader
from veilmq.store.sqlite.reading import peeks
from veilmq.store.sqlite.space import Space
from veilmq.store.sqlite.upkeep.trimming import Origins, ReadPins

CRASH_POINTS: Final = (
    "batch opened",
    "batch applied",
    "before commit",
    "after commit",
    "after checkpoint",
)
"""Where a test may kill the process (tests/support)."""
_DISK_LOOK_US: Final = SECOND_US
_APPLIED_MEANWHILE: Final = 16
"""When the log has this many batches that the database lacks, they are copied while an append is under way."""
_DAMAGE: Final = (apsw.Error, *DAMAGE)
"""Errors of reading a damaged table: SQLite notices a torn page, but not a changed value."""

logger = logging.getLogger("veilmq.store")

T = TypeVar("T")


class SqliteStore:
    """See `Store`. Owns a data directory. Opening raises DirectoryHeld, DirectoryUnsafe, DatabaseUnusable, NotOurs,
    SchemaRefused (SchemaOlder: `Options.migrates`), SqliteTooOld."""

    def __init__(
        self,
        path: Path,
        options: Options | None = None,
        at_point: Callable[[str], None] = lambda point: None,
        log: Log | None = None,
        archive: Archive | None = None,
    ) -> None:
        """log: makes the batches durable; the files are then a copy of what it has. archive: gets what the tables'
        transactions changed; the caller starts and closes it."""
        check_version()
        self.options = options or Options()
        if log is not None:
            tables = self.options.schema or schema.VERSION
            self.options = msgspec.structs.replace(self.options, redo_bytes=0, synchronous="NORMAL", schema=tables)
        self._at_point = at_point
        self._log = log
        self._archive = archive
        self._origins = Origins()
        self.pins = ReadPins()
        """What readers of the history need; trimming leaves it alone."""
        directory = DataDirectory(path, self.options.reserve_bytes, self.options.floor_bytes, self.options.disk)
        self.directory = directory
        try:
            is_new = not holds_database(path)
            open_mending(directory.database, self._open, alone=log is None)
        except BaseException:
            self.directory.close()
            raise
        if is_new:
            logger.info("created data directory %s", path.absolute())

    def _open(self, trusting: bool) -> None:
        """trusting: see `open_writer`."""
        if not self.directory.take_reserve():
            free = self.directory.free_bytes()
            logger.warning("no room for the reserve of %d bytes: %d bytes free", self.options.reserve_bytes, free)
        database = self.directory.database
        connection, freed = self._with_reserve(
            lambda: open_writer(database, self.options, trusting=trusting), DatabaseUnusable
        )
        try:
            shipping = shipping_of(connection, self._log, self._archive)
            (self._writer, self._snapshots, self._rolling), freed_now = self._with_reserve(
                lambda: load(connection, self.directory, self.options, shipping), apsw.FullError
            )
            self._space = Space(self.directory, self._writer, has_log=self._log is not None)
            if freed or freed_now:
                self._space.free_reserve(freed=True)
            self._flush_all()
            self._writer.redo.open(self.directory.free_bytes() - self.directory.floor_bytes(), connection)
            if self._log is None:
                with suppress(apsw.FullError):  # a copy of veilmq.db alone then knows which files belong to it
                    fold(connection, self._writer.last_commit.note_folded)
        except (NotOurs, NotAppended, AppendUnknown):
            close_unchecked(connection)
            raise
        except (*_DAMAGE, OSError) as error:
            close_unchecked(connection)
            raise unusable(database, error) from error
        self._writer.step_us_max = self.options.clock_step_us_max  # judged at the next batch, so not before
        self.readers = Readers(
            database, self.options, self.apply_log, trusting=trusting, opening=self._space.check_files
        )
        self.checkpointer = Checkpointer(
            database, self.options, int(connection.pragma("page_size")), self._writer.last_commit.note_folded
        )
        self.reader = SqliteReader(
            self.directory, self.options, self._writer, self.readers, self.checkpointer, self.pins, self.apply_log
        )
        self._disk_looked = Instant(-_DISK_LOOK_US)
        self._broken: str | None = None
        self._trusting = trusting  # pages are read whatever their checksums say
        self._reads_old = False
        """Whether readers miss the latest commits."""
        self._handlers = serial_order(self._sweep)
        if self._archive is not None:
            self._archive.apply_log = self.apply_log

    def _with_reserve(self, step: Callable[[], T], error: type[Exception]) -> tuple[T, bool]:
        """Run a step of opening. If it fails, perhaps because the disk is full, free the reserve and try again. Returns
        the step's result and whether the reserve was freed."""
        try:
            return step(), False
        except error:
            if not self.directory.give_up_reserve():
                raise
            return step(), True

    @property
    def mark(self) -> Instant:
        """High-water mark of the lease clock."""
        return Instant(self._writer.mark.clock)

    @property
    def disk_low(self) -> bool:
        """Whether sends and creates are refused because disk space is low."""
        return self._space.is_low

    def apply(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        self._check_usable()
        self._look_at_disk(now)
        writer = self._writer
        writer.bytes_left = DELIVERED_BYTES_MAX
        try:
            writer.begin(now)
            self._at_point("batch opened")
            outcomes = self._apply_kinds(commands)
            self._finish()
        except Exception as error:  # noqa: BLE001 the batch's edge: roll back, and try each command alone
            self._roll_back(error)
            return self.apply_each(commands, now)
        self._at_point("batch applied")
        return self._applied(outcomes, writer.wrote)

    def _finish(self) -> None:
        """End the batch's statements. Message groups that it changed are written last."""
        if self._writer.memtable.is_full:
            flush(self._writer)
        if self._writer.queues.stale_groups:
            groups.update_all_rows(self._writer)
        self._writer.finish()

    def _apply_kinds(self, commands: Sequence[AnyCommand]) -> list[Outcome]:
        """Apply the commands kind by kind, and return the outcomes in the order of the commands."""
        kinds = list(map(type, commands))
        there = set(kinds)
        if len(there) == 1:
            return self._handlers[kinds[0]](self._writer, list(commands))
        unknown = there - self._handlers.keys()
        assert not unknown, f"no store knows {unknown}"
        outcomes: list[Any] = [None] * len(commands)
        for kind, handler in self._handlers.items():
            if kind in there:
                places = [place for place, each in enumerate(kinds) if each is kind]
                for place, outcome in zip(places, handler(self._writer, [commands[i] for i in places]), strict=True):
                    outcomes[place] = outcome
        return outcomes

    def work_ahead(self) -> bool:
        """See `Store.work_ahead`. A batch that flushes takes half as long if the log was applied before it."""
        writer = self._writer
        try:
            if self._broken is not None or not (writer.memtable.is_full and writer.redo.unapplied):
                return writer.rollups.add_many()
            writer.apply_log()
        except (StoreError, apsw.Error):
            pass  # the next batch meets the same, and so does the end
        except Exception:  # a bug; the next batch must come all the same
            logger.exception("work ahead")
        return True

    @property
    def commit_takes_long(self) -> bool:
        return self._log is not None or self.checkpointer.is_behind

    def begin_commit(self) -> int | None:
        shipping = self._writer.shipping
        if shipping is None or self._log is None:
            return None
        try:
            descriptor = shipping.send(self._writer.mark.clock)
        except (apsw.Error, NotAppended, AppendUnknown):
            return None  # `commit` meets the same
        if descriptor is not None and len(self._writer.redo.unapplied) >= _APPLIED_MEANWHILE:
            with suppress(StoreError, apsw.Error):  # the next batch meets the same; this one has its answer coming
                self.apply_log()
        return descriptor

    def commit_confirmed(self) -> bool | None:
        shipping = self._writer.shipping
        return False if shipping is None or self.checkpointer.is_behind else shipping.confirmed()

    def commit(self) -> None:
        was_behind = self.checkpointer.is_behind
        self._at_point("before commit")
        try:
            self._commit_batch()
        except (apsw.Error, NotAppended, AppendUnknown) as error:
            self._roll_back(error)
            raise StoreFailed(reason=str(error)) from error
        self._at_point("after commit")
        self._checkpoint(lambda: self.checkpointer.committed(self._writer.wal_pages, was_behind=was_behind))
        self._at_point("after checkpoint")

    def _commit_batch(self) -> None:
        """Raises apsw.Error, and as `Log.append`. What the log has is committed: then a failure of this file stops the
        store, but not the answers."""
        shipping = self._writer.shipping
        try:
            self._writer.commit()
        except apsw.Error as error:
            if shipping is None or not shipping.is_ahead:
                raise
            self._broken = f"the log has a batch that {self.directory.database} lacks: {error}"
            logger.error("%s", self._broken)

    def _checkpoint(self, step: Callable[[], None]) -> None:
        """Run a step of a checkpoint. Committed data is durable even if it fails, but after an I/O error the store
        stops."""
        try:
            step()
        except apsw.Error as error:
            logger.warning("checkpoint: %s; the WAL keeps growing", self._classified(error))

    def _classified(self, error: apsw.Error) -> StoreError:
        """The typed error for an SQLite error. If the state is unknown, mark the store broken and raise
        StoreUnknown."""
        judged = verdict(error)
        if is_mismatch(error):
            self.readers.note_mismatch()
        if isinstance(judged, StoreUnknown):
            self._broken = judged.reason
            raise judged from error
        return judged

    def apply_each(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        self._writer.bytes_left = DELIVERED_BYTES_MAX
        visible: dict[Any, int] = {}
        outcomes: list[Outcome] = []
        for command in commands:
            self._check_usable()
            try:
                outcomes.append(self._apply_alone(command, now))
            except NotAppended as error:  # each of the others would wait for the log as long as this one
                outcomes += [StoreFailed(reason=str(error))] * (len(commands) - len(outcomes))
                break
            for key, count in self._writer.take_visible().items():
                visible[key] = visible.get(key, 0) + count
        applied = self._applied(outcomes, wrote=False)
        applied.visible = visible
        return applied

    def _apply_alone(self, command: AnyCommand, now: Instant) -> Outcome:
        try:
            return self._commit_alone(command, now)
        except apsw.FullError as error:
            # The reserve's space may have gone into a checkpoint under way: finish that, so that the WAL can restart.
            self._roll_back(error)
            self._checkpoint(self.checkpointer.finish)
        except Exception as error:  # noqa: BLE001 the command's edge: its failure does not fail the others
            return self._failed_alone(command, error)
        try:
            return self._commit_alone(command, now)
        except Exception as error:  # noqa: BLE001 as above
            return self._failed_alone(command, error)

    def _commit_alone(self, command: AnyCommand, now: Instant) -> Outcome:
        writer = self._writer
        writer.begin(now)
        (outcome,) = self._handlers[type(command)](writer, [command])
        self._finish()
        if writer.open:
            self._commit_batch()
        return outcome

    def _failed_alone(self, command: AnyCommand, error: Exception) -> StoreFailed:
        self._roll_back(error)
        if isinstance(error, NotAppended):
            raise error
        if isinstance(error, apsw.FullError) and self._log is not None and self._writer.redo.unapplied:
            self._broken = f"{self.directory.database} has no room for what the log has: {error}"
        if isinstance(error, apsw.ConstraintError):
            logger.error("%s could not be applied (%s): see what `veilmq check` finds", type(command).__name__, error)
        elif not isinstance(error, apsw.Error):
            logger.error("%s could not be applied", type(command).__name__, exc_info=error)
        return StoreFailed(reason=f"{type(error).__name__}: {error}")

    def query(self, command: Peek, now: Instant) -> Outcome:
        looked = Instant(now - self._writer.held_us)
        return self.readers.read(lambda each: peeks.peek(each, self._writer.queues, command, now, looked))

    def apply_log(self) -> None:
        """Copy the batches that only a log has into the database, for readers of the database. Any thread.

        On a full disk readers see an older committed state. Raises StoreUnknown.
        """
        if os.getpid() != self.directory.pid or not self._writer.redo.unapplied:
            return
        if self._broken is not None:
            raise StoreUnknown(reason=self._broken)
        try:
            self._writer.apply_log()
        except apsw.FullError as error:
            if not self._reads_old:
                logger.warning("readers do not see the latest batches yet: %s", error)
            self._reads_old = True
        except apsw.Error as error:
            raise self._classified(error) from error
        except StoreUnknown as error:
            self._broken = error.reason
            raise
        else:
            self._reads_old = False

    def close(self) -> None:
        is_owner = os.getpid() == self.directory.pid
        if self._broken is None and is_owner:
            try:
                if self._writer.open:
                    self._writer.rollback()
                if self.readers.trusting:
                    self._writer.trust_pages()
                if self._log is None:
                    self._flush_all()
                else:  # the next owner flushes
                    self.apply_log()
                self._writer.release_redo()
            except (*_DAMAGE, StoreUnknown) as error:
                self._broken = str(error)
                logger.error("unclean shutdown: %s: %s", type(error).__name__, reason_of(error))
        try:
            if self._broken is None and is_owner and self._log is None:
                with suppress(apsw.Error):  # notes what the file has; closing the last connection copies, too
                    self.checkpointer.finish()
            self.checkpointer.close()
            self.readers.close()
            how = close_last if self._broken is None else close_unchecked
            self._writer.close(how, waits=is_owner)
        finally:
            self.directory.close()

    def _flush_all(self) -> None:
        """Apply the redo log and flush all messages. At start, because content read from disk is checked in the tables;
        and at close.

        On a full disk the messages stay in their journal. Raises any other error; the state is then unknown.
        """
        writer = self._writer
        try:
            writer.apply_log()
            if not writer.memtable.batches:
                return
            writer.begin(Instant(0))
            flush(writer)
            writer.finish()
            writer.commit()
        except apsw.FullError as error:
            logger.warning("unflushed messages stay in their journal: %s", error)
            writer.rollback()
            self._space.free_reserve()

    def _applied(self, outcomes: list[Outcome], wrote: bool) -> Applied:
        writer = self._writer
        return Applied(writer.now, outcomes, wrote, writer.take_visible(), writer.queues.due.first())

    def _heed_mismatch(self) -> None:
        """A page did not match its checksum: give this copy up, if another server's may be whole; else serve it."""
        self._trusting = True
        gives_up = self.options.gives_up
        if gives_up is not None and gives_up(MISMATCH):
            self._broken = MISMATCH
        else:
            self._writer.trust_pages()

    def _check_usable(self) -> None:
        if self.readers.trusting and not self._trusting:
            self._heed_mismatch()
        if self._broken is not None:
            raise StoreUnknown(reason=self._broken)
        if os.getpid() != self.directory.pid:
            raise StoreUnknown(reason="a forked process may not use its parent's store")

    def _roll_back(self, error: Exception) -> None:
        """Return to the state before the batch. Raises StoreUnknown if that state cannot be known."""
        if isinstance(error, apsw.Error):
            self._classified(error)
        if isinstance(error, StoreUnknown):
            self._broken = error.reason
            raise error
        if isinstance(error, AppendUnknown):  # and the transaction stays open
            self._keep_confirmed()
            self._broken = str(error)
            raise StoreUnknown(reason=self._broken) from error
        try:
            self._writer.rollback()
            self.pins.forget()
        except _DAMAGE as second:
            self._broken = f"rollback failed: {second}"
            raise StoreUnknown(reason=self._broken) from second
        if isinstance(error, NotOwner):
            self._keep_confirmed()
            self._broken = str(error)
        if isinstance(error, CopyDamaged):
            self._broken = str(error)
            raise StoreUnknown(reason=self._broken) from error
        if isinstance(error, apsw.FullError):
            self._space.free_reserve()

    def _keep_confirmed(self) -> None:
        """The store ends: its file gets what only the log has, which may be lost, too."""
        with suppress(apsw.Error, StoreUnknown):
            self._writer.apply_log()

    def _sweep(self, writer: Writer, command: Sweep) -> Outcome:
        return upkeep.sweep(writer, command, self.options, self._snapshots, self.pins, self._origins, self._rolling)

    def _look_at_disk(self, now: Instant) -> None:
        if now - self._disk_looked < _DISK_LOOK_US:
            return
        self._disk_looked = now
        self._writer.last_commit.sync()
        try:
            self._space.look()
            if self.disk_low:
                self._checkpoint(self.checkpointer.give_back)
        except (OSError, apsw.Error) as error:
            self._broken = f"the data directory cannot be looked at: {error}"
            raise StoreUnknown(reason=self._broken) from error
        self.checkpointer.look_again()
