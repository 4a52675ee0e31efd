"""Everything that one pass over the events tells, kept for the jobs that share it.

Strategy: the histogram of leases is small however long the history is, so it is computed once and brought here; what
follows from it is computed from there. `health` is a pass of its own.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Any

from veilmq.pipeline import publish
from veilmq.pipeline.jobs import attempts, buckets, health, split, survival, timeouts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from veilmq.client.timeouts.schedule import Costs


class Analysis:
    """The jobs' results as pandas frames, each computed when it is asked for first."""

    def __init__(
        self, events: "DataFrame", costs: "Costs | None" = None, *, cells: Any = None, until: int | None = None
    ) -> None:
        """cells: a histogram that is known already (a pandas frame). until: see `attempts`."""
        self._events = events
        self._until = until
        self._costs = costs
        self._given = cells

    @cached_property
    def cells(self) -> Any:
        """The histogram."""
        if self._given is not None:
            return self._given
        return buckets.histogram(attempts.attempts(self._events, self._until)).toPandas()

    @cached_property
    def _cells(self) -> "DataFrame":
        return self._events.sparkSession.createDataFrame(self.cells, buckets.SCHEMA)

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
        return timeouts.recommended(self._cells, self._costs).orderBy(*buckets.GROUP).toPandas()

    @cached_property
    def redelivery(self) -> Any:
        """See `timeouts.redelivery_curve`."""
        found = timeouts.redelivery_curve(self._cells, self._costs)
        return found.orderBy(*buckets.GROUP, "timeout_s").toPandas()

    @cached_property
    def split(self) -> Any:
        """See `split.split`."""
        return split.split(self._cells, self._costs).orderBy("account", "region", "queue", "part").toPandas()

    @cached_property
    def floors(self) -> Any:
        """See `publish.floors`."""
        return publish.floors(self._events).toPandas()

    @cached_property
    def health(self) -> Any:
        """See `health.health`, in windows of five minutes or, of a long history, so many that a page shows them."""
        from pyspark.sql import functions as F

        low, high = self._events.agg(F.min("at"), F.max("at")).first() or (None, None)
        minutes = 5 if low is None else max(5, round((high - low) / 60e6 / WINDOWS_MAX))
        found = health.health(self._events, window=f"{minutes} minutes")
        return found.orderBy("from", "account", "region", "queue").toPandas()


WINDOWS_MAX = 300
