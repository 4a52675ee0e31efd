"""Closing a receiver, or stopping a worker, whose polls are parked for twenty seconds: on a directory, on our server,
through boto3, and through a pattern that receives by itself.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import veilmq
from veilmq.client.encrypted import EncryptedQueue, Keys, new_key
from veilmq.client.queue import Queue
from veilmq.client.receiver import Receiver
from veilmq.client.unreadable import keep
from veilmq.client.worker import Worker
from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow

POLL_SECONDS = 20
SOON_SECONDS = 15
"""Below a poll's wait, far above what a busy machine needs."""


@contextmanager
def embedded(server: LocalServer, directory: Path) -> Iterator[Queue]:
    with veilmq.connect(f"veil://{directory}/data?queue=jobs&create=1") as queue:
        yield queue


@contextmanager
def veil(server: LocalServer, directory: Path) -> Iterator[Queue]:
    with server.connect("jobs") as queue:
        yield queue


@contextmanager
def sqs(server: LocalServer, directory: Path) -> Iterator[Queue]:
    server.connect("jobs").close()
    with veilmq.connect(f"sqs://any:any@{server.sqs_url.partition('//')[2]}/jobs?tls=0&region=us-east-1") as queue:
        yield queue


@contextmanager
def encrypted(server: LocalServer, directory: Path) -> Iterator[Queue]:
    with server.connect("jobs") as queue:
        yield EncryptedQueue(queue, Keys(new_key()), unreadable=keep)


@pytest.fixture(params=[embedded, veil, sqs, encrypted], ids=["embedded", "veil", "sqs", "encrypted over veil"])
def queue(request: pytest.FixtureRequest, veilmq_server: LocalServer, tmp_path: Path) -> Iterator[Queue]:
    with request.param(veilmq_server, tmp_path) as queue:
        yield queue


def soon(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SOON_SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_a_workers_poll_ends_when_it_is_told_to_stop(queue: Queue) -> None:
    before = set(threading.enumerate())
    worker = Worker(queue, lambda job: None, wait=POLL_SECONDS, pollers=3)
    worker.start()
    soon(lambda: sum("veilmq worker poller" in each.name for each in set(threading.enumerate()) - before) == 3)
    worker.stop()
    assert worker.join(SOON_SECONDS), "a poll is still parked"


@contextmanager
def answers_on_their_way(server: str) -> Iterator[str]:
    """A way to the server on which the answer to a receive arrives only when the client sends no more."""

    def carry(client: socket.socket) -> None:
        host, _, port = server.rpartition(":")
        receives, over = threading.Event(), threading.Event()

        def answers() -> None:
            with suppress(OSError):
                while data := behind.recv(65_536):
                    if receives.is_set():
                        over.wait(SOON_SECONDS)
                    client.sendall(data)

        with suppress(OSError), client, socket.create_connection((host, int(port))) as behind:
            answering = threading.Thread(target=answers, daemon=True)
            answering.start()
            while data := client.recv(65_536):
                if b"VeilMQ.Receive" in data:
                    receives.set()
                behind.sendall(data)
            over.set()
            behind.shutdown(socket.SHUT_WR)
            answering.join(SOON_SECONDS)

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=carry, args=(door.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as door:
        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        yield f"127.0.0.1:{door.getsockname()[1]}"
        door.shutdown(socket.SHUT_RDWR)
        listening.join(SOON_SECONDS)


def test_an_answer_on_its_way_to_a_worker_that_stops_goes_back(veilmq_server: LocalServer) -> None:
    server = urlsplit(veilmq_server.sqs_url).netloc
    with (
        veilmq_server.connect("jobs") as queue,
        answers_on_their_way(server) as way,
        veilmq.connect(f"veil://{way}/jobs") as slow,
    ):
        worker = Worker(slow, lambda job: None, wait=POLL_SECONDS)
        worker.start()
        queue.send("on its way")
        soon(lambda: queue.stats().in_flight == 1)
        worker.stop()
        assert worker.join(SOON_SECONDS)
        (message,) = queue.receive(1)
        assert message.receive_count == 2


def test_parked_polls_end_with_their_receiver(queue: Queue) -> None:
    receiver = Receiver(queue, polls=3, wait=POLL_SECONDS)
    callers = [threading.Thread(target=receiver.receive) for _ in range(20)]
    for callers_now, caller in enumerate(callers, 1):
        caller.start()
        # One after the other: for callers who come together one poll is enough.
        soon(lambda n=callers_now: receiver.waiting == n and len(receiver._polling._exchange.calls) == min(n, 3))
    receiver.close(deadline=SOON_SECONDS)
    assert not receiver._polling._exchange.calls, "a poll is still under way"
    for caller in callers:
        caller.join(SOON_SECONDS)
        assert not caller.is_alive()
    # The queue is as it was, and what comes now is for others.
    queue.send("for another")
    with Receiver(queue) as another:
        message = another.receive(SOON_SECONDS)
        assert message is not None
        assert message.body == "for another"
        queue.delete(message.handle)
