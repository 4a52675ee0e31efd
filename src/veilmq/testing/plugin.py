"""The pytest plugin: a fixture `veilmq_server` for the tests of programs that use queues.

Strategy: pytest finds the plugin by itself if VeilMQ is installed (entry point `pytest11`). It imports no VeilMQ module
before a test uses the fixture, so it costs other tests nothing.

    def test_a_late_worker_loses_its_message(veilmq_server):
        queue = veilmq_server.connect("jobs")
        queue.send("hello")
        queue.receive(lease=6 * 3600)
        veilmq_server.advance(hours=6)
        assert queue.receive()[0].receive_count == 2
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from veilmq.testing.local import LocalServer


@pytest.fixture(scope="session")
def veilmq_server_process(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[LocalServer]":
    """One server for the whole run, or per worker under pytest-xdist."""
    from veilmq.testing.local import LocalServer

    server = LocalServer(tmp_path_factory.mktemp("veilmq"), "--no-cooldowns", "--push-allow", "127.0.0.0/8,::1/128")
    yield server
    server.stop()


@pytest.fixture
def veilmq_server(veilmq_server_process: "LocalServer") -> "Iterator[LocalServer]":
    """A real server in development mode, without queues: `LocalServer`."""
    yield veilmq_server_process
    veilmq_server_process.disconnect()
    try:
        veilmq_server_process.reset()
    except OSError:
        if not veilmq_server_process.was_interrupted():
            raise
