"""Options of a message: delay, time to live, priority, lease hint, and a handle from its send."""

import pytest

from veilmq.client.messages import Message, Template
from veilmq.client.queue import HandleOnSend
from veilmq.model.errors import LeaseError, ParameterInvalid, VeilError
from veilmq.testing.client_contract.stage import LONG, SECOND, Stage


class TestOptions:
    """Fields of a `Message`, and the queue's own settings behind them."""

    def test_a_message_is_delayed(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send(Message("later", delay=stage.brief))
        queue.send("now")
        assert [message.body for message in stage.empty(queue)] == ["now"]
        stage.pass_time(stage.brief + SECOND)
        assert [message.body for message in stage.empty(queue)] == ["later"]

    def test_a_queue_delays_what_names_no_delay(self, stage: Stage) -> None:
        queue = stage.create(Template(delay=stage.brief))
        queue.send("later")
        queue.send(Message("now", delay=0))
        assert [message.body for message in stage.empty(queue)] == ["now"]
        stage.pass_time(stage.brief + SECOND)
        assert [message.body for message in stage.empty(queue)] == ["later"]

    def test_a_delay_that_is_too_long_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        for delay in (queue.capabilities.delay_max + 1, -1):
            with pytest.raises(ParameterInvalid) as refused:
                queue.send(Message("x", delay=delay))
            assert refused.value.parameter == "delay"
        assert queue.receive() == []

    def test_a_message_dies(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.ttl:
            return
        queue.send(Message("dead", ttl=SECOND))
        queue.send("alive")
        stage.pass_time(2 * SECOND)
        assert [message.body for message in stage.empty(queue)] == ["alive"]

    def test_a_message_may_die_before_its_delay_ends(self, stage: Stage) -> None:
        queue = stage.create()
        if not (queue.capabilities.retention_below_delay and queue.capabilities.ttl):
            return
        sent = queue.send(Message("unseen", delay=LONG, ttl=SECOND))
        stage.pass_time(2 * SECOND)
        if sent.handle is not None:
            with pytest.raises(LeaseError):
                queue.release(sent.handle)
        assert queue.receive() == []

    def test_the_most_urgent_comes_first(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.priorities:
            return
        for priority in (16, 8, 1, None):
            queue.send(Message(str(priority), priority=priority))
        bodies = [stage.take(queue).body for _ in range(4)]
        assert (bodies[0], bodies[3], set(bodies[1:3])) == ("1", "16", {"8", "None"})
        for priority in (0, 17, -1):
            with pytest.raises(ParameterInvalid) as refused:
                queue.send(Message("x", priority=priority))
            assert refused.value.parameter == "priority"

    def test_a_hint_is_the_lease_of_a_receive_that_names_none(self, stage: Stage) -> None:
        queue = stage.create(Template(visibility_timeout=LONG))
        if not queue.capabilities.lease_hints:
            return
        queue.send(Message("x", lease_hint=SECOND))
        before = stage.clock.monotonic()
        (hinted,) = queue.receive()
        assert before <= hinted.lease_end - SECOND <= stage.clock.monotonic()
        assert dict(hinted.attributes) == {}
        stage.pass_time(2 * SECOND)
        assert stage.take(queue, lease=LONG).id == hinted.id

    def test_when_a_send_gives_a_handle(self, stage: Stage) -> None:
        queue = stage.create()
        plain, delayed = queue.send("plain"), queue.send(Message("delayed", delay=LONG))
        given = queue.capabilities.handle_on_send
        assert (plain.handle is not None) is (given is HandleOnSend.ALWAYS)
        assert (delayed.handle is not None) is (given is not HandleOnSend.NEVER)

    def test_a_delayed_message_is_committed_by_the_handle_of_its_send(self, stage: Stage) -> None:
        queue = stage.create()
        if queue.capabilities.handle_on_send is HandleOnSend.NEVER:
            return
        sent = queue.send(Message("half", delay=LONG))
        assert sent.handle is not None
        assert queue.receive() == []
        queue.release(sent.handle)
        try:
            queue.release(sent.handle)  # again: no effect, and no second message
        except VeilError as error:
            assert isinstance(error, LeaseError)
        stage.back(queue)
        message = stage.take(queue)
        assert (message.id, message.receive_count) == (sent.id, 1)
        assert queue.receive() == []
        with pytest.raises(LeaseError):
            queue.release(sent.handle)
        queue.delete(message.handle)

    def test_a_delayed_message_is_rolled_back_by_the_handle_of_its_send(self, stage: Stage) -> None:
        queue = stage.create()
        if queue.capabilities.handle_on_send is HandleOnSend.NEVER:
            return
        sent = queue.send(Message("half", delay=stage.brief))
        assert sent.handle is not None
        queue.delete(sent.handle)
        stage.pass_time(stage.brief + SECOND)
        assert queue.receive() == []

    def test_a_delayed_message_is_rescheduled_by_the_handle_of_its_send(self, stage: Stage) -> None:
        queue = stage.create()
        if queue.capabilities.handle_on_send is HandleOnSend.NEVER:
            return
        sent = queue.send(Message("half", delay=stage.brief))
        assert sent.handle is not None
        queue.extend(sent.handle, LONG)
        stage.pass_time(stage.brief + SECOND)
        assert queue.receive() == []

    def test_a_dead_letter_goes_where_the_template_says(self, stage: Stage) -> None:
        dead = stage.create()
        template = Template(visibility_timeout=LONG, dead_letter_queue=dead.name, receive_count_max=1)
        try:
            queue = stage.create(template)
        except VeilError as error:
            assert type(error).__name__ == "CapabilityMissing"
            return
        message = stage.held(queue, "poison")
        queue.release(message.handle)
        stage.back(queue)
        assert queue.receive() == []
        assert stage.take(dead).body == "poison"
