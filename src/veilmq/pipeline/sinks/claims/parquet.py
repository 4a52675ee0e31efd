"""Which manifest each of the last batches of a drain's Parquet table is.

    <table>/_claims/00000000000000000012    the name of the manifest that is batch 12 of the drain
    <table>/_claims/lock                    held by the source while it claims there; not in an object store
    <table>/_drain/lock                     held by a call of `drain` as long as its query runs; not in an object store

Strategy: Spark's own sink knows the numbers of batches alone. It skips a batch whose number it has, and the source then
deletes the messages of that batch, also if a copy of the drain wrote another one of that number. So the source claims a
batch before Spark runs it, which succeeds only if nobody has, and looks at the claim again before it deletes. A
manifest's name is unique, and Spark has logged it with the batch's offset by then: a drain that was killed repeats
exactly that batch, and finds its own claim.

Only the newest claims are kept. A batch without a claim is refused if there is a later one: its drain is behind.

A drain that was killed and began anew, or whose checkpoint a power cut shortened, leaves a claim of a batch that the
table lacks. The next `drain` removes it once it has both locks, which the kernel releases at the end of a process. It
needs the second one because Spark writes a batch to its end although the source's process has died. An object store has
no such locks, and a person decides. `drain` may run as another user than the source, as a client of Spark Connect
does: it makes nothing in `_claims`, which would then be closed to the source.

Before changing it: a table without claims is not refused, because earlier releases wrote none. No claim may be removed
between the moment it was made and the batch after it: a copy would take its place. While a lock is waited for, its
holder writes batches: what was read of the table before is read again.
"""

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from veilmq.pipeline.errors import DirectoryTaken, DirectoryUnwritable, OptionInvalid, TableForeign
from veilmq.pipeline.places import Lock, ObjectPath, Patience, Place, PlaceTaken, check_creates, lock_of
from veilmq.pipeline.sinks.claims import MEND_BACK, copied, went_back
from veilmq.store.files import durable_write, give_to_owner_of, make_directory

SINK_LOG: Final = "_spark_metadata"
"""Spark's log in a table: the files of each batch."""
_CLAIMS: Final = "_claims"
_DRAIN: Final = "_drain"
_KEPT: Final = 2
"""Spark repeats the last batch alone."""
_PATIENCE: Final = Patience(15.0)
"""Spark's process of a query that has ended may live a little longer."""
_UNSUPPORTED: Final = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}
"""What a file system answers that has no locks."""
_MEND: Final = (
    "Go on with the copy that wrote that batch. The messages of this one's last batch are in the queue or in its "
    "`manifests/bad_records`: keep those. If there is no other copy, start again with a new checkpoint, directory and "
    "table. If no drain runs and no row of the table has that `batch`, remove {}."
)
_AGAIN: Final = "Run the query again when it can: it goes on."

log = logging.getLogger("veilmq.pipeline")


class Claims:
    """The claims of one drain in its table."""

    def __init__(self, table: Place, patience: Patience = _PATIENCE) -> None:
        self._table, self._directory = table, table / _CLAIMS
        self._patience = patience
        self._lock: Lock | None = None
        self._drain: Lock | None = None
        self._is_checked = self._is_off = self._is_warned = False
        self._own = 0
        """The last batch that is known to be this drain's."""

    def close(self) -> None:
        """Release the locks; the claims stay."""
        for lock in (self._lock, self._drain):
            if lock is not None:
                lock.release()
        self._lock = self._drain = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the body runs, which is a query that `drain` has started, no other `drain` removes claims of a local
        table: it raises DirectoryTaken. Where that cannot be, as for a client of Spark Connect that may not write
        there, a warning is logged, the first time."""
        try:
            try:
                with self._writing():
                    self._keep_out_drains()
            except (DirectoryTaken, DirectoryUnwritable) as error:
                if not self._is_warned:
                    log.warning("table %s: another drain may remove claims of this one: %s", self._table, error.wrong)
                self._is_warned = True
            yield
        finally:
            self.close()

    def _keep_out_drains(self) -> None:
        if isinstance(self._table, Path) and not self._is_off and (self._table / SINK_LOG).is_dir():
            _make(self._table / _DRAIN)
            self._drain = lock_of(self._table / _DRAIN, "", Patience(0))

    def claim(self, seq: int, manifest: str) -> None:
        """Claim a batch whose offset Spark has logged, or find that it is claimed as that manifest.

        A warning is logged and nothing is claimed in a local table without Spark's log (the table is elsewhere, as in
        Spark's default file system) or on a file system without locks. Raises TableForeign if it is another drain's
        batch, or the table has later ones; DirectoryTaken if another drain writes there; DirectoryUnwritable;
        OptionInvalid if the object store overwrites.
        """
        with self._writing():
            if self._is_held() and not self._is_own(seq, manifest) and self._created(seq, manifest):
                try:
                    self._check_newest(seq)
                except TableForeign:
                    self._file(seq).unlink(missing_ok=True)
                    raise
                self._own = seq
                self._remove(lambda each: each <= seq - _KEPT)
        self.check(seq, manifest)

    def check(self, seq: int, manifest: str) -> None:
        """Raises TableForeign if the batch is another drain's, or has no claim and there are later ones; OptionInvalid
        if the claims cannot be read."""
        if not self._is_own(seq, manifest):
            self._check_newest(seq)

    def check_last(self, logged: Path) -> None:
        """Check that a local table's last batch is this drain's, and remove the claims beyond it.

        logged: the log of offsets in the drain's checkpoint. Raises as `claim`.
        """
        seq = self._last(logged)
        if any(int(each.name) > seq for each in self._all()):
            try:
                with self._writing():
                    if self._is_held():
                        self._keep_out_drains()
                        seq = self._last(logged)
                        self._remove(lambda each: each > seq)
            finally:
                self.close()

    def _last(self, logged: Path) -> float:
        """The number of the table's last batch; infinite if only Spark can tell. Raises TableForeign."""
        has, reached = last_entry(self._table / SINK_LOG), last_entry(logged)
        if has > reached >= 0:
            raise TableForeign(went_back(str(self._table), has, reached), MEND_BACK)
        offsets = _offsets(logged / str(has)) if has >= 0 else [(0, "")]
        if len(offsets) > 1:  # several sources, of which one may claim here
            offsets = [each for each in offsets if self._claimed(each[0]) == each[1]]
        for seq, manifest in offsets:
            self._is_own(seq, manifest)
        return max((seq for seq, _ in offsets), default=float("inf"))

    def _is_held(self) -> bool:
        """Whether claims can be written; of a local table the lock is taken."""
        if isinstance(self._directory, ObjectPath):
            if not self._is_checked:
                check_creates(self._directory)
                self._is_checked = True
        elif self._lock is None and not self._is_off:
            try:
                (self._directory.parent / SINK_LOG).stat()
            except (FileNotFoundError, NotADirectoryError):
                self._switch_off(f"Spark has no {SINK_LOG} there")
                return False
            _make(self._directory)
            self._lock = lock_of(self._directory, "", self._patience)
        return not self._is_off

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except PlaceTaken as error:
            wrong = f"Another drain writes into {self._table} ({error.wrong})."
            raise DirectoryTaken(wrong, "Stop one of them: a Parquet table has one drain.") from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                wrong = f"{error.filename or self._directory} cannot be used: {error.strerror}."
                raise DirectoryUnwritable(wrong, _AGAIN) from error
            self._switch_off(str(error.strerror))

    def _switch_off(self, why: str) -> None:
        self._is_off = True
        log.warning("table %s: batches are not claimed, so a copy of this drain is not noticed: %s", self._table, why)

    def _created(self, seq: int, manifest: str) -> bool:
        """False if the claim exists."""
        file = self._file(seq)
        if isinstance(file, ObjectPath):
            return file.create(manifest.encode())
        durable_write(file, manifest.encode(), mode=0o644)  # another user's `drain` reads it
        return True

    def _is_own(self, seq: int, manifest: str) -> bool:
        """False if nobody has claimed the batch. Raises TableForeign, OptionInvalid."""
        if seq > self._own:
            claimed = self._claimed(seq)
            if claimed is None:
                return False
            if claimed != manifest:
                raise TableForeign(copied(str(self._table), _numbered(seq)), _MEND.format(self._file(seq)))
            self._own = seq
        return True

    def _check_newest(self, seq: int) -> None:
        """Raises TableForeign if a later batch was claimed."""
        newest = max((int(each.name) for each in self._all()), default=seq)
        if newest > seq:
            wrong = went_back(str(self._table), _numbered(newest), seq)
            raise TableForeign(wrong, _MEND.format(self._file(newest)))

    def _claimed(self, seq: int) -> str | None:
        """The manifest's name in the claim; None if there is no claim."""
        found: str | None = self._read(self._file(seq).read_text)
        return found

    def _all(self) -> list[Place]:
        found: list[Place] | None = self._read(lambda: list(self._directory.iterdir()))
        return [each for each in found or () if each.name.isdigit()]

    def _read(self, read: Callable[[], Any]) -> Any:
        """None if there is no such file. Raises OptionInvalid."""
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            wrong = f"{error.filename} of the table cannot be read: {error.strerror}."
            raise OptionInvalid(wrong, "Let the driver's user read it, and run the query again.") from None

    def _file(self, seq: int) -> Place:
        return self._directory / f"{seq:020}"

    def _remove(self, is_over: Callable[[int], bool]) -> None:
        for each in self._all():
            if is_over(int(each.name)):
                each.unlink(missing_ok=True)


def _make(directory: Path) -> None:
    """Create a directory that belongs to the owner of the table, where the system allows it: what root runs once does
    not close it to a service. Raises OSError."""
    if not directory.is_dir():
        make_directory(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            give_to_owner_of(directory.parent, descriptor)
        finally:
            os.close(descriptor)


def _numbered(seq: int) -> str:
    return f"{seq} (as in the column `batch`; Spark's log counts from 0)"


def _offsets(entry: Path) -> list[tuple[int, str]]:
    """Number and manifest of each drain in an entry of Spark's log of offsets: line 3 is that of the first source."""
    found = []
    with suppress(OSError):  # Spark says what is wrong with its file
        for line in entry.read_text().splitlines()[2:]:
            with suppress(ValueError, LookupError, TypeError):
                offset = json.loads(line)
                found.append((int(offset["seq"]), str(offset["file"])))
    return found


def last_entry(directory: Place) -> int:
    """The number of the last entry of one of Spark's logs, where every tenth may be `9.compact`; -1 for none."""
    if not directory.is_dir():
        return -1
    return max((int(each.stem) for each in directory.iterdir() if each.stem.isdigit()), default=-1)
