"""The programs of test_transaction_kills.py: a producer and a checker that kill themselves after a given step.

    python -m tests.client.transaction_sides produce|check DIRECTORY STEP

A step is a call to one of the two queues, or a write to the application's own database. Nothing else outlives the
process, so a death before a step is one after the step before.
"""

import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.embedded import EmbeddedClient

from veilmq.client.messages import Message, Received, Sent, Template
from veilmq.client.queue import Queue
from veilmq.client.transaction import Prepared, TransactionQueue, Verdict
from veilmq.client.wrapping import Wrapping
from veilmq.model.messages import Failure

WEEK = Template(retention=7 * 86_400)


class Steps:
    """Counts, and dies."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.count = 0

    def step(self, call: Callable[[], Any]) -> Any:
        self.count += 1
        result = call()
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


class Mortal(Wrapping):
    changes_bodies = False

    def __init__(self, inner: Queue, steps: Steps) -> None:
        super().__init__(inner)
        self.steps = steps

    def send(self, message: str | Message) -> Sent:
        return self.steps.step(lambda: self.inner.send(message))

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        return self.steps.step(lambda: self.inner.receive(count_max, lease=lease, wait=wait))

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.steps.step(lambda: self.inner.release(handle, delay, failure=failure))

    def delete(self, handle: str) -> None:
        self.steps.step(lambda: self.inner.delete(handle))


class Application:
    """Its database has the operations that are done."""

    def __init__(self, directory: Path, steps: Steps) -> None:
        self.connection = sqlite3.connect(directory / "application.db", check_same_thread=False)
        self.connection.execute("CREATE TABLE IF NOT EXISTS done (id TEXT)")
        self.steps = steps

    def do(self, prepared: Prepared) -> bool:
        self.connection.execute("INSERT INTO done VALUES (?)", (prepared.id,))
        self.steps.step(self.connection.commit)
        return True

    def check(self, prepared: Prepared) -> Verdict:
        found = self.connection.execute("SELECT * FROM done WHERE id = ?", (prepared.id,)).fetchone()
        return Verdict.COMMIT if found else Verdict.ROLLBACK


def opened(directory: Path, steps: Steps) -> tuple[EmbeddedClient, TransactionQueue, Application]:
    client = EmbeddedClient(directory / "data")
    for name in ("orders", "log"):
        client.account.create(name, WEEK)
    application = Application(directory, steps)
    orders, log = (Mortal(client.account.queue(name), steps) for name in ("orders", "log"))
    return client, TransactionQueue(orders, log, application.check, clock=client.clock), application


if __name__ == "__main__":
    role, directory, last = sys.argv[1:]
    client, queue, application = opened(Path(directory), Steps(int(last)))
    if role == "produce":
        queue.send_transaction("order 7", application.do)
    else:
        client.pass_time(601)
        queue.checker.run_once()
    client.account.close()
