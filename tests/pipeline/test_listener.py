"""Streaming queries in a Prometheus registry."""

import sys
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.pipeline.drain_stage import Stage, send

from veilmq.pipeline.drain import drain
from veilmq.pipeline.errors import Unready


def value(registry: CollectorRegistry, name: str, query: str) -> float | None:
    return registry.get_sample_value(f"veilmq_query_{name}", {"query": query})


def told(registry: CollectorRegistry, name: str, query: str, wanted: float) -> None:
    """Spark tells its listeners from a thread of its own."""
    end = time.monotonic() + 60
    while (found := value(registry, name, query)) != wanted:
        assert time.monotonic() < end, f"{name} of {query} is {found}, not {wanted}"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_queries_are_counted(spark: Any, stage: Stage) -> None:
    from veilmq.pipeline.listener import QueryMetrics

    registry = CollectorRegistry()
    metrics = QueryMetrics(registry)
    spark.streams.addListener(metrics)
    began = time.time()

    def fails(frame: Any, batch: int) -> None:
        raise ValueError("the sink fails")

    try:
        with stage.make() as queue:
            send(queue, [f"body {number}" for number in range(250)])
            drain(spark, stage.url(), f"delta:{stage.directory}/t", stage.directory / "d", max_rows=100, name="orders")
            told(registry, "active", "orders", 0)
            assert value(registry, "rows_total", "orders") == 250
            assert value(registry, "batches_total", "orders") == 3
            assert value(registry, "batch_seconds_count", "orders") == 3
            assert value(registry, "failures_total", "orders") == 0
            assert value(registry, "backlog_messages", "orders") == 0
            assert (value(registry, "in_flight_messages", "orders") or 0) >= 50
            assert (value(registry, "oldest_seconds", "orders") or 0) > 0
            assert (value(registry, "last_told_timestamp_seconds", "orders") or 0) >= began
            send(queue, ["one more"])
            with pytest.raises(Exception, match="the sink fails"):
                drain(spark, stage.url(), fails, stage.directory / "other", name="failing")
            told(registry, "failures_total", "failing", 1)
            told(registry, "active", "failing", 0)
    finally:
        spark.streams.removeListener(metrics)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from veilmq.pipeline.listener import QueryMetrics

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(Unready, match=r"prometheus-client is missing. pip install 'veilmq\[telemetry\]'"):
        QueryMetrics()
