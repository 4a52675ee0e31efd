"""An unmodified SDK behind several servers: through HAProxy with the configuration of deploy/, and with a name that has
several addresses. What goes wrong while servers are killed and restarted the SDK's own retries cover."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import boto3
import pytest
from tests.cluster.test_serving import Servers, ready, servers
from tests.support.ports import kept_ports
from tests.support.postgres import until

from veilmq.testing.local import ServerProcess

__all__ = ["servers"]
pytestmark = pytest.mark.slow

CONFIGURATION = Path(__file__).parents[2] / "deploy/haproxy.cfg"


class Fixed:
    """Two servers whose addresses stay when they are started again."""

    def __init__(self, servers: Servers, hosts: dict[str, str], ports: dict[str, tuple[int, int]]) -> None:
        self._servers = servers
        self.hosts, self.ports = hosts, ports
        self.running = {name: self.start(name) for name in hosts}

    def start(self, name: str) -> ServerProcess:
        host, (sqs, admin) = self.hosts[name], self.ports[name]
        server = self._servers.begin(name, "--sqs", f"{host}:{sqs}", "--admin", f"{host}:{admin}").opened()
        until(lambda: ready(server))
        return server

    def replace(self, name: str, end: Callable[[ServerProcess], object]) -> None:
        """End a server, and start it again."""
        end(self.running[name])
        self.running[name] = self.start(name)

    def owner(self) -> str:
        return self._servers.owner()


def connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def haproxy(fixed: Fixed, port: int, directory: Path) -> Iterator[str]:
    """The endpoint of SQS at HAProxy."""
    # Of the example's three listeners that of SQS, at our addresses.
    text = CONFIGURATION.read_text().partition("listen azure")[0].replace("bind *:9324", f"bind 127.0.0.1:{port}")
    for name, place in (("one", "10.0.0.1"), ("two", "10.0.0.2")):
        sqs, admin = fixed.ports[name]
        text = text.replace(f"{place}:9324", f"127.0.0.1:{sqs} port {admin}")
    path = directory / "haproxy.cfg"
    path.write_text(text)
    program = shutil.which("haproxy") or "/usr/sbin/haproxy"
    with (directory / "haproxy.log").open("wb") as log:
        process = subprocess.Popen([program, "-db", "-f", str(path)], stderr=log)
    try:
        until(lambda: connects(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


class Work:
    """boto3 as it comes, which sends, receives and deletes in two threads."""

    def __init__(self, endpoint: str) -> None:
        keys = {"aws_access_key_id": "A", "aws_secret_access_key": "s"}
        self._clients: list[Any] = [
            boto3.client("sqs", endpoint_url=endpoint, region_name="us-east-1", **keys) for _ in range(2)
        ]
        self._url = self._clients[0].create_queue(QueueName="jobs")["QueueUrl"]
        self.sent: list[str] = []
        self.got: list[str] = []
        self._ended = Event()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """While the block runs. Raises what the SDK raised, and if a message was lost."""
        with ThreadPoolExecutor(2) as pool:
            working = [pool.submit(self._send), pool.submit(self._receive)]
            try:
                self.moves()
                yield
                self.moves()
            finally:
                self._ended.set()
            for each in working:
                each.result(90)
        assert set(self.sent) == set(self.got)

    def moves(self) -> None:
        """Wait until messages have been received that were sent from now on."""
        sent = len(self.sent) + 5
        until(lambda: len(self.sent) >= sent)
        until(lambda: self.sent[sent - 1] in self.got)

    def _send(self) -> None:
        while not self._ended.is_set():
            body = str(len(self.sent))
            self._clients[0].send_message(QueueUrl=self._url, MessageBody=body)
            self.sent.append(body)
            time.sleep(0.005)

    def _receive(self) -> None:
        while not (self._ended.is_set() and set(self.sent) <= set(self.got)):
            client = self._clients[1]
            found = client.receive_message(QueueUrl=self._url, MaxNumberOfMessages=10, WaitTimeSeconds=1)
            for message in found.get("Messages", ()):
                client.delete_message(QueueUrl=self._url, ReceiptHandle=message["ReceiptHandle"])
                self.got.append(message["Body"])


@pytest.mark.timeout(1_200)  # `make cluster` restarts servers for ten minutes
@pytest.mark.alone
def test_boto3_through_haproxy(servers: Servers, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    end = time.monotonic() + pytestconfig.getoption("--restarts") * 60
    hosts = {"one": "127.0.0.1", "two": "127.0.0.1"}
    with kept_ports(5) as ports:
        fixed = Fixed(servers, hosts, {"one": (ports[0], ports[1]), "two": (ports[2], ports[3])})
        with haproxy(fixed, ports[4], tmp_path) as endpoint:
            work = Work(endpoint)
            with work.going_on():
                fixed.replace(fixed.owner(), ServerProcess.kill)
                work.moves()
                restarts = 0
                while restarts < 2 or time.monotonic() < end:
                    fixed.replace(("one", "two")[restarts % 2], ServerProcess.stop)
                    work.moves()
                    restarts += 1
    print(f"{restarts} restarts in turn, {len(work.sent):,} messages")


@pytest.mark.alone
def test_boto3_with_a_name_of_two_addresses(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a DNS name with two addresses: the SDK's HTTP client tries the one after the other."""
    hosts = {"one": "127.0.0.1", "two": "127.0.0.2"}
    looked_up = socket.getaddrinfo

    def two_addresses(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != "queues.localhost":
            return looked_up(host, port, *args, **options)
        return [each for place in hosts.values() for each in looked_up(place, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
    with kept_ports(3, *hosts.values()) as ports:
        fixed = Fixed(servers, hosts, {"one": (ports[0], ports[1]), "two": (ports[0], ports[2])})
        work = Work(f"http://queues.localhost:{ports[0]}")
        with work.going_on():
            fixed.replace("one", ServerProcess.kill)
            work.moves()
            fixed.replace("two", ServerProcess.stop)


def test_the_example_of_haproxy_names_our_ports() -> None:
    text = CONFIGURATION.read_text()
    assert re.findall(r"bind \*:(\d+)", text) == ["9324", "10001", "9326"]
    assert "port 9325" in text
