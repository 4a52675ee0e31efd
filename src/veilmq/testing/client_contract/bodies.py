"""Bodies and attributes: they come back unchanged, or are refused and leave no trace."""

from decimal import Decimal
from typing import Any, Final

import pytest

from veilmq.client.messages import Message, Template
from veilmq.model.errors import MessageTooLarge
from veilmq.testing.client_contract.stage import Stage, unrefused

BODIES: Final = [
    "x",
    "žluťoučký 漢字 \U0001f600 \U0010fffd",
    "a\r\nb\rc\nd\te",
    "  spaces around  ",
    "<a b='c'>&amp;\"]]></a>",
    '{"n": 1, "s": "\\u0000"}',
    "100%25+%2B&a=b",
    "é" * 30_000,
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
        queue.send(Message("x", {"a": "b"}, type="invoice"))
        received = stage.take(queue)
        assert (received.type, dict(received.attributes)) == ("invoice", {"a": "b"})

    def test_a_group_comes_back(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.groups:
            return
        queue.send(Message("x", group="tenant-1"))
        assert stage.take(queue).group == "tenant-1"

    def test_a_plain_message_has_nothing_that_was_not_given(self, stage: Stage) -> None:
        queue = stage.create()
        received = stage.held(queue)
        assert (dict(received.attributes), received.group, received.type) == ({}, None, None)
        assert received.receive_count == 1
