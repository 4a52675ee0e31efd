"""The worker on real queues in a directory: what it does with messages, failures, lost leases and stops."""

import functools
import gc
import threading
import time
from collections import Counter
from typing import Any

import pytest
from tests.client.worker_stage import WAIT_S, Gate, Stage

from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Message, Received, Template
from veilmq.client.queue import Queue
from veilmq.client.worker import Backoff, Cause, Kind, Options, Reject, Retry, Worker, worker
from veilmq.client.worker.options import complete
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.model.messages import Failure
from veilmq.testing.client_contract import for_each

LATE = Backoff(first=3_000, longest=3_000, jitter=0)


class TestMessages:
    @pytest.mark.parametrize("options", [{}, {"concurrency": 4, "prefetch": 30}, {"pollers": 3}, {"keeper": False}])
    def test_each_is_worked_once_and_deleted(self, stage: Stage, options: dict[str, Any]) -> None:
        stage.send(*map(str, range(60)))
        counts = stage.work(stage.note, **options)
        assert Counter(stage.seen) == Counter(map(str, range(60)))
        assert (counts.received, counts.outcomes) == (60, {"done": 60})
        assert stage.nothing_left()

    def test_a_job_shows_its_message(self, stage: Stage) -> None:
        stage.send(Message("body", attributes={"colour": "red", "size": 3}, type="order"))
        jobs: list[Any] = []
        stage.work(jobs.append, lease=30, keeper={"max_hold": 100})
        (job,) = jobs
        assert (job.body, dict(job.attributes), job.receive_count) == ("body", {"colour": "red", "size": 3}, 1)
        assert job.message.type == "order"
        assert (job.state, job.cancelled.is_set(), job.group) == (None, False, None)
        assert 0 < job.remaining() <= 100

    def test_no_more_are_in_hand_than_the_parameters_say(self, stage: Stage) -> None:
        stage.send(*map(str, range(20)))
        gate = Gate(stage)
        with stage.worker(gate, concurrency=2, prefetch=3):
            gate.wait_begun(2)
            deadline = time.monotonic() + WAIT_S
            while stage.queue.stats().in_flight != 5 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)  # more would come now
            assert stage.queue.stats().in_flight == 5
            gate.may.set()

    def test_it_ends_after_so_many(self, stage: Stage) -> None:
        stage.send(*map(str, range(20)))
        counts = stage.worker(stage.note, prefetch=10, pollers=2).run(messages_max=7)
        assert (counts.received, len(stage.seen)) == (7, 7)
        assert len(stage.visible()) == 13

    def test_the_lease_may_follow_from_the_message(self, stage: Stage) -> None:
        stage.send("short", "long")
        left: dict[str, float] = {}

        def handler(job: Any) -> None:
            left[job.body] = job.remaining()

        stage.work(handler, lease=lambda message: 500 if message.body == "long" else 50, keeper=False)
        assert 40 < left["short"] <= 50
        assert 450 < left["long"] <= 500

    def test_a_lease_function_that_fails_costs_nothing(self, stage: Stage) -> None:
        stage.send("a")
        stage.work(stage.note, lease=lambda message: 1 / 0)
        assert stage.seen == ["a"]

    def test_a_url_is_connected_for_the_run(self, stage: Stage) -> None:
        stage.send("a")

        @worker(f"veil://{stage.directory}?queue=work", wait=0.2)
        def handle(job: Any) -> None:
            stage.note(job)

        assert isinstance(handle, Worker)
        assert handle.run(until_empty=True).outcomes == {"done": 1}
        handle(Received("id", "called", handle="h", lease_end=0.0))
        assert stage.seen == ["a", "called"]

    def test_a_keeper_of_ones_own_stays_open(self, stage: Stage) -> None:
        stage.send("a", "b")
        with LeaseKeeper(stage.queue) as keeper:
            stage.work(stage.note, keeper=keeper)
            assert keeper.stats.registered == 2
            stage.send("c")
            (received,) = stage.queue.receive()
            keeper.register(received).delete()


class TestFailures:
    def test_a_failed_message_comes_back_and_the_worker_lives(self, stage: Stage) -> None:
        stage.send("good", "bad", "good")

        def handler(job: Any) -> None:
            stage.note(job)
            if job.body == "bad" and job.receive_count < 3:
                raise RuntimeError("not yet")

        counts = stage.work(handler)
        assert Counter(stage.seen) == {"good": 2, "bad": 3}
        assert counts.outcomes == {"done": 3, "failed": 2}
        assert stage.nothing_left()

    def test_the_retry_delay_is_not_the_lease(self, stage: Stage) -> None:
        stage.send("a")

        def handler(job: Any) -> None:
            raise RuntimeError("never")

        stage.work(handler, lease=30, retry=LATE)
        assert stage.queue.receive(wait=0) == []
        assert stage.queue.stats().in_flight == 1

    def test_a_handler_may_say_when(self, stage: Stage) -> None:
        stage.send("a")

        def handler(job: Any) -> None:
            stage.note(job)
            if job.receive_count == 1:
                raise Retry(0.0, "not ready")

        counts = stage.work(handler, retry=LATE)
        assert stage.seen == ["a", "a"]
        assert counts.outcomes == {"retry": 1, "done": 1}

    @pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
    def test_what_ends_a_thread_ends_no_worker(self, stage: Stage, raised: type[BaseException]) -> None:
        stage.send("a", "b")

        def handler(job: Any) -> None:
            stage.note(job)
            if job.receive_count == 1:
                raise raised

        assert stage.work(handler).outcomes == {"failed": 2, "done": 2}

    def test_poison_goes_to_the_dead_letter_queue(self, stage: Stage) -> None:
        dead = stage.make("dead")
        stage.send(Message("bad", attributes={"colour": "red"}, type="order"), "good")

        def handler(job: Any) -> None:
            stage.note(job)
            if job.body == "bad":
                raise RuntimeError("line one\nline two")

        counts = stage.work(handler, poison_after=3, dead_letter_queue="dead")
        assert Counter(stage.seen) == {"bad": 3, "good": 1}
        assert counts.outcomes == {"done": 1, "failed": 2, "dead_lettered": 1}
        (letter,) = dead.receive(10)
        assert (letter.body, letter.type, letter.attributes["colour"]) == ("bad", "order", "red")
        assert letter.attributes["veilmq.dead_letter.queue"] == "work"
        assert letter.attributes["veilmq.dead_letter.receive_count"] == 3
        assert letter.attributes["veilmq.dead_letter.reason"] == "RuntimeError: line one line two"
        assert stage.nothing_left()

    def test_a_message_with_an_empty_body_goes_there_too(self, stage: Stage) -> None:
        dead = stage.make("dead")
        stage.send_empty()

        def handler(job: Any) -> None:
            raise Reject(f"no order in {job.body!r}")

        assert stage.work(handler, dead_letter_queue="dead", receives=1).outcomes == {"dead_lettered": 1}
        (letter,) = dead.receive()
        assert (letter.body, letter.attributes["veilmq.dead_letter.reason"]) == ("(empty)", "no order in ''")

    def test_what_killed_its_workers_is_not_started_again(self, stage: Stage) -> None:
        dead = stage.make("dead")
        stage.send("killer")
        for _ in range(2):
            (received,) = stage.queue.receive()
            stage.queue.release(received.handle)
        stage.work(stage.note, poison_after=2, dead_letter_queue=dead)
        assert stage.seen == []
        assert [each.body for each in dead.receive(10)] == ["killer"]

    def test_a_rejected_message_goes_there_at_once(self, stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
        dead = stage.make("dead")
        stage.send("a")

        def handler(job: Any) -> None:
            raise Reject("no such customer")

        assert stage.work(handler, dead_letter_queue="dead").outcomes == {"dead_lettered": 1}
        assert dead.receive()[0].attributes["veilmq.dead_letter.reason"] == "no such customer"
        assert " went to dead after 1 receive: no such customer" in caplog.text

    def test_a_message_full_of_attributes_goes_there_too(self, stage: Stage) -> None:
        dead = stage.make("dead")
        stage.send(Message("a", attributes={f"a{number}": "x" for number in range(9)}))

        def handler(job: Any) -> None:
            raise Reject("reason")

        stage.work(handler, dead_letter_queue="dead")
        (letter,) = dead.receive()
        assert len(letter.attributes) == 10
        assert letter.attributes["veilmq.dead_letter.reason"] == "reason"

    def test_without_a_dead_letter_queue_it_is_retried(self, stage: Stage) -> None:
        stage.send("a")

        def handler(job: Any) -> None:
            if job.receive_count < 3:
                raise Reject("reason")

        assert stage.work(handler).outcomes == {"failed": 2, "done": 1}

    def test_if_it_cannot_be_sent_there_it_stays(self, stage: Stage) -> None:
        dead = stage.make("dead")
        stage.send("a")

        def handler(job: Any) -> None:
            stage.account.delete("dead")
            raise Reject("reason")

        counts = stage.work(handler, dead_letter_queue=dead, retry=LATE)
        assert counts.outcomes == {"failed": 1}
        assert counts.failures == {"dead_letter": 1}
        assert stage.queue.stats().in_flight == 1


class TestBatches:
    def test_the_failed_ones_are_returned(self, stage: Stage) -> None:
        stage.send(*map(str, range(10)))
        sizes: list[int] = []

        def handler(jobs: list[Any]) -> list[Any]:
            sizes.append(len(jobs))
            for job in jobs:
                stage.note(job)
            return [job for job in jobs if job.body in "37" and job.receive_count == 1]

        counts = stage.work(handler, batch=5)
        assert Counter(stage.seen) == Counter(map(str, range(10))) + Counter("37")
        assert counts.outcomes == {"done": 10, "failed": 2}
        assert max(sizes) == 5

    def test_ids_serve_as_well(self, stage: Stage) -> None:
        stage.send("a", "b")
        counts = stage.work(lambda jobs: {job.id for job in jobs if job.receive_count == 1}, batch=2)
        assert counts.outcomes == {"done": 2, "failed": 2}

    def test_one_that_raises_fails_them_all(self, stage: Stage) -> None:
        stage.send("a", "b")

        def handler(jobs: list[Any]) -> None:
            if jobs[0].receive_count == 1:
                raise RuntimeError("all of it")

        assert stage.work(handler, batch=2).outcomes == {"done": 2, "failed": 2}

    @pytest.mark.parametrize("returned", ["a string", 3, ["no such id"]])
    def test_what_it_returns_is_checked(self, stage: Stage, returned: Any) -> None:
        stage.send("a")
        counts = stage.work(lambda jobs: returned, batch=2, retry=LATE)
        assert counts.outcomes == {"failed": 1}


class Faulty(Wrapping):
    """Raises what a list of errors by call says, once each, and then works."""

    def __init__(self, inner: Queue, **faults: list[Exception]) -> None:
        super().__init__(inner)
        self.faults = faults
        self.after = False
        """The call is done, and then its answer is lost."""

    def _fault(self, call: str) -> None:
        if self.faults.get(call):
            raise self.faults[call].pop(0)

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        self._fault("receive")
        return self.inner.receive(count_max, lease=lease, wait=wait)

    def delete(self, handle: str) -> None:
        if not self.after:
            self._fault("delete")
        self.inner.delete(handle)
        self._fault("delete")

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self._fault("release")
        self.inner.release(handle, delay, failure=failure)


GONE = TransportError(reason="connection refused", may_have_happened=False)
REVOKED = ServiceError(code="InvalidClientTokenId", status=403, request_id="r", message="revoked")


class TestFaults:
    def test_receives_that_fail_are_backed_off_and_reported(self, stage: Stage) -> None:
        stage.send("a")
        told: list[Exception] = []
        queue = Faulty(stage.queue, receive=[GONE, REVOKED])
        counts = stage.work(stage.note, queue, on_error=told.append)
        assert told == [GONE, REVOKED]
        assert counts.failures == {"receive": 2}
        assert stage.seen == ["a"]

    def test_a_server_that_stays_away_ends_the_run_if_that_is_wanted(self, stage: Stage) -> None:
        queue = Faulty(stage.queue, receive=[REVOKED] * 100)
        worker = stage.worker(stage.note, queue, give_up_after=0.2)
        with pytest.raises(ServiceError, match="revoked"):
            worker.run()
        assert len(queue.faults["receive"]) > 90  # few tries, not a storm

    def test_a_started_worker_tells_when_it_is_joined(self, stage: Stage) -> None:
        worker = stage.worker(stage.note, Faulty(stage.queue, receive=[REVOKED] * 100), give_up_after=0.1)
        worker.start()
        with pytest.raises(ServiceError, match="revoked"):
            worker.join(WAIT_S)
        assert worker.join()

    def test_a_delete_is_tried_again(self, stage: Stage) -> None:
        stage.send("a")
        counts = stage.work(stage.note, Faulty(stage.queue, delete=[GONE, GONE]))
        assert (stage.seen, counts.outcomes, counts.failures) == (["a"], {"done": 1}, {"delete": 2})
        assert stage.nothing_left()

    @pytest.mark.parametrize("keeper", [True, False])
    def test_a_delete_whose_answer_was_lost_is_done(self, stage: Stage, keeper: bool) -> None:
        stage.send("a")
        queue = Faulty(stage.queue, delete=[TransportError(reason="no answer", may_have_happened=True)])
        queue.after = True
        lost: list[Received] = []
        counts = stage.work(stage.note, queue, keeper=keeper, on_lost=lost.append)
        assert (counts.outcomes, lost) == ({"done": 1}, [])

    def test_a_release_is_tried_again(self, stage: Stage) -> None:
        stage.send("a")

        def handler(job: Any) -> None:
            stage.note(job)
            if job.receive_count == 1:
                raise RuntimeError("once")

        counts = stage.work(handler, Faulty(stage.queue, release=[GONE]))
        assert (stage.seen, counts.outcomes) == (["a", "a"], {"failed": 1, "done": 1})

    def test_a_callback_that_fails_stops_nothing(self, stage: Stage) -> None:
        stage.send("a", "b")

        def broken(*given: Any) -> None:
            raise RuntimeError("callback")

        queue = Faulty(stage.queue, receive=[GONE])
        assert stage.work(stage.note, queue, on_error=broken, on_result=broken).outcomes == {"done": 2}


@pytest.mark.slow
class TestLeases:
    def test_a_lost_lease_cancels_the_handler_and_nothing_is_deleted(self, stage: Stage) -> None:
        stage.send("a")
        lost: list[Received] = []
        causes: list[Any] = []
        thief: list[Received] = []

        def handler(job: Any) -> None:
            while not thief:
                thief.extend(stage.queue.receive(wait=5))
            assert job.cancelled.wait(WAIT_S)
            causes.append(job.cancelled.cause)

        counts = stage.work(handler, lease=0.5, keeper=False, on_lost=lost.append)
        assert causes == [Cause.LOST]
        assert [each.id for each in lost] == [thief[0].id]
        assert counts.outcomes["lost"] == 1
        stage.queue.delete(thief[0].handle)
        assert stage.nothing_left()

    def test_work_of_ten_timeouts_is_never_seen_twice(self, stage: Stage) -> None:
        stage.send(*map(str, range(8)))

        def handler(job: Any) -> None:
            stage.note(job)
            # The last two were prefetched, and have waited for as long.
            assert not job.cancelled.wait(30.0 if len(stage.seen) <= 6 else 0)

        # On a busy machine: a stall of half a lease must be no loss.
        one = stage.worker(handler, concurrency=3, prefetch=1, lease=3.0, wait=1.0)
        two = stage.worker(handler, concurrency=3, prefetch=1, lease=3.0, wait=1.0)
        with two:
            counts = one.run(until_empty=True)
        assert two.counts is not None
        assert Counter(stage.seen) == Counter(map(str, range(8)))
        assert counts.outcomes.get("done", 0) + two.counts.outcomes.get("done", 0) == 8
        assert stage.nothing_left()


class TestStopping:
    def test_running_handlers_finish_and_the_rest_is_visible_at_once(self, stage: Stage) -> None:
        stage.send(*map(str, range(9)))
        gate = Gate(stage)
        worker = stage.worker(gate, concurrency=2, prefetch=5, wait=20)
        worker.start()
        gate.wait_begun(2)
        worker.stop()
        assert not worker.join(0.1)
        assert len(stage.queue.receive(10, lease=0.1, wait=5)) > 0, "given back while handlers still run"
        gate.may.set()
        assert worker.join(WAIT_S)
        assert worker.counts is not None
        assert worker.counts.outcomes["done"] == 2
        time.sleep(0.1)
        assert sorted(stage.visible() + stage.seen) == sorted(map(str, range(9)))

    def test_handlers_that_go_on_are_told_and_their_messages_given_back(self, stage: Stage) -> None:
        stage.send("a", "b")
        gate = Gate(stage)
        worker = stage.worker(gate, concurrency=2, drain=0.1)
        worker.start()
        gate.wait_begun(2)
        worker.stop()
        assert worker.join(WAIT_S)
        assert [job.cancelled.cause for job in gate.jobs] == [Cause.SHUTDOWN] * 2
        assert worker.counts is not None
        assert worker.counts.outcomes == {"stopped": 2}
        held = stage.queue.receive(10)
        assert sorted(each.body for each in held) == ["a", "b"]
        gate.may.set()
        time.sleep(0.3)  # the late handlers return
        assert worker.counts.outcomes == {"stopped": 2}
        for each in held:
            stage.queue.delete(each.handle)

    def test_a_batch_that_ends_after_the_stop_is_no_fault(self, stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
        stage.send("a", "b")
        began, may = threading.Event(), threading.Event()

        def handler(jobs: Any) -> None:
            began.set()
            assert may.wait(WAIT_S)

        async def coroutine(jobs: Any) -> None:
            handler(jobs)  # it holds up its loop

        for call, kind, thread_name in (
            (handler, "threads", "veilmq worker 1"),
            (coroutine, "async", "veilmq worker loop"),
        ):
            worker = stage.worker(call, kind=kind, batch=2, drain=0.1)
            worker.start()
            assert began.wait(WAIT_S)
            runners = [thread for thread in threading.enumerate() if thread.name == thread_name]
            worker.stop()
            assert worker.join(WAIT_S)
            may.set()
            for thread in runners:
                thread.join(WAIT_S)
            assert len(runners) == 1
            began.clear()
            may.clear()
        gc.collect()  # asyncio logs what nobody retrieved
        assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []

    def test_a_message_that_is_given_back_while_its_result_is_told_is_not_done_too(self, stage: Stage) -> None:
        stage.send("a")
        told, may = threading.Event(), threading.Event()

        def tell(*_: Any) -> None:
            told.set()
            may.wait(WAIT_S)

        worker = stage.worker(stage.note, drain=0.1, on_result=tell)
        worker.start()
        assert told.wait(WAIT_S)
        worker.stop()
        assert worker.join(WAIT_S)
        assert worker.counts is not None
        assert worker.counts.outcomes == {"stopped": 1}
        (again,) = stage.queue.receive(wait=5)
        may.set()
        time.sleep(0.3)  # the late thread goes on
        assert worker.counts.outcomes == {"stopped": 1}
        stage.queue.delete(again.handle)

    def test_the_end_of_a_block_is_no_second_stop(self, stage: Stage) -> None:
        stage.send("a")
        gate = Gate(stage)
        with stage.worker(gate, drain=60) as worker:
            gate.wait_begun()
            worker.stop()
            threading.Timer(0.3, gate.may.set).start()
        assert worker.counts is not None
        assert worker.counts.outcomes == {"done": 1}

    def test_what_has_no_time_from_the_start_comes_back_after_a_pause(self, stage: Stage) -> None:
        stage.send("a")
        counts = stage.work(
            stage.note, receives=1, lease=5.0, stop_before_expiry=600.0, keeper={"max_hold": 600.0}, retry=LATE
        )
        assert counts.outcomes == {"expired": 1}
        assert stage.queue.receive() == [], "not at once, over and over"

    def test_a_second_stop_does_not_wait_for_the_drain(self, stage: Stage) -> None:
        stage.send("a")
        gate = Gate(stage)
        worker = stage.worker(gate, drain=3_000)
        worker.start()
        gate.wait_begun()
        worker.stop()
        worker.stop()
        assert worker.join(WAIT_S)
        assert stage.visible() == ["a"]
        gate.may.set()

    def test_an_open_poll_is_ended(self, stage: Stage) -> None:
        before = set(threading.enumerate())

        def pollers() -> list[str]:
            return [each.name for each in set(threading.enumerate()) - before if "poller" in each.name]

        worker = stage.worker(stage.note, wait=20)
        worker.start()
        deadline = time.monotonic() + WAIT_S
        while not pollers():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker.stop()
        assert worker.join(15)
        assert pollers() == []

    def test_what_a_poll_brings_too_late_goes_back(self, stage: Stage) -> None:
        polls, answer = threading.Semaphore(0), threading.Event()

        class Slow(Wrapping):
            def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
                came = self.inner.receive(count_max, lease=lease, wait=wait)
                polls.release()
                assert answer.wait(WAIT_S)
                return came

        stage.send("a")
        worker = stage.worker(stage.note, Slow(stage.queue), wait=20)
        worker.start()
        assert polls.acquire(timeout=WAIT_S)
        worker.stop()
        assert not worker.join(0.2)
        answer.set()
        assert worker.join(WAIT_S)
        assert worker.counts is not None
        assert (stage.seen, worker.counts.outcomes) == ([], {"stopped": 1})
        assert stage.visible() == ["a"]

    def test_it_runs_again(self, stage: Stage) -> None:
        worker = stage.worker(stage.note)
        for body in ("a", "b"):
            stage.send(body)
            worker.run(until_empty=True)
        assert stage.seen == ["a", "b"]
        worker.start()
        for again in (worker.start, worker.run):
            with pytest.raises(ParameterInvalid, match="runs already"):
                again()
        worker.stop()
        assert worker.join(WAIT_S)


class TestParameters:
    @for_each(
        "options, parameter",
        [
            ({"concurrency": 0}, "concurrency"),
            ({"concurrency": True}, "concurrency"),
            ({"concurrency": 10_000, "batch": 1_000}, "concurrency"),
            ({"prefetch": -1}, "prefetch"),
            ({"batch": 0}, "batch"),
            ({"kind": "fibres"}, "kind"),
            ({"lease": 0}, "lease"),
            ({"lease": 10**7}, "lease"),
            ({"wait": 10**6}, "wait"),
            ({"drain": -1}, "drain"),
            ({"stop_before_expiry": 30, "keeper": False}, "stop_before_expiry"),
            ({"poison_after": 3}, "dead_letter_queue"),
            ({"poison_after": 0, "dead_letter_queue": "dead"}, "poison_after"),
            ({"guard_key": lambda message: message.id}, "guard"),
            ({"kind": "async"}, "handler"),
            ({"kind": "processes"}, "handler"),
            *(({name: "5"}, name) for name in ("retry", "guard", "checkpoints", "metrics", "keeper", "on_lost")),
            ({"dead_letter_queue": 5}, "dead_letter_queue"),
            ({"colour": "red"}, "colour"),
        ],
    )
    def test_what_cannot_work_is_refused(self, stage: Stage, options: dict[str, Any], parameter: str) -> None:
        with pytest.raises(ParameterInvalid) as refused:
            Worker(stage.queue, lambda job: None, **options)
        assert refused.value.parameter == parameter

    def test_so_is_a_handler_that_cannot_be_called_with_a_job(self, stage: Stage) -> None:
        async def handler(job: Any) -> None: ...

        with pytest.raises(ParameterInvalid, match="kind=async"):
            Worker(stage.queue, handler)
        for wrong in (lambda: None, lambda job, more: None, Template):
            with pytest.raises(ParameterInvalid, match="handler: is called with one argument"):
                Worker(stage.queue, wrong)

        def generator(job: Any) -> Any:
            yield

        async def asynchronous(job: Any) -> Any:
            yield

        for kind, never in (("threads", generator), ("threads", asynchronous), ("async", asynchronous)):
            with pytest.raises(ParameterInvalid, match="handler: is a generator function"):
                Worker(stage.queue, never, kind=kind)
        Worker(stage.queue, generator, batch=2)  # it yields the jobs that failed

        # A decorator adds the second argument; or nobody can tell what the arguments are.
        def with_one_more(job: Any, more: Any) -> None: ...

        class Unreadable:
            def __call__(self, job: Any) -> None: ...

            @property
            def __signature__(self) -> Any:
                raise NameError("as of an annotation that only a type checker imports")

        @functools.wraps(with_one_more)
        def decorated(job: Any) -> None:
            with_one_more(job, None)

        class Made:
            def __init__(self, job: Any) -> None: ...

            def __call__(self) -> Any:  # of the object, which is not called
                yield

        for handler in (decorated, Unreadable(), Made):
            assert Worker(stage.queue, handler).handler is handler

    def test_so_is_a_keeper_that_would_lose_leases(self, stage: Stage) -> None:
        with pytest.raises(ParameterInvalid, match="visibility_timeout"):
            stage.worker(stage.note, keeper={"interval": 30}).run()

    def test_a_dead_letter_queue_must_be_there_and_another(self, stage: Stage) -> None:
        with pytest.raises(QueueMissing):
            stage.worker(stage.note, dead_letter_queue="nowhere").run()
        with pytest.raises(ParameterInvalid, match="is the queue itself"):
            stage.worker(stage.note, dead_letter_queue=stage.queue).run()

    def test_every_parameter_is_an_option(self) -> None:
        usual = complete({})
        assert set(Options.__annotations__) == set(usual)
        assert usual["kind"] is Kind.THREADS

    @for_each(
        "values", [{"first": 0}, {"longest": float("inf")}, {"factor": 0.5}, {"jitter": 2}, {"first": 10, "longest": 5}]
    )
    def test_a_backoff_that_cannot_work_is_refused(self, values: dict[str, float]) -> None:
        with pytest.raises(ParameterInvalid):
            Backoff(**values)

    def test_a_backoff_grows_to_its_longest(self) -> None:
        backoff = Backoff(first=1, factor=2, longest=10, jitter=0.5)
        assert [backoff.delay(tries, 0.0) for tries in (1, 2, 3, 4, 5, 500)] == [1, 2, 4, 8, 10, 10]
        assert backoff.delay(3, 1.0) == 2
