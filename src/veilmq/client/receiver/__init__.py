"""The receiver: many callers, few parked polls, for threads and for coroutines.

Strategy: `Receiver` and `AsyncReceiver` differ only in how a caller waits. Receivers whose queue objects stand for the
same queue (veilmq.client.queue) share one exchange, if they have the same lease and clock. The table of shared
exchanges keeps nothing alive: an entry goes with its last receiver. Each runner thread asks the exchange (exchange.py)
what to do, does it, and reports the result. Runners are started as needed, at most one for each request that may be in
progress, and end when idle. One lock guards the exchange; it is never held during a request. If a runner breaks (a bug
in an adapter), its traceback goes to threading.excepthook, a new runner replaces it, and its request counts as failed.

Closing: a receiver that closes leaves its requests to the others. The last one interrupts the queue objects again and
again until no request is parked: one may have been about to start at the first interruption.

docs/patterns/receiver.md explains it. Source: document 002, "LongPolling" (MessageReceiver).
"""

import asyncio
import logging
import math
import secrets
import threading
import weakref
from collections.abc import Hashable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from veilmq.client.clock import SYSTEM, Clock, sleeping_by
from veilmq.client.keeper.decisions import check_lease
from veilmq.client.messages import Received
from veilmq.client.queue import ById, Queue, identity_of
from veilmq.client.receiver.exchange import Call, Exchange, Limits, Seat, Wish, joint
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import Anew, Closing, Unpicklable, forget_in_child
from veilmq.client.shared.outages import Outages
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, VeilError, as_fields

__all__ = ["AsyncReceiver", "Receiver"]

IDLE_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 0.05
"""First pause between two interruptions; it doubles."""
_AGAIN_MAX: Final = 8
_JITTERS: Final = 1 << 30

log = logging.getLogger("veilmq.receiver")


class Polling(Anew):
    """The requests of one queue's receivers."""

    def __init__(self, queue: str, limits: Limits, lease: float | None, clock: Clock) -> None:
        """limits: those of the first receiver."""
        self._queue = queue
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
        self._outages = Outages(log, f"queue {self._queue}", self.clock)
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
            # In a pause after a failure an idle runner sleeps on, because nobody waited for the pause to end.
            unnoticed = self._exchange.next_time(now) < math.inf and (self._idle or not self._runners)
            if unnoticed or self._exchange.more(now):
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
        checks.remaining(deadline, "deadline")
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
                at = self._exchange.next_time(now)
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
        try:
            came = call.seat.queue.receive(call.count, lease=self.lease, wait=call.wait)
        except VeilError as error:
            if call.seat.usable:
                self._outages.failed("receive", error)
            return error
        self._outages.worked("receive")
        return came

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
                polling = self.pollings[key] = Polling(seat.queue.name, seat.limits, lease, clock)
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


WAIT: Final = 20.0
"""Seconds of one parked poll, if the protocol allows as many."""
POLLS: Final = 1
FETCHES: Final = 8
GRACE: Final = 1.0
BACKOFF_MAX: Final = 5.0
_THREADS_MAX: Final = 1_000


class _Door(Unpicklable):
    """The parameters and the close of both receivers."""

    def __init__(
        self,
        queue: Queue,
        *,
        polls: int = POLLS,
        fetches: int = FETCHES,
        wait: float | None = None,
        lease: float | None = None,
        grace: float = GRACE,
        backoff_max: float = BACKOFF_MAX,
        clock: Clock = SYSTEM,
    ) -> None:
        capabilities = checks.queue(queue).capabilities
        wait = min(WAIT, capabilities.wait_max) if wait is None else wait
        for name, value in (("polls", polls), ("fetches", fetches)):
            checks.whole(value, name, 1, _THREADS_MAX)
        if not checks.positive(wait, "wait") <= capabilities.wait_max:
            limit = f"{capabilities.wait_max:g} s of {capabilities.protocol}"
            raise ParameterInvalid(parameter="wait", reason=f"{wait!r} is not above 0 and within the {limit}")
        if lease is not None:
            check_lease("lease", lease, capabilities)
        for name, seconds in (("grace", grace), ("backoff_max", backoff_max)):
            if not checks.positive(seconds, name) <= WAIT:
                raise ParameterInvalid(parameter=name, reason=f"{seconds!r} is not above 0 and at most {WAIT:g} s")
        limits = Limits(
            polls=polls,
            fetches=fetches,
            count_max=capabilities.receive_messages_max,
            wait=wait,
            grace=grace,
            backoff_max=backoff_max,
        )
        self.queue = queue
        self._clock = clock
        self._seat = Seat(queue, limits)
        self._polling = _shared.join(self._seat, lease, clock)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.queue!r})"

    @property
    def waiting(self) -> int:
        """How many callers wait now."""
        return self._polling.waiting(self._seat)

    def _until(self, timeout: float | None, now: float) -> float | None:
        if timeout is None:
            return math.inf
        checks.seconds(timeout, "timeout", 0, math.inf)
        return now + timeout if timeout else None


class Receiver(_Door, Closing):
    """One receiver of a queue for any number of threads. Durations are seconds.

    At most `polls` requests are parked at the queue, each for up to `wait` (None: 20, or the protocol's longest),
    however many callers wait. Once messages come, up to `fetches` more requests without a wait collect them in batches.
    `lease`: of each message; None: as in the queue's `receive`: the sender's hint, an applied plan or the queue's
    visibility timeout. Raises ParameterInvalid for parameters that cannot work.
    """

    def receive(self, timeout: float | None = None) -> Received | None:
        """The next message, or None if none came within `timeout` seconds or the receiver was closed.

        timeout: None waits for ever; 0 asks once and never waits. Raises the queue's error at once if waiting cannot
        help (QueueMissing, a ServiceError that is not retryable), any other error only if nothing but errors came until
        the timeout.
        """
        messages = self.receive_batch(1, timeout)
        return messages[0] if messages else None

    def receive_batch(self, count_max: int, timeout: float | None = None) -> Sequence[Received]:
        """Up to `count_max` messages that come together; otherwise like `receive`, with an empty list instead of
        None."""
        now = self._clock.monotonic()
        wish = _ThreadWish(self._seat, checks.at_least(count_max, "count_max", 1), now, self._until(timeout, now))
        try:
            self._polling.ask(wish)
            wish.woken.wait(min(timeout, threading.TIMEOUT_MAX) if timeout else None)
            outcome = self._polling.withdraw(wish)
        except BaseException:  # Ctrl-C may come at any moment
            self._polling.abandon(wish)
            raise
        return _outcome(outcome)

    def close(self, deadline: float = 0) -> None:
        """Waiting callers get None at once, and so do later ones. Parked requests are interrupted, and with them
        everybody else who waits at this queue object; messages that they still bring are released. deadline: seconds to
        wait for requests in progress. Raises ParameterInvalid."""
        self._polling.close(self._seat, deadline)


class AsyncReceiver(_Door):
    """Like `Receiver`, for coroutines of asyncio; requests run in separate threads, so a busy loop delays no poll."""

    async def receive(self, timeout: float | None = None) -> Received | None:  # noqa: ASYNC109
        """See `Receiver.receive`. If cancelled, other callers get its messages."""
        messages = await self.receive_batch(1, timeout)
        return messages[0] if messages else None

    async def receive_batch(self, count_max: int, timeout: float | None = None) -> Sequence[Received]:  # noqa: ASYNC109
        """See `Receiver.receive_batch`."""
        now = self._clock.monotonic()
        wish = _LoopWish(self._seat, checks.at_least(count_max, "count_max", 1), now, self._until(timeout, now))
        self._polling.ask(wish)
        try:
            await asyncio.wait([wish.woken], timeout=timeout or None)
        except BaseException:
            self._polling.abandon(wish)
            raise
        return _outcome(self._polling.withdraw(wish))

    async def close(self, deadline: float = 0) -> None:
        """See `Receiver.close`."""
        await asyncio.to_thread(self._polling.close, self._seat, deadline)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _ThreadWish(Wish):
    """A waiting thread."""

    def __init__(self, seat: Seat, count: int, since: float, until: float | None) -> None:
        super().__init__(seat, count, since, until)
        self.woken = threading.Event()

    def resolve(self, outcome: Sequence[Received] | VeilError) -> None:
        super().resolve(outcome)
        self.woken.set()


class _LoopWish(Wish):
    """A waiting coroutine."""

    def __init__(self, seat: Seat, count: int, since: float, until: float | None) -> None:
        super().__init__(seat, count, since, until)
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            reason = "AsyncReceiver outside asyncio: in trio call a Receiver through trio.to_thread.run_sync"
            raise CapabilityMissing(capability=reason) from None
        self.woken: asyncio.Future[None] = self.loop.create_future()

    @property
    def gone(self) -> bool:
        return self.loop.is_closed()

    def resolve(self, outcome: Sequence[Received] | VeilError) -> None:
        super().resolve(outcome)
        # The loop may be closed at this moment: then the message comes back when its lease ends.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


def _outcome(outcome: Sequence[Received] | VeilError) -> Sequence[Received]:
    if isinstance(outcome, VeilError):
        # Many callers may share one error, and each raise writes its own traceback into it: raise a copy.
        raise type(outcome)(**as_fields(outcome)) from outcome
    return outcome
