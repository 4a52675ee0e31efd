"""Looks at Spark's checkpoint before a drain starts: does the table belong to it, and what did a kill leave in it?

Strategy of `check_table`: Spark's Parquet sink identifies batches by their numbers only. If a new query starts on
another query's table, the sink says that it already has batch 0, and the source then deletes messages that are in no
table. Nor can one directory be two tables: a Delta reader ignores what the Parquet sink wrote, and the other way round.

Strategy of `clear`: Spark writes a log entry to a hidden file and renames it. If it is killed in between during its
very first batch, the next start finds that file and takes the checkpoint for another query's
(STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY). Nothing was logged yet, so the file can go, unless a query is running
there; the lock of its manifests tells.
"""

from pathlib import Path
from typing import Final

from veilmq.pipeline.drain.manifests import is_taken
from veilmq.pipeline.errors import TableForeign

_LOGS: Final = ("offsets", "commits")
_UNFINISHED: Final = (".tmp", ".tmp.crc")
_ELSEWHERE: Final = "://"
_NONE: Final = -1


def clear(checkpoint: Path, manifests: Path) -> None:
    """Remove the unfinished entries of a first batch that was never logged."""
    logged = checkpoint / "offsets"
    if not logged.is_dir() or any(each.name.isdigit() for each in logged.iterdir()) or is_taken(manifests):
        return
    for name in _LOGS:
        for each in (checkpoint / name).glob(".*"):
            if each.name.endswith(_UNFINISHED):
                each.unlink(missing_ok=True)


def check_table(kind: str, path: str, checkpoint: Path) -> None:
    """Check a table on a file system that is reachable here; others are not checked. Raises TableForeign."""
    local = path.removeprefix("file:")
    if local == path and _ELSEWHERE in path:
        return
    table = Path(local)
    is_delta, log = (table / "_delta_log").is_dir(), table / "_spark_metadata"
    if kind != "delta" and is_delta:
        raise TableForeign(f"{path} is a Delta table.", "Drain with that format, or into another place.")
    if kind == "delta" and log.is_dir():
        raise TableForeign(f"{path} is a Parquet table.", "Drain with that format, or into another place.")
    reached, has = _last(checkpoint / "offsets"), _last(log)
    is_strange = reached == _NONE and not is_delta and any(table.glob("*.parquet"))
    if has > reached or is_strange:
        mend = "Bring its checkpoint back, or name an empty place: Spark would take new batches for those that it has."
        raise TableForeign(f"{path} holds rows of another query.", mend if has > reached else "Name an empty place.")


def _last(log: Path) -> int:
    """The number of the last entry of one of Spark's logs, where every tenth may be `9.compact`."""
    if not log.is_dir():
        return _NONE
    return max((int(each.stem) for each in log.iterdir() if each.stem.isdigit()), default=_NONE)
