"""Waits on several queues with one long poll for each queue, however many threads wait.

Strategy: a waiting thread starts a poll for each queue that has none, each in a thread of its own and for a limited
time, and sleeps until one returns a message. The first message goes to one of the waiting threads; the other polls stay
for the next one or time out. A wait whose time is over stays for the polls that end with it, because one of them may
bring a message. If nobody waits when a poll returns messages, they are released at once: a message is never held for a
caller who may not come. A queue that returns nothing before its wait is over is polled less and less often.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from veilmq.client.clock import Clock, sleeping_by
from veilmq.client.messages import Received
from veilmq.client.unreadable import log
from veilmq.model.errors import VeilError

SLICE: Final = 5.0
"""Seconds that a poll may outlive the wait for which it was started."""
GRACE: Final = 2.0
"""Seconds that a wait may last longer because a poll that ends with it has not returned yet."""
_REST_MIN: Final = 0.1
_REST_MAX: Final = 5.0

Lease = float | None


class _Arrived(msgspec.Struct):
    lease: Lease
    messages: list[Received]
    error: BaseException | None = None


class Parked:
    """The polls of one set of queues. Any thread."""

    def __init__(
        self,
        names: Sequence[str],
        poll: Callable[[str, Lease, float], list[Received]],
        give_back: Callable[[Received], None],
        clock: Clock,
    ) -> None:
        """poll: one receive of one message from the queue of that name, with that lease and wait."""
        self._names = names
        self._poll, self._give_back, self._clock = poll, give_back, clock
        self._changed = sleeping_by(clock, threading.Condition())
        self._waiting: dict[Lease, int] = {}
        self._polls: dict[tuple[str, Lease], float] = {}
        """When each of them ends, if no message comes."""
        self._arrived: list[_Arrived] = []
        self._pauses: dict[str, tuple[float, float]] = {}
        self._interrupts = 0
        self._closed = False

    @property
    def polls(self) -> int:
        """How many polls are running now."""
        return len(self._polls)

    def wait(self, lease: Lease, wait: float, count_max: int) -> list[Received]:
        """The first messages that arrive within `wait` seconds, or none. Raises what a poll raised."""
        deadline = self._clock.monotonic() + wait
        with self._changed:
            self._waiting[lease] = self._waiting.get(lease, 0) + 1
            try:
                came = self._first(lease, deadline, count_max)
            finally:
                self._waiting[lease] -= 1
                over = self._over(lease)
        self._release(over)
        messages = [message for each in came for message in each.messages]
        errors = [each.error for each in came if each.error is not None]
        if errors and not messages:
            raise errors[0]
        return messages

    def interrupt(self) -> None:
        """End the current waits; polls end at their time limit, or when their queues are interrupted."""
        with self._changed:
            self._interrupts += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the waits; polls end with their queues."""
        self._closed = True
        self.interrupt()

    def _first(self, lease: Lease, deadline: float, count_max: int) -> list[_Arrived]:
        interrupts = self._interrupts
        while not self._closed and self._interrupts == interrupts:
            # Each poll returns one message.
            came = [arrived for arrived in self._arrived if arrived.lease == lease][:count_max]
            if came:
                self._arrived = [arrived for arrived in self._arrived if not any(arrived is each for each in came)]
                return came
            now = self._clock.monotonic()
            if now < deadline:
                pause = min(deadline - now, self._park(lease, deadline, now))
            elif now < deadline + GRACE and self._ending(lease, deadline):
                pause = deadline + GRACE - now
            else:
                break
            self._changed.wait(pause)
        return []

    def _ending(self, lease: Lease, deadline: float) -> bool:
        """Whether a poll that ends by then is still running."""
        return any(until <= deadline for (_, of), until in self._polls.items() if of == lease)

    def _park(self, lease: Lease, deadline: float, now: float) -> float:
        """Start the missing polls; return the seconds until the next one may start."""
        soonest = SLICE
        for name in self._names:
            if (name, lease) in self._polls:
                continue
            paused_until, _ = self._pauses.get(name, (now, 0.0))
            if paused_until > now:
                soonest = min(soonest, paused_until - now)
                continue
            until = min(now + SLICE, deadline)
            arguments = (name, lease, until)
            try:
                threading.Thread(target=self._run, args=arguments, name=f"poll {name}", daemon=True).start()
            except RuntimeError:  # "can't start new thread": retried at the next look
                soonest = min(soonest, _REST_MIN)
            else:
                self._polls[name, lease] = until
        return soonest

    def _run(self, name: str, lease: Lease, until: float) -> None:
        began = self._clock.monotonic()
        wait = until - began
        came = _Arrived(lease, [])
        try:
            # A thread may be so late that nobody waits any more.
            came.messages = self._poll(name, lease, wait) if wait > 0 else []
        except BaseException as error:  # noqa: BLE001 raised in the waiting thread: a user's policy may raise anything
            came.error = error
        now = self._clock.monotonic()
        with self._changed:
            del self._polls[name, lease]
            if came.messages:
                self._pauses.pop(name, None)
            elif came.error is not None or now - began < wait / 2:
                _, last = self._pauses.get(name, (now, 0.0))
                pause = min(max(_REST_MIN, 2 * last), _REST_MAX)
                self._pauses[name] = now + pause, pause
            if came.messages or came.error is not None:
                self._arrived.append(came)
            over = self._over(lease)
            self._changed.notify_all()
        self._release(over)

    def _over(self, lease: Lease) -> list[Received]:
        """Messages for waits that have ended."""
        if self._waiting.get(lease):
            return []
        self._waiting.pop(lease, None)
        gone = [arrived for arrived in self._arrived if arrived.lease == lease]
        self._arrived = [arrived for arrived in self._arrived if arrived.lease != lease]
        return [message for arrived in gone for message in arrived.messages]

    def _release(self, messages: list[Received]) -> None:
        for message in messages:
            try:
                self._give_back(message)
            except VeilError as error:
                log.warning("message %s could not be released: %s", message.id, error)
