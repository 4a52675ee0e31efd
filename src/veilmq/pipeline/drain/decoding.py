"""JSON bodies into columns of a schema, a bad one never stopping the others.

Strategy: msgspec decodes each body into a type made from Spark's schema, strictly but for what that schema cannot say;
fields that the schema lacks are ignored, missing ones are null. What does not fit goes, as it is, into the column for
corrupt records if the schema has one, as Spark's own reader does it; else the message is quarantined.
"""

import datetime
import decimal
from typing import Any, Final

import msgspec
from pyspark.sql import types

from veilmq.pipeline.drain.columns import ARROW_SCHEMA
from veilmq.pipeline.errors import OptionInvalid

_FLOAT_MAX: Final = (2 - 2**-23) * 2.0**127
METADATA: Final = {f"_{name}": name for name in ARROW_SCHEMA.names if name != "body"}
"""Columns of a schema for JSON that are the message's and not the body's."""


def _integer(bits: int) -> Any:
    return msgspec.Meta(ge=-(1 << bits - 1), le=(1 << bits - 1) - 1)


def python_type(kind: types.DataType, place: str) -> Any:
    """What msgspec decodes a value of this Spark type into. Raises OptionInvalid."""
    from typing import Annotated

    match kind:
        case types.ByteType():
            return Annotated[int, _integer(8)]
        case types.ShortType():
            return Annotated[int, _integer(16)]
        case types.IntegerType():
            return Annotated[int, _integer(32)]
        case types.LongType():
            return Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
        case types.ArrayType():
            return list[python_type(kind.elementType, place) | None]  # type: ignore[misc]
        case types.MapType() if isinstance(kind.keyType, types.StringType):
            return dict[str, python_type(kind.valueType, place) | None]  # type: ignore[misc]
        case types.StructType():
            fields = [
                (f"f{number}", python_type(field.dataType, f"{place}.{field.name}") | None, None)
                for number, field in enumerate(kind.fields)
            ]
            names = {f"f{number}": field.name for number, field in enumerate(kind.fields)}
            return msgspec.defstruct("Record", fields, rename=names)
    found = _PLAIN.get(type(kind))
    if found is None:
        raise OptionInvalid(f"Column {place}: format=json reads no {kind.simpleString()}.", "Read it as string.")
    return found


_PLAIN: Final[dict[type, Any]] = {
    types.StringType: str,
    types.BooleanType: bool,
    types.FloatType: float,
    types.DoubleType: float,
    types.DecimalType: decimal.Decimal,
    types.TimestampType: datetime.datetime,
    types.DateType: datetime.date,
    types.BinaryType: bytes,
}


class Decoding:
    """JSON for one schema. Raises OptionInvalid for a schema that cannot be."""

    def __init__(self, schema: types.StructType, corrupt_column: str) -> None:
        self.schema = schema
        self._corrupt = corrupt_column if corrupt_column in schema.fieldNames() else None
        if self._corrupt is not None and not isinstance(schema[self._corrupt].dataType, types.StringType):
            raise OptionInvalid(f"Column {self._corrupt} for corrupt records is no string.", "")
        self._fields = [field for field in schema.fields if field.name not in METADATA and field.name != self._corrupt]
        self._decoder = msgspec.json.Decoder(python_type(types.StructType(self._fields), "$"))

    def row(self, body: str, metadata: dict[str, Any]) -> dict[str, Any]:
        """The row of one body. Raises ValueError with the reason if it fits nowhere."""
        found = {name: metadata[METADATA[name]] for name in self.schema.fieldNames() if name in METADATA}
        try:
            record = self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            return self._unfit(body, found, str(error))
        try:
            values = [_plain(getattr(record, f"f{number}"), each.dataType) for number, each in enumerate(self._fields)]
        except ValueError as error:
            return self._unfit(body, found, str(error))
        return found | {each.name: value for each, value in zip(self._fields, values, strict=True)}

    def _unfit(self, body: str, found: dict[str, Any], reason: str) -> dict[str, Any]:
        if self._corrupt is None:
            raise ValueError(f"no JSON of the schema: {reason}")
        return found | {self._corrupt: body}


def _plain(value: Any, kind: types.DataType) -> Any:
    """As Arrow takes it: records as dicts, instants in UTC. Raises ValueError for what its type has no room for."""
    if value is None:
        return None
    match kind:
        case types.StructType():
            return {
                field.name: _plain(getattr(value, f"f{number}"), field.dataType)
                for number, field in enumerate(kind.fields)
            }
        case types.ArrayType():
            return [_plain(each, kind.elementType) for each in value]
        case types.MapType():
            return [(name, _plain(each, kind.valueType)) for name, each in value.items()]
        case types.TimestampType():
            return _in_utc(value)
        case types.DecimalType():
            return _scaled(value, kind)
        case types.FloatType() if abs(value) > _FLOAT_MAX:
            raise ValueError(f"{value} is no {kind.simpleString()}")
    return value


def _in_utc(value: datetime.datetime) -> datetime.datetime:
    if value.tzinfo is None:
        return value.replace(tzinfo=datetime.UTC)
    try:
        return value.astimezone(datetime.UTC)
    except OverflowError:
        raise ValueError(f"{value} is no year of 1 to 9999 in UTC") from None


def _scaled(value: decimal.Decimal, kind: types.DecimalType) -> decimal.Decimal:
    """Rounded to the column's scale."""
    # First, because to round 1e999999 would write it out.
    if value.is_finite() and value.adjusted() < kind.precision - kind.scale:
        rounded = value.quantize(decimal.Decimal(1).scaleb(-kind.scale), context=decimal.Context(prec=76))
        if len(rounded.as_tuple().digits) <= kind.precision:
            return rounded
    raise ValueError(f"{value} is no {kind.simpleString()}")
