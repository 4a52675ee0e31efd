"""The batches under way: which ids are known and not certainly deleted, and the leases that each batch holds.
`exchange`, beside this, calls the queue from threads of their own, so that the next batch is received
while the last one is deleted.

Strategy: without Spark. An id is forgotten when the queue confirmed its delete under a lease that was held without a
gap. A protocol may report "done" or "gone" when only the handle was stale (SQS does both). Such an id stays known, and
if its message comes again it is deleted again. The same holds for an id whose handle was refused: its message comes
again, unless somebody else dealt with it or its queue was recreated, which nobody reports. A message that comes again
only provides its new handle; it is not emitted again.

Leases are held from the receive until the batch is committed and its messages are deleted. Most batches finish long
before a lease runs out, so no lease is registered with a keeper during the first third of the lease; then one lease
keeper takes the whole batch. `BatchLeases.unbroken` reports whether a lease was held without a gap.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.keeper import Lease, LeaseKeeper, Reason
from veilmq.client.messages import Extension, Received
from veilmq.client.queue import Queue
from veilmq.model.errors import LeaseError, MessageGone, ReceiptInvalid, VeilError
from veilmq.pipeline.drain.batches.backlog import oldest_of
from veilmq.pipeline.drain.batches.queues import joined
from veilmq.pipeline.drain.manifests import open_manifest
from veilmq.pipeline.places import Place

_PARTS: Final = 3
"""Leases are registered after one part of the lease, and extended with half of it left."""
_MAX_HOLD: Final = 10.0 * 365 * 86_400


class BatchLeases:
    """Holds the leases of one batch. Thread-safe."""

    def __init__(self, queue: Queue, messages: Sequence[Received], lease: float, clock: Clock) -> None:
        self._queue, self._lease, self._clock = queue, lease, clock
        self._messages = list(messages)
        self._held: dict[int, Lease] = {}
        self._keeper: LeaseKeeper | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def start(self) -> None:
        """Hold the leases from now on; no I/O."""
        if not self._messages:
            return
        first = min(each.lease_end for each in self._messages) - self._clock.monotonic()
        self._timer = threading.Timer(max(0.0, first - self._lease * (_PARTS - 1) / _PARTS), self._take_over)
        self._timer.daemon = True
        self._timer.start()

    def revive(self) -> None:
        """Extend leases of another process, as far as they are still ours.

        Raises TransportError and other errors that say nothing about a single message.
        """
        now = self._clock.monotonic()
        extensions = [Extension(each.handle, self._lease) for each in self._messages]
        for place, answer in enumerate(self._queue.extend_batch(extensions)):
            if isinstance(answer, str):
                changed = {"handle": answer, "lease_end": now + self._lease}
                self._messages[place] = msgspec.structs.replace(self._messages[place], **changed)

    def renew(self, place: int, message: Received) -> None:
        """The message was received again; use its new lease."""
        with self._lock:
            self._messages[place] = message
            self._held.pop(place, None)
            if self._keeper is not None and not self._stopped:
                self._register(self._keeper, place)

    def stop(self) -> None:
        """Stop extending; the leases run until they expire."""
        with self._lock:
            self._stopped = True
            keeper = self._keeper
        if self._timer is not None:
            self._timer.cancel()
        if keeper is not None:
            keeper.close(release=False)

    def handle(self, place: int) -> str:
        """The newest handle."""
        held = self._held.get(place)
        return self._messages[place].handle if held is None else held.handle

    def unbroken(self, place: int) -> bool:
        """Whether the lease is held now and has been held since the receive without a gap."""
        held = self._held.get(place)
        if held is None:
            return self._messages[place].lease_end > self._clock.monotonic()
        return held.deadline > self._clock.monotonic() and held.lost.reason in (None, Reason.CLOSED)

    def _take_over(self) -> None:
        with self._lock:
            if self._stopped:
                return
            self._keeper = keeper = LeaseKeeper(
                self._queue,
                visibility_timeout=max(self._lease, self._queue.capabilities.lease_min),
                interval=self._lease / 3,
                minimal_life=self._lease / 6,
                max_hold=_MAX_HOLD,
                clock=self._clock,
            )
            for place in range(len(self._messages)):
                self._register(keeper, place)

    def _register(self, keeper: LeaseKeeper, place: int) -> None:
        message = self._messages[place]
        if message.lease_end <= self._clock.monotonic():
            return
        try:
            self._held[place] = keeper.register(message)
        except VeilError:
            # The lease is over or taken, which `unbroken` detects by the clock, or it expires and the message comes
            # again.
            return


class Batch:
    """The messages of one manifest that are not certainly deleted."""

    def __init__(self, seq: int, path: Place, messages: Sequence[Received], leases: BatchLeases) -> None:
        self.seq, self.path, self.leases = seq, path, leases
        self.places = {each.id: place for place, each in enumerate(messages)}
        self.doubtful: set[str] = set()
        """Reported as deleted, but perhaps with a stale handle; or refused because the handle was stale."""
        self.oldest = oldest_of(messages)
        """When the oldest message was sent; None: unknown."""
        self.is_tidied = False
        """Its bad records and objects were handled."""

    def renew(self, message: Received) -> None:
        """One of its messages was received again."""
        place = self.places.get(message.id)
        if place is None:
            return  # deleted for good a moment ago
        self.leases.renew(place, message)
        self.doubtful.discard(message.id)

    def to_delete(self) -> list[str]:
        """Ids for which a delete should be tried. Any thread: others may be deleted meanwhile."""
        return [each for each in list(self.places) if each not in self.doubtful]

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
        self._paths: dict[str, Place] = {}
        self._left: dict[Place, set[str]] = {}
        self._written: dict[Place, float] = {}
        """In the order of time."""

    def add(self, path: Place, ids: Iterable[str], written: float) -> None:
        """Add ids that the file `path` keeps. written: when it was, in Unix seconds."""
        found = set(ids)
        if found:
            self._paths |= dict.fromkeys(found, path)
            self._left[path], self._written[path] = found, written

    def __contains__(self, message: str) -> bool:
        return message in self._paths

    def settle(self, message: str) -> None:
        """The message was deleted for good; the file goes with its last id."""
        path = self._paths.pop(message)
        self._left[path].discard(message)
        if not self._left[path]:
            self._drop(path)

    def expire(self, before: float) -> None:
        """Forget the ids of files that were written before that."""
        while self._written:
            path, written = next(iter(self._written.items()))
            if written >= before:
                return
            self._drop(path)

    def _drop(self, path: Place) -> None:
        for each in self._left.pop(path):
            if self._paths.get(each) == path:
                del self._paths[each]
        del self._written[path]
        path.unlink(missing_ok=True)


def load(seq: int, path: Place, queue: Queue, lease: float, clock: Clock) -> Batch:
    """The batch of a manifest that another process wrote. Raises ManifestDamaged."""
    messages = loaded(path)
    return Batch(seq, path, messages, BatchLeases(queue, messages, lease, clock))


def loaded(path: Place) -> list[Received]:
    """Ids and handles; their leases are unknown, and so count as expired. Raises ManifestDamaged."""
    with open_manifest(path) as reader:
        table = reader.read_all()
        ids, handles = table.column("id").to_pylist(), table.column("handle").to_pylist()
        # A manifest of an earlier release has no such column.
        queues = table.column("queue").to_pylist() if "queue" in table.column_names else [None] * len(ids)
    return [
        Received(each if queue is None else joined(queue, each), "", handle=handle, lease_end=0.0)
        for each, handle, queue in zip(ids, handles, queues, strict=True)
    ]
