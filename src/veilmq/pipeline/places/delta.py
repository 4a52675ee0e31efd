"""Files of Delta tables, written by tasks; and tables at a URL, which are replaced and read as a whole.

Strategy: Spark has a connector for a store only if its user installed one, so tasks of Python write and read the files.
A replacement is one transaction: a reader sees the old table or the new one. Credentials are those of the environment.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset
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


_PARTED: Final = (pa.types.is_string, pa.types.is_integer, pa.types.is_boolean, pa.types.is_date32)
"""Types of columns whose values can be the name of a directory, and are texts in the log as Python writes them."""


def write_parted(
    batches: Iterator[Any], path: str, schema: Any, partitions: Sequence[str], number: int
) -> list[tuple[Part, dict[str, str | None]]]:
    """Write record batches as files of the table, one for each combination of the partition columns' values: each file
    with those values, durably. number: of the task. Raises OSError, OptionInvalid."""
    files, root = files_of(path)
    columns = pa.schema([schema.field(name) for name in partitions])
    layout = pyarrow.dataset.partitioning(columns, flavor="hive")
    found: list[tuple[Part, dict[str, str | None]]] = []

    def note(file: Any) -> None:
        below = file.path[len(root) + 1 :] if file.path.startswith(f"{root}/") else file.path
        values = pyarrow.dataset.get_partition_keys(layout.parse(below))
        found.append(
            (
                Part(below, int(file.size), file.metadata.num_rows),
                {name: _told(values.get(name)) for name in partitions},
            )
        )

    pyarrow.dataset.write_dataset(
        pa.RecordBatchReader.from_batches(schema, (each for each in batches if each.num_rows)),
        root,
        basename_template=f"part-{number:05}-{secrets.token_hex(16)}-{{i}}.zstd.parquet",
        format=pyarrow.dataset.ParquetFileFormat(),
        file_options=pyarrow.dataset.ParquetFileFormat().make_write_options(compression="zstd"),
        filesystem=files,
        partitioning=layout,
        max_rows_per_group=_ROWS_FLUSHED,
        existing_data_behavior="overwrite_or_ignore",
        file_visitor=note,
    )
    if isinstance(files, pyarrow.fs.LocalFileSystem):
        made = {Path(root)}
        for part, _ in found:
            sync_file(Path(root, part.name))
            made |= {each for each in Path(root, part.name).parents if each.is_relative_to(root)}
        for directory in sorted(made, key=lambda each: len(each.parts), reverse=True):
            sync_directory(directory)
    return found


def check_partitions(schema: Any, partitions: Sequence[str]) -> None:
    """Raises OptionInvalid unless rows of that Arrow schema can be divided by these columns."""
    for name in partitions:
        if name not in schema.names:
            raise OptionInvalid(
                f"partitionBy={name}: there is no such column.", f"There are {', '.join(schema.names)}."
            )
        if not any(is_kind(schema.field(name).type) for is_kind in _PARTED):
            raise OptionInvalid(
                f"partitionBy={name}: a column of {schema.field(name).type} cannot be.",
                "Use a text, an integer, a boolean or a date.",
            )
    if len(partitions) == len(schema.names):
        raise OptionInvalid("partitionBy names all columns.", "A file needs one of its own.")


def _told(value: Any) -> str | None:
    """A partition column's value as the log has it (Delta protocol, "Partition Value Serialization")."""
    if value is None or value == "":
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


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
