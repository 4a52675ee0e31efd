"""How a command fails: its exit code, its message, and advice.

Strategy: a `Failure` ends the command wherever it is raised. When the system only says `Permission denied`, advice
names the file or directory that denies access: the cause may be a directory above the requested path, or the one in
which it would be made. The search goes from the root down and names the first one that is closed.
"""

import errno
import os
import pwd
import sys
from enum import IntEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from veilmq.server.config import FileInvalid
    from veilmq.store.directory import DestinationTaken


_EXTRAS: Final = {
    "server": (
        "aiohttp", "certifi", "cryptography", "httptools", "prometheus_client", "rich", "starlette", "typer", "uvicorn",
        "yarl",
    ),
    "amqp": ("pika",),
    "cluster": ("psycopg",),
    "telemetry": ("opentelemetry",),
    "pipeline": ("deltalake", "fsspec", "matplotlib", "numpy", "pandas", "py4j", "pyarrow", "pyspark"),
}  # fmt: skip
"""The extra that installs each import; none is installed by a plain `pip install veilmq`."""
MEMBER_FILE: Final = "cluster.json"
"""In a copy that a server of a cluster keeps. As in veilmq.cluster.member, which needs the extra `cluster`."""
KEEP_RUNNING: Final = "Do not stop the server, which still has it open: docs/operations.md, A deleted file."
_SPACE: Final = "Free some space, or name a directory on another disk: --data DIR."
DISK_ADVICE: Final = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EROFS: "Mount it for writing (after an error of the disk: see `dmesg`), under systemd add it to "
    "`ReadWritePaths=` in the unit, or name another: --data DIR.",
    errno.EIO: "Its disk may be failing: see `dmesg`.",
}
"""What to do about an error of the disk that holds the data directory."""
_EFFECTIVE: Final = os.access in os.supports_effective_ids


def serve_command(data: Path) -> str:
    """What to type to serve a directory."""
    cluster = " --cluster URL" if (data / MEMBER_FILE).exists() else ""
    return f"veilmq serve --data {quote(str(data))}{cluster}"


def check_command(data: Path) -> str:
    """What to type to check a directory."""
    return f"veilmq check --data {quote(str(data))}"


def repair_command(data: Path | None) -> str:
    """What to type to see what can be had of a damaged directory. None: it is another machine's."""
    named = f" --data {quote(str(data))}" if data else ""
    return f"veilmq check{named} --repair NEW_DIRECTORY --backup NEWEST_BACKUP"


def repair_advice(data: Path | None, *, is_damaged: bool = True) -> str:
    """What to do about a damaged directory; is_damaged false: about one that SQLite could not read."""
    command = repair_command(data)
    if is_damaged:
        return f"See what can be had: {command}"
    return f"Free space if the disk is full; else see what can be had: {command}"


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

    answered: tuple[int, str, str] | None = None
    """A server's answer: its status, error and request id."""

    def __init__(self, code: Exit, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.advice = advice


class Unreachable(Failure):
    """No complete answer came: the server may be restarting."""


class NoServer(Unreachable):
    """A directory that no server holds."""

    def __init__(self, data: Path) -> None:
        advice = f"Only a running server can do this. Start it as usual, or for a look: {serve_command(data)}"
        super().__init__(Exit.ADDRESS, f"no server runs on {data}", advice)


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


def taken(error: "DestinationTaken") -> Failure:
    """The directory that was to be made is there, or another process is writing it."""
    from veilmq.store.directory import DestinationBusy

    if isinstance(error, DestinationBusy):
        return Failure(Exit.DIRECTORY, str(error), "Wait until it ends, or name another directory.")
    return Failure(Exit.USAGE, str(error), "Name a directory that is empty or not there yet.")


def refuse_remains(directory: Path) -> None:
    """Raises Failure if a directory has other files of a database, and not the database itself, or an empty one;
    OSError."""
    from veilmq.store.directory import COMMITTED, DATABASE, REDO, holder_of

    database, log = directory / DATABASE, directory / REDO
    part = directory / f"{DATABASE}.part"
    is_there = database.exists()
    if not is_there and part.exists():
        advice = "Wait for it, or run it again into an empty directory."
        raise Failure(Exit.DIRECTORY, f"{part} is of a copy or a repair that has not ended", advice)
    remains = _has_content(directory / f"{DATABASE}-wal") or _has_content(log) or (directory / COMMITTED).exists()
    if remains and not (is_there and database.stat().st_size):
        can = f"Restore all files as of one moment, or a backup; or see what can be had: {repair_command(directory)}"
        advice = KEEP_RUNNING if holder_of(directory) else can
        state = "empty" if is_there else "missing"
        raise Failure(Exit.DIRECTORY, f"{database} is {state}, but other files of it exist", advice)


def _has_content(file: Path) -> bool:
    """Whether it has a beginning that is not all zeros."""
    if not file.exists():
        return False
    with file.open("rb") as opened:
        return any(opened.read(_BEGINNING_BYTES))


_BEGINNING_BYTES: Final = 4_096


def end_without(error: ModuleNotFoundError) -> NoReturn:
    """End a command whose extra is not installed; re-raise if the module belongs to no extra."""
    package = str(error.name).partition(".")[0]
    for extra, packages in _EXTRAS.items():
        if package in packages:
            advice = f"It comes with the extra `{extra}`: pip install 'veilmq[{extra}]'."
            end(Failure(Exit.USAGE, f"the package {package} is missing", advice))
    raise error


def end(failure: Failure) -> NoReturn:
    """Print the problem and the advice on stderr, and exit. A server's words may be in them."""
    from veilmq.cli.output import printable

    for text in filter(None, (f"veilmq: {failure}", f"  {failure.advice}" if failure.advice else "")):
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr)
    raise SystemExit(int(failure.code))


def closed_to_user(path: Path, *, made: bool = False, of_server: bool = False) -> str:
    """Why this user cannot read the path, as a sentence; made: also why they cannot make it, if it is missing.

    Empty if nothing does. of_server: the file is one that the server reads, and this user is the server's.
    """
    path = path.absolute()
    for each in reversed(path.parents):
        if not may(each, os.F_OK):
            return ""  # missing, as all below it
        if not may(each, os.X_OK):
            step = _way_in(each)
            if of_server and _of_root(each):
                step = f"put {path.name} where this user may read it"
            return f"{each} is closed to this user ({_user()}): {step}."
    if made and not may(path, os.F_OK):
        return "" if may(path.parent, os.W_OK) else unwritable(path.parent, path)
    if may(path, os.F_OK) and not may(path, os.R_OK):
        step = _way_in(path)
        if of_server and _of_root(path) and path.is_file():
            # A service cannot become root, and should not.
            step = f"chown {_named(os.geteuid())} {quote(str(path))} as root"
        return f"{path} may not be read by this user ({_user()}): {step}."
    return ""


def _of_root(path: Path) -> bool:
    """Whether it is root's, and this user is another."""
    return path.stat().st_uid == 0 and os.geteuid() != 0


def _way_in(path: Path) -> str:
    """What to type, so that this user may use the file or directory."""
    owner = path.stat().st_uid
    if owner == os.geteuid():
        return f"chmod {'700' if path.is_dir() else '600'} {quote(str(path))}"
    return f"run the command as its owner, sudo -u {_named(owner, '#')}"


def _named(uid: int, mark: str = "") -> str:
    """The user's name; mark: what sudo wants before the number of a user without one."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"'{mark}{uid}'" if mark else str(uid)


def own_and_closed(*paths: Path) -> str:
    """What to type, if one of these is this user's own, and its mode keeps even this user from writing; else empty."""
    for path in paths:
        mode = os.W_OK | os.X_OK if path.is_dir() else os.W_OK
        if may(path, os.F_OK) and path.stat().st_uid == os.geteuid() and not may(path, mode):
            return f"Its mode keeps even its owner ({_user()}) from writing: {_way_in(path)}"
    return ""


def unusable(data: Path, error: OSError) -> Failure:
    """Why a server cannot use its data directory, and what to do."""
    where = error.filename or data
    if error.errno in {errno.EACCES, errno.EPERM}:
        chown = f"chown -R {os.geteuid()}: {quote(str(data))}"
        owner = f"The data directory and all in it must belong to the server's user: {chown}"
        advice = closed_to_user(data, made=True) or own_and_closed(data, Path(where)) or owner
    else:
        advice = DISK_ADVICE.get(error.errno or 0, "Choose another directory with --data DIR.")
    return Failure(Exit.DIRECTORY, f"{where}: {error.strerror}", advice)


def _denial(path: Path) -> int:
    """Why nothing can be written there, as an error number."""
    there = next(each for each in (path, *path.absolute().parents) if may(each, os.F_OK))
    return errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES


def unwritable(path: Path, below: Path | None = None) -> str:
    """Why this user cannot write there; below: what was to be made in it."""
    if _denial(path) == errno.EROFS:
        return f"{path} is on a file system that is mounted read-only."
    if below is not None and path.stat().st_uid != os.geteuid():
        step = f"have it made for you, sudo install -d -m 700 -o {os.geteuid()} {quote(str(below))}"
    else:
        step = _way_in(path)
    return f"{path} may not be written by this user ({_user()}): {step}."


def advice_on(path: Path, otherwise: str) -> str:
    """Why this user has no access, and what to do; else `otherwise`."""
    closed = closed_to_user(path)
    return f"{closed} {otherwise}" if closed else otherwise


def file_advice(error: "FileInvalid", *, missing: str, wrong: str = "") -> str:
    """Advice about an unusable file of the server's; missing, wrong: if it is not there, or its contents are wrong."""
    if error.errno is None:
        return wrong
    return missing if error.errno == errno.ENOENT else closed_to_user(error.path, of_server=True) or "Check the path."


def check_directory(path: Path, named: str, *, beside: bool = False) -> None:
    """Raises Failure if the directory cannot be written by this user, or is missing and cannot be made.

    A directory is not made below a missing one, so that a mistyped path does not create an empty data directory. named:
    the user's name for it, such as an option. beside: it is written beside its place first, as by `made_beside`.
    """
    if beside and os.path.ismount(os.path.realpath(path)):
        advice = f"Name a directory inside it: {path / 'data'}"
        raise Failure(Exit.USAGE, f"{named}: {path} is a mount point, which no directory can replace", advice)
    parent = path.absolute().parent
    closed = closed_to_user(path, made=True)
    if beside and parent.is_dir() and not may(parent, os.W_OK | os.X_OK):
        closed = f"It is written beside its place first. {unwritable(parent)}"
    elif not closed and path.is_dir() and not may(path, os.W_OK | os.X_OK):
        closed = unwritable(path)
    if closed:
        advice = f"{closed} Name a directory {'in one ' if beside else ''}that you may write to."
        raise Failure(Exit.USAGE, f"{named}: {path}: {os.strerror(_denial(path))}", advice)
    if not parent.is_dir():
        advice = f"Check the path, or make it first: mkdir -p {quote(str(parent))}"
        raise Failure(Exit.USAGE, f"{named}: {path} is not made, because its parent is not there", advice)


def _user() -> str:
    return f"uid {os.geteuid()}"


def may(path: Path, mode: int) -> bool:
    """Whether this user may use the path so (`os.access`)."""
    return os.access(path, mode, effective_ids=_EFFECTIVE)
