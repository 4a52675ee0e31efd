"""The lease keeper: received messages stay ours while their handlers work, and come back soon when they do not.

Strategy: a thread of its own asks the table (table.py) what is due and hands it to a pool of senders (sending.py); one
lock guards the table and is never held during a call to the queue, the plan or the user. The monotonic clock is read
before each call, so that a lease is never thought longer than the queue thinks it. A handler that is busy, a loop that
is blocked, a server that hangs: none of them stops the deciding thread.

Source: the documents' manager (000, 001 and 002, "processing time, self-adapting"; 003; 004).
"""

import logging
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Self

from veilmq.client import checked
from veilmq.client.clock import SYSTEM, Clock, sleeping_by
from veilmq.client.closing import Closing
from veilmq.client.forked import OfProcess
from veilmq.client.keeper.decisions import LeaseDecisions
from veilmq.client.keeper.lease import Lease
from veilmq.client.keeper.parameters import (
    INTERVAL,
    MAX_HOLD,
    MINIMAL_LIFE,
    VISIBILITY_TIMEOUT,
    Parameters,
    batch_size,
    check_lease,
)
from veilmq.client.keeper.sending import SenderPool, Teller
from veilmq.client.keeper.states import CrashLearner, KeeperStats, Learner, Plan, Reason, State, may_have_happened
from veilmq.client.messages import Extension, Received
from veilmq.client.queue import Queue
from veilmq.model.errors import LeaseError, LeaseExpired, MessageGone, ParameterInvalid, VeilError
from veilmq.model.reports import Failure

LOOKS_MAX: Final = 1_000
"""Leases looked at before the lock is free for others."""
LATE_SECONDS: Final = 1.0
"""What a plan is not told of: the way to the queue and back, and the keeper's own slots."""
RELEASE_SECONDS: Final = 10.0
"""Longest time that `close` spends on releasing; what it does not reach comes back by itself."""
_JITTERS: Final = 1 << 30

log = logging.getLogger("veilmq.keeper")


class LeaseKeeper(Closing, OfProcess):
    """Extends the leases of registered messages until they are deleted, released, lost, or held too long.

    Durations are seconds. A lease is extended to `visibility_timeout` when no more than `interval + minimal_life` of it
    is left, until it was held for `max_hold`. `plan` decides the lengths instead, if there is one. `senders` is the
    most calls at once; None: 4 where the queue extends in batches, else 32, each started when it is needed.
    `on_lost(lease)` is called for every lost lease, in a thread of its own. Raises ParameterInvalid for what cannot
    work. Use it from any thread, and close it. A forked child may not use its parent's: ParameterInvalid.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        minimal_life: float = MINIMAL_LIFE,
        interval: float = INTERVAL,
        visibility_timeout: float = VISIBILITY_TIMEOUT,
        max_hold: float = MAX_HOLD,
        plan: Plan | None = None,
        clock: Clock = SYSTEM,
        senders: int | None = None,
        on_lost: Callable[[Lease], object] | None = None,
    ) -> None:
        self.queue = queue
        self.clock = clock
        self.plan = plan
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
        self._teller = Teller(f"veilmq keeper {queue.name} teller")
        self._on_lost = on_lost
        learner: object = plan
        self._learner: Learner | None = learner if isinstance(learner, Learner) else None
        self._crashes: CrashLearner | None = learner if isinstance(learner, CrashLearner) else None
        self._lock = threading.Lock()
        self._wake = sleeping_by(clock, threading.Condition(self._lock))
        self._turn = sleeping_by(clock, threading.Condition(self._lock))
        self._thread: threading.Thread | None = None
        self._sleeps_until = 0.0
        self._handed = 0
        """Batches that the senders have not finished."""
        self._closing = False
        self._stopped = False
        self._pid = self._this()

    @classmethod
    def steady(cls, queue: Queue, extend: float = 120, every: float = 60, *, clock: Clock = SYSTEM) -> Self:
        """Extend to `extend` seconds every `every` seconds, as document 004 advises. Raises as the constructor."""
        lead = extend - every
        if lead <= 0:
            raise ParameterInvalid(parameter="every", reason=f"{every:g} s is not below extend = {extend:g} s")
        life = lead / 3
        return cls(queue, visibility_timeout=extend, interval=lead - life, minimal_life=life, clock=clock)

    @property
    def leases(self) -> int:
        """Messages held now."""
        return len(self._decisions.holds)

    @property
    def stats(self) -> KeeperStats:
        """What was counted so far."""
        with self._lock:
            table = self._decisions
            return KeeperStats(
                leases=len(table.holds),
                registered=table.registered,
                extensions=table.extensions,
                failures=table.failures,
                losses=dict(table.lost),
                late=tuple(table.late),
                late_seconds=table.late_seconds,
                late_seconds_max=table.late_seconds_max,
                senders=self._pool.started,
            )

    def register(self, received: Received, *, lease: float | None = None, max_hold: float | None = None) -> Lease:
        """Hold a message from now on; do it when it is received, not when its handler starts.

        `lease`: seconds that this message's lease should have, from the first on; None: the keeper's. A message with
        less than minimal_life left is extended before this returns: LeaseExpired if the queue refuses, other errors as
        `Queue.extend` raises them. ParameterInvalid for what cannot work, and once the keeper is closed.
        """
        self.check_open()
        if lease is not None:
            check_lease("lease", lease, self._capabilities)
        if max_hold is not None:
            checked.positive(max_hold, "max_hold")
        wanted = self.plan.first_lease(received) if lease is None and self.plan is not None else lease
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
        held.wanted = None if wanted is None else table.clamped(wanted, held.hold_end - now)
        if received.lease_end - now < min(self.parameters.minimal_life, held.lead):
            self._revive(held, now)
        with self._lock:
            self.check_open()
            self._thread = self._thread or self._started()
            table.admit(held, self.clock.monotonic())
            if table.next_look() < self._sleeps_until:
                self._wake.notify()
        if self._crashes is not None and received.receive_count > 1:
            self._crashes.redelivered(received)
        return held

    def extend(self, message: Lease | Received, seconds: float, body: str | None = None) -> None:
        """The lease ends `seconds` from now. Raises as `Lease.extend`, and ParameterInvalid for what is not held."""
        self._check_process()
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
                self._decisions.settle(lease, answer, seconds, before, self.clock.monotonic(), own=False)
                told = self._after()
                if self._decisions.next_look() < self._sleeps_until:
                    self._wake.notify()
            self._tell(told)

    def release(self, message: Lease | Received, delay: float = 0, *, failure: Failure | None = None) -> None:
        """Give the message back. Raises as `Lease.release`, and ParameterInvalid for what is not held."""
        held = (lease := self._held(message)).status is not State.DONE
        self._end(lease, lambda: self.queue.release(lease.newest, delay, failure=failure))
        if self._crashes is not None and held and lease.status is State.DONE:
            self._crashes.given_back(lease.message)

    def delete(self, message: Lease | Received) -> None:
        """Done with it. Raises as `Lease.delete`, and ParameterInvalid for what is not held."""
        lease = self._held(message)
        before = self.clock.monotonic()
        self._end(lease, lambda: self._delete(lease))
        if self._learner is not None and lease.status is State.DONE:
            self._learner.finished(lease.message, before - lease.registered)

    def forget(self, message: Lease | Received) -> None:
        """Extend it no more: it comes back when its lease ends. Raises ParameterInvalid for what is not held."""
        self._end(self._held(message), lambda: None)

    def settle(self) -> None:
        """Make every extension that is due, and return when they are answered: for clocks that tests move."""
        while batches := self._look():
            for batch in batches:
                self._send(batch)
        with self._lock:
            while self._handed and not self._stopped:
                self._turn.wait()

    def close(self, release: bool = True, deadline: float = 0) -> None:
        """Take no more, wait up to `deadline` seconds for the held ones, let the rest go.

        They are extended while they are waited for. Then the handlers of the rest are told (Reason.CLOSED) and, with
        `release`, the messages given back at once. Twice is once, and nothing happens in a forked child. Raises
        ParameterInvalid.
        """
        checked.remaining(deadline, "deadline")
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
            told = self._after()
            self._wake.notify_all()
            self._turn.notify_all()
        self._tell(told)
        if release:
            self._release_all(rest)
        self._pool.close()
        if self._thread is not None:
            self._thread.join(1.0)
        self._pool.join(1.0)

    def watch(self, lease: Lease, callback: Callable[[Lease], object]) -> None:
        """Call `callback(lease)` once the lease is lost."""
        with self._lock:
            if lease.reason is None:
                lease.callbacks = [*(lease.callbacks or ()), callback]
                return
        self._teller.tell([partial(callback, lease)])

    def event_of(self, lease: Lease) -> threading.Event:
        """Is set once the lease is lost; made when somebody first waits, for most never do."""
        with self._lock:
            if lease.event is None:
                lease.event = threading.Event()
                if lease.reason is not None:
                    lease.event.set()
            return lease.event

    def _held(self, message: Lease | Received) -> Lease:
        if isinstance(message, Lease):
            return message
        lease = self._decisions.holds.get(message.handle)
        if lease is None:
            raise ParameterInvalid(parameter="message", reason="this keeper does not hold it")
        return lease

    def _revive(self, lease: Lease, now: float) -> None:
        """Almost over: one extension here and now, or the handler never starts."""
        seconds = self._decisions.length(lease, now)
        try:
            lease.newest = self.queue.extend(lease.newest, seconds)
        except LeaseExpired:
            raise
        except LeaseError as error:
            attempt = getattr(error, "attempt", 0)
            raise LeaseExpired(sequence=getattr(error, "sequence", 0), attempt=attempt) from error
        lease.wanted = None
        lease.deadline = now + seconds
        lease.lead = self._decisions.lead_for(seconds)
        lease.renew_at = lease.deadline - lease.lead

    def _take_turn(self, lease: Lease) -> None:
        """Wait, with the lock, until no call with this lease's handle is under way."""
        while lease.busy:
            self._turn.wait()

    def check_open(self) -> None:
        """Raises ParameterInvalid if it holds nothing more: it is closed, or another process's."""
        self._check_process()
        if self._closing:
            raise ParameterInvalid(parameter="keeper", reason="it is closed")

    def _check_process(self) -> None:
        """The parent's threads are not here, and what they had locked stays locked."""
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
                told = self._after()
            self._tell(told)

    def _delete(self, lease: Lease) -> None:
        """Delete; a repeated one whose answer was lost the first time finds the message gone, and that is well."""
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
            # Unreachable but for a bug: then its traceback is shown, and the leases are kept all the same.
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
            # Not longer than an interval: a machine that slept wakes with leases over.
            pause = min(self._decisions.next_look() - now, self.parameters.interval)
            if pause > 0 and not self._stopped:
                self._sleeps_until = now + pause
                self._wake.wait(pause)
                self._sleeps_until = 0.0

    def _look(self) -> list[list[Lease]]:
        """The extensions to make now, in batches, first to end first."""
        with self._lock:
            due = self._decisions.due(self.clock.monotonic(), LOOKS_MAX)
            batches = [due[first : first + self._batch] for first in range(0, len(due), self._batch)]
            self._handed += len(batches)
            told = self._after()
        self._tell(told)
        return batches

    def _send(self, batch: list[Lease]) -> None:
        with self._lock:
            begun = [lease for lease in batch if self._decisions.begin(lease)]
        before = self.clock.monotonic()
        # What a plan or adapter that breaks leaves behind: not extended, nothing known.
        lengths: list[float] = [math.inf] * len(begun)
        answers: Sequence[str | VeilError | None] = [None] * len(begun)
        try:
            if begun:
                lengths = [self._decisions.length(lease, before) for lease in begun]
                self._warn(begun, lengths, before)
                answers = self._ask(begun, lengths, self.queue.extend)
        finally:
            now = self.clock.monotonic()
            with self._lock:
                for lease, seconds, answer in zip(begun, lengths, answers, strict=True):
                    if self._learner is not None and isinstance(answer, str):
                        late = now - max(lease.deadline - lease.lead, lease.registered)
                        self._learner.late(late if late > LATE_SECONDS and lease.wanted is None else 0.0)
                    self._decisions.settle(lease, answer, seconds, before, now)
                self._handed -= 1
                told = self._after()
                if self._decisions.next_look() < self._sleeps_until:
                    self._wake.notify()
            self._tell(told)

    def _warn(self, leases: list[Lease], lengths: list[float], now: float) -> None:
        """Say which messages are extended for the last time."""
        for lease, seconds in zip(leases, lengths, strict=True):
            if now + seconds >= lease.hold_end - self._decisions.schedule.width:
                log.warning(
                    "queue %s: message %s is let go in %.0f s: %s",
                    self.queue.name, lease.message.id, seconds, self._decisions.end_reason(lease),
                )  # fmt: skip

    def _ask(
        self, leases: list[Lease], lengths: list[float], single: Callable[[str, float], str]
    ) -> Sequence[str | VeilError]:
        """The queue's answers: handles to use next, or errors."""
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

    def _after(self) -> list[Lease]:
        """With the lock, after a change: let those who wait look again; who was lost."""
        self._turn.notify_all()
        lost, self._decisions.losses = self._decisions.losses, []
        return lost

    def _tell(self, lost: list[Lease]) -> None:
        if not lost:
            return
        calls: list[Callable[[], object]] = []
        for lease in lost:
            with self._lock:
                if lease.event is not None:
                    lease.event.set()
                calls += [partial(callback, lease) for callback in lease.callbacks or ()]
                lease.callbacks = None
            if self._on_lost is not None:
                calls.append(partial(self._on_lost, lease))
            if self._learner is not None and lease.reason in (Reason.EXPIRED, Reason.TAKEN):
                self._learner.lost(lease.message, self.clock.monotonic() - lease.registered)
        first = lost[0]
        log.log(
            logging.INFO if first.reason is Reason.CLOSED else logging.WARNING,
            "queue %s: %d leases lost, first message %s: %s%s",
            self.queue.name, len(lost), first.message.id, first.reason, f" ({first.error})" if first.error else "",
        )  # fmt: skip
        self._teller.tell(calls)

    def _release_all(self, leases: list[Lease]) -> None:
        """Visible again, as far as RELEASE_SECONDS reach."""
        left = math.ceil(len(leases) / self._batch)
        done = threading.Semaphore(0)

        def let_go(batch: list[Lease]) -> None:
            try:
                with self._lock:
                    for lease in batch:
                        self._take_turn(lease)
                for lease, answer in zip(batch, self._ask(batch, [0.0] * len(batch), self._release), strict=True):
                    if isinstance(answer, VeilError):
                        log.info("queue %s: message %s not released: %s", self.queue.name, lease.message.id, answer)
                    elif self._crashes is not None:
                        self._crashes.given_back(lease.message)
            finally:
                done.release()

        for first in range(0, len(leases), self._batch):
            batch = leases[first : first + self._batch]
            if not self._pool.put(batch[0].deadline, partial(let_go, batch)):
                let_go(batch)
        end = self.clock.monotonic() + RELEASE_SECONDS
        for _ in range(left):
            if not done.acquire(timeout=max(end - self.clock.monotonic(), 0.001)):
                return

    def _release(self, handle: str, seconds: float) -> str:
        self.queue.release(handle, seconds)
        return handle
