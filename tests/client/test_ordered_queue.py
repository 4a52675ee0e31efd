"""Strict order over queues that are not: numbers without gap or double, each message until it is acknowledged."""

import errno
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.client.ordered_stage import LOST, Failing, Memory, Place, bodies, drain
from tests.support.embedded import EmbeddedClient

from veilmq.client.adapters.embedded import EmbeddedQueue
from veilmq.client.errors import GapFound, QueueRecreated, StateInvalid, StorageHeld, TransportError
from veilmq.client.messages import Extension, Message, Received, Sent, Template
from veilmq.client.ordered import LocalFile, Ordered, OrderedQueue, OrderedReceiver, OrderedSender, _send_on, run
from veilmq.client.queue import Queue
from veilmq.client.unreadable import DeadLetters
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseTaken,
    MessageGone,
    ParameterInvalid,
    ReceiptInvalid,
    VeilError,
)
from veilmq.testing.client_contract import for_each
from veilmq.testing.client_contract.stage import MovableClock
from veilmq.testing.disordered import Disordered


@pytest.fixture
def place(embedded: EmbeddedClient, tmp_path: Path) -> Iterator[Place]:
    with closing(Place(embedded, tmp_path)) as place:
        yield place


# The document's run.


def test_a_plain_disordered_queue_shows_the_documents_run(place: Place) -> None:
    plain = Disordered(place.queue, window=1, seed=21, clock=place.clock)
    for body in bodies(10):
        plain.send(body)
    assert [plain.receive()[0].body for _ in range(10)] == ["1", "3", "2", "5", "4", "7", "6", "9", "8", "10"]


@pytest.mark.parametrize(("window", "marking"), [(1, "auto"), (2, "#num#"), (7, "body"), (7, "auto"), (50, "auto")])
def test_the_ordered_queue_restores_the_order(place: Place, window: int, marking: str) -> None:
    plain = Disordered(place.queue, window=window, seed=window, clock=place.clock)
    sender, receiver = place.sender(plain, marking=marking), place.receiver(plain, marking=marking)
    for body in bodies(10):
        sender.send(body)
    sender.send_batch(bodies(20, 11))
    assert drain(receiver) == bodies(30)
    assert place.queue.stats().visible == place.queue.stats().in_flight == 0


def test_disorder_is_bounded_and_loses_nothing(place: Place) -> None:
    plain = Disordered(place.queue, window=3, seed=5, clock=place.clock)
    plain.send_batch(bodies(200))
    came = [int(message.body) for _ in range(50) for message in plain.receive(4)]
    assert sorted(came) == list(range(1, 201))
    assert came != sorted(came)
    late = [place - number for place, number in enumerate(came, 1)]
    assert max(late) <= 3
    assert plain.receive() == []
    with pytest.raises(ParameterInvalid, match="window"):
        Disordered(place.queue, window=0)


def test_a_disordered_queue_closes_though_another_has_what_it_kept(place: Place) -> None:
    inner = place.embedded.account.queue("orders")
    plain = Disordered(inner, window=3, clock=MovableClock())  # behind the queue's
    plain.send_batch(bodies(4))
    plain.receive(lease=30)
    place.embedded.pass_time(31)
    assert len(place.queue.receive(10)) == 4
    plain.close()
    assert isinstance(inner, EmbeddedQueue)
    assert inner.closed


# Handing out.


def test_nothing_is_handed_out_before_the_one_before_is_acknowledged(place: Place) -> None:
    place.sender().send_batch(bodies(3))
    receiver = place.receiver()
    (first,) = receiver.receive(10)
    assert receiver.receive(10) == []
    receiver.delete(first.handle)
    (second,) = receiver.receive(10)
    assert second.body == "2"


def test_several_in_hand_come_in_order_and_may_be_acknowledged_in_any(place: Place) -> None:
    place.sender().send_batch(bodies(6))
    receiver = place.receiver(in_hand_max=3)
    one, two, three = receiver.receive(10)
    assert [message.body for message in (one, two, three)] == ["1", "2", "3"]
    receiver.delete(two.handle)
    assert receiver.next_number == 1
    (four,) = receiver.receive(10)
    receiver.close()
    again = place.receiver(in_hand_max=10)
    assert [message.body for message in again.receive(10)] == ["1", "3", "4", "5", "6"]
    with pytest.raises(ReceiptInvalid):
        again.delete("nonsense")
    with pytest.raises((LeaseTaken, MessageGone)):
        again.delete(four.handle + "9")


def test_a_released_message_blocks_until_its_delay_is_over(place: Place) -> None:
    place.sender().send_batch(bodies(2))
    receiver = place.receiver()
    (first,) = receiver.receive()
    receiver.release(first.handle, 30)
    assert receiver.receive() == []
    with pytest.raises(LeaseTaken):
        receiver.delete(first.handle)
    place.embedded.pass_time(30)
    (again,) = receiver.receive()
    assert (again.body, again.receive_count) == ("1", 2)
    receiver.delete(again.handle)
    with pytest.raises(MessageGone):
        receiver.delete(again.handle)
    assert drain(receiver) == ["2"]


def test_a_hand_out_with_a_lease_ends_unless_it_is_extended(place: Place) -> None:
    place.sender().send_batch(bodies(2))
    receiver = place.receiver()
    (first,) = receiver.receive(lease=10)
    place.embedded.pass_time(6)
    assert receiver.extend(first.handle, 10) == first.handle
    place.embedded.pass_time(6)
    assert receiver.receive(lease=10) == []
    place.embedded.pass_time(6)
    (again,) = receiver.receive(lease=10)
    assert again.body == "1"
    with pytest.raises(LeaseTaken):
        receiver.delete(first.handle)


def test_an_acknowledgement_comes_before_the_delete(place: Place) -> None:
    """A crash between the two: the message comes back, and its number tells that it was done."""

    class Undeletable(Wrapping):
        def delete(self, handle: str) -> None:
            raise LOST

    place.sender().send_batch(bodies(2))
    receiver = place.receiver(Undeletable(place.queue))
    (first,) = receiver.receive()
    receiver.delete(first.handle)
    receiver.close()
    assert place.queue.stats().visible == 2
    assert drain(place.receiver()) == ["2"]
    assert place.queue.stats().visible == 0


class FailsOnce(LocalFile):
    """A disk that is full for one save, when told."""

    full = False

    def save(self, state: bytes) -> None:
        full, self.full = self.full, False
        if full:
            raise OSError(errno.ENOSPC, "no space left")
        super().save(state)


def test_an_acknowledgement_that_cannot_be_saved_deletes_nothing(place: Place) -> None:
    place.sender().send_batch(bodies(2))
    storage = FailsOnce(place.directory / "receive")
    receiver = OrderedReceiver(place.queue, storage, clock=place.clock)
    place.open.append(receiver)
    (first,) = receiver.receive()
    storage.full = True
    with pytest.raises(OSError, match="no space left"):
        receiver.delete(first.handle)
    receiver.close()
    assert drain(place.receiver()) == ["1", "2"]


def test_a_crash_before_the_acknowledgement_loses_nothing(place: Place) -> None:
    """The sample of the document deletes before it hands out."""
    place.sender().send_batch(bodies(2))
    receiver = place.receiver()
    receiver.receive()
    receiver.close()
    assert drain(place.receiver()) == ["1", "2"]


def test_duplicates_are_dropped_by_their_number(place: Place) -> None:
    copies: list[Message] = []

    class Copying(Wrapping):
        def send(self, message: str | Message) -> Sent:
            assert isinstance(message, Message)
            copies.append(message)
            self.inner.send(message)
            return self.inner.send(message)

    sender = place.sender(Copying(place.queue))
    for body in bodies(5):
        sender.send(body)
    receiver = place.receiver()
    assert drain(receiver) == bodies(5)
    place.queue.send(copies[2])
    assert drain(receiver) == []
    stats = place.queue.stats()
    assert (stats.visible, stats.in_flight) == (0, 0)


def test_a_small_buffer_still_finds_the_next_one(place: Place) -> None:
    sent: list[Message] = []

    class Keeping(Wrapping):
        def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
            sent.extend(message for message in messages if isinstance(message, Message))
            return [Sent("x") for _ in messages]

    place.sender(Keeping(place.queue)).send_batch(bodies(30))
    place.queue.send_batch(sent[::-1])
    receiver = place.receiver(buffer_max=4)
    came: list[str] = []
    for _ in range(60):
        came += drain(receiver)
        assert receiver.buffered <= 4
        place.embedded.pass_time(1)
    assert came == bodies(30)


def test_what_a_dead_receiver_had_is_found_behind_all_that_waits(place: Place) -> None:
    """Its leases end, and what came back is handed out behind what waited: all of that passes by, many at a time."""

    class Counting(Wrapping):
        requests = received = 0

        def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
            came = self.inner.receive(count_max, lease=lease, wait=wait)
            self.received += len(came)
            return came

        def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
            self.requests += 1
            return self.inner.extend_batch(extensions)

        def release(self, handle: str, delay: float = 0, **options: object) -> None:
            self.requests += 1
            self.inner.release(handle, delay, **options)  # type: ignore[arg-type]

    place.sender().send_batch(bodies(500))
    assert len(place.queue.receive(10, lease=30)) == 10
    place.embedded.pass_time(30)
    queue = Counting(place.queue)
    receiver = place.receiver(queue, buffer_max=10)
    came: list[str] = []
    while len(came) < 100:
        came += drain(receiver)
        place.embedded.pass_time(1)
    assert came == bodies(500)[: len(came)]
    assert queue.requests < queue.received / 5, "not one for each message that is too far ahead"


def test_a_lost_lease_in_the_buffer_comes_again(place: Place) -> None:
    """Somebody else receives a buffered message (its lease could not be renewed in time) and gives it back."""
    sender = place.sender()
    sender.send_batch(bodies(3))
    held = place.queue.receive(lease=1000)[0]
    receiver = place.receiver(lease=10)
    assert receiver.receive() == []
    assert receiver.buffered == 2
    place.queue.release(held.handle)
    assert drain(receiver) == bodies(3)


def test_a_hand_out_whose_message_comes_again_ends_when_it_would_have(place: Place) -> None:
    """Nobody renewed the lease in the queue: the machine slept."""
    place.sender().send("1")
    receiver = place.receiver(in_hand_max=2)
    (first,) = receiver.receive(lease=1000)
    place.embedded.pass_time(100)
    assert receiver.receive() == []
    receiver.extend(first.handle, 1000)
    place.embedded.pass_time(999)
    assert receiver.receive() == []
    place.embedded.pass_time(2)
    (again,) = receiver.receive()
    assert again.body == "1"
    with pytest.raises(LeaseTaken):
        receiver.delete(first.handle)


def test_a_wait_without_end_for_a_place_in_hand(place: Place) -> None:
    sender, receiver = place.sender(), place.receiver(in_hand_max=1)
    sender.send("1")
    (first,) = receiver.receive()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.receive, wait=math.inf)
        try:
            time.sleep(0.1)  # it waits
            sender.send("2")
            receiver.delete(first.handle)
            assert [message.body for message in waiting.result(20)] == ["2"]
        finally:
            receiver.interrupt()


def test_receivers_in_threads_get_each_message_once(place: Place) -> None:
    place.sender().send_batch(bodies(30))
    receiver = place.receiver(in_hand_max=8)
    came: list[str] = []

    def work() -> None:
        while messages := receiver.receive(3, wait=0.3):
            for message in messages:
                came.append(message.body)
                receiver.delete(message.handle)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(came, key=int) == bodies(30)


def test_a_waiting_receive_gets_what_comes_and_ends_with_close(place: Place) -> None:
    sender, receiver = place.sender(), place.receiver()
    came: list[list[Received]] = []
    thread = threading.Thread(target=lambda: came.append(receiver.receive(wait=30)))
    thread.start()
    sender.send("1")
    thread.join(10)
    assert [message.body for message in came[0]] == ["1"]
    other = threading.Thread(target=lambda: came.append(receiver.receive(wait=0.2)))
    other.start()
    other.join(10)
    assert came[1] == []


# Gaps.


def with_a_gap(place: Place) -> None:
    """Numbers 1, 2, 4, 5: the third one is gone."""
    place.sender().send_batch(bodies(5))
    taken = place.queue.receive(5)
    place.queue.delete(taken[2].handle)
    for message in taken[:2] + taken[3:]:
        place.queue.release(message.handle)


def test_a_gap_is_waited_for_and_told_once(place: Place) -> None:
    told: list[GapFound] = []
    with_a_gap(place)
    # So long that no keeper has to be as quick as the clock.
    receiver = place.receiver(gap_timeout=60, tell_gap=told.append, lease=600)
    assert drain(receiver) == ["1", "2"]
    for _ in range(5):
        place.embedded.pass_time(25)
        assert drain(receiver) == []
    assert [(gap.first, gap.last) for gap in told] == [(3, 3)]
    assert told[0].waited >= 60


def test_a_gap_raises_after_each_timeout(place: Place) -> None:
    with_a_gap(place)
    receiver = place.receiver(gap_timeout=60, on_gap="raise")
    assert drain(receiver) == ["1", "2"]
    for _ in range(2):
        assert receiver.receive() == []
        place.embedded.pass_time(61)
        with pytest.raises(GapFound) as caught:
            receiver.receive()
        assert (caught.value.first, caught.value.last) == (3, 3)
    no_end = GapFound(queue="jobs", epoch=1, first=5, last=4, waited=60.0)
    assert str(no_end) == "queue jobs: the end of epoch 1, after number 4, did not come within 60.0 s"


def test_a_loop_ends_when_its_receiver_is_closed(place: Place) -> None:
    done, handled = threading.Event(), []

    class Telling(Wrapping):
        def delete(self, handle: str) -> None:
            super().delete(handle)
            done.set()

    place.sender().send("1")
    receiver = place.receiver(Telling(place.queue))
    loop = threading.Thread(target=lambda: handled.append(run(receiver, lambda message: None)), daemon=True)
    loop.start()
    assert done.wait(10)
    receiver.close()
    loop.join(10)
    assert not loop.is_alive()
    assert handled == [1]


def test_nothing_is_handed_out_after_the_close(place: Place) -> None:
    sender = place.sender()
    for number in range(3):
        sender.send(str(number))
    receiver = place.receiver()
    (first,) = receiver.receive()
    receiver.release(first.handle)
    assert receiver.buffered
    receiver.close()
    with pytest.raises(TransportError, match="is closed"):
        receiver.receive()


def test_a_gap_that_closes_while_it_is_told_is_not_skipped(place: Place) -> None:
    came: list[Ordered] = []

    def tell(found: GapFound) -> None:
        place.queue.release(missing.handle)
        came.extend(receiver.receive())

    place.sender().send_batch(bodies(3))
    (missing,) = place.queue.receive(lease=1000)
    receiver = place.receiver(gap_timeout=60, on_gap="skip", tell_gap=tell)
    assert receiver.receive() == []
    place.embedded.pass_time(61)
    assert receiver.receive() == []
    assert [message.body for message in came] == ["1"]
    assert receiver.next_number == 1
    receiver.delete(came[0].handle)
    assert drain(receiver) == ["2", "3"]


def test_a_gap_is_skipped_and_what_comes_late_goes_to_the_dead_letters(place: Place) -> None:
    copies: list[Message] = []

    class Copying(Wrapping):
        def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
            copies.extend(message for message in messages if isinstance(message, Message))
            return self.inner.send_batch(messages)

    place.queue = Copying(place.queue)
    with_a_gap(place)
    place.embedded.account.create("dead")
    dead = place.embedded.account.queue("dead")
    receiver = place.receiver(gap_timeout=60, on_gap="skip", unreadable=DeadLetters(dead))
    assert drain(receiver) == ["1", "2"]
    place.embedded.pass_time(61)
    assert drain(receiver) == ["4", "5"]
    place.queue.send(copies[2])
    assert drain(receiver) == []
    receiver.close()
    place.queue.send(copies[2])
    assert drain(place.receiver(unreadable=DeadLetters(dead))) == []
    assert [message.body for message in dead.receive(10)] == ["3", "3"]
    place.queue.send(copies[3])
    assert drain(place.open[-1]) == []
    assert dead.receive(10) == []


@for_each(
    "options, parameter",
    [
        ({"gap_timeout": 5 * 86_400}, "gap_timeout"),
        ({"gap_timeout": 30, "on_gap": "skip", "lease": 30}, "gap_timeout"),
        ({"gap_timeout": None, "on_gap": "raise"}, "gap_timeout"),
        ({"gap_timeout": -1}, "gap_timeout"),
        ({"on_gap": "guess"}, "on_gap"),
        ({"in_hand_max": 0}, "in_hand_max"),
        ({"in_hand_max": 9, "buffer_max": 8}, "in_hand_max"),
        ({"marking": "#x#"}, "marking"),
        ({"lease": 0}, "lease"),
    ],
)
def test_what_cannot_work_is_refused(place: Place, options: dict[str, object], parameter: str) -> None:
    with pytest.raises(ParameterInvalid) as caught:
        place.receiver(**options)
    assert parameter in (caught.value.parameter, "lease")
    place.receiver().close()


# Messages without a number, epochs, other queues.


def test_unmarked_messages_go_to_the_dead_letters_and_block_nobody(place: Place) -> None:
    place.embedded.account.create("dead")
    dead = place.embedded.account.queue("dead")
    place.queue.send("nobody's")
    place.sender().send_batch(bodies(2))
    place.queue.send(Message("forged", attributes={"veilmq.order": "1.0"}))
    receiver = place.receiver(unreadable=DeadLetters(dead))
    assert drain(receiver) == ["1", "2"]
    assert {message.body for message in dead.receive(10)} == {"nobody's", "forged"}
    assert place.queue.stats().visible == place.queue.stats().in_flight == 0


def test_unmarked_messages_go_to_a_handler(place: Place) -> None:
    seen: list[str] = []

    def handler(queue: Queue, message: Received, error: VeilError) -> None:
        seen.append(message.body)
        queue.delete(message.handle)

    place.queue.send("nobody's")
    place.sender().send("1")
    assert drain(place.receiver(unreadable=handler)) == ["1"]
    assert seen == ["nobody's"]


def test_the_documents_form_is_read_and_written(place: Place) -> None:
    place.sender(marking="#num#").send("hello #2#")
    assert [message.body for message in place.queue.peek()] == ["#1#hello #2#"]
    place.queue.send("#3#three")
    place.queue.send("#2##5#two")
    assert drain(place.receiver(marking="#num#")) == ["hello #2#", "#5#two", "three"]


def test_a_new_epoch_follows_the_old_one(place: Place) -> None:
    sender = place.sender()
    sender.send_batch(bodies(2))
    old = sender.epoch
    sender.reset()
    assert sender.epoch > old
    sender.send("new")
    receiver = place.receiver(gap_timeout=60, on_gap="skip")
    assert drain(receiver) == ["1", "2"]
    place.embedded.pass_time(61)
    assert drain(receiver) == ["new"]


def test_a_new_epoch_is_greater_though_the_wall_clock_stood_still(place: Place) -> None:
    class Still(MovableClock):
        def wall(self) -> float:
            return 1_700_000_000.0

    with OrderedSender(place.queue, LocalFile(place.directory / "send"), clock=Still()) as sender:
        before = sender.epoch
        sender.reset()
        assert sender.epoch > before


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_queue_created_anew_is_told(place: Place, side: str) -> None:
    opened: Callable[..., OrderedSender | OrderedReceiver] = getattr(place, side)
    opened().close()
    place.embedded.account.delete("orders")
    place.embedded.account.create("orders")
    place.queue = place.embedded.account.queue("orders")
    with pytest.raises(QueueRecreated):
        opened()
    opened(reset=True).close()
    opened()


def test_a_queue_created_anew_is_told_while_it_is_in_use(place: Place) -> None:
    sender = place.sender()
    sender.send("1")
    place.embedded.account.delete("orders")
    place.embedded.account.create("orders")
    place.embedded.pass_time(61)
    for _ in range(2):  # a caller who tries again is told again
        with pytest.raises(QueueRecreated):
            sender.send("2")
    sender.reset()
    sender.send("1")


def test_a_storage_of_another_queue_or_side_is_told(place: Place) -> None:
    place.sender().close()
    place.embedded.account.create("other")
    other = place.embedded.account.queue("other")
    with pytest.raises(StateInvalid, match="orders"):
        OrderedSender(other, LocalFile(place.directory / "send"))
    with pytest.raises(StateInvalid):
        OrderedReceiver(place.queue, LocalFile(place.directory / "send"))
    (place.directory / "send").write_bytes(b'{"queue":"\xff"}')
    with pytest.raises(StateInvalid):
        place.sender()


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_second_one_is_refused(place: Place, side: str) -> None:
    opened: Callable[..., OrderedSender | OrderedReceiver] = getattr(place, side)
    first = opened()
    with pytest.raises(StorageHeld, match=r"pid \d+, perhaps this process: each sender and each receiver needs"):
        opened()
    first.close()
    opened()


# Handlers.


def test_a_failing_handler_blocks(place: Place) -> None:
    place.sender().send_batch(bodies(3))
    tries: list[str] = []

    def handler(message: Ordered) -> None:
        tries.append(message.body)
        if len(tries) in (2, 3):
            raise RuntimeError("not today")

    receiver = place.receiver()
    assert run(receiver, handler, idle=-1) == 0
    assert run(receiver, handler, retry_delay=0, idle=0.01) == 3
    assert tries == ["1", "2", "2", "2", "3"]


def test_a_failing_handler_dead_letters_and_goes_on(place: Place) -> None:
    place.embedded.account.create("dead")
    dead = place.embedded.account.queue("dead")
    place.sender().send_batch(bodies(3))

    def handler(message: Ordered) -> None:
        if message.body == "2":
            raise RuntimeError("never")

    assert run(place.receiver(), handler, on_failure="dead-letter", dead_letters=dead, idle=0.01) == 3
    assert [message.body for message in dead.receive(10)] == ["2"]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1, "x"])
def test_a_hand_out_is_changed_by_a_duration_alone(place: Place, seconds: Any) -> None:
    place.sender().send("1")
    receiver = place.receiver()
    (message,) = receiver.receive(lease=10)
    for change in (receiver.extend, receiver.release):
        with pytest.raises(ParameterInvalid):
            change(message.handle, seconds)
    place.embedded.pass_time(11)
    assert [each.body for each in receiver.receive()] == ["1"]


def test_what_is_no_handle_is_that_entry_s_error(place: Place) -> None:
    place.sender().send("1")
    queue = OrderedQueue(place.queue, receive_storage=LocalFile(place.directory / "receive"), clock=place.clock)
    (message,) = queue.receive()
    for handle in (7, f"1.{'9' * 5_000}.1"):
        with pytest.raises(ReceiptInvalid):
            queue.delete(handle)  # type: ignore[arg-type]
    results = queue.extend_batch(["x", Extension(message.handle, 10)])  # type: ignore[list-item]
    assert [type(each) for each in results] == [ParameterInvalid, str]
    queue.close()


def test_an_empty_body_goes_on_to_a_queue_that_takes_none(place: Place) -> None:
    place.embedded.account.create("dead")
    dead = place.embedded.account.queue("dead")
    place.sender().send("1")
    (message,) = place.receiver().receive()
    _send_on(dead, msgspec.structs.replace(message, body=""))
    assert [message.body for message in dead.receive(10)] == ["(empty)"]


def test_a_failing_handler_raises(place: Place) -> None:
    place.sender().send_batch(bodies(3))
    receiver = place.receiver()

    def handler(message: Ordered) -> None:
        raise RuntimeError("never")

    with pytest.raises(RuntimeError):
        run(receiver, handler, on_failure="raise", idle=0.01)
    assert drain(receiver) == bodies(3)
    with pytest.raises(ParameterInvalid, match="dead_letters"):
        run(receiver, handler, on_failure="dead-letter")
    with pytest.raises(ParameterInvalid, match="on_failure"):
        run(receiver, handler, on_failure="shrug")


def test_a_loop_that_was_ended_by_an_error_goes_on_when_it_is_run_again(place: Place) -> None:
    """Whatever raised: the dead letters, the storage, a Ctrl-C in the handler."""
    place.embedded.account.create("dead.fifo")
    dead = Failing(place.embedded.account.queue("dead.fifo"))
    dead.plan = [(TransportError(reason="refused", may_have_happened=False), False)]
    place.sender().send_batch(bodies(4))
    storage = FailsOnce(place.directory / "other")
    receiver = OrderedReceiver(place.queue, storage, clock=place.clock)
    place.open.append(receiver)
    done: list[str] = []

    def handler(message: Ordered) -> None:
        done.append(message.body)
        if message.body == "1":
            raise RuntimeError("never")
        if done == ["1", "1", "2"]:
            raise KeyboardInterrupt
        storage.full = done == ["1", "1", "2", "2"]

    for error in (TransportError, KeyboardInterrupt, OSError):
        with pytest.raises(error):
            run(receiver, handler, on_failure="dead-letter", dead_letters=dead, idle=0.01)
    assert run(receiver, handler, on_failure="dead-letter", dead_letters=dead, idle=0.01) == 3
    assert [message.body for message in dead.receive(10)] == ["1"]
    assert done == ["1", "1", "2", "2", "2", "3", "4"]


# Attributes, which the sender's storage keeps until they are sent.


def test_attributes_are_sent_as_they_were_given(place: Place) -> None:
    given = {
        "price": Decimal("0.12345678901234567890123456789"),
        "big": 10**37 + 1,
        "raw": bytearray(b"\0\xff"),
        "f": 0.1,
    }
    place.sender().send(Message("x", given))
    (message,) = place.receiver().receive()
    assert {name: message.attributes[name] for name in given} == given


def test_an_attribute_that_no_queue_can_carry_costs_no_number(place: Place) -> None:
    sender = place.sender()
    results = sender.send_batch([Message("1"), Message("no", {"on": True}), Message("2")])
    assert [type(each) for each in results] == [Sent, ParameterInvalid, Sent]
    assert sender.next_number == 3
    assert drain(place.receiver()) == ["1", "2"]


# As a queue.


def test_it_is_a_queue(place: Place) -> None:
    queue = OrderedQueue(
        Disordered(place.queue, window=2, seed=1, clock=place.clock),
        send_storage=Memory(), receive_storage=Memory(), clock=place.clock,
    )  # fmt: skip
    queue.send("1")
    assert all(isinstance(each, Sent) and each.handle is None for each in queue.send_batch(["2", Message("3")]))
    assert [(message.body, dict(message.attributes)) for message in queue.peek()] == [("1", {})]
    (first,) = queue.receive()
    assert queue.extend(first.handle, 5) == first.handle
    assert queue.delete_batch([first.handle, first.handle]) == [None, None]
    (second,) = queue.receive()
    queue.release(second.handle)
    assert drain(queue) == ["2", "3"]
    queue.send("4")
    handled: list[Ordered] = []
    assert run(Wrapping(Wrapping(queue)), handled.append, idle=0.01) == 1
    assert [message.number for message in handled] == [4]
    queue.close()


def test_an_option_of_a_side_that_is_not_there_is_refused(place: Place) -> None:
    with pytest.raises(ParameterInvalid, match="gap_timeout"):
        OrderedQueue(place.queue, send_storage=Memory(), gap_timeout=60)


def test_a_side_without_a_storage_is_missing(place: Place) -> None:
    queue = OrderedQueue(place.queue)
    with pytest.raises(CapabilityMissing):
        queue.send("1")
    with pytest.raises(CapabilityMissing):
        queue.receive()
    queue.close()


def test_a_message_that_expires_is_refused_where_the_queue_is_asked(place: Place) -> None:
    assert not OrderedQueue(place.queue).capabilities.ttl
    place.embedded.account.create("short", Template(retention=120))
    short = place.embedded.account.queue("short")
    with pytest.raises(ParameterInvalid, match="retention"):
        OrderedReceiver(short, Memory())


# Native FIFO.


@pytest.fixture
def fifo(place: Place) -> Place:
    place.embedded.account.create("orders.fifo")
    place.queue = place.embedded.account.queue("orders.fifo")
    return place


def test_a_fifo_queue_keeps_the_order_itself(fifo: Place) -> None:
    sender = fifo.sender()
    sender.send_batch(bodies(25))
    peeked = fifo.queue.peek(1)[0]
    assert peeked.group == "veilmq.ordered"
    with fifo.receiver() as receiver:
        came = []
        for _ in range(7):
            (message,) = receiver.receive()
            came.append(message.body)
            receiver.delete(message.handle)
    came += drain(fifo.receiver())
    assert came == bodies(25)


def test_a_fifo_queue_absorbs_the_second_copy_of_a_number(fifo: Place) -> None:
    queue = Failing(fifo.queue)
    queue.plan = [(LOST, True)]
    sender = fifo.sender(queue)
    with pytest.raises(TransportError):
        sender.send("1")
    assert sender.send("1").duplicate
    sender.send("1")
    assert fifo.queue.stats().visible == 2
    assert drain(fifo.receiver()) == ["1", "1"]


def test_a_fifo_group_is_let_go_when_a_lease_in_its_midst_is_lost(fifo: Place) -> None:
    """While the later ones are held, the queue gives nobody the one before them."""
    fifo.sender().send_batch(bodies(6))
    receiver = fifo.receiver()
    (first,) = receiver.receive()
    place, entry = sorted(receiver._reorder.held.items(), key=lambda item: item[0])[1]
    fifo.queue.release(entry.lease.handle)
    receiver._intake._forget(place, entry)
    receiver.delete(first.handle)
    assert drain(receiver) == bodies(5, 2)


def test_a_message_that_is_gone_from_a_fifo_group_is_a_gap(fifo: Place) -> None:
    fifo.sender().send_batch(bodies(4))
    taken = fifo.queue.receive(4)
    fifo.queue.delete(taken[1].handle)
    for message in taken[:1] + taken[2:]:
        fifo.queue.release(message.handle)
    receiver = fifo.receiver(gap_timeout=60, on_gap="skip")
    assert drain(receiver) == ["1"]
    fifo.embedded.pass_time(61)
    assert drain(receiver) == ["3", "4"]
