"""The command line run in this process, and both ways to a store's data."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.admin import server as admin

from veilmq.cli import main

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


def bare(**more: str) -> dict[str, str]:
    """The environment of a command that gets none of the tests' variables but where Python finds its modules, and
    `more`."""
    paths = [path for path in (more.get("PYTHONPATH"), os.environ.get("PYTHONPATH")) if path]
    return {"PATH": "/usr/bin:/bin", **more} | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], directory: Path) -> Run:
    """`run("send", "orders", ..., stdin="")`: the command in this process, in that directory. Not `serve`, which sets
    up the logging of the whole process."""
    monkeypatch.chdir(directory)
    for name in [name for name in os.environ if name.startswith("VEILMQ_")]:
        monkeypatch.delenv(name)

    def command(*arguments: str, stdin: str = "") -> Ended:
        assert arguments[:1] != ("serve",)
        monkeypatch.setattr(sys, "argv", ["veilmq", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return command


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
