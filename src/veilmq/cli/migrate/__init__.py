"""`veilmq bridge`, which moves or copies messages between any two queues, and `veilmq import`, which brings settings.

Strategy: the options are declared here with typer alone, so that the help comes quickly.
"""

from pathlib import Path
from typing import Annotated

import typer

from veilmq.cli.options import Yes

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[FROM]", show_default=False,
        help="sqs://..., azure://..., mns://..., amqp://..., veil://HOST:PORT/NAME, veil:///DIR?queue=NAME."
        " Or VEILMQ_FROM, then the only URL is TO.",
    ),
]  # fmt: skip
Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[TO]", show_default=False,
        help="Likewise, with create=1 to create the queue. Or VEILMQ_TO, then the only URL is FROM.",
    ),
]  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("bridge")(_bridge)
    app.command("import")(_import)


def _bridge(
    source: Source = None,
    target: Target = None,
    copies: Annotated[
        bool, typer.Option("--copy", help="Leave the messages at the source, leased until the end, then given back.")
    ] = False,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End when the source is empty. Without: go on until Ctrl-C.")
    ] = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", metavar="N", help="End after N messages.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", metavar="N", help="Messages a second, at most.")] = None,
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Batches of ten at the same time.")] = 4,
    lease: Annotated[
        str, typer.Option("--lease", metavar="TIME", help="After a kill messages come back at the source after it.")
    ] = "60s",
    group: Annotated[
        str | None, typer.Option("--group", metavar="NAME", help="At a FIFO queue, of messages without one [one each].")
    ] = None,
    give_up_after: Annotated[
        str, typer.Option("--give-up-after", metavar="TIME", help="End when a queue has not answered for so long.")
    ] = "5m",
    admin: Annotated[
        str | None,
        typer.Option("--admin", metavar="HOST:PORT", help="Of TO's server: send through it, each message once."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="Its bearer token.", readable=False)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be moved and what is lost, and change nothing.")
    ] = False,
    yes: Yes = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> None:
    """Move messages from one queue to another, at least once: deleted at the source when the target has them.

    What the target cannot carry is said first, and asked about (--yes). The first Ctrl-C or SIGTERM ends once the
    messages received so far are moved, the second at once. Exits 1 if messages were refused, or could not
    be deleted at the source.
    """
    given = dict(locals())
    from veilmq.cli.migrate.bridge import bridge

    raise typer.Exit(int(bridge(given)))


def _import(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            show_default=False,
            help="ElasticMQ's .conf, Azurite's directory, JSON of `aws sqs get-queue-attributes`, sqs://HOST:PORT/.",
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="URL", help="Create them there: veil://HOST:PORT/, sqs://..., azure://..."),
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="FILE", help="Write a queues file, for `veilmq serve --queues`.")
    ] = None,
    messages: Annotated[bool, typer.Option("--messages", help="With --to: send Azurite's messages, too.")] = False,
    account: Annotated[
        str | None, typer.Option("--account", metavar="NAME", help="Of Azurite's accounts [the only one].")
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Only queues whose names begin so.")] = "",
) -> None:
    """Bring the queues of another service: print them as a queues file, or create them with --to.

    What cannot be brought is said on stderr. Exits 1 if a queue exists with other settings, or was refused.
    """
    given = dict(locals())
    from veilmq.cli.migrate.settings import bring

    raise typer.Exit(int(bring(given)))
