"""Many messages at once: several receives side by side until there are enough, or the queue has no more.

Strategy: threads for the calls, a shared count for how many are still wanted. An empty answer ends it; a short one does
not, because some protocols answer short for no reason. Nobody knows how large a body is before it came: a receive takes
room for as many of the largest that are likely as it asks for, and gives back what it did not need. Room for the
largest that the queue takes, always, would be a bound without exception, and cost a third of the speed: half of the
receivers would wait. What an error meets beside messages is the next call's.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from veilmq.client.capabilities import Capabilities
from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.model.errors import VeilError

_PART: Final = 4
"""Receives of less than this part of a full one would be many for few messages: a batch is complete before."""
_SURPRISE: Final = 16
"""A body is taken to be at most so many times as large as the largest before it."""


class Room:
    """Bytes of bodies that a batch may still take. Not for two threads at once; for all batches, as it learns."""

    def __init__(self, bytes_max: int, able: Capabilities) -> None:
        self._bytes_max, self._left_bytes = bytes_max, bytes_max
        self._limit_bytes, self._receive_max = able.body_bytes_max, able.receive_messages_max
        self._largest_bytes = self._limit_bytes
        self._is_known = False

    def begin(self) -> None:
        """Another batch."""
        self._left_bytes = self._bytes_max

    @property
    def fits(self) -> int:
        """Messages that a receive may ask for; 0: the batch is complete, or others may still bring so much."""
        body_bytes = self._likely_bytes
        most = max(1, min(self._receive_max, self._bytes_max // body_bytes))
        if self._bytes_max < body_bytes:
            # Not even one is sure to fit: they come one by one until the bound is reached.
            return int(self._left_bytes > 0)
        fits = self._left_bytes // body_bytes
        return min(most, fits) if fits >= max(1, most // _PART) else 0

    def take(self, wanted: int) -> tuple[int, int]:
        """How many of `wanted` messages to ask for, and the bytes to give back."""
        count = min(wanted, self.fits)
        taken = count * self._likely_bytes
        self._left_bytes -= taken
        return count, taken

    def give_back(self, taken: int, came: list[Received]) -> None:
        """A receive that took so much brought these."""
        sizes = [_size_bytes(each) for each in came]
        self._left_bytes += taken - sum(sizes)
        if sizes:
            self._largest_bytes = max(sizes) if not self._is_known else max(self._largest_bytes, *sizes)
            self._is_known = True

    def free(self, message: Received) -> None:
        """It is not of this batch."""
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
        """Receive until it is over. One thread of several."""
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
        """What to ask for, once there is room for it; (0, 0): nothing more."""
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
    """Up to `wanted` messages, as far as there is room (there must be some), until `is_over` says so.

    Raises what a receive raised, if nothing came.
    """
    round_ = Gathering(queue, wanted, room, lease, is_over)
    # The last of them in this thread.
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
    """`work` on chunks of `items`, side by side. Raises what one of them raised."""
    futures = [pool.submit(work, items[at : at + size]) for at in range(0, len(items), size)]
    for future in futures:
        future.result()
