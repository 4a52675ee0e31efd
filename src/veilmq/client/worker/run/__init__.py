"""One run of a worker: from the first receive until the last message in hand is deleted or given back.

Strategy: `Intake` (intake.py) receives messages in threads of its own, and runners work them. The thread that called
`go` waits for an event (`RunEvent`), then drains: it stops receiving, gives back what has not begun, waits for
handlers, cancels them, gives back the rest, and releases what an open poll still brings. Events arrive through a
SimpleQueue, which signal handlers may use too.

Source: docs/patterns/worker.md, "Stopping".
"""

import logging
import threading
from collections.abc import Callable
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from veilmq.client.clock import Clock
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.queue import Queue
from veilmq.client.routed import RoutedQueue
from veilmq.client.worker.job import Cause, Hand
from veilmq.client.worker.metrics import Counts, Spans
from veilmq.client.worker.options import Kind, Options, capacity, check_queue, keeper_parameters
from veilmq.client.worker.run.intake import Intake
from veilmq.client.worker.runners import AsyncRunners, ThreadRunners
from veilmq.client.worker.runners.flow import Flow, Ready
from veilmq.client.worker.runners.processes import ProcessRunners
from veilmq.client.worker.runners.settling import DeadLetters, Settling
from veilmq.client.wrapping import GatheredDeletes, Wrapping, can_gather
from veilmq.model.errors import ParameterInvalid
from veilmq.model.wording import counted

log = logging.getLogger("veilmq.worker")

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
        ended = [f"{count} {outcome.replace('_', '-')}" for outcome, count in sorted(self.counts.outcomes.items())]
        how = "stopped at once" if hurried else "stopped"
        log.info("queue %s: %s: %s", self.name, how, ", ".join(ended) or "no messages")
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
            log.warning("queue %s: %s still in a handler", self.name, counted(self.ready.in_hand, "message"))
            self._flow.cancel_running(Cause.SHUTDOWN)
            if not hurried:
                hurried = self._wait_free(self._clock.monotonic() + GRACE)
            self._settling.give_up()
            self.runners.kill()
            self._flow.abandon_running(_POLL_SLACK)
        threads[0].join(min(max(GRACE, end - self._clock.monotonic()), threading.TIMEOUT_MAX))
        self._settling.give_up()
        if not self._intake.join(GRACE if self._own_poll or hurried else self._intake.wait + _POLL_SLACK):
            log.warning("queue %s: a poll is still open: its messages come back when their leases end", self.name)
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
