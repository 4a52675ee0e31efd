"""`veilmq serve` under a service manager: readiness as systemd hears it, and whose directory it is."""

import errno
import http.client
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from tests.cli.conftest import WAIT_S, Serve

from veilmq.cli.failures import Exit
from veilmq.cli.serve import _in_the_way
from veilmq.cli.serve.systemd import Manager, manager_of
from veilmq.server.config.settings import Settings
from veilmq.testing.for_each import for_each
from veilmq.testing.local import VEILMQ


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


def test_a_manager_with_a_full_queue_hears_that_it_is_ready(serve: Serve, manager: socket.socket) -> None:
    manager.bind("notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, suppress(BlockingIOError):
        other.setblocking(False)
        while True:
            other.sendto(b"another unit", "notify")
    server = serve(NOTIFY_SOCKET="notify").ready()
    server.sqs().list_queues()  # whose answer comes after a first try
    assert next(told for told in iter(partial(manager.recv, 100), b"") if told != b"another unit") == b"READY=1"
    assert server.stop() == 0


def test_it_serves_though_nobody_can_be_told(serve: Serve, tmp_path: Path) -> None:
    server = serve(NOTIFY_SOCKET="nowhere").ready()
    assert "NOTIFY_SOCKET nowhere cannot be told READY=1" in server.wait_for("NOTIFY_SOCKET")
    assert server.stop() == 0


def test_the_watchdog_hears_of_it_while_it_serves(serve: Serve, manager: socket.socket) -> None:
    manager.bind("notify")
    server = serve(NOTIFY_SOCKET="notify", WATCHDOG_USEC="100000")
    assert [manager.recv(100) for _ in range(4)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    server.send_signal(signal.SIGSTOP)
    manager.settimeout(0.5)
    with pytest.raises(TimeoutError):
        list(iter(partial(manager.recv, 100), b""))
    server.send_signal(signal.SIGCONT)
    manager.settimeout(WAIT_S)
    assert manager.recv(100) == b"WATCHDOG=1"
    assert server.stop() == 0
    while (last := manager.recv(100)) == b"WATCHDOG=1":
        pass
    assert last == b"STOPPING=1"


@for_each(
    ("given", "watchdog_s", "sockets"),
    [
        ({}, None, 0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0, 0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None, 0),  # of the process that started this one
        ({"WATCHDOG_USEC": "0"}, None, 0),
        ({"WATCHDOG_USEC": "soon"}, None, 0),
        ({"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid())}, None, 2),
        ({"LISTEN_FDS": "2", "LISTEN_PID": "1"}, None, 0),
        ({"LISTEN_FDS": "two", "LISTEN_PID": str(os.getpid())}, None, 0),
    ],
)
def test_what_is_meant_for_another_process_is_left_alone(
    given: dict[str, str], watchdog_s: float | None, sockets: int
) -> None:
    assert manager_of(given) == Manager(None, watchdog_s, sockets)


@pytest.fixture
def activated(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a server as systemd does that has opened its ports: `activated(sockets, *flags)`."""
    started: list[subprocess.Popen[str]] = []

    def start(sockets: list[socket.socket], *flags: str) -> subprocess.Popen[str]:
        # Two steps, for a descriptor to be moved may be one that is taken: first above all of them, then from 3 on.
        numbers = [each.fileno() for each in sockets]
        above = max(numbers) + 1
        moves = [f"{above + place}<&{number}" for place, number in enumerate(numbers)]
        moves += [f"{3 + place}<&{above + place}" for place in range(len(numbers))]
        script = f'export LISTEN_PID=$$ LISTEN_FDS={len(numbers)}; exec {" ".join(moves)}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *VEILMQ, "serve", "--data", str(tmp_path / "data"), *flags],
            stderr=subprocess.PIPE, text=True, pass_fds=numbers,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(WAIT_S)
        assert process.stderr is not None
        process.stderr.close()


def opened(host: str = "127.0.0.1") -> socket.socket:
    return socket.create_server((host, 0))


def test_clients_of_a_port_that_the_manager_opened_wait_for_the_next_server(
    activated: Callable[..., subprocess.Popen[str]],
) -> None:
    with opened() as sqs, opened() as admin:
        number = sqs.getsockname()[1]
        ports = {"sqs": number, "admin": admin.getsockname()[1], "azure": 0, "mns": 0}
        flags = [word for name, port in ports.items() for word in (f"--{name}", f"127.0.0.1:{port}")]
        first = activated([sqs, admin], *flags)
        for process in (first, None):
            # Between the two servers nobody accepts, and nobody is refused: the second one answers.
            caller = http.client.HTTPConnection("127.0.0.1", number, timeout=WAIT_S)
            caller.request("GET", "/?Action=ListQueues")
            if process is None:
                process = activated([sqs, admin], *flags)
            assert caller.getresponse().status == 200
            caller.close()
            health = http.client.HTTPConnection("127.0.0.1", ports["admin"], timeout=WAIT_S)
            health.request("GET", "/health/live")
            assert health.getresponse().status == 200
            health.close()
            process.terminate()
            assert process.wait(WAIT_S) == 0


def test_a_socket_that_no_port_takes_is_refused(activated: Callable[..., subprocess.Popen[str]]) -> None:
    with opened() as stranger, opened() as twice, opened("0.0.0.0") as outside:
        number = outside.getsockname()[1]
        cases = [
            ([stranger], [], 4, f"opened 127.0.0.1:{stranger.getsockname()[1]}, which is none of the server's"),
            ([twice, twice], ["--mns", f"127.0.0.1:{twice.getsockname()[1]}"], 4, "two sockets for --mns"),
            ([outside], ["--sqs", f"127.0.0.1:{number}"], 2, f"0.0.0.0:{number} can be reached from other machines"),
        ]
        for sockets, flags, code, told in cases:
            process = activated(sockets, *flags)
            assert process.wait(WAIT_S) == code
            assert process.stderr is not None
            assert told in process.stderr.read()


def test_another_users_directory_is_not_given_up_for_another() -> None:
    failure = _in_the_way(PermissionError(errno.EACCES, "Permission denied", "a d/lock"), Settings(data=Path("a d")))
    assert failure.code is Exit.DIRECTORY
    assert str(failure) == "a d/lock: Permission denied"
    assert failure.advice.endswith(f"chown -R {os.geteuid()}: 'a d'")
