"""azure-storage-queue, unmodified, against a real server: messages, services, fencing across protocols."""

import asyncio
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ResourceExistsError,
    ResourceNotFoundError,
)
from azure.storage.queue import (
    AccessPolicy,
    AccountSasPermissions,
    BinaryBase64DecodePolicy,
    BinaryBase64EncodePolicy,
    CorsRule,
    QueueAnalyticsLogging,
    QueueClient,
    QueueSasPermissions,
    QueueServiceClient,
    ResourceTypes,
    RetentionPolicy,
    TextBase64DecodePolicy,
    TextBase64EncodePolicy,
    generate_account_sas,
    generate_queue_sas,
)
from azure.storage.queue.aio import QueueClient as AsyncQueueClient
from azure.storage.queue.aio import QueueServiceClient as AsyncQueueServiceClient

from veilmq.testing.local import LocalServer

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """One development server for all tests of the module; each makes its own queue."""
    server = LocalServer(tmp_path_factory.mktemp("azure"))
    yield server
    server.stop()


@pytest.fixture
def connection(local: LocalServer) -> str:
    """What `UseDevelopmentStorage=true` stands for, on the server's port."""
    endpoint = f"{local.process.azure}/{ACCOUNT}"
    keys = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY}"
    return f"{keys};QueueEndpoint={endpoint};"


@pytest.fixture
def service(connection: str) -> Iterator[QueueServiceClient]:
    """The account; no retries, so that each answer is seen as it is."""
    with QueueServiceClient.from_connection_string(connection, retry_total=0) as client:
        yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A queue's name of the test's own."""
    text = "".join(each if each.isalnum() else "-" for each in request.node.name.lower())
    return text.replace("--", "-").strip("-")[:63].strip("-")


@pytest.fixture
def queue(service: QueueServiceClient, name: str) -> QueueClient:
    """A queue of the test's own."""
    return service.create_queue(name)


@pytest.fixture
def sqs(local: LocalServer) -> Any:
    """boto3 on the same account."""
    return boto3.client(
        "sqs", endpoint_url=local.sqs_url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )


def later(**duration: float) -> datetime:
    return datetime.now(UTC) + timedelta(**duration)


def code_of(raised: pytest.ExceptionInfo[HttpResponseError]) -> str:
    return str(getattr(raised.value.error_code, "value", raised.value.error_code))  # type: ignore[attr-defined]


def test_a_message_goes_round(queue: QueueClient) -> None:
    sent = queue.send_message("\u00e9 <&> \U0001f600\n", visibility_timeout=0, time_to_live=3600)
    assert sent.expires_on - sent.inserted_on == timedelta(hours=1)
    (peeked,) = queue.peek_messages(5)
    assert (peeked.id, peeked.content, peeked.dequeue_count) == (sent.id, "\u00e9 <&> \U0001f600\n", 0)
    message = queue.receive_message(visibility_timeout=60)
    assert (message.id, message.content, message.dequeue_count) == (sent.id, sent.content, 1)
    assert queue.receive_message() is None
    with pytest.raises(ResourceNotFoundError) as raised:
        queue.delete_message(sent)
    assert code_of(raised) == "MessageNotFound"
    queue.delete_message(message)
    assert queue.get_queue_properties().approximate_message_count == 0


def test_pages_of_a_receive(queue: QueueClient) -> None:
    for number in range(70):
        queue.send_message(str(number))
    pages = [[message.content for message in page] for page in queue.receive_messages(messages_per_page=32).by_page()]
    assert [len(page) for page in pages] == [32, 32, 6]
    assert [content for page in pages for content in page] == [str(number) for number in range(70)]
    assert len({message.pop_receipt for message in queue.receive_messages(messages_per_page=32)}) == 0


def test_every_answer_names_a_server(queue: QueueClient) -> None:
    """Azure's Rust crates up to 0.21 fail with "header not found server": azure-sdk-for-rust #3530 and #4489."""
    named: list[str | None] = []
    hook = {"raw_response_hook": lambda answer: named.append(answer.http_response.headers.get("Server"))}
    queue.send_message("one", **hook)
    queue.delete_message(queue.receive_message(**hook), **hook)
    with pytest.raises(ResourceNotFoundError):
        queue.delete_message("nothing", pop_receipt=queue.send_message("two").pop_receipt, **hook)
    assert named == ["VeilMQ"] * 4


@pytest.mark.parametrize("forever", [True, False])
def test_time_to_live(local: LocalServer, queue: QueueClient, forever: bool) -> None:
    sent = queue.send_message("x", time_to_live=-1 if forever else 60)
    assert (sent.expires_on.year == 9999) is forever
    local.advance(seconds=61)
    assert (queue.receive_message() is not None) is forever


def test_an_expiry_beats_a_lease(local: LocalServer, queue: QueueClient) -> None:
    queue.send_message("x", time_to_live=60)
    message = queue.receive_message(visibility_timeout=7 * 86_400)
    extended = queue.update_message(message, visibility_timeout=7 * 86_400)
    assert extended.next_visible_on > message.expires_on + timedelta(days=6)
    local.advance(seconds=60)
    with pytest.raises(ResourceNotFoundError):
        queue.delete_message(extended.id, extended.pop_receipt)


def test_a_poller_that_works_longer_than_the_lease(local: LocalServer, queue: QueueClient) -> None:
    """As Azure Functions polls: get 16, extend each by update while working, delete by the newest receipt."""
    for number in range(20):
        queue.send_message(str(number))
    held = list(queue.receive_messages(messages_per_page=16, max_messages=16, visibility_timeout=30))
    assert len(held) == 16
    receipts = {message.id: {message.pop_receipt} for message in held}
    for _ in range(5):
        local.advance(seconds=25)
        held = [queue.update_message(message, visibility_timeout=30) for message in held]
        for message in held:
            receipts[message.id].add(message.pop_receipt)
    assert {len(seen) for seen in receipts.values()} == {6}
    others = [message.content for message in queue.receive_messages(messages_per_page=32)]
    assert sorted(others, key=int) == ["16", "17", "18", "19"], "what is held reaches nobody else"
    for message in held:
        queue.delete_message(message.id, message.pop_receipt)
    local.advance(hours=1)
    assert len(list(queue.receive_messages(messages_per_page=32))) == 4


def test_an_update_may_replace_the_text_and_is_no_delivery(local: LocalServer, queue: QueueClient) -> None:
    queue.send_message("first")
    message = queue.receive_message(visibility_timeout=30)
    updated = queue.update_message(message, content="step 2 of 3", visibility_timeout=0)
    assert updated.pop_receipt != message.pop_receipt
    again = queue.receive_message(visibility_timeout=30)
    assert (again.content, again.dequeue_count) == ("step 2 of 3", 2)
    kept = queue.update_message(again, visibility_timeout=60)
    local.advance(seconds=61)
    assert queue.receive_message().content == "step 2 of 3"
    with pytest.raises(ResourceNotFoundError):
        queue.update_message(kept.id, kept.pop_receipt, visibility_timeout=1)


def test_a_receipt_outlives_its_lease_until_the_next_delivery(local: LocalServer, queue: QueueClient) -> None:
    for _ in range(2):
        queue.send_message("x")
    first, second = queue.receive_message(visibility_timeout=60), queue.receive_message(visibility_timeout=60)
    local.advance(seconds=61)
    queue.delete_message(first)
    assert queue.receive_message().id == second.id
    with pytest.raises(ResourceNotFoundError):
        queue.delete_message(second)


def test_a_delayed_message(local: LocalServer, queue: QueueClient) -> None:
    sent = queue.send_message("x", visibility_timeout=3600)
    assert queue.receive_message() is None
    assert queue.peek_messages() == []
    moved = queue.update_message(sent.id, sent.pop_receipt, visibility_timeout=60)
    local.advance(seconds=60)
    assert queue.receive_message().dequeue_count == 1
    with pytest.raises(ResourceNotFoundError):
        queue.delete_message(moved.id, moved.pop_receipt)


def test_clear(queue: QueueClient) -> None:
    for number in range(5):
        queue.send_message("x", visibility_timeout=number * 60)
    queue.clear_messages()
    assert queue.get_queue_properties().approximate_message_count == 0


def test_base64_of_text_and_bytes(connection: str, queue: QueueClient) -> None:
    assert queue.queue_name
    for encode, decode, content in (
        (TextBase64EncodePolicy(), TextBase64DecodePolicy(), "\r\n\u20ac"),
        (BinaryBase64EncodePolicy(), BinaryBase64DecodePolicy(), bytes(range(256))),
    ):
        with QueueClient.from_connection_string(
            connection, queue.queue_name, message_encode_policy=encode, message_decode_policy=decode
        ) as client:
            client.send_message(content)
            assert client.receive_message().content == content


def test_queues_and_metadata(service: QueueServiceClient, name: str) -> None:
    queue = service.create_queue(name, metadata={"owner": "shop", "a_1": "x", "a1": "y"})
    with pytest.raises(ResourceExistsError) as raised:
        queue.create_queue()
    assert code_of(raised) == "QueueAlreadyExists"
    assert queue.get_queue_properties().metadata == {"owner": "shop", "a_1": "x", "a1": "y"}
    many = {f"m{number}": "x" for number in range(1_000)}  # Azure bounds their bytes
    for metadata in (many, {"owner": "mail"}):
        queue.set_queue_metadata(metadata)
        listed = service.list_queues(name_starts_with=name[:10], include_metadata=True)
        assert {each.name: each.metadata for each in listed}[name] == metadata
    queue.delete_queue()
    for use in (queue.delete_queue, queue.get_queue_properties, queue.receive_message, queue.peek_messages):
        with pytest.raises(ResourceNotFoundError) as missing:
            use()
        assert code_of(missing) == "QueueNotFound"
    with pytest.raises(ResourceExistsError) as early:
        queue.create_queue()
    assert code_of(early) == "QueueBeingDeleted"


def test_names_of_metadata_keep_their_case_and_are_compared_without(service: QueueServiceClient, name: str) -> None:
    queue = service.create_queue(name, metadata={"Owner": "shop", "costCentre": "7", "plain": "x"})
    assert queue.get_queue_properties().metadata == {"Owner": "shop", "costCentre": "7", "plain": "x"}
    for metadata, status in (
        ({"OWNER": "shop", "costcentre": "7", "plain": "x"}, 204),
        ({"Owner": "Shop", "costCentre": "7", "plain": "x"}, 409),
    ):
        with pytest.raises(ResourceExistsError) as raised:
            queue.create_queue(metadata=metadata)
        assert raised.value.status_code == status
    listed = service.list_queues(name_starts_with=name, include_metadata=True)
    assert [each.metadata for each in listed] == [{"Owner": "shop", "costCentre": "7", "plain": "x"}]
    queue.set_queue_metadata({"owner": "mail", "Plain": "x"})
    assert queue.get_queue_properties().metadata == {"owner": "mail", "Plain": "x"}
    queue.set_queue_metadata({})
    assert queue.get_queue_properties().metadata == {}


@pytest.mark.parametrize("twice", [(b"x-ms-meta-a", b"x-ms-meta-a"), (b"x-ms-meta-a", b"X-MS-Meta-A")])
def test_a_name_of_metadata_is_given_once(local: LocalServer, name: str, twice: tuple[bytes, bytes]) -> None:
    sas = generate_account_sas(
        ACCOUNT, KEY, ResourceTypes(container=True), AccountSasPermissions(create=True), later(hours=1)
    )
    given = "".join(f"{each.decode()}: 1\r\n" for each in twice)
    head = f"PUT /{ACCOUNT}/{name}?{sas} HTTP/1.1\r\nHost: 127.0.0.1\r\n{given}Connection: close\r\n\r\n"
    where = urlsplit(local.process.azure)
    with socket.create_connection((where.hostname or "", where.port or 0)) as plain:
        plain.sendall(head.encode())
        answer = b"".join(iter(lambda: plain.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.1 400 The metadata specified is invalid. ")
    assert b"<Code>InvalidMetadata</Code>" in answer


def test_lists_come_in_pages(service: QueueServiceClient) -> None:
    names = sorted(f"paged-{number}" for number in range(7))
    for each in names:
        service.create_queue(each)
    pages = list(service.list_queues(name_starts_with="paged-", results_per_page=3).by_page())
    assert [[each.name for each in page] for page in pages] == [names[:3], names[3:6], names[6:]]


def test_service_properties(service: QueueServiceClient) -> None:
    logging = QueueAnalyticsLogging(delete=True, retention_policy=RetentionPolicy(enabled=True, days=7))
    rule = CorsRule(
        ["https://a.example", "https://b.example"], ["GET"], allowed_headers=["x-ms-*"], max_age_in_seconds=9
    )
    service.set_service_properties(analytics_logging=logging, cors=[rule])
    shown = service.get_service_properties()
    assert shown["analytics_logging"].delete is True
    assert shown["analytics_logging"].retention_policy.days == 7
    assert shown["cors"][0].allowed_origins == "https://a.example,https://b.example"
    service.set_service_properties(cors=[])
    assert service.get_service_properties()["cors"] == []
    with pytest.raises(HttpResponseError) as raised:
        service.set_service_properties(cors=[rule] * 6)
    assert code_of(raised) == "InvalidXmlDocument"


def test_the_secondary_endpoint(local: LocalServer, queue: QueueClient) -> None:
    queue.send_message("x")
    credential = {"account_name": ACCOUNT, "account_key": KEY}
    host = urlsplit(local.process.azure).netloc
    with QueueServiceClient(
        f"http://{host}/{ACCOUNT}-secondary", credential=credential, secondary_hostname=host, retry_total=0
    ) as there:
        assert there.get_service_stats()["geo_replication"]["status"] == "live"
        mirrored = there.get_queue_client(queue.queue_name)
        assert [message.content for message in mirrored.peek_messages()] == ["x"]
        with pytest.raises(HttpResponseError) as raised:
            mirrored.receive_message()
        assert code_of(raised) == "InsufficientAccountPermissions"


def test_a_secondary_that_is_given_by_its_path(local: LocalServer, queue: QueueClient) -> None:
    """The SDK puts it before the path of the primary, account and all."""
    queue.send_message("x")
    host = urlsplit(local.process.azure).netloc
    second = f"{host}/{ACCOUNT}-secondary"
    credential = {"account_name": ACCOUNT, "account_key": KEY}
    sas = generate_account_sas(
        ACCOUNT,
        KEY,
        ResourceTypes(service=True),
        AccountSasPermissions(read=True),
        datetime.now(UTC) + timedelta(hours=1),
    )
    for given in (credential, sas):
        with QueueServiceClient(f"http://{host}/{ACCOUNT}", given, secondary_hostname=second, retry_total=0) as there:
            assert there.get_service_stats()["geo_replication"]["status"] == "live"


def test_use_development_storage(tmp_path: Path) -> None:
    """The port is fixed in the SDKs: no other test listens there."""
    from veilmq.testing.local import ServerProcess

    server = ServerProcess(tmp_path, "--azure", "127.0.0.1:10001").start()
    try:
        with QueueClient.from_connection_string("UseDevelopmentStorage=true", "development") as queue:
            queue.create_queue()
            queue.send_message("x")
            assert queue.receive_message().content == "x"
    finally:
        assert server.stop() == 0


def test_an_account_sas(local: LocalServer, service: QueueServiceClient, queue: QueueClient) -> None:
    sas = generate_account_sas(
        ACCOUNT, KEY, ResourceTypes(object=True), AccountSasPermissions(add=True, process=True), later(hours=1)
    )
    with QueueClient(f"{local.process.azure}/{ACCOUNT}", queue.queue_name, credential=sas, retry_total=0) as client:
        client.send_message("x")
        client.delete_message(client.receive_message())
        for use in (client.peek_messages, client.clear_messages, client.delete_queue):
            with pytest.raises(HttpResponseError) as raised:
                use()
            assert code_of(raised).startswith("Authorization")
    expired = generate_account_sas(
        ACCOUNT, KEY, ResourceTypes(service=True), AccountSasPermissions(list=True), later(hours=-1)
    )
    with QueueServiceClient(f"{local.process.azure}/{ACCOUNT}", credential=expired, retry_total=0) as client:
        with pytest.raises(ClientAuthenticationError):
            list(client.list_queues())


def test_a_queue_sas_and_a_stored_policy(local: LocalServer, queue: QueueClient) -> None:
    url = f"{local.process.azure}/{ACCOUNT}"
    direct = generate_queue_sas(ACCOUNT, queue.queue_name, KEY, QueueSasPermissions(read=True), later(hours=1))
    with QueueClient(url, queue.queue_name, credential=direct, retry_total=0) as client:
        assert client.peek_messages() == []
        with pytest.raises(HttpResponseError):
            client.send_message("x")
    policy = AccessPolicy(QueueSasPermissions(add=True), later(hours=1), later(hours=-1))
    queue.set_queue_access_policy({"adders": policy})
    assert queue.get_queue_access_policy()["adders"].permission == "a"
    stored = generate_queue_sas(ACCOUNT, queue.queue_name, KEY, policy_id="adders")
    with QueueClient(url, queue.queue_name, credential=stored, retry_total=0) as client:
        client.send_message("x")
        with pytest.raises(HttpResponseError):
            client.peek_messages()
        queue.set_queue_access_policy({})
        with pytest.raises(ClientAuthenticationError):
            client.send_message("x")


def test_wrong_keys_and_parameters(local: LocalServer, queue: QueueClient) -> None:
    url = f"{local.process.azure}/{ACCOUNT}"
    with QueueClient(url, queue.queue_name, credential="d3Jvbmc=", retry_total=0) as stranger:
        with pytest.raises(ClientAuthenticationError) as raised:
            stranger.send_message("x")
    assert code_of(raised) == "AuthenticationFailed"
    for use, code in (
        (lambda: queue.send_message("x" * 65_537), "RequestBodyTooLarge"),
        (lambda: queue.send_message("x", visibility_timeout=604_801), "OutOfRangeQueryParameterValue"),
        (lambda: queue.send_message("a\x01b"), "InvalidXmlDocument"),
        (
            lambda: queue.peek_messages(32) or queue.receive_message(visibility_timeout=0),
            "OutOfRangeQueryParameterValue",
        ),
        (lambda: queue.delete_message("11111111-2222-3333-4444-555555555555", "x"), "InvalidQueryParameterValue"),
    ):
        with pytest.raises(HttpResponseError) as refused:
            use()
        assert code_of(refused) == code


def test_the_asynchronous_client(connection: str, name: str) -> None:
    async def go_round() -> None:
        async with AsyncQueueServiceClient.from_connection_string(connection) as service:
            client = await service.create_queue(name, metadata={"a_b": "1", "a1": "2"})
            await asyncio.gather(*(client.send_message(str(number)) for number in range(40)))
            seen = {message.content async for message in client.receive_messages(messages_per_page=32)}
            assert seen == {str(number) for number in range(40)}
            assert [each.name async for each in service.list_queues(name_starts_with=name)] == [name]
        async with AsyncQueueClient.from_connection_string(connection, name) as client:
            await client.send_message("one more")
            message = await client.receive_message(visibility_timeout=30)
            updated = await client.update_message(message, visibility_timeout=60, content="later")
            await client.delete_message(updated.id, updated.pop_receipt)
            await client.delete_queue()

    asyncio.run(go_round())


class TestBesideSqs:
    """One queue, two protocols."""

    def test_what_one_sends_the_other_receives(self, sqs: Any, queue: QueueClient) -> None:
        url = sqs.get_queue_url(QueueName=queue.queue_name)["QueueUrl"]
        sqs.send_message(
            QueueUrl=url,
            MessageBody="from boto3 \r\n<&>",
            MessageAttributes={"n": {"DataType": "Number", "StringValue": "1"}},
        )
        message = queue.receive_message(visibility_timeout=60)
        assert message.content == "from boto3 \r\n<&>"
        queue.delete_message(message)
        sent = queue.send_message("from azure")
        (received,) = sqs.receive_message(QueueUrl=url)["Messages"]
        assert (received["Body"], received["MessageId"]) == ("from azure", sent.id)
        sqs.delete_message(QueueUrl=url, ReceiptHandle=received["ReceiptHandle"])
        assert queue.get_queue_properties().approximate_message_count == 0

    def test_a_lease_holds_in_both(self, local: LocalServer, sqs: Any, queue: QueueClient) -> None:
        url = sqs.get_queue_url(QueueName=queue.queue_name)["QueueUrl"]
        for _ in range(2):
            queue.send_message("x")
        held = queue.receive_message(visibility_timeout=30)
        (other,) = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=30)["Messages"]
        assert other["MessageId"] != held.id
        assert queue.receive_message() is None
        assert queue.peek_messages() == []
        local.advance(seconds=20)
        held = queue.update_message(held, visibility_timeout=30)
        local.advance(seconds=20)
        assert queue.receive_message(visibility_timeout=30).id == other["MessageId"]
        assert "Messages" not in sqs.receive_message(QueueUrl=url)

    def test_stale_receipts_are_fenced_across_both(self, local: LocalServer, sqs: Any, queue: QueueClient) -> None:
        url = sqs.get_queue_url(QueueName=queue.queue_name)["QueueUrl"]
        queue.send_message("x")
        held = queue.receive_message(visibility_timeout=1)
        local.advance(seconds=2)
        (newer,) = sqs.receive_message(QueueUrl=url, VisibilityTimeout=30, AttributeNames=["All"])["Messages"]
        assert newer["Attributes"]["ApproximateReceiveCount"] == "2"
        for use in (lambda: queue.delete_message(held), lambda: queue.update_message(held, visibility_timeout=0)):
            with pytest.raises(ResourceNotFoundError):
                use()
        sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=newer["ReceiptHandle"], VisibilityTimeout=1)
        local.advance(seconds=2)
        newest = queue.receive_message(visibility_timeout=30)
        assert newest.dequeue_count == 3
        sqs.delete_message(QueueUrl=url, ReceiptHandle=newer["ReceiptHandle"])
        assert queue.get_queue_properties().approximate_message_count == 1, "a stale handle deletes nothing"
        # The same lease, by the other protocol: the receipt is the handle.
        sqs.delete_message(QueueUrl=url, ReceiptHandle=newest.pop_receipt)
        assert queue.get_queue_properties().approximate_message_count == 0

    def test_an_update_fences_the_handle_of_the_same_lease(self, sqs: Any, queue: QueueClient) -> None:
        url = sqs.get_queue_url(QueueName=queue.queue_name)["QueueUrl"]
        queue.send_message("x")
        held = queue.receive_message(visibility_timeout=30)
        queue.update_message(held, visibility_timeout=60)
        sqs.delete_message(QueueUrl=url, ReceiptHandle=held.pop_receipt)
        assert queue.get_queue_properties().approximate_message_count == 1

    def test_queue_policy_acts_on_both(self, local: LocalServer, sqs: Any, queue: QueueClient) -> None:
        dead = sqs.create_queue(QueueName=f"{queue.queue_name[:55]}-dead")["QueueUrl"]
        arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        url = sqs.get_queue_url(QueueName=queue.queue_name)["QueueUrl"]
        policy = f'{{"deadLetterTargetArn": "{arn}", "maxReceiveCount": 2}}'
        sqs.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy, "VisibilityTimeout": "5"})
        queue.send_message("poison")
        for count in (1, 2):
            assert queue.receive_message().dequeue_count == count
            local.advance(seconds=5)
        assert queue.receive_message() is None
        (buried,) = sqs.receive_message(QueueUrl=dead)["Messages"]
        assert buried["Body"] == "poison"


def test_a_kill_loses_nothing_and_brings_nothing_back(tmp_path: Path) -> None:
    from veilmq.testing.local import ServerProcess

    server = ServerProcess(tmp_path).start()

    def client() -> QueueClient:
        return QueueClient(
            f"{server.azure}/{ACCOUNT}", "orders", credential={"account_name": ACCOUNT, "account_key": KEY}
        )

    with client() as queue:
        queue.create_queue(metadata={"a": "1"})
        for number in range(100):
            queue.send_message(str(number))
        held = list(queue.receive_messages(messages_per_page=32, max_messages=40, visibility_timeout=600))
        for message in held[:20]:
            queue.delete_message(message)
        extended = queue.update_message(held[20], visibility_timeout=900, content="changed")
    server.kill()
    server.start()
    with client() as queue:
        assert queue.get_queue_properties().approximate_message_count == 80
        assert queue.get_queue_properties().metadata == {"a": "1"}
        rest = [message.content for message in queue.receive_messages(messages_per_page=32, visibility_timeout=600)]
        assert rest == [str(number) for number in range(40, 100)]
        with pytest.raises(ResourceNotFoundError):
            queue.delete_message(held[20])
        queue.delete_message(extended.id, extended.pop_receipt)
        for message in held[21:]:
            queue.delete_message(message)
        assert queue.get_queue_properties().approximate_message_count == 60
    assert server.stop() == 0
