"""What a meter hears of several workers, and of one that has stopped."""

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.client.test_worker_clock import eventually
from tests.client.worker_stage import WAIT_S, Gate, Stage

from veilmq.client.errors import ServiceError
from veilmq.client.worker import PrometheusMeter
from veilmq.client.worker.metrics import Counts


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def in_hand(registry: CollectorRegistry) -> Callable[[], float | None]:
    return lambda: registry.get_sample_value("veilmq_worker_in_hand", {"queue": "work"})


def test_workers_on_one_queue_add_up(stage: Stage, registry: CollectorRegistry) -> None:
    meter, gauge = PrometheusMeter(registry), in_hand(registry)
    first, second = Gate(stage), Gate(stage)
    with stage.worker(first, prefetch=9, metrics=meter) as one:
        stage.send(*map(str, range(10)))
        eventually(lambda: gauge() == 10)
        with stage.worker(second, metrics=meter) as two:
            stage.send("x")
            second.wait_begun()
            eventually(lambda: gauge() == 11)
            second.may.set()
            eventually(lambda: gauge() == 10)
        assert gauge() == 10, "one that stops takes only its own away"
        first.may.set()
        eventually(lambda: gauge() == 0)
    assert (one.counts and one.counts.outcomes, two.counts and two.counts.outcomes) == ({"done": 10}, {"done": 1})


def test_a_worker_that_has_stopped_has_nothing_in_hand(stage: Stage, registry: CollectorRegistry) -> None:
    meter, gauge = PrometheusMeter(registry), in_hand(registry)
    gate = Gate(stage)
    working = stage.worker(gate, prefetch=9, metrics=meter, drain=0.1)
    working.start()
    stage.send(*map(str, range(10)))
    eventually(lambda: gauge() == 10)
    working.stop()
    assert working.join(WAIT_S)
    assert gauge() == 0
    gate.may.set()  # a thread cannot be ended: its handler returns after the run
    assert working._run is not None
    assert working._run.ready.wait_until_free(WAIT_S)
    assert gauge() == 0


def test_a_meter_of_ones_own_hears_each_worker(stage: Stage) -> None:
    heard: list[tuple[str, int]] = []

    class Own:
        def ended(self, *given: Any) -> None: ...

        def failed(self, *given: Any) -> None: ...

        def in_hand(self, queue: str, messages: int) -> None:
            heard.append((queue, messages))

    stage.send("a", "b")
    stage.work(stage.note, prefetch=5, metrics=Own())
    assert {queue for queue, _ in heard} == {"work"}
    assert max(messages for _, messages in heard) == 2
    assert heard[-1] == ("work", 0)


def test_a_refusal_counts_under_its_code_and_invented_codes_under_one_name(registry: CollectorRegistry) -> None:
    counts = Counts("jobs", PrometheusMeter(registry))
    refusals = [ServiceError(code=f"Code{number}", status=400, request_id="", message="") for number in range(60)]
    for error in [
        *refusals,
        *refusals,
        ServiceError(code="HTTP 502", status=502, request_id="", message=""),
        OSError(),
    ]:
        counts.failed("receive", error)

    def failures(error: str) -> float | None:
        labels = {"queue": "jobs", "call": "receive", "error": error}
        return registry.get_sample_value("veilmq_worker_failed_calls_total", labels)

    assert [failures(name) for name in ("Code0", "Code49", "Code50", "ServiceError", "OSError")] == [2, 2, None, 21, 1]


def test_counts_show_what_they_counted() -> None:
    counts = Counts("jobs", None)
    counts.came(3)
    counts.ended("done")
    counts.ended("done")
    counts.failed("delete", ValueError())
    assert repr(counts) == "Counts(received=3, outcomes={'done': 2}, failures={'delete': 1})"
