"""The other side of the peer port: a server that does not own the shard passes its calls on to the owner.

Strategy: `Caller` is called like the own engine's shell. It keeps one connection to one address and makes it again when
it is lost. A call is either *held* (it has not left this machine) or *under way*. When the connection goes, what may
safely run again is given back to `on_returned`, which knows the next owner: calls that were held, receives and other
reads, sends that the queue deduplicates, and what the peer answered with `NotOwner`. Of any other call nobody knows
whether it was carried out: it is answered StoreUnknown, for which every protocol has an error that SDKs retry.

Clients of this server that do not read their answers are counted here. While they are over their bound, receives for
them are refused, and messages that come for them all the same are given back.
"""

import asyncio
import logging
import math
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

from veilmq.cluster import Calls, Clock, Ticket, age_us, may_repeat, move_arrival
from veilmq.cluster.peer import Identity, Limits
from veilmq.cluster.peer.connection import Connection
from veilmq.cluster.peer.frames import ACCEPTED, FROM_OWNER, AnswerSoon, Bye, Call, Cancel, Garbage, NotOwner, unpacked
from veilmq.cluster.peer.handshake import Handshake, Refusal, Role
from veilmq.cluster.peer.port import count_trouble
from veilmq.cluster.tls import in_words
from veilmq.engine.long_polls import Unread
from veilmq.model.commands import AnyCommand, Peek, Receive, Undeliver
from veilmq.model.errors import CapabilityMissing, Overloaded, StoreFailed, StoreUnknown
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome, Received

log = logging.getLogger("veilmq.peer")

OnReturned = Callable[[Ticket, Instant, str | None, bool], None]
"""Called with a call that may be submitted elsewhere: its ticket, the instant at which it was submitted, the owner that
the peer named (or None), and whether the peer may have carried the call out."""

_RETRY_S_MIN: Final = 0.02
_ABORTED_S: Final = 1.0
"""How long the loop may take to say that a connection is gone."""


class _Silent:
    """The ticket of an Undeliver."""

    __slots__ = ("commands",)

    def __init__(self, command: Undeliver) -> None:
        self.commands = (command,)

    def answer(self, outcomes: list[Outcome]) -> None:
        """See `Ticket`. If it failed, the lease ends by itself."""


class _Sent:
    """A call of this server."""

    __slots__ = ("cancelled", "held_since_s", "id", "soon", "submitted", "ticket")

    def __init__(self, ticket: Ticket, submitted: Instant, held_since_s: float) -> None:
        self.ticket: Final = ticket
        self.submitted = submitted
        self.held_since_s: Final = held_since_s
        self.id = 0
        """0: held."""
        self.cancelled = self.soon = False

    @property
    def first(self) -> AnyCommand:
        return self.ticket.commands[0]


class Caller(Calls):
    """Passes calls on to the server at one address, from `start` to `close`.

    connected: whether calls go out now. trouble: why not, in one sentence; None until the first attempt has failed.
    troubles: failed attempts by reason.
    """

    def __init__(
        self,
        address: tuple[str, int],
        identity: Identity,
        secret: bytes,
        clock: Clock,
        on_returned: OnReturned,
        *,
        expects: str | None = None,
        context: Callable[[], ssl.SSLContext | None] = lambda: None,
        limits: Limits | None = None,
        unread: Unread | None = None,
    ) -> None:
        """expects: the server that the address should lead to. context: makes that of TLS, and again if it fails.
        unread: counts what this server's own clients have not read. Raises ValueError for too short a secret."""
        self.address, self.identity, self.limits = address, identity, limits or Limits()
        self.trouble: str | None = None
        self.troubles: Counter[str] = Counter()
        self._secret, self._expects = secret, expects
        self._read_context, self._context = context, context()
        self._clock, self._on_returned = clock, on_returned
        self._unread = unread
        self._calls: dict[Ticket, _Sent] = {}
        """Calls that have no answer yet and whose clients wait."""
        self._under_way: dict[int, _Sent] = {}
        """Calls that were sent, until they have ended there; also those that were cancelled meanwhile."""
        self._ids = count(1)
        self._drained: asyncio.Future[None] | None = None
        """Set while it retires; done when nothing is under way."""
        self._link: _Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._hold_timer: asyncio.TimerHandle | None = None
        self.handshake()

    def handshake(self) -> Handshake:
        """This side of the next connection."""
        return Handshake(Role.CALLER, self.identity, self._secret, self._expects)

    def start(self) -> None:
        """Connect, and again whenever the connection is lost. Call on the loop."""
        self._task = asyncio.ensure_future(self._keep_connected())

    async def retire(self, deadline_s: float) -> None:
        """Give back what has not left, wait for the answers of what is under way, and close."""
        for sent in [each for each in self._calls.values() if not each.id]:
            self._return(sent, None)
        if self._under_way:
            self._drained = asyncio.get_running_loop().create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._drained
        await self.close()

    async def close(self) -> None:
        """Drop the connection. All calls are given back or answered before this returns."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._hold_timer is not None:
            self._hold_timer.cancel()
        for sent in [each for each in self._calls.values() if not each.id]:
            self._return(sent, None)

    @property
    def connected(self) -> bool:
        """Whether calls go out now."""
        return self._link is not None

    @property
    def calls(self) -> int:
        """Calls in flight, held ones included."""
        return len(self._calls)

    def clock_moved(self, by_us: int) -> None:
        """This server's clock was set: calls in flight are as old as they were."""
        for sent in self._calls.values():
            sent.submitted = Instant(sent.submitted + by_us)
            move_arrival(sent.ticket.commands, by_us)

    def tickets(self) -> list[Ticket]:
        """Of the calls in flight."""
        return list(self._calls)

    def has(self, ticket: Ticket) -> bool:
        """Whether a call is in flight here."""
        return ticket in self._calls

    # What a shell does.

    def now(self) -> Instant:
        return self._clock.now()

    def arrived(self, now: Instant | None = None) -> Instant:
        return self._clock.now() if now is None else now

    def submit(self, ticket: Ticket, now: Instant) -> None:
        commands = ticket.commands
        first = commands[0]
        refusal: Overloaded | CapabilityMissing | None = None
        if type(first) not in ACCEPTED:
            refusal = CapabilityMissing(capability=f"{type(first).__name__} on a server that does not own the shard")
        elif len(self._calls) >= self.limits.calls_max:
            refusal = Overloaded(limit=self.limits.calls_max)
        elif self._unread is not None and self._unread.near and type(first) is Receive and self._is_full(first):
            self._unread.refused += 1
            refusal = Overloaded(limit=self._unread.bytes_max)
        if refusal is not None:
            ticket.answer([refusal] * len(commands))
            return
        sent = self._calls[ticket] = _Sent(ticket, now, 0.0 if self._link else asyncio.get_running_loop().time())
        if self._link is not None:
            self._send(self._link, sent)
        elif self._hold_timer is None:
            self._hold_timer = asyncio.get_running_loop().call_later(self.limits.held_s_max, self._end_holding)

    def cancel(self, ticket: Ticket) -> None:
        sent = self._calls.pop(ticket, None)
        if sent is not None and sent.id:
            sent.cancelled = True
            assert self._link is not None
            self._link.send(Cancel(sent.id))

    def answer_soon(self, ticket: Ticket) -> None:
        sent = self._calls.get(ticket)
        if sent is not None:
            sent.soon = True
            if sent.id:
                assert self._link is not None
                self._link.send(AnswerSoon(sent.id))

    def undeliver(self, command: Receive, outcome: Received) -> None:
        handles = tuple(message.handle for message in outcome.messages)
        # A client with an attempt id will retry and must find its messages unchanged.
        if handles and command.attempt_id is None:
            release = Undeliver(queue=command.queue, origin=command.origin, handles=handles)
            self.submit(_Silent(release), self._clock.now())

    async def query(self, command: Peek) -> Outcome:
        (outcome,) = await self.call(command)
        return outcome

    # The connection.

    async def _keep_connected(self) -> None:
        retry_s = _RETRY_S_MIN
        while True:
            link = _Link(self)
            try:
                await self._connect(link)
                retry_s = _RETRY_S_MIN
                await link.gone
            except (OSError, Refusal) as error:
                self._failed(error)
                if isinstance(error, ssl.SSLError):
                    with suppress(OSError):  # a file of it is being replaced
                        self._context = self._read_context()
            finally:
                await link.drop()
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, self.limits.retry_s_max)

    async def _connect(self, link: "_Link") -> None:
        """Returns when the peer has proved itself. Raises OSError and Refusal."""
        host, port = self.address
        try:
            async with asyncio.timeout(self.limits.handshake_s):
                await asyncio.get_running_loop().create_connection(lambda: link, host, port, ssl=self._context)
                await link.ready
        except TimeoutError:
            raise TimeoutError(f"nobody answered within {self.limits.handshake_s:g} s") from None

    def _failed(self, error: OSError | Refusal) -> None:
        reason = error.reason if isinstance(error, Refusal) else "unreachable"
        self.trouble = f"cannot reach the owner at {self.address[0]}:{self.address[1]}: {in_words(error)}"
        count_trouble(self.troubles, reason, self.trouble)

    def joined(self, link: "_Link") -> None:
        """The peer has proved itself: send what was held."""
        self._link, self.trouble = link, None
        log.info("connected to server %s at %s:%d", link.handshake.peer, *self.address)
        for sent in [each for each in self._calls.values() if not each.id]:
            self._send(link, sent)

    def left(self, link: "_Link") -> None:
        """The connection is lost."""
        if self._link is not link:
            return
        self._link = None
        self.trouble = f"lost the owner at {self.address[0]}:{self.address[1]}: {link.why}"
        log.info("%s", self.trouble)
        under_way, self._under_way = self._under_way, {}
        never_left = {id(sent) for sent in link.unsent}
        self._note_drained()
        for sent in under_way.values():
            if not sent.cancelled:
                perhaps_done = id(sent) not in never_left and sent.id <= link.last_read
                if not perhaps_done or may_repeat(sent.ticket.commands):
                    self._return(sent, None, perhaps_done)
                else:
                    error = StoreUnknown(reason="the connection to the owner was lost")
                    self._answer(sent, [error] * len(sent.ticket.commands))

    def _note_drained(self) -> None:
        if self._drained is not None and not self._under_way and not self._drained.done():
            self._drained.set_result(None)

    # Calls.

    def _send(self, link: "_Link", sent: _Sent) -> None:
        commands = sent.ticket.commands
        sent.id = next(self._ids)
        age = age_us(commands, sent.submitted, self._clock.now())
        if not link.send(Call(sent.id, age, tuple(commands)), sent):  # type: ignore[arg-type]  # see submit
            text = "the request is too large for a server that does not own the shard"
            self._answer(sent, [StoreFailed(reason=text)] * len(commands))
            return
        self._under_way[sent.id] = sent
        if sent.soon:
            link.send(AnswerSoon(sent.id))

    def ended(self, id_: int, outcomes: Sequence[Any]) -> None:
        """The owner has answered. Raises Garbage."""
        sent = self._under_way.pop(id_, None)
        if sent is None:
            raise Garbage(f"an answer to no call: {id_}")
        found = unpacked(outcomes)
        first = sent.first
        if type(first) is Receive and found and type(found[0]) is Received and found[0].messages:
            if sent.cancelled:
                self.undeliver(first, found[0])
            elif self._unread is not None and self._unread.near and self._is_full(first):
                self.undeliver(first, found[0])
                found = [Received([])]
        self._note_drained()
        if sent.cancelled:
            return
        if len(found) != len(sent.ticket.commands):
            self._under_way[id_] = sent
            raise Garbage(f"{len(found)} outcomes of {len(sent.ticket.commands)} commands")
        self._answer(sent, found)

    def moved(self, frame: NotOwner) -> None:
        """The peer does not own the shard and has not carried the call out."""
        sent = self._under_way.pop(frame.id, None)
        self._note_drained()
        if sent is not None and not sent.cancelled:
            self._return(sent, frame.owner)

    def _answer(self, sent: _Sent, outcomes: list[Outcome]) -> None:
        del self._calls[sent.ticket]
        sent.ticket.answer(outcomes)

    def _return(self, sent: _Sent, owner: str | None, perhaps_done: bool = False) -> None:
        if sent.soon:  # its client may be gone: it waits nowhere else
            self._answer(sent, [Received([])])
            return
        del self._calls[sent.ticket]
        self._on_returned(sent.ticket, sent.submitted, owner, perhaps_done)

    def _is_full(self, command: Receive) -> bool:
        return self._unread is not None and self._unread.refuses(command.queue.account)

    def _end_holding(self) -> None:
        """Answer what has waited for a connection for too long."""
        self._hold_timer = None
        loop, held_s_max = asyncio.get_running_loop(), self.limits.held_s_max
        held = [each for each in self._calls.values() if not each.id]
        for sent in held:
            if loop.time() - sent.held_since_s >= held_s_max:
                error = StoreFailed(reason=self.trouble or "the owner cannot be reached")
                self._answer(sent, [error] * len(sent.ticket.commands))
        left = [each.held_since_s for each in self._calls.values() if not each.id]
        if left:
            self._hold_timer = loop.call_at(min(left) + held_s_max, self._end_holding)


class _Link(Connection):
    """One connection of a caller. `ready`: the peer has proved itself. `gone`: the connection is lost."""

    def __init__(self, caller: Caller) -> None:
        super().__init__(caller.handshake(), caller.limits, FROM_OWNER)
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self._caller = caller
        self.last_read: float = math.inf
        """The greatest id of a call that the owner has read; infinite while it reads on."""

    async def drop(self) -> None:
        """Close at once, if there is a connection, and wait until it is gone."""
        if self.address:
            self.transport.abort()
            await asyncio.wait([self.gone], timeout=_ABORTED_S)
            if not self.gone.done():  # uvloop closes what a cancelled attempt to connect has made without a word
                self.connection_lost(None)

    def proved(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)
        self._caller.joined(self)

    def received(self, frame: Any) -> None:
        if type(frame) is NotOwner:
            self._caller.moved(frame)
        elif type(frame) is Bye:
            self.last_read = frame.last
            self.end(ConnectionResetError("it stops"))
        else:
            self._caller.ended(frame.id, frame.outcomes)

    def lost(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)
        if not self.ready.done():
            why = self.why
            self.ready.set_exception(why if isinstance(why, OSError | Refusal) else ConnectionResetError(str(why)))
            self.ready.exception()  # nobody may be waiting for it
        self._caller.left(self)
