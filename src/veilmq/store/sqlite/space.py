"""Whether the store takes messages. On a nearly full disk, and while a file of the database is gone, it refuses sends
and creates; receives and deletes go on, so that the queues can be emptied."""

import logging
from pathlib import Path

from veilmq.model.errors import DiskLow, StoreFailed
from veilmq.store.directory import DataDirectory
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.disk.redo.file import is_same_file

logger = logging.getLogger("veilmq.store")


def is_low(writer: Writer) -> bool:
    """Whether sends and creates are refused because disk space is low."""
    return isinstance(writer.refusal, DiskLow)


class Space:
    """The room on the disk, and the files that the database has open. Sets `Writer.refusal`."""

    def __init__(self, directory: DataDirectory, writer: Writer, *, has_log: bool) -> None:
        """has_log: a log has all that the files have, so that nothing is lost with them."""
        self._directory = directory
        self._writer = writer
        self._has_log = has_log
        database = directory.database
        files = [] if has_log else [path for path in (database, Path(f"{database}-wal")) if path.exists()]
        self._inodes = {path: path.stat().st_ino for path in files}
        self._gone: Path | None = None

    @property
    def is_low(self) -> bool:
        return is_low(self._writer)

    def free_reserve(self, *, freed: bool = False) -> None:
        """The disk is full: free the reserve, unless it is `freed` already, and refuse sends and creates until there is
        room for it again."""
        freed = self._directory.give_up_reserve() or freed
        if freed or not self.is_low:
            refused = f"sends and creates are refused until {self._directory.needed_bytes()} bytes are free"
            logger.error("disk full: %s; %s", refused, "the reserve was freed" if freed else "there is no reserve")
        self._writer.refusal = DiskLow(free_bytes=self._directory.free_bytes())

    def look(self) -> None:
        """See how much space there is, and whether the files are there. Call when no batch is open. Raises OSError,
        apsw.Error."""
        free, floor = self._directory.free_bytes(), self._directory.floor_bytes()
        was_low = self.is_low
        has_room = free >= floor and (self._directory.take_reserve() or not was_low)
        self._look_at_files()
        refusal = None if self._gone is None else _failed(self._gone)
        self._writer.refusal = refusal if has_room else DiskLow(free_bytes=free)
        if was_low == has_room:
            logger.warning("disk %s: %d bytes free, floor %d", "has space again" if was_low else "low", free, floor)
        if not has_room or self._gone is not None:
            return
        if was_low and not self._has_log:
            self._writer.redo.open(free - floor, self._writer.connection)
        elif self._writer.redo.is_gone():
            self._writer.renew_redo(free - floor)

    def check_files(self) -> None:
        """Raises StoreFailed if a file is gone: SQLite would open another one, or make it. Any thread."""
        if (gone := self._find_gone()) is not None:
            raise _failed(gone)

    def _find_gone(self) -> Path | None:
        return next((path for path, inode in self._inodes.items() if not is_same_file(path, inode)), None)

    def _look_at_files(self) -> None:
        gone = self._find_gone()
        if gone is not None and self._gone is None:
            logger.error(
                "%s was deleted or replaced while the server ran: sends and creates are refused until it is back. Do"
                " not stop the server, which still has it open: docs/operations.md, A deleted file",
                gone,
            )
        elif gone is None and self._gone is not None:
            logger.warning("%s is back", self._gone)
        self._gone = gone


def _failed(gone: Path) -> StoreFailed:
    return StoreFailed(reason=f"{gone.name} was deleted or replaced while the server ran")
