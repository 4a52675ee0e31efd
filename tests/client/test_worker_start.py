"""What a worker refuses before it receives anything, and the user's own keeper that is closed under it."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.client.test_forked import code_of, in_child
from tests.client.worker_stage import WAIT_S, Gate, Stage

import veilmq
from veilmq.client.errors import TransportError
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.large import LargeMessageQueue
from veilmq.client.messages import Received
from veilmq.client.ordered import LocalFile, OrderedReceiver
from veilmq.client.queue import Queue
from veilmq.client.unreadable import keep
from veilmq.client.worker import Job, Retry
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import ParameterInvalid
from veilmq.testing.for_each import for_each


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(ParameterInvalid) as refused:
        call()
    return refused.value.parameter, refused.value.reason


def test_a_closed_keeper_is_refused(stage: Stage) -> None:
    stage.send("x")
    keeper = LeaseKeeper(stage.queue)
    worker = stage.worker(stage.note, keeper=keeper)
    keeper.close()
    assert refusal(lambda: stage.worker(stage.note, keeper=keeper)) == ("keeper", "it is closed")
    assert refusal(worker.run) == ("keeper", "it is closed")
    assert stage.queue.stats().visible == 1
    assert stage.seen == []


def test_an_ordered_receiver_refuses_it_too(stage: Stage, tmp_path: Any) -> None:
    keeper = LeaseKeeper(stage.queue)
    keeper.close()
    storage = LocalFile(tmp_path / "state")
    assert refusal(lambda: OrderedReceiver(stage.queue, storage, keeper=keeper)) == ("keeper", "it is closed")
    storage.acquire()
    storage.release()


def test_a_keeper_of_another_queue_is_refused(stage: Stage) -> None:
    with LeaseKeeper(stage.make("other")) as keeper:
        told = refusal(lambda: stage.worker(stage.note, keeper=keeper))
    assert told == ("keeper", "it keeps leases of queue other, not of work")


def test_a_keeper_of_a_queue_of_the_same_name_elsewhere_is_refused(stage: Stage, tmp_path: Path) -> None:
    with veilmq.connect(f"veil://{tmp_path}/elsewhere?queue=work&create=1") as other, LeaseKeeper(other) as keeper:
        storage = LocalFile(tmp_path / "state")
        both = (
            refusal(lambda: stage.worker(stage.note, keeper=keeper)),
            refusal(lambda: OrderedReceiver(stage.queue, storage, keeper=keeper)),
        )
    assert both == 2 * (("keeper", "it keeps leases of another queue work: make it with this queue object"),)


def test_a_keeper_of_the_queue_below_a_pattern_with_handles_of_its_own_is_refused(stage: Stage, tmp_path: Path) -> None:
    large = LargeMessageQueue(stage.queue, f"file://{tmp_path}/bodies", unreadable=keep)
    told = [("keeper", "queue work has other handles there: make it with this queue object, patterns included")]
    with LeaseKeeper(stage.queue) as keeper:
        assert [refusal(lambda: stage.worker(stage.note, large, keeper=keeper))] == told
    with LeaseKeeper(large) as keeper:
        assert [refusal(lambda: stage.worker(stage.note, keeper=keeper))] == told
        stage.send("small")
        assert stage.work(stage.note, large, keeper=keeper).outcomes == {"done": 1}


def test_a_keeper_of_another_object_of_the_same_queue_is_taken(stage: Stage) -> None:
    stage.send("x")
    with LeaseKeeper(Wrapping(stage.account.queue("work"))) as keeper:
        assert stage.work(stage.note, keeper=keeper).outcomes == {"done": 1}


def test_a_parents_keeper_is_refused(stage: Stage) -> None:
    with LeaseKeeper(stage.queue) as keeper:

        def work() -> bool:
            parameter, reason = refusal(lambda: stage.worker(stage.note, keeper=keeper))
            return parameter == "keeper" and "forked" in reason

        assert code_of(in_child(work)) == 0


def test_a_keeper_that_is_closed_under_its_worker_ends_it_and_the_messages_go_back(stage: Stage) -> None:
    keeper = LeaseKeeper(stage.queue)
    gate = Gate(stage)
    worker = stage.worker(gate, keeper=keeper, wait=20)
    stage.send("first")
    worker.start()
    gate.wait_begun()
    keeper.close(release=False)
    gate.may.set()
    stage.send("second")
    assert refusal(lambda: worker.join(WAIT_S)) == ("keeper", "it is closed")
    assert worker.counts is not None
    assert "unsettled" not in worker.counts.outcomes
    assert stage.visible() == ["second"]


def test_a_queue_that_is_closed_under_its_worker_ends_it(stage: Stage) -> None:
    """Its polls go through another object: it would work each message again and again, and could delete none."""
    stage.send("a", "b", "c")
    worker = stage.worker(lambda job: stage.queue.close())
    with pytest.raises(TransportError, match="queue work is closed"):
        worker.run(messages_max=3)
    assert worker.counts is not None
    assert worker.counts.outcomes == {"unsettled": 1}
    assert worker.counts.failures == {"delete": 1}


def test_what_a_poll_brings_after_the_close_of_its_queue_is_released(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody calls `join` for long, perhaps: the error that ends the worker is in the log."""
    stage.send("a", "b")
    closing = stage.account.queue("work")

    def lease(message: Received) -> float:
        closing.close()
        return 60

    worker = stage.worker(stage.note, closing, concurrency=2, lease=lease)
    worker.start()
    with pytest.raises(TransportError, match="queue work is closed"):
        worker.join(WAIT_S)
    assert stage.visible() == ["b"]
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["queue work: the worker ends: queue work is closed"]


def test_a_stop_after_the_end_is_not_for_the_next_start(stage: Stage) -> None:
    worker = stage.worker(gate := Gate(stage))
    worker.run(until_empty=True)
    worker.stop()
    stage.send("x")
    gate.may.set()
    with worker:
        gate.wait_begun()
    assert stage.nothing_left()


class Waits(Wrapping):
    """Notes how long each poll would wait, and answers at once."""

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.waits: list[float] = []

    def receive(self, count: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        self.waits.append(wait)
        return self.inner.receive(count, lease=lease)


@for_each(
    ("bodies", "wait", "waits"), [("", None, {1.0}), ("a", None, {1.0, 20.0}), ("", 5.0, {5.0}), ("a", 5.0, {5.0})]
)
def test_a_run_until_empty_waits_for_what_was_given_back(
    tmp_path: Path, bodies: str, wait: float | None, waits: set[float]
) -> None:
    """Its polls are short while nothing can come back."""
    stage = Stage(tmp_path / (bodies + str(wait)))
    stage.send(*bodies)

    def handler(job: Job) -> None:
        if job.receive_count == 1:
            raise Retry(delay=0)

    queue = Waits(stage.queue)
    counts = stage.worker(handler, queue, wait=wait).run(until_empty=True)
    stage.account.close()
    assert counts.outcomes == ({"retry": 1, "done": 1} if bodies else {})
    assert (set(queue.waits), queue.waits[-1]) == (waits, max(waits))


def test_signals_are_for_the_main_thread(stage: Stage) -> None:
    stage.send("x")
    found: list[tuple[str, str]] = []
    worker = stage.worker(stage.note)
    thread = threading.Thread(target=lambda: found.append(refusal(lambda: worker.run(signals=True))))
    thread.start()
    thread.join(WAIT_S)
    assert found == [("signals", "only the main thread hears them")]
    assert stage.queue.stats().visible == 1


def test_a_handler_of_signals_that_python_did_not_set_is_no_trouble(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = signal.signal
    before = install(signal.SIGTERM, signal.SIG_DFL)
    try:
        # What Python says of a handler of whoever embeds it.
        monkeypatch.setattr(signal, "signal", lambda number, handler: install(number, handler) and None)
        stage.send("x")
        stage.worker(stage.note).run(signals=True, until_empty=True)
        assert stage.seen == ["x"]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        monkeypatch.undo()
        install(signal.SIGTERM, before)
        install(signal.SIGINT, signal.default_int_handler)
