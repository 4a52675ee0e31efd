"""Clients of the simulated server: what they call, what they write down, and how they go away.

Strategy: a client makes one call after the other. A call is a ticket of the shell, as a connection's is; its operations
are in the log before it is submitted, as unknown, and get their answer when it comes. A client may hang up before,
or end its input, or be gone when its messages come. Handles are common property: any client uses any of the latest,
also stale ones.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import md5
from typing import Any, Final, NamedTuple

from msgspec.structs import replace
from tests.simulation.plan import DEAD, DEAD_FIFO, FIFO, JOBS, Plan
from tests.support.contract.stage import TESTER, sending

from veilmq.checking.log import Grant, Kind, Operation
from veilmq.checking.log import Outcome as Known
from veilmq.checking.report import story
from veilmq.engine.directory import DatabaseError
from veilmq.model.commands import (
    AfterExpiry,
    AnyCommand,
    ChangeQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    ListQueues,
    Peek,
    PurgeQueue,
    Receive,
    Send,
)
from veilmq.model.errors import StoreUnknown, VeilError
from veilmq.model.instant import SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.outcomes import Extended, MoveStarted, Outcome, QueueDeleted, Received, Sent
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.server.shell import Shell
from veilmq.testing import Random

LEASE_US_MAX: Final = 60 * SECOND_US
DELAY_US_MAX: Final = 20 * SECOND_US
_HANDLES_KEPT: Final = 24


def making(queue: QueueKey, plan: Plan) -> CreateQueue:
    """The command that makes one of the queues."""
    change: dict[str, Any] = {"fifo": True} if queue in (FIFO, DEAD_FIFO) else {}
    if queue is JOBS:
        change["redrive"] = RedrivePolicy(DEAD, plan.receives_max)
    if queue is FIFO and plan.fifo_dies:
        change["redrive"] = RedrivePolicy(DEAD_FIFO, 1)
    return CreateQueue(queue=queue, origin=TESTER, change=change)


Drawn = tuple[list[AnyCommand], list[int]] | None
"""Commands of a call, and the numbers of their operations; None: nothing to do."""


class Held(NamedTuple):
    """A handle that some client has."""

    queue: QueueKey
    handle: str
    lease: int
    rotation: int


class Attempt(NamedTuple):
    """A receive that has an attempt id."""

    id: tuple[QueueKey, str]
    again: dict[str, int]
    """By handle: operations that extend the leases of the receive before with that id, if this one repeats it."""


class Book:
    """The log of all clients, and what they know."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now
        self.log: list[Operation] = []
        self.handles: list[Held] = []
        self.tasks: list[bytes] = []
        """Move tasks that were started."""
        self.attempts: dict[tuple[QueueKey, str], dict[str, int]] = {}
        """By attempt id: what the latest receive returned, leases by handle."""
        self.asked: dict[int, Attempt] = {}
        """By number of the receive."""
        self.waiting: set[tuple[QueueKey, str]] = set()
        """Attempt ids of receives that wait for their answers: of two at a time nobody could say which was first."""
        self.repeats = self.fifo_deaths = 0
        """Receives that repeated another one; dead letters of the FIFO queue that somebody received."""
        self.bodies = 0
        self.leases = 0
        self.trace: Callable[[str], None] | None = None

    def begin(self, client: str, kind: Kind, queue: QueueKey, **fields: Any) -> int:
        """Write a call that is about to begin; returns its number."""
        number = len(self.log)
        self.log.append(
            Operation(number=number, client=client, kind=kind, queue=queue.name, invoked=self.now(), **fields)
        )
        return number

    def end(self, number: int, outcome: Known, **fields: Any) -> None:
        """Write its answer."""
        self.log[number] = replace(self.log[number], returned=self.now() + 1, outcome=outcome, **fields)
        if self.trace is not None:
            (line,) = story([self.log[number]], "")
            self.trace(line.strip())

    def lease(self) -> int:
        """The number of a new lease."""
        self.leases += 1
        return self.leases

    def keep(self, held: Held) -> None:
        """A handle came."""
        self.handles.append(held)
        del self.handles[:-_HANDLES_KEPT]

    def ask(self, client: str, number: int, queue: QueueKey, name: str) -> None:
        """The receive of that number has an attempt id. Until its answer is there, it may end the leases of the receive
        before with that id at any time: it may set another end, and they are released if nobody hears of it."""
        self.waiting.add((queue, name))
        known = self.attempts.get((queue, name), {})
        again = {handle: self.begin(client, Kind.EXTEND, queue, lease=lease) for handle, lease in known.items()}
        self.asked[number] = Attempt((queue, name), again)

    def received(self, number: int, queue: QueueKey, outcome: Received) -> None:
        """Write the answer to a receive."""
        attempt = self.asked.get(number)
        handles = [each.handle for each in outcome.messages]
        if attempt is not None and handles and all(handle in attempt.again for handle in handles):
            for each in outcome.messages:
                self.end(attempt.again[each.handle], Known.OK, lease_us=each.lease_us or 0)
            self.end(number, Known.OK)
            self.repeats += 1
            return
        grants = self.grants(queue, outcome)
        if attempt is not None:
            self.refused(number)
            leases = [grant.lease for grant in grants]
            self.attempts[attempt.id] = dict(zip(handles, leases, strict=True))
        self.end(number, Known.OK, grants=grants)

    def is_over(self, number: int) -> None:
        """Nobody waits for the answer to that call any more."""
        if number in self.asked:
            self.waiting.discard(self.asked[number].id)

    def refused(self, number: int) -> None:
        """The receive repeated none."""
        attempt = self.asked.get(number)
        for extension in attempt.again.values() if attempt is not None else ():
            self.end(extension, Known.FAIL, why="no repeat")

    def grants(self, queue: QueueKey, outcome: Received) -> tuple[Grant, ...]:
        """The messages of an answer."""
        found = []
        self.fifo_deaths += len(outcome.messages) if queue is DEAD_FIFO else 0
        for each in outcome.messages:
            lease = self.lease()
            self.keep(Held(queue, each.handle, lease, 0))
            grant = Grant(
                message=each.id.hex(), lease=lease, lease_us=each.lease_us or 0, body=digest(each.body),
                count=each.receive_count, group=each.extras.group, deduplication=each.extras.deduplication_id,
                sequence=each.sequence if queue is FIFO else None,
            )  # fmt: skip
            found.append(grant)
        return tuple(found)


def digest(body: str) -> str:
    """What the log has of a body: its name, and a checksum."""
    return f"{body.partition('.')[0]}-{zlib.crc32(body.encode()):08x}"


class Call:
    """A ticket."""

    __slots__ = ("begun", "client", "commands", "over")

    def __init__(self, client: "Client", commands: Sequence[AnyCommand], begun: Sequence[int]) -> None:
        self.client = client
        self.commands = commands
        self.begun = begun
        self.over = False

    def answer(self, outcomes: list[Outcome]) -> None:
        """See `Ticket.answer`."""
        self.client.answered(self, outcomes)


class Server(NamedTuple):
    """What a client sees of the running server."""

    shell: Shell
    later: Callable[..., Any]
    """`call_later` of its loop."""
    is_gone: Callable[[], bool]


class Client:
    """One client of one server's life."""

    def __init__(
        self, name: str, server: Server, book: Book, plan: Plan, chance: Random, more: Callable[[], bool]
    ) -> None:
        """more: whether another call may be made; counts it."""
        self.name, self._server, self._book, self._plan = name, server, book, plan
        self._chance, self._more = chance, more
        self._to_make: QueueKey | None = None
        """A queue that this client has deleted."""
        self._call: Call | None = None
        self._think()

    def _think(self) -> None:
        self._server.later(self._chance.expovariate(1e6 / self._plan.think_us), self.act)

    def act(self) -> None:
        """Make the next call."""
        if self._server.is_gone() or not self._more():
            return
        drawn = self._draw()
        if drawn is None:
            self._think()
            return
        commands, begun = drawn
        call = self._call = Call(self, commands, begun)
        shell = self._server.shell
        draw = self._chance.random()
        if draw < 0.05:
            self._server.later(self._chance.expovariate(1e6 / self._plan.think_us), self._hang_up, call)
        elif draw < 0.06:
            self._server.later(self._chance.expovariate(1e6 / self._plan.think_us), self._end_input, call)
        shell.submit(call, shell.now())

    def _hang_up(self, call: Call) -> None:
        if call.over or self._server.is_gone():
            return
        call.over = True
        for number in call.begun:
            self._book.is_over(number)
        self._server.shell.cancel(call)
        self._think()

    @property
    def waits(self) -> bool:
        """Whether a call has no answer yet."""
        return self._call is not None and not self._call.over

    def leave(self) -> None:
        """Hang up for good."""
        if self._call is not None and not self._call.over:
            self._call.over = True
            self._server.shell.cancel(self._call)

    def _end_input(self, call: Call) -> None:
        if not call.over and not self._server.is_gone():
            self._server.shell.answer_soon(call)

    def answered(self, call: Call, outcomes: list[Outcome]) -> None:
        """Write the answer down, unless nobody is there to read it."""
        if call.over or self._server.is_gone():
            return
        call.over = True
        for number in call.begun:
            self._book.is_over(number)
        (first, *_) = outcomes
        command = call.commands[0]
        if isinstance(command, Receive) and isinstance(first, Received) and self._chance.random() < 0.02:
            self._server.shell.undeliver(command, first)
        else:
            if isinstance(first, MoveStarted):
                self._book.tasks.append(first.info.id)
            for number, asked, outcome in zip(call.begun, call.commands, outcomes, strict=False):
                self._write(number, asked, outcome)
        self._think()

    def _write(self, number: int, asked: AnyCommand, outcome: Outcome) -> None:
        book = self._book
        match outcome:
            case StoreUnknown():
                book.end(number, Known.INFO, why=str(outcome))
            case VeilError():
                book.end(number, Known.FAIL, why=f"{type(outcome).__name__}: {outcome}")
                book.refused(number)
            case Sent() if isinstance(asked, Send):
                self._sent(number, asked.queue, outcome)
            case Received() if isinstance(asked, Receive):
                book.received(number, asked.queue, outcome)
            case Extended() if isinstance(asked, Extend):
                begun = book.log[number]
                if asked.rotate:
                    assert begun.lease is not None
                    book.keep(Held(asked.queue, outcome.handle, begun.lease, begun.rotation + 1))
                book.end(number, Known.OK)
            case QueueDeleted() if isinstance(asked, DeleteQueue):
                book.end(number, Known.OK)
                self._to_make = asked.queue
            case _:
                book.end(number, Known.OK)

    def _sent(self, number: int, queue: QueueKey, outcome: Sent) -> None:
        lease = None
        if outcome.handle:
            lease = self._book.lease()
            self._book.keep(Held(queue, outcome.handle, lease, 0))
        sequence = outcome.sequence if queue is FIFO else None
        self._book.end(number, Known.OK, message=outcome.id.hex(), sequence=sequence, lease=lease)

    def _draw(self) -> Drawn:
        """The next call."""
        chance = self._chance
        if self._to_make is not None:
            queue, self._to_make = self._to_make, None
            return [making(queue, self._plan)], []
        queue = FIFO if chance.random() < self._plan.fifo_share else JOBS
        draw = chance.random()
        if draw < 0.36:
            asked = [self._send(queue) for _ in range(chance.choice((1, 1, 1, 1, 2, 5)))]
            return [command for command, _ in asked], [number for _, number in asked]
        if draw < 0.66:
            dead = DEAD if queue is JOBS else DEAD_FIFO if self._plan.fifo_dies else queue
            return self._receive(dead if chance.random() < 0.15 else queue)
        if draw < 0.95:
            return self._use()
        if draw < 0.985:
            return self._look(queue)
        return self._upset(queue)

    def _send(self, queue: QueueKey) -> tuple[AnyCommand, int]:
        chance, book = self._chance, self._book
        book.bodies += 1
        length = int(chance.random() ** 2 * self._plan.body_bytes)
        body = f"b{book.bodies}.".ljust(length, "x")
        fields: dict[str, Any] = {}
        extras: dict[str, Any] = {}
        known: dict[str, Any] = {}
        if queue is FIFO:
            name = f"d{chance.randint(0, 8)}" if chance.random() < 0.3 else f"once {book.bodies}"
            known = extras = {"group": chance.choice("abc"), "deduplication_id": name}
            known = {"group": extras["group"], "deduplication": name}
        else:
            delay_us = chance.choice((0, 0, 0, 0, SECOND_US, DELAY_US_MAX))
            ttl_us = (
                chance.choice((None, None, None, 30 * SECOND_US))
                if self._plan.expires and not self._plan.moves
                else None
            )
            fields = {"delay_us": delay_us, "ttl_us": ttl_us, "wants_handle": chance.random() < 0.1}
            fields["priority"] = chance.choice((8, 8, 8, 1, 16))
            known = {"delay_us": delay_us, "ttl_us": ttl_us}
            if chance.random() < self._plan.tenants:
                extras["group"] = known["group"] = chance.choice(("tenant 1", "tenant 2", "tenant 3"))
        number = book.begin(self.name, Kind.SEND, queue, body=digest(body), **known)
        return sending(queue, body, extras=Extras(**extras), **fields), number

    def _receive(self, queue: QueueKey) -> tuple[list[AnyCommand], list[int]]:
        chance = self._chance
        lease_us = chance.choice((SECOND_US, 5 * SECOND_US, 30 * SECOND_US, LEASE_US_MAX, 0, None))
        known = LEASE_US_MAX // 2 if lease_us is None else lease_us
        repeats = queue in (FIFO, DEAD_FIFO) and chance.random() < self._plan.attempts
        attempt = chance.choice("xxy") if repeats else None
        if (queue, attempt) in self._book.waiting:
            attempt = None
        command = Receive(
            queue=queue, origin=TESTER, count_max=chance.choice((1, 1, 3, 10)), lease_us=lease_us,
            wait_us=chance.choice((0, 0, SECOND_US, 20 * SECOND_US)),
            in_flight_max=chance.choice((None, None, None, None, 2)), attempt_id=attempt,
        )  # fmt: skip
        number = self._book.begin(self.name, Kind.RECEIVE, queue, lease_us=known)
        if attempt is not None:
            self._book.ask(self.name, number, queue, attempt)
        return [command], [number]

    def _use(self) -> Drawn:
        chance, book = self._chance, self._book
        if not book.handles:
            return None
        held = chance.choice(book.handles[-6:] if chance.random() < 0.8 else book.handles)
        arrived = self._server.shell.arrived()
        known: dict[str, Any] = {"lease": held.lease, "rotation": held.rotation}
        late = chance.choice((AfterExpiry.ALLOW, AfterExpiry.REFUSE))
        draw = chance.random()
        if draw < (0.2 if self._plan.moves else 0.6):
            number = book.begin(self.name, Kind.DELETE, held.queue, **known)
            command: AnyCommand = Delete(
                queue=held.queue, origin=TESTER, handle=held.handle, arrived=arrived, after_expiry=late
            )
            return [command], [number]
        lease_us = 0 if draw < 0.8 else chance.choice((SECOND_US, 10 * SECOND_US, LEASE_US_MAX))
        rotates = lease_us > 0 and chance.random() < 0.3
        body: dict[str, Any] = {}
        if lease_us and chance.random() < 0.2 and held.queue is not FIFO and not self._plan.moves:
            book.bodies += 1
            text = f"b{book.bodies}.rewritten"
            body = {"body": text, "md5": md5(text.encode(), usedforsecurity=False).digest(), "size_bytes": len(text)}
            known["body"] = digest(text)
        kind = Kind.EXTEND if lease_us else Kind.RELEASE
        number = book.begin(self.name, kind, held.queue, lease_us=lease_us, rotates=rotates, **known)
        command = Extend(
            queue=held.queue, origin=TESTER, handle=held.handle, lease_us=lease_us, arrived=arrived, after_expiry=late,
            rotate=rotates, **body,
        )  # fmt: skip
        return [command], [number]

    def _look(self, queue: QueueKey) -> Drawn:
        """Calls that change nothing, or nothing that the log has."""
        chance = self._chance
        match chance.randint(0, 3):
            case 0:
                return [DescribeQueue(queue=queue, origin=TESTER)], []
            case 1:
                return [ListQueues(origin=TESTER, account=queue.account, region=queue.region)], []
            case 2:
                change = {"visibility_timeout_us": LEASE_US_MAX // chance.choice((1, 2, 60))}
                if queue is FIFO:
                    change["delay_us"] = chance.choice((0, 0, 3 * SECOND_US))
                return [ChangeQueue(queue=queue, origin=TESTER, change=change)], []
            case _:
                with suppress(
                    StoreUnknown, DatabaseError
                ):  # of a disk that fails; the next call finds the store broken
                    shell = self._server.shell
                    shell.store.query(Peek(queue=queue, origin=TESTER, count_max=5), shell.now())
                return None

    def _upset(self, queue: QueueKey) -> tuple[list[AnyCommand], list[int]]:
        """Calls after which all messages are gone."""
        number = self._book.begin(self.name, Kind.PURGE, queue)
        if queue is FIFO or self._chance.random() < 0.7:
            return [PurgeQueue(queue=queue, origin=TESTER)], [number]
        return [DeleteQueue(queue=queue, origin=TESTER)], [number]
