"""Each type goes to its queue, and one receive serves them all: fairly, and without idle polls."""

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.embedded import EmbeddedClient

from veilmq.client.errors import TransportError
from veilmq.client.messages import Extension, Message, Received, Recommended, Sent, Template
from veilmq.client.queue import HandleOnSend, Queue
from veilmq.client.routed import Route, RoutedQueue, queue_name, weakest
from veilmq.client.wrapping import Wrapping
from veilmq.model.commands import SuggestPlan
from veilmq.model.errors import MessageGone, ParameterInvalid, QueueExists, ReceiptInvalid
from veilmq.model.instant import SECOND_US
from veilmq.model.settings.queue import LeasePlan
from veilmq.testing.client_contract import for_each
from veilmq.testing.client_contract.stage import Text

SPLIT = [
    {"types": ["thumbnail"], "visibility_timeout": 30},
    {"types": ["film", "audio"], "visibility_timeout": 3600},
]


@pytest.fixture
def routed(embedded: EmbeddedClient) -> RoutedQueue:
    return RoutedQueue.create(embedded.account, "jobs", SPLIT, clock=embedded.clock)


def made(embedded: EmbeddedClient, *names: str) -> list[Queue]:
    for name in names:
        embedded.account.create(name)
    return [embedded.account.queue(name) for name in names]


class TestCreate:
    def test_a_queue_and_a_timeout_for_each_entry(self, embedded: EmbeddedClient, routed: RoutedQueue) -> None:
        names = embedded.account.names()
        assert len(names) == 3
        assert {"jobs", "jobs-thumbnail"} < set(names)
        assert routed.routes["film"] is routed.routes["audio"]
        timeouts = {kind: route.queue.stats().visibility_timeout for kind, route in routed.routes.items()}
        assert timeouts == {"thumbnail": 30, "film": 3600, "audio": 3600}
        assert routed.name == "jobs"

    def test_the_queues_of_a_fifo_queue_are_fifo(self, embedded: EmbeddedClient) -> None:
        tagged = Template(tags={Text("team"): Text("a")})
        queue = RoutedQueue.create(embedded.account, "orders.fifo", SPLIT, template=tagged)
        assert {route.queue.capabilities.native_fifo for route in queue.routes.values()} == {True}

    def test_the_next_split_finds_the_same_queues(self, embedded: EmbeddedClient, routed: RoutedQueue) -> None:
        routed.send(Message("x", type="film"))
        split = [{"types": ["audio", "film"], "visibility_timeout": 5000}]
        again = RoutedQueue.create(embedded.account, Text("jobs"), split)
        assert str(again.name) == "jobs"
        (message,) = again.receive()
        assert message.lease_end - embedded.clock.monotonic() == pytest.approx(5000, abs=60)
        assert again.receive(lease=1) == []
        assert len(embedded.account.names()) == 3

    def test_another_setting_that_differs_is_an_error(self, embedded: EmbeddedClient, routed: RoutedQueue) -> None:
        with pytest.raises(QueueExists, match="retention"):
            RoutedQueue.create(embedded.account, "jobs", SPLIT, template=Template(retention=777))

    @for_each(
        "split, parameter",
        [
            ([7], "split[0]"),
            ([{}], "split[0].types"),
            ([{"types": "film", "visibility_timeout": 1}], "split[0].types"),
            ([{"types": [], "visibility_timeout": 1}], "split[0].types"),
            ([{"types": ["a", "a"], "visibility_timeout": 1}], "split[0].types"),
            ([{"types": ["a"], "visibility_timeout": 0}], "split[0].visibility_timeout"),
            ([{"types": ["a"], "visibility_timeout": "30"}], "split[0].visibility_timeout"),
            ([{"types": ["a"], "visibility_timeout": 1}, {"types": ["b", "a"], "visibility_timeout": 2}],
             "split[1].types"),
        ],
    )  # fmt: skip
    def test_a_split_that_is_none_makes_nothing(self, embedded: EmbeddedClient, split: Any, parameter: str) -> None:
        with pytest.raises(ParameterInvalid) as caught:
            RoutedQueue.create(embedded.account, "jobs", split)
        assert caught.value.parameter == parameter
        assert embedded.account.names() == []

    @given(st.lists(st.text(min_size=1), min_size=1, unique=True), st.lists(st.text(min_size=1), min_size=1))
    def test_names(self, types: list[str], others: list[str]) -> None:
        name = queue_name("jobs", types)
        assert name == queue_name("jobs", types[::-1])
        assert len(name) <= 63
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert not name.endswith("-")
        if sorted(types) != sorted(others):
            assert name != queue_name("jobs", others)


class TestRouting:
    def test_each_to_its_own(self, embedded: EmbeddedClient, routed: RoutedQueue) -> None:
        kinds = ["thumbnail", "film", "audio", "unknown", None]
        answers = routed.send_batch([Message(str(kind), type=kind) for kind in kinds])
        routed.send("plain")
        assert all(isinstance(answer, Sent) for answer in answers)
        assert routed.routes["thumbnail"].queue.stats().visible == 1
        assert routed.routes["film"].queue.stats().visible == 2
        assert embedded.account.queue("jobs").stats().visible == 3
        assert routed.stats().visible == 6
        assert sorted(message.body for message in routed.peek(10)) == sorted([*map(str, kinds), "plain"])

    def test_by_something_else(self, embedded: EmbeddedClient) -> None:
        fast, slow = made(embedded, "fast", "slow")

        def size(message: Message) -> str:
            return "large" if len(message.body) > 10 else "small"

        queue = RoutedQueue({"large": slow}, fast, by=size)
        queue.send_batch(["x", "x" * 11])
        assert (fast.stats().visible, slow.stats().visible) == (1, 1)

    def test_what_was_learnt_of_each_queue_is_one_answer(self, embedded: EmbeddedClient) -> None:
        fast, slow = made(embedded, "fast", "slow")
        queue = RoutedQueue({"film": slow, "thumbnail": fast}, fast)
        assert queue.recommended() is None
        for name, plan in (
            ("fast", LeasePlan(lease_us=10 * SECOND_US, by_type={"x": 20 * SECOND_US}, why="a")),
            ("slow", LeasePlan(lease_us=900 * SECOND_US, by_type={}, why="b")),
        ):
            inner = embedded.account.queue(name)
            inner._one(SuggestPlan(queue=inner._key, origin=inner._origin, plan=plan))
        found = queue.recommended()
        assert found == Recommended(10, {"x": 20, "film": 900, "thumbnail": 10}, "a; b", applied=False)

    def test_handles_carry_the_route(self, embedded: EmbeddedClient, routed: RoutedQueue) -> None:
        routed.send_batch([Message(str(kind), type=kind) for kind in ("thumbnail", "film", "x", "y")])
        came = routed.receive(10)
        assert len(came) == 4
        elsewhere = RoutedQueue.create(embedded.account, "jobs", SPLIT)
        extended = elsewhere.extend_batch([*(Extension(each.handle, 60) for each in came), Extension("x:y", 60)])
        assert isinstance(extended[-1], ReceiptInvalid)
        elsewhere.release(elsewhere.extend(str(extended[0]), 90))
        done = elsewhere.delete_batch(["none", *map(str, extended[1:4])])
        assert isinstance(done[0], ReceiptInvalid)
        assert done[1:] == [None] * 3
        (last,) = elsewhere.receive(10)
        elsewhere.delete(last.handle)
        with pytest.raises(MessageGone):
            elsewhere.delete(last.handle)

    def test_the_handle_of_a_send(self, routed: RoutedQueue) -> None:
        sent = routed.send(Message("x", type="film", delay=60))
        assert sent.handle
        routed.delete(sent.handle)
        assert routed.stats().delayed == 0

    @for_each("handle", ["", "x", ":", "nobody:x", None, 7])
    def test_handles_of_others(self, routed: RoutedQueue, handle: Any) -> None:
        for call in (routed.delete, routed.release, lambda it: routed.extend(it, 30)):
            with pytest.raises(ReceiptInvalid):
                call(handle)

    def test_a_bad_message_of_a_batch(self, embedded: EmbeddedClient, routed: RoutedQueue) -> None:
        answers = routed.send_batch(["a", b"bytes", "b"])  # type: ignore[list-item]
        assert [type(answer) for answer in answers] == [Sent, ParameterInvalid, Sent]
        one, other = made(embedded, "one", "other")
        by_number = RoutedQueue({"1": one}, other, by=lambda message: str(int(message.body)))
        answers = by_number.send_batch(["1", "x", "2"])
        assert [type(answer) for answer in answers] == [Sent, ParameterInvalid, Sent]
        assert "by" in str(answers[1])
        assert "ValueError: invalid literal" in str(answers[1])
        of_lists = RoutedQueue({"1": one}, other, by=lambda message: [message.type])  # type: ignore
        with pytest.raises(ParameterInvalid, match="by: must return a message's type or None, not list"):
            of_lists.send("1")

    def test_a_queue_of_a_batch_that_is_gone(self, embedded: EmbeddedClient, routed: RoutedQueue) -> None:
        embedded.account.delete("jobs-thumbnail")
        answers = routed.send_batch(["a", Message("b", type="thumbnail")])
        assert [type(answer).__name__ for answer in answers] == ["Sent", "QueueMissing"]

    def test_two_queues_of_one_name(self, embedded: EmbeddedClient) -> None:
        one, other = made(embedded, "q", "q")
        with pytest.raises(ParameterInvalid, match="by: must be a function"):
            RoutedQueue({"a": one}, one, by="type")  # type: ignore[arg-type]
        with pytest.raises(ParameterInvalid, match=re.escape("routes['a']: must be a queue")):
            RoutedQueue({"a": "veil://127.0.0.1/q"}, one)  # type: ignore[dict-item]
        with pytest.raises(ParameterInvalid, match="default: must be a queue"):
            RoutedQueue({}, Route(embedded.account))  # type: ignore[arg-type]
        with pytest.raises(ParameterInvalid, match="twice"):
            RoutedQueue({"a": one}, other)
        with pytest.raises(ParameterInvalid, match="twice"):
            RoutedQueue({"a": Route(one, 5)}, Route(one, 6))

    def test_what_all_can_do(self, embedded: EmbeddedClient) -> None:
        (queue,) = made(embedded, "q")
        one = queue.capabilities
        other = msgspec.structs.replace(
            one, protocol="sqs", receive_messages_max=10, lease_total_max=43_200, receipts_rotate=True, peek=False,
            handle_on_send=HandleOnSend.DELAYED, base64_body=True, lease_min=1, release_min=1,
            attributes_max=9,
        )  # fmt: skip
        able = weakest([one, other])
        assert (able.protocol, able.receive_messages_max, able.lease_total_max) == ("embedded+sqs", 10, 43_200)
        assert (able.receipts_rotate, able.peek, able.base64_body, able.lease_min) == (True, False, True, 1)
        assert able.handle_on_send is HandleOnSend.DELAYED
        assert (able.release_min, able.attributes_max) == (1, 9)


class TestFairness:
    def test_one_at_a_time(self, embedded: EmbeddedClient) -> None:
        queues = made(embedded, "a", "b", "c")
        for queue, count in zip(queues, (300, 30, 30), strict=True):
            queue.send_batch([queue.name] * count)
        routed = RoutedQueue({"a": queues[0], "b": queues[1]}, queues[2])
        came = Counter(routed.receive()[0].body for _ in range(90))
        assert came == {"a": 30, "b": 30, "c": 30}

    @pytest.mark.parametrize("count", [2, 3, 10])
    def test_many_at_a_time(self, embedded: EmbeddedClient, count: int) -> None:
        queues = made(embedded, "a", "b", "c")
        for queue in queues:
            queue.send_batch([queue.name] * 300)
        routed = RoutedQueue({"a": queues[0], "b": queues[1]}, queues[2])
        came: Counter[str] = Counter()
        for _ in range(60):
            batch = routed.receive(count)
            assert len(batch) == count
            came.update(message.body for message in batch)
        assert max(came.values()) <= 1.1 * min(came.values())

    def test_a_share_of_each(self, embedded: EmbeddedClient) -> None:
        queues = made(embedded, "a", "b", "c")
        for queue in queues:
            queue.send_batch([queue.name] * 9)
        routed = RoutedQueue({"a": queues[0], "b": queues[1]}, queues[2])
        assert Counter(message.body for message in routed.receive(9)) == {"a": 3, "b": 3, "c": 3}

    def test_one_alone_fills_the_batch(self, embedded: EmbeddedClient) -> None:
        queues = made(embedded, "a", "b", "c")
        queues[1].send_batch(["b"] * 20)
        routed = RoutedQueue({"a": queues[0], "b": queues[1]}, queues[2])
        assert len(routed.receive(10)) == 10

    def test_a_queue_that_is_gone_does_not_lose_the_others_messages(self, embedded: EmbeddedClient) -> None:
        queues = made(embedded, "a", "b")
        queues[1].send_batch(["b"] * 5)
        embedded.account.delete("a")
        routed = RoutedQueue({"a": queues[0]}, queues[1])
        assert len(routed.receive(5)) == 5
        with pytest.raises(Exception, match="no queue a"):
            routed.receive(5)


class Counting(Wrapping):
    """Counts the polls that are parked, and all receives."""

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()
        self.parked = self.parked_max = self.calls = 0

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        with self.lock:
            self.calls += 1
            self.parked += wait > 0
            self.parked_max = max(self.parked_max, self.parked)
        try:
            return super().receive(count_max, lease=lease, wait=wait)
        finally:
            with self.lock:
                self.parked -= wait > 0


def parked(routed: RoutedQueue, polls: int) -> None:
    """Come back when that many polls are parked."""
    pause = threading.Event()
    while routed._parked.polls != polls:
        pause.wait(0.002)


class TestWaiting:
    @pytest.fixture
    def queues(self, embedded: EmbeddedClient) -> list[Counting]:
        return [Counting(queue) for queue in made(embedded, "a", "b", "c")]

    @pytest.fixture
    def routed(self, queues: list[Counting]) -> RoutedQueue:
        return RoutedQueue({"a": queues[0], "b": queues[1]}, queues[2])

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_whichever_it_comes_from(self, queues: list[Counting], routed: RoutedQueue, place: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(routed.receive, wait=60)
            parked(routed, 3)
            queues[place].send("x")
            (message,) = waiting.result(30)
        routed.delete(message.handle)
        assert queues[place].stats().in_flight == 0

    def test_threads_share_the_polls(self, queues: list[Counting], routed: RoutedQueue) -> None:
        with ThreadPoolExecutor(20) as pool:
            waiting = [pool.submit(routed.receive, wait=60) for _ in range(20)]
            parked(routed, 3)
            for number in range(20):
                queues[number % 3].send(str(number))
            came = [message.body for future in waiting for message in future.result(60)]
        assert sorted(came) == sorted(map(str, range(20)))
        assert max(queue.parked_max for queue in queues) == 1
        assert {queue.stats().visible for queue in queues} == {0}

    def test_what_comes_for_nobody_goes_back_at_once(self, queues: list[Counting], routed: RoutedQueue) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(routed.receive, lease=600, wait=60)
            parked(routed, 3)
            queues[0].send("first")
            assert waiting.result(30)[0].body == "first"
        # The polls of the other two stay parked for a slice.
        released = threading.Event()
        give_back = routed._parked._give_back

        def noted(message: Received) -> None:
            give_back(message)
            released.set()

        routed._parked._give_back = noted
        queues[1].send("second")
        assert released.wait(30)
        assert (queues[1].stats().in_flight, queues[1].stats().visible) == (0, 1)

    def test_what_comes_as_the_wait_ends_is_received(self, embedded: EmbeddedClient) -> None:
        class Late(Counting):
            """Returns a moment after its time."""

            def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
                if wait:
                    threading.Event().wait(wait + 0.05)
                    self.send("late")
                return super().receive(count_max, lease=lease, wait=0)

        late, other = made(embedded, "a", "b")
        (message,) = RoutedQueue({"a": Late(late)}, other).receive(wait=0.1)
        assert (message.body, message.receive_count) == ("late", 1)

    def test_a_poll_whose_thread_begins_late_takes_nothing(
        self, queues: list[Counting], routed: RoutedQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late: list[threading.Thread] = []

        def keep(thread: threading.Thread) -> None:
            late.append(thread)

        monkeypatch.setattr(threading.Thread, "start", keep)
        assert routed._parked.wait(None, 0.01, 1) == []
        monkeypatch.undo()
        queues[0].send("x")
        for thread in late:
            thread.start()
        for thread in late:
            thread.join(30)
        (message,) = queues[0].receive()
        assert message.receive_count == 1

    def test_the_others_are_let_go(self, queues: list[Counting], routed: RoutedQueue, embedded: EmbeddedClient) -> None:
        assert routed.receive(wait=0.05) == []
        for queue in queues:
            with queue.lock:
                assert queue.calls <= 4
        embedded.pass_time(10)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("poll ")]
        for thread in threads:
            thread.join(10)
        assert routed._parked.polls == 0

    def test_a_queue_that_answers_early_is_asked_slowly(self, embedded: EmbeddedClient) -> None:
        class Early(Counting):
            def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
                return super().receive(count_max, lease=lease, wait=0)

        queues = [Early(queue) for queue in made(embedded, "a", "b")]
        assert RoutedQueue({"a": queues[0]}, queues[1]).receive(wait=1) == []
        assert max(queue.calls for queue in queues) <= 6

    def test_an_error_of_one_is_told(self, embedded: EmbeddedClient, queues: list[Counting]) -> None:
        class Broken(Wrapping):
            def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
                if wait:
                    raise TransportError(reason="gone", may_have_happened=False)
                return []

        with pytest.raises(TransportError):
            RoutedQueue({"a": Broken(queues[0])}, queues[1]).receive(wait=20)

    def test_what_ends_a_poll_s_thread_is_raised_where_somebody_waits(
        self, embedded: EmbeddedClient, queues: list[Counting]
    ) -> None:
        class Exiting(Wrapping):
            def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
                if wait:
                    raise SystemExit
                return []

        routed = RoutedQueue({"a": Exiting(queues[0])}, queues[1])
        with pytest.raises(SystemExit):
            routed.receive(wait=20)
        assert routed._parked.polls <= 1, "its own poll is over"

    def test_closing_ends_a_wait(self, routed: RoutedQueue) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(routed.receive, wait=60)
            parked(routed, 3)
            routed.close()
            assert waiting.result(30) == []
