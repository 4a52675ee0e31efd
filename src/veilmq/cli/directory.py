"""`veilmq backup` and `veilmq check`: through the server that holds a data directory, or directly on it; and `veilmq
restore`: the state at an instant, from a cluster, an archive or a backup, in a new directory.

Strategy: a server that holds the directory, or that `--admin` names, does the work on a thread of its own. Of a
directory that nobody holds, one committed state is read through a read-only connection. `check --repair` writes what
can be had of a damaged directory into a new one. A repair is a success (code 0) only if everything that was
acknowledged is in its place. If anything is missing, in doubt, set apart or exported, the new directory is there all
the same, and the code is 1.

What a restore makes takes its name when it is complete, checked, and has a secret of its own. So nothing is written
over, and a restore that fails leaves nothing.
"""

import json
import os
import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from veilmq.cli.access import AS_SERVER
from veilmq.cli.access.http import HttpAccess
from veilmq.cli.failures import Exit, Failure, advice_on, check_directory, foreign
from veilmq.cli.output import bar, instant
from veilmq.engine.directory import open_follower, renew
from veilmq.model.errors import StoreError
from veilmq.model.instant import SECOND_US, Instant, from_text
from veilmq.store import Options
from veilmq.store.archive import ArchiveSource, PlaceUnusable, place_at
from veilmq.store.directory import (
    DATABASE,
    REDO,
    DatabaseFailed,
    DatabaseUnusable,
    DestinationTaken,
    DirectoryHeld,
    NotOurs,
    Report,
    SchemaRefused,
    SqliteTooOld,
)
from veilmq.store.files import made_beside
from veilmq.store.log import Diverged, Entry, Held, Point, Position, Restored, Source, SourceUnusable
from veilmq.store.log import restore as restore_into
from veilmq.store.sqlite.tools import check as check_database
from veilmq.store.sqlite.tools.backup import backup_directory, copy_checked, receive_directory

if TYPE_CHECKING:
    from veilmq.store.sqlite.repair import MissingMessage, QueueContent, Repair

_HEAD: Final = b"SQLite format 3\0"
"""The file's first bytes (SQLite Database File Format, 1.3)."""
REPAIR: Final = "veilmq check --repair NEW_DIRECTORY --backup NEWEST_BACKUP"
_RESTORE: Final = f"See what can be had: {REPAIR}"
_FREE: Final = f"Free space if the disk is full; else see what can be had: {REPAIR}"
_CLUSTER: Final = re.compile(r"postgres(ql)?://|(.*\s)?(host|hostaddr|dbname|service)\s*=", re.ASCII)
"""Either form of a connection string of PostgreSQL."""
_OPTIONS: Final = Options(reserve_bytes=0, migrates=False)


def backup(data: Path, destination: Path, *, as_json: bool, access: HttpAccess | None = None) -> None:
    """Make a copy, and print how to go back to it. Raises Failure.

    With `access`, the server makes the copy and sends it.
    """
    check_directory(destination, "DEST")
    try:
        with bar() as advance:
            step = partial(advance, "copying")
            if access is not None:
                size_bytes = receive_directory(destination, lambda file: access.download("/api/v1/backup", file, step))
            else:
                size_bytes = backup_directory(_database(data), destination, step)
    except DestinationTaken as error:
        raise Failure(Exit.USAGE, str(error), "Name a directory that is empty or not there yet.") from None
    except NotOurs as error:
        raise foreign(data, error) from None
    except (SchemaRefused, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except (OSError, DatabaseFailed) as error:
        advice = _closed(data) if access is None else ""
        if isinstance(error, PermissionError):
            asked = "Name a directory that belongs to this user, or one that is not there yet."
        else:
            asked = "Is there space at the destination, and where the data is?"
        raise Failure(Exit.STORE, f"the copy failed and was removed: {error}", advice or asked) from None
    _say_copied(destination, size_bytes, as_json=as_json)


def _say_copied(destination: Path, size_bytes: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"destination": str(destination.absolute()), "bytes": size_bytes}))
    else:
        print(f"copied {size_bytes} bytes to {destination}; to go back, serve a copy of it:")
        print(f"veilmq restore NEW_DIRECTORY --from {destination}")


def _through(access: HttpAccess, path: str, members: dict[str, Any]) -> dict[str, Any]:
    """The result of a long job on the server. Raises Failure."""
    last: dict[str, Any] = {}
    with bar() as advance:
        for last in access.steps(path, members):
            if "stage" in last:
                advance(last["stage"], last["done"], last["total"])
    if "result" in last:
        result: dict[str, Any] = last["result"]
        return result
    message = last.get("message", "the server ended before the work was done")
    raise Failure(Exit.STORE, message)


def check(data: Path, *, as_json: bool, access: HttpAccess | None = None) -> Exit:
    """Check everything and print a report. Raises Failure if there is nothing to check."""
    if access is not None:
        try:
            report = msgspec.convert(_through(access, "/api/v1/check", {}), Report)
        except msgspec.ValidationError as error:
            raise Failure(Exit.ADDRESS, f"the server's report is none of this release: {error}") from None
        return _say_checked(report, as_json=as_json)
    database = _database(data)
    try:
        with bar() as advance:
            report = check_database(database, advance)
    except NotOurs as error:
        raise foreign(data, error) from None
    except (SchemaRefused, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except (OSError, DatabaseFailed) as error:
        raise Failure(Exit.DIRECTORY, f"{database} cannot be opened: {error}", _closed(data) or _FREE) from None
    return _say_checked(report, as_json=as_json)


def _closed(data: Path) -> str:
    """Advice if the files cannot be read or the directory cannot be written, which SQLite needs even to read a
    write-ahead log."""
    for each in (data / DATABASE, data / REDO):
        if each.exists() and not os.access(each, os.R_OK):
            return f"{each} may not be read by this user: chown it (or chmod u+rw), or be its owner."
    if os.access(data, os.W_OK):
        return ""
    return f"{data} cannot be written by this user, or is read-only: copy all of it elsewhere, and look there."


def _say_checked(report: Report, *, as_json: bool) -> Exit:
    print(msgspec.json.encode(report).decode() if as_json else _shown(report))
    return Exit.WRONG if report.problems_count else Exit.DONE


def _shown(report: Report) -> str:
    lines = [
        f"{report.queues} queues, {report.messages} messages ({report.body_bytes} bytes), {report.leases} leases, "
        f"{report.events} events from offset {report.history_first_offset} on",
        f"sent = live + deleted + expired + purged + set apart + moved: {report.books}",
    ]
    if not report.page_checksums:
        lines.append("its pages have no checksums, so some flips go unnoticed: copies of `veilmq backup` have them")
    lines += [f"{problem.kind}: {problem.text}" for problem in report.problems]
    if more := report.problems_count - len(report.problems):
        lines.append(f"and {more} more")
    lines.append("everything is in order" if not report.problems_count else f"{report.problems_count} problems")
    if any(problem.kind != "quarantine" for problem in report.problems):
        lines.append(f"what can be had, in a new directory: {REPAIR}")
    return "\n".join(lines)


def _database(data: Path) -> Path:
    database = data / DATABASE
    try:
        with database.open("rb") as file:
            head = file.read(len(_HEAD))
    except PermissionError as error:
        raise Failure(Exit.DIRECTORY, f"{database}: {error.strerror}", advice_on(database, AS_SERVER)) from None
    except OSError as error:
        raise Failure(
            Exit.DIRECTORY, f"{database}: {error.strerror}", "Name the data directory with --data DIR."
        ) from None
    if not head:
        raise Failure(Exit.DIRECTORY, f"{database} is empty")
    if head != _HEAD:
        raise Failure(Exit.DIRECTORY, f"{database} is not a database, or its first page is damaged", _RESTORE)
    return database


_PARTS: Final = (DATABASE, f"{DATABASE}-wal", REDO)


def write_new(data: Path, destination: Path, backup: Path | None, *, as_json: bool) -> Exit:
    """Write the new directory and print the report. Raises Failure."""
    from veilmq.store.sqlite.repair.repair import repair as repair_directory

    check_directory(destination, "--repair")
    for directory, option, names in ((data, "--data", _PARTS), (backup, "--backup", _PARTS[:1])):
        if directory is not None and not any((directory / name).is_file() for name in names):
            raise Failure(Exit.DIRECTORY, f"{directory} has no {names[0]}", f"Name a data directory with {option}.")
    try:
        with bar() as advance:
            report = repair_directory(data, destination, backup, advance)
    except DestinationTaken as error:
        raise Failure(Exit.USAGE, str(error), "Name a directory that is empty or not there yet.") from None
    except (DirectoryHeld, NotOurs, SchemaRefused, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except (OSError, DatabaseFailed) as error:
        asked = "Is there space for a copy at the new directory, and may this user read the old one?"
        raise Failure(Exit.STORE, f"the repair failed, and what it wrote was removed: {error}", asked) from None
    print(msgspec.json.encode(report).decode() if as_json else _shown_repair(report, data))
    return Exit.DONE if report.is_whole else Exit.WRONG


def _shown_repair(report: "Repair", data: Path) -> str:
    """The report for people."""
    lines = [f"found: {each}" for each in report.found]
    lines += [_shown_queue(each) for each in report.queues]
    total = sum(each.visible + each.delayed + each.in_flight for each in report.queues)
    lines.append(f"{total} messages in {len(report.queues)} queues are in {report.directory}")
    lines += [_shown_missing(each) for each in report.missing]
    if more := report.missing_count - len(report.missing):
        lines.append(f"and {more} more are missing for certain")
    if report.events_missing:
        lines.append(f"perhaps missing: what {report.events_missing} events did that were committed last")
    elif report.may_miss:
        lines.append("perhaps missing: messages of which nothing is known")
    if report.again_count:
        lines.append(f"{report.again_count} messages may be delivered again: nobody knows whether they were deleted")
    if report.exported:
        lines.append(f"{report.exported} rows have no place in the new directory: {report.export}")
    lines += [f"the new directory is not in order: {each}" for each in report.problems]
    lines.append(
        "everything that was acknowledged is there" if report.is_whole else "not everything is there: see above"
    )
    return "\n".join([*lines, f"{data} is as it was; serve the new one with: veilmq serve --data {report.directory}"])


def _shown_queue(queue: "QueueContent") -> str:
    states = ("visible", "delayed", "in flight", "in quarantine", "missing for certain")
    counts = (queue.visible, queue.delayed, queue.in_flight, queue.quarantined, queue.missing)
    told = ", ".join(f"{count} {state}" for count, state in zip(counts, states, strict=True) if count)
    return f"queue {queue.queue}: {told or 'empty'}"


def _shown_missing(message: "MissingMessage") -> str:
    sent = datetime.fromtimestamp(message.sent / SECOND_US, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"missing for certain: {message.id}, sent {sent} to {message.queue}"


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
            raise SourceUnusable(str(error)) from error

    def records(self, after: Position) -> list[Entry]:
        """See `Source.records`. There are none."""
        return []


def source_at(place: str) -> Source:
    """What a user names. Raises SourceUnusable."""
    if _CLUSTER.match(place):
        from veilmq.cluster.moving import PostgresSource

        return PostgresSource(place)
    if (Path(place) / DATABASE).is_file() or Path(place).is_file():
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
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        advice = "Name a directory that is empty or not there yet."
        raise Failure(Exit.USAGE, f"{destination} exists already", advice)
    check_directory(destination, "DIR", beside=True)
    try:
        with made_beside(destination) as beside:
            restored = restore_into(source_at(place), until, beside, partial(open_follower, options=_OPTIONS))
            renew(beside / DATABASE)
            with bar() as advance:
                report = check_database(beside / DATABASE, advance, is_owner=True)
    except SourceUnusable as error:
        raise Failure(Exit.WRONG, f"nothing can be restored from {_shown_place(place)}: {error}") from None
    except (NotOurs, SchemaRefused, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except (OSError, DatabaseFailed, DatabaseUnusable, StoreError) as error:
        raise Failure(Exit.STORE, f"nothing was restored: {error}", "Is there space for the data?") from None
    if as_json:
        content = {"directory": str(destination.absolute())} | msgspec.to_builtins(restored)
        print(json.dumps(content | {"check": msgspec.to_builtins(report)}))
    else:
        print(_restored(restored, report, destination))
    return Exit.WRONG if restored.damaged or report.problems_count else Exit.DONE


def _shown_place(place: str) -> str:
    """Without a password."""
    return "the cluster" if _CLUSTER.match(place) else place


def _restored(restored: Restored, report: Report, destination: Path) -> str:
    lines = [f"restored the state of {instant(restored.clock)}"]
    if restored.lsn:
        begun = f"the snapshot of record {restored.snapshot}" if restored.snapshot else "nothing"
        lines[0] += f", record {restored.lsn}: {restored.records} records after {begun}"
        goes_on = restored.goes_on
        lines.append("the source ends there" if goes_on is None else f"the next record is of {instant(goes_on)}")
    lines += [f"damaged: {each}" for each in restored.damaged]
    lines.append(f"{report.messages} messages and {report.leases} leases in {report.queues} queues")
    lines += [f"not in order: {each.kind}: {each.text}" for each in report.problems]
    lines.append("receipt handles from before are void, and the history has a new epoch")
    lines.append(f"serve it with: veilmq serve --data {destination}")
    return "\n".join(lines)
