"""Receives: how many messages, for how long, the fields of each, and waits for a message; and what their leases allow.

A lease is extended, released, ended, or its message is deleted; and a handle can do little after its message was
delivered again. Calls come from many threads, too; a closed queue or account does nothing more, an interrupted queue
goes on.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Unfinished
from functools import partial
from typing import Any, Final

import pytest

from veilmq.client.errors import TransportError
from veilmq.client.messages import Extension, Message, Template
from veilmq.client.queue import Queue
from veilmq.model.errors import LeaseError, MessageGone, ParameterInvalid, ReceiptInvalid, VeilError
from veilmq.testing.client_contract.stage import LONG, PATIENCE_SECONDS, SECOND, Number, Stage, Text, sent, unrefused

_TURNS: Final = 20
"""Interruptions within `PATIENCE_SECONDS`."""
THREADS = 8
EACH = 12


class TestReceives:
    """Receives."""

    def test_an_empty_queue_gives_nothing(self, stage: Stage) -> None:
        assert stage.create().receive() == []

    def test_never_more_than_asked_for_and_nobody_else_gets_them(self, stage: Stage) -> None:
        queue = stage.create()
        ids = {sent(result).id for result in queue.send_batch([f"m{number}" for number in range(8)])}
        first = queue.receive(3, lease=LONG)
        assert 1 <= len(first) <= 3
        rest = stage.empty(queue)
        assert len(first) + len(rest) == 8
        assert {message.id for message in first + rest} == ids

    def test_what_no_adapter_can_do_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send("x")
        fields: list[dict[str, Any]] = [{"count_max": 0}, {"count_max": -1}, {"lease": -1}, {"wait": -1}]
        assert unrefused(lambda given: queue.receive(**given), fields, parameter=lambda given: next(iter(given))) == []
        (message,) = stage.empty(queue)
        assert message.receive_count == 1

    def test_more_than_its_capabilities_say_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        able = queue.capabilities
        most = {"count_max": able.receive_messages_max, "lease": able.lease_max, "wait": able.wait_max}
        queue.send("x")

        def receive(field: str) -> Any:
            return queue.receive(**{field: most[field] + 1})  # type: ignore[arg-type]

        assert unrefused(receive, most, parameter=lambda field: field) == []
        (received,) = queue.receive(able.receive_messages_max, lease=able.lease_max)
        assert received.receive_count == 1
        queue.delete(Text(received.handle))
        assert queue.stats().in_flight in {0, None}

    def test_a_lease_is_as_long_as_the_receive_says(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue, lease=Number(stage.brief))
        assert queue.receive() == []
        stage.pass_time(stage.brief + SECOND)
        again = stage.take(queue)
        assert (again.id, again.receive_count) == (message.id, 2)

    def test_without_one_it_is_the_queues(self, stage: Stage) -> None:
        queue = stage.create(Template(visibility_timeout=2 * SECOND))
        queue.send("x")
        before = stage.clock.monotonic()
        (message,) = queue.receive()
        assert before <= message.lease_end - 2 * SECOND <= stage.clock.monotonic()
        stage.pass_time(3 * SECOND)
        assert stage.take(queue).id == message.id

    def test_the_end_of_a_lease_is_told_on_the_monotonic_clock(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send("x")
        before = stage.clock.monotonic()
        (message,) = queue.receive(lease=LONG)
        assert before <= message.lease_end - LONG <= stage.clock.monotonic()

    def test_the_count_of_receives_grows_and_the_first_stays(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        first = message.first_received
        for count in (2, 3):
            queue.release(message.handle)
            stage.back(queue)
            message = stage.take(queue)
            assert (message.receive_count, message.first_received) == (count, first)


class TestWaiting:
    """Long polls."""

    def test_no_wait_is_no_wait_whatever_the_queue_is_set_to(self, stage: Stage) -> None:
        queue = stage.create(Template(wait=20))
        assert stage.aside(queue.receive)() == []

    def test_a_message_that_is_there_is_not_waited_for(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send("x")
        (message,) = stage.aside(lambda: queue.receive(wait=stage.wait(queue)))()
        assert message.body == "x"

    def test_a_send_wakes(self, stage: Stage) -> None:
        queue = stage.create()
        waited = stage.aside(lambda: queue.receive(lease=LONG, wait=stage.wait(queue)))
        queue.send("x")
        (message,) = waited()
        assert (message.body, message.receive_count) == ("x", 1)
        assert message.lease_end <= stage.clock.monotonic() + LONG
        queue.delete(message.handle)

    def test_a_release_wakes(self, stage: Stage) -> None:
        queue = stage.create()
        held = stage.held(queue)
        waited = stage.aside(lambda: queue.receive(wait=stage.wait(queue)))
        queue.release(held.handle)
        (message,) = waited()
        assert (message.id, message.receive_count) == (held.id, 2)

    def test_the_end_of_a_delay_wakes(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send(Message("x", delay=SECOND))
        waited = stage.aside(lambda: queue.receive(wait=stage.wait(queue)))
        stage.pass_time(2 * SECOND)
        (message,) = waited()
        assert message.body == "x"

    def test_a_wait_ends(self, stage: Stage) -> None:
        queue = stage.create()
        waited = stage.aside(lambda: queue.receive(wait=SECOND))
        stage.pass_time(2 * SECOND)
        assert waited() == []
        queue.send("x")
        assert len(stage.empty(queue)) == 1

    def test_many_who_wait_share_what_comes(self, stage: Stage) -> None:
        queue = stage.create()
        waits = [stage.aside(lambda: _one(queue, stage)) for _ in range(6)]
        ids = {sent(result).id for result in queue.send_batch([f"m{number}" for number in range(6)])}
        received = [wait() for wait in waits]
        assert set(received) == ids


def _one(queue: Queue, stage: Stage) -> str:
    (message,) = queue.receive(1, lease=LONG, wait=stage.wait(queue))
    return message.id


class TestLeases:
    """Leases."""

    def test_an_extension_counts_from_now(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue, lease=stage.brief)
        handle = queue.extend(message.handle, LONG)
        stage.pass_time(stage.brief + SECOND)
        assert queue.receive() == []
        queue.delete(handle)

    def test_an_extension_can_shorten(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        queue.extend(message.handle, SECOND)
        stage.pass_time(2 * SECOND)
        assert stage.take(queue).id == message.id

    def test_the_handle_to_use_next(self, stage: Stage) -> None:
        queue = stage.create()
        first = stage.held(queue).handle
        second = queue.extend(first, LONG)
        (third,) = queue.extend_batch([Extension(second, LONG)])
        assert isinstance(third, str)
        if queue.capabilities.receipts_rotate:
            assert len({first, second, third}) == 3
            for old in (first, second):
                with pytest.raises(LeaseError):
                    queue.extend(old, LONG)
                with pytest.raises(LeaseError):
                    queue.delete(old)
        else:
            assert first == second == third
        queue.delete(third)

    def test_an_extension_beyond_the_longest_lease_is_refused_and_changes_nothing(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        for lease in (queue.capabilities.lease_max + 1, -1, float("nan")):
            with pytest.raises(ParameterInvalid) as refused:
                queue.extend(message.handle, lease)
            assert refused.value.parameter == "lease"
        assert queue.receive() == []
        queue.delete(message.handle)

    def test_a_released_message_is_there_at_once(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        queue.release(message.handle)
        stage.back(queue)
        again = stage.take(queue)
        assert (again.id, again.receive_count) == (message.id, 2)

    def test_a_late_extend_holds_the_message_again(self, stage: Stage) -> None:
        """A message that nobody else received still belongs to the holder of the expired lease; only some protocols
        allow it."""
        queue = stage.create()
        message = stage.held(queue, lease=stage.brief)
        stage.pass_time(stage.brief + SECOND)
        try:
            handle = queue.extend(message.handle, LONG)
        except LeaseError:
            assert not queue.capabilities.extends_late
            assert stage.take(queue).receive_count == 2
            return
        assert queue.receive() == []
        queue.delete(handle)
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)

    def test_a_message_is_released_for_later(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        queue.release(message.handle, stage.brief)
        assert queue.receive() == []
        stage.pass_time(stage.brief + SECOND)
        assert stage.take(queue).id == message.id

    def test_a_deleted_message_is_gone_for_good(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue, lease=stage.brief)
        queue.delete(message.handle)
        stage.pass_time(stage.brief + SECOND)
        assert queue.receive() == []
        with pytest.raises(VeilError):
            queue.extend(message.handle, LONG)
        try:
            queue.delete(message.handle)  # some protocols report this, some do not
        except VeilError as error:
            assert isinstance(error, MessageGone | ReceiptInvalid)

    def test_fencing(self, stage: Stage) -> None:
        """A consumer that lost the lease to another one can neither extend, release nor delete the message."""
        queue = stage.create()
        old = stage.held(queue, lease=SECOND)
        stage.pass_time(2 * SECOND)
        new = stage.take(queue)
        assert new.id == old.id
        assert new.handle != old.handle
        with pytest.raises(LeaseError):
            queue.extend(old.handle, LONG)
        with pytest.raises(LeaseError):
            queue.release(old.handle)
        (refused,) = queue.extend_batch([Extension(old.handle, SECOND)])
        assert isinstance(refused, LeaseError)
        try:
            queue.delete(old.handle)  # SQS reports nothing and does nothing
        except VeilError as error:
            assert isinstance(error, LeaseError)
        assert queue.receive() == []
        handle = queue.extend(new.handle, LONG)
        queue.delete(handle)
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)

    def test_what_is_no_handle_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        for call in (lambda handle: queue.extend(handle, LONG), queue.release, queue.delete):
            assert unrefused(call, ["", "x", "0" * 66, "žluť", "AQEB/+=="], ReceiptInvalid) == []
        queue.delete(message.handle)

    def test_a_handle_of_another_queue_is_refused(self, stage: Stage) -> None:
        one, other = stage.create(), stage.create()
        message = stage.held(one)
        for call in (lambda: other.extend(message.handle, LONG), lambda: other.delete(message.handle)):
            with pytest.raises((ReceiptInvalid, ParameterInvalid, LeaseError)):
                call()
        assert one.receive() == []
        one.delete(message.handle)

    def test_a_body_is_replaced_with_its_lease(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.body_replaceable:
            return
        message = stage.held(queue, "step 0")
        handle = queue.extend(message.handle, LONG, body="step 1\r\n")
        with pytest.raises(ParameterInvalid):
            queue.extend(handle, LONG, body="\0")
        queue.release(handle)
        stage.back(queue)
        assert stage.take(queue).body == "step 1\r\n"


class TestClosing:
    """Close and interrupt."""

    def test_a_closed_queue_or_account_does_nothing_more(self, stage: Stage) -> None:
        queue, account, unused = stage.create(), stage.account, stage.name("q")
        held = stage.held(queue)
        other = account.queue(queue.name)
        queue.close()
        queue.close()
        calls: list[Callable[[], Any]] = [
            lambda: queue.send("x"),
            queue.receive,
            lambda: queue.delete(held.handle),
            queue.stats,
        ]
        self._fail_unsent(calls)
        account.close()
        account.close()
        calls = [
            lambda: other.send("x"),
            lambda: account.queue(queue.name),
            lambda: account.create(unused),
            account.names,
            lambda: account.delete(queue.name),
        ]
        self._fail_unsent(calls)

    def _fail_unsent(self, calls: list[Callable[[], Any]]) -> None:
        for call in calls:
            with pytest.raises(TransportError) as refused:
                call()
            assert not refused.value.may_have_happened

    def test_other_queues_of_the_account_go_on(self, stage: Stage) -> None:
        queue = stage.create()
        again = stage.account.queue(queue.name)
        queue.close()
        again.send("x")
        assert len(stage.empty(again)) == 1

    def test_a_with_block_closes(self, stage: Stage) -> None:
        with stage.create() as queue:
            queue.send("x")
        with pytest.raises(TransportError):
            queue.send("y")

    def test_an_interruption_ends_waits_and_nothing_else(self, stage: Stage) -> None:
        queue = stage.create()
        queue.interrupt()
        waits = [stage.aside(lambda: queue.receive(lease=LONG, wait=stage.wait(queue))) for _ in range(3)]
        assert [_interrupted(queue, waited) for waited in waits] == [[]] * 3
        waited = stage.aside(lambda: queue.receive(lease=LONG, wait=stage.wait(queue)))
        queue.send("x")
        (message,) = waited()
        assert message.body == "x"
        queue.delete(message.handle)

    def test_an_interruption_loses_no_message(self, stage: Stage) -> None:
        queue = stage.create()
        came: list[str] = []
        for number in range(10):
            waited = stage.aside(lambda: queue.receive(lease=LONG, wait=stage.wait(queue)))
            queue.send(str(number))
            queue.interrupt()
            for message in _interrupted(queue, waited):
                came.append(message.body)
                queue.delete(message.handle)
        while len(came) < 10:
            (message,) = stage.aside(lambda: queue.receive(lease=LONG, wait=stage.wait(queue)))()
            came.append(message.body)
            queue.delete(message.handle)
        assert sorted(came) == [str(number) for number in range(10)]

    def test_who_waits_comes_back(self, stage: Stage) -> None:
        queue = stage.create()
        waited = stage.aside(lambda: queue.receive(wait=stage.wait(queue)))
        queue.close()
        try:
            assert waited() == []
        except TransportError:
            pass
        other = stage.account.queue(queue.name)
        other.send("x")
        # The abandoned poll may still be parked in the server; it gives back what it receives.
        assert len(stage.aside(lambda: other.receive(wait=stage.wait(other)))()) == 1


def _interrupted(queue: Queue, waited: Callable[..., Any]) -> list[Any]:
    """The result of a receive that is interrupted until it ends: it may not have begun to wait the first time."""
    for _ in range(_TURNS):
        queue.interrupt()
        try:
            return list(waited(PATIENCE_SECONDS / _TURNS))
        except Unfinished:
            continue
    raise AssertionError("it waits on")


class TestThreads:
    """A queue is safe to call from many threads."""

    def test_what_some_send_others_receive_once(self, stage: Stage) -> None:
        queue = stage.create()

        def send(thread: int) -> None:
            for number in range(EACH):
                queue.send(f"{thread}-{number}")

        def take(thread: int) -> list[str]:
            bodies = []
            while received := queue.receive(2, lease=LONG, wait=1):
                for message in received:
                    handle = queue.extend(message.handle, LONG)
                    queue.delete(handle)
                    bodies.append(message.body)
                    done.append(message.id)
                if len(done) >= THREADS * EACH:
                    break
            return bodies

        done: list[str] = []
        with ThreadPoolExecutor(2 * THREADS) as pool:
            sending = [pool.submit(partial(send, thread)) for thread in range(THREADS)]
            for future in sending:
                future.result()
            taking = [pool.submit(partial(take, thread)) for thread in range(THREADS)]
            bodies = Counter(body for future in taking for body in future.result())
        assert bodies == Counter(f"{thread}-{number}" for thread in range(THREADS) for number in range(EACH))
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)
