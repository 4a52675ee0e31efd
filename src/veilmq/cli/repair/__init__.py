"""`veilmq check --repair`: what can be had of a damaged data directory, in a new one, and a plain report.

Strategy: a repair is a success (code 0) only if everything that was acknowledged is in its place. If anything is
missing, in doubt, set apart or exported, the new directory is there all the same, and the code is 1.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from veilmq.cli.failures import Exit, Failure, check_directory
from veilmq.cli.output import bar
from veilmq.model.instant import SECOND_US
from veilmq.store.directory import DATABASE, REDO, DirectoryHeld
from veilmq.store.errors import DatabaseFailed, DestinationTaken, NotOurs, SchemaRefused, SqliteTooOld
from veilmq.store.sqlite.repair.repair import repair as repair_directory
from veilmq.store.sqlite.repair.report import MissingMessage, QueueContent, Repair

_PARTS: Final = (DATABASE, f"{DATABASE}-wal", REDO)


def repair(data: Path, destination: Path, backup: Path | None, *, as_json: bool) -> Exit:
    """Write the new directory and print the report. Raises Failure."""
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
    print(msgspec.json.encode(report).decode() if as_json else shown(report, data))
    return Exit.DONE if report.is_whole else Exit.WRONG


def shown(report: Repair, data: Path) -> str:
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


def _shown_queue(queue: QueueContent) -> str:
    states = ("visible", "delayed", "in flight", "in quarantine", "missing for certain")
    counts = (queue.visible, queue.delayed, queue.in_flight, queue.quarantined, queue.missing)
    told = ", ".join(f"{count} {state}" for count, state in zip(counts, states, strict=True) if count)
    return f"queue {queue.queue}: {told or 'empty'}"


def _shown_missing(message: MissingMessage) -> str:
    sent = datetime.fromtimestamp(message.sent / SECOND_US, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"missing for certain: {message.id}, sent {sent} to {message.queue}"
