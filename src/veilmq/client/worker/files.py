"""Folders and locks of the files that guards and checkpoints keep.

Strategy: a file is replaced whole (veilmq.store.files). A lock is an flock on a file that stays, so that a killed
holder frees it.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from veilmq.store.files import sync_directory


def make_folder(path: Path) -> None:
    """With those above it, if they are not there; durable when this returns, as what is put into it shall be. Raises
    OSError."""
    if path.is_dir():
        return
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone with this file, among all threads and processes of the machine."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        # To close it is not enough: a child that was forked meanwhile has it open, too.
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)
