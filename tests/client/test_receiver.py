"""The receiver over real queues: threads and coroutines that wait, polls that are counted."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from veilmq.client import receiver as module
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.errors import TransportError
from veilmq.client.messages import Received
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.receiver import AsyncReceiver, Receiver, exchange
from veilmq.client.receiver.exchange import Wish
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import ParameterInvalid, QueueMissing, VeilError
from veilmq.testing.client_contract import for_each

UNREACHABLE = TransportError(reason="connection refused", may_have_happened=False)


class Counting(Wrapping):
    """Counts receives; `answer`, if there is one, is what they meet instead of the queue."""

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()
        self.receives = 0
        self.parked = 0
        self.parked_max = 0
        self.waits: Counter[bool] = Counter()
        self.answer: Sequence[Received] | VeilError | None = None
        self.interruptible = True

    def interrupt(self) -> None:
        if self.interruptible:
            self.inner.interrupt()

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        with self.lock:
            self.receives += 1
            self.waits[wait > 0] += 1
            self.parked += wait > 0
            self.parked_max = max(self.parked_max, self.parked)
        try:
            if isinstance(self.answer, VeilError):
                raise self.answer
            return self.inner.receive(count_max, lease=lease, wait=wait) if self.answer is None else list(self.answer)
        finally:
            with self.lock:
                self.parked -= wait > 0


@pytest.fixture
def account(tmp_path: Path) -> Iterator[EmbeddedAccount]:
    with EmbeddedAccount(tmp_path / "data") as account:
        account.create("jobs")
        yield account


@pytest.fixture
def queue(account: EmbeddedAccount) -> Counting:
    return Counting(account.queue("jobs"))


def eventually(condition: Callable[[], object]) -> None:
    """For what another thread does in its own time."""
    for _ in range(3_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


async def until(condition: Callable[[], object]) -> None:
    """As `eventually`, and the loop goes on."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what it waits for happens in threads
            await asyncio.sleep(0.01)


class Crowd:
    """Threads that receive in a loop until they get None."""

    def __init__(self, receiver: Receiver, count: int, timeout: float | None = None) -> None:
        self.got: list[str] = []
        self.errors: list[VeilError] = []
        self.threads = [threading.Thread(target=self.work, args=(receiver, timeout)) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def work(self, receiver: Receiver, timeout: float | None) -> None:
        try:
            while (message := receiver.receive(timeout)) is not None:
                self.got.append(message.body)
        except VeilError as error:
            self.errors.append(error)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("polls", [1, 3])
def test_two_hundred_threads_hold_exactly_so_many_polls(queue: Counting, polls: int) -> None:
    with Receiver(queue, polls=polls) as receiver:
        crowd = Crowd(receiver, 200)
        eventually(lambda: receiver.waiting == 200 and queue.parked == polls)
        assert (queue.parked_max, queue.receives) == (polls, polls)
    queue.close()
    crowd.join()
    assert crowd.got == []


def test_a_thousand_messages_are_handed_out_once_each(queue: Counting) -> None:
    with Receiver(queue) as receiver:
        crowd = Crowd(receiver, 200)
        eventually(lambda: receiver.waiting == 200)
        queue.send_batch([str(number) for number in range(1_000)])
        eventually(lambda: len(crowd.got) >= 1_000)
        eventually(lambda: receiver.waiting == 200 and queue.parked == 1)
        assert sorted(crowd.got, key=int) == [str(number) for number in range(1_000)]
        assert queue.parked_max == 1
        assert queue.receives < 500, "in batches"
        assert queue.stats().visible == 0
    queue.close()
    crowd.join()


def test_requests_for_what_is_there_run_side_by_side(queue: Counting) -> None:
    here, all_here = threading.Semaphore(3), threading.Event()

    class Distant(Wrapping):
        @property
        def capabilities(self) -> Capabilities:
            return msgspec.structs.replace(self.inner.capabilities, receive_messages_max=10)

        def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
            if not wait and not here.acquire(blocking=False):
                all_here.set()
            assert wait or all_here.wait(30), "they come one after another"
            return self.inner.receive(count_max, lease=lease, wait=wait)

    with Receiver(Distant(queue), fetches=3) as receiver, ThreadPoolExecutor(60) as pool:
        # Each asks once: nobody who comes back starts a request.
        asked = [pool.submit(receiver.receive, 60) for _ in range(60)]
        eventually(lambda: receiver.waiting == 60 and queue.parked == 1)
        queue.send_batch([str(number) for number in range(60)])
        assert None not in [future.result() for future in asked]


@pytest.mark.parametrize("answer", [[], UNREACHABLE])
def test_a_queue_that_answers_so_at_once_is_asked_a_few_times(
    queue: Counting, answer: Sequence[Received] | VeilError
) -> None:
    queue.answer = answer
    with Receiver(queue, polls=4) as receiver:
        crowd = Crowd(receiver, 200, timeout=1)
        crowd.join()
        # 0.1 + 0.2 + 0.4 + 0.8 s and so on, a quarter shorter at most.
        assert 3 <= queue.receives <= 10
        assert crowd.got == []
        assert set(crowd.errors) <= {UNREACHABLE}
        assert bool(crowd.errors) == isinstance(answer, VeilError)
        queue.answer = None
        queue.send("better now")
        message = receiver.receive(20)
        assert message is not None
        assert message.body == "better now"


def test_a_queue_that_is_deleted_is_raised(account: EmbeddedAccount, queue: Counting) -> None:
    account.delete("jobs")
    with Receiver(queue) as receiver:
        crowd = Crowd(receiver, 20)
        crowd.join()
        assert crowd.errors == [QueueMissing(queue="jobs")] * 20
        assert queue.receives <= 20


def test_runners_that_are_no_longer_needed_end(queue: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)
    with Receiver(queue) as receiver:
        crowd = Crowd(receiver, 30)
        eventually(lambda: receiver.waiting == 30)
        queue.send_batch([str(number) for number in range(300)])
        eventually(lambda: len(crowd.got) == 300)
        # One holds the poll. The others wait for nothing: they must not look again and again.
        eventually(lambda: receiver._polling._runners == 1)
    crowd.join()


def test_who_comes_in_the_pause_after_a_failure_is_served_when_it_ends(
    queue: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "BACKOFF_SECONDS", 1.0)

    class Failing(Wrapping):
        failing = True

        def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
            if self.failing:
                raise UNREACHABLE
            return self.inner.receive(count_max, lease=lease, wait=wait)

    failing = Failing(queue)
    with Receiver(failing) as receiver:
        with pytest.raises(type(UNREACHABLE)):
            receiver.receive(0)
        eventually(lambda: receiver._polling._idle == 1)
        failing.failing = False
        queue.send("there")
        # Less than the time after which an idle runner looks for itself.
        message = receiver.receive(module.IDLE_SECONDS / 2)
        assert message is not None
        assert message.body == "there"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_adapter_that_breaks_stops_nobody(queue: Counting) -> None:
    faults = iter([True, True])

    class Broken(Wrapping):
        def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
            if next(faults, False):
                raise KeyError("a fault of the adapter")
            return self.inner.receive(count_max, lease=lease, wait=wait)

    with Receiver(Broken(queue)) as receiver:
        queue.send("there")
        message = receiver.receive(20)
        assert message is not None
        assert message.body == "there"


def test_no_wait_never_waits(queue: Counting) -> None:
    with Receiver(queue) as receiver:
        assert receiver.receive(0) is None
        assert queue.waits == {False: 1}
        queue.send("there")
        message = receiver.receive(0)
        assert message is not None
        assert message.body == "there"


def test_none_when_nothing_came(queue: Counting) -> None:
    with Receiver(queue) as receiver:
        assert receiver.receive(0.05) is None
        assert receiver.receive_batch(5, 0.05) == []
        assert receiver.waiting == 0


def test_a_batch_takes_what_is_there(queue: Counting) -> None:
    with Receiver(queue) as receiver:
        queue.send_batch(["1", "2", "3"])
        batch = receiver.receive_batch(10, 5)
        assert [message.body for message in batch] == ["1", "2", "3"]
        with pytest.raises(ParameterInvalid, match="count_max"):
            receiver.receive_batch(0)


def test_a_lease_of_its_own(queue: Counting) -> None:
    with Receiver(queue, lease=0.2) as receiver:
        queue.send("there")
        assert receiver.receive(5) is not None
        assert receiver.receive(5) is not None, "after that it is back"


def test_close_wakes_everyone_and_releases_what_the_poll_still_brings(queue: Counting) -> None:
    queue.interruptible = False
    receiver = Receiver(queue)
    crowd = Crowd(receiver, 50)
    eventually(lambda: queue.parked == 1)
    receiver.close()
    crowd.join()
    assert queue.parked == 1, "it ends with its wait"
    queue.send("late")
    receiver.close(deadline=30)
    assert crowd.got == []
    (message,) = queue.receive(1, wait=5)
    assert (message.body, message.receive_count) == ("late", 2)
    assert receiver.receive(5) is None


def test_close_waits_for_what_is_released_too(queue: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.interruptible = False
    begun, may = threading.Event(), threading.Event()
    release = queue.inner.release

    def slow(handle: str, delay: float = 0, **options: object) -> None:
        begun.set()
        assert may.wait(30)
        release(handle, delay, **options)

    monkeypatch.setattr(queue.inner, "release", slow)
    receiver = Receiver(queue)
    crowd = Crowd(receiver, 1)
    eventually(lambda: queue.parked == 1)
    closing = threading.Thread(target=receiver.close, args=(30,))
    closing.start()
    crowd.join()
    queue.send("late")
    assert begun.wait(30)
    closing.join(0.2)
    assert closing.is_alive()
    may.set()
    closing.join(30)
    assert queue.stats().visible == 1


def test_close_interrupts_the_polls_and_the_queue_goes_on(queue: Counting) -> None:
    receiver = Receiver(queue, polls=3)
    crowd = Crowd(receiver, 50)
    eventually(lambda: queue.parked == 3)
    receiver.close(deadline=10)
    assert queue.parked == 0
    crowd.join()
    queue.send("for another")
    (message,) = queue.receive()
    assert (message.body, message.receive_count) == ("for another", 1)


def test_a_poll_that_is_on_its_way_when_the_receiver_closes_ends_too(queue: Counting) -> None:
    at_the_door, go_in = threading.Event(), threading.Event()

    class Slow(Wrapping):
        def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
            at_the_door.set()
            assert go_in.wait(10)
            return self.inner.receive(count_max, lease=lease, wait=wait)

    receiver = Receiver(Slow(queue))
    crowd = Crowd(receiver, 1)
    assert at_the_door.wait(10)
    receiver.close()
    crowd.join()
    go_in.set()
    receiver.close(deadline=10)
    assert queue.parked == 0


def test_close_of_the_queue_ends_the_poll(queue: Counting) -> None:
    queue.interruptible = False
    receiver = Receiver(queue)
    crowd = Crowd(receiver, 5)
    eventually(lambda: queue.parked == 1)
    receiver.close()
    queue.close()
    crowd.join()
    eventually(lambda: queue.parked == 0)


@pytest.mark.parametrize("moment", ["_rouse", "withdraw"])
def test_a_caller_who_is_interrupted_takes_nothing_along(
    queue: Counting, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with Receiver(queue, wait=5) as receiver:
        begin = getattr(receiver._polling, moment)

        def interrupted(*wish: Wish) -> None:
            monkeypatch.undo()
            begin(*wish)
            raise KeyboardInterrupt

        monkeypatch.setattr(receiver._polling, moment, interrupted)
        queue.send("for the next")
        with pytest.raises(KeyboardInterrupt):
            receiver.receive(30)
        message = receiver.receive(30)
        assert message is not None
        assert message.receive_count == 1


def test_what_came_for_a_caller_who_left_is_visible_again(queue: Counting) -> None:
    with Receiver(queue, grace=0.05, wait=5) as receiver:
        # The poll is asked for while somebody waits, and outlives him.
        waiting = threading.Thread(target=receiver.receive, args=(0.3,))
        waiting.start()
        eventually(lambda: queue.parked == 1)
        polling = receiver._polling
        with polling._changed:
            (wish,) = polling._exchange._waiting
            polling._exchange.withdraw(wish)
        queue.send("for nobody")
        waiting.join()
        eventually(lambda: queue.inner.stats().visible == 1)


@for_each(
    "values, named",
    [
        ({"polls": 0}, "polls"),
        ({"fetches": 0}, "fetches"),
        ({"wait": 0}, "wait"),
        ({"wait": 1e9}, "wait"),
        ({"lease": 1e9}, "lease"),
        ({"grace": 0}, "grace"),
        ({"backoff_max": -1}, "backoff_max"),
    ],
)
def test_parameters_that_cannot_work_are_refused(queue: Counting, values: dict[str, float], named: str) -> None:
    with pytest.raises(ParameterInvalid) as refused:
        Receiver(queue, **values)
    assert refused.value.parameter == named
    with pytest.raises(ParameterInvalid, match="timeout"):
        Receiver(queue).receive(-1)


class TestCoroutines:
    """The same promise in an event loop."""

    def test_two_hundred_hold_one_poll_and_share_a_thousand_messages(self, queue: Counting) -> None:
        got: list[str] = []

        async def work(receiver: AsyncReceiver) -> None:
            while (message := await receiver.receive()) is not None:
                got.append(message.body)

        async def main() -> None:
            async with AsyncReceiver(queue) as receiver:
                tasks = [asyncio.create_task(work(receiver)) for _ in range(200)]
                await until(lambda: receiver.waiting == 200 and queue.parked == 1)
                assert queue.receives == 1
                queue.send_batch([str(number) for number in range(1_000)])
                await until(lambda: len(got) >= 1_000 and receiver.waiting == 200)
            await asyncio.gather(*tasks)

        asyncio.run(main())
        assert sorted(got, key=int) == [str(number) for number in range(1_000)]
        assert queue.parked_max == 1

    def test_timeouts_and_looks(self, queue: Counting) -> None:
        async def main() -> None:
            async with AsyncReceiver(queue) as receiver:
                assert await receiver.receive(0.05) is None
                assert await receiver.receive(0) is None
                # The request of the first caller, for one message, is over.
                await until(lambda: queue.parked == 0)
                queue.send_batch(["1", "2"])
                assert [message.body for message in await receiver.receive_batch(5, 5)] == ["1", "2"]

        asyncio.run(main())
        assert queue.waits[False] == 1

    def test_a_cancelled_one_takes_nothing_along(self, queue: Counting) -> None:
        async def main() -> None:
            async with AsyncReceiver(queue) as receiver:
                cancelled = asyncio.create_task(receiver.receive())
                await until(lambda: queue.parked == 1)
                cancelled.cancel()
                await asyncio.wait([cancelled])
                assert cancelled.cancelled()
                queue.send("for the next")
                message = await receiver.receive(20)
                assert message is not None
                assert message.receive_count == 1

        asyncio.run(main())

    def test_what_came_for_a_cancelled_one_is_for_the_next(self, queue: Counting) -> None:
        async def main() -> None:
            async with AsyncReceiver(queue) as receiver:
                cancelled = asyncio.create_task(receiver.receive())
                await until(lambda: queue.parked == 1)
                queue.send("there")
                # It is his before the loop can say so; then he is cancelled.
                eventually(lambda: queue.inner.stats().in_flight == 1 and receiver.waiting == 0)
                cancelled.cancel()
                await asyncio.wait([cancelled])
                assert cancelled.cancelled()
                message = await receiver.receive(0.5)
                assert message is not None
                assert message.receive_count == 1

        asyncio.run(main())

    @pytest.mark.parametrize("closed", [True, False])
    def test_what_came_for_a_cancelled_one_goes_back_if_nobody_follows(self, queue: Counting, closed: bool) -> None:
        async def main() -> None:
            receiver = AsyncReceiver(queue, grace=0.05, lease=600)
            cancelled = asyncio.create_task(receiver.receive())
            await until(lambda: queue.parked == 1)
            queue.send("there")
            eventually(lambda: queue.inner.stats().in_flight == 1 and receiver.waiting == 0)
            if closed:
                receiver._polling.close(receiver._seat, 0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            await until(lambda: queue.inner.stats().visible == 1)
            await receiver.close()

        asyncio.run(main())

    def test_a_closed_loop_takes_no_message(self, queue: Counting) -> None:
        """Its coroutines wait for ever, first in line."""
        receiver = AsyncReceiver(queue, lease=600)
        loop = asyncio.new_event_loop()
        left = loop.create_task(receiver.receive())
        loop.run_until_complete(until(lambda: receiver.waiting))
        loop.close()

        async def main() -> None:
            waiting = asyncio.create_task(receiver.receive(30))
            await until(lambda: receiver.waiting == 2)
            queue.send("a")
            message = await waiting
            assert message is not None
            assert message.receive_count == 1
            await receiver.close()

        asyncio.run(main())
        assert not left.done()
        left._log_destroy_pending = False  # type: ignore[attr-defined] asyncio would log it

    def test_a_blocked_loop_stops_no_poll(self, queue: Counting) -> None:
        async def main() -> None:
            async with AsyncReceiver(queue) as receiver:
                waiting = asyncio.create_task(receiver.receive())
                await until(lambda: queue.parked == 1)
                queue.send("there")
                # The loop stands still; the message is fetched all the same.
                eventually(lambda: queue.inner.stats().in_flight == 1)
                message = await waiting
                assert message is not None

        asyncio.run(main())


def test_many_no_wait_callers_share_requests(queue: Counting) -> None:
    queue.send_batch([str(number) for number in range(40)])
    with Receiver(queue) as receiver, ThreadPoolExecutor(40) as pool:
        found = list(pool.map(lambda _: receiver.receive(0), range(80)))
    bodies = [message.body for message in found if message is not None]
    assert sorted(bodies, key=int) == [str(number) for number in range(40)]
