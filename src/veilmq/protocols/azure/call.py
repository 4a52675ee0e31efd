"""The types of the operations: a verified request, the call it becomes, and an operation's row.

Strategy: an operation turns an `Asked` into a `Call`, which goes to the engine and returns with its outcomes. A call
whose `question` is set only reads what authorization needs; the codec then makes the call that follows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from veilmq.model.access import AccessKey
from veilmq.model.commands import AnyCommand
from veilmq.model.errors import VeilError
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome
from veilmq.model.queue import QueueKey
from veilmq.protocols.azure.addresses import Endpoint, Place, check_queue_name
from veilmq.protocols.azure.caller import Caller
from veilmq.protocols.azure.cors import NOTHING, Told
from veilmq.protocols.azure.errors import fault_of
from veilmq.protocols.http import Request, Response

Headers = tuple[tuple[bytes, bytes], ...]

SERVICE_QUEUE = "azure/service"
"""The hidden queue whose labels are the account's service properties; no protocol allows a slash in names."""


class Asked(msgspec.Struct, gc=False):
    """A request and its parsed parts. `caller` is set once it is verified."""

    request: Request
    place: Place
    parameters: dict[str, str]
    version: str
    wall: Instant
    arrived: Instant
    endpoint: Endpoint
    caller: Caller | None = None
    cors: Told = NOTHING
    """Headers that let a page's browser show the response."""

    @property
    def sender(self) -> Caller:
        """The verified caller."""
        assert self.caller is not None
        return self.caller

    def queue(self) -> QueueKey:
        """The queue that the path names. Raises Refusal: InvalidResourceName, OutOfRangeInput."""
        key = self.sender.account.key
        return QueueKey(key.account, key.home_region, check_queue_name(self.place.queue))


def service_queue(key: AccessKey) -> QueueKey:
    """The queue that holds the service properties of a key's account."""
    return QueueKey(key.account, key.home_region, SERVICE_QUEUE)


Plan = tuple[tuple[AnyCommand, ...], Any]
"""The commands of an operation, and a memo for its response. Without commands it is answered at once."""


class Operation(msgspec.Struct, frozen=True):
    """One row of the table of operations."""

    name: str
    plan: "Callable[[Asked], Plan]"
    answer: "Callable[[Call, Sequence[Outcome]], Response]"
    """Raises Refusal if the operation failed."""
    account_types: str = ""
    """`srt` of an account SAS: one of these letters."""
    account_permissions: str = ""
    """`sp` of an account SAS: one of these letters; empty: none is sufficient."""
    queue_permissions: str = ""
    """`sp` of a queue SAS or user delegation SAS, in the same way."""
    writes: bool = True
    """Not on the secondary endpoint."""
    since: str = ""
    """The first version with the operation."""
    bearer_since: str = ""
    """The first version that accepts a bearer token."""
    only_bearer: bool = False


class Call(msgspec.Struct, gc=False):
    """A decoded request: its commands for the engine, and what its response needs."""

    key: AccessKey
    commands: tuple[AnyCommand, ...]
    row: Operation
    asked: Asked
    memo: Any = None
    question: bool = False


def sole(call: Call, outcomes: Sequence[Outcome]) -> Any:
    """The one outcome of a call that has one command. Raises Refusal if it is an error."""
    outcome = outcomes[0]
    if isinstance(outcome, VeilError):
        raise fault_of(outcome, call.commands[0])
    return outcome
