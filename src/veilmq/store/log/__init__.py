"""The log that makes a batch durable before anybody is answered, where that is not this directory's own files.

Strategy: a record is what one transaction of the store changed. Records of a shard are numbered without a gap, and each
names the checksum of the one before, so a reader notices what is missing or of another history. A log takes one record
at a time, and only from the server that owns the shard. Who owns it, and how the log finds out, is its own affair: the
store calls `append` between its statements and its COMMIT, and needs to know three ends of it.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol
from zlib import crc32

import msgspec

from veilmq.model.instant import Instant
from veilmq.model.settings.queue import QueueInfo
from veilmq.store.directory import DataDirectory, SchemaRefused


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What one transaction changed, as it is kept in the log."""

    schema: int
    """Number of the schema of the tables, which whoever has older ones migrates to before."""
    clock: int
    """The lease clock after it, in microseconds."""
    before: int
    """Checksum of the packed record before it; 0 before the first."""
    patch: bytes
    """Patchset of the tables with bodies and events."""
    change: bytes
    """Changeset of all others."""
    plain: "Plain | None" = None
    """Instead of both, where the transaction changed nothing else."""


class Plain(msgspec.Struct, frozen=True, array_like=True):
    """What most transactions change, as the values that they write."""

    history: tuple[int, int, int, int, int, bytes]
    """The new row of the table."""
    journal: bytes | None
    """What the memtable's new row holds, under the same key; None: it has none."""
    mark: tuple[int, int, int, int]
    """The row of the table: clock, sequence, generation, offset."""


class Position(NamedTuple):
    """How far a file has come in the log."""

    lsn: int
    """Number of the last record that it has; 0: none."""
    epoch: int
    """The epoch under which that was appended."""
    checksum: int
    """Checksum of that record, packed."""


class Entry(NamedTuple):
    """One record of a log."""

    lsn: int
    epoch: int
    record: bytes


class Point(NamedTuple):
    """What a copy of the state holds."""

    position: Position
    """The last record that it has."""
    clock: Instant
    """The lease clock then."""


class NotAppended(Exception):
    """The record is not in the log and never will be. The owner may go on after a rollback."""


class NotOwner(NotAppended):
    """The same, because another server owns the shard now. Nothing more may be appended."""


class AppendUnknown(Exception):
    """It cannot be known whether the record is in the log. Nobody may be answered, and nothing more may be appended."""


class Log(Protocol):
    """Where the owner of a shard puts its records. One call at a time, in any thread."""

    @property
    def epoch(self) -> int:
        """The epoch under which the next record is appended. It may grow by a call that found out what became of a
        record."""
        ...

    def append(self, lsn: int, record: bytes) -> None:
        """Make a packed `Record` durable, or finish what `send` began. Blocks, unless `heard` has said True. Raises
        NotAppended, NotOwner, AppendUnknown.

        lsn: the number of the last record, plus one.
        """
        ...

    def send(self, lsn: int, record: bytes) -> int | None:
        """Begin an append without waiting. Returns the descriptor that is readable when there is news: then ask
        `heard`. None: `append` has to wait. Raises NotAppended, NotOwner, AppendUnknown."""
        ...

    def heard(self) -> bool | None:
        """Whether what was sent is in the log; False: `append` has to find out; None: there was no answer yet."""
        ...


class Changed(NamedTuple):
    """What of a record concerns more than the tables."""

    queues: set[int]
    """Incarnations of queues whose rows it changed."""
    shared: bool
    """Whether it changed a value that all servers of a cluster have."""


class Diverged(Exception):
    """A follower does not hold what the owner held: its directory must be filled anew."""


class FormatUnknown(SchemaRefused):
    """A record is of tables that this release does not know: a later release must go on."""

    def __init__(self, lsn: int, found: int, known: int) -> None:
        super().__init__(f"record {lsn} is of state format {found}, and this release knows {known}: upgrade")


class Follower(Protocol):
    """Keeps a data directory as the owner's is. One thread."""

    @property
    def position(self) -> Position:
        """The last record that it has."""
        ...

    @property
    def format(self) -> int:
        """The state format that the tables have."""
        ...

    @property
    def directory(self) -> DataDirectory:
        """Where the data is."""
        ...

    def apply(self, lsn: int, epoch: int, record: bytes) -> Changed:
        """Apply the next record.

        Raises Diverged, FormatUnknown, with nothing changed; StoreUnknown: close it, and open it again.
        """
        ...

    def together(self) -> AbstractContextManager[None]:
        """What is applied in the block becomes one transaction, which takes less work. A record that fails changes
        nothing, those before it stay. Not for the first record of all. Raises StoreUnknown at its end."""
        ...

    def queues(self, incarnations: Iterable[int] | None = None) -> dict[int, QueueInfo | None]:
        """These queues, or all, without counts; None for one that is not there. By incarnation."""
        ...

    def shared(self) -> dict[str, bytes]:
        """Values that all servers of the cluster have, secrets among them, by name."""
        ...

    def copy(self, file: Path) -> Point:
        """Write a copy of the state, which a follower can open, and check it.

        Any thread, beside `apply`. Raises Diverged if the check found anything; DestinationTaken, DatabaseFailed,
        OSError.
        """
        ...

    def close(self) -> None:
        """Release the directory."""
        ...


def checksum(record: bytes) -> int:
    """What the next record calls `before`."""
    return crc32(record)
