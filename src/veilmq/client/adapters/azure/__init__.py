"""The Azure adapter: Azure Queue Storage, and other services with its protocol, through azure-storage-queue.

Strategy: `calls` is the only module that handles azure.core's exceptions, and maps error codes; `settings` keeps in a
queue's metadata what the service has no setting for; `messages` converts the port's values to the service's and back;
`waiting` polls, because the service has no long poll; `queue` implements the port.
"""

from veilmq.client.adapters.azure.queue import AzureAccount, AzureQueue

__all__ = ["AzureAccount", "AzureQueue"]
