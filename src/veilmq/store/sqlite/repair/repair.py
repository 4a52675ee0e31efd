"""`veilmq check --repair`: writes a new data directory with everything that can be had of a damaged one.

Strategy: the source is only read. First its database is put together as the last commit left it: the file, the good
frames of the WAL, the records of the redo log that follow. If SQLite and `check` find that in order, it is the new
database. If not, its rows are taken over one by one (`salvage`), and what is missing is looked for in older pages and
in the backup. The new database has a receipt key and an epoch of its own, as the copy of a backup has: old handles are
void, and readers of the history begin anew.

At the end a salvaged database gets the numbers that only grow, and a history that begins with a snapshot of what is
there. The history is kept as far back as it is without a gap. Behind it a snapshot lists every queue and message, so
that the books of `veilmq check` begin there, and readers know the whole state at its end.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import apsw
import msgspec

from veilmq.model.events import SCHEMA_VERSION, Event, Kind, Part
from veilmq.model.instant import HOUR_US, Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.model.wording import counted
from veilmq.store import Options
from veilmq.store.directory import (
    COMMITTED,
    DATABASE,
    REDO,
    DatabaseFailed,
    DirectoryHeld,
    NotOurs,
    Progress,
    is_held,
    read_holder,
)
from veilmq.store.files import sync_directory, take_name
from veilmq.store.sqlite import tools
from veilmq.store.sqlite.batch.history_index import history_end
from veilmq.store.sqlite.batch.memtable import replay
from veilmq.store.sqlite.batch.queues import SETTINGS_DECODER
from veilmq.store.sqlite.disk import check_version, connect, is_full, open_reader, reason_of, schema, trust_pages
from veilmq.store.sqlite.disk.redo import INSERT_HISTORY, apply_log, last_commit
from veilmq.store.sqlite.disk.redo import file as redo_file
from veilmq.store.sqlite.disk.redo.last_commit import Noted
from veilmq.store.sqlite.disk.schema import fresh_secret
from veilmq.store.sqlite.raw import Image, assemble, page_bytes
from veilmq.store.sqlite.raw.free_list import free_pages
from veilmq.store.sqlite.raw.logs import NO_WAL, Frame, Log, Wal, read_log, read_wal
from veilmq.store.sqlite.repair import Export, Repair
from veilmq.store.sqlite.repair.salvage import NUMBER_MAX, Salvage
from veilmq.store.sqlite.repair.salvage.tables import EVENTS, Backup, read
from veilmq.store.sqlite.repair.settle import server, settle
from veilmq.store.sqlite.settings.queue_commands import recorded_settings
from veilmq.store.sqlite.tools.backup import made, renew
from veilmq.store.sqlite.tools.books import Recorded, listed
from veilmq.store.sqlite.upkeep.snapshots import HELD, MESSAGES_MAX

_ROW_EVENTS: Final = 64
"""Events in a row of the snapshot."""
_BREAK: Final = (
    "SELECT max(offset) FROM (SELECT offset, lag(offset + count) OVER (ORDER BY offset) AS expected FROM history)"
    " WHERE offset <> expected"
)
_QUEUES: Final = (
    "SELECT incarnation, account, region, name, generation, created, modified, settings FROM queue"
    " WHERE deleted IS NULL ORDER BY incarnation"
)
_MARK: Final = (
    "INSERT OR REPLACE INTO mark SELECT 1, ?, max(ifnull((SELECT max(sequence) FROM message), 0),"
    " ifnull((SELECT sequence FROM mark), 0), ifnull((SELECT max(sequence) FROM deduplication), 0)),"
    " max(ifnull((SELECT max(generation) FROM queue), 0), ifnull((SELECT generation FROM mark), 0)), ?"
)
_ENCODE: Final = msgspec.msgpack.Encoder().encode

T = TypeVar("T")


def clock_of(target: apsw.Connection, noted: Noted | None) -> Instant:
    """The lease clock: that of the mark, unless the history and the last commit say that it cannot be right."""
    ((mark, known),) = read(target, "SELECT (SELECT clock FROM mark), (SELECT max(at) FROM history)")
    latest = max(known or 0, 0 if noted is None else noted.clock)
    is_right = mark is not None and (latest <= mark <= latest + HOUR_US or not latest)
    return Instant(mark if is_right else latest)


def _end(target: apsw.Connection, clock: Instant, offset_min: int) -> None:
    """Write the mark, the secret, and the snapshot. offset_min: the next offset, if the history ends before it."""
    target.execute(f"DELETE FROM history WHERE offset < ({_BREAK})")
    target.execute("DELETE FROM history WHERE offset <= ?", (_last_contradiction(target),))
    row: Any = target.execute("SELECT max(offset + count) FROM history").fetchone()
    offset = max(offset_min, 1) if row[0] is None else row[0]  # a snapshot at 0 would not begin the books
    target.execute(_MARK, (clock, offset))
    for kind, statement in tools.NUMBERS.items():
        last: Any = target.execute(statement).get
        target.execute(
            "INSERT INTO last_number VALUES (?, ?) ON CONFLICT (kind) DO UPDATE SET last = max(last, excluded.last)",
            (kind, last or 0),
        )
    target.execute("INSERT OR REPLACE INTO secret VALUES (1, ?, ?)", fresh_secret())
    _write_snapshot(target, clock, offset)


def _last_contradiction(target: apsw.Connection) -> int:
    """The last row of the history that says something else than the tables; -1: none does."""
    recorded, last = Recorded(target, []), -1
    rows: Any = target.cursor().execute("SELECT offset, events FROM history ORDER BY offset")
    for offset, packed in rows:
        for event in EVENTS.decode(packed):
            if recorded.compare(event):
                last = offset
    return NUMBER_MAX if any(recorded.queues()) else last


def _write_snapshot(target: apsw.Connection, clock: Instant, offset: int) -> None:
    begin, size = offset, history_end(target)
    for events in _pieces(_snapshot(target, clock, begin), _ROW_EVENTS):
        packed = _ENCODE(events)
        target.execute(INSERT_HISTORY, (offset, len(events), clock, size, SCHEMA_VERSION, packed))
        offset, size = offset + len(events), size + len(packed)
    target.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?)", (begin, offset - 1))
    target.execute("UPDATE mark SET offset = ?", (offset,))
    target.execute("UPDATE rollup_mark SET offset = ?, garbage = 1", (offset,))


def _snapshot(target: apsw.Connection, clock: Instant, begin: int) -> Iterator[Event]:
    origin = server(target)
    last: Any = target.execute("SELECT sequence FROM mark").get

    def event(queue: int | None, detail: dict[str, Any]) -> Event:
        return Event(Kind.SNAPSHOT, clock, queue, origin, detail=detail)

    yield event(None, {"part": Part.BEGIN, "last": last})
    incarnations = {}
    for incarnation, account, region, name, generation, created, modified, settings in read(target, _QUEUES):
        incarnations[generation] = incarnation
        detail = {"part": Part.QUEUE, "created": created, "modified": modified}
        recorded = recorded_settings(QueueKey(account, region, name), SETTINGS_DECODER.decode(settings))
        yield event(incarnation, detail | recorded)
    messages: Any = target.cursor().execute(HELD, (0, last, -1))
    for generation, group in groupby(messages, key=lambda row: row[0]):
        for held in _pieces((row[1:] for row in group), MESSAGES_MAX):
            yield event(incarnations[generation], {"part": Part.MESSAGES, "messages": held})
    yield event(None, {"part": Part.END, "begin": begin})


def _pieces(values: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(values)
    while piece := list(islice(iterator, size)):
        yield piece


EXPORT: Final = "not-placed.jsonl"
_NAMES: Final = "queue_by_name"
_QUEUE_NAMES: Final = (
    "SELECT generation, account || '/' || region || '/' || name FROM queue WHERE deleted IS NULL ORDER BY 2"
)
_OLD_WAL: Final = f"{DATABASE}-wal: left out, because {DATABASE} is of a later moment"
_OTHER_WAL: Final = f"{DATABASE}-wal: left out, because it is of another database or copy"
_READS: Final = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
_AGREED: Final = "SELECT offset FROM mark WHERE offset = (SELECT max(offset + count) FROM history)"
_CONTENT: Final = (
    "SELECT message.generation, iif(q.sequence IS NOT NULL, 'quarantined', iif(ifnull(hidden, 0) = 0, 'visible',"
    " iif(attempt > 0, 'in_flight', 'delayed'))) AS state, count(*) FROM message LEFT JOIN lease USING (sequence)"
    " LEFT JOIN quarantine q USING (sequence) GROUP BY 1, 2"
)


class _State(NamedTuple):
    """A database as it was put together."""

    key: bytes
    epoch: bytes
    following: int
    """The next offset of its history, with what the redo log adds."""
    problems: list[str]
    later: bool
    """Whether the redo log has batches that do not follow: something before them is missing."""
    is_other: bool
    """Whether its last batch is not the one that was committed last."""


def repair(source: Path, destination: Path, backup: Path | None, progress: Progress) -> Repair:
    """Write what can be had of `source` (and of `backup`, a data directory) into the new directory.

    Raises DestinationTaken, DirectoryHeld, DatabaseFailed (nothing can be had, or written), SchemaRefused, OSError;
    then the new directory is removed.
    """
    check_version()
    report = Repair(directory=str(destination))
    with _looking(source), made(destination):
        try:
            _Work(source, destination, backup, report, progress).run()
        except BaseException as error:
            for left in destination.iterdir():
                left.unlink()
            if isinstance(error, apsw.Error) and is_full(error, destination):
                raise DatabaseFailed(f"no space is left for {destination}") from error
            if isinstance(error, apsw.Error):
                raise DatabaseFailed(f"{destination}: {reason_of(error)}") from error
            raise
    sync_directory(destination.parent)
    return report


@contextmanager
def _looking(source: Path) -> Iterator[None]:
    """No server starts on the source meanwhile. Raises DirectoryHeld if one runs, also if its lock was deleted."""
    with ExitStack() as opened:
        for place in (source / "lock", source):  # a server holds both
            with suppress(OSError):
                lock = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, lock)
                if is_held(lock):
                    raise DirectoryHeld(source, read_holder(source))
                fcntl.flock(lock, fcntl.LOCK_SH)
        yield


class _Work:
    """One repair."""

    def __init__(
        self, source: Path, destination: Path, backup: Path | None, report: Repair, progress: Progress
    ) -> None:
        self._database = source.absolute() / DATABASE
        self._target = destination / "salvage.part"
        self._part = destination / f"{DATABASE}.part"
        self._export = Export(destination / EXPORT, report)
        self._backup = None if backup is None else backup / DATABASE
        self._frames: list[Frame] = []
        self._key: bytes | None = None
        """The receipt key of the redo log, if the database has another."""
        self._offset = NUMBER_MAX
        """The next offset of the history in the tables that were put together, if that can be read."""
        self._doubts = False
        """Whether some page is not the newest, and nobody knows which."""
        self._report = report
        self._progress = progress
        self._notes = last_commit.newest_first(source / COMMITTED)
        self._noted = next(iter(self._notes), None)
        if self._noted is None:
            report.found.append(f"{COMMITTED}: missing or damaged, so nobody knows what was committed last")

    def run(self) -> None:
        """Write the new directory's database, which takes its name when it is whole, and complete the report."""
        with nullcontext() if self._backup is None else closing(Backup(self._backup)) as backup:
            image, state = self._put_together()
            if backup is not None and state is not None and self._is_older(state, backup):
                image.close()
                self._key = state.key
                image, state = self._assembled(backup.database, NO_WAL)
                self._report.found.append(
                    f"veilmq.db: older than the backup {backup.database.parent}, which was taken instead"
                )
            with closing(image), closing(self._export):
                if state is None or state.problems or state.later or image.suspects or self._doubts:
                    following = self._salvage(image, backup, state)
                else:
                    following = state.following
                    self._target = self._part
                    renew(self._target)
        self._count(following, state)
        take_name(self._target, self._target.with_name(DATABASE))
        self._part.unlink(missing_ok=True)

    def _put_together(self) -> tuple[Image, _State | None]:
        """The database with the WAL and the redo log. Frames in doubt are used only if something is missing without
        them."""
        found = read_wal(Path(f"{self._database}-wal"), page_bytes(self._database))
        self._report_wal(found)
        self._frames = found.frames
        firm, reported = found.firm(), len(self._report.found)
        image, state = self._assembled(self._database, firm)
        is_other = state is not None and state.is_other
        # Frames in doubt may have more than the file.
        is_older = firm.frames == found.frames and self._offset_alone() > self._offset
        if is_other or is_older:
            image.close()
            image, alone = self._assembled(self._database, NO_WAL)
            if is_other and (alone is None or not alone.is_other):
                self._report.found[reported:], self._frames = [_OTHER_WAL], []
                return image, alone
            if not is_other and alone is not None and not alone.problems:  # else a checkpoint was under way
                self._report.found[reported:], self._report.may_miss = [_OLD_WAL], False
                return image, alone
            image.close()
            del self._report.found[reported:]
            image, state = self._assembled(self._database, firm)
        if firm.frames == found.frames or (state is not None and not self._lacks(state)):
            return image, state
        image.close()
        image, other = self._assembled(self._database, found)
        if other is not None and other.is_other:
            image.close()
            self._report.found[reported:], self._frames = [_OTHER_WAL], []
            return self._assembled(self._database, NO_WAL)
        is_better = self._noted is not None if other is None else state is None or other.following > state.following
        if state is not None and not is_better:
            image.close()
            return self._assembled(self._database, firm)
        self._doubts = found.lost > 0
        self._report.found.append("veilmq.db-wal: what is behind destroyed frames was used")
        return image, other

    def _offset_alone(self) -> int:
        """The next offset of the history without the WAL; 0: unknown, or mark and history differ."""
        with suppress(apsw.Error), closing(apsw.Connection(f"{self._database.as_uri()}?immutable=1", _READS)) as alone:
            return int(alone.execute(_AGREED).get or 0)
        return 0

    def _lacks(self, state: _State) -> bool:
        """Whether something that was committed is missing, as far as is known."""
        noted = self._noted
        return noted is None or (noted.epoch == state.epoch and noted.offset > state.following)

    def _is_older(self, state: _State, backup: Backup) -> bool:
        """Whether the database is an earlier state of the backup's."""
        ((offset,),) = backup.read("SELECT offset FROM mark")
        if offset <= state.following:
            return False
        with closing(connect(self._part)) as connection:
            trust_pages(connection)
            last = read(connection, "SELECT offset, events FROM history ORDER BY offset DESC LIMIT 1")
        same = "SELECT 1 FROM history WHERE offset = ? AND events = ?"
        return not last or bool([*backup.read(same, last[0])])

    def _report_wal(self, found: Wal) -> None:
        damaged = found.lost + sum(not frame.is_good for frame in found.frames)
        if found.frames or found.unfinished:
            self._report.found.append(
                f"veilmq.db-wal: {counted(len(found.frames) + found.lost, 'frame')} up to the last commit;"
                f" {found.mended} had one bit flipped, which was flipped back; {damaged} damaged"
            )

    def _report_pages(self, image: Image) -> None:
        """Report the pages that did not match their checksums. What is left of them is taken as it is."""
        if mended := len(image.pages.mended):
            self._report.found.append(
                f"veilmq.db: {counted(mended, 'page')} had one bit flipped, which was flipped back"
            )
        self._report.pages_wrong = wrong = len(set(image.pages.left) - free_pages(image))
        if wrong:
            self._report.found.append(
                f"veilmq.db: {counted(wrong, 'page')} with a wrong checksum; values of their rows may be wrong"
            )

    def _assembled(self, database: Path, found: Wal) -> tuple[Image, _State | None]:
        """The database in a file of its own, and what SQLite says about it."""
        image = assemble(database, found, self._part)
        self._report_pages(image)
        try:
            state = self._judged()
        except apsw.FullError:
            raise
        except (apsw.Error, NotOurs, DatabaseFailed, msgspec.MsgspecError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0][:120]
            self._report.found.append(f"veilmq.db: SQLite cannot read it: {reason}")
            state = None
        for left in ("-wal", "-shm", "-journal"):
            Path(f"{self._part}{left}").unlink(missing_ok=True)
        image.refresh()
        return image, state

    def _judged(self) -> _State:
        """Apply the redo log, and check."""
        with closing(connect(self._part)) as connection:
            trust_pages(connection)
            connection.pragma("synchronous", "OFF")
            schema.check_ours(connection)
            ((key, epoch, self._offset),) = read(connection, "SELECT receipts, epoch, offset FROM secret, mark")
            damage = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(100)") if row[0] != "ok"]
            entries = self._read_log([key])
            missing = entries.following(self._offset)
            following = missing[-1].following if missing else self._offset
            later = any(at > following for at in entries.entries)
            with suppress(apsw.Error):  # a database too damaged to ask is reported below
                is_lost = redo_file.loss(self._database.with_name(REDO), connection) is not None
                lost = f"{REDO}: missing or cut, so nobody knows what was committed last"
                if is_lost and (self._noted is None or self._noted.offset <= following):  # it proves nothing
                    self._report.found += [] if lost in self._report.found else [lost]
                    self._report.may_miss = True
            is_other = self._has_other_batch(epoch, connection)
            if damage:
                return _State(key, epoch, following, damage, later, is_other)
            schema.migrate(connection)
            with connection:
                if missing:
                    apply_log(connection.execute, missing)
                redo_file.note_size(connection, 0)
            connection.pragma("journal_mode", "DELETE")
        report = tools.check(self._part, self._progress, is_owner=True)
        problems = [f"{each.kind}: {each.text}" for each in report.problems if each.kind != "quarantine"]
        return _State(key, epoch, following, problems, later, is_other)

    def _has_other_batch(self, epoch: bytes, connection: apsw.Connection) -> bool:
        if self._noted is None or self._noted.epoch != epoch:
            return False
        with suppress(apsw.Error):  # a damaged history
            if last_commit.other_batch(self._notes, connection) is not None:
                self._report.may_miss = True
                self._report.found.append(f"{COMMITTED}: the last batch that it knows is another one")
                return True
        return False

    def _read_log(self, keys: list[bytes]) -> Log:
        return read_log(self._database.with_name(REDO), keys if self._key is None else [self._key])

    def _salvage(self, image: Image, backup: Backup | None, state: _State | None) -> int:
        """Take the rows over into a new database; returns the next offset, less the events that are missing before."""
        image.suspects |= set(image.pages.left)
        with closing(connect(self._target)) as target:
            os.chmod(self._target, 0o600)
            schema.give_checksums(target, schema.VERSION)
            target.pragma("auto_vacuum", "INCREMENTAL")
            target.pragma("journal_mode", "MEMORY")
            target.pragma("synchronous", "OFF")
            schema.migrate(target)
            with target:
                salvage = Salvage(target, image, self._frames, self._report, self._export)
                salvage.asks_of_all = state is None or bool(state.problems)
                salvage.names_are_damaged = state is not None and any(_NAMES in each for each in state.problems)
                following = self._take_over(salvage, backup)
        return following

    def _take_over(self, salvage: Salvage, backup: Backup | None) -> int:
        target = salvage.target
        salvage.copy()
        with closing(connect(self._part)) as connection, suppress(apsw.Error):
            trust_pages(connection)
            salvage.note_listed(listed(connection))
        if self._doubts:
            salvage.doubt_everything()
        following, beyond = self._read_journal(salvage)
        salvage.learn()
        salvage.fill(backup, following + beyond)
        if self._doubts:
            salvage.renew_leases()
        clock = clock_of(target, self._noted)
        salvage.reconcile_times(clock)
        settle(salvage, clock)
        salvage.list_missing()
        _end(target, clock, following)
        return following + beyond

    def _read_journal(self, salvage: Salvage) -> tuple[int, int]:
        """Learn from the redo log; returns the offset where a gap begins, and how many events are known behind it."""
        entries = self._read_log(salvage.keys())
        known = "SELECT max(ifnull((SELECT max(offset + count) FROM history), 0), ifnull((SELECT offset FROM mark), 0))"
        ((following,),) = read(salvage.target, known)
        follow = entries.following(following)
        salvage.read_journal(each for _, each in sorted(entries.entries.items()))
        if follow:
            following = follow[-1].following
        beyond = [each for at, each in entries.entries.items() if at > following]
        behind = sum(each.count for each in beyond)
        if beyond:
            self._report.events_missing = max(each.following for each in beyond) - following - behind
        return following, behind

    def _count(self, following: int, state: _State | None) -> None:
        """Complete the report from the new database."""
        noted, report = self._noted, self._report
        if noted is not None and (state is None or noted.epoch == state.epoch or noted.offset > following):
            report.events_missing = max(report.events_missing, noted.offset - following)
        report.may_miss |= report.events_missing > 0 or noted is None
        checked = tools.check(self._target, self._progress, is_owner=True)
        report.problems = [f"{each.kind}: {each.text}" for each in checked.problems if each.kind != "quarantine"]
        with closing(open_reader(self._target, Options())) as connection:
            contents = {generation: report.of(name) for generation, name in read(connection, _QUEUE_NAMES)}
            for generation, place, count in read(connection, _CONTENT):
                if generation in contents:  # else it is garbage
                    setattr(contents[generation], place, count)
            for each in replay(connection).values():
                content = contents[each.row.generation]
                content.in_flight += each.leased
                content.visible += not each.leased
