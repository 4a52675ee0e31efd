"""Which ids are known: emitted, or about to be, and not yet certainly deleted.

Strategy: an id is forgotten when the queue confirmed its delete under a lease that was never broken. A protocol may say
"done" or "gone" when only the handle was stale (SQS says both): such an id stays known, and is
deleted again if it comes again. So does one whose handle was refused: it comes again, unless somebody else has dealt
with it or its queue was made anew, and nobody will tell. A message that comes again gives its new handle and is not
emitted.
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
        """Called deleted, but perhaps by a stale handle; or refused, because it was one."""
        self.is_tidied = False
        """What its rows leave behind was dealt with: quarantine, objects."""

    def renew(self, message: Received) -> None:
        """One of its messages came again."""
        place = self.places.get(message.id)
        if place is None:
            return  # deleted for good a moment ago
        self.leases.renew(place, message)
        self.doubtful.discard(message.id)

    def to_delete(self) -> list[str]:
        """Ids whose delete is worth a try."""
        return [each for each in self.places if each not in self.doubtful]

    def deleted(self, message: str, handle: str, answer: VeilError | None) -> bool:
        """Take the answer to its delete by that handle; False if the delete must be tried again."""
        place = self.places[message]
        if handle != self.leases.handle(place):
            # It came again meanwhile: the answer is about a lease that was over.
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
        """Nothing but doubts is left."""
        return len(self.places) == len(self.doubtful)


class Remembered:
    """Ids of earlier batches that may come again though their delete was called done."""

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}
        self._left: dict[Path, int] = {}

    def add(self, path: Path, ids: Iterable[str]) -> None:
        """Ids that the file `path` keeps."""
        for each in ids:
            self._paths[each] = path
            self._left[path] = self._left.get(path, 0) + 1

    def __contains__(self, message: str) -> bool:
        return message in self._paths

    def settle(self, message: str) -> None:
        """It was deleted for good; its file goes with the last of them."""
        path = self._paths.pop(message)
        self._left[path] -= 1
        if not self._left[path]:
            path.unlink(missing_ok=True)


def load(seq: int, path: Path, queue: Queue, lease: float, clock: Clock) -> Batch:
    """The batch of a manifest that another process wrote. Raises ManifestDamaged."""
    messages = loaded(path)
    return Batch(seq, path, messages, BatchLeases(queue, messages, lease, clock))


def loaded(path: Path) -> list[Received]:
    """Ids and handles; their leases are unknown, and so over. Raises ManifestDamaged."""
    with open_manifest(path) as reader:
        table = reader.read_all()
        ids, handles = table.column("id").to_pylist(), table.column("handle").to_pylist()
    return [Received(each, "", handle=handle, lease_end=0.0) for each, handle in zip(ids, handles, strict=True)]
