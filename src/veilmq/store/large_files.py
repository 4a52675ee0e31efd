"""Large files beside the database: written, and let go of, a piece at a time.

Strategy: a commit's fdatasync waits until the file system has journalled what went before it: the blocks that another
file was given or has lost, and the data in them. Of a whole copy that is 50 to 100 ms; of a piece, 2 or 3.
"""

import os
from typing import IO, Final, Protocol

PIECE_BYTES: Final = 4 << 20


class Writing(Protocol):
    """What can be written to."""

    def write(self, data: bytes, /) -> int:
        """All of the data. Raises OSError."""
        ...


class SyncedInPieces:
    """Writes to a file, and syncs it after each piece; who wants the rest synced does that."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._unsynced_bytes = 0

    def write(self, data: bytes, /) -> int:
        """All of the data. Raises OSError."""
        self._file.write(data)
        self._unsynced_bytes += len(data)
        if self._unsynced_bytes >= PIECE_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._unsynced_bytes = 0
        return len(data)


def let_go(file: IO[bytes]) -> None:
    """Close a nameless file that may be written to, its end first."""
    size = os.fstat(file.fileno()).st_size
    for left in range(size - PIECE_BYTES, 0, -PIECE_BYTES):
        os.ftruncate(file.fileno(), left)
        os.fdatasync(file.fileno())
    file.close()
