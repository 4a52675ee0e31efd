"""health: in batch and as a stream, by the same lines."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.histories_stage import event, frame, received, sent, table_of
from tests.support.histories import Workload, history, lognormal, write

from veilmq.cli.pipeline import Asked, run
from veilmq.cli.pipeline import session as sessions
from veilmq.pipeline import tables
from veilmq.pipeline.jobs.health import health

MINUTE = 60


def test_windows_count_what_happened(spark: Any) -> None:
    base = 1_767_225_600
    events = [
        sent(base),
        received(base + 10, sent=base * 1_000_000),
        event("lease_expired", base + 40),
        received(base + 41, attempt=2, lease=45, sent=base * 1_000_000),
        *(event("delete_refused", base + 50 + n, detail={"reason": "stale"}) for n in range(5)),
        event("delete_refused", base + 56, detail={"reason": "gone"}),
        event("released_for_retry", base + 57, lease_us=1),
        event("retry_due", base + 58),
        event("expired_after_change", base + 59),
        event("dead_lettered", base + 6 * MINUTE, attempt=2, sent=base * 1_000_000),
    ]
    first, second = health(frame(spark, table_of(events))).orderBy("from").collect()
    assert (first["to"] - first["from"]).total_seconds() == 5 * MINUTE
    assert (first.sent, first.received, first.redeliveries, first.expired_leases) == (1, 2, 1, 1)
    assert (first.stale_deletes, first.gone_deletes, first.dead_letters) == (5, 1, 0)
    assert (first.retries, first.changed_leases, second.retries) == (1, 1, 0)
    assert first.oldest_s == pytest.approx(41)
    assert (first.lease_s, first.raise_to_s) == (45.0, 90.0)
    assert (second.dead_letters, second.raise_to_s) == (1, None)
    assert second.oldest_s == pytest.approx(6 * MINUTE)


def test_the_threshold_is_the_documents(spark: Any) -> None:
    base = 1_767_225_600
    refused = [event("delete_refused", base + 50 + n, detail={"reason": "stale"}) for n in range(4)]
    events = [sent(base), received(base + 10), *refused]
    (row,) = health(frame(spark, table_of(events))).collect()
    assert (row.stale_deletes, row.raise_to_s) == (4, None)
    (row,) = health(frame(spark, table_of(events)), failures=4, factor=3).collect()
    assert row.raise_to_s == 90.0


@pytest.mark.slow
def test_rows_are_fetched_a_few_at_a_time_and_printed_in_order(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A partition of 3 million windows did not fit into Spark's usual heap."""
    write(history([Workload(name, lognormal(20, 1), "t", 300) for name in "ba"], seed=4), tmp_path / "events")
    monkeypatch.setattr(sessions, "started", lambda *where, is_short: nullcontext(spark))
    monkeypatch.setattr(run, "_ROWS_AT_ONCE", 7)
    asked = Asked(None, tmp_path / "events", None, None, None, None, None, "parquet", True, None, None)
    run.health(asked, {}, "1h", 5, follow=False)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(row["from"], row["queue"]) for row in rows]
    assert found == sorted(set(found))
    assert sum(row["sent"] for row in rows) == 600
    jobs = spark.sparkContext.statusTracker().getJobIdsForGroup(None)
    assert len(jobs) > len(rows) / 7, "each piece is fetched by a job of its own"


def test_a_stream_says_what_a_batch_says(spark: Any, tmp_path: Path) -> None:
    workload = Workload("q", lognormal(20, 1), "t", 2_000, lease=20.0, crashes_per_second=1 / 500)
    exported = write(history([workload], seed=2, span=7_200), tmp_path / "events", file_rows=1_000)
    source = {"path": str(exported)}
    batch = health(spark.read.format("veilmq-events").options(**source).load(), window="10 minutes")
    stream = spark.readStream.format("veilmq-events").options(**source, maxRows=2_000).load()
    query = (
        health(stream, window="10 minutes", late="1 hour")
        .writeStream.format("memory")
        .queryName("health_windows")
        .outputMode("complete")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(100)
    assert query.exception() is None
    found = spark.table("health_windows")
    assert sorted(found.collect()) == sorted(batch.collect())
    assert batch.agg({"stale_deletes": "sum"}).first()[0] > 50
    assert batch.where("raise_to_s IS NOT NULL").count() > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stream_appends_windows_that_are_over(spark: Any, tmp_path: Path) -> None:
    """As `--follow` does: each window once, when the watermark has passed it, and none of them twice."""
    workload = Workload("q", lognormal(20, 1), "t", 600, lease=20.0, crashes_per_second=1 / 500)
    exported = write(history([workload], seed=2, span=7_200), tmp_path / "events", file_rows=1_000)
    source = {"path": str(exported)}
    batch = health(spark.read.format("veilmq-events").options(**source).load(), window="10 minutes")
    stream = spark.readStream.format("veilmq-events").options(**source).load()
    query = (
        health(stream, window="10 minutes", late="1 hour")
        .writeStream.format("veilmq-delta")
        .outputMode("append")
        .option("path", str(tmp_path / "health"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(250)
    assert query.exception() is None
    found = sorted(tables.read(spark, tmp_path / "health").collect())
    whole = sorted(batch.collect())
    # The last hour's windows wait for events that may come late.
    assert 0 < len(found) < len(whole)
    assert found == whole[: len(found)]
