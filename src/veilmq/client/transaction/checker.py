"""The checker: works off the log's overdue entries (failure analysis A to D).

Strategy: receive an overdue entry (A), ask the application (B), carry out its verdict (C), erase the entry (D). If a
step fails, the entry stays and comes again. An undecided transaction is asked about for a limited time, then parked
where people see it. Transactions in progress in this process are left alone. Source: document 002, TransactionChecker.

Commits and rollbacks: any process may repeat any step at any time, and each step reports what it found. A half message
whose handle was taken had been committed before, because only a visible message can be received. One that is gone
before its end was committed too, unless nobody can have done that. One that is gone after its end is sent again from
the log, and `on_lost` is called. Source: document 002, failure analysis C: "the same handle can be committed only
once".
"""

import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Self

from msgspec.structs import replace

from veilmq.client.clock import Clock, Stop
from veilmq.client.messages import Message, Received
from veilmq.client.queue import Queue
from veilmq.client.shared.lifetimes import Closing
from veilmq.client.shared.outages import Outages
from veilmq.client.transaction.logbook import (
    CLOCKS_APART,
    Entry,
    Form,
    Logbook,
    Prepared,
    Times,
    Verdict,
    decode,
    marked,
    verdict_of,
)
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseError,
    LeaseTaken,
    ReceiptInvalid,
    UsageError,
    VeilError,
)


class CommitResult(StrEnum):
    """What a commit did or found."""

    COMMITTED = "committed"
    EARLIER = "committed earlier"
    RESENT = "sent again"
    """Sent from the log: at least once."""


class Committer:
    """Commits and rolls back the transactions of one queue."""

    def __init__(self, queue: Queue, times: Times, on_lost: Callable[[Prepared], object] | None) -> None:
        self.queue = queue
        self._times = times
        self._on_lost = on_lost

    def prepare(self, message: Message, transaction: str, life: float) -> str:
        """Send the half message; returns its handle. Raises like `Queue.send`."""
        capabilities = self.queue.capabilities
        half = replace(message, delay=self._times.half_delay, ttl=life if capabilities.ttl else None)
        entry = Entry(1, transaction, Form.HIDDEN, half, None, 0.0, None)
        handle = self.queue.send(marked(entry, capabilities)).handle
        if handle is None:
            raise CapabilityMissing(capability=f"a handle from a delayed send on {capabilities.protocol}")
        return handle

    def commit(self, entry: Entry, now: float, perhaps_earlier: bool) -> CommitResult:
        """Make the message visible, unless it is already. perhaps_earlier: whether an earlier attempt may have done it.

        Raises TransportError, ServiceError, CapacityError (try again), UsageError and CapabilityMissing (it never
        succeeds).
        """
        if entry.handle is None:
            self.queue.send(marked(entry, self.queue.capabilities))
            return CommitResult.COMMITTED
        alive = entry.expires is not None and now < entry.expires - CLOCKS_APART
        if entry.expires is not None and alive and entry.expires - now < self._times.life_min:
            return self._anew(entry, entry.handle)
        try:
            self.queue.release(entry.handle)
        except LeaseTaken:
            return CommitResult.EARLIER
        except (LeaseError, ReceiptInvalid) as error:
            if isinstance(error, LeaseError) and alive and perhaps_earlier:
                return CommitResult.EARLIER
            return self._resend(entry, str(error))
        return CommitResult.COMMITTED

    def roll_back(self, entry: Entry) -> None:
        """Delete the half message, if there is one. Raises TransportError, ServiceError (try again)."""
        if entry.handle is None:
            return
        try:
            self.queue.delete(entry.handle)
        except LeaseTaken:
            log.error("transaction %s is rolled back, but its message was committed before and received", entry.id)
        except (LeaseError, UsageError) as error:
            log.info("transaction %s: there is no half message any more: %s", entry.id, error)

    def _anew(self, entry: Entry, handle: str) -> CommitResult:
        """Too little of the half message's life is left: replace it with a new message."""
        if not self.queue.capabilities.receipts_rotate:
            try:
                # Nobody has the half message; this keeps it from being received meanwhile.
                self.queue.extend(handle, self._times.check_lease)
            except LeaseError:
                return CommitResult.EARLIER
        result = self._resend(entry, "most of its half message's life is over")
        try:
            self.queue.delete(handle)
        except VeilError as error:
            log.info("transaction %s: its half message stays until it ends: %s", entry.id, error)
        return result

    def _resend(self, entry: Entry, why: str) -> CommitResult:
        log.warning("transaction %s: its message is sent again from the log: %s", entry.id, why)
        self.queue.send(marked(entry, self.queue.capabilities))
        if self._on_lost is not None:
            try:
                self._on_lost(entry.shown())
            except Exception:  # the message is sent: an error in the application's callback must not send it again
                log.exception("transaction %s: on_lost failed", entry.id)
        return CommitResult.RESENT


def hopeless(error: VeilError) -> bool:
    """Whether a commit that failed with this error can never succeed."""
    return isinstance(error, UsageError | CapabilityMissing)


BATCH_MAX = 10

log = logging.getLogger("veilmq.transaction")

Check = Callable[[Prepared], Verdict | bool]
"""What became of the local operation? ROLLBACK promises that it will never be done."""
Compensate = Callable[[Prepared, VeilError], object]
"""Undo the local operation, because its message can never be sent; the error says why."""


class Checker(Closing):
    """Works off the log: in a thread (`start`), or by calls of `run_once`."""

    def __init__(
        self,
        logbook: Logbook,
        committer: Committer,
        times: Times,
        check: Check,
        park: Callable[[str], object],
        compensate: Compensate | None,
        running: Callable[[str], bool],
        clock: Clock,
    ) -> None:
        """park: puts an entry's body where people see it. running: whether a transaction is in progress here."""
        self._logbook = logbook
        self._committer = committer
        self._times = times
        self._check = check
        self._park = park
        self._compensate = compensate
        self._running = running
        self._clock = clock
        self._stop = Stop(clock)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Check the log every `check_every` seconds, in a separate thread. Idempotent; in a forked child, which does
        not have the parent's thread, it starts a new one."""
        if self._thread is None or not self._thread.is_alive():
            self._stop.clear()
            thread = threading.Thread(target=self._run, name="veilmq transaction checker", daemon=True)
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """End the thread after the entries that it has received. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def run_once(self, now: float | None = None) -> int:
        """Work off what is overdue now; returns how many transactions were decided or parked.

        now: Unix seconds, to judge what has ended; None: the queue's clock. Raises like `Queue.receive`; an entry that
        fails is logged, and comes again.
        """
        return self._look(lambda: False, now)

    def _look(self, ends: Callable[[], bool], now: float | None) -> int:
        """Work until nothing is overdue or `ends` returns True."""
        decided = 0
        seen: set[str] = set()
        while not ends():
            entries = self._logbook.overdue(BATCH_MAX)
            # An entry that was given back may come again at once: this look ends, and the rest is left to others.
            again = [message for message in entries if message.id in seen]
            for message in entries:
                if message.id not in seen:
                    seen.add(message.id)
                    decided += self._work_off(message, now)
            if not entries or again:
                break
        return decided

    def decide(self, entry: Entry, verdict: Verdict, now: float) -> bool:
        """Carry out a verdict other than UNKNOWN. False: the message can never be sent, and nobody compensated.

        Raises VeilErrors after which it can be tried again.
        """
        if verdict is Verdict.ROLLBACK:
            self._committer.roll_back(entry)
            return True
        try:
            found = self._committer.commit(entry, now, perhaps_earlier=True)
        except VeilError as error:
            if not hopeless(error):
                raise
            return self.give_up(entry, error)
        log.info("transaction %s: %s", entry.id, found)
        return True

    def give_up(self, entry: Entry, error: VeilError) -> bool:
        """The commit can never succeed. Returns whether the operation was compensated."""
        log.error("transaction %s can never be committed: %s", entry.id, error)
        if self._compensate is None:
            return False
        self._compensate(entry.shown(), error)
        return True

    def ask(self, entry: Entry) -> Verdict:
        """The application's answer; UNKNOWN if it raises or answers anything else."""
        try:
            return verdict_of(self._check(entry.shown()))
        except Exception:  # the application may raise anything, and is asked again later
            log.exception("transaction %s: its check failed, and is asked again later", entry.id)
            return Verdict.UNKNOWN

    def _run(self) -> None:
        outages = Outages(log, "transaction log", self._clock)
        while not self._stop.wait(self._times.check_every):
            try:
                self._look(self._stop.is_set, None)
                outages.worked("receive")
            except Exception as error:  # noqa: BLE001 the user's code runs in a pattern around the log
                outages.failed("receive", error)

    def _work_off(self, message: Received, now: float | None) -> bool:
        """Work off one entry. Returns whether it left the log."""
        try:
            return self._worked_off(message, now)
        except VeilError as error:
            log.warning("log entry %s comes again: %s", message.id, error)
        except Exception:  # the application's callback raised: this entry comes again, and the others go on
            log.exception("log entry %s comes again", message.id)
        return False

    def _worked_off(self, message: Received, now: float | None) -> bool:
        queue = self._logbook.queue
        entry = decode(message.body)
        if entry is None:
            log.error("queue %s: message %s is no log entry, and is parked", queue.name, message.id)
            self._park(message.body)
        elif self._running(entry.id):
            queue.release(message.handle, self._times.ask_every)
            return False
        else:
            verdict = self.ask(entry)
            if now is None:  # use the producer's clock, which wrote the entry
                now = entry.prepared + self._logbook.age(message, entry)
            if verdict is Verdict.UNKNOWN and now - entry.prepared < self._times.decided_within:
                queue.release(message.handle, self._times.ask_every)
                return False
            if verdict is Verdict.UNKNOWN or not self.decide(entry, verdict, now):
                log.error("transaction %s is parked: %s", entry.id, verdict)
                self._park(message.body)
        queue.delete(message.handle)
        return True


def send_to(parked: Queue, body: str) -> None:
    """Send an entry to the queue of parked ones."""
    parked.send(Message(body))
