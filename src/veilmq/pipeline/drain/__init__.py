"""Drains a live queue into a table, each message once: the stream source `veilmq`, and here the helper `drain`, which
goes on until the queue is empty and every delete is confirmed.

Strategy: `driver` does the work, without Spark: it receives, writes manifests (`manifests`), holds leases, and deletes
what Spark has committed (`batches`). Executors only read manifests (`source`, with `decoding`; `bad_records` keeps what
cannot be decoded). `source` is the adapter to Spark.

`drain` runs a query with trigger AvailableNow again and again on one checkpoint, because one run ends with what the
queue held at its start. The last call of each run deletes and waits for the answers, so a run that ends well leaves
nothing to confirm; the directory is checked for leftovers all the same. Messages leased by others are waited for.
Before it starts: does the table belong to the checkpoint (`veilmq.pipeline.sinks.ownership`), and what did a kill leave
in it?

`clear_checkpoint`: Spark writes a log entry to a hidden file and renames it. If it is killed in between during its very
first batch, the next start finds that file and takes the checkpoint for another query's
(STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY). Nothing was logged yet, so the file can go, unless a query is running
there: the lock of its manifests shows it.
At another URL than `file:` it stays: only Spark reads a checkpoint there, and its lists do not show hidden files.

Before changing it: docs/pipeline-drain.md explains the order of the steps.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from veilmq.client.clock import SYSTEM
from veilmq.client.messages import Stats
from veilmq.model.errors import VeilError
from veilmq.model.wording import counted
from veilmq.pipeline import register
from veilmq.pipeline.drain.bad_records import BadRecord, read_bad_records
from veilmq.pipeline.drain.batches.queues import opened, total
from veilmq.pipeline.drain.manifests import is_taken, writing
from veilmq.pipeline.errors import (
    DirectoryForeign,
    DirectoryTaken,
    DirectoryUnwritable,
    DrainUnfinished,
    ManifestDamaged,
    OptionInvalid,
    SourceUnreachable,
    TableForeign,
)
from veilmq.pipeline.options import DrainOptions, camel, read_options
from veilmq.pipeline.places import Place, alone, here, make, place
from veilmq.pipeline.sinks.claims.parquet import Claims
from veilmq.pipeline.sinks.ownership import check_table, readable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "BadRecord",
    "DirectoryForeign",
    "DirectoryTaken",
    "DirectoryUnwritable",
    "DrainUnfinished",
    "Drained",
    "ManifestDamaged",
    "TableForeign",
    "drain",
    "read_bad_records",
]


_PAUSE_SECONDS: Final = 0.5
_PROGRESS: Final = "spark.sql.streaming.numRecentProgressUpdates"
_LOGS: Final = ("offsets", "commits")
_UNFINISHED: Final = (".tmp", ".tmp.crc")
_REPORTS_KEPT: Final = 1_000
"""More than there are batches in `_LOOK_SECONDS`."""
_LOOK_SECONDS: Final = 5
_HELD: Final = "Does somebody else hold its messages, or can the adapter not decode some, as the log would tell?"
_SMALL_GROUPS: Final = {
    "parquet.block.size": str(32 << 20),
    "parquet.block.size.row.check.min": "1",
    "parquet.page.size.row.check.min": "1",
}
"""A task buffers a row group and by default checks sizes only every hundred rows; large bodies would fill the heap."""
_FORMATS: Final = {"delta": ("veilmq-delta", {}), "parquet": ("parquet", _SMALL_GROUPS)}

log = logging.getLogger("veilmq.pipeline")


class Drained(msgspec.Struct, frozen=True):
    """The result of a drain."""

    messages: int
    """Rows passed to the sink by this call; a batch counts twice if a crash or the function has it read twice."""
    batches: int
    bad_records: int
    """Messages the query could not decode since it first started."""
    runs: int
    seconds: float


def drain(
    spark: "SparkSession",
    url: str,
    sink: "str | Callable[[DataFrame, int], None]",
    directory: Path | str,
    *,
    until: float | None = None,
    schema: str | None = None,
    transform: "Callable[[DataFrame], DataFrame] | None" = None,
    name: str | None = None,
    checkpoint: Path | str | None = None,
    partition_by: Sequence[str] = (),
    **options: Any,
) -> Drained:
    """Drain the queue `url` into `sink`; return once the queue is empty and all deletes are confirmed.

    sink: `delta:/path` or `parquet:/path`, each exactly once; or a function of (frame, batch number) that Spark calls
    once per micro-batch, and again with the same number and rows after a crash. directory: absolute or a URL, used by
    this query only, kept between calls: manifests, bad records, and Spark's checkpoint, unless `checkpoint` names
    another place for that, which a URL needs. until: seconds after which DrainUnfinished is raised. schema: of JSON
    bodies, with format="json". transform: maps the messages to the rows of the sink. name: of the query, in Spark's UI
    and in metrics. partition_by: columns by which the table's files are divided. options: those of the source, in snake
    case (`max_rows=...`; None: the default); with `queues`, `url` is the account's.

    Raises PipelineError, and Spark's StreamingQueryException with the reason at its end.
    """
    started = SYSTEM.monotonic()
    home = place(directory)
    if checkpoint is None and not isinstance(home, Path):
        mend = "Name a place that Spark itself can write: checkpoint='/var/lib/drain/orders'."
        raise OptionInvalid(f"directory={str(directory)!r} is a URL, and Spark's checkpoint cannot be there.", mend)
    progress = str(home / "checkpoint" if checkpoint is None else checkpoint)
    given = source_options(options) | {"url": url, "directory": str(home / "manifests")}
    kind, _, path = sink.partition(":") if isinstance(sink, str) else ("", "", "")
    local = here(path) if kind == "parquet" else None
    if local is not None:
        given.setdefault("table", str(local.absolute()))
    read = read_options(given)
    if kind == "parquet" and read.table is None:
        log.warning(
            "table %s: batches are not claimed, so a copy of this drain is not noticed: name it as table=", path
        )
    opened(read, SYSTEM).close()  # a wrong URL is a sentence here, and in Spark a page of Java's trace
    register(spark)
    with ExitStack() as held:
        with writing(home):
            make(home)
            held.enter_context(alone(home, "lock", DirectoryTaken, "Another drain"))
        with readable(progress):
            clear_checkpoint(progress, home / "manifests")
        claims = None if local is None else Claims(local)
        messages = batches = runs = 0
        while True:
            reader = spark.readStream.format("veilmq").options(**given)
            frame = (reader if schema is None else reader.schema(schema)).load()
            query = _started(
                spark, frame if transform is None else transform(frame), sink, progress, name, partition_by
            )
            with nullcontext() if claims is None else claims.running():
                rows = _counted(spark, query)
            runs += 1
            messages += sum(rows)
            batches += sum(1 for each in rows if each)
            left = _left(read)
            if not total(left) and not any((home / "manifests").glob("*.arrow")):
                break
            if until is not None and SYSTEM.monotonic() - started > until:
                state = f"{counted(left.visible, 'message')} visible, {left.in_flight or 0} in flight"
                raise DrainUnfinished(f"The queue is not empty after {until:g} s: {state}.", _HELD)
            time.sleep(_PAUSE_SECONDS)
    bad = len(read_bad_records(home / "manifests"))
    return Drained(messages, batches, bad, runs, SYSTEM.monotonic() - started)


def _started(
    spark: "SparkSession", frame: "DataFrame", sink: "str | Callable[[DataFrame, int], None]", checkpoint: str,
    name: str | None, partitions: Sequence[str],
) -> Any:  # fmt: skip
    from pyspark.sql.pandas.types import to_arrow_schema

    from veilmq.pipeline.sinks.delta import check_place

    writer = frame.writeStream.trigger(availableNow=True).option("checkpointLocation", checkpoint)
    if name is not None:
        writer = writer.queryName(name)
    if not isinstance(sink, str):
        return writer.foreachBatch(sink).start()
    kind, colon, path = sink.partition(":")
    if not colon or kind not in _FORMATS:
        raise OptionInvalid(f"sink={sink!r} cannot be.", f"It is a function, or {':/path, '.join(_FORMATS)}:/path.")
    check_table(kind, path, checkpoint, spark)
    if kind == "delta":
        check_place(path, to_arrow_schema(frame.schema, timezone="UTC"), partitions)
    elif partitions:
        writer = writer.partitionBy(*partitions)
    # Spark finds a sink written in Python only through the thread's active session, and other threads than the one that
    # made the session have none. This makes it the active one.
    spark.createDataFrame([], "nothing int")
    form, options = _FORMATS[kind]
    if kind == "delta":
        options = options | {"partitionBy": ",".join(partitions)}
    return writer.format(form).options(**options).option("path", path).start()


def _counted(spark: "SparkSession", query: Any) -> list[int]:
    """Wait until the query ends, or stop it at a KeyboardInterrupt; the rows of each batch.

    Spark keeps the reports of the last 100 batches (or of as many as the user set) and reads the setting anew with each
    of them, so it is raised while the query runs, and reports are taken as they come.
    """
    before = spark.conf.get(_PROGRESS)
    rows: dict[int, int] = {}
    spark.conf.set(_PROGRESS, str(_REPORTS_KEPT))
    try:
        is_over = False
        while not is_over:
            is_over = query.awaitTermination(_LOOK_SECONDS)
            for report in query.recentProgress:
                # The progress key of that name is empty over Spark Connect.
                rows[report.batchId] = max(report.numInputRows, rows.get(report.batchId, 0))
    except KeyboardInterrupt:
        # Not by this thread: on its connection to Java, the answer to the interrupted call may be still to come.
        with ThreadPoolExecutor(1) as beside:
            beside.submit(query.stop).result()
        raise
    finally:
        spark.conf.set(_PROGRESS, str(before))
    return list(rows.values())


def _left(options: DrainOptions) -> Stats:
    try:
        with closing(opened(options, SYSTEM)) as queue:
            return queue.stats()
    except VeilError as error:
        raise SourceUnreachable(f"The queue cannot be reached: {error}.", "Run it again.") from None


def source_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Options in snake case as Spark passes them on, as texts. One that is None is left out: it has its default."""
    return {camel(name): _text(value) for name, value in options.items() if value is not None}


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def clear_checkpoint(checkpoint: Path | str, manifests: Place) -> None:
    """Remove the unfinished entries of a first batch that was never logged, on a file system that is reachable here."""
    there = here(checkpoint)
    if there is None:
        return
    logged = there / "offsets"
    if not logged.is_dir() or any(each.name.isdigit() for each in logged.iterdir()) or is_taken(manifests):
        return
    for name in _LOGS:
        for each in (there / name).glob(".*"):
            if each.name.endswith(_UNFINISHED):
                each.unlink(missing_ok=True)
