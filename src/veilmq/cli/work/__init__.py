"""Options of the commands that run clients of a queue for a while, and their registration: workers with a handler
(`veilmq work`, `calibrate`), and the driver, whose answers are checked (`verify`).

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
    wait: Annotated[Time, _time("--wait", "Of one poll [20s; with --until-empty 1s until a message fails].")] = None,
    drain: Annotated[Time, _time("--drain", "How long handlers may go on after SIGTERM [30s].")] = None,
    give_up_after: Annotated[
        Time, _time("--give-up-after", "End when the queue cannot be reached for so long [never].")
    ] = None,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End when a poll finds nothing; messages delayed for longer are left.")
    ] = False,
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


def register_verify(app: typer.Typer) -> None:
    """Add `veilmq verify`."""
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
    minutes: Annotated[
        float | None, typer.Option("--minutes", metavar="N", help="How long the clients run [1].")
    ] = None,
    clients: Annotated[
        int | None, typer.Option("--clients", metavar="N", help="How many run at the same time [4].")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="N", help="Calls a second of each client; 0: no limit [50]."),
    ] = None,
    fifo: Annotated[bool, typer.Option("--fifo", help="A FIFO queue: groups, deduplication ids.")] = False,
    dead_letters: Annotated[bool, typer.Option("--dead-letters", help="With a dead-letter queue (SQS, veil).")] = False,
    kill: Annotated[
        str | None,
        typer.Option("--kill", metavar="CMD", help="Run this shell command now and then: it kills and restarts."),
    ] = None,
    kill_every: Annotated[
        str | None, typer.Option("--kill-every", metavar="TIME", help="Time between, on average [10s].")
    ] = None,
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
    from veilmq.cli.work.verify import verify

    raise typer.Exit(int(verify(given)))
