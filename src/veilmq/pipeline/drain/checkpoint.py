"""What a kill leaves in Spark's checkpoint and Spark does not clear away.

Strategy: Spark writes a log entry to a hidden file and renames it. Killed in between in its very first batch, it finds
that file at the next start and takes the checkpoint for another query's (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY).
Nothing was logged then, so the file is nothing; but only if no query is at work there, which its manifests' lock tells.
"""

from pathlib import Path
from typing import Final

from veilmq.pipeline.drain.manifests import is_taken

_LOGS: Final = ("offsets", "commits")
_UNFINISHED: Final = (".tmp", ".tmp.crc")


def clear(checkpoint: Path, manifests: Path) -> None:
    """Take away the unfinished entries of a first batch that was never logged."""
    logged = checkpoint / "offsets"
    if not logged.is_dir() or any(each.name.isdigit() for each in logged.iterdir()) or is_taken(manifests):
        return
    for name in _LOGS:
        for each in (checkpoint / name).glob(".*"):
            if each.name.endswith(_UNFINISHED):
                each.unlink(missing_ok=True)
