"""Deletes what Spark has committed, while the next batch is received.

Strategy: one thread takes committed batches in order and splits each into requests that a pool sends. Requests that did
not reach the queue are retried until `patience` is over; then `finish` raises, and the manifests remain for the next
run. `cleanup` runs before the messages are deleted.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from veilmq.client.clock import Clock
from veilmq.client.queue import Queue
from veilmq.model.errors import VeilError
from veilmq.pipeline.drain.ledger import Batch
from veilmq.pipeline.drain.receiving import each_chunk
from veilmq.pipeline.errors import SourceUnreachable

_PAUSE_SECONDS: Final = 0.2
_CHUNK_MIN: Final = 10

log = logging.getLogger("veilmq.pipeline")


class Deleter:
    """Deletes batches in the background."""

    def __init__(
        self, queue: Queue, senders: int, patience: float, clock: Clock, cleanup: Callable[[Batch], None],
        done: Callable[[Batch], None],
    ) -> None:  # fmt: skip
        """done: called for each finished batch, in the deleting thread."""
        self._queue, self._patience, self._clock = queue, patience, clock
        self._cleanup, self._done = cleanup, done
        self._line = ThreadPoolExecutor(1, "veilmq drain deletes")
        self._pool = ThreadPoolExecutor(senders, "veilmq drain delete")
        self._under_way: dict[int, Future[None]] = {}
        self._failure: VeilError | None = None
        self._lock = threading.Lock()

    def submit(self, batch: Batch) -> None:
        """Delete the batch soon; a batch is queued at most once at a time."""
        there = self._under_way.get(batch.seq)
        if there is None or there.done():
            if there is not None:
                there.result()
            self._under_way[batch.seq] = self._line.submit(self._delete, batch)

    def finish(self) -> None:
        """Wait for all deletes. Raises SourceUnreachable if the queue could not be reached, and what `cleanup`
        raised."""
        while self._under_way:
            seq, future = next(iter(self._under_way.items()))
            del self._under_way[seq]
            future.result()

    def close(self) -> None:
        """Start nothing more."""
        self._line.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _delete(self, batch: Batch) -> None:
        end = self._clock.monotonic() + self._patience
        if not batch.is_tidied:
            self._cleanup(batch)
            batch.is_tidied = True
        batch.leases.stop()
        left = batch.to_delete()
        while left:
            self._failure = None
            each_chunk(self._pool, lambda ids: self._request(batch, ids), left, self._chunk())
            left = batch.to_delete()
            if left and self._clock.monotonic() > end:
                raise SourceUnreachable(
                    f"{len(left)} messages of queue {self._queue.name} could not be deleted: {self._failure}.",
                    "Run the query again: they are known and are deleted then.",
                )
            if left:
                time.sleep(_PAUSE_SECONDS)
        if batch.is_done:
            self._done(batch)

    def _chunk(self) -> int:
        return max(self._queue.capabilities.batch_messages_max, _CHUNK_MIN)

    def _request(self, batch: Batch, ids: list[str]) -> None:
        handles = [batch.leases.handle(batch.places[each]) for each in ids]
        try:
            answers = self._queue.delete_batch(handles)
        except VeilError as error:
            self._failure = error
            return
        with self._lock:
            for each, handle, answer in zip(ids, handles, answers, strict=True):
                if not batch.deleted(each, handle, answer):
                    self._failure = answer
