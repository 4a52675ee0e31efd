"""The threads that make receivers' requests, and the table of receivers that share them.

Strategy: receivers whose queue objects stand for the same queue (veilmq.client.identity) share one exchange, if they
have the same lease and clock. The table of shared exchanges keeps nothing alive: an entry goes with its last receiver.
Each runner asks the exchange (exchange.py) what to do, does it, and reports the result. Runners are started as needed,
at most one for each request that may be in progress, and end when idle. One lock guards the exchange; it is never held
during a request. If a runner breaks (a bug in an adapter), its traceback goes to threading.excepthook, a new runner
replaces it, and its request counts as failed.

Closing: a receiver that closes leaves its requests to the others. The last one interrupts the queue objects again and
again until no request is parked: one may have been about to start at the first interruption.
"""

import logging
import math
import secrets
import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Final

from veilmq.client import checked
from veilmq.client.clock import Clock, sleeping_by
from veilmq.client.forked import Anew, forget_in_child
from veilmq.client.identity import ById, identity_of
from veilmq.client.messages import Received
from veilmq.client.receiver.exchange import Call, Exchange, Limits, Seat, Wish, joint
from veilmq.model.errors import VeilError

IDLE_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 0.05
"""First pause between two interruptions; it doubles."""
_AGAIN_MAX: Final = 8
_JITTERS: Final = 1 << 30

log = logging.getLogger("veilmq.receiver")


class Polling(Anew):
    """The requests of one queue's receivers."""

    def __init__(self, limits: Limits, lease: float | None, clock: Clock) -> None:
        """limits: those of the first receiver."""
        self.lease = lease
        self.clock = clock
        self._limits = limits
        self._seats: weakref.WeakSet[Seat] = weakref.WeakSet()
        """Seats of receivers that are not closed."""
        self._counted = 0
        """How many seats the current limits were computed from."""
        self._closed = False
        self._here()

    def _begin(self) -> None:
        self._exchange = Exchange(self._limits, secrets.randbelow(_JITTERS) / _JITTERS)
        self._exchange.closed = self._closed
        self._runners = 0
        self._releasing = 0
        self._idle = 0
        self._changed = sleeping_by(self.clock, threading.Condition())

    def waiting(self, seat: Seat) -> int:
        """How many callers wait at this seat."""
        return self._exchange.waiting_at(seat)

    def join(self, seat: Seat) -> None:
        """Add a receiver."""
        with self._changed:
            self._seats.add(seat)
            self._fit()

    def leave(self, seat: Seat) -> bool:
        """Remove a receiver: its callers get nothing. Returns whether it was the last one; then everything ends."""
        self._here()
        with self._changed:
            self._exchange.leave(seat)
            self._seats.discard(seat)
            self._closed = not self._seats
            if not self._closed:
                self._fit()
        return self._closed

    def _fit(self) -> None:
        """Recompute the limits from the living receivers; one may have been garbage-collected without a close."""
        seats = list(self._seats)
        self._counted = len(seats)
        if seats:
            self._limits = self._exchange.limits = joint([seat.limits for seat in seats])

    def ask(self, wish: Wish) -> None:
        """Add a caller."""
        self._here()
        with self._changed:
            now = self.clock.monotonic()
            self._exchange.ask(wish, now)
            if self._exchange.more(now):
                try:
                    self._rouse(wish.seat.queue.name)
                except RuntimeError:
                    self._exchange.withdraw(wish)
                    raise

    def withdraw(self, wish: Wish) -> Sequence[Received] | VeilError:
        """The caller stops waiting: returns what it gets."""
        with self._changed:
            return self._exchange.withdraw(wish)

    def abandon(self, wish: Wish) -> None:
        """The caller is gone: other callers get its messages."""
        with self._changed:
            outcome = self._exchange.withdraw(wish)
            if isinstance(outcome, VeilError) or not outcome:
                return
            if not self._exchange.closed:
                self._exchange.give(outcome, self.clock.monotonic(), wish.seat)
                self._rouse(wish.seat.queue.name)
                return
        self._release(outcome, wish.seat)

    def close(self, seat: Seat, deadline: float) -> None:
        """Close a receiver: its callers get nothing. The last one also ends the parked requests, and waits up to
        `deadline` seconds for those in progress, which release the messages that they bring. Raises
        ParameterInvalid."""
        checked.remaining(deadline, "deadline")
        if not _shared.leave(self, seat):
            return
        with self._changed:
            first = not self._exchange.closed
            spares = self._exchange.close()
            self._changed.notify_all()
            parked = bool(self._exchange.calls)
        if first and parked:
            self._interrupt()
            threading.Thread(target=self._end_calls, name=f"veilmq receiver {seat.queue.name} end", daemon=True).start()
        self._release(spares, seat)
        end = self.clock.monotonic() + deadline
        with self._changed:
            while (self._exchange.calls or self._releasing) and (left := end - self.clock.monotonic()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _interrupt(self) -> None:
        """Interrupt all objects: a request may run over the object of a receiver that closed earlier."""
        with self._changed:
            queues = {id(call.seat.queue): call.seat.queue for call in self._exchange.calls}
        for queue in queues.values():
            queue.interrupt()

    def _end_calls(self) -> None:
        for turn in range(_AGAIN_MAX):
            with self._changed:
                if self._changed.wait_for(lambda: not self._exchange.calls, math.ldexp(AGAIN_SECONDS, turn)):
                    return
            self._interrupt()

    def _rouse(self, name: str) -> None:
        if self._idle:
            self._changed.notify()
        elif self._runners < self._limits.polls + self._limits.fetches:
            thread = threading.Thread(target=self._run, args=(name,), name=f"veilmq receiver {name}", daemon=True)
            self._runners += 1  # before it runs, because Ctrl-C may come while it starts
            try:
                thread.start()
            except RuntimeError:  # "can't start new thread": the running ones continue
                self._runners -= 1
                if not self._runners:
                    raise

    def _run(self, name: str) -> None:
        broken = True
        try:
            while (call := self._next(name)) is not None:
                self._do(call)
            broken = False
        finally:
            with self._changed:
                self._runners -= 1
                if broken:
                    self._rouse(name)

    def _next(self, name: str) -> Call | None:
        """Wait for the next request; None when this runner may end."""
        with self._changed:
            leave_at = self.clock.monotonic() + IDLE_SECONDS
            while True:
                now = self.clock.monotonic()
                if self._counted != len(self._seats):
                    self._fit()
                call = self._exchange.take(now)
                if call is not None:
                    if self._exchange.more(now):
                        self._rouse(name)
                    return call
                at = self._exchange.next_time()
                if self._exchange.closed or (now >= leave_at and at == math.inf):
                    return None
                self._idle += 1
                self._changed.wait(max(min(at, leave_at) - now, 0.001))
                self._idle -= 1

    def _do(self, call: Call) -> None:
        answer: Sequence[Received] | VeilError | None = None
        late: Sequence[Received] = call.release
        try:
            if not late:
                answer = self._receive(call)
        finally:
            with self._changed:
                late = self._exchange.ended(call, answer, self.clock.monotonic()) or late
                self._releasing += bool(late)
                if self._exchange.closed:
                    self._changed.notify_all()
        if late:
            try:
                self._release(late, call.seat)
            finally:
                with self._changed:
                    self._releasing -= 1
                    self._changed.notify_all()

    def _receive(self, call: Call) -> Sequence[Received] | VeilError:
        queue = call.seat.queue
        try:
            return queue.receive(call.count, lease=self.lease, wait=call.wait)
        except VeilError as error:
            if call.seat.usable:
                log.warning("queue %s: receive failed: %s", queue.name, error)
            return error

    def _release(self, messages: Sequence[Received], seat: Seat) -> None:
        """Release messages that nobody here wants, so that they are visible at once."""
        if not messages:
            return
        # Any object of the queue can do it; the one that received them may be closed by now.
        queue = next((each.queue for each in [seat, *self._seats] if not each.closed), seat.queue)
        for message in messages:
            try:
                queue.release(message.handle)
            except VeilError as error:
                log.info("queue %s: message %s not released: %s", queue.name, message.id, error)


class _Shared:
    """The exchanges that receivers of one queue share in this process, while one of them lives."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: share nothing with the parent's receivers, whose connections may not be used."""
        self.lock = threading.RLock()
        self.pollings: weakref.WeakValueDictionary[Hashable, Polling] = weakref.WeakValueDictionary()

    def join(self, seat: Seat, lease: float | None, clock: Clock) -> Polling:
        """The `Polling` for this receiver's callers."""
        key = identity_of(seat.queue), lease, ById(clock)
        with self.lock:
            polling = self.pollings.get(key)
            if polling is None:
                polling = self.pollings[key] = Polling(seat.limits, lease, clock)
            polling.join(seat)
            return polling

    def leave(self, polling: Polling, seat: Seat) -> bool:
        """See `Polling.leave`; a receiver that joins after the last one has left gets a new `Polling`."""
        with self.lock:
            is_over = polling.leave(seat)
            if is_over:
                for key in [key for key, each in self.pollings.items() if each is polling]:
                    del self.pollings[key]
            return is_over


_shared = _Shared()
forget_in_child(_shared)
join = _shared.join
