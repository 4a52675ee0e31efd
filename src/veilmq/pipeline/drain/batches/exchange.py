"""What a drain exchanges with the queue: receives the next batch with parallel receives, while it deletes what Spark
has committed.

Strategy of receiving: threads make the calls and share a count of the messages still wanted. An empty answer ends the
round; a short one does not, because some protocols answer short for no reason. The size of a body is unknown before it
arrives, so a receive reserves room for as many of the largest likely bodies as it asks for, and returns what it did not
need. Reserving for the largest body that the queue takes would never exceed the bound, but cost a third of the speed:
half of the receivers would wait. If an error follows after messages came, the next call meets it.

A large body that executors fetch counts as what its pointer states. Such sizes differ by much more than those of
bodies, so a receive reserves twice their mean, which begins at the bound for a batch: the first receives ask for one
message, and later ones for at most half as many as were seen.

Strategy of deleting: one thread takes committed batches in order and splits each into requests that a pool sends.
Requests that did not reach the queue are retried until `patience` is over; then `finish` raises, and the manifests
remain for the next run.

The cleanup of bad records and of the objects of large bodies runs before the messages are deleted, and again after a
crash. So a dead-letter queue may get a message twice but never misses one (a FIFO queue drops the second by its id). An
object that cannot be removed is left to the sweep of `LargeMessageQueue`; objects of bad records stay.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from veilmq.client.adapters.connect import connect
from veilmq.client.clock import Clock
from veilmq.client.errors import ObjectStoreFailed, PointerRefused
from veilmq.client.large import BODY_BYTES_MAX, PointerFormat, drop
from veilmq.client.large.pointer import read as read_pointer
from veilmq.client.large.pointer import stated_bytes
from veilmq.client.messages import Message, Peeked, Received
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.records import ObjectStore
from veilmq.model.errors import InFlightFull, VeilError
from veilmq.model.wording import counted
from veilmq.pipeline.drain.bad_records import BadRecord, mark_sent, of_manifest, unsent
from veilmq.pipeline.drain.batches import Batch
from veilmq.pipeline.drain.batches.queues import is_drained
from veilmq.pipeline.drain.manifests import open_manifest
from veilmq.pipeline.errors import OptionInvalid, SourceUnreachable, unusable
from veilmq.pipeline.options import DrainOptions, store_options_of
from veilmq.pipeline.places import Place

_PART: Final = 4
"""A batch counts as complete before its receives would be smaller than this part of a full one."""
_SURPRISE: Final = 16
"""A body is assumed to be at most this many times as large as the largest one so far."""

_MARGIN: Final = 2
"""How many times the mean of large bodies is reserved for one."""
_SEEN: Final = 1_000
"""Messages that the mean remembers."""


class Room:
    """Bytes of bodies that a batch may still take. Not thread-safe; one for all batches, because it learns sizes."""

    def __init__(self, bytes_max: int, able: Capabilities, large: PointerFormat | None = None) -> None:
        """large: the form of pointers, if their objects count."""
        self._bytes_max, self._left_bytes = bytes_max, bytes_max
        self._limit_bytes, self._receive_max = able.body_bytes_max, able.receive_messages_max
        self._largest_bytes = self._limit_bytes
        self._is_known = False
        self._large, self._seen = large, 1
        self._mean_bytes = float(bytes_max if large else 0)

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
        bodies = [_size_bytes(each) for each in came]
        size_bytes = sum(map(self._whole_bytes, came))
        self._left_bytes += taken - size_bytes
        if bodies:
            self._largest_bytes = max(bodies) if not self._is_known else max(self._largest_bytes, *bodies)
            self._is_known = True
        if bodies and self._large:
            self._seen = min(self._seen + len(came), max(_SEEN, len(came)))
            self._mean_bytes += (size_bytes - len(came) * self._mean_bytes) / self._seen

    def free(self, message: Received) -> None:
        """The message does not belong to this batch."""
        self._left_bytes += self._whole_bytes(message)

    def _whole_bytes(self, message: Received) -> int:
        stated = 0 if self._large is None else stated_bytes(message, self._large)
        # One that states more is a bad record, and nothing is fetched.
        return stated if 0 < stated <= BODY_BYTES_MAX else _size_bytes(message)

    @property
    def _likely_bytes(self) -> int:
        return max(1, min(self._limit_bytes, _SURPRISE * self._largest_bytes), int(_MARGIN * self._mean_bytes))


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
                came = _received(self._queue, count, lease=self._lease)
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
        came = _received(queue, count, lease=lease, wait=min(wait, queue.capabilities.wait_max))
    finally:
        room.give_back(taken, came)
    return came


def _received(queue: Queue, count: int, *, lease: float, wait: float = 0) -> list[Received]:
    """A queue of which others hold so many messages that it gives out none is as good as empty."""
    try:
        return queue.receive(count, lease=lease, wait=wait)
    except InFlightFull as error:
        log.info("nothing comes until others are done: %s", error)
        return []


def each_chunk(pool: ThreadPoolExecutor, work: Callable[[list[str]], None], items: list[str], size: int) -> None:
    """Run `work` on chunks of `items` in parallel. Raises what one of them raised."""
    futures = [pool.submit(work, items[at : at + size]) for at in range(0, len(items), size)]
    for future in futures:
        future.result()


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
                rest = counted(len(left), "message")
                raise SourceUnreachable(
                    f"{rest} of queue {self._queue.name} could not be deleted: {self._failure}.",
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


def _target(url: str, source: Queue) -> Queue:
    """The queue of the option deadLetters. Raises OptionInvalid, also if the drain would receive from it."""
    try:
        target = connect(url)
        comes_again = is_drained(target, source)
    except VeilError as error:
        raise OptionInvalid(*unusable("The queue of the option deadLetters", error)) from None
    if comes_again:
        target.close()
        wrong = f"The queue of the option deadLetters, {target.name}, is drained itself: a bad record would never end."
        raise OptionInvalid(wrong, "Name one that the options url and queues do not.")
    return target


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
            self._target = _target(options.dead_letters, queue)

    def close(self) -> None:
        """Close the dead-letter queue."""
        if self._target is not None:
            self._target.close()

    def run(self, batch: Batch) -> None:
        """Run before the batch's messages are deleted. Raises SourceUnreachable if dead letters could not be sent."""
        if bad := len(of_manifest(batch.path)):
            count = counted(bad, "message")
            log.warning("queue %s: %s of batch %d cannot be decoded", self._queue.name, count, batch.seq)
        if self._target is not None:
            for path, rows in unsent(batch.path):
                self._send(self._target, rows)
                mark_sent(path)
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
        reasons = {
            "veilmq.unreadable": row.reason[:_REASON_CHARACTERS_MAX],
            "veilmq.source": row.queue or self._queue.name,
        }
        if len(attributes) + len(reasons) + (row.type is not None) <= ATTRIBUTES_MAX:
            attributes |= reasons
        return Message(
            row.body,
            attributes=attributes if able.attributes else {},
            type=row.type if able.attributes else None,
            group=(row.group or row.queue or self._queue.name)
            if able.native_fifo
            else row.group
            if able.groups
            else None,
            deduplication_id=row.id if able.native_fifo else None,
        )

    def _remove_objects(self, manifest: Place, store: ObjectStore) -> None:
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
