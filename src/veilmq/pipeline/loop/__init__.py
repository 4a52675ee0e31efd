"""`loop`: keeps the recommendations up to date, at the cost of new events only.

Strategy: a run reads the events since the last run and adds what they say of each lease (`attempts.partials`) to the
pending leases. Leases that ended go into the histogram, one file per run in the day of its last event. Leases that have
not ended, and crashes whose worker may still report (`GRACE_US`), stay pending. A group is planned again when the
attempts since its last plan are `REPLAN_GROWTH` of those before; the total is no measure, because it stops growing once
old days are dropped. Beside the histogram it keeps the leases' sums by hour, and each change of a plan in force, which
say whether a plan helped (`worse`). Every file of a run carries its last offset in its name, and `state.json`, replaced
last, says which offset counts: if a run dies, the next one removes its files. A lock allows one run at a time.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from veilmq.pipeline import tables
from veilmq.pipeline.errors import HistoryGap, OptionInvalid, PipelineError
from veilmq.pipeline.estimates import buckets
from veilmq.pipeline.events.export import unchanged
from veilmq.pipeline.events.reading import History, last_instant
from veilmq.pipeline.events.source import load
from veilmq.pipeline.jobs import attempts, plan_changes, timeouts
from veilmq.pipeline.places import (
    Lock,
    Patience,
    Place,
    PlaceTaken,
    is_url,
    kept,
    listed,
    lock_of,
    make,
    place,
    put,
    remove,
    source,
    whole,
)
from veilmq.pipeline.publish.plans import Queue, floors, plans_of
from veilmq.pipeline.tables import append_day, counted, covering
from veilmq.store.files import restore, sync_tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from veilmq.estimate.schedule import Costs

GRACE_US: Final = 3_600 * 1_000_000
"""How long after the end of its lease a worker may still report."""
REPLAN_GROWTH: Final = 0.15
RETENTION_DAYS_DEFAULT: Final = 30
_LOCALLY_MAX: Final = 24
"""Up to this many groups are planned in this process: a Spark job costs more than planning them."""
_COMPACT_FILES: Final = 24
_CELLS: Final = "cells"
_HOURS: Final = "hours"
_CHANGES: Final = "changes"
GROWING: Final = (_CELLS, _HOURS, _CHANGES)
"""Tables to which each run adds a file."""
_STATE: Final = "state.json"


class LoopTaken(PipelineError):
    """Another run is working in the directory."""


class Ran(msgspec.Struct, frozen=True):
    """The result of a run."""

    start: int
    stop: int
    """The run read the offsets from `start` to before `stop`."""
    settled: int
    pending: int
    planned: int
    """Groups that were planned again ..."""
    groups: int
    """... out of this many."""
    seconds: float
    compacted: int = 0
    dropped_days: int = 0
    left_out: int = 0
    """Deleted queues: they keep what was learnt, in case they come back, but have no recommendation."""


class _State(msgspec.Struct):
    next: int | None = None
    pending: str | None = None
    runs: int = 0
    source: str = ""
    epoch: str = ""
    """The epoch of the source's history: see `History.epoch`."""
    floors_us: dict[str, int] = {}
    """By account/region/queue, twice the longest interval between extensions seen so far."""
    unplanned: dict[str, float] = {}
    """By group (`_name`), the attempts since its last plan."""
    deleted: set[str] = set()
    """Deleted queues (account/region/queue)."""


class Loop:
    """The directory of one loop: `timeouts` (a table), `cells`, `hours`, `changes`, `pending-*`, `state.json`,
    `metrics.prom`, `lock`."""

    def __init__(
        self, directory: Place | str, *, kind: str = "parquet", retention_days: int = RETENTION_DAYS_DEFAULT
    ) -> None:
        """directory: or a URL in an object store. kind: format of the table `timeouts`; retention_days: 0 to 36,500.
        Raises OptionInvalid."""
        tables.check_format(kind, directory)
        tables.oldest_kept(date.max, retention_days)
        self.directory = place(directory)
        tables.check_replaced(self.timeouts, kind)
        self._kind = kind
        self._retention_days = retention_days

    @property
    def timeouts(self) -> Place:
        """The table of recommendations, as `timeouts.recommended` gives it."""
        return self.directory / "timeouts"

    def run(
        self,
        spark: "SparkSession",
        history: History,
        options: dict[str, str],
        *,
        costs: "Costs | None" = None,
        now: float,
        timer: Any,
    ) -> Ran:
        """Process the new events. `options` make `veilmq-events` read the same history.

        now: Unix seconds; timer: a clock to measure with. Raises LoopTaken, HistoryGap, OptionInvalid, PipelineError.
        """
        if options.keys() & {"from", "until"}:
            raise OptionInvalid("A loop goes on where it stopped: from and until are not for it.", "")
        began = timer()
        make(self.directory)
        with _locked(self.directory) as lock, unchanged(options.get("path")):
            state = self._state(lock, options)
            before = msgspec.json.encode(state)
            history.epoch = state.epoch
            start = history.hold(None) if state.next is None else state.next
            bounds = history.bounds()
            if not bounds.first <= start <= bounds.following:
                mend = f"Remove {self.directory} to begin anew, and run more often than the history is trimmed."
                raise HistoryGap(f"The history holds {bounds.first} to {bounds.following}, and {start} is next.", mend)
            history.hold(start)
            _clear(self.directory, lock, state)
            left = self._left(state)
            settled, waiting = 0, 0 if left is None else tables.load(left).num_rows
            until = last_instant(history, start, bounds.following)
            if until is not None:
                events = _events(spark, options, attempts.KINDS, start, bounds.following)
                earlier = None if left is None else _pending(spark, left)
                settled, waiting = self._take_in(events, earlier, state, start, bounds.following, until)
                changed = plan_changes.changes(_events(spark, options, [plan_changes.KIND], start, bounds.following))
                self._add(_CHANGES, changed.toArrow(), start, bounds.following, until)
                _see_deleted(state, _events(spark, options, timeouts.LIFE_KINDS, start, bounds.following))
                _raise_floors(state, floors(events, earlier))
            planned, groups, left_out = self._plan(spark, state, costs, lambda: lock.save(before))
            state.next, state.runs, state.epoch = bounds.following, state.runs + 1, history.epoch
            # Once it is durable, the files of the previous state may be removed.
            lock.save(msgspec.json.encode(state))
            today = datetime.fromtimestamp(now, UTC).date()
            oldest = tables.oldest_kept(today, self._retention_days)
            there = growing(self.directory)
            dropped = max((tables.retain(table, oldest) for table in there), default=0)
            compacted = sum(tables.compact(table, files_max=_COMPACT_FILES) for table in there)
            took = timer() - began
            read = (start, bounds.following)
            ran = Ran(*read, settled, waiting, planned, groups, took, compacted, dropped, left_out)
            self._write_metrics(ran, now)
        return ran

    def _take_in(
        self, events: "DataFrame", earlier: "DataFrame | None", state: _State, start: int, stop: int, until: int
    ) -> tuple[int, int]:
        from pyspark.sql import functions as F

        leases = attempts.partials(events)
        if earlier is not None:
            # An earlier release had fewer columns.
            leases = attempts.merged(leases.unionByName(earlier, allowMissingColumns=True))
        leases = leases.where(F.col("granted").isNotNull()).persist()
        try:
            ends = ("deleted", "delete_refused", "failed", "released", "returned", "undelivered", "dropped")
            over = F.coalesce(*ends).isNotNull()
            # A lease whose message was purged has no end of its own.
            settled = over | (F.greatest("expired", "lease_end") < until - GRACE_US)
            pending = f"pending-{stop:020}"
            left = leases.where(~settled)
            self._keep(left, self.directory / pending)
            judged = attempts.judged(leases.where(settled))
            cells, by_hour = buckets.histogram(judged).toArrow(), plan_changes.hours(judged).toArrow()
        finally:
            leases.unpersist()
        self._add(_CELLS, cells, start, stop, until)
        self._add(_HOURS, by_hour, start, stop, until)
        state.pending = pending
        for cell in cells.select([*buckets.GROUP, "leases"]).to_pylist():
            name = _name(cell[each] for each in buckets.GROUP)
            state.unplanned[name] = state.unplanned.get(name, 0.0) + cell["leases"]
        return round(sum(cells.column("leases").to_pylist())), tables.load(self.directory / pending).num_rows

    def _add(self, name: str, rows: Any, start: int, stop: int, until: int) -> None:
        """What the run adds to a table that grows, in the day of its last event."""
        if rows.num_rows or name == _CELLS:
            day = datetime.fromtimestamp(until / 1e6, UTC).date()
            append_day(rows, self.directory / name, day, f"offset-{start:020}-{stop:020}")

    def _keep(self, left: "DataFrame", path: Place) -> None:
        """Durably: as Spark writes it, or as one object."""
        if isinstance(path, Path):
            left.coalesce(1).write.mode("overwrite").parquet(str(path))
            sync_tree(path)
            return
        with whole(path) as file:
            pq.write_table(left.toArrow(), file, compression="zstd")

    def _left(self, state: _State) -> Place | None:
        """The leases that were pending after the last run. Raises HistoryGap if their file is gone."""
        if state.pending is None:
            return None
        left = self.directory / state.pending
        if not left.exists():
            mend = f"Bring it back, or remove {self.directory} to begin anew."
            raise HistoryGap(f"{left} is missing, and with it the leases that had not ended.", mend)
        return left

    def plans(self) -> dict[Queue, dict[str, Any]]:
        """The recommendations in the form that `publish` takes."""
        if not self.timeouts.exists():
            return {}
        rows = tables.load(self.timeouts).to_pylist()
        state = msgspec.json.decode(kept(self.directory, _STATE) or b"{}", type=_State)
        floors_us = {_queue(name): floor_us for name, floor_us in state.floors_us.items()}
        return plans_of(rows, floors_us)

    def worse(self) -> dict[Queue, tuple[int, str]]:
        """Plans in force after which it got worse, in the form that `publish.take_back` takes: see `plan_changes`."""
        changed = self._kept(_CHANGES, plan_changes.CHANGES_SCHEMA)
        if changed.empty:
            return {}
        queue = list(plan_changes.QUEUE)
        by_hour = self._kept(_HOURS, plan_changes.HOURS_SCHEMA)
        hours = dict(iter(by_hour.groupby(queue)))
        none = by_hour.iloc[:0]
        found = [plan_changes.compared(hours.get(names, none), rows) for names, rows in changed.groupby(queue)]
        return {
            (row["account"], row["region"], row["queue"]): (row["made"], plan_changes.reason(row))
            for row in found
            if plan_changes.is_worse(row)
        }

    def _kept(self, name: str, schema: str) -> Any:
        """All rows of a table that grows, as a pandas frame."""
        import pandas as pd

        files = counted(self.directory / name)
        if not files:
            return pd.DataFrame(columns=[part.split()[0] for part in schema.split(", ")])
        return pa.concat_tables([pq.ParquetFile(source(file)).read() for file in files]).to_pandas()

    def cells(self) -> Any:
        """The histogram of all data kept, as a pandas frame."""
        rows = self._kept(_CELLS, buckets.SCHEMA)
        keys = [*buckets.GROUP, *buckets.CELL]
        return rows.groupby(keys, dropna=False, as_index=False)[list(buckets.SUMS)].sum()

    def _plan(
        self, spark: "SparkSession", state: _State, costs: "Costs | None", hold: Callable[[], None]
    ) -> tuple[int, int, int]:
        """Plan groups that grew; the others keep their rows. Returns how many of how many, and the queues left out.

        hold: raises PlaceTaken if another process has taken over, whose plans this one would replace.
        """
        import pandas as pd

        learnt = self.cells()
        before: Any = tables.load(self.timeouts).to_pandas() if self.timeouts.exists() else None
        rows_before = 0 if before is None else len(before)
        gone = {_queue(name) for name in state.deleted}
        self._forget(state, learnt, before)
        if learnt.empty and before is None:
            return 0, 0, 0
        cells = timeouts.without_deleted(learnt, gone)
        left_out = len(gone & set(learnt[list(timeouts.QUEUE)].itertuples(index=False, name=None)))
        group = list(buckets.GROUP)
        before = None if before is None else timeouts.without_deleted(before, gone)
        known = set() if before is None else {_key(row) for row in before[group].itertuples(index=False, name=None)}
        found = [(_key(key), rows) for key, rows in cells.groupby(group, dropna=False)]
        fresh = {key: state.unplanned.get(_name(key), 0.0) for key, _ in found}
        grown = {
            key
            for key, rows in found
            if key not in known or fresh[key] >= REPLAN_GROWTH * (rows.leases.sum() - fresh[key])
        }
        if grown or (before is not None and len(before) < rows_before):
            anew = self._recommended(spark, [rows for key, rows in found if key in grown], costs)
            if before is not None:
                kept = [_key(row) not in grown for row in before[group].itertuples(index=False, name=None)]
                anew = pd.concat([before[kept].astype(object), anew.astype(object)])
            # A table of an earlier release has fewer columns.
            names = [part.split()[0] for part in timeouts.SCHEMA.split(", ")]
            anew = anew.reindex(columns=names).sort_values(group, na_position="first")
            rows = [
                tuple(None if value is None or value != value else value for value in row)
                for row in anew.itertuples(index=False, name=None)
            ]
            frame = spark.createDataFrame(rows, timeouts.SCHEMA)
            if not isinstance(self.timeouts, Path):
                hold()
            tables.write(frame.coalesce(1), self.timeouts, self._kind)
        state.unplanned = {_name(key): fresh[key] for key, _ in found if key not in grown and fresh[key]}
        return len(grown), len(found), left_out

    def _forget(self, state: _State, learnt: Any, planned: Any) -> None:
        """The state names only queues of which leases are kept, or recommendations."""
        names = set(learnt[list(timeouts.QUEUE)].itertuples(index=False, name=None))
        if planned is not None:
            names |= set(planned[list(timeouts.QUEUE)].itertuples(index=False, name=None))
        left = self._left(state)
        if left is not None:
            waiting = tables.load(left).select(list(timeouts.QUEUE)).group_by(list(timeouts.QUEUE)).aggregate([])
            names |= {tuple(row[name] for name in timeouts.QUEUE) for row in waiting.to_pylist()}
        known = set(map("/".join, names))
        state.deleted &= known
        state.floors_us = {name: floor_us for name, floor_us in state.floors_us.items() if name in known}

    def _recommended(self, spark: "SparkSession", groups: list[Any], costs: "Costs | None") -> Any:
        import pandas as pd

        if len(groups) <= _LOCALLY_MAX:
            rows = [timeouts.recommend(rows, costs) for rows in groups]
            return pd.DataFrame(rows)
        frame = spark.createDataFrame(pd.concat(groups), buckets.SCHEMA)
        return timeouts.recommended(frame, costs).toPandas()

    def _state(self, lock: Lock, options: dict[str, str]) -> _State:
        path = options.get("path", "")
        origin = options.get("server") or (path if is_url(path) else str(Path(path).resolve()))
        content = lock.load()
        state = _State(source=origin) if content is None else msgspec.json.decode(content, type=_State)
        if state.source != origin:
            mend = "Give each history a directory of its own."
            raise HistoryGap(f"{self.directory} is of the history of {state.source}, not of {origin}.", mend)
        return state

    def _write_metrics(self, ran: Ran, now: float) -> None:
        """Write the metrics as a text file for Prometheus' node exporter."""
        lines = {
            "veilmq_pipeline_last_success_timestamp_seconds": now,
            "veilmq_pipeline_run_seconds": ran.seconds,
            "veilmq_pipeline_next_offset": ran.stop,
            "veilmq_pipeline_pending_leases": ran.pending,
            "veilmq_pipeline_groups": ran.groups,
        }
        text = "".join(f"# TYPE {name} gauge\n{name} {json.dumps(value)}\n" for name, value in lines.items())
        if not isinstance(self.directory, Path):
            put(self.directory / "metrics.prom", text.encode())
            return
        part = self.directory / ".metrics.prom.part"
        part.write_text(text)
        part.rename(self.directory / "metrics.prom")


def growing(directory: Place) -> list[Place]:
    """The tables of `GROWING` that a loop's directory has by now."""
    return [table for name in GROWING if (table := directory / name).is_dir()]


@contextmanager
def between_runs(directory: Place | str) -> Iterator[None]:
    """Hold a loop's tables, as the command `tidy` must. Raises LoopTaken."""
    directory = place(directory)
    with _locked(directory) as lock:
        content = lock.load()
        if content is not None:
            _clear(directory, lock, msgspec.json.decode(content, type=_State))
        yield


@contextmanager
def _locked(directory: Place) -> Iterator[Lock]:
    """Raises LoopTaken, also if another run has taken over when the state is saved."""
    lock = None
    try:
        lock = lock_of(directory, _STATE, Patience(0), 0o666)
        yield lock
    except PlaceTaken as error:
        mend = "Wait until it ends, or give this one a directory of its own."
        raise LoopTaken(f"Another run works in {directory} ({error.wrong}).", mend) from None
    finally:
        if lock is not None:
            lock.release()


def _clear(directory: Place, lock: Lock, state: _State) -> None:
    """Remove the files of unfinished runs, and the pending leases of earlier runs. Raises PlaceTaken."""
    if isinstance(directory, Path):
        restore(directory)
        for name in GROWING:
            restore(directory / name)
    gone = [each for each in directory.glob("pending-*") if each.name != state.pending]
    for name in GROWING:
        files = listed(directory / name, "day=*/offset-*.parquet")
        settled = [each for each in files if int(each.stem.rpartition("-")[2]) <= (state.next or 0)]
        counting = set(covering(settled))
        gone += [each for each in files if each not in counting]
    if gone and not isinstance(directory, Path):
        lock.save(msgspec.json.encode(state))  # a process that slept learns that another one has taken over
    for each in gone:
        remove(each)


def _events(spark: "SparkSession", options: dict[str, str], kinds: Sequence[str], start: int, stop: int) -> "DataFrame":
    return load(spark, options | {"from": str(start), "until": str(stop)}, kinds)


def _pending(spark: "SparkSession", path: Place) -> "DataFrame":
    """The leases of `Loop._keep`."""
    if isinstance(path, Path):
        return spark.read.parquet(tables.literal(str(path)))
    return spark.createDataFrame(tables.load(path))


def _see_deleted(state: _State, events: "DataFrame") -> None:
    for *queue, is_deleted in timeouts.queue_lives(events).collect():
        (state.deleted.add if is_deleted else state.deleted.discard)("/".join(queue))


def _raise_floors(state: _State, floors: "DataFrame") -> None:
    for row in floors.collect():
        name = "/".join(row[:3])
        state.floors_us[name] = max(state.floors_us.get(name, 0), int(row[3]))


def _queue(name: str) -> Queue:
    account, region, queue = name.split("/", 2)
    return account, region, queue


def _name(key: Iterable[str | None]) -> str:
    """A group's names as one unambiguous text."""
    return json.dumps(list(key))


def _key(values: Any) -> tuple[Any, ...]:
    """A group's names; missing ones are None, whatever pandas holds."""
    return tuple(None if value is None or value != value else value for value in values)
