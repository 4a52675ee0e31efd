"""Where the commands of remote.py go: through a server's admin port, or straight to a directory that no server holds.

Strategy: one small interface, `Door`, with two implementations (remote_http.py, remote_direct.py); both read the same
table of operations (admin/operations.py), so that a command is written once and shows the same either way. `open_door`
picks: a flag goes before a variable, and a directory that a server holds is reached through that server.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from veilmq.cli.exits import Exit, Failure
from veilmq.cli.obstacles import advice_on
from veilmq.model.queue import QueueKey

if TYPE_CHECKING:
    from veilmq.cli.remote_http import HttpDoor

ADMIN_DEFAULT: Final = "127.0.0.1:9325"
DATA_DEFAULT: Final = Path("veilmq-data")
TOKEN_FILE: Final = "admin-token"
AS_SERVER: Final = "Say the command as the server's user, or name the server with --admin and --token-file."
EVERYTHING: Final[Mapping[str, str]] = MappingProxyType({})
"""No event is left out."""
_ACCOUNTS_NAMED: Final = 10
_TOKEN: Final = re.compile(rb"[!-~]+")


def several_accounts(where: str, accounts: Collection[str]) -> Failure:
    """It is not certain whose queues are meant; `accounts` is empty if nobody tells which there are."""
    advice = "Say whose queues are meant: --account ID."
    if accounts:
        more = "" if len(accounts) <= _ACCOUNTS_NAMED else f" and {len(accounts) - _ACCOUNTS_NAMED} more"
        advice = f"{advice[:-1]}, of {', '.join(sorted(accounts)[:_ACCOUNTS_NAMED])}{more}."
    return Failure(Exit.USAGE, where, f"{advice} `veilmq queues list --all` shows those of all.")


class Piece(NamedTuple):
    """Some events as JSON lines, which cover the offsets from `start` to before `following`."""

    lines: bytes
    start: int
    following: int
    epoch: str = ""
    """Names the history that they are of; empty straight on a directory, and from a server that does not tell it."""


class Home(NamedTuple):
    """Whose queues are meant, and in which region."""

    account: str
    region: str
    is_known: bool = True
    """False if the server's credentials file has no such account."""


class Door(Protocol):
    """What can be asked. All raise Failure."""

    def run(self, operation: str, queue: QueueKey, members: Mapping[str, Any]) -> dict[str, Any]:
        """One row of `OPERATIONS` on one queue; what its `show` gives."""
        ...

    def home(self, account: str | None) -> Home:
        """The account's home region; without an account the one that is meant where none is named: Failure if that is
        not certain."""
        ...

    def queues(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        """Queues by name; account `*` means all."""
        ...

    def topics(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        """Topics by name, with their subscriptions; account `*` means all."""
        ...

    def moves(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        """Message move tasks of these queues, newest first; account `*` means all."""
        ...

    def trace(self, message: str) -> dict[str, Any]:
        """The history of one message: {message, complete, scanned, events}."""
        ...

    def events(self, start: str, limit: int, follow_s: float, wanted: Mapping[str, str] = EVERYTHING) -> Piece:
        """Events of up to `limit` offsets from `start` (an offset, `first`, `next`), after waiting up to `follow_s`;
        wanted: only those of a `queue`, of some `kind`s, of a `message`."""
        ...


class Target(NamedTuple):
    """Which server or directory, as flags or variables say."""

    admin: str | None
    token_file: Path | None
    data: Path | None


@contextmanager
def open_door(target: Target, environment: Mapping[str, str]) -> Iterator[Door]:
    """The door that the target means. Raises Failure."""
    door = http_door(target, environment)
    if door is None:
        from veilmq.cli.remote_direct import open_direct

        with open_direct(directory_of(target, environment)) as direct:
            yield direct
        return
    try:
        yield door
    finally:
        door.close()


def http_door(target: Target, environment: Mapping[str, str]) -> "HttpDoor | None":
    """The admin port that the target means; None if it means a directory that nobody holds. Raises Failure."""
    from veilmq.cli.remote_http import HttpDoor

    home = directory_of(target, environment)
    admin = target.admin or (None if target.data else environment.get("VEILMQ_ADMIN") or None)
    announced: str | None = None
    if admin is None and (target.data or environment.get("VEILMQ_DATA")):
        admin = announced = _admin_of_holder(home)
        if admin is None:
            return None
    source = "VEILMQ_ADMIN" if admin and not (target.admin or announced) else "--admin"
    token = _token(target, environment, home)
    return HttpDoor(admin or ADMIN_DEFAULT, token, announced=announced is not None, source=source)


@contextmanager
def holder_door(target: Target, environment: Mapping[str, str]) -> Iterator["HttpDoor | None"]:
    """The admin port that `--admin` names or that the directory's owner announced; None if nobody holds it.

    Raises Failure.
    """
    from veilmq.cli.remote_http import HttpDoor

    home = target.data or DATA_DEFAULT
    admin = target.admin or _admin_of_holder(home)
    if admin is None:
        yield None
        return
    door = HttpDoor(admin, _token(target, environment, home), announced=target.admin is None)
    try:
        yield door
    finally:
        door.close()


def directory_of(target: Target, environment: Mapping[str, str]) -> Path:
    """The data directory that is meant, whether it was named or not."""
    return target.data or _path(environment.get("VEILMQ_DATA")) or DATA_DEFAULT


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _admin_of_holder(directory: Path) -> str | None:
    """The admin URL that the directory's owner announced, if it has one. Raises Failure if it is no data directory."""
    from veilmq.store.directory import DATABASE, REDO, holds_database, is_held, read_holder

    try:
        found = holds_database(directory)
    except PermissionError as error:
        raise Failure(Exit.DIRECTORY, f"{directory}: {error.strerror}", advice_on(directory, AS_SERVER)) from None
    if not found and any((directory / name).exists() for name in (f"{DATABASE}-wal", REDO)):
        message = f"{directory / DATABASE} is missing, and other files of it are there"
        raise Failure(Exit.DIRECTORY, message, "Bring back all files of one moment, or a backup.")
    if not found:
        raise Failure(
            Exit.DIRECTORY,
            f"{directory} is not a data directory",
            "Name one with --data DIR, or make one with: veilmq serve --data DIR",
        )
    try:
        with (directory / "lock").open("rb") as lock:
            if not is_held(lock.fileno()):
                return None
    except OSError:
        return None
    holder = read_holder(directory)
    return holder.listeners.get("admin") if holder else None


def _token(target: Target, environment: Mapping[str, str], home: Path) -> str | None:
    """The bearer token, or None if nobody named a file and there is none: the server will say that one is missing."""
    named = target.token_file or _path(environment.get("VEILMQ_TOKEN_FILE"))
    path = named or home / TOKEN_FILE
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        if named is None and isinstance(error, FileNotFoundError):
            return None
        advice = advice_on(path, "Name a file that you may read with --token-file.")
        raise Failure(Exit.USAGE, f"{path}: {error.strerror}", advice) from None
    if not _TOKEN.fullmatch(text):
        raise Failure(Exit.USAGE, f"{path} holds no token", "Name the server's admin-token with --token-file.")
    return text.decode()
