"""Transactions under faults: a message is received if and only if its operation was done.

Strategy: producers send by half messages, and do the operation, an entry in a set, or not. A checker finishes what a
fault has left open. When the log is empty, what was received is held against what was done: a message twice is the
pattern's right (its consumers are told so), a message less or a message of an operation that was not done is not.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from veilmq.client.adapters.connect import connect_account
from veilmq.client.messages import Template
from veilmq.client.queue import Account
from veilmq.client.transaction import ATTRIBUTE, Prepared, Times, TransactionQueue, Verdict
from veilmq.driver import PATIENCE_SECONDS
from veilmq.model.errors import VeilError
from veilmq.testing import chance

PRODUCERS = 2
TIMES = Times(timeout=2, check_every=0.5, check_lease=2, ask_every=1)
_PAUSE_SECONDS = 0.02
_RETENTION_SECONDS = 4 * 86_400


class Transactions:
    """The queue, its log, the producers and the checker."""

    name = "transactions"

    def __init__(self, urls: dict[str, str]) -> None:
        self.operations = 0
        self.violations: list[str] = []
        self.use(urls)
        self._numbers = count()
        self._done: set[str] = set()
        self._received: set[str] = set()
        self._said: set[str] = set()

    def use(self, urls: dict[str, str]) -> None:
        """Reach the server by these from now on."""
        self._url = urls["veil"]

    def open(self) -> None:
        """Make the queues."""
        with connect_account(self._url) as account:
            account.create("orders", Template(retention=_RETENTION_SECONDS))
            account.create("orders-log", Template(retention=_RETENTION_SECONDS))

    def round(self, seconds: float) -> None:
        """Produce for so long, finish everything, and compare."""
        stop = threading.Event()
        with ThreadPoolExecutor(PRODUCERS, "producer") as pool:
            producers = [pool.submit(self._produce, number, stop) for number in range(PRODUCERS)]
            stop.wait(seconds)
            stop.set()
            for each in producers:
                each.result()
        end = time.monotonic() + PATIENCE_SECONDS
        left = True
        while left and time.monotonic() < end:
            try:
                with connect_account(self._url) as account:
                    left = self._finish(account)
            except VeilError:
                pass  # the server is not back yet
            time.sleep(0.2)
        broken = {f"operation {each} was done, and its message did not come" for each in self._done - self._received}
        broken |= {f"message {each} came, and its operation was not done" for each in self._received - self._done}
        broken |= {"the log of the transactions did not become empty"} if left else set()
        self.violations += sorted(broken - self._said)
        self._said |= broken

    def _queue(self, account: Account) -> TransactionQueue:
        return TransactionQueue(account.queue("orders"), account.queue("orders-log"), self._checked, times=TIMES)

    def _checked(self, prepared: Prepared) -> Verdict:
        return Verdict.COMMIT if prepared.id in self._done else Verdict.ROLLBACK

    def _produce(self, number: int, stop: threading.Event) -> None:
        draw = chance(number)

        def operation(prepared: Prepared) -> Verdict:
            if draw.random() < 0.3:
                return Verdict.ROLLBACK
            self._done.add(prepared.id)
            return Verdict.COMMIT

        while not stop.is_set():
            try:
                with connect_account(self._url) as account:
                    queue = self._queue(account)
                    while not stop.is_set():
                        self.operations += 1
                        queue.send_transaction(f"order {next(self._numbers)}", operation)
                        stop.wait(_PAUSE_SECONDS)
            except VeilError:
                stop.wait(_PAUSE_SECONDS)

    def _finish(self, account: Account) -> bool:
        """Whether something is left to be done."""
        queue = self._queue(account)
        queue.checker.run_once()
        while messages := queue.receive(16):
            self._received |= {str(message.attributes[ATTRIBUTE]) for message in messages}
            queue.delete_batch([message.handle for message in messages])
        log, orders = queue.log.stats(), queue.stats()
        return bool(log.visible or log.delayed or log.in_flight or orders.visible or orders.in_flight)

    def close(self) -> None:
        """Nothing is open."""
