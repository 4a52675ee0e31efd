"""What the keeper reports: a lost lease to its handler, `on_lost` and the log; the life of every message to the plan.

Strategy: nearly all of it is the user's code, which may block, fail or fork. So it runs without the keeper's lock. An
error of the plan goes to the caller of `register`, `release` or `delete`; where nobody called, it is logged.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from veilmq.client.clock import Clock
from veilmq.client.keeper.lease import CrashLearner, Learner, Lease, Plan, Reason
from veilmq.client.messages import Received
from veilmq.client.shared.lifetimes import in_one_process
from veilmq.client.shared.threads import CallbackThread
from veilmq.model.wording import counted

LATE_SECONDS: Final = 1.0
"""Lateness up to this is not reported to the plan: it covers the round trip to the queue and the keeper's own slots."""

log = logging.getLogger("veilmq.keeper")


class Reports:
    """The reports of one keeper. Any thread, without the keeper's lock."""

    def __init__(
        self, queue: str, clock: Clock, plan: Plan | None, on_lost: Callable[[Lease], object] | None,
        lock: threading.Lock,
    ) -> None:  # fmt: skip
        """lock: the keeper's, under which a lease is lost."""
        self._queue = queue
        self._clock = clock
        self._on_lost = on_lost
        self._lock = lock
        self._callbacks = CallbackThread(f"veilmq keeper {queue} callbacks")
        learner: object = plan
        self._learner: Learner | None = learner if isinstance(learner, Learner) else None
        self._crashes: CrashLearner | None = learner if isinstance(learner, CrashLearner) else None

    def watch(self, lease: Lease, callback: Callable[[Lease], object]) -> None:
        """See `LeaseKeeper.watch`."""
        with self._lock:
            if lease.reason is None:
                lease.callbacks = [*(lease.callbacks or ()), callback]
                return
        self._callbacks.run_soon([partial(callback, lease)])

    def event_of(self, lease: Lease) -> threading.Event:
        """See `LeaseKeeper.event_of`. Created on the first wait, because most handlers never wait."""
        with self._lock:
            if lease.event is None:
                lease.event = threading.Event()
                if lease.reason is not None:
                    lease.event.set()
            return lease.event

    def lost(self, leases: list[Lease], *, at_once: bool) -> None:
        """Leases that were just lost. at_once: call the callbacks in this thread, and log nothing."""
        if not leases:
            return
        calls: list[Callable[[], object]] = []
        for lease in leases:
            with self._lock:
                if lease.event is not None:
                    lease.event.set()
                calls += [partial(callback, lease) for callback in lease.callbacks or ()]
                lease.callbacks = None
            if self._on_lost is not None:
                calls.append(partial(self._on_lost, lease))
            if self._learner is not None and lease.reason in (Reason.EXPIRED, Reason.TAKEN):
                held_s = self._clock.monotonic() - lease.registered
                calls.append(partial(self._learn, self._learner.lost, lease.message, held_s))
        if at_once:
            for call in calls:
                call()
            return
        count, first = counted(len(leases), "lease"), leases[0]
        why = f"{first.reason} ({first.error})" if first.error else first.reason
        level = logging.INFO if first.reason is Reason.CLOSED else logging.WARNING
        log.log(level, "queue %s: %s lost, first message %s: %s", self._queue, count, first.message.id, why)
        self._callbacks.run_soon(calls)

    def extended(self, late: list[float]) -> None:
        """Extensions that were granted, each `late` seconds after it was due."""
        if self._learner is not None:
            for seconds in late:
                self._learn(self._learner.late, seconds if seconds > LATE_SECONDS else 0.0)

    def registered(self, message: Received) -> None:
        """A message that is held from now on."""
        if self._crashes is not None and message.receive_count > 1:
            in_one_process(self._crashes.redelivered, message)

    def deleted(self, lease: Lease, at: float) -> None:
        """A message that was deleted; its delete began at the instant `at`."""
        if self._learner is not None:
            in_one_process(self._learner.finished, lease.message, at - lease.registered)

    def released(self, lease: Lease) -> None:
        """A message that was given back."""
        if self._crashes is not None:
            in_one_process(self._crashes.given_back, lease.message)

    def _learn(self, call: Callable[..., object], *values: object) -> None:
        """Report to the plan what nobody called for. Its errors hold nothing up."""
        try:
            in_one_process(call, *values)
        except Exception:
            log.exception("queue %s: the plan failed", self._queue)
