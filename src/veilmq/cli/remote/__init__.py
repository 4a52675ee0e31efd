"""Commands on queues and messages: through the admin port, or directly on a directory (cli/access).

Strategy: each command is a function of its context (`Asked`: access, account, region, JSON or not) and its own
arguments; `command_of` adds the common options. Each file has the commands on one noun. Only typer is imported until a
command runs.
"""

import inspect
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from itertools import chain, count, islice
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.remote.messages import (
    delete,
    drop_template,
    extend,
    keep_template,
    list_templates,
    peek,
    receive,
    send,
)
from veilmq.cli.remote.messages.jobs import cancel_job, list_jobs, show_job, start_job
from veilmq.cli.remote.messages.quarantine import drop_quarantined, export_quarantined, list_quarantined
from veilmq.cli.remote.queues import (
    cancel_move,
    change_queue,
    create,
    list_moves,
    list_queues,
    list_topics,
    plan,
    purge,
    remove,
    start_move,
)
from veilmq.cli.remote.queues.rates import at, rates, timeout, worst
from veilmq.cli.remote.workers import list_accounts, list_failures, list_holders, list_workers, show_queue, top

if TYPE_CHECKING:
    from veilmq.cli.access import AdminAccess, Home
    from veilmq.cli.access.http import HttpAccess
    from veilmq.model.settings.queue import QueueKey


_ADVISED: Final = re.compile(
    r"(?:(?<=`)|(?<=: ))veilmq (?:queues|moves|jobs|templates|quarantine|events|peek)[^`]*(?=`|$)"
)
"""A command that an advice names: in backticks, or after a colon up to the end."""
_PLACE: Final = ("account", "region")
_NAMING: Final = (*_PLACE, "admin", "token_file", "data")
"""Options that an advised command repeats."""
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
    again: "Callable[[], HttpAccess]"
    """Opens a new access to the same server. Raises Failure, also while nobody serves the directory."""
    ids: Iterator[str] | None = None
    """The ids of the calls that change something; None: they have none."""
    is_named: bool = False
    """Whether the user gave the id: this may be a repetition."""
    advised: Callable[[str], str] = str
    """Completes the commands in a text: for the same server or directory, account and region."""

    @cached_property
    def _home(self) -> "Home":
        account, region = self.named
        if account is not None and region is not None:
            from veilmq.cli.access import Home

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

    def next_id(self) -> str:
        """The id of the next call that changes something, of a command that always has one."""
        assert self.ids is not None
        return next(self.ids)

    def queue(self, name: str) -> "QueueKey":
        """The queue of that name."""
        from veilmq.model.settings.queue import QueueKey

        return QueueKey(self.account, self.region, name)

    def run(self, operation: str, queue: str, **members: Any) -> dict[str, Any]:
        """Run one operation on one queue; members of None are left out."""
        given = {name: value for name, value in members.items() if value is not None}
        return self.run_with(operation, queue, given)

    def run_with(self, operation: str, queue: str, members: Mapping[str, Any]) -> dict[str, Any]:
        """The same with all members."""
        if self.ids is None or operation in {"describe", "templates"}:
            return self.access.run(operation, self.queue(queue), members)
        return self.access.run(operation, self.queue(queue), members, next(self.ids))


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
_ID: Final = Annotated[
    str | None, typer.Option("--id", metavar="ID", help="Id of this command: repeated with the same id, it acts once.")
]


def accept_clock(asked: Asked) -> None:
    """Say that the machine's clock is right: what only its step has kept from expiring now expires."""
    from veilmq.cli.output import duration, print_json

    shown = asked.access.accept_clock(asked.next_id())
    if asked.as_json:
        print_json(shown)
    elif shown["accepted_us"]:
        print(f"accepted a step of {duration(shown['accepted_us'])}")
    else:
        print("there was nothing to accept")


def open_console(
    asked: Asked,
    opens: Annotated[bool, typer.Option("--open", help="Open it in a browser, too.")] = False,
) -> None:
    """Print a link that signs in to the web console, once and within two minutes."""
    from veilmq.cli.output import print_json

    access = asked.again()
    try:
        link = access.console_link()
    finally:
        access.close()
    if asked.as_json:
        print_json({"url": link})
    else:
        print(link)
    if opens:
        import webbrowser

        if not webbrowser.open(link):
            raise Failure(Exit.WRONG, "no browser could be opened", "Open the link yourself.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    changing: dict[str, dict[str, Callable[..., None]]] = {
        "queues": {"create": create, "set": change_queue, "plan": plan, "delete": remove},
        "moves": {"start": start_move, "cancel": cancel_move},
        "jobs": {"start": start_job, "cancel": cancel_job},
        "quarantine": {"drop": drop_quarantined},
        "templates": {"keep": keep_template, "drop": drop_template},
        "clock": {"accept": accept_clock},
    }
    looking: dict[str, dict[str, Callable[..., None]]] = {
        "queues": {
            "list": list_queues,
            "show": show_queue,
            "worst": worst,
            "rates": rates,
            "at": at,
            "timeout": timeout,
            "holders": list_holders,
            "failures": list_failures,
        },
        "topics": {"list": list_topics},
        "moves": {"list": list_moves},
        "jobs": {"list": list_jobs, "show": show_job},
        "quarantine": {"list": list_quarantined, "export": export_quarantined},
        "templates": {"list": list_templates},
    }
    for group, text in (
        ("queues", "Make, list, change and delete queues, and look into them."),
        ("topics", "List topics and their subscriptions."),
        ("moves", "Move dead letters back to where they came from, or elsewhere."),
        ("jobs", "Redrive, move, delete, purge or release all messages that match."),
        ("quarantine", "List, export and delete damaged messages, which nobody receives."),
        ("templates", "Keep messages under names, to be sent again."),
        ("clock", "Accept a step of the machine's clock."),
    ):
        noun = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)
        for name, body in looking.get(group, {}).items():
            noun.command(name)(command_of(body))
        for name, body in changing.get(group, {}).items():
            noun.command(name)(command_of(body, Id.ALWAYS))
        app.add_typer(noun, name=group)
    of_messages: dict[str, Callable[..., None]] = {"send": send, "delete": delete, "extend": extend}
    for name, body in of_messages.items():
        app.command(name)(command_of(body, Id.IF_GIVEN))
    others: dict[str, Callable[..., None]] = {
        "receive": receive,
        "peek": peek,
        "console": open_console,
        "workers": list_workers,
        "top": top,
        "accounts": list_accounts,
    }
    for name, body in others.items():
        app.command(name)(command_of(body))
    app.command("purge")(command_of(purge, Id.ALWAYS))


class Id(Enum):
    """Whether the calls of a command have an id under which they act once."""

    NEVER = 0
    IF_GIVEN = 1
    """The history records each message anyhow."""
    ALWAYS = 2


def _ids(given: str | None, wanted: Id) -> Iterator[str] | None:
    """The id of each call of a command: the given one, or a fresh one; later calls have a number behind it. Raises
    Failure."""
    if given is None and wanted is not Id.ALWAYS:
        return None
    if given is not None:
        from veilmq.model.commands import COMMAND_ID_CHARACTERS_MAX as MOST

        if not re.fullmatch(f"[!-~]{{1,{MOST}}}", given):
            raise Failure(Exit.USAGE, f"--id: expected 1 to {MOST} visible ASCII characters")
    first = secrets.token_hex(16) if given is None else given
    return chain([first], (f"{first}.{number}" for number in count(2)))


def command_of(body: Callable[..., None], ids: Id = Id.NEVER) -> Callable[..., None]:
    """A typer command with `body`'s own parameters and the common options."""
    options = _OPTIONS if ids is Id.NEVER else {"command_id": _ID, **_OPTIONS}

    def command(**given: Any) -> None:
        from veilmq.cli.access import Target, open_access, server_access

        _check_text(given.values())
        taken = {name: given.pop(name) for name in options}
        target = Target(taken["admin"], taken["token_file"], taken["data"])
        again = partial(server_access, target, os.environ)
        own_ids = _ids(taken.get("command_id"), ids)
        advised = partial(_advised, {name: taken[name] for name in _NAMING})
        try:
            with open_access(target, os.environ) as access:
                named, is_named = (taken["account"], taken["region"]), taken.get("command_id") is not None
                body(Asked(access, named, taken["as_json"], again, own_ids, is_named, advised), **given)
        except Failure as failure:
            failure.advice = advised(failure.advice)
            raise

    kind = inspect.Parameter.KEYWORD_ONLY
    own = [each.replace(kind=kind) for each in list(inspect.signature(body).parameters.values())[1:]]
    shared = [
        inspect.Parameter(name, kind, default=_DEFAULTS.get(name), annotation=annotation)
        for name, annotation in options.items()
    ]
    command.__doc__ = body.__doc__
    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in [*own, *shared]}
    return command


def _advised(named: Mapping[str, Any], text: str) -> str:
    """The text, whose commands are for the same server or directory, account and region."""

    def whole(found: re.Match[str]) -> str:
        left_out = _PLACE if "--all" in found[0].split() else ()
        options = [(name, value) for name, value in named.items() if value and name not in left_out]
        return found[0] + "".join(f" --{name.replace('_', '-')} {quote(str(value))}" for name, value in options)

    return _ADVISED.sub(whole, text)


def _check_text(values: Iterable[Any]) -> None:
    """Raises Failure for an argument that is not UTF-8; only file names may contain other bytes."""
    for value in values:
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise Failure(Exit.USAGE, f"expected UTF-8, not {text!r}") from None
