"""Many callers, few parked polls: the receiver, for threads and for coroutines.

Strategy: both classes are thin shells over the same `Polling`, which they share with other receivers of the same queue.
They differ only in how a caller waits. Source: document 002, "LongPolling" (MessageReceiver).
"""

import asyncio
import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from veilmq.client import checked
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.closing import Closing
from veilmq.client.keeper.parameters import check_lease
from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.client.receiver import polling
from veilmq.client.receiver.exchange import Limits, Seat, Wish
from veilmq.model.errors import ParameterInvalid, VeilError, as_fields

WAIT: Final = 20.0
"""Seconds of one parked poll, if the protocol allows as many."""
POLLS: Final = 1
FETCHES: Final = 8
GRACE: Final = 1.0
BACKOFF_MAX: Final = 5.0
_THREADS_MAX: Final = 1_000


class _Door:
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
        capabilities = queue.capabilities
        wait = min(WAIT, capabilities.wait_max) if wait is None else wait
        for name, value in (("polls", polls), ("fetches", fetches)):
            checked.whole(value, name, 1, _THREADS_MAX)
        if not checked.positive(wait, "wait") <= capabilities.wait_max:
            limit = f"{capabilities.wait_max:g} s of {capabilities.protocol}"
            raise ParameterInvalid(parameter="wait", reason=f"{wait!r} is not above 0 and within the {limit}")
        if lease is not None:
            check_lease("lease", lease, capabilities)
        for name, seconds in (("grace", grace), ("backoff_max", backoff_max)):
            if not checked.positive(seconds, name) <= WAIT:
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
        self._polling = polling.join(self._seat, lease, clock)

    @property
    def waiting(self) -> int:
        """How many callers wait now."""
        return self._polling.waiting(self._seat)

    def _until(self, timeout: float | None, now: float) -> float | None:
        if timeout is None:
            return math.inf
        checked.seconds(timeout, "timeout", 0, math.inf)
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
        wish = _ThreadWish(self._seat, checked.at_least(count_max, "count_max", 1), now, self._until(timeout, now))
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
    """Like `Receiver`, for coroutines; requests run in separate threads, so a busy loop delays no poll."""

    async def receive(self, timeout: float | None = None) -> Received | None:  # noqa: ASYNC109
        """See `Receiver.receive`. If cancelled, other callers get its messages."""
        messages = await self.receive_batch(1, timeout)
        return messages[0] if messages else None

    async def receive_batch(self, count_max: int, timeout: float | None = None) -> Sequence[Received]:  # noqa: ASYNC109
        """See `Receiver.receive_batch`."""
        now = self._clock.monotonic()
        wish = _LoopWish(self._seat, checked.at_least(count_max, "count_max", 1), now, self._until(timeout, now))
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
        self.loop = asyncio.get_running_loop()
        self.woken: asyncio.Future[None] = self.loop.create_future()

    def resolve(self, outcome: Sequence[Received] | VeilError) -> None:
        super().resolve(outcome)
        # The loop may be closed while coroutines wait: then the message comes back when its lease ends.
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
