"""One message through boto3, azure-storage-queue and aliyun-mns-sdk: one lease, one count, fencing across all three.

Strategy: the three SDKs, unmodified, behind five functions each; the same walk in every order of the three. Whoever has
the lease, the two others find nothing; and every handle of an earlier holder is tried in every protocol.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any, NamedTuple

import boto3
import httpx
import pytest
from azure.core.exceptions import HttpResponseError
from azure.storage.queue import QueueServiceClient
from botocore.exceptions import ClientError
from mns.account import Account
from mns.mns_exception import MNSServerException
from mns.queue import Message

from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
REFUSED = (ClientError, HttpResponseError, MNSServerException)
LEASE = 30


class Held(NamedTuple):
    """A message as one protocol gave it; ids and handles in the form that all three share."""

    id: str
    body: str
    count: int
    handle: str


class Way(NamedTuple):
    """One SDK on the queue."""

    send: Callable[[str], str]
    receive: Callable[[], Held | None]
    extend: Callable[[Held, int], str]
    delete: Callable[[Held], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    server = LocalServer(tmp_path_factory.mktemp("three"))
    yield server
    server.stop()


@pytest.fixture
def ways(server: LocalServer, request: pytest.FixtureRequest) -> Iterator[dict[str, Way]]:
    """By protocol: a queue of the test's own, with a timeout of `LEASE` seconds."""
    name = "".join(each if each.isalnum() else "-" for each in request.node.name.lower())[:60].strip("-")
    account = Account(server.process.mns, "id", "secret")
    url = f"{server.process.azure}/{ACCOUNT}"
    with QueueServiceClient(url, credential={"account_name": ACCOUNT, "account_key": KEY}, retry_total=0) as service:
        yield {"sqs": by_sqs(server, name), "azure": by_azure(service, name), "mns": by_mns(account, name)}
    account.get_client().close_connection()


def by_sqs(server: LocalServer, name: str) -> Way:
    sqs = boto3.client(
        "sqs", endpoint_url=server.sqs_url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    url = sqs.create_queue(QueueName=name, Attributes={"VisibilityTimeout": str(LEASE)})["QueueUrl"]

    def receive() -> Held | None:
        found = sqs.receive_message(QueueUrl=url, MessageSystemAttributeNames=["All"]).get("Messages", [])
        if not found:
            return None
        count = int(found[0]["Attributes"]["ApproximateReceiveCount"])
        return Held(found[0]["MessageId"], found[0]["Body"], count, found[0]["ReceiptHandle"])

    def extend(held: Held, seconds: int) -> str:
        sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=held.handle, VisibilityTimeout=seconds)
        return held.handle

    return Way(
        send=lambda body: str(sqs.send_message(QueueUrl=url, MessageBody=body)["MessageId"]),
        receive=receive,
        extend=extend,
        delete=lambda held: sqs.delete_message(QueueUrl=url, ReceiptHandle=held.handle),
    )


def by_azure(service: QueueServiceClient, name: str) -> Way:
    queue = service.get_queue_client(name)

    def receive() -> Held | None:
        found: Any = queue.receive_message()
        return None if found is None else Held(found.id, found.content, found.dequeue_count, found.pop_receipt)

    return Way(
        send=lambda body: str(queue.send_message(body).id),
        receive=receive,
        extend=lambda held, seconds: str(
            queue.update_message(held.id, held.handle, visibility_timeout=seconds).pop_receipt
        ),
        delete=lambda held: queue.delete_message(held.id, held.handle),
    )


def by_mns(account: Account, name: str) -> Way:
    queue = account.get_queue(name)
    queue.set_encoding(False)

    def receive() -> Held | None:
        try:
            found = queue.receive_message(0)
        except MNSServerException as error:
            if error.type != "MessageNotExist":
                raise
            return None
        return Held(canonical(found.message_id), found.message_body, found.dequeue_count, found.receipt_handle)

    return Way(
        send=lambda body: canonical(queue.send_message(Message(body)).message_id),
        receive=receive,
        extend=lambda held, seconds: str(queue.change_message_visibility(held.handle, seconds).receipt_handle),
        delete=lambda held: queue.delete_message(held.handle),
    )


def canonical(message_id: str) -> str:
    """MNS writes the same id without hyphens and in capitals."""
    digits = message_id.lower()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def fenced(ways: dict[str, Way], stale: list[Held]) -> None:
    """No protocol does anything for a handle of the past. SQS takes the delete of a stale one, and deletes nothing."""
    for old in stale:
        for protocol, way in ways.items():
            with pytest.raises(REFUSED):
                way.extend(old, LEASE)
            if protocol == "sqs":
                way.delete(old)
            else:
                with pytest.raises(REFUSED):
                    way.delete(old)


@pytest.mark.parametrize("order", list(permutations(("sqs", "azure", "mns"))), ids="-".join)
def test_the_walk(server: LocalServer, ways: dict[str, Way], order: tuple[str, ...]) -> None:
    body = "žluť <&> \U0001f600"
    sent = ways[order[0]].send(body)
    stale: list[Held] = []
    for count, protocol in enumerate((*order, order[0]), 1):
        way = ways[protocol]
        held = way.receive()
        assert held is not None
        assert (held.id, held.body, held.count) == (sent, body, count)
        assert [other.receive() for other in ways.values()] == [None, None, None]
        # An extension counts for all; what rotates makes the handle before it stale everywhere.
        newest = held._replace(handle=way.extend(held, 2 * LEASE))
        assert (newest.handle == held.handle) is (protocol == "sqs")
        stale += [held] if newest.handle != held.handle else []
        server.advance(seconds=LEASE + 1)
        assert [other.receive() for other in ways.values()] == [None, None, None]
        fenced(ways, stale)
        stale.append(newest)
        server.advance(seconds=LEASE)
    last = ways[order[1]].receive()
    assert last is not None
    assert last.count == 5
    fenced(ways, stale)
    ways[order[2]].delete(last)  # one handle is good for every protocol
    server.advance(seconds=LEASE)
    assert [way.receive() for way in ways.values()] == [None, None, None]


@pytest.mark.parametrize("name", ["Jobs_of_today", "jobs.fifo"])
def test_an_alias_where_a_name_is_not_legal(server: LocalServer, name: str) -> None:
    sqs = boto3.client(
        "sqs", endpoint_url=server.sqs_url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    fifo = name.endswith(".fifo")
    more = {"MessageGroupId": "g", "MessageDeduplicationId": "d"} if fifo else {}
    url = sqs.create_queue(QueueName=name, Attributes={"FifoQueue": "true"} if fifo else {})["QueueUrl"]
    alias = f"alias-{name[:4].lower()}-{len(name)}"
    settings = f"{server.process.admin}/api/v1/queues/000000000000/us-east-1/{name}"
    token = {"Authorization": f"Bearer {(server.process.data / 'admin-token').read_text().strip()}"}
    assert httpx.patch(settings, json={"alias": alias}, headers=token).status_code == 200
    account = Account(server.process.mns, "id", "secret")
    mns = account.get_queue(alias)
    mns.set_encoding(False)
    endpoint = f"{server.process.azure}/{ACCOUNT}"
    with QueueServiceClient(
        endpoint, credential={"account_name": ACCOUNT, "account_key": KEY}, retry_total=0
    ) as service:
        assert alias in [each.name for each in service.list_queues()]
        azure = service.get_queue_client(alias)
        sqs.send_message(QueueUrl=url, MessageBody="from SQS", **more)
        held = azure.receive_message(visibility_timeout=30)
        assert held.content == "from SQS"
        assert "Messages" not in sqs.receive_message(QueueUrl=url)
        with pytest.raises(MNSServerException):
            mns.receive_message(0)
        azure.update_message(held, visibility_timeout=0)
        found = mns.receive_message(0)
        assert (canonical(found.message_id), found.message_body, found.dequeue_count) == (held.id, "from SQS", 2)
        mns.delete_message(found.receipt_handle)
        if fifo:
            with pytest.raises(HttpResponseError) as refused:
                azure.send_message("a FIFO queue needs a group")
            assert refused.value.status_code == 400
        else:
            # Who waits through MNS is woken by a send through SQS, and the other way round.
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(mns.receive_message, 20)
                sqs.send_message(QueueUrl=url, MessageBody="woken")
                assert waiting.result().message_body == "woken"
                mns.delete_message(waiting.result().receipt_handle)
        assert azure.get_queue_properties().approximate_message_count == 0
        assert httpx.patch(settings, json={"alias": None}, headers=token).status_code == 200
        with pytest.raises(HttpResponseError) as gone:
            azure.peek_messages()
        assert gone.value.status_code == 404
    account.get_client().close_connection()


def test_a_late_worker_may_still_delete_until_somebody_else_has_it(server: LocalServer, ways: dict[str, Way]) -> None:
    for late, other in permutations(("sqs", "azure"), 2):
        ways["mns"].send("x")
        held = ways[late].receive()
        assert held is not None
        server.advance(seconds=LEASE + 1)
        ways[other].delete(held)
        assert [way.receive() for way in ways.values()] == [None, None, None]


def test_no_handle_of_one_message_is_good_for_another(ways: dict[str, Way]) -> None:
    first, second = ways["sqs"].send("1"), ways["mns"].send("2")
    one, two = ways["azure"].receive(), ways["azure"].receive()
    assert one is not None
    assert two is not None
    assert (one.id, two.id) == (first, second)
    with pytest.raises(REFUSED):
        ways["azure"].delete(one._replace(handle=two.handle))
    ways["azure"].delete(two)
    ways["azure"].delete(one)
