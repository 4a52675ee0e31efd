"""One run of a worker: from the first receive until the last message in hand is deleted or given back.

Strategy: `Intake` receives messages in threads of its own, and runners work them. The thread that called `go` waits for
an event (`RunEvent`), then drains: it stops receiving, gives back what has not begun, waits for handlers, cancels them,
gives back the rest, and releases what an open poll still brings. Events arrive through a SimpleQueue, which signal
handlers may use too.

Intake: a place is reserved before a message is received, and its lease is registered with the keeper at once, so a
prefetched message is kept like one whose handler runs. Errors are reported and followed by a backoff; only errors that
no retry can cure are fatal. An empty answer that comes early is followed by a backoff too: otherwise a server that does
not park polls would get a request storm. Messages that an open poll brings after the stop are released at once.

Source: docs/patterns/worker.md, "Stopping"; document 002, "LongPolling" (the request storm); docs/patterns/receiver.md.
"""

import logging
import math
import threading
from collections.abc import Callable
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from veilmq.client.clock import Clock, Stop
from veilmq.client.errors import TransportError
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Received
from veilmq.client.queue import Queue, is_closed
from veilmq.client.routed import RoutedQueue
from veilmq.client.shared.threads import in_one_process
from veilmq.client.worker.job import Cause, Hand
from veilmq.client.worker.metrics import Counts, Spans
from veilmq.client.worker.options import (
    WAIT,
    Backoff,
    Kind,
    Options,
    capacity,
    chance,
    check_queue,
    first_lease,
    keeper_parameters,
    lane_of,
)
from veilmq.client.worker.runners import AsyncRunners, ThreadRunners
from veilmq.client.worker.runners.flow import Flow, Ready
from veilmq.client.worker.runners.processes import ProcessRunners
from veilmq.client.worker.runners.settling import DeadLetters, Settling
from veilmq.client.wrapping import GatheredDeletes, Wrapping, can_gather
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
            try:
                came = self._poll.receive(places, lease=self._first_lease, wait=self._wait)
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


def poll_of(queue: Queue) -> Queue:
    """A queue for polls that can be closed by itself, so that a stop ends an open poll; `queue` itself if there is
    none.

    A pattern that changes what it receives, or has several queues, must receive itself: then its queue is interrupted
    instead.
    """
    inner = queue
    while isinstance(inner, Wrapping) and type(inner).receive is Wrapping.receive:
        inner = inner.inner
    if isinstance(inner, Wrapping | RoutedQueue):
        return queue
    fresh = inner.account.queue(inner.name)
    if type(fresh) is type(inner) and fresh is not inner:
        return fresh
    return queue


GRACE: Final = 1.0
"""Seconds that handlers get after they were cancelled."""
_POLL_SLACK: Final = 5.0
"""How many seconds a stop waits for answers of the queue."""
_TURN_SECONDS: Final = 1.0
"""How long the run's thread sleeps at a time. A signal that the kernel delivers to another thread (to a frozen process,
for example) is handled when this thread next wakes."""


class RunEvent(Enum):
    """Events of a run. The fourth kind is an exception: nothing can be received any more."""

    STOP = "stop"
    """Drain. The second time: stop draining."""
    IDLE = "idle"
    """The queue is empty, or the wanted number was received, and the run was to end then."""
    FREE = "free"
    """Nothing is in hand."""


class Runners(Protocol):
    """Threads, processes or coroutines that run the handler."""

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


_RUNNERS: Final[dict[str, Callable[[Flow, Callable[[Any], Any]], Runners]]] = {
    Kind.THREADS: ThreadRunners,
    Kind.PROCESSES: ProcessRunners,
    Kind.ASYNC: AsyncRunners,
}


class Run:
    """See `Worker.run`. The constructor raises the same errors, before anything is received."""

    def __init__(
        self,
        queue: Queue,
        handler: Callable[[Any], Any],
        options: Options,
        clock: Clock,
        inbox: "SimpleQueue[RunEvent | BaseException]",
        *,
        until_empty: bool,
        messages_max: int | None = None,
    ) -> None:
        able = queue.capabilities
        check_queue(options, queue)
        self.name = queue.name
        self._options = options
        self._clock = clock
        self._inbox = inbox
        self.counts = Counts(queue.name, options["metrics"])
        spans = Spans(queue.name, able.protocol, options["tracer"])
        self._settling = Settling(queue, options, self.counts, _dead_letters(queue, options), clock)
        self.ready: Ready[Hand] = Ready(capacity(options), messages_max)
        self._flow = Flow(options, self.ready, self._settling, self.counts, spans, clock)
        self.runners = _RUNNERS[options["kind"]](self._flow, handler)
        self._own_keeper = not isinstance(options["keeper"], LeaseKeeper)
        held = GatheredDeletes(queue) if can_gather(queue) else queue
        self.keeper = _keeper(held, options, clock)
        self._poll = poll_of(queue)
        self._own_poll = self._poll is not queue
        self._intake = Intake(
            held,
            self._poll,
            options,
            self.ready,
            self._settling,
            self.counts,
            self.keeper,
            clock,
            fatal=inbox.put,
            idle=lambda: inbox.put(RunEvent.IDLE),
            until_empty=until_empty,
        )

    def go(self) -> None:
        """Work until stopped. Raises the error that ended the run, if there was one."""
        try:
            self.runners.start()
            log.info("queue %s: working", self.name)
            self._intake.start()
            event = self._next_event()
        except BaseException:
            self._drain(0)
            raise
        hurried = self._drain(self._options["drain"])
        log.info("queue %s: %s: %s", self.name, "stopped at once" if hurried else "stopped", self.counts.outcomes)
        if isinstance(event, BaseException):
            raise event

    def _next_event(self) -> RunEvent | BaseException:
        while True:
            try:
                return self._inbox.get(timeout=_TURN_SECONDS)
            except Empty:
                continue

    def _drain(self, seconds: float) -> bool:
        """Settle or give back everything in hand. True if a second stop cut it short."""
        self._intake.stop()
        rest = self.ready.close()
        self.counts.in_hand(lambda: self.ready.in_hand)
        self._poll.interrupt()  # not closed: a close would lose an answer on its way, whose leases would stay taken
        threads = [
            threading.Thread(target=self._give_back_all, args=(rest,), name="veilmq worker release", daemon=True),
            threading.Thread(target=self._report_free, name="veilmq worker drain", daemon=True),
        ]
        for thread in threads:
            thread.start()
        end = self._clock.monotonic() + seconds
        hurried = self._wait_free(end)
        if self.ready.in_hand:
            log.warning("queue %s: messages still in their handlers: %d", self.name, self.ready.in_hand)
            self._flow.cancel_running(Cause.SHUTDOWN)
            if not hurried:
                hurried = self._wait_free(self._clock.monotonic() + GRACE)
            self._settling.give_up()
            self.runners.kill()
            self._flow.abandon_running(_POLL_SLACK)
        threads[0].join(min(max(GRACE, end - self._clock.monotonic()), threading.TIMEOUT_MAX))
        self._settling.give_up()
        if not self._intake.join(GRACE if self._own_poll or hurried else self._intake.wait + _POLL_SLACK):
            log.warning("queue %s: a poll is still open; what it brings comes back by itself", self.name)
        if self._own_poll:
            self._poll.close()
        self.runners.close()
        self._flow.close()
        if self._own_keeper:
            self.keeper.close()
        self.counts.over()
        return hurried

    def _wait_free(self, end: float) -> bool:
        """Wait until nothing is in hand or until `end`. True if a second stop came."""
        while self.ready.in_hand and (left := end - self._clock.monotonic()) > 0:
            try:
                if self._inbox.get(timeout=min(left, _TURN_SECONDS)) is RunEvent.STOP:
                    return True
            except Empty:
                continue
        return False

    def _give_back_all(self, hands: list[Hand]) -> None:
        for hand in hands:
            self._settling.give_back(hand)

    def _report_free(self) -> None:
        self.ready.wait_until_free(None)
        self._inbox.put(RunEvent.FREE)


def _keeper(queue: Queue, options: Options, clock: Clock) -> LeaseKeeper:
    if options["keeper"] is False:
        return LeaseKeeper.passive(queue, clock=clock)
    if isinstance(options["keeper"], LeaseKeeper):
        return options["keeper"]
    return LeaseKeeper(queue, clock=clock, **keeper_parameters(options))


def _dead_letters(queue: Queue, options: Options) -> DeadLetters | None:
    target = options["dead_letter_queue"]
    if target is None:
        return None
    found = queue.account.queue(target) if isinstance(target, str) else target
    if found.name == queue.name and found.account is queue.account:
        raise ParameterInvalid(parameter="dead_letter_queue", reason="is the queue itself")
    return DeadLetters(queue.name, found)
