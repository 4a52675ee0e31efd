"""Acknowledged messages, until the queue has deleted them.

Strategy: the acknowledgement is durable already, so nothing depends on the delete: what the queue does not take now is
tried again with the next ones, and in the end given back. It comes again, and is dropped by its number.
"""

import logging
import threading
from collections.abc import Iterable

from veilmq.client.keeper import Lease
from veilmq.client.ordered.entries import give_back
from veilmq.model.errors import LeaseError, ReceiptInvalid, VeilError

log = logging.getLogger("veilmq.ordered")


class Deletions:
    """Of one receiver. Any thread."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._waiting: list[Lease] = []
        self._closed = False

    def delete(self, leases: Iterable[Lease] = ()) -> None:
        """Delete these, and what waits."""
        with self._lock:
            due, self._waiting = [*self._waiting, *leases], []
        for lease in due:
            try:
                lease.delete()
            except (LeaseError, ReceiptInvalid):
                continue
            except VeilError as error:
                log.info("queue %s: an acknowledged message is not deleted yet: %s", self._queue, error)
                self._wait(lease)

    def close(self) -> None:
        """Nothing waits here any more."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for lease in waiting:
            give_back(lease)

    def _wait(self, lease: Lease) -> None:
        with self._lock:
            if not self._closed:
                self._waiting.append(lease)
                return
        give_back(lease)
