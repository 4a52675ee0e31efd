"""Fetches messages from the queue and puts them into the receiver's buffer.

Strategy: one thread at a time pulls, without holding the receiver's lock, which guards the buffer (reorder.py). A
message either goes into the buffer, with its lease held by the keeper, or is handled here: set aside, deleted, or
released. `end` interrupts the pull in progress; messages that it still brings are released at once.

Deletes: the acknowledgement is already durable, so nothing depends on the delete. A delete that fails is retried with
the next ones, and finally given up: the message comes back and is dropped by its number.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

from veilmq.client.clock import Clock
from veilmq.client.errors import Unordered
from veilmq.client.keeper import Lease, LeaseKeeper
from veilmq.client.messages import Extension, Received
from veilmq.client.ordered.numbering import Mark, Marking
from veilmq.client.ordered.receiving.reorder import Entry, Fate, Place, Reorder, give_back
from veilmq.client.queue import Queue
from veilmq.client.unreadable import Policy, set_aside
from veilmq.client.unreadable import give_back as release_all
from veilmq.model.errors import LeaseError, ReceiptInvalid, VeilError
from veilmq.model.wording import counted


class Deletions:
    """The deletes of one receiver. Thread-safe."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._waiting: list[Lease] = []
        self._closed = False

    def delete(self, leases: Iterable[Lease] = ()) -> None:
        """Delete these messages, and those that wait for a retry."""
        with self._lock:
            due, self._waiting = [*self._waiting, *leases], []
        for lease in due:
            try:
                lease.delete()
            except (LeaseError, ReceiptInvalid):
                continue
            except VeilError as error:
                log.info("queue %s: an acknowledged message is not deleted yet: %s", self._queue, error)
                self._wait(lease)

    def close(self) -> None:
        """Give up the waiting deletes."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for lease in waiting:
            give_back(lease)

    def _wait(self, lease: Lease) -> None:
        with self._lock:
            if not self._closed:
                self._waiting.append(lease)
                return
        give_back(lease)


PULL_MAX: Final = 100
ASIDE_SECONDS: Final = 1.0
"""How long a message that is too far ahead for the buffer stays invisible."""
END_SECONDS: Final = 5.0
"""How long `end` waits for the pull in progress. Messages that the pull brings later are released then."""
_AGAIN_SECONDS: Final = 0.05
"""First pause between two interruptions; it doubles."""

log = logging.getLogger("veilmq.ordered")


class Intake:
    """The intake of one receiver, with the receiver's lock, `changed`."""

    def __init__(
        self,
        queue: Queue,
        marking: Marking,
        keeper: LeaseKeeper,
        unreadable: Policy,
        lease: float,
        reorder: Reorder[Entry],
        changed: threading.Condition,
        clock: Clock,
    ) -> None:
        self.deletions = Deletions(queue.name)
        self._queue = queue
        self._marking = marking
        self._keeper = keeper
        self._unreadable = unreadable
        self._lease_seconds = lease
        self._reorder = reorder
        self._changed = changed
        self._clock = clock
        self._puller: int | None = None
        """Id of the thread that pulls."""
        self._closed = False

    @property
    def busy(self) -> bool:
        """With the lock held: whether a thread pulls."""
        return self._puller is not None

    def begin(self) -> None:
        """With the lock held: this thread becomes the puller."""
        self._puller = threading.get_ident()

    def pull(self, wait: float) -> tuple[bool, bool]:
        """Fetch once, after `begin`. Returns whether anything changed, and whether the fetch ended early."""
        try:
            return self._pull(min(wait, self._queue.capabilities.wait_max))
        finally:
            with self._changed:
                self._puller = None
                self._changed.notify_all()

    def close(self) -> None:
        """With the lock held: put nothing more into the buffer."""
        self._closed = True
        self._changed.notify_all()

    def end(self) -> None:
        """Interrupt the pull in progress until it ends, for at most END_SECONDS.

        Repeated, because the pull may have been about to start at the first interruption.
        """
        end = self._clock.monotonic() + END_SECONDS
        pause = _AGAIN_SECONDS
        while self._puller is not None:
            self._queue.interrupt()
            if self._puller == threading.get_ident() or self._clock.monotonic() >= end:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._puller is None, pause)
            pause *= 2

    def _pull(self, wait: float) -> tuple[bool, bool]:
        self.deletions.delete()
        before = self._clock.monotonic()
        count = min(self._queue.capabilities.receive_messages_max, PULL_MAX, self._reorder.room)
        arrived = self._queue.receive(count, lease=self._lease_seconds, wait=wait)
        if not arrived:
            return False, self._clock.monotonic() - before < wait / 2 or wait == 0
        read = deque(sorted(((self._marking.read(message), message) for message in arrived), key=_by_mark))
        came = False
        ahead: list[str] = []
        try:
            while read and not self._closed:
                found, raw = read.popleft()
                if found is None:
                    self._set_aside(raw, "it has no number")
                    came = True
                elif self._is_too_far(found[0]):
                    ahead.append(raw.handle)
                else:
                    came = self._admit(*found, raw) or came
        finally:
            release_all(self._queue, [raw.handle for _, raw in read])
            self._put_off(ahead)
        return came, False

    def _is_too_far(self, mark: Mark) -> bool:
        place = Place(mark.epoch, mark.number)
        with self._changed:
            return self._reorder.late(place) is None and self._reorder.is_too_far(place)

    def _put_off(self, handles: list[str]) -> None:
        """Give messages back for a while, all at once.

        Messages from the buffer of a receiver that died come back behind all waiting ones, so everything that waits
        passes through here until they are reached.
        """
        if not handles:
            return
        try:
            self._queue.extend_batch([Extension(handle, ASIDE_SECONDS) for handle in handles])
        except VeilError as error:
            count = counted(len(handles), "message")
            log.info("queue %s: could not give back %s before the leases end: %s", self._queue.name, count, error)

    def _admit(self, mark: Mark, message: Received, raw: Received) -> bool:
        """Put one message where it belongs. Returns whether that changed anything. raw: as the queue returned it."""
        place = Place(mark.epoch, mark.number)
        with self._changed:
            late = self._reorder.late(place)
        if late is not None:
            self._set_aside(raw, late)
            return True
        try:
            lease = self._keeper.register(message)
        except VeilError as error:
            log.info("queue %s: number %d came too late to be kept: %s", self._queue.name, mark.number, error)
            release_all(self._queue, [message.handle])
            return False
        entry = Entry(message, lease, mark.void)
        fate, other = self._placed(place, entry)
        if fate is Fate.DUPLICATE:
            self.deletions.delete([lease])
        elif fate is Fate.FULL and other is not None:
            give_back(other.lease, 0 if self._closed else ASIDE_SECONDS)
            if other is entry:
                return False
            fate = Fate.KEPT
        if fate is Fate.KEPT:
            lease.on_lost(lambda _: self._forget(place, entry))
        return True

    def _placed(self, place: Place, entry: Entry) -> tuple[Fate, Entry | None]:
        """What became of the entry, and which entry must leave the buffer for it."""
        with self._changed:
            if self._closed:
                return Fate.FULL, entry
            fate, other = self._reorder.arrive(place, entry)
            if fate is not Fate.AGAIN or other is None:
                return fate, other
            if other.message.id == entry.message.id:
                # The same message again, so its lease was lost: the newer lease counts, and the hand-out continues.
                entry.attempt, entry.hands = other.attempt, other.hands
                entry.until, entry.not_before = other.until, other.not_before
                return Fate.KEPT, None
            self._reorder.restore(place, other)
            return Fate.DUPLICATE, None

    def _set_aside(self, message: Received, reason: str) -> None:
        set_aside(self._unreadable, self._queue, message, Unordered(message=message.id, reason=reason))

    def _forget(self, place: Place, entry: Entry) -> None:
        with self._changed:
            self._reorder.forget(place, entry)
            self._changed.notify_all()


def _by_mark(read: tuple[tuple[Mark, Received] | None, Received]) -> tuple[bool, Mark | None]:
    found, _ = read
    return found is None, None if found is None else found[0]
