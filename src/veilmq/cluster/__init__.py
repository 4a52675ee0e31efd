"""Many servers: PostgreSQL replicates the log of a shard and decides who owns it; the state stays in SQLite.

Strategy: everything rests on two facts: an append and a take-over lock the same row, and the log has no gap. So a
server that lost the shard appends nothing, whatever it believes. `postgres` is what stands in PostgreSQL: the
connection and what must be set there, `schema` the tables, `ownership` the epoch and the lease, `log` the append and
the reading, `snapshots` whole copies. `member` is one server, which follows until it owns. `peer` passes clients' calls
on to the owner; it knows nothing of PostgreSQL.

Here is `Calls`, the interface of whatever carries calls out: this server's own shell, or the owner's through its peer
port. Five methods are each carrier's own; the coroutines that await a call are written on top of them, once.

Before changing it: each rule here was seen to lose or resurrect messages when it was left out
(docs/decisions/0028-log-in-postgresql.md, tools/mutants/cluster).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Protocol

from veilmq.model.commands import (
    AnyCommand,
    Delete,
    DescribeQueue,
    DescribeSubscription,
    DescribeTopic,
    Extend,
    ListMoves,
    ListQueues,
    ListSubscriptions,
    ListTopics,
    Peek,
    Receive,
    Send,
    Undeliver,
)
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.settings.queue import FIFO_SUFFIX, ListTemplates


class Ticket(Protocol):
    """One call: its commands, and the receiver of the answer."""

    @property
    def commands(self) -> Sequence[AnyCommand]:
        """At least one command; all of a call are applied in one batch."""

    def answer(self, outcomes: list[Outcome]) -> None:
        """Receive one durable outcome per command, on the loop. Must not raise."""


class Clock(Protocol):
    """The lease clock, as the edge reads it."""

    def now(self) -> Instant:
        """The current instant."""


REPEATABLE: Final[frozenset[type]] = frozenset(
    {
        Receive, Undeliver, Peek, DescribeQueue, ListQueues, ListMoves, DescribeTopic, ListTopics, DescribeSubscription,
        ListSubscriptions, ListTemplates,
    }
)  # fmt: skip
"""What may run twice: messages of a receive whose outcome was lost come back when their lease ends, as on one machine;
an Undeliver changes nothing the second time; the others only read."""


def may_repeat(commands: Sequence[AnyCommand]) -> bool:
    """Whether a call may run twice. So may sends to FIFO queues with ids by which the queue drops the second one, and
    answers it like the first."""
    if type(commands[0]) in REPEATABLE:
        return True
    return all(
        type(each) is Send and each.extras.deduplication_id is not None and each.queue.name.endswith(FIFO_SUFFIX)
        for each in commands
    )


def age_us(commands: Sequence[AnyCommand], submitted: Instant, now: Instant) -> int:
    """How long ago a call arrived."""
    first = commands[0]
    arrived = first.arrived if type(first) is Delete or type(first) is Extend else submitted
    return max(0, now - min(arrived, submitted))


def move_arrival(commands: Sequence[AnyCommand], by_us: int) -> None:
    """Move the instants at which commands arrived: the clock was set by that much since."""
    for command in commands:
        if type(command) is Delete or type(command) is Extend:
            command.arrived = Instant(command.arrived + by_us)


class Waiting:
    """The ticket of `Calls.call`."""

    __slots__ = ("commands", "future")

    def __init__(self, commands: Sequence[AnyCommand]) -> None:
        self.commands = commands
        self.future: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()

    def answer(self, outcomes: list[Outcome]) -> None:
        """See `Ticket`."""
        if not self.future.done():
            self.future.set_result(outcomes)


class Calls(ABC):
    """Carries calls out. Use it on its loop."""

    @abstractmethod
    def now(self) -> Instant:
        """The current instant of the lease clock."""

    @abstractmethod
    def arrived(self, now: Instant | None = None) -> Instant:
        """An instant no later than the arrival of the bytes being handled.

        now: the current instant, if the caller has read the clock already.
        """

    @abstractmethod
    def submit(self, ticket: Ticket, now: Instant) -> None:
        """Queue a call. now: when it came; a receive waits from then on."""

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """Cancel a call whose client is gone. It must not have been answered."""

    @abstractmethod
    def answer_soon(self, ticket: Ticket) -> None:
        """Let the receive of a call wait no longer: its client has ended its input. It must not have been answered."""

    @abstractmethod
    def undeliver(self, command: Receive, outcome: Received) -> None:
        """An answer with messages could not be written: release them."""

    @abstractmethod
    async def query(self, command: Peek) -> Outcome:
        """Answer from committed state."""

    async def call(self, *commands: AnyCommand) -> list[Outcome]:
        """Run commands as one call and wait for their outcomes."""
        ticket = Waiting(commands)
        self.submit(ticket, self.now())
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._abandon(ticket)
            raise

    async def receive(self, command: Receive, ended: asyncio.Event) -> list[Outcome]:
        """Run a receive that waits no longer once its client has ended its input."""
        ticket = Waiting((command,))
        self.submit(ticket, self.now())

        def answer_soon(_: object) -> None:
            if ended.is_set() and not ticket.future.done():
                self.answer_soon(ticket)

        ending = asyncio.ensure_future(ended.wait())
        ending.add_done_callback(answer_soon)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._abandon(ticket)
            raise
        finally:
            ending.cancel()

    def _abandon(self, ticket: Waiting) -> None:
        """Cancel a call that nobody awaits; its answer may have come in this very turn of the loop."""
        if not ticket.future.done() or ticket.future.cancelled():
            self.cancel(ticket)
            return
        command, (outcome, *_) = ticket.commands[0], ticket.future.result()
        if isinstance(command, Receive) and isinstance(outcome, Received):
            self.undeliver(command, outcome)
