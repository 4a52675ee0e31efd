"""Many messages at once: several receives side by side until there are enough, or the queue has no more.

Strategy: threads for the calls, a shared count for how many are still wanted. An empty answer ends it; a short one does
not, because some protocols answer short for no reason. What an error meets beside messages is the next call's.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.model.errors import VeilError


class Gathering:
    """One round of receives."""

    def __init__(self, queue: Queue, wanted: int, wanted_bytes: int, lease: float, is_over: Callable[[], bool]) -> None:
        self._queue, self._lease, self._is_late = queue, lease, is_over
        self._wanted, self._wanted_bytes = wanted, wanted_bytes
        self._lock = threading.Lock()
        self.messages: list[Received] = []
        self.error: VeilError | None = None
        self._is_over = False

    def run(self) -> None:
        """Receive until it is over. One thread of several."""
        most = self._queue.capabilities.receive_messages_max
        while True:
            with self._lock:
                count = min(self._wanted, most)
                if self._is_over or count <= 0:
                    return
                self._wanted -= count
            try:
                came = self._queue.receive(count, lease=self._lease)
            except VeilError as error:
                with self._lock:
                    self.error, self._is_over = error, True
                return
            with self._lock:
                self.messages += came
                self._wanted += count - len(came)
                self._wanted_bytes -= sum(len(each.body) for each in came)
                if not came or self._wanted_bytes <= 0 or self._is_late():
                    self._is_over = True


def gather(
    pool: ThreadPoolExecutor,
    queue: Queue,
    wanted: int,
    wanted_bytes: int,
    *,
    lease: float,
    receivers: int,
    wait: float,
    is_over: Callable[[], bool],
) -> list[Received]:
    """Up to `wanted` messages, of about `wanted_bytes` characters, until `is_over` says so.

    Raises what a receive raised, if nothing came.
    """
    round_ = Gathering(queue, wanted, wanted_bytes, lease, is_over)
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
    able = queue.capabilities
    return queue.receive(min(wanted, able.receive_messages_max), lease=lease, wait=min(wait, able.wait_max))


def each_chunk(pool: ThreadPoolExecutor, work: Callable[[list[str]], None], items: list[str], size: int) -> None:
    """`work` on chunks of `items`, side by side. Raises what one of them raised."""
    futures = [pool.submit(work, items[at : at + size]) for at in range(0, len(items), size)]
    for future in futures:
        future.result()
