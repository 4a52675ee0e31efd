"""The age of each queue's oldest message that is visible or in flight: a few index seeks per queue."""

from collections.abc import Iterable

from veilmq.model.instant import Instant
from veilmq.store import Reader
from veilmq.store.reader import QueueState


def oldest_ages_us(reader: Reader, queues: Iterable[tuple[QueueState, list[int]]], now: Instant) -> dict[int, int]:
    """By incarnation, for queues with messages; with each queue its lines, as the loop saw them. Blocks."""
    with reader.look() as view:
        return {incarnation: max(0, now - sent) for incarnation, sent in view.oldest_sent(queues).items()}
