"""The Azure adapter: Azure Queue Storage, and other services with its protocol, through azure-storage-queue.

Strategy: `calls` is the only module that handles azure.core's exceptions; it also converts the port's messages to the
service's and back. `queue` implements the port, and keeps in a queue's metadata what the service has no setting for.
"""

from veilmq.client.adapters.azure.queue import AzureAccount, AzureQueue

__all__ = ["AzureAccount", "AzureQueue"]
