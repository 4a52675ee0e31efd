"""Directories of the pipeline: replaces them whole, and locks them (for files: veilmq.store.files).

Strategy: after a kill or a power cut, the old or the new directory is there whole. Write the new content beside its
place and sync it, rename it, then sync the parent directory. Until that last sync, remove nothing and write no state
that relies on the new content. One rename cannot replace a directory: between the two renames the old one is called
`.NAME.old`, and `restore` brings it back. The lock is an flock on a file in the directory: the kernel releases it when
the process ends, however that happens.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from veilmq.pipeline.errors import PipelineError
from veilmq.store.files import sync_directory, sync_file


def sync_tree(directory: Path) -> None:
    """Make a directory, everything below it and its name durable. Raises OSError."""
    for place, _, files in os.walk(directory):
        for name in files:
            sync_file(Path(place, name))
        sync_directory(place)
    sync_directory(directory.parent)


def take_place(beside: Path, place: Path) -> None:
    """Replace the directory `place` with the complete directory `beside`. Raises OSError."""
    sync_tree(beside)
    old = place.with_name(f".{place.name}.old")
    if place.exists():
        # The old one may be the only copy.
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    beside.rename(place)
    sync_directory(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore(directory: Path) -> None:
    """Undo an unfinished `take_place` of a process that died between its two renames."""
    for old in directory.glob(".*.old"):
        place = directory / old.name.removeprefix(".").removesuffix(".old")
        if place.exists():
            shutil.rmtree(old)
        else:
            old.rename(place)
            sync_directory(directory)


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
