"""Queues of a server, by whichever protocol, each with a new name."""

import itertools
from pathlib import Path
from urllib.parse import urlsplit

import veilmq
from veilmq.client.messages import Template
from veilmq.client.queue import Queue
from veilmq.testing.local import ServerProcess

_NUMBERS = itertools.count()


class Stage:
    """One test's queue and directory."""

    def __init__(self, server: ServerProcess, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.name = f"queue-{next(_NUMBERS)}"

    def url(self, scheme: str = "veil", name: str | None = None) -> str:
        """Of a queue that may not exist yet."""
        name = self.name if name is None else name
        port = {"azure": self.server.azure, "mns": self.server.mns}.get(scheme, self.server.sqs)
        place = urlsplit(port).netloc
        return {
            "veil": f"veil://{place}/{name}",
            "sqs": f"sqs://x:x@{place}/{name}?tls=0",
            "azure": f"azure://{place}/devstoreaccount1/{name}?tls=0",
            "mns": f"mns://id:secret@{place}/{name}?base64=0",
        }[scheme]

    def make(self, name: str | None = None, *, timeout: float = 30, fifo: bool = False) -> Queue:
        """Create the queue, and open it over veil."""
        return veilmq.connect(self.url(name=name), template=Template(visibility_timeout=timeout, fifo=fifo))


def send(queue: Queue, bodies: list[str]) -> None:
    """All of them, or fail."""
    failed = [each for each in queue.send_batch(bodies) if isinstance(each, Exception)]
    assert not failed, failed[0]


def left(queue: Queue) -> int:
    """Messages in the queue, in whatever state."""
    stats = queue.stats()
    return stats.visible + (stats.delayed or 0) + (stats.in_flight or 0)


def come_again(queue: Queue, count: int) -> None:
    """Somebody receives the messages, so that earlier handles are stale, and gives them back."""
    got = []
    while len(got) < count:
        got += queue.receive(min(64, count - len(got)), lease=60, wait=5)
    for each in got:
        queue.release(each.handle)
