"""JSON into values, without Spark."""

import decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types
from tests.pipeline.drain_stage import Stage, left, send
from tests.pipeline.test_drain_driver import START, Play

from veilmq.client.messages import Message
from veilmq.pipeline.drain import read_bad_records
from veilmq.pipeline.drain.manifests import BYTES_PER_BATCH
from veilmq.pipeline.drain.source import Decoding, rows
from veilmq.pipeline.errors import OptionInvalid
from veilmq.testing.for_each import for_each

ID = types.StructField("_id", types.StringType())
CORRUPT = types.StructField("_corrupt_record", types.StringType())
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


@for_each("text", ["3.402823568e38", "-1e39", "1e308"])
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


def filled(kind: types.DataType) -> types.StructField:
    return types.StructField("v", kind, nullable=False)


INT, TEXT = types.IntegerType(), types.StringType()


@for_each(
    ("field", "bad"),
    [
        (filled(INT), "{}"), (filled(INT), '{"v": null}'),
        (filled(types.DecimalType(10, 2)), "{}"), (filled(types.DecimalType(10, 2)), '{"v": null}'),
        (types.StructField("v", types.ArrayType(INT, containsNull=False)), '{"v": [1, null]}'),
        (types.StructField("v", types.MapType(TEXT, INT, valueContainsNull=False)), '{"v": {"k": null}}'),
        (types.StructField("v", types.StructType([filled(INT)])), '{"v": {}}'),
    ],
)  # fmt: skip
def test_a_null_that_the_schema_does_not_allow_is_no_json_of_it(field: types.StructField, bad: str) -> None:
    schema = types.StructType([field, ID])
    with pytest.raises(ValueError, match=r"no JSON of the schema: .* NOT NULL is null or missing"):
        Decoding(schema, "_corrupt_record").row(bad, {})
    row = Decoding(schema.add(CORRUPT), "_corrupt_record")
    if field.nullable:
        assert row.row(bad, {"id": "1"}) == {"_id": "1", "_corrupt_record": bad}
    else:
        with pytest.raises(ValueError, match="no JSON of the schema"):
            row.row(bad, {})


def test_the_column_for_corrupt_records_must_allow_nulls() -> None:
    schema = types.StructType([types.StructField("_corrupt_record", TEXT, nullable=False)])
    with pytest.raises(OptionInvalid, match="_corrupt_record is NOT NULL"):
        Decoding(schema, "_corrupt_record")


def test_large_decoded_bodies_are_handed_on_a_few_at_a_time(stage: Stage) -> None:
    """Java loads each record batch as a whole."""
    body = f'{{"v": "{"x" * 1_000_000}"}}'
    with stage.make() as queue:
        for _ in range(4):
            send(queue, [body] * 5)
        play = Play(stage, format="json", partitions=1)
        (span,) = play.driver.pieces(START, play.driver.latest(START, 100))
        found = list(rows(span, types.StructType([types.StructField("v", TEXT)]), play.options))
        play.driver.close()
    assert sum(batch.num_rows for batch in found) == 20
    assert max(batch.nbytes for batch in found) < BYTES_PER_BATCH + 1_000_000


@pytest.mark.parametrize("form", ["raw", "json"])
def test_a_message_with_a_null_that_the_schema_does_not_allow_is_a_bad_record(stage: Stage, form: str) -> None:
    """Java fails on such a row, and Spark repeats the batch for ever."""
    column = {"raw": "type", "json": "_type"}[form]
    with stage.make() as queue:
        queue.send_batch([Message("{}", type="a"), Message("{}")])
        play = Play(stage, format=form)
        end = play.driver.latest(START, 10)
        (span,) = play.driver.pieces(START, end)
        schema = types.StructType([types.StructField(column, TEXT, nullable=False)])
        found = [row for batch in rows(span, schema, play.options) for row in batch.to_pylist()]
        assert found == [{column: "a"}]
        (bad,) = read_bad_records(Path(play.options.directory))
        assert bad.reason == f"the column {column} is NOT NULL, and null in this row"
        assert play.driver.latest(end, 10) == end
        assert left(queue) == 0
        play.driver.close()
