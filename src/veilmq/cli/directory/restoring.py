"""`veilmq restore`: the state at an instant, from a cluster, an archive or a backup, in a new directory.

Strategy: what a restore makes takes its name when it is complete, checked, and has a secret of its own. So nothing is
written over, and a restore that fails leaves nothing.
"""

import json
import re
import sys
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Final

import msgspec

from veilmq.cli.failures import Exit, Failure, check_directory, serve_command, taken
from veilmq.cli.output import bar, instant
from veilmq.engine.directory import open_follower, renew
from veilmq.model.errors import StoreError
from veilmq.model.instant import MILLISECOND_US, MINUTE_US, Instant, from_text
from veilmq.model.wording import counted
from veilmq.server.clock import wall
from veilmq.store import Options
from veilmq.store.archive import ArchiveSource, PlaceUnusable, place_at, shown_url
from veilmq.store.directory import (
    DATABASE,
    DatabaseFailed,
    DatabaseUnusable,
    DestinationTaken,
    NotOurs,
    Report,
    SchemaRefused,
    SqliteTooOld,
)
from veilmq.store.log import Diverged, Entry, Held, Point, Position, Restored, Source, SourceUnusable
from veilmq.store.log import restore as restore_into
from veilmq.store.sqlite.tools import check as check_database
from veilmq.store.sqlite.tools.backup import NO_SPACE, copy_checked, made_beside

_CLUSTER: Final = re.compile(r"postgres(ql)?://|(.*\s)?(host|hostaddr|dbname|service)\s*=", re.ASCII)
"""Either form of a connection string of PostgreSQL."""
_OPTIONS: Final = Options(reserve_bytes=0)


class DirectorySource:
    """A backup, or any data directory: one snapshot."""

    def __init__(self, directory: Path) -> None:
        """directory: a data directory, or the database in one."""
        self._database = directory if directory.is_file() else directory / DATABASE

    def snapshots(self) -> list[Held]:
        """See `Source.snapshots`. Its instant is known when it was copied."""
        return [Held(Point(Position(0, 0, 0), Instant(0)), self._fetch)]

    def _fetch(self, file: Path) -> Point:
        try:
            return copy_checked(self._database, file)
        except (Diverged, NotOurs, SchemaRefused, DatabaseFailed) as error:
            if str(error) == NO_SPACE:
                raise  # the source is not to blame
            raise SourceUnusable(str(error)) from error

    def records(self, after: Position) -> list[Entry]:
        """See `Source.records`. There are none."""
        return []


def source_at(place: str) -> Source:
    """What a user names. Raises SourceUnusable."""
    if _CLUSTER.match(place):
        from veilmq.cluster.moving import PostgresSource

        return PostgresSource(place)
    try:
        is_directory = (Path(place) / DATABASE).is_file() or Path(place).is_file()
    except PermissionError as error:
        raise SourceUnusable(f"{error.strerror} ({place})") from error
    if is_directory:
        return DirectorySource(Path(place))
    try:
        return ArchiveSource(place_at(place), place)
    except PlaceUnusable as error:
        raise SourceUnusable(str(error)) from error


def restore(destination: Path, place: str, to: str | None, *, as_json: bool) -> Exit:
    """Restore, and print what was restored. Raises Failure."""
    try:
        until = None if to is None else from_text(to)
    except ValueError:
        raise Failure(Exit.USAGE, f"--to: expected an instant such as 2026-01-31T12:00:00Z, not {to!r}") from None
    check_directory(destination, "DIR", beside=True)
    try:
        with made_beside(destination) as beside:
            restored = restore_into(source_at(place), until, beside, partial(open_follower, options=_OPTIONS))
            renew(beside / DATABASE)
            with bar() as advance:
                report = check_database(beside / DATABASE, advance, is_owner=True)
    except DestinationTaken as error:
        raise taken(error) from None
    except SourceUnusable as error:
        advice = ""
        if isinstance(error.__cause__, DatabaseFailed | Diverged) and Path(place).is_dir():
            repair = f"veilmq check --data {quote(place)} --repair {quote(str(destination))}"
            advice = f"If it is damaged, see what can be had: {repair}"
        elif error.since is not None:
            advice = f"The first instant that can be restored: --to '{instant(error.since + MILLISECOND_US - 1)}'"
        raise Failure(Exit.WRONG, f"nothing can be restored from {_shown_place(place)}: {error}", advice) from None
    except (NotOurs, SchemaRefused, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except (OSError, DatabaseFailed, DatabaseUnusable, StoreError) as error:
        raise Failure(Exit.STORE, f"nothing was restored: {error}", "Is there space for the data?") from None
    if until is not None and until > wall() and restored.goes_on is None and not restored.damaged:
        print(f"--to: {instant(until)} UTC is still to come, so this is the newest state", file=sys.stderr)
    is_ahead = until is None and restored.clock - wall() > MINUTE_US
    if as_json:
        content = {"directory": str(destination.absolute())} | msgspec.to_builtins(restored)
        print(json.dumps(content | {"is_ahead": is_ahead, "check": msgspec.to_builtins(report)}))
    else:
        print(_restored(restored, report, destination, is_ahead))
    return Exit.WRONG if restored.damaged or report.problems_count or is_ahead else Exit.DONE


def _shown_place(place: str) -> str:
    """Without a password."""
    return "the cluster" if _CLUSTER.match(place) else shown_url(place)


def _restored(restored: Restored, report: Report, destination: Path, is_ahead: bool) -> str:
    lines = [f"restored the state of {instant(restored.clock)}"]
    if restored.lsn:
        begun = f"the snapshot of record {restored.snapshot}" if restored.snapshot else "nothing"
        lines[0] += f", record {restored.lsn}: {counted(restored.records, 'record')} after {begun}"
        if restored.goes_on is not None:
            lines.append(f"the next record is of {instant(restored.goes_on)}")
        elif not restored.damaged:  # behind damage there may be more
            lines.append("the source ends there")
    lines += [f"damaged: {each}" for each in restored.damaged]
    if is_ahead:
        why = "that is still to come: the server's clock was ahead"
        lines.append(f"{why}. If its directory was put back to an earlier copy since then: --to '{instant(wall())}'")
    held = f"{counted(report.messages, 'message')} and {counted(report.leases, 'lease')}"
    lines.append(f"{held} in {counted(report.queues, 'queue')}")
    lines += [f"not in order: {each.kind}: {each.text}" for each in report.problems]
    lines.append("receipt handles from before are void, and the history has a new epoch")
    lines.append(f"serve it with: {serve_command(destination)}")
    return "\n".join(lines)
