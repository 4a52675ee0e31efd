"""What may be read of a store beside its batches: the state in memory, committed rows, the history, whole copies.

Strategy: a reader changes nothing, and one may stand where no batch is ever applied. What it has in memory is read on
the loop that applies the batches; whatever goes to the disk blocks and belongs in a thread. Rows and events are read
through a `View`: one committed state, from its first read to its end.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import IO, Any, Final, NamedTuple, Protocol

from veilmq.model.events import Event, EventRecord
from veilmq.model.message import Extras
from veilmq.model.moves import MoveInfo
from veilmq.model.queue import QueueInfo, QueueKey, QueueSettings
from veilmq.model.topic import TopicKey
from veilmq.store.directory import DataDirectory
from veilmq.store.report import Progress, Report
from veilmq.store.topics import LiveTopic

HOLD_S_MAX: Final = 600
"""For so long a reader of the history may keep it from being trimmed."""


class QueueState(Protocol):
    """A queue in memory."""

    @property
    def key(self) -> QueueKey:
        """Its name, with account and region."""
        ...

    @property
    def incarnation(self) -> int:
        """Which queue of that name it is."""
        ...

    @property
    def settings(self) -> QueueSettings:
        """Those of the moment."""
        ...

    @property
    def visible(self) -> int:
        """Messages that a receive could take."""
        ...

    @property
    def delayed(self) -> int:
        """Messages that were not visible yet."""
        ...

    @property
    def in_flight(self) -> int:
        """Messages under a lease."""
        ...

    @property
    def ready(self) -> Mapping[int, int]:
        """Messages that wait in a line, by the line."""
        ...

    def info(self) -> QueueInfo:
        """As a protocol sees it."""
        ...


class Held(NamedTuple):
    """A message that a queue holds, without its body. The last six are of its lease, if it has one or had one."""

    sequence: int
    id: bytes
    priority: int
    sent: int
    own_expiry: int | None
    sender: str
    extras: Extras
    body_bytes: int
    attempt: int | None
    rotation: int | None
    hidden: int | None
    due: int | None
    granted: int | None
    first: int | None


class StoredQueue(NamedTuple):
    """A queue that exists, as committed."""

    incarnation: int
    key: QueueKey
    created: int
    modified: int
    settings: QueueSettings


class Names(Protocol):
    """Joins the numbers of stored events with their names; reads each name once."""

    def record(self, offset: int, event: Event) -> EventRecord:
        """The event with its names."""
        ...


class View(Protocol):
    """One committed state. Pages seek by index and never count."""

    def visible(self, queue: QueueState, behind: int, limit: int) -> list[Held]:
        """Up to `limit` visible messages by sequence, of greater ones than `behind`."""
        ...

    def hidden(self, queue: QueueState, due: int, sequence: int, limit: int) -> list[Held]:
        """Up to `limit` delayed or leased messages by due instant, behind the one of that due instant and sequence."""
        ...

    def oldest_sent(self, queues: Iterable[tuple[QueueState, list[int]]]) -> dict[int, int]:
        """When the oldest message was sent that is visible or in flight, by incarnation, of queues that have one; with
        each queue its lines (`ready`), as the loop saw them."""
        ...

    def moves(self, count_max: int) -> list[MoveInfo]:
        """The latest move tasks of all queues that exist, newest first."""
        ...

    def head(self) -> tuple[int, int, str]:
        """Clock's mark, next offset, epoch in hexadecimal."""
        ...

    def live_queues(self) -> Iterator[StoredQueue]:
        """Every queue that exists, by incarnation."""
        ...

    def live_messages(self) -> Iterator[tuple[Any, ...]]:
        """Every message that a queue holds, by sequence: (incarnation, sequence, id, priority, sent, own expiry, group,
        type, body's bytes, attempt, rotation, hidden, due, granted, first, instant of its quarantine)."""
        ...

    def incarnations(self, account: str) -> list[tuple[int, str]]:
        """(incarnation, name) of the account's queues that the history can name, deleted ones too."""
        ...

    def incarnations_named(self, *key: str) -> list[int]:
        """All queues, deleted ones too, of a name, or of an account, region and name."""
        ...

    def bounds(self) -> tuple[int, int]:
        """First offset of the history that is still there, and the next to be given."""
        ...

    def newest_snapshot(self) -> int | None:
        """Offset of the newest complete snapshot's begin, or 0 if all of the history is there; None: neither is."""
        ...

    def newest_first(self) -> Iterator[tuple[int, int, bytes]]:
        """(first offset, count, packed events) of every commit."""
        ...

    def oldest_first(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """(first offset, packed events) of every commit with an event in [start, stop)."""
        ...

    def events_from(self, start: int) -> Iterator[tuple[int, Event]]:
        """All events from offset `start` on, as stored, with their offsets."""
        ...

    def packed_bytes(self, start: int, stop: int) -> int:
        """About how many bytes the events of these offsets take: whole commits, but for the last."""
        ...

    def queue_names(self, incarnation: int) -> tuple[Any, ...] | None:
        """(account, region, name) of a queue, a deleted one too."""
        ...

    def origin_names(self, number: int) -> tuple[Any, ...] | None:
        """(protocol, principal, client) of an origin."""
        ...

    def names(self) -> Names:
        """What joins events of this state with their names."""
        ...


class Reader(Protocol):
    """Reads a store. What is not a property blocks; any thread."""

    @property
    def directory(self) -> DataDirectory:
        """Where the data is."""
        ...

    @property
    def queues(self) -> Mapping[QueueKey, QueueState]:
        """All queues, by name."""
        ...

    @property
    def aliases(self) -> Mapping[QueueKey, QueueKey]:
        """Alias, as a key of its account and region -> the queue's own."""
        ...

    @property
    def topics(self) -> Mapping[TopicKey, LiveTopic]:
        """All topics."""
        ...

    @property
    def first_event(self) -> int:
        """Offset of the first event since the store was opened."""
        ...

    @property
    def disk_low(self) -> bool:
        """Whether sends and creates are refused for want of space."""
        ...

    @property
    def log_bytes(self) -> int:
        """Size of the write-ahead log, which a long look keeps from being folded in."""
        ...

    @property
    def log_is_long(self) -> bool:
        """Whether it has grown behind such a look."""
        ...

    def look(self) -> AbstractContextManager[View]:
        """A view, for the thread that asks; waits while too many are open."""
        ...

    def hold(self, offset: int, seconds: float) -> int:
        """Spare the history from `offset` on for so long, at most `HOLD_S_MAX`, or some seconds more.

        Returns the first offset that trimming has left: what is before it is gone, though it may still be seen.
        """
        ...

    def database_bytes(self) -> int:
        """About how large a backup is."""
        ...

    def backup(self) -> IO[bytes]:
        """The whole database as a nameless file, with a fresh receipt key and epoch. Raises OSError, DatabaseFailed."""
        ...

    def check(self, progress: Progress) -> Report:
        """Look at everything. Raises OSError, DatabaseFailed."""
        ...
