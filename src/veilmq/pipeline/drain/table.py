"""Whether a table is this query's to write, looked at before anything is received.

Strategy: Spark's Parquet sink knows batches by their numbers alone. To a query that begins anew, on the table of
another one, it says of batch 0 that it has it, and the source then deletes messages that are in no table. Nor is a
directory two tables: a reader of Delta passes over what the other sink wrote, and the other way round.
"""

from pathlib import Path
from typing import Final

from veilmq.pipeline.drain.errors import TableForeign

_ELSEWHERE: Final = "://"
_NONE: Final = -1


def check_table(kind: str, path: str, checkpoint: Path) -> None:
    """Of a table on a file system that is reached here; of others nothing is known. Raises TableForeign."""
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
