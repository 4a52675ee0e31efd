"""Commands that look: at messages in any state, at what happened to one, and at the history."""

import inspect
from collections.abc import Callable
from typing import Any

import typer

from veilmq.cli.history.events import print_events
from veilmq.cli.history.messages import find, list_messages, trace
from veilmq.cli.pipeline import export_events
from veilmq.cli.remote import command_of


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
