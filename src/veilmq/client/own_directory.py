"""A directory that belongs to this user alone, below one that everybody may write to, such as /tmp.

Strategy: another user could create the directory first and put files into it that this user then runs or trusts. So the
name contains the user's id, the mode is 0700, and a directory that another user owns or may write to is refused.
"""

import errno
import os
import stat
import tempfile
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def own_path(name: str) -> Path:
    """Where this user's directory of that name is, or will be."""
    return Path(tempfile.gettempdir()) / f"{name}-{os.geteuid()}"


def make_own(path: Path) -> None:
    """Make the directory (0700) if there is none. Raises OSError: PermissionError if it is not this user's alone."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        raise PermissionError(errno.EPERM, "is not a directory that this user alone may write to", str(path))
