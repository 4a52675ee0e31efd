"""Admin access for the commands of cli/remote: through a server's admin port, or directly on a directory that no server
holds.

Strategy: one small interface, `AdminAccess`, with two implementations (http.py, direct.py); both read the
same table of operations (admin/api/operations.py), so that a command is written once and prints the same either way.
`open_access` chooses: a flag takes precedence over a variable, and a directory that a server holds is reached through
that server.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from veilmq.cli.failures import (
    KEEP_RUNNING,
    Exit,
    Failure,
    Missing,
    NoServer,
    Unknown,
    advice_on,
    refuse_remains,
    serve_command,
)
from veilmq.cli.options import option_of
from veilmq.model.errors import NAME_TAKEN
from veilmq.model.settings.queue import FIFO_SUFFIX, QueueKey

if TYPE_CHECKING:
    from veilmq.cli.access.http import HttpAccess


ADMIN_DEFAULT: Final = "127.0.0.1:9325"
DATA_DEFAULT: Final = Path("veilmq-data")
TOKEN_FILE: Final = "admin-token"
AS_SERVER: Final = "Run the command as the server's user, or name the server with --admin and --token-file."
EVERYTHING: Final[Mapping[str, str]] = MappingProxyType({})
"""No filter: every event."""
_ACCOUNTS_NAMED: Final = 10
_TOKEN: Final = re.compile(rb"[!-~]+")


def several_accounts(where: str, accounts: Collection[str]) -> Failure:
    """The account is ambiguous; `accounts` is empty if it is not known which ones exist."""
    advice = "Name the account with --account ID."
    if accounts:
        more = "" if len(accounts) <= _ACCOUNTS_NAMED else f" and {len(accounts) - _ACCOUNTS_NAMED} more"
        advice = f"{advice[:-1]}, of {', '.join(sorted(accounts)[:_ACCOUNTS_NAMED])}{more}."
    return Failure(Exit.USAGE, where, f"{advice} `veilmq queues list --all` shows those of all.")


class Piece(NamedTuple):
    """Events as JSON lines, of the offsets from `start` to before `following`."""

    lines: bytes
    start: int
    following: int
    epoch: str = ""
    """Identifies the history; empty on a directory, and from a server that does not report it."""


class Home(NamedTuple):
    """The account and region of a command."""

    account: str
    region: str
    is_known: bool = True
    """False if the server's credentials file has no such account."""


class AdminAccess(Protocol):
    """The admin operations. All raise Failure."""

    def run(
        self, operation: str, queue: QueueKey, members: Mapping[str, Any], command_id: str | None = None
    ) -> dict[str, Any]:
        """Run one row of `OPERATIONS` on one queue; return the result of its `show`. What changes something acts once
        under its id."""
        ...

    def home(self, account: str | None) -> Home:
        """The account and its home region; default: the only account. Failure if that is ambiguous."""
        ...

    def queues(self, account: str, region: str | None, prefix: str, minutes: int = 0) -> Iterator[dict[str, Any]]:
        """Queues by name; account `*` means all. With the rates of so many minutes."""
        ...

    def topics(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        """Topics by name, with their subscriptions; account `*` means all."""
        ...

    def moves(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        """Message move tasks of these queues, newest first; account `*` means all."""
        ...

    def jobs(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        """Jobs of these queues, newest first, with move tasks; account `*` means all."""
        ...

    def job(self, job: str) -> dict[str, Any]:
        """One job, by its id."""
        ...

    def start_job(self, queue: QueueKey, members: Mapping[str, Any], command_id: str) -> dict[str, Any]:
        """Start a job (`JobInput`, without its queue) and return its first state."""
        ...

    def cancel_job(self, job: str, command_id: str) -> dict[str, Any]:
        """End a job; return its state."""
        ...

    def quarantined(self, account: str, region: str | None, prefix: str, *, bodies: bool) -> Iterator[dict[str, Any]]:
        """Damaged messages of these queues in quarantine, by sequence; account `*` means all."""
        ...

    def messages(self, queue: QueueKey, wanted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Pages of a queue's messages that match (`PageInput`): {messages, after, looked_at}."""
        ...

    def holders(self, queue: QueueKey, client: str) -> Iterator[dict[str, Any]]:
        """Pages of a queue's messages in flight, of clients with that text in their names: {at, holders, after,
        looked_at, waiters}."""
        ...

    def blocked(self, queue: QueueKey, limit: int) -> dict[str, Any]:
        """What waits in a FIFO queue behind held messages: {at, messages, groups, complete, held}."""
        ...

    def rollups(self, queue: QueueKey, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """What happened to a queue by minute or hour (`RollupsInput`)."""
        ...

    def past(self, queue: QueueKey, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The queue as it was (`PastInput`)."""
        ...

    def timeout(self, queue: QueueKey, tried_us: int | None) -> dict[str, Any]:
        """What the queue's leases say about its timeout, and about another one (`TimeoutInput`)."""
        ...

    def worst(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The worst queues of an account (`WorstInput`): {by, since, complete, queues}."""
        ...

    def wrong_timeouts(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Queues of an account whose timeout is clearly wrong (`WrongInput`): {at, queues}."""
        ...

    def failures(self, queue: QueueKey, minutes: int) -> dict[str, Any]:
        """Why messages of the queue failed in the last minutes: {from, to, causes, other, lines}."""
        ...

    def all_failures(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The same over all queues of an account (`AllFailuresInput`): {from, to, stopped, queues, causes, other}."""
        ...

    def workers(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The clients seen in the last hour (`WorkersInput`). Only a server knows them."""
        ...

    def accounts(self) -> Iterator[dict[str, Any]]:
        """Pages of accounts with keys and grants: {checks, limits, accounts, more, after}. Only a server knows them."""
        ...

    def message(self, message: str, *, bodies: bool) -> dict[str, Any]:
        """Where one message is: {message, complete, scanned, places, last}."""
        ...

    def sends(self, deduplication_id: str, queue: str | None) -> dict[str, Any]:
        """The messages that were sent with a deduplication id (`SendsInput`): {deduplication_id, messages, complete,
        scanned}."""
        ...

    def trace(self, message: str) -> dict[str, Any]:
        """The history of one message: {message, complete, scanned, story, events}."""
        ...

    def events(self, start: str, limit: int, follow_s: float, wanted: Mapping[str, str] = EVERYTHING) -> Piece:
        """Events of up to `limit` offsets from `start` (an offset, `first`, `next`), after waiting up to `follow_s`;
        wanted: filters `queue`, `kind` and `message`."""
        ...

    def accept_clock(self, command_id: str) -> dict[str, Any]:
        """Say that the machine's clock is right: {accepted_us, held_us}."""
        ...


class Target(NamedTuple):
    """The server or directory that flags or variables name."""

    admin: str | None
    token_file: Path | None
    data: Path | None


@contextmanager
def open_access(target: Target, environment: Mapping[str, str]) -> Iterator[AdminAccess]:
    """Access to the target. Raises Failure."""
    access = http_access(target, environment)
    if access is None:
        from veilmq.cli.access.direct import open_direct

        with open_direct(directory_of(target, environment)) as direct:
            yield direct
        return
    try:
        yield access
    finally:
        access.close()


def http_access(target: Target, environment: Mapping[str, str]) -> "HttpAccess | None":
    """Access to the target's admin port; None if it is a directory that nobody holds. Raises Failure."""
    from veilmq.cli.access.http import HttpAccess
    from veilmq.store.directory import reached_here

    if target.admin == "":  # an unset variable of a script: another server would be asked
        raise Failure(Exit.USAGE, "--admin: expected a URL, not an empty text")
    home = directory_of(target, environment)
    admin = target.admin or (None if target.data else environment.get("VEILMQ_ADMIN") or None)
    announced: str | None = None
    has_directory = bool(target.data or environment.get("VEILMQ_DATA"))
    if admin and has_directory and not target.admin and reached_here(admin) != admin:
        admin = None  # all addresses: where the server of the directory listens, as its lock knows better
    if admin is None and has_directory:
        admin = announced = _admin_of_holder(home)
        if admin is None:
            return None
    source = "VEILMQ_ADMIN" if admin and not (target.admin or announced) else "--admin"
    token = _token(target, environment, home, is_own=announced is not None)
    return HttpAccess(admin or ADMIN_DEFAULT, token, announced=announced is not None, source=source)


def server_access(target: Target, environment: Mapping[str, str]) -> "HttpAccess":
    """Access to the target's admin port. Raises Failure, also if it is a directory that nobody holds."""
    if (access := http_access(target, environment)) is None:
        raise NoServer(directory_of(target, environment))
    return access


@contextmanager
def holder_access(target: Target, environment: Mapping[str, str]) -> Iterator["HttpAccess | None"]:
    """The admin port that `--admin` names or that the directory's owner announced; None if nobody holds it.

    Raises Failure.
    """
    from veilmq.cli.access.http import HttpAccess

    home = target.data or DATA_DEFAULT
    admin = target.admin or _admin_of_holder(home)
    if admin is None:
        yield None
        return
    announced = target.admin is None
    access = HttpAccess(admin, _token(target, environment, home, is_own=announced), announced=announced)
    try:
        yield access
    finally:
        access.close()


def directory_of(target: Target, environment: Mapping[str, str]) -> Path:
    """The data directory: the named one, or the default."""
    return target.data or _path(environment.get("VEILMQ_DATA")) or DATA_DEFAULT


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _admin_of_holder(directory: Path) -> str | None:
    """The admin URL that the directory's owner announced, if it has one: it serves also if somebody deleted its files.

    Raises Failure if it is no data directory.
    """
    from veilmq.store.directory import holder_of, holds_database

    holder = holder_of(directory)
    if admin := holder and holder.url("admin"):
        return admin
    try:
        found = holds_database(directory)
        refuse_remains(directory)
    except PermissionError as error:
        raise Failure(Exit.DIRECTORY, f"{directory}: {error.strerror}", advice_on(directory, AS_SERVER)) from None
    if not found:
        raise Failure(
            Exit.DIRECTORY,
            f"{directory} is not a data directory",
            f"Name another one with --data DIR, or make it with: {serve_command(directory)}",
        )
    return None


def _token(target: Target, environment: Mapping[str, str], home: Path, *, is_own: bool) -> str | None:
    """The bearer token; None if no file is named and the default does not exist: the server then reports the lack.

    A directory that is named goes before the variable: its own server's token is there. is_own: it is that server that
    is asked, so a token that is not there was removed. Raises Failure."""
    named = target.token_file or (None if target.data else _path(environment.get("VEILMQ_TOKEN_FILE")))
    path = named or home / TOKEN_FILE
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        if named is None and isinstance(error, FileNotFoundError):
            if is_own:
                advice = (
                    "The server makes a new one at its next start. Or name a file with its token: --token-file FILE."
                )
                raise Failure(Exit.USAGE, f"{path} is missing", advice) from None
            return None
        advice = advice_on(path, "Name a file that you may read with --token-file.")
        raise Failure(Exit.USAGE, f"{path}: {error.strerror}", advice) from None
    if not _TOKEN.fullmatch(text):
        raise Failure(Exit.USAGE, f"{path} holds no token", "Name the server's admin-token with --token-file.")
    return text.decode()


def failure_of(error: str, message: str, answer: Mapping[str, Any]) -> Failure:
    """Turn an error of the admin port into the command's failure, with advice."""
    if error == "not_authenticated":
        return Failure(Exit.USAGE, message, _ADVICE_TOKEN)
    if error == "history_trimmed":
        return Failure(Exit.WRONG, message, f"Begin with --from {answer.get('first_offset')}, or with --from first.")
    if error == "not_found":
        return Unknown(Exit.WRONG, message, f"Is a name or id empty, or has it a slash? If not, {_RELEASE}")
    if error in _OF_STORE:
        advice = next((advice for words, advice in _ADVICE_FILES.items() if words in message), _ADVICE_STORE)
        return Failure(Exit.STORE, message, advice)
    if error == "QueueExists":
        message = _with_option(message)
    if error == "idempotency_key_reused":
        message = message.replace("this Idempotency-Key", "--id: this id")
    if error == "QueueMissing":
        return Missing(Exit.WRONG, message, _next(error, answer))
    return Failure(Exit.USAGE if error == "ParameterInvalid" else Exit.WRONG, message, _next(error, answer))


def _with_option(message: str) -> str:
    """That a queue exists with another setting, said with the option of it."""
    start, another, setting = message.rpartition(_ANOTHER)
    if not another:
        return message
    return start + another + ("--dead-letters or --max-receives" if setting == "redrive" else option_of(setting))


def _next(error: str, answer: Mapping[str, Any]) -> str:
    """What to do next, with the queue's own name."""
    data = answer.get("data")
    queue, setting = (data.get("queue"), data.get("setting")) if isinstance(data, dict) else (None, None)
    if error == "QueueExists" and setting == NAME_TAKEN:
        return "It is the alias of another queue: choose another name."
    name = queue.rpartition("/")[2] if isinstance(queue, str) else ""
    advice = _NEXT.get(error, "").replace("NAME", name or "NAME")
    return advice.replace(f"create {name}", f"create {name} --fifo") if name.endswith(FIFO_SUFFIX) else advice


_ADVICE_TOKEN: Final = (
    "Name the server's data directory with --data DIR or VEILMQ_DATA: its token is there. "
    "Or name a file that holds the token with --token-file FILE."
)
_ANOTHER: Final = " exists with another "
_RELEASE: Final = "the server is of another release than this command, and has no such operation."
_ADVICE_FILES: Final = {
    "not match its checksum": "The data is damaged: see where with `veilmq check` and the same --data or --admin.",
    "was deleted or replaced": KEEP_RUNNING,
}
_ADVICE_STORE: Final = "The server's log says more, and perhaps its disk is full."
_OF_STORE: Final = {"StoreFailed", "StoreUnknown"}
_NEXT: Final = {
    "method_not_allowed": f"Perhaps {_RELEASE}",
    "QueueMissing": "See what there is with `veilmq queues list --all`, or make it with `veilmq queues create NAME`.",
    "QueueExists": "Change it with `veilmq queues set NAME`.",
    "idempotency_key_reused": (
        "If it was for this command, that was carried out; what the command starts from, such as a queue's tags, has "
        "changed since. See how things are, and repeat it without --id if it is still wanted."
    ),
    "DiskLow": "Free some space; receives and deletes go on meanwhile, as long as any is left, the reserve included.",
    "LeaseTaken": "The message is another receiver's now: its handle is the one that counts.",
}
