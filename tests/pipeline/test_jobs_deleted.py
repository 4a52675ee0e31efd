"""Queues that were deleted have no recommendation; and what the source leaves out early changes no figure."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pandas.testing import assert_frame_equal
from tests.pipeline.histories_stage import frame
from tests.support.histories import MadeUp, Workload, history, lognormal, write

from veilmq.pipeline import tables
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.events import ARROW_SCHEMA
from veilmq.pipeline.events.export import export
from veilmq.pipeline.events.reading import ParquetHistory, first_instant, last_instant
from veilmq.pipeline.events.source import Wanted
from veilmq.pipeline.jobs.audit import audit
from veilmq.pipeline.loop import Loop, Ran
from veilmq.pipeline.report import Analysis

PLACE = ("000000000000", "us-east-1")
OLD = (*PLACE, "old")


def then(table: pa.Table, *happened: tuple[str, str]) -> pa.Table:
    """The history with these events of queues (kind, name) behind it."""
    empty = dict.fromkeys(ARROW_SCHEMA.names)
    account, region = PLACE
    rows = [
        empty
        | {"offset": table.num_rows + at, "kind": kind, "at": table["at"][-1].as_py() + at, "account": account}
        | {"region": region, "queue": queue, "incarnation": 100 + at, "detail": '{"count":1}'}
        for at, (kind, queue) in enumerate(happened)
    ]
    return pa.concat_tables([table, pa.Table.from_pylist(rows, ARROW_SCHEMA)])


@pytest.fixture(scope="module")
def table() -> pa.Table:
    names = ("kept", "old", "back")
    return history([Workload(name, lognormal(20, 0.6), "t", 300, crashes_per_second=1 / 900) for name in names], seed=5)


@pytest.fixture(scope="module")
def after(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    happened = (("queue_deleted", "old"), ("queue_deleted", "back"), ("queue_created", "back"))
    return write(then(table, *happened), tmp_path_factory.mktemp("after"))


@pytest.mark.slow
def test_queues_that_were_deleted_are_left_out(spark: Any, after: Path) -> None:
    assert Analysis(spark.read.format("veilmq-events").option("path", str(after)).load()).left_out == [OLD]


@pytest.mark.slow
def test_a_deleted_queue_gets_no_recommendation(spark: Any, table: pa.Table, after: Path) -> None:
    before = Analysis(frame(spark, table))
    found = Analysis(spark.read.format("veilmq-events").option("path", str(after)).load())
    assert before.left_out == []
    assert found.left_out == [OLD]
    for name in ("timeouts", "redelivery", "split"):
        wanted = getattr(before, name)
        wanted = wanted[wanted.queue != "old"].reset_index(drop=True)
        assert {*wanted.queue} == {"back", "kept"}
        assert_frame_equal(getattr(found, name), wanted)
    # How long its work took stays true.
    assert_frame_equal(found.quantiles, before.quantiles)


@pytest.mark.slow
def test_a_loop_leaves_deleted_queues_out_until_they_are_back(spark: Any, table: pa.Table, tmp_path: Path) -> None:
    place, loop = tmp_path / "events", Loop(tmp_path / "loop")

    def ran(events: pa.Table, days: int = 0) -> tuple[Ran, set[str]]:
        export(MadeUp(events), place)
        seconds = iter(range(9))
        found = loop.run(
            spark,
            ParquetHistory(str(place)),
            {"path": str(place)},
            now=1_767_312_000.0 + 86_400 * days,
            timer=lambda: float(next(seconds)),
        )
        return found, {row["queue"] for row in tables.load(loop.timeouts).to_pylist()}

    def state() -> Any:
        return json.loads((tmp_path / "loop" / "state.json").read_bytes())

    told, queues = ran(table)
    assert (told.groups, told.left_out, queues) == (3, 0, {"kept", "old", "back"})
    gone = then(table, ("queue_deleted", "old"), ("queue_deleted", "back"))
    told, queues = ran(gone)
    assert (told.groups, told.left_out, queues) == (1, 2, {"kept"})
    assert {queue for *_, queue in loop.plans()} == {"kept"}
    back = then(gone, ("queue_created", "back"))
    told, queues = ran(back)
    assert (told.planned, told.left_out, queues) == (1, 1, {"kept", "back"})
    assert state()["deleted"] == ["000000000000/us-east-1/old"]
    # What is known of old days goes, and in the run after it the names of queues of which nothing is left.
    for _ in range(2):
        ran(back, days=60)
    assert (state()["deleted"], state()["floors_us"]) == ([], {})


def test_kinds_that_nobody_asks_for_do_not_leave_the_source(spark: Any, after: Path) -> None:
    source = spark.read.format("veilmq-events").option("path", str(after))
    every = source.load()
    few = source.option("kinds", "sent, deleted").load()
    kinds = every.kind.isin("sent", "deleted")
    assert sorted(few.collect()) == sorted(every.where(kinds).collect())
    # Of filters that Spark would offer to the source, it may mix up those of two branches.
    parts = [every.where(every.kind == kind).groupBy("kind").count() for kind in ("sent", "deleted")]
    assert sorted(parts[0].union(parts[1]).collect()) == sorted(part.first() for part in parts)
    with pytest.raises(OptionInvalid, match="no kind of event 'send'"):
        Wanted({"path": str(after), "kinds": "deleted,send"})


@pytest.mark.slow
def test_figures_are_those_of_every_event_in_spark(spark: Any, after: Path) -> None:
    """A job that reads only the kinds that it needs finds what it finds among all events."""
    exported = ParquetHistory(str(after))
    bounds = exported.bounds()
    reader = spark.read.format("veilmq-events").option("path", str(after))
    source = reader.load()
    whole = frame(spark, pa.Table.from_batches(exported.read(*bounds)))
    given = {"since": first_instant(exported, *bounds), "until": last_instant(exported, *bounds)}
    few = Analysis(source, of=lambda kinds: reader.option("kinds", ",".join(kinds)).load(), **given)
    all_ = Analysis(whole)
    for name in ("curve", "quantiles", "timeouts", "redelivery", "split", "health"):
        assert_frame_equal(getattr(few, name), getattr(all_, name))
    assert few.left_out == all_.left_out == [OLD]
    assert sorted(few.floors.values.tolist()) == sorted(all_.floors.values.tolist())
    # The deletions here say that a message went with them, which the books do not.
    findings = audit(source).collect()
    assert {row.rule for row in findings} >= {"conservation"}
    assert findings == audit(whole).collect()
