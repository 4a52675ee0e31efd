"""Messages of any size: the body goes to an object store, the queue carries a pointer.

Strategy: `pointer` has what the queue carries, in our form or in AWS's, and the handles of such messages; `fetching`
reads objects while it keeps the leases; `queue` is the pattern; `sweeping` removes what crashes left behind; `shared`
lets the queues of a topic share one object. Source: the documents' BigMessageSizeQueue.
"""

from veilmq.client.large.pointer import PointerFormat
from veilmq.client.large.queue import LargeMessageQueue
from veilmq.client.large.shared import SharedBodies
from veilmq.client.large.sweeping import Swept
from veilmq.client.records.objects import ObjectStore

__all__ = ["LargeMessageQueue", "ObjectStore", "PointerFormat", "SharedBodies", "Swept"]
