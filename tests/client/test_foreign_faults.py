"""What a user's own code raises (a policy, a plan, a meter, a check, a lease function) ends no thread of ours."""

import logging
import threading
from typing import Any

import pytest
from tests.client.worker_stage import WAIT_S, Stage

from veilmq.client.messages import Received, Template
from veilmq.client.queue import Queue
from veilmq.client.routed import RoutedQueue
from veilmq.client.timeouts import AdaptiveTimeout
from veilmq.client.transaction import Times, TransactionQueue, Verdict
from veilmq.client.wrapping import Wrapping


class Fault(Exception):
    """What no call of ours says that it raises."""


class Breaking(Wrapping):
    """Its first receives fail, as a receive does whose policy for unreadable messages raises."""

    def __init__(self, inner: Queue, times: int) -> None:
        super().__init__(inner)
        self.left = times

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        if self.left:
            self.left -= 1
            raise Fault("in a policy")
        return self.inner.receive(count_max, lease=lease, wait=wait)


class TestWorker:
    def test_receives_that_fault_are_backed_off_and_logged(
        self, stage: Stage, caplog: pytest.LogCaptureFixture
    ) -> None:
        stage.send("a")
        counts = stage.work(stage.note, Breaking(stage.queue, 2))
        assert (stage.seen, counts.outcomes, counts.failures) == (["a"], {"done": 1}, {"receive": 2})
        # Not by the text: where Spark ran in this process, it is written as Spark has it.
        assert "in a policy" in caplog.text
        assert any(record.exc_info for record in caplog.records)

    def test_and_end_the_run_if_that_is_wanted(self, stage: Stage) -> None:
        worker = stage.worker(stage.note, Breaking(stage.queue, 1_000), give_up_after=0.2)
        with pytest.raises(Fault):
            worker.run()

    def test_a_plan_that_faults_costs_one_receive(self, stage: Stage) -> None:
        class Plan(AdaptiveTimeout):
            faults = 1

            def first_lease(self, message: Received) -> float:
                if self.faults:
                    self.faults -= 1
                    raise Fault("in a plan")
                return super().first_lease(message)

        stage.send("a", "b")
        worker = stage.worker(stage.note, keeper={"plan": Plan()}, lease=1)
        worker.start()
        wait = threading.Event()
        while len(stage.seen) < 2:
            assert not wait.wait(0.01)
        worker.stop()
        assert worker.join(WAIT_S)
        assert worker.counts is not None
        assert worker.counts.outcomes == {"unsettled": 1, "done": 2}

    def test_a_meter_that_faults_is_logged(self, stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
        class Meter:
            def ended(self, queue: str, outcome: str, seconds: float) -> None:
                raise Fault("in a meter")

            def failed(self, queue: str, call: str, error: str) -> None:
                raise Fault("in a meter")

            def in_hand(self, queue: str, messages: int) -> None:
                raise Fault("in a meter")

        stage.send("a", "b", "c")
        counts = stage.work(stage.note, metrics=Meter())
        assert (sorted(stage.seen), counts.outcomes) == (["a", "b", "c"], {"done": 3})
        assert "in a meter" in caplog.text

    @pytest.mark.parametrize("given", [float("nan"), None, "long"])
    def test_a_lease_function_that_gives_no_number_is_logged(
        self, stage: Stage, given: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        stage.send("a")
        counts = stage.work(stage.note, lease=lambda message: given)
        assert counts.outcomes == {"done": 1}
        assert "the lease function failed" in caplog.text


class TestRoutedQueue:
    def test_a_poll_that_faults_is_told_and_parked_again(self, stage: Stage) -> None:
        class Late(Breaking):
            """Fails in parked polls alone."""

            def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
                return super().receive(count_max, lease=lease, wait=wait) if wait else []

        routed = RoutedQueue({"first": Late(stage.queue, 1)}, stage.make("second"))
        with pytest.raises(Fault):
            routed.receive(wait=WAIT_S)
        stage.send("comes")
        (message,) = routed.receive(wait=WAIT_S)
        assert message.body == "comes"


class TestChecker:
    def test_a_log_that_faults_is_read_again(self, stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
        stage.account.create("log", Template(retention=7 * 86_400))
        log = Breaking(stage.account.queue("log"), 2)
        times = Times(check_every=0.01)
        transactions = TransactionQueue(stage.queue, log, lambda prepared: Verdict.COMMIT, times=times)
        with caplog.at_level(logging.ERROR, "veilmq.transaction"), transactions.checker:
            wait = threading.Event()
            while log.left or not caplog.records:
                assert not wait.wait(0.01)
            assert "in a policy" in caplog.text
            (checker,) = [each for each in threading.enumerate() if each.name == "veilmq transaction checker"]
            assert checker.is_alive()
