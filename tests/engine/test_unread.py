"""Answers that nobody reads: receives wait or are refused before they take messages, and everything else goes on."""

import pytest
from tests.engine.conftest import QUEUE, Shell
from tests.support.contract.stage import TESTER, sending

from veilmq.engine.long_polls import Unread
from veilmq.model.commands import CreateQueue, Delete, Receive
from veilmq.model.errors import Overloaded
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import Deleted, Received, Sent
from veilmq.model.settings.queue import QueueKey

ACCOUNT = QUEUE.account
OTHER = QueueKey("111111111111", "us-east-1", "jobs")
MIB = 1024 * 1024


def receiving(queue: QueueKey = QUEUE, **fields: int) -> Receive:
    return Receive(queue=queue, origin=TESTER, **fields)


class TestOverTheBound:
    def test_a_receive_is_refused_before_it_takes_messages(self, shell: Shell) -> None:
        shell.limit(unread_bytes_max=100)
        shell.send("a")
        shell.engine.unread.add(ACCOUNT, 51)
        assert shell.call(receiving()) == [Overloaded(limit=100)]
        assert shell.engine.unread.refused == 1
        shell.engine.unread.remove(ACCOUNT, 51)
        (outcome,) = shell.call(receiving())
        assert isinstance(outcome, Received)
        assert [(each.body, each.receive_count) for each in outcome.messages] == [("a", 1)]

    def test_sends_deletes_and_other_accounts_go_on(self, shell: Shell) -> None:
        shell.limit(unread_bytes_max=100)
        shell.call(CreateQueue(queue=OTHER, origin=TESTER))
        shell.send("a")
        (received,) = shell.call(receiving())
        assert isinstance(received, Received)
        shell.engine.unread.add(ACCOUNT, 51)
        shell.send("b", queue=OTHER)
        (outcome,) = shell.call(receiving(OTHER))
        assert isinstance(outcome, Received)
        assert len(outcome.messages) == 1
        assert isinstance(shell.send("c")[0], Sent)
        deleted = shell.call(
            Delete(queue=QUEUE, origin=TESTER, handle=received.messages[0].handle, arrived=shell.clock.now)
        )
        assert isinstance(deleted[0], Deleted)

    def test_a_new_long_poll_waits_until_answers_are_read(self, shell: Shell) -> None:
        shell.limit(unread_bytes_max=100)
        shell.send("a")
        shell.engine.unread.add(ACCOUNT, 51)
        poll = shell.wait("poll", 20 * SECOND_US)
        assert shell.got(poll) is None
        shell.later(SECOND_US)
        assert shell.got(poll) is None
        shell.engine.unread.remove(ACCOUNT, 51)
        shell.run()
        assert shell.got(poll) == ["a"]

    def test_a_parked_long_poll_gets_what_was_sent_meanwhile_when_answers_are_read(self, shell: Shell) -> None:
        shell.limit(unread_bytes_max=100)
        poll = shell.wait("poll", 20 * SECOND_US)
        shell.engine.unread.add(ACCOUNT, 51)
        shell.send("a")
        assert shell.got(poll) is None
        shell.engine.unread.remove(ACCOUNT, 51)
        shell.run()
        assert shell.got(poll) == ["a"]

    def test_a_long_poll_whose_time_is_up_is_answered_empty(self, shell: Shell) -> None:
        shell.limit(unread_bytes_max=100)
        shell.send("a")
        shell.engine.unread.add(ACCOUNT, 51)
        poll = shell.wait("poll", SECOND_US)
        shell.later(SECOND_US)
        assert shell.got(poll) == []


class TestTheBounds:
    def test_one_account_has_half_and_all_together_the_whole(self) -> None:
        unread = Unread(100)
        unread.add("a", 50)
        assert not unread.near
        unread.add("a", 1)
        assert unread.near
        assert unread.refuses("a")
        assert not unread.refuses("b")
        unread.add("b", 49)
        assert not unread.refuses("c")
        unread.add("b", 1)
        assert unread.refuses("c")

    def test_requests_being_read_take_at_most_half(self) -> None:
        unread = Unread(100)
        unread.reading = lambda: 1_000
        assert not unread.refuses("a")
        unread.add("b", 49)
        assert not unread.refuses("a")
        unread.add("b", 2)
        assert unread.near
        assert unread.refuses("a")

    def test_room_is_reported(self) -> None:
        unread, reported = Unread(100), []
        unread.on_room = lambda: reported.append(unread.bytes)
        unread.add("a", 40)
        unread.remove("a", 40)
        assert reported == []
        unread.add("a", 60)
        unread.remove("a", 60)
        assert reported == [0]


class TestOneBatch:
    @pytest.mark.parametrize("wait_us", [0, SECOND_US])
    def test_it_delivers_a_bounded_number_of_bytes_and_the_next_ones_the_rest(self, shell: Shell, wait_us: int) -> None:
        for number in range(40):
            shell.call(sending(QUEUE, f"{number:02}" + "x" * (MIB - 2)))
        tickets = [shell.submit(receiving(count_max=10, wait_us=wait_us)) for _ in range(5)]
        batch = shell.engine.take_batch(shell.clock.now)
        assert batch is not None
        shell.give_back(batch)
        assert sum(len(shell.got(ticket) or ()) for ticket in tickets) == 16
        assert [ticket in shell.answers for ticket in tickets] == [True, True, False, False, False]
        shell.run()
        bodies = [body[:2] for ticket in tickets for body in shell.got(ticket) or ()]
        assert bodies == [f"{number:02}" for number in range(40)]

    def test_what_it_left_waits_if_the_answers_are_not_read(self, shell: Shell) -> None:
        for number in range(18):
            shell.call(sending(QUEUE, f"{number:02}" + "x" * (MIB - 2)))
        shell.limit(unread_bytes_max=20 * MIB)
        tickets = [shell.submit(receiving(count_max=10, wait_us=0)) for _ in range(3)]
        batch = shell.engine.take_batch(shell.clock.now)
        assert batch is not None
        shell.give_back(batch)
        shell.engine.unread.add(ACCOUNT, 16 * MIB)
        shell.run()
        assert shell.answers[tickets[2]] == [Overloaded(limit=20 * MIB)]

    def test_a_woken_receive_that_it_left_nothing_for_and_whose_client_is_gone_passes_its_wake_on(
        self, shell: Shell
    ) -> None:
        shell.call(CreateQueue(queue=OTHER, origin=TESTER))
        shell.wait("large", 20 * SECOND_US, count_max=16)
        shell.wait("gone", 20 * SECOND_US, queue=OTHER)
        shell.wait("next", 20 * SECOND_US, queue=OTHER)
        shell.submit(*[sending(QUEUE, "x" * MIB) for _ in range(16)])
        shell.submit(sending(OTHER, "a"))
        sends = shell.engine.take_batch(shell.clock.now)
        assert sends is not None
        shell.give_back(sends)
        receives = shell.engine.take_batch(shell.clock.now)
        assert receives is not None
        assert [call.ticket for call in receives.calls] == ["large", "gone"]
        shell.engine.cancel("gone")
        shell.give_back(receives)
        shell.run()
        assert (shell.got("gone"), shell.got("next")) == (None, ["a"])
