"""Snapshots in a history are neither sends nor leases nor endings: every job says the same with and without them."""

from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.histories_stage import Event, S, event, extended, frame, received, sent, table_of
from tests.support.histories import write

from veilmq.pipeline.events import plain
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.pipeline.jobs.attempts import attempts
from veilmq.pipeline.jobs.audit import audit
from veilmq.pipeline.jobs.health import health

LIFE: list[Event] = [
    event("queue_created", 1, None, sequence=None),
    sent(10),
    sent(11, sequence=2),
    received(12),
    extended(30),
    received(31, sequence=2),
    event("lease_expired", 60),
    received(61, attempt=2, visible_since=60 * S),
    event("deleted", 63, attempt=2),
    event("purged", 100, None, sequence=None, detail={"count": 1, "watermark": 2}),
]


def part(kind: str, at: int, **more: Any) -> Event:
    nothing = {"sequence": None, "rotation": None}
    of_no_queue = dict.fromkeys(("account", "region", "queue", "incarnation")) if kind in {"begin", "end"} else {}
    return event("snapshot", at, None, detail={"part": kind, **more}, **nothing, **of_no_queue)


MESSAGES = [{"sequence": 2, "id": "00" * 16, "priority": 8, "sent": 11 * S, "body_bytes": 5, "receive_count": 1}]
TOLD = [
    *LIFE[:2],
    part("begin", 10, last=1),
    *LIFE[2:4],
    part("queue", 13, account="000000000000", region="us-east-1", name="q", settings={"fifo": False}),
    *LIFE[4:6],
    part("messages", 31, messages=MESSAGES),
    *LIFE[6:8],
    part("end", 62, begin=2),
    *LIFE[8:],
]


def rows(found: Any) -> list[str]:
    return sorted(str(row) for row in found.collect())


@pytest.mark.slow
def test_the_jobs_pass_them_over(spark: Any) -> None:
    plainly, told = frame(spark, table_of(LIFE)), frame(spark, table_of(TOLD))
    assert told.count() == plainly.count() + 4
    assert audit(told).collect() == []
    assert rows(attempts(told)) == rows(attempts(plainly)) != []
    assert rows(health(told)) == rows(health(plainly)) != []


def test_an_export_keeps_them(tmp_path: Path) -> None:
    table = table_of(TOLD)
    write(table, tmp_path)
    exported = ParquetHistory(str(tmp_path))
    found = [row for batch in exported.read(0, len(TOLD)) for row in plain(batch).to_pylist()]
    assert found == table.to_pylist()
