"""The veil adapter against a real server that checks signatures: rights, clocks, forks, restarts, TLS."""

import math
import os
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from tests.support.certificate import CERTIFICATE, PRIVATE_KEY

from veilmq.client.adapters.connect import connect_account
from veilmq.client.adapters.veil import VeilAccount
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Extension, Message, Sent, Template
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseTaken,
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    QueueExists,
    QueueMissing,
    ReceiptInvalid,
)
from veilmq.testing.client_contract import for_each
from veilmq.testing.client_contract.stage import Text
from veilmq.testing.local import ServerProcess, port_kept

pytestmark = pytest.mark.slow

KEY, READER, OTHER, SECRET = (
    "AKIDVEIL000000000001",
    "AKIDVEIL000000000002",
    "AKIDVEIL000000000003",
    "a secret / of tests",
)
CREDENTIALS = f"""
[[account]]
id = "111111111111"
[[account.key]]
id = "{KEY}"
secret = "{SECRET}"
[[account.key]]
id = "{READER}"
secret = "{SECRET}"
grants = [{{ actions = ["receive", "describe-queue", "peek"], queues = ["readable*"] }}]
[[account]]
id = "222222222222"
[[account.key]]
id = "{OTHER}"
secret = "{SECRET}"
"""


def credentials(directory: Path) -> str:
    path = directory / "credentials.toml"
    path.write_text(CREDENTIALS)
    path.chmod(0o600)
    return str(path)


Open = Callable[..., VeilAccount]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("signed")
    server = ServerProcess(directory, "--credentials", credentials(directory)).start()
    yield server
    assert server.stop() == 0


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Open]:
    """Opens accounts that are closed after the test."""
    opened: list[VeilAccount] = []

    def connect(key: str = KEY, secret: str = SECRET, **more: Any) -> VeilAccount:
        url = more.pop("url", server.sqs)
        address = urlsplit(url)
        opened.append(VeilAccount(address.hostname or "", address.port, key, secret, **more))
        return opened[-1]

    yield connect
    for account in opened:
        account.close()


@pytest.fixture
def account(connect: Open) -> VeilAccount:
    return connect()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A queue name of the test's own."""
    return "".join(each if each.isalnum() else "-" for each in request.node.name)[:70]


def test_a_whole_life(account: VeilAccount, name: str) -> None:
    assert account.create(name)
    queue = account.queue(name)
    message = Message(
        "body", {"n": 7, "f": 0.5, "s": "t", "b": b"\0\xff"}, ttl=1_000, priority=3, group="tenant", type="resize"
    )
    sent = queue.send(message)
    assert sent.handle is not None
    (peeked,) = queue.peek(5)
    (received,) = queue.receive(lease=30)
    for shown in (peeked, received):
        assert (shown.id, shown.body, shown.attributes) == (sent.id, "body", message.attributes)
        assert (shown.priority, shown.group, shown.type) == (3, "tenant", "resize")
        assert shown.sent is not None
        assert shown.expires == pytest.approx(shown.sent + 1_000)
    assert (peeked.receive_count, received.receive_count) == (0, 1)
    assert received.first_received is not None
    stats = queue.stats()
    assert (stats.visible, stats.delayed, stats.in_flight) == (0, 0, 1)
    assert queue.extend(received.handle, 60, body="progress") == received.handle
    queue.release(received.handle)
    (again,) = queue.receive(lease=30)
    assert (again.body, again.receive_count) == ("progress", 2)
    with pytest.raises(LeaseTaken) as stale:
        queue.delete(received.handle)
    assert stale.value.attempt == 1
    queue.delete(again.handle)
    with pytest.raises(MessageGone):
        queue.delete(again.handle)
    with pytest.raises(ReceiptInvalid):
        queue.delete("no-handle")
    with pytest.raises(ReceiptInvalid, match="give its `handle`"):
        queue.delete(again)  # type: ignore[arg-type]


def test_the_most_urgent_first(account: VeilAccount, name: str) -> None:
    account.create(name)
    queue = account.queue(name)
    queue.send_batch([Message(str(priority), priority=priority) for priority in (16, 8, 1, 9)] + ["plain"])
    assert [message.body for message in queue.receive(5)] == ["1", "8", "plain", "9", "16"]


def test_a_fifo_queue(account: VeilAccount, name: str) -> None:
    assert account.create(f"{name}.fifo", Template(fifo=True, visibility_timeout=77))
    queue = account.queue(f"{name}.fifo")
    assert (queue.capabilities.native_fifo, queue.capabilities.delay_max, queue.capabilities.priorities) == (
        True,
        0,
        False,
    )
    first = queue.send(Message("1", group="g", deduplication_id="d"))
    again = queue.send(Message("1", group="g", deduplication_id="d"))
    assert (again.id, again.sequence_number, again.duplicate) == (first.id, first.sequence_number, True)
    results = queue.send_batch([Message(str(number), group="g", deduplication_id=str(number)) for number in (2, 3)])
    numbers = [first.sequence_number, *(result.sequence_number for result in results if isinstance(result, Sent))]
    started = SYSTEM.monotonic()
    received = queue.receive(2)
    assert [message.body for message in received] == ["1", "2"]
    assert [message.sequence_number for message in received] == numbers[:2]
    assert [(message.group, message.deduplication_id) for message in received] == [("g", "d"), ("g", "2")]
    assert all(started + 77 <= message.lease_end <= SYSTEM.monotonic() + 77 for message in received)
    assert queue.receive(2) == []  # the group is locked
    assert queue.delete_batch([message.handle for message in received]) == [None, None]
    assert [message.body for message in queue.receive(2)] == ["3"]
    with pytest.raises(ParameterInvalid) as lacking:
        queue.send("without a group")
    assert lacking.value.parameter == "group"
    with pytest.raises(CapabilityMissing):
        queue.send(Message("x", group="g", deduplication_id="p", priority=1))


def test_batches_far_beyond_ten(account: VeilAccount, name: str) -> None:
    account.create(name)
    queue = account.queue(name)
    sent = queue.send_batch([f"m{number}" for number in range(600)])
    assert all(isinstance(each, Sent) for each in sent)
    held = [message for _ in range(10) for message in queue.receive(64, lease=60)]
    assert len({message.id for message in held}) == 600
    queue.delete(held[300].handle)
    results = queue.extend_batch([Extension(message.handle, 90) for message in held])
    assert [place for place, result in enumerate(results) if result != held[place].handle] == [300]
    assert isinstance(results[300], MessageGone)
    results = queue.delete_batch([message.handle for message in held])
    assert [place for place, result in enumerate(results) if result is not None] == [300]
    assert queue.stats().in_flight == 0


def test_a_batch_is_cut_by_size_too(account: VeilAccount, name: str) -> None:
    account.create(name)
    queue = account.queue(name)
    results = queue.send_batch(["x" * 400_000] * 4 + ["é" * 524_289] + ['"\n' * 524_288])
    assert [type(each) for each in results] == [Sent] * 4 + [MessageTooLarge, Sent]
    assert isinstance(results[4], MessageTooLarge)
    assert results[4].size_bytes == 1_048_578
    assert sum(len(message.body) for message in queue.receive(10)) == 4 * 400_000 + 1_048_576


@for_each(
    "call",
    [
        lambda queue: queue.send(Message("x", delay=604_801)),
        lambda queue: queue.send(Message("x", ttl=0)),
        lambda queue: queue.send(Message("x", type="")),
        lambda queue: queue.send(Message("x", lease_hint=-1)),
        lambda queue: queue.send(Message("x", attributes={"": 1})),
        lambda queue: queue.send(Message("x", attributes={"a": float("nan")})),
        lambda queue: queue.send(Message("x", attributes={"a": True})),
        lambda queue: queue.send("\ud800"),
        lambda queue: queue.send(""),
        lambda queue: queue.receive(65),
        lambda queue: queue.receive(wait=61),
        lambda queue: queue.receive(lease=604_801),
        lambda queue: queue.peek(0),
        lambda queue: queue.extend("h", -1),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(account: VeilAccount, name: str, call: Callable[[Any], Any]) -> None:
    account.create(name)
    queue = account.queue(name)
    with pytest.raises(ParameterInvalid) as refused:
        call(queue)
    assert refused.value.parameter.split("[")[0] in {
        "delay", "ttl", "type", "lease_hint", "attributes", "body", "count_max", "wait", "lease",
    }  # fmt: skip
    assert queue.stats().visible == 0


@for_each(
    "given",
    [
        {"key": "k", "secret": None},
        {"key": "with space"},
        {"region": "a\nb"},
        {"timeout": 0},
        {"host": "bücher"},
        {"host": "http://127.0.0.1"},
        {"host": "127.0.0.1:9324"},
        {"host": ""},
    ],
)
def test_an_account_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ParameterInvalid):
        VeilAccount(**{"host": "127.0.0.1", "key": "k", "secret": "s", **given})


def test_settings_and_their_dead_letters(account: VeilAccount, name: str) -> None:
    account.create(f"{name}-dead")
    template = Template(
        visibility_timeout=5, delay=1, retention=3_600, wait=2, dead_letter_queue=f"{name}-dead", receive_count_max=3,
        tags={Text("team"): Text("a")},
    )  # fmt: skip
    assert account.create(name, template)
    assert not account.create(name, template)
    with pytest.raises(QueueExists):
        account.create(name, Template(visibility_timeout=6))
    with pytest.raises(QueueMissing):
        account.create(f"{name}-2", Template(dead_letter_queue="nowhere", receive_count_max=3))
    with pytest.raises(ParameterInvalid, match="need each other"):
        account.create(f"{name}-2", Template(dead_letter_queue=f"{name}-dead"))
    for wrong in (math.inf, math.nan, "5", 1.5):
        with pytest.raises(ParameterInvalid, match="retention"):
            account.create(f"{name}-2", Template(retention=wrong))  # type: ignore[arg-type]
    stats = account.queue(name).stats()
    assert (stats.visibility_timeout, stats.delay, stats.retention) == (5, 1, 3_600)


def test_wrong_credentials_are_told_as_such(connect: Open) -> None:
    for wrong, code in ((connect(secret="other"), "SignatureDoesNotMatch"), (connect(key="X"), "InvalidClientTokenId")):
        with pytest.raises(ServiceError) as refused:
            wrong.names()
        assert (refused.value.code, refused.value.status) == (code, 403)
        assert refused.value.request_id
        assert SECRET not in str(refused.value)


def test_a_key_does_what_it_was_granted(account: VeilAccount, connect: Open) -> None:
    account.create("readable")
    account.create("private")
    account.queue("readable").send("x")
    reader = connect(READER)
    queue = reader.queue("readable")
    assert queue.peek()[0].body == "x"
    (message,) = queue.receive(lease=30)
    for call in (
        lambda: queue.send("y"),
        lambda: queue.delete(message.handle),
        lambda: queue.extend(message.handle, 5),
        lambda: queue.delete_batch([message.handle]),
        lambda: reader.queue("private"),
        lambda: reader.create("readable-2"),
        lambda: reader.delete("readable"),
    ):
        with pytest.raises(ServiceError) as denied:
            call()
        assert denied.value.code == "AccessDenied"
    assert account.queue("readable").stats().in_flight == 1


def test_one_account_does_not_see_anothers(account: VeilAccount, connect: Open, name: str) -> None:
    account.create(name)
    other = connect(OTHER)
    assert name not in other.names()
    with pytest.raises(QueueMissing):
        other.queue(name)
    with pytest.raises(ServiceError, match="AccessDenied"):
        connect(OTHER, account="111111111111").queue(name)
    assert connect(account="111111111111").queue(name).name == name


def test_regions_are_apart(account: VeilAccount, connect: Open, name: str) -> None:
    account.create(name)
    with pytest.raises(QueueMissing):
        connect(region="eu-west-1").queue(name)


class WrongClock:
    """A machine whose wall clock is an hour off."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def monotonic(self) -> float:
        return SYSTEM.monotonic()

    def wall(self) -> float:
        return SYSTEM.wall() + self.ahead_s


@pytest.mark.parametrize("ahead_s", [-3 * 86_400, -3_600, 3_600, 3 * 86_400])
def test_a_wrong_wall_clock_is_corrected_by_the_servers(connect: Open, name: str, ahead_s: float) -> None:
    clock = WrongClock(ahead_s)
    account = connect(clock=clock)
    assert account.create(name)
    clock.ahead_s = 0  # and set right later
    queue = account.queue(name)
    queue.send("x")
    (message,) = queue.receive(lease=30)
    assert message.lease_end <= SYSTEM.monotonic() + 30


def test_many_threads_share_an_account(account: VeilAccount, name: str) -> None:
    account.create(name)
    queue = account.queue(name)

    def work(thread: int) -> list[str]:
        for number in range(40):
            queue.send(f"{thread}-{number}")
        bodies = []
        while messages := queue.receive(3, lease=60):
            for message in messages:
                queue.delete(queue.extend(message.handle, 60))
                bodies.append(message.body)
        return bodies

    with ThreadPoolExecutor(8) as pool:
        bodies = [body for found in pool.map(work, range(8)) for body in found]
    bodies += work(8)
    assert sorted(bodies) == sorted(f"{thread}-{number}" for thread in range(9) for number in range(40))
    assert queue.stats().in_flight == 0


def test_a_forked_child_has_connections_of_its_own(account: VeilAccount, name: str) -> None:
    account.create(name)
    queue = account.queue(name)
    queue.send("parent")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert not account._pool._idle  # what the parent has open is the parent's
            for _ in range(50):
                queue.send("child")
            status = 0
        finally:
            os._exit(status)
    for _ in range(50):
        queue.send("parent")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert queue.stats().visible == 101


def test_a_server_that_restarts(tmp_path: Path, connect: Open) -> None:
    server = ServerProcess(tmp_path, "--credentials", credentials(tmp_path)).start()
    try:
        account = connect(url=server.sqs)
        account.create("q")
        queue = account.queue("q")
        queue.send("kept")
        port = urlsplit(server.sqs).port or 0
        parked = ThreadPoolExecutor(1)
        (message,) = queue.receive(lease=60)
        waiting = parked.submit(queue.receive, wait=20)
        until_parked(server)
        server.kill()
        with pytest.raises(TransportError):
            waiting.result(10)
        parked.shutdown()
        with port_kept(port):
            for call in (lambda: queue.send("x"), queue.stats):
                with pytest.raises(TransportError) as refused:
                    call()
                assert not refused.value.may_have_happened
            server.options = (*server.options, "--sqs", f"127.0.0.1:{port}")
            server.start()
        queue.extend(message.handle, 60)
        queue.delete(message.handle)
        assert queue.send("new").id
        assert queue.stats().visible == 1
    finally:
        server.kill()


def until_parked(server: ServerProcess, context: ssl.SSLContext | None = None) -> None:
    """Returns once the server has a parked receive."""
    for _ in range(1_000):
        with urlopen(f"{server.admin}/metrics", timeout=10, context=context) as page:
            if b"\nveilmq_waiters 1" in page.read():
                return
        time.sleep(0.01)
    raise AssertionError("nothing parked")


def test_a_parked_receive_ends_with_its_queue_and_loses_nothing(
    server: ServerProcess, account: VeilAccount, name: str
) -> None:
    account.create(name)
    queue, other = account.queue(name), account.queue(name)
    with ThreadPoolExecutor(1) as pool:
        parked = pool.submit(queue.receive, lease=600, wait=60)
        until_parked(server)
        queue.close()
        assert parked.result(10) == []
    other.send("for another")
    assert [message.body for message in other.receive(wait=5)] == ["for another"]


def test_tls(tmp_path: Path, connect: Open) -> None:
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    private.write_text(PRIVATE_KEY)
    private.chmod(0o600)
    server = ServerProcess(
        tmp_path, "--credentials", credentials(tmp_path), "--tls-cert", str(certificate), "--tls-key", str(private)
    ).start()
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        account = connect(url=server.sqs, tls=context)
        account.create("q")
        queue = account.queue("q")
        body = "é" * 300_000
        for _ in range(3):
            queue.send(body)
        assert [message.body for message in queue.receive(3)] == [body] * 3
        with ThreadPoolExecutor(1) as pool:
            parked = pool.submit(queue.receive, wait=60)
            until_parked(server, context)
            queue.close()
            assert parked.result(10) == []
        with pytest.raises(TransportError):
            connect(url=server.sqs).names()
        over_boto3 = connect_account(f"sqs://k:s@{urlsplit(server.sqs).netloc}/?retries=0")
        for distrusting in (connect(url=server.sqs, tls=True), over_boto3):
            with pytest.raises(TransportError) as refused, distrusting:
                distrusting.names()
            assert not refused.value.may_have_happened
    finally:
        server.kill()
