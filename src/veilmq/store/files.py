"""Files that are written whole or not at all, and outlive a power cut.

Strategy: write beside, fsync, rename, fsync the directory that names the file: a reader sees the old content or the
new one.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes, *, keeps_owner: bool = False) -> None:
    """Durable when this returns, with mode 0600. keeps_owner: of the file that it replaces, if the system lets us.

    Raises OSError.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            if keeps_owner:
                _give_to_owner_of(path, file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _give_to_owner_of(path: Path, descriptor: int) -> None:
    """root may add a key to a file that a service's user reads."""
    with suppress(OSError):
        found = path.stat()
        if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(descriptor, found.st_uid, found.st_gid)


def sync_directory(path: Path | str) -> None:
    """Make durable which files are in it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
