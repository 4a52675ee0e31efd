"""Messages: bodies and attributes come back unchanged or are refused and leave no trace; options do what they say.

The options are delay, time to live, priority, lease hint, and a handle from the send. A batch has one result or one
error per entry, in order, each independent of the others.
"""

from decimal import Decimal
from typing import Any, Final

import pytest

from veilmq.client.messages import Extension, Message, Sent, Template
from veilmq.client.queue import HandleOnSend
from veilmq.model.errors import LeaseError, MessageTooLarge, ParameterInvalid, QueueMissing, VeilError
from veilmq.testing.client_contract.stage import LONG, SECOND, Number, Stage, Text, sent, unrefused

BODIES: Final = [
    "x",
    "žluťoučký 漢字 \U0001f600 \U0010fffd",
    "a\r\nb\rc\nd\te",
    "  spaces around  ",
    "<a b='c'>&amp;\"]]></a>",
    '{"n": 1, "s": "\\u0000"}',
    "100%25+%2B&a=b",
    "é" * 30_000,
    Text("of a subclass"),
]
NO_ATTRIBUTES: Final[list[dict[Any, Any]]] = [
    {"a": ""}, {"a": b""}, {"a": float("nan")}, {"a": True}, {"a": None}, {"": "x"}, {"a..b": "x"}, {"a b": "x"},
    {"a": "\0"}, {f"a{number}": "x" for number in range(11)},
]  # fmt: skip


class TestBodies:
    """Bodies and attributes."""

    def test_a_body_comes_back_as_it_went(self, stage: Stage) -> None:
        queue = stage.create()
        changed = []
        for body in BODIES:
            if queue.capabilities.base64_body:
                body = body[:24_000]
            sent = queue.send(body)
            received = stage.take(queue)
            if (received.body, received.id) != (body, sent.id):
                changed.append((body[:40], received.body[:40], received.id == sent.id))
        assert changed == []

    def test_what_xml_cannot_carry_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        bodies = [f"a{character}b" for character in ("\0", "\x0b", "\x1f", "\ud800", "\ufffe", "\uffff")]
        assert unrefused(queue.send, bodies, parameter=lambda _: "body") == []
        assert queue.receive() == []

    def test_a_message_larger_than_the_adapter_carries_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        able = queue.capabilities
        body = "é" * (able.body_bytes_max // 2)
        while able.transmitted_bytes(body) > able.body_bytes_max:
            body = body[: len(body) - 1 - (able.transmitted_bytes(body) - able.body_bytes_max) // 4]
        with pytest.raises(MessageTooLarge):
            queue.send(body + "é" * 4)
        queue.send(body)
        assert stage.take(queue).body == body

    def test_a_message_larger_than_the_queue_takes_is_refused(self, stage: Stage) -> None:
        queue = stage.create(Template(message_bytes_max=1024))
        most = 384 if queue.capabilities.base64_body else 512
        with pytest.raises(MessageTooLarge):
            queue.send("é" * (most + 1))
        queue.send("é" * most)
        assert len(stage.empty(queue)) == 1

    def test_attributes_come_back_with_their_kinds(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.attributes:
            return
        given: dict[str, Any] = {
            "text": "žluť\r\n'<&>\"",
            "digits": "007",
            "whole": -(10**37) - 1,
            "zero": 0,
            "part": 0.1,
            "tiny": 1e-7,
            "exact": Decimal("-12345678901234567890.123456789012345678"),
            "raw": bytes(range(256)),
            "dots.in_a-name": "x",
        }
        queue.send(Message("x", given))
        attributes = dict(stage.take(queue).attributes)
        assert attributes == given
        assert {name: type(value) for name, value in attributes.items()} == {
            name: type(value) for name, value in given.items()
        }

    def test_attributes_that_cannot_be_are_refused(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.attributes:
            return
        assert unrefused(lambda attributes: queue.send(Message("x", attributes)), NO_ATTRIBUTES) == []
        assert queue.receive() == []

    def test_a_type_travels_and_is_no_attribute(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.attributes:
            return
        queue.send(Message("x", {Text("a"): Text("b")}, type=Text("invoice")))
        received = stage.take(queue)
        assert (received.type, dict(received.attributes)) == ("invoice", {"a": "b"})

    def test_a_group_comes_back(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.groups:
            return
        queue.send(Message("x", group=Text("tenant-1")))
        assert stage.take(queue).group == "tenant-1"

    def test_a_plain_message_has_nothing_that_was_not_given(self, stage: Stage) -> None:
        queue = stage.create()
        received = stage.held(queue)
        assert (dict(received.attributes), received.group, received.type) == ({}, None, None)
        assert received.receive_count == 1


class TestOptions:
    """Fields of a `Message`, and the queue's own settings behind them."""

    def test_a_message_is_delayed(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send(Message("later", delay=Number(stage.brief)))
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


class TestBatches:
    """send_batch, extend_batch, delete_batch."""

    def test_more_than_one_request_takes(self, stage: Stage) -> None:
        queue = stage.create()
        bodies = [f"m{number}" for number in range(25)]
        results = [sent(result) for result in queue.send_batch(bodies)]
        received = stage.empty(queue)
        assert {message.id: message.body for message in received} == {
            result.id: body for result, body in zip(results, bodies, strict=True)
        }
        handles = queue.extend_batch([Extension(message.handle, LONG) for message in received])
        assert all(isinstance(handle, str) for handle in handles)
        assert queue.delete_batch([str(handle) for handle in handles]) == [None] * 25
        assert (queue.stats().visible, queue.stats().in_flight or 0) == (0, 0)

    def test_nothing_to_do(self, stage: Stage) -> None:
        queue = stage.create()
        assert (queue.send_batch([]), queue.extend_batch([]), queue.delete_batch([])) == ([], [], [])

    def test_large_messages_share_no_request_that_cannot_carry_them(self, stage: Stage) -> None:
        queue = stage.create()
        size = queue.capabilities.body_bytes_max // 4
        bodies = [f"{number}" * size for number in range(6)]
        bodies = [body[: size * 3 // 4] for body in bodies]
        for result in queue.send_batch(bodies):
            sent(result)
        assert sorted(message.body[0] for message in stage.empty(queue)) == list("012345")

    def test_messages_that_cannot_be_leave_the_others_alone(self, stage: Stage) -> None:
        queue = stage.create()
        large = "x" * (queue.capabilities.body_bytes_max + 1)
        late = [f"m{number}" for number in range(12)]
        entries: list[str | Message] = ["a", "bad\0", Message("b"), large, Message("c", delay=-1), *late]
        results = queue.send_batch(entries)
        kinds = [type(result) for result in results]
        assert kinds == [Sent, ParameterInvalid, Sent, MessageTooLarge, ParameterInvalid, *[Sent] * 12]
        assert {message.body for message in stage.empty(queue)} == {"a", "b", *late}

    def test_extends_that_cannot_be_leave_the_others_alone(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send_batch([f"m{number}" for number in range(12)])
        held = stage.empty(queue)
        gone = held[5]
        queue.delete(gone.handle)
        extensions = [Extension(message.handle, LONG) for message in held]
        extensions.insert(0, Extension("no-handle", LONG))
        extensions.append(Extension(held[0].handle, queue.capabilities.lease_max + 1))
        results = queue.extend_batch(extensions)
        failed = [place for place, result in enumerate(results) if isinstance(result, VeilError)]
        assert failed == [0, 6, 13]
        assert isinstance(results[13], ParameterInvalid)

    def test_each_extension_has_its_own_length(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send_batch(["short", "long"])
        held = {message.body: message for message in stage.empty(queue)}
        extensions = [Extension(held["short"].handle, SECOND), Extension(held["long"].handle, LONG)]
        assert all(isinstance(handle, str) for handle in queue.extend_batch(extensions))
        stage.pass_time(2 * SECOND)
        assert [message.body for message in stage.empty(queue)] == ["short"]

    def test_deletes_that_cannot_be_leave_the_others_alone(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send_batch([f"m{number}" for number in range(12)])
        held = stage.empty(queue)
        handles = [message.handle for message in held]
        results = queue.delete_batch([*handles[:3], "no-handle", *handles[3:]])
        assert [place for place, result in enumerate(results) if result is not None] == [3]
        assert isinstance(results[3], VeilError)
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)

    def test_a_queue_that_is_gone_raises(self, stage: Stage) -> None:
        queue = stage.create()
        held = stage.held(queue)
        stage.account.delete(queue.name)
        for call in (
            lambda: queue.send_batch(["a", "b"]),
            lambda: queue.extend_batch([Extension(held.handle, LONG)]),
            lambda: queue.delete_batch([held.handle]),
        ):
            with pytest.raises(QueueMissing):
                call()
