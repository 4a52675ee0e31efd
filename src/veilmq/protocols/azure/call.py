"""What the operations are written against: a request whose sender is certain, the call it becomes, an operation's row.

Strategy: `Asked` goes in, a `Call` comes out and goes to the engine, and comes back with its outcomes. A call whose
`question` is set only asks for what the request is judged by; the codec answers it with the call that follows.
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
"""The hidden queue whose labels are the account's service properties: no protocol's names have a slash."""


class Asked(msgspec.Struct, gc=False):
    """A request, and all that is known of it. `caller` is set as soon as it is certain."""

    request: Request
    place: Place
    parameters: dict[str, str]
    version: str
    wall: Instant
    arrived: Instant
    endpoint: Endpoint
    caller: Caller | None = None
    cors: Told = NOTHING
    """What lets the page's browser show it the answer."""

    @property
    def sender(self) -> Caller:
        """The caller, once it is certain."""
        assert self.caller is not None
        return self.caller

    def queue(self) -> QueueKey:
        """The queue that the path names. Raises Refusal: InvalidResourceName, OutOfRangeInput."""
        key = self.sender.account.key
        return QueueKey(key.account, key.home_region, check_queue_name(self.place.queue))


def service_queue(key: AccessKey) -> QueueKey:
    """Where the service properties of a key's account are kept."""
    return QueueKey(key.account, key.home_region, SERVICE_QUEUE)


Plan = tuple[tuple[AnyCommand, ...], Any]
"""What an operation wants of the engine, and what its answer will need to know. Without commands it is answered at
once."""


class Operation(msgspec.Struct, frozen=True):
    """One row of the table of operations."""

    name: str
    plan: "Callable[[Asked], Plan]"
    answer: "Callable[[Call, Sequence[Outcome]], Response]"
    """Raises Refusal if the operation failed."""
    account_types: str = ""
    """`srt` of an account SAS: one of these letters."""
    account_permissions: str = ""
    """`sp` of an account SAS: one of these letters; empty: none suffices."""
    queue_permissions: str = ""
    """`sp` of a queue SAS or user delegation SAS, in the same way."""
    writes: bool = True
    """Not on the secondary endpoint."""
    since: str = ""
    """The first version that has it."""
    bearer_since: str = ""
    """The first version in which a bearer token suffices."""
    only_bearer: bool = False


class Call(msgspec.Struct, gc=False):
    """A request understood: its commands go to the engine, and the rest is what its answer needs."""

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
