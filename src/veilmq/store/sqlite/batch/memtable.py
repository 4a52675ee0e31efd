"""All unflushed messages of a store, and the lines in which they wait."""

from collections import deque
from collections.abc import Sequence
from typing import Final

import apsw

from veilmq.store.sqlite.batch.queues import LiveQueue, Queues
from veilmq.store.sqlite.batch.unflushed import Unflushed, replay
from veilmq.store.sqlite.disk.redo import Contents, Entry

MESSAGES_MAX: Final = 2_048
"""Unflushed messages of a store; with one more, all are flushed, which takes some 10 ms then."""
BATCHES_MAX: Final = 64
"""Batches since the journal began, with unflushed messages or without: a reader goes through the history of all of
them."""
BYTES_MAX: Final = 4 << 20
"""Bodies and attributes in the journal, those of deleted messages among them."""
EVENTS_MAX: Final = 16_384
"""Events since the journal began: a reader takes some 20 ms for them."""
DEPTH_MAX: Final = 512
"""A message that so many others are before will not die unflushed."""
MESSAGE_BYTES_MAX: Final = 16 * 1024
"""A longer message, body and attributes, is written once, where it stays."""
_SINCE: Final = "SELECT count(*), ifnull(sum(count), 0) FROM history WHERE offset >= (SELECT min(offset) FROM memtable)"


class Memtable:
    """All unflushed messages of a store."""

    def __init__(self) -> None:
        self.messages: dict[int, Unflushed] = {}
        """By sequence."""
        self.queues: dict[int, LiveQueue] = {}
        """By generation, those of the messages, and those whose unflushed messages have all gone since."""
        self.batches = 0
        """Since the journal began; 0: there is none."""
        self.changed = False
        """Whether the open batch may have changed anything here: said before it is done, for it may fail midway."""
        self.held: dict[str, Unflushed] = {}
        """Those that are in flight, by handle; after a restart without those of before."""
        self.unjudged = False
        """They were read back from the disk: nobody receives one before all were flushed, and are judged as any."""
        self.died: list[int] = []
        """Sequences of those that the open batch deleted."""
        self._born: list[Contents] = []
        self._bytes = 0
        self._events = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to flush all."""
        return (
            len(self.messages) > MESSAGES_MAX
            or self.batches >= BATCHES_MAX
            or self._bytes > BYTES_MAX
            or self._events > EVENTS_MAX
        )

    def begin_batch(self) -> None:
        """A batch is opened."""
        self.changed = False
        self.died = []

    def add(self, queue: LiveQueue, unflushed: Unflushed, size_bytes: int) -> None:
        """One more, at the end of its line; it takes so much in the journal."""
        self.changed = True
        contents = unflushed.contents
        self.messages[contents.sequence] = unflushed
        self._born.append(contents)
        self._bytes += size_bytes
        line = queue.unflushed.get(contents.priority)
        if line is None:
            line = self._line(queue, contents.priority)
        line.append(unflushed)

    def _line(self, queue: LiveQueue, priority: int) -> deque[Unflushed]:
        self.queues[queue.generation] = queue
        return queue.unflushed.setdefault(priority, deque())

    def end_batch(self, events: int) -> list[Contents]:
        """Those that the open batch sent and that are unflushed still, a row of the journal; it has so many events."""
        born, self._born = self._born, []
        if born or self.batches:
            self.changed = True
            self.batches += 1
            self._events += events
        return born

    def clear(self) -> None:
        """None is unflushed any more, and there is no journal."""
        self.changed = True
        for queue in self.queues.values():
            queue.unflushed = {}
        self.messages = {}
        self.queues = {}
        self.batches = 0
        self.held = {}
        self.unjudged = False
        self._born = []
        self._bytes = self._events = 0

    def restore(self, connection: apsw.Connection, queues: Queues, unapplied: Sequence[Entry] = ()) -> None:
        """As the database and the entries that it lacks say, after a start or a rollback."""
        self.clear()
        self.messages = replay(connection, unapplied=unapplied)
        ((batches, events),) = connection.execute(_SINCE)
        self.batches = batches + len(unapplied)
        self._events = events + sum(entry.count for entry in unapplied)
        self._bytes = sum(unflushed.contents.size_bytes for unflushed in self.messages.values())
        self.unjudged = bool(self.messages)
        if self.messages:
            by_generation = {queue.generation: queue for queue in queues.by_incarnation.values()}
            for unflushed in self.messages.values():
                queue = self.queues[unflushed.contents.generation] = by_generation[unflushed.contents.generation]
                if not unflushed.leased:
                    self._line(queue, unflushed.contents.priority).append(unflushed)
        self.changed = False

    def count(self, queues: Queues) -> None:
        """After a start: put the messages on the counts of their queues, and make sure that a sweep looks at them."""
        for unflushed in self.messages.values():
            queue = self.queues[unflushed.contents.generation]
            queues.lower_expiry(queue, 0)
            if unflushed.leased:
                queue.in_flight += 1
                queues.lower_due(queue, unflushed.due)
            else:
                queue.visible += 1
