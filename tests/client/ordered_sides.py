"""The two programs of test_ordered_kills.py: `produce` and `consume`, each ready to die at any instant.

They keep no record of their own: the producer goes on where its numbers are, and the consumer's rows are written in the
transaction of its acknowledgements.
"""

import random  # noqa: TID251 - what is drawn only varies the sizes of batches
import sqlite3
import sys
from pathlib import Path

import veilmq
from veilmq.client.messages import Sent
from veilmq.client.ordered import LocalFile, OrderedReceiver, OrderedSender, TableStorage

LEASE_SECONDS = 1.0


def produce(url: str, directory: Path, total: int) -> None:
    """Send the numbers up to `total`, in batches of one to five."""
    with veilmq.connect(url) as queue, OrderedSender(queue, LocalFile(directory / "send")) as sender:
        sender.settle()
        while sender.next_number <= total:
            first = sender.next_number
            size = min(random.randint(1, 5), total + 1 - first)
            results = sender.send_batch([str(number) for number in range(first, first + size)])
            assert all(isinstance(result, Sent) for result in results), results


def consume(url: str, directory: Path, total: int) -> None:
    """Record every message with its acknowledgement, until `total` is there and nothing more comes."""
    storage = TableStorage(connection(directory), "receiver", hold_seconds=5)
    with veilmq.connect(url) as queue, OrderedReceiver(queue, storage, lease=LEASE_SECONDS) as receiver:
        while True:
            messages = receiver.receive(wait=2 * LEASE_SECONDS)
            if not messages and receiver.next_number > total:
                return
            for message in messages:
                with receiver.acknowledging(message.handle) as cursor:
                    cursor.execute("INSERT INTO done (body) VALUES (?)", (message.body,))


def connection(directory: Path):
    def connect() -> sqlite3.Connection:
        made = sqlite3.connect(directory / "application.db", check_same_thread=False)
        made.execute("PRAGMA journal_mode=WAL")
        made.execute("PRAGMA synchronous=NORMAL")
        return made

    return connect


if __name__ == "__main__":
    role, url, directory, total = sys.argv[1:]
    {"produce": produce, "consume": consume}[role](url, Path(directory), int(total))
