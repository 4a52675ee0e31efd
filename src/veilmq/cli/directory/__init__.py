"""`veilmq backup` and `veilmq check`: through the server that holds a data directory, or directly on it.

Strategy: a server that holds the directory, or that `--admin` names, does the work on a thread of its own. Of a
directory that nobody holds, one committed state is read through a read-only connection. `check --repair` writes what
can be had of a damaged directory into a new one. A repair is a success (code 0) only if everything that was
acknowledged is in its place. If anything is missing, in doubt, in quarantine or exported, the new directory is there
all the same, and the code is 1.
"""

import json
import os
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import msgspec

from veilmq.cli.access import AS_SERVER
from veilmq.cli.access.http import HttpAccess
from veilmq.cli.failures import (
    MEMBER_FILE,
    Exit,
    Failure,
    advice_on,
    check_directory,
    foreign,
    may,
    refuse_remains,
    repair_advice,
    repair_command,
    serve_command,
    taken,
)
from veilmq.cli.output import bar
from veilmq.model.instant import SECOND_US
from veilmq.model.wording import counted
from veilmq.store import Options
from veilmq.store.directory import (
    DATABASE,
    REDO,
    DatabaseFailed,
    DestinationTaken,
    DirectoryHeld,
    NotOurs,
    Report,
    SchemaRefused,
    SqliteTooOld,
)
from veilmq.store.sqlite.disk import DAMAGE, MISMATCH, SqliteError, open_reader
from veilmq.store.sqlite.tools import check as check_database
from veilmq.store.sqlite.tools.backup import DAMAGED, NO_SPACE, backup_directory, receive_directory

if TYPE_CHECKING:
    from veilmq.store.sqlite.repair import MissingMessage, QueueContent, Repair

_HEAD: Final = b"SQLite format 3\0"
"""The file's first bytes (SQLite Database File Format, 1.3)."""
_UNREAD: Final = Report().books
"""Of a database whose tables could not be read to the end."""
_ROOM: Final = (
    "It makes the copy in its data directory first: free as much space there as veilmq.db has, and as sends need. "
    "Nothing was changed."
)


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
    except Failure as failure:
        if failure.answered is None or failure.answered[1] != "DiskLow":
            raise
        raise Failure(failure.code, f"the server has no room for the copy: {failure}", _ROOM) from None
    except DestinationTaken as error:
        raise taken(error) from None
    except NotOurs as error:
        raise foreign(data, error) from None
    except (SchemaRefused, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except (OSError, DatabaseFailed) as error:
        advice = access_advice(data) if access is None else ""
        if isinstance(error, PermissionError):
            asked = "Name a directory that belongs to this user, or one that is not there yet."
        elif isinstance(error, DatabaseFailed) and str(error) != NO_SPACE:
            is_damaged = str(error).startswith((MISMATCH, DAMAGED))
            asked = repair_advice(data if access is None else None, is_damaged=is_damaged)
        else:
            asked = "Is there space at the destination, and where the data is?"
        raise Failure(Exit.STORE, f"the copy failed and was removed: {error}", advice or asked) from None
    _report_copied(destination, size_bytes, as_json=as_json)


def _report_copied(destination: Path, size_bytes: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"destination": str(destination.absolute()), "bytes": size_bytes}))
    else:
        print(f"copied {size_bytes} bytes to {destination}; to go back, serve a copy of it:")
        print(f"veilmq restore NEW_DIRECTORY --from {quote(str(destination))}")


def _checked_through(access: HttpAccess) -> Report:
    """What the server's own check found. Raises Failure."""
    last: dict[str, Any] = {}
    with bar() as advance:
        for last in access.steps("/api/v1/check"):
            if "stage" in last:
                advance(last["stage"], last["done"], last["total"])
    if "result" not in last:
        raise Failure(Exit.STORE, last.get("message", "the server ended before the work was done"))
    try:
        return msgspec.convert(last["result"], Report)
    except msgspec.ValidationError as error:
        raise Failure(Exit.ADDRESS, f"the server's report is none of this release: {error}") from None


def check(data: Path, *, as_json: bool, access: HttpAccess | None = None) -> Exit:
    """Check everything and print a report. Raises Failure if there is nothing to check."""
    if access is not None:
        return _report_checked(_checked_through(access), None, as_json=as_json)
    database = _database(data)
    try:
        with bar() as advance:
            report = check_database(database, advance)
    except NotOurs as error:
        raise foreign(data, error) from None
    except (SchemaRefused, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except (OSError, DatabaseFailed) as error:
        advice = access_advice(data) or repair_advice(data, is_damaged=False)
        raise Failure(Exit.DIRECTORY, f"{database} cannot be opened: {error}", advice) from None
    return _report_checked(report, data, as_json=as_json)


def access_advice(data: Path) -> str:
    """Advice if the files cannot be read or the directory cannot be written, which SQLite needs even to read a
    write-ahead log."""
    for each in (data / DATABASE, data / REDO):
        if each.exists() and not may(each, os.R_OK):
            return f"{each} may not be read by this user: chown it (or chmod u+rw), or be its owner."
    if may(data, os.W_OK):
        return ""
    return f"{data} cannot be written by this user, or is read-only: copy all of it elsewhere, and look there."


def _report_checked(report: Report, data: Path | None, *, as_json: bool) -> Exit:
    print(msgspec.json.encode(report).decode() if as_json else _shown(report, data))
    return Exit.WRONG if report.problems_count else Exit.DONE


def _shown(report: Report, data: Path | None) -> str:
    """data: the directory, if it is here."""
    found = (
        f"{counted(report.queues, 'queue')}, {counted(report.messages, 'message')} ({report.body_bytes} bytes), "
        f"{counted(report.leases, 'lease')}, {counted(report.events, 'event')} from offset "
        f"{report.history_first_offset} on"
    )
    lines = [
        found if report.books != _UNREAD or report.queues else "what is in it could not be counted",
        f"sent = live + deleted + expired + purged + set apart + moved: {report.books}",
    ]
    if not report.page_checksums:
        lines.append(
            "its pages have no checksums, so some flips go unnoticed: only copies that `veilmq backup` makes "
            "after the first start of this release have them"
        )
    lines += [f"{problem.kind}: {problem.text}" for problem in report.problems]
    if more := report.problems_count - len(report.problems):
        lines.append(f"and {more} more")
    lines.append("everything is in order" if not report.problems_count else counted(report.problems_count, "problem"))
    if any(problem.kind != "quarantine" for problem in report.problems):
        if data is not None and (data / MEMBER_FILE).exists():
            lines.append(
                "this is a copy of a cluster's data: start that server with an empty directory, which is filled again; "
                "repair only if the whole cluster is lost"
            )
        lines.append(f"what can be had, in a new directory: {repair_command(data)}")
    return "\n".join(lines)


def _database(data: Path) -> Path:
    database = data / DATABASE
    try:
        refuse_remains(data)
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
    if head != _HEAD and not _is_readable(database):
        text = f"{database} is not a database, or its first page is damaged"
        raise Failure(Exit.DIRECTORY, text, repair_advice(data))
    return database


def _is_readable(database: Path) -> bool:
    """Whether SQLite finds no damage at its beginning: the first page may be in the WAL."""
    try:
        with closing(open_reader(database, Options())) as connection:
            connection.pragma("application_id")
    except SqliteError as error:
        return not isinstance(error, DAMAGE)
    return True


def _has_one(directory: Path, names: Iterable[str]) -> bool:
    """Whether one of these files is there. Raises Failure."""
    try:
        return any((directory / name).is_file() for name in names)
    except PermissionError as error:
        raise Failure(Exit.DIRECTORY, f"{directory}: {error.strerror}", advice_on(directory, AS_SERVER)) from None


_PARTS: Final = (DATABASE, f"{DATABASE}-wal", REDO)


def write_new(data: Path, destination: Path, backup: Path | None, *, as_json: bool) -> Exit:
    """Write the new directory and print the report. Raises Failure."""
    from veilmq.store.sqlite.repair.repair import repair as repair_directory

    check_directory(destination, "--repair")
    for directory, option, names in ((data, "--data", _PARTS), (backup, "--backup", _PARTS[:1])):
        if directory is not None and not _has_one(directory, names):
            raise Failure(Exit.DIRECTORY, f"{directory} has no {names[0]}", f"Name a data directory with {option}.")
        if directory is not None and directory.resolve() in destination.resolve().parents:
            text = f"{destination} is inside {directory}, which a repair does not change"
            raise Failure(Exit.USAGE, text, "Name a directory elsewhere, such as one beside it.")
    try:
        with bar() as advance:
            report = repair_directory(data, destination, backup, advance)
    except DestinationTaken as error:
        raise taken(error) from None
    except (DirectoryHeld, NotOurs, SchemaRefused, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except (OSError, DatabaseFailed) as error:
        asked = "Is there space for two copies at the new directory, and may this user read the old one?"
        raise Failure(Exit.STORE, f"the repair failed, and what it wrote was removed: {error}", asked) from None
    print(msgspec.json.encode(report).decode() if as_json else _shown_repair(report, data))
    return Exit.DONE if report.is_whole else Exit.WRONG


def _shown_repair(report: "Repair", data: Path) -> str:
    """The report for people."""
    lines = [f"found: {each}" for each in report.found]
    lines += [_shown_queue(each) for each in report.queues]
    total = sum(each.visible + each.delayed + each.in_flight for each in report.queues)
    lines.append(f"{counted(total, 'message')} in {counted(len(report.queues), 'queue')} are in {report.directory}")
    lines += [_shown_missing(each) for each in report.missing]
    if more := report.missing_count - len(report.missing):
        lines.append(f"and {more} more are missing for certain")
    if report.unsure_count:
        unsure = counted(report.unsure_count, "message")
        lines.append(f"perhaps missing: {unsure}, unless removed by events that are missing")
    if report.events_missing:
        lines.append(f"perhaps missing: what the last {counted(report.events_missing, 'event')} did")
    elif report.may_miss:
        lines.append("perhaps missing: messages of which nothing is known")
    lines += [f"perhaps missing: rows of the table {each}" for each in report.tables_in_doubt]
    if report.again_count:
        lines.append(f"{counted(report.again_count, 'message')} may be delivered again: a delete may be lost")
    if report.earlier_count:
        lines.append(f"{counted(report.earlier_count, 'message')} may have an earlier body: an update may be lost")
    if report.exported:
        lines.append(f"{counted(report.exported, 'row')} without a place in the new directory: {report.export}")
    lines += [f"the new directory is not in order: {each}" for each in report.problems]
    is_short = report.missing_count or report.events_missing or report.exported or report.problems
    if report.is_whole:
        lines.append("everything that was acknowledged is there")
    elif is_short or any(each.quarantined for each in report.queues):
        lines.append("not everything is there: see above")
    else:
        lines.append("whether everything is there is not certain: see above")
    return "\n".join([*lines, f"{data} is as it was; serve the new one with: {serve_command(Path(report.directory))}"])


def _shown_queue(queue: "QueueContent") -> str:
    states = ("visible", "delayed", "in flight", "in quarantine", "missing for certain")
    counts = (queue.visible, queue.delayed, queue.in_flight, queue.quarantined, queue.missing)
    content = ", ".join(f"{count} {state}" for count, state in zip(counts, states, strict=True) if count)
    return f"queue {queue.queue}: {content or 'empty'}"


def _shown_missing(message: "MissingMessage") -> str:
    sent = datetime.fromtimestamp(message.sent / SECOND_US, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"missing for certain: {message.id}, sent {sent} to {message.queue}"
