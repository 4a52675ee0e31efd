"""JSON into values, without Spark."""

import decimal
from typing import Any

import pytest
from pyspark.sql import types

from veilmq.pipeline.drain.source import Decoding
from veilmq.testing.for_each import for_each

LARGEST = (2 - 2**-23) * 2.0**127


def decoded(kind: types.DataType, text: str) -> Any:
    """Of a body with one field."""
    schema = types.StructType([types.StructField("v", kind)])
    return Decoding(schema, "_corrupt_record").row(f'{{"v": {text} }}', {})["v"]


@for_each(
    ("text", "value"),
    [("3.4028235e38", LARGEST), ("-3.4028235e38", -LARGEST), ("3.4028234e38", LARGEST), ("0.5", 0.5), ("1", 1.0)],
)
def test_a_float_is_what_32_bits_have_of_it(text: str, value: float) -> None:
    assert decoded(types.FloatType(), text) == value


@pytest.mark.parametrize("text", ["3.402823568e38", "-1e39", "1e308"])
def test_a_float_beyond_32_bits_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="is no float"):
        decoded(types.FloatType(), text)


@for_each(
    ("text", "value"),
    [
        ("12.345", "12.34"), ('"12.345"', "12.34"), ("-1e2", "-100.00"), ('"-1E+2"', "-100.00"), ('"007"', "7.00"),
        ("null", None), ("99999999.99", "99999999.99"),
    ],
)  # fmt: skip
def test_a_decimal_may_be_a_number_or_its_text(text: str, value: str | None) -> None:
    expected = None if value is None else decimal.Decimal(value)
    assert decoded(types.DecimalType(10, 2), text) == expected
    assert decoded(types.ArrayType(types.DecimalType(10, 2)), f"[{text}, {text}]") == [expected] * 2
    nested = types.MapType(types.StringType(), types.StructType([types.StructField("w", types.DecimalType(10, 2))]))
    assert decoded(nested, f'{{"k": {{"w":{text}}}}}') == [("k", {"w": expected})]


@for_each(
    "text",
    [
        '"1_0"', '" 1 "', '"NaN"', '"Infinity"', '"1."', '".5"', '"+1"', '"\u0663"', '""', "true", "[1]", '{"a": 1}',
        "1e9999999999999999999", '"1', "123456789.00",
    ],
)  # fmt: skip
def test_other_spellings_of_decimals_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="no JSON of the schema"):
        decoded(types.DecimalType(10, 2), text)
