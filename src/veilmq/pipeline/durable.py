"""Directories that take their name whole, and keep it through a kill and a power cut (files: veilmq.store.files).

Strategy: what is new is written beside its place and synced, then takes the name, and then the directory that has the
name is synced: before that nothing may be removed, and no state may be written, that relies on it. A directory cannot
be replaced by one rename: the old one is `.NAME.old` between two of them, and `restore` brings it back.
"""

import os
import shutil
from pathlib import Path

from veilmq.store.files import sync_directory, sync_file


def sync_tree(directory: Path) -> None:
    """Make a directory durable with all that is below it, and its name. Raises OSError."""
    for place, _, files in os.walk(directory):
        for name in files:
            sync_file(Path(place, name))
        sync_directory(place)
    sync_directory(directory.parent)


def take_place(beside: Path, place: Path) -> None:
    """Let a directory that is whole take the place of another one. Raises OSError."""
    sync_tree(beside)
    old = place.with_name(f".{place.name}.old")
    if place.exists():
        # Without it the old one is all that there is.
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    beside.rename(place)
    sync_directory(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore(directory: Path) -> None:
    """Bring back what a process left that died between the two renames of `take_place`."""
    for old in directory.glob(".*.old"):
        place = directory / old.name.removeprefix(".").removesuffix(".old")
        if place.exists():
            shutil.rmtree(old)
        else:
            old.rename(place)
            sync_directory(directory)
