"""The documents' classes refuse before they change anything, in words that help, and take what the SDKs hand over."""

import pickle
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from azure.storage.queue import QueueClient
from tests.support.embedded import EmbeddedClient

from veilmq.client.adapters.connect import DEVELOPMENT_KEYS
from veilmq.client.documents import (
    CloudAccount,
    CloudQueue,
    Manager,
    Message,
    MNSClient,
    QueueMeta,
    SecurityKeyGenerator,
    SecurityQueue,
    ServiceException,
)
from veilmq.client.messages import Template
from veilmq.client.queue import Account, Queue
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.testing.client_contract import for_each
from veilmq.testing.local import LocalServer


@pytest.fixture
def account(embedded: EmbeddedClient) -> Account:
    return embedded.account


@pytest.fixture
def client(server: LocalServer, request: pytest.FixtureRequest) -> Iterator[MNSClient]:
    """Over the protocol that the test names."""
    scheme = request.param
    port = {"azure": server.azure_url, "mns": server.mns_url}.get(scheme, server.sqs_url)
    path = "/devstoreaccount1/" if scheme == "azure" else ""
    key, secret = ("", "") if scheme == "azure" else ("id", "secret")
    tls = "" if scheme == "veil" else "?tls=0"
    endpoint = f"{scheme}://{urlsplit(port).netloc}{path}{tls}"
    with CloudAccount(key, secret, endpoint).getMNSClient() as client:
        yield client


def made(account: Account, name: str) -> Queue:
    account.create(name)
    return account.queue(name)


def meta(name: str) -> QueueMeta:
    queueMeta = QueueMeta()
    queueMeta.setQueueName(name)
    return queueMeta


class Checker:
    """Says that everything was done."""

    def checkTransactionStatus(self, message: Message) -> bool:
        return True


class TestTransQueue:
    """createTransQueue creates nothing before everything is checked: a deleted queue's name is blocked for a while."""

    @pytest.mark.slow
    @pytest.mark.parametrize("client", ["veil", "sqs", "azure", "mns"], indirect=True)
    def test_the_corrected_call_works_at_once(self, client: MNSClient) -> None:
        name = f"corrected-{type(client.account).__name__.lower()}"
        too_long = meta(name)
        too_long.setMessageRetentionPeriod(1)
        too_long.setVisibilityTimeout(10**9)
        for settings, checker, timeout in (
            (meta(name), Checker(), 10**9),
            (meta(name), object(), None),
            (too_long, Checker(), None),
        ):
            with pytest.raises(ParameterInvalid):
                client.createTransQueue(settings, checker, timeout)  # type: ignore[arg-type]
        assert client.account.names(name) == []
        with client.createTransQueue(meta(name), Checker()) as queue:
            assert queue.queue.checker is not None

    @pytest.mark.slow
    @pytest.mark.parametrize("client", ["sqs"], indirect=True)
    def test_a_log_that_is_there_and_forgets_too_early(self, client: MNSClient) -> None:
        client.account.create("early-operation-log", Template(retention=5_000))
        with pytest.raises(ParameterInvalid, match="must exceed"):
            client.createTransQueue(meta("early"), Checker(), 2_000)
        client.createTransQueue(meta("early"), Checker(), 600).close()

    def test_a_fifo_queue_has_a_log_too(self, account: Account) -> None:
        with MNSClient(account).createTransQueue(meta("trans.fifo"), Checker()) as queue:
            assert (queue.queue.inner.name, queue.queue.log.name) == ("trans.fifo", "trans-operation-log")

    def test_a_delete_that_was_cut_off_goes_on(self, account: Account) -> None:
        queue = MNSClient(account).createTransQueue(meta("trans"), Checker())
        account.delete("trans-operation-log")
        queue.delete()
        assert account.names() == []
        with pytest.raises(QueueMissing):
            queue.delete()


@pytest.mark.slow
class TestManagerTakes:
    """Messages as the SDKs' own calls return them."""

    def test_azures(self, server: LocalServer) -> None:
        server.connect("azure-messages")
        url, key = f"{server.azure_url}/devstoreaccount1", DEVELOPMENT_KEYS["devstoreaccount1"]
        with QueueClient(url, "azure-messages", credential=key) as queue, Manager(queue, 1, 1, 60) as manager:
            queue.send_message("hello")
            (peeked,) = queue.peek_messages()
            with pytest.raises(ParameterInvalid, match="received"):
                manager.registerMessage(peeked)
            message = queue.receive_message(visibility_timeout=5)
            assert message is not None
            lease = manager.registerMessage(message)
            assert lease.remaining() > 50
            assert (lease.message.id, lease.message.body) == (message.id, "hello")
            manager.deleteMessage(message)
            assert queue.get_queue_properties().approximate_message_count == 0

    def test_those_of_boto3s_client(self, server: LocalServer) -> None:
        queue = server.connect("boto3-messages")
        queue.send("hello")
        keys = {"aws_access_key_id": "id", "aws_secret_access_key": "secret"}
        sqs = boto3.client("sqs", "us-east-1", endpoint_url=server.sqs_url, **keys)
        url = sqs.get_queue_url(QueueName="boto3-messages")["QueueUrl"]
        (message,) = sqs.receive_message(QueueUrl=url, VisibilityTimeout=5)["Messages"]
        service = boto3.resource("sqs", "us-east-1", endpoint_url=server.sqs_url, **keys)
        with Manager(service.Queue(url), 1, 1, 60) as manager:
            assert manager.registerMessage(message).remaining() > 50
            manager.deleteMessage(message)
        assert queue.stats().in_flight == 0
        for each in (sqs, service.meta.client):
            each.close()


@pytest.mark.slow
@pytest.mark.parametrize("client", ["veil", "sqs", "azure", "mns"], indirect=True)
def test_a_typed_error_has_the_requests_id(client: MNSClient) -> None:
    queue = client.createQueue(meta("request-ids"))
    handle = "1-not-of-ours" if queue.queue.capabilities.protocol == "mns" else "1-not:of-ours"
    with pytest.raises(ServiceException) as caught:
        queue.deleteMessage(handle)
    assert len(caught.value.getRequestId()) >= 16
    assert pickle.loads(pickle.dumps(caught.value)).getRequestId() == caught.value.getRequestId()
    with pytest.raises(ServiceException) as missing:
        client.getQueueRef("request-ids-missing")
    assert len(missing.value.getRequestId()) >= 16
    assert missing.value.getRequestId() != caught.value.getRequestId()


class TestArguments:
    """As the documents' listings, and Java, have them."""

    @for_each("endpoint", ["127.0.0.1:29326", "localhost:29326", "ftp://host", "", None])
    def test_an_endpoint_of_no_scheme_is_told_all_that_it_may_have(self, endpoint: Any) -> None:
        with pytest.raises(ParameterInvalid) as caught:
            CloudAccount("id", "secret", endpoint)
        assert caught.value.parameter == "endpoint"
        if endpoint is not None:
            assert all(f"{scheme}://" in caught.value.reason for scheme in ("http", "https", "mns", "veil", "sqs"))

    def test_queue_key_and_algorithm_by_place(self, account: Account) -> None:
        key = SecurityKeyGenerator.generate("AES")
        assert key.algorithm == "A256GCM"
        plain, dead = made(account, "secret"), made(account, "dead")
        plain.send("not encrypted")
        queue = SecurityQueue(plain, key, "AES", dead)
        queue.putMessage(Message("hello"))
        message = queue.popMessage()
        assert message is not None
        assert message.getMessageBody() == "hello"
        assert dead.stats().visible == 1
        with pytest.raises(ParameterInvalid):
            SecurityQueue(plain, key, "A128GCM")
        with pytest.raises(ParameterInvalid, match="algorithm"):
            SecurityQueue(plain, key, dead, dead)

    @for_each("name", ["DES", "DESede", "nonsense", 256])
    def test_another_algorithm_is_refused_in_words(self, account: Account, name: Any) -> None:
        said = "must be text" if name == 256 else "too weak" if name != "nonsense" else "take AES"
        with pytest.raises(ParameterInvalid, match=said):
            SecurityKeyGenerator.generate(name)
        with pytest.raises(ParameterInvalid):
            SecurityQueue(CloudQueue(made(account, "secret")), SecurityKeyGenerator.generate(), algorithm=name)
