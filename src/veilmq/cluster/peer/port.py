"""The owner's side of the peer port: carries out what other servers ask for, on this server's shell.

Strategy: a call of a peer becomes a ticket of the shell, like a client's request. What ends a request on one machine
ends it here: a peer that is gone takes all its calls with it, and messages that were granted to it and did not leave
this machine are given back. A message whose outcome has left may be with its client: it keeps its lease.

Every server opens the port. While it does not own the shard it answers each call with who does.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

from veilmq.cluster import Calls
from veilmq.cluster.peer import Identity, Limits
from veilmq.cluster.peer.connection import Connection
from veilmq.cluster.peer.frames import (
    FROM_CALLER,
    AnswerSoon,
    Bye,
    Call,
    Cancel,
    Garbage,
    NotOwner,
    outcomes_of,
    settle,
)
from veilmq.cluster.peer.handshake import CALLS, Handshake, Refusal, Role
from veilmq.engine.long_polls import Unread
from veilmq.model.commands import AnyCommand, Peek, Receive
from veilmq.model.errors import Overloaded, StoreFailed
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome, Received

Factory: TypeAlias = Callable[[], asyncio.Protocol]
"""Makes the protocol of a new connection."""

_ALONE: Final = frozenset({Receive, Peek})
"""Commands that are calls of their own."""

log = logging.getLogger("veilmq.peer")


def count_trouble(counts: Counter[str], reason: str, text: str) -> None:
    """Count a refusal, and log the first of its reason, the tenth, the hundredth and so on."""
    counts[reason] += 1
    count = counts[reason]
    if count == 10 ** (len(str(count)) - 1):
        log.warning("%s%s", text, f" ({count} times so far)" if count > 1 else "")


class PeerPort:
    """The peer port of one server, on the loop that opened it.

    refused: connections that were refused, by reason. peers: the servers that are connected, by name.
    """

    def __init__(
        self,
        identity: Identity,
        secret: bytes,
        limits: Limits | None = None,
        answered: Callable[[Sequence[Outcome]], None] = lambda outcomes: None,
    ) -> None:
        """answered: called with the outcomes of each call but a receive.

        Raises ValueError for a secret that is too short.
        """
        self.identity, self.limits = identity, limits or Limits()
        self._secret = secret
        self.answered = answered
        self.refused: Counter[str] = Counter()
        self.shell: Calls | None = None
        self.take: Callable[[Connection], None] | None = None
        """Takes a connection that is for something else."""
        self.unread = Unread(0)
        self.owner: str | None = None
        self._connections: dict[_Peer, None] = {}
        self._server: asyncio.Server | None = None
        self._closing = False
        self._empty = asyncio.Event()
        self._handshake()

    async def open(self, host: str, port: int, secured: Callable[[Factory], Factory] = lambda plain: plain) -> None:
        """Open the port; 0 takes a free one: see `address`. secured: puts a TLS handshake before a connection.

        Raises OSError if the address is not available.
        """
        factory = secured(lambda: _Peer(self, self._handshake()))
        self._server = await asyncio.get_running_loop().create_server(factory, host, port)

    def _handshake(self) -> Handshake:
        return Handshake(Role.OWNER, self.identity, self._secret, serves=self._serves)

    def _serves(self, purpose: str) -> bool:
        return purpose == CALLS or (self.shell is not None and self.take is not None)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first socket."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    @property
    def peers(self) -> list[str]:
        """The servers that are connected."""
        return sorted(each.handshake.peer for each in self._connections if each.handshake.done)

    @property
    def calls(self) -> int:
        """Calls of all peers in flight."""
        return sum(len(each.calls) for each in self._connections)

    def lead(self, shell: Calls, unread: Unread) -> None:
        """This server owns the shard: carry calls out on that shell. unread: that of its engine."""
        self.shell, self.unread, self.owner = shell, unread, None

    def follow(self, owner: str | None) -> None:
        """Another server owns the shard, or nobody that is known. Receives that wait here are sent on to it; the shell
        still answers other calls that it has."""
        self.shell, self.owner = None, owner
        for each in list(self._connections):
            each.send_waiting_on(owner)

    async def close(self, deadline_s: float = 1.0) -> None:
        """Stop accepting, and close all connections; until the deadline what was answered may leave. What they still
        have in flight is cancelled: stop the shell first."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        why = ConnectionResetError("this server stops")
        for each in list(self._connections):
            each.leave(why)
        if self._connections:
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._empty.wait()
            for each in list(self._connections):
                each.transport.abort()
            await self._empty.wait()
        if self._server is not None:
            await self._server.wait_closed()

    # What the connections call.

    def joined(self, peer: "_Peer") -> None:
        """A connection was made. Beyond `strangers_max` the oldest one that has not proved itself has to go: if it were
        the newest, strangers could keep the servers of the cluster out."""
        strangers = [each for each in self._connections if not each.handshake.done and each.why is None]
        self._connections[peer] = None
        if len(strangers) >= self.limits.strangers_max:
            strangers[0].end(Refusal("full", "too many connections have not proved themselves yet"))

    def proved(self, peer: "_Peer") -> None:
        """A server has proved itself. If it had a connection before, that one is dead, whatever TCP believes."""
        log.info("peer port: server %s at %s joined", peer.handshake.peer, peer.address)
        for each in list(self._connections):
            if each is not peer and each.handshake.done and each.handshake.peer == peer.handshake.peer:
                each.end(ConnectionResetError("the server of that name has connected anew"))

    def left(self, peer: "_Peer") -> None:
        """A connection is gone."""
        self._connections.pop(peer, None)
        if self._closing and not self._connections:
            self._empty.set()
        why, name = peer.why, peer.handshake.peer
        if isinstance(why, Refusal) and why.reason != "not owner":
            count_trouble(self.refused, why.reason, f"peer port: refused {peer.address}: {why}")
        elif isinstance(why, Garbage):
            count_trouble(self.refused, "garbage", f"peer port: dropped server {name} at {peer.address}: {why}")
        elif peer.handshake.done and peer.handshake.purpose == CALLS and not self._closing:
            log.info("peer port: server %s at %s left: %s", name, peer.address, why)


class _Peer(Connection):
    """The connection of one other server."""

    def __init__(self, port: PeerPort, handshake: Handshake) -> None:
        super().__init__(handshake, port.limits, FROM_CALLER)
        self.calls: dict[int, _PeersCall] = {}
        self._port = port
        self._queued_bytes: Counter[str] = Counter()
        """Bytes of messages that are yet to be given to the transport, by account."""
        self._unread_bytes: Counter[str] = Counter()
        """Bytes of messages that wait for the peer to read, as counted in `_unread`."""
        self._unread = port.unread
        self._reading_paused = False
        """Whether reading has stopped until the peer reads its outcomes."""
        self._last = 0
        """The greatest id of a call that was read."""
        self._left = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._port.joined(self)

    def proved(self) -> None:
        if self.handshake.purpose == CALLS:
            self._port.proved(self)
        else:
            assert self._port.take is not None, "the handshake has asked"
            self._port.take(self)

    def leave(self, why: Exception) -> None:
        """Carry out no more calls, and tell the peer which was the last that was read: it passes later ones on, and
        closes."""
        if not self.handshake.done:
            self.finish(why)
        elif not self._left:
            self._left = True
            self.send(Bye(self._last))

    def received(self, frame: Any) -> None:
        kind = type(frame)
        if self._left:
            return
        if kind is Call:
            self._call(frame)
        elif kind is Cancel:
            call = self.calls.pop(frame.id, None)
            if call is not None:  # otherwise its outcomes are on their way
                call.cancel()
                self.send(outcomes_of(frame.id, ()))
        elif kind is AnswerSoon:
            call = self.calls.get(frame.id)
            if call is not None and call.query is None:
                call.shell.answer_soon(call)

    def _call(self, frame: Call) -> None:
        port, commands = self._port, frame.commands
        shell = port.shell
        self._last = max(self._last, frame.id)
        if not commands or frame.id in self.calls or (len(commands) > 1 and not _ALONE.isdisjoint(map(type, commands))):
            raise Garbage("a call without commands, with one that must be alone, or with an id that is in use")
        if shell is None:
            self.send(NotOwner(frame.id, port.owner))
            return
        now = shell.now()
        arrived = shell.arrived(now)  # after a stall the earliest possible: a receive has not waited that long
        began = Instant(settle(commands, frame.age_us, arrived) + now - arrived)
        limit = self.limits.calls_max
        if len(self.calls) >= limit:
            self.send(outcomes_of(frame.id, [Overloaded(limit=limit)] * len(commands)))
            return
        call = self.calls[frame.id] = _PeersCall(self, frame.id, commands, shell)
        first = commands[0]
        if type(first) is Peek:
            call.query = asyncio.ensure_future(call.run(first))
        else:
            shell.submit(call, began)

    def answer(self, call: "_PeersCall", outcomes: Sequence[Outcome]) -> None:
        """Send the end of a call, unless it has had one."""
        command, outcome = call.commands[0], outcomes[0]
        if type(command) is not Receive:
            self._port.answered(outcomes)
        granted = (command, outcome) if type(outcome) is Received and outcome.messages else None
        if self.calls.get(call.id) is not call:
            self._give_back(call.shell, granted)
            return
        del self.calls[call.id]
        size = self.send(outcomes_of(call.id, outcomes), granted and (call.shell, granted))
        if not size:
            self._give_back(call.shell, granted)
            text = "the answer is too large for a server that does not own the shard"
            self.send(outcomes_of(call.id, [StoreFailed(reason=text)] * len(outcomes)))
        elif granted is not None:
            account = command.queue.account  # type: ignore[union-attr]
            self._queued_bytes[account] += size
            if self.paused:
                self._count(Counter({account: size}))
        if self.paused and self.backlog_bytes > self.limits.backlog_bytes_max and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._uncount()
        super().resume_writing()
        if self._reading_paused and self.why is None:
            self._reading_paused = False
            self.transport.resume_reading()

    def written(self) -> None:
        if self.paused:
            self._count(self._queued_bytes)
        self._queued_bytes.clear()

    def _count(self, unread_bytes: Counter[str]) -> None:
        """The peer does not read fast enough: messages for these accounts wait for it."""
        if not self._unread_bytes:
            self._unread = self._port.unread
        for account, size in unread_bytes.items():
            self._unread.add(account, size)
        self._unread_bytes.update(unread_bytes)

    def _uncount(self) -> None:
        for account, size in self._unread_bytes.items():
            self._unread.remove(account, size)
        self._unread_bytes.clear()

    def hand_back(self, call: "_PeersCall", owner: str | None) -> None:
        """End a call that was not carried out, unless it has had an end."""
        if self.calls.get(call.id) is call:
            del self.calls[call.id]
            self.send(NotOwner(call.id, owner))

    def _give_back(self, shell: Calls, granted: Any) -> None:
        if granted is not None and type(granted[0]) is Receive:
            shell.undeliver(*granted)

    def send_waiting_on(self, owner: str | None) -> None:
        """Another server owns the shard: the receives that wait here shall wait there."""
        for call in list(self.calls.values()):
            first = call.commands[0]
            if type(first) is Receive and first.wait_us != 0:
                call.hand_back(owner)
                call.cancel()

    def lost(self) -> None:
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.cancel()
        for shell, granted in self.unsent:
            self._give_back(shell, granted)
        self._uncount()
        self._port.left(self)


class _PeersCall:
    """A peer's call that is with the shell: its ticket."""

    __slots__ = ("_peer", "commands", "id", "query", "shell")

    def __init__(self, peer: _Peer, id_: int, commands: Sequence[AnyCommand], shell: Calls) -> None:
        self._peer: Final = peer
        self.id: Final = id_
        self.commands: Final = commands
        self.shell: Final = shell
        self.query: asyncio.Task[None] | None = None

    def answer(self, outcomes: list[Outcome]) -> None:
        """See `Ticket`."""
        self._peer.answer(self, outcomes)

    def hand_back(self, owner: str | None) -> None:
        """The shell has certainly not carried it out, as another server owns the shard: it may run there."""
        self._peer.hand_back(self, owner)

    async def run(self, command: Peek) -> None:
        """Answer from committed state, beside the batches."""
        self.answer([await self.shell.query(command)])

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self.query is not None:
            self.query.cancel()
        else:
            self.shell.cancel(self)
