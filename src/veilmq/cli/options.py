"""Arguments and options that several commands share: their parsing, the shell's completion of queue names, and the
option behind a parameter that an error names.

Strategy: typer alone, so that the help comes quickly.

The lower rooms name a value by its member or parameter (`wait_us`, `messages[0].ttl_us`) in errors of servers, stores
and workers, but a user knows the option. One table maps them; units that nobody typed are left out.

Completion: the words typed so far choose the server or directory. A shell waits for the result, so it comes within a
second or two, or is empty; errors are silent. A directory without a server is only read: the TAB key must not keep a
server from starting.
"""

import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from veilmq.cli.failures import Exit, Failure

if TYPE_CHECKING:
    from veilmq.cli.access import Target

_ANSWER_S: Final = 2
_NAMES_MAX: Final = 1_000
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Delay = Annotated[str | None, typer.Option("--delay", metavar="TIME", help="Time before a message becomes visible.")]
Wait = Annotated[str | None, typer.Option("--wait", metavar="TIME", help="How long a receive waits, at most 30s.")]
Prefix = Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Only names that begin with TEXT.")]
Everything = Annotated[bool, typer.Option("--all", help="Of all accounts and regions.")]
OfType = Annotated[str | None, typer.Option("--type", metavar="NAME", help="Only this type.")]
OfGroup = Annotated[str | None, typer.Option("--group", metavar="NAME", help="Only this group.")]
Older = Annotated[str | None, typer.Option("--older", metavar="TIME", help="Only those sent more than TIME ago.")]
Receives = Annotated[int, typer.Option("--receives", metavar="N", min=0, help="Only those received at least N times.")]
Text = Annotated[str | None, typer.Option("--text", metavar="TEXT", help="Only those with TEXT in the body.")]


def filter_of(
    message_type: str | None, group: str | None, older: str | None, receives: int, text: str | None
) -> dict[str, str | int]:
    """What `OfType`, `OfGroup`, `Older`, `Receives` and `Text` ask for, as members of the API. Raises Failure."""
    age_us = None if older is None else duration_us("--older", older)
    named = {"type": message_type, "group": group, "age_us_min": age_us, "receives_min": receives or None, "text": text}
    return {name: value for name, value in named.items() if value is not None}


def queue_names(context: typer.Context, incomplete: str) -> list[str]:
    """Queues whose names begin with the text."""
    from veilmq.cli.access import Target

    given = context.params
    files = (Path(given[name]) if given.get(name) else None for name in ("token_file", "data"))
    target = Target(given.get("admin"), *files)
    try:
        with _deadline():
            return list(islice(_names(target, given.get("account"), given.get("region"), incomplete), _NAMES_MAX))
    except (Failure, OSError):
        return []


def _names(target: "Target", account: str | None, region: str | None, prefix: str) -> Iterator[str]:
    """Raises Failure, OSError."""
    from veilmq.cli.access import directory_of, http_access

    access = http_access(target, os.environ)
    if access is None:
        yield from _names_there(directory_of(target, os.environ), account, region, prefix)
        return
    try:
        home = access.home(account)
        for queue in access.queues(home.account, region or home.region, prefix):
            yield queue["name"]
    finally:
        access.close()


def _names_there(directory: Path, account: str | None, region: str | None, prefix: str) -> Iterator[str]:
    from veilmq.store import Options
    from veilmq.store.directory import DATABASE
    from veilmq.store.sqlite.disk import SqliteError, open_reader
    from veilmq.store.sqlite.reading import SqliteView

    with suppress(SqliteError):
        connection = open_reader(directory / DATABASE, Options())
        try:
            for queue in SqliteView(connection).live_queues():
                key = queue.key
                if account in (None, key.account) and region in (None, key.region) and key.name.startswith(prefix):
                    yield key.name
        finally:
            connection.close()


@contextmanager
def _deadline() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(_ANSWER_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


Queue = Annotated[
    str,
    typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False, autocompletion=queue_names),
]


def duration_us(option: str, text: str) -> int:
    """30, 30s, 500ms, 5m, 2h, 4d in microseconds. Raises Failure."""
    return round(seconds(option, text) * 10**6)


def pairs(option: str, given: list[str]) -> Iterator[tuple[str, str]]:
    """Name and value of each NAME=VALUE. Raises Failure."""
    for text in given:
        name, sign, value = text.partition("=")
        if not name or not sign:
            raise Failure(Exit.USAGE, f"{option}: expected NAME=VALUE, not {text!r}")
        yield name, value


def confirm(question: str, yes: bool) -> None:
    """Ask at a terminal; without one, --yes is required. Raises Failure."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failure(Exit.USAGE, "this cannot be undone", "Use --yes to do it without being asked.")
    try:
        is_wanted = typer.confirm(question, err=True)
    except typer.Abort as abort:
        if isinstance(abort.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    if not is_wanted:
        raise typer.Abort


_OPTIONS: Final = {
    # Members of /api/v1 (admin/api/inputs.py) and fields of the store's errors, without `_us`.
    "name": "QUEUE",
    "source": "QUEUE",
    "message_id": "MESSAGE_ID",
    "handles": "HANDLE",
    "task": "QUEUE",
    "job": "JOB_ID",
    "at": "WHEN",
    "minutes": "--last",
    "messages": "BODY",
    "body": "BODY",
    "attributes": "--attribute",
    "redrive": "--dead-letters",
    "target": "--dead-letters",
    "receive_count_max": "--max-receives",
    "tags": "--tag",
    "destination": "--to",
    "rate_max": "--rate",
    "first_lease_min": "--first-lease-min",
    # A worker's parameters, and its keeper's.
    "handler": "MODULE:HANDLER",
    "messages_max": "--count",
}
_OF_OPERATION: Final = {
    "keep_template": {"name": "NAME", "message": "BODY"},
    "drop_template": {"name": "NAME"},
    "start_job": {"queue": "QUEUE", "filter": "ACT"},
}
"""Members that are called otherwise there."""
_KEEPER: Final = {"visibility_timeout": "--lease", "interval": "--lease", "minimal_life": "--lease"}
"""Parameters of a worker's keeper that are derived from the lease."""
_INDEX: Final = re.compile(r"\[[^]]*\]")
_MICROSECONDS: Final = re.compile(r" \(\d+ microseconds\)")
_IN_SENTENCES: Final = {
    "kind=async": "--kind async",
    "poison_after": "--poison-after",
    "interval + minimal_life": "half of it",
}
_UNITS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|)")


def option_of(parameter: str, *, worker: bool = False, operation: str = "") -> str:
    """The option or argument behind a member, field or parameter: `messages[0].delay_us` is `--delay`."""
    if parameter in (of_operation := _OF_OPERATION.get(operation, {})):
        return of_operation[parameter]
    parts = [_INDEX.sub("", part).removesuffix("_us") for part in parameter.split(".")]
    if "attributes" in parts:  # its name, value or type
        return _OPTIONS["attributes"]
    known = (_KEEPER.get(parts[-1]) if worker else None) or _OPTIONS.get(parts[-1])
    return known or f"--{parts[-1].replace('_', '-')}"


def message_ids(given: Iterable[str]) -> list[str]:
    """The ids. Raises Failure for what can be none."""
    from veilmq.admin.api.inputs import message_id
    from veilmq.model.errors import ParameterInvalid

    ids = list(given)
    for each in ids:
        try:
            message_id(each)
        except ParameterInvalid as error:
            raise Failure(Exit.USAGE, f"MESSAGE_ID: {error.reason}, not {each!r}") from None
    return ids


def refused_value(parameter: str, reason: str, *, worker: bool = False, operation: str = "") -> str:
    """The message about a refused value: `--wait: Expected at most 30s`."""
    message = _MICROSECONDS.sub("", reason)
    for below, above in _IN_SENTENCES.items():
        message = message.replace(below, above)
    return f"{option_of(parameter, worker=worker, operation=operation)}: {message}"


def seconds(option: str, text: str) -> float:
    """30, 30s, 500ms, 5m, 2h, 4d in seconds. Raises Failure."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise Failure(Exit.USAGE, f"{option}: expected a time such as 30s, 500ms, 5m, 2h or 4d, not {text!r}")
    return float(found[1]) * _UNITS[found[2]]
