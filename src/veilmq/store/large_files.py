"""Large files beside the database are written and freed in pieces, so that they do not delay commits.

Strategy: a commit's fdatasync waits until the file system has journalled all earlier changes: blocks that another file
gained or lost, and the data in them. For a whole copy that takes 50 to 100 ms; for a piece, 2 or 3 ms.
"""

import os
from typing import IO, Final, Protocol

PIECE_BYTES: Final = 4 << 20


class Writing(Protocol):
    """Anything with a `write` method."""

    def write(self, data: bytes, /) -> int:
        """Write all of the data. Raises OSError."""
        ...


class SyncedInPieces:
    """Writes to a file, and syncs it after each piece. The caller syncs the last, incomplete piece if needed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._unsynced_bytes = 0

    def write(self, data: bytes, /) -> int:
        """Write all of the data. Raises OSError."""
        self._file.write(data)
        self._unsynced_bytes += len(data)
        if self._unsynced_bytes >= PIECE_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._unsynced_bytes = 0
        return len(data)


def let_go(file: IO[bytes]) -> None:
    """Close an unlinked, writable file, truncating it piece by piece from its end first."""
    size = os.fstat(file.fileno()).st_size
    for left in range(size - PIECE_BYTES, 0, -PIECE_BYTES):
        os.ftruncate(file.fileno(), left)
        os.fdatasync(file.fileno())
    file.close()
