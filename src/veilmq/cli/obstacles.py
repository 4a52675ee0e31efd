"""Finds the file or directory that denies access, when the system only says `Permission denied`.

Strategy: the system names the requested path, but the cause may be a directory above it, or the one in which it would
be made. The search goes from the root down and names the first one that is closed.
"""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from veilmq.cli.exits import Exit, Failure

if TYPE_CHECKING:
    from veilmq.server.toml_file import FileInvalid

_EFFECTIVE: Final = os.access in os.supports_effective_ids


def closed_to_user(path: Path, *, made: bool = False) -> str:
    """Why this user cannot read the path, as a sentence; made: also why they cannot make it, if it is missing.

    Empty if nothing does.
    """
    path = path.absolute()
    for each in reversed(path.parents):
        if not _may(each, os.F_OK):
            return ""  # missing, as all below it
        if not _may(each, os.X_OK):
            return f"{each} is closed to this user ({_user()})."
    if made and not _may(path, os.F_OK):
        return "" if _may(path.parent, os.W_OK) else f"{path.parent} may not be written by this user ({_user()})."
    if _may(path, os.F_OK) and not _may(path, os.R_OK):
        return f"{path} may not be read by this user ({_user()})."
    return ""


def advice_on(path: Path, otherwise: str) -> str:
    """Why this user has no access, and what to do; else `otherwise`."""
    closed = closed_to_user(path)
    return f"{closed} {otherwise}" if closed else otherwise


def file_advice(error: "FileInvalid", *, missing: str, wrong: str = "") -> str:
    """Advice about an unusable file; missing, wrong: if it does not exist, or its contents are wrong."""
    if error.errno is None:
        return wrong
    return missing if error.errno == errno.ENOENT else closed_to_user(error.path)


def check_directory(path: Path, named: str) -> None:
    """Raises Failure if the directory cannot be written by this user, or is missing and cannot be made.

    A directory is not made below a missing one, so that a mistyped path does not create an empty data directory. named:
    the user's name for it, such as an option.
    """
    closed = closed_to_user(path, made=True)
    if not closed and path.is_dir() and not _may(path, os.W_OK | os.X_OK):
        closed = f"{path} may not be written by this user ({_user()})."
    if closed:
        advice = f"{closed} Name a directory that you may write to."
        raise Failure(Exit.USAGE, f"{named}: {path}: Permission denied", advice)
    parent = path.absolute().parent
    if not parent.is_dir():
        advice = f"Check the path, or make it first: mkdir -p {parent}"
        raise Failure(Exit.USAGE, f"{named}: {path} is not made, because its parent is not there", advice)


def _user() -> str:
    return f"uid {os.geteuid()}"


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=_EFFECTIVE)
