"""Deletes of many threads in few requests.

Strategy: as a store's group commit. A delete goes out at once unless `UNDER_WAY_MAX` requests are under way: then it
waits for the first of these to return, and goes with all that came meanwhile. A request's worth does not wait, nor
does anybody longer than `PATIENCE_S`. So no timer holds a delete up, one thread alone is as fast as before, and the
more threads there are, the fewer requests a message takes: those are what clouds charge for, and most of what a delete
costs a client and a server.
"""

import threading
from typing import Final

from veilmq.client.errors import TransportError
from veilmq.client.forked import Anew
from veilmq.client.queue import Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import VeilError

UNDER_WAY_MAX: Final = 2
"""With one, two threads would take turns on a slow line; with many, requests would go half empty."""
PATIENCE_S: Final = 1.0
"""Requests that take so long may be stuck: who waits for them goes on without."""


class _Delete:
    """One thread's, until it is done."""

    __slots__ = ("batch", "handle", "outcome", "sent", "woken")

    def __init__(self, handle: str) -> None:
        self.handle = handle
        self.outcome: BaseException | None = None
        self.batch: list[_Delete] = []
        """What its thread is to send; empty: another one's thread has done it."""
        self.sent = False
        """Its request has begun."""
        self.woken = threading.Lock()
        self.woken.acquire()


class GatheredDeletes(Wrapping, Anew):
    """A queue whose `delete` shares requests with those of other threads; all else is `inner`'s.

    Each delete returns or raises as `inner.delete` would. A pattern that changes `delete` must change `delete_batch` in
    the same class: else its deletes are not gathered (see `can_gather`).
    """

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self._most = inner.capabilities.batch_messages_max
        self._here()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._line: list[_Delete] = []
        self._under_way: set[_Delete] = set()

    def delete(self, handle: str) -> None:
        self._here()
        mine = _Delete(handle)
        try:
            with self._lock:
                self._line.append(mine)
                if self._may_go():
                    self._go_next(mine)
            if not mine.batch and not mine.woken.acquire(timeout=PATIENCE_S) and not self._goes_alone(mine):
                mine.woken.acquire()
            if mine.batch:
                self._send(mine)
        except BaseException:  # Ctrl-C, in the main thread: nobody else shall wait for this one
            self._end(mine)
            raise
        if mine.outcome is not None:
            raise mine.outcome

    def _may_go(self) -> bool:
        return len(self._under_way) < UNDER_WAY_MAX or len(self._line) >= self._most

    def _goes_alone(self, mine: _Delete) -> bool:
        """Whether it was in line still: then its thread sends what waits."""
        with self._lock:
            if mine in self._line:
                self._go_next(mine)
        return bool(mine.batch)

    def _go_next(self, leader: _Delete) -> None:
        """With the lock: the next request is under way, and the leader's thread sends it."""
        self._under_way.add(leader)
        leader.batch = self._line[: self._most]
        del self._line[: self._most]

    def _send(self, leader: _Delete) -> None:
        """Send the leader's batch, tell those in it, and let the first of those who wait send the next."""
        batch = leader.batch
        leader.sent = True
        try:
            for each, outcome in zip(batch, self._outcomes(batch), strict=True):
                each.outcome = outcome
        except Exception as error:  # noqa: BLE001 raised in each thread that asked
            for each in batch:
                each.outcome = error
        except BaseException:
            # The leader's thread is to end, and nobody else's: what became of theirs is not known.
            for each in batch:
                each.outcome = TransportError(reason="the thread that sent it was ended", may_have_happened=True)
            raise
        self._end(leader)

    def _end(self, mine: _Delete) -> None:
        """It leaves the line, or its request is over. A second time ends what an interrupted first one began."""
        with self._lock:
            if not mine.sent:
                if mine in self._line:
                    self._line.remove(mine)
                self._line[:0] = [each for each in mine.batch if each is not mine]
                mine.batch = []
            self._under_way.discard(mine)
            if self._line and self._may_go():
                heir = self._line[0]
                self._go_next(heir)
                heir.woken.release()
            for each in mine.batch:
                if each is not mine and each.woken.locked():
                    each.woken.release()

    def _outcomes(self, batch: list[_Delete]) -> list[VeilError | None]:
        if len(batch) == 1:
            self.inner.delete(batch[0].handle)
            return [None]
        return self.inner.delete_batch([each.handle for each in batch])


def can_gather(queue: Queue) -> bool:
    """Whether one request of the queue deletes many, and does to each what `delete` does."""
    if queue.capabilities.batch_messages_max < 2:
        return False
    layer = queue
    while (definer := _definer(layer, "delete")) is not None and definer is _definer(layer, "delete_batch"):
        if not isinstance(layer, Wrapping):
            return True
        layer = layer.inner
    return False


def _definer(queue: Queue, name: str) -> type | None:
    return next((each for each in type(queue).__mro__ if name in vars(each)), None)
