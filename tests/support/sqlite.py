"""The SQLite store as the contract and the fault tests open it: small, and with access to its internals."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from tests.support.contract.stage import Stage

from veilmq.admin.history import Scope, snapshot_lines
from veilmq.model.commands import AnyCommand, Send
from veilmq.model.events import EventRecord, HistoryTrimmed
from veilmq.model.instant import FOREVER
from veilmq.model.settings.queue import FIFO_SUFFIX
from veilmq.store import MIB, Options, Store, View
from veilmq.store.sqlite.batch.memtable import replay
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.store import SqliteStore

SMALL = Options(reserve_bytes=0, floor_bytes=0, cache_bytes=4 * MIB, redo_bytes=32 * 1024, clock_step_us_max=FOREVER)
"""No disk reserve: tests open hundreds of stores. And time may pass while a store is closed."""


def store_of(stage: Stage) -> SqliteStore:
    """The stage's store, to look inside."""
    assert isinstance(stage.store, SqliteStore)
    return stage.store


def read_events(view: View, start: int, count_max: int) -> list[EventRecord]:
    """Up to `count_max` events from offset `start` on. Raises HistoryTrimmed if `start` is below the first offset."""
    first, following = view.bounds()
    if start < first:
        raise HistoryTrimmed(first)
    if start >= following:
        return []
    names = view.names()
    return [names.record(offset, event) for offset, event in islice(view.events_from(start), count_max)]


class SqliteFactory:
    """Opens one directory again and again (`tests.support.contract.StoreFactory`)."""

    kind: type[SqliteStore] = SqliteStore

    def __init__(self, path: Path, options: Options = SMALL) -> None:
        self.path = path
        self.options = options

    def open(
        self,
        *,
        history_us_max: int | None = None,
        history_bytes_max: int | None = None,
        clock_step_us_max: int | None = None,
    ) -> SqliteStore:
        """See `StoreFactory.open`."""
        options = self.options
        if history_us_max is not None:
            options = msgspec.structs.replace(options, history_us_max=history_us_max)
        if clock_step_us_max is not None:
            options = msgspec.structs.replace(options, clock_step_us_max=clock_step_us_max)
        if history_bytes_max is not None:
            options = msgspec.structs.replace(options, history_bytes_max=history_bytes_max)
        return self.kind(self.path, options)

    def kill(self, store: Store) -> None:
        """Close the store, then restore the files as they were before: its close changes nothing."""
        assert isinstance(store, SqliteStore)
        names = ("veilmq.db", "veilmq.db-wal", "redo", "committed")
        left = {name: (self.path / name).read_bytes() for name in names if (self.path / name).exists()}
        store.close()
        for name, content in left.items():
            (self.path / name).write_bytes(content)

    def abandon(self, store: Store) -> None:
        """See `StoreFactory.abandon`."""
        assert isinstance(store, SqliteStore)
        store._writer.rollback()

    def history(self, store: Store, start: int, count_max: int) -> list[EventRecord]:
        """See `StoreFactory.history`."""
        assert isinstance(store, SqliteStore)
        with store.reader.look() as view:
            return read_events(view, start, count_max)

    def state(self, store: Store) -> list[dict[str, Any]]:
        """See `StoreFactory.state`."""
        assert isinstance(store, SqliteStore)
        with store.reader.look() as view:
            return [msgspec.json.decode(line) for line in snapshot_lines(view, Scope())]

    def damage(self, sequence: int) -> None:
        """See `StoreFactory.damage`. The first byte stays valid UTF-8 or not, as the bit falls."""
        connection = connect(self.path / "veilmq.db")
        body = bytearray(connection.execute("SELECT body FROM message WHERE sequence = ?", (sequence,)).get)
        body[len(body) // 2] ^= 0x80
        connection.execute("UPDATE message SET body = ? WHERE sequence = ?", (bytes(body), sequence))
        connection.close()

    def rows(self, store: Store) -> int:
        """See `StoreFactory.rows`."""
        assert isinstance(store, SqliteStore)
        with store.readers.lend() as connection:
            return int(connection.execute("SELECT count(*) FROM message").get) + len(replay(connection))

    def order(self, store: Store, commands: Sequence[AnyCommand]) -> list[int]:
        """The serial order that the store gave the commands of one batch, as places in it."""
        assert isinstance(store, SqliteStore)
        kinds = list(store._handlers)

        def rank(place: int) -> tuple[int, bool]:
            command = commands[place]
            # By the name: the batch itself may have deleted or made the queue.
            return kinds.index(type(command)), isinstance(command, Send) and command.queue.name.endswith(FIFO_SUFFIX)

        return sorted(range(len(commands)), key=rank)
