"""Strict order over a queue that is only roughly ordered (the document's OrderedQueueWrapper).

Strategy: the sender numbers messages, durably before it sends them (sender.py); the receiver hands out only the next
number (receiver.py, reorder.py); each keeps its count in a storage that one process at a time may hold (storage.py,
tables.py, objects.py, locks.py). docs/patterns/ordered-queue.md.
"""

from veilmq.client.ordered.locks import StateLock
from veilmq.client.ordered.objects import ObjectStorage
from veilmq.client.ordered.queue import OrderedQueue
from veilmq.client.ordered.receiver import OrderedReceiver
from veilmq.client.ordered.reorder import GapPolicy, Ordered
from veilmq.client.ordered.running import OnFailure, run
from veilmq.client.ordered.sender import OrderedSender
from veilmq.client.ordered.storage import LocalFile, Storage
from veilmq.client.ordered.tables import TableStorage

__all__ = [
    "GapPolicy",
    "LocalFile",
    "ObjectStorage",
    "OnFailure",
    "Ordered",
    "OrderedQueue",
    "OrderedReceiver",
    "OrderedSender",
    "StateLock",
    "Storage",
    "TableStorage",
    "run",
]
