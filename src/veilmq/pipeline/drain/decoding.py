"""Restores the bodies that a sender's patterns wrapped, and decodes JSON bodies into the columns of a schema.

Strategy: it runs on executors, and a bad body never stops the others. The client's own readers restore a body (fetch
its object, decrypt it) in the order of the option `unwrap`; if a message is faulty (Unreadable), it is a bad
record; if a store cannot be reached, the task fails and Spark retries it.

msgspec decodes each JSON body into a type built from Spark's schema, strictly except where the schema is less strict;
fields that are not in the schema are ignored, missing ones become null. A body that does not fit goes unchanged into
the column for corrupt records if the schema has one, as in Spark's own reader; else the message is a bad record.
"""

import datetime
import decimal
import functools
import re
import struct
from typing import Any, Final

import msgspec
from pyspark.sql import types

from veilmq.client.adapters.connect import parse_url
from veilmq.client.clock import SYSTEM
from veilmq.client.encrypted import Cipher, Keys
from veilmq.client.errors import KeyFileInvalid
from veilmq.client.large import BODY_BYTES_MAX, PointerFormat
from veilmq.client.large.pointer import Fetcher
from veilmq.client.messages import Peeked
from veilmq.client.records import ObjectStore
from veilmq.client.unreadable import keep
from veilmq.model.errors import ParameterInvalid
from veilmq.pipeline.drain.manifests import ARROW_SCHEMA, QUEUE
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.options import DrainOptions, store_options_of

_FLOAT: Final = struct.Struct("<f")
_DECIMAL: Final = re.compile(rb'("?)(-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\1')
_NULL: Final = b"null"
METADATA: Final = {f"_{name}": name for name in (*ARROW_SCHEMA.names, QUEUE.name) if name != "body"}
"""Columns of a JSON schema that hold the message's metadata, not fields of the body."""
_PLAIN: Final[dict[type, Any]] = {
    types.StringType: str,
    types.BooleanType: bool,
    types.FloatType: float,
    types.DoubleType: float,
    # msgspec's own decimal accepts texts in Python's notation, such as "1_0".
    types.DecimalType: msgspec.Raw,
    types.TimestampType: datetime.datetime,
    types.DateType: datetime.date,
    types.BinaryType: bytes,
}


def _integer(bits: int) -> Any:
    return msgspec.Meta(ge=-(1 << bits - 1), le=(1 << bits - 1) - 1)


def python_type(kind: types.DataType, place: str) -> Any:
    """The type that msgspec decodes a value of this Spark type into. Raises OptionInvalid."""
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
            return list[_or_none(kind.elementType, place)]  # type: ignore[misc]
        case types.MapType() if isinstance(kind.keyType, types.StringType):
            return dict[str, _or_none(kind.valueType, place)]  # type: ignore[misc]
        case types.StructType():
            fields = [
                (f"f{number}", _or_none(field.dataType, f"{place}.{field.name}"), None)
                for number, field in enumerate(kind.fields)
            ]
            names = {f"f{number}": field.name for number, field in enumerate(kind.fields)}
            return msgspec.defstruct("Record", fields, rename=names)
    found = _PLAIN.get(type(kind))
    if found is None:
        raise OptionInvalid(f"Column {place}: format=json reads no {kind.simpleString()}.", "Read it as string.")
    return found


def _or_none(kind: types.DataType, place: str) -> Any:
    found = python_type(kind, place)
    # A raw value may be null anyway, and msgspec does not accept it in a union.
    return found if found is msgspec.Raw else found | None


class Decoding:
    """Decodes JSON for one schema. Raises OptionInvalid for an unsupported schema."""

    def __init__(self, schema: types.StructType, corrupt_column: str) -> None:
        self.schema = schema
        self._corrupt = corrupt_column if corrupt_column in schema.fieldNames() else None
        if self._corrupt is not None and not isinstance(schema[self._corrupt].dataType, types.StringType):
            raise OptionInvalid(f"Column {self._corrupt} for corrupt records is no string.", "")
        self._fields = [field for field in schema.fields if field.name not in METADATA and field.name != self._corrupt]
        self._decoder = msgspec.json.Decoder(python_type(types.StructType(self._fields), "$"))

    def row(self, body: str, metadata: dict[str, Any]) -> dict[str, Any]:
        """The row of one body. Raises ValueError with the reason if the body does not fit."""
        found = {name: metadata.get(METADATA[name]) for name in self.schema.fieldNames() if name in METADATA}
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
    """The value as Arrow takes it: records as dicts, instants in UTC. Raises ValueError if the type cannot hold it."""
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
            return None if bytes(value) == _NULL else _scaled(_decimal(bytes(value), kind), kind)
        case types.FloatType():
            return _rounded(value, kind)
    return value


def _rounded(value: float, kind: types.FloatType) -> float:
    """Rounded to a 32-bit float, so that the largest one does not count as too large because of its decimal
    notation."""
    try:
        return float(_FLOAT.unpack(_FLOAT.pack(value))[0])
    except OverflowError:
        raise ValueError(f"{value} is no {kind.simpleString()}") from None


def _in_utc(value: datetime.datetime) -> datetime.datetime:
    if value.tzinfo is None:
        return value.replace(tzinfo=datetime.UTC)
    try:
        return value.astimezone(datetime.UTC)
    except OverflowError:
        raise ValueError(f"{value} is no year of 1 to 9999 in UTC") from None


def _decimal(raw: bytes, kind: types.DecimalType) -> decimal.Decimal:
    """A JSON number, or a text that contains one."""
    found = _DECIMAL.fullmatch(raw)
    try:
        if found is not None:
            return decimal.Decimal(found[2].decode())
    except decimal.InvalidOperation:  # the exponent is out of range
        pass
    raise ValueError(f"{raw[:40].decode(errors='replace')} is no {kind.simpleString()}")


def _scaled(value: decimal.Decimal, kind: types.DecimalType) -> decimal.Decimal:
    """Rounded to the column's scale."""
    # Checked first: rounding 1e999999 would write out all its digits.
    if value.is_finite() and value.adjusted() < kind.precision - kind.scale:
        rounded = value.quantize(decimal.Decimal(1).scaleb(-kind.scale), context=decimal.Context(prec=76))
        if len(rounded.as_tuple().digits) <= kind.precision:
            return rounded
    raise ValueError(f"{value} is no {kind.simpleString()}")


class Unwrapping:
    """The steps of one query. Raises OptionInvalid for invalid keys or an invalid store."""

    def __init__(self, options: DrainOptions) -> None:
        try:
            self._steps = [_large(options) if step == "large" else _encrypted(options) for step in options.unwrap]
        except (ParameterInvalid, KeyFileInvalid, ValueError) as error:
            raise OptionInvalid(f"unwrap={','.join(options.unwrap)}: {error}.", "") from None

    def body(self, message: Peeked, queue: str | None = None) -> str:
        """The body as it was sent. `queue`: where it came from, in a drain of many.

        Raises Unreadable, and ObjectStoreFailed, which says nothing about the message.
        """
        for step in self._steps:
            message = Peeked(message.id, step(message, queue), message.attributes)
        return message.body


def _large(options: DrainOptions) -> Any:
    store = ObjectStore(str(options.store), options=store_options_of(options))
    nowhere: Any = None  # without leases there is nothing to ask the queue
    fetcher = Fetcher(nowhere, store, PointerFormat(options.pointers), BODY_BYTES_MAX, keep, SYSTEM)
    return lambda message, queue: fetcher.peeked(message).body


def _encrypted(options: DrainOptions) -> Any:
    keys = Keys.read(str(options.keys))

    @functools.cache
    def cipher(queue: str | None) -> Cipher:
        return Cipher(keys, options.algorithms, options.bound_to or queue or parse_url(options.url).queue or "", ())

    cipher(None)  # what is wrong with the options is found before a message is
    return lambda message, queue: cipher(queue).decrypt(message.body, message.id)
