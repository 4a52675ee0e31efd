"""One Spark session and one server for all tests of the pipeline.

Strategy: a session takes ten seconds to start and a gigabyte to live, so there is one a test run: a module that uses it
says `pytestmark = pytest.mark.xdist_group("spark")`, so that one worker has them all. Queues have names of their own.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import veilmq
from veilmq.client.messages import Template
from veilmq.client.queue import Queue
from veilmq.pipeline.session import session
from veilmq.testing.server import ServerProcess


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """`local[2]`, stopped at the end whatever happens."""
    local = tmp_path_factory.mktemp("spark")
    made = session("local[2]", settings={"spark.local.dir": str(local), "spark.sql.warehouse.dir": str(local / "w")})
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on free ports."""
    process = ServerProcess(tmp_path_factory.mktemp("server")).start()
    try:
        yield process
    finally:
        process.stop()


class Stage:
    """Queues of the server, by whichever protocol, each with a new name."""

    _numbers = itertools.count()

    def __init__(self, server: ServerProcess, directory: Path) -> None:
        self.place = server.sqs.removeprefix("http://").rstrip("/")
        self.directory = directory
        self.name = f"queue-{next(self._numbers)}"

    def url(self, scheme: str = "veil", name: str | None = None) -> str:
        """Of a queue that may not exist yet."""
        name = self.name if name is None else name
        return f"veil://{self.place}/{name}" if scheme == "veil" else f"sqs://x:x@{self.place}/{name}?tls=0"

    def make(self, name: str | None = None, *, timeout: float = 30, fifo: bool = False) -> Queue:
        """Create the queue; over veil."""
        template = Template(visibility_timeout=timeout, fifo=fifo)
        return veilmq.connect(self.url(name=name), template=template)


@pytest.fixture()
def stage(server: ServerProcess, tmp_path: Path) -> Stage:
    """A queue's name and a directory, for one test."""
    return Stage(server, tmp_path)


def send(queue: Queue, bodies: list[str]) -> None:
    """All of them, or fail."""
    failed = [each for each in queue.send_batch(bodies) if isinstance(each, Exception)]
    assert not failed, failed[0]


def left(queue: Queue) -> int:
    """Messages in the queue, in whatever state."""
    stats = queue.stats()
    return stats.visible + (stats.delayed or 0) + (stats.in_flight or 0)
