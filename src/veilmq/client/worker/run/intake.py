"""Receives a worker's messages and takes them in hand.

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
from veilmq.client.errors import TransportError
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Received
from veilmq.client.queue import Queue, is_closed
from veilmq.client.shared.lifetimes import in_one_process
from veilmq.client.worker.job import Hand
from veilmq.client.worker.metrics import Counts
from veilmq.client.worker.options import WAIT, Backoff, Options, chance, first_lease, lane_of
from veilmq.client.worker.runners.flow import Ready
from veilmq.client.worker.runners.settling import Settling
from veilmq.model.errors import CapabilityMissing, LeaseError, ParameterInvalid, VeilError

FAILED: Final = Backoff(first=0.2, longest=30.0)
"""Pause after a failed receive."""
EARLY: Final = Backoff(first=0.05, longest=5.0)
"""Pause after an empty answer that came in less than half of the wait."""
_AGAIN_SECONDS: Final = 0.2
"""Pause between two interruptions of the open polls."""
_LAST_POLL_S: Final = 1.0
"""The wait of a run until empty, while no message can come back: its last poll costs it."""
_GONE: Final = {"done", "repeated", "dead_lettered"}
"""Outcomes after which a message cannot come back."""

log = logging.getLogger("veilmq.worker")


class Intake:
    """Receives through `poll`, holds through `queue`. Each thread calls `fatal(error)` and `idle()` at most once."""

    def __init__(
        self,
        queue: Queue,
        poll: Queue,
        options: Options,
        ready: Ready[Hand],
        settling: Settling,
        counts: Counts,
        keeper: LeaseKeeper,
        clock: Clock,
        *,
        fatal: Callable[[BaseException], None],
        idle: Callable[[], None],
        until_empty: bool,
    ) -> None:
        self._queue = queue
        self._poll = poll
        self._options = options
        self._ready = ready
        self._settling = settling
        self._counts = counts
        self._keeper = keeper
        self._clock = clock
        self._fatal = fatal
        self._idle = idle
        self._until_empty = until_empty
        self._able = queue.capabilities
        self._first_lease = first_lease(options)
        self._wait = min(WAIT, self._able.wait_max) if options["wait"] is None else options["wait"]
        if options["keeper"] is False:
            # SQS does not say when it gave a message out, so a lease counts from before the poll.
            self._wait = min(self._wait, self._first_lease / 2)
        self._stop = Stop(clock)
        self._threads: list[threading.Thread] = []

    @property
    def wait(self) -> float:
        """The longest wait of a poll, in seconds."""
        return self._wait

    def start(self) -> None:
        """Start receiving."""
        for number in range(1, self._options["pollers"] + 1):
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
            if (closed := self._closed()) is not None:
                self._ready.unreserve(places)
                if not self._stop.is_set():
                    self._fatal(closed)
                return
            before = self._clock.monotonic()
            # Checked before the poll: a message given back during the poll may have come too late for it.
            idle = self._ready.in_hand == 0
            wait = self._next_wait()
            try:
                came = self._poll.receive(places, lease=self._first_lease, wait=wait)
            except BaseException as error:  # noqa: BLE001 the user's policy runs here and may fail in any way
                self._ready.unreserve(places)
                failing_since = before if failing_since is None else failing_since
                if not self._go_on(error, before - failing_since):
                    return
                tries += 1
                self._stop.wait(FAILED.delay(tries, chance()))
                continue
            tries, failing_since = 0, None
            self._settling.worked("receive")
            taken = self._admit(came)
            self._ready.unreserve(places - taken)
            if came:
                early = 0
            elif self._until_empty and idle and self._ready.in_hand == 0 and wait == self._next_wait():
                self._idle()
                return
            elif self._clock.monotonic() - before < wait / 2 or not wait:
                early += 1
                self._stop.wait(EARLY.delay(early, chance()))
        if not self._stop.is_set():
            # No more may be received: the run ends when the last message is done.
            self._ready.wait_until_free(None)
            self._idle()

    def _next_wait(self) -> float:
        """Of a poll. If the user named no wait, a run until empty polls briefly until something failed or came back."""
        if self._until_empty and self._options["wait"] is None and self._counts.outcomes.keys() <= _GONE:
            return min(_LAST_POLL_S, self._wait)
        return self._wait

    def _go_on(self, error: BaseException, failing: float) -> bool:
        """Whether to receive again after this error."""
        if self._stop.is_set():
            return False
        self._settling.report("receive", error)
        limit = self._options["give_up_after"]
        hopeless = isinstance(error, (ParameterInvalid, CapabilityMissing))
        if hopeless or (limit is not None and failing >= limit):
            self._fatal(error)
            return False
        return True

    def _admit(self, came: list[Received]) -> int:
        """Put the messages in line. Returns how many reserved places they took."""
        self._counts.came(len(came))
        hands: list[Hand] = []
        behind: list[Received] = []
        blocked: set[str] = set()
        for message in came:
            lane = lane_of(self._queue, message)
            if self._stop.is_set() or self._closed() is not None:
                self._return(message)
            elif lane in blocked:
                behind.append(message)
            elif (hand := self._hold(message, lane)) is not None:
                hands.append(hand)
            elif lane is not None:
                blocked.add(lane)
        for message in reversed(behind):  # it must not be worked before the one that is not held
            self._return(message)
        if not self._ready.put(hands):
            for hand in hands:
                self._settling.give_back(hand)
            return 0
        self._counts.in_hand(lambda: self._ready.in_hand)
        return len(hands)

    def _hold(self, message: Received, lane: str | None) -> Hand | None:
        """Take one message in hand; None if its lease is gone already."""
        seconds = self._length(message)
        try:
            lease = self._keeper.register(message, lease=seconds)
        except LeaseError:
            self._counts.ended("expired")
            return None
        except BaseException as error:  # noqa: BLE001 the user's plan runs here and may fail in any way
            if self._closed() is not None:
                self._return(message)
                return None
            self._settling.report("extend", error)
            self._counts.ended("unsettled")
            return None
        self._settling.worked("extend")
        hand = Hand(
            self._queue.name,
            message,
            lease,
            capabilities=self._able,
            lane=lane,
            seconds=self._first_lease if seconds is None else seconds,
            stop_before=self._options["stop_before_expiry"] or 0.0,
            checkpoints=self._options["checkpoints"],
        )
        lease.on_lost(lambda lost: self._settling.lose(hand, str(lost.reason)))
        return hand

    def _closed(self) -> VeilError | None:
        """Why nothing more can be settled: the user has closed the queue, or a keeper of their own."""
        try:
            self._keeper.check_open()
        except ParameterInvalid as error:
            return error
        if is_closed(self._queue):  # the poll goes through another object, which may still be open
            return TransportError(reason=f"queue {self._queue.name} is closed", may_have_happened=False)
        return None

    def _length(self, message: Received) -> float | None:
        """The lease that the user's function wants for this message, within the queue's bounds; None: as received."""
        wanted: Any = self._options["lease"]
        if not callable(wanted):
            return None
        try:
            seconds = float(in_one_process(wanted, message))
            if math.isnan(seconds):
                raise ValueError("it gave no number")
            return min(max(seconds, self._able.lease_min), self._able.lease_max)
        except BaseException:
            log.exception("the lease function failed on message %s: it gets the default", message.id)
            return None

    def _return(self, message: Received) -> None:
        try:
            # Closed meanwhile: the poll may go through another object of the queue, which is still open.
            (self._poll if is_closed(self._queue) else self._queue).release(message.handle)
        except VeilError as error:
            self._settling.report("release", error)
        else:
            self._settling.worked("release")
        self._counts.ended("stopped")
