"""Commands of operators: each changing call is one `Operate` with an id, so that a repeated call acts once; and jobs,
the commands that go on.

Strategy: a client gives the id in the header `Idempotency-Key`; without one the server makes it, for the history alone.
What was asked is compared by a digest of operation, target and members, so the same call through another door (the
command line on a directory) counts as the same. Source: draft-ietf-httpapi-idempotency-key-header.

Jobs are pure functions, for the routes and for the command line on a directory: from a request's members to commands,
and from a job to JSON. The message move tasks of SQS are shown as jobs that redrive, so that one list has everything
that moves messages.
"""

import re
import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET

from veilmq.admin.api import Refused, inputs
from veilmq.admin.api.inputs import ChangeInput
from veilmq.admin.api.operations import neighbour
from veilmq.admin.api.views import shown_key
from veilmq.admin.history import MOVES_MAX
from veilmq.model.commands import (
    COMMAND_ID_CHARACTERS_MAX,
    AnyCommand,
    CancelJob,
    CancelMove,
    Operate,
    Origin,
    StartJob,
)
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.model.messages import id_text
from veilmq.model.moves import Act, JobInfo, MoveInfo
from veilmq.model.outcomes import JobCancelled, JobStarted, MoveCancelled, Operated, Outcome
from veilmq.model.settings.access import Action
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Reader

HEADER: Final = "idempotency-key"
REPLAYED: Final = {"idempotent-replayed": "true"}
"""Of an answer that was given before."""
_ASKED_BYTES_MAX: Final = 2_000
_QUOTED: Final = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
"""A string of RFC 9651, 3.3.3."""
_ID: Final = re.compile(rf"[!-~]{{1,{COMMAND_ID_CHARACTERS_MAX}}}")
_JSON: Final = msgspec.json.Encoder(order="deterministic")
_UNRECORDED: Final = frozenset({"tags", "message"})
"""Members that may hold anything: the history records that they were there, but not their values."""
_COUNTED: Final = frozenset({"messages", "handles"})
ACTIONS: Final = {
    Act.REDRIVE: Action.MOVE,
    Act.MOVE: Action.MOVE,
    Act.DELETE: Action.PURGE,
    Act.PURGE: Action.PURGE,
    Act.RELEASE: Action.PURGE,
}
"""What a key must be granted on the queue. A destination needs `send`, too, and a filter by text `peek`."""

AnyJob = JobInfo | MoveInfo


class Asked(NamedTuple):
    """What an operator asks for."""

    act: str
    target: str
    """The path of what it is done to."""
    members: Any
    """The input, as a struct."""

    @property
    def digest(self) -> bytes:
        """Differs for every other call, but not by `if_version`: who repeats a change sees another version."""
        is_change = isinstance(self.members, ChangeInput)
        members = msgspec.structs.replace(self.members, if_version=UNSET) if is_change else self.members
        return sha256(_JSON.encode([self.act, self.target, members])).digest()

    def shown(self) -> dict[str, Any]:
        """The members for the history: no bodies, no handles, and no more than fits."""
        given = {name: value for name, value in msgspec.to_builtins(self.members).items() if value is not None}
        shown = {name: _recorded(self.act, name, value) for name, value in given.items()}
        if len(_JSON.encode(shown)) > _ASKED_BYTES_MAX:
            shown = dict.fromkeys(shown)
        return {"target": self.target} | shown


def _recorded(act: str, name: str, value: Any) -> Any:
    if name in _UNRECORDED:
        return None
    return len(value) if name in _COUNTED and act != "drop" else value


def command_id(given: Sequence[str]) -> str | None:
    """The id in the headers of that name: as a quoted string, as the draft says, or bare. Raises Refused (400)."""
    if not given:
        return None
    text = given[0].strip()
    quoted = _QUOTED.fullmatch(text)
    if len(given) > 1 or (quoted is None and '"' in text):
        raise _no_id()
    return checked_id(text if quoted is None else re.sub(r"\\(.)", r"\1", quoted[1]))


def checked_id(text: str) -> str:
    """The id of a command. Raises Refused (400)."""
    if not _ID.fullmatch(text):
        raise _no_id()
    return text


def _no_id() -> Refused:
    reason = f"Idempotency-Key: expected one id of 1 to {COMMAND_ID_CHARACTERS_MAX} visible ASCII characters"
    return Refused(400, "idempotency_key_invalid", reason)


def operate(origin: Origin, asked: Asked, commands: Sequence[AnyCommand], given: str | None) -> Operate:
    """The commands as one. given: the client's id."""
    return Operate(
        origin=origin,
        id=secrets.token_hex(16) if given is None else given,
        keeps=given is not None,
        digest=asked.digest,
        act=asked.act,
        asked=asked.shown(),
        commands=tuple(commands),
    )


class Done(NamedTuple):
    """What became of an operator's commands."""

    outcomes: list[Outcome]
    repeated: bool


def done(command: Operate, outcome: Outcome) -> Done:
    """The outcomes of the commands. Raises Refused (422) if the id is another command's, and an error of the store."""
    if isinstance(outcome, VeilError):
        raise outcome
    assert isinstance(outcome, Operated)
    if outcome.mismatch:
        words = "this Idempotency-Key was used for another call: a new call needs an id of its own"
        raise Refused(422, "idempotency_key_reused", words, id=command.id)
    return Done(outcome.outcomes, outcome.repeated)


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
    """The value of `after` for the page behind this job."""
    return f"{job.started}-{job.id.hex()}"


def is_behind(job: AnyJob, after: str) -> bool:
    """Whether it comes after the page that ended with `after`."""
    started, _, number = after.partition("-")
    return not after or (job.started, job.id) < (int(started), bytes.fromhex(number))
