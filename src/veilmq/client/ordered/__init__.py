"""Strict order over a queue that is only roughly ordered (the document's OrderedQueueWrapper).

Strategy: the sender numbers messages, durably before it sends them (sender.py); the receiver hands out only the next
number (receiving/); each keeps its count in a storage that one process at a time may hold (storage.py, tables.py).
docs/patterns/ordered-queue.md.
"""

from veilmq.client.ordered.queue import OnFailure, OrderedQueue, run
from veilmq.client.ordered.receiving.receiver import OrderedReceiver
from veilmq.client.ordered.receiving.reorder import GapPolicy, Ordered
from veilmq.client.ordered.sender import OrderedSender
from veilmq.client.ordered.storage import LocalFile, ObjectStorage, StateLock, Storage
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
