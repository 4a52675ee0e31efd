"""`veilmq serve` under a service manager: readiness as systemd hears it, and whose directory it is."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import WAIT_S, Serve

from veilmq.cli.failures import Exit
from veilmq.cli.serve import _in_the_way
from veilmq.server.config.settings import Settings


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What systemd would listen on."""
    monkeypatch.chdir(tmp_path)  # a socket's path has room for 107 bytes
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(WAIT_S)
        yield listening


@pytest.mark.parametrize("address", ["notify", "@veilmq-test"])
def test_it_tells_when_it_is_ready_and_when_it_ends(
    serve: Serve, manager: socket.socket, tmp_path: Path, address: str
) -> None:
    name = f"{address}-{tmp_path.parent.name}-{tmp_path.name}" if address.startswith("@") else address
    manager.bind(name.replace("@", "\0", 1))
    server = serve(NOTIFY_SOCKET=name)
    assert manager.recv(100) == b"READY=1"
    server.ready()  # it has logged its ports before
    assert server.sqs().list_queues()["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert server.stop() == 0
    assert manager.recv(100) == b"STOPPING=1"


def test_it_serves_though_nobody_can_be_told(serve: Serve, tmp_path: Path) -> None:
    server = serve(NOTIFY_SOCKET="nowhere").ready()
    assert "NOTIFY_SOCKET nowhere cannot be told READY=1" in server.wait_for("NOTIFY_SOCKET")
    assert server.stop() == 0


def test_another_users_directory_is_not_given_up_for_another() -> None:
    failure = _in_the_way(PermissionError(errno.EACCES, "Permission denied", "d/lock"), Settings(data=Path("d")))
    assert failure.code is Exit.DIRECTORY
    assert str(failure) == "d/lock: Permission denied"
    assert failure.advice.endswith(f"chown -R {os.geteuid()}: d")
