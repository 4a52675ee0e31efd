"""`veilmq serve --cluster`: every server answers every request, and another one goes on when the owner is gone."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Event
from typing import Any

import apsw
import boto3
import httpx
import psycopg
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from prometheus_client.parser import text_string_to_metric_families
from tests.house.test_alarms import Series, alarms, series_of, unseen
from tests.support.commands import Run, in_process
from tests.support.ports import kept_ports
from tests.support.postgres import Pair, until
from tests.support.small_disk import fill_up, small_disk

import veilmq
from veilmq.client.errors import TransportError
from veilmq.client.worker import Worker
from veilmq.cluster.postgres import Postgres
from veilmq.cluster.postgres.schema import init
from veilmq.engine.directory import STATE_FORMAT
from veilmq.store.directory import DATABASE
from veilmq.store.sqlite.disk import connect
from veilmq.testing.local import VEILMQ, ServerProcess

LEASE_S = 1.0
pytestmark = pytest.mark.slow


class Servers:
    """Servers of one cluster."""

    def __init__(self, directory: Path, pair: Pair) -> None:
        self._directory = directory
        self.pair = pair
        self._all: list[ServerProcess] = []

    def begin(self, name: str, *options: str, program: tuple[str, ...] = VEILMQ) -> ServerProcess:
        """A server, as it begins."""
        (self._directory / name).mkdir(exist_ok=True)
        own = ("--cluster", self.pair.dsn, "--cluster-name", name, "--peer", "127.0.0.1:0")
        server = ServerProcess(self._directory / name, *own, *options)
        server.program = program
        self._all.append(server)
        return server.begin()

    def start(self, name: str, *options: str, program: tuple[str, ...] = VEILMQ) -> ServerProcess:
        """A server whose clients' calls reach the owner, itself or another."""
        server = self.begin(name, *options, program=program).opened()
        until(lambda: ready(server))
        return server

    def stop(self, name: str) -> None:
        """Stop the one that runs."""
        (running,) = (each for each in self._all if each.data.parent.name == name and each.process.poll() is None)
        assert running.stop() == 0

    def registered(self, run: Run) -> list[dict[str, Any]]:
        """All servers that `veilmq cluster status` shows."""
        shown = run("cluster", "status", "--cluster", self.pair.dsn, "--json")
        found: list[dict[str, Any]] = json.loads(shown.out)["servers"]
        return found

    def owner(self) -> str:
        """The name of the server that owns the queues now, once one does."""
        until(lambda: self._query("owner, holder from veilmq.shard")[0][1] is not None)
        return str(self._query("owner from veilmq.shard")[0][0])

    def _query(self, what: str) -> list[tuple[Any, ...]]:
        return self.pair.primary.query(f"select {what}")

    def close(self) -> None:
        for server in self._all:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGCONT)
                server.kill()


def ready(server: ServerProcess) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{server.admin}/health/ready").status_code == 200
    return False


@pytest.fixture
def servers(shared_pair: Pair, tmp_path: Path) -> Iterator[Servers]:
    """None yet, of a new cluster."""
    shared_pair.primary.query("drop schema if exists veilmq cascade")
    init(Postgres(shared_pair.dsn), state_format=STATE_FORMAT, lease_us=int(LEASE_S * 1e6))
    servers = Servers(tmp_path, shared_pair)
    yield servers
    servers.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return in_process(monkeypatch, capsys, tmp_path)


class Client:
    """boto3 on one server's queue, without retries."""

    def __init__(self, server: ServerProcess, key: str = "A", secret: str = "s") -> None:
        keys = {"aws_access_key_id": key, "aws_secret_access_key": secret}
        once = Config(retries={"max_attempts": 0})
        self._sqs: Any = boto3.client("sqs", endpoint_url=server.sqs, region_name="us-east-1", config=once, **keys)
        self._url = self._sqs.create_queue(QueueName="jobs")["QueueUrl"]

    def send(self, body: str) -> None:
        self._sqs.send_message(QueueUrl=self._url, MessageBody=body)

    def receive(self, wait_s: int = 0, most: int = 10) -> list[tuple[str, str]]:
        """Bodies and handles."""
        found = self._sqs.receive_message(
            QueueUrl=self._url, MaxNumberOfMessages=most, VisibilityTimeout=600, WaitTimeSeconds=wait_s
        )
        return [(message["Body"], message["ReceiptHandle"]) for message in found.get("Messages", ())]

    def delete(self, handle: str) -> None:
        self._sqs.delete_message(QueueUrl=self._url, ReceiptHandle=handle)

    def deny(self, action: str) -> None:
        """A policy that denies everybody the action; "": none."""
        statement = {"Effect": "Deny", "Principal": "*", "Action": action, "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]}) if action else ""
        self._sqs.set_queue_attributes(QueueUrl=self._url, Attributes={"Policy": policy})

    def is_denied(self) -> bool:
        """Whether a send is."""
        try:
            self.send("denied?")
        except self._sqs.exceptions.ClientError as error:
            return bool(error.response["Error"]["Code"] == "AccessDenied")
        return False

    def keep_for(self, seconds: int) -> None:
        """Set the retention period."""
        self._sqs.set_queue_attributes(QueueUrl=self._url, Attributes={"MessageRetentionPeriod": str(seconds)})

    def kept_for(self) -> int:
        """It, in seconds."""
        names = ["MessageRetentionPeriod"]
        found = self._sqs.get_queue_attributes(QueueUrl=self._url, AttributeNames=names)["Attributes"]
        return int(found[names[0]])

    def counts(self) -> tuple[int, int]:
        """Visible, in flight."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self._sqs.get_queue_attributes(QueueUrl=self._url, AttributeNames=names)["Attributes"]
        return int(found[names[0]]), int(found[names[1]])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_follower_that_does_not_follow_says_so(servers: Servers, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small") as small:
        (small / "data").mkdir(mode=0o700)
        (tmp_path / "two").mkdir()
        (tmp_path / "two" / "data").symlink_to(small / "data")
        client = Client(servers.start("one"))
        two = servers.start("two")

        def told() -> Any:
            return httpx.get(f"{two.admin}/health/ready").json()

        assert told() == {"ready": True, "reasons": {}, "warnings": {}}
        ballast = fill_up(small / "ballast")
        for _ in range(5):
            client.send("x" * 10_000)
        until(lambda: told()["warnings"])
        (warning,) = told()["warnings"].items()
        assert warning[0] == "copy"
        assert re.match("it does not follow the log: the disk of .*data is full, and this server waits", warning[1])
        assert told()["ready"]
        ballast.unlink()
        until(lambda: not told()["warnings"])
        servers.stop("two")


STORY_OF_A_KILL = (
    r"INFO    veilmq.peer: lost the owner at 127.0.0.1:\d+: (the connection was closed|.*Connection reset by peer)",
    r"WARNING veilmq.peer: cannot reach the owner at 127.0.0.1:\d+: ",
    r"WARNING veilmq.cluster: the owner, one, is silent: this server may take over in 0.\d s",
    r"WARNING veilmq.cluster: took over in epoch 2: the lease of one has ended, which gave no sign of life for \d+\.\d",
    r"INFO    veilmq.cluster: serving in epoch 2: \d+\.\d\d s after the owner's last sign of life",
)
STORY_OF_A_HAND_OVER = (
    r"INFO    veilmq.peer: lost the owner at 127.0.0.1:\d+: (it stops|the connection was closed)",
    r"INFO    veilmq.cluster: took over in epoch 3: it was handed over",
    r"INFO    veilmq.cluster: serving in epoch 3: \d+\.\d\d s after the owner's last sign of life",
)


def told(server: ServerProcess, before: int, story: tuple[str, ...]) -> None:
    """That its log goes on with these lines. Two threads write them, and a peer may join meanwhile."""
    until(lambda: "serving in epoch" in "".join(server.log.read_text().splitlines()[before:]))
    lines = server.log.read_text().splitlines()[before:]
    lines = [line for line in lines if not line.endswith(" joined")][: len(story)]
    for expected in story:
        assert any(re.search(expected, line) for line in lines), "\n".join(lines)


def test_every_server_answers_every_request(servers: Servers) -> None:
    """A receive waits at one server for what is sent to another, and a handle is good at all of them."""
    first, second, third = (Client(servers.start(name)) for name in ("one", "two", "three"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(third.receive, wait_s=20)
        second.send("hello")
        ((body, handle),) = waiting.result()
    assert body == "hello"
    assert first.counts() == second.counts() == third.counts() == (0, 1)
    second.delete(handle)
    assert third.counts() == (0, 0)


def test_a_killed_owner_is_replaced_and_nothing_is_lost(servers: Servers, run: Run) -> None:
    """Clients of the other server wait for the lease to end, and get no error. A third one does not take the new owner
    for the old one."""
    first, second, third = (servers.start(name) for name in ("one", "two", "three"))
    assert run("cluster", "drain", "--cluster", servers.pair.dsn, "three").code == 0
    client = Client(second)
    for number in range(20):
        client.send(str(number))
    taken, before = client.receive(), len(second.log.read_text().splitlines())
    first.kill()
    client.send("sent meanwhile")
    assert servers.owner() == "two"
    told(second, before, STORY_OF_A_KILL)
    until(lambda: "connected to server two" in third.log.read_text())
    assert "the owner, one, is silent" in third.log.read_text()
    assert "signs of life again" not in third.log.read_text()
    (silent_s,) = re.findall(r"which gave no sign of life for (\d+\.\d) s", second.log.read_text())
    assert float(silent_s) >= LEASE_S
    assert client.counts() == (21 - len(taken), len(taken))
    for _, handle in taken:
        client.delete(handle)
    assert client.counts() == (21 - len(taken), 0)


def test_a_copy_that_is_damaged_in_what_only_an_owner_reads_is_filled_again(servers: Servers, run: Run) -> None:
    one, two = servers.start("one"), servers.start("two")
    Client(one).send("kept")
    servers.stop("two")
    with closing(connect(two.data / DATABASE)) as connection:
        connection.pragma("journal_mode", "delete")
        (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'topic'").fetchall()[0]
    with (two.data / DATABASE).open("r+b") as file:
        file.seek((page - 1) * 4_096)
        file.write(b"\xff" * 4_096)
    checked = run("check", "--data", str(two.data))
    assert (checked.code, "start that server with an empty directory" in checked.out) == (1, True)
    two = servers.start("two")
    one.kill()
    until(lambda: servers.owner() == "two")
    until(lambda: ready(two))
    assert [body for body, _ in Client(two).receive()] == ["kept"]
    assert "the copy is thrown away and filled again" in two.log.read_text()
    assert two.stop() == 0


def test_a_message_that_is_damaged_in_a_copy_comes_whole_from_another(servers: Servers) -> None:
    """The owner finds it as it is received, hands over, and fills its copy again. What is damaged in that one soon
    after is set apart: it may be so in the log, and servers must not hand over for ever."""
    one, two = servers.start("one"), servers.start("two")
    for number in range(15):
        Client(one).send(str(number))
    for name in ("one", "two"):  # the other one opens its store, and messages get their rows
        if name == "two":
            flip(one.data, "0")
        servers.stop(name)
        one, two = (servers.start(name), two) if name == "one" else (one, servers.start(name))
    assert servers.owner() == "one"
    client, got = Client(two), []

    def receive(most: int) -> list[str]:
        with suppress(ClientError):
            got.extend(body for body, _ in client.receive(most=most))
        return got

    until(lambda: "0" in receive(1))
    assert servers.owner() == "two"
    filled = r"message [0-9a-f-]+ is damaged: the copy is thrown away and filled again(.|\n)*connected to server two"
    until(lambda: re.search(filled, one.log.read_text()))
    said = one.log.read_text()
    assert re.search("no longer the owner: message [0-9a-f-]+ is damaged in the copy of this server", said)
    assert "its state is unknown" not in said
    flip(one.data, "14")
    servers.stop("two")
    until(lambda: ready(one))
    two = servers.start("two")
    client = Client(two)
    until(lambda: len(receive(10)) >= 14)
    assert set(got) == {str(number) for number in range(14)}
    assert servers.owner() == "one"
    assert "was set apart" in one.log.read_text()


def test_an_owner_whose_copy_was_damaged_is_replaced(servers: Servers) -> None:
    """A bit flips in the copy of a server that is down, and nothing notices before it owns the queues and writes that
    row: no other server could follow its record."""
    one, two = servers.start("one"), servers.start("two")
    Client(one).send("kept")
    servers.stop("two")
    with closing(connect(two.data / DATABASE)) as connection:
        connection.execute("UPDATE queue SET modified = modified + 1")
    two = servers.start("two")
    servers.stop("one")
    one = servers.start("one")
    assert servers.owner() == "two"
    client, copy = Client(two), "its copy was thrown away, and is being filled again"
    with psycopg.connect(servers.pair.primary.dsn) as connection:
        connection.execute("lock table veilmq.snapshot in access exclusive mode")
        client.keep_for(601)
        until(lambda: copy in httpx.get(f"{one.admin}/health/ready").json()["warnings"].get("copy", ""))
        reported = "select role, record from veilmq.server where name = 'one'"
        until(lambda: servers.pair.primary.query(reported) == [("filling", 0)])
    until(lambda: servers.owner() == "one")
    assert "copy" not in httpx.get(f"{one.admin}/health/ready").json()["warnings"]
    until(lambda: "the copy is thrown away and filled again" in two.log.read_text())
    assert "its owner's is damaged: it is applied: SQLITE_CHANGESET_DATA: UPDATE in queue, row 1" in one.log.read_text()
    assert "asked two, whose copy is damaged, to hand over to this server" in one.log.read_text()
    assert client.kept_for() == 601
    client.keep_for(602)
    until(lambda: two.log.read_text().count("it is applied") == 1)
    servers.stop("one")
    assert servers.owner() == "two"
    assert client.receive()[0][0] == "kept"
    assert client.kept_for() == 602
    assert one.log.read_text().count("is thrown away") == 1
    assert two.log.read_text().count("it is applied") == 1


def flip(data: Path, body: str) -> None:
    """A bit of a body, in a follower's copy, once that has it."""

    def flipped() -> bool:
        with suppress(apsw.Error), closing(connect(data / DATABASE)) as connection:
            connection.execute("UPDATE message SET body = ? WHERE body = ?", (b"X" + body[1:].encode(), body.encode()))
            return connection.changes() == 1
        return False

    until(flipped)


def test_owners_hand_over_and_no_client_notices(servers: Servers) -> None:
    """The owner is stopped and started again, in turn, while clients of a third server send and receive without
    retries."""
    running = {name: servers.start(name) for name in ("one", "two")}
    client = Client(servers.start("three"))
    sent, got, ended = [], [], Event()

    def send() -> None:
        while not ended.is_set():
            client.send(str(len(sent)))
            sent.append(str(len(sent)))

    def receive() -> None:
        while not (ended.is_set() and len(got) >= len(sent)):
            for body, handle in client.receive(wait_s=1):
                client.delete(handle)
                got.append(body)

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(send), pool.submit(receive)]
        for _ in range(6):
            name = servers.owner()
            if name in running:
                count = len(sent)
                assert running[name].stop() == 0
                until(lambda count=count: len(sent) > count)
                running[name] = servers.start(name)
            else:
                break
        ended.set()
        for each in working:
            each.result(60)
    assert sorted(got, key=int) == sent


def test_an_owner_that_is_asked_to_hands_over_and_no_client_notices(servers: Servers, run: Run) -> None:
    """Clients of the owner itself neither: its ports stay open, and it passes their calls on."""
    clients = [Client(servers.start(name)) for name in ("one", "two")]
    counts, ended = [0, 0], Event()

    def send(place: int) -> None:
        while not ended.is_set():
            clients[place].send(f"{place}")
            counts[place] += 1

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(send, place) for place in range(2)]
        for asked, owner in (("two", "two"), ("one", "one"), ("", "two"), ("", "one")):
            before = list(counts)
            shown = run("cluster", "handover", "--cluster", servers.pair.dsn, "--to", asked)
            assert shown.out.startswith(f"{owner} owns the queues, in epoch ")
            until(lambda before=before: all(count > was for count, was in zip(counts, before, strict=True)))
        ended.set()
        for each in working:
            each.result(60)
    assert clients[0].counts() == (sum(counts), 0)


def test_an_owner_that_was_asleep_answers_nothing_of_its_own(servers: Servers) -> None:
    """A receive that reached it meanwhile is passed on to the owner that there is now, which has given the message to
    somebody else."""
    first, second = servers.start("one"), servers.start("two")
    client = Client(second)
    client.send("kept")
    host, port = first.sqs.removeprefix("http://").split(":")
    first.process.send_signal(signal.SIGSTOP)
    with socket.create_connection((host, int(port)), timeout=20) as asking:
        body = b'{"QueueUrl":"http://localhost/000000000000/jobs"}'
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.ReceiveMessage\r\n"
        head += b"Content-Type: application/x-amz-json-1.0\r\nContent-Length: %d\r\n" % len(body)
        key = b"Authorization: AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/sqs/aws4_request\r\n\r\n"
        asking.sendall(head + key + body)
        assert [body for body, _ in client.receive()] == ["kept"]
        first.process.send_signal(signal.SIGCONT)
        answer = asking.recv(1 << 16)
    assert b"kept" not in answer
    until(lambda: "no longer the owner" in first.log.read_text())
    until(lambda: "no longer serving the queues: " in first.log.read_text())
    assert "its state is unknown" not in first.log.read_text()
    assert client.counts() == Client(first).counts() == (0, 1)


def test_a_policy_holds_at_every_server(servers: Servers, run: Run, tmp_path: Path) -> None:
    """Set at a follower or at the owner, it denies at the other."""
    path = tmp_path / "keys.toml"
    (made,) = run("keys", "new", "--into", str(path), "--json").json
    secret = tomllib.loads(path.read_text())["account"][0]["key"][0]["secret"]
    options = ("--credentials", str(path))
    first, second = (Client(servers.start(name, *options), made["id"], secret) for name in ("one", "two"))
    for setting, asking in ((second, first), (first, second)):
        setting.deny("sqs:SendMessage")
        until(lambda asking=asking: asking.is_denied())
        setting.deny("")
        until(lambda asking=asking: not asking.is_denied())


def test_a_worker_goes_on_when_the_server_that_it_talks_to_is_killed(servers: Servers) -> None:
    """Sends do, too, but for the one that was under way. What was acknowledged is handled."""
    first, second = servers.start("one"), servers.start("two")
    url = f"veil://{','.join(server.sqs.removeprefix('http://') for server in (first, second))}/jobs"
    sent, doubtful, handled = [], [], []
    # What was granted as the server died comes back when its lease ends.
    queue = veilmq.connect(f"{url}?create=1")
    worker = Worker(url, lambda job: handled.append(job.body), concurrency=4, lease=3)
    with closing(queue), worker:
        for number in range(300):
            if number == 100:
                until(lambda: len(handled) > 20)
                first.kill()
            try:
                queue.send(str(number))
                sent.append(str(number))
            except TransportError as error:
                doubtful += [str(number)] * (1 if error.may_have_happened else 1_000)
        assert len(doubtful) <= 1
        until(lambda: set(sent) <= set(handled))
    assert set(handled) <= {*sent, *doubtful}


def test_an_operator_hands_over_at_any_server_and_the_history_tells(servers: Servers) -> None:
    first, second = servers.start("one"), servers.start("two")
    until(lambda: token(first) == token(second))
    with httpx.Client(base_url=second.admin, headers=token(second), timeout=30) as http:
        until(lambda: [each["role"] for each in http.get("/api/v1/cluster").json()["servers"]] == ["owner", "follower"])
        found = http.get("/api/v1/cluster").json()
        assert (found["server"], found["owner"], found["confirming"], found["log"]["owned"]) == ("one", "one", 1, True)
        refused = http.post("/api/v1/cluster/handover", json={"to": "nobody"})
        assert (refused.status_code, refused.json()["field"]) == (400, "to")
        key = {"Idempotency-Key": "mine"}
        for _ in range(2):
            assert http.post("/api/v1/cluster/handover", json={"to": "two"}, headers=key).status_code == 200
        until(lambda: servers.owner() == "two")
        until(lambda: http.get("/api/v1/cluster").json()["owner"] == "two")
        events = [json.loads(line) for line in http.get("/api/v1/events").text.splitlines()]
    detail = {"id": "mine", "act": "hand_over", "asked": {"target": "cluster", "to": "two"}}
    assert [event["detail"] for event in events if event["kind"] == "operator_command"] == [detail]


def shown(server: ServerProcess) -> dict[str, float]:
    """The metrics of the cluster, counters of all labels."""
    families = text_string_to_metric_families(httpx.get(f"{server.admin}/metrics").text)
    samples = (sample for family in families for sample in family.samples if sample.name.startswith("veilmq_cluster_"))
    return {sample.name.removeprefix("veilmq_cluster_"): sample.value for sample in samples}


def test_every_server_says_how_its_cluster_stands(servers: Servers) -> None:
    """Before and after a take-over; and the alarms for a cluster look at what is shown."""
    first, second = servers.start("one"), servers.start("two")
    Client(second).send("hello")
    servers.pair.primary.query("insert into veilmq.snapshot values (1, 1, 0, 4096, '{}')")
    until(lambda: "snapshot_age_seconds" in shown(first))
    until(lambda: shown(second)["lag_records"] == 0 and "snapshot_age_seconds" in shown(second))
    owner, follower = shown(first), shown(second)
    for name, values in {
        "owner": (1, 0), "ready": (1, 1), "owned": (1, 1), "epoch": (1, 1), "takeovers_total": (1, 0), "peers": (1, 0),
        "standbys": (1, 1), "single_copy": (0, 0), "snapshot_lsn": (1, 1), "log_answers": (1, 1),
    }.items():  # fmt: skip
        assert (owner[name], follower[name]) == values, name
    assert (owner["lag_seconds"], owner["lag_records"]) == (0, 0)
    assert follower["lag_seconds"] < 5
    assert owner["append_seconds_count"] > 1 > follower["append_seconds_count"]
    assert owner["records"] > 1 < owner["log_bytes"]
    proxied = {"X-Forwarded-For": "10.0.0.9"}
    for server in (first, second):  # what an address of this machine may see, others need the token for
        assert httpx.get(f"{server.admin}/metrics", headers=proxied).status_code == 401
        assert httpx.get(f"{server.admin}/metrics", headers=proxied | token(server)).status_code == 200
        assert httpx.get(f"{server.admin}/metrics", headers={"Host": "rebound.example"}).status_code == 403
    series = [*series_of(httpx.get(f"{second.admin}/metrics").text), Series("up", {"instance": "two"})]
    assert {rule["alert"]: unseen(rule, series) for rule in alarms("veilmq-cluster") if unseen(rule, series)} == {}
    assert first.stop() == 0
    until(lambda: shown(second)["owner"] == 1)
    until(lambda: (found := shown(second))["takeovers_total"] == found["owned"] == 1 and found["epoch"] == 3)


def test_console_and_api_are_on_every_server(servers: Servers, run: Run, tmp_path: Path) -> None:
    """A server that does not own the queues passes requests on. Sessions, jobs and operators' ids outlive the owner."""
    first, second = servers.start("one"), servers.start("two")
    until(lambda: token(first) == token(second))
    with httpx.Client(base_url=second.admin, timeout=30) as http:
        assert http.get("/api/v1/queues", headers={"X-Veilmq-Client": "9.9.9.9 https"}).status_code == 401
        until(lambda: "/api/v1/queues from 127.0.0.1: refused with 401" in first.log.read_text())
        http.headers.update(token(second))
        queue = "/api/v1/queues/000000000000/us-east-1/orders"
        assert http.put(queue).status_code == 201
        bodies = [{"body": f"{number} " + "x" * 50_000} for number in range(10)]
        sent = http.post(f"{queue}/messages", content=iter([json.dumps({"messages": bodies}).encode()]))  # chunked
        assert sent.status_code == 200, sent.text
        shown = http.get(f"{queue}/peek", params={"count": 10})
        assert [message["body"] for message in shown.json()["messages"]] == [each["body"] for each in bodies]
        assert http.head("/api/v1/queues").content == b""
        assert http.get("/api/v1/nothing").status_code == 404
        with ThreadPoolExecutor(1) as pool:
            # A request that waits at the owner.
            last = http.get("/api/v1/events", params={"from": "next"}).headers["veilmq-next-offset"]
            following = pool.submit(http.get, "/api/v1/events", params={"from": last, "follow": 20})
            Client(first).send("news")
            assert '"kind":"' in following.result().text
    listed = run("queues", "list", "--admin", second.admin, "--token-file", str(second.data / "admin-token"))
    assert "orders" in listed.out, listed
    with httpx.Client(base_url=second.admin) as browser:
        origin = {"Origin": second.admin}
        secret = (second.data / "admin-token").read_text().strip()
        entered = browser.post("/console/sign-in", data={"secret": secret}, headers=origin)
        assert entered.status_code == 303, entered.text
        cookies = dict(browser.cookies)
        assert "orders" in browser.get("/console/").text
    for server in (first, second):
        assert httpx.get(f"{server.admin}/console/", cookies=cookies).status_code == 200
    assert httpx.get(f"{second.admin}/health/live").status_code == 200
    assert "veilmq_cluster_ready 1.0" in httpx.get(f"{second.admin}/metrics").text
    place = dict(zip(("account", "region", "name"), queue.split("/")[-3:], strict=True))
    wanted = {"act": "delete", "queue": place, "rate": 4}
    asking = {"headers": token(second) | {"Idempotency-Key": "mine"}, "timeout": 20}
    job = httpx.post(f"{second.admin}/api/v1/jobs", json=wanted, **asking).json()["id"]
    first.kill()
    assert httpx.get(f"{second.admin}{queue}", headers=token(second), timeout=20).status_code == 200  # it waited
    again = httpx.post(f"{second.admin}/api/v1/jobs", json=wanted, **asking)
    assert (again.headers["idempotent-replayed"], again.json()["id"]) == ("true", job)
    of_job = f"{second.admin}/api/v1/jobs/{job}"
    until(lambda: httpx.get(of_job, headers=token(second)).json()["status"] == "completed")
    assert httpx.get(of_job, headers=token(second)).json()["done"] == 10
    assert httpx.get(f"{second.admin}/console/", cookies=cookies).status_code == 200
    assert "veilmq_queue_messages" in httpx.get(f"{second.admin}/metrics", headers=token(second)).text


def test_a_server_reads_events_from_its_own_copy_where_that_is_enough(servers: Servers) -> None:
    first, second = servers.start("one"), servers.start("two")
    until(lambda: token(first) == token(second))
    Client(first).send("news")
    path, stale_ok = "/api/v1/events", {"VeilMQ-Read": "stale-ok"}
    with httpx.Client(base_url=second.admin, headers=token(second), timeout=30) as http:
        shown = http.get(path)
        end = shown.headers["veilmq-next-offset"]

        def reads(**members: Any) -> httpx.Response:
            return http.get(path, params=members, headers=stale_ok)

        until(lambda: reads(**{"from": 0}).headers["veilmq-next-offset"] == end)
        found = reads(**{"from": 0})
        assert (found.status_code, found.text, found.headers["veilmq-read"]) == (200, shown.text, "copy")
        assert [found.headers[name] for name in ENDS] == [shown.headers[name] for name in ENDS]
        assert http.get(path, params={"from": 0}, headers=stale_ok | {"Authorization": "Bearer x"}).status_code == 401
        # What its copy does not have, and what only the owner can do, the owner answers.
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(reads, **{"from": end, "follow": 20})
            Client(first).send("more news")
            assert following.result().headers["veilmq-start-offset"] == end
            assert following.result().text
        assert "veilmq-read" not in reads(**{"from": 0, "hold": 5}).headers
        assert reads(**{"from": 10_000}).status_code == 400
        assert reads(**{"from": "9" * 5_000}).status_code == 400


ENDS = ("veilmq-first-offset", "veilmq-next-offset", "veilmq-epoch")


def mns(server: ServerProcess, method: str, path: str, body: str = "") -> str:
    answer = httpx.request(method, f"{server.mns}{path}", content=body)
    answer.raise_for_status()
    return answer.text


@pytest.fixture
def nowhere() -> Iterator[str]:
    """A URL at which nobody answers."""
    with kept_ports(1) as (port,):
        yield f"http://127.0.0.1:{port}"


def test_what_one_server_keeps_to_itself_the_servers_of_a_cluster_share(
    servers: Servers, nowhere: str, tmp_path: Path
) -> None:
    """The token, which may be brought, the certificate of pushes, and how long an endpoint is left alone."""
    brought = tmp_path / "one" / "data" / "admin-token"
    brought.parent.mkdir(0o700, parents=True)
    brought.touch(0o600)
    brought.write_text("brought-by-the-operator\n")
    first, second = (servers.start(name, "--push-allow", "127.0.0.0/8") for name in ("one", "two"))
    until(lambda: token(first) == token(second))
    secrets = [(second.data / "admin-token").read_text().strip()]
    assert secrets == ["brought-by-the-operator"]
    mns(second, "PUT", "/topics/news", "<Topic/>")
    mns(second, "PUT", "/topics/news/subscriptions/s", f"<Subscription><Endpoint>{nowhere}/</Endpoint></Subscription>")
    for number in range(3):
        mns(second, "POST", "/topics/news/messages", f"<Message><MessageBody>{number}</MessageBody></Message>")
    path = "/api/v1/topics/000000000000/us-east-1/news"
    expected = {"endpoint": nowhere, "available": False, "failures": 3, "pause_us": 500_000}

    def pushing(server: ServerProcess) -> dict[str, Any] | None:
        """None: the token is refused, or another server owns the queues."""
        answer = httpx.get(f"{server.admin}{path}", headers={"Authorization": f"Bearer {secrets[0]}"})
        if answer.status_code in {401, 503}:
            return None
        found = answer.json()["subscriptions"][0]["push"]
        return {name: found.get(name) for name in expected}

    until(lambda: pushing(first) == expected)
    until(lambda: servers.pair.primary.query("select 1 from veilmq.log_0_0 where record like '%push-pauses%'") != [])
    certificate = mns(first, "GET", "/veilmq-push.pem")
    assert certificate.startswith("-----BEGIN CERTIFICATE-----")
    until(lambda: httpx.get(f"{second.mns}/veilmq-push.pem").text == certificate)
    secrets.append((first.data / "push-key.pem").read_text().strip())
    first.kill()
    found: list[dict[str, Any]] = []
    until(lambda: (seen := pushing(second)) and seen["endpoint"] and not found.append(seen))
    assert (found[0]["available"], found[0]["pause_us"] >= 500_000) == (False, True)  # before it failed here, too
    assert mns(second, "GET", "/veilmq-push.pem") == certificate
    assert stat.S_IMODE((second.data / "push-key.pem").stat().st_mode) == 0o600
    assert [(second.data / name).read_text().strip() for name in ("admin-token", "push-key.pem")] == secrets
    third = servers.start("three")
    until(lambda: token(third) == token(second))
    uploads = [begun_with_token(server, "/api/v1/queues/000000000000/us-east-1/late") for server in (second, third)]
    for changed in (third, second):  # a follower's file is put back, the owner's is what counts
        (changed.data / "admin-token").write_text("the-operators-own-token\n")
        changed.process.send_signal(signal.SIGHUP)
        until(lambda changed=changed: "the admin token stays as it was" in third.log.read_text() or changed is second)
        until(lambda changed=changed: token(third) == token(second))
    assert pushing(second) is None
    assert httpx.get(f"{second.admin}{path}", headers=token(third)).status_code == 200
    for upload in uploads:
        with upload:
            upload.sendall(b"{}")
            assert b" 401 " in upload.recv(1_000).partition(b"\r\n")[0]
    for server in (first, second, third):
        assert not [secret for secret in secrets if secret.splitlines()[-2:][0] in server.log.read_text()]


def begun_with_token(server: ServerProcess, path: str) -> socket.socket:
    """A connection on which a PUT has begun, with the token of now; its body of two bytes is missing."""
    host, port = server.admin.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=30)
    head = f"PUT {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: {token(server)['Authorization']}\r\n"
    client.sendall(f"{head}Expect: 100-continue\r\nContent-Length: 2\r\n\r\n".encode())
    assert client.recv(1_000).startswith(b"HTTP/1.1 100 ")
    return client


def token(server: ServerProcess) -> dict[str, str]:
    return {"Authorization": f"Bearer {(server.data / 'admin-token').read_text().strip()}"}


def test_the_commands_make_a_cluster_and_show_it(run: Run, shared_pair: Pair, tmp_path: Path) -> None:
    shared_pair.primary.query("drop schema if exists veilmq cascade")
    refused = run("cluster", "init", "--cluster", shared_pair.dsn, "--lease", "2m")
    assert (refused.code, refused.err) == (2, "veilmq: --lease: expected 1s to 60s, not 2m\n")
    refused = run("cluster", "status", "--cluster", "nonsense")
    assert (refused.code, refused.err.startswith("veilmq: --cluster: this is no connection string")) == (2, True)
    made = run("cluster", "init", "--cluster", shared_pair.dsn, "--lease", "1500ms")
    assert made.code == 0
    for lease in ((), ("--lease", "1.5s")):
        assert run("cluster", "init", "--cluster", shared_pair.dsn, *lease).out == made.out
    changed = run("cluster", "init", "--cluster", shared_pair.dsn, "--lease", "9s", "--keep", "7d")
    assert (changed.code, "there already, with a lease of 1.5 s" in changed.err) == (1, True)
    before = run("cluster", "status", "--cluster", shared_pair.dsn)
    assert before.code == 1
    assert "nobody, epoch 0" in before.out
    assert "server    no server could own the queues: start one" in before.out
    in_json = run("cluster", "status", "--cluster", shared_pair.dsn, "--json")
    assert (in_json.code, in_json.json[0]["owned"], in_json.json[0]["keep_s"]) == (1, False, 0)
    asked = [run("cluster", command, "--cluster", shared_pair.dsn) for command in ("handover", "finalize")]
    assert [(each.code, each.err.split(":")[1]) for each in asked] == [
        (1, " no server of this cluster is running"),
        (1, " no server is running"),
    ]
    servers = Servers(tmp_path, shared_pair)
    try:
        servers.start("one")
        shown = run("cluster", "status", "--cluster", shared_pair.dsn, "--json")
    finally:
        servers.close()
    shared_pair.primary.query("update veilmq.shard set owner = '', holder = null")  # as after a hand-over
    for role, until_it in (("starting", "has caught up with the log"), ("filling", "has filled its copy")):
        shared_pair.primary.query(f"update veilmq.server set role = '{role}', seen = clock_timestamp()")
        starts_or_fills = run("cluster", "status", "--cluster", shared_pair.dsn).out
        assert f"server    one: {role}, " in starts_or_fills
        assert f"server    no server could own the queues: wait until one {until_it}" in starts_or_fills
    at = ("--data", str(tmp_path / "one" / "data"), "--cluster", shared_pair.dsn, "--peer", "127.0.0.1:0", "--json")
    queues = [each["level"] for each in run("doctor", *at).json if each["check"] == "queues"]
    assert queues == ["ok"]  # the copy of a server that is stopped, though no command may open it
    found = json.loads(shown.out)
    assert (shown.code, found["owner"], found["epoch"], found["lease_s"]) == (0, "one", 1, 1.5)
    assert found["records"] > 0
    assert [standby["sync"] for standby in found["standbys"]] == ["sync"]


LATER = (sys.executable, str(Path(__file__).parents[1] / "support/later_release.py"))
"""A release that knows one more state format."""


def test_servers_are_upgraded_one_by_one_and_then_the_state_format(servers: Servers, run: Run) -> None:
    """A client of a server that stays as it is sends all the while, without retries."""
    url = ("--cluster", servers.pair.dsn)
    client, old = Client(servers.start("three")), servers.start("one")
    sent, ended = [], Event()

    def send() -> None:
        while not ended.is_set():
            client.send(str(len(sent)))
            sent.append(str(len(sent)))

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        old.stop()
        servers.start("one", program=LATER)
        refused = run("cluster", "finalize", *url)
        assert (refused.code, "is not known to three (release " in refused.err) == (1, True)
        handed = run("cluster", "handover", *url, "--to", "one")
        assert handed.out.startswith("one owns")
        refused = run("cluster", "forget", *url, "three")
        assert (refused.code, "stop it first" in refused.err) == (1, True)
        ended.set()
        sending.result(60)
    servers.stop("three")
    assert run("cluster", "forget", *url, "three").out == "three is forgotten\n"
    client = Client(servers.start("two", program=LATER))
    for _ in range(2):  # a second time changes nothing
        done = run("cluster", "finalize", *url)
        assert done.out == f"the queues have state format {STATE_FORMAT + 1}, the newest that all servers know\n"
    assert client.counts() == (len(sent), 0)
    client.send("with the new format")
    found = json.loads(run("cluster", "status", *url, "--json").out)
    assert found["format"] == STATE_FORMAT + 1
    until(lambda: all(each["format"] == STATE_FORMAT + 1 for each in servers.registered(run)))
    # The old release does not begin any more, and leaves its copy as it is.
    old = servers.begin("three")
    assert old.process.wait(20) == 2
    assert f"knows {STATE_FORMAT}: upgrade this server" in old.log.read_text()
    Client(servers.start("three", program=LATER)).send("upgraded")
    assert client.counts() == (len(sent) + 2, 0)


def test_a_drained_server_owns_nothing_and_is_not_ready(servers: Servers, run: Run) -> None:
    url = ("--cluster", servers.pair.dsn)
    first = servers.start("one")
    alone = run("cluster", "drain", *url, "one")
    assert (alone.code, "no other server could own the queues" in alone.err) == (1, True)
    alone = run("cluster", "handover", *url)
    assert (alone.code, "no other server could own the queues: start one" in alone.err) == (1, True)
    alone = httpx.post(f"{first.admin}/api/v1/cluster/handover", json={}, headers=token(first))
    assert (alone.status_code, "no other server could own the queues: start one" in alone.text) == (400, True)
    assert run("cluster", "handover", *url, "--to", "one").out == "one owns the queues already, in epoch 1\n"
    second = servers.start("two")
    before = len(second.log.read_text().splitlines())
    assert run("cluster", "drain", *url, "one").out == "one is drained; two owns the queues\n"
    told(second, before, STORY_OF_A_HAND_OVER)
    assert not ready(first)
    said = httpx.get(f"{first.admin}/health/ready").json()["reasons"]["cluster"]
    assert said == "an operator drained this server: `veilmq cluster undrain one` ends that"
    Client(first).send("it answers all the same")
    refused = run("cluster", "handover", *url, "--to", "one")
    assert (refused.code, "server one is drained: name another" in refused.err) == (1, True)
    unknown = run("cluster", "drain", *url, "eleven")
    assert "there is no server eleven: name one of one, two" in unknown.err
    shown = run("cluster", "status", *url).out
    assert re.search(
        r"server    one: drained, \d+ records behind, 127.0.0.1:\d+, release \S+, formats \d+( to \d+)?, seen", shown
    )
    assert "server    two: owner, " in shown
    lacks = "server    no other server could own the queues: start one, or undrain one\n"
    assert lacks in shown
    run("cluster", "undrain", *url, "one")
    until(lambda: ready(first))
    assert lacks not in run("cluster", "status", *url).out
    first.process.send_signal(signal.SIGSTOP)
    missed = run("cluster", "handover", *url, "--to", "one")
    assert (missed.code, "one did not take the queues over: two owns them, in epoch" in missed.err) == (1, True)


def test_two_servers_of_one_name_are_told(servers: Servers) -> None:
    first = servers.start("one")
    other = servers.begin("other", "--cluster-name", "one")
    assert other.process.wait(30) == 2
    assert "another server of this cluster is called one" in other.log.read_text()
    # One that was asleep, while another one began: it ends as if it had been refused at its start.
    second = servers.start("two")
    servers.pair.primary.query("update veilmq.server set holder = gen_random_uuid() where name = 'two'")
    assert second.process.wait(30) == 2
    told = second.log.read_text()
    assert "no server of the cluster any more: another server of this cluster is called two" in told
    assert "Traceback" not in told
    assert "the store failed" not in told
    # The same of the owner: it hands over first.
    third = servers.start("three")
    shutil.copytree(third.data.parent, third.data.parent.with_name("clone"))
    clone = servers.begin("clone", "--cluster-name", "three")
    assert clone.process.wait(30) == 2
    assert "another server of this cluster is called three" in clone.log.read_text()
    assert third.process.poll() is None
    servers.pair.primary.query(
        "update veilmq.server set holder = gen_random_uuid(), seen = seen + interval '4 s' where name = 'one'"
    )
    assert first.process.wait(30) == 2
    told = first.log.read_text()
    assert "another server of this cluster is called one" in told
    assert "the lease is not renewed" not in told
    Client(third).send("taken over")
    # It was asleep, while a server on a copy of its directory began under its name.
    servers.pair.primary.query("update veilmq.server set address = 'elsewhere:9327' where name = 'three'")
    assert third.process.wait(30) == 2
    assert "another server of this cluster is called three" in third.log.read_text()


def test_a_server_that_lost_its_directory_gets_its_name_back(servers: Servers, tmp_path: Path) -> None:
    server = servers.start("one")
    server.kill()
    shutil.rmtree(server.data)
    servers.pair.primary.query("update veilmq.server set seen = seen - interval '4 s'")
    Client(servers.start("one")).send("back")


def test_a_running_server_waits_while_an_operator_changes_postgresql(servers: Servers) -> None:
    """It would not have begun like that; but it goes on when the setting is right again."""
    primary, second = servers.pair.primary, None
    first = servers.start("one")
    second = servers.start("two")
    primary.set("synchronous_standby_names", "")
    try:
        until(lambda: "set synchronous_standby_names in PostgreSQL" in second.log.read_text())
        # The owner's lease ends: what it has may be old, and a proxy is to send nothing there.
        until(lambda: not ready(first))
        said = httpx.get(f"{first.admin}/health/ready").json()["reasons"]["cluster"]
        assert "this server's lease has ended: " in said
        assert "synchronous_standby_names" in said
        assert "veilmq_cluster_ready 0.0" in httpx.get(f"{first.admin}/metrics").text
        with pytest.raises(httpx.ReadTimeout):  # it waits for an owner
            httpx.get(f"{first.admin}/api/v1/queues", headers=token(first), timeout=0.5)
    finally:
        primary.set("synchronous_standby_names", servers.pair.standby.name)
    until(lambda: ready(first))
    assert httpx.get(f"{first.admin}/api/v1/queues", headers=token(first)).status_code == 200
    until(lambda: re.search("PostgreSQL answers again|serving in epoch", second.log.read_text()))
    until(lambda: ready(second))
    servers.stop("one")
    Client(second).send("after")
    assert servers.owner() == "two"
