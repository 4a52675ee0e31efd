"""Receives many messages with parallel receives, until there are enough or the queue has no more.

Strategy: threads make the calls and share a count of the messages still wanted. An empty answer ends the round; a short
one does not, because some protocols answer short for no reason. The size of a body is unknown before it arrives, so a
receive reserves room for as many of the largest likely bodies as it asks for, and returns what it did not need.
Reserving for the largest body that the queue takes would never exceed the bound, but cost a third of the speed: half of
the receivers would wait. If an error follows after messages came, the next call meets it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from veilmq.client.messages import Received
from veilmq.client.queue import Capabilities, Queue
from veilmq.model.errors import VeilError

_PART: Final = 4
"""A batch counts as complete before its receives would be smaller than this part of a full one."""
_SURPRISE: Final = 16
"""A body is assumed to be at most this many times as large as the largest one so far."""


class Room:
    """Bytes of bodies that a batch may still take. Not thread-safe; one for all batches, because it learns sizes."""

    def __init__(self, bytes_max: int, able: Capabilities) -> None:
        self._bytes_max, self._left_bytes = bytes_max, bytes_max
        self._limit_bytes, self._receive_max = able.body_bytes_max, able.receive_messages_max
        self._largest_bytes = self._limit_bytes
        self._is_known = False

    def begin(self) -> None:
        """Start another batch."""
        self._left_bytes = self._bytes_max

    @property
    def fits(self) -> int:
        """How many messages a receive may ask for; 0: the batch is complete, or running receives may fill it."""
        body_bytes = self._likely_bytes
        most = max(1, min(self._receive_max, self._bytes_max // body_bytes))
        if self._bytes_max < body_bytes:
            # Not even one message is sure to fit: receive one at a time until the bound is reached.
            return int(self._left_bytes > 0)
        fits = self._left_bytes // body_bytes
        return min(most, fits) if fits >= max(1, most // _PART) else 0

    def take(self, wanted: int) -> tuple[int, int]:
        """How many of `wanted` messages to ask for, and the bytes to give back afterwards."""
        count = min(wanted, self.fits)
        taken = count * self._likely_bytes
        self._left_bytes -= taken
        return count, taken

    def give_back(self, taken: int, came: list[Received]) -> None:
        """A receive that reserved `taken` returned these messages."""
        sizes = [_size_bytes(each) for each in came]
        self._left_bytes += taken - sum(sizes)
        if sizes:
            self._largest_bytes = max(sizes) if not self._is_known else max(self._largest_bytes, *sizes)
            self._is_known = True

    def free(self, message: Received) -> None:
        """The message does not belong to this batch."""
        self._left_bytes += _size_bytes(message)

    @property
    def _likely_bytes(self) -> int:
        return max(1, min(self._limit_bytes, _SURPRISE * self._largest_bytes))


def _size_bytes(message: Received) -> int:
    body = message.body
    return len(body) if body.isascii() else len(body.encode())


class Gathering:
    """One round of receives."""

    def __init__(self, queue: Queue, wanted: int, room: Room, lease: float, is_over: Callable[[], bool]) -> None:
        self._queue, self._lease, self._is_late = queue, lease, is_over
        self._wanted, self._room = wanted, room
        self._changed = threading.Condition()
        self._under_way = 0
        self.messages: list[Received] = []
        self.error: VeilError | None = None
        self._is_over = False

    def run(self) -> None:
        """Receive until the round is over. Runs in several threads."""
        while True:
            with self._changed:
                count, taken = self._next()
                if not count:
                    return
                self._wanted -= count
                self._under_way += 1
            came: list[Received] = []
            try:
                came = self._queue.receive(count, lease=self._lease)
            except VeilError as error:
                self.error = error
            finally:
                with self._changed:
                    self._under_way -= 1
                    self.messages += came
                    self._wanted += count - len(came)
                    self._room.give_back(taken, came)
                    self._is_over = self._is_over or not came or self._is_late()
                    self._changed.notify_all()

    def _next(self) -> tuple[int, int]:
        """What to ask for, once there is room; (0, 0): nothing more."""
        while not self._is_over and self._wanted > 0:
            count, taken = self._room.take(self._wanted)
            if count or not self._under_way:
                return count, taken
            self._changed.wait()
        return 0, 0


def gather(
    pool: ThreadPoolExecutor,
    queue: Queue,
    wanted: int,
    room: Room,
    *,
    lease: float,
    receivers: int,
    wait: float,
    is_over: Callable[[], bool],
) -> list[Received]:
    """Up to `wanted` messages, within the room (there must be some), until `is_over` is true.

    Raises what a receive raised, if nothing came.
    """
    round_ = Gathering(queue, wanted, room, lease, is_over)
    # The last one runs in this thread.
    futures = [pool.submit(round_.run) for _ in range(min(receivers, max(1, wanted)) - 1)]
    round_.run()
    for future in futures:
        future.result()
    if round_.messages:
        return round_.messages
    if round_.error is not None:
        raise round_.error
    if wait <= 0:
        return []
    count, taken = room.take(wanted)
    came: list[Received] = []
    try:
        came = queue.receive(count, lease=lease, wait=min(wait, queue.capabilities.wait_max))
    finally:
        room.give_back(taken, came)
    return came


def each_chunk(pool: ThreadPoolExecutor, work: Callable[[list[str]], None], items: list[str], size: int) -> None:
    """Run `work` on chunks of `items` in parallel. Raises what one of them raised."""
    futures = [pool.submit(work, items[at : at + size]) for at in range(0, len(items), size)]
    for future in futures:
        future.result()
