"""Ships what a server alone writes to a URL: a copy of its data that lags by seconds.

Strategy: each transaction of the tables becomes a record (sqlite/effects.py), which is appended to a file beside the
database, the spool, before the COMMIT. That file is not synced: it survives a kill. A thread takes what was committed
every few seconds, and uploads it. The store's position, which is in the tables, says at the next start whether the
spool and the archive hold everything up to there. If not, as after a power cut or a time without the archive, a new
epoch begins, with a snapshot. So it does if the place has records that the tables lack: those of a directory that was
put back to an earlier moment, or that were uploaded before they were synced. A place that lost its snapshots, or is
another one because a disk is not mounted, gets a new one.

Before changing it: a record is uploaded only after its COMMIT, and the copy of a snapshot must not have what only the
redo log has: that comes with a later record.
"""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final

import msgspec

from veilmq.model.errors import StoreError
from veilmq.model.instant import SECOND_US, Instant
from veilmq.store.archive import (
    EPOCH_MIN,
    RECORDS,
    Place,
    PlaceFailed,
    frame,
    frames,
    keep,
    name_of,
    remove_others,
    segments,
    shown_url,
    snapshots,
    upload,
)
from veilmq.store.directory import DATABASE, DatabaseFailed
from veilmq.store.files import REAL
from veilmq.store.log import Diverged, Entry, Point, Position, checksum

SNAPSHOT_BYTES: Final = 64 << 20
"""A snapshot is due when the records since the last one take this many bytes, and at least as many as the database."""
SEGMENTS_MAX: Final = 10_000
"""It is also due when these records are this many objects,"""
SNAPSHOT_SECONDS: Final = 86_400.0
"""or when the last snapshot is this old."""
BYTES_PER_SECOND: Final = 32 << 20
LSN_MAX: Final = 10**16
SPOOL_BYTES_MAX: Final = 1 << 30
"""Size of the open spool file, and of all files that wait for an upload; beyond either, a new epoch begins."""
_FILE_BYTES: Final = 16 << 20
"""Size at which the open spool file is closed, even if others still wait: a file is uploaded whole, from memory."""
_LAST_SECONDS: Final = 10.0
"""How long a stopping server waits until the last records are uploaded."""
_LOOK_SECONDS: Final = 3_600.0
"""How often to check that the place still has the last snapshot."""
_FOLDER: Final = "archive"
"""In the data directory."""
_STATE: Final = "state.json"

log = logging.getLogger("veilmq.archive")

Copying = Callable[[Path, Path, Callable[[], None]], Point]
"""Copies a database to a file, without what only the redo log has, and checks it."""


class State(msgspec.Struct):
    """What is known of the archive, beside the spool."""

    lineage: str = ""
    url: str = ""
    end: Position = Position(0, 0, 0)
    """The last record that is there."""
    snapshot: int = 0
    """Epoch of the last snapshot."""
    folder: str = ""
    """Where that is."""
    bytes: int = 0
    segments: int = 0
    """What came since."""


class Stopped(Exception):
    """The archive is being closed: end the work."""


class Archive:
    """See the module. `append`, `committed` and `forget` come from the store, one thread at a time."""

    def __init__(
        self,
        place: Place,
        url: str,
        directory: Path,
        copying: Copying,
        *,
        keep_us: int,
        every_s: float,
        wall: Instant,
        snapshot_bytes: int = SNAPSHOT_BYTES,
    ) -> None:
        """directory: the data directory. copying: see `Copying`. keep_us: how far a restore can go back."""
        self._place, self._url = place, url
        self._database = directory / DATABASE
        self._folder = directory / _FOLDER
        self._copying = copying
        self._keep_us, self._every_s, self._snapshot_bytes = keep_us, every_s, snapshot_bytes
        self._gate = threading.Lock()
        self._state = State()
        self._epoch_min = EPOCH_MIN + wall // SECOND_US
        self.epoch = self._epoch_min
        """Epoch of the records being appended. It begins with wall time, so that it grows even if the one before is not
        known."""
        self._file: int | None = None
        self._path = self._folder
        self._size = self._taken = 0
        """Bytes of the open file, and of what is committed there."""
        self._closed_bytes = 0
        """Bytes of full files that were closed since the last upload began."""
        self._waiting_since: float | None = None
        self._snapshot_at = perf_counter()
        self._ending = threading.Event()
        self._patient = False
        """Whether this is the last step, which is completed although the server stops."""
        self._failed = False
        """Whether the spool lacks a record."""
        self._shipped_at = 0.0
        self._looked_at: float | None = None
        self.trouble = ""
        """Why nothing can be written at the place; empty: something can."""
        self._lost = ""
        """Why it begins anew, if the spool could not be written."""
        self.uploaded_bytes = 0
        self.apply_log: Callable[[], object] = lambda: None
        """Set by the store: copies all acknowledged batches into the tables. Any thread."""
        self._thread = threading.Thread(target=self._run, name="veilmq-archive", daemon=True)

    @property
    def lag_s(self) -> float:
        """How long the oldest change has waited that is not in the archive; 0: all are there."""
        since = self._waiting_since
        return 0.0 if since is None else perf_counter() - since

    @property
    def _lacking(self) -> bool:
        """Whether the place lacks a snapshot of this epoch: until then a restore has nothing of it."""
        return self._state.snapshot != self.epoch

    @property
    def awaits_record(self) -> bool:
        """Whether the epoch began while the store was open, and has no record yet: its snapshot follows the first."""
        with self._gate:
            return self._lacking and self._state.end.epoch != self.epoch and not (self._size or self._failed)

    def _wait(self) -> None:
        """Something is not in the archive."""
        if self._waiting_since is None:
            self._waiting_since = perf_counter()

    # What the store calls.

    def begin(self, lineage: str, found: Position | None) -> Position:
        """Call while the store is being opened. found: the position in its tables. Returns the one to put there."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        _remove_copies(self._folder)
        state = _state_in(self._folder)
        same = (state.lineage, state.url) == (lineage, self._url)
        if found is not None and same and self._holds(found, state.end):
            self.epoch, self._state = found.epoch, state
            if self._lacking:
                self._wait()
            self._closed_bytes = sum(path.stat().st_size for path in self._folder.glob("spool-*"))
            return found
        for left in self._folder.glob("spool-*"):
            left.unlink()
        last = state.end if found is None else max(state.end, found)
        self.epoch = max(self._epoch_min, last.epoch + 1)
        position = Position(max(1, last.lsn), self.epoch, 0 if found is None else found.checksum)
        self._state = State(lineage, self._url, position)
        self._wait()
        return position

    def _holds(self, found: Position, end: Position) -> bool:
        """Whether the archive and the spool have all up to a position. What the spool has beyond was not committed."""
        for path in sorted(self._folder.glob("spool-*")):
            content = path.read_bytes()
            whole = 0
            for entry in frames(content):
                if (entry.lsn, entry.epoch) > (found.lsn, found.epoch):
                    break
                whole += len(frame(entry))
                if entry.lsn > end.lsn:
                    if entry.lsn != end.lsn + 1:
                        return False
                    end = Position(entry.lsn, entry.epoch, checksum(entry.record))
            if whole:
                os.truncate(path, whole)
                self._waiting_since = perf_counter()
            else:
                path.unlink()
        return end == found

    def append(self, lsn: int, record: bytes) -> None:
        """Take a record whose transaction is about to be committed. Never fails: the store goes on without."""
        content = frame(Entry(lsn, self.epoch, record))
        with self._gate:
            if self._failed:
                return
            try:
                if self._file is None:
                    self._path = self._folder / f"spool-{self.epoch:016}-{lsn:016}"
                    self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                    self._size = self._taken = 0
                written = os.write(self._file, content)
                self._size += written
                self._failed = written != len(content) or self._closed_bytes + self._size > SPOOL_BYTES_MAX
            except OSError as error:
                self._failed = True
                self._lost = f", for the spool cannot be written: {error.strerror}"
                self.trouble = f"it begins anew{self._lost}"
                log.warning("the archive lags: %s", self.trouble)

    def send(self, lsn: int, record: bytes) -> int | None:
        self.append(lsn, record)
        return None

    def confirmed(self) -> bool | None:
        return True

    def committed(self) -> None:
        """The transaction was committed."""
        with self._gate:
            self._taken = self._size
            if self._file is not None and self._size >= _FILE_BYTES:
                self._close_file()
                self._closed_bytes += self._size
        self._wait()

    def forget(self) -> None:
        """The transaction was rolled back."""
        with self._gate:
            if self._file is not None and self._size != self._taken:
                os.ftruncate(self._file, self._taken)
                os.lseek(self._file, self._taken, os.SEEK_SET)
                self._size = self._taken

    # The thread.

    def start(self) -> None:
        """The store is open."""
        self._thread.start()

    def close(self) -> None:
        """The store is closed: wait a little until the rest is there."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_SECONDS)
        if self._thread.is_alive() or self._lacking:
            log.warning("the last changes are not in the archive yet: the next start goes on with them")
        self._close_file()

    def _run(self) -> None:
        self._try_step()
        while not self._ending.wait(self._every_s):
            self._try_step()
        self._patient = True
        self._try_step()

    def _try_step(self) -> None:
        try:
            self.step()
            if self._lacking:
                self.trouble = f"it begins anew with a snapshot in a moment{self._lost}"
            elif self.trouble:
                log.info("the archive can be written to again")
                self.trouble = ""
        except Stopped:
            pass
        except (PlaceFailed, DatabaseFailed, Diverged, StoreError, OSError) as error:
            if str(error) != self.trouble:
                log.warning("the archive lags: %s", error)
            self.trouble = str(error)
        except Exception as error:
            if (message := f"{type(error).__name__}: {error}") != self.trouble:
                log.exception("the archive lags")
            self.trouble = message

    def step(self) -> None:
        """Upload what was acknowledged, and a snapshot if one is due. Raises PlaceFailed, DatabaseFailed, Diverged,
        StoreError, OSError."""
        if self._failed:  # also while the place cannot be reached
            self._begin_anew()
        if self._looked_at is None or perf_counter() - self._looked_at >= _LOOK_SECONDS:
            self._look()
        self.apply_log()
        if self._failed:
            self._begin_anew()
        self._ship()
        # An epoch that began while the store was open has no snapshot before its first record.
        has_begun = self._state.end.epoch == self.epoch
        if has_begun and (self._state.snapshot != self.epoch or (not self._patient and self._is_due())):
            self._snapshot()

    def _look(self) -> None:
        """Look at what the place has. Raises PlaceFailed."""
        found = snapshots(self._place, self._state.lineage)
        if self._looked_at is None:
            self._look_for_more(manifest.epoch for _, manifest in found)
        self._look_for_snapshot({folder for folder, _ in found})
        self._looked_at = perf_counter()

    def _look_for_more(self, epochs: Iterable[int]) -> None:
        """Begin anew if the place has more than the tables have. epochs: of its snapshots. Raises PlaceFailed."""
        waiting = {name_of(path.read_bytes()) for path in self._folder.glob("spool-*") if path != self._path}
        known = self._state.end.lsn if self._state.end.epoch == self.epoch else 0
        beyond = [
            each.epoch
            for each in segments(self._place, self._state.lineage)
            if each.epoch > self.epoch or (each.epoch == self.epoch and each.last > known and each.name not in waiting)
        ]
        beyond += [epoch for epoch in epochs if epoch > self.epoch]
        if beyond:
            log.warning("the archive has changes that this directory lacks, as after a power cut: a new epoch begins")
            self.epoch, self._failed = max(beyond), True

    def _look_for_snapshot(self, folders: set[str]) -> None:
        """Have one written if the place, which has these, lost the last one, or is another place."""
        is_there = folders and (not self._state.folder or self._state.folder in folders)
        if self._state.snapshot == self.epoch and not is_there:
            log.warning("%s lacks the last snapshot (is it mounted?): a new one is written", shown_url(self._url))
            self._state.snapshot = 0
            self._wait()

    def _ship(self) -> None:
        """Upload what was acknowledged."""
        began = self._shipped_at = perf_counter()
        if not (self.trouble and any(path != self._path for path in self._folder.glob("spool-*"))):
            self._rotate()  # while uploads fail, one file grows, because each file becomes an object
        with self._gate:  # so that a file that is just being opened does not count as closed
            self._closed_bytes = 0
            waiting = sorted(self._folder.glob("spool-*"))
            open_one = None if self._file is None else self._path
        if sum(path.stat().st_size for path in waiting) > SPOOL_BYTES_MAX:
            self._failed = True
        for path in waiting:
            if path == open_one:
                continue
            content = path.read_bytes()
            if content:
                if (missing := self._missing_before(content)) is not None:
                    log.error("the spool lost the changes %d to %d: a new epoch begins", *missing)
                    self._begin_anew()
                    return
                self._state.end = keep(self._place, self._state.lineage, content)
                self._state.bytes += len(content)
                self._state.segments += 1
                self.uploaded_bytes += len(content)
                self._save()
            path.unlink()
        self._note_lag(began if waiting else None)

    def _missing_before(self, content: bytes) -> tuple[int, int] | None:
        """The numbers of the records between the last one that is there and these."""
        first, end = next(frames(content)), self._state.end
        is_next = first.epoch != end.epoch or first.lsn <= end.lsn + 1
        return None if is_next else (end.lsn + 1, first.lsn - 1)

    def _note_lag(self, began: float | None) -> None:
        """began: when an upload began before which nothing waits any more."""
        with self._gate:
            if self._lacking:
                return
            if (self._file is None or not self._size) and not self._closed_bytes:
                self._waiting_since = None
            elif self._waiting_since is not None and began is not None:
                self._waiting_since = max(self._waiting_since, began)

    def _begin_anew(self) -> None:
        """The spool lacks a record: drop it, and begin a new epoch."""
        with self._gate:
            self._close_file()
            for left in self._folder.glob("spool-*"):
                left.unlink()
            self.epoch += 1
            self._size = self._taken = 0
            self._failed = False
        self._wait()

    def _rotate(self) -> None:
        """Close the spool's file, unless a transaction is being committed, or there is nothing in it."""
        for _ in range(100):
            with self._gate:
                if self._file is None or not self._taken:
                    return
                if self._size == self._taken:
                    self._close_file()
                    return
            self._ending.wait(0.001)

    def _close_file(self) -> None:
        """Close the open spool file, if there is one. Call with the gate held, or when no thread uses it any more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _save(self) -> None:
        part = self._folder / f"{_STATE}.part"
        part.write_bytes(msgspec.json.encode(self._state))
        part.replace(self._folder / _STATE)

    def _is_due(self) -> bool:
        state = self._state
        return state.segments > 0 and (
            state.bytes >= max(self._snapshot_bytes, self._database.stat().st_size)
            or state.segments >= SEGMENTS_MAX
            or perf_counter() - self._snapshot_at >= SNAPSHOT_SECONDS
        )

    def _snapshot(self) -> None:
        state, since = self._state, (self._state.bytes, self._state.segments)
        needed_bytes, free_bytes = self._database.stat().st_size + _ROOM_BYTES, REAL.space(self._folder)[0]
        if free_bytes < needed_bytes:
            raise OSError(errno.ENOSPC, f"a snapshot needs {needed_bytes} bytes of space, and {free_bytes} are free")
        with TemporaryDirectory(dir=self._folder, prefix="copy-") as place:
            copy = Path(place, DATABASE)
            point = self._copying(self._database, copy, self._go_on)
            if point.position.epoch != self.epoch:
                return  # its first record was not in the tables yet
            state.folder, _ = upload(
                self._place, state.lineage, copy, point, state_format=0,
                pace=lambda size: self._go_on(size / BYTES_PER_SECOND),
            )  # fmt: skip
            self.uploaded_bytes += copy.stat().st_size
        state.snapshot = point.position.epoch
        state.bytes, state.segments = state.bytes - since[0], state.segments - since[1]
        self._snapshot_at = perf_counter()
        self._lost = ""
        self._note_lag(None)
        self._save()
        log.info("archived a snapshot of record %d", point.position.lsn)
        self._drop_old()

    def _drop_old(self) -> None:
        """Remove what no restore within the time that is kept needs."""
        found = snapshots(self._place, self._state.lineage)
        found.sort(key=lambda each: (each[1].epoch, each[1].lsn), reverse=True)
        begins = found[0][1].clock - self._keep_us
        kept = found[: max(2, sum(manifest.clock > begins for _, manifest in found) + 1)]
        oldest = kept[-1][1]
        remove_others(self._place, self._state.lineage, {folder for folder, _ in kept}, LSN_MAX)
        for segment in segments(self._place, self._state.lineage):
            if (segment.epoch, segment.last) <= (oldest.epoch, oldest.lsn):
                self._place.remove(f"{self._state.lineage}/{RECORDS}/{segment.name}")

    def _go_on(self, seconds: float = 0.0) -> None:
        """Between two pieces of a snapshot: wait, and upload the records that came meanwhile."""
        if not self._patient and (self._ending.wait(seconds) if seconds else self._ending.is_set()):
            raise Stopped
        if not self._failed and perf_counter() - self._shipped_at >= self._every_s:
            self._ship()


def goes_to(directory: Path, url: str) -> bool:
    """Whether the data directory has been archived to that URL. Raises OSError."""
    return _state_in(directory / _FOLDER).url == url


def _state_in(folder: Path) -> State:
    try:
        return msgspec.json.decode((folder / _STATE).read_bytes(), type=State)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return State()


def remove_leftovers(directory: Path) -> None:
    """What an archive that is no longer used left in a data directory: it would begin anew."""
    _remove_copies(directory / _FOLDER)
    for left in (directory / _FOLDER).glob("spool-*"):
        left.unlink(missing_ok=True)


def _remove_copies(folder: Path) -> None:
    """Those of snapshots that a kill ended."""
    for left in folder.glob("copy-*"):
        shutil.rmtree(left, ignore_errors=True)


_ROOM_BYTES: Final = 64 * 1024 * 1024
"""Left on the disk beside a snapshot, for what is written meanwhile."""
