"""Trims the history: drops the oldest rows, except what is being read, and deleted queues that no event names any more.

Strategy: drop whole rows from the old end, a few at a time. The history's size is the difference of two running totals,
so nothing has to be added up.

A full history loses its oldest events all the time, and a reader that starts with them would never get to read them. So
a reader pins the offset that it needs, for a time, and trimming keeps everything from there on. Pins are bounded: they
expire, they let the history grow by at most half its size and for at most ten minutes, and they are ignored when disk
space is low. They are kept in buckets of 10 s by expiry, so that any number of readers takes a few numbers. Their time
begins with the next sweep, because the readers' threads do not have the store's clock.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Final

from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.store.options import Options
from veilmq.store.reader import HOLD_S_MAX
from veilmq.store.sqlite.batch.history_index import NAME_BYTES
from veilmq.store.sqlite.batch.writer import Writer

_TICK_S: Final = 10


class ReadPins:
    """The offsets that readers of one store need. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[int, int] = {}
        """The least pinned offset, by the number of ticks that it is to last: pins since the latest sweep."""
        self._held: dict[int, int] = {}
        """The least pinned offset, by the tick in which it expires."""
        self._first = 0

    def keep(self, offset: int, seconds: float) -> int:
        """Protect the history from `offset` on for `seconds` (at most `HOLD_S_MAX`) or some seconds more.

        Returns the first offset that is not trimmed: events before it count as gone, though they may still be readable.
        """
        ticks = ceil(min(seconds, HOLD_S_MAX) / _TICK_S)
        with self._lock:
            self._new[ticks] = min(offset, self._new.get(ticks, offset))
            return self._first

    @contextmanager
    def trimming(self, now: int) -> Iterator["Trimming"]:
        """While the body runs, no pin can be added."""
        with self._lock:
            tick = now // (_TICK_S * SECOND_US)
            self._held = {end: offset for end, offset in self._held.items() if end > tick}
            for ticks, offset in self._new.items():
                end = tick + ticks + 1
                self._held[end] = min(offset, self._held.get(end, offset))
            self._new = {}
            step = Trimming(min(self._held.values(), default=None))
            yield step
            self._first = max(self._first, step.first)

    def forget(self) -> None:
        """The batch that trimmed was rolled back: what it trimmed is there again."""
        with self._lock:
            self._first = 0


class Trimming:
    """One step of trimming: what it must keep, and what is left after it."""

    def __init__(self, held: int | None) -> None:
        self.held = held
        """The least pinned offset; None if there is none."""
        self.first = 0
        """If rows are dropped, set it to the first offset that is left."""


FORGOTTEN_MAX: Final = 256
"""How many deleted queues one step forgets: all of them may be due at once, as after a long stop."""
DELETED_US_MIN: Final = 2 * MINUTE_US
"""How long a deleted queue is known at least: for a minute its name may not be used again (SQS)."""
_FORGOTTEN: Final = (
    "SELECT incarnation FROM queue INDEXED BY queue_deleted"
    " WHERE deleted < (SELECT at FROM history ORDER BY offset LIMIT 1) AND deleted < ? LIMIT ?"
)
"""The first row of the history is the oldest: the clock never goes back."""


def trim(writer: Writer, options: Options, floor: int | None, pins: ReadPins, rows_max: int) -> int:
    """Drop the oldest rows beyond the bounds, at most `rows_max` and never the last; returns how many.

    floor: nothing is dropped from this offset on, whatever the bounds say (snapshots.py). pins: the same for what is
    being read, but for at most half as many bytes again and ten minutes, and not on a low disk.
    """
    if floor == 0:
        return 0
    with pins.trimming(writer.now) as step:
        held = step.held if writer.disk_low is None else None
        cut = _beyond(writer, options, floor, held, rows_max)
        if cut:
            offset, step.first = cut[-1]
            writer.write("DELETE FROM history WHERE offset <= ?", (offset,))
            writer.index.trim(step.first)
    return len(cut)


def _beyond(
    writer: Writer, options: Options, floor: int | None, held: int | None, rows_max: int
) -> list[tuple[int, int]]:
    """Offset and end of each row to drop."""
    rows = writer.read(
        "SELECT offset, count, at, bytes_before, length(events) FROM history ORDER BY offset LIMIT ?", (rows_max,)
    )
    keep_after, bytes_max = writer.expiry_now - options.history_us_max, options.history_bytes_max
    cut = []
    for offset, count, at, bytes_before, length in rows:
        end = offset + count
        index_bytes = NAME_BYTES * (writer.mark.offset - end)  # at most
        left = writer.history_bytes - (bytes_before + length) + index_bytes
        is_beyond = at < keep_after or left >= bytes_max
        is_spared = at >= keep_after - HOLD_S_MAX * SECOND_US and left < bytes_max + bytes_max // 2
        is_held = held is not None and end > held and is_spared
        if is_beyond and not is_held and (floor is None or end <= floor):
            cut.append((offset, end))
    if cut and cut[-1][0] == _last_row(writer):
        cut.pop()
    return cut


def forget_queues(writer: Writer) -> int:
    """Drop the rows of deleted queues that no event names any more, at most `FORGOTTEN_MAX`; returns how many."""
    rows = writer.read(_FORGOTTEN, (writer.now - DELETED_US_MIN, FORGOTTEN_MAX))
    if rows:
        writer.write_many("DELETE FROM queue WHERE incarnation = ?", rows)
    return len(rows)


def _last_row(writer: Writer) -> int | None:
    row = writer.read_one("SELECT max(offset) FROM history", ())
    return None if row is None else row[0]
