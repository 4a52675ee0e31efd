"""The type of a message: its sender's word, an attribute, a place in the body."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.contract.stage import TESTER

from veilmq.model.commands import Send
from veilmq.model.message_type import BODY_CHARACTERS_MAX, MessageTypes, parse_pointer
from veilmq.model.messages import NO_EXTRAS, Attribute, Extras
from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each

QUEUE = QueueKey("000000000000", "us-east-1", "jobs")


def send(body: str = "x", extras: Extras = NO_EXTRAS) -> Send:
    return Send(queue=QUEUE, origin=TESTER, body=body, md5=b"", size_bytes=1, extras=extras)


def with_attribute(name: str, kind: str, value: str | bytes) -> Extras:
    return Extras(attributes=(Attribute("first", "String", "1"), Attribute(name, kind, value)))


@for_each(
    ("pointer", "body", "found"),
    [
        ("/type", '{"type": "resize"}', "resize"),
        ("/type", ' \r\n\t{"type": "resize"}', "resize"),
        ("/detail/kind", '{"detail": {"kind": "ä/ö"}}', "ä/ö"),
        ("/0/type", '[{"type": 7}]', "7"),
        ("/a~1b/m~0n", '{"a/b": {"m~n": "x"}}', "x"),
        ("/", '{"": "empty name"}', "empty name"),
        ("/type", '{"type": null}', None),
        ("/type", '{"type": true}', None),
        ("/type", '{"type": 1.5}', None),
        ("/type", '{"type": {}}', None),
        ("/type", '{"type": ""}', None),
        ("/type", '{"type": "\\u0000"}', None),
        ("/type", '{"type": "%s"}' % ("x" * 256), "x" * 256),
        ("/type", '{"type": "%s"}' % ("x" * 257), None),
        ("/type", '{"other": 1}', None),
        ("/type", '"type"', None),
        ("/type", "type", None),
        ("/type", '{"type": "resize"', None),
        ("/type", "", None),
        ("/5/type", '[{"type": "x"}]', None),
        ("/²", '["x", "y", "z"]', None),
        ("/" + "9" * 5_000, '["x"]', None),
        ("/type", "[" * 60_000, None),
        ("/type", '{"type": "x", "y": "%s"}' % ("y" * BODY_CHARACTERS_MAX), None),
        ("", '{"type": "resize"}', None),
    ],
)
def test_a_place_in_the_body(pointer: str, body: str, found: str | None) -> None:
    command = send(body)
    typed = MessageTypes(pointer=pointer).typed(command)
    assert typed.extras.type == found
    assert msgspec.structs.replace(typed, extras=NO_EXTRAS) == command


@for_each(
    ("kind", "value", "found"),
    [("String", "resize", "resize"), ("Number", "7", "7"), ("String.x", "y", "y"), ("Binary", b"resize", None),
     ("String", "x" * 257, None)],
)  # fmt: skip
def test_an_attribute(kind: str, value: str | bytes, found: str | None) -> None:
    extras = with_attribute("veilmq.type", kind, value)
    typed = MessageTypes().typed(send(extras=extras))
    assert typed.extras == msgspec.structs.replace(extras, type=found)
    assert MessageTypes("other").typed(send(extras=extras)).extras is extras
    assert MessageTypes("first").typed(send(extras=extras)).extras.type == "1"


def test_who_says_more_wins() -> None:
    types = MessageTypes("kind", "/type")
    body = '{"type": "of the body"}'
    attribute = with_attribute("kind", "String", "of the attribute")
    assert types.typed(send(body)).extras.type == "of the body"
    assert types.typed(send(body, attribute)).extras.type == "of the attribute"
    own = msgspec.structs.replace(attribute, type="own")
    assert types.typed(send(body, own)).extras.type == "own"


def test_a_message_like_most_stays_as_it_is() -> None:
    command = send('{"type": "resize"}')
    assert MessageTypes().typed(command) is command


@given(steps=st.lists(st.text(max_size=5), min_size=1, max_size=5))
def test_a_pointer_names_each_step(steps: list[str]) -> None:
    pointer = "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)
    assert parse_pointer(pointer) == tuple(steps)


@for_each("text", ["type", "#/type", "/a~", "/a~2b", "/~~1"])
def test_what_is_no_pointer(text: str) -> None:
    with pytest.raises(ValueError, match="JSON pointer"):
        MessageTypes(pointer=text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(body=VALUES.map(lambda value: msgspec.json.encode(value).decode()) | st.text())
def test_no_body_is_refused(body: str) -> None:
    for pointer in ("/type", "/0", "/"):
        MessageTypes(pointer=pointer).typed(send(body))
