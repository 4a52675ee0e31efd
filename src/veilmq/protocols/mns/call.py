"""The types of the operations: a verified request, the call it becomes, and an operation's row.

Strategy: an operation turns an `Asked` into a `Call`, which goes to the engine and returns with its outcomes.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from veilmq.model.commands import AnyCommand
from veilmq.model.errors import VeilError
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome
from veilmq.model.settings.access import AccessKey
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import TopicKey
from veilmq.protocols import Request, Response
from veilmq.protocols.mns.addresses import Endpoint, Place, queue_of, subscription_name, topic_of, url_start
from veilmq.protocols.mns.errors import fault_of
from veilmq.protocols.mns.signature import Caller


class Asked(msgspec.Struct, gc=False):
    """A request and its parsed parts."""

    request: Request
    caller: Caller
    place: Place
    parameters: dict[str, str]
    """By lower-case name."""
    arrived: Instant
    endpoint: Endpoint

    def queue(self) -> QueueKey:
        """The queue that the path names. Raises Refusal."""
        return queue_of(self.caller.key, self.place.name)

    def topic(self) -> TopicKey:
        """The topic that the path names. Raises Refusal."""
        return topic_of(self.caller.key, self.place.name)

    def subscription(self) -> str:
        """The subscription that the path names. Raises Refusal."""
        return subscription_name(self.place.subscription)

    def header(self, name: bytes) -> str:
        """A header as text; empty if it is missing."""
        return self.request.headers.get(name, b"").decode("utf-8", "replace")

    def url(self, path: str) -> str:
        """A URL of this server for this client."""
        return f"{url_start(self.endpoint, self.request)}{path}"


Plan = tuple[tuple[AnyCommand, ...], Any]
"""The commands of an operation, and a memo for its response. Without commands it is answered at once."""


class Operation(msgspec.Struct, frozen=True):
    """One row of the table of operations."""

    name: str
    plan: "Callable[[Asked], Plan]"
    answer: "Callable[[Call, Sequence[Outcome]], Response]"
    """Raises Refusal if the operation failed."""


class Call(msgspec.Struct, gc=False):
    """A decoded request: its commands for the engine, and what its response needs."""

    verified: ClassVar[bool] = True

    key: AccessKey
    commands: tuple[AnyCommand, ...]
    row: Operation
    asked: Asked
    memo: Any = None


def sole(call: Call, outcomes: Sequence[Outcome]) -> Any:
    """The one outcome of a call that has one command. Raises Refusal if it is an error."""
    outcome = outcomes[0]
    if isinstance(outcome, VeilError):
        raise fault_of(outcome, call.commands[0])
    return outcome


def answer_nothing(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """204, if every command succeeded."""
    for command, outcome in zip(call.commands, outcomes, strict=True):
        if isinstance(outcome, VeilError):
            raise fault_of(outcome, command)
    return Response(204, None, b"")


def answer_delete(missing: type[VeilError]) -> Callable[[Call, Sequence[Outcome]], Response]:
    """The answer to a deletion: 204, also if `missing` says that there was none. No SDK handles an error here."""

    def answer(call: Call, outcomes: Sequence[Outcome]) -> Response:
        return Response(204, None, b"") if isinstance(outcomes[0], missing) else answer_nothing(call, outcomes)

    return answer
