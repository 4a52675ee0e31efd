"""Options of `veilmq verify`, and its registration: declared with typer alone, so that the help comes quickly."""

from pathlib import Path
from typing import Annotated

import typer

Time = str | None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(_verify)


def _verify(
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="URL",
            envvar="VEILMQ_ENDPOINT",
            show_envvar=False,
            help="Of an account: sqs://..., azure://..., mns://..., veil://HOST:PORT/.",
        ),
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", metavar="N", help="How long the clients run.")] = 1,
    clients: Annotated[int, typer.Option("--clients", metavar="N", help="How many run at the same time.")] = 4,
    rate: Annotated[
        float, typer.Option("--rate", metavar="N", help="Calls a second of each client, at most; 0: no limit.")
    ] = 50,
    fifo: Annotated[bool, typer.Option("--fifo", help="A FIFO queue: groups, deduplication ids.")] = False,
    dead_letters: Annotated[bool, typer.Option("--dead-letters", help="With a dead-letter queue (SQS, veil).")] = False,
    kill: Annotated[
        str | None,
        typer.Option("--kill", metavar="CMD", help="Run this shell command now and then: it kills and restarts."),
    ] = None,
    kill_every: Annotated[str, typer.Option("--kill-every", metavar="TIME", help="Time between, on average.")] = "10s",
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Of the load [a new one].")] = None,
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="Write what the clients did, as JSON lines.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option("--check", metavar="FILE", help="Drive nothing: check such a file.")
    ] = None,
    stale_deletes: Annotated[
        bool | None,
        typer.Option(
            "--stale-deletes-accepted/--stale-deletes-refused",
            help="How a delete with a stale handle is answered [accepted by standard queues over SQS].",
        ),
    ] = None,
    deduplication: Annotated[
        Time, typer.Option("--deduplication", metavar="TIME", help="Window of a FIFO queue [5m].")
    ] = None,
    by_group: Annotated[
        bool, typer.Option("--deduplication-by-group", help="Ids are compared within a group.")
    ] = False,
    tolerance: Annotated[
        Time, typer.Option("--tolerance", metavar="TIME", help="How far the clocks may differ about a duration [10ms].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> None:
    """Drive a queue at any endpoint, and check that it keeps its promises. Exits 1 if it does not.

    Makes a queue with a random name, and deletes it at the end. Every minute the queue is drained and the log checked.
    Ctrl-C ends the load early; what was done is drained and checked.
    """
    given = dict(locals())
    from veilmq.cli.verify.command import verify

    raise typer.Exit(int(verify(given)))
