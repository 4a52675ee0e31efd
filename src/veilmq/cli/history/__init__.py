"""Commands that look: at messages in any state, at what happened to one, and at the history.

Strategy: functions of the context (`Asked`), to which `veilmq.cli.remote` adds the common options. Nothing is leased.
"""

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.history.events import print_events
from veilmq.cli.output import instant, print_json, printable
from veilmq.cli.pipeline import export_events
from veilmq.cli.remote import command_of
from veilmq.cli.remote.options import OfGroup, OfType, Older, Queue, Receives, Text, filter_of

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked

_SCAN_MAX: Final = 100_000


def list_messages(
    asked: "Asked",
    queue: Queue,
    hidden: Annotated[bool, typer.Option("--hidden", help="Those delayed or in flight.")] = False,
    message_type: OfType = None,
    group: OfGroup = None,
    older: Older = None,
    receives: Receives = 0,
    text: Text = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="At most so many.")] = 100,
    scan: Annotated[int, typer.Option("--scan", metavar="N", min=1, help="Look at so many at most.")] = _SCAN_MAX,
) -> None:
    """List messages of a queue without their bodies."""
    from veilmq.admin.api.inputs import PAGE_MAX

    given = {"state": "hidden" if hidden else "visible", "limit": min(limit, PAGE_MAX)}
    given |= filter_of(message_type, group, older, receives, text)
    found: list[dict[str, Any]] = []
    looked_at, is_stopped = 0, False
    for page in asked.access.messages(asked.queue(queue), given):
        found += page["messages"][: limit - len(found)]
        looked_at += page["looked_at"]
        is_stopped = looked_at >= scan and page["after"] is not None
        if is_stopped or len(found) == limit:
            break
    if asked.as_json:
        for message in found:
            print_json(message)
    elif found:
        from veilmq.cli.remote.tables import message_table

        message_table(found)
    if is_stopped and len(found) < limit:
        print(f"stopped after {looked_at} messages: --scan N looks at more", file=sys.stderr)
    elif not found and not asked.as_json:
        print("no such message", file=sys.stderr)


def find(
    asked: "Asked",
    message: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="Its id.", show_default=False)],
    body: Annotated[bool, typer.Option("--body", help="Its body, too; the history records who read it.")] = False,
) -> None:
    """Find a message by its id, in whatever state it is, and show all of it without a lease."""
    found = asked.access.message(message, bodies=body)
    if asked.as_json:
        print_json(found)
    elif found["places"]:
        from veilmq.cli.remote.tables import message_blocks

        message_blocks(found["places"])
    if not found["places"]:
        last = found["last"]
        if last is None:
            raise Failure(Exit.WRONG, f"no event of {message} among the last {found['scanned']}")
        raise Failure(Exit.WRONG, f"{message} is in no queue: {last['kind']} at {instant(last['at'])} UTC")


def trace(
    asked: "Asked",
    message: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="Its id.", show_default=False)],
    everything: Annotated[bool, typer.Option("--all", help="A line for each event, also in runs of the same.")] = False,
) -> None:
    """Say what happened to one message, and show each event of it."""
    found = asked.access.trace(message)
    if asked.as_json:
        print_json(found)
    elif found["events"]:
        from veilmq.cli.remote.tables import Run, run_table, runs

        if found.get("story"):  # earlier releases tell none
            print(printable(found["story"]["sentence"]))
        run_table([Run([event]) for event in found["events"]] if everything else runs(found["events"]))
    if not found["events"]:
        raise Failure(Exit.WRONG, f"no event of {message} among the last {found['scanned']}")
    if not found["complete"]:
        print("its send is no longer in the history, or too far back", file=sys.stderr)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("messages")(command_of(list_messages))
    app.command("find")(command_of(find))
    app.command("trace")(command_of(trace))
    events = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
    events.callback()(_alone(command_of(print_events)))
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
