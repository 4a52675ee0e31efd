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
"""

from collections.abc import Iterator, Sequence
from typing import Any

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

from veilmq.client.errors import Unreadable
from veilmq.client.messages import Peeked
from veilmq.pipeline.drain import bad_records
from veilmq.pipeline.drain.bad_records import BadRecord
from veilmq.pipeline.drain.decoding import METADATA, Decoding, Unwrapping
from veilmq.pipeline.drain.driver import Driver, Span
from veilmq.pipeline.drain.manifests import ARROW_SCHEMA, QUEUE, SPARK_SCHEMA, Offset, open_manifest
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.options import ROWS_DEFAULT, DrainOptions, read_options, read_send_options
from veilmq.pipeline.places import Place, place
from veilmq.pipeline.sinks.queue import QueueStreamWriter, QueueWriter


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
        """Does nothing: Spark calls it late or never, and `latestOffset` has acted on it already."""
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
    if options.format == "raw" and not options.unwrap:
        with open_manifest(place(path)) as reader:
            for at in range(first, stop):
                batch = reader.get_batch(at)
                yield pa.RecordBatch.from_arrays([batch.column(name) for name in wanted.names], schema=wanted)
        return
    yield from _decoded(place(path), first, stop, schema, options).to_batches()


def _decoded(path: Place, first: int, stop: int, schema: types.StructType, options: DrainOptions) -> Any:
    unwrapping = Unwrapping(options)
    decoding = Decoding(schema, options.column_name_of_corrupt_record) if options.format == "json" else None
    good: list[dict[str, Any]] = []
    bad: list[BadRecord] = []
    with open_manifest(path) as reader:
        for at in range(first, stop):
            for row in reader.get_batch(at).to_pylist():
                try:
                    message = Peeked(row["id"], row["body"], dict(row["attributes"]))
                    body = unwrapping.body(message, row.get("queue"))
                    good.append({**row, "body": body} if decoding is None else decoding.row(body, row))
                except (Unreadable, ValueError) as error:
                    bad.append(_bad_record(row, str(error)))
    bad_records.write(path, first, bad)
    wanted = arrow_schema(schema)
    columns = [pa.array([row.get(field.name) for row in good], field.type) for field in wanted]
    return pa.Table.from_arrays(columns, schema=wanted)


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
