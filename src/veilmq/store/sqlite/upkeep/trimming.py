"""Trims the history: drops the oldest rows, and deleted queues that no event names any more.

Strategy: drop whole rows from the old end, a few at a time. The history's size is the difference of two running totals,
so nothing has to be added up.
"""

from typing import Final

from veilmq.model.instant import SECOND_US
from veilmq.store.options import Options
from veilmq.store.reader import HOLD_S_MAX
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.upkeep.read_pins import ReadPins

FORGOTTEN_MAX: Final = 256
"""How many deleted queues one step forgets: all of them may be due at once, as after a long stop."""
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
    return len(cut)


def _beyond(
    writer: Writer, options: Options, floor: int | None, held: int | None, rows_max: int
) -> list[tuple[int, int]]:
    """Offset and end of each row to drop."""
    rows = writer.read(
        "SELECT offset, count, at, bytes_before, length(events) FROM history ORDER BY offset LIMIT ?", (rows_max,)
    )
    keep_after, bytes_max = writer.now - options.history_us_max, options.history_bytes_max
    cut = []
    for offset, count, at, bytes_before, length in rows:
        end, left = offset + count, writer.history_bytes - (bytes_before + length)
        is_beyond = at < keep_after or left >= bytes_max
        is_spared = at >= keep_after - HOLD_S_MAX * SECOND_US and left < bytes_max + bytes_max // 2
        is_held = held is not None and end > held and is_spared
        if is_beyond and not is_held and (floor is None or end <= floor):
            cut.append((offset, end))
    if cut and cut[-1][0] == _last_row(writer):
        cut.pop()
    return cut


def forget_queues(writer: Writer, history_us_max: int) -> int:
    """Drop the rows of deleted queues that no event names any more, at most `FORGOTTEN_MAX`; returns how many."""
    rows = writer.read(_FORGOTTEN, (writer.now - history_us_max, FORGOTTEN_MAX))
    if rows:
        writer.write_many("DELETE FROM queue WHERE incarnation = ?", rows)
    return len(rows)


def _last_row(writer: Writer) -> int | None:
    row = writer.read_one("SELECT max(offset) FROM history", ())
    return None if row is None else row[0]
