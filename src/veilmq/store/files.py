"""Durable file writes: a file is written whole or not at all, and survives a power cut.

Strategy: write a temporary file beside the target, fsync it, rename it, fsync the directory. A reader sees the old
content or the new. No other module calls `os.fsync` (tests/house/test_rooms.py).
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def durable_write(
    path: Path,
    content: bytes,
    *,
    mode: int = 0o600,
    alone: bool = False,
    exclusive: bool = False,
    keeps_owner: bool = False,
) -> None:
    """Replace a file; durable when this returns.

    mode: before the umask. alone: nobody else writes this file at the same time; the temporary file then has a fixed
    name, so that repeated kills leave at most one behind. exclusive: raise FileExistsError if the file exists.
    keeps_owner: give the new file the old one's owner, where the system allows it.

    Raises OSError.
    """
    beside = path.with_name(f".{path.name}.part" if alone else f".{path.name}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if alone else os.O_EXCL)
    try:
        with open(os.open(beside, flags, mode), "wb") as file:
            if keeps_owner:
                _give_to_owner_of(path, file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(beside, path)
            beside.unlink()
        else:
            beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def take_name(part: Path, path: Path) -> None:
    """Rename a complete file to `path`, durably, replacing any file there. Raises OSError."""
    sync_file(part)
    part.replace(path)
    sync_directory(path.parent)


def make_directory(path: Path, mode: int = 0o777, parents_mode: int = 0o777) -> None:
    """Create a directory and its parents, durably; do nothing if it exists. Modes are before the umask. Raises
    OSError."""
    if path.is_dir():
        return
    make_directory(path.parent, parents_mode, parents_mode)
    path.mkdir(mode=mode, exist_ok=True)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Make a file's content durable. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path | str) -> None:
    """Make the directory's entries durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _give_to_owner_of(path: Path, descriptor: int) -> None:
    """Keep the owner: root may add a key to a file that a service's user reads."""
    with suppress(OSError):
        found = path.stat()
        if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(descriptor, found.st_uid, found.st_gid)
