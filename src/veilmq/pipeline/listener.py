"""Spark's streaming queries as Prometheus metrics.

    metrics = QueryMetrics()
    spark.streams.addListener(metrics)
    prometheus_client.start_http_server(9108, "127.0.0.1")

Strategy: a Spark listener, on the driver or on the client of a Spark Connect server. The only label is the query's name
or, if it has none, the id kept in its checkpoint, so that a restarted query continues its counters. All metrics of a
query exist from its start, at zero.
"""

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.streaming.listener import StreamingQueryListener

from veilmq.client.clock import SYSTEM
from veilmq.pipeline.drain.batches.backlog import read_backlog
from veilmq.pipeline.errors import Unready

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

SECONDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0)
"""Upper bounds of the histogram buckets for a micro-batch's duration."""


class QueryMetrics(StreamingQueryListener):
    """Metrics of all queries of a session; add it with `spark.streams.addListener`. Create one per registry.

    Raises Unready if prometheus-client is not installed. Source: Spark's Structured Streaming guide, "Reporting Metrics
    programmatically using Asynchronous APIs".
    """

    def __init__(self, registry: "CollectorRegistry | None" = None) -> None:
        """registry: a prometheus-client registry; None: the default one."""
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError:
            raise Unready("The package prometheus-client is missing.", "pip install 'veilmq[telemetry]'.") from None
        given: Any = {"labelnames": ["query"], "registry": registry or REGISTRY}
        self._active = Gauge("veilmq_query_active", "1 while the query runs.", **given)
        self._batches = Counter("veilmq_query_batches", "Micro-batches that were committed.", **given)
        self._rows = Counter("veilmq_query_rows", "Rows that the sources gave.", **given)
        self._seconds = Histogram("veilmq_query_batch_seconds", "Time of a micro-batch.", buckets=SECONDS, **given)
        self._failures = Counter("veilmq_query_failures", "Ends of the query by an error.", **given)
        self._last_report = Gauge(
            "veilmq_query_last_told_timestamp_seconds", "When Spark last told of the query.", **given
        )
        of = "of the queues that it drains"
        self._backlog = {
            "waiting": Gauge("veilmq_query_backlog_messages", f"Visible messages {of}.", **given),
            "inFlight": Gauge("veilmq_query_in_flight_messages", f"Leased messages {of}, by whomever.", **given),
            "oldestSeconds": Gauge("veilmq_query_oldest_seconds", "Age of the oldest message under way.", **given),
            "secondsLeft": Gauge("veilmq_query_backlog_seconds", "Until the backlog is gone, as estimated.", **given),
        }
        self._names: dict[str, str] = {}

    def onQueryStarted(self, event: "QueryStartedEvent") -> None:
        """Spark calls this in the thread that starts the query."""
        name = event.name or str(event.id)
        self._names[str(event.id)] = name
        for each in (self._batches, self._rows, self._seconds, self._failures, *self._backlog.values()):
            each.labels(name)
        self._active.labels(name).set(1)
        self._last_report.labels(name).set(SYSTEM.wall())

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """Called after a micro-batch, and for a trigger without rows, which is not counted."""
        progress = event.progress
        name = self._name(progress.id)
        self._last_report.labels(name).set(SYSTEM.wall())
        for each, figure in read_backlog(source.latestOffset for source in progress.sources).items():
            self._backlog[each].labels(name).set(figure)
        rows = progress.numInputRows
        if rows:
            self._batches.labels(name).inc()
            self._rows.labels(name).inc(rows)
            self._seconds.labels(name).observe(progress.batchDuration / 1_000)

    def onQueryIdle(self, event: "QueryIdleEvent") -> None:
        """The query is waiting for data."""
        name = self._name(event.id)
        self._last_report.labels(name).set(SYSTEM.wall())
        for each in ("waiting", "oldestSeconds", "secondsLeft"):
            self._backlog[each].labels(name).set(0)

    def onQueryTerminated(self, event: "QueryTerminatedEvent") -> None:
        """The query ended, with or without an error."""
        name = self._name(event.id)
        self._active.labels(name).set(0)
        self._last_report.labels(name).set(SYSTEM.wall())
        if event.exception is not None:
            self._failures.labels(name).inc()

    def _name(self, query: Any) -> str:
        return self._names.get(str(query), str(query))
