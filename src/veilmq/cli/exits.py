"""Exit codes, and the message of a failed command."""

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
"""The extra that installs each import; none is installed by a plain `pip install veilmq`."""


class Exit(IntEnum):
    """Exit codes of `veilmq`; the help text lists them."""

    DONE = 0
    WRONG = 1
    """The command ran and found a problem, or its request was refused."""
    USAGE = 2
    """A flag, a variable or a file is wrong: nothing was started."""
    DIRECTORY = 3
    """The data directory is held by another process, open to other users, of another release, or not ours."""
    ADDRESS = 4
    """A port is in use or not available."""
    STORE = 5
    """The store failed and must be checked; nothing acknowledged is lost."""


class Failure(Exception):
    """Ends the command with an exit code; `advice` says what to do next."""

    def __init__(self, code: Exit, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.advice = advice


class Unreachable(Failure):
    """No complete answer came: the server may be restarting."""


class Unknown(Failure):
    """The server does not know the operation or the name."""


class Missing(Failure):
    """The queue does not exist."""


def foreign(directory: Path, error: Exception) -> Failure:
    """The directory's contents belong to another program or are damaged."""
    if str(directory) in str(error):
        return Failure(Exit.DIRECTORY, str(error))  # the text includes advice
    advice = "It is another program's: name the data directory with --data DIR."
    return Failure(Exit.DIRECTORY, f"{directory}: {error}", advice)


def end_without(error: ModuleNotFoundError) -> NoReturn:
    """End a command whose extra is not installed; re-raise if the module belongs to no extra."""
    package = str(error.name).partition(".")[0]
    for extra, packages in _EXTRAS.items():
        if package in packages:
            advice = f"It comes with the extra `{extra}`: pip install 'veilmq[{extra}]'."
            end(Failure(Exit.USAGE, f"the package {package} is missing", advice))
    raise error


def end(failure: Failure) -> NoReturn:
    """Print the problem and the advice on stderr, and exit."""
    print(f"veilmq: {failure}", file=sys.stderr)
    if failure.advice:
        print(f"  {failure.advice}", file=sys.stderr)
    raise SystemExit(int(failure.code))
