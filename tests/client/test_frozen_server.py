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

LEASES_S = (2.0, 5.0, 10.0)
MESSAGES = 6


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path).start()
    yield process
    process.stop()


def urls(server: ServerProcess, name: str) -> dict[str, str]:
    at = {name: getattr(server, name).partition("//")[2] for name in ("sqs", "azure", "mns")}
    return {
        "veil": f"veil://{at['sqs']}/{name}-veil?create=1",
        "sqs": f"sqs://any:any@{at['sqs']}/{name}-sqs?tls=0&region=us-east-1&create=1",
        "azure": f"azure://{at['azure']}/devstoreaccount1/{name}-azure?tls=0&create=1",
        "mns": f"mns://any:any@{at['mns']}/{name}-mns?tls=0&create=1",
    }


@pytest.mark.slow
def test_an_extension_that_arrived_in_time_keeps_its_lease_though_a_receive_is_parked(server: ServerProcess) -> None:
    # On a busy machine a short lease may be over before the server is frozen: then again with a longer one.
    assert any(kept_over_a_freeze(server, lease) for lease in LEASES_S), "the machine is too slow for this test"


def kept_over_a_freeze(server: ServerProcess, lease: float) -> bool:
    """False: the leases were nearly over before the server was frozen, so nothing was tried."""
    own, other = (
        {name: veilmq.connect(url) for name, url in urls(server, f"frozen-{lease:.0f}").items()} for _ in range(2)
    )
    for queue in own.values():
        queue.send_batch(["x"] * MESSAGES)
    began = time.monotonic()
    held = [(queue, message) for queue in own.values() for message in queue.receive(MESSAGES, lease=lease)]

    def extended(queue: Queue, handle: str) -> str:
        return queue.extend(handle, 60)

    # A thread each, and so new connections too, which the server must first take.
    with ThreadPoolExecutor(len(held) + len(other)) as pool:
        polls = [pool.submit(queue.receive, wait=20) for queue in other.values()]
        time.sleep(0.5)  # they park
        server.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        in_time = stopped - began < lease * 0.8
        try:
            if in_time:
                extensions = [pool.submit(extended, queue, message.handle) for queue, message in held]
                time.sleep(lease + 1)
        finally:
            server.process.send_signal(signal.SIGCONT)
        handles = [each.result(20) for each in extensions] if in_time else []
        for queue in other.values():
            queue.interrupt()
        found = [each.result(20) for each in polls]
    if in_time:
        assert len(held) == MESSAGES * len(own)
        assert found == [[] for _ in polls]
        for (queue, _), handle in zip(held, handles, strict=True):
            queue.delete(handle)
    for queue in [*own.values(), *other.values()]:
        queue.close()
    return in_time
