"""The threads that receive messages for the worker.

Strategy: a place is reserved before a message is received, and its lease is registered with the keeper at once, so a
prefetched message is kept like one whose handler runs. Errors are reported and followed by a backoff; only errors that
no retry can cure are fatal. An empty answer that comes early is followed by a backoff too: otherwise a server that does
not park polls would get a request storm. Messages that an open poll brings after the stop are released at once.

Source: document 002, "LongPolling" (the request storm); docs/patterns/receiver.md.
"""

import logging
import math
import threading
from collections.abc import Callable
from typing import Any, Final

from veilmq.client.clock import Clock, Stop
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.client.worker.hand import Hand, Held, PlainLease
from veilmq.client.worker.metrics import Counts
from veilmq.client.worker.parameters import WAIT, Backoff, Parameters, chance
from veilmq.client.worker.ready import Ready
from veilmq.client.worker.settling import Settling
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, LeaseError, ParameterInvalid, VeilError

FAILED: Final = Backoff(first=0.2, longest=30.0)
"""Pause after a failed receive."""
EARLY: Final = Backoff(first=0.05, longest=5.0)
"""Pause after an empty answer that came in less than half of the wait."""
_AGAIN_SECONDS: Final = 0.2
"""Pause between two interruptions of the open polls."""

log = logging.getLogger("veilmq.worker")


class Intake:
    """Receives through `poll`, holds through `queue`. Each thread calls `fatal(error)` and `idle()` at most once."""

    def __init__(
        self,
        queue: Queue,
        poll: Queue,
        parameters: Parameters,
        ready: Ready[Hand],
        settling: Settling,
        counts: Counts,
        keeper: LeaseKeeper | None,
        clock: Clock,
        *,
        fatal: Callable[[BaseException], None],
        idle: Callable[[], None],
        until_empty: bool,
    ) -> None:
        self._queue = queue
        self._poll = poll
        self._parameters = parameters
        self._ready = ready
        self._settling = settling
        self._counts = counts
        self._keeper = keeper
        self._clock = clock
        self._fatal = fatal
        self._idle = idle
        self._until_empty = until_empty
        self._able = queue.capabilities
        self._wait = min(WAIT, self._able.wait_max) if parameters.wait is None else parameters.wait
        self._stop = Stop(clock)
        self._threads: list[threading.Thread] = []

    @property
    def wait(self) -> float:
        """The longest wait of a poll, in seconds."""
        return self._wait

    def start(self) -> None:
        """Start receiving."""
        for number in range(1, self._parameters.pollers + 1):
            thread = threading.Thread(target=self._run, name=f"veilmq worker poller {number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Begin no more receives. The caller must close the line too."""
        self._stop.set()

    def join(self, timeout: float) -> bool:
        """Interrupt the open polls and wait up to `timeout` seconds for them. Returns whether all have ended."""
        end = self._clock.monotonic() + timeout
        for thread in self._threads:
            while thread.is_alive() and (left := end - self._clock.monotonic()) > 0:
                # Interrupt again: a poll may have been about to start at the first interruption.
                self._poll.interrupt()
                thread.join(min(left, _AGAIN_SECONDS))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        tries = early = 0
        failing_since: float | None = None
        while places := self._ready.reserve(self._able.receive_messages_max):
            if (closed := self._keeper_closed()) is not None:
                self._ready.give_back(places)
                if not self._stop.is_set():
                    self._fatal(closed)
                return
            before = self._clock.monotonic()
            # Checked before the poll: a message given back during the poll may have come too late for it.
            idle = self._ready.in_hand == 0
            try:
                came = self._poll.receive(places, lease=self._parameters.first_lease, wait=self._wait)
            except BaseException as error:  # noqa: BLE001 the user's policy runs here and may fail in any way
                self._ready.give_back(places)
                failing_since = before if failing_since is None else failing_since
                if not self._go_on(error, before - failing_since):
                    return
                tries += 1
                self._stop.wait(FAILED.delay(tries, chance()))
                continue
            tries, failing_since = 0, None
            taken = self._admit(came)
            self._ready.give_back(places - taken)
            if came:
                early = 0
            elif self._until_empty and idle and self._ready.in_hand == 0:
                self._idle()
                return
            elif self._clock.monotonic() - before < self._wait / 2 or not self._wait:
                early += 1
                self._stop.wait(EARLY.delay(early, chance()))
        if not self._stop.is_set():
            # No more may be received: the run ends when the last message is done.
            self._ready.wait_until_free(None)
            self._idle()

    def _go_on(self, error: BaseException, failing: float) -> bool:
        """Whether to receive again after this error."""
        if self._stop.is_set():
            return False
        self._settling.report("receive", error)
        limit = self._parameters.give_up_after
        hopeless = isinstance(error, (ParameterInvalid, CapabilityMissing))
        if hopeless or (limit is not None and failing >= limit):
            self._fatal(error)
            return False
        return True

    def _admit(self, came: list[Received]) -> int:
        """Put the messages in line. Returns how many reserved places they took."""
        self._counts.came(len(came))
        hands: list[Hand] = []
        for message in came:
            if self._stop.is_set():
                self._return(message)
            elif (hand := self._hold(message)) is not None:
                hands.append(hand)
        if not self._ready.put(hands):
            for hand in hands:
                self._settling.release(hand)
            return 0
        self._counts.in_hand(lambda: self._ready.in_hand)
        return len(hands)

    def _hold(self, message: Received) -> Hand | None:
        """Take one message in hand; None if its lease is gone already."""
        seconds = self._length(message)
        lease: Held
        try:
            if self._keeper is not None:
                lease = self._keeper.register(message, lease=seconds)
            else:
                lease = PlainLease(self._queue, message, self._clock)
                if seconds is not None:
                    lease.extend(seconds)
        except LeaseError:
            self._counts.ended("expired")
            return None
        except BaseException as error:  # noqa: BLE001 the user's plan runs here and may fail in any way
            if self._keeper_closed() is not None:
                self._return(message)
                return None
            self._settling.report("extend", error)
            self._counts.ended("unsettled")
            return None
        hand = Hand(
            self._queue.name,
            message,
            lease,
            capabilities=self._able,
            seconds=self._parameters.first_lease if seconds is None else seconds,
            stop_before=self._parameters.stop_before_expiry or 0.0,
            checkpoints=self._parameters.checkpoints,
        )
        lease.on_lost(lambda lost: self._settling.lose(hand, str(getattr(lost, "reason", "its extension was refused"))))
        return hand

    def _keeper_closed(self) -> ParameterInvalid | None:
        """Why the keeper, if it is the user's own, takes nothing more."""
        try:
            if self._keeper is not None:
                self._keeper.check_open()
        except ParameterInvalid as error:
            return error
        return None

    def _length(self, message: Received) -> float | None:
        """The lease that the user's function wants for this message, within the queue's bounds; None: as received."""
        wanted: Any = self._parameters.lease
        if not callable(wanted):
            return None
        try:
            seconds = float(wanted(message))
            if math.isnan(seconds):
                raise ValueError("it gave no number")
            return min(max(seconds, self._able.lease_min), self._able.lease_max)
        except BaseException:
            log.exception("the lease function failed on message %s: it gets the default", message.id)
            return None

    def _return(self, message: Received) -> None:
        try:
            self._queue.release(message.handle)
        except VeilError as error:
            self._settling.report("release", error)
        self._counts.ended("stopped")


def poll_of(queue: Queue) -> Queue:
    """A queue for polls that can be closed by itself, so that a stop ends an open poll; `queue` itself if there is
    none.

    A pattern that changes what it receives must receive itself: then its queue is interrupted instead.
    """
    inner = queue
    while isinstance(inner, Wrapping) and type(inner).receive is Wrapping.receive:
        inner = inner.inner
    if isinstance(inner, Wrapping):
        return queue
    fresh = inner.account.queue(inner.name)
    if type(fresh) is type(inner) and fresh is not inner:
        return fresh
    return queue
