"""Drains through Spark by each protocol's own client, and leases that are held for as long as a batch runs."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.pipeline.drain_stage import Stage, left, send
from tests.pipeline.stores import Store, told

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


class Long:
    """A query whose batch takes longer than its leases."""

    def __init__(self, spark: Any, stage: Stage, scheme: str, lease: int, seconds: int) -> None:
        self.stage, self.scheme, self.lease, self.seconds = stage, scheme, lease, seconds
        self._spark = spark
        self._found: list[str] = []

    def start(self) -> Any:
        """The query, once its batch is under way."""
        query = self._writer(str(self.stage.directory / "m")).foreachBatch(self._work).start()
        while not self._found and query.isActive:
            time.sleep(0.05)
        return query

    def _work(self, frame: Any, batch: int) -> None:
        self._found += [row["body"] for row in frame.select("body").collect()]
        time.sleep(self.seconds)

    def _writer(self, manifests: str) -> Any:
        given = {"url": self.stage.url(self.scheme), "directory": manifests, "lease": str(self.lease)}
        frame = self._spark.readStream.format("veilmq").options(**given).load()
        writer = frame.writeStream.trigger(availableNow=True)
        return writer.option("checkpointLocation", str(self.stage.directory / "c"))

    def bodies(self) -> list[str]:
        """What came."""
        return self._found


class LongInStore(Long):
    """With its table and its manifests in an object store, which is slow to answer the commit."""

    def __init__(self, spark: Any, stage: Stage, store: Store, lease: int, seconds: int) -> None:
        super().__init__(spark, stage, "veil", lease, seconds)
        self._store, self._home = store, f"{store.url}/{stage.name}"

    def start(self) -> Any:
        self._store.fault(at=f"/t/_delta_log/{0:020}.json", do="hold")
        writer = self._writer(f"{self._home}/m").format("veilmq-delta").option("path", f"{self._home}/t")
        query = writer.start()
        while self._store.is_armed() and query.isActive:
            time.sleep(0.05)
        Timer(self.seconds, self._store.fault).start()
        return query

    def bodies(self) -> list[str]:
        with told(self._store.environment):
            found: list[str] = DeltaTable(f"{self._home}/t").to_pyarrow_table()["body"].to_pylist()
        return found


def test_batches_take_longer_than_their_leases(
    spark_at_azure: Any, drain_server: ServerProcess, tmp_path: Path, closing: ExitStack, s3: Store, abfs: Store,
    all_kills: bool,
) -> None:  # fmt: skip
    """One query a protocol and store, all at the same time; the history tells whether anything was delivered again.

    With `--all-kills` batches of 10 s on leases of 4 s, which another process's stall of 2 s could end."""
    lease, seconds = (4, 10) if all_kills else (LEASE_SECONDS, BATCH_SECONDS)

    def stage(name: str) -> Stage:
        return Stage(drain_server, tmp_path / name)

    spark, times = spark_at_azure, (lease, seconds)
    queries = [Long(spark, stage(scheme), scheme, *times) for scheme in ("veil", "sqs", "azure", "mns")]
    queries += [LongInStore(spark, stage(store.scheme), store, *times) for store in (s3, abfs)]
    queues = [closing.enter_context(each.stage.make(timeout=1)) for each in queries]
    for queue in queues:
        send(queue, bodies(200))
    # Spark gives a Python process ten seconds to come up: not all of them at once.
    for query in [each.start() for each in queries]:
        assert query.awaitTermination(200)
        assert query.exception() is None
        assert any(each.batchDuration >= seconds * 1_000 for each in query.recentProgress)
    for each, queue in zip(queries, queues, strict=True):
        assert sorted(each.bodies()) == sorted(bodies(200)), each.stage.directory
        assert left(queue) == 0, each.stage.directory
    token = (drain_server.data / "admin-token").read_text().strip()
    events = spark.read.format("veilmq-events").option("server", drain_server.admin).option("token", token).load()
    names = [each.stage.name for each in queries]
    counts = events.where(events.queue.isin(names)).groupBy("queue", "kind").count().collect()
    seen = {(row["queue"], row["kind"]): row["count"] for row in counts}
    for name in names:
        assert (seen[name, "received"], seen[name, "deleted"]) == (200, 200)
        # Held by extending, and by nothing else.
        assert seen[name, "extended"] >= 200
        assert not {"lease_expired", "released", "delete_refused", "extend_refused"} & {
            kind for queue, kind in seen if queue == name
        }
