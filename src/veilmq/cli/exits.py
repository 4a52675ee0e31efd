"""How a command ends: its exit code, and what it says when it fails."""

import sys
from enum import IntEnum
from pathlib import Path
from typing import Final, NoReturn

_EXTRAS: Final = {
    "server": (
        "aiohttp", "certifi", "cryptography", "httptools", "prometheus_client", "rich", "starlette", "typer", "uvicorn",
        "yarl",
    ),
    "pipeline": ("deltalake", "fsspec", "matplotlib", "numpy", "pandas", "py4j", "pyarrow", "pyspark"),
}  # fmt: skip
"""What the extras bring, by the names to import: one is missing after a plain `pip install veilmq`."""


class Exit(IntEnum):
    """Exit codes of `veilmq`; the help text lists them."""

    DONE = 0
    WRONG = 1
    """The command ran and what it looked at is not in order, or what it asked for was refused."""
    USAGE = 2
    """A flag, a variable or a file is wrong: nothing was started."""
    DIRECTORY = 3
    """The data directory is held by another process, open to other users, of another release, or not ours."""
    ADDRESS = 4
    """A port is in use or cannot be had."""
    STORE = 5
    """The store failed, and what it holds must be looked at; nothing acknowledged is lost."""


class Failure(Exception):
    """Ends the command with that code; `advice` says what to do next."""

    def __init__(self, code: Exit, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.advice = advice


class Unreachable(Failure):
    """No answer came, or none that was whole: the server may be about to start again."""


class Unknown(Failure):
    """The server has no such operation, or nothing of that name."""


class Missing(Failure):
    """There is no such queue."""


def foreign(directory: Path, error: Exception) -> Failure:
    """What is in the directory is another program's, or damaged."""
    if str(directory) in str(error):
        return Failure(Exit.DIRECTORY, str(error))  # it says itself what to do
    advice = "It is another program's: name the data directory with --data DIR."
    return Failure(Exit.DIRECTORY, f"{directory}: {error}", advice)


def end_without(error: ModuleNotFoundError) -> NoReturn:
    """End a command that needs more than the plain installation; what is of no extra is raised again."""
    package = str(error.name).partition(".")[0]
    for extra, packages in _EXTRAS.items():
        if package in packages:
            advice = f"It comes with the extra `{extra}`: pip install 'veilmq[{extra}]'."
            end(Failure(Exit.USAGE, f"the package {package} is missing", advice))
    raise error


def end(failure: Failure) -> NoReturn:
    """Say on stderr what went wrong and what to do next, and exit."""
    print(f"veilmq: {failure}", file=sys.stderr)
    if failure.advice:
        print(f"  {failure.advice}", file=sys.stderr)
    raise SystemExit(int(failure.code))
