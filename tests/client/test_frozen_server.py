"""A server that is frozen for a while (SIGSTOP, a suspended machine) and goes on: what reached it meanwhile counts
before what ended meanwhile."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import veilmq
from veilmq.client.queue import Queue
from veilmq.testing.local import ServerProcess

LEASE_S = 2.0
FROZEN_S = 3.0
MESSAGES = 6


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path).start()
    yield process
    process.stop()


def urls(server: ServerProcess) -> dict[str, str]:
    at = {name: getattr(server, name).partition("//")[2] for name in ("sqs", "azure", "mns")}
    return {
        "veil": f"veil://{at['sqs']}/frozen-veil?create=1",
        "sqs": f"sqs://any:any@{at['sqs']}/frozen-sqs?tls=0&region=us-east-1&create=1",
        "azure": f"azure://{at['azure']}/devstoreaccount1/frozen-azure?tls=0&create=1",
        "mns": f"mns://any:any@{at['mns']}/frozen-mns?tls=0&create=1",
    }


@pytest.mark.slow
def test_an_extension_that_arrived_in_time_keeps_its_lease_though_a_receive_is_parked(server: ServerProcess) -> None:
    own, other = ({name: veilmq.connect(url) for name, url in urls(server).items()} for _ in range(2))
    for queue in own.values():
        queue.send_batch(["x"] * MESSAGES)
    held = [(queue, message) for queue in own.values() for message in queue.receive(MESSAGES, lease=LEASE_S)]
    assert len(held) == MESSAGES * len(own)

    def extended(queue: Queue, handle: str) -> str:
        return queue.extend(handle, 60)

    # A thread each, and so new connections too, which the server must first take.
    with ThreadPoolExecutor(len(held) + len(other)) as pool:
        polls = [pool.submit(queue.receive, wait=15) for queue in other.values()]
        time.sleep(0.5)  # they park
        server.process.send_signal(signal.SIGSTOP)
        try:
            extensions = [pool.submit(extended, queue, message.handle) for queue, message in held]
            time.sleep(FROZEN_S)
        finally:
            server.process.send_signal(signal.SIGCONT)
        handles = [each.result(20) for each in extensions]
        for queue in other.values():
            queue.interrupt()
        assert [each.result(20) for each in polls] == [[] for _ in polls]
    for (queue, _), handle in zip(held, handles, strict=True):
        queue.delete(handle)
    for queue in [*own.values(), *other.values()]:
        queue.close()
