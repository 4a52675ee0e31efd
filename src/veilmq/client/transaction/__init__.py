"""A queue whose messages are sent if and only if a local operation succeeds.

Strategy: the document's steps: 1 prepare, 2 log, 3 operate, 4 commit or roll back, 5 erase the log entry. Any of them
may fail. Before step 3 the operation never starts; from step 3 on the log entry stays until the verdict is carried out,
here or by a checker. All state except the operation itself is in two queues, so any process with these two can finish
what another began. Source: document 002, TransactionQueue, TransactionOperations, TransactionChecker. The document's
sample swallows a failed commit, erases the entry, and so loses messages. logbook.py has the log, its entries and the
times; checker.py commits, rolls back, and finishes what a producer left open. docs/patterns/transaction-queue.md.
"""

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import may_have_happened
from veilmq.client.messages import Message, Received, Template
from veilmq.client.queue import Queue, identity_of
from veilmq.client.shared import checks
from veilmq.client.shared.checks import as_message, check_sendable, text_bytes
from veilmq.client.transaction.checker import Check, Checker, Committer, Compensate, hopeless, send_to
from veilmq.client.transaction.logbook import (
    ATTRIBUTE,
    Entry,
    Form,
    Logbook,
    Prepared,
    Times,
    Verdict,
    check_half,
    check_log,
    decode,
    form_for,
    marked,
    new_entry,
    times_for,
    verdict_of,
)
from veilmq.client.wrapping import Wrapping, changing_bodies, innermost
from veilmq.model.errors import LeaseError, ParameterInvalid, QueueExists, VeilError

__all__ = [
    "ATTRIBUTE",
    "Checker",
    "Form",
    "Outcome",
    "Prepared",
    "Times",
    "Transaction",
    "TransactionQueue",
    "Verdict",
]

COMMIT_TRIES = 3
_PARKED_SECONDS: Final = 14 * 86_400.0
"""Retention of the queue of undecided transactions, where an entry may be the only copy: the longest of all clouds."""

log = logging.getLogger("veilmq.transaction")


class Outcome(StrEnum):
    """The result of `send_transaction`."""

    COMMITTED = "committed"
    """The operation was done and the message was sent."""
    ROLLED_BACK = "rolled back"
    """Neither happened."""
    PENDING = "pending"
    """The verdict is not known or could not be carried out yet: the checker will."""
    COMPENSATED = "compensated"
    """The operation was done, its message can never be sent, and `compensate` undid it."""


class Transaction(msgspec.Struct, frozen=True):
    """The result of one `send_transaction`."""

    id: str
    """Sent with the message if the queue can carry it: the consumers' idempotency key."""
    outcome: Outcome


class TransactionQueue(Wrapping):
    """`queue`, with `send_transaction`. `send` is unchanged; consumers receive as usual."""

    def __init__(
        self,
        queue: Queue,
        log: Queue,
        check_transaction: Check,
        *,
        form: Form | str | None = None,
        times: Times | None = None,
        parked: Queue | None = None,
        on_lost: Callable[[Prepared], object] | None = None,
        compensate: Compensate | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """log: the operation log, a queue for these transactions alone. check_transaction: asked about transactions
        that nobody finished; ROLLBACK promises that the operation will never be done. form: None chooses by the queue's
        capabilities. parked: the queue for what stays undecided; None: `<log>-parked`, created when needed. Name one in
        the same pattern if a pattern around `log` changes bodies (encrypted, large). on_lost: called when a message was
        sent again because its half message had ended. compensate: called with a done operation whose message can never
        be sent.

        Raises ParameterInvalid, CapabilityMissing, and the errors of `stats`.
        """
        super().__init__(checks.queue(queue))
        checks.function(check_transaction, "check_transaction")
        checks.function_or_none(on_lost, "on_lost")
        checks.function_or_none(compensate, "compensate")
        self.times = times_for(times, queue.capabilities)
        self.form = form_for(form, queue.capabilities)
        self.log = checks.queue(log, "log")
        self._clock = clock
        is_named_alike = log.name == queue.name and log.account is queue.account
        if is_named_alike or identity_of(innermost(log)) == identity_of(innermost(queue)):
            raise ParameterInvalid(parameter="log", reason="must be another queue")
        if parked is None and (pattern := changing_bodies(log)) is not None:
            reason = f"the log is in {pattern}, and <log>-parked would be a bare queue: pass one in the same pattern"
            raise ParameterInvalid(parameter="parked", reason=reason)
        hidden = self.form is Form.HIDDEN
        self._life = check_half(self.times, queue.capabilities, queue.stats().retention) if hidden else None
        check_log(self.times, self.form, log.capabilities, log.stats().retention)
        self._parked = None if parked is None else checks.queue(parked, "parked")
        self._running: set[str] = set()
        self._lock = threading.Lock()
        self._logbook = Logbook(log, self.times, clock)
        self._committer = Committer(queue, self.times, on_lost)
        self.checker = Checker(
            self._logbook, self._committer, self.times, check_transaction, self._park, compensate,
            self._running.__contains__, clock,
        )  # fmt: skip

    def send_transaction(
        self, message: str | Message, do_transaction: Callable[[Prepared], Verdict | bool]
    ) -> Transaction:
        """Do the operation and send the message, or neither.

        Errors before the operation starts are those of `Queue.send`, for either queue. An exception of `do_transaction`
        is raised after the checker was asked what became of the operation.
        """
        checks.function(do_transaction, "do_transaction")
        entry, handle = self._prepare(as_message(message))
        try:
            return Transaction(entry.id, self._operate(entry, handle, do_transaction))
        finally:
            with self._lock:
                self._running.discard(entry.id)

    def parked(self) -> Queue:
        """The queue of undecided transactions."""
        with self._lock:
            if self._parked is None:
                name = f"{self.log.name}-parked"
                with suppress(QueueExists):  # an earlier release made it, or somebody chose its settings
                    self.log.account.create(name, Template(retention=_PARKED_SECONDS))
                self._parked = self.log.account.queue(name)
            return self._parked

    def settle_parked(self, decide: Callable[[Prepared], Verdict | bool], now: float | None = None) -> int:
        """Go through the parked transactions once and settle those that `decide` knows; returns how many.

        Each is asked about once, however long `decide` takes. Their half messages have ended long ago, so a commit
        sends from the entry. Raises the errors of `decide` and of the queues.
        """
        checks.function(decide, "decide")
        parked = self.parked()
        kept: dict[str, str] = {}
        settled: dict[str, bool] = {}
        again = 0
        try:
            # A message comes again if its lease ended meanwhile. After a whole round of such repeats, no new one is
            # left.
            while again <= len(settled) and (messages := parked.receive(lease=self.times.check_lease)):
                for message in messages:
                    kept[message.id] = message.handle
                    again = again + 1 if message.id in settled else 0
                    if message.id not in settled:
                        settled[message.id] = self._decide_parked(message, decide, now)
                    if settled[message.id]:
                        with suppress(LeaseError):  # then it will come again
                            parked.delete(message.handle)
                        del kept[message.id]
        finally:
            for handle in kept.values():
                with suppress(LeaseError):  # its lease has ended, so it is back in the queue
                    parked.release(handle)
        return sum(settled.values())

    def close(self) -> None:
        """Close the checker's thread, the log and the queue."""
        self.checker.close()
        self.log.close()
        self.inner.close()

    def _decide_parked(
        self, message: Received, decide: Callable[[Prepared], Verdict | bool], now: float | None
    ) -> bool:
        """Returns whether the verdict is known and carried out."""
        entry = decode(message.body)
        verdict = Verdict.UNKNOWN if entry is None else verdict_of(decide(entry.shown()))
        if entry is None or verdict is Verdict.UNKNOWN:
            return False
        return self.checker.decide(entry, verdict, self._clock.wall() if now is None else now)

    def _prepare(self, message: Message) -> tuple[Entry, str]:
        """Steps 1 and 2. Returns the log entry and its handle."""
        text_bytes(message.body)
        transaction, now = secrets.token_hex(16), self._clock.wall()
        if self.form is Form.HIDDEN and (message.delay or message.ttl is not None):
            reason = "of a half message are the transaction's own: choose form=logged"
            raise ParameterInvalid(parameter="delay and ttl", reason=reason)
        draft = new_entry(transaction, self.form, message, "x" * 512 if self._life else None, now, self._life)
        self._logbook.check_size(draft)
        check_sendable(marked(draft, self.inner.capabilities), self.inner.capabilities)
        with self._lock:
            self._running.add(transaction)
        handle = None
        try:
            if self._life is not None:
                handle = self._committer.prepare(message, transaction, self._life)
            entry = replace(draft, handle=handle)
            return entry, self._logbook.write(entry)
        except BaseException:
            with self._lock:
                self._running.discard(transaction)
            if handle is not None:
                self._forget(replace(draft, handle=handle))
            raise

    def _forget(self, entry: Entry) -> None:
        """The log was not written, so the half message is useless: delete it; if it stays, it ends unseen."""
        try:
            self._committer.roll_back(entry)
        except VeilError as error:
            log.info("transaction %s: its half message stays until it ends: %s", entry.id, error)

    def _operate(self, entry: Entry, handle: str, do_transaction: Callable[[Prepared], Verdict | bool]) -> Outcome:
        """Steps 3 to 5."""
        try:
            verdict = verdict_of(do_transaction(entry.shown()))
        except Exception:
            # The operation may have reached its own commit: only the application's check knows.
            self._finish(entry, handle, self.checker.ask(entry))
            raise
        return self._finish(entry, handle, verdict)

    def _finish(self, entry: Entry, handle: str, verdict: Verdict) -> Outcome:
        """Steps 4 and 5. A failure here is left to the checker."""
        if verdict is Verdict.UNKNOWN:
            return Outcome.PENDING
        try:
            if verdict is Verdict.ROLLBACK:
                self._committer.roll_back(entry)
                outcome = Outcome.ROLLED_BACK
            else:
                outcome = self._commit(entry)
        except VeilError as error:
            log.warning("transaction %s is left to the checker: %s", entry.id, error)
            return Outcome.PENDING
        if outcome is not Outcome.PENDING:
            self._logbook.erase(handle)
        return outcome

    def _commit(self, entry: Entry) -> Outcome:
        """Commit, with retries. Raises VeilError if the last try failed."""
        perhaps_earlier = False
        for left in range(COMMIT_TRIES - 1, -1, -1):
            try:
                found = self._committer.commit(entry, self._clock.wall(), perhaps_earlier)
            except VeilError as error:
                if hopeless(error):
                    return Outcome.COMPENSATED if self.checker.give_up(entry, error) else Outcome.PENDING
                perhaps_earlier = perhaps_earlier or may_have_happened(error)
                if not left:
                    raise
            else:
                log.debug("transaction %s: %s", entry.id, found)
                return Outcome.COMMITTED
        raise AssertionError("the last try returns or raises")

    def _park(self, body: str) -> None:
        send_to(self.parked(), body)
