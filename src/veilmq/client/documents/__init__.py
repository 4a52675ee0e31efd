"""The names from the source documents, over our patterns: the documents' listings run with only the import changed.

Strategy: thin. Each class says in its docstring which of our classes it stands for, and where that is safer than the
published sample; no pattern is implemented here. Only this package uses names that are not ours: the documents' Java,
C# and Python names are its purpose. Source: documents 000, 001, 002; docs/from-the-documents.md.
"""

from veilmq.client.documents.accounts import (
    ChangeVisibilityTask,
    CloudAccount,
    CloudPullTopic,
    CloudQueue,
    Manager,
    MessageReceiver,
    MNSClient,
    ServiceSettings,
)
from veilmq.client.documents.queues import (
    BigMessageSizeQueue,
    LocalDiskStorage,
    OrderedQueueWrapper,
    SecurityKeyGenerator,
    SecurityQueue,
    TransactionChecker,
    TransactionOperations,
    TransactionQueue,
)
from veilmq.client.documents.values import (
    ClientException,
    Message,
    QueueMeta,
    RawTopicMessage,
    ServiceException,
    TopicMessage,
    TopicMeta,
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
