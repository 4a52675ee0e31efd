"""Takes the calls of the ports of a server of a cluster, and hands them to its own shell, to the owner, or to the next.

Strategy: while this server owns the shard, its shell carries the calls out; while another server does, the peer port's
caller passes them on. While nobody does, in a take-over or a hand-over, they are held, and then go where the shard is.
What the owner has certainly not carried out comes back from the caller, and is held or passed on again. So does what
may run twice; but if that fails later, the first time may have carried it out, so its outcome is unknown.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from veilmq.cluster import Calls, Clock, Ticket, move_arrival
from veilmq.cluster.peer.caller import Caller, OnReturned
from veilmq.model.commands import Peek, Receive, Send
from veilmq.model.errors import DiskLow, Overloaded, StoreFailed, StoreUnknown
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome, Received

HELD_SECONDS: Final = 10.0
"""How long a call waits for an owner; then StoreFailed, which clients may try again."""
AGAIN_SECONDS: Final = 0.03
"""After this time a call that came back is passed on again to the same server, which may be taking over."""
AT_ONCE_SECONDS: Final = 1.0
"""A call that comes back within this time was not carried out meanwhile: its wait goes on, and does not begin anew."""
RETIRE_SECONDS: Final = 3.0
"""How long a server that no longer owns the shard may still answer the calls that were sent to it."""
HELD_MAX: Final = 50_000
"""Calls that may wait for one; beyond, StoreFailed at once."""
_NOBODY: Final = "nobody owns the queues at present"

log = logging.getLogger("veilmq.cluster")


class _Held:
    """A call that waits for an owner."""

    __slots__ = ("age_us", "since_s")

    def __init__(self, age_us: int, since_s: float) -> None:
        self.age_us = age_us
        """How old it was when it began to wait."""
        self.since_s = since_s


class _Again:
    """The ticket of a call that may have been carried out and runs again."""

    __slots__ = ("_again", "commands", "ticket")

    def __init__(self, ticket: Ticket, again: "dict[Ticket, _Again]") -> None:
        self.commands = ticket.commands
        self.ticket = ticket
        self._again = again
        again[ticket] = self

    def answer(self, outcomes: list[Outcome]) -> None:
        """See `Ticket`."""
        self._again.pop(self.ticket, None)
        self.ticket.answer(
            [_unknown(each) if isinstance(each, StoreFailed | Overloaded | DiskLow) else each for each in outcomes]
        )


def _unknown(error: StoreFailed | Overloaded | DiskLow) -> StoreUnknown:
    return StoreUnknown(reason=error.reason if isinstance(error, StoreFailed) else str(error))


class Front(Calls):
    """See the module. Use it on its loop."""

    def __init__(self, clock: Clock, call: Callable[[tuple[str, int], OnReturned], Caller]) -> None:
        """call: makes the caller for the owner at an address."""
        self._clock = clock
        self._call = call
        self._shell: Calls | None = None
        self._left: Calls | None = None
        """The shell of the last time that this server owned the shard: it still answers the calls that it has."""
        self._caller: Caller | None = None
        self._retiring: dict[asyncio.Future[None], Caller] = {}
        self._held: dict[Ticket, _Held] = {}
        self._passed: dict[Ticket, _Held] = {}
        """Calls that were passed on a moment ago: one that comes back has waited since before."""
        self._peeks: dict[Ticket, asyncio.Future[None]] = {}
        """Peeks at this server's own store."""
        self._repeated: dict[Ticket, _Again] = {}
        """Calls that run again, by the ticket that was submitted here."""
        self._timer: asyncio.TimerHandle | None = None
        self._again = False
        """Whether what came back is about to be passed on again."""

    @property
    def caller(self) -> Caller | None:
        """What passes calls on; None while this server owns the shard, or nobody is known to."""
        return self._caller

    @property
    def held(self) -> int:
        """Calls that wait for an owner."""
        return len(self._held)

    def lead(self, shell: Calls) -> None:
        """This server owns the shard."""
        self._drop_caller()
        self._shell = shell
        self._release()

    def clock_moved(self, by_us: int) -> None:
        """A take-over has set this server's clock: what waits is as old as it was."""
        for caller in (self._caller, *self._retiring.values()):
            if caller is not None:
                caller.clock_moved(by_us)
        for ticket in self._held:
            move_arrival(ticket.commands, by_us)

    def follow(self, address: tuple[str, int] | None) -> None:
        """The server at that address owns it; None: nobody is known to."""
        if self._shell is not None:
            self._left, self._shell = self._shell, None
        if self._caller is not None and self._caller.address == address:
            return
        self._drop_caller()
        if address is not None:
            self._caller = self._call(address, self._returned)
            self._caller.start()
            self._release()

    def forget_left(self) -> None:
        """The shell of the last time as the owner has stopped, and has answered everything."""
        self._left = None

    async def close(self) -> None:
        """Answer everything that waits."""
        self._drop_caller()
        await asyncio.gather(*self._retiring)
        self._end_holding(0.0)

    def _drop_caller(self) -> None:
        """What is under way there is still answered; the rest comes back."""
        caller, self._caller = self._caller, None
        if caller is not None:
            task = asyncio.ensure_future(caller.retire(RETIRE_SECONDS))
            self._retiring[task] = caller
            task.add_done_callback(self._retiring.pop)

    def answer_parked(self) -> None:
        """At shutdown: answer the receives that wait at the owner, or for one."""
        callers = [caller for caller in (self._caller, *self._retiring.values()) if caller is not None]
        for ticket in [*self._held, *(ticket for caller in callers for ticket in caller.tickets())]:
            if isinstance(ticket.commands[0], Receive):
                self.answer_soon(ticket)

    # What a shell does.

    def now(self) -> Instant:
        return self._clock.now()

    def arrived(self, now: Instant | None = None) -> Instant:
        if self._shell is not None:
            return self._shell.arrived(now)
        return self._clock.now() if now is None else now

    def submit(self, ticket: Ticket, now: Instant) -> None:
        if self._shell is not None:
            self._carry_out(self._shell, ticket, now)
        elif self._caller is not None:
            self._caller.submit(ticket, now)
        else:
            self._hold(ticket, now)

    def _carry_out(self, shell: Calls, ticket: Ticket, now: Instant) -> None:
        command = ticket.commands[0]
        if isinstance(command, Peek):  # which is no command of a batch
            self._peeks[ticket] = asyncio.ensure_future(self._peek(shell, ticket, command))
        else:
            shell.submit(ticket, now)

    async def _peek(self, shell: Calls, ticket: Ticket, command: Peek) -> None:
        try:
            ticket.answer([await shell.query(command)])
        finally:
            self._peeks.pop(ticket, None)

    def cancel(self, ticket: Ticket) -> None:
        ticket = self._repeated.pop(ticket, ticket)
        peek = self._peeks.get(ticket)
        if peek is not None:
            peek.cancel()
        elif self._held.pop(ticket, None) is None and (carrier := self._of(ticket)) is not None:
            carrier.cancel(ticket)

    def answer_soon(self, ticket: Ticket) -> None:
        ticket = self._repeated.get(ticket, ticket)
        if ticket not in self._held:
            if (carrier := self._of(ticket)) is not None:
                carrier.answer_soon(ticket)
        elif isinstance(ticket.commands[0], Receive):
            del self._held[ticket]
            ticket.answer([Received([])])

    def undeliver(self, command: Receive, outcome: Received) -> None:
        carrier = self._shell or self._caller
        if carrier is not None:
            carrier.undeliver(command, outcome)  # else the leases end by themselves

    async def query(self, command: Peek) -> Outcome:
        carrier = self._shell or self._caller
        return (await self.call(command))[0] if carrier is None else await carrier.query(command)

    def _of(self, ticket: Ticket) -> Calls | None:
        """The caller or shell that has a call that is not held; None: the call was answered."""
        for caller in (self._caller, *self._retiring.values()):
            if caller is not None and caller.has(ticket):
                return caller
        return self._shell or self._left

    # What waits for an owner.

    def _hold(self, ticket: Ticket, submitted: Instant, since_s: float | None = None) -> None:
        """since_s: it has waited since then; None: it begins to."""
        if len(self._held) >= HELD_MAX:
            ticket.answer([StoreFailed(reason=_NOBODY)] * len(ticket.commands))
            return
        loop = asyncio.get_running_loop()
        time_s = loop.time()
        since_s = time_s if since_s is None else since_s
        self._held[ticket] = _Held(self._clock.now() - submitted - int((time_s - since_s) * 1e6), since_s)
        if self._timer is None:
            self._timer = loop.call_later(max(0.0, since_s + HELD_SECONDS - time_s), self._look)

    def _returned(self, ticket: Ticket, submitted: Instant, _owner: str | None, perhaps_done: bool) -> None:
        """A call came back from a caller: whom it called owns the shard no more, or not yet."""
        if perhaps_done and type(ticket) is not _Again and isinstance(ticket.commands[0], Send):
            ticket = _Again(ticket, self._repeated)
        if self._shell is not None:
            self._carry_out(self._shell, ticket, submitted)
            return
        before = self._passed.get(ticket)
        self._hold(ticket, submitted, None if before is None else before.since_s)
        if not self._again:
            self._again = True
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._again = False
        if self._shell is not None or self._caller is not None:
            self._release()

    def _release(self) -> None:
        """Pass on what was held. The clock may have been set since: only the age of a call counts."""
        loop = asyncio.get_running_loop()
        held, self._held = self._held, {}
        self._passed = held
        loop.call_later(AT_ONCE_SECONDS, held.clear)
        time_s = loop.time()
        for ticket, each in held.items():
            self.submit(ticket, Instant(self._clock.now() - each.age_us - int((time_s - each.since_s) * 1e6)))

    def _look(self) -> None:
        self._timer = None
        self._end_holding(HELD_SECONDS)
        if self._held:
            time_s = asyncio.get_running_loop().time()
            first = min(each.since_s for each in self._held.values())
            self._timer = asyncio.get_running_loop().call_later(max(0.0, first + HELD_SECONDS - time_s), self._look)

    def _end_holding(self, seconds: float) -> None:
        """Answer what has waited for so long."""
        time_s = asyncio.get_running_loop().time()
        for ticket, each in list(self._held.items()):
            if time_s - each.since_s >= seconds:
                del self._held[ticket]
                ticket.answer([StoreFailed(reason=_NOBODY)] * len(ticket.commands))
