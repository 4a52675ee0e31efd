"""`veilmq backup` and `veilmq check`: what works straight on a data directory, whether or not a server holds it.

Strategy: both read one committed state through a connection that can only read; SQLite allows that beside the server's.
"""

import json
from pathlib import Path

import msgspec

from veilmq.cli.exits import Exit, Failure
from veilmq.cli.progress import bar
from veilmq.store.sqlite.backup import DestinationTaken, SqliteFailed, backup_directory
from veilmq.store.sqlite.connections import SqliteTooOld
from veilmq.store.sqlite.directory import DATABASE
from veilmq.store.sqlite.integrity import Report
from veilmq.store.sqlite.integrity import check as check_database
from veilmq.store.sqlite.schema import NotOurs, SchemaNewer


def backup(data: Path, destination: Path, *, as_json: bool) -> None:
    """Copy, and say what to do with the copy. Raises Failure."""
    database = _database(data)
    try:
        with bar() as advance:
            size_bytes = backup_directory(database, destination, lambda done, total: advance("copying", done, total))
    except DestinationTaken as error:
        raise Failure(Exit.USAGE, str(error), "Name a directory that does not exist yet.") from None
    except (NotOurs, SchemaNewer, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except (OSError, SqliteFailed) as error:
        raise Failure(
            Exit.STORE, f"the copy failed and was removed: {error}", "Is there space at the destination?"
        ) from None
    if as_json:
        print(json.dumps({"destination": str(destination.absolute()), "bytes": size_bytes}))
    else:
        print(f"copied {size_bytes} bytes to {destination}; serve it with: veilmq serve --data {destination}")


def check(data: Path, *, as_json: bool) -> Exit:
    """Look at everything and print a report. Raises Failure if there is nothing to look at."""
    database = _database(data)
    try:
        with bar() as advance:
            report = check_database(database, advance)
    except (NotOurs, SchemaNewer, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except (OSError, SqliteFailed) as error:
        raise Failure(Exit.STORE, f"{database} cannot be read: {error}", "Restore a backup, or ask for help.") from None
    print(msgspec.json.encode(report).decode() if as_json else _shown(report))
    return Exit.WRONG if report.problems_count else Exit.DONE


def _shown(report: Report) -> str:
    lines = [
        f"{report.queues} queues, {report.messages} messages ({report.body_bytes} bytes), {report.leases} leases, "
        f"{report.events} events from offset {report.history_first_offset} on",
        f"sent = live + deleted + expired + purged + moved: {report.books}",
    ]
    lines += [f"{problem.kind}: {problem.text}" for problem in report.problems]
    more = report.problems_count - len(report.problems)
    if more:
        lines.append(f"and {more} more")
    lines.append("everything is in order" if not report.problems_count else f"{report.problems_count} problems")
    return "\n".join(lines)


def _database(data: Path) -> Path:
    database = data / DATABASE
    try:
        if database.stat().st_size == 0:
            raise Failure(Exit.DIRECTORY, f"{database} is empty")
    except OSError as error:
        raise Failure(
            Exit.DIRECTORY, f"{database}: {error.strerror}", "Name the data directory with --data DIR."
        ) from None
    return database
