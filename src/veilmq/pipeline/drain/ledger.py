"""Tracks known ids: emitted or about to be, and not certainly deleted yet.

Strategy: an id is forgotten when the queue confirmed its delete under a lease that was held without a gap. A protocol
may report "done" or "gone" when only the handle was stale (SQS does both). Such an id stays known, and if its message
comes again it is deleted again. The same holds for an id whose handle was refused: its message comes again, unless
somebody else dealt with it or its queue was recreated, which nobody reports. A message that comes again only provides
its new handle; it is not emitted again.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from veilmq.client.clock import Clock
from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.model.errors import LeaseError, MessageGone, ReceiptInvalid, VeilError
from veilmq.pipeline.drain.batch_leases import BatchLeases
from veilmq.pipeline.drain.manifests import open_manifest


class Batch:
    """The messages of one manifest that are not certainly deleted."""

    def __init__(self, seq: int, path: Path, messages: Sequence[Received], leases: BatchLeases) -> None:
        self.seq, self.path, self.leases = seq, path, leases
        self.places = {each.id: place for place, each in enumerate(messages)}
        self.doubtful: set[str] = set()
        """Reported as deleted, but perhaps with a stale handle; or refused because the handle was stale."""
        self.is_tidied = False
        """Its quarantined rows and objects were handled."""

    def renew(self, message: Received) -> None:
        """One of its messages was received again."""
        place = self.places.get(message.id)
        if place is None:
            return  # deleted for good a moment ago
        self.leases.renew(place, message)
        self.doubtful.discard(message.id)

    def to_delete(self) -> list[str]:
        """Ids for which a delete should be tried."""
        return [each for each in self.places if each not in self.doubtful]

    def deleted(self, message: str, handle: str, answer: VeilError | None) -> bool:
        """Record the answer to the delete with that handle; False if the delete must be retried."""
        place = self.places[message]
        if handle != self.leases.handle(place):
            # The message came again meanwhile: the answer is about a lease that had ended.
            return False
        if answer is None or isinstance(answer, MessageGone):
            if self.leases.unbroken(place):
                del self.places[message]
            else:
                self.doubtful.add(message)
        elif isinstance(answer, LeaseError | ReceiptInvalid):
            self.doubtful.add(message)
        else:
            return False
        return True

    @property
    def is_done(self) -> bool:
        """Only doubtful ids are left."""
        return len(self.places) == len(self.doubtful)


class Remembered:
    """Ids of earlier batches that may come again although their delete was reported as done."""

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}
        self._left: dict[Path, int] = {}

    def add(self, path: Path, ids: Iterable[str]) -> None:
        """Add ids that the file `path` keeps."""
        for each in ids:
            self._paths[each] = path
            self._left[path] = self._left.get(path, 0) + 1

    def __contains__(self, message: str) -> bool:
        return message in self._paths

    def settle(self, message: str) -> None:
        """The message was deleted for good; the file goes with its last id."""
        path = self._paths.pop(message)
        self._left[path] -= 1
        if not self._left[path]:
            path.unlink(missing_ok=True)


def load(seq: int, path: Path, queue: Queue, lease: float, clock: Clock) -> Batch:
    """The batch of a manifest that another process wrote. Raises ManifestDamaged."""
    messages = loaded(path)
    return Batch(seq, path, messages, BatchLeases(queue, messages, lease, clock))


def loaded(path: Path) -> list[Received]:
    """Ids and handles; their leases are unknown, and so count as expired. Raises ManifestDamaged."""
    with open_manifest(path) as reader:
        table = reader.read_all()
        ids, handles = table.column("id").to_pylist(), table.column("handle").to_pylist()
    return [Received(each, "", handle=handle, lease_end=0.0) for each, handle in zip(ids, handles, strict=True)]
