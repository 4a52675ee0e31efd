"""The age of each queue's oldest message that is visible or in flight: a few index seeks per queue."""

from collections.abc import Iterable

from veilmq.model.instant import Instant
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.reading.rows import oldest_sent, oldest_young
from veilmq.store.sqlite.store import SqliteStore


def oldest_ages_us(store: SqliteStore, queues: Iterable[tuple[LiveQueue, list[int]]], now: Instant) -> dict[int, int]:
    """Ages by incarnation, for queues with messages. `queues`: each queue with its lines, as the loop saw them.
    Blocks."""
    ages = {}
    with store.readers.lend() as connection:
        young = oldest_young(connection)
        for queue, lines in queues:
            if not queue.visible and not queue.in_flight:
                continue
            found = (oldest_sent(connection, queue.generation, lines), young.get(queue.generation))
            sent = min((each for each in found if each is not None), default=None)
            if sent is not None:
                ages[queue.incarnation] = max(0, now - sent)
    return ages
