"""Computes everything that one pass over the events yields, and keeps it for the jobs that share it.

Strategy: the histogram of leases is small however long the history is, so it is computed once and collected here; other
results are computed from it. `health` needs a pass of its own. Recommendations are only for queues that exist: for a
deleted queue only the durations of its work are reported.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from veilmq.pipeline import publish
from veilmq.pipeline.estimates import buckets
from veilmq.pipeline.jobs import attempts, health, split, survival, timeouts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from veilmq.client.timeouts.schedule import Costs


class Analysis:
    """The jobs' results as pandas frames, each computed at its first use."""

    def __init__(
        self,
        events: "DataFrame",
        costs: "Costs | None" = None,
        *,
        cells: Any = None,
        of: "Callable[[Sequence[str]], DataFrame] | None" = None,
        since: int | None = None,
        until: int | None = None,
    ) -> None:
        """cells: a histogram that is known already (a pandas frame). of: returns the events of some kinds, if there is
        a quicker way than reading all. since, until: when the events begin and end, in microseconds
        (`reading.first_instant`, `last_instant`); None: the events are read once more to find out."""
        self._events = events
        self._of = of or (lambda kinds: events)
        self._since = since
        self._until = until
        self._costs = costs
        self._given = cells

    @cached_property
    def cells(self) -> Any:
        """The histogram."""
        if self._given is not None:
            return self._given
        # Without `until`, the last of all events is needed.
        events = self._events if self._until is None else self._of(attempts.KINDS)
        return buckets.histogram(attempts.attempts(events, self._until)).toPandas()

    @cached_property
    def _cells(self) -> "DataFrame":
        return self._events.sparkSession.createDataFrame(self.cells, buckets.SCHEMA)

    @cached_property
    def left_out(self) -> list[tuple[str, ...]]:
        """Queues (account, region, name) that have leases here but no recommendation, because they were deleted."""
        if self.cells.empty:
            return []
        known = set(self.cells[list(timeouts.QUEUE)].itertuples(index=False, name=None))
        gone = timeouts.queue_lives(self._of(timeouts.LIFE_KINDS)).where("deleted").select(*timeouts.QUEUE).collect()
        return sorted(known & {tuple(row) for row in gone})

    @cached_property
    def _current(self) -> "DataFrame":
        rows = timeouts.without_deleted(self.cells, set(self.left_out))
        return self._events.sparkSession.createDataFrame(rows, buckets.SCHEMA)

    @cached_property
    def curve(self) -> Any:
        """See `survival.curve`."""
        return survival.curve(self._cells).orderBy(*buckets.GROUP, "bucket").toPandas()

    @cached_property
    def quantiles(self) -> Any:
        """See `survival.quantiles`."""
        return survival.quantiles(self._cells).orderBy(*buckets.GROUP).toPandas()

    @cached_property
    def timeouts(self) -> Any:
        """See `timeouts.recommended`."""
        return timeouts.recommended(self._current, self._costs).orderBy(*buckets.GROUP).toPandas()

    @cached_property
    def redelivery(self) -> Any:
        """See `timeouts.redelivery_curve`."""
        found = timeouts.redelivery_curve(self._current, self._costs)
        return found.orderBy(*buckets.GROUP, "timeout_s").toPandas()

    @cached_property
    def split(self) -> Any:
        """See `split.split`."""
        return split.split(self._current, self._costs).orderBy("account", "region", "queue", "part").toPandas()

    @cached_property
    def floors(self) -> Any:
        """See `publish.floors`."""
        return publish.floors(self._of(publish.SIGNS)).toPandas()

    @cached_property
    def health(self) -> Any:
        """See `health.health`; in windows of five minutes or, for a long history, as many windows as fit on a page."""
        from pyspark.sql import functions as F

        low, high = self._since, self._until
        if low is None or high is None:
            low, high = self._events.agg(F.min("at"), F.max("at")).first() or (None, None)
        minutes = 5 if low is None or high is None else max(5, round((high - low) / 60e6 / WINDOWS_MAX))
        found = health.health(self._of(health.KINDS), window=f"{minutes} minutes")
        return found.orderBy("from", "account", "region", "queue").toPandas()


WINDOWS_MAX = 300
