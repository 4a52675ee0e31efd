"""A disk so small that a test can fill it. Only root mounts one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def small_disk(mount: Path) -> Iterator[Path]:
    """A disk of 16 MiB, mounted there while the block runs."""
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)


def fill_up(path: Path) -> Path:
    """Take all the space that is left, with a file. Returns it."""
    with path.open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    return path
