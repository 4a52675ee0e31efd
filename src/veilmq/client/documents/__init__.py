"""The source documents' own names, over our patterns: their listings run with the import changed.

Strategy: thin. Each class here says in its docstring which of ours it is and where it is safer than the published
sample; nothing is built here. This is the one room whose names are not ours: the documents' spelling, in Java's, C#'s
and Python's case, is the point. Source: documents 000, 001, 002; docs/from-the-documents.md.
"""

from veilmq.client.documents.accounts import CloudAccount, CloudPullTopic, CloudQueue, MNSClient, ServiceSettings
from veilmq.client.documents.exceptions import ClientException, ServiceException
from veilmq.client.documents.keeping import ChangeVisibilityTask, Manager, MessageReceiver
from veilmq.client.documents.messages import Message, QueueMeta, RawTopicMessage, TopicMessage, TopicMeta
from veilmq.client.documents.ordered import LocalDiskStorage, OrderedQueueWrapper
from veilmq.client.documents.queues import (
    BigMessageSizeQueue,
    SecurityKeyGenerator,
    SecurityQueue,
    TransactionChecker,
    TransactionOperations,
    TransactionQueue,
)

__all__ = [
    "BigMessageSizeQueue",
    "ChangeVisibilityTask",
    "ClientException",
    "CloudAccount",
    "CloudPullTopic",
    "CloudQueue",
    "LocalDiskStorage",
    "MNSClient",
    "Manager",
    "Message",
    "MessageReceiver",
    "OrderedQueueWrapper",
    "QueueMeta",
    "RawTopicMessage",
    "SecurityKeyGenerator",
    "SecurityQueue",
    "ServiceException",
    "ServiceSettings",
    "TopicMessage",
    "TopicMeta",
    "TransactionChecker",
    "TransactionOperations",
    "TransactionQueue",
]
