"""Knows what was committed last, outside the WAL and the redo log.

Strategy: SQLite drops every frame of a WAL behind the first bad one, without a word, and a redo log of zeros looks
unused. So each commit also writes the offset of the next event into the file `committed`, after its own sync and before
it is answered. The file is mapped, so this is no system call. The write survives a kill, and `sync` makes it survive a
power cut, once a second and beside the batches. A start, `check` and `backup` compare what they find with this file
(`loss`).

    slot     epoch of the database (16 bytes), number of the write (8), offset (8), CRC-32 of these (4)

Two slots, in different sectors, are written alternately: a torn write leaves the other one.

Before changing it: if somebody empties the file, the next write ends the process (SIGBUS), as with SQLite's own -shm.
The file may lag behind the database, never be ahead of it. So it is only kept where every commit is
synced. A copy of the database has an epoch of its own, and ignores the file. See docs/operations.md.
"""

import logging
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import apsw

from veilmq.store.files import durable_write
from veilmq.store.options import Options
from veilmq.store.sqlite.disk.redo import Entry
from veilmq.store.sqlite.disk.redo_file import GIVEN_UP, is_given_up

_SLOT: Final = struct.Struct("<16sQQ")
_CHECKSUM: Final = struct.Struct("<I")
_SLOT_BYTES: Final = _SLOT.size + _CHECKSUM.size
_PLACES: Final = (0, 512)
_FILE_BYTES: Final = mmap.PAGESIZE

logger = logging.getLogger("veilmq.store")


class Noted(NamedTuple):
    """What the file says."""

    epoch: bytes
    number: int
    offset: int
    """Offset of the next event, after the last commit that is known."""


class LastCommit:
    """The file of an open store."""

    def __init__(self, path: Path, options: Options, epoch: bytes, offset: int) -> None:
        """Replaces the file, durably. If that fails, the old one stays, and lags behind."""
        self._epoch, self._number, self._offset = epoch, 0, offset
        self._synced = offset
        self._descriptor = -1
        self._map: mmap.mmap | None = None
        self._syncing: threading.Thread | None = None
        if options.synchronous != "FULL":
            path.unlink(missing_ok=True)
            return
        try:
            slot = _SLOT.pack(epoch, 0, offset)
            slot += _CHECKSUM.pack(crc32(slot))
            durable_write(path, slot.ljust(_FILE_BYTES, b"\0"), alone=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._map = mmap.mmap(self._descriptor, _FILE_BYTES)
        except (OSError, ValueError) as error:
            logger.warning("a damaged WAL or redo log would not be noticed after a kill: %s: %s", path, error)

    def note(self, offset: int) -> None:
        """Write the offset of the next event, after the commit was synced."""
        if offset == self._offset or self._map is None:
            return
        self._offset = offset
        self._number += 1
        place = _PLACES[self._number & 1]
        slot = _SLOT.pack(self._epoch, self._number, offset)
        self._map[place : place + _SLOT_BYTES] = slot + _CHECKSUM.pack(crc32(slot))

    def sync(self) -> None:
        """Begin to sync the file, in a thread, unless it is synced. Call about once a second."""
        if self._map is None or self._offset == self._synced or (self._syncing and self._syncing.is_alive()):
            return
        self._syncing = threading.Thread(target=self._sync, name="veilmq-last-commit", daemon=True)
        with suppress(RuntimeError):  # "can't start new thread": the next second
            self._syncing.start()

    def _sync(self) -> None:
        offset = self._offset
        with suppress(OSError):
            os.fdatasync(self._descriptor)
            self._synced = offset

    def close(self) -> None:
        """Close the file."""
        if self._syncing is not None and self._syncing.is_alive():
            self._syncing.join()
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read(path: Path) -> Noted | None:
    """The newer whole slot; None: there is no such file, or the operator gave up what it knows. Raises OSError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    found = []
    for place in _PLACES:
        slot = content[place : place + _SLOT_BYTES]
        if len(slot) == _SLOT_BYTES and _CHECKSUM.unpack(slot[_SLOT.size :])[0] == crc32(slot[: _SLOT.size]):
            found.append(Noted(*_SLOT.unpack(slot[: _SLOT.size])))
    return max(found, key=lambda noted: noted.number, default=None)


def loss(
    path: Path, noted: Noted | None, connection: apsw.Connection, missing: Sequence[Entry], log: Path
) -> str | None:
    """What was committed and is neither in the database nor in its redo log, and what to do; None if all is there, or
    if nothing is known.

    noted: read before the connection's transaction began, because a running server commits on. missing: the entries of
    the log that the database lacks in that transaction. Raises apsw.Error, OSError.
    """
    if noted is None or is_given_up(log):
        return None
    secret = connection.execute("SELECT epoch FROM secret").fetchone()
    if secret is None or secret[0] != noted.epoch:
        return None  # a new database, or another one
    following: Any = missing[-1].following if missing else connection.execute("SELECT offset FROM mark").get
    if following >= noted.offset:
        return None
    return (
        f"{noted.offset - following} events that were committed last are missing, from offset {following} on: "
        f"veilmq.db-wal or {log.name} is damaged, cut, or not of the same moment; restore all files of one moment, "
        f"or a backup; to go on without, say so: echo {GIVEN_UP.decode()} > {path}"
    )
