"""Sends rows as messages to a queue; `replay` sends archived messages back.

    body (string)            needed
    attributes (map)  type  group  tag (string)  delay  ttl  lease_hint (seconds)  priority (int)
    deduplication_id (string)                                       FIFO queues, where no key is given

Strategy: each task sends its rows in the protocol's batches, and retries what failed on the way until `patience` is
over. On a FIFO queue a row's deduplication id is its key's digest, or query, batch, partition and position: a repeated
task sends the same ids, provided that its input has the same order. On other queues a repeated task sends again: at
least once.

An archive has these columns, those that the queue sets itself (sequence, times), and those that only the drain knew. A
FIFO queue gets its rows in order and drops messages whose id it knows, so a replay that failed half way can be run
again.
"""

import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import types
from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter, WriterCommitMessage

from veilmq.client.adapters.connect import connect
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import may_succeed_later
from veilmq.client.messages import Message
from veilmq.client.queue import Queue
from veilmq.client.shared.checks import token
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.pipeline.errors import OptionInvalid, PipelineError, SourceUnreachable, unusable
from veilmq.pipeline.options import SendOptions
from veilmq.pipeline.places import Place, place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS: Final = (
    "body",
    "attributes",
    "type",
    "group",
    "tag",
    "delay",
    "ttl",
    "lease_hint",
    "priority",
    "deduplication_id",
)
_NUMBERS: Final = frozenset({"delay", "ttl", "lease_hint", "priority"})
_CHUNK_ROWS: Final = 512
_CHUNK_CHARACTERS: Final = 8 << 20
"""Characters of bodies held at once, unless a single body is larger."""
_PAUSE_SECONDS: Final = 0.2


class SendFailed(PipelineError):
    """Messages could not be sent."""


class SentCount(WriterCommitMessage):
    """What a task sent."""

    def __init__(self, count: int) -> None:
        self.count = count


def check_columns(schema: types.StructType, options: SendOptions) -> None:
    """Raises OptionInvalid for a frame whose columns do not make messages."""
    names = schema.fieldNames()
    strange = [name for name in names if name not in COLUMNS and name != options.key]
    if strange:
        mend = f"Drop it, or name it one of {', '.join(COLUMNS)}; the key may have any name."
        raise OptionInvalid(f"A message has no column {strange[0]}.", mend)
    if "body" not in names:
        raise OptionInvalid("The frame has no column body.", "")
    if options.key is not None and options.key not in names:
        raise OptionInvalid(f"key={options.key}: the frame has no such column.", "")
    check_key(schema, options.key)
    for field in schema.fields:
        if field.name == "attributes":
            fits = isinstance(field.dataType, types.MapType) and all(
                isinstance(each, types.StringType) for each in (field.dataType.keyType, field.dataType.valueType)
            )
        elif field.name in _NUMBERS:
            fits = isinstance(field.dataType, types.NumericType)
        else:
            fits = field.name not in COLUMNS or isinstance(field.dataType, types.StringType)
        if not fits:
            raise OptionInvalid(f"Column {field.name} cannot be {field.dataType.simpleString()}.", "")


def check_key(schema: types.StructType, key: str | None) -> None:
    """Raises OptionInvalid for a column whose values have no unique text."""
    if key is not None and not isinstance(schema[key].dataType, types.AtomicType):
        kind = schema[key].dataType.simpleString()
        raise OptionInvalid(f"key={key}: the column is {kind}, which is no key.", "Name one of single values.")


def send_rows(rows: Iterator[Any], options: SendOptions, prefix: str) -> int:
    """Send the rows; returns how many. Raises SendFailed, OptionInvalid."""
    try:
        queue = connect(options.url)
    except VeilError as error:
        raise SendFailed(*unusable("The queue of the option url", error)) from None
    with queue:
        fifo = queue.capabilities.native_fifo
        if options.key is not None and not fifo:
            mend = "Leave key away, or send to a FIFO queue."
            raise OptionInvalid(f"key={options.key}: queue {queue.name} does not deduplicate.", mend)
        count = characters = 0
        chunk: list[Message] = []
        for row in rows:
            chunk.append(_message(row, options.key, f"{prefix}/{count}" if fifo else None))
            count += 1
            characters += len(chunk[-1].body)
            if len(chunk) == _CHUNK_ROWS or characters >= _CHUNK_CHARACTERS:
                _send(queue, chunk, options.patience)
                chunk, characters = [], 0
        _send(queue, chunk, options.patience)
    return count


def _message(row: Any, key: str | None, place: str | None) -> Message:
    given = {name: row[name] for name in COLUMNS if name in row and row[name] is not None}
    if key is not None and row[key] is not None:
        given["deduplication_id"] = hashlib.sha256(str(row[key]).encode()).hexdigest()
    elif place is not None:
        given.setdefault("deduplication_id", hashlib.sha256(place.encode()).hexdigest())
    if "body" not in given:
        raise SendFailed("A row's body is null.", "Filter such rows.")
    for name in _NUMBERS & given.keys():
        given[name] = _number(name, given[name])
    return Message(**given)


def _number(name: str, value: Any) -> float:
    """Raises SendFailed for a value that is no number, and for a fractional priority."""
    number = float(value)
    if not math.isfinite(number) or (name == "priority" and number % 1):
        mend = "It is a whole number." if name == "priority" else "It is a number of seconds."
        raise SendFailed(f"A row's {name} is {value}.", mend)
    return int(value) if name == "priority" else number


def _send(queue: Queue, messages: list[Message], patience: float) -> None:
    """Send all. To a FIFO queue one request after the other: rows of a group must not overtake one that is refused."""
    able = queue.capabilities
    size = able.batch_messages_max if able.native_fifo else max(1, len(messages))
    for at in range(0, len(messages), size):
        _send_together(queue, messages[at : at + size], patience)


def _send_together(queue: Queue, messages: list[Message], patience: float) -> None:
    end = SYSTEM.monotonic() + patience
    left = messages
    pause = _PAUSE_SECONDS
    while left:
        try:
            answers: list[Any] = list(queue.send_batch(left))
        except VeilError as error:
            answers = [error] * len(left)
        failed = [(message, each) for message, each in zip(left, answers, strict=True) if isinstance(each, VeilError)]
        for _, reason in failed:
            if not may_succeed_later(reason) or SYSTEM.monotonic() >= end:
                raise SendFailed(f"Queue {queue.name} does not take a message: {reason}.", "") from reason
        left = [message for message, _ in failed]
        if left:
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


def _task() -> tuple[Callable[[str], str | None], int]:
    """A function to read this task's local properties, and its partition."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return context.getLocalProperty, context.partitionId()


class QueueWriter(DataSourceWriter):
    """A batch write: a repeated task sends the same ids."""

    def __init__(self, schema: types.StructType, options: SendOptions, overwrite: bool) -> None:
        check_columns(schema, options)
        if overwrite:
            raise OptionInvalid("A queue cannot be overwritten.", "Use mode('append').")
        self._options = options
        # Created once on the driver, and pickled for every attempt of every task.
        self._write_id = secrets.token_hex(16)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Sends a partition."""
        _, partition = _task()
        return SentCount(send_rows(iterator, self._options, f"{self._write_id}/{partition}"))


class QueueStreamWriter(DataSourceStreamWriter):
    """A stream write: a repeated batch sends the same ids."""

    def __init__(self, schema: types.StructType, options: SendOptions) -> None:
        check_columns(schema, options)
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Sends a partition of a micro-batch."""
        local, partition = _task()
        query, batch = local("sql.streaming.queryId"), local("streaming.sql.batchId")
        assert query is not None, "Spark tells a streaming task its query"
        assert batch is not None
        return SentCount(send_rows(iterator, self._options, f"{query}/{batch}/{partition}"))


_SENT: Final = (
    "body", "attributes", "type", "group", "tag", "delay", "ttl", "lease_hint", "priority", "deduplication_id",
)  # fmt: skip
_ORDER: Final = ("batch", "position")
_DATA_EXCEPTION: Final = "22"
"""The SQLSTATE class for values that an expression cannot handle: a cast, a division by zero, a date."""
_VECTORS: Final = "spark.sql.parquet.enableVectorizedReader"


def replay(
    spark: "SparkSession", table: Place | str, queue: str, *, where: str | None = None, key: str | None = None
) -> int:
    """Send the rows of a table (Parquet or Delta, or Delta at a URL) to the queue; returns the number of rows.

    where: a condition in SQL; key: a column whose equal rows a FIFO queue takes once, by default `id`. On a FIFO queue
    rows without a group form one group. Raises PipelineError.
    """
    from pyspark.sql import functions as f

    from veilmq.pipeline.tables import read

    table = place(table)
    rows = read(spark, table)
    if "body" not in rows.columns:
        raise OptionInvalid(f"{table} has no column body.", "Is it an archive?")
    if key is not None and key not in rows.columns:
        raise OptionInvalid(f"{table} has no column {key}.", f"It has {', '.join(rows.columns)}.")
    check_key(rows.schema, key)
    if where is not None:
        rows = _only(rows, where)
    if _is_fifo(queue):
        if key is None and "id" in rows.columns and "deduplication_id" not in rows.columns:
            key = "id"
        group = f.lit(group_of(table.name))
        rows = rows.withColumn("group", f.coalesce("group", group) if "group" in rows.columns else group)
        order = [name for name in _ORDER if name in rows.columns]
        # One partition, so that the order stays.
        rows = rows.coalesce(1).sortWithinPartitions(*order) if order else rows
    wanted = [_quoted(name) for name in rows.columns if name in _SENT or name == key]
    writer = rows.select(*wanted).write.format("veilmq").option("url", queue).mode("append")
    with row_by_row(spark):
        number = _counted(rows, where)
        (writer if key is None else writer.option("key", key)).save()
    return number


def _quoted(name: str) -> str:
    """For Spark, which takes `a.b` for a member of `a`."""
    return f"`{name.replace('`', '``')}`"


def group_of(table: str) -> str:
    """The group of a table's rows without one: the table's name, or a digest of a name that no group may have."""
    try:
        token(table, "group")
    except ParameterInvalid:
        return hashlib.sha256(table.encode(errors="surrogateescape")).hexdigest()
    return table


@contextmanager
def row_by_row(spark: "SparkSession") -> Iterator[None]:
    """Within this context Parquet is read row by row: Spark otherwise reads thousands of rows at once, whatever their
    size."""
    before = spark.conf.get(_VECTORS)
    spark.conf.set(_VECTORS, "false")
    try:
        yield
    finally:
        spark.conf.set(_VECTORS, str(before))


def _only(rows: "DataFrame", where: str) -> "DataFrame":
    from pyspark.errors import AnalysisException

    try:
        kept = rows.where(where)
        # Spark Connect checks a condition when it is asked for columns that it does not know yet.
        _ = kept.select("body").columns
    except AnalysisException as error:
        raise OptionInvalid(f"where={where!r} cannot be: {_sentence(error)}", "") from None
    return kept


def _counted(rows: "DataFrame", where: str | None) -> int:
    """The number of rows. A condition that fits the columns may still fail on a row; nothing was sent then."""
    from pyspark.errors import PySparkException

    try:
        return rows.count()
    except PySparkException as error:
        if where is None or not (error.getSqlState() or "").startswith(_DATA_EXCEPTION):
            raise
        raise OptionInvalid(f"where={where!r} fails on a row: {_sentence(error)}", "") from None


def _sentence(error: Exception) -> str:
    return " ".join(str(error).partition(";")[0].partition("== SQL")[0].split())


def _is_fifo(url: str) -> bool:
    try:
        with connect(url) as queue:
            return queue.capabilities.native_fifo
    except VeilError as error:
        raise SourceUnreachable(*unusable("The queue", error)) from None
