"""What makes a file outlive a power cut beside its own fsync: that of the directory that names it."""

import os
from pathlib import Path


def sync_directory(path: Path | str) -> None:
    """Make durable which files are in it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
