"""Removes what a kill leaves in Spark's checkpoint and Spark does not clean up.

Strategy: Spark writes a log entry to a hidden file and renames it. If it is killed in between during its very first
batch, the next start finds that file and takes the checkpoint for another query's
(STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY). Nothing was logged yet, so the file can go, unless a query is running
there; the lock of its manifests tells.
"""

from pathlib import Path
from typing import Final

from veilmq.pipeline.drain.manifests import is_taken

_LOGS: Final = ("offsets", "commits")
_UNFINISHED: Final = (".tmp", ".tmp.crc")


def clear(checkpoint: Path, manifests: Path) -> None:
    """Remove the unfinished entries of a first batch that was never logged."""
    logged = checkpoint / "offsets"
    if not logged.is_dir() or any(each.name.isdigit() for each in logged.iterdir()) or is_taken(manifests):
        return
    for name in _LOGS:
        for each in (checkpoint / name).glob(".*"):
            if each.name.endswith(_UNFINISHED):
                each.unlink(missing_ok=True)
