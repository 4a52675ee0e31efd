"""Statements of the source documents that no other test holds alone: their own numbers, hours passing at once.

docs/from-the-documents.md names the test of each statement.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.documents import CloudQueue, Manager, MNSClient, QueueMeta, RawTopicMessage, TopicMeta
from veilmq.client.keeper import LeaseKeeper, State
from veilmq.client.messages import Message, Received, Template
from veilmq.client.ordered import LocalFile, OrderedReceiver, OrderedSender
from veilmq.client.queue import Queue
from veilmq.client.routed import RoutedQueue
from veilmq.client.timeouts import ThresholdTimeout
from veilmq.model.errors import LeaseError

ROOT = Path(__file__).parents[2]
MINUTE, HOUR = 60.0, 3_600.0


def made(client: EmbeddedClient, name: str, **settings: float) -> Queue:
    client.account.create(name, Template(**settings))  # type: ignore[arg-type]
    return client.account.queue(name)


def pass_kept(client: EmbeddedClient, manager: Manager, seconds: float, step: float = 15) -> None:
    """Time passes, and the manager's timer with it."""
    while seconds > 0:
        client.pass_time(min(step, seconds))
        manager.keeper.extend_due()
        seconds -= step


class TestLongOrShort:
    """000, 001, 002: "Problem", "Objective", with the documents' numbers."""

    def test_a_crash_after_the_work_costs_the_whole_long_timeout(self, embedded: EmbeddedClient) -> None:
        queue = made(embedded, "jobs", visibility_timeout=6 * HOUR)
        queue.send("M1")
        assert len(queue.receive()) == 1  # worked on; the worker dies before its delete
        embedded.pass_time(6 * HOUR - 1)
        assert queue.receive() == []
        embedded.pass_time(1)
        assert [message.body for message in queue.receive()] == ["M1"]

    def test_with_a_short_timeout_another_worker_has_it_within_five_minutes(self, embedded: EmbeddedClient) -> None:
        queue = made(embedded, "jobs", visibility_timeout=5 * MINUTE)
        queue.send("M1")
        manager = Manager(queue, clock=embedded.clock)
        message = CloudQueue(queue).popMessage()
        assert message is not None
        manager.RegisterMessage(message)
        pass_kept(embedded, manager, 20 * MINUTE)
        manager.keeper.close(release=False)  # the crash
        embedded.pass_time(5 * MINUTE)
        assert [again.body for again in queue.receive()] == ["M1"]

    def test_work_of_an_hour_does_not_time_out(self, embedded: EmbeddedClient) -> None:
        queue = made(embedded, "jobs", visibility_timeout=5 * MINUTE)
        queue.send("M1")
        with Manager(queue, clock=embedded.clock) as manager:
            message = CloudQueue(queue).popMessage()
            assert message is not None
            manager.RegisterMessage(message)
            for _ in range(60):
                pass_kept(embedded, manager, MINUTE)
                assert queue.receive() == []
            manager.DeleteMessage(message)
        embedded.pass_time(HOUR)
        assert queue.stats().visible == 0

    def test_a_stuck_workers_message_is_let_go_after_five_hours(self, embedded: EmbeddedClient) -> None:
        queue = made(embedded, "jobs", visibility_timeout=5 * MINUTE)
        queue.send("M1")
        with Manager(queue, clock=embedded.clock) as manager:
            message = CloudQueue(queue).popMessage()
            assert message is not None
            lease = manager.RegisterMessage(message)
            pass_kept(embedded, manager, 5 * HOUR - MINUTE)
            assert (lease.state, queue.receive()) == (State.HELD, [])
            pass_kept(embedded, manager, 2 * MINUTE)
            assert lease.state is State.LOST
            assert [again.body for again in queue.receive()] == ["M1"]

    def test_each_change_sets_the_queues_own_timeout(self, embedded: EmbeddedClient) -> None:
        queue = made(embedded, "jobs", visibility_timeout=5 * MINUTE)
        queue.send("M1")
        with Manager(queue, clock=embedded.clock) as manager:
            message = CloudQueue(queue).popMessage()
            assert message is not None
            lease = manager.RegisterMessage(message)
            embedded.pass_time(5 * MINUTE - 20)
            manager.keeper.extend_due()
            assert lease.remaining() == pytest.approx(5 * MINUTE, abs=5)

    def test_the_first_look_is_at_the_registration(self, embedded: EmbeddedClient) -> None:
        queue = made(embedded, "jobs", visibility_timeout=12)
        queue.send("M1")
        with Manager(queue, 5, 10, 60, clock=embedded.clock) as manager:
            message = CloudQueue(queue).popMessage()  # 12 s are left: less than interval and minimal life together
            assert message is not None
            lease = manager.RegisterMessage(message)
            manager.keeper.extend_due()
            assert lease.remaining() == pytest.approx(60, abs=5)


class TestTradeOff:
    """003 and 004: too large, too small, and what to do about it."""

    def test_a_crash_after_ten_of_thirty_minutes_costs_twenty_more(self, embedded: EmbeddedClient) -> None:
        queue = made(embedded, "jobs", visibility_timeout=30 * MINUTE)
        queue.send("M1")
        queue.receive()
        embedded.pass_time(10 * MINUTE)  # here the application crashes
        embedded.pass_time(20 * MINUTE - 1)
        assert queue.receive() == []
        embedded.pass_time(1)
        assert len(queue.receive()) == 1

    def test_a_timeout_that_is_too_small_gives_the_work_to_two_and_refuses_the_firsts_delete(
        self, embedded: EmbeddedClient
    ) -> None:
        queue = made(embedded, "jobs", visibility_timeout=MINUTE)
        queue.send("M1")
        (first,) = queue.receive()
        embedded.pass_time(MINUTE)
        (second,) = queue.receive()
        assert (second.body, second.receive_count) == ("M1", 2)
        with pytest.raises(LeaseError):
            queue.delete(first.handle)
        queue.delete(second.handle)

    def test_a_timeout_for_each_queue_of_a_type(self, embedded: EmbeddedClient) -> None:
        split = [
            {"types": ["thumbnail"], "visibility_timeout": 30},
            {"types": ["film"], "visibility_timeout": 600},
        ]
        queue = RoutedQueue.create(embedded.account, "jobs", split, clock=embedded.clock)
        for kind in ("thumbnail", "film"):
            queue.send(Message(kind, type=kind))
        assert len(queue.receive(2)) == 2
        embedded.pass_time(31)
        assert [message.body for message in queue.receive(2)] == ["thumbnail"]

    def test_the_senders_are_told_the_new_timeout(self, embedded: EmbeddedClient) -> None:
        """Worker roles count deletes that fail; past the threshold the web roles send with a longer timeout."""
        # On a FIFO queue a lease that has ended is over; on others the keeper would take it up again.
        queue = made(embedded, "jobs.fifo", visibility_timeout=30, fifo=True)
        told = made(embedded, "timeouts")
        rule = ThresholdTimeout(30, failures=2, tell=lambda seconds: told.send(f"{seconds:g}"), clock=embedded.clock)
        with LeaseKeeper(queue, plan=rule, clock=embedded.clock) as keeper:
            for number in range(2):
                queue.send(Message("slow work", group="g", deduplication_id=f"{number}"))
                lease = keeper.register(queue.receive(lease=30)[0])
                embedded.pass_time(31)
                (again,) = queue.receive()
                with pytest.raises(LeaseError):
                    lease.delete()
                queue.delete(again.handle)
        (news,) = told.receive()
        queue.send(Message("slow work", group="g", deduplication_id="2", lease_hint=float(news.body)))
        assert len(queue.receive()) == 1
        embedded.pass_time(59)
        assert queue.receive() == []
        embedded.pass_time(1)
        assert len(queue.receive()) == 1

    def test_a_timeout_at_its_longest_is_not_told_again(self) -> None:
        told: list[float] = []
        rule = ThresholdTimeout(30, failures=1, longest=60, tell=told.append)
        for _ in range(3):
            rule.lost(Received("1", "work", handle="handle", lease_end=0), 31)
        assert told == [60]

    def test_one_message_is_shortened_and_one_extended_without_the_queues_timeout(
        self, embedded: EmbeddedClient
    ) -> None:
        queue = made(embedded, "jobs", visibility_timeout=MINUTE)
        queue.send_batch(["shorter", "longer", "as it is"])
        handles = {message.body: message.handle for message in queue.receive(3)}
        queue.extend(handles["shorter"], 10)
        queue.extend(handles["longer"], 2 * MINUTE)
        assert queue.stats().visibility_timeout == MINUTE
        embedded.pass_time(10)
        assert [message.body for message in queue.receive(3)] == ["shorter"]
        embedded.pass_time(50)
        assert {message.body for message in queue.receive(3)} == {"as it is"}
        embedded.pass_time(MINUTE)
        assert "longer" in {message.body for message in queue.receive(3)}


class TestOrderedGuard:
    """002, strict order: "a background thread sees to it that what was received is not consumed twice"."""

    def test_what_waits_for_its_turn_is_received_by_nobody_else(self, embedded: EmbeddedClient, tmp_path: Path) -> None:
        queue = made(embedded, "orders")
        with OrderedSender(queue, LocalFile(tmp_path / "send"), clock=embedded.clock) as sender:
            for body in ("1", "2"):
                sender.send(body)
        (first,) = queue.receive(lease=10 * MINUTE)  # a consumer that died: 2 waits for 1 in the buffer
        assert first.body == "1"
        with OrderedReceiver(
            queue, LocalFile(tmp_path / "receive"), gap_timeout=None, clock=embedded.clock
        ) as receiver:
            assert receiver.receive() == []
            assert receiver.buffered == 1
            for _ in range(60):
                assert queue.receive() == []
                embedded.pass_time(10)
                receiver._keeper.extend_due()
            bodies = []
            while found := receiver.receive():
                bodies.append((found[0].body, found[0].receive_count))
                receiver.delete(found[0].handle)
        assert bodies == [("1", 2), ("2", 1)]


class TestBroadcast:
    """002, pull topics."""

    def test_each_consumer_pulls_its_own_copy_when_it_likes(self, embedded: EmbeddedClient, tmp_path: Path) -> None:
        client = MNSClient(embedded.account, f"file://{tmp_path}/topics")
        meta, template = TopicMeta(), QueueMeta()
        meta.setTopicName("news")
        names = ["consumer001", "consumer002"]
        topic = client.createPullTopic(meta, names, True, template)
        topic.publishMessage(RawTopicMessage("hello"))
        early = client.getQueueRef("consumer001").popMessage()
        assert early is not None
        client.getQueueRef("consumer001").deleteMessage(early.getReceiptHandle())
        embedded.pass_time(HOUR)
        late = client.getQueueRef("consumer002").popMessage()
        assert late is not None
        assert late.getMessageBodyAsRawString() == "hello"


@pytest.mark.slow
def test_what_encryption_costs_can_be_measured_as_the_page_has_it() -> None:
    """002: "encryption has some influence on performance"; each row of the page is one of the script."""
    done = subprocess.run(
        [sys.executable, ROOT / "bench/encryption.py", "--rounds", "1"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    row = re.compile(r"^\| (A\d\S+) \| (\d+ KiB) \| (\d+) us \| (\d+) us \|", re.MULTILINE)
    measured = {found[:2] for found in row.findall(done.stdout) if int(found[2]) > 0 and int(found[3]) > 0}
    page = {found[:2] for found in row.findall((ROOT / "docs/patterns/encrypted-queue.md").read_text())}
    assert page
    assert page <= measured
