"""A Delta table as the sink of a stream, each micro-batch once, through deltalake.

    frame.writeStream.format("veilmq-delta").option("path", "/tables/orders").option("checkpointLocation", ...).start()

Strategy: a task writes its rows as one Parquet file under a name used once and tells its size; the driver adds the
files of a micro-batch in one transaction that carries (application, batch number), and does nothing for a batch that
the table already has. The application is the query's id, which its checkpoint keeps. A killed attempt leaves files that
no transaction names; a vacuum removes them.

Source: the Delta protocol, "Transaction Identifiers".
"""

import json
import secrets
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from pyspark.sql import types
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from veilmq.client.clock import SYSTEM
from veilmq.pipeline.errors import OptionInvalid, PipelineError
from veilmq.pipeline.sinks.options import DeltaOptions, read_delta_options

_ROWS_FLUSHED: Final = 65_536
_OF_NULLS: Final = frozenset({"nullable", "containsNull", "valueContainsNull", "metadata"})


class DeltaRefused(PipelineError):
    """The table does not take these rows."""


class Written(WriterCommitMessage):
    """One file of a task; `name` is empty if it had no rows."""

    def __init__(self, name: str, size_bytes: int, rows: int, query: str) -> None:
        self.name, self.size_bytes, self.rows, self.query = name, size_bytes, rows, query


def is_committed(path: str, app: str, batch: int, storage: dict[str, str] | None = None) -> bool:
    """Whether the table has that batch of that application."""
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(path, storage):
        return False
    version = DeltaTable(path, storage_options=storage).transaction_version(app)
    return version is not None and version >= batch


def add_files(
    path: str, schema: Any, files: list[Written], app: str, batch: int, storage: dict[str, str] | None = None
) -> bool:
    """One transaction; False if the table had the batch already. Raises DeltaRefused."""
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
    from deltalake.exceptions import DeltaError
    from deltalake.transaction import AddAction

    if is_committed(path, app, batch, storage):
        return False
    now_ms = round(SYSTEM.wall() * 1_000)
    actions: list[Any] = [
        AddAction(each.name, each.size_bytes, {}, now_ms, True, json.dumps({"numRecords": each.rows}))
        for each in files
        if each.name
    ]
    properties = CommitProperties(app_transactions=[Transaction(app, batch)])
    try:
        if not DeltaTable.is_deltatable(path, storage):
            write_deltalake(path, schema.empty_table(), storage_options=storage)
        table = DeltaTable(path, storage_options=storage)
        check_table(table, schema)
        table.create_write_transaction(actions, "append", schema, [], commit_properties=properties)
    except DeltaError as error:
        if is_committed(path, app, batch, storage):
            return False
        raise DeltaRefused(f"The table {path} refuses batch {batch}: {error}.", "Do its columns fit?") from error
    return True


def check_table(table: Any, schema: Any) -> None:
    """Whether files of that Arrow schema may be added; a transaction takes any. Raises DeltaRefused."""
    from deltalake import Schema

    path = table.table_uri
    if table.metadata().partition_columns:
        names = ", ".join(table.metadata().partition_columns)
        mend = "Write another table, or with foreachBatch and deltalake."
        raise DeltaRefused(f"The table {path} is partitioned by {names}, and veilmq-delta writes no partitions.", mend)
    there = {field.name: field for field in table.schema().fields}
    ours = {field.name: field for field in Schema.from_arrow(schema).fields}
    for name, field in ours.items():
        if name not in there:
            raise DeltaRefused(f"The table {path} has no column {name}.", f"It has {', '.join(there)}.")
        if _kind(field) != _kind(there[name]):
            mend = f"It is {_said(there[name])}."
            raise DeltaRefused(f"The column {name} of the table {path} is no {_said(field)}.", mend)
    needed = [name for name, field in there.items() if name not in ours and not field.nullable]
    if needed:
        raise DeltaRefused(f"The table {path} needs a column {needed[0]}.", "")


def _said(field: Any) -> str:
    return str(field.type.to_json().strip('"'))


def _kind(field: Any) -> Any:
    """Its type without what may be null in it."""

    def bare(value: Any) -> Any:
        if not isinstance(value, dict):
            return [bare(each) for each in value] if isinstance(value, list) else value
        return {name: bare(each) for name, each in value.items() if name not in _OF_NULLS}

    return bare(json.loads(field.type.to_json()))


class DeltaWriter(DataSourceStreamArrowWriter):
    """Writes Parquet on executors, commits on the driver."""

    def __init__(self, schema: types.StructType, options: DeltaOptions) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self._options = options
        self._schema = to_arrow_schema(schema, timezone="UTC")

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """One file a task."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId") or ""
        files, root = _files(self._options.path)
        name = f"part-{context.partitionId():05}-{secrets.token_hex(16)}.zstd.parquet"
        waiting: list[Any] = []
        rows = flushed = 0
        writer: Any = None
        for batch in iterator:
            if not batch.num_rows:
                continue
            if writer is None:
                files.create_dir(root, recursive=True)
                writer = pq.ParquetWriter(f"{root}/{name}", self._schema, filesystem=files, compression="zstd")
            waiting.append(pa.RecordBatch.from_arrays(batch.columns, schema=self._schema))
            rows += batch.num_rows
            if rows - flushed >= _ROWS_FLUSHED:
                writer.write_table(pa.Table.from_batches(waiting, self._schema))
                waiting, flushed = [], rows
        if writer is None:
            return Written("", 0, 0, query)
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting, self._schema))
        writer.close()
        return Written(name, int(files.get_file_info(f"{root}/{name}").size), rows, query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """All files of the micro-batch, or none if the table has it."""
        files = [each for each in messages if isinstance(each, Written)]
        if not any(each.name for each in files):
            return
        app = self._options.app or files[0].query
        if not app:
            raise OptionInvalid("Spark does not tell the query's id here.", "Give the option app.")
        storage = json.loads(self._options.storage) or None
        if not add_files(self._options.path, self._schema, files, app, batchId, storage):
            self._forget(files)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Remove what was written."""
        self._forget([each for each in messages if isinstance(each, Written)])

    def _forget(self, written: list[Written]) -> None:
        files, root = _files(self._options.path)
        for each in written:
            if each.name:
                files.delete_file(f"{root}/{each.name}")


def _files(path: str) -> tuple[Any, str]:
    """File system and the table's path on it. Raises OptionInvalid."""
    try:
        files, root = pyarrow.fs.FileSystem.from_uri(path)
    except (pa.ArrowException, OSError) as error:
        raise OptionInvalid(f"path={path!r} cannot be: {error}.", "It is an absolute path or a URI.") from None
    return files, root.rstrip("/")


class DeltaSink(DataSource):
    """The data source; Spark makes one for each use."""

    @classmethod
    def name(cls) -> str:
        """What `format` takes."""
        return "veilmq-delta"

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:
        """For `DataFrame.writeStream`, in append mode."""
        if overwrite:
            raise OptionInvalid("veilmq-delta appends.", "Use outputMode('append').")
        return DeltaWriter(schema, read_delta_options(self.options))
