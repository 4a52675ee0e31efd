"""Locks a directory so that only one run works in it at a time.

Strategy: an flock on a file in it. The kernel releases it when the process ends, however that happens.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from veilmq.pipeline.errors import PipelineError


@contextmanager
def locked(lock: Path, taken: type[PipelineError], who: str) -> Iterator[None]:
    """Hold the lock, a file in the directory. Raises `taken`, which names `who` works there, if it is held already."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mend = "Wait until it ends, or give this one a directory of its own."
            raise taken(f"{who} works in {lock.parent}.", mend) from None
        yield
