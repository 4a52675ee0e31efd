"""The Azure adapter: Azure Queue Storage, and whatever speaks its protocol, through azure-storage-queue.

Strategy: `calls` is the only module that meets azure.core's exceptions, `errors` says what a code means; `settings`
keeps in a queue's metadata what the service has no setting for; `sending` and `receiving` turn the port's values into
the service's and back; `waiting` polls, because the service has no long poll; `account` and `queue` are the port.
"""

from veilmq.client.azure.account import AzureAccount
from veilmq.client.azure.queue import AzureQueue

__all__ = ["AzureAccount", "AzureQueue"]
