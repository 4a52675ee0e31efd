"""What a drain reports of its backlog: to Spark's progress, and from there to metrics."""

import json
import math
import time
from typing import Any

import pytest
from tests.pipeline.drain_stage import Stage, send
from tests.pipeline.test_drain_driver import START, Play

from veilmq.client.errors import TransportError
from veilmq.client.messages import Stats
from veilmq.pipeline.drain.batches.backlog import Backlog, read_backlog
from veilmq.testing.client_contract.stage import MovableClock


class Told:
    """A queue's answers, one after the other."""

    def __init__(self, *answers: Stats | TransportError) -> None:
        self.answers = list(answers)

    def ask(self) -> Stats:
        answer = self.answers.pop(0)
        if isinstance(answer, TransportError):
            raise answer
        return answer


def test_the_end_is_estimated_from_how_fast_the_backlog_becomes_less() -> None:
    clock = MovableClock()
    backlog = Backlog(Told(Stats(1_000), Stats(700, 5, 40), Stats(2_000), Stats(0)).ask, clock)
    first = backlog.report(1, None)
    assert first is not None
    assert (first["waiting"], first["secondsLeft"], first["estimatedEnd"]) == (1_000, None, None)
    clock.advance(3)
    second = backlog.report(2, clock.wall() - 2.5)
    assert second is not None
    assert second["estimatedEnd"].endswith("Z")
    del second["estimatedEnd"]
    assert second == {
        "seq": 2, "waiting": 700, "delayed": 5, "inFlight": 40, "oldestSeconds": 2.5, "secondsLeft": 7.0,
    }  # fmt: skip
    clock.advance(3)
    grown = backlog.report(3, None)
    assert grown is not None
    assert (grown["waiting"], grown["secondsLeft"]) == (2_000, None)
    clock.advance(3)
    done = backlog.report(4, None)
    assert done is not None
    assert (done["waiting"], done["secondsLeft"]) == (0, 0.0)


def test_a_queue_that_does_not_answer_makes_no_query_fail() -> None:
    clock = MovableClock()
    lost = TransportError(reason="nobody answers", may_have_happened=False)
    backlog = Backlog(Told(lost, Stats(7), lost).ask, clock)
    assert backlog.report(0, None) is None
    for _ in range(2):
        clock.advance(2)
        found = backlog.report(0, None)
        assert found is not None
        assert found["waiting"] == 7


def test_the_queue_is_asked_once_a_second_at_most_and_what_came_meanwhile_is_counted() -> None:
    backlog = Backlog(Told(Stats(7, 0, 1)).ask, MovableClock())
    first = backlog.report(0, None)
    backlog.received(5)
    second = backlog.report(0, None)
    assert first is not None
    assert second is not None
    assert [(each["waiting"], each["inFlight"]) for each in (first, second)] == [(7, 1), (2, 6)]


def test_a_drain_reports_what_waits_and_how_old_what_is_under_way_is(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, [f"{number}" for number in range(100)])
        play = Play(stage)
        end = play.driver.latest(START, 30)
        told = play.driver.backlog()
        assert told is not None
        assert (told["seq"], told["waiting"], told["inFlight"]) == (1, 70, 30)
        assert 0 <= told["oldestSeconds"] < 60
        play.to_the_end(end)
        told = play.driver.backlog()
        assert told is not None
        assert told["oldestSeconds"] is None
        play.driver.close()


def test_figures_of_several_sources_are_one_query_s() -> None:
    one = {"waiting": 5, "inFlight": 1, "oldestSeconds": 9.0, "secondsLeft": 2.0}
    found = read_backlog(["null", '"x"', "no json", json.dumps(one), json.dumps(one | {"secondsLeft": None})])
    assert (found["waiting"], found["inFlight"], found["oldestSeconds"]) == (10, 2, 9.0)
    assert math.isnan(found["secondsLeft"])
    assert read_backlog(["null", '{"seq": 4}']) == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_spark_s_progress_has_the_backlog(spark: Any, stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, [f"{number}" for number in range(250)])
        given = {"url": stage.url(), "directory": str(stage.directory / "m"), "maxOffsetsPerTrigger": "100"}
        frame = spark.readStream.format("veilmq").options(**given).load()
        writer = frame.writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(stage.directory / "c")).start()
        assert query.awaitTermination(120)
        end = time.monotonic() + 30
        while len(reports := [each for each in query.recentProgress if each.numInputRows]) < 3:
            assert time.monotonic() < end
            time.sleep(0.05)
    told = [json.loads(each.sources[0].latestOffset) for each in reports]
    assert [(each["seq"], each["waiting"]) for each in told] == [(1, 150), (2, 50), (3, 0)]
    assert told[0]["inFlight"] == 100
    assert all(each["oldestSeconds"] > 0 for each in told)
