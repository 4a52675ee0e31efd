"""Deletes what Spark has committed, while the next batch is received; and handles what a batch leaves besides messages.

Strategy: one thread takes committed batches in order and splits each into requests that a pool sends. Requests that did
not reach the queue are retried until `patience` is over; then `finish` raises, and the manifests remain for the next
run.

The cleanup of bad records and of the objects of large bodies runs before the messages are deleted, and again after
a crash. So a dead-letter queue may get a message twice but never misses one (a FIFO queue drops the second by its id).
An object that cannot be removed is left to the sweep of `LargeMessageQueue`; objects of bad records stay.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from veilmq.client.adapters.connect import connect
from veilmq.client.clock import Clock
from veilmq.client.errors import ObjectStoreFailed, PointerRefused
from veilmq.client.large import PointerFormat, drop
from veilmq.client.large.pointer import read as read_pointer
from veilmq.client.messages import Message, Peeked
from veilmq.client.queue import Queue
from veilmq.client.records.objects import ObjectStore
from veilmq.model.errors import VeilError
from veilmq.pipeline.drain.bad_records import BadRecord, of_manifest, unsent
from veilmq.pipeline.drain.batches import Batch
from veilmq.pipeline.drain.batches.receiving import each_chunk
from veilmq.pipeline.drain.manifests import open_manifest
from veilmq.pipeline.errors import OptionInvalid, SourceUnreachable
from veilmq.pipeline.options import DrainOptions, store_options_of

_PAUSE_SECONDS: Final = 0.2
_CHUNK_MIN: Final = 10
_REASON_CHARACTERS_MAX: Final = 200
ATTRIBUTES_MAX: Final = 10

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


class Cleanup:
    """Cleans up for one query; `queue` is the queue that is drained. Raises OptionInvalid, SourceUnreachable."""

    def __init__(self, options: DrainOptions, queue: Queue) -> None:
        self._queue = queue
        self._target: Queue | None = None
        self._store: ObjectStore | None = None
        self._form = PointerFormat(options.pointers)
        if options.unwrap[:1] == ("large",) and options.delete_objects:
            self._store = ObjectStore(str(options.store), options=store_options_of(options))
        if options.dead_letters is not None:
            try:
                self._target = connect(options.dead_letters)
            except VeilError as error:
                raise OptionInvalid(f"The queue of the option deadLetters: {error}.", "Is it there?") from None

    def close(self) -> None:
        """Close the dead-letter queue."""
        if self._target is not None:
            self._target.close()

    def run(self, batch: Batch) -> None:
        """Run before the batch's messages are deleted. Raises SourceUnreachable if dead letters could not be sent."""
        count = len(of_manifest(batch.path))
        if count:
            log.warning("queue %s: %d messages of batch %d cannot be decoded", self._queue.name, count, batch.seq)
        if self._target is not None:
            for path, rows in unsent(batch.path):
                self._send(self._target, rows)
                path.rename(path.with_suffix(".sent"))
        if self._store is not None:
            self._remove_objects(batch.path, self._store)

    def _send(self, target: Queue, rows: list[BadRecord]) -> None:
        for answer in target.send_batch([self._message(target, row) for row in rows]):
            if isinstance(answer, VeilError):
                raise SourceUnreachable(
                    f"A bad record could not be sent to {target.name}: {answer}.",
                    "Run the query again; without the option deadLetters it stays in its file.",
                )

    def _message(self, target: Queue, row: BadRecord) -> Message:
        able = target.capabilities
        attributes = dict(row.attributes)
        told = {"veilmq.unreadable": row.reason[:_REASON_CHARACTERS_MAX], "veilmq.source": self._queue.name}
        if len(attributes) + len(told) + (row.type is not None) <= ATTRIBUTES_MAX:
            attributes |= told
        return Message(
            row.body,
            attributes=attributes if able.attributes else {},
            type=row.type if able.attributes else None,
            group=(row.group or self._queue.name) if able.native_fifo else row.group if able.groups else None,
            deduplication_id=row.id if able.native_fifo else None,
        )

    def _remove_objects(self, manifest: Path, store: ObjectStore) -> None:
        kept = {row.id for row in of_manifest(manifest)}
        with open_manifest(manifest) as reader:
            rows = reader.read_all().select(["id", "body", "attributes"]).to_pylist()
        try:
            for row in rows:
                if row["id"] not in kept:
                    self._remove(Peeked(row["id"], row["body"], dict(row["attributes"])), store)
        except ObjectStoreFailed as error:
            log.warning("queue %s: objects are left to a sweep: %s", self._queue.name, error)

    def _remove(self, message: Peeked, store: ObjectStore) -> None:
        try:
            found = read_pointer(message, store, self._form)
        except PointerRefused:
            return
        if found is not None and found.reader is not None:
            drop(store, found.key, found.reader)
        elif found is not None:
            store.remove(found.key)
