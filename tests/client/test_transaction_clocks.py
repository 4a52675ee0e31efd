"""Machines whose clocks are an hour apart: a transaction's times are judged by its log's own clock."""

import pytest
from tests.client.clocks_apart import HOUR, Apart
from tests.client.transaction_stage import KINDS, Place, left_behind
from tests.support.embedded import EmbeddedClient

from veilmq.client.messages import Message
from veilmq.client.transaction import TransactionQueue, Verdict
from veilmq.client.transaction.logbook import Entry, Form, encode


@pytest.fixture(params=list(KINDS))
def place(request: pytest.FixtureRequest, embedded: EmbeddedClient) -> Place:
    return Place(embedded, request.param)


def elsewhere(place: Place, apart: float) -> TransactionQueue:
    """Of a machine whose clock is that far ahead; it has sent a message of its own."""
    queue = TransactionQueue(
        place.queue, place.log, place.ledger.check, clock=Apart(place.embedded.clock, apart),
        on_lost=lambda prepared: place.lost.append(prepared.id),
    )  # fmt: skip
    queue.send_transaction("its own", place.ledger.do)
    assert place.bodies() == ["its own"]
    return queue


@pytest.mark.parametrize("apart", [-HOUR, HOUR])
def test_what_is_undecided_is_parked_when_it_is_time(place: Place, apart: float) -> None:
    queue = elsewhere(place, apart)
    left_behind(place)
    place.ledger.answer = Verdict.UNKNOWN
    place.embedded.pass_time(601)
    assert (queue.checker.run_once(), place.ledger.asked) == (0, 1)
    place.embedded.pass_time(3_500)
    assert (queue.checker.run_once(), place.ledger.asked) == (0, 2)
    place.embedded.pass_time(120)
    assert (queue.checker.run_once(), place.ledger.asked) == (1, 3)
    assert queue.parked().stats().visible == 1


def test_an_entry_that_its_producer_is_about_to_find_is_not_asked_about(embedded: EmbeddedClient) -> None:
    place = Place(embedded, "sqs")
    fresh = Entry(1, "fresh", Form.LOGGED, Message("order 7"), None, embedded.clock.wall(), None)
    place.log.send(encode(fresh))
    queue = TransactionQueue(place.queue, place.log, place.ledger.check, clock=Apart(embedded.clock, HOUR))
    assert (queue.checker.run_once(), place.ledger.asked, place.left()) == (0, 0, 1)


@pytest.mark.parametrize("apart", [-HOUR, HOUR])
def test_a_half_message_that_ended_is_sent_again(embedded: EmbeddedClient, apart: float) -> None:
    """By a clock that is behind it would seem to live, and to have been committed."""
    place = Place(embedded, "hidden")
    transaction = left_behind(place)
    embedded.pass_time(47 * HOUR + 60)
    queue = TransactionQueue(
        place.queue, place.log, place.ledger.check, clock=Apart(embedded.clock, apart),
        on_lost=lambda prepared: place.lost.append(prepared.id),
    )  # fmt: skip
    assert queue.checker.run_once() == 1
    assert place.lost == [transaction]
    assert place.bodies() == ["order 7"]
