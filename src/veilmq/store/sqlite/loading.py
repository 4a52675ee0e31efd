"""Opens a database whose pages may be damaged, and loads it into memory.

Strategy: a start flips single wrong bits back, and reads what is still wrong as it is if no other server has a better
copy. What only the redo log has is copied into the tables first, so that everything in memory is loaded from the
tables alone.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.instant import Instant
from veilmq.model.messages import ReceiptKey
from veilmq.model.settings.queue import QueueKey, QueueSettings
from veilmq.model.settings.topic import (
    LiveSubscription,
    LiveTopic,
    SubscriptionSettings,
    TopicKey,
    Topics,
    TopicSettings,
)
from veilmq.store import Options
from veilmq.store.directory import DatabaseDamaged, DataDirectory
from veilmq.store.sqlite.batch import Mark, Writer
from veilmq.store.sqlite.batch.queues import FIRST_DUE, PRIORITY_LINES_MAX, SETTINGS_DECODER, Groups, LiveQueue, Queues
from veilmq.store.sqlite.disk import SERVED, is_mismatch, redo, schema
from veilmq.store.sqlite.disk.redo.last_commit import LastCommit
from veilmq.store.sqlite.effects import Shipping
from veilmq.store.sqlite.raw.logs import mend_pages
from veilmq.store.sqlite.settings import queue_commands
from veilmq.store.sqlite.upkeep import snapshots
from veilmq.store.sqlite.upkeep.rollups import Rolling
from veilmq.store.sqlite.upkeep.snapshots import Snapshots

logger = logging.getLogger("veilmq.store")

_TOPIC: Final = msgspec.msgpack.Decoder(TopicSettings)
_SUBSCRIPTION: Final = msgspec.msgpack.Decoder(SubscriptionSettings)
_NEXT_WITH_GROUPS: Final = (
    "SELECT min(generation) FROM message_group INDEXED BY message_group_name WHERE generation > ?"
)


def open_mending(database: Path, open_files: Callable[[bool], None], *, alone: bool) -> None:
    """Call `open_files(False)`. If pages do not match their checksums, flip single wrong bits back and call it again.
    If that fails, read pages as they are, by `open_files(True)`: most of the data is right. Raises as `open_files`.

    alone: no other server has a better copy; if one has, `open_files(True)` is not called.
    """
    with suppress(OSError):  # it is missing, or `open_files` says what is wrong
        _mend(database, 1)  # the first page says whether all have checksums
    try:
        try:
            open_files(False)
        except DatabaseDamaged as error:
            if not is_mismatch(error.__cause__):
                raise
            with suppress(OSError):
                _mend(database)
            open_files(False)
    except DatabaseDamaged as error:
        if not (alone and is_mismatch(error.__cause__)):
            raise
        open_files(True)
        logger.error(SERVED, database)


def _mend(database: Path, pages: int | None = None) -> None:
    if mended := mend_pages(database, pages).mended:
        logger.warning("%s: a bit had flipped, and was flipped back, in page %s", database, ", ".join(map(str, mended)))


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
    transaction: Callable[[int], AbstractContextManager[object]]
    transaction = (lambda _: connection) if shipping is None else shipping.transaction
    with transaction(0):
        _insert_first_rows(connection)
    key, epoch = _row(connection, "SELECT receipts, epoch FROM secret")
    redo.recover(options.disk, directory.redo, connection, key, transaction)
    mark = Mark(*_row(connection, "SELECT clock, sequence, generation, offset FROM mark"))
    loaded = load_queues(connection)
    queue_commands.load_plans(connection, loaded)
    log = redo.Redo(directory.redo, options, key)
    last = LastCommit(directory.committed, options, epoch, mark.offset, mark.clock)
    redo.forget_given_up(options.disk, directory.redo, connection)
    topics = _load_topics(connection)
    for topic, found in topics.items():
        loaded.subscriptions[topic.account] += len(found.subscriptions)
    writer = Writer(connection, loaded, topics, mark, ReceiptKey(key), log, last, shipping, options)
    (writer.held_us,) = _row(connection, "SELECT held_us FROM expiry_hold")
    writer.memtable.count(loaded)
    rolling = Rolling(connection)
    rolling.load_counts(connection, writer.rollups, mark.clock)
    return writer, snapshots.load(connection), rolling


def _insert_first_rows(connection: apsw.Connection) -> None:
    """Insert the rows that exist once into a new file."""
    connection.execute("INSERT OR IGNORE INTO mark VALUES (1, 0, 0, 0, 0)")
    connection.execute("INSERT OR IGNORE INTO secret VALUES (1, ?, ?)", schema.fresh_secret())


def load_queues(connection: apsw.Connection) -> Queues:
    """Rebuild everything from the tables: one scan of the narrow indexes, without reading a body."""
    queues = Queues()
    by_generation: dict[int, LiveQueue] = {}
    rows = connection.execute(
        "SELECT incarnation, account, region, name, generation, created, modified, purged, settings"
        " FROM queue WHERE deleted IS NULL"
    )
    alike: dict[bytes, QueueSettings] = {}
    for incarnation, account, region, name, generation, created, modified, purged, packed in rows:
        settings = alike.get(packed)
        if settings is None:
            settings = alike[packed] = SETTINGS_DECODER.decode(packed)
        queue = LiveQueue(QueueKey(account, region, name), incarnation, generation, created, settings)
        queue.modified, queue.purged = modified, purged
        queues.add(queue)
        by_generation[generation] = queue
    for generation, line, count in connection.execute(
        "SELECT generation, line, count(*) FROM message INDEXED BY message_line"
        " WHERE in_line = 1 AND line <= ? GROUP BY generation, line", (PRIORITY_LINES_MAX,)
    ):  # fmt: skip
        if generation in by_generation:
            by_generation[generation].ready[line] = count
            by_generation[generation].visible += count
    _load_groups(connection, queues, by_generation)
    _load_leases(connection, by_generation)
    for queue in by_generation.values():
        if queue.delayed or queue.in_flight:
            found = connection.execute(FIRST_DUE, (queue.generation,)).get
            queues.lower_due(queue, found)
        if queue.visible or queue.delayed or queue.in_flight:
            queue.next_expiry = Instant(0)
    queues.expiry.renew((0, queue.incarnation) for queue in by_generation.values() if not queue.next_expiry)
    return queues


def _load_groups(connection: apsw.Connection, queues: Queues, by_generation: dict[int, LiveQueue]) -> None:
    """Count all messages of groups as visible; `_load_leases` subtracts those that are not."""
    generation = 0
    while (generation := connection.execute(_NEXT_WITH_GROUPS, (generation,)).get) is not None:
        queue = by_generation.get(generation)
        if queue is None:
            continue
        if queue.groups is None:
            queue.groups = Groups(queue, queues.stale_groups)
        for index, in_line in (("message_line", 1), ("message_aside", 0)):
            queue.visible += connection.execute(
                f"SELECT count(*) FROM message INDEXED BY {index}"
                f" WHERE generation = ? AND in_line = {in_line} AND line > {PRIORITY_LINES_MAX}",
                (generation,),
            ).get


def _load_leases(connection: apsw.Connection, by_generation: dict[int, LiveQueue]) -> None:
    """A message with a lease row does not wait in its line: the line's cursor is at or beyond it, or it is aside. The
    messages of all groups are counted as one line."""
    of_groups = PRIORITY_LINES_MAX + 1
    for generation, line, in_line, hidden, received, count, last in connection.execute(
        "SELECT generation, min(line, ?), in_line, hidden, attempt > 0, count(*), max(sequence)"
        " FROM lease GROUP BY 1, 2, 3, 4, 5", (of_groups,)
    ):  # fmt: skip
        if generation not in by_generation:
            continue
        queue = by_generation[generation]
        if in_line or line == of_groups:
            queue.visible -= count
        if in_line and line < of_groups:
            queue.cursors[line] = max(queue.cursors.get(line, 0), last)
            queue.ready[line] -= count
        if not hidden:
            queue.returned += count
            queue.visible += count
        elif received:
            queue.in_flight += count
            queue.grouped += count if line == of_groups else 0
        else:
            queue.delayed += count


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
