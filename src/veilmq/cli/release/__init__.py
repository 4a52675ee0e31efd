"""`veilmq version`: what is installed here, for a report of a bug; and `veilmq upgrade --check`: what this release
would do to a data directory, before a server of it starts there.

Strategy: both only look. The state format is read from the database through a read-only connection, also beside a
server that has it open; a file of a newer release, or of one before the first, is described and not refused. What is
optional is listed by the extras that the installed distribution names. Source: docs/decisions/0030-state-formats.md.
"""

import json
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Final, NamedTuple

import typer

import veilmq
from veilmq.cli.failures import Exit, Failure, closed_to_user, foreign, refuse_remains, repair_advice

_EXTRA: Final = re.compile(r"""([A-Za-z0-9._-]+)[^;]*;.*\bextra == ["']([a-z]+)["']""")
"""A package and its extra, in the metadata of a distribution."""
_OF_DEVELOPERS: Final = {"dev", "test"}
_MIB: Final = 1 << 20
Data = Annotated[
    Path, typer.Option("--data", metavar="DIR", envvar="VEILMQ_DATA", help="The data directory.", readable=False)
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("version")(_version)
    app.command("upgrade")(_upgrade)


def _version(data: Data = Path("veilmq-data"), as_json: Json = False) -> None:
    """Print what a bug report needs to say of this installation: it holds no secret and no name of a queue."""
    found = installed() | {"data": _data(data)}
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<11} {value}" if isinstance(value, str) else f"{name:<11} {', '.join(value)}")


def installed() -> dict[str, Any]:
    """Release, interpreter, machine, the database's engine, event loop, accelerator, what each extra lacks."""
    from veilmq import accelerator
    from veilmq.engine.directory import STATE_FORMAT

    accelerator.check_value()
    return {
        "veilmq": f"{veilmq.__version__} (state format {STATE_FORMAT}) in {Path(veilmq.__file__).parent}",
        "python": f"{platform.python_version()} ({platform.python_implementation()}) in {sys.prefix}",
        "platform": f"{platform.platform()} ({os.cpu_count()} cores)",
        "sqlite": sqlite_version(),
        "loop": f"uvloop {version}" if (version := _version_of("uvloop")) else "asyncio's own",
        "accelerator": accelerator.status,
        "extras": [f"{name}: {_shown(packages)}" for name, packages in sorted(_extras().items())],
    }


def sqlite_version() -> str:
    """SQLite's version, which is inside apsw, and apsw's."""
    from veilmq.store.sqlite.tools import SQLITE

    return SQLITE


def _extras() -> dict[str, list[str]]:
    """The packages of each extra that users install."""
    extras: dict[str, list[str]] = {}
    try:
        required = metadata.requires("veilmq") or []
    except metadata.PackageNotFoundError:  # a checkout that is on the path
        return {}
    for each in required:
        if (found := _EXTRA.match(each)) and found[2] not in _OF_DEVELOPERS:
            extras.setdefault(found[2], []).append(found[1])
    return extras


def _shown(packages: list[str]) -> str:
    lacking = [name for name in packages if _version_of(name) is None]
    return f"without {' '.join(lacking)}" if lacking else "yes"


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _data(data: Path) -> str:
    try:
        return f"state format {look(data).format} in {data}"
    except Failure as failure:
        return f"none in {data}" if failure.code is Exit.USAGE else str(failure)


class Found(NamedTuple):
    """A data directory, as an upgrade sees it."""

    format: int
    refused: str
    """Why this release does not read it; empty if it does."""
    follows: bool
    """It is a copy of a cluster's state."""
    losses: list[str]
    """What was acknowledged and is missing: a start refuses that."""


def look(data: Path) -> Found:
    """Look at a directory that nobody holds, without a change. Raises Failure if there is no database of ours, or if it
    cannot be read."""
    from veilmq.store.directory import DATABASE, DatabaseFailed, NotOurs, SchemaNewer, SchemaUnreleased
    from veilmq.store.sqlite.tools.backup import format_of

    database = data / DATABASE
    if closed := closed_to_user(database):
        advice = "Run the command as the server's user."
        raise Failure(Exit.DIRECTORY, f"{database} cannot be read: {closed.rstrip('.')}", advice)
    try:
        refuse_remains(data)
        try:
            database.stat()  # since Python 3.14 Path.exists takes what cannot be a path for a missing file
        except (FileNotFoundError, NotADirectoryError):
            raise Failure(Exit.USAGE, f"{data} has no data of VeilMQ", "Check --data DIR.") from None
        number, follows, losses = format_of(database)
        return Found(number, "", follows, losses)
    except (SchemaNewer, SchemaUnreleased) as error:
        return Found(error.found, str(error), follows=False, losses=[])
    except NotOurs as error:
        raise foreign(data, error) from None
    except (DatabaseFailed, OSError) as error:
        from veilmq.cli.directory import access_advice

        advice = ""
        if isinstance(error, DatabaseFailed):
            advice = access_advice(data) or repair_advice(data, is_damaged=False)
        raise Failure(Exit.DIRECTORY, f"{database} cannot be read: {error}", advice) from None


def _upgrade(
    check: Annotated[bool, typer.Option("--check", help="Say what would happen; nothing else is there yet.")] = False,
    data: Data = Path("veilmq-data"),
    as_json: Json = False,
) -> None:
    """Say what this release would do to a data directory: formats, space, and whether there is a way back.

    An upgrade itself is to install the release and start the server. Exits 1 if something stands in the way, 3 if this
    release does not read the directory.
    """
    if not check:
        advice = "Say --check for what it would do. To upgrade, install the release and start the server."
        raise Failure(Exit.USAGE, "a server upgrades its data directory when it starts", advice)
    found = look(data)
    plan = planned(found, data)
    if as_json:
        print(json.dumps(plan))
    else:
        print("\n".join(f"{name + ':':<10} {value}" for name, value in _plan_lines(plan)))
    if found.refused:
        raise typer.Exit(int(Exit.DIRECTORY))
    raise typer.Exit(int(Exit.WRONG if plan["in_the_way"] else Exit.DONE))


def planned(found: Found, data: Path) -> dict[str, Any]:
    """What would happen to a directory, as plain values."""
    from veilmq.engine.directory import STATE_FORMAT

    size = sum(
        each.stat().st_size for each in data.iterdir() if each.name.startswith("veilmq.db") or each.name == "redo"
    )
    disk = os.statvfs(data)
    free = disk.f_bavail * disk.f_frsize
    migrates = not found.refused and not found.follows and found.format < STATE_FORMAT
    in_the_way = [] if found.follows else [*found.losses]  # a server of a cluster fills its copy anew
    # A migration may write each page once more, into the write-ahead log, and all of it in one transaction.
    if migrates and free < size:
        in_the_way.append(f"{free // _MIB} MiB are free, and the migration may need {-(-size // _MIB)} MiB: free space")
    return {
        "data": str(data),
        "format": found.format,
        "release": veilmq.__version__,
        "release_format": STATE_FORMAT,
        "refused": found.refused,
        "cluster": found.follows,
        "migrates": migrates,
        "bytes": size,
        "free_bytes": free,
        "way_back": not migrates,
        "in_the_way": in_the_way,
    }


def _plan_lines(plan: dict[str, Any]) -> list[tuple[str, str]]:
    sizes = f"{-(-plan['bytes'] // _MIB)} MiB of data, {plan['free_bytes'] // _MIB} MiB are free"
    lines = [
        ("data", f"{plan['data']}, state format {plan['format']}"),
        ("release", f"{plan['release']}, state format {plan['release_format']}"),
    ]
    if plan["refused"]:
        return [*lines, ("refused", plan["refused"])]
    if plan["cluster"]:
        what = "nothing at the start: `veilmq cluster finalize` raises the format, when all servers have the release"
        back = "the older release, until `veilmq cluster finalize`"
    elif plan["migrates"]:
        what = f"the start brings format {plan['format']} to {plan['release_format']}, in one transaction"
        back = "only a backup: an older release refuses the data after the start"
    else:
        what = "nothing: the format is the same"
        back = "the older release starts on the data as it is"
    lines += [("does", what), ("space", sizes), ("way back", back)]
    lines += [("in the way", each) for each in plan["in_the_way"]]
    first = "see to what is in the way, " * bool(plan["in_the_way"])
    backup = f"veilmq backup DEST --data {quote(str(plan['data']))}"
    steps = (
        f"`{backup}`, stop the server, install the release, start"
        if plan["migrates"]
        else "stop, install the release, start"
    )
    return [*lines, ("next", first + steps if not plan["cluster"] else 'docs/cluster.md, "Upgrade"')]
