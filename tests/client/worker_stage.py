"""A queue in a data directory with the real clock, and workers on it that end when it is empty."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.adapters.embedded.translation import digest, send_command
from veilmq.client.messages import Message, Received, Template
from veilmq.client.queue import Queue
from veilmq.client.worker import Backoff, Counts, Worker

SOON = Backoff(first=0.001, longest=0.001)
WAIT_S = 30.0


class Stage:
    """`queue` is empty at first; `seen` are the bodies that `note` was called with, in order."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.account = EmbeddedAccount(directory)
        self.queue = self.make("work")
        self.seen: list[str] = []
        self.lock = threading.Lock()

    def make(self, name: str, **settings: Any) -> Queue:
        self.account.create(name, Template(**settings))
        return self.account.queue(name)

    def send(self, *bodies: str | Message) -> None:
        for answer in self.queue.send_batch(bodies):
            assert not isinstance(answer, Exception), answer

    def send_empty(self) -> None:
        """What an Azure client may send."""
        queue: Any = self.queue
        command = send_command(queue._key, queue._origin, "x", False)
        queue._one(msgspec.structs.replace(command, body="", md5=digest(b""), size_bytes=0))

    def note(self, job: Any) -> None:
        with self.lock:
            self.seen.append(job.body)

    def worker(self, handler: Callable[[Any], Any], queue: Queue | None = None, **options: Any) -> Worker:
        return Worker(queue or self.queue, handler, **{"retry": SOON, "wait": 0.1, **options})

    def work(
        self, handler: Callable[[Any], Any], queue: Queue | None = None, *, receives: int | None = None, **options: Any
    ) -> Counts:
        """Until the queue is empty, or so many messages were received."""
        return self.worker(handler, queue, **options).run(until_empty=receives is None, messages_max=receives)

    def visible(self) -> list[str]:
        """The bodies that a receiver gets now, sorted; they are deleted."""
        came: list[Received] = []
        while more := self.queue.receive(10):
            came += more
        for each in came:
            self.queue.delete(each.handle)
        return sorted(each.body for each in came)

    def nothing_left(self) -> bool:
        stats = self.queue.stats()
        return (stats.visible, stats.delayed, stats.in_flight) == (0, 0, 0)


class Gate:
    """A handler that says that it began, and goes on when it is let."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.began = threading.Semaphore(0)
        self.may = threading.Event()
        self.jobs: list[Any] = []

    def __call__(self, job: Any) -> None:
        self.jobs.append(job)
        self._stage.note(job)
        self.began.release()
        assert self.may.wait(WAIT_S)

    def wait_begun(self, number: int = 1) -> None:
        for _ in range(number):
            assert self.began.acquire(timeout=WAIT_S)
