"""The types of the operations: a verified request, the call it becomes, an operation's row, and the entries of a batch.

Strategy: an operation turns an `Asked` into a `Call`, which goes to the engine and returns with its outcomes. An
`Operation` is a row with two functions, from input to commands and from outcomes to result; neither knows the wire
form.

The entries of the three batch operations are checked and answered one by one: an error of the batch refuses the
request, an error of an entry fails only that entry. Source: "Error" sections of the batch operations in the SQS API
Reference.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, ClassVar, Final, Protocol, TypeVar

import msgspec

from veilmq.model.commands import AnyCommand
from veilmq.model.errors import QueueMissing, VeilError
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome
from veilmq.model.settings.access import AccessKey
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols import Request
from veilmq.protocols.sqs import errors, limits
from veilmq.protocols.sqs.addresses import Endpoint, queue_of_url
from veilmq.protocols.sqs.auth import Caller
from veilmq.protocols.sqs.errors import Refusal, fault_of, missing
from veilmq.protocols.sqs.forms import BatchResultErrorEntry, SqsResult
from veilmq.protocols.sqs.veil import VeilResult

_URL_CHARACTERS_CACHED_MAX: Final = 512


class Form(IntEnum):
    """The wire form of a request and its response."""

    JSON = 1
    """JSON 1.0, both ways."""
    QUERY = 2
    """A form or query string; the response is XML."""
    QUERY_JSON = 3
    """The same, but the response is JSON because `Accept` asks for it."""


class Asked(msgspec.Struct, gc=False):
    """A request with a verified sender."""

    request: Request
    caller: Caller
    arrived: Instant
    endpoint: Endpoint
    foreign: QueueKey | None = None
    """The queue of another account that the request names."""
    refused_batch: QueueKey | None = None
    """The queue of a batch whose entries were all refused: it has no command, but is authorized like any other."""

    def queue(self, url: str | None) -> QueueKey:
        """The queue that a QueueUrl names. Raises Refusal."""
        if not url:  # in JSON; the Query form has the URL of the request (yavosh/pail, sqs-edge-cases)
            raise Refusal(errors.QUEUE_DOES_NOT_EXIST, errors.NO_QUEUE)
        return self.caller.queues.get(url) or self._resolved(url)

    def _resolved(self, url: str) -> QueueKey:
        caller = self.caller
        queue = queue_of_url(url, self.endpoint, caller.key.account, caller.region)
        if queue is None:
            raise Refusal(errors.QUEUE_DOES_NOT_EXIST, errors.NO_QUEUE)
        # A queue of another account is not cached: each request that names one is checked against its policy.
        if caller.verified and queue.account != caller.key.account:
            self.foreign = queue
        elif len(url) <= _URL_CHARACTERS_CACHED_MAX:
            caller.queues.keep(url, queue)
        return queue


class Entry(msgspec.Struct, gc=False):
    """One entry of a wire batch: refused here, or the command of that number."""

    id: str
    command: int
    refusal: Refusal | None = None


Result = SqsResult | VeilResult

Plan = tuple[tuple[AnyCommand, ...], Any]
"""The commands of an operation, and a memo for its response."""


class Operation(msgspec.Struct, frozen=True):
    """One row of the table of operations."""

    name: str
    input_type: type[msgspec.Struct]
    plan: "Callable[[Asked, Any], Plan]"
    answer: "Callable[[Call, Sequence[Outcome]], Result | Call]"
    """The result; or a further call, if this one only read what the operation depends on. Raises Refusal if the whole
    call failed."""
    before: "Callable[[Call], Call] | None" = None
    """Returns the call, or a call that first reads what it depends on."""
    json: "Callable[[Call, Sequence[Outcome]], bytes | None] | None" = None
    """The body in JSON 1.0 of what `answer` gives, in one step; None if `answer` has to look."""


class Call(msgspec.Struct, gc=False):
    """A decoded request: its commands for the engine, and what its response needs."""

    verified: ClassVar[bool] = True

    operation: str
    key: AccessKey
    commands: tuple[AnyCommand, ...]
    row: Operation
    form: Form
    memo: Any
    request: Request
    endpoint: Endpoint


def sole(call: Call, outcomes: Sequence[Outcome]) -> Any:
    """The one outcome of a call that has one command. Raises Refusal if it is an error."""
    outcome = outcomes[0]
    if isinstance(outcome, VeilError):
        raise fault_of(outcome, call.commands[0])
    return outcome


class _HasId(Protocol):
    @property
    def id(self) -> str | None: ...


HasId = TypeVar("HasId", bound=_HasId)


def plan_entries(
    asked: Asked, queue: QueueKey, given: list[HasId] | None, name: str, command_of: Callable[[HasId], AnyCommand]
) -> tuple[tuple[AnyCommand, ...], list[Entry]]:
    """Commands of the valid entries, and all entries. `name`: an entry's name in the Query form."""
    if not given:
        raise Refusal(errors.EMPTY_BATCH_REQUEST, f"There should be at least one {name} in the request.")
    if len(given) > limits.ENTRIES_MAX:
        text = f"Maximum number of entries per request are {limits.ENTRIES_MAX}. You have sent {len(given)}."
        raise Refusal(errors.TOO_MANY_ENTRIES, text)
    is_id, seen = limits.ENTRY_ID.match, set()
    commands: list[AnyCommand] = []
    entries = []
    for number, entry in enumerate(given, 1):
        identity = entry.id
        if identity is None:
            raise missing(f"{name}.{number}.Id")
        if not is_id(identity):
            text = "A batch entry id can only contain alphanumeric characters, hyphens and underscores."
            raise Refusal(errors.INVALID_BATCH_ENTRY_ID, f"{text} It can be at most 80 letters long.")
        if identity in seen:
            raise Refusal(errors.BATCH_ENTRY_IDS_NOT_DISTINCT, f"Id {identity} repeated.")
        seen.add(identity)
        try:
            command = command_of(entry)
        except Refusal as refusal:
            entries.append(Entry(identity, -1, refusal))
        else:
            entries.append(Entry(identity, len(commands)))
            commands.append(command)
    if not commands:
        asked.refused_batch = queue
    return tuple(commands), entries


def check_whole(call: Call, outcomes: Sequence[Outcome]) -> None:
    """Raises Refusal if the whole batch failed: its queue is missing, or the server did none of it."""
    refusals = []
    for command, outcome in zip(call.commands, outcomes, strict=True):
        if not isinstance(outcome, VeilError):
            return
        refusal = fault_of(outcome, command)
        if isinstance(outcome, QueueMissing):
            raise refusal
        refusals.append(refusal)
    if refusals and not any(refusal.fault.sender for refusal in refusals):
        raise refusals[0]


def failed(entry: Entry, refusal: Refusal) -> BatchResultErrorEntry:
    """The entry's result under Failed."""
    return BatchResultErrorEntry(entry.id, refusal.fault.sender, refusal.fault.code, refusal.message)
