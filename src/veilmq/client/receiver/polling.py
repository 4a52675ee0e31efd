"""The threads that make a receiver's requests.

Strategy: each runner asks the exchange (exchange.py) what to do, does it, and says what came of it; runners are started
as they are needed, at most one for each request that may be under way, and leave when idle. One lock guards the
exchange and is never held during a request. A runner that breaks (a fault of an adapter) shows its traceback through
threading.excepthook and is replaced; the request it had counts as failed. Closing interrupts the queue until no request
is parked any more: one may have been on its way when the first interruption came.
"""

import logging
import math
import secrets
import threading
from collections.abc import Sequence
from typing import Final

from veilmq.client import checked
from veilmq.client.clock import Clock, sleeping_by
from veilmq.client.forked import Anew
from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.client.receiver.exchange import Call, Exchange, Limits, Wish
from veilmq.model.errors import VeilError

IDLE_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 0.05
"""First pause between two interruptions; doubles."""
_AGAIN_MAX: Final = 8
_JITTERS: Final = 1 << 30

log = logging.getLogger("veilmq.receiver")


class Polling(Anew):
    """The requests of one receiver."""

    def __init__(self, queue: Queue, limits: Limits, lease: float | None, clock: Clock) -> None:
        self.queue = queue
        self.lease = lease
        self.clock = clock
        self._limits = limits
        self._runners_max = limits.polls + limits.fetches
        self._closed = False
        self._here()

    def _begin(self) -> None:
        self._exchange = Exchange(self._limits, secrets.randbelow(_JITTERS) / _JITTERS)
        self._exchange.closed = self._closed
        self._runners = 0
        self._releasing = 0
        self._idle = 0
        self._changed = sleeping_by(self.clock, threading.Condition())

    @property
    def waiting(self) -> int:
        """Callers that wait."""
        return self._exchange.waiting

    def ask(self, wish: Wish) -> None:
        """A caller comes."""
        self._here()
        with self._changed:
            now = self.clock.monotonic()
            self._exchange.ask(wish, now)
            if self._exchange.more(now):
                try:
                    self._rouse()
                except RuntimeError:
                    self._exchange.withdraw(wish)
                    raise

    def withdraw(self, wish: Wish) -> Sequence[Received] | VeilError:
        """The caller waits no longer: what it gets."""
        with self._changed:
            return self._exchange.withdraw(wish)

    def abandon(self, wish: Wish) -> None:
        """The caller is gone: what it would have got is for others."""
        with self._changed:
            outcome = self._exchange.withdraw(wish)
            if isinstance(outcome, VeilError) or not outcome:
                return
            if not self._exchange.closed:
                self._exchange.give(outcome, self.clock.monotonic())
                self._rouse()
                return
        self._release(outcome)

    def close(self, deadline: float) -> None:
        """Wake everyone, and end the parked requests; wait up to `deadline` seconds for all that are under way, which
        release what they bring. Raises ParameterInvalid."""
        checked.remaining(deadline, "deadline")
        self._here()
        self._closed = True
        with self._changed:
            first = not self._exchange.closed
            spares = self._exchange.close()
            self._changed.notify_all()
            parked = bool(self._exchange.calls)
        if first and parked:
            self.queue.interrupt()
            threading.Thread(target=self._end_calls, name=f"veilmq receiver {self.queue.name} end", daemon=True).start()
        self._release(spares)
        end = self.clock.monotonic() + deadline
        with self._changed:
            while (self._exchange.calls or self._releasing) and (left := end - self.clock.monotonic()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _end_calls(self) -> None:
        for turn in range(_AGAIN_MAX):
            with self._changed:
                if self._changed.wait_for(lambda: not self._exchange.calls, math.ldexp(AGAIN_SECONDS, turn)):
                    return
            self.queue.interrupt()

    def _rouse(self) -> None:
        if self._idle:
            self._changed.notify()
        elif self._runners < self._runners_max:
            thread = threading.Thread(target=self._run, name=f"veilmq receiver {self.queue.name}", daemon=True)
            self._runners += 1  # before it runs: Ctrl-C may come while it starts
            try:
                thread.start()
            except RuntimeError:  # "can't start new thread": those that run go on
                self._runners -= 1
                if not self._runners:
                    raise

    def _run(self) -> None:
        broken = True
        try:
            while (call := self._next()) is not None:
                self._do(call)
            broken = False
        finally:
            with self._changed:
                self._runners -= 1
                if broken:
                    self._rouse()

    def _next(self) -> Call | None:
        """The next request, once there is one; None when this runner may leave."""
        with self._changed:
            leave_at = self.clock.monotonic() + IDLE_SECONDS
            while True:
                now = self.clock.monotonic()
                call = self._exchange.take(now)
                if call is not None:
                    if self._exchange.more(now):
                        self._rouse()
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
                self._release(late)
            finally:
                with self._changed:
                    self._releasing -= 1
                    self._changed.notify_all()

    def _receive(self, call: Call) -> Sequence[Received] | VeilError:
        try:
            return self.queue.receive(call.count, lease=self.lease, wait=call.wait)
        except VeilError as error:
            log.warning("queue %s: receive failed: %s", self.queue.name, error)
            return error

    def _release(self, messages: Sequence[Received]) -> None:
        """Nobody wants them here: visible again at once."""
        for message in messages:
            try:
                self.queue.release(message.handle)
            except VeilError as error:
                log.info("queue %s: message %s not released: %s", self.queue.name, message.id, error)
