"""The two programs of test_ordered_kills.py: `produce` and `consume`, each ready to die at any instant.

The producer goes on where its numbers are, and the consumer's rows are written in the transaction of its
acknowledgements.
"""

import random  # noqa: TID251 - what is drawn only varies the sizes of batches
import sqlite3
import sys
from pathlib import Path
from typing import TextIO
from uuid import uuid4

import veilmq
from veilmq.client.messages import Sent
from veilmq.client.ordered import LocalFile, OrderedReceiver, OrderedSender, TableStorage

LEASE_SECONDS = 0.5


def produce(url: str, directory: Path, total: int) -> None:
    """Send `total` messages in batches of one to five, and note what was sent under which number.

    No two bodies are alike, so that a number that is given to two messages shows.
    """
    with (
        veilmq.connect(url) as queue,
        OrderedSender(queue, LocalFile(directory / "send")) as sender,
        (directory / "told").open("a", buffering=1) as told,
    ):
        left_open = [message.body for message in sender.pending]
        sender.settle()
        note(told, sender.next_number - len(left_open), left_open)
        while (first := sender.next_number) <= total:
            bodies = [uuid4().hex for _ in range(min(random.randint(1, 5), total + 1 - first))]
            results = sender.send_batch(bodies)
            assert all(isinstance(result, Sent) for result in results), results
            note(told, first, bodies)


def note(told: TextIO, first: int, bodies: list[str]) -> None:
    for number, body in enumerate(bodies, first):
        told.write(f"{number} {body}\n")


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
