"""Drains through Spark by each protocol's own client, and leases that are held for as long as a batch runs."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.pipeline.drain_stage import Stage, left, send

from veilmq.pipeline.drain import drain
from veilmq.testing.local import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LEASE_SECONDS = 6
BATCH_SECONDS = 15


def bodies(count: int) -> list[str]:
    return [f"body {number}" for number in range(count)]


# veil and sqs: test_drain.py
@pytest.mark.parametrize("scheme", ["azure", "mns"])
def test_a_queue_becomes_a_table(spark: Any, stage: Stage, scheme: str) -> None:
    table = f"{stage.directory}/table"
    with stage.make() as queue:
        send(queue, bodies(250))
        done = drain(spark, stage.url(scheme), f"delta:{table}", stage.directory / "d", max_rows=100)
        assert (done.messages, done.batches, done.bad_records) == (250, 3, 0)
        assert sorted(DeltaTable(table).to_pyarrow_table()["body"].to_pylist()) == sorted(bodies(250))
        assert left(queue) == 0


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_batches_of_fifteen_seconds_on_leases_of_six(
    spark: Any, drain_server: ServerProcess, tmp_path: Path, closing: ExitStack
) -> None:
    """One query a protocol, all at the same time; the history tells whether anything was delivered again."""
    found: dict[str, list[str]] = {}

    def sink(scheme: str) -> Any:
        def work(frame: Any, batch: int) -> None:
            found.setdefault(scheme, []).extend(row["body"] for row in frame.select("body").collect())
            time.sleep(BATCH_SECONDS)

        return work

    stages = {scheme: Stage(drain_server, tmp_path / scheme) for scheme in ("veil", "sqs", "azure", "mns")}
    queues = {scheme: closing.enter_context(stage.make(timeout=1)) for scheme, stage in stages.items()}
    started = []
    for scheme, stage in stages.items():
        send(queues[scheme], bodies(200))
        given = {"url": stage.url(scheme), "directory": str(stage.directory / "m"), "lease": str(LEASE_SECONDS)}
        frame = spark.readStream.format("veilmq").options(**given).load()
        writer = frame.writeStream.foreachBatch(sink(scheme)).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(stage.directory / "c")).start()
        started.append(query)
        # Spark gives a Python process ten seconds to come up: not all of them at once.
        while scheme not in found and query.isActive:
            time.sleep(0.05)
    for query in started:
        assert query.awaitTermination(200)
        assert query.exception() is None
        assert any(told.batchDuration >= BATCH_SECONDS * 1_000 for told in query.recentProgress)
    for scheme, queue in queues.items():
        assert sorted(found[scheme]) == sorted(bodies(200)), scheme
        assert left(queue) == 0, scheme
    token = (drain_server.data / "admin-token").read_text().strip()
    events = spark.read.format("veilmq-events").option("server", drain_server.admin).option("token", token).load()
    names = [stage.name for stage in stages.values()]
    counts = events.where(events.queue.isin(names)).groupBy("queue", "kind").count().collect()
    told = {(row["queue"], row["kind"]): row["count"] for row in counts}
    for name in names:
        assert (told[name, "received"], told[name, "deleted"]) == (200, 200)
        # Held by extending, and by nothing else.
        assert told[name, "extended"] >= 200
        assert not {"lease_expired", "released", "delete_refused", "extend_refused"} & {
            kind for queue, kind in told if queue == name
        }
