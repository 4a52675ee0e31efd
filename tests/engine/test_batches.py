"""Batches: what goes together, what a failure tells whom, what is due by itself."""

from tests.engine.conftest import QUEUE, Shell
from tests.support.contract.stage import TESTER, sending

from veilmq.engine.long_polls import POLLERS_MAX, Polls
from veilmq.model.commands import Delete, Extend, Origin, Receive, RecordPolls, Send, Sweep
from veilmq.model.errors import LeaseTaken, Overloaded, StoreFailed
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.model.outcomes import Applied, Deleted, Received, Sent


class TestGathering:
    def test_commands_of_one_wire_batch_stay_together_and_in_order(self, shell: Shell) -> None:
        shell.limit(batch_messages_max=4)
        shell.run()
        for start in (0, 3, 6):
            shell.submit(*[sending(QUEUE, str(start + number)) for number in range(3)])
        sizes = []
        while (batch := shell.engine.take_batch(shell.clock.now)) is not None:
            sizes.append(len(batch.commands))
            shell.give_back(batch)
        assert sizes == [6, 3]
        assert all(len(shell.answers[ticket]) == 3 for ticket in shell.order[-3:])

    def test_beyond_the_bound_calls_are_refused_at_once(self, shell: Shell) -> None:
        shell.limit(pending_max=2)
        tickets = [shell.submit(sending(QUEUE, str(number))) for number in range(4)]
        shell.run()
        kinds = [type(shell.answers[ticket][0]) for ticket in tickets]
        assert kinds == [Sent, Sent, Overloaded, Overloaded]

    def test_a_failed_batch_tells_everybody_in_it_and_nobody_else(self, shell: Shell) -> None:
        shell.wait("parked", MINUTE_US)
        one, two = shell.submit(sending(QUEUE, "1")), shell.submit(sending(QUEUE, "2"), sending(QUEUE, "3"))
        batch = shell.engine.take_batch(shell.clock.now)
        error = StoreFailed(reason="test")
        shell.deliver(shell.engine.failed(batch, error))
        assert (shell.answers[one], shell.answers[two]) == ([error], [error, error])
        shell.send("4")
        assert shell.got("parked") == ["4"]

    def test_nothing_is_answered_before_its_batch_is_given_back(self, shell: Shell) -> None:
        ticket = shell.submit(sending(QUEUE, "1"))
        batch = shell.engine.take_batch(shell.clock.now)
        shell.deliver(shell.engine.expire_waiters(shell.clock.now))
        assert ticket not in shell.answers
        shell.give_back(batch)
        assert ticket in shell.answers


class TestStalls:
    def _held(self, shell: Shell) -> str:
        shell.send("1")
        shell.wait("holder", 0, lease_us=2 * SECOND_US)
        return str(shell.answers["holder"][0].messages[0].handle)

    def test_what_had_arrived_before_a_stall_comes_before_what_would_take_its_message(self, shell: Shell) -> None:
        shell.limit(batch_messages_max=1)
        handle = self._held(shell)
        arrived = shell.clock.now
        shell.submit(Receive(queue=QUEUE, origin=TESTER, wait_us=0), ticket="rival")
        shell.submit(Delete(queue=QUEUE, origin=TESTER, handle=handle, arrived=arrived), ticket="d")
        shell.clock.advance(5 * SECOND_US)
        shell.run()
        assert type(shell.answers["d"][0]) is Deleted
        assert shell.got("rival") == []

    def test_after_a_start_too(self, shell: Shell) -> None:
        handle = self._held(shell)
        arrived = shell.clock.now
        shell.limit(batch_messages_max=1)
        shell.clock.advance(5 * SECOND_US)
        shell.submit(Receive(queue=QUEUE, origin=TESTER, wait_us=0), ticket="rival")
        extend = Extend(queue=QUEUE, origin=TESTER, handle=handle, lease_us=SECOND_US, arrived=arrived)
        shell.submit(extend, ticket="e")
        shell.run()
        assert type(shell.answers["e"][0]).__name__ == "Extended"
        assert shell.got("rival") == []

    def test_without_a_stall_it_is_first_come_first_served(self, shell: Shell) -> None:
        shell.limit(batch_messages_max=1)
        handle = self._held(shell)
        shell.later(SECOND_US)
        shell.later(SECOND_US)
        shell.submit(Receive(queue=QUEUE, origin=TESTER, wait_us=0), ticket="rival")
        shell.submit(Delete(queue=QUEUE, origin=TESTER, handle=handle, arrived=shell.clock.now), ticket="d")
        shell.run()
        assert shell.got("rival") == ["1"]
        assert type(shell.answers["d"][0]) is LeaseTaken


class TestHousekeeping:
    def test_a_sweep_comes_at_least_each_second(self, shell: Shell) -> None:
        assert shell.engine.take_batch(shell.clock.now) is None
        due = shell.engine.next_due(shell.clock.now)
        assert shell.clock.now < due <= shell.clock.now + SECOND_US
        shell.clock.advance(SECOND_US)
        batch = shell.engine.take_batch(shell.clock.now)
        assert [type(command) for command in batch.commands] == [Sweep]
        shell.give_back(batch)

    def test_a_sweep_that_fails_on_a_full_disk_is_not_tried_again_at_once(self, shell: Shell) -> None:
        """Though a lease has ended and a receive waits: the loop would turn until there is space."""
        shell.send("1", delay_us=SECOND_US // 2)
        shell.wait("w", 20 * SECOND_US)
        now = shell.clock.advance(SECOND_US // 2)
        batch = shell.engine.take_batch(now)
        assert [type(command) for command in batch.commands] == [Sweep]
        failed = Applied(at=now, outcomes=[StoreFailed(reason="full")], wrote=False, next_due=now)
        shell.deliver(shell.engine.committed(batch, failed))
        assert shell.engine.take_batch(now) is None
        assert shell.engine.next_due(now) > now
        shell.later(SECOND_US)
        assert shell.got("w") == ["1"]

    def test_a_sweep_goes_on_while_there_is_more(self, shell: Shell) -> None:
        shell.send(*[str(number) for number in range(2_000)], ttl_us=SECOND_US)
        shell.later(SECOND_US)
        assert shell.factory.rows(shell.store) == 0

    def test_a_snapshot_of_the_history_goes_on_without_hurry(self, shell: Shell) -> None:
        shell.limit(sweep_steps_max=4)
        shell.send(*[str(number) for number in range(8)])
        shell.store.close()
        shell.store = shell.factory.open(history_bytes_max=1_000)
        shell.clock.advance(SECOND_US)
        due: list[int] = []
        while not due or due[-1] < SECOND_US // 2:
            shell.run()
            now = shell.clock.now
            following = shell.engine.next_due(now)
            due.append(following - now)
            shell.clock.advance(following - now)
        # One step tells of the queue, three of its messages; the last finds no more, and all is quiet again.
        assert due[:3] == [shell.engine.limits.snapshot_every_us] * 3
        assert due[3:] == [SECOND_US]
        told = [event.detail for event in shell.factory.history(shell.store, 0, 1_000) if event.kind == "snapshot"]
        assert [each["part"] for each in told] == ["begin", "queue", "messages", "messages", "end"]

    def test_polls_are_counted_and_recorded_each_minute(self, shell: Shell) -> None:
        shell.later(0)
        shell.wait("empty", 0)
        shell.wait("waits", SECOND_US)
        shell.later(SECOND_US)
        shell.send("1")
        shell.wait("finds", 0)
        shell.later(MINUTE_US)
        (polled,) = [event for event in shell.factory.history(shell.store, 0, 1_000) if event.kind == "polled"]
        assert polled.detail == {"receives": 3, "empty": 2, "refused": 0}
        shell.later(MINUTE_US)
        kinds = [event.kind for event in shell.factory.history(shell.store, 0, 1_000)]
        assert kinds.count("polled") == 1, "a minute without polls has no event"

    def test_the_pollers_of_a_minute_are_bounded(self) -> None:
        polls = Polls()
        for number in [*range(POLLERS_MAX + 1), 0]:
            polls.count(Receive(queue=QUEUE, origin=Origin("sqs", f"key-{number}")), empty=True)
        first, *others = polls.take()
        assert (first.origin.principal, first.receives) == ("key-0", 2)
        assert len(others) == POLLERS_MAX - 1
        assert polls.take() == ()

    def test_refused_parkings_are_counted(self, shell: Shell) -> None:
        shell.limit(parked_max=0)
        shell.wait("a", SECOND_US)
        assert shell.got("a") == []
        shell.engine.flush_polls(shell.clock.now)
        batch = shell.engine.take_batch(shell.clock.now)
        assert [type(command) for command in batch.commands] == [RecordPolls]
        (count,) = batch.commands[0].polls
        assert (count.receives, count.empty, count.refused) == (1, 1, 1)

    def test_a_quiet_engine_rests_until_something_is_due(self, shell: Shell) -> None:
        (outcome,) = shell.call(Receive(queue=QUEUE, origin=TESTER, wait_us=0))
        assert outcome == Received([])
        assert not shell.engine.busy
        assert shell.engine.next_due(shell.clock.now) > shell.clock.now


class TestPace:
    """A batch whose statements took too long makes the next ones smaller."""

    SLOW_US, FAST_US = 20_000, 1_000

    def _sizes(self, shell: Shell, count: int, took_us: int) -> list[int]:
        """Sends that wait, in the batches in which they are taken; each takes that long. Sweeps are not counted."""
        for number in range(count):
            shell.submit(sending(QUEUE, str(number)))
        sizes = []
        while (batch := shell.engine.take_batch(shell.clock.now)) is not None:
            shell.engine.paced(took_us)
            shell.give_back(batch)
            sizes.append(sum(type(command) is not Sweep for command in batch.commands))
        return [size for size in sizes if size]

    def test_it_shrinks_down_to_one_message_and_grows_back(self, shell: Shell) -> None:
        shell.limit(batch_messages_max=8)
        shell.run()
        assert self._sizes(shell, 20, self.SLOW_US) == [8, 4, 2, 1, 1, 1, 1, 1, 1]
        assert self._sizes(shell, 30, self.FAST_US) == [1, 2, 4, 8, 8, 7]

    def test_what_was_in_the_batch_counts_not_what_might_have_been(self, shell: Shell) -> None:
        shell.run()
        assert self._sizes(shell, 10, self.SLOW_US) == [10]
        assert self._sizes(shell, 10, self.SLOW_US) == [5, 2, 1, 1, 1]

    def test_neither_fast_nor_slow_changes_nothing(self, shell: Shell) -> None:
        shell.limit(batch_messages_max=8)
        shell.run()
        self._sizes(shell, 8, self.SLOW_US)
        assert self._sizes(shell, 9, 7_000) == [4, 4, 1]

    def test_a_sweep_that_takes_long_is_nobodys_fault(self, shell: Shell) -> None:
        shell.limit(batch_messages_max=8)
        shell.run()
        shell.clock.advance(SECOND_US)
        sweep = shell.engine.take_batch(shell.clock.now)
        assert [type(command) for command in sweep.commands] == [Sweep]
        shell.engine.paced(self.SLOW_US)
        shell.give_back(sweep)
        assert self._sizes(shell, 8, self.SLOW_US) == [8]

    def test_a_sweep_goes_alone_among_small_batches_and_beside_many_calls(self, shell: Shell) -> None:
        shell.run()
        found = []
        for count in (7, 8):
            shell.clock.advance(SECOND_US)
            for number in range(count):
                shell.submit(sending(QUEUE, str(number)))
            batches = []
            while (batch := shell.engine.take_batch(shell.clock.now)) is not None:
                batches.append([type(command) for command in batch.commands])
                shell.give_back(batch)
            found.append(batches)
        assert found == [[[Send] * 7 + [Sweep]], [[Send] * 8, [Sweep]]]
        shell.limit(batch_messages_max=8)
        shell.run()
        self._sizes(shell, 8, self.SLOW_US)
        shell.clock.advance(SECOND_US)
        shell.submit(sending(QUEUE, "before"))
        kinds = []
        while (batch := shell.engine.take_batch(shell.clock.now)) is not None:
            if not kinds:
                shell.submit(sending(QUEUE, "after"))
            shell.engine.paced(self.SLOW_US)
            kinds.append([type(command) for command in batch.commands])
            shell.give_back(batch)
        assert kinds == [[Send], [Sweep], [Send]]
        assert self._sizes(shell, 3, self.FAST_US) == [1, 2]
