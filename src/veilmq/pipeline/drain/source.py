"""`veilmq`: drains a queue as a stream, each message once; and sends rows to a queue.

    spark.readStream.format("veilmq").option("url", "veil://127.0.0.1:9324/orders").option("directory", "/m").load()
    frame.write.format("veilmq").option("url", "veil://127.0.0.1:9324/orders").mode("append").save()

Options of the stream: those of `DrainOptions`, in camel case; of the sink: those of `SendOptions`. The offset of the
stream is `{"seq", "file", "sha256"}`: the last manifest.

Strategy: Spark creates two readers, one that the driver calls and one that it pickles for `read`, and never says which
is which or when it ends. So the constructor only stores options, and the first hook that only the driver calls opens
the rest.

An executor reads the rows of a part of a manifest. A plain drain passes Arrow record batches on unchanged. With
`unwrap` or `format=json` a task first processes all its rows and keeps the bad records, and only then yields the
others. So a query that does not read to the end cannot lose a bad record.

Bodies that a sender's patterns wrapped are restored on executors, and a bad body never stops the others. The client's
own readers restore a body (fetch its object, decrypt it) in the order of the option `unwrap`; if a message is faulty
(Unreadable), it is a bad record; if a store cannot be reached, the task fails and Spark retries it.

msgspec decodes each JSON body into a type built from Spark's schema, strictly except where the schema is less strict;
fields that are not in the schema are ignored, missing ones become null. A body that does not fit goes unchanged into
the column for corrupt records if the schema has one, as in Spark's own reader; else the message is a bad record. So is
one whose row would have a null where the schema is NOT NULL: Java fails on that, and the batch would never pass.
"""

import datetime
import decimal
import functools
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from veilmq.client.adapters.connect import parse_url
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import KeyFileInvalid, Unreadable
from veilmq.client.large import BODY_BYTES_MAX, PointerFormat
from veilmq.client.large.pointer import Fetcher
from veilmq.client.messages import Peeked
from veilmq.client.records import ObjectStore
from veilmq.client.unreadable import keep
from veilmq.model.errors import ParameterInvalid
from veilmq.pipeline.drain import bad_records
from veilmq.pipeline.drain.bad_records import BadRecord
from veilmq.pipeline.drain.driver import Driver, Span
from veilmq.pipeline.drain.manifests import ARROW_SCHEMA, QUEUE, SPARK_SCHEMA, Offset, cuts, open_manifest
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.options import ROWS_DEFAULT, DrainOptions, read_options, read_send_options, store_options_of
from veilmq.pipeline.places import Place, place
from veilmq.pipeline.sinks.queue import QueueStreamWriter, QueueWriter

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


class Piece(InputPartition):
    """A part of a manifest: one task."""

    def __init__(self, span: Span) -> None:
        super().__init__(None)
        self.span = span


class DrainReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The queue as a stream."""

    def __init__(self, schema: Any, options: DrainOptions) -> None:
        check_schema(schema, options)
        self._schema, self._options = schema, options
        self._driver: Driver | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_schema": self._schema, "_options": self._options, "_driver": None}

    def initialOffset(self) -> dict[str, Any]:
        """The offset before the first batch."""
        return Offset()._asdict()

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxRows` a micro-batch."""
        return ReadMaxRows(self._options.max_rows or ROWS_DEFAULT)

    def prepareForTriggerAvailableNow(self) -> None:
        """This run ends with what the queue holds now."""
        self._opened().prepare()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Receive the next batch; delete what `start` says is committed."""
        # Spark may ask for an unlimited read, but a queue has no end and a manifest needs one.
        bound = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return self._opened().latest(Offset.read(start), bound)._asdict()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The backlog, for StreamingQueryProgress."""
        return self._opened().backlog()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Parts of the manifest `end`."""
        return [Piece(span) for span in self._opened().pieces(Offset.read(start), Offset.read(end))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Record batches of one part."""
        assert isinstance(partition, Piece)
        yield from rows(partition.span, self._schema, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        """Begins the deletes that are left: Spark calls it late or never, so `latestOffset` does it, too."""
        self._opened().committed(Offset.read(end))

    def stop(self) -> None:
        """Spark may or may not call it."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _opened(self) -> Driver:
        if self._driver is None:
            self._driver = Driver(self._options)
        return self._driver


class QueueSource(DataSource):
    """The data source; Spark creates one for each use."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return "veilmq"

    def schema(self) -> str:
        """The columns of a message; JSON bodies need a schema from the user."""
        options = read_options(self.options)
        if options.format == "json":
            raise OptionInvalid("format=json needs a schema.", "Give it with .schema('...').")
        return f"`queue` string, {SPARK_SCHEMA}" if options.queues else SPARK_SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        """Refused: a batch read has no later moment at which its messages could be deleted."""
        raise OptionInvalid(
            "A queue is no table: spark.read cannot drain it exactly once.",
            "Use spark.readStream with trigger(availableNow=True), or veilmq.pipeline.drain.drain.",
        )

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """For `spark.readStream`."""
        return DrainReader(schema, read_options(self.options))

    def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
        """For `DataFrame.write`."""
        return QueueWriter(schema, read_send_options(self.options), overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        """For `DataFrame.writeStream`, in append and update mode."""
        if overwrite:
            raise OptionInvalid("A queue cannot be overwritten.", "Use outputMode('append').")
        return QueueStreamWriter(schema, read_send_options(self.options))


def check_schema(schema: types.StructType, options: DrainOptions) -> None:
    """Raises OptionInvalid for a schema that the source cannot provide."""
    able = ARROW_SCHEMA.append(QUEUE) if options.queues else ARROW_SCHEMA
    names = {name: name for name in able.names}
    if options.format == "json":
        Decoding(schema, options.column_name_of_corrupt_record)
        schema = types.StructType([field for field in schema.fields if field.name in METADATA])
        names = {column: name for column, name in METADATA.items() if name in able.names}
    for field in arrow_schema(schema):
        if field.name not in names or able.field(names[field.name]).type != field.type:
            raise OptionInvalid(
                f"veilmq has no column {field.name} of the type {field.type}.", f"It has {', '.join(names)}."
            )


def arrow_schema(schema: types.StructType) -> Any:
    """The Arrow schema in which Spark wants record batches."""
    return to_arrow_schema(schema, timezone="UTC")


def rows(span: Span, schema: types.StructType, options: DrainOptions) -> Iterator[Any]:
    """Record batches. Raises ManifestDamaged, ObjectStoreFailed (Spark retries the task), OptionInvalid."""
    path, first, stop = span
    wanted = arrow_schema(schema)
    needed = [field.name for field in schema.fields if not field.nullable]
    if options.format == "raw" and not options.unwrap and not needed:
        with open_manifest(place(path)) as reader:
            for at in range(first, stop):
                batch = reader.get_batch(at)
                yield pa.RecordBatch.from_arrays([batch.column(name) for name in wanted.names], schema=wanted)
        return
    good, lengths = _decoded(place(path), first, stop, schema, options, needed)
    for start, end in cuts(lengths):
        columns = [pa.array([row.get(field.name) for row in good[start:end]], field.type) for field in wanted]
        yield pa.RecordBatch.from_arrays(columns, schema=wanted)


def _decoded(
    path: Place, first: int, stop: int, schema: types.StructType, options: DrainOptions, needed: list[str]
) -> tuple[list[dict[str, Any]], list[int]]:
    """The good rows, and the lengths of their bodies; others are kept as bad records. needed: columns without nulls."""
    unwrapping = Unwrapping(options)
    decoding = Decoding(schema, options.column_name_of_corrupt_record) if options.format == "json" else None
    good: list[dict[str, Any]] = []
    lengths: list[int] = []
    bad: list[BadRecord] = []
    with open_manifest(path) as reader:
        for at in range(first, stop):
            for row in reader.get_batch(at).to_pylist():
                try:
                    message = Peeked(row["id"], row["body"], dict(row["attributes"]))
                    body = unwrapping.body(message, row.get("queue"))
                    found = {**row, "body": body} if decoding is None else decoding.row(body, row)
                    if (empty := next((name for name in needed if found.get(name) is None), None)) is not None:
                        raise ValueError(f"the column {empty} is NOT NULL, and null in this row")
                    good.append(found)
                    lengths.append(len(body))
                except (Unreadable, ValueError) as error:
                    bad.append(_bad_record(row, str(error)))
    bad_records.write(path, first, bad)
    return good, lengths


def _bad_record(row: dict[str, Any], reason: str) -> BadRecord:
    return BadRecord(
        id=row["id"],
        body=row["body"],
        reason=reason,
        attributes=dict(row["attributes"]),
        type=row["type"],
        group=row["group"],
        sent=None if row["sent"] is None else row["sent"].timestamp(),
        receive_count=row["receive_count"],
        batch=row["batch"],
        queue=row.get("queue"),
    )


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
        if self._corrupt is not None and not schema[self._corrupt].nullable:
            raise OptionInvalid(f"Column {self._corrupt} is NOT NULL, and a sound record has a null there.", "")
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
            values = _values(record, self._fields)
        except ValueError as error:
            return self._unfit(body, found, str(error))
        return found | {each.name: value for each, value in zip(self._fields, values, strict=True)}

    def _unfit(self, body: str, found: dict[str, Any], reason: str) -> dict[str, Any]:
        if self._corrupt is None or any(not field.nullable for field in self._fields):
            raise ValueError(f"no JSON of the schema: {reason}")
        return found | {self._corrupt: body}


def _values(record: Any, fields: list[types.StructField]) -> list[Any]:
    return [_plain(getattr(record, f"f{number}"), each.dataType, each.nullable) for number, each in enumerate(fields)]


def _plain(value: Any, kind: types.DataType, is_nullable: bool) -> Any:
    """The value as Arrow takes it: records as dicts, instants in UTC. Raises ValueError if the type cannot hold it."""
    if value is None:
        if not is_nullable:
            raise ValueError(f"{kind.simpleString()} NOT NULL is null or missing")
        return None
    match kind:
        case types.StructType():
            return dict(zip(kind.names, _values(value, kind.fields), strict=True))
        case types.ArrayType():
            return [_plain(each, kind.elementType, kind.containsNull) for each in value]
        case types.MapType():
            return [(name, _plain(each, kind.valueType, kind.valueContainsNull)) for name, each in value.items()]
        case types.TimestampType():
            return _in_utc(value)
        case types.DecimalType():
            raw = bytes(value)
            return _plain(None, kind, is_nullable) if raw == _NULL else _scaled(_decimal(raw, kind), kind)
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
    from veilmq.client.encrypted import Cipher, Keys

    keys = Keys.read(str(options.keys))

    @functools.cache
    def cipher(queue: str | None) -> Cipher:
        return Cipher(keys, options.algorithms, options.bound_to or queue or parse_url(options.url).queue or "", ())

    cipher(None)  # what is wrong with the options is found before a message is
    return lambda message, queue: cipher(queue).decrypt(message.body, message.id)
