"""Parked receives of FIFO queues: a group that becomes free wakes one of them, a locked one nobody."""

from typing import Any

import pytest
from tests.engine.conftest import Shell
from tests.support.contract.stage import TESTER, sending

from veilmq.model.commands import CreateQueue, Delete, Extend, Receive
from veilmq.model.errors import AttemptNotRetryable
from veilmq.model.instant import SECOND_US
from veilmq.model.messages import Delivery, Extras
from veilmq.model.outcomes import Received
from veilmq.model.settings.queue import QueueKey

LINE = QueueKey("000000000000", "us-east-1", "line.fifo")
WAIT_US = 20 * SECOND_US


@pytest.fixture
def line(shell: Shell) -> Shell:
    change = {"fifo": True, "content_deduplication": True}
    shell.call(CreateQueue(queue=LINE, origin=TESTER, change=change))
    return shell


def put(shell: Shell, *texts: str) -> None:
    """One send each; the first character is the group."""
    for text in texts:
        shell.send(text, queue=LINE, extras=Extras(group=text[0]))


def wait(shell: Shell, ticket: str, count_max: int = 10, **fields: Any) -> None:
    shell.wait(ticket, WAIT_US, count_max, LINE, **fields)


def take(shell: Shell, count_max: int = 1, **fields: Any) -> list[Delivery]:
    (outcome,) = shell.call(Receive(queue=LINE, origin=TESTER, count_max=count_max, wait_us=0, **fields))
    assert isinstance(outcome, Received)
    return outcome.messages


def delete(shell: Shell, message: Delivery) -> None:
    shell.call(Delete(queue=LINE, origin=TESTER, handle=message.handle, arrived=shell.clock.now))


def test_a_message_of_a_locked_group_wakes_nobody(line: Shell) -> None:
    put(line, "a1")
    (held,) = take(line)
    for ticket in ("first", "second"):
        wait(line, ticket)
    put(line, "a2", "a3")
    assert line.got("first") is None
    delete(line, held)
    assert line.got("first") == ["a2", "a3"]
    assert line.got("second") is None


def test_two_free_groups_wake_two_if_the_first_is_filled_up(line: Shell) -> None:
    put(line, "a1", "b1")
    held = take(line, 2)
    for ticket in ("first", "second", "third"):
        wait(line, ticket, 1)
    for message in held:
        handle = message.handle
        line.call(Extend(queue=LINE, origin=TESTER, handle=handle, lease_us=0, arrived=line.clock.now))
    assert [line.got(ticket) for ticket in ("first", "second", "third")] == [["a1"], ["b1"], None]


def test_a_batch_that_leaves_one_by_one_wakes_once(line: Shell) -> None:
    put(line, "a1", "a2", "a3", "a4")
    held = take(line, 3)
    wait(line, "waiting")
    for message in held[:2]:
        delete(line, message)
        assert line.got("waiting") is None
    delete(line, held[2])
    assert line.got("waiting") == ["a4"]


def test_a_release_wakes_though_later_messages_of_the_group_are_in_flight(line: Shell) -> None:
    put(line, "a1", "a2", "a3")
    first, second = take(line, 2)
    for ticket in ("first", "second"):
        wait(line, ticket)
    line.call(Extend(queue=LINE, origin=TESTER, handle=first.handle, lease_us=0, arrived=line.clock.now))
    assert (line.got("first"), line.got("second")) == (["a1"], None)
    line.call(Extend(queue=LINE, origin=TESTER, handle=second.handle, lease_us=0, arrived=line.clock.now))
    assert line.got("second") is None, "a1 is in flight again"


def test_the_end_of_a_lease_wakes_though_a_later_one_was_extended(line: Shell) -> None:
    put(line, "a1", "a2", "a3")
    _, second = take(line, 2, lease_us=SECOND_US)
    line.call(Extend(queue=LINE, origin=TESTER, handle=second.handle, lease_us=WAIT_US, arrived=line.clock.now))
    wait(line, "waiting")
    line.later(SECOND_US)
    assert line.got("waiting") == ["a1"]


def test_a_repeated_attempt_whose_message_was_deleted_is_refused_and_nobody_waits_for_it(line: Shell) -> None:
    put(line, "a1", "b1")
    (first,) = take(line, attempt_id="again")
    delete(line, first)
    wait(line, "repeated", attempt_id="again")
    assert line.answers["repeated"] == [AttemptNotRetryable(attempt_id="again")]
    assert [message.body for message in take(line)] == ["b1"]


def test_the_end_of_a_lease_wakes_for_the_whole_group(line: Shell) -> None:
    put(line, "a1", "a2")
    take(line, 1, lease_us=SECOND_US)
    wait(line, "waiting")
    line.later(SECOND_US)
    assert line.got("waiting") == ["a1", "a2"]


def test_a_repeated_attempt_is_answered_though_others_wait(line: Shell) -> None:
    put(line, "a1")
    (first,) = take(line, attempt_id="again")
    wait(line, "waiting")
    wait(line, "repeated", attempt_id="again")
    assert line.got("repeated") == ["a1"]
    assert line.got("waiting") is None
    (outcome,) = line.answers["repeated"]
    assert [message.handle for message in outcome.messages] == [first.handle]  # type: ignore[union-attr]


def test_an_attempt_that_finds_nothing_waits_in_its_turn(line: Shell) -> None:
    wait(line, "first")
    wait(line, "attempt", attempt_id="new")
    put(line, "a1")
    assert (line.got("first"), line.got("attempt")) == (["a1"], None)
    put(line, "b1")
    assert line.got("attempt") == ["b1"]


def test_who_repeats_an_attempt_that_still_waits_gets_what_it_gets(line: Shell) -> None:
    """The connection of the first request broke, and nobody has told the server."""
    wait(line, "before")
    wait(line, "broken", attempt_id="x")
    wait(line, "between")
    wait(line, "another", attempt_id="y")
    wait(line, "repeated", attempt_id="x")
    put(line, "a1", "b1")
    assert [line.got(ticket) for ticket in ("before", "broken", "repeated")] == [["a1"], ["b1"], ["b1"]]
    (first,), (again,) = line.answers["broken"], line.answers["repeated"]
    assert [each.handle for each in again.messages] == [each.handle for each in first.messages]  # type: ignore[union-attr]
    assert (line.got("between"), line.got("another")) == (None, None)
    put(line, "c1", "d1")
    assert (line.got("between"), line.got("another")) == (["c1"], ["d1"])


def test_who_repeats_an_attempt_whose_client_has_gone_gets_what_it_got(line: Shell) -> None:
    wait(line, "gone", attempt_id="x")
    wait(line, "repeated", attempt_id="x")
    line.submit(sending(LINE, "a1", extras=Extras(group="a")))
    line.give_back(line.engine.take_batch(line.clock.now))  # type: ignore[arg-type]
    batch = line.engine.take_batch(line.clock.now)
    line.engine.cancel("gone")
    line.give_back(batch)  # type: ignore[arg-type]
    line.run()
    assert (line.got("gone"), line.got("repeated")) == (None, ["a1"])


def test_an_attempt_whose_answer_was_lost_finds_its_messages_as_they_were(line: Shell) -> None:
    put(line, "a1")
    line.submit(Receive(queue=LINE, origin=TESTER, wait_us=0, attempt_id="again"), ticket="lost")
    batch = line.engine.take_batch(line.clock.now)
    assert batch is not None
    line.engine.cancel("lost")
    line.give_back(batch)
    line.run()
    assert line.got("lost") is None
    (again,) = take(line, attempt_id="again")
    assert (again.body, again.receive_count) == ("a1", 1)


def test_a_lost_answer_without_an_attempt_frees_the_group(line: Shell) -> None:
    put(line, "a1")
    line.submit(Receive(queue=LINE, origin=TESTER, wait_us=0), ticket="lost")
    batch = line.engine.take_batch(line.clock.now)
    assert batch is not None
    line.engine.cancel("lost")
    line.give_back(batch)
    (again,) = take(line)
    assert (again.body, again.receive_count) == ("a1", 2)


def test_who_gets_the_messages_of_its_attempt_again_leaves_the_others_to_the_next(line: Shell) -> None:
    wait(line, "first", attempt_id="x")
    wait(line, "second")
    for text in ("a1", "b1"):
        line.submit(sending(LINE, text, extras=Extras(group=text[0])))
    line.submit(Receive(queue=LINE, origin=TESTER, wait_us=WAIT_US, attempt_id="x"), ticket="asks again")
    line.run()
    assert (line.got("asks again"), line.got("first"), line.got("second")) == (["a1"], ["a1"], ["b1"])


def test_who_waits_at_the_cap_is_woken_by_a_lease_that_ends_in_a_group_that_stays_locked(line: Shell) -> None:
    put(line, "a1", "a2", "b1")
    _, held = take(line, 2, lease_us=2 * SECOND_US)
    wait(line, "waits", in_flight_max=2)
    line.call(Extend(queue=LINE, origin=TESTER, handle=held.handle, lease_us=WAIT_US, arrived=line.clock.now))
    assert line.got("waits") is None
    line.later(2 * SECOND_US)
    assert line.got("waits") == ["b1"]
