"""Who waits for messages, which requests to make for them, and who gets the messages that come.

Strategy: no thread, no clock, no I/O. A `Seat` is one receiver with its queue object; receivers share an exchange if
their objects stand for the same queue. A `Wish` is one waiting caller. A `Call` is one request to make now, over the
queue object of a seat with waiting callers.

While the queue is empty, at most `polls` requests are parked, however many callers wait. A full answer says that there
is more: then requests without a wait run side by side until one comes back short. A message goes to the caller that has
waited longest, and wakes nobody else.

After an error, or an empty answer that came long before its wait was over, only one request is made at a time, after a
pause that doubles: the queue or its cap on parked polls is the cause, and more requests would make it worse. The next
request uses another seat's object, if there is one. An error concerns only the callers of its own seat, until two seats
have met one; then it concerns all callers.

Messages that come when nobody waits are kept for the next caller for `grace` seconds, then released.
"""

import itertools
import math
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from veilmq.client.errors import ForkRefused, ServiceError, TransportError, may_succeed_later
from veilmq.client.messages import Received
from veilmq.client.queue import Queue, is_closed
from veilmq.model.errors import CapabilityMissing, UsageError, VeilError

BACKOFF_SECONDS: Final = 0.1
EARLY_SHARE: Final = 0.5
"""An empty answer is early if it took less than this share of its wait."""
_GOLDEN: Final = 0.6180339887498949

_OF_QUEUE: Final = (UsageError, CapabilityMissing, ServiceError, ForkRefused)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one receiver may do. Durations are seconds."""

    polls: int
    """Requests parked at the queue at once."""
    fetches: int
    """Requests without a wait at once, besides the parked ones."""
    count_max: int
    """Most messages of one request."""
    wait: float
    """Longest wait of one request."""
    grace: float
    backoff_max: float


def joint(all_of: Sequence[Limits]) -> Limits:
    """The limits of receivers that share requests: the most requests that any of them allows, and the smallest batch,
    wait and grace."""
    return Limits(
        polls=max(each.polls for each in all_of),
        fetches=max(each.fetches for each in all_of),
        count_max=min(each.count_max for each in all_of),
        wait=min(each.wait for each in all_of),
        grace=min(each.grace for each in all_of),
        backoff_max=max(each.backoff_max for each in all_of),
    )


class Seat:
    """One receiver at an exchange, with its queue object."""

    def __init__(self, queue: Queue, limits: Limits) -> None:
        self.queue = queue
        self.limits = limits
        self.left = False
        """The receiver is closed."""
        self.failed_at = -math.inf
        """When the last request over its object failed; -inf if the last one succeeded."""

    @property
    def closed(self) -> bool:
        """Whether its queue object is closed: then no request can be made over it, and its callers could delete
        nothing."""
        return is_closed(self.queue)

    @property
    def usable(self) -> bool:
        """Whether a failure of its requests says anything about the queue."""
        return not self.left and not self.closed

    def refusal(self) -> VeilError:
        """The error for callers whose queue object is closed."""
        return TransportError(reason=f"queue {self.queue.name} is closed", may_have_happened=False)


class Wish:
    """A caller that waits for up to `count` messages until `until`; None: one request without a wait (a look)."""

    def __init__(self, seat: Seat, count: int, since: float, until: float | None) -> None:
        self.seat = seat
        self.count = count
        self.since = since
        self.until = until
        self.outcome: Sequence[Received] | VeilError | None = None

    @property
    def gone(self) -> bool:
        """Whether the caller can no longer be woken, so that a message would be lost on it."""
        return False

    def resolve(self, outcome: Sequence[Received] | VeilError) -> None:
        """End the wait. Subclasses also wake the caller."""
        self.outcome = outcome


class Call(msgspec.Struct, eq=False):
    """A request to make: receive up to `count` messages, waiting up to `wait` seconds, or release messages."""

    seat: Seat
    """The seat whose queue object makes it."""
    count: int
    wait: float
    started: float
    looks: list[Wish] = []
    """The looks that it answers."""
    release: list[Received] = []


class _Spare(msgspec.Struct):
    """A message that came when nobody waited."""

    until: float
    message: Received
    seat: Seat
    """The seat over whose object it came."""


class Exchange:
    """All callers that wait for one queue. Instants are seconds on the client's monotonic clock."""

    def __init__(self, limits: Limits, jitter: float) -> None:
        self.limits = limits
        self.closed = False
        self.calls: dict[Call, None] = {}
        """Requests in progress."""
        self.error: VeilError | None = None
        """The error of the last request, if it failed."""
        self.not_before = -math.inf
        """No request is made before this instant."""
        self._waiting: dict[Wish, None] = {}
        self._looking: dict[Wish, None] = {}
        self._callers: dict[Seat, int] = {}
        """How many of these wait at each seat; seats with none are left out."""
        self._spares: deque[_Spare] = deque()
        self._more = False
        """The last answer was full, so there may be more."""
        self._failures = 0
        self._failing: weakref.WeakSet[Seat] = weakref.WeakSet()
        """Seats that met an error since the last successful request."""
        self._failed_at = -math.inf
        self._succeeded_at = -math.inf
        self._jitter = jitter

    @property
    def waiting(self) -> int:
        """How many callers wait."""
        return len(self._waiting) + len(self._looking)

    def waiting_at(self, seat: Seat) -> int:
        """How many callers wait at this seat."""
        return self._callers.get(seat, 0)

    def ask(self, wish: Wish, now: float) -> None:
        """Add a caller, which may be resolved at once."""
        if isinstance(self.error, ForkRefused):
            wish.resolve(self.error)
            return
        if self.closed or wish.seat.left:
            wish.resolve([])
            return
        if wish.seat.closed:
            wish.resolve(wish.seat.refusal())
            return
        messages = self._from_spares(wish.count, now)
        if messages or (wish.until is None and self._held_back(now)):
            wish.resolve(messages)
        else:
            self._enter(wish)

    def withdraw(self, wish: Wish) -> Sequence[Received] | VeilError:
        """The caller stops waiting: returns what it gets. An error only if every answer during its wait was an error,
        and not all of them came over one other seat's object."""
        if wish.outcome is not None:
            return wish.outcome
        self._forget(wish)
        wish.outcome = []  # what its request still brings is for others
        if self.error is not None and self._failed_at >= wish.since > self._succeeded_at and self._concerned(wish):
            wish.outcome = self.error
        return wish.outcome

    def give(self, messages: Sequence[Received], now: float, seat: Seat) -> None:
        """Give messages to the callers, longest wait first; keep the rest for a moment. seat: over whose object they
        came."""
        rest = deque(messages)
        while rest and (self._looking or self._waiting):
            self._hand(next(iter(self._waiting or self._looking)), rest)
        until = now + self.limits.grace
        self._spares.extend(_Spare(until, message, seat) for message in rest)

    def take(self, now: float) -> Call | None:
        """The request to make now, if there is one; it then counts as in progress."""
        self._dismiss()
        call = self._needed(now)
        if call is None:
            return None
        for _ in call.release:
            self._spares.popleft()
        for wish in call.looks:
            self._forget(wish)
        self.calls[call] = None
        return call

    def more(self, now: float) -> bool:
        """Whether `take` would return a request."""
        return self._needed(now) is not None

    def ended(self, call: Call, answer: Sequence[Received] | VeilError | None, now: float) -> list[Received]:
        """The request ended with messages, an error, or None if it broke. Returns the messages to release at once."""
        del self.calls[call]
        if call.release:
            return []
        messages: Sequence[Received] = []
        if answer is not None and not isinstance(answer, VeilError):
            messages = answer
        if not messages and not call.seat.usable:
            # Its queue object or receiver was closed: ask again over another seat, at once.
            self._look_again(call)
        elif answer is None or isinstance(answer, VeilError):
            self._failed(call, answer, now)
        else:
            self._succeeded(call, len(messages), now)
        if self._failures and self._requests():
            # After a failure there is one request at a time. A look that has to be repeated would wait for it.
            for wish in [*call.looks, *self._looking]:
                if wish.outcome is None:
                    self._resolve(wish, [])
        if self.closed:
            return list(messages)
        rest = deque(messages)
        for wish in call.looks:
            if wish.outcome is None and wish not in self._looking:
                self._hand(wish, rest)
        self.give(rest, now, call.seat)
        self._dismiss()
        return []

    def next_time(self, now: float) -> float:
        """When `take`, which has nothing now, may return a request even if no caller comes and no request ends;
        infinity: never."""
        spare = self._spares[0].until if self._spares else math.inf
        paused = self.not_before > now and (self._waiting or self._looking)
        return min(spare, self.not_before if paused else math.inf)

    def leave(self, seat: Seat) -> None:
        """A receiver closes: its callers stop waiting. Its requests continue for the others."""
        seat.left = True
        for wish in [*self._wishes(), *self._under_way()]:
            if wish.seat is seat:
                self._resolve(wish, [])

    def close(self) -> list[Received]:
        """End all waits. Returns the messages to release."""
        self.closed = True
        for wish in [*self._wishes(), *self._under_way()]:
            self._resolve(wish, [])
        spares = [spare.message for spare in self._spares]
        self._spares.clear()
        return spares

    def _needed(self, now: float) -> Call | None:
        if self._spares and self._spares[0].until <= now:
            seat = self._spares[0].seat
            over = itertools.takewhile(lambda spare: spare.until <= now and spare.seat is seat, self._spares)
            return Call(seat, 0, 0, now, release=[spare.message for spare in over])
        if self.closed or self._held_back(now):
            return None
        requests = self._requests()
        limits = self.limits
        if self._looking and requests < limits.polls + limits.fetches:
            looks = list(self._looking)
            count = min(sum(wish.count for wish in looks), limits.count_max)
            return Call(_next_seat(looks), count, 0, now, looks=looks)
        wanted = sum(wish.count for wish in self._waiting) - sum(call.count for call in self.calls if not call.looks)
        count = min(wanted, limits.count_max)
        if count <= 0:
            return None
        if self._more:
            wait = 0.0
            if requests >= limits.polls + limits.fetches:
                return None
        else:
            if sum(call.wait > 0 for call in self.calls) >= limits.polls:
                return None
            wait = min(limits.wait, max((wish.until or now) - now for wish in self._waiting))
            if wait <= 0:
                return None
        return Call(_next_seat(self._waiting), count, wait, now)

    def _wishes(self) -> Iterable[Wish]:
        return itertools.chain(self._waiting, self._looking)

    def _under_way(self) -> list[Wish]:
        """Looks whose request is in progress."""
        return [wish for call in self.calls for wish in call.looks if wish.outcome is None]

    def _requests(self) -> int:
        return sum(not call.release for call in self.calls)

    def _held_back(self, now: float) -> bool:
        """Whether a failure delays requests: a pause, then one request at a time."""
        return self.not_before > now or (self._failures > 0 and self._requests() > 0)

    def _succeeded(self, call: Call, count: int, now: float) -> None:
        self.error = None
        self._succeeded_at = now
        self._failing.clear()
        self._more = count >= call.count
        call.seat.failed_at = -math.inf
        if not count and call.wait > 0 and now - call.started < call.wait * EARLY_SHARE:
            call.seat.failed_at = now
            self._back_off(now)
            for wish in list(self._looking):
                self._resolve(wish, [])
        elif count or call.wait > 0:
            self._failures = 0
            self.not_before = -math.inf

    def _failed(self, call: Call, error: VeilError | None, now: float) -> None:
        """Looks get the error. Waiting callers go on waiting, unless waiting cannot help."""
        self._more = False
        self.error = error
        self._failed_at = call.seat.failed_at = now
        self._failing.add(call.seat)
        self._back_off(now)
        outcome: Sequence[Received] | VeilError = [] if error is None else error
        for wish in [*call.looks, *self._looking]:
            if wish.outcome is None and self._concerned(wish):
                self._resolve(wish, outcome)
        self._look_again(call)
        if error is None or may_succeed_later(error):
            return
        # A pattern's error is about one message (Undecryptable); the other errors are about the queue.
        if isinstance(error, _OF_QUEUE):
            concerned = [wish for wish in self._waiting if self._concerned(wish)]
        else:
            concerned = [wish for wish in self._waiting if wish.seat is call.seat][: not call.looks]
        for wish in concerned:
            self._resolve(wish, error)

    def _concerned(self, wish: Wish) -> bool:
        """Whether the errors since the last success concern this caller: they came over its own queue object, or over
        at least two, so that the cause is the queue and not one object."""
        return wish.seat in self._failing or len(self._failing) > 1

    def _back_off(self, now: float) -> None:
        self._jitter = (self._jitter + _GOLDEN) % 1.0
        pause = min(math.ldexp(BACKOFF_SECONDS, min(self._failures, 16)), self.limits.backoff_max)
        self._failures += 1
        self.not_before = now + pause * (0.75 + 0.25 * self._jitter)

    def _dismiss(self) -> None:
        """End the waits of callers whose queue object was closed."""
        closed = [seat for seat in self._callers if seat.closed]
        if closed:
            for wish in [wish for wish in self._wishes() if wish.seat in closed]:
                self._resolve(wish, wish.seat.refusal())

    def _hand(self, wish: Wish, rest: deque[Received]) -> None:
        """Give the caller its share of the messages in `rest`."""
        if wish.seat.closed:
            self._resolve(wish, wish.seat.refusal())
        elif wish.gone:
            self._resolve(wish, [])
        else:
            self._resolve(wish, [rest.popleft() for _ in range(min(wish.count, len(rest)))])

    def _look_again(self, call: Call) -> None:
        """The request failed over this object: callers without an outcome ask again over another."""
        for wish in call.looks:
            if wish.outcome is None:
                self._enter(wish)

    def _enter(self, wish: Wish) -> None:
        (self._looking if wish.until is None else self._waiting)[wish] = None
        self._callers[wish.seat] = self._callers.get(wish.seat, 0) + 1

    def _forget(self, wish: Wish) -> None:
        if wish not in self._waiting and wish not in self._looking:
            return
        self._waiting.pop(wish, None)
        self._looking.pop(wish, None)
        self._callers[wish.seat] -= 1
        if not self._callers[wish.seat]:
            del self._callers[wish.seat]

    def _resolve(self, wish: Wish, outcome: Sequence[Received] | VeilError) -> None:
        self._forget(wish)
        wish.resolve(outcome)

    def _from_spares(self, count: int, now: float) -> list[Received]:
        """Spares whose lease still runs; spares whose grace is over are released."""
        found: list[Received] = []
        for _ in range(len(self._spares)):
            spare = self._spares.popleft()
            if len(found) < count and spare.message.lease_end > now:
                found.append(spare.message)
            else:
                self._spares.append(spare)
        return found


def _next_seat(wishes: Collection[Wish]) -> Seat:
    """The seat for the next request: of the caller that has waited longest, skipping failed seats; if all have failed,
    the one that failed longest ago."""
    first = next(iter(wishes)).seat
    if first.failed_at == -math.inf:
        return first
    return min((wish.seat for wish in wishes), key=lambda seat: seat.failed_at)
