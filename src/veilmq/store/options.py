"""What can be set about a SQLite store. The defaults are for production; tests shrink them."""

import msgspec

from veilmq.model.instant import DAY_US
from veilmq.model.message_type import TYPE_ATTRIBUTE

MIB = 1 << 20


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the store, with their units."""

    history_us_max: int = 7 * DAY_US
    """Events older than this are trimmed."""
    history_bytes_max: int = 1024 * MIB
    """The oldest events beyond this size are trimmed."""
    reserve_bytes: int = 64 * MIB
    """Kept back on disk, given up when the disk is full."""
    floor_bytes: int = 256 * MIB
    """Sends and creates are refused below this much free space (at most 2 % of the file system)."""
    checkpoint_bytes: int = 16 * MIB
    """WAL size at which its pages are copied into the database."""
    redo_bytes: int = 4 * MIB
    """Size of the redo log; 0: none, every batch is a transaction."""
    cache_bytes: int = 64 * MIB
    """SQLite's page cache of the writer."""
    migrates: bool = True
    """Whether a file of an older schema is brought to today's. Else it is refused and stays as it is: its release would
    not open it again."""
    error_lines: bool = True
    """Keep the first line of the error for which a worker gives a message back; else its type alone."""
    type_attribute: str = TYPE_ATTRIBUTE
    """Which attribute names a message's type, where its sender's protocol has no other place."""
    type_pointer: str = ""
    """JSON pointer to the type in a body; "" looks into none."""
    disorder: int = 0
    """How many places a standard queue's message may come out of its order (development)."""
    vfs: str | None = None
    """Name of the apsw VFS to open files with (fault injection)."""
    synchronous: str = "FULL"
    """Anything else loses acknowledged commands in a power cut; only a test that proves this sets it."""
