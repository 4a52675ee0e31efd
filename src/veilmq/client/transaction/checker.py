"""The checker: works off the log's overdue entries (failure analysis A to D).

Strategy: receive what is overdue (A), ask the application (B), settle by its verdict (C), erase the entry (D). What
fails on the way leaves the entry, and comes again; what stays undecided is asked for a bounded time and then parked
where people see it. A transaction that is under way in this process is left alone. Source: document 002,
TransactionChecker.

Settling: each step may be repeated by anybody at any time, and says what it found. A half message whose handle is taken
was committed before, for only a visible message can be received; one that is gone before its end was too, unless nobody
can have done that; one that is gone after its end is sent again from the log, and whoever asked to be told is told.
Source: document 002, failure analysis C: "the same handle can be committed only once".
"""

import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Self

from msgspec.structs import replace

from veilmq.client.clock import Clock, Stop
from veilmq.client.closing import Closing
from veilmq.client.messages import Message, Received
from veilmq.client.queue import Queue
from veilmq.client.transaction.entry import (
    CLOCKS_APART,
    Entry,
    Form,
    Prepared,
    Times,
    Verdict,
    decode,
    marked,
    verdict_of,
)
from veilmq.client.transaction.logbook import Logbook
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseError,
    LeaseTaken,
    ReceiptInvalid,
    UsageError,
    VeilError,
)


class Settled(StrEnum):
    """What a commit found."""

    COMMITTED = "committed"
    EARLIER = "committed earlier"
    RESENT = "sent again"
    """From the log: at least once."""


class Settler:
    """Settles the transactions of one queue."""

    def __init__(self, queue: Queue, times: Times, on_lost: Callable[[Prepared], object] | None) -> None:
        self.queue = queue
        self._times = times
        self._on_lost = on_lost

    def prepare(self, message: Message, transaction: str, life: float) -> str:
        """Send the half message; its handle. Raises as `Queue.send`."""
        capabilities = self.queue.capabilities
        half = replace(message, delay=self._times.half_delay, ttl=life if capabilities.ttl else None)
        entry = Entry(1, transaction, Form.HIDDEN, half, None, 0.0, None)
        handle = self.queue.send(marked(entry, capabilities)).handle
        if handle is None:
            raise CapabilityMissing(capability=f"a handle from a delayed send on {capabilities.protocol}")
        return handle

    def commit(self, entry: Entry, now: float, perhaps_earlier: bool) -> Settled:
        """Make the message visible, or see that it is. perhaps_earlier: an attempt before this one may have done it.

        Raises TransportError, ServiceError, CapacityError (try again), UsageError and CapabilityMissing (never).
        """
        if entry.handle is None:
            self.queue.send(marked(entry, self.queue.capabilities))
            return Settled.COMMITTED
        alive = entry.expires is not None and now < entry.expires - CLOCKS_APART
        if entry.expires is not None and alive and entry.expires - now < self._times.life_min:
            return self._anew(entry, entry.handle)
        try:
            self.queue.release(entry.handle)
        except LeaseTaken:
            return Settled.EARLIER
        except (LeaseError, ReceiptInvalid) as error:
            if isinstance(error, LeaseError) and alive and perhaps_earlier:
                return Settled.EARLIER
            return self._resend(entry, str(error))
        return Settled.COMMITTED

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

    def _anew(self, entry: Entry, handle: str) -> Settled:
        """Too little of its life is left: a whole message in its place."""
        if not self.queue.capabilities.receipts_rotate:
            try:
                # Nobody has it, and nobody gets it meanwhile.
                self.queue.extend(handle, self._times.check_lease)
            except LeaseError:
                return Settled.EARLIER
        settled = self._resend(entry, "most of its half message's life is over")
        try:
            self.queue.delete(handle)
        except VeilError as error:
            log.info("transaction %s: its half message stays until it ends: %s", entry.id, error)
        return settled

    def _resend(self, entry: Entry, why: str) -> Settled:
        log.warning("transaction %s: its message is sent again from the log: %s", entry.id, why)
        self.queue.send(marked(entry, self.queue.capabilities))
        if self._on_lost is not None:
            try:
                self._on_lost(entry.shown())
            except Exception:  # it is sent: what the application makes of that must not send it once more
                log.exception("transaction %s: on_lost failed", entry.id)
        return Settled.RESENT


def hopeless(error: VeilError) -> bool:
    """Whether a commit that failed with this can never succeed."""
    return isinstance(error, UsageError | CapabilityMissing)


BATCH_MAX = 10

log = logging.getLogger("veilmq.transaction")

Check = Callable[[Prepared], Verdict | bool]
"""What became of the local operation? ROLLBACK promises that it never will be done."""
Compensate = Callable[[Prepared, VeilError], object]
"""Undo the local operation: its message can never be sent, and why."""


class Checker(Closing):
    """Run it in a thread (`start`), or call `run_once`."""

    def __init__(
        self,
        logbook: Logbook,
        settler: Settler,
        times: Times,
        check: Check,
        park: Callable[[str], object],
        compensate: Compensate | None,
        running: Callable[[str], bool],
        clock: Clock,
    ) -> None:
        """park: puts an entry's body where people see it. running: whether a transaction is under way here."""
        self._logbook = logbook
        self._settler = settler
        self._times = times
        self._check = check
        self._park = park
        self._compensate = compensate
        self._running = running
        self._stop = Stop(clock)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look every `check_every` seconds, in a thread of its own. Twice is once, but for a forked child, where the
        parent's thread is not."""
        if self._thread is None or not self._thread.is_alive():
            self._stop.clear()
            thread = threading.Thread(target=self._run, name="veilmq transaction checker", daemon=True)
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """End the thread, after the entries that it has received. Twice is once."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def run_once(self, now: float | None = None) -> int:
        """Work off what is overdue now; how many transactions were settled or parked.

        now: Unix seconds, to judge what has ended; None: the queue's. Raises what `Queue.receive` raises; an entry that
        fails is logged, and comes again.
        """
        return self._look(lambda: False, now)

    def _look(self, ends: Callable[[], bool], now: float | None) -> int:
        """Until nothing is overdue, or `ends` says so."""
        settled = 0
        seen: set[str] = set()
        while not ends():
            entries = self._logbook.overdue(BATCH_MAX)
            # One that was given back may come at once: the rest of this look is others'.
            again = [message for message in entries if message.id in seen]
            for message in entries:
                if message.id not in seen:
                    seen.add(message.id)
                    settled += self._work_off(message, now)
            if not entries or again:
                break
        return settled

    def decide(self, entry: Entry, verdict: Verdict, now: float) -> bool:
        """Carry out a verdict other than UNKNOWN; False: its message can never be sent, and nobody compensated.

        Raises VeilErrors after which it may be tried again.
        """
        if verdict is Verdict.ROLLBACK:
            self._settler.roll_back(entry)
            return True
        try:
            found = self._settler.commit(entry, now, perhaps_earlier=True)
        except VeilError as error:
            if not hopeless(error):
                raise
            return self.give_up(entry, error)
        log.info("transaction %s: %s", entry.id, found)
        return True

    def give_up(self, entry: Entry, error: VeilError) -> bool:
        """The commit is lost for good: whether the operation was compensated."""
        log.error("transaction %s can never be committed: %s", entry.id, error)
        if self._compensate is None:
            return False
        self._compensate(entry.shown(), error)
        return True

    def ask(self, entry: Entry) -> Verdict:
        """The application's answer; whatever goes wrong there is UNKNOWN."""
        try:
            return verdict_of(self._check(entry.shown()))
        except Exception:  # the application raises what it likes, and is asked again
            log.exception("transaction %s: nobody knows what became of it", entry.id)
            return Verdict.UNKNOWN

    def _run(self) -> None:
        while not self._stop.wait(self._times.check_every):
            try:
                self._look(self._stop.is_set, None)
            except VeilError as error:
                log.warning("the log cannot be read: %s", error)
            except Exception:  # a pattern around the log runs the user's code: the next look may succeed
                log.exception("the log cannot be read")

    def _work_off(self, message: Received, now: float | None) -> bool:
        """One entry; whether it is out of the log."""
        try:
            return self._worked_off(message, now)
        except VeilError as error:
            log.warning("log entry %s comes again: %s", message.id, error)
        except Exception:  # a callback of the application's raised: the entry comes again, and others go on
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
            if now is None:  # the producer's clock, by which the entry was written
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
    """Put an entry among the parked ones."""
    parked.send(Message(body))
