"""Another user of the machine, as whom a test may look at files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NOBODY: Final = 65_534


@contextmanager
def other_user(user: int = NOBODY) -> Iterator[None]:
    """For root only, whom no mode keeps out: everybody else is shut out by modes already."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(user)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
