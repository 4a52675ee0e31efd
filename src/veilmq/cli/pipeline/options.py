"""The options that several commands of the pipeline have, and those of all jobs on the history as one value."""

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
Json = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write the job's tables there.")]
Format = Annotated[str, typer.Option("--format", metavar="FORMAT", help="Of tables: parquet or delta.")]
Publish = Annotated[
    bool, typer.Option("--publish", help="Tell the server: each queue's `adaptive` says what it makes of that.")
]
Url = Annotated[
    str, typer.Option("--queue", metavar="URL", envvar="VEILMQ_QUEUE", help="veil://HOST:PORT/NAME, sqs://...")
]


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


OPTIONS: Final[dict[str, tuple[Any, Any]]] = {
    "server": (Server, None),
    "path": (Exported, None),
    "token_file": (Token, None),
    "certificate": (Certificate, None),
    "master": (Master, None),
    "remote": (Remote, None),
    "out": (Out, None),
    "format": (Format, "parquet"),
    "as_json": (Json, False),
    "start": (
        Annotated[str | None, typer.Option("--from", metavar="OFFSET", help="Begin with this offset.")],
        None,
    ),
    "until": (Annotated[int | None, typer.Option("--until", metavar="OFFSET", help="End before this offset.")], None),
}
