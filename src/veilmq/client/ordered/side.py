"""What sender and receiver have in common: a storage that is theirs alone, in one process, until they are closed."""

from veilmq.client.closing import Closing
from veilmq.client.errors import StorageHeld, TransportError
from veilmq.client.forked import OfProcess
from veilmq.client.ordered.storage import LockedStorage
from veilmq.client.queue import Queue


class Side(Closing, OfProcess):
    """One end of an ordered queue."""

    queue: Queue
    _storage: LockedStorage
    _role: str
    _closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _enter(self) -> None:
        """Before anything else, locks included. Raises StorageHeld in a forked child: the storage is its parent's."""
        if self.inherited:
            raise StorageHeld(storage=str(self._storage), holder=f"pid {self._pid}")

    def _check_open(self) -> None:
        if self._closed:
            raise self._is_closed()

    def _is_closed(self) -> TransportError:
        reason = f"the ordered {self._role} of queue {self.queue.name} is closed"
        return TransportError(reason=reason, may_have_happened=False)
