"""The Azure adapter: Azure Queue Storage, and whatever speaks its protocol, through azure-storage-queue.

Strategy: `calls` is the only module that meets azure.core's exceptions, and says what a code means; `settings` keeps in
a queue's metadata what the service has no setting for; `messages` turns the port's values into the service's and back;
`waiting` polls, because the service has no long poll; `queue` is the port.
"""

from veilmq.client.azure.queue import AzureAccount, AzureQueue

__all__ = ["AzureAccount", "AzureQueue"]
