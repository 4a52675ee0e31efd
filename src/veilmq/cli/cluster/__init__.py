"""`veilmq cluster`: makes a cluster in a PostgreSQL, shows the state of one, and commands its servers."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from veilmq.cli.failures import Exit, Failure, check_directory, repair_advice, serve_command, taken
from veilmq.cli.output import print_json
from veilmq.model.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from veilmq.cluster.postgres import Postgres
    from veilmq.cluster.registry import Registered, Status

_Url = Annotated[
    str,
    typer.Option(
        "--cluster", metavar="URL", envvar="VEILMQ_CLUSTER", help="Its PostgreSQL: postgresql://USER@HOST1,HOST2/NAME."
    ),
]
_SingleCopy = Annotated[bool, typer.Option("--single-copy", envvar="VEILMQ_SINGLE_COPY", help="No standby is needed.")]
_Server = Annotated[str, typer.Argument(metavar="SERVER", help="Its name: `veilmq cluster status` shows them.")]
_LEASE_US_MIN, _LEASE_US_MAX = 1_000_000, 60_000_000
_WAIT_SECONDS: Final = 30
_LOOK_SECONDS: Final = 0.05
_Json = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    cluster = typer.Typer(
        help="Set up and run several servers that share their queues.", no_args_is_help=True, rich_markup_mode=None
    )
    cluster.command("init")(_init)
    cluster.command("status")(_status)
    cluster.command("handover")(_hand_over)
    cluster.command("import")(_import)
    cluster.command("export")(_export)
    cluster.command("drain")(_drain)
    cluster.command("undrain")(_undrain)
    cluster.command("forget")(_forget)
    cluster.command("finalize")(_finalize)
    app.add_typer(cluster, name="cluster")


def _init(
    url: _Url,
    lease: Annotated[
        str | None,
        typer.Option("--lease", metavar="TIME", help="Replace an owner silent for so long, 1s to 60s [3s]."),
    ] = None,
    snapshots: Annotated[
        str | None,
        typer.Option("--snapshots", metavar="URL", help="Where to keep snapshots [in that PostgreSQL]; changeable."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep", metavar="TIME", help="How far back a restore can go, say 7d [two snapshots]; changeable."
        ),
    ] = None,
    single_copy: _SingleCopy = False,
) -> None:
    """Create a cluster's tables in a PostgreSQL. If they are there already, only set --snapshots and --keep."""
    from veilmq.cli.options import duration_us, seconds
    from veilmq.cluster.postgres.schema import UNKNOWN, init
    from veilmq.engine.directory import STATE_FORMAT

    lease_us = None if lease is None else duration_us("--lease", lease)
    if lease_us is not None and not _LEASE_US_MIN <= lease_us <= _LEASE_US_MAX:
        raise Failure(Exit.USAGE, f"--lease: expected 1s to 60s, not {lease}")
    keep_us = None if keep is None else int(seconds("--keep", keep) * 1e6)
    if snapshots:
        _try_place(snapshots)
    with _asking(url, single_copy) as postgres:
        try:
            shard = init(postgres, state_format=STATE_FORMAT, lease_us=lease_us, snapshots=snapshots, keep_us=keep_us)
        except KeyboardInterrupt:
            print(UNKNOWN, file=sys.stderr)
            raise
    print(f"cluster {shard.incarnation}: start its servers with `veilmq serve --cluster URL`")


def _try_place(url: str) -> None:
    """Raises Failure if nothing can be written at the URL, or if it is another place for each server."""
    from veilmq.store.archive import PlaceFailed, PlaceUnusable, place_at

    folder = url.removeprefix("file://")
    if "://" not in folder and not Path(folder).is_absolute():
        advice = "Write it from the root on: each server would look below its own working directory."
        raise Failure(Exit.USAGE, f"--snapshots: {url} is a relative path", advice)
    try:
        place = place_at(url, is_new=True)
        place.write("veilmq-try", b"")
        place.remove("veilmq-try")
    except (PlaceUnusable, PlaceFailed) as error:
        raise Failure(Exit.USAGE, f"--snapshots: {error}") from None


def _status(url: _Url, single_copy: _SingleCopy = False, as_json: _Json = False) -> None:
    """Show who owns the queues, how long the log is, which standbys confirm it, and all servers."""
    from veilmq.cluster.registry import status

    with _asking(url, single_copy) as postgres:
        found = status(postgres)
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        _show(found)
    if not found.owned:
        raise typer.Exit(int(Exit.WRONG))


def _show(found: Status) -> None:
    owner = f"{found.owner or 'nobody'}, epoch {found.epoch}"
    if not found.owned:
        owner += ": its lease has ended" if found.owner else ""
    print(f"cluster   {found.incarnation}, state format {found.format}")
    if found.moved:
        print(f"export    to {found.moved}: no server of this cluster starts any more")
    print(f"owner     {owner}")
    print(f"lease     {found.lease_s:g} s, renewed {found.renewed_s:.1f} s ago")
    print(
        f"log       {counted(found.records, 'record')}, {counted(found.segments, 'segment')}, {found.log_bytes} bytes"
    )
    print(f"snapshot  {_snapshot(found)}")
    for standby in found.standbys:
        behind = "stands still" if standby.stands_still else f"{standby.lag_s:.3f} s behind"
        known = f"{standby.sync}, {standby.state}, {behind}" if standby.sync else "not known"
        print(f"standby   {standby.name}: {known}")
    if found.blind and not found.single_copy:
        print("standby   grant pg_monitor to this role, so that it sees which of them confirm commits")
    if found.missing:
        print(f"standby   commits are not confirmed: every client waits for standby {found.missing}")
    elif found.single_copy:
        print("standby   none confirms commits: losing PostgreSQL's machine loses messages")
    for server in found.servers:
        print(f"server    {server.name}: {_line_of(server, found)}")
    if not found.moved and (why := found.why_not_owner("")):
        print(f"server    {why}")


def _snapshot(found: Status) -> str:
    if not found.snapshot:
        return "none yet"
    by = f"verified by {found.snapshot_verified_by}" if found.snapshot_verified_by else "verified by no other server"
    return f"of record {found.snapshot}, {by}" + (f", at {found.snapshots}" if found.snapshots else "")


def _hand_over(
    url: _Url,
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="To this server, not to whichever is first.")] = "",
    single_copy: _SingleCopy = False,
) -> None:
    """Ask the owner to hand the queues over, and wait until another server has them. Clients notice nothing."""
    from veilmq.cluster.registry import ask_to_hand_over, status, within

    with _asking(url, single_copy) as postgres:
        if to and (found := status(postgres)).owned and found.owner == to:
            print(f"{to} owns the queues already, in epoch {found.epoch}")
            return
        epoch = within(postgres, lambda session: ask_to_hand_over(session, to))
        found = _wait(postgres, "not handed over", lambda found: found.owned and found.epoch != epoch)
        if to not in {"", found.owner}:
            text = f"{to} did not take the queues over: {found.owner} owns them, in epoch {found.epoch}"
            raise Failure(Exit.WRONG, text, f"See what the log of {to} says, and whether it still runs.")
    print(f"{found.owner} owns the queues, in epoch {found.epoch}")


def _import(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A data directory that no server has open.")],
    url: _Url,
    single_copy: _SingleCopy = False,
) -> None:
    """Bring the data of a server alone into an empty cluster. Receipt handles stay valid; no server opens DIR again."""
    from veilmq.cluster.moving import import_directory
    from veilmq.server.clock import wall

    with _asking(url, single_copy) as postgres, _moving(directory, reads=True):
        moved = import_directory(postgres, directory, wall())
    print(f"imported {moved.size_bytes} bytes; receipt handles stay good")
    print("start the cluster's servers with empty data directories: `veilmq serve --cluster URL`")
    print(f"no server starts on {directory} any more: remove it when the cluster serves")


def _export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that is empty or not there yet.")],
    url: _Url,
    single_copy: _SingleCopy = False,
) -> None:
    """Take a cluster's data into a directory for a server alone. Stop all servers first; none starts again."""
    from veilmq.cluster.moving import export_directory
    from veilmq.server.clock import boot_ns

    check_directory(directory, "DIR", beside=True)
    with _asking(url, single_copy) as postgres, _moving(directory):
        moved = export_directory(postgres, directory, boot_ns)
    print(f"exported {moved.size_bytes} bytes, up to record {moved.position.lsn}; receipt handles stay good")
    print(f"serve it with: {serve_command(directory)}")
    if moved.earlier:
        print(f"an export to {moved.earlier} was begun before: serve only one of the two, or messages are worked twice")


@contextmanager
def _moving(directory: Path, *, reads: bool = False) -> Iterator[None]:
    """Raises Failure with what is wrong with the directory. reads: the data comes from there."""
    from veilmq.model.errors import StoreError
    from veilmq.store.directory import (
        DatabaseFailed,
        DatabaseUnusable,
        DestinationTaken,
        DirectoryHeld,
        DirectoryUnsafe,
        NotOurs,
        SchemaRefused,
    )
    from veilmq.store.log import Diverged

    try:
        yield
    except DirectoryHeld as error:
        raise Failure(Exit.DIRECTORY, str(error), "Stop that server first.") from None
    except DestinationTaken as error:
        raise taken(error) from None
    except (DirectoryUnsafe, SchemaRefused, NotOurs) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except Diverged as error:
        raise Failure(Exit.DIRECTORY, f"{directory}: {error}", repair_advice(directory)) from None
    except (DatabaseFailed, DatabaseUnusable, StoreError, OSError) as error:
        advice = "Is there space for a copy of the data?"
        if reads and isinstance(error, (DatabaseFailed, DatabaseUnusable)):
            advice = repair_advice(directory, is_damaged=False)
        raise Failure(Exit.STORE, f"nothing was moved: {error}", advice) from None


def _drain(server: _Server, url: _Url, single_copy: _SingleCopy = False) -> None:
    """Take a server out of service: it hands the queues over, owns none, and is not ready, so proxies avoid it.

    Ends with `undrain`, or when the server starts again.
    """
    from veilmq.cluster.registry import drain, within

    def is_drained(found: Status) -> bool:
        drained = found.server(server)
        return found.owned and drained is not None and (drained.role == "drained" or not drained.is_running)

    with _asking(url, single_copy) as postgres:
        within(postgres, lambda session: drain(session, server))
        found = _wait(postgres, f"{server} is not drained", is_drained)
    print(f"{server} is drained; {found.owner} owns the queues")


def _undrain(server: _Server, url: _Url, single_copy: _SingleCopy = False) -> None:
    """Let a drained server take part again."""
    from veilmq.cluster.registry import drain, within

    with _asking(url, single_copy) as postgres:
        within(postgres, lambda session: drain(session, server, undo=True))
    print(f"{server} may own the queues again")


def _forget(server: _Server, url: _Url, single_copy: _SingleCopy = False) -> None:
    """Remove a server that will not come back, so that nothing waits for it."""
    from veilmq.cluster.registry import forget, within

    with _asking(url, single_copy) as postgres:
        within(postgres, lambda session: forget(session, server))
    print(f"{server} is forgotten")


def _finalize(url: _Url, single_copy: _SingleCopy = False) -> None:
    """After an upgrade: give the queues the newest state format, once all servers know it. There is no way back."""
    from veilmq.cluster.registry import ask_to_hand_over, finalize, status, within

    with _asking(url, single_copy) as postgres:
        wanted = within(postgres, finalize)

        def is_there(found: Status) -> bool:
            owner = found.server(found.owner)
            return found.owned and owner is not None and owner.role == "owner" and owner.format == wanted

        if not is_there(found := status(postgres)):  # the next owner gives it to the tables
            if not any(server.is_running for server in found.servers):
                raise Failure(
                    Exit.WRONG,
                    f"no server is running: the next one that owns the queues gives them state format {wanted}",
                    "Start one, and look at `veilmq cluster status`.",
                )
            within(postgres, lambda session: ask_to_hand_over(session, "", anew=True))
            _wait(postgres, f"the queues do not have state format {wanted} yet", is_there)
    print(f"the queues have state format {wanted}, the newest that all servers know")


def _line_of(server: Registered, found: Status) -> str:
    """A server in a line."""
    from veilmq.cluster.registry import FILLING, STARTING

    if server.is_running and server.role == "owner" and server.name == found.owner:
        part = "owner"
    else:
        states = [server.absence] * (not server.is_running) + ["drained"] * server.drained
        behind = max(0, found.records - server.record)
        role = server.role if server.role in {STARTING, FILLING} else "follower"
        part = f"{', '.join(states) or role}, {counted(behind, 'record')} behind"
    formats = f"{server.oldest} to {server.newest}" if server.oldest < server.newest else f"{server.newest}"
    where = f"{server.address or 'starting'}, release {server.release}, formats {formats}"
    return f"{part}, {where}, seen {server.seen_s:.1f} s ago"


def _wait(postgres: Postgres, failed: str, done: Callable[[Status], bool]) -> Status:
    """The status once it is as wanted. Raises Failure if it does not become so."""
    from veilmq.cluster.registry import status

    end = perf_counter() + _WAIT_SECONDS
    while not done(found := status(postgres)):
        if perf_counter() > end:
            raise Failure(
                Exit.WRONG,
                f"{failed} after {_WAIT_SECONDS} s",
                "See what `veilmq cluster status` says: whether the owner is alive, and whether PostgreSQL waits.",
            )
        sleep(_LOOK_SECONDS)
    return found


@contextmanager
def _asking(url: str, single_copy: bool) -> Iterator[Postgres]:
    """Raises Failure with what is wrong with the URL or the PostgreSQL."""
    from veilmq.cluster.postgres import ClusterError, Postgres

    try:
        postgres = Postgres(url, single_copy=single_copy)
    except ClusterError as error:
        raise Failure(Exit.USAGE, f"--cluster: {error}") from None
    try:
        yield postgres
    except ClusterError as error:
        raise Failure(Exit.WRONG, str(error)) from None
