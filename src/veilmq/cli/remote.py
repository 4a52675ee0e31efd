"""Commands on queues, messages and the history: through the admin port, or directly on a directory (admin_access.py).

Strategy: each command is a function of its context (`Asked`: access, account, region, JSON or not) and its own
arguments; `_command` adds the common options. Only typer is imported until a command runs.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from veilmq.cli.exits import Exit, Failure, Unreachable
from veilmq.cli.output import in_json
from veilmq.cli.pipeline import export_events
from veilmq.cli.remote_events import print_events
from veilmq.cli.remote_lists import cancel_move, list_moves, list_topics, start_move
from veilmq.cli.remote_options import Delay, Queue, Wait, duration_us, pairs
from veilmq.cli.remote_plan import plan
from veilmq.cli.remote_queues import change_queue, create, list_queues, purge, remove

if TYPE_CHECKING:
    from veilmq.cli.admin_access import AdminAccess, Home
    from veilmq.cli.remote_http import HttpAccess
    from veilmq.model.queue import QueueKey

_BATCH: Final = 100
_ELSEWHERE_MAX: Final = 10_000
"""Queues searched for other regions."""
_REGIONS_SHOWN: Final = 5


@dataclass(frozen=True)
class Asked:
    """The context of every command."""

    access: "AdminAccess"
    named: tuple[str | None, str | None]
    """The account and region as given."""
    as_json: bool
    again: "Callable[[], HttpAccess | None]"
    """Opens a new access to the same server; None while nobody serves the directory. Raises Failure."""

    @cached_property
    def _home(self) -> "Home":
        account, region = self.named
        if account is not None and region is not None:
            from veilmq.cli.admin_access import Home

            return Home(account, region)
        found = self.access.home(account)
        return found if region is None else found._replace(region=region)

    @property
    def account(self) -> str:
        """The account. Raises Failure."""
        return self._home.account

    @property
    def region(self) -> str:
        """The region. Raises Failure."""
        return self._home.region

    def why_nothing(self, ask: "Callable[[str, str | None], Iterable[Mapping[str, Any]]]") -> str:
        """The reason, if a list is empty because of the account or region. Raises Failure.

        ask: lists an account and region; `*` and None mean all.
        """
        if not self.access.home(self.account).is_known:
            return f"the server's credentials file has no account {self.account}"
        everything = (each.get("source", each) for each in islice(ask("*", None), _ELSEWHERE_MAX))
        regions = sorted({each["region"] for each in everything if each["account"] == self.account} - {self.region})
        if not regions:
            return ""
        shown = ", ".join(regions[:_REGIONS_SHOWN]) + (" and more" if len(regions) > _REGIONS_SHOWN else "")
        return f"but there are in {shown}: say --region {regions[0]}, or --all"

    def queue(self, name: str) -> "QueueKey":
        """The queue of that name."""
        from veilmq.model.queue import QueueKey

        return QueueKey(self.account, self.region, name)

    def run(self, operation: str, queue: str, **members: Any) -> dict[str, Any]:
        """Run one operation on one queue; members of None are left out."""
        given = {name: value for name, value in members.items() if value is not None}
        return self.access.run(operation, self.queue(queue), given)


_OPTIONS: Final = {
    "account": Annotated[
        str | None, typer.Option("--account", metavar="ID", help="Account of 12 digits [the only one there is].")
    ],
    "region": Annotated[
        str | None, typer.Option("--region", metavar="NAME", help="Region [the account's home region].")
    ],
    "admin": Annotated[
        str | None,
        typer.Option("--admin", metavar="HOST:PORT", help="The server's admin port, or VEILMQ_ADMIN [127.0.0.1:9325]."),
    ],
    "token_file": Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="Its bearer token [admin-token in the data directory].", readable=False
        ),
    ],
    "data": Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="This data directory, or the server that holds it.", readable=False),
    ],
    "as_json": Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")],
}
_DEFAULTS: Final = {"as_json": False}
Handles = Annotated[
    list[str], typer.Argument(metavar="HANDLE", help="As `receive` printed it; several at once.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    queues = typer.Typer(help="Queues.", no_args_is_help=True, rich_markup_mode=None)
    below: dict[str, Callable[..., None]] = {"list": list_queues, "create": create, "set": change_queue, "plan": plan}
    for name, body in (below | {"delete": remove}).items():
        queues.command(name)(_command(body))
    app.add_typer(queues, name="queues")
    moves: dict[str, Callable[..., None]] = {"list": list_moves, "start": start_move, "cancel": cancel_move}
    for group, text, bodies in (
        ("topics", "Topics.", {"list": list_topics}),
        ("moves", "Message move tasks.", moves),
    ):
        noun = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)
        for name, body in bodies.items():
            noun.command(name)(_command(body))
        app.add_typer(noun, name=group)
    for name, body in _COMMANDS.items():
        app.command(name)(_command(body))
    events = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
    events.callback()(_alone(_command(print_events)))
    events.command("export")(export_events)
    app.add_typer(events, name="events")


def _alone(command: Callable[..., None]) -> Callable[..., None]:
    """The group's default command."""

    def callback(context: typer.Context, **given: Any) -> None:
        if context.invoked_subcommand is None:
            command(**given)

    own = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    signature = inspect.signature(command)
    callback.__doc__ = command.__doc__
    callback.__signature__ = inspect.Signature([own, *signature.parameters.values()])  # type: ignore[attr-defined]
    callback.__annotations__ = {"context": typer.Context} | command.__annotations__
    return callback


def _command(body: Callable[..., None]) -> Callable[..., None]:
    """A typer command with `body`'s own parameters and the common options."""

    def command(**given: Any) -> None:
        from veilmq.cli.admin_access import Target, http_access, open_access

        _check_text(given.values())
        taken = {name: given.pop(name) for name in _OPTIONS}
        target = Target(taken["admin"], taken["token_file"], taken["data"])
        again = partial(http_access, target, os.environ)
        with open_access(target, os.environ) as access:
            body(Asked(access, (taken["account"], taken["region"]), taken["as_json"], again), **given)

    kind = inspect.Parameter.KEYWORD_ONLY
    own = [each.replace(kind=kind) for each in list(inspect.signature(body).parameters.values())[1:]]
    shared = [
        inspect.Parameter(name, kind, default=_DEFAULTS.get(name), annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    command.__doc__ = body.__doc__
    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in [*own, *shared]}
    return command


def _check_text(values: Iterable[Any]) -> None:
    """Raises Failure for an argument that is not UTF-8; only file names may contain other bytes."""
    for value in values:
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise Failure(Exit.USAGE, f"expected UTF-8, not {text!r}") from None


def _send(
    asked: Asked,
    queue: Queue,
    body: Annotated[
        str | None, typer.Argument(metavar="BODY", help="Its text; left out or -: from stdin.", show_default=False)
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of stdin is a message.")] = False,
    delay: Delay = None,
    ttl: Annotated[str | None, typer.Option("--ttl", metavar="TIME", help="Its own time to live.")] = None,
    priority: Annotated[int | None, typer.Option("--priority", metavar="N", help="1 (first) to 16.")] = None,
    group: Annotated[str | None, typer.Option("--group", metavar="NAME", help="Its group.")] = None,
    deduplication_id: Annotated[
        str | None,
        typer.Option("--deduplication-id", metavar="ID", help="A FIFO queue takes one of an id in 5 minutes."),
    ] = None,
    message_type: Annotated[str | None, typer.Option("--type", metavar="NAME", help="What kind of message.")] = None,
    attributes: Annotated[
        list[str] | None, typer.Option("--attribute", metavar="NAME=VALUE", help="An attribute; may be repeated.")
    ] = None,
) -> None:
    """Send a message, or one for each line of stdin."""
    shared = {
        "delay_us": None if delay is None else duration_us("--delay", delay),
        "ttl_us": None if ttl is None else duration_us("--ttl", ttl),
        "priority": priority,
        "group": group,
        "deduplication_id": deduplication_id,
        "type": message_type,
        "attributes": [{"name": name, "value": value} for name, value in pairs("--attribute", attributes or [])],
    }
    if lines:
        if body is not None:
            raise Failure(Exit.USAGE, "--lines reads stdin: leave BODY out")
        bodies: Iterable[str] = (line.removesuffix("\n") for line in _from_stdin(lines=True))
    else:
        bodies = _from_stdin(lines=False) if body is None or body == "-" else [body]
    count = refused = under_way = 0
    try:
        for batch in _batches(_watched(bodies, lines), _BATCH):
            under_way = len(batch)
            shown = asked.run("send", queue, messages=[shared | {"body": each} for each in batch])["messages"]
            count, under_way = count + len(batch), 0
            refused += _report(asked, shown, None if lines else "sent {id}")
    except (KeyboardInterrupt, Failure) as end:
        if lines:
            what = "failure" if isinstance(end, Failure) else "interrupt"
            is_unsure = under_way and isinstance(end, KeyboardInterrupt | Unreachable)
            unsure = f", and perhaps the next {under_way}" if is_unsure else ""
            print(f"sent {count - refused} messages before the {what}{unsure}", file=sys.stderr)
        raise
    if lines and not asked.as_json:
        print(f"sent {count - refused} messages")
    if refused:
        raise Failure(Exit.WRONG, f"{refused} of {count} messages were refused")


def _receive(
    asked: Asked,
    queue: Queue,
    count: Annotated[int, typer.Option("--count", metavar="N", help="At most so many messages.")] = 1,
    lease: Annotated[str | None, typer.Option("--lease", metavar="TIME", help="Length of the lease.")] = None,
    wait: Wait = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete them as soon as they are printed.")] = False,
) -> None:
    """Receive messages: lease them, and print them with their handles."""
    lease_us = None if lease is None else duration_us("--lease", lease)
    wait_us = None if wait is None else duration_us("--wait", wait)
    messages = asked.run("receive", queue, count=count, lease_us=lease_us, wait_us=wait_us)["messages"]
    _show_messages(asked, messages)
    if delete and messages:
        sys.stdout.flush()
        results = asked.run("delete", queue, handles=[message["handle"] for message in messages])["results"]
        if any("error" in each for each in results):
            raise Failure(Exit.WRONG, "some of them could not be deleted and will come back")


def _peek(
    asked: Asked,
    queue: Queue,
    count: Annotated[int, typer.Option("--count", metavar="N", help="At most so many messages.")] = 10,
) -> None:
    """Look at visible messages without a lease."""
    _show_messages(asked, asked.run("peek", queue, count=count)["messages"])


def _delete(asked: Asked, queue: Queue, handles: Handles) -> None:
    """Delete received messages by their handles."""
    results = asked.run("delete", queue, handles=handles)["results"]
    if _report(asked, results, "deleted"):
        raise Failure(Exit.WRONG, "not all of them were deleted")


def _extend(
    asked: Asked,
    queue: Queue,
    handles: Handles,
    lease: Annotated[str, typer.Option("--lease", metavar="TIME", help="From now on; 0 releases.", show_default=False)],
) -> None:
    """Set the end of leases, or release them."""
    results = asked.run("extend", queue, handles=handles, lease_us=duration_us("--lease", lease))["results"]
    if _report(asked, results, "extended"):
        raise Failure(Exit.WRONG, "not all of them were extended")


def _trace(
    asked: Asked,
    message: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="Its id.", show_default=False)],
    everything: Annotated[bool, typer.Option("--all", help="A line for each event, also in runs of the same.")] = False,
) -> None:
    """Show everything that happened to one message."""
    found = asked.access.trace(message)
    if asked.as_json:
        _print_json(found)
    elif found["events"]:
        from veilmq.cli.remote_tables import run_table
        from veilmq.cli.runs import Run, runs

        run_table([Run([event]) for event in found["events"]] if everything else runs(found["events"]))
    if not found["events"]:
        raise Failure(Exit.WRONG, f"no event of {message} among the last {found['scanned']}")
    if not found["complete"]:
        print("its send is no longer in the history, or too far back", file=sys.stderr)


_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "send": _send,
    "receive": _receive,
    "delete": _delete,
    "extend": _extend,
    "peek": _peek,
    "purge": purge,
    "trace": _trace,
}


def _print_json(value: object) -> None:
    print(in_json(value))


def _show_messages(asked: Asked, messages: list[dict[str, Any]]) -> None:
    if asked.as_json:
        for message in messages:
            _print_json(message)
    elif messages:
        from veilmq.cli.remote_tables import message_blocks

        message_blocks(messages)
    else:
        print("nothing visible", file=sys.stderr)


def _report(asked: Asked, shown: list[dict[str, Any]], said: str | None) -> int:
    """Print the result of each; return how many were refused."""
    for each in shown:
        if asked.as_json:
            _print_json(each)
        elif "error" in each:
            print(f"refused: {each['message']}", file=sys.stderr)
        elif said is not None:
            print(said.format(**each))
    return sum("error" in each for each in shown)


def _from_stdin(*, lines: bool) -> Iterator[str]:
    """All of stdin as one text, or line by line. Raises Failure."""
    try:
        texts: Iterable[str] = sys.stdin if lines else [sys.stdin.read()]
        for text in texts:
            text.encode()
            yield text
    except UnicodeError:
        advice = "What was read before it may have been sent." if lines else ""
        raise Failure(Exit.USAGE, "stdin: expected UTF-8", advice) from None


def _batches(bodies: Iterable[str], count_max: int) -> Iterator[list[str]]:
    left = iter(bodies)
    while batch := list(islice(left, count_max)):
        yield batch


def _watched(bodies: Iterable[str], lines: bool) -> Iterable[str]:
    """The same bodies, with a progress bar on a terminal."""
    if not lines or not sys.stderr.isatty():
        return bodies
    from rich.console import Console
    from rich.progress import track

    return track(bodies, "sending", console=Console(stderr=True))
