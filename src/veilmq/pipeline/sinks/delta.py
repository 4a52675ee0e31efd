"""A Delta table as the sink of a stream, each micro-batch once, through deltalake.

    frame.writeStream.format("veilmq-delta").option("path", "/tables/orders").option("checkpointLocation", ...).start()

Strategy: a task writes its rows as one Parquet file under a name used once and tells its size; the driver adds the
files of a micro-batch in one transaction that carries (application, batch number), and does nothing for a batch that
the table already has. The application is the query's id, which its checkpoint keeps. Under a name of the user's it is
that name, and beside it name and id, which tell one query's batch 0 from the next one's. A killed attempt leaves files
that no transaction names; a vacuum removes them.

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
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.sinks.fitting import DeltaRefused, check_nulls, check_table, nulls_of
from veilmq.pipeline.sinks.options import DeltaOptions, read_delta_options

_ROWS_FLUSHED: Final = 65_536
_ELSEWHERE: Final = ("s3://", "gs://", "gcs://", "abfs://", "abfss://", "hdfs://", "viewfs://")


class Written(WriterCommitMessage):
    """One file of a task; `name` is empty if it had no rows. nulls: the columns that have some (`nulls_of`)."""

    def __init__(self, name: str, size_bytes: int, rows: int, query: str, nulls: frozenset[str] = frozenset()) -> None:
        self.name, self.size_bytes, self.rows, self.query, self.nulls = name, size_bytes, rows, query, nulls


def is_committed(path: str, app: str, batch: int, storage: dict[str, str] | None = None) -> bool:
    """Whether the table has that batch of that application."""
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(path, storage):
        return False
    return _has(DeltaTable(path, storage_options=storage), app, batch)


def add_files(
    path: str, schema: Any, files: list[Written], app: str, batch: int, storage: dict[str, str] | None = None
) -> bool:
    """One transaction; False if the table had the batch of the files' query already. Raises DeltaRefused.

    app: the query, or a name for it, which is refused where another query has it.
    """
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
    from deltalake.exceptions import DeltaError
    from deltalake.transaction import AddAction

    query = files[0].query
    own = app if app == query else f"{app}/{query}"
    if _is_done(path, app, own, batch, storage):
        return False
    now_ms = round(SYSTEM.wall() * 1_000)
    actions: list[Any] = [
        AddAction(each.name, each.size_bytes, {}, now_ms, True, json.dumps({"numRecords": each.rows}))
        for each in files
        if each.name
    ]
    try:
        if not DeltaTable.is_deltatable(path, storage):
            write_deltalake(path, schema.empty_table(), storage_options=storage)
        table = DeltaTable(path, storage_options=storage)
        check_table(table, schema)
        check_nulls(table, frozenset().union(*(each.nulls for each in files)))
        versions = {app: max(batch, table.transaction_version(app) or 0), own: batch}
        properties = CommitProperties(app_transactions=[Transaction(*each) for each in versions.items()])
        table.create_write_transaction(actions, "append", schema, [], commit_properties=properties)
    except DeltaError as error:
        if _is_done(path, app, own, batch, storage):
            return False
        raise DeltaRefused(f"The table {path} refuses batch {batch}: {error}.", "Do its columns fit?") from error
    return True


def check_place(path: str, schema: Any) -> None:
    """What can be told of a table's path before there are rows for it. Raises OptionInvalid, DeltaRefused."""
    from deltalake import DeltaTable

    if path.startswith(_ELSEWHERE):
        # That is the executors' to reach.
        return
    files, root = _files(path)
    if files.get_file_info(root).is_file:
        raise OptionInvalid(f"path={path!r} cannot be: it is a file.", "It is a directory.")
    if DeltaTable.is_deltatable(path):
        check_table(DeltaTable(path), schema)


def _has(table: Any, app: str, batch: int) -> bool:
    version = table.transaction_version(app)
    return version is not None and version >= batch


def _is_done(path: str, app: str, own: str, batch: int, storage: dict[str, str] | None) -> bool:
    """Whether the table has the batch of the query that is `own`. Raises DeltaRefused if it may be another one's."""
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(path, storage):
        return False
    table = DeltaTable(path, storage_options=storage)
    if _has(table, own, batch):
        return True
    if table.transaction_version(own) is None and _has(table, app, batch):
        mend = "Bring that query's checkpoint back, or give this one another name."
        raise DeltaRefused(f"The table {path} has batch {batch} of another query under the name app={app}.", mend)
    return False


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
        nulls: set[str] = set()
        rows = flushed = 0
        writer: Any = None
        for batch in iterator:
            if not batch.num_rows:
                continue
            if writer is None:
                files.create_dir(root, recursive=True)
                writer = pq.ParquetWriter(f"{root}/{name}", self._schema, filesystem=files, compression="zstd")
            waiting.append(pa.RecordBatch.from_arrays(batch.columns, schema=self._schema))
            nulls.update(nulls_of(waiting[-1]))
            rows += batch.num_rows
            if rows - flushed >= _ROWS_FLUSHED:
                writer.write_table(pa.Table.from_batches(waiting, self._schema))
                waiting, flushed = [], rows
        if writer is None:
            return Written("", 0, 0, query)
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting, self._schema))
        writer.close()
        return Written(name, int(files.get_file_info(f"{root}/{name}").size), rows, query, frozenset(nulls))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """All files of the micro-batch, or none if the table has it."""
        files = [each for each in messages if isinstance(each, Written)]
        if not any(each.name for each in files):
            return
        app = self._options.app or files[0].query
        assert files[0].query, "Spark tells a streaming task its query"
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
