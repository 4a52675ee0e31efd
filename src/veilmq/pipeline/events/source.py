"""`veilmq-events`: the history for Spark, in batch and as a stream.

    spark.read.format("veilmq-events").option("server", "http://127.0.0.1:9325").option("token", ...).load()
    spark.readStream.format("veilmq-events").option("path", "exported").option("maxRows", 1_000_000).load()

Options: `server` (with `token`, `certificate`) or `path`; `from` (an offset, `first`, `next`; default `first`) and
`until` (an offset); `kinds` (event kinds, comma-separated; default all); `partitionRows` (524,288); for a stream
`maxRows` per micro-batch. The offset of a stream is `{"seq": n, "epoch": e}`: the next event and, if known, the epoch
of its history. Replay is identical by construction: an offset names the same event of its history for ever.

Strategy: the readers hold only options, because Spark pickles them and creates a second one for `read`. Most jobs want
few kinds, and passing an event to Java costs more than reading it: hence the option `kinds`. For the same reason
`load`, by which the jobs read, leaves exported files to Spark's own reader where Spark can see them: it decodes only
the columns that a job asks for. What this source refuses in a file, `load` refuses by the file's footer.

Before changing it: do not use Spark's filter pushdown (`pushFilters`). Spark 4.3 gives all reads of one DataFrame the
filter that it pushed last, so a union of two kinds of events returned one kind twice.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from veilmq.pipeline.errors import HistoryGap, OptionInvalid
from veilmq.pipeline.events import KINDS, SPARK_SCHEMA
from veilmq.pipeline.events.reading import OFFSET, History, ParquetHistory, ServerHistory
from veilmq.pipeline.places import Place
from veilmq.pipeline.tables import literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION_ROWS_DEFAULT: Final = 524_288
_OPTIONS: Final = frozenset(
    {"server", "token", "certificate", "path", "from", "until", "kinds", "partitionrows", "maxrows"}
)
_STRICT: Final = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false", "recursiveFileLookup": "false"}
"""Whatever the session says: a history that comes back short must be an error."""

_CONNECTORS: Final = {"s3": "s3a", "gcs": "gs"}
"""Schemes that Hadoop's connectors name otherwise than fsspec."""

log = logging.getLogger("veilmq.pipeline")


class Piece(InputPartition):
    """The offsets of one task, within a range that begins at `first`."""

    def __init__(self, first: int, start: int, stop: int, epoch: str) -> None:
        super().__init__(None)
        self.first = first
        self.start = start
        self.stop = stop
        self.epoch = epoch


class Wanted:
    """The options, read once."""

    def __init__(self, options: Any) -> None:
        """Raises OptionInvalid."""
        given = {str(name).lower(): str(value) for name, value in dict(options).items()}
        unknown = given.keys() - _OPTIONS
        if unknown:
            raise OptionInvalid(
                f"veilmq-events has no option {min(unknown)}.", f"It has {', '.join(sorted(_OPTIONS))}."
            )
        if ("server" in given) == ("path" in given):
            raise OptionInvalid("veilmq-events needs one of the options server and path.", "")
        self.history: History
        if "server" in given:
            self.history = ServerHistory(given["server"], given.get("token"), given.get("certificate"))
        else:
            self.history = ParquetHistory(given["path"])
        self.start = given.get("from", "first")
        if self.start not in {"first", "next"} and not OFFSET.match(self.start):
            raise OptionInvalid(f"from={self.start!r} is none of an offset, first and next.", "")
        self.until = _number(given, "until", None)
        self.partition_rows = _number(given, "partitionrows", PARTITION_ROWS_DEFAULT) or 1
        self.kinds = [each.strip() for each in given["kinds"].split(",")] if "kinds" in given else None
        for kind in set(self.kinds or ()) - KINDS:
            raise OptionInvalid(f"kinds: there is no kind of event {kind!r}.", f"There are {', '.join(sorted(KINDS))}.")
        self.rows_max = _number(given, "maxrows", None)
        if self.rows_max == 0:
            raise OptionInvalid("maxRows=0: a micro-batch needs an event.", "")

    def first(self) -> int:
        """The offset to begin with. Raises HistoryGap if it was trimmed, OptionInvalid if it is beyond `until`."""
        start = self._first()
        if self.until is not None and self.until < start:
            raise OptionInvalid(f"until={self.until} is before offset {start}, where it is to begin.", "")
        return start

    def _first(self) -> int:
        if self.start == "first":
            return self.history.hold(None)
        first, following = self.history.bounds()
        if self.start == "next":
            return following
        start = int(self.start)
        if not first <= start <= following:
            mend = f"The history holds {first} to {following}: begin with from=first."
            raise HistoryGap(f"There is no offset {start}.", mend)
        return start

    def end(self, start: int = 0) -> int:
        """The offset to stop before, when reading from `start`. Raises HistoryGap if the history ends before it."""
        following = self.history.bounds().following
        if following < start:
            mend = "Is it another server's, or a restored backup's? Begin with a new checkpoint."
            raise HistoryGap(f"The history ends at offset {following}, and {start} is next.", mend)
        return following if self.until is None else min(following, self.until)

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The tasks for a range, which the server then holds for them."""
        if start < stop:
            self.history.hold(start)
        epoch = self.history.epoch
        return [Piece(start, *each, epoch) for each in self.history.splits(start, stop, self.partition_rows)]

    def read(self, piece: Piece) -> Iterator[Any]:
        """The piece's record batches, from the history it was cut from, without unwanted kinds."""
        self.history.epoch = piece.epoch
        if piece.start > piece.first:  # other pieces may still be unread, or all of them be read again
            try:
                self.history.hold(piece.first)
            except HistoryGap:
                self.history.hold(piece.start)
        for batch in self.history.read(piece.start, piece.stop):
            if self.kinds is None:
                yield batch
            else:
                yield batch.filter(pc.is_in(batch.column("kind"), pa.array(self.kinds)))


def _number(given: dict[str, str], name: str, default: int | None) -> int | None:
    if name not in given:
        return default
    if not OFFSET.match(given[name]):
        raise OptionInvalid(f"{name}={given[name]!r} is no whole number.", "")
    return int(given[name])


class EventsReader(DataSourceReader):
    """One batch read of the history."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def partitions(self) -> Sequence[InputPartition]:
        """Pieces of about `partitionRows` offsets."""
        return self._wanted.pieces(self._wanted.first(), self._wanted.end())

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Record batches of one piece."""
        # If there are no pieces, Spark makes one that is None.
        if isinstance(partition, Piece):
            yield from self._wanted.read(partition)


class EventsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The history as a stream."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._target: int | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Where a new query begins."""
        return self._offset(self._wanted.first())

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxRows` a micro-batch."""
        return ReadAllAvailable() if self._wanted.rows_max is None else ReadMaxRows(self._wanted.rows_max)

    def prepareForTriggerAvailableNow(self) -> None:
        """Events from now on belong to the next run."""
        self._target = self._wanted.end()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next micro-batch. Raises HistoryGap if the server now has another history."""
        history = self._wanted.history
        history.epoch = start.get("epoch", history.epoch)
        end = self._wanted.end(start["seq"])
        if self._target is not None:
            end = min(end, self._target)
        if isinstance(limit, ReadMaxRows):
            end = min(end, start["seq"] + limit.max_rows)
        return self._offset(end) if end > start["seq"] else start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Pieces of the micro-batch."""
        self._wanted.history.epoch = end.get("epoch", "")
        return self._wanted.pieces(start["seq"], end["seq"])

    def _offset(self, seq: int) -> dict[str, Any]:
        epoch = self._wanted.history.epoch
        return {"seq": seq, "epoch": epoch} if epoch else {"seq": seq}

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Record batches of one piece."""
        assert isinstance(partition, Piece)
        yield from self._wanted.read(partition)


class EventsSource(DataSource):
    """The data source; Spark creates one for each use."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return "veilmq-events"

    def schema(self) -> str:
        """The columns of /api/v1/events."""
        return SPARK_SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        """For `spark.read`."""
        return EventsReader(Wanted(self.options))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """For `spark.readStream`."""
        return EventsStreamReader(Wanted(self.options))


def load(spark: "SparkSession", options: Mapping[str, str], kinds: Sequence[str] | None = None) -> "DataFrame":
    """The events for these options of `veilmq-events`, by the cheapest reader. With `kinds`, only those.

    Exported files are read by Spark itself, with its column pruning and push-down, if Spark can see them; else, and
    from a server, by `veilmq-events`. Both give the same rows. Raises OptionInvalid, HistoryGap, HistoryNewer.
    """
    given = dict(options) if kinds is None else {**options, "kinds": ",".join(kinds)}
    found = _by_spark(spark, Wanted(given)) if "path" in given else None
    return spark.read.format("veilmq-events").options(**given).load() if found is None else found


def _by_spark(spark: "SparkSession", wanted: Wanted) -> "DataFrame | None":
    """The events through Spark's own Parquet reader; None if it cannot read them."""
    from pyspark.sql import functions as F

    assert isinstance(wanted.history, ParquetHistory)
    start = wanted.first()
    stop = wanted.end(start)
    files = wanted.history.checked(start, stop)
    if not files:
        return None
    try:
        events = spark.read.schema(SPARK_SCHEMA).options(**_STRICT).parquet(*map(_named, files))
        events.schema  # noqa: B018 - over Spark Connect nothing looks at the files before
    except (PySparkException, Py4JError) as error:
        reason = str(error).partition("\n")[0]
        log.info("Spark cannot see %s, and Python reads it: %s", wanted.history.directory, reason)
        return None
    first, following = wanted.history.bounds()
    if start > first or stop < following:
        events = events.where(F.col("offset").between(start, stop - 1))
    return events if wanted.kinds is None else events.where(F.col("kind").isin(*wanted.kinds))


def _named(file: Place) -> str:
    """As Spark names the file; with a scheme, since its default file system may be another."""
    if isinstance(file, Path):
        return f"file:{literal(str(file.resolve()))}"
    scheme, _, rest = str(file).partition("://")
    return f"{_CONNECTORS.get(scheme, scheme)}://{literal(rest)}"
