"""A server of a cluster: what the rest of the server needs of its cluster, and learns of it. See docs/cluster.md."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple, Protocol

from veilmq.cluster import Calls
from veilmq.engine.engine import Engine
from veilmq.engine.long_polls import Unread
from veilmq.model.settings.queue import QueueInfo, QueueKey
from veilmq.server.http.tls import Certificate
from veilmq.server.port import Aliases
from veilmq.server.shell import Latencies, Shell
from veilmq.store import Store
from veilmq.store.directory import DataDirectory
from veilmq.store.log import Follower

if TYPE_CHECKING:
    from veilmq.cluster.registry import Status
    from veilmq.server.cluster.admin import Owner

Lead = Callable[[AsyncExitStack, Engine, Store], Awaitable[Shell]]
"""Serve with an engine and a store until the stack is closed."""


class Following(NamedTuple):
    """A server that does not own the data."""

    owner: str
    """The server that owns it; empty: none is known."""
    ready: bool
    """Whether calls reach the owner."""
    trouble: str
    """Why calls do not reach it, in a sentence."""
    held: int
    """Calls that wait for an owner."""
    copy: str = ""
    """Why this server does not follow the log, in a sentence; empty: it does."""


class KnownAliases(Mapping[QueueKey, QueueKey]):
    """Aliases of queues: the owner's, or those of the copy."""

    def __init__(self) -> None:
        self.known: Mapping[QueueKey, QueueKey] = {}

    def __getitem__(self, key: QueueKey) -> QueueKey:
        return self.known[key]

    def __iter__(self) -> Iterator[QueueKey]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


class ClusterReport(NamedTuple):
    """What a server knows of its cluster, and what PostgreSQL says of it, which may be some seconds old."""

    server: str
    """Its own name."""
    owner: str
    """The server that owns the data; empty: none is known."""
    leads: bool
    """Whether this server owns it."""
    epoch: int
    """The newest epoch that it has seen."""
    ready: bool
    """Whether calls of its clients are carried out, here or at the owner."""
    held: int
    """Calls that wait for an owner."""
    lag_s: float
    """How long ago it last had every record of the log; 0 at the owner."""
    lag_records: int | None
    """Records that it lacks; None: not known."""
    appends: Latencies
    """Its own appends to the log, since its start."""
    takeovers: int
    """How often it became the owner, since its start."""
    handovers: int
    """How often it handed over."""
    peers: list[str]
    """Servers that are connected to it."""
    single_copy: bool
    """Whether it goes on though no standby confirms commits."""
    status: "Status | None"
    """None: PostgreSQL does not answer."""


class Cluster(Protocol):
    """What the server needs of its cluster."""

    noted: Callable[[QueueInfo], None]
    """Set by the server: called with each queue that this server learns about, and when it changes."""
    opened: Callable[[DataDirectory], None]
    """Set by the server: called when the data directory was opened, or opened anew."""
    admin: Callable[[], asyncio.Protocol] | None
    """Set by the admin port: makes the protocol of a connection over which another server passes a request on."""
    shared: Callable[[dict[str, bytes]], None]
    """Set by the server: called with what all servers have, when this one learns or changes it."""

    @property
    def unread(self) -> Unread:
        """What clients of this server have not read."""

    @property
    def aliases(self) -> Aliases:
        """Of all queues."""

    @property
    def front(self) -> Calls:
        """Carries calls out, here or at the owner."""

    @property
    def copy(self) -> Follower | None:
        """This server's copy of the data, which may be behind; None: it has none yet."""

    @property
    def following(self) -> Following:
        """How it stands while another server owns the data."""

    async def report(self) -> ClusterReport:
        """How this server and its cluster stand. Takes a second at most."""

    async def hand_over(self, to: str) -> None:
        """Ask the owner to hand over to that server; "": to any. Raises ParameterInvalid, StoreFailed."""

    async def join(self, undo: AsyncExitStack, certificate: Certificate | None) -> bool:
        """Become one of the cluster's servers, which reach this one under TLS with that certificate; False: `stop` was
        called. Raises ClusterRefused, OSError."""

    def holds(self) -> bool:
        """Whether this server's lease runs."""

    async def run(self, lead: Lead) -> None:
        """Follow, and serve while this server owns the data, until `stop`. Raises as `join` and `open_directory`."""

    async def reach_admin(self) -> "Owner":
        """Connect to the owner's admin port. Raises Unreached."""

    def answer_parked(self) -> None:
        """Answer receives of this server's clients that wait at the owner."""

    def stop(self) -> None:
        """End `run`."""


class ClusterRefused(Exception):
    """The server cannot be part of its cluster: why, and what to do."""
