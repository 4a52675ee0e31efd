"""The operation log: one hidden entry for each transaction, until it is settled.

Strategy: if a send returns a handle, the entry is delayed by the transaction's timeout and deleted by that handle. If
not (SQS), the entry is sent without a delay and received at once, with a lease as long as the timeout; threads of one
process share what they find, and give back entries of other processes. Either way, an entry that nobody deletes becomes
visible after the timeout, and is then overdue. An entry's age is judged by the queue's clock, which producers and
checkers share; it is learned from messages that nobody received before.
"""

import logging
import threading

from veilmq.client.clock import Clock
from veilmq.client.errors import TransportError
from veilmq.client.messages import Message, Received
from veilmq.client.queue import Queue
from veilmq.client.transaction.entry import Entry, Times, claims, decode, encode
from veilmq.model.errors import MessageTooLarge, VeilError

CLAIM_MAX = 10
"""Entries received at once in the search for one's own."""

log = logging.getLogger("veilmq.transaction")


class Logbook:
    """Thread-safe."""

    def __init__(self, queue: Queue, times: Times, clock: Clock) -> None:
        self.queue = queue
        self._times = times
        self._clock = clock
        self._claims = claims(queue.capabilities)
        self._ahead: float | None = None
        """Seconds that the queue's clock is ahead of our monotonic one; None: not known yet."""
        self._changed = threading.Condition()
        self._searching = False
        self._wanted: set[str] = set()
        self._found: dict[str, str] = {}

    def check_size(self, entry: Entry) -> None:
        """Raises MessageTooLarge if the log cannot take the entry."""
        size_bytes = self.queue.capabilities.transmitted_bytes(encode(entry))
        limit_bytes = self.queue.capabilities.body_bytes_max
        if size_bytes > limit_bytes:
            raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=limit_bytes)

    def write(self, entry: Entry) -> str:
        """Write the entry; returns its handle. Raises like `Queue.send`; TransportError if it was not found again."""
        body = encode(entry)
        if not self._claims:
            handle = self.queue.send(Message(body, delay=self._times.asked_after)).handle
            assert handle is not None, "checked by its capabilities"
            return handle
        with self._changed:
            self._wanted.add(entry.id)
        try:
            self.queue.send(Message(body))
            return self._claim(entry.id)
        finally:
            with self._changed:
                self._wanted.discard(entry.id)
                self._found.pop(entry.id, None)

    def erase(self, handle: str) -> None:
        """Delete an entry. If that fails now, the checker meets the entry again and settles it once more."""
        try:
            self.queue.delete(handle)
        except VeilError as error:
            log.info("a settled log entry stays for now: %s", error)

    def overdue(self, count_max: int) -> list[Received]:
        """Visible entries, leased for the time of a check. Raises like `Queue.receive`."""
        count = min(count_max, self.queue.capabilities.receive_messages_max)
        came = self._receive(count, self._times.check_lease)
        return self._sorted_out(came, self._times.check_lease) if self._claims else came

    def age(self, message: Received, entry: Entry) -> float:
        """Seconds since the entry was logged, by the queue's clock; until that is known, by the producer's and ours."""
        if self._ahead is None or message.sent is None:
            return self._clock.wall() - entry.prepared
        return self._clock.monotonic() + self._ahead - message.sent

    def _receive(self, count: int, lease: float, wait: float = 0.0) -> list[Received]:
        came = self.queue.receive(count, lease=lease, wait=wait)
        for message in came:
            if message.receive_count == 1 and message.first_received is not None:
                self._ahead = message.first_received - self._clock.monotonic()
        return came

    def _claim(self, transaction: str) -> str:
        """Find our own entry. One thread of the process searches for all."""
        deadline = self._clock.monotonic() + self._times.claim_for
        while True:
            with self._changed:
                while self._searching and transaction not in self._found and self._left(deadline) > 0:
                    self._changed.wait(self._left(deadline))
                handle = self._found.pop(transaction, None)
                if handle is not None:
                    return handle
                if self._left(deadline) <= 0:
                    reason = f"log entry of transaction {transaction} was not found within {self._times.claim_for:g} s"
                    raise TransportError(reason=reason, may_have_happened=True)
                self._searching = True
            try:
                wait = min(1.0, self.queue.capabilities.wait_max, max(0.0, self._left(deadline)))
                count = min(CLAIM_MAX, self.queue.capabilities.receive_messages_max)
                came = self._receive(count, self._times.asked_after, wait)
                for message in self._sorted_out(came, self._times.asked_after):
                    self._give_back(message)
            finally:
                with self._changed:
                    self._searching = False
                    self._changed.notify_all()

    def _left(self, deadline: float) -> float:
        return deadline - self._clock.monotonic()

    def _sorted_out(self, messages: list[Received], lease: float) -> list[Received]:
        """The overdue entries. Entries that a thread here waits for are passed to it; those of other processes are
        given back.
        """
        overdue = []
        for message in messages:
            entry = decode(message.body)
            with self._changed:
                wanted = entry is not None and entry.id in self._wanted
            if entry is not None and wanted:
                self._hand_over(entry.id, message, lease)
            elif entry is not None and self.age(message, entry) < self._times.asked_after:
                self._give_back(message)
            else:
                overdue.append(message)
        return overdue

    def _hand_over(self, transaction: str, message: Received, lease: float) -> None:
        handle = message.handle
        if lease != self._times.asked_after:
            try:
                handle = self.queue.extend(handle, self._times.asked_after)
            except VeilError as error:
                log.info("log entry of transaction %s comes again: %s", transaction, error)
                return
        with self._changed:
            self._found[transaction] = handle
            self._changed.notify_all()

    def _give_back(self, message: Received) -> None:
        try:
            self.queue.release(message.handle)
        except VeilError as error:
            log.info("a log entry comes back by itself: %s", error)
