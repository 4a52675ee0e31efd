"""Loads an opened database into memory.

Strategy: topics are few and change rarely. Each change writes its row, changes the value in memory, and registers an
undo in case the batch is rolled back.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.messages import ReceiptKey
from veilmq.model.settings.topic import (
    LiveSubscription,
    LiveTopic,
    SubscriptionSettings,
    TopicKey,
    Topics,
    TopicSettings,
)
from veilmq.store import Options
from veilmq.store.directory import DataDirectory
from veilmq.store.sqlite.batch import Mark, Writer, queues
from veilmq.store.sqlite.disk import redo, schema
from veilmq.store.sqlite.disk.redo.last_commit import LastCommit
from veilmq.store.sqlite.effects import Shipping
from veilmq.store.sqlite.settings import queue_commands
from veilmq.store.sqlite.upkeep import snapshots
from veilmq.store.sqlite.upkeep.rollups import Rolling
from veilmq.store.sqlite.upkeep.snapshots import Snapshots

_TOPIC: Final = msgspec.msgpack.Decoder(TopicSettings)
_SUBSCRIPTION: Final = msgspec.msgpack.Decoder(SubscriptionSettings)


def _row(connection: apsw.Connection, query: str) -> tuple[Any, ...]:
    (row,) = connection.execute(query).fetchall()
    return row


def load(
    connection: apsw.Connection, directory: DataDirectory, options: Options, shipping: Shipping | None
) -> tuple[Writer, Snapshots, Rolling]:
    """Load all state that is kept in memory. Raises apsw.Error, ValueError, TypeError or LookupError if the file does
    not hold what was written; NotOurs, OSError, and as `Log.append`."""
    if shipping is not None:
        shipping.migrate(options.schema or schema.VERSION)
    transaction: Callable[[], AbstractContextManager[object]]
    transaction = (lambda: connection) if shipping is None else shipping.transaction
    with transaction():
        _insert_first_rows(connection)
    key, epoch = _row(connection, "SELECT receipts, epoch FROM secret")
    redo.recover(options.disk, directory.redo, connection, key, transaction)
    mark = Mark(*_row(connection, "SELECT clock, sequence, generation, offset FROM mark"))
    loaded = queues.load(connection)
    queue_commands.load_plans(connection, loaded)
    log = redo.Redo(directory.redo, options, key)
    last = LastCommit(directory.committed, options, epoch, mark.offset, mark.clock)
    redo.forget_given_up(options.disk, directory.redo, connection)
    topics = _load_topics(connection)
    for topic, found in topics.items():
        loaded.subscriptions[topic.account] += len(found.subscriptions)
    writer = Writer(connection, loaded, topics, mark, ReceiptKey(key), log, last, shipping)
    (writer.held_us,) = _row(connection, "SELECT held_us FROM expiry_hold")
    writer.memtable.count(loaded)
    rolling = Rolling(connection)
    rolling.recall(connection, writer.rollups, mark.clock)
    return writer, snapshots.load(connection), rolling


def _insert_first_rows(connection: apsw.Connection) -> None:
    """Insert the rows that exist once into a new file."""
    connection.execute("INSERT OR IGNORE INTO mark VALUES (1, 0, 0, 0, 0)")
    connection.execute("INSERT OR IGNORE INTO secret VALUES (1, ?, ?)", schema.fresh_secret())


def _load_topics(connection: apsw.Connection) -> Topics:
    """Load all topics."""
    topics: Topics = {}
    by_incarnation: dict[int, LiveTopic] = {}
    for incarnation, account, region, name, created, modified, settings in connection.execute(
        "SELECT incarnation, account, region, name, created, modified, settings FROM topic"
    ):
        key = TopicKey(account, region, name)
        topic = LiveTopic(key, incarnation, created, modified, _TOPIC.decode(settings))
        topics[key] = by_incarnation[incarnation] = topic
    for number, incarnation, name, created, modified, settings in connection.execute(
        "SELECT id, topic, name, created, modified, settings FROM subscription"
    ):
        found = LiveSubscription(number, name, created, modified, _SUBSCRIPTION.decode(settings))
        by_incarnation[incarnation].subscriptions[name] = found
    return topics
