"""The lease keeper: keeps received messages leased while their handlers work, and lets them come back soon if not.

Strategy: one thread asks decisions.py which leases are due and passes them to a pool of senders. One lock
guards the decisions; it is never held during a call to the queue, the plan or the user's code. The monotonic clock is
read before each call, so the keeper never believes that a lease is longer than the queue does. A busy handler, a
blocked event loop or a server that hangs does not stop the deciding thread. Losses go to reports.py.

Source: the documents' manager (000, 001 and 002, "processing time, self-adapting"; 003; 004).
"""

import logging
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Self

from veilmq.client.clock import SYSTEM, Clock, sleeping_by
from veilmq.client.errors import may_have_happened
from veilmq.client.keeper.decisions import LeaseDecisions, Parameters, batch_size, check_lease
from veilmq.client.keeper.lease import KeeperStats, Lease, Plan, Reason, State
from veilmq.client.keeper.reports import Reports
from veilmq.client.messages import Extension, Received
from veilmq.client.queue import Queue
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import Closing, OfProcess, in_one_process
from veilmq.client.shared.threads import SenderPool
from veilmq.model.errors import LeaseError, LeaseExpired, MessageGone, ParameterInvalid, VeilError
from veilmq.model.messages import Failure

LOOKS_MAX: Final = 1_000
"""Leases checked before the lock is released for others."""
RELEASE_SECONDS: Final = 10.0
"""The longest time that `close` spends on releases. Messages not released by then come back when their leases end."""
_JITTERS: Final = 1 << 30
_USUAL: Final = Parameters()

log = logging.getLogger("veilmq.keeper")


class LeaseKeeper(Closing, OfProcess):
    """Extends the leases of registered messages until they are deleted, released, lost, or held too long.

    Durations are seconds. A lease is extended to `visibility_timeout` when at most `interval + minimal_life` of it is
    left, until the message has been held for `max_hold`. A `plan`, if given, decides the lengths instead. `senders`:
    the most calls at once; None: 4 if the queue extends in batches, else 32; threads are started as needed.
    `on_lost(lease)` is called for every lost lease, in a separate thread. Raises ParameterInvalid for parameters that
    cannot work. Thread-safe; close it after use. A forked child may not use its parent's keeper: ParameterInvalid.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        minimal_life: float = _USUAL.minimal_life,
        interval: float = _USUAL.interval,
        visibility_timeout: float = _USUAL.visibility_timeout,
        max_hold: float = _USUAL.max_hold,
        plan: Plan | None = None,
        clock: Clock = SYSTEM,
        senders: int | None = None,
        on_lost: Callable[[Lease], object] | None = None,
    ) -> None:
        self.queue, self.clock, self.plan = checks.queue(queue), clock, plan
        self.renews = True
        self.parameters = Parameters(
            minimal_life=minimal_life,
            interval=interval,
            visibility_timeout=visibility_timeout,
            max_hold=max_hold,
            senders=senders,
        )
        self._capabilities = capabilities = queue.capabilities
        self.parameters.check(capabilities, plan)
        self._decisions: LeaseDecisions[Lease] = LeaseDecisions(
            self.parameters, capabilities, plan, secrets.randbelow(_JITTERS) / _JITTERS
        )
        self._batch = batch_size(capabilities)
        self._pool = SenderPool(self.parameters.senders_max(capabilities), f"veilmq keeper {queue.name} sender")
        self._lock = threading.Lock()
        self._reports = Reports(queue.name, clock, plan, checks.function_or_none(on_lost, "on_lost"), self._lock)
        self._wake = sleeping_by(clock, threading.Condition(self._lock))
        self._turn = sleeping_by(clock, threading.Condition(self._lock))
        self._thread: threading.Thread | None = None
        self._sleeps_until = 0.0
        self._handed = 0
        """Batches that the senders have not finished yet."""
        self._closing = self._stopped = False
        self._pid = self._this()

    @classmethod
    def steady(cls, queue: Queue, extend: float = 120, every: float = 60, *, clock: Clock = SYSTEM) -> Self:
        """A keeper that extends to `extend` seconds every `every` seconds (document 004). Raises like the
        constructor."""
        lead = checks.positive(extend, "extend") - checks.positive(every, "every")
        if lead <= 0:
            raise ParameterInvalid(parameter="every", reason=f"{every:g} s is not below extend = {extend:g} s")
        life = lead / 3
        return cls(queue, visibility_timeout=extend, interval=lead - life, minimal_life=life, clock=clock)

    @classmethod
    def passive(cls, queue: Queue, *, clock: Clock = SYSTEM) -> Self:
        """A keeper that extends nothing by itself and starts no thread: its leases are those of the receives, until
        their handlers extend them. It reports a loss only when an extension is refused, in the caller's thread."""
        lease = min(_USUAL.visibility_timeout, checks.queue(queue).capabilities.lease_max)
        keeper = cls(queue, visibility_timeout=lease, interval=lease / 3, minimal_life=lease / 6, clock=clock)
        keeper.renews = keeper._decisions.renews = False
        return keeper

    def __repr__(self) -> str:
        return f"LeaseKeeper({self.queue!r}, leases={self.leases}{', closed' if self._closing else ''})"

    @property
    def leases(self) -> int:
        """Messages held now."""
        return len(self._decisions.holds)

    @property
    def stats(self) -> KeeperStats:
        """Counts since the keeper was made."""
        with self._lock:
            return self._decisions.stats(self._pool.started)

    def register(self, received: Received, *, lease: float | None = None, max_hold: float | None = None) -> Lease:
        """Hold a message from now on. Register it when it is received, not when its handler starts.

        lease: seconds that each lease of this message should have, including the first; None: the keeper's setting. A
        message with less than minimal_life left is extended before this returns: LeaseExpired if the queue refuses,
        other errors like `Queue.extend`. ParameterInvalid for values that cannot work, and after the keeper is closed.
        """
        self.check_open()
        checks.received(received, "received")
        if lease is not None:
            check_lease("lease", lease, self._capabilities)
        if max_hold is not None:
            checks.positive(max_hold, "max_hold")
        wanted = in_one_process(self.plan.first_lease, received) if lease is None and self.plan is not None else lease
        now = self.clock.monotonic()
        table = self._decisions
        held = Lease(
            self,
            received,
            lead=table.lead_for(self.parameters.visibility_timeout if wanted is None else wanted),
            fixed=lease,
            hold_end=table.hold_end(self.parameters.max_hold if max_hold is None else max_hold, now, received),
            now=now,
        )
        if not self.renews:
            if lease is not None:
                self.extend(held, lease)
            return held
        held.wanted = None if wanted is None else table.clamped(wanted, held.hold_end - now)
        if received.lease_end - now < min(self.parameters.minimal_life, held.lead):
            self._revive(held, now)
        with self._lock:
            self.check_open()
            self._thread = self._thread or self._started()
            table.admit(held, self.clock.monotonic())
            self._wake_if_due()
        self._reports.registered(received)
        return held

    def extend(self, message: Lease | Received, seconds: float, body: str | None = None) -> None:
        """Let the lease end `seconds` from now. Raises like `Lease.extend`; ParameterInvalid if it is not held."""
        self._check_process()
        if self.renews:
            check_lease("seconds", seconds, self._capabilities)
        lease = self._held(message)
        with self._lock:
            self._take_turn(lease)
            if lease.status is State.DONE:
                raise LeaseExpired(sequence=0, attempt=lease.message.receive_count)
            self._decisions.claim(lease, "extend")
        before = self.clock.monotonic()
        answer: str | VeilError | None = None
        try:
            answer = self.queue.extend(lease.newest, seconds, body=body)
        except VeilError as error:
            answer = error
            raise
        finally:
            with self._lock:
                self._decisions.extended(lease, answer, seconds, before, self.clock.monotonic(), own=False)
                lost = self._after()
            self._report(lost)

    def release(self, message: Lease | Received, delay: float = 0, *, failure: Failure | None = None) -> None:
        """Give the message back. Raises like `Lease.release`; ParameterInvalid if it is not held."""
        held = (lease := self._held(message)).status is not State.DONE
        self._end(lease, lambda: self.queue.release(lease.newest, delay, failure=failure))
        if held and lease.status is State.DONE:
            self._reports.released(lease)

    def delete(self, message: Lease | Received) -> None:
        """Delete the message. Raises like `Lease.delete`; ParameterInvalid if it is not held."""
        held = (lease := self._held(message)).status is not State.DONE
        before = self.clock.monotonic()
        self._end(lease, lambda: self._delete(lease))
        if held and lease.status is State.DONE:
            self._reports.deleted(lease, before)

    def forget(self, message: Lease | Received) -> None:
        """Stop extending it: the message comes back when its lease ends. Raises ParameterInvalid if it is not held."""
        self._end(self._held(message), lambda: None)

    def extend_due(self) -> None:
        """Make every extension that is due and wait for the answers. For tests that move the clock."""
        while batches := self._look():
            for batch in batches:
                self._send(batch)
        with self._lock:
            self._turn.wait_for(lambda: not self._handed or self._stopped)

    def close(self, release: bool = True, deadline: float = 0) -> None:
        """Register nothing more, wait up to `deadline` seconds for the held messages, and let the rest go.

        Leases are extended during the wait. After it the remaining handlers are notified (Reason.CLOSED) and, with
        `release`, their messages released at once. Idempotent; nothing in a forked child. Raises ParameterInvalid.
        """
        checks.remaining(deadline, "deadline")
        if self.inherited:
            return
        with self._lock:
            self._closing = True
            end = self.clock.monotonic() + deadline
            while self._decisions.holds and not self._stopped and (left := end - self.clock.monotonic()) > 0:
                self._turn.wait(min(left, threading.TIMEOUT_MAX))
            if self._stopped:
                return
            self._stopped = True
            rest = [lease for lease in self._decisions.holds.values() if lease.status in (State.HELD, State.EXTENDING)]
            for lease in rest:
                self._decisions.lose(lease, Reason.CLOSED)
            lost = self._after()
            self._wake.notify_all()
        self._report(lost)
        if release:
            self._release_all(rest)
        self._pool.close()
        if self._thread is not None:
            self._thread.join(1.0)
        self._pool.join(1.0)

    def watch(self, lease: Lease, callback: Callable[[Lease], object]) -> None:
        """Call `callback(lease)` when the lease is lost; soon, if it is lost already."""
        self._reports.watch(lease, callback)

    def event_of(self, lease: Lease) -> threading.Event:
        """An event that is set when the lease is lost."""
        return self._reports.event_of(lease)

    def check_open(self) -> None:
        """Raises ParameterInvalid if the keeper is closed or belongs to another process."""
        self._check_process()
        if self._closing:
            raise ParameterInvalid(parameter="keeper", reason="it is closed")

    def _held(self, message: Lease | Received) -> Lease:
        if isinstance(message, Lease):
            return message
        lease = self._decisions.holds.get(checks.received(message, "message").handle)
        if lease is None:
            raise ParameterInvalid(parameter="message", reason="this keeper does not hold it")
        return lease

    def _revive(self, lease: Lease, now: float) -> None:
        """The lease is almost over: extend it here and now, or the handler must not start."""
        seconds = self._decisions.length(lease, now)
        try:
            lease.newest = self.queue.extend(lease.newest, seconds)
        except LeaseExpired:
            raise
        except LeaseError as error:
            raise LeaseExpired(sequence=getattr(error, "sequence", 0), attempt=getattr(error, "attempt", 0)) from error
        lease.wanted = None
        lease.deadline = now + seconds
        lease.lead = self._decisions.lead_for(seconds)
        lease.renew_at = lease.deadline - lease.lead

    def _check_process(self) -> None:
        """A forked child does not have the parent's threads, and locks that they held stay locked."""
        if self.inherited:
            reason = "was made before this process was forked: make another one here"
            raise ParameterInvalid(parameter="keeper", reason=reason)

    def _end(self, lease: Lease, call: Callable[[], None]) -> None:
        self._check_process()
        with self._lock:
            self._take_turn(lease)
            if lease.status is State.DONE:
                return
            self._decisions.claim(lease, "end")
        failed: VeilError | None = None
        returned = False
        try:
            call()
            returned = True
        except VeilError as error:
            failed = error
            raise
        finally:
            with self._lock:
                self._decisions.ended(lease, returned, failed, self.clock.monotonic())
                lost = self._after()
            self._report(lost)

    def _delete(self, lease: Lease) -> None:
        """Delete. If an earlier delete lost its answer, finding the message gone counts as success."""
        try:
            self.queue.delete(lease.newest)
        except MessageGone:
            if not lease.maybe_deleted:
                raise
        except VeilError as error:
            lease.maybe_deleted = lease.maybe_deleted or may_have_happened(error)
            raise

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name=f"veilmq keeper {self.queue.name}", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._step()
        finally:
            # Reached only through a bug. The traceback is shown, and the leases are still extended.
            with self._lock:
                if not self._stopped:
                    self._thread = self._started()

    def _step(self) -> None:
        batches = self._look()
        for batch in batches:
            if not self._pool.put(batch[0].deadline, partial(self._send, batch)):
                self._send(batch)
        if batches:
            return
        with self._lock:
            now = self.clock.monotonic()
            # At most one interval: a machine that slept may wake up with ended leases.
            pause = min(self._decisions.next_look() - now, self.parameters.interval)
            if pause > 0 and not self._stopped:
                self._sleeps_until = now + pause
                self._wake.wait(pause)
                self._sleeps_until = 0.0

    def _look(self) -> list[list[Lease]]:
        """The extensions to make now, in batches, earliest end first."""
        with self._lock:
            due = self._decisions.due(self.clock.monotonic(), LOOKS_MAX)
            batches = [due[first : first + self._batch] for first in range(0, len(due), self._batch)]
            self._handed += len(batches)
            lost = self._after()
        self._report(lost)
        return batches

    def _send(self, batch: list[Lease]) -> None:
        before = self.clock.monotonic()
        with self._lock:
            begun = [lease for lease in batch if self._decisions.begin(lease, before)]
        # If the plan or the adapter breaks, these values remain: no length, no answer.
        lengths: list[float] = [math.inf] * len(begun)
        answers: Sequence[str | VeilError | None] = [None] * len(begun)
        try:
            if begun:
                lengths = [self._decisions.length(lease, before) for lease in begun]
                self._warn(begun, lengths, before)
                answers = self._ask(begun, lengths, self.queue.extend)
        finally:
            now, late = self.clock.monotonic(), list[float]()
            with self._lock:
                for lease, seconds, answer in zip(begun, lengths, answers, strict=True):
                    if isinstance(answer, str):
                        due = max(lease.deadline - lease.lead, lease.registered)
                        late.append(now - due if lease.wanted is None else 0.0)
                    self._decisions.extended(lease, answer, seconds, before, now)
                self._handed -= 1
                lost = self._after()
            self._report(lost)
            self._reports.extended(late)

    def _warn(self, leases: list[Lease], lengths: list[float], now: float) -> None:
        """Log which messages are extended for the last time."""
        for lease, seconds in zip(leases, lengths, strict=True):
            if now + seconds >= lease.hold_end - self._decisions.schedule.width:
                log.warning(
                    "queue %s: message %s is let go in %.0f s: %s",
                    self.queue.name, lease.message.id, seconds, self._decisions.end_reason(lease),
                )  # fmt: skip

    def _ask(
        self, leases: list[Lease], lengths: list[float], single: Callable[[str, float], str]
    ) -> Sequence[str | VeilError]:
        """The queue's answers: new handles, or errors."""
        try:
            if not self._capabilities.batch_extend:
                return [single(leases[0].newest, lengths[0])]
            answers = self.queue.extend_batch(
                [Extension(lease.newest, seconds) for lease, seconds in zip(leases, lengths, strict=True)]
            )
            assert len(answers) == len(leases)
            return answers
        except VeilError as error:
            return [error] * len(leases)

    def _take_turn(self, lease: Lease) -> None:
        """Wait, holding the lock, until no call with this lease's handle is in progress."""
        self._turn.wait_for(lambda: not lease.busy)

    def _after(self) -> list[Lease]:
        """After a change, with the lock held: wake the waiting threads and return the lost leases."""
        self._turn.notify_all()
        self._wake_if_due()
        lost, self._decisions.losses = self._decisions.losses, []
        return lost

    def _wake_if_due(self) -> None:
        """With the lock held: end the deciding thread's sleep if a lease is due before it ends."""
        if self._decisions.next_look() < self._sleeps_until:
            self._wake.notify()

    def _report(self, lost: list[Lease]) -> None:
        self._reports.lost(lost, at_once=not self.renews)

    def _release_all(self, leases: list[Lease]) -> None:
        """Release as many as possible within RELEASE_SECONDS."""
        done = threading.Semaphore(0)

        def let_go(batch: list[Lease]) -> None:
            try:
                with self._lock:
                    for lease in batch:
                        self._take_turn(lease)
                for lease, answer in zip(batch, self._ask(batch, [0.0] * len(batch), self._release), strict=True):
                    if isinstance(answer, VeilError):
                        log.info("queue %s: message %s not released: %s", self.queue.name, lease.message.id, answer)
                    else:
                        self._reports.released(lease)
            finally:
                done.release()

        for first in range(0, len(leases), self._batch):
            batch = leases[first : first + self._batch]
            if not self._pool.put(batch[0].deadline, partial(let_go, batch)):
                let_go(batch)
        end = self.clock.monotonic() + RELEASE_SECONDS
        for _ in range(math.ceil(len(leases) / self._batch)):
            if not done.acquire(timeout=max(end - self.clock.monotonic(), 0.001)):
                return

    def _release(self, handle: str, seconds: float) -> str:
        self.queue.release(handle, seconds)
        return handle
