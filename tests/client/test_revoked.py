"""Credentials that are revoked while messages are held: handlers are told, no thread dies, all goes on afterwards."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import veilmq
from veilmq.client.errors import ServiceError
from veilmq.client.keeper import LeaseKeeper, Reason
from veilmq.client.queue import Queue
from veilmq.client.receiver import Receiver
from veilmq.client.worker import Backoff, Cause, Worker
from veilmq.testing.local import ServerProcess

pytestmark = pytest.mark.slow

KEY, OTHER, SECRET = "AKIDREVOKED000000001", "AKIDREVOKED000000002", "a secret of the test"
ACCOUNT = "111111111111"
LEASE_SECONDS = 6
SHORT: dict[str, Any] = {"visibility_timeout": LEASE_SECONDS, "interval": 2, "minimal_life": 1}


class Place:
    """A server that checks signatures, and whose key can be taken away and given back."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "credentials.toml"
        self.write(KEY, OTHER)
        self.server = ServerProcess(directory, "--credentials", str(self.file)).start()

    def write(self, *keys: str) -> None:
        entries = "".join(f'[[account.key]]\nid = "{key}"\nsecret = "{SECRET}"\n' for key in keys)
        self.file.write_text(f'[[account]]\nid = "{ACCOUNT}"\n{entries}')
        self.file.chmod(0o600)

    def revoke(self, queue: Queue) -> None:
        self.reload(lambda: refused(queue), OTHER)

    def give_back(self, queue: Queue) -> None:
        self.reload(lambda: not refused(queue), KEY, OTHER)

    def reload(self, done: Callable[[], bool], *keys: str) -> None:
        self.write(*keys)
        self.server.process.send_signal(signal.SIGHUP)
        eventually(done)


def refused(queue: Queue) -> bool:
    try:
        queue.stats()
    except ServiceError:
        return True
    return False


def eventually(condition: Callable[[], object]) -> None:
    for _ in range(3_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.server.stop()


@pytest.fixture(params=["veil", "sqs"])
def queue(request: pytest.FixtureRequest, place: Place) -> Iterator[Queue]:
    at = f"{KEY}:{quote(SECRET)}@{place.server.sqs.partition('//')[2]}/jobs?create=1&region=us-east-1"
    with veilmq.connect(f"{request.param}://{at}{'&tls=0' if request.param == 'sqs' else ''}") as queue:
        yield queue


def test_a_keeper_tells_its_handlers_and_lives(place: Place, queue: Queue) -> None:
    queue.send("work")
    with LeaseKeeper(queue, **SHORT) as keeper:
        lease = keeper.register(queue.receive(lease=LEASE_SECONDS)[0])
        eventually(lambda: keeper.stats.extensions)
        place.revoke(queue)
        eventually(lambda: lease.lost)
        assert lease.lost.reason is Reason.EXPIRED
        assert isinstance(lease.lost.error, ServiceError)
        place.give_back(queue)
        (message,) = queue.receive(lease=LEASE_SECONDS, wait=20)
        assert message.receive_count == 2
        before = keeper.stats.extensions
        lease = keeper.register(message)
        eventually(lambda: keeper.stats.extensions > before)
        lease.delete()


def test_a_worker_tells_its_handler_and_works_on(place: Place, queue: Queue) -> None:
    errors: list[Any] = []
    causes: list[Any] = []
    began, done = threading.Event(), threading.Event()

    def handler(job: Any) -> None:
        if not began.is_set():
            began.set()
            assert job.cancelled.wait(30)
            causes.append(job.cancelled.cause)
            job.cancelled.check()
        done.set()

    queue.send("work")
    soon = Backoff(first=0.1, longest=0.1)
    # A place is free, so that it goes on receiving.
    with Worker(queue, handler, lease=LEASE_SECONDS, prefetch=1, wait=1, retry=soon, on_error=errors.append, drain=5):
        assert began.wait(30)
        place.revoke(queue)
        eventually(lambda: causes and errors)
        assert causes == [Cause.LOST]
        place.give_back(queue)
        assert done.wait(60)
    assert {type(error) for error in errors} == {ServiceError}
    stats = queue.stats()
    assert (stats.visible, stats.in_flight) == (0, 0)


def test_a_receiver_raises_and_works_on(place: Place, queue: Queue) -> None:
    with Receiver(queue, wait=1) as receiver:
        place.revoke(queue)
        with pytest.raises(ServiceError):
            receiver.receive(10)
        place.give_back(queue)
        queue.send("work")

        def came() -> bool:
            try:
                return receiver.receive(1) is not None
            except ServiceError:
                return False

        eventually(came)
