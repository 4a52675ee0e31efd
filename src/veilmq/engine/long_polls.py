"""The waiting room: parked receives, first come first served, per queue; and how many bytes of answers clients have not
read, while receives must wait for them.

Strategy: each queue keeps its waiters in order of arrival. A wake takes out the first one; if its claim finds nothing,
it returns to its old place (`Waiter.place` orders the list). A heap holds the deadlines; an entry whose waiter has left
is skipped. The cost is the same with 2,000 waiters as with 2.

Before changing it: the server itself waits for each hidden queue, once per subscription; it neither uses the clients'
room nor can be denied room by them. A waiter held up by a cap on messages in flight (SQS) must not block waiters
without one, so those are also kept in a list of their own.

A receive beyond the cap may have to wait for its empty answer, too: `Brake` slows clients that poll in a tight loop. It
is a heap of due instants; the entry of a client that hung up is skipped when it is due. No message wakes these tickets:
their answer is decided and only sent later.

Messages that became available are counted for the waiters of their queue (`Credits`), until as many of these try again.

Counts of receives (`Polls`), by queue, principal and minute, for the `polled` events: counted in memory and appended to
the history once a minute; a crash loses only the current minute. Counting per principal, not per user agent, bounds the
memory: a client can send any number of user agents.

Unread answers (`Unread`): the listeners count an answer when its client reads too slowly for it, and uncount it when
the client has read it or is gone. While there are too many such bytes, in all or of one account, the engine starts no
receives: long polls stay parked, other receives are refused. Everything else goes on. `near` is False as long as
nothing can be refused, so that a batch usually pays for one comparison. What is being read from clients has its own
bound of the same size (`server.http.Limits`). It also takes from the bound here, but at most half: clients without any
key can send unfinished requests, and must not be able to stop all receives.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Final

import msgspec

from veilmq.engine import Limits
from veilmq.model.commands import Origin, PollCount, Receive
from veilmq.model.instant import Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import is_hidden

_STALE_MAX: Final = 1_024
"""How many more stale entries than parked waiters the heap may hold before it is rebuilt."""


class Waiter(msgspec.Struct, gc=False, eq=False):
    """One parked receive."""

    ticket: Any
    command: Receive
    began: Instant
    """When the call came."""
    deadline: Instant
    place: int
    parked: bool = False
    timed: bool = False
    """Has an entry in the heap of deadlines."""


class WaitingRoom:
    """All parked receives."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lines: dict[QueueKey, list[Waiter]] = {}
        self._free: dict[QueueKey, list[Waiter]] = {}
        """The waiters of each queue that no cap on messages in flight can hold up."""
        self._own_waits: dict[QueueKey, int] = {}
        """The `wait_us` of queues where somebody waits, as the store last named it."""
        self._attempts: dict[tuple[QueueKey, str], list[Waiter]] = {}
        """Waiters with an attempt id, by queue and id."""
        self.parked: dict[Any, Waiter] = {}
        """By ticket; for reading only. Never replaced: a test whether it is empty costs less than one of the room."""
        self._deadlines: list[tuple[int, int, Waiter]] = []
        self._accounts: Counter[str] = Counter()
        self._hidden = 0
        self._places = 0
        self.refused: Counter[tuple[QueueKey, str]] = Counter()
        """Receives that found no room, by queue and limit; whoever reports them may replace the counter."""

    def __len__(self) -> int:
        return len(self.parked)

    @property
    def clients(self) -> int:
        """How many receives of clients wait; the server's own, for pushes, do not count."""
        return len(self.parked) - self._hidden

    def waits_for(self, queue: QueueKey) -> int:
        """How many receives wait for the queue."""
        return len(self._lines.get(queue, ()))

    def who_waits_for(self, queue: QueueKey) -> Counter[Origin]:
        """How many receives of each client wait for the queue."""
        return Counter(waiter.command.origin for waiter in self._lines.get(queue, ()))

    def everybody(self) -> list[Origin]:
        """Who waits, for any queue: one for each receive."""
        return [waiter.command.origin for waiter in self.parked.values()]

    def wait_behind(self, command: Receive) -> int:
        """How long a receive that comes now waits behind others, in us; 0: none is before it, or it may not wait."""
        lines = self._free if command.in_flight_max is None else self._lines
        if command.queue not in lines:
            return 0
        return self._own_waits.get(command.queue, 0) if command.wait_us is None else command.wait_us

    def note_wait(self, command: Receive, wait_us: int) -> None:
        """The store said how long that receive waits: if this is the queue's own wait, others may wait behind it."""
        if command.wait_us is None and command.queue in self._lines:
            self._own_waits[command.queue] = wait_us

    def forget_waits(self) -> None:
        """A queue's settings may have changed: the store names its own wait again to the next receive."""
        self._own_waits.clear()

    def has_room(self, queue: QueueKey) -> bool:
        """Whether one more may park for the queue; if not, it is counted in `refused`."""
        limits = self._limits
        if is_hidden(queue.name):
            return True
        if self.clients >= limits.parked_max:
            full = "parked_max"
        elif self._accounts[queue.account] >= limits.parked_per_account_max:
            full = "parked_per_account_max"
        elif self.waits_for(queue) >= limits.parked_per_queue_max:
            full = "parked_per_queue_max"
        else:
            return True
        self.refused[queue, full] += 1
        return False

    def new(self, ticket: Any, command: Receive, began: Instant, deadline: Instant) -> Waiter:
        """A new waiter, last in order, not parked yet."""
        self._places += 1
        return Waiter(ticket, command, began, deadline, self._places)

    def park(self, waiter: Waiter) -> None:
        """Add the waiter to its queue's list, at its place."""
        queue = waiter.command.queue
        _join(self._lines, waiter)
        if waiter.command.in_flight_max is None:
            _join(self._free, waiter)
        if waiter.command.attempt_id is not None:
            self._attempts.setdefault((queue, waiter.command.attempt_id), []).append(waiter)
        waiter.parked = True
        self.parked[waiter.ticket] = waiter
        self._count(queue, 1)
        if not waiter.timed:
            waiter.timed = True
            heappush(self._deadlines, (waiter.deadline, waiter.place, waiter))
            if len(self._deadlines) > 2 * len(self.parked) + _STALE_MAX:
                self._compact()

    def take_first(self, queue: QueueKey) -> Waiter | None:
        """Take out the waiter that has waited longest for the queue."""
        line = self._lines.get(queue)
        return self._leave(line[0]) if line else None

    def take_free(self, queue: QueueKey) -> Waiter | None:
        """Take out the longest waiter that no cap holds up."""
        line = self._free.get(queue)
        return self._leave(line[0]) if line else None

    def take(self, ticket: Any) -> Waiter | None:
        """Take out the waiter of that ticket; None if it is not parked."""
        waiter = self.parked.get(ticket)
        return None if waiter is None else self._leave(waiter)

    def take_expired(self, now: Instant) -> list[Waiter]:
        """Take out all waiters whose deadline has come."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            waiter = heappop(self._deadlines)[2]
            waiter.timed = False
            if waiter.parked:
                expired.append(self._leave(waiter))
        return expired

    def take_all(self, queue: QueueKey | None = None) -> list[Waiter]:
        """Take out all waiters, or all of one queue (it was deleted)."""
        queues = list(self._lines) if queue is None else [queue]
        return [self._leave(waiter) for key in queues for waiter in list(self._lines.get(key, ()))]

    def take_attempt(self, queue: QueueKey, attempt_id: str) -> list[Waiter]:
        """Take out all waiters with that attempt id."""
        return [self._leave(waiter) for waiter in list(self._attempts.get((queue, attempt_id), ()))]

    def next_deadline(self) -> Instant | None:
        """The earliest deadline of all parked waiters."""
        while self._deadlines and not self._deadlines[0][2].parked:
            heappop(self._deadlines)[2].timed = False
        return Instant(self._deadlines[0][0]) if self._deadlines else None

    def _compact(self) -> None:
        """Drop the entries of waiters that left. A waiter that is in a batch now gets a new entry if it parks again."""
        parked = []
        for entry in self._deadlines:
            if entry[2].parked:
                parked.append(entry)
            else:
                entry[2].timed = False
        heapify(parked)
        self._deadlines = parked

    def _leave(self, waiter: Waiter) -> Waiter:
        queue = waiter.command.queue
        _step_out(self._lines, waiter)
        if queue not in self._lines:
            self._own_waits.pop(queue, None)
        if waiter.command.in_flight_max is None:
            _step_out(self._free, waiter)
        if waiter.command.attempt_id is not None:
            again = self._attempts[queue, waiter.command.attempt_id]
            again.remove(waiter)
            if not again:
                del self._attempts[queue, waiter.command.attempt_id]
        del self.parked[waiter.ticket]
        self._count(queue, -1)
        waiter.parked = False
        return waiter

    def _count(self, queue: QueueKey, more: int) -> None:
        if is_hidden(queue.name):
            self._hidden += more
            return
        self._accounts[queue.account] += more
        if not self._accounts[queue.account]:
            del self._accounts[queue.account]


def _join(lines: dict[QueueKey, list[Waiter]], waiter: Waiter) -> None:
    """Insert the waiter into the queue's list, by place."""
    line = lines.setdefault(waiter.command.queue, [])
    if not line or line[-1].place < waiter.place:
        line.append(waiter)
    else:
        insort(line, waiter, key=_place)


def _step_out(lines: dict[QueueKey, list[Waiter]], waiter: Waiter) -> None:
    """Remove the waiter from the queue's list."""
    line = lines[waiter.command.queue]
    if line[0] is waiter:
        del line[0]
    else:
        line.remove(waiter)
    if not line:
        del lines[waiter.command.queue]


def _place(waiter: Waiter) -> int:
    return waiter.place


class Brake:
    """Tickets whose empty answer is due later."""

    def __init__(self) -> None:
        self._dues: list[tuple[Instant, int, Any]] = []
        self._held: set[Any] = set()
        self._places = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, ticket: Any, due: Instant) -> None:
        """Answer the ticket at `due`."""
        self._places += 1
        self._held.add(ticket)
        heappush(self._dues, (due, self._places, ticket))

    def cancel(self, ticket: Any) -> bool:
        """Forget the ticket of a client that is gone. Returns whether it was held."""
        held = ticket in self._held
        self._held.discard(ticket)
        return held

    def take_due(self, now: Instant) -> list[Any]:
        """Take out all whose answer is due."""
        due = []
        while self._dues and (self._dues[0][0] <= now or self._dues[0][2] not in self._held):
            ticket = heappop(self._dues)[2]
            if ticket in self._held:
                self._held.remove(ticket)
                due.append(ticket)
        return due

    def take_all(self) -> list[Any]:
        """Take out all tickets."""
        everybody = [ticket for _, _, ticket in sorted(self._dues, key=lambda due: due[:2]) if ticket in self._held]
        self._dues, self._held = [], set()
        return everybody

    def next_due(self) -> Instant | None:
        """The earliest due instant."""
        return self._dues[0][0] if self._dues else None


POLLERS_MAX = 10_000
"""Distinct (queue, principal) pairs counted in one minute; more are not counted."""


class Polls:
    """Counts since the last `take`."""

    def __init__(self) -> None:
        self._counts: dict[tuple[QueueKey, str], list[int]] = {}
        self._origins: dict[tuple[QueueKey, str], Origin] = {}
        # A client that polls in a loop has the same two values each time.
        self._queue: QueueKey | None = None
        self._origin: Origin | None = None
        self._last = [0, 0, 0]

    def __bool__(self) -> bool:
        return bool(self._counts)

    def count(self, command: Receive, *, empty: bool, refused: bool = False) -> None:
        """A receive was answered."""
        if command.queue is not self._queue or command.origin is not self._origin:
            counts = self._find(command)
            if counts is None:
                return
            self._queue, self._origin, self._last = command.queue, command.origin, counts
        last = self._last
        last[0] += 1
        if empty:
            last[1] += 1
            last[2] += refused

    def _find(self, command: Receive) -> list[int] | None:
        key = (command.queue, command.origin.principal)
        counts = self._counts.get(key)
        if counts is None and len(self._counts) < POLLERS_MAX:
            counts = self._counts[key] = [0, 0, 0]
            self._origins[key] = command.origin
        return counts

    def take(self) -> tuple[PollCount, ...]:
        """All counts; the next minute begins."""
        taken = tuple(PollCount(key[0], self._origins[key], *counts) for key, counts in self._counts.items())
        self._counts = {}
        self._origins = {}
        self._queue = self._origin = None
        return taken


class Unread:
    """The unread bytes of one server, by account.

    bytes: of all accounts. bytes_max: their bound. account_bytes_max: the bound of one account, half of `bytes_max`.
    near: whether any account may be over a bound. refused: receives and peeks that were refused, since the start.
    reading: returns the bytes of unfinished requests. on_room: called when bytes were read while `near`.
    """

    __slots__ = ("_accounts", "account_bytes_max", "bytes", "bytes_max", "near", "on_room", "reading", "refused")

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self.account_bytes_max = bytes_max // 2
        self.near = False
        self.refused = 0
        self.reading: Callable[[], int] = lambda: 0
        self.on_room: Callable[[], None] = lambda: None
        self._accounts: dict[str, int] = {}

    def add(self, account: str, size: int) -> None:
        """An answer of that size waits for its client."""
        self.bytes += size
        self._accounts[account] = self._accounts.get(account, 0) + size
        self.near = self.bytes > self.account_bytes_max

    def remove(self, account: str, size: int) -> None:
        """The client has read it, or is gone."""
        self.bytes -= size
        left = self._accounts[account] - size
        if left:
            self._accounts[account] = left
        else:
            del self._accounts[account]
        if self.near:
            self.near = self.bytes > self.account_bytes_max
            self.on_room()

    def refuses(self, account: str) -> bool:
        """Whether messages for this account must wait."""
        if self._accounts.get(account, 0) > self.account_bytes_max:
            return True
        return self.bytes + min(self.reading(), self.account_bytes_max) > self.bytes_max


class Credits:
    """How many messages have become available to parked receives, by queue. True if some may be received now: those of
    accounts that must first read their answers are withheld until then.
    """

    __slots__ = ("_given", "_unread", "_withheld")

    def __init__(self, unread: Unread) -> None:
        self._unread = unread
        self._given: dict[QueueKey, int] = {}
        self._withheld: dict[QueueKey, int] = {}

    def __bool__(self) -> bool:
        return bool(self._given)

    def add(self, queue: QueueKey, count: int) -> None:
        """So many more messages may be available."""
        self._given[queue] = self._given.get(queue, 0) + count

    def withhold(self, queue: QueueKey, count: int) -> None:
        """So many more may be available, but nobody may receive them now."""
        self._withheld[queue] = self._withheld.get(queue, 0) + count

    def take(self) -> dict[QueueKey, int]:
        """All that may be received now."""
        if self._withheld:
            withheld, self._withheld = self._withheld, {}
            for queue, count in withheld.items():
                self.add(queue, count)
        given, self._given = self._given, {}
        if self._unread.near:
            for queue in list(given):
                if self._unread.refuses(queue.account) and not is_hidden(queue.name):
                    self.withhold(queue, given.pop(queue))
        return given
