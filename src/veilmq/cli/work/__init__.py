"""Options of the commands that run a handler, and their registration.

Strategy: declared here with typer alone, so that the help comes quickly; what they do is imported when they run.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

Handler = Annotated[str, typer.Argument(metavar="MODULE:HANDLER", help="A function of one job.", show_default=False)]
Url = Annotated[
    str,
    typer.Option(
        "--queue", metavar="URL", envvar="VEILMQ_QUEUE", help="veil:///DIR?queue=NAME, veil://HOST:PORT/NAME, sqs://..."
    ),
]
Time = str | None


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("work")(_work)
    app.command("calibrate")(_calibrate)


def _time(flag: str, text: str) -> Any:
    return typer.Option(flag, metavar="TIME", help=text)


def _work(
    handler: Handler,
    queue: Url,
    concurrency: Annotated[int, typer.Option("--concurrency", metavar="N", help="Handlers at the same time.")] = 1,
    kind: Annotated[
        str | None,
        typer.Option("--kind", metavar="KIND", help="threads, processes or async [as the handler is]."),
    ] = None,
    prefetch: Annotated[int, typer.Option("--prefetch", metavar="N", help="Messages received ahead.")] = 0,
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", help="Give the handler lists of up to N jobs.")
    ] = None,
    lease: Annotated[Time, _time("--lease", "Length of a lease, extended while the handler works [30s].")] = None,
    max_hold: Annotated[Time, _time("--max-hold", "Let a message go that is held longer [5h].")] = None,
    keeper: Annotated[bool, typer.Option("--keeper/--no-keeper", help="Extend leases.")] = True,
    stop_before_expiry: Annotated[
        Time, _time("--stop-before-expiry", "Tell a handler to stop so long before its time is over.")
    ] = None,
    retry_first: Annotated[Time, _time("--retry-first", "Delay after a first failure; doubles [1s].")] = None,
    retry_longest: Annotated[Time, _time("--retry-longest", "Longest delay after a failure [5m].")] = None,
    error_report: Annotated[
        str | None,
        typer.Option("--error-report", metavar="WHAT", help="Tell the server of errors: line, type or none [line]."),
    ] = None,
    poison_after: Annotated[
        int | None, typer.Option("--poison-after", metavar="N", help="Dead-letter a message after N receives.")
    ] = None,
    dead_letter_queue: Annotated[
        str | None, typer.Option("--dead-letter-queue", metavar="NAME", help="Where it goes: a queue of the account.")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option("--checkpoints", metavar="DIR|URL", help="Where progress is kept [in the message].")
    ] = None,
    guard: Annotated[
        Path | None, typer.Option("--guard", metavar="DIR", help="Remember there what was done; never do it twice.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="TEXT",
            envvar="VEILMQ_CLIENT_NAME",
            show_envvar=False,
            help="What the history calls this worker; '' for nothing [host and process].",
        ),
    ] = None,
    wait: Annotated[Time, _time("--wait", "Of one poll [20s].")] = None,
    drain: Annotated[Time, _time("--drain", "How long handlers may go on after SIGTERM [30s].")] = None,
    give_up_after: Annotated[
        Time, _time("--give-up-after", "End when the queue cannot be reached for so long [never].")
    ] = None,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when the queue is empty.")] = False,
    count: Annotated[int | None, typer.Option("--count", "-n", metavar="N", help="End after N messages.")] = None,
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Serve metrics for Prometheus there.")
    ] = None,
    traces: Annotated[bool, typer.Option("--traces", help="Make OpenTelemetry spans.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Log and tell in JSON, for programs.")] = False,
) -> None:
    """Run a handler on a queue's messages until SIGTERM.

    SIGTERM or Ctrl-C drains: nothing more is received, running handlers may finish, the rest goes back at once. A
    second one stops now.
    """
    given = dict(locals())
    from veilmq.cli.work.command import work

    raise typer.Exit(int(work(given.pop("handler"), given.pop("queue"), given)))


def _calibrate(
    handler: Handler,
    queue: Url,
    count: Annotated[int, typer.Option("-n", "--count", metavar="N", help="Messages to work.")] = 100,
    concurrency: Annotated[int, typer.Option("--concurrency", metavar="N", help="Handlers at the same time.")] = 1,
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="threads, processes or async.")] = None,
    wait: Annotated[Time, _time("--wait", "How long to wait for the next message before it ends [5s].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> None:
    """Work up to N messages, show how long it takes, and recommend a timeout.

    The messages are worked for real: what is done is deleted. It ends early when the queue is empty.
    """
    from veilmq.cli.work.command import calibrate

    raise typer.Exit(int(calibrate(handler, queue, count, concurrency, kind, wait, as_json=as_json)))
