"""Jobs at the admin port: from a request's members to commands, and from a job to JSON.

Strategy: pure functions, for the routes and for the command line on a directory. The message move tasks of SQS are
shown as jobs that redrive, so that one list has everything that moves messages.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from veilmq.admin.api import Refused, inputs
from veilmq.admin.api.operations import neighbour
from veilmq.admin.api.views import shown_key
from veilmq.admin.history import MOVES_MAX
from veilmq.model.commands import CancelJob, CancelMove, Origin, StartJob
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.model.messages import id_text
from veilmq.model.moves import Act, JobInfo, MoveInfo
from veilmq.model.outcomes import JobCancelled, JobStarted, MoveCancelled, Outcome
from veilmq.model.settings.access import Action
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Reader

ACTIONS: Final = {
    Act.REDRIVE: Action.MOVE,
    Act.MOVE: Action.MOVE,
    Act.DELETE: Action.PURGE,
    Act.PURGE: Action.PURGE,
    Act.RELEASE: Action.PURGE,
}
"""What a key must be granted on the queue. A destination needs `send`, too, and a filter by text `peek`."""

AnyJob = JobInfo | MoveInfo


def starting(origin: Origin, queue: QueueKey, wanted: inputs.JobInput) -> StartJob:
    """The command. Raises ParameterInvalid."""
    destination = None if wanted.destination is None else neighbour("destination", queue, wanted.destination)
    return StartJob(
        queue=queue,
        origin=origin,
        act=wanted.act,
        destination=destination,
        filter=wanted.filter.filter,
        rate_max=wanted.rate,
        dry_run=wanted.dry_run,
    )


def cancelling(origin: Origin, job: AnyJob) -> CancelJob | CancelMove:
    """The command that ends it."""
    if isinstance(job, MoveInfo):
        return CancelMove(queue=job.source, origin=origin, task=job.id)
    return CancelJob(origin=origin, job=job.id)


def missing(job: str) -> Refused:
    """The answer for an id that no job has."""
    return Refused(404, "job_missing", f"no job {job}: it has been forgotten, or was its queue's, which is gone")


def shown_outcome(outcomes: Sequence[Outcome], job: str = "") -> dict[str, Any]:
    """The job that was started or cancelled. Raises VeilError and Refused."""
    (outcome,) = outcomes
    if isinstance(outcome, VeilError):
        raise outcome
    if isinstance(outcome, JobStarted):
        return shown_job(outcome.info)
    assert isinstance(outcome, JobCancelled | MoveCancelled)
    if outcome.info is None:
        raise missing(job)
    if not outcome.cancelled:
        reason = f"only a running job can be cancelled: this one is {outcome.info.status}"
        raise ParameterInvalid(parameter="job", reason=reason)
    return shown_job(outcome.info)


def shown_job(job: AnyJob) -> dict[str, Any]:
    """A job; of a move task what is known."""
    shown = {
        "id": id_text(job.id),
        "act": Act.REDRIVE,
        "queue": shown_key(job.source),
        "destination": None if job.destination is None else shown_key(job.destination),
        "filter": {},
        "rate": job.rate_max,
        "dry_run": False,
        "status": job.status,
        "failure": job.failure,
        "principal": None,
        "started": job.started,
        "ended": None,
    }
    if isinstance(job, MoveInfo):
        counts = dict.fromkeys(("seen", "matched", "done"), job.moved)
        return shown | {"total": job.to_move} | counts | {"failed": int(job.failure is not None)}
    given = {name: value for name, value in msgspec.structs.asdict(job.filter).items() if value}
    own = {"act": job.act, "filter": given, "dry_run": job.dry_run, "principal": job.principal, "ended": job.ended}
    counts = {"total": job.total, "seen": job.seen, "matched": job.matched, "done": job.done, "failed": job.failed}
    return shown | own | counts


def all_jobs(reader: Reader) -> list[AnyJob]:
    """All jobs and move tasks that are remembered, newest first, those of one instant by id. Blocks."""
    with reader.look() as view:
        found: list[AnyJob] = [*view.jobs(), *view.moves(MOVES_MAX)]
    return sorted(found, key=lambda job: (job.started, job.id), reverse=True)


def find_job(reader: Reader, job: bytes) -> AnyJob | None:
    """The job or move task of that id. Blocks."""
    with reader.look() as view:
        return view.job(job)


def place_of(job: AnyJob) -> str:
    """What names the page after the one that ends with it."""
    return f"{job.started}-{job.id.hex()}"


def is_behind(job: AnyJob, after: str) -> bool:
    """Whether it comes after the page that ended with `after`."""
    started, _, number = after.partition("-")
    return not after or (job.started, job.id) < (int(started), bytes.fromhex(number))
