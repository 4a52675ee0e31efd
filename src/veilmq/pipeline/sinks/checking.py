"""Finds files that a table names but no longer has; the rows in them are lost.

    found = check("/archive/orders/messages", now=time.time())
    for file in found.missing: print(file.path, file.version, file.rows)

Strategy: list the existing files once, through the store that delta-rs reads the table with, and compare them with the
files that the current version names. Older versions are checked from their log entries, as far as these exist: a file
that was removed from the table counts as missing only if no vacuum explains it. A vacuum explains it if the log has one
after the removal, or if the removal is older than the table keeps removed files, because not every writer logs its
vacuums. A repair (FSCK) removes files that are missing already, and explains nothing.

For a table that a stream wrote as Parquet, Spark's own log (`_spark_metadata`) says which files count.

Source: the Delta protocol, "Add File and Remove File".
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
import pyarrow as pa
import pyarrow.fs

from veilmq.pipeline.errors import OptionInvalid, SourceUnreachable
from veilmq.pipeline.places.delta import reason_of, storage_of

_ENTRY: Final = re.compile(r"_delta_log/(\d{20})\.json\Z")
_STREAM_LOG: Final = "_spark_metadata"
_ELSEWHERE: Final = "://"
_KEPT_MS: Final = 7 * 86_400_000
"""How long a Delta table keeps removed files unless its property says otherwise."""
_KEPT: Final = "delta.deletedFileRetentionDuration"
_INTERVAL: Final = re.compile(r"(?:interval )?(\d+) (minute|hour|day|week)s?\Z")
_UNITS_MS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000, "week": 7 * 86_400_000}
_VACUUM: Final = "VACUUM"
_REPAIR: Final = "FSCK"


class Missing(msgspec.Struct, frozen=True):
    """A missing file."""

    path: str
    """Relative to the table, or absolute if the file is elsewhere."""
    version: int | None
    """The first version that names it (for a stream's Parquet table, the batch); None: the log no longer goes back so
    far."""
    is_current: bool
    """The current version names it, so the table cannot be read as a whole. Otherwise only an older version does."""
    rows: int | None
    size_bytes: int


class Checked(msgspec.Struct, frozen=True):
    """The result of a check."""

    table: str
    version: int
    """The current version."""
    files: int
    """Number of files that the current version names."""
    missing: tuple[Missing, ...]


class _Added(NamedTuple):
    version: int | None
    rows: int | None
    size_bytes: int


class _Removed(NamedTuple):
    version: int
    at_ms: int
    operation: str


class _Log(NamedTuple):
    """What the remaining entries of a log say."""

    added: dict[str, _Added]
    removed: dict[str, _Removed]
    vacuumed: int
    """The last version written by a vacuum; -1 if none is known."""


def check(table: Path | str, storage: dict[str, str] | None = None, *, now: float) -> Checked:
    """Look for the files of a table. `storage`: deltalake's storage options; now: Unix seconds.

    Raises OptionInvalid if there is no table of a known kind, SourceUnreachable if it cannot be read.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    local = _local(str(table))
    place = str(table if local is None else local)
    storage = storage_of(place, storage)
    try:
        if DeltaTable.is_deltatable(place, storage):
            return _check_delta(place, storage, now)
        if local is not None and (local / _STREAM_LOG).is_dir():
            return _check_stream(local)
    except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
        raise SourceUnreachable(f"The table {place} cannot be read: {reason_of(error)}.", "") from error
    raise OptionInvalid(f"{place} holds no table with a log.", _mend(local))


def _local(table: str) -> Path | None:
    if table.startswith("file:"):
        return Path(unquote(urlsplit(table).path))
    return None if _ELSEWHERE in table else Path(table).resolve()


def _mend(place: Path | None) -> str:
    if place is not None and (place / "messages").is_dir():
        return f"Of an archive that is {place / 'messages'}."
    return "Name a Delta table, or one that a stream wrote."


def _check_delta(place: str, storage: dict[str, str] | None, now: float) -> Checked:
    from deltalake import DeltaTable
    from deltalake.fs import DeltaStorageHandler

    table = DeltaTable(place, storage_options=storage)
    version = int(table.version())
    current = {
        unquote(row["path"]): _Added(None, row["num_records"], row["size_bytes"])
        for row in pa.table(table.get_add_actions()).select(["path", "num_records", "size_bytes"]).to_pylist()
    }
    store = pyarrow.fs.PyFileSystem(DeltaStorageHandler(place, storage))
    listed = store.get_file_info(pyarrow.fs.FileSelector("", recursive=True))
    there = {each.path for each in listed if each.is_file}
    log = _read_log(store, there, version)
    missing = [
        Missing(path, log.added.get(path, added).version, is_current=True, rows=added.rows, size_bytes=added.size_bytes)
        for path, added in current.items()
        if not _is_there(path, there)
    ]
    kept_ms = _kept_ms(table.metadata().configuration)
    missing += [
        Missing(path, added.version, is_current=False, rows=added.rows, size_bytes=added.size_bytes)
        for path, added in log.added.items()
        if path not in current
        and not _is_explained(log.removed.get(path), log.vacuumed, now * 1_000 - kept_ms)
        and not _is_there(path, there)
    ]
    return Checked(place, version, len(current), tuple(missing))


def _read_log(store: Any, there: set[str], version: int) -> _Log:
    """The entries up to a version, oldest first."""
    log = _Log({}, {}, -1)
    for path in sorted(there):
        found = _ENTRY.match(path)
        if found and int(found[1]) <= version:
            log = _read_entry(log, int(found[1]), _actions(store, path))
    return log


def _actions(store: Any, path: str) -> list[dict[str, Any]]:
    with store.open_input_file(path) as file:
        return [json.loads(line) for line in file.read().splitlines() if line.strip()]


def _read_entry(log: _Log, version: int, actions: list[dict[str, Any]]) -> _Log:
    operation = next((str(each["commitInfo"].get("operation")) for each in actions if "commitInfo" in each), "")
    for each in actions:
        if add := each.get("add"):
            rows = json.loads(add.get("stats") or "{}").get("numRecords")
            log.added.setdefault(unquote(add["path"]), _Added(version, rows, add["size"]))
        elif remove := each.get("remove"):
            at_ms = remove.get("deletionTimestamp") or 0
            log.removed[unquote(remove["path"])] = _Removed(version, at_ms, operation)
    return log._replace(vacuumed=version) if operation.startswith(_VACUUM) else log


def _is_there(path: str, there: set[str]) -> bool:
    if _ELSEWHERE not in path:
        return path in there
    # A shallow clone names its source's files this way.
    files, place = pyarrow.fs.FileSystem.from_uri(path)
    return bool(files.get_file_info(place).is_file)


def _is_explained(removed: _Removed | None, vacuumed: int, kept_since_ms: float) -> bool:
    """Whether a vacuum may have removed a file that an older version names."""
    if removed is None or removed.operation == _REPAIR:
        return False
    return vacuumed > removed.version or removed.at_ms < kept_since_ms


def _kept_ms(configuration: Mapping[str, str | None]) -> int:
    found = _INTERVAL.match(configuration.get(_KEPT) or "")
    return int(found[1]) * _UNITS_MS[found[2]] if found else _KEPT_MS


def _check_stream(place: Path) -> Checked:
    named = dict(_named_by(place / _STREAM_LOG))
    missing = [
        Missing(
            str(path.relative_to(place)) if path.is_relative_to(place) else str(path),
            version,
            is_current=True,
            rows=None,
            size_bytes=size,
        )
        for path, (version, size) in named.items()
        if not path.is_file()
    ]
    return Checked(str(place), max((version for version, _ in named.values()), default=-1), len(named), tuple(missing))


def _named_by(log: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """The files that Spark's log names, with their batch and size. `9.compact` repeats the entries 0 to 9.

    The batch of a file in a compact entry is known only while the original entry exists.
    """
    entries = {int(each.stem): each for each in log.iterdir() if each.name.isdigit()}
    compact = {int(each.stem): each for each in log.glob("*.compact") if each.stem.isdigit()}
    last = max(compact, default=-1)
    wanted = sorted([*entries.items(), *([(last, compact[last])] if compact else [])], reverse=True)
    for batch, entry in wanted:
        for line in entry.read_text().splitlines()[1:]:
            action = json.loads(line)
            if action["action"] == "add":
                yield Path(unquote(urlsplit(action["path"]).path)), (batch, action["size"])
