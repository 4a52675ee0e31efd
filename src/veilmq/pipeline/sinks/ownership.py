"""Does a table belong to the query that is about to write it, and is it still there? Spark's logs answer both.

Spark's Parquet sink identifies batches by their numbers only. If a new query starts on another query's table, the sink
says that it already has batch 0, and the source then deletes messages that are in no table. If a query goes on whose
table was removed, Spark writes files that it cannot read, for the log of the first batches is missing. Nor can one
directory be two tables: a Delta reader ignores what the Parquet sink wrote, and the other way round.

The Delta sink identifies batches by the query's id, too. But a checkpoint that was restored from a backup has the same
id, and gives new batches numbers that the table has; a copy does the same, and the marks in the table show it
(`claims`).

Strategy: compare the last batch in the sink's log with the last in the checkpoint's. Python reads the logs that it
finds. Spark looks for the others, with its own connector: those at a URL, and those at a path without a scheme if its
default file system is not the local one.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from veilmq.pipeline.errors import OptionInvalid, TableForeign
from veilmq.pipeline.places import here
from veilmq.pipeline.places.delta import table_at
from veilmq.pipeline.sinks.claims import OFFSETS, Claim, copied, last, mark_of, went_back
from veilmq.pipeline.sinks.claims.parquet import SINK_LOG, Claims, last_entry
from veilmq.pipeline.tables import literal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_QUERY: Final = "metadata"
"""The file of a checkpoint that has the query's id."""
_FILES: Final = ("*.parquet", "*=*/**/*.parquet")
"""Of a table of Parquet: also below the directories of partitions."""
_NONE: Final = -1
_BEGIN_AGAIN: Final = (
    "Bring the newest checkpoint and directory back. Or start again with new ones: the table may then get messages "
    "that it already has a second time. Compare `id`."
)
"""For a drain whose checkpoint went back."""
_CHANGE_COPY: Final = (
    "Go on with the copy that wrote that batch. The messages of this one's last batch are in the queue or in its "
    "`manifests/bad_records`: keep those. If there is no other copy, start again with a new checkpoint and directory: "
    "the table may then get messages of its last batch a second time. Compare `id`."
)
"""For a drain whose checkpoint is a copy's."""


@contextmanager
def readable(*given: Path | str) -> Iterator[None]:
    """Raises OptionInvalid if one of these directories, or one that is looked at in the body, is a file or closed to
    this user. A directory may be missing, and one at a URL is not looked at."""
    try:
        for directory in filter(None, map(here, given)):
            first = next(each for each in (directory, *directory.parents) if each.exists())
            if not first.is_dir():
                raise OptionInvalid(f"{directory} cannot be: {first} is a file.", "Name a directory.")
        yield
    except OSError as error:
        if error.filename is None:  # no file's, such as a connection's
            raise
        wrong = f"{error.filename} cannot be read: {error.strerror}."
        raise OptionInvalid(wrong, "Let this user read it, or name another directory, and run it again.") from None


def check_table(
    kind: str, path: str, checkpoint: Path | str, spark: "SparkSession | None" = None, mend_newer: str | None = None
) -> None:  # fmt: skip
    """Check that the table is its query's, and has what that wrote. A Delta table at a URL is not checked.

    spark: lists logs that Python does not find; without it, those at a URL are not checked. mend_newer: how to fix a
    Delta table that has later or other batches; None: of a drain. Raises TableForeign, and OptionInvalid if a log
    cannot be read, or a directory is none; of a drain's Parquet table as `Claims.check_last`.
    """
    with readable(path, checkpoint):
        _check(kind, path, checkpoint, spark, mend_newer)


def _check(
    kind: str, path: str, checkpoint: Path | str, spark: "SparkSession | None", mend_newer: str | None
) -> None:  # fmt: skip
    table, has, files, is_delta = here(path), _NONE, False, False
    if table is not None:
        is_delta, log = (table / "_delta_log").is_dir(), table / SINK_LOG
        if kind != "delta" and is_delta:
            raise TableForeign(f"{path} is a Delta table.", "Drain with that format, or into another place.")
        if kind == "delta" and log.is_dir():
            raise TableForeign(f"{path} is a Parquet table.", "Drain with that format, or into another place.")
        has, files = last_entry(log), not is_delta and any(any(table.glob(each)) for each in _FILES)
    if is_delta and table is not None:
        _check_newest(table, here(checkpoint), mend_newer)
    if not files and (kind == "delta" or (table is None and spark is None)):
        return
    reached = _reached(checkpoint, spark, OFFSETS)
    if reached is None:
        return
    if has == _NONE and kind == "parquet" and spark is not None and _has_later(spark, path, reached):
        has = reached + 1
    if has > reached or (reached == _NONE and files):
        mend = "Bring its checkpoint back, or name an empty place: Spark would take new batches for those that it has."
        raise TableForeign(f"{path} holds rows of another query.", mend if has > reached else "Name an empty place.")
    if kind == "parquet" and has < reached:
        _check_complete(path, has, checkpoint, spark)
    if kind == "parquet" and table is not None and (there := here(checkpoint)) is not None:
        Claims(table).check_last(there / OFFSETS)


def _check_newest(table: Path, checkpoint: Path | None, mend: str | None) -> None:
    """Raises TableForeign if a Delta table has a batch that its query's checkpoint does not know, or another one of
    that number, and OptionInvalid. A checkpoint that only Spark reads is not checked."""
    if checkpoint is None or not (checkpoint / _QUERY).is_file():
        return
    try:
        query = json.loads((checkpoint / _QUERY).read_bytes())["id"]
        found = table_at(table)
    except (ValueError, LookupError, TypeError):
        return  # Spark says what is wrong with its file, and the sink what is wrong with the table
    has, reached = last(found, query), last_entry(checkpoint / OFFSETS)
    if has > reached:
        raise TableForeign(went_back(str(table), has, reached), mend or _BEGIN_AGAIN)
    if has >= 0 and Claim(query, query, has, mark_of(checkpoint, has)).is_of_a_copy(found):
        raise TableForeign(copied(str(table), has), mend or _CHANGE_COPY)


def _check_complete(path: str, has: int, checkpoint: Path | str, spark: "SparkSession | None") -> None:
    """Raises TableForeign unless a Parquet table has its query's last batch. has: the last one that Python finds.

    Spark cannot read a table that lacks the log of its first batches.
    """
    written = _reached(checkpoint, spark, "commits")
    if written is None or written <= has:
        return
    entry = f"{literal(path.rstrip('/'))}/{SINK_LOG}/{{{written},{written}.compact}}"
    if spark is None or _listed(spark, entry) is None:
        mend = "Bring it back, or start again with a new table, checkpoint and directory."
        raise TableForeign(f"{path} lacks batch {written} of this query: it was removed or replaced.", mend)


def _reached(checkpoint: Path | str, spark: "SparkSession | None", log: str) -> int | None:
    """The number of the last batch in one of the logs of a query's checkpoint; None: nobody can look."""
    there = here(checkpoint)
    if there is not None and (spark is None or (there / log).is_dir()):
        return last_entry(there / log)
    if spark is None:
        return None
    names = _listed(spark, f"{literal(str(checkpoint).rstrip('/'))}/{log}") or []
    return max((int(each) for each in names if each.isdigit()), default=_NONE)


def _has_later(spark: "SparkSession", path: str, reached: int) -> bool:
    """Whether the log of a Parquet table has an entry beyond that one, such as 130 or 129.compact beyond 123."""
    text = str(reached) if reached >= 0 else ""
    wanted = ["[0-9]" * (len(text) + 1) + "*"]  # longer, and then greater in one of the digits
    for place, digit in enumerate(text):
        if digit < "9":
            wanted.append(f"{text[:place]}[{int(digit) + 1}-9]{'[0-9]' * (len(text) - place - 1)}*")
    return _listed(spark, f"{literal(path.rstrip('/'))}/{SINK_LOG}/{{{','.join(wanted)}}}") is not None


def _listed(spark: "SparkSession", pattern: str) -> list[str] | None:
    """Names of files that Spark lists, of a sink's log none; None: nothing matches. Raises OptionInvalid."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        found = spark.read.format("binaryFile").load(pattern).select("path").collect()
    except (PySparkException, Py4JError) as error:
        if isinstance(error, PySparkException) and error.getCondition() == "PATH_NOT_FOUND":
            return None
        wrong = f"{pattern}: Spark cannot read there: {str(error).partition(chr(10))[0]}."
        raise OptionInvalid(wrong, "Give Spark the connector of that store, or name a directory.") from None
    return [row.path.rpartition("/")[2] for row in found]
