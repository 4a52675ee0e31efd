"""Reading a store outside its batches: state in memory, committed rows, the history, whole copies, and a check.

Strategy: a reader changes nothing, and may exist in a process that never applies a batch. Read its state in memory on
the loop that applies the batches. Whatever reads the disk blocks: call it in a thread. Rows and events are read through
a `View`, which shows one committed state from its first read until it is closed.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any, Final, NamedTuple, Protocol

from veilmq.model.errors import DiskLow, StoreFailed
from veilmq.model.events import Event, EventRecord, HeldMessage
from veilmq.model.instant import Instant
from veilmq.model.messages import Extras
from veilmq.model.messages.states import Blocked, HeldLease
from veilmq.model.moves import JobInfo, MoveInfo
from veilmq.model.settings.access import StoredSession
from veilmq.model.settings.queue import QueueInfo, QueueKey, QueueSettings
from veilmq.model.settings.topic import LiveTopic, TopicKey
from veilmq.store.directory import DataDirectory, Progress, Report
from veilmq.store.rollups import FailingRollups, MinutesOfMany, Rollup, SeenClients, StoredRollups

HOLD_S_MAX: Final = 600
"""A reader of the history can protect it from trimming for at most this long."""


class QueueState(Protocol):
    """A queue in memory."""

    @property
    def key(self) -> QueueKey:
        """Its name, with account and region."""

    @property
    def incarnation(self) -> int:
        """Number that tells queues of the same name apart."""

    @property
    def settings(self) -> QueueSettings:
        """Its settings now."""

    @property
    def visible(self) -> int:
        """Messages that can be received."""

    @property
    def delayed(self) -> int:
        """Messages whose delay has not ended."""

    @property
    def in_flight(self) -> int:
        """Messages under a lease."""

    @property
    def ready(self) -> Mapping[int, int]:
        """Number of messages in each line, by line."""

    def info(self) -> QueueInfo:
        """The queue as protocols show it."""


class ListedMessage(HeldMessage, array_like=True, gc=False):
    """A message as pages list it."""

    sender: str
    extras: Extras


class FoundMessage(NamedTuple):
    """A message in a queue or in quarantine, with its body, its MD5 when it was sent, and its queue's retention."""

    queue: QueueKey
    retention_us: int
    listed: ListedMessage
    md5: bytes
    body: bytes
    holder: int | None
    ending: int
    """Of its lease, or its last one: the origin, and what it means if it ends (`LeaseEnding`)."""


class AccountCounts(NamedTuple):
    """How many of each an account has, as its limits count them."""

    queues: int
    topics: int
    subscriptions: int


class HeldBy(NamedTuple):
    """A message that some client has and works on."""

    queue: QueueKey
    id: bytes
    granted: Instant
    due: Instant
    attempt: int


class HeldByOrigin(NamedTuple):
    """Messages in flight, by origin; not those that it gave back for a retry."""

    held: dict[int, tuple[int, Instant]]
    """How many, and since when the oldest lease."""
    oldest: dict[int, list[HeldBy]]
    """The oldest leases."""
    is_all: bool
    """False: the limit of messages to look at was reached, so there may be more."""


class DamagedMessage(NamedTuple):
    """A message in quarantine, as it is stored."""

    queue: QueueKey
    sequence: int
    id: bytes
    quarantined: Instant
    sent: Instant
    own_expiry: Instant | None
    priority: int
    sender: str
    group: str | None
    type: str | None
    md5: bytes
    """As it was sent: the body may have another."""
    body: bytes
    packed: bytes | None
    """Its attributes, packed."""
    extras: Extras | None
    """The same, unpacked; None if they cannot be read."""


class StoredQueue(NamedTuple):
    """A queue that exists, as committed."""

    incarnation: int
    key: QueueKey
    created: int
    modified: int
    settings: QueueSettings


class Span(NamedTuple):
    """Events in a row of the history."""

    start: int
    stop: int
    indexed: bool
    """Whether the index says that they name what is sought; False: nobody knows yet."""


MEASURES: Final = ("oldest", "blocked", "depth", "in_flight", "dead_lettered", "lease_expired", "failed")
"""By which queues are ranked; the last three count the present hour and the one before."""


class Ranking(Protocol):
    """The worst queues of an account by one measure."""

    @property
    def value_of(self) -> Callable[[int], int]:
        """By incarnation; 0: not ranked. The greater the worse."""

    def top(self) -> tuple[list[tuple[int, int]], bool]:
        """(value, incarnation) of queues that are certainly the worst, worst first; and whether these are all."""

    def begin_renewal(self) -> None:
        """There are too few of them: `walk`, and then `end_renewal` whatever happens."""

    def walk(self, incarnations: Iterable[int]) -> list[tuple[int, int]]:
        """The worst few thousand of all queues of the account, as `top` shows them. Any thread."""

    def end_renewal(self, ranked: list[tuple[int, int]] | None) -> None:
        """What `walk` found; None: it failed."""


class Worst(Protocol):
    """The rankings of all accounts. On the loop, but for `Ranking.walk`."""

    @property
    def accounts(self) -> list[str]:
        """All that have one."""

    @property
    def unseen(self) -> list[int]:
        """Queues that had messages at the start, and whose oldest message was not looked up yet."""

    @property
    def hour(self) -> int:
        """The present one, by number since 1970."""

    def queue(self, incarnation: int) -> QueueState | None:
        """The queue, if it still exists."""

    def ranking(self, account: str, by: str) -> Ranking:
        """By one of `MEASURES`. Those of `oldest` and `blocked` are bounds: FOREVER less an instant before which no
        message was sent, or blocked."""

    def set_blocked_bound(self, incarnation: int, since: int) -> None:
        """The queue was looked at: nothing in it has been blocked since before `since`, which is its new bound."""


class Names(Protocol):
    """Replaces the numbers in stored events by names; reads each name once."""

    def record(self, offset: int, event: Event) -> EventRecord:
        """The event with its names."""


class View(Protocol):
    """One committed state. Pages are found by index seeks; nothing is counted."""

    def visible(self, queue: QueueState, behind: int, limit: int) -> list[ListedMessage]:
        """Up to `limit` visible messages with a sequence greater than `behind`, by sequence."""

    def hidden(self, queue: QueueState, due: int, sequence: int, limit: int) -> list[ListedMessage]:
        """Up to `limit` delayed or leased messages after (due, sequence), by due instant and sequence."""

    def leases(self, queue: QueueState, due: int, sequence: int, limit: int) -> list[HeldLease]:
        """The same messages as `hidden`, with those who have them."""

    def blocked(self, queue: QueueState, now: int, shown_max: int) -> Blocked:
        """What waits behind messages in flight or delayed, with up to `shown_max` groups."""

    def heads(self, queue: QueueState, now: int, groups: set[str]) -> dict[str, HeldLease]:
        """Of these groups those that are blocked: by name, the message that every other one behind it waits for."""

    def held_by_origin(self, limit: int, each_max: int = 0, queue: QueueState | None = None) -> "HeldByOrigin":
        """What each client has in flight, of one queue or of all; looks at `limit` delayed or leased messages."""

    def containing(self, queue: QueueState, sequences: list[int], text: str) -> set[int]:
        """Of these messages of the queue those whose body has the text in it."""

    def message(self, incarnation: int, sequence: int) -> FoundMessage | None:
        """The message with this sequence, if it is in this queue or its quarantine."""

    def quarantined(
        self, wanted: Callable[[QueueKey], bool], behind: int, limit: int, body_bytes_max: int
    ) -> tuple[list[DamagedMessage], bool]:
        """Up to `limit` messages in quarantine with a sequence greater than `behind`, by sequence, of the queues that
        are wanted, and whether there are more. The page ends early with the message that reaches `body_bytes_max`."""

    def quarantined_count(self) -> int:
        """How many messages of existing queues are in quarantine."""

    def oldest_sent(self, queues: Iterable[tuple[QueueState, list[int]]]) -> dict[int, int]:
        """When the oldest visible or leased message was sent, by incarnation, for queues that have such a message.
        queues: each with its lines (the keys of `ready`), as seen on the loop."""

    def rollups(self, incarnation: int, first: int, last: int, *, hours: bool) -> StoredRollups:
        """The stored rollups of minutes or hours from `first` to `last`, both by number since 1970."""

    def minutes(self, incarnations: Sequence[int], first: int, last: int) -> MinutesOfMany:
        """The stored rollups of the minutes from `first` to `last` of some queues: one seek each."""

    def failing_rollups(self, first: int, last: int, rows_max: int, limit: int) -> FailingRollups:
        """Stored rollups with failures of the minutes from `first` to `last`, of all queues, newest first: up to
        `limit` of the newest `rows_max` rollups."""

    def moves(self, count_max: int) -> list[MoveInfo]:
        """The latest move tasks of all existing queues, newest first."""

    def jobs(self) -> list[JobInfo]:
        """All jobs that are remembered, newest first."""

    def session(self, digest: bytes) -> StoredSession | None:
        """The session of the console whose secret has that digest."""

    def job(self, id_: bytes) -> JobInfo | MoveInfo | None:
        """The job or move task of that id."""

    def head(self) -> tuple[int, int, str]:
        """Mark of the lease clock, next event offset, epoch in hexadecimal."""

    def live_queues(self) -> Iterator[StoredQueue]:
        """Every existing queue, by incarnation."""

    def live_messages(self) -> Iterator[tuple[int, HeldMessage]]:
        """Every message in a queue, by sequence, with the queue's incarnation."""

    def incarnations(self, account: str) -> list[tuple[int, str]]:
        """(incarnation, name) of the account's queues that the history knows, including deleted ones."""

    def incarnations_named(self, *key: str) -> list[int]:
        """All queues with this name, or this account, region and name, including deleted ones."""

    def lives(self, key: QueueKey) -> list[tuple[int, int, int | None]]:
        """(incarnation, created, deleted) of each queue that the history knows under that name, oldest first."""

    def bounds(self) -> tuple[int, int]:
        """First offset still in the history, and the next offset to be assigned."""

    def newest_snapshot(self) -> int | None:
        """Offset at which the newest complete snapshot begins; 0 if the whole history is there; None if neither is."""

    def snapshots(self) -> list[tuple[int, int]]:
        """(first offset, instant of its end) of the complete snapshots in the history, oldest first."""

    def offset_after(self, instant: int) -> int:
        """Offset of the first event of the first commit after the instant; the next offset if there is none."""

    def commits(self, start: int, stop: int) -> Iterator[tuple[int, int, int, bytes]]:
        """(first offset, count, instant, packed events) of every commit with an event in [start, stop)."""

    def spans(self, ids: Collection[bytes], sequences: Iterable[int], emptied: Iterable[int]) -> list[Span]:
        """Where in the history events may be that name one of these, oldest first: a message's id, the sequence of a
        message that is gone, or the incarnation of a queue that was emptied."""

    def spans_of_sends(self, deduplication_id: str) -> list[Span]:
        """The same of sends with this deduplication id."""

    def oldest_first(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """(first offset, packed events) of every commit with an event in [start, stop), oldest first."""

    def events_from(self, start: int) -> Iterator[tuple[int, Event]]:
        """(offset, event) of all events from offset `start` on, as stored."""

    def packed_bytes(self, start: int, stop: int) -> int:
        """About how many bytes the events in [start, stop) take: whole commits, except for the last."""

    def queue_names(self, incarnation: int) -> tuple[Any, ...] | None:
        """(account, region, name) of a queue, including deleted ones."""

    def origin_names(self, number: int) -> tuple[Any, ...] | None:
        """(protocol, principal, client) of an origin."""

    def names(self) -> Names:
        """Adds names to events of this state."""


class Reader(Protocol):
    """Reads a store. Methods block and may be called in any thread; properties do not block."""

    @property
    def directory(self) -> DataDirectory:
        """Where the data is."""

    @property
    def queues(self) -> Mapping[QueueKey, QueueState]:
        """All queues, by name."""

    @property
    def aliases(self) -> Mapping[QueueKey, QueueKey]:
        """Alias -> the queue's own key. The alias is a key in the queue's account and region."""

    @property
    def topics(self) -> Mapping[TopicKey, LiveTopic]:
        """All topics."""

    @property
    def first_event(self) -> int:
        """Offset of the first event since the store was opened."""

    @property
    def refusal(self) -> DiskLow | StoreFailed | None:
        """Why sends and creates are refused: no space, or a file of the database is gone. None: they are not."""

    @property
    def pages_damaged(self) -> bool:
        """Whether a page did not match its checksum, so that what is served may be wrong."""

    @property
    def held_us(self) -> int:
        """How far the expiry clock is behind the lease clock: steps of the clock that nobody has accepted."""

    @property
    def log_bytes(self) -> int:
        """Size of the WAL. A long read keeps it from being checkpointed."""

    @property
    def log_is_long(self) -> bool:
        """Whether the WAL has grown because of a long read."""

    def per_account(self) -> dict[str, "AccountCounts"]:
        """What each account has, of those that have anything. Call on the loop."""

    def unstored(self, incarnation: int) -> dict[int, Rollup]:
        """The rollups of a queue's minutes that are not stored yet, by number since 1970. Call on the loop."""

    def unstored_failing(self, limit: int) -> dict[tuple[int, int], Rollup]:
        """Up to `limit` rollups with failures that are not stored yet, by minute and queue. Call on the loop."""

    @property
    def worst(self) -> "Worst":
        """The queues that are worst by some measure. Read it on the loop."""

    def seen_clients(self, now: Instant) -> SeenClients:
        """What clients did in the last hour. Call on the loop."""

    def look(self) -> AbstractContextManager[View]:
        """A view for the calling thread; waits while too many are open."""

    def hold(self, offset: int, seconds: float) -> int:
        """Protect the history from `offset` on against trimming, for `seconds` (at most `HOLD_S_MAX`) or some seconds
        more.

        Returns the first offset that is not trimmed: events before it count as gone, though they may still be readable.
        """

    def database_bytes(self) -> int:
        """Approximate size of a backup."""

    def backup(self, step: Callable[[], None]) -> IO[bytes]:
        """The whole database as an unlinked file, with a fresh receipt key and epoch. step: called now and then; what
        it raises ends the work. Raises OSError, DatabaseFailed."""

    def check(self, progress: Progress) -> Report:
        """Check everything. Raises OSError, DatabaseFailed, NotOurs (somebody took the file away)."""
