"""`veilmq backup` and `veilmq check`: through the server that holds a data directory, or directly on it.

Strategy: a server that holds the directory, or that `--admin` names, does the work on a thread of its own. Of a
directory that nobody holds, one committed state is read through a read-only connection.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from veilmq.cli.access import AS_SERVER
from veilmq.cli.access.http import HttpAccess
from veilmq.cli.failures import Exit, Failure, advice_on, check_directory, foreign
from veilmq.cli.output import bar
from veilmq.store.directory import DATABASE, REDO
from veilmq.store.errors import DatabaseFailed, DestinationTaken, NotOurs, Report, SchemaRefused, SqliteTooOld
from veilmq.store.sqlite.tools.backup import backup_directory, receive_directory
from veilmq.store.sqlite.tools.integrity import check as check_database

_HEAD: Final = b"SQLite format 3\0"
"""The file's first bytes (SQLite Database File Format, 1.3)."""
REPAIR: Final = "veilmq check --repair NEW_DIRECTORY --backup NEWEST_BACKUP"
_RESTORE: Final = f"See what can be had: {REPAIR}"
_FREE: Final = f"Free space if the disk is full; else see what can be had: {REPAIR}"


def backup(data: Path, destination: Path, *, as_json: bool, access: HttpAccess | None = None) -> None:
    """Make a copy, and print how to serve it. Raises Failure.

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
        print(f"copied {size_bytes} bytes to {destination}; serve it with: veilmq serve --data {destination}")


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
    lines += [f"{problem.kind}: {problem.text}" for problem in report.problems]
    more = report.problems_count - len(report.problems)
    if more:
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
