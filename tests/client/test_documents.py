"""The documents' listings, with only the import changed, over embedded queues and line for line."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.documents import (
    BigMessageSizeQueue,
    CloudAccount,
    LocalDiskStorage,
    Manager,
    Message,
    MessageReceiver,
    MNSClient,
    OrderedQueueWrapper,
    QueueMeta,
    RawTopicMessage,
    SecurityKeyGenerator,
    SecurityQueue,
    TopicMeta,
    accounts,
)
from veilmq.client.queue import Account, Queue
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.testing.disordered import Disordered


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    client = EmbeddedClient(tmp_path / "data")
    yield client.account
    client.account.close()


def made(account: Account, name: str) -> Queue:
    account.create(name)
    return account.queue(name)


class TestPullTopic:
    """Seed 002, "one to many by pull"."""

    def test_definitions_are_kept_where_no_other_user_writes_them(
        self, account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = tmp_path / "veilmq-pull-topics"
        monkeypatch.setattr(accounts, "DEFINITIONS_DEFAULT", place)
        place.mkdir()
        place.chmod(0o777)
        client = MNSClient(account)
        meta = TopicMeta()
        meta.setTopicName("news")
        with pytest.raises(ParameterInvalid, match="definitions"):
            client.createPullTopic(meta, ["a"], True, QueueMeta())
        place.rmdir()
        client.createPullTopic(meta, ["a"], True, QueueMeta())
        assert place.stat().st_mode & 0o077 == 0

    def test_the_demo(self, account: Account, tmp_path: Path) -> None:
        client = MNSClient(account, f"file://{tmp_path}/topics")
        consumerNameList = ["consumer001", "consumer002", "consumer003"]
        queueMetaTemplate = QueueMeta()
        queueMetaTemplate.setPollingWaitSeconds(20)
        topicMeta = TopicMeta()
        topicMeta.setTopicName("demo-topic-for-pull")
        pullTopic = client.createPullTopic(topicMeta, consumerNameList, True, queueMetaTemplate)
        tMessage = RawTopicMessage()
        tMessage.setBaseMessageBody("broadcast message to all the consumers:hello the world.")
        pullTopic.publishMessage(tMessage)
        for name in consumerNameList:
            message = client.getQueueRef(name).popMessage(30)
            assert message is not None
            assert message.getMessageBodyAsRawString() == "broadcast message to all the consumers:hello the world."
            client.getQueueRef(name).deleteMessage(message.getReceiptHandle())
        pullTopic.delete()
        with pytest.raises(QueueMissing):
            client.getQueueRef("consumer001")

    def test_the_second_form_keeps_the_queues_that_were_there(self, account: Account, tmp_path: Path) -> None:
        made(account, "mine")
        client = MNSClient(account, f"file://{tmp_path}/topics")
        topicMeta = TopicMeta()
        topicMeta.setTopicName("demo")
        client.createPullTopic(topicMeta, ["mine"]).delete()
        assert account.names() == ["mine"]


class TestOrdered:
    """Seed 002, "strict order"."""

    def test_twenty_messages_through_a_disordered_queue(self, account: Account, tmp_path: Path) -> None:
        myQueue = Disordered(made(account, "ordered"), window=3)
        sendConfig = {"localFileName": str(tmp_path / "mns_send_message_seq_id")}
        orderedQueue = OrderedQueueWrapper(myQueue, sendSeqIdPersistStorage=LocalDiskStorage(sendConfig))
        for number in range(20):
            orderedQueue.SendMessageInOrder(Message(str(number)))
        receiveConfig = {"localFileName": str(tmp_path / "mns_receive_message_seq_id")}
        receiving = OrderedQueueWrapper(myQueue, receiveSeqIdPersistStorage=LocalDiskStorage(receiveConfig))
        bodies = []
        while (recv_msg := receiving.ReceiveMessageInOrder(1)) is not None:
            bodies.append(recv_msg.getMessageBody())
        assert bodies == [str(number) for number in range(20)]
        assert made(account, "ordered").stats().visible == 0
        orderedQueue.close()
        receiving.close()

    def test_an_acknowledgement_that_failed_is_made_with_the_next_receive(
        self, account: Account, tmp_path: Path
    ) -> None:
        queue = made(account, "ordered")
        storage = LocalDiskStorage({"localFileName": str(tmp_path / "numbers")})
        with (
            OrderedQueueWrapper(
                queue, sendSeqIdPersistStorage=LocalDiskStorage({"localFileName": f"{tmp_path}/s"})
            ) as out,
            OrderedQueueWrapper(queue, receiveSeqIdPersistStorage=storage) as orderedQueue,
        ):
            for body in ("first", "second"):
                out.SendMessageInOrder(body)
            assert orderedQueue.ReceiveMessageInOrder() is not None
            storage.path = tmp_path / "unmounted" / "numbers"
            with pytest.raises(OSError, match="unmounted"):
                orderedQueue.ReceiveMessageInOrder()
            storage.path = tmp_path / "numbers"
            second = orderedQueue.ReceiveMessageInOrder()
            assert second is not None
            assert second.getMessageBody() == "second"

    def test_a_plain_queue_would_not(self, account: Account) -> None:
        queue = Disordered(made(account, "common"), window=3)
        queue.send_batch([str(number) for number in range(1, 11)])
        bodies = [found[0].body for _ in range(10) if (found := queue.receive())]
        assert sorted(bodies, key=int) == [str(number) for number in range(1, 11)]
        assert bodies != sorted(bodies, key=int)


class TestSecurity:
    """Seed 002, "encrypted transfer"."""

    def test_what_is_put_comes_out_and_is_not_readable_between(self, account: Account, tmp_path: Path) -> None:
        plain, dead = made(account, "secret"), made(account, "dead")
        key = SecurityKeyGenerator.generateToFile(tmp_path / "key.json")
        queue = SecurityQueue(plain, key, dead)
        queue.putMessage(Message("the password"))
        plain.send("not encrypted")
        assert "password" not in plain.peek()[0].body
        message = queue.popMessage()
        assert message is not None
        assert message.getMessageBody() == "the password"
        queue.deleteMessage(message.getReceiptHandle())
        assert queue.popMessage() is None
        assert dead.stats().visible == 1


class TestBigMessages:
    """Seed 002, "messages beyond 64 KiB"."""

    def test_a_large_body_goes_by_the_object_store(self, account: Account, tmp_path: Path) -> None:
        cq, dead = made(account, "big"), made(account, "dead")
        queue = BigMessageSizeQueue(cq, f"file://{tmp_path}", "bucket", dead)
        queue.setBigMessageSize(1_000)
        queue.putMessage(Message("x" * 100_000))
        assert len(cq.peek()[0].body) < 1_000
        message = queue.popMessage(1)
        assert message is not None
        assert len(message.getMessageBody()) == 100_000
        queue.setNeedDeleteMessageObjectOnOSSFlag(False)
        queue.deleteMessage(message.getReceiptHandle())
        assert any(path.is_file() for path in (tmp_path / "bucket").rglob("*"))


class TestTransactions:
    """Seed 002, "transaction messages"."""

    def test_the_demo(self, account: Account, tmp_path: Path) -> None:
        class MyTransactionChecker:
            def checkTransactionStatus(self, message: Message) -> bool:
                return True

        class MyTransactionOperations:
            def __init__(self, result: bool) -> None:
                self.result = result
                self.seen: list[str] = []

            def doTransaction(self, message: Message) -> bool:
                self.seen.append(message.getMessageBody())
                return self.result

        client = MNSClient(account, f"file://{tmp_path}/topics")
        queueMeta = QueueMeta()
        queueMeta.setQueueName("transQueueName")
        queueMeta.setPollingWaitSeconds(15)
        transQueue = client.createTransQueue(queueMeta, MyTransactionChecker())
        done, undone = MyTransactionOperations(True), MyTransactionOperations(False)
        msg = Message()
        msg.setMessageBody("TransactionMessageDemo")
        assert transQueue.sendTransMessage(msg, done)
        assert not transQueue.sendTransMessage(Message("never"), undone)
        message = transQueue.popMessage()
        assert message is not None
        assert message.getMessageBody() == "TransactionMessageDemo"
        transQueue.deleteMessage(message.getReceiptHandle())
        assert transQueue.popMessage() is None
        assert (done.seen, undone.seen) == (["TransactionMessageDemo"], ["never"])
        transQueue.delete()
        assert account.names() == []


class TestManager:
    """Seeds 000 and 002, "processing time that adapts"."""

    def test_a_registered_message_is_held_until_it_is_deleted(self, account: Account) -> None:
        queue = made(account, "jobs")
        queue.send("long work")
        manager = Manager(queue, MessageMinimalLife=1, TimerInterval=1, QueueMessageVisibilityTimeout=5)
        (received,) = queue.receive(lease=5)
        message = Message.of(received)
        lease = manager.RegisterMessage(message)
        assert lease.remaining() > 0
        manager.DeleteMessage(message)
        assert queue.stats().in_flight == 0
        manager.close()

    def test_a_timeout_that_cannot_hold_is_refused(self, account: Account) -> None:
        with pytest.raises(ParameterInvalid):
            Manager(made(account, "jobs"), MessageMinimalLife=10, TimerInterval=10, QueueMessageVisibilityTimeout=20)


class TestMessageReceiver:
    """Seed 002, "long polling"."""

    def test_threads_with_receivers_of_their_own_share_one_poll(self, account: Account) -> None:
        queue = made(account, "jobs")
        got: list[str] = []

        def work() -> None:
            receiver = MessageReceiver(queue)
            while (message := receiver.receiveMessage(1)) is not None:
                got.append(message.getMessageBody())
                queue.delete(message.getReceiptHandle())

        threads = [threading.Thread(target=work) for _ in range(20)]
        for thread in threads:
            thread.start()
        queue.send_batch([str(number) for number in range(50)])
        for thread in threads:
            thread.join()
        assert sorted(got, key=int) == [str(number) for number in range(50)]


def test_an_account_is_an_endpoint_with_its_key(tmp_path: Path) -> None:
    client = CloudAccount("", "", f"veil:///{tmp_path}/data?create=1").getMNSClient()
    queueMeta = QueueMeta()
    queueMeta.setQueueName("jobs")
    queueMeta.setVisibilityTimeout(60)
    queue = client.createQueue(queueMeta)
    queue.putMessage(Message("hello"))
    message: Any = queue.popMessage()
    handle = queue.changeMessageVisibilityTimeout(message.getReceiptHandle(), 30)
    queue.deleteMessage(handle)
    client.close()


def test_a_secret_of_the_account_is_in_no_error() -> None:
    with pytest.raises(ParameterInvalid) as caught:
        CloudAccount("id", "verysecret", "nonsense://host:1").getMNSClient()
    assert "verysecret" not in str(caught.value)
