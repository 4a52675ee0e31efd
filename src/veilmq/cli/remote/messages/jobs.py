"""`veilmq jobs`: bulk acts on all messages of a queue that a filter matches, carried out by the server.

Strategy: `--wait` asks for the job until it has ended; the server goes on if the command is interrupted.
"""

import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from veilmq.cli.failures import Exit, Failure, Unreachable
from veilmq.cli.options import (
    Everything,
    OfGroup,
    OfType,
    Older,
    Prefix,
    Queue,
    Receives,
    Text,
    Yes,
    confirm,
    filter_of,
    queue_names,
)
from veilmq.cli.output import print_json
from veilmq.cli.remote.tables import failure_advice, failure_text, show_list
from veilmq.model.wording import counted

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked


class Act(StrEnum):
    """See `veilmq.model.moves.Act`, which costs an import."""

    REDRIVE = "redrive"
    MOVE = "move"
    DELETE = "delete"
    PURGE = "purge"
    RELEASE = "release"


_ASK_S: Final = 0.5
_UNDER_WAY: Final = ("running", "cancelling")
_DONE: Final = {
    Act.REDRIVE: "moved",
    Act.MOVE: "moved",
    Act.DELETE: "deleted",
    Act.PURGE: "deleted",
    Act.RELEASE: "released",
}
Job = Annotated[str, typer.Argument(metavar="JOB_ID", help="Its id.", show_default=False)]
UntilDone = Annotated[bool, typer.Option("--wait", help="Show its progress and wait for its end.")]


def start_job(
    asked: "Asked",
    act: Annotated[Act, typer.Argument(metavar="ACT", help="redrive, move, delete, purge or release.")],
    queue: Queue,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="QUEUE", help="Where messages are moved.", autocompletion=queue_names),
    ] = None,
    message_type: OfType = None,
    group: OfGroup = None,
    older: Older = None,
    receives: Receives = 0,
    text: Text = None,
    rate: Annotated[int | None, typer.Option("--rate", metavar="N", help="Messages a second, up to 10000.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, and count what would change.")] = False,
    wait: UntilDone = False,
    yes: Yes = False,
) -> None:
    """Begin to redrive, move, delete, purge or release all messages of a queue that match."""
    wanted = filter_of(message_type, group, older, receives, text)
    if act in (Act.DELETE, Act.PURGE) and not dry_run:
        which = "the messages of" if wanted else "ALL messages of"
        more = " that match: how many, says --dry-run" if wanted else ""
        confirm(f"Delete {which} {queue}{more}?", yes)
    given: dict[str, Any] = {"act": act.value, "destination": to, "rate": rate, "filter": wanted, "dry_run": dry_run}
    members = {name: value for name, value in given.items() if value is not None}
    job = asked.access.start_job(asked.queue(queue), members, asked.next_id())
    _end(asked, job, wait=wait or dry_run)


def list_jobs(asked: "Asked", prefix: Prefix = "", everything: Everything = False) -> None:
    """List jobs, newest first, with the move tasks of SQS."""
    show_list(asked, lambda account, region: asked.access.jobs(account, region, prefix), _table, "jobs", everything)


def show_job(asked: "Asked", job: Job, wait: UntilDone = False) -> None:
    """Show how far a job is."""
    _end(asked, asked.access.job(job), wait=wait)


def cancel_job(asked: "Asked", job: Job) -> None:
    """End a job; what it did stays done."""
    _report_job(asked, asked.access.cancel_job(job, asked.next_id()))


def _end(asked: "Asked", job: Mapping[str, Any], *, wait: bool) -> None:
    """Show the job, when it has ended if that is wanted. Raises Failure if it failed, wholly or in part."""
    shows = wait and sys.stderr.isatty()
    try:
        while wait and job["status"] in _UNDER_WAY:
            if shows:
                print(f"\r{_progress(job)}", end="", file=sys.stderr, flush=True)
            time.sleep(_ASK_S)
            job = asked.access.job(job["id"])
    except (KeyboardInterrupt, Unreachable):
        one = job["id"]
        notice = f"job {one} has not ended: a server goes on with it, or `veilmq jobs show {one} --wait` does"
        print("\r\x1b[K" * shows + asked.advised(notice), file=sys.stderr)
        raise
    if shows:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    _report_job(asked, job)
    if job["failed"] or job["status"] == "failed":
        which = f"{counted(job['failed'], 'message')} could not be {_done(job)}"
        raise Failure(Exit.WRONG, f"{which}: {failure_text(job)}", failure_advice(job))


def _progress(job: Mapping[str, Any]) -> str:
    """How far it is, in words."""
    if job["dry_run"]:
        return f"{job['act']}: looked at {job['seen']} of {job['total']}, {job['matched']} would be {_done(job)}"
    return f"{job['act']}: looked at {job['seen']} of {job['total']}, {job['done']} {_done(job)}"


def _done(job: Mapping[str, Any]) -> str:
    return _DONE[Act(job["act"])]


def _report_job(asked: "Asked", job: Mapping[str, Any]) -> None:
    if asked.as_json:
        print_json(job)
    else:
        print(f"job {job['id']} is {job['status']}: {_progress(job)}")


def _table(jobs: list[Mapping[str, Any]]) -> None:
    from veilmq.cli.output import instant, table

    rows = [
        [
            job["id"],
            job["act"] + (" (dry run)" if job["dry_run"] else ""),
            job["queue"]["name"],
            job["status"] + (f": {failure_text(job)}" if job["failure"] else ""),
            instant(job["started"]),
            f"{job['seen']} of {job['total']}",
            job["matched"],
            job["done"],
            job["failed"],
        ]
        for job in jobs
    ]
    table(["job", "act", "queue", "status", "begun (UTC)", "looked at", "matched", "done", "failed"], rows)
