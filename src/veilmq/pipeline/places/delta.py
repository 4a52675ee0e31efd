"""Files of Delta tables, written by tasks; and tables at a URL, which are replaced and read as a whole.

Strategy: Spark has a connector for a store only if its user installed one, so tasks of Python write and read the files.
A replacement is one transaction: a reader sees the old table or the new one. Credentials are those of the environment.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq

from veilmq.client.clock import SYSTEM
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.places import is_url, place
from veilmq.store.files import sync_directory, sync_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ARROWS_OWN: Final = ("s3://", "gs://", "gcs://", "hdfs://", "viewfs://", "file:")
"""URLs whose files pyarrow writes without another package; for the others, and where it is configured, fsspec does."""
_OF_FSSPEC: Final = {
    "aws_access_key_id": "key", "aws_secret_access_key": "secret", "aws_session_token": "token"
}  # fmt: skip
_ROWS_FLUSHED: Final = 65_536
_HELD_BYTES: Final = 64 << 20
"""Of rows that wait to be divided, in one task. A copy of them is made."""
_NAME_BYTES: Final = 255
_DIRECTORY_LETTERS: Final = 200
"""A name on a local disk has 255 bytes, and a key of an object store 1,024."""
_SYNCS: Final = 16
_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
"""How a directory's name writes null."""
_UNTAKEN: Final = re.compile(r"[\x00-\x1f\x7f\[\]^|\\]|%[0-9A-Fa-f]{2}")
"""What deltalake does not take in a local path, which it makes a URL of."""
_CAUSE: Final = re.compile(r"\s*\n\s*(?:\x1b\[\d+m)?↳(?:\x1b\[0m)?\s*")
_TRACE: Final = re.compile(r"\n\s+0: .*", re.DOTALL)
_ROWS_READ: Final = 1_000
"""Rows may be large bodies."""
_PATH: Final = "path of the file"
_WRITTEN: Final = "`name` string, `size_bytes` bigint, `rows` bigint"


class Part(NamedTuple):
    """A file that a task wrote; `name` is empty if there were no rows."""

    name: str = ""
    size_bytes: int = 0
    rows: int = 0


def storage_of(path: str, given: dict[str, str] | None = None) -> dict[str, str] | None:
    """deltalake's storage options: those that were given, over what fsspec's configuration says of S3 (`FSSPEC_S3_KEY`
    ...). None if there are none: deltalake takes them from its environment."""
    known = _fsspecs_of(path)
    more = known.get("client_kwargs") or {}
    endpoint = known.get("endpoint_url") or more.get("endpoint_url")
    known_options = {name: known.get(key) for name, key in _OF_FSSPEC.items()}
    known_options |= {"aws_endpoint_url": endpoint, "aws_region": more.get("region_name")}
    known_options |= {"aws_allow_http": "true" if str(endpoint).startswith("http:") else None}
    return {name: str(value) for name, value in known_options.items() if value} | (given or {}) or None


def table_at(path: Path | str, storage: dict[str, str] | None = None) -> Any:
    """The deltalake table there; None: there is none. storage: see `storage_of`. Raises DeltaError, OSError."""
    from deltalake import DeltaTable

    storage = storage_of(str(path), storage)
    return DeltaTable(path, storage_options=storage) if DeltaTable.is_deltatable(path, storage) else None


def reason_of(error: BaseException) -> str:
    """deltalake's error in one line, without a full stop. It draws causes below each other, in colour, and may append a
    trace of Rust; an object store's answer has lines, too."""
    return " ".join(_CAUSE.sub(": ", _TRACE.sub("", str(error))).split()).rstrip(".")


def check_named(path: Path | str) -> None:
    """Raises OptionInvalid for a local path at which deltalake can make no table."""
    found = None if is_url(path) else _UNTAKEN.search(str(Path(path).resolve()))
    if found:
        mend = "Name another place. In a path, deltalake takes no %XX, [, ], ^, |, backslash or control character."
        raise OptionInvalid(f"{str(path)!r} cannot be the place of a Delta table: it has {found[0]!r}.", mend)


def _fsspecs_of(path: str) -> dict[str, Any]:
    """What fsspec's configuration says of a path in S3."""
    from fsspec.config import conf

    return conf.get("s3", {}) if path.startswith("s3://") else {}


def files_of(path: str) -> tuple[Any, str]:
    """The file system, and the table's path on it. Raises OptionInvalid."""
    try:
        if is_url(path) and (not path.startswith(ARROWS_OWN) or _fsspecs_of(path)):
            import fsspec

            place(path)  # refuses what cannot be
            found, root = fsspec.core.url_to_fs(path, use_listings_cache=False)
            files: Any = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(found))
        else:
            files, root = pyarrow.fs.FileSystem.from_uri(path)
    except (pa.ArrowException, ImportError, OSError, ValueError) as error:
        raise OptionInvalid(f"path={path!r} cannot be: {error}.", "It is an absolute path or a URI.") from None
    if isinstance(files, pyarrow.fs.LocalFileSystem):
        check_named(root)
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
    """Write record batches as files of the table, divided by the partition columns' values: each file with those
    values, durably. number: of the task. Raises OSError, OptionInvalid.

    Any number of values: rows are held up to `_HELD_BYTES`, then sorted and written, one file after the other.
    """
    files, root = files_of(path)
    found: list[tuple[Part, dict[str, str | None]]] = []
    template = f"part-{number:05}-{secrets.token_hex(16)}"
    for held in _held(batches, schema):
        for rows, values in _divided(held, partitions):
            directory = _directory(values)
            if not isinstance(files, pyarrow.fs.S3FileSystem):  # there it would be an object
                files.create_dir(f"{root}/{directory}", recursive=True)
            name = f"{directory}/{template}-{len(found)}.zstd.parquet"
            pq.write_table(rows, f"{root}/{name}", filesystem=files, compression="zstd", row_group_size=_ROWS_FLUSHED)
            found.append((Part(name, int(files.get_file_info(f"{root}/{name}").size), rows.num_rows), values))
    if isinstance(files, pyarrow.fs.LocalFileSystem) and found:
        _sync(Path(root), [Path(root, part.name) for part, _ in found])
    return found


def _sync(root: Path, files: list[Path]) -> None:
    """Many at a time: a disk's cache is flushed for all that wait."""
    directories = {root}.union(*(set(each.parents) - set(root.parents) for each in files))
    with ThreadPoolExecutor(_SYNCS) as pool:
        list(pool.map(sync_file, files))
        list(pool.map(sync_directory, directories))


def _held(batches: Iterator[Any], schema: Any) -> Iterator[Any]:
    """The rows, as tables of about `_HELD_BYTES`."""
    waiting: list[Any] = []
    size_bytes = 0
    for batch in batches:
        if batch.num_rows:
            waiting.append(batch)
            size_bytes += batch.nbytes
        if size_bytes >= _HELD_BYTES:
            yield pa.Table.from_batches(waiting, schema)
            waiting, size_bytes = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting, schema)


def _divided(rows: Any, partitions: Sequence[str]) -> Iterator[tuple[Any, dict[str, str | None]]]:
    """The rows of each combination of values, without the partition columns, and the values as the log has them."""
    keys = pa.table({str(n): _key(rows[name]) for n, name in enumerate(partitions)})
    order = pc.sort_indices(keys, [(name, "ascending") for name in keys.column_names])
    keys, rows = keys.take(order), rows.take(order)
    changes = pa.array([False] * (rows.num_rows - 1), pa.bool_())
    for column in keys.columns:
        numbers = column.combine_chunks()
        changes = pc.or_(changes, pc.not_equal(numbers[1:], numbers[:-1]))
    starts = [0, *(each + 1 for each in pc.indices_nonzero(changes).to_pylist()), rows.num_rows]
    for start, stop in pairwise(starts):
        some = rows.slice(start, stop - start)
        yield some.drop_columns(list(partitions)), {name: _partition_text(some[name][0].as_py()) for name in partitions}


def _key(column: Any) -> Any:
    """A number for each value of a column; of texts the log has no empty one."""
    if pa.types.is_string(column.type):
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
    return column.combine_chunks().dictionary_encode("encode").indices


def _directory(values: Mapping[str, str | None]) -> str:
    """Where files with these values are: by their names, as Hive and Spark have them, or by a digest of them.

    A reader takes the values from the log; the names only help a human reader, and one that knows no Delta. A digest
    stands for names that a file system or store would refuse as too long, or that would say another value (Delta
    protocol, "Partition Values": a path need not have them).
    """
    directory = "/".join(f"{_encoded(name)}={_NO_VALUE if v is None else _encoded(v)}" for name, v in values.items())
    if len(directory) <= _DIRECTORY_LETTERS and _NO_VALUE not in values.values():
        return directory
    return sha256(json.dumps(list(values.items())).encode()).hexdigest()


def _encoded(text: str) -> str:
    """As in names of directories, and no shorter than deltalake has it."""
    return quote(text, safe="").replace("~", "%7E")


def long_values(table: Any) -> list[tuple[str, list[str]]]:
    """Texts in a deltalake table's partition columns that are too long for deltalake's own writers, which make names of
    directories of them: its `optimize` and `delete` fail on those; `rewrite` does not."""
    adds = pa.table(table.get_add_actions(flatten=True))
    found: list[tuple[str, list[str]]] = []
    for name in table.metadata().partition_columns:
        if f"partition.{name}" not in adds.column_names:  # columns are mapped to other names
            continue
        values = pc.unique(adds.column(f"partition.{name}")).to_pylist()
        long = [v for v in values if isinstance(v, str) and len(_encoded(name) + _encoded(v)) >= _NAME_BYTES]
        found += [(name, long)] if long else []
    return found


def rewrite(table: Any, name: str, value: str, kept: Any = None) -> int:
    """Write the rows of one partition value to as few files as there can be, in one transaction; returns how many files
    are gone. kept: a pyarrow expression of the rows that stay. Raises as deltalake does, if others changed the same."""
    table.update_incremental()
    before = pc.sum(pc.equal(pa.table(table.get_add_actions(flatten=True)).column(f"partition.{name}"), value)).as_py()
    if before <= 1 and kept is None:
        return 0
    rows = table.to_pyarrow_dataset().scanner(filter=_both(pc.field(name) == value, kept))
    schema, columns = rows.projected_schema, table.metadata().partition_columns
    parts = write_parted(rows.to_batches(), table.table_uri, schema, columns, 0)
    actions = [action for part, values in parts for action in added(iter([part]), values)]
    table.create_write_transaction(actions, "overwrite", schema, columns, [(name, "=", value)])
    return int(before) - len(parts)


def _both(one: Any, other: Any) -> Any:
    return one if other is None else one & other


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


def _partition_text(value: Any) -> str | None:
    """A partition column's value as the log has it (Delta protocol, "Partition Value Serialization")."""
    if value is None or value == "":
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def added(parts: Iterator[Part], values: Mapping[str, str | None] | None = None) -> list[Any]:
    """The actions that add these files to a table. values: of its partition columns."""
    from deltalake.transaction import AddAction

    now_ms = round(SYSTEM.wall() * 1_000)
    return [
        AddAction(name, size_bytes, dict(values or {}), now_ms, True, f'{{"numRecords": {rows}}}')
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
    storage = storage_of(url)
    if not DeltaTable.is_deltatable(url, storage):
        write_deltalake(url, schema.empty_table(), mode="ignore", storage_options=storage)
    actions = added(Part(*row) for row in rows)
    table = DeltaTable(url, storage_options=storage)
    table.create_write_transaction(actions, "overwrite", schema, [])
    table.vacuum(vacuum_hours, dry_run=False)


def _write(batches: Iterator[Any], url: str, schema: Any) -> Iterator[Any]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    named = (pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in batches)
    yield pa.RecordBatch.from_pylist([write_part(named, url, schema, context.partitionId())._asdict()])


Checking = Callable[[Any, str], None]
"""Raises OptionInvalid unless the files of a deltalake table, which is there, hold exactly its rows."""


def read(spark: "SparkSession", url: str, check: Checking) -> "DataFrame":
    """The table's rows, each file by a task of its own; its partitions' values are the log's. Raises OptionInvalid,
    also as `check` does."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StringType, StructField, StructType

    table = _table(url)
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    adds = pa.table(table.get_add_actions(flatten=True))
    paths = [unquote(each) for each in adds.column("path").to_pylist()]
    check(table, url)
    if any("://" in path for path in paths):
        raise OptionInvalid(f"{url} has files elsewhere.", "Read it with Spark's own Delta, and write a plain table.")
    names = table.metadata().partition_columns
    columns = StructType([StructField(_PATH, StringType()), *(schema[name] for name in names)])
    values = (adds.column(f"partition.{name}").to_pylist() for name in names)
    files = list(zip(paths, *values, strict=True))
    frame = spark.createDataFrame(files, columns).repartition(max(1, len(files)))
    return frame.mapInArrow(partial(_read, url=url, schema=to_arrow_schema(schema, timezone="UTC")), schema)


def _read(batches: Iterator[Any], url: str, schema: Any) -> Iterator[Any]:
    """batches: of paths, and of the partition columns' values."""
    files, root = files_of(url)
    for batch in batches:
        same = batch.drop_columns([_PATH])
        names = [name for name in schema.names if name not in same.schema.names]
        for number, path in enumerate(batch.column(_PATH).to_pylist()):
            values = {name: same[name][number] for name in same.schema.names}
            with files.open_input_file(f"{root}/{path}") as file:
                for rows in pq.ParquetFile(file).iter_batches(_ROWS_READ, columns=names):
                    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
                    columns |= {name: pa.repeat(value, rows.num_rows) for name, value in values.items()}
                    absent = {each.name: pa.nulls(rows.num_rows, each.type) for each in schema}
                    yield pa.RecordBatch.from_pydict({name: (absent | columns)[name] for name in schema.names})


def load(url: str) -> Any:
    """The table's rows as a pyarrow Table: for small ones. Raises OptionInvalid if there is no table."""
    return _table(url).to_pyarrow_table()


def _table(url: str) -> Any:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        return DeltaTable(url, storage_options=storage_of(url))
    except (DeltaError, OSError, ValueError) as error:
        wrong = f"{url} holds no table that can be read: {reason_of(error)}."
        raise OptionInvalid(wrong, "Name a Delta table.") from None
