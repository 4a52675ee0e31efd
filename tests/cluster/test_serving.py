"""`veilmq serve --cluster`: one server serves, the others follow, and one of them goes on."""

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import boto3
import pytest
from botocore.config import Config
from tests.support.commands import Run, in_process
from tests.support.postgres import Pair, until

from veilmq.cluster.postgres import Postgres
from veilmq.cluster.postgres.schema import init
from veilmq.engine.directory import STATE_FORMAT
from veilmq.testing.local import ServerProcess

LEASE_S = 1.0
pytestmark = pytest.mark.slow


class Servers:
    """Servers of one cluster."""

    def __init__(self, directory: Path, pair: Pair) -> None:
        self._directory = directory
        self.pair = pair
        self._all: list[ServerProcess] = []

    def begin(self, name: str) -> ServerProcess:
        """A server that serves when it owns the queues."""
        (self._directory / name).mkdir(exist_ok=True)
        server = ServerProcess(self._directory / name, "--cluster", self.pair.dsn, "--cluster-name", name)
        self._all.append(server)
        return server.begin()

    def follows(self, server: ServerProcess) -> None:
        """Wait until it follows."""
        until(lambda: "following as" in server.log.read_text() and (server.data / "veilmq.db").exists())

    def close(self) -> None:
        for server in self._all:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGCONT)
                server.kill()


@pytest.fixture
def servers(shared_pair: Pair, tmp_path: Path) -> Iterator[Servers]:
    """None yet, of a new cluster."""
    shared_pair.primary.query("drop schema if exists veilmq cascade")
    init(Postgres(shared_pair.dsn), state_format=STATE_FORMAT, lease_us=int(LEASE_S * 1e6))
    servers = Servers(tmp_path, shared_pair)
    yield servers
    servers.close()


class Client:
    """boto3 on one server's queue, without retries."""

    def __init__(self, server: ServerProcess) -> None:
        self._sqs: Any = boto3.client(
            "sqs", endpoint_url=server.sqs, region_name="us-east-1", aws_access_key_id="A", aws_secret_access_key="s",
            config=Config(retries={"max_attempts": 0}),
        )  # fmt: skip
        self._url = self._sqs.create_queue(QueueName="jobs")["QueueUrl"]

    def send(self, body: str) -> None:
        self._sqs.send_message(QueueUrl=self._url, MessageBody=body)

    def receive(self) -> list[tuple[str, str]]:
        """Bodies and handles."""
        found = self._sqs.receive_message(QueueUrl=self._url, MaxNumberOfMessages=10, VisibilityTimeout=600)
        return [(message["Body"], message["ReceiptHandle"]) for message in found.get("Messages", ())]

    def delete(self, handle: str) -> None:
        self._sqs.delete_message(QueueUrl=self._url, ReceiptHandle=handle)

    def counts(self) -> tuple[int, int]:
        """Visible, in flight."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self._sqs.get_queue_attributes(QueueUrl=self._url, AttributeNames=names)["Attributes"]
        return int(found[names[0]]), int(found[names[1]])


def test_a_killed_owner_is_replaced_and_nothing_is_lost(servers: Servers) -> None:
    first = servers.begin("one").opened()
    second = servers.begin("two")
    servers.follows(second)
    client = Client(first)
    for number in range(20):
        client.send(str(number))
    taken = client.receive()
    first.kill()
    killed = perf_counter()
    client = Client(second.opened())
    assert perf_counter() - killed > 0.2  # it waited for the lease
    assert client.counts() == (20 - len(taken), len(taken))
    for _, handle in taken:
        client.delete(handle)
    assert client.counts() == (20 - len(taken), 0)


def test_a_server_that_ends_hands_over(servers: Servers) -> None:
    """The next one does not wait for the lease; and the first comes back as a follower, and takes over again."""
    first, second = servers.begin("one").opened(), servers.begin("two")
    servers.follows(second)
    Client(first).send("kept")
    assert first.stop() == 0
    assert "the owner before was nobody" in second.opened().log.read_text()  # it was handed over
    first = servers.begin("one")
    servers.follows(first)
    Client(second).send("too")
    assert second.stop() == 0
    assert Client(first.opened()).counts() == (2, 0)


def test_an_owner_that_was_asleep_answers_nothing(servers: Servers) -> None:
    first, second = servers.begin("one").opened(), servers.begin("two")
    servers.follows(second)
    Client(first).send("kept")
    host, port = first.sqs.removeprefix("http://").split(":")
    first.process.send_signal(signal.SIGSTOP)
    with socket.create_connection((host, int(port)), timeout=20) as asking:
        body = b'{"QueueName":"jobs"}'
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.GetQueueUrl\r\n"
        head += b"Content-Type: application/x-amz-json-1.0\r\nContent-Length: %d\r\n" % len(body)
        key = b"Authorization: AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/sqs/aws4_request\r\n\r\n"
        asking.sendall(head + key + body)
        client = Client(second.opened())
        client.receive()
        first.process.send_signal(signal.SIGCONT)
        assert first.process.wait(20) == 5
        answer = asking.recv(1 << 16)
    assert not answer or b" 5" in answer.split(b"\r\n", 1)[0], answer
    assert client.counts() == (0, 1)


class TestRefused:
    """What a server or command says that cannot be part of a cluster."""

    def ends(self, server: ServerProcess) -> str:
        assert server.process.wait(20) in {1, 2, 3}
        return server.log.read_text()

    def test_the_data_of_a_server_alone_is_not_a_copy(self, servers: Servers, tmp_path: Path) -> None:
        (tmp_path / "one").mkdir()
        ServerProcess(tmp_path / "one").start().stop()
        assert "holds the data of a server alone" in self.ends(servers.begin("one"))

    def test_a_copy_is_not_served_alone(self, servers: Servers, tmp_path: Path) -> None:
        servers.begin("one").opened().stop()
        with pytest.raises(RuntimeError, match="start it with --cluster"):
            ServerProcess(tmp_path / "one").start()

    def test_no_cluster_was_made(self, servers: Servers) -> None:
        servers.pair.primary.query("drop schema veilmq cascade")
        assert "veilmq cluster init" in self.ends(servers.begin("one"))

    def test_another_format(self, servers: Servers) -> None:
        servers.pair.primary.query("update veilmq.shard set format = format + 1")
        assert "run the same release on all servers" in self.ends(servers.begin("one"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return in_process(monkeypatch, capsys, tmp_path)


def test_the_commands_make_a_cluster_and_show_it(run: Run, shared_pair: Pair, tmp_path: Path) -> None:
    shared_pair.primary.query("drop schema if exists veilmq cascade")
    made = run("cluster", "init", "--cluster", shared_pair.dsn, "--lease", "1.5")
    assert made.code == 0
    again = run("cluster", "init", "--cluster", shared_pair.dsn)
    assert again.out == made.out
    before = run("cluster", "status", "--cluster", shared_pair.dsn)
    assert before.code == 1
    assert "nobody, epoch 0" in before.out
    servers = Servers(tmp_path, shared_pair)
    try:
        servers.begin("one").opened()
        shown = run("cluster", "status", "--cluster", shared_pair.dsn, "--json")
    finally:
        servers.close()
    found = json.loads(shown.out)
    assert (shown.code, found["owner"], found["epoch"], found["lease_s"]) == (0, "one", 1, 1.5)
    assert found["records"] > 0
    assert [standby["sync"] for standby in found["standbys"]] == ["sync"]
