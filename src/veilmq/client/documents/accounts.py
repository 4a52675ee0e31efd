"""CloudAccount, MNSClient, CloudQueue and CloudPullTopic of the documents' Java listings.

Strategy: an endpoint is any URL that `veilmq.client.connect.connect_account` takes (`veil://`, `sqs://`, `mns://`, a
directory's `veil:///`); the access key fills in where the URL has none. A pull topic's list of queues is kept in the
directory or store that `definitions` names, by default one of this user's.
"""

from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from veilmq.client.closing import Closing
from veilmq.client.connect import connect_account
from veilmq.client.documents.messages import Message, QueueMeta, TopicMessage, TopicMeta
from veilmq.client.documents.transactions import TransactionChecker, TransactionQueue
from veilmq.client.messages import Message as Outgoing
from veilmq.client.own_directory import make_own, own_path
from veilmq.client.queue import Account, Queue
from veilmq.client.topics import PullTopic, create_pull_topic
from veilmq.client.transaction import Form, Times
from veilmq.client.transaction.parameters import form_for
from veilmq.model.errors import ParameterInvalid

DEFINITIONS_DEFAULT: Final = own_path("veilmq-pull-topics")
_LOG_SUFFIX: Final = "-operation-log"


class CloudQueue(Closing):
    """A queue by the documents' names: ours, `queue`, with putMessage, popMessage and deleteMessage."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def putMessage(self, message: Message) -> Message:
        """Send; the message with its id."""
        sent = self.queue.send(message.message_body)
        message.message_id = sent.id
        message.receipt_handle = sent.handle or ""
        return message

    def popMessage(self, waitSeconds: float = 0) -> Message | None:
        """Receive one, waiting up to so long; None if nothing came (the SDK's MessageNotExist)."""
        found = self.queue.receive(wait=min(waitSeconds, self.queue.capabilities.wait_max))
        return Message.of(found[0]) if found else None

    def deleteMessage(self, receiptHandle: str) -> None:
        """Done with it."""
        self.queue.delete(receiptHandle)

    def changeMessageVisibilityTimeout(self, receiptHandle: str, visibilityTimeout: float) -> str:
        """The lease ends so many seconds from now; the handle to use next."""
        return self.queue.extend(receiptHandle, visibilityTimeout)

    def close(self) -> None:
        """Let its connections go."""
        self.queue.close()


class CloudPullTopic(Closing):
    """One message to many queues (document 002): ours, `topic`."""

    def __init__(self, topic: PullTopic) -> None:
        self.topic = topic

    def publishMessage(self, message: TopicMessage) -> TopicMessage:
        """A copy to every queue."""
        self.topic.publish(Outgoing(message.message_body, tag=message.message_tag))
        return message

    def delete(self) -> None:
        """The topic, and the queues that it created: not, as in the sample, those that were there before."""
        self.topic.delete()

    def close(self) -> None:
        """Let its queues' connections go."""
        self.topic.close()


class MNSClient(Closing):
    """Queues and topics of one account: ours, `account`."""

    def __init__(self, account: Account, definitions: str | None = None) -> None:
        self.account = account
        self._definitions = definitions

    def createQueue(self, queueMeta: QueueMeta) -> CloudQueue:
        """Make sure that the queue exists."""
        self.account.create(queueMeta.queue_name, queueMeta.template())
        return self.getQueueRef(queueMeta.queue_name)

    def getQueueRef(self, queueName: str) -> CloudQueue:
        """A queue that exists. Raises QueueMissing."""
        return CloudQueue(self.account.queue(queueName))

    def createPullTopic(
        self,
        topicMeta: TopicMeta,
        queueNameList: list[str],
        needCreateQueue: bool = False,
        queueMetaTemplate: QueueMeta | None = None,
    ) -> CloudPullTopic:
        """A topic over these queues; both forms of the document. All of it is made, or nothing."""
        topic = create_pull_topic(
            self.account,
            topicMeta.topic_name,
            queueNameList,
            definitions=self._definitions or _own_definitions(),
            create_queues=needCreateQueue,
            template=None if queueMetaTemplate is None else queueMetaTemplate.template(),
        )
        return CloudPullTopic(topic)

    def createTransQueue(self, queueMeta: QueueMeta, checker: TransactionChecker) -> TransactionQueue:
        """A transaction queue with its log, and the checker at work."""
        name = queueMeta.queue_name + _LOG_SUFFIX
        self.account.create(name)
        log = self.account.queue(name)
        template = queueMeta.template()
        if form_for(None, log.capabilities) is Form.HIDDEN and not log.capabilities.ttl and template.retention is None:
            # A half message ends with its queue's retention, which the document's SDK sets.
            template = msgspec.structs.replace(template, retention=Times().half_life)
        self.account.create(queueMeta.queue_name, template)
        return TransactionQueue(self.account, self.account.queue(queueMeta.queue_name), log, checker)

    def close(self) -> None:
        """Let connections go."""
        self.account.close()


def _own_definitions() -> str:
    """Raises ParameterInvalid if the default cannot be used."""
    try:
        make_own(DEFINITIONS_DEFAULT)
    except OSError as error:
        reason = f"name a place: the default, {DEFINITIONS_DEFAULT}, cannot be used ({error.strerror})"
        raise ParameterInvalid(parameter="definitions", reason=reason) from None
    return f"file://{DEFINITIONS_DEFAULT}"


class CloudAccount:
    """An account by its access key and endpoint."""

    def __init__(self, accessKeyId: str, accessKeySecret: str, endpoint: str, definitions: str | None = None) -> None:
        """definitions: URL of the place where pull topics are written down; see docs/patterns/pull-topic.md."""
        parts = urlsplit(endpoint)
        if accessKeyId and parts.netloc and "@" not in parts.netloc:
            user = f"{quote(accessKeyId, safe='')}:{quote(accessKeySecret, safe='')}"
            endpoint = urlunsplit(parts._replace(netloc=f"{user}@{parts.netloc}"))
        self._endpoint = endpoint
        self._definitions = definitions

    def getMNSClient(self) -> MNSClient:
        """A client; initialise it once."""
        return MNSClient(connect_account(self._endpoint), self._definitions)
