"""Arguments and options that several commands of remote.py share, and their parsing.

Strategy: typer alone, so that the help comes quickly.
"""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from veilmq.cli.completion import queue_names
from veilmq.cli.durations import seconds
from veilmq.cli.exits import Exit, Failure

Queue = Annotated[
    str,
    typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False, autocompletion=queue_names),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Delay = Annotated[str | None, typer.Option("--delay", metavar="TIME", help="Before a message becomes visible.")]
Wait = Annotated[str | None, typer.Option("--wait", metavar="TIME", help="How long a receive waits, at most 30s.")]
Prefix = Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Only names that begin so.")]
Everything = Annotated[bool, typer.Option("--all", help="Of all accounts and regions.")]


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
    typer.confirm(question, abort=True)
