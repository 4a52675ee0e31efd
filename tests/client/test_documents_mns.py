"""The documents' demos of pull topics and transactions over MNS itself, with only the import changed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from veilmq.client.documents import (
    CloudAccount,
    Message,
    MNSClient,
    QueueMeta,
    RawTopicMessage,
    TopicMeta,
)
from veilmq.client.topics import Form
from veilmq.model.errors import QueueMissing
from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow


@pytest.fixture
def client(server: LocalServer, tmp_path: Path) -> Iterator[MNSClient]:
    server.reset()
    endpoint = f"mns://{urlsplit(server.process.mns).netloc}?tls=0"
    client = CloudAccount("id", "secret", endpoint, f"file://{tmp_path}/topics").getMNSClient()
    yield client
    client.close()


def test_one_to_many_by_pull(client: MNSClient) -> None:
    """Seed 002, CloudPullTopicDemo. The topic is one of MNS."""
    consumerNameList = ["consumer001", "consumer002", "consumer003"]
    queueMetaTemplate = QueueMeta()
    queueMetaTemplate.setPollingWaitSeconds(20)
    topicMeta = TopicMeta()
    topicMeta.setTopicName("demo-topic-for-pull")
    pullTopic = client.createPullTopic(topicMeta, consumerNameList, True, queueMetaTemplate)
    there: Any = client.account
    assert len(there.topics().subscriptions("demo-topic-for-pull")) == 3
    assert pullTopic.topic._definition.form is Form.NATIVE
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


def test_transaction_messages(server: LocalServer, client: MNSClient) -> None:
    """Seed 002, TransactionMessageDemo: half messages hidden by their delay."""
    seen: list[str] = []

    class MyTransactionChecker:
        def checkTransactionStatus(self, message: Message) -> bool:
            return True

    class MyTransactionOperations:
        def doTransaction(self, message: Message) -> bool:
            seen.append(message.getMessageBody())
            return message.getMessageBody() == "TransactionMessageDemo"

    queueMeta = QueueMeta()
    queueMeta.setQueueName("transQueueName")
    queueMeta.setPollingWaitSeconds(15)
    transQueue = client.createTransQueue(queueMeta, MyTransactionChecker())
    assert transQueue.queue.form == "hidden"
    msg = Message()
    msg.setMessageBody("TransactionMessageDemo")
    assert transQueue.sendTransMessage(msg, MyTransactionOperations())
    assert not transQueue.sendTransMessage(Message("never"), MyTransactionOperations())
    server.advance(seconds=2)
    message = transQueue.popMessage()
    assert message is not None
    assert message.getMessageBody() == "TransactionMessageDemo"
    transQueue.deleteMessage(message.getReceiptHandle())
    assert transQueue.popMessage() is None
    assert seen == ["TransactionMessageDemo", "never"]
    transQueue.delete()
    assert client.account.names() == []
