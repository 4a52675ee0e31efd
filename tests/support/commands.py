"""The command line run in this process, and both ways to a store's data."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.admin import server as admin

WAYS = ("admin port", "directory")


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Ended]


@contextmanager
def reaching(way: str, run: Run, directory: Path) -> Iterator[Run]:
    """`run` with the options that lead to the store in `directory`, by one of `WAYS`."""
    if way == "directory":
        yield lambda *arguments, **more: run(*arguments, "--data", str(directory), **more)
        return
    token = directory.parent / "token"
    token.write_text(admin.TOKEN + "\n")
    with admin.running(directory) as server:
        where = ("--admin", f"127.0.0.1:{server.port}", "--token-file", str(token))
        yield lambda *arguments, **more: run(*arguments, *where, **more)
