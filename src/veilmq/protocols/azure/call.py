"""The types of the operations: the verified caller, its request, the call it becomes, and an operation's row.

Strategy: there is one `Caller` for every kind of authorisation. A SAS carries its own permissions, which the rows in
`operations/` name; the server checks a key's grants. An operation turns an `Asked` into a `Call`, which goes to the
engine and returns with its outcomes. A call whose `question` is set only reads what authorization needs; the codec then
makes the call that follows.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec

from veilmq.model.commands import CLIENT_NAME_CHARACTERS_MAX, AnyCommand, Origin
from veilmq.model.errors import VeilError
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome
from veilmq.model.settings.access import AccessKey, NamedAccount
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols import Request, Response
from veilmq.protocols.azure.addresses import Endpoint, Place, check_queue_name
from veilmq.protocols.azure.cors import NOTHING, CorsHeaders
from veilmq.protocols.azure.errors import fault_of


class Way(StrEnum):
    """How a request was authorised."""

    SHARED_KEY = "shared key"
    ACCOUNT_SAS = "account SAS"
    QUEUE_SAS = "queue SAS"
    DELEGATION_SAS = "user delegation SAS"
    BEARER = "bearer token"


class Sas(msgspec.Struct, frozen=True):
    """A shared access signature with a correct signature; times and the rest are not checked yet."""

    way: Way
    key: AccessKey
    permissions: str | None
    """`sp`; None: the stored policy's."""
    start: Instant | None
    expiry: Instant | None
    policy: str | None
    """`si`: the stored access policy that completes it."""
    address: tuple[int, int] | None
    """First and last IPv4 address of `sip`."""
    https_only: bool
    resource_types: str = ""
    services: str = "q"
    delegated_to: str | None = None
    """`sduoid`: a bearer token of this user is required, too."""
    delegated_tenant: str | None = None
    """`skdutid`: and of this tenant."""


class Identity(msgspec.Struct, frozen=True):
    """The bearer of a verified token."""

    key: AccessKey
    object_id: str
    tenant: str
    expiry: Instant


class Caller(msgspec.Struct, gc=False):
    """The sender of a request."""

    account: NamedAccount
    key: AccessKey
    way: Way
    origin: Origin
    sas: Sas | None = None
    identity: Identity | None = None


def origin_of(principal: str, agent: bytes) -> Origin:
    """One object for all requests of a principal and client."""
    return _origin(principal, agent[:CLIENT_NAME_CHARACTERS_MAX])


@lru_cache(4_096)
def _origin(principal: str, client: bytes) -> Origin:
    return Origin("azure", principal, client.decode("utf-8", "replace"))


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
    cors: CorsHeaders = NOTHING
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

    @property
    def verified(self) -> bool:
        """Whether the sender is verified: not for a preflight, nor for a refusal that a page may read."""
        return self.asked.caller is not None


def sole(call: Call, outcomes: Sequence[Outcome]) -> Any:
    """The one outcome of a call that has one command. Raises Refusal if it is an error."""
    outcome = outcomes[0]
    if isinstance(outcome, VeilError):
        raise fault_of(outcome, call.commands[0])
    return outcome


def answer_nothing(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """204, if the one command succeeded."""
    sole(call, outcomes)
    return Response(204, None, b"")
