"""`veilmq pipeline` and `veilmq events export`: options, and their registration.

Strategy: declared here with typer alone, so that the help comes quickly; Spark is imported when a command runs
(run.py). All jobs on the history have the same options (`OPTIONS`), which `_job` adds and which come as one value
(`Asked`).
"""

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="The history of this server: its admin port, or VEILMQ_ADMIN [http://127.0.0.1:9325].",
    ),
]
Token = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="Its bearer token [admin-token in the data directory]."),
]
Certificate = Annotated[
    Path | None, typer.Option("--certificate", metavar="FILE", help="A PEM file to trust, for https.")
]
Exported = Annotated[Path | None, typer.Option("--path", metavar="DIR", help="What `veilmq events export` wrote.")]
Master = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Where Spark runs: local[2], spark://..., yarn [local[*]]."),
]
Remote = Annotated[str | None, typer.Option("--remote", metavar="URL", help="Over Spark Connect: sc://HOST:PORT.")]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark; can be given several times."),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write the job's tables there.")]
Format = Annotated[str, typer.Option("--format", metavar="FORMAT", help="Of tables: parquet or delta.")]
Checkpoint = Annotated[
    Path | None, typer.Option("--checkpoint", metavar="DIR", help="If --out is a URL: where Spark keeps its progress.")
]
Publish = Annotated[
    bool, typer.Option("--publish", help="Send the plans to the server; each queue's `adaptive` says what they do.")
]
Url = Annotated[
    str, typer.Option("--queue", metavar="URL", envvar="VEILMQ_QUEUE", help="veil://HOST:PORT/NAME, sqs://...")
]


class Where(NamedTuple):
    """Where Spark runs, and how."""

    master: str | None
    remote: str | None
    conf: list[str] | None


class Asked(NamedTuple):
    """What every job on the history gets."""

    server: str | None
    path: Path | None
    token_file: Path | None
    certificate: Path | None
    master: str | None
    remote: str | None
    out: Path | None
    format: str
    as_json: bool
    start: str | None
    until: int | None
    conf: list[str] | None = None


OPTIONS: Final[dict[str, tuple[Any, Any]]] = {
    "server": (Server, None),
    "path": (Exported, None),
    "token_file": (Token, None),
    "certificate": (Certificate, None),
    "master": (Master, None),
    "remote": (Remote, None),
    "conf": (Conf, None),
    "out": (Out, None),
    "format": (Format, "parquet"),
    "as_json": (Json, False),
    "start": (Annotated[str | None, typer.Option("--from", metavar="OFFSET", help="Begin with this offset.")], None),
    "until": (Annotated[int | None, typer.Option("--until", metavar="OFFSET", help="End before this offset.")], None),
}


_DAYS_MAX: Final = 36_500
"""As in veilmq.pipeline.tables, which is imported when a job runs."""
_NOT_OF: Final = {"loop": ("start", "until")}
"""Options that a job does not have: a loop continues where it stopped."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    pipeline = typer.Typer(
        help="Compute timeouts from the history, and drain queues into tables, on Spark.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    for body in (_attempts, _survival, _timeouts, _split, _whatif, _helped, _health, _audit, _report, _loop):
        name = body.__name__.removeprefix("_")
        pipeline.command(name)(_job(body, without=_NOT_OF.get(name, ())))
    pipeline.command("tidy")(_tidy)
    pipeline.command("archive")(_archive)
    pipeline.command("replay")(_replay)
    pipeline.command("check")(_check)
    app.add_typer(pipeline, name="pipeline")


def _job(body: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """A typer command with `body`'s own parameters and the common options, except those in `without`."""

    def command(**given: Any) -> None:
        body(Asked(**{name: given.pop(name, default) for name, (_, default) in OPTIONS.items()}), **given)

    kind = inspect.Parameter.KEYWORD_ONLY
    own = [each.replace(kind=kind) for each in list(inspect.signature(body).parameters.values())[1:]]
    shared = [
        inspect.Parameter(name, kind, default=default, annotation=annotation)
        for name, (annotation, default) in OPTIONS.items()
        if name not in without
    ]
    command.__doc__ = body.__doc__
    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in [*own, *shared]}
    return command


def _attempts(asked: Asked) -> None:
    """One row per lease: when it was granted, how it ended, how long the work took."""
    from veilmq.cli.pipeline.run import attempts

    attempts(asked, os.environ)


def _survival(asked: Asked) -> None:
    """How long work takes, per queue and message type: p50, p90, p99, or "at least"."""
    from veilmq.cli.pipeline.run import analysis

    analysis(asked, os.environ, "survival")


def _timeouts(asked: Asked, publish: Publish = False) -> None:
    """Recommend visibility timeouts and leases, per queue and message type, with what they cost."""
    from veilmq.cli.pipeline.run import analysis

    analysis(asked, os.environ, "timeouts", publish=publish)


def _split(asked: Asked) -> None:
    """Say which message types belong in queues of their own."""
    from veilmq.cli.pipeline.run import analysis

    analysis(asked, os.environ, "split")


def _whatif(
    asked: Asked,
    timeout: Annotated[
        list[str] | None,
        typer.Option("--timeout", metavar="[TYPE=]TIME", help="Of all messages, or of a type; several times."),
    ] = None,
    extend: Annotated[
        str | None, typer.Option("--extend", metavar="TIME", help="How often workers extend their leases.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", metavar="N", min=1, help="At each queue.")] = None,
    split: Annotated[
        str | None, typer.Option("--split", metavar="type", help="Each message type has a queue of its own.")
    ] = None,
) -> None:
    """Replay the history under other settings: duplicates, recovery, waiting and cost, beside today's."""
    from veilmq.cli.pipeline.run import whatif

    whatif(asked, os.environ, timeout or [], extend, workers, split)


def _helped(
    asked: Asked,
    revert: Annotated[bool, typer.Option("--revert", help="Take back each plan that made things worse.")] = False,
) -> None:
    """Compare the hours after the last change of each queue's plan with the same hours before it."""
    from veilmq.cli.pipeline.run import helped

    helped(asked, os.environ, revert=revert)


def _health(
    asked: Asked,
    window: Annotated[str, typer.Option("--window", metavar="TIME", help="Length of time per row.")] = "5m",
    failures: Annotated[
        int, typer.Option("--failures", metavar="N", min=1, help="Stale deletes in a window that raise the timeout.")
    ] = 5,
    follow: Annotated[bool, typer.Option("--follow", help="As a stream into --out, until Ctrl-C.")] = False,
    checkpoint: Checkpoint = None,
) -> None:
    """Stale deletes, redeliveries, oldest message and dead letters over time; when stale deletes raise the timeout."""
    from veilmq.cli.pipeline.run import health

    health(asked, os.environ, window, failures, follow=follow, checkpoint=checkpoint)


def _audit(asked: Asked) -> None:
    """Check that a history loses and doubles no message and no lease breaks a rule. Exits 1 if something is wrong."""
    from veilmq.cli.pipeline.run import audit

    raise typer.Exit(int(audit(asked, os.environ)))


def _report(asked: Asked) -> None:
    """Everything on one page: --out DIR gets the tables and report.html."""
    from veilmq.cli.pipeline.run import report

    report(asked, os.environ)


def _loop(
    asked: Asked,
    every: Annotated[
        str | None, typer.Option("--every", metavar="TIME", help="Run again after so long, say 15m [run once].")
    ] = None,
    retention_days: Annotated[
        int, typer.Option("--retention-days", metavar="N", min=0, max=_DAYS_MAX, help="Forget results that are older.")
    ] = 30,
    publish: Publish = False,
) -> None:
    """Keep the recommendations in --out up to date, reading only what is new."""
    from veilmq.cli.pipeline.run import loop

    loop(asked, os.environ, every, retention_days, publish=publish)


def _tidy(
    table: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Exported events, a Delta table, or a loop's --out.", show_default=False),
    ],
    retention_days: Annotated[
        int | None,
        typer.Option("--retention-days", metavar="N", min=0, max=_DAYS_MAX, help="Drop what is older [nothing]."),
    ] = None,
    vacuum_hours: Annotated[
        int,
        typer.Option("--vacuum-hours", metavar="N", min=0, max=24 * _DAYS_MAX, help="How long to keep old versions."),
    ] = 168,
    as_json: Json = False,
) -> None:
    """Make one file of many in tables that grow, and drop what is old."""
    from veilmq.cli.pipeline.run import tidy

    tidy(table, retention_days, vacuum_hours, as_json=as_json)


def _archive(
    queue: Url,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The table, and beside it the drain's own files.")],
    format: Format = "parquet",  # noqa: A002 the option's name
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="Fail if somebody else still holds messages after so long."),
    ] = None,
    queues: Annotated[
        str | None,
        typer.Option("--queues", metavar="LIST", help="Names and patterns (orders-*); --queue is the account's URL."),
    ] = None,
    checkpoint: Checkpoint = None,
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Drain a queue, or many, into a table, each message once."""
    from veilmq.cli.pipeline.drain import archive

    archive(queue, queues, out, format, until, checkpoint, Where(master, remote, conf), as_json=as_json)


def _replay(
    table: Annotated[Path, typer.Argument(metavar="DIR", help="A table with the column body.", show_default=False)],
    queue: Url,
    where: Annotated[str | None, typer.Option("--where", metavar="SQL", help="Only these rows.")] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="COLUMN", help="To a FIFO queue, send one row for each value [id].")
    ] = None,
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Send what was archived to a queue: at least once, to a FIFO queue each message once."""
    from veilmq.cli.pipeline.drain import replay

    replay(table, queue, where, key, Where(master, remote, conf), as_json=as_json)


def _check(
    table: Annotated[
        str,
        typer.Argument(metavar="TABLE", help="A directory, or a URL as the Delta sink takes it.", show_default=False),
    ],
    storage: Annotated[
        Path | None, typer.Option("--storage", metavar="FILE", help="The Delta sink's option storage, as a JSON file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Look for the files that a table names: rows of those that are missing are lost. Exits 1 if one is."""
    from veilmq.cli.pipeline.drain import check

    check(table, storage, as_json=as_json)


def export_events(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go.", show_default=False)],
    server: Server = None,
    token_file: Token = None,
    certificate: Certificate = None,
    start: Annotated[
        int | None, typer.Option("--from", metavar="OFFSET", help="Where to begin an empty directory [at the first].")
    ] = None,
    until: Annotated[int | None, typer.Option("--until", metavar="OFFSET", help="End before this offset.")] = None,
    kind: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="parquet, or delta: a Delta table.")
    ] = "parquet",
    as_json: Json = False,
) -> None:
    """Write the history as Parquet, and go on where the last export stopped."""
    from veilmq.cli.pipeline.run import export

    export(directory, server, token_file, certificate, start, until, os.environ, kind=kind, as_json=as_json)
