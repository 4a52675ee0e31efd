"""`veilmq`: drains a queue as a stream, each message once; and sends rows to a queue.

    spark.readStream.format("veilmq").option("url", "veil://127.0.0.1:9324/orders").option("directory", "/m").load()
    frame.write.format("veilmq").option("url", "veil://127.0.0.1:9324/orders").mode("append").save()

Options of the stream: those of `DrainOptions`, in camel case; of the sink: those of `SendOptions`. The offset of the
stream is `{"seq", "file", "sha256"}`: the last manifest.

Strategy: Spark creates two readers, one that the driver calls and one that it pickles for `read`, and never says which
is which or when it ends. So the constructor only stores options, and the first hook that only the driver calls opens
the rest.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from veilmq.pipeline.drain.columns import SPARK_SCHEMA
from veilmq.pipeline.drain.driver import Driver, Span
from veilmq.pipeline.drain.manifests import Offset
from veilmq.pipeline.drain.options import ROWS_DEFAULT, DrainOptions, read_options
from veilmq.pipeline.drain.rows import check_schema, rows
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.sinks.options import read_send_options
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
        if read_options(self.options).format == "json":
            raise OptionInvalid("format=json needs a schema.", "Give it with .schema('...').")
        return SPARK_SCHEMA

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
