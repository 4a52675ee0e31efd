"""Spark's executors as workers."""

from typing import Any

import pytest
from tests.pipeline.drain_stage import Stage, left, send

from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.process import process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_handlers_run_on_executors_and_settle_each_message(spark: Any, stage: Stage) -> None:
    notes = stage.directory / "notes"
    notes.mkdir()

    def handler(job: Any) -> None:
        from veilmq.client.worker import Reject

        if job.body == "poison":
            raise Reject("never")
        if job.body == "first time fails" and job.receive_count == 1:
            raise ValueError("once")
        (notes / job.id).write_text(job.body)

    with stage.make("dead-" + stage.name) as dead, stage.make() as queue:
        sent = [f"body {number}" for number in range(60)] + ["first time fails"]
        send(queue, [*sent, "poison"])
        done = process(
            spark, stage.url(), handler, workers=2, concurrency=4, lease=20, dead_letter_queue=dead.name, wait=3
        )
        assert sorted(each.read_text() for each in notes.iterdir()) == sorted(sent)
        assert done.outcomes["done"] == 61
        assert done.outcomes["dead_lettered"] == 1
        assert done.received >= 63
        assert left(queue) == 0
        assert left(dead) == 1


def test_a_lease_is_kept_while_its_handler_works(spark: Any, stage: Stage) -> None:
    def handler(job: Any) -> None:
        import time

        time.sleep(8)

    with stage.make(timeout=4) as queue:
        send(queue, ["long"])
        done = process(spark, stage.url(), handler, workers=2, lease=4, wait=3)
        assert (done.received, done.outcomes) == (1, {"done": 1})
        assert left(queue) == 0


def test_no_workers_is_told(spark: Any, stage: Stage) -> None:
    with pytest.raises(OptionInvalid, match="workers=0"):
        process(spark, stage.url(), print, workers=0)


def test_what_a_killed_worker_had_comes_again(spark: Any, stage: Stage) -> None:
    notes = stage.directory / "notes"
    notes.mkdir()

    def handler(job: Any) -> None:
        import os
        import signal

        if job.body == "deadly" and job.receive_count == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        (notes / f"{job.id}-{job.receive_count}").write_text(job.body)

    sent = [f"body {number}" for number in range(40)]
    with stage.make(timeout=2) as queue:
        send(queue, [*sent, "deadly"])
        # On `local[2]` a task is tried once; a cluster would try it again by itself.
        with pytest.raises(Exception, match="Python worker exited unexpectedly"):
            process(spark, stage.url(), handler, workers=1, lease=2, wait=3)
        process(spark, stage.url(), handler, workers=2, lease=2, wait=3)
        assert {each.read_text() for each in notes.iterdir()} == {*sent, "deadly"}
        assert left(queue) == 0
