"""The checker: works off the log's overdue entries (failure analysis A to D).

Strategy: receive what is overdue (A), ask the application (B), settle by its verdict (C), erase the entry (D). What
fails on the way leaves the entry, and comes again; what stays undecided is asked for a bounded time and then parked
where people see it. A transaction that is under way in this process is left alone. Source: document 002,
TransactionChecker.
"""

import logging
import threading
from collections.abc import Callable
from typing import Self

from veilmq.client.clock import Clock
from veilmq.client.closing import Closing
from veilmq.client.messages import Message, Received
from veilmq.client.pausing import Stop
from veilmq.client.queue import Queue
from veilmq.client.transaction.entry import Entry, Prepared, Verdict, decode, verdict_of
from veilmq.client.transaction.logbook import Logbook
from veilmq.client.transaction.parameters import Times
from veilmq.client.transaction.settling import Settler, hopeless
from veilmq.model.errors import VeilError

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
