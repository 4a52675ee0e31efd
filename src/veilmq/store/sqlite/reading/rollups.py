"""Reads the stored rollups of one queue, and of all queues those with failures.

Strategy: the ids of the rows of a range are known, so each is a seek, and the other queues' rows are never read. What
the queue held before the range is in the last row before it: of a minute if one is kept, else of an hour.
"""

from typing import Any, Final

import apsw

from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US
from veilmq.store.rollups import FailingRollups, State, StoredRollups, unpacked
from veilmq.store.sqlite.batch.rollups import HOURS, INCARNATION, MINUTES, PERIOD_SHIFT, row_id
from veilmq.store.sqlite.messages.places import numbers
from veilmq.store.sqlite.upkeep.rollups import periods_ran

_BACK: Final = {MINUTES: DAY_US // MINUTE_US, HOURS: 90 * DAY_US // HOUR_US}
"""How many periods a look for the last row before a range goes back."""
_ROWS: Final = "SELECT r.id, r.numbers FROM carray(?) c CROSS JOIN {table} r ON r.id = c.value"
_FAILING: Final = (
    "SELECT id, numbers FROM (SELECT id, numbers FROM rollup_minute WHERE id >= :first AND id < :end ORDER BY id DESC"
    " LIMIT :rows) WHERE instr(numbers, x'97') LIMIT :limit"
)
"""A cause is stored as an array of seven, which begins with this byte."""
_ROW_BEHIND: Final = (
    "SELECT id FROM rollup_minute WHERE id >= :first AND id < :end ORDER BY id DESC LIMIT 1 OFFSET :rows"
)
_LAST: Final = "SELECT max(r.id) FROM carray(?) c CROSS JOIN {table} r ON r.id = c.value"
_ONE: Final = "SELECT numbers FROM {table} WHERE id = ?"


def stored(connection: apsw.Connection, incarnation: int, hours: bool, first: int, last: int) -> StoredRollups:
    """See `View.rollups`."""
    table = HOURS if hours else MINUTES
    ids = [row_id(period, incarnation) for period in range(first, last + 1)]
    rows: Any = connection.execute(_ROWS.format(table=table), (numbers(ids),))
    found = {id_ >> PERIOD_SHIFT: unpacked(packed) for id_, packed in rows}
    return StoredRollups(
        found, periods_ran(connection, table, first, last), _before(connection, table, incarnation, first)
    )


def failing(connection: apsw.Connection, first: int, last: int, rows_max: int, limit: int) -> FailingRollups:
    """See `View.failing_rollups`."""
    bound = {"first": row_id(first, 0), "end": row_id(last + 1, 0), "rows": rows_max, "limit": limit}
    rows: list[Any] = connection.execute(_FAILING, bound).fetchall()
    found = {(id_ >> PERIOD_SHIFT, id_ & INCARNATION): unpacked(packed) for id_, packed in rows}
    stop: Any = connection.execute(_ROW_BEHIND, bound).get if len(rows) < limit else rows[-1][0]
    return FailingRollups(found, None if stop is None else stop >> PERIOD_SHIFT)


def _before(connection: apsw.Connection, table: str, incarnation: int, first: int) -> State | None:
    """What the queue held at the end of the last row before that period."""
    state = _last(connection, table, incarnation, first)
    if state is None and table == MINUTES:
        state = _last(connection, HOURS, incarnation, first * MINUTE_US // HOUR_US)
    return state


def _last(connection: apsw.Connection, table: str, incarnation: int, end: int) -> State | None:
    ids = [row_id(period, incarnation) for period in range(max(0, end - _BACK[table]), end)]
    id_: Any = connection.execute(_LAST.format(table=table), (numbers(ids),)).get
    if id_ is None:
        return None
    packed: Any = connection.execute(_ONE.format(table=table), (id_,)).get
    return unpacked(packed).state
