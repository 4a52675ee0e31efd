"""Queues around a queue: `Wrapping` passes every call on to `inner`, and `GatheredDeletes` makes few requests of many
deletes.

Strategy: a pattern inherits from `Wrapping` and overrides what it changes. `inner` is public, so that a stack can be
walked.

Gathered deletes: like a store's group commit. A delete is sent at once unless `UNDER_WAY_MAX` requests are in flight.
Otherwise it waits until the first of these returns, and is sent together with all that arrived meanwhile. A full
request does not wait, and no delete waits longer than `PATIENCE_S`. So no timer delays a delete, and a single thread is
as fast as without gathering. The more threads there are, the fewer requests each message costs, and requests are what
clouds charge for and most of a delete's cost for client and server.
"""

import threading
from collections.abc import Hashable, Sequence
from typing import ClassVar, Final

from veilmq.client.errors import TransportError
from veilmq.client.messages import Extension, Message, Peeked, Received, Recommended, Sent, Stats
from veilmq.client.queue import Account, Capabilities, Queue, identity_of, is_closed
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import Anew, Closing
from veilmq.model.errors import VeilError
from veilmq.model.messages import Failure


class Wrapping(Closing):
    """A `Queue` that does what `inner` does."""

    changes_bodies: ClassVar[bool] = True
    """Whether a pattern that overrides `send` changes what is sent, so that only the same pattern can read it."""
    changes_handles: ClassVar[bool] = False
    """Whether what it receives has handles that only the same pattern can use."""

    def __init__(self, inner: Queue) -> None:
        """Raises ParameterInvalid if it is not a queue."""
        self.inner = checks.queue(inner, "inner")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def account(self) -> Account:
        return self.inner.account

    @property
    def identity(self) -> Hashable | None:
        """See `veilmq.client.queue`: that of `inner`, unless the pattern receives differently."""
        return identity_of(self.inner) if type(self).receive is Wrapping.receive else None

    @property
    def closed(self) -> bool:
        """Whether `inner` is closed."""
        return is_closed(self.inner)

    def send(self, message: str | Message) -> Sent:
        return self.inner.send(message)

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        return self.inner.send_batch(messages)

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        return self.inner.receive(count_max, lease=lease, wait=wait)

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        return self.inner.extend(handle, lease, body=body)

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        return self.inner.extend_batch(extensions)

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.inner.release(handle, delay, failure=failure)

    def delete(self, handle: str) -> None:
        self.inner.delete(handle)

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        return self.inner.delete_batch(handles)

    def peek(self, count_max: int = 1) -> list[Peeked]:
        return self.inner.peek(count_max)

    def stats(self) -> Stats:
        return self.inner.stats()

    def recommended(self) -> Recommended | None:
        return self.inner.recommended()

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()


def innermost(queue: Queue) -> Queue:
    """The queue that all patterns around it wrap."""
    while isinstance(queue, Wrapping):
        queue = queue.inner
    return queue


def changing_bodies(queue: Queue) -> str | None:
    """The name of the outermost pattern around it that changes what is sent; None: there is none."""
    while isinstance(queue, Wrapping):
        if type(queue).send is not Wrapping.send and queue.changes_bodies:
            return type(queue).__name__
        queue = queue.inner
    return None


def handles_of(queue: Queue) -> list[type]:
    """The patterns around it that have handles of their own."""
    found: list[type] = []
    while isinstance(queue, Wrapping):
        if queue.changes_handles:
            found.append(type(queue))
        queue = queue.inner
    return found


UNDER_WAY_MAX: Final = 2
"""With one, two threads would alternate on a slow connection; with many, requests would go out half empty."""
PATIENCE_S: Final = 1.0
"""Seconds. Requests that take longer may be stuck; the deletes that wait for them are sent without waiting further."""


class _Delete:
    """The delete of one thread."""

    __slots__ = ("batch", "handle", "outcome", "sent", "woken")

    def __init__(self, handle: str) -> None:
        self.handle = handle
        self.outcome: BaseException | None = None
        self.batch: list[_Delete] = []
        """The deletes that its thread has to send; empty: another thread sends it."""
        self.sent = False
        """Its request has started."""
        self.woken = threading.Lock()
        self.woken.acquire()


class GatheredDeletes(Wrapping, Anew):
    """A queue whose `delete` shares requests with other threads; everything else is passed to `inner`.

    Each delete returns or raises as `inner.delete` would. A pattern that overrides `delete` must override
    `delete_batch` in the same class, or its deletes are not gathered (see `can_gather`).
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
        except BaseException:  # Ctrl-C in the main thread: no other thread may wait for this delete
            self._end(mine)
            raise
        if mine.outcome is not None:
            raise mine.outcome

    def _may_go(self) -> bool:
        return len(self._under_way) < UNDER_WAY_MAX or len(self._line) >= self._most

    def _goes_alone(self, mine: _Delete) -> bool:
        """Whether it was still waiting; then its thread sends it with the others that wait."""
        with self._lock:
            if mine in self._line:
                self._go_next(mine)
        return bool(mine.batch)

    def _go_next(self, leader: _Delete) -> None:
        """With the lock held: count the next request as in flight; the leader's thread sends it."""
        self._under_way.add(leader)
        leader.batch = self._line[: self._most]
        del self._line[: self._most]

    def _send(self, leader: _Delete) -> None:
        """Send the leader's batch, report each result, and let the first waiting delete send the next batch."""
        batch = leader.batch
        leader.sent = True
        try:
            for each, outcome in zip(batch, self._outcomes(batch), strict=True):
                each.outcome = outcome
        except Exception as error:  # noqa: BLE001 raised in each thread that asked
            for each in batch:
                each.outcome = error
        except BaseException:
            # Only the leader's thread is ending. The outcome of the other threads' deletes is unknown.
            for each in batch:
                each.outcome = TransportError(reason="the thread that sent it was ended", may_have_happened=True)
            raise
        self._end(leader)

    def _end(self, mine: _Delete) -> None:
        """Remove it from the waiting line, or end its request. A second call completes a first one that was
        interrupted."""
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
    """Whether one request of the queue deletes many messages, each just as `delete` would."""
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
