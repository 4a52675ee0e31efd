"""The documents' classes together: each takes any queue, with their argument counts, names and exceptions."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from azure.storage.queue import QueueClient
from mns.account import Account as SdkAccount
from mns.queue import Message as SdkMessage
from tests.support.embedded import EmbeddedClient

from veilmq.client.adapters.connect import DEVELOPMENT_KEYS
from veilmq.client.clock import SYSTEM
from veilmq.client.documents import (
    BigMessageSizeQueue,
    ChangeVisibilityTask,
    ClientException,
    CloudAccount,
    CloudQueue,
    LocalDiskStorage,
    Manager,
    Message,
    MessageReceiver,
    MNSClient,
    OrderedQueueWrapper,
    QueueMeta,
    SecurityKeyGenerator,
    SecurityQueue,
    ServiceException,
    ServiceSettings,
    TopicMeta,
    queues,
)
from veilmq.client.documents.values import received_of
from veilmq.client.errors import StorageHeld, TransportError
from veilmq.client.queue import Account, Queue
from veilmq.model.errors import LeaseTaken, ParameterInvalid, QueueMissing
from veilmq.testing.client_contract import for_each
from veilmq.testing.local import LocalServer


@pytest.fixture
def account(embedded: EmbeddedClient) -> Account:
    return embedded.account


def made(account: Account, name: str) -> Queue:
    account.create(name)
    return account.queue(name)


def meta(name: str, wait: float | None = None) -> QueueMeta:
    queueMeta = QueueMeta()
    queueMeta.setQueueName(name)
    if wait is not None:
        queueMeta.setPollingWaitSeconds(wait)
    return queueMeta


def cloud_queue(server: LocalServer, name: str, undo: ExitStack) -> Any:
    return CloudQueue(server.connect(name))


def mns_queue(server: LocalServer, name: str, undo: ExitStack) -> Any:
    server.connect(name)
    account = SdkAccount(server.mns_url, "id", "secret")
    undo.callback(account.get_client().close_connection)
    queue = account.get_queue(name)
    undo.callback(queue.mns_client.close_connection)
    return queue


def boto3_queue(server: LocalServer, name: str, undo: ExitStack) -> Any:
    server.connect(name)
    keys = {"aws_access_key_id": "id", "aws_secret_access_key": "secret"}
    service = boto3.resource("sqs", "us-east-1", endpoint_url=server.sqs_url, **keys)
    undo.callback(service.meta.client.close)
    return service.get_queue_by_name(QueueName=name)


def azure_queue(server: LocalServer, name: str, undo: ExitStack) -> Any:
    server.connect(name)
    url = f"{server.azure_url}/devstoreaccount1"
    return undo.enter_context(QueueClient(url, name, credential=DEVELOPMENT_KEYS["devstoreaccount1"]))


Source = Callable[[LocalServer, str, ExitStack], Any]


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_queue(request: pytest.FixtureRequest, server: LocalServer, undo: ExitStack) -> tuple[Any, str]:
    """A queue object of the kind that the class is tested with, and its name."""
    name = f"{request.function.__name__}-{request.param.__name__}".replace("_", "-")
    return request.param(server, name, undo), name


@pytest.mark.slow
@pytest.mark.parametrize("open_queue", [cloud_queue, mns_queue, boto3_queue, azure_queue], indirect=True)
class TestAnyQueue:
    """Whatever takes a queue takes a CloudQueue and an SDK's own object; ours is in test_documents.py."""

    def test_message_receiver(self, open_queue: tuple[Any, str]) -> None:
        with CloudQueue(open_queue[0]) as cloud:
            cloud.putMessage(Message("hello"))
            receiver = MessageReceiver(open_queue[0])
            message = receiver.receiveMessage(10)
            assert message is not None
            assert message.getMessageBody() == "hello"
            receiver.receiver.close(5)
            receiver.receiver.queue.close()

    def test_manager(self, server: LocalServer, open_queue: tuple[Any, str]) -> None:
        queue, name = open_queue
        with CloudQueue(queue) as cloud, Manager(queue, 1, 1, 5) as manager:
            cloud.putMessage(Message("hello"))
            message = cloud.popMessage(10)
            assert message is not None
            lease = manager.RegisterMessage(message)
            lease.extend(40)  # another handle, on MNS and Azure
            manager.deleteMessage(message)
        assert server.connect(name).stats().in_flight == 0

    def test_ordered_queue_wrapper(self, open_queue: tuple[Any, str], tmp_path: Path) -> None:
        sends, receives = (LocalDiskStorage({"localFileName": f"{tmp_path}/{side}"}) for side in ("send", "receive"))
        with OrderedQueueWrapper(open_queue[0], sends, receives) as ordered:
            ordered.SendMessageInOrder("first")
            message = ordered.ReceiveMessageInOrder(10)
        assert message is not None
        assert message.getMessageBody() == "first"

    def test_big_message_size_queue(self, open_queue: tuple[Any, str], tmp_path: Path) -> None:
        with BigMessageSizeQueue(open_queue[0], f"file://{tmp_path}", "bucket") as queue:
            queue.putMessage(Message("x" * 100_000))
            message = queue.popMessage(10)
            assert message is not None
            assert message.getMessageBody() == "x" * 100_000
            queue.deleteMessage(message.getReceiptHandle())

    def test_security_queue(self, open_queue: tuple[Any, str]) -> None:
        with SecurityQueue(open_queue[0], SecurityKeyGenerator.generate()) as queue:
            queue.putMessage(Message("the password"))
            message = queue.popMessage(10)
            assert message is not None
            assert message.getMessageBody() == "the password"


@pytest.mark.slow
def test_the_manager_takes_the_messages_of_an_sdk(server: LocalServer, undo: ExitStack) -> None:
    """Their leases are of an unknown length: the first extension is at once."""
    queue = mns_queue(server, "sdk-messages", undo)
    queue.send_message(SdkMessage("hello"))
    message = queue.receive_message(5)
    with Manager(queue, 1, 1, 60) as manager:
        lease = manager.RegisterMessage(message)
        assert lease.remaining() > 50
        assert lease.handle != message.receipt_handle
        manager.DeleteMessage(message)
    assert server.connect("sdk-messages").stats().in_flight == 0


class TestStacked:
    """A class of the documents over another one."""

    def test_encrypted_over_large_over_a_queue(self, account: Account, tmp_path: Path) -> None:
        plain = made(account, "stack")
        large = BigMessageSizeQueue(CloudQueue(plain), f"file://{tmp_path}", "bucket")
        queue = SecurityQueue(large, SecurityKeyGenerator.generate())
        large.setBigMessageSize(100)  # after the other class took it
        queue.putMessage(Message("x" * 10_000))
        assert len(plain.peek()[0].body) < 1_000
        with Manager(queue, 1, 1, 5) as manager:
            message = MessageReceiver(queue).receiveMessage(5)
            assert message is not None
            assert message.getMessageBody() == "x" * 10_000
            manager.RegisterMessage(message)
            manager.DeleteMessage(message)
        assert plain.stats().in_flight == 0

    @for_each("wrong", ["jobs", object(), None])
    def test_what_is_no_queue_is_refused(self, wrong: Any) -> None:
        with pytest.raises(ParameterInvalid):
            CloudQueue(wrong)


class TestArguments:
    """As many as the documents' listings have."""

    def test_a_message_whose_object_is_missing_comes_again(self, embedded: EmbeddedClient, tmp_path: Path) -> None:
        cq = made(embedded.account, "big")
        queue = BigMessageSizeQueue(cq, f"file://{tmp_path}", "bucket")
        queue.setBigMessageSize(10)
        queue.putMessage(Message("x" * 100))
        for path in (tmp_path / "bucket").rglob("*"):
            if path.is_file():
                path.unlink()
        assert queue.popMessage() is None
        embedded.pass_time(31)
        assert cq.stats().visible == 1

    def test_more_than_64_kib_goes_by_the_object_store(self, account: Account, tmp_path: Path) -> None:
        queue = BigMessageSizeQueue(made(account, "big"), f"file://{tmp_path}", "bucket")
        queue.putMessage(Message("x" * 65_536))
        assert not (tmp_path / "bucket").exists()
        queue.putMessage(Message("x" * 65_537))
        assert any(path.is_file() for path in (tmp_path / "bucket").rglob("*"))

    def test_plain_text_in_an_encrypted_queue_comes_again(self, embedded: EmbeddedClient) -> None:
        plain = made(embedded.account, "secret")
        queue = SecurityQueue(plain, SecurityKeyGenerator.generate())
        plain.send("not encrypted")
        queue.putMessage(Message("encrypted"))
        message = queue.popMessage()
        assert message is not None
        assert message.getMessageBody() == "encrypted"
        embedded.pass_time(31)
        assert plain.stats().visible == 2

    def test_a_key_of_each_algorithm(self, account: Account, tmp_path: Path) -> None:
        plain = made(account, "secret")
        key = SecurityKeyGenerator.generateToFile(tmp_path / "keys", "A128GCM")
        queue = SecurityQueue(plain, key)
        queue.putMessage(Message("first"))
        SecurityKeyGenerator.generateToFile(tmp_path / "keys", "A256CBC-HS512")
        queue.putMessage(Message("second"))
        bodies = [message.getMessageBody() for _ in range(2) if (message := queue.popMessage())]
        assert sorted(bodies) == ["first", "second"]

    def test_one_algorithm_alone(self, account: Account) -> None:
        key = SecurityKeyGenerator.generate("A128GCM")
        SecurityQueue(made(account, "a"), key, algorithm="A128GCM")
        with pytest.raises(ParameterInvalid):
            SecurityQueue(made(account, "b"), key, algorithm="A256GCM")

    def test_a_delay_of_one_message(self, embedded: EmbeddedClient) -> None:
        queue = CloudQueue(made(embedded.account, "later"))
        message = Message("later")
        message.setDelaySeconds(60)
        queue.putMessage(message)
        assert queue.popMessage() is None
        embedded.pass_time(60)
        assert queue.popMessage() is not None

    @pytest.mark.slow
    def test_a_message_of_the_sdk_keeps_its_delay(self, server: LocalServer) -> None:
        queue = CloudQueue(server.connect("sdk-delay"))
        queue.putMessage(SdkMessage("now"))
        queue.putMessage(SdkMessage("later", delay_seconds=60))
        stats = queue.queue.stats()
        assert (stats.visible, stats.delayed) == (1, 1)

    def test_peek_and_delete(self, account: Account) -> None:
        queue = CloudQueue(made(account, "short"))
        assert queue.peekMessage() is None
        queue.putMessage(Message("hello"))
        peeked = queue.peekMessage()
        assert peeked is not None
        assert (peeked.getMessageBody(), peeked.getReceiptHandle()) == ("hello", "")
        queue.delete()
        assert account.names() == []


class TestTask:
    """ChangeVisibilityTask: one look, as in the document's flowchart."""

    def test_it_changes_the_visibility_when_that_is_due_and_only_then(self, embedded: EmbeddedClient) -> None:
        queue = made(embedded.account, "jobs")
        queue.send("work")
        # The manager's own clock stands still, so that only the task looks.
        manager = Manager(queue, 5, 10, 60)
        (message,) = queue.receive(lease=60)
        lease = manager.RegisterMessage(message)
        assert not ChangeVisibilityTask(manager, message).Run()
        lease.extend(12)
        assert manager.ChangeMessageVisibility(message)
        assert lease.remaining() > 50
        manager.DeleteMessage(message)
        assert not manager.ChangeMessageVisibility(message)
        manager.close()

    def test_a_message_that_was_let_go_can_be_deleted_unless_somebody_has_it(self, embedded: EmbeddedClient) -> None:
        queue = made(embedded.account, "jobs")
        queue.send_batch(["kept", "taken"])
        manager = Manager(queue, 1, 1, 5, MessageTimeout=2, clock=embedded.clock)
        kept, taken = (Message.of(each) for each in queue.receive(2, lease=5))
        for message in (kept, taken):
            manager.RegisterMessage(message)
        embedded.pass_time(6)
        manager.keeper.extend_due()
        assert manager.held(kept) is None
        manager.DeleteMessage(kept)
        (again,) = queue.receive()
        assert again.body == "taken"
        with pytest.raises(LeaseTaken):
            manager.DeleteMessage(taken)
        manager.close()

    def test_leases_that_ended_are_forgotten(self, account: Account) -> None:
        queue = made(account, "jobs")
        with Manager(queue, 1, 1, 5) as manager:
            for _ in range(20):
                queue.send("work")
                (message,) = queue.receive(lease=5)
                manager.RegisterMessage(message).delete()
            assert len(manager._leases) <= 2


class TestExceptions:
    """`catch (ClientException ce)`, `catch (ServiceException se)`."""

    def test_what_the_service_refuses(self, account: Account, capsys: pytest.CaptureFixture[str]) -> None:
        client = MNSClient(account)
        with pytest.raises(ServiceException) as caught:
            client.getQueueRef("missing")
        assert isinstance(caught.value, QueueMissing)
        assert not isinstance(caught.value, ClientException)
        assert caught.value.getErrorCode() == "QueueNotExist"
        assert caught.value.queue == "missing"
        caught.value.printStackTrace()
        assert "no queue missing" in capsys.readouterr().err

    def test_a_handle_that_is_not_current(self, embedded: EmbeddedClient) -> None:
        queue = CloudQueue(made(embedded.account, "jobs"))
        queue.putMessage(Message("work"))
        message = queue.popMessage()
        assert message is not None
        embedded.pass_time(31)
        assert queue.popMessage() is not None
        with pytest.raises(ServiceException) as caught:
            queue.deleteMessage(message.getReceiptHandle())
        assert caught.value.getErrorCode() == "MessageNotExist"

    def test_a_network_that_fails(self) -> None:
        client = CloudAccount("id", "secret", "http://127.0.0.1:9").getMNSClient()
        with pytest.raises(ClientException) as caught:
            client.getQueueRef("jobs")
        assert isinstance(caught.value, TransportError)
        assert not isinstance(caught.value, ServiceException)
        assert caught.value.getErrorCode() == "NetworkError"

    def test_what_concerns_this_machine_alone_is_neither(self, account: Account, tmp_path: Path) -> None:
        queue = made(account, "jobs")
        config = {"localFileName": str(tmp_path / "numbers")}
        with OrderedQueueWrapper(queue, LocalDiskStorage(config)), pytest.raises(StorageHeld) as caught:
            OrderedQueueWrapper(queue, LocalDiskStorage(config))
        assert not isinstance(caught.value, (ClientException, ServiceException))

    def test_they_can_be_sent_to_another_process(self, account: Account) -> None:
        with pytest.raises(ServiceException) as caught:
            MNSClient(account).getQueueRef("missing")
        again = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(again, ServiceException)
        assert again == caught.value


class TestSettings:
    """The file of the documents' SDK."""

    def test_endpoint_and_key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "settings"
        file.write_text(
            "# the account\nmns.accountendpoint=http\\://host\\:80/\n"
            " mns.accesskeyid : an id\nmns.accesskeysecret=x=y\n"
        )
        monkeypatch.setattr(ServiceSettings, "path", file)
        assert ServiceSettings.getMNSAccountEndpoint() == "http://host:80/"
        assert ServiceSettings.getMNSAccessKeyId() == "an id"
        assert ServiceSettings.getMNSAccessKeySecret() == "x=y"
        file.write_text("mns.accesskeyid=an id\n")
        with pytest.raises(ParameterInvalid, match=r"mns\.accesskeysecret"):
            ServiceSettings.getMNSAccessKeySecret()
        file.unlink()
        with pytest.raises(ParameterInvalid, match="cannot be read"):
            ServiceSettings.getMNSAccessKeyId()


@pytest.mark.slow
class TestEndpoints:
    """Endpoints and waits as the listings have them."""

    @pytest.fixture
    def told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(queues, "_logged", set())

    @pytest.mark.parametrize("slash", ["", "/"])
    def test_http_is_mns(self, server: LocalServer, slash: str) -> None:
        client = CloudAccount("id", "secret", server.mns_url + slash).getMNSClient()
        client.createQueue(meta("by-http", 30)).putMessage(Message("hello"))
        message = client.getQueueRef("by-http").popMessage(30)
        assert message is not None
        assert message.getMessageBody() == "hello"
        client.getQueueRef("by-http").deleteMessage(message.getReceiptHandle())
        client.close()

    def test_https_is_mns_with_tls(self, server: LocalServer) -> None:
        client = CloudAccount("id", "secret", server.mns_url.replace("http://", "https://")).getMNSClient()
        with pytest.raises(ClientException, match="speaks no TLS"):
            client.getQueueRef("jobs")

    @pytest.mark.parametrize("scheme", ["veil", "sqs", "azure", "mns"])
    def test_a_wait_of_30_s(
        self,
        server: LocalServer,
        scheme: str,
        told: None,
        caplog: pytest.LogCaptureFixture,
        tmp_path: Path,
    ) -> None:
        port = {"veil": server.sqs_url, "sqs": server.sqs_url, "azure": server.azure_url, "mns": server.mns_url}
        path = "/devstoreaccount1/" if scheme == "azure" else ""
        tls = "" if scheme == "veil" else "?tls=0"
        key, secret = ("", "") if scheme == "azure" else ("id", "secret")
        endpoint = f"{scheme}://{urlsplit(port[scheme]).netloc}{path}{tls}"
        with CloudAccount(key, secret, endpoint, f"file://{tmp_path}/topics").getMNSClient() as client:
            queue = client.createQueue(meta(f"waits-{scheme}", 30))
            dead = client.createQueue(meta(f"dead-{scheme}", 30))
            topic = TopicMeta()
            topic.setTopicName(f"topic-{scheme}")
            client.createPullTopic(topic, [f"pull-{scheme}"], True, meta("", 30))
            secure = SecurityQueue(queue, SecurityKeyGenerator.generate(), dead)
            large = BigMessageSizeQueue(dead, f"file://{tmp_path}", "bucket")
            for each in (secure, large):
                each.putMessage(Message("hello"))
                assert each.popMessage(30) is not None
            dead.putMessage(Message("again"))
            assert MessageReceiver(dead).receiveMessage(30) is not None
        lines = [record.getMessage() for record in caplog.records if record.name == "veilmq.documents"]
        assert sum("30 s is lowered to that" in line for line in lines) == {"veil": 1, "sqs": 2}.get(scheme, 0)
        assert len(lines) == len(set(lines))


class Checker:
    """Says that everything was done."""

    def checkTransactionStatus(self, message: Message) -> bool:
        return True


class TestTransQueue:
    """createTransQueue."""

    def test_the_timeout_of_the_operation(self, account: Account) -> None:
        with MNSClient(account).createTransQueue(meta("trans"), Checker(), 90) as queue:
            assert queue.queue.times.asked_after == 90
            assert queue.queue.log.stats().visible == 0

    @for_each("timeout", [0, -1, 90 * 24 * 3_600, "soon"])
    def test_a_timeout_that_cannot_be_leaves_nothing_behind(self, account: Account, timeout: Any) -> None:
        with pytest.raises(ParameterInvalid):
            MNSClient(account).createTransQueue(meta("trans"), Checker(), timeout)
        assert account.names() == []

    def test_what_it_did_not_make_stays(self, account: Account) -> None:
        made(account, "trans")
        with pytest.raises(ParameterInvalid):
            MNSClient(account).createTransQueue(meta("trans"), object())  # type: ignore[arg-type]
        assert account.names() == ["trans"]

    def test_a_queue_with_other_settings(self, account: Account) -> None:
        made(account, "trans")
        settings = meta("trans")
        settings.setVisibilityTimeout(77)
        with pytest.raises(ServiceException) as caught:
            MNSClient(account).createTransQueue(settings, Checker())
        assert caught.value.getErrorCode() == "QueueAlreadyExist"
        assert account.names() == ["trans"]

    @pytest.mark.slow
    def test_a_life_beyond_the_delay_on_mns(self, server: LocalServer) -> None:
        client = CloudAccount("id", "secret", server.mns_url).getMNSClient()
        settings = meta("refused")
        settings.setMessageRetentionPeriod(7 * 24 * 3_600)
        with pytest.raises(ParameterInvalid, match="half messages appear"):
            client.createTransQueue(settings, Checker())
        assert [name for name in client.account.names() if name.startswith("refused")] == []
        client.close()


def test_the_clock_of_a_received_message_is_this_machines() -> None:
    """An SDK's message has no lease by our clock: it counts as over, whatever the clocks say."""

    class Foreign:
        message_id, receipt_handle, message_body = "1", "handle", "body"

    assert received_of(Foreign()).lease_end <= SYSTEM.monotonic()
    with pytest.raises(ParameterInvalid):
        received_of(Message("never received"))
