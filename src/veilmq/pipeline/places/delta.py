"""Files of Delta tables, written by tasks; and tables at a URL, which are replaced and read as a whole.

Strategy: Spark has a connector for a store only if its user installed one, so tasks of Python write and read the files.
A replacement is one transaction: a reader sees the old table or the new one. Credentials are those of the environment.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from veilmq.client.clock import SYSTEM
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.places import is_url, place
from veilmq.store.files import sync_directory, sync_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ARROWS_OWN: Final = ("s3://", "gs://", "gcs://", "hdfs://", "viewfs://", "file:")
"""URLs whose files pyarrow writes without another package; for the others fsspec does."""
_ROWS_FLUSHED: Final = 65_536
_ROWS_READ: Final = 1_000
"""Rows may be large bodies."""
_WRITTEN: Final = "`name` string, `size_bytes` bigint, `rows` bigint"


class Part(NamedTuple):
    """A file that a task wrote; `name` is empty if there were no rows."""

    name: str = ""
    size_bytes: int = 0
    rows: int = 0


def files_of(path: str) -> tuple[Any, str]:
    """The file system, and the table's path on it. Raises OptionInvalid."""
    try:
        if is_url(path) and not path.startswith(ARROWS_OWN):
            import fsspec

            place(path)  # refuses what cannot be
            found, root = fsspec.core.url_to_fs(path, use_listings_cache=False)
            files: Any = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(found))
        else:
            files, root = pyarrow.fs.FileSystem.from_uri(path)
    except (pa.ArrowException, ImportError, OSError, ValueError) as error:
        raise OptionInvalid(f"path={path!r} cannot be: {error}.", "It is an absolute path or a URI.") from None
    return files, root.rstrip("/")


def write_part(batches: Iterator[Any], path: str, schema: Any, number: int) -> Part:
    """Write record batches as one file of the table, durably. number: of the task. Raises OSError, OptionInvalid."""
    files, root = files_of(path)
    name = f"part-{number:05}-{secrets.token_hex(16)}.zstd.parquet"
    waiting: list[Any] = []
    rows = flushed = 0
    writer: Any = None
    for batch in batches:
        if not batch.num_rows:
            continue
        if writer is None:
            files.create_dir(root, recursive=True)
            writer = pq.ParquetWriter(f"{root}/{name}", schema, filesystem=files, compression="zstd")
        waiting.append(batch)
        rows += batch.num_rows
        if rows - flushed >= _ROWS_FLUSHED:
            writer.write_table(pa.Table.from_batches(waiting, schema))
            waiting, flushed = [], rows
    if writer is None:
        return Part()
    if waiting:
        writer.write_table(pa.Table.from_batches(waiting, schema))
    writer.close()
    if isinstance(files, pyarrow.fs.LocalFileSystem):
        sync_file(Path(root, name))
        sync_directory(root)
    return Part(name, int(files.get_file_info(f"{root}/{name}").size), rows)


def added(parts: Iterator[Part]) -> list[Any]:
    """The actions that add these files to a table."""
    from deltalake.transaction import AddAction

    now_ms = round(SYSTEM.wall() * 1_000)
    return [
        AddAction(name, size_bytes, {}, now_ms, True, f'{{"numRecords": {rows}}}')
        for name, size_bytes, rows in parts
        if name
    ]


def replace(frame: "DataFrame", url: str, vacuum_hours: int) -> None:
    """The table at the URL has these rows and no others, or those of before if this fails. Files of versions that are
    older than `vacuum_hours` are removed."""
    from deltalake import DeltaTable, write_deltalake
    from pyspark.sql.pandas.types import to_arrow_schema

    schema = to_arrow_schema(frame.schema, timezone="UTC")
    rows = frame.mapInArrow(partial(_write, url=url, schema=schema), _WRITTEN).collect()
    if not DeltaTable.is_deltatable(url):
        write_deltalake(url, schema.empty_table(), mode="ignore")
    actions = added(Part(*row) for row in rows)
    table = DeltaTable(url)
    table.create_write_transaction(actions, "overwrite", schema, [])
    table.vacuum(vacuum_hours, dry_run=False)


def _write(batches: Iterator[Any], url: str, schema: Any) -> Iterator[Any]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    named = (pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in batches)
    yield pa.RecordBatch.from_pylist([write_part(named, url, schema, context.partitionId())._asdict()])


Checking = Callable[[Any, str, list[str]], None]
"""Raises OptionInvalid unless a deltalake table's files, at these paths, hold exactly its rows."""


def read(spark: "SparkSession", url: str, check: Checking) -> "DataFrame":
    """The table's rows, each file by a task of its own. Raises OptionInvalid, also as `check` does."""
    from pyspark.sql.types import StructType

    table = _table(url)
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    paths = [unquote(each) for each in pa.table(table.get_add_actions()).column("path").to_pylist()]
    check(table, url, paths)
    if table.metadata().partition_columns or any("://" in path for path in paths):
        mend = "Read it with Spark's own Delta, and write a plain table."
        raise OptionInvalid(f"{url} has partitions, or files elsewhere.", mend)
    frame = spark.createDataFrame([(path,) for path in paths], "path string").repartition(max(1, len(paths)))
    return frame.mapInArrow(partial(_read, url=url, names=schema.names), schema)


def _read(batches: Iterator[Any], url: str, names: list[str]) -> Iterator[Any]:
    files, root = files_of(url)
    for batch in batches:
        for path in batch.column("path").to_pylist():
            with files.open_input_file(f"{root}/{path}") as file:
                for rows in pq.ParquetFile(file).iter_batches(_ROWS_READ, columns=names):
                    yield rows.select(names)


def load(url: str) -> Any:
    """The table's rows as a pyarrow Table: for small ones. Raises OptionInvalid if there is no table."""
    return _table(url).to_pyarrow_table()


def _table(url: str) -> Any:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        return DeltaTable(url)
    except (DeltaError, OSError) as error:
        raise OptionInvalid(f"{url} holds no table that can be read: {error}.", "Name a Delta table.") from None
