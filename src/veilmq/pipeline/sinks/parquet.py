"""Which manifest each of the last batches of a drain's Parquet table is.

    <table>/_claims/00000000000000000012    the name of the manifest that is batch 12 of the drain
    <table>/_claims/lock                    held while a drain writes there; not in an object store

Strategy: Spark's own sink knows the numbers of batches alone. It skips a batch whose number it has, and the source then
deletes the messages of that batch, also if a copy of the drain wrote another one of that number. So the source claims a
batch before Spark runs it, which succeeds only if nobody has, and looks at the claim again before it deletes. A
manifest's name is unique, and Spark has logged it with the batch's offset by then: a drain that was killed repeats
exactly that batch, and finds its own claim.

A drain that was killed and began anew, or whose checkpoint a power cut shortened, leaves a claim of a batch that the
table lacks. The next drain removes it once it has the lock, which the kernel releases at the end of a process. An
object store has no such lock, and a person decides.

Before changing it: a batch that was not claimed is not refused, because earlier releases wrote no claims. No claim may
be removed between the moment it was made and the batch after it: a copy would take its place.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from veilmq.pipeline.errors import DirectoryTaken, DirectoryUnwritable, OptionInvalid, TableForeign
from veilmq.pipeline.places import (
    Lock,
    ObjectPath,
    Patience,
    Place,
    PlaceTaken,
    check_creates,
    listed,
    lock_of,
    make,
)
from veilmq.pipeline.sinks.claims import copied
from veilmq.store.files import durable_write

SINK_LOG: Final = "_spark_metadata"
"""Spark's log in a table: the files of each batch."""
_CLAIMS: Final = "_claims"
_KEPT: Final = 2
"""Spark repeats the last batch alone."""
_LOCK_SECONDS: Final = 15.0
"""Spark's process of a query that has ended may live a little longer."""
_MEND: Final = (
    "Go on with the copy that wrote that batch. The messages of this one's last batch are in the queue or in its "
    "`manifests/bad_records`: keep those. If there is no other copy, start again with a new checkpoint, directory and "
    "table. If no drain runs and the table lacks that batch, remove {}."
)
_AGAIN: Final = "Run the query again when it can: it goes on."


class Claims:
    """The claims of one drain in its table."""

    def __init__(self, table: Place, lock_seconds: float = _LOCK_SECONDS) -> None:
        self._table, self._directory = table, table / _CLAIMS
        self._lock_seconds = lock_seconds
        self._lock: Lock | None = None
        self._is_checked = False
        self._own = 0
        """The last batch that is known to be this drain's."""

    def close(self) -> None:
        """Release the lock; the claims stay."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def claim(self, seq: int, manifest: str) -> None:
        """Claim a batch whose offset Spark has logged, or find that it is claimed as that manifest.

        Without Spark's log in a local table nothing is claimed: the table is elsewhere, as in Spark's default file
        system. Raises TableForeign if it is another drain's batch, DirectoryTaken if another one writes there,
        DirectoryUnwritable; OptionInvalid if the object store overwrites.
        """
        if isinstance(self._table, Path) and not (self._table / SINK_LOG).is_dir():
            return
        with self._writing():
            if _created(self._file(seq), manifest.encode()):
                self._own = seq
                self._remove(lambda each: each <= seq - _KEPT)
        self.check(seq, manifest)

    def check(self, seq: int, manifest: str) -> None:
        """Raises TableForeign if the batch is another drain's, OptionInvalid if its claim cannot be read."""
        if seq <= self._own:
            return
        file = self._file(seq)
        try:
            claimed = file.read_text()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            wrong = f"{file} of the table cannot be read: {error.strerror}."
            raise OptionInvalid(wrong, "Let the driver's user read it, and run the query again.") from None
        if claimed != manifest:
            raise TableForeign(copied(str(self._table), seq), _MEND.format(file))
        self._own = seq

    def clear(self, seq: int) -> None:
        """Remove the claims in a local table beyond its last batch. Raises as `claim`."""
        if isinstance(self._directory, Path) and any(int(each.name) > seq for each in self._all()):
            with self._writing():
                self._remove(lambda each: each > seq)
            self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """With the lock, in a local table."""
        try:
            if isinstance(self._directory, ObjectPath):
                if not self._is_checked:
                    check_creates(self._directory)
                    self._is_checked = True
            elif self._lock is None:
                make(self._directory)
                self._lock = lock_of(self._directory, "", Patience(self._lock_seconds))
            yield
        except PlaceTaken as error:
            wrong = f"Another drain writes into {self._table} ({error.wrong})."
            raise DirectoryTaken(wrong, "Stop one of them: a Parquet table has one drain.") from None
        except OSError as error:
            raise DirectoryUnwritable(f"{self._directory} cannot be written: {error.strerror}.", _AGAIN) from error

    def _file(self, seq: int) -> Place:
        return self._directory / f"{seq:020}"

    def _remove(self, is_over: Callable[[int], bool]) -> None:
        for each in self._all():
            if is_over(int(each.name)):
                each.unlink(missing_ok=True)

    def _all(self) -> list[Place]:
        return [each for each in listed(self._directory, "*") if each.name.isdigit()]


def _created(file: Place, content: bytes) -> bool:
    """False if the file exists."""
    if isinstance(file, ObjectPath):
        return file.create(content)
    try:
        durable_write(file, content, exclusive=True)
    except FileExistsError:
        return False
    return True


def check_last(table: Path, logged: Path, has: int) -> None:
    """Check that the table's last batch is that of this drain, and remove claims that no batch followed.

    logged: the log of offsets in the drain's checkpoint. has: the number of the table's last batch, -1 for none. Raises
    as `Claims.claim`.
    """
    claims, seq = Claims(table), 0
    if has >= 0:
        try:
            offset = json.loads((logged / str(has)).read_text().splitlines()[2])
            seq, manifest = int(offset["seq"]), str(offset["file"])
        except (OSError, ValueError, LookupError, TypeError):
            return  # Spark says what is wrong with its file, and no other query has such offsets
        claims.check(seq, manifest)
    claims.clear(seq)
