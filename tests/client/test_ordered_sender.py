"""The sender of an ordered queue: numbers without gap or double, whatever a send raises."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.client.ordered_stage import LOST, UNREACHED, Failing, Memory, Place, bodies, drain
from tests.support.embedded import EmbeddedClient

from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Message, Sent
from veilmq.client.ordered import Ordered, OrderedSender
from veilmq.client.queue import Capabilities
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import MessageTooLarge, ParameterInvalid, VeilError


@pytest.fixture
def place(embedded: EmbeddedClient, tmp_path: Path) -> Iterator[Place]:
    with closing(Place(embedded, tmp_path)) as place:
        yield place


def test_numbers_go_on_after_a_restart(place: Place) -> None:
    with place.sender() as sender:
        sender.send("1")
        epoch = sender.epoch
    with place.sender() as sender:
        assert sender.next_number == 2
        sender.send("2")
    with place.receiver() as receiver:
        (first,) = receiver.receive()
        assert isinstance(first, Ordered)
        assert (first.epoch, first.number, first.body) == (epoch, 1, "1")
        assert "veilmq.order" not in first.attributes
        receiver.delete(first.handle)
    with place.receiver() as receiver:
        assert receiver.next_number == 2
        assert drain(receiver) == ["2"]


def test_the_number_is_durable_before_the_send(place: Place) -> None:
    seen: list[bytes] = []

    class Looking(Wrapping):
        def send(self, message: str | Message) -> Sent:
            seen.append((place.directory / "send").read_bytes())
            return super().send(message)

    sender = place.sender(Looking(place.queue))
    sender.send("1")
    assert b'"next":2' in seen[0]
    assert b'"pending":[{"number":1' in seen[0]
    assert b'"pending":[]' in (place.directory / "send").read_bytes()


@pytest.mark.parametrize("arrived", [True, False])
@pytest.mark.parametrize("restart", [True, False])
def test_a_retried_message_keeps_its_number(place: Place, arrived: bool, restart: bool) -> None:
    queue = Failing(place.queue)
    queue.plan = [(LOST, arrived)]
    sender = place.sender(queue)
    with pytest.raises(TransportError):
        sender.send("1")
    assert [message.body for message in sender.pending] == ["1"]
    if restart:
        sender.close()
        sender = place.sender(queue)
    sender.send("1")
    sender.send("2")
    assert sender.next_number == 3
    assert drain(place.receiver()) == ["1", "2"]
    assert place.queue.stats().visible == 0


@pytest.mark.parametrize("restart", [True, False])
def test_an_open_message_comes_before_another_one(place: Place, restart: bool) -> None:
    queue = Failing(place.queue)
    queue.plan = [(LOST, False)]
    sender = place.sender(queue)
    with pytest.raises(TransportError):
        sender.send("1")
    if restart:
        sender.close()
        sender = place.sender(queue)
    queue.plan = [(UNREACHED, False)]
    with pytest.raises(TransportError) as caught:
        sender.send("2")
    assert not caught.value.may_have_happened
    sender.send("2")
    assert drain(place.receiver()) == ["1", "2"]


@pytest.mark.parametrize(
    "error",
    [
        UNREACHED,
        MessageTooLarge(size_bytes=9, limit_bytes=1),
        ServiceError(code="AccessDenied", status=403, request_id="", message=""),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_number_that_certainly_was_not_used_is_given_to_the_next(place: Place, error: VeilError) -> None:
    queue = Failing(place.queue)
    queue.plan = [(error, False)]
    sender = place.sender(queue)
    with pytest.raises(type(error)):
        sender.send("never")
    assert (sender.next_number, sender.pending) == (1, [])
    sender.send("1")
    assert drain(place.receiver()) == ["1"]


def test_equal_messages_are_two_once_the_first_one_is_decided(place: Place) -> None:
    sender = place.sender()
    sender.send("tick")
    sender.close()
    sender = place.sender()
    sender.send("tick")
    assert drain(place.receiver()) == ["tick", "tick"]


def test_a_batch_is_written_ahead_once_a_request_and_splits(place: Place) -> None:
    storage = Memory()

    class Small(Wrapping):
        @property
        def capabilities(self) -> Capabilities:
            return replace(self.inner.capabilities, batch_messages_max=10)

    with OrderedSender(Small(place.queue), storage) as sender:
        before = storage.saves
        results = sender.send_batch(bodies(100))
        assert all(isinstance(result, Sent) for result in results)
        assert storage.saves - before == 11
    assert drain(place.receiver()) == bodies(100)


@pytest.mark.parametrize("in_hand_max", [1, 3])
def test_a_refused_entry_in_a_batch_leaves_no_gap(place: Place, in_hand_max: int) -> None:
    queue = Failing(place.queue)
    refused = ParameterInvalid(parameter="body", reason="not that one")
    queue.plan = [(None, True), (refused, False), (None, True), (refused, False)]
    sender = place.sender(queue)
    results = sender.send_batch(["1", "never", "3", "never"])
    assert [isinstance(result, Sent) for result in results] == [True, False, True, False]
    assert sender.next_number == 4
    sender.send("4")
    assert drain(place.receiver(in_hand_max=in_hand_max), 10) == ["1", "3", "4"]
    assert place.queue.stats().visible == 0


def test_after_an_undecided_entry_nothing_more_is_tried(place: Place) -> None:
    queue = Failing(place.queue)

    class Pairs(Failing):
        @property
        def capabilities(self) -> Capabilities:
            return replace(self.inner.capabilities, batch_messages_max=2)

    queue = Pairs(place.queue)
    queue.plan = [(None, True), (LOST, False), (None, True)]
    sender = place.sender(queue)
    results = sender.send_batch(bodies(6))
    assert isinstance(results[0], Sent)
    assert results[1] == LOST
    assert all(isinstance(each, TransportError) and not each.may_have_happened for each in results[2:])
    queue.plan = []
    retried = [body for body, result in zip(bodies(6), results, strict=True) if isinstance(result, VeilError)]
    assert all(isinstance(each, Sent) for each in sender.send_batch(retried))
    assert drain(place.receiver()) == bodies(6)


def test_what_cannot_keep_the_order_is_refused_before_it_has_a_number(place: Place) -> None:
    sender = place.sender(marking="body")
    with pytest.raises(ParameterInvalid, match="must not be empty"):
        sender.send("")
    with pytest.raises(ParameterInvalid, match="ttl"):
        sender.send(Message("1", ttl=60))
    with pytest.raises(MessageTooLarge):
        sender.send("x" * (place.queue.capabilities.body_bytes_max + 1))
    with pytest.raises(ParameterInvalid, match="body"):
        sender.send(Message(b"bytes"))  # type: ignore[arg-type]
    with pytest.raises(ParameterInvalid, match="message"):
        sender.send(7)  # type: ignore[arg-type]
    results = sender.send_batch(["1", "\0", "2"])
    assert [isinstance(result, Sent) for result in results] == [True, False, True]
    assert sender.next_number == 3


def test_threads_share_a_sender(place: Place) -> None:
    sender = place.sender()

    def work(name: str) -> None:
        for number in range(6):
            sender.send(f"{name} {number}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    came = drain(place.receiver())
    assert len(came) == 24
    for name in "abcd":
        assert [body for body in came if body.startswith(name)] == [f"{name} {number}" for number in range(6)]
