"""The types of the operations: a verified request, the call it becomes, and an operation's row.

Strategy: an operation turns an `Asked` into a `Call`, which goes to the engine and returns with its outcomes. An
`Operation` is a row with two functions, from input to commands and from outcomes to result; neither knows the wire
form.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from veilmq.model.access import AccessKey
from veilmq.model.commands import AnyCommand
from veilmq.model.errors import VeilError
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome
from veilmq.model.queue import QueueKey
from veilmq.protocols.http import Request
from veilmq.protocols.sqs import results
from veilmq.protocols.sqs.addresses import Endpoint, resolve
from veilmq.protocols.sqs.errors import Refusal, fault_of, missing
from veilmq.protocols.sqs.signature import Caller


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
        if not url:
            raise missing("QueueUrl")
        return self.caller.queues.get(url) or self._resolved(url)

    def _resolved(self, url: str) -> QueueKey:
        queue = resolve(self.caller, url, self.endpoint)
        if self.caller.verified and queue.account != self.caller.key.account:
            self.foreign = queue
        return queue


class Entry(msgspec.Struct, gc=False):
    """One entry of a wire batch: refused here, or the command of that number."""

    id: str
    command: int
    refusal: Refusal | None = None


Plan = tuple[tuple[AnyCommand, ...], Any]
"""The commands of an operation, and a memo for its response."""


class Operation(msgspec.Struct, frozen=True):
    """One row of the table of operations."""

    name: str
    input_type: type[msgspec.Struct]
    plan: "Callable[[Asked, Any], Plan]"
    answer: "Callable[[Call, Sequence[Outcome]], results.Result | Call]"
    """The result; or a further call, if this one only read what the operation depends on. Raises Refusal if the whole
    call failed."""
    before: "Callable[[Call], Call] | None" = None
    """Returns the call, or a call that first reads what it depends on."""


class Call(msgspec.Struct, gc=False):
    """A decoded request: its commands for the engine, and what its response needs."""

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
