"""Messages of any size: the body goes to an object store, the queue carries a pointer.

Strategy: `pointer` has what the queue carries, in our form or in AWS's, and reads the objects while it keeps the
leases; `queue` is the pattern, for one queue or for the queues of a topic, and removes what crashes left behind.
Source: the documents' BigMessageSizeQueue.
"""

from veilmq.client.large.pointer import PointerFormat
from veilmq.client.large.queue import LargeMessageQueue, SharedBodies, Swept
from veilmq.client.records.objects import ObjectStore

__all__ = ["LargeMessageQueue", "ObjectStore", "PointerFormat", "SharedBodies", "Swept"]
