"""A Delta table as the sink of a stream, each micro-batch exactly once, through deltalake.

    frame.writeStream.format("veilmq-delta").option("path", "/tables/orders").option("checkpointLocation", ...).start()

Strategy: a task writes its rows as one Parquet file with a unique name and reports its size. The driver adds the files
of a micro-batch in one transaction that says which batch of which query it is (`claims`), and does nothing for a batch
that the table already has. A transaction accepts any files, so the sink checks that they fit the table (`columns`).

Before changing it: nothing here removes a file. A commit that raised may have landed (its answer was lost, or the
checkpoint after it failed), and so may the commit of a process that died, so a version may name any file that was
written. After an error the code asks the table what landed. A vacuum removes files that no version names.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs
from pyspark.sql import types
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from veilmq.client.clock import SYSTEM
from veilmq.pipeline.errors import DeltaRefused, OptionInvalid, SourceUnreachable
from veilmq.pipeline.options import DeltaOptions, read_delta_options
from veilmq.pipeline.places import is_url
from veilmq.pipeline.places.delta import (
    ARROWS_OWN,
    check_partitions,
    files_of,
    reason_of,
    storage_of,
    table_at,
    write_part,
    write_parted,
)
from veilmq.pipeline.sinks.claims import Claim, mark_of
from veilmq.pipeline.sinks.columns import check_columns, check_fits, check_nulls, nulls_of
from veilmq.store.files import sync_directory, sync_file

_ELSEWHERE: Final = (*ARROWS_OWN[:-1], "abfs://", "abfss://", "az://", "oss://")
"""Stores that only the executors need to reach."""
_LOG: Final = "_delta_log"
"""The directory of a table's log."""

log = logging.getLogger("veilmq.pipeline")
_synced: dict[Path, set[tuple[int, int, int, int]]] = {}
"""Log files of local tables that this process has synced: inode, size and last change. Kept by table and not by name
only: a table that is removed and recreated begins with the same names, often on the same inodes."""
_TRIES: Final = 4
"""Of a commit that conflicts with another query's: two that make a table at the same moment both write its columns."""


class Written(WriterCommitMessage):
    """One file of a task; `name` is empty if there were no rows. nulls: the columns that have some (`nulls_of`).

    partition: its values of the table's partition columns, which the rows do not hold. stats: what the log says of its
    rows besides their number (Delta protocol, "Per-file Statistics").
    """

    def __init__(
        self, name: str, size_bytes: int, rows: int, query: str, nulls: frozenset[str] = frozenset(),
        partition: Mapping[str, str | None] | None = None, stats: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.size_bytes, self.rows, self.query, self.nulls = name, size_bytes, rows, query, nulls
        self.partition, self.stats = dict(partition or {}), stats or {}


class Several(WriterCommitMessage):
    """The files of a task of a table with partitions."""

    def __init__(self, files: list[Written]) -> None:
        self.files = files


def add_files(
    path: Path | str, schema: Any, files: list[Written], app: str, batch: int, storage: dict[str, str] | None = None,
    *, after: int | None = None, mark: int | None = None,
) -> bool:  # fmt: skip
    """Commit in one transaction; False if the table already had the batch of the files' query.

    app: the query's id, or a name for it, which is refused if another query uses it. after: the batch that must be the
    table's last one of `app`, -1 for none; if it is another, nothing is added, which also returns False. mark:
    tells the batch from another one of its number (`mark_of`). Raises DeltaRefused, and SourceUnreachable if the table
    cannot be reached; the next call then finds out whether the batch landed.
    """
    from deltalake.exceptions import CommitFailedError, DeltaError

    path, claim = str(path), Claim(app, files[0].query, batch, mark, after)
    storage = storage_of(path, storage)
    if claim.is_held(_table(path, batch, storage), path):
        _sync_log(path)  # the process that committed it may have died before it synced
        return False
    for left in reversed(range(_TRIES)):
        try:
            is_new = _commit(path, schema, files, claim, storage)
            break
        except DeltaRefused:
            raise
        except Exception as error:
            if claim.is_held(found := _table(path, batch, storage), path):
                log.warning("table %s has batch %d, though its commit raised: %s", path, batch, error)
                _sync_log(path)
                return True
            if claim.is_late(found):
                return False
            if isinstance(error, CommitFailedError) and left:
                continue
            if isinstance(error, DeltaError):
                raise DeltaRefused(
                    f"The table {path} refuses batch {batch}: {reason_of(error)}.", "Do its columns fit?"
                ) from error
            if isinstance(error, OSError):
                raise _unreachable(path, batch, error) from error
            raise
    _sync_log(path)
    return is_new


def _commit(path: str, schema: Any, files: list[Written], claim: Claim, storage: dict[str, str] | None) -> bool:
    """False if the version of the table that it would follow has the batch, or another last one than `after`: delta-rs
    sees conflicts with later ones alone."""
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
    from deltalake.exceptions import DeltaError
    from deltalake.transaction import AddAction

    now_ms = round(SYSTEM.wall() * 1_000)
    actions: list[Any] = []
    for each in files:
        if each.name:
            statistics = json.dumps({"numRecords": each.rows, **each.stats})
            actions.append(AddAction(each.name, each.size_bytes, each.partition, now_ms, True, statistics))
    partitions = next((list(each.partition) for each in files if each.name), [])
    if not DeltaTable.is_deltatable(path, storage):
        try:
            empty = _created(schema, partitions).empty_table()
            write_deltalake(path, empty, partition_by=partitions or None, storage_options=storage)
        except DeltaError:  # another process made it at the same moment
            if not DeltaTable.is_deltatable(path, storage):
                raise
    table = DeltaTable(path, storage_options=storage)
    if claim.is_held(table, path) or claim.is_late(table):
        return False
    check_fits(table, schema, partitions)
    check_nulls(table, frozenset().union(*map(_nulls_in, files)))
    properties = CommitProperties(app_transactions=[Transaction(*each) for each in claim.versions(table).items()])
    table.create_write_transaction(actions, "append", schema, partitions, commit_properties=properties)
    return True


def _created(schema: Any, partitions: Sequence[str]) -> Any:
    """The columns of a new table: a text that divides it may be null, because the log writes an empty one as null."""
    texts = [name for name in partitions if pa.types.is_string(schema.field(name).type)]
    return pa.schema([each.with_nullable(True) if each.name in texts else each for each in schema], schema.metadata)


def _nulls_in(file: Written) -> set[str]:
    """Columns that a reader finds nulls in: an empty text of the partition is one."""
    return {*file.nulls, *(name for name, value in file.partition.items() if value is None)}


def _sync_log(path: str) -> None:
    """Make the table's log survive a power cut, because the messages are deleted next.

    Needed on a local disk: delta-rs syncs nothing there. Another process may have died before it synced its versions,
    so this syncs everything that this process has not synced yet.
    """
    table = _local(path)
    if table is None:
        return
    before, synced = _synced.get(table, set()), set()
    for entry in sorted((table / _LOG).iterdir()):
        with suppress(FileNotFoundError):  # a cleanup of the log removed it
            if entry.is_file():
                found = entry.stat()
                identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
                if identity not in before:
                    sync_file(entry)
                synced.add(identity)
    _synced[table] = synced
    for directory in (table / _LOG, table, table.parent):
        sync_directory(directory)


def _local(path: str) -> Path | None:
    """The table's directory, if it is local."""
    if is_url(path):
        return None
    files, root = files_of(path)
    return Path(root) if isinstance(files, pyarrow.fs.LocalFileSystem) else None


def _unreachable(path: str, batch: int, error: Exception) -> SourceUnreachable:
    wrong = f"The table {path} cannot be reached, and may have batch {batch} or not: {reason_of(error)}."
    return SourceUnreachable(wrong, "Run the query again: it asks the table, and goes on.")


def _unreadable(path: str, error: ValueError) -> DeltaRefused:
    """As of a null in the log for a column that allows none."""
    wrong = f"The log of the table {path} cannot be read: {reason_of(error)}."
    return DeltaRefused(wrong, "An earlier version may be sound.")


def check_place(path: Path | str, schema: Any, partitions: Sequence[str] = ()) -> None:
    """Check what can be known of a table's path before there are rows. Raises OptionInvalid, DeltaRefused."""
    from deltalake import DeltaTable

    check_partitions(schema, partitions)
    check_columns(schema)
    path = str(path)
    if path.startswith(_ELSEWHERE):
        return
    files, root = files_of(path)
    if files.get_file_info(root).is_file:
        raise OptionInvalid(f"path={path!r} cannot be: it is a file.", "It is a directory.")
    if DeltaTable.is_deltatable(path):
        try:
            table = DeltaTable(path)
        except ValueError as error:
            raise _unreadable(path, error) from error
        check_fits(table, schema, partitions)


def _table(path: str, batch: int, storage: dict[str, str] | None) -> Any:
    """The table; None: there is none. Raises SourceUnreachable, DeltaRefused."""
    from deltalake.exceptions import DeltaError

    try:
        return table_at(path, storage)
    except (DeltaError, OSError) as error:
        raise _unreachable(path, batch, error) from error
    except ValueError as error:
        raise _unreadable(path, error) from error


class DeltaWriter(DataSourceStreamArrowWriter):
    """Writes Parquet on executors, commits on the driver."""

    def __init__(self, schema: types.StructType, options: DeltaOptions) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self._options = options
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._partitions = options.partitions
        check_partitions(self._schema, self._partitions)
        check_columns(self._schema)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Write one file per task, or of a table with partitions one for each of those that the task has rows of."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId") or ""
        nulls: set[str] = set()

        def named() -> Iterator[Any]:
            for batch in iterator:
                nulls.update(nulls_of(batch := pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)))
                yield batch

        where = self._options.path, self._schema
        if self._partitions:
            parts = write_parted(named(), *where, self._partitions, context.partitionId())
            return Several([Written(*part, query, frozenset(nulls), values) for part, values in parts])
        part = write_part(named(), *where, context.partitionId())
        return Written(*part, query, frozenset(nulls))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Add all files of the micro-batch, or none if the table has the batch."""
        files = [each for each in messages if isinstance(each, Written)]
        files += [file for each in messages if isinstance(each, Several) for file in each.files]
        if not any(each.name for each in files):
            return
        app = self._options.app or files[0].query
        assert files[0].query, "Spark tells a streaming task its query"
        mark = mark_of(self._options.checkpoint_location, batchId)
        storage = json.loads(self._options.storage) or None
        add_files(self._options.path, self._schema, files, app, batchId, storage, mark=mark)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Keep all files: Spark also calls this if the committing process died, and that commit may have landed."""


class DeltaSink(DataSource):
    """The data source; Spark creates one for each use."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return "veilmq-delta"

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:
        """For `DataFrame.writeStream`, in append mode."""
        if overwrite:
            raise OptionInvalid("veilmq-delta appends.", "Use outputMode('append').")
        return DeltaWriter(schema, read_delta_options(self.options))
