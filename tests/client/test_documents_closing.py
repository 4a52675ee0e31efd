"""A class of the documents closes what it opened, and leaves open what the caller handed over."""

from collections.abc import Callable
from pathlib import Path

import boto3
import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.documents import (
    BigMessageSizeQueue,
    CloudPullTopic,
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
    TopicMeta,
    TransactionQueue,
)
from veilmq.client.errors import TransportError
from veilmq.client.messages import Template
from veilmq.client.queue import Queue, is_closed
from veilmq.client.shared.lifetimes import Closing
from veilmq.client.topics import create_pull_topic
from veilmq.testing.client_contract import for_each
from veilmq.testing.local import LocalServer

Make = Callable[[Queue, Queue, Path], Closing]


def ordered(queue: Queue, other: Queue, place: Path) -> Closing:
    sends, receives = (LocalDiskStorage({"localFileName": f"{place}/{side}"}) for side in ("send", "receive"))
    made = OrderedQueueWrapper(queue, sends, receives)
    made.SendMessageInOrder("first")
    return made


class Checker:
    """Says that everything was done."""

    def checkTransactionStatus(self, message: Message) -> bool:
        return True


MAKE: dict[str, Make] = {
    "CloudQueue": lambda queue, other, place: CloudQueue(queue),
    "CloudQueue over CloudQueue": lambda queue, other, place: CloudQueue(CloudQueue(queue)),
    "SecurityQueue": lambda queue, other, place: SecurityQueue(queue, SecurityKeyGenerator.generate(), None, other),
    "BigMessageSizeQueue": lambda queue, other, place: BigMessageSizeQueue(queue, f"file://{place}", "bucket", other),
    "OrderedQueueWrapper": ordered,
    "Manager": lambda queue, other, place: Manager(queue, 1, 1, 5),
    "MessageReceiver": lambda queue, other, place: MessageReceiver(queue),
    "TransactionQueue": lambda queue, other, place: TransactionQueue(queue.account, queue, other, Checker()),
    "MNSClient": lambda queue, other, place: MNSClient(queue.account),
}


@for_each("name", MAKE)
def test_the_callers_queues_stay_open(embedded: EmbeddedClient, tmp_path: Path, name: str) -> None:
    account = embedded.account
    account.create("jobs", Template(retention=2 * 24 * 3_600 - 60))
    account.create("other")
    queue, other = account.queue("jobs"), account.queue("other")
    with MAKE[name](queue, other, tmp_path):
        pass
    queue.send("still here")
    other.send("still here")
    assert account.names() == ["jobs", "other"]


def test_the_callers_topic_stays_open(embedded: EmbeddedClient, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/topics"
    with create_pull_topic(embedded.account, "news", ["jobs"], definitions=where, create_queues=True) as topic:
        topic.publish("first")
        CloudPullTopic(topic).close()
        assert topic._queues
        assert not any(map(is_closed, topic._queues.values()))


def test_a_receiver_beside_it_goes_on(embedded: EmbeddedClient) -> None:
    embedded.account.create("jobs")
    cloud = CloudQueue(embedded.account.queue("jobs"))
    first, second = MessageReceiver(cloud), MessageReceiver(cloud)
    first.close()
    SecurityQueue(cloud, SecurityKeyGenerator.generate()).close()
    cloud.putMessage(Message("hello"))
    assert second.receiveMessage(5) is not None
    assert first.receiveMessage(5) is None
    second.close()


def test_what_a_client_of_the_documents_opened_is_closed(embedded: EmbeddedClient, tmp_path: Path) -> None:
    embedded.account.create("jobs")
    client = MNSClient(embedded.account, f"file://{tmp_path}/topics")
    meta, topic_meta = QueueMeta(), TopicMeta()
    meta.setQueueName("trans")
    topic_meta.setTopicName("news")
    queue, trans = client.getQueueRef("jobs"), client.createTransQueue(meta, Checker())
    topic = client.createPullTopic(topic_meta, ["jobs"])
    for each in (queue, trans, topic):
        each.close()
    with pytest.raises(TransportError):
        queue.putMessage(Message("too late"))
    assert is_closed(trans.queue.log)
    assert all(map(is_closed, topic.topic._queues.values()))


@pytest.mark.slow
def test_what_was_opened_over_an_sdks_queue_is_closed(server: LocalServer) -> None:
    keys = {"aws_access_key_id": "id", "aws_secret_access_key": "secret"}
    service = boto3.resource("sqs", "us-east-1", endpoint_url=server.sqs_url, **keys)
    theirs, dead = (service.create_queue(QueueName=name) for name in ("theirs", "dead"))
    queue = SecurityQueue(theirs, SecurityKeyGenerator.generate(), dead)
    opened = [queue.queue.inner, queue._dead_letters]
    assert not any(map(is_closed, opened))
    queue.close()
    assert all(map(is_closed, opened))
    theirs.send_message(MessageBody="still here")
    service.meta.client.close()
