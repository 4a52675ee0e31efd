"""The sqs adapter through boto3: against a real server that checks signatures, and against one that breaks the way."""

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import boto3
import pytest
from botocore.config import Config
from msgspec.structs import replace
from tests.support.broken_server import HANG_UP, BrokenServer, answer

from veilmq.client.adapters.cloud import creation_attributes
from veilmq.client.adapters.sqs import SqsAccount, SqsQueue
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.keeper.decisions import MINIMAL_LIFE
from veilmq.client.messages import LEASE_HINT_ATTRIBUTE, Extension, Message, Sent, Template
from veilmq.model.errors import (
    CapabilityMissing,
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    QueueExists,
    QueueMissing,
    ReceiptInvalid,
)
from veilmq.model.message_type import TYPE_ATTRIBUTE
from veilmq.testing.client_contract import for_each
from veilmq.testing.local import ServerProcess

pytestmark = pytest.mark.slow

KEY, OTHER, SECRET = "AKIDSQSTESTS00000001", "AKIDSQSTESTS00000002", "a secret of the tests"
CREDENTIALS = f"""
[[account]]
id = "111111111111"
[[account.key]]
id = "{KEY}"
secret = "{SECRET}"
[[account.key]]
id = "{OTHER}"
secret = "{SECRET}"
grants = [{{ actions = ["send"], queues = ["*"] }}]
"""


def client_of(url: str, key: str = KEY, attempts: int = 1, **more: Any) -> Any:
    return boto3.client(
        "sqs",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key=SECRET,
        config=Config(retries={"total_max_attempts": attempts}, **more),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory: Path = tmp_path_factory.mktemp("signed")
    credentials = directory / "credentials.toml"
    credentials.write_text(CREDENTIALS)
    credentials.chmod(0o600)
    server = ServerProcess(directory, "--credentials", str(credentials)).start()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Any:
    return client_of(server.sqs)


@pytest.fixture
def account(client: Any) -> Iterator[SqsAccount]:
    account = SqsAccount(client)
    yield account
    account.close()


@pytest.fixture
def queue(account: SqsAccount, request: pytest.FixtureRequest) -> SqsQueue:
    name = "".join(each if each.isalnum() else "-" for each in request.node.name)[:70]
    assert account.create(name)
    return account.queue(name)


def test_a_type_and_a_hint_travel_as_attributes_that_others_can_read(client: Any, queue: SqsQueue) -> None:
    queue.send(Message("x", {"mine": 1}, type="resize", lease_hint=7.5))
    (raw,) = client.receive_message(QueueUrl=queue.url, MessageAttributeNames=["All"], VisibilityTimeout=0)["Messages"]
    attributes = {name: (each["DataType"], each["StringValue"]) for name, each in raw["MessageAttributes"].items()}
    assert attributes == {
        "mine": ("Number", "1"),
        TYPE_ATTRIBUTE: ("String", "resize"),
        LEASE_HINT_ATTRIBUTE: ("Number", "7.5"),
    }
    (message,) = queue.receive(lease=30)
    assert (message.attributes, message.type) == ({"mine": 1}, "resize")


def test_a_hint_that_is_none(client: Any, queue: SqsQueue) -> None:
    """Somebody else may write what they like under our name."""
    for kind, value in (("String", "soon"), ("Number", "-5")):
        attributes = {LEASE_HINT_ATTRIBUTE: {"DataType": kind, "StringValue": value}}
        client.send_message(QueueUrl=queue.url, MessageBody="x", MessageAttributes=attributes)
    assert len(queue.receive(10)) == 2
    assert queue.stats().in_flight == 2


def test_numbers_of_every_size(client: Any, queue: SqsQueue) -> None:
    given = {"i": 2**80, "n": -3, "f": 0.1, "e": 1e100, "b": b"\0\xff", "s": "é"}
    queue.send(Message("x", given))
    custom = {
        "c": {"DataType": "Number.mine", "StringValue": "+007"},
        "t": {"DataType": "String.mine", "StringValue": "x"},
    }
    client.send_message(QueueUrl=queue.url, MessageBody="x", MessageAttributes=custom)
    first, second = queue.receive(2, lease=30)
    assert first.attributes == given
    assert second.attributes == {"c": 7, "t": "x"}


@for_each(
    "message, error",
    [
        (Message("x", ttl=5), CapabilityMissing),
        (Message("x", priority=1), CapabilityMissing),
        (Message("x", tag="t"), CapabilityMissing),
        (Message("x", deduplication_id="d"), CapabilityMissing),
        (Message("x", delay=901), ParameterInvalid),
        (Message("x", lease_hint=0), ParameterInvalid),
        (Message("x", {"a": ""}), ParameterInvalid),
        (Message("x", {"a": None}), ParameterInvalid),
        (Message("x", {TYPE_ATTRIBUTE: "a"}, type="b"), ParameterInvalid),
        (Message("x", {f"a{number}": 1 for number in range(10)}, type="b"), ParameterInvalid),
        (Message(""), ParameterInvalid),
        (Message("\ud800"), ParameterInvalid),
        (Message("x" * 1_048_570, {"name": "value"}), MessageTooLarge),
    ],
)
def test_what_cannot_be_sent_is_refused_without_a_request(
    client: Any, queue: SqsQueue, message: Message, error: type[Exception]
) -> None:
    calls: list[Any] = []
    client.meta.events.register("before-send.sqs", lambda request, **_: calls.append(request), unique_id="spy")
    try:
        with pytest.raises(error):
            queue.send(message)
        (result,) = queue.send_batch([message])
        assert isinstance(result, error)
    finally:
        client.meta.events.unregister("before-send.sqs", unique_id="spy")
    assert calls == []


def test_a_batch_is_cut_at_ten_and_at_a_mebibyte(client: Any, queue: SqsQueue) -> None:
    sizes: list[int] = []

    def count(params: dict[str, Any], **_: Any) -> None:
        sizes.append(len(params["Entries"]))

    client.meta.events.register("provide-client-params.sqs.SendMessageBatch", count, unique_id="spy")
    try:
        bodies = ["x"] * 12 + ["y" * 500_000] * 3 + ["z"] * 2
        results = queue.send_batch(bodies)
    finally:
        client.meta.events.unregister("provide-client-params.sqs.SendMessageBatch", unique_id="spy")
    assert sizes == [10, 4, 3]
    assert all(isinstance(result, Sent) for result in results)
    assert queue.stats().visible == len(bodies)


def test_no_wait_is_sent_as_no_wait(client: Any, queue: SqsQueue) -> None:
    waits: list[Any] = []

    def note(params: dict[str, Any], **_: Any) -> None:
        waits.append(params["WaitTimeSeconds"])

    client.meta.events.register("provide-client-params.sqs.ReceiveMessage", note, unique_id="spy")
    try:
        queue.send("x")
        queue.receive(lease=0)
        queue.receive(lease=0, wait=0.2)
    finally:
        client.meta.events.unregister("provide-client-params.sqs.ReceiveMessage", unique_id="spy")
    assert waits == [0, 1]


def test_fractions_of_seconds_are_rounded_up_and_believed_as_asked(queue: SqsQueue) -> None:
    queue.send("x")
    before = queue._clock.monotonic()
    (message,) = queue.receive(lease=2.5)
    assert before + 2.5 <= message.lease_end <= queue._clock.monotonic() + 2.5
    assert queue.extend(message.handle, 0.5) == message.handle
    assert queue.stats().in_flight == 1  # half a second became one, and not none


def test_a_message_tells_from_when_its_cap_counts(queue: SqsQueue) -> None:
    queue.send("x")
    before = SYSTEM.monotonic()
    (message,) = queue.receive(lease=30)
    assert message.asked is not None
    assert before <= message.asked == message.lease_end - 30 <= SYSTEM.monotonic()
    with LeaseKeeper(queue, max_hold=86_400) as keeper:
        lease = keeper.register(message)
        assert lease.hold_end == message.asked + 43_200 - MINIMAL_LIFE
        old = replace(message, handle="of old", asked=before - 43_200, lease_end=math.inf)
        assert keeper.register(old).lost.wait(10)


def test_what_a_handle_is_worth(client: Any, queue: SqsQueue) -> None:
    queue.send("x")
    (message,) = queue.receive(lease=30)
    with pytest.raises(ParameterInvalid) as beyond:
        queue.extend(message.handle, 43_200)  # a little more than 12 hours from the receive
    assert beyond.value.parameter == "lease"
    queue.release(message.handle)
    queue.extend(message.handle, 30)
    assert queue.receive() == [], "it is held again: nobody else got it"
    queue.release(message.handle)
    (again,) = queue.receive(lease=30)
    queue.delete(again.handle)
    with pytest.raises(MessageGone):
        queue.extend(again.handle, 30)
    queue.delete(again.handle)  # SQS does not tell
    with pytest.raises(ReceiptInvalid):
        queue.delete("no-handle")
    with pytest.raises(CapabilityMissing):
        queue.extend(again.handle, 30, body="new")
    with pytest.raises(CapabilityMissing):
        queue.peek()


def test_a_type_of_queue(account: SqsAccount) -> None:
    able = SqsQueue(account, account._calls, "q.fifo", "u").capabilities
    assert (able.native_fifo, able.delay_max, able.groups) == (True, 0, True)
    with pytest.raises(ParameterInvalid, match=r"must end in \.fifo"):
        account.create("q", Template(fifo=True))
    with pytest.raises(ParameterInvalid, match="only a FIFO queue"):
        account.create("q", Template(content_deduplication=True))


def test_a_fifo_queue(account: SqsAccount) -> None:
    assert account.create("life.fifo", Template(fifo=True, visibility_timeout=77))
    queue = account.queue("life.fifo")
    first = queue.send(Message("1", group="g", deduplication_id="d", delay=0))
    again = queue.send(Message("1", group="g", deduplication_id="d"))
    assert (again.id, again.sequence_number) == (first.id, first.sequence_number)
    (second,) = queue.send_batch([Message("2", group="g", deduplication_id="e")])
    assert isinstance(second, Sent)
    received = queue.receive(2)
    assert [message.body for message in received] == ["1", "2"]
    assert [message.sequence_number for message in received] == [first.sequence_number, second.sequence_number]
    assert [(message.group, message.deduplication_id) for message in received] == [("g", "d"), ("g", "e")]
    queue.release(received[0].handle)
    with pytest.raises(ParameterInvalid) as lacking:
        queue.send("without a group")
    assert lacking.value.parameter == "group"
    with pytest.raises(ParameterInvalid):
        queue.send(Message("x", group="g", deduplication_id="f", delay=1))


def test_settings_and_dead_letters(account: SqsAccount) -> None:
    account.create("dead")
    template = Template(visibility_timeout=5, dead_letter_queue="dead", receive_count_max=1, tags={"a": "b"})
    assert account.create("source", template)
    assert not account.create("source", template)
    url = account.client.get_queue_url(QueueName="source")["QueueUrl"]
    shown = account.client.get_queue_attributes(QueueUrl=url, AttributeNames=["RedrivePolicy"])["Attributes"]
    sent = creation_attributes("source", template, account.arn)
    assert sent["RedrivePolicy"] == shown["RedrivePolicy"], "LocalStack compares the texts"
    with pytest.raises(QueueExists) as exists:
        account.create("source", Template(visibility_timeout=6))
    assert (exists.value.queue, exists.value.setting) == ("source", "visibility_timeout")
    with pytest.raises(QueueMissing):
        account.create("source-2", Template(dead_letter_queue="nowhere", receive_count_max=1))
    with pytest.raises(ParameterInvalid, match="whole seconds"):
        account.create("source-2", Template(delay=0.5))
    assert [name for name in account.names("sou") if name != "source"] == []


def test_more_queues_than_a_page(client: Any) -> None:
    class Paged:
        """The client, with short pages."""

        meta = client.meta

        def list_queues(self, **given: Any) -> Any:
            return client.list_queues(**{**given, "MaxResults": 2})

    for number in range(5):
        client.create_queue(QueueName=f"page-{number}")
    assert SqsAccount(Paged()).names("page-") == [f"page-{number}" for number in range(5)]


def test_rights_and_credentials(server: ServerProcess, account: SqsAccount, queue: SqsQueue) -> None:
    limited = SqsAccount(client_of(server.sqs, OTHER))
    with pytest.raises(ServiceError) as denied:
        limited.queue(queue.name)
    assert (denied.value.code, denied.value.status) == ("AccessDenied", 403)
    assert denied.value.request_id
    assert not denied.value.retryable
    only_send = SqsQueue(limited, limited._calls, queue.name, queue.url)
    only_send.send("x")
    with pytest.raises(ServiceError, match="AccessDenied"):
        only_send.receive()  # its visibility timeout is not ours to see
    with pytest.raises(ServiceError, match="InvalidClientTokenId"):
        SqsAccount(client_of(server.sqs, "UNKNOWN")).names()


def test_another_owner(server: ServerProcess, client: Any, queue: SqsQueue) -> None:
    assert SqsAccount(client, owner="111111111111").queue(queue.name).url == queue.url
    with pytest.raises(QueueMissing):
        SqsAccount(client, owner="222222222222").queue(queue.name)


def until_parked(server: ServerProcess) -> None:
    """Returns once the server has a parked receive."""
    for _ in range(1_000):
        with urlopen(f"{server.admin}/metrics", timeout=10) as page:
            if b"\nveilmq_waiters 1" in page.read():
                return
        time.sleep(0.01)
    raise AssertionError("nothing parked")


def test_closing_lets_the_caller_go_and_gives_back_what_the_poll_brings(
    server: ServerProcess, account: SqsAccount, queue: SqsQueue
) -> None:
    with ThreadPoolExecutor(1) as pool:
        parked = pool.submit(queue.receive, 10, lease=600, wait=20)
        until_parked(server)
        queue.close()
        assert parked.result(10) == []
    other = account.queue(queue.name)
    other.send("x")  # the poll that nobody waits for any more takes it first
    (message,) = other.receive(lease=30, wait=20)
    assert (message.body, message.receive_count) == ("x", 2)
    with pytest.raises(TransportError, match="closed") as refused:
        queue.receive()
    assert not refused.value.may_have_happened


def test_polls_reuse_their_threads(queue: SqsQueue) -> None:
    before = set(threading.enumerate())
    for number in range(3):
        queue.send(str(number))
        queue.receive(wait=20)
    started = set(threading.enumerate()) - before
    names = [thread.name for thread in started if thread.name.startswith(f"veilmq-poll-{queue.name}")]
    assert len(names) == 1
    queue.close()


def test_a_socket_that_gives_up_early_bounds_the_wait(server: ServerProcess, queue: SqsQueue) -> None:
    account = SqsAccount(client_of(server.sqs, read_timeout=5))
    able = account.queue(queue.name).capabilities
    assert able.wait_max == 4
    with pytest.raises(ParameterInvalid):
        account.queue(queue.name).receive(wait=5)


def test_an_account_leaves_the_users_client_as_it_was(client: Any, queue: SqsQueue) -> None:
    account = SqsAccount(client)
    account.queue(queue.name)
    account.close()
    account.close()
    assert client.get_queue_url(QueueName=queue.name)["QueueUrl"] == queue.url


def queue_at(url: str, attempts: int) -> SqsQueue:
    account = SqsAccount(client_of(url, attempts=attempts, connect_timeout=2))
    return SqsQueue(account, account._calls, "q", f"{url}/111111111111/q")


@for_each(
    "steps, attempts, error, doubt",
    [
        ([], 1, TransportError, False),
        ([], 2, TransportError, False),
        ([HANG_UP], 1, TransportError, True),
        ([HANG_UP], 2, TransportError, True),
        ([answer(500)], 2, TransportError, True),
        ([answer(200, b"<html>")], 1, TransportError, True),
        ([answer(500)], 1, ServiceError, None),
    ],
)
def test_what_may_have_happened(steps: list[bytes], attempts: int, error: type[Exception], doubt: bool | None) -> None:
    """After the steps nobody listens: the last of boto3's own attempts is refused, and does not tell of the first."""
    server = BrokenServer(steps)
    queue = queue_at(server.url, attempts)
    with pytest.raises(error) as failed:
        queue.send("x")
    server.close()
    assert server.requests == len(steps)
    if isinstance(failed.value, TransportError):
        assert failed.value.may_have_happened is doubt
    else:
        assert isinstance(failed.value, ServiceError)
        assert failed.value.retryable


def test_doubts_of_one_call_are_not_of_the_next() -> None:
    server = BrokenServer([HANG_UP])
    queue = queue_at(server.url, 1)
    with pytest.raises(TransportError) as first:
        queue.send("x")
    server.close()
    with pytest.raises(TransportError) as second:
        queue.send("x")
    assert (first.value.may_have_happened, second.value.may_have_happened) == (True, False)


def test_a_batch_whose_way_breaks_says_of_each_entry_what_may_have_happened() -> None:
    ok = (
        b'{"Successful":['
        + b",".join(b'{"Id":"%d","MessageId":"m","MD5OfMessageBody":"x"}' % number for number in range(9))
        + b'],"Failed":[]}'
    )
    server = BrokenServer([answer(200, ok, "Content-Type: application/x-amz-json-1.0"), HANG_UP])
    results = queue_at(server.url, 1).send_batch(["x"] * 25)
    server.close()
    assert all(isinstance(result, Sent) for result in results[:9])
    doubts = [result.may_have_happened for result in results[9:] if isinstance(result, TransportError)]
    assert doubts == [True] * 11 + [False] * 5


def test_a_batch_of_which_nothing_happened_raises() -> None:
    server = BrokenServer([])
    queue = queue_at(server.url, 1)
    server.close()
    for call in (
        lambda: queue.send_batch(["x"] * 25),
        lambda: queue.delete_batch(["h"] * 25),
        lambda: queue.extend_batch([Extension("h", 5)] * 25),
    ):
        with pytest.raises(TransportError) as refused:
            call()
        assert not refused.value.may_have_happened


def test_no_credentials_are_told_before_anything_is_sent() -> None:
    class Broken:
        """A client without credentials."""

        meta = client_of("http://127.0.0.1:1").meta

        def list_queues(self, **_: Any) -> Any:
            from botocore.exceptions import NoCredentialsError

            raise NoCredentialsError

    with pytest.raises(ServiceError, match=r"no credentials were found: .*AWS_ACCESS_KEY_ID") as refused:
        SqsAccount(Broken()).names()
    assert refused.value.code == "NoCredentialsError"
    assert "status" not in str(refused.value)
