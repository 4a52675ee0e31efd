"""Who waits for messages, what to ask the queue for them, and who gets what it brings.

Strategy: no thread, no clock, no queue. A `Wish` is one caller that waits; a `Call` is one request that should be made
now. While nothing is there, at most `polls` requests are parked, whoever waits; an answer that was full says that there
is more, and then requests without a wait run side by side until one comes back short. A message goes to the caller that
waits longest, and wakes nobody else. An error, or an empty answer that came long before its wait was over, leaves one
request at a time, after a pause that doubles: the queue or its cap on parked polls is at fault, and a storm would make
it worse.

What comes when nobody waits any more is kept for the next caller for `grace` seconds, then released.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from veilmq.client.errors import ForkRefused, ServiceError, TransportError
from veilmq.client.messages import Received
from veilmq.model.errors import CapabilityMissing, CapacityError, StoreError, UsageError, VeilError

BACKOFF_SECONDS: Final = 0.1
EARLY_SHARE: Final = 0.5
"""An empty answer that took less than this share of its wait came early."""
_GOLDEN: Final = 0.6180339887498949

_OF_QUEUE: Final = (UsageError, CapabilityMissing, ServiceError, ForkRefused)


class Wish:
    """A caller that waits for up to `count` messages until `until`; `until` None: one look at the queue, no wait."""

    def __init__(self, count: int, since: float, until: float | None) -> None:
        self.count = count
        self.since = since
        self.until = until
        self.outcome: Sequence[Received] | VeilError | None = None

    def resolve(self, outcome: Sequence[Received] | VeilError) -> None:
        """The wait is over. A shell's own class wakes the caller as well."""
        self.outcome = outcome


class Call(msgspec.Struct, eq=False):
    """A request to make: up to `count` messages, waiting up to `wait` seconds; or messages to release."""

    count: int
    wait: float
    started: float
    looks: list[Wish] = []
    """The wishes without a wait that it answers."""
    release: list[Received] = []


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one receiver may do. Seconds."""

    polls: int
    """Requests that wait at the queue at once."""
    fetches: int
    """Requests without a wait at once, beside them."""
    count_max: int
    """Messages of one request."""
    wait: float
    """Wait of one request."""
    grace: float
    backoff_max: float


class Exchange:
    """All that waits at one receiver. Instants are seconds on the client's monotonic clock."""

    def __init__(self, limits: Limits, jitter: float) -> None:
        self.limits = limits
        self.closed = False
        self.calls: dict[Call, None] = {}
        """Under way."""
        self.error: VeilError | None = None
        """Of the last request, if it failed."""
        self.not_before = -math.inf
        """No request leaves before this instant."""
        self._waiting: dict[Wish, None] = {}
        self._looking: dict[Wish, None] = {}
        self._spares: deque[tuple[float, Received]] = deque()
        self._more = False
        """The last answer was full: there may be more."""
        self._failures = 0
        self._failed_at = -math.inf
        self._succeeded_at = -math.inf
        self._jitter = jitter

    @property
    def waiting(self) -> int:
        """Callers that wait."""
        return len(self._waiting) + len(self._looking)

    def ask(self, wish: Wish, now: float) -> None:
        """A caller comes; it may be resolved at once."""
        if isinstance(self.error, ForkRefused):
            wish.resolve(self.error)
            return
        messages = self._from_spares(wish.count, now)
        if messages or self.closed or (wish.until is None and self._held_back(now)):
            wish.resolve(messages)
        elif wish.until is None:
            self._looking[wish] = None
        else:
            self._waiting[wish] = None

    def withdraw(self, wish: Wish) -> Sequence[Received] | VeilError:
        """The caller waits no longer: what it gets. An error only if nothing but errors came while it waited."""
        if wish.outcome is not None:
            return wish.outcome
        self._waiting.pop(wish, None)
        self._looking.pop(wish, None)
        if self.error is not None and self._failed_at >= wish.since > self._succeeded_at:
            return self.error
        return []

    def give(self, messages: Sequence[Received], now: float) -> None:
        """Hand messages to those who wait, longest first; keep what is left for a moment."""
        rest = deque(messages)
        while rest and (self._looking or self._waiting):
            wish = next(iter(self._waiting or self._looking))
            self._resolve(wish, [rest.popleft() for _ in range(min(wish.count, len(rest)))])
        self._spares.extend((now + self.limits.grace, message) for message in rest)

    def take(self, now: float) -> Call | None:
        """The request to make now, if there is one; it is under way then."""
        call = self._needed(now)
        if call is None:
            return None
        if call.release:
            for _ in call.release:
                self._spares.popleft()
        for wish in call.looks:
            del self._looking[wish]
        self.calls[call] = None
        return call

    def more(self, now: float) -> bool:
        """Whether `take` would find something."""
        return self._needed(now) is not None

    def ended(self, call: Call, answer: Sequence[Received] | VeilError | None, now: float) -> list[Received]:
        """The request is over: messages, an error, or None if it broke. Returns what is to be released at once."""
        del self.calls[call]
        if call.release:
            return []
        messages: Sequence[Received] = []
        if answer is None or isinstance(answer, VeilError):
            self._failed(call, answer, now)
        else:
            messages = answer
            self._succeeded(call, len(messages), now)
        if self.closed:
            return list(messages)
        rest = deque(messages)
        for wish in call.looks:
            if wish.outcome is None:
                wish.resolve([rest.popleft() for _ in range(min(wish.count, len(rest)))])
        self.give(rest, now)
        return []

    def next_time(self) -> float:
        """When `take` may find something though nobody came and no request ended."""
        spare = self._spares[0][0] if self._spares else math.inf
        return min(spare, self.not_before if self._waiting else math.inf)

    def close(self) -> list[Received]:
        """Nobody waits any more; what is to be released."""
        self.closed = True
        looking = [wish for call in self.calls for wish in call.looks if wish.outcome is None]
        for wish in [*self._waiting, *self._looking, *looking]:
            self._resolve(wish, [])
        spares = [message for _, message in self._spares]
        self._spares.clear()
        return spares

    def _needed(self, now: float) -> Call | None:
        if self._spares and self._spares[0][0] <= now:
            return Call(0, 0, now, release=[message for end, message in self._spares if end <= now])
        if self.closed or self._held_back(now):
            return None
        requests = self._requests()
        limits = self.limits
        if self._looking and requests < limits.polls + limits.fetches:
            looks = list(self._looking)
            return Call(min(sum(wish.count for wish in looks), limits.count_max), 0, now, looks=looks)
        wanted = sum(wish.count for wish in self._waiting) - sum(call.count for call in self.calls if not call.looks)
        count = min(wanted, limits.count_max)
        if count <= 0:
            return None
        if self._more:
            return Call(count, 0, now) if requests < limits.polls + limits.fetches else None
        if sum(call.wait > 0 for call in self.calls) >= limits.polls:
            return None
        wait = min(limits.wait, max((wish.until or now) - now for wish in self._waiting))
        return Call(count, wait, now) if wait > 0 else None

    def _requests(self) -> int:
        return sum(not call.release for call in self.calls)

    def _held_back(self, now: float) -> bool:
        """After a failure: a pause, then one request at a time."""
        return self.not_before > now or (self._failures > 0 and self._requests() > 0)

    def _succeeded(self, call: Call, count: int, now: float) -> None:
        self.error = None
        self._succeeded_at = now
        self._more = count >= call.count
        if not count and call.wait > 0 and now - call.started < call.wait * EARLY_SHARE:
            self._back_off(now, [])
        elif count or call.wait > 0:
            self._failures = 0
            self.not_before = -math.inf

    def _failed(self, call: Call, error: VeilError | None, now: float) -> None:
        """Those who looked get the error; those who wait go on waiting, unless waiting cannot help."""
        self._more = False
        self.error = error
        self._failed_at = now
        outcome: Sequence[Received] | VeilError = [] if error is None else error
        for wish in call.looks:
            wish.resolve(outcome)
        self._back_off(now, outcome)
        if error is None or _passes(error):
            return
        # A pattern's error is about one message (Undecryptable), the others are about the queue.
        concerned = list(self._waiting) if isinstance(error, _OF_QUEUE) else list(self._waiting)[: not call.looks]
        for wish in concerned:
            self._resolve(wish, error)

    def _back_off(self, now: float, outcome: Sequence[Received] | VeilError) -> None:
        self._jitter = (self._jitter + _GOLDEN) % 1.0
        pause = min(math.ldexp(BACKOFF_SECONDS, min(self._failures, 16)), self.limits.backoff_max)
        self._failures += 1
        self.not_before = now + pause * (0.75 + 0.25 * self._jitter)
        for wish in list(self._looking):
            self._resolve(wish, outcome)

    def _resolve(self, wish: Wish, outcome: Sequence[Received] | VeilError) -> None:
        self._waiting.pop(wish, None)
        self._looking.pop(wish, None)
        wish.resolve(outcome)

    def _from_spares(self, count: int, now: float) -> list[Received]:
        """Spares whose lease still runs; the others are released when their grace is over."""
        found: list[Received] = []
        for _ in range(len(self._spares)):
            spare = self._spares.popleft()
            if len(found) < count and spare[1].lease_end > now:
                found.append(spare[1])
            else:
                self._spares.append(spare)
        return found


def _passes(error: VeilError) -> bool:
    """Whether the same request may succeed later, so that waiting helps."""
    if isinstance(error, ServiceError):
        return error.retryable
    return isinstance(error, TransportError | CapacityError | StoreError) and not isinstance(error, ForkRefused)
