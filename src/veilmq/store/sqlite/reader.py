"""Reads the SQLite store beside its batches (`veilmq.store.reader`)."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import IO, Final

from veilmq.model.errors import DiskLow, StoreFailed
from veilmq.model.instant import Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import Topics
from veilmq.store import Options
from veilmq.store.directory import COPY_PREFIX, DatabaseFailed, DataDirectory, Progress, Report
from veilmq.store.reader import AccountCounts
from veilmq.store.rollups import Rollup, SeenClients
from veilmq.store.sqlite import tools
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.rollups.worst import Worst
from veilmq.store.sqlite.disk import MISMATCH, Checkpointer
from veilmq.store.sqlite.disk.readers import Readers
from veilmq.store.sqlite.reading import SqliteView
from veilmq.store.sqlite.tools import backup
from veilmq.store.sqlite.upkeep.trimming import ReadPins

_LONG: Final = 2
"""A WAL this many times longer than the size at which a checkpoint begins has grown because of a long read."""


class SqliteReader:
    """See `Reader`. The store owns it and closes with it."""

    def __init__(
        self,
        directory: DataDirectory,
        options: Options,
        writer: Writer,
        readers: Readers,
        checkpointer: Checkpointer,
        pins: ReadPins,
        apply_log: Callable[[], None],
    ) -> None:
        """apply_log: copies the batches that only a log has into the database."""
        self.directory = directory
        self.first_event = writer.mark.offset
        self._writer = writer
        self._readers = readers
        self._checkpointer = checkpointer
        self._pins = pins
        self._apply_log = apply_log
        self._log_bytes_long = _LONG * options.checkpoint_bytes

    @property
    def queues(self) -> dict[QueueKey, LiveQueue]:
        return self._writer.queues.by_key

    @property
    def aliases(self) -> dict[QueueKey, QueueKey]:
        return self._writer.queues.aliases

    @property
    def topics(self) -> Topics:
        return self._writer.topics

    @property
    def refusal(self) -> DiskLow | StoreFailed | None:
        return copy(self._writer.refusal)

    @property
    def pages_damaged(self) -> bool:
        return self._readers.trusting

    @property
    def held_us(self) -> int:
        return self._writer.held_us

    @property
    def log_bytes(self) -> int:
        return self._checkpointer.wal_bytes

    @property
    def log_is_long(self) -> bool:
        return self.log_bytes > self._log_bytes_long

    def per_account(self) -> dict[str, AccountCounts]:
        queues, topics = self._writer.queues, Counter(key.account for key in self._writer.topics)
        return {
            each: AccountCounts(queues.per_account[each], topics[each], queues.subscriptions[each])
            for each in queues.per_account.keys() | topics.keys()
        }

    def unstored(self, incarnation: int) -> dict[int, Rollup]:
        return self._writer.rollups.live(incarnation)

    def unstored_failing(self, limit: int) -> dict[tuple[int, int], Rollup]:
        return self._writer.rollups.live_failing(limit)

    @property
    def worst(self) -> Worst:
        return self._writer.rollups.shown_worst()

    def seen_clients(self, now: Instant) -> SeenClients:
        self._writer.rollups.add_pending()
        return self._writer.rollups.clients.state(now)

    @contextmanager
    def look(self) -> Iterator[SqliteView]:
        with self._readers.lend() as connection:
            yield SqliteView(connection)

    def hold(self, offset: int, seconds: float) -> int:
        return self._pins.keep(offset, seconds)

    def database_bytes(self) -> int:
        return self.directory.database.stat().st_size + self._checkpointer.wal_bytes

    def backup(self, step: Callable[[], None]) -> IO[bytes]:
        with tempfile.TemporaryDirectory(prefix=COPY_PREFIX, dir=self.directory.path) as directory:
            copy = Path(directory, "veilmq.db")
            self._apply_log()
            try:
                backup.backup(self.directory.database, copy, lambda done, total: step(), is_owner=True)
            except DatabaseFailed as error:
                if str(error) == MISMATCH and not self._readers.trusting:
                    self._readers.note_mismatch()
                raise
            return copy.open("r+b")

    def check(self, progress: Progress) -> Report:
        self._apply_log()
        return tools.check(self.directory.database, progress, is_owner=True)
