"""Attributes between Python's values, SQS's texts and the JSON of logs: every number comes back as it went."""

import math
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.client.too_deep import TOO_DEEP

from veilmq.client.messages import Message, from_text, hint_of, to_text, typed, untyped
from veilmq.client.transaction.logbook import Form, decode, encode, new_entry
from veilmq.model.errors import ParameterInvalid
from veilmq.testing.client_contract import for_each

DIGITS_38 = "12345678901234567890123456789012345678"


class Level(IntEnum):
    HIGH = 3


class Colour(StrEnum):
    RED = "red"


@for_each(
    "text, value",
    [
        ("7", 7),
        ("-007", -7),
        (DIGITS_38, int(DIGITS_38)),
        ("0.1", 0.1),
        ("1.50", 1.5),
        ("1e+16", 1e16),
        (f"0.{DIGITS_38}", Decimal(f"0.{DIGITS_38}")),
        ("0.1000000000000000055511151231257827", Decimal("0.1000000000000000055511151231257827")),
        ("9007199254740993.0", Decimal("9007199254740993.0")),
        ("1e400", Decimal("1e400")),
        ("1e-400", Decimal("1e-400")),
    ],
)
def test_a_number_is_a_float_only_where_the_float_is_that_number(text: str, value: Any) -> None:
    found = untyped("Number.mine", text)
    assert (type(found), found) == (type(value), value)


@for_each(
    "text",
    ["nan", "-Infinity", "sNaN", "twelve", "9" * 5_000, "1e9999999999999999999", ""],
    ids=["nan", "infinite", "signalling", "word", "endless", "exponent", "empty"],
)
def test_what_is_no_number_to_python_stays_text(text: str) -> None:
    assert untyped("Number", text) == text


@given(
    st.decimals(allow_nan=False, allow_infinity=False)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)
def test_a_number_that_was_sent_can_be_had_exactly(value: Any) -> None:
    exact = Decimal(str(value))
    digits = "".join(map(str, exact.as_tuple().digits)).strip("0")
    if exact and (len(digits) > 38 or not -128 <= exact.adjusted() <= 126):
        with pytest.raises(ParameterInvalid):
            typed("n", value)
        return
    kind, content = typed("n", value)
    back = untyped(kind, content)
    assert Decimal(str(back)) == Decimal(str(value))
    if isinstance(value, float):
        assert (type(back), back) == (float, value) or value == int(value)


@for_each(
    "value, sent",
    [
        (numpy.float64(1.5), ("Number", "1.5")),
        (Level.HIGH, ("Number", "3")),
        (Colour.RED, ("String", "red")),
        (Decimal("1E+3"), ("Number", "1E+3")),
        (bytearray(b"ab"), ("Binary", b"ab")),
    ],
)
def test_subclasses_go_as_what_they_are(value: Any, sent: tuple[str, str | bytes]) -> None:
    kind, content = typed("a", value)
    assert (kind, content, type(content)) == (*sent, type(sent[1]))


@for_each(
    "value",
    [Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity"), 10**5_000, 1j],
    ids=["nan", "signalling", "infinite", "endless", "complex"],
)
def test_numbers_that_have_no_text_are_refused(value: Any) -> None:
    with pytest.raises(ParameterInvalid, match=r"attributes\['n'\]"):
        typed("n", value)


@for_each(
    "value, seconds",
    [(5, 5.0), (7.5, 7.5), (Decimal(f"1.{DIGITS_38}"), float(f"1.{DIGITS_38}")), (10**400, None), (-1, None),
     (Decimal("1e400"), None), (Decimal("1e-400"), None), ("soon", None), (b"5", None), (None, None)],
)  # fmt: skip
def test_a_hint_is_a_number_of_seconds_or_none(value: Any, seconds: float | None) -> None:
    assert hint_of(value) == seconds


def test_a_message_kept_as_text_keeps_its_attributes() -> None:
    given = {
        "d": Decimal(f"0.{DIGITS_38}"), "price": Decimal("19.90"), "i": 2**100, "f": 0.1, "whole": 3.0, "s": "{}",
        "b": b"\0\xff",
    }  # fmt: skip
    back = from_text(to_text(Message("x", given | {"array": bytearray(b"ab"), "numpy": numpy.float64(0.5)})))
    assert back is not None
    assert dict(back.attributes) == given | {"array": b"ab", "numpy": 0.5}
    assert {name: type(back.attributes[name]) for name in given} == {name: type(given[name]) for name in given}


def test_a_message_kept_as_text_may_live_for_ever() -> None:
    endless = Message("x", ttl=math.inf)
    assert from_text(to_text(endless)) == endless
    entry = new_entry("t", Form.LOGGED, endless, None, 0.0, None)
    assert decode(encode(entry)) == entry


def test_what_cannot_be_sent_is_not_kept_either() -> None:
    with pytest.raises(ParameterInvalid, match=r"attributes\['on'\]"):
        to_text(Message("x", {"on": True}))
    for field in ("delay", "ttl", "lease_hint"):
        with pytest.raises(ParameterInvalid, match=field):
            to_text(Message("x", **{field: math.nan if field == "ttl" else math.inf}))
    for wrong in (
        {"type": "\ud800"}, {"group": "\ud800"}, {"attributes": {"a": "\ud800"}}, {"attributes": {"\ud800": "a"}},
    ):  # fmt: skip
        with pytest.raises(ParameterInvalid, match=next(iter(wrong))):
            to_text(Message("x", **wrong))
    assert from_text('{"body":"x","attributes":{"a":{"decimal":"nine"}}}') is None
    assert from_text(f'{{"body":"x","attributes":{{"a":{TOO_DEEP}}}}}') is None
