"""The driver's side of a drain, without Spark: what each hook of a stream reader does.

    latest(start)   everything up to start is committed: purge what lies beyond it, delete what lies before, receive
                    the next batch, write its manifest, and only then return its offset
    pieces          the manifest's rows, cut into tasks; after a restart its leases are taken over

Strategy: an offset exists only after its manifest is on disk, and messages are deleted only when Spark asks for what
follows them. Everything else may be lost at any moment: the leases of a killed driver expire by themselves, a manifest
whose offset Spark never logged is purged, and the ids of a logged one are known again before the next receive.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import may_succeed_later
from veilmq.client.large import PointerFormat
from veilmq.client.messages import Extension, Received
from veilmq.client.queue import Queue
from veilmq.model.errors import LeaseError, ReceiptInvalid, VeilError
from veilmq.model.wording import counted
from veilmq.pipeline.drain import bad_records, batches
from veilmq.pipeline.drain.batches import Batch, BatchLeases, Remembered
from veilmq.pipeline.drain.batches.backlog import Backlog
from veilmq.pipeline.drain.batches.exchange import Cleanup, Deleter, Room, each_chunk, gather
from veilmq.pipeline.drain.batches.queues import Queues, opened, parted, total
from veilmq.pipeline.drain.batches.siblings import Siblings
from veilmq.pipeline.drain.manifests import Directory, Offset, open_manifest, table_of
from veilmq.pipeline.errors import OptionInvalid, SourceUnreachable
from veilmq.pipeline.options import DrainOptions, rows_default
from veilmq.pipeline.places import Place, modified, place
from veilmq.pipeline.sinks.claims.parquet import Claims

REMEMBER_SECONDS: Final = 14 * 86_400.0
_PAUSE_SECONDS: Final = 0.2
_RELEASED_ROWS: Final = 256
_PARTS: Final = 3
"""A batch is received within one part of the lease."""

log = logging.getLogger("veilmq.pipeline")

Span = tuple[str, int, int]
"""Path of a manifest, and a range of its record batches: the first, and the one after the last."""


class Driver:
    """One query's driver; opens its queue and directory in the constructor. All methods may raise PipelineError."""

    def __init__(
        self, options: DrainOptions, clock: Clock = SYSTEM, wrap: Callable[[Queue], Queue] = lambda queue: queue
    ) -> None:
        """`wrap`: wraps the queue of the option url, to inject faults."""
        self._options, self._clock = options, clock
        queue: object = opened(options, clock)
        self._queues = queue if isinstance(queue, Queues) else None
        self._queue = wrap(cast(Queue, queue))
        try:
            _check_lease(options, self._queue)
            self._cleanup = Cleanup(options, self._queue)
            self._claims = None if options.table is None else Claims(place(options.table))
            self.directory = Directory(place(options.directory), self._queue.name, clock=clock)
            bad_records.adopt_former(self.directory.path)
        except BaseException:
            self._queue.close()
            raise
        self._pool = ThreadPoolExecutor(options.receivers, "veilmq drain receive")
        large = PointerFormat(options.pointers) if options.unwrap[:1] == ("large",) else None
        self._room = Room(options.max_bytes, self._queue.capabilities, large)
        self._deleter = Deleter(
            self._queue, options.receivers, options.patience, clock, self._cleanup.run, self._batch_done
        )
        self._batches: dict[int, Batch] = {}
        self._remembered = Remembered()
        self._remember_s = REMEMBER_SECONDS
        self._lock = threading.Lock()
        self._target: int | None = None
        self._emitted = 0
        self._siblings = None
        if options.group is not None:
            self._siblings = Siblings(Path(options.group), Path(options.directory), self._queue.name)
        self._is_adopted = False
        self._start = Offset()
        if self._queues is None:
            self._backlog = Backlog(self._queue.stats, clock)
        else:
            self._backlog = Backlog(self._queues.known, clock, 0)

    def close(self) -> None:
        """Close everything; leases expire by themselves."""
        for batch in list(self._batches.values()):
            batch.leases.stop()
        self._deleter.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._cleanup.close()
        if self._claims is not None:
            self._claims.close()
        self.directory.close()
        self._queue.close()

    def prepare(self) -> None:
        """AvailableNow: messages that arrive from now on belong to the next run."""
        stats = self._asked(self._queue.stats if self._queues is None else self._queues.prepare)
        self._target = self._emitted + total(stats)
        self._backlog.note(stats)

    def latest(self, start: Offset, rows: int | None) -> Offset:
        """The next batch of up to `rows` messages (None: the option's value), or `start` if there are none."""
        self._start = start
        if self._claims is not None:
            self._claims.check(start.seq, start.file)
        self.directory.begin(start)
        self._adopt(start)
        with self._lock:
            self._remembered.expire(self._clock.wall() - self._remember_s)
        self.committed(start)
        wanted = self._wanted(rows)
        fresh = self._fresh(wanted) if wanted else {}
        if not fresh:
            self._deleter.finish()
            # Some messages may have come again meanwhile, with a valid handle.
            self.committed(start)
            self._deleter.finish()
            return start
        messages = self._in_order(list(fresh.values()))
        seq = start.seq + 1
        leases = BatchLeases(self._queue, messages, self._options.lease, self._clock)
        leases.start()
        try:
            offset = self.directory.write(seq, table_of(messages, seq, None if self._queues is None else parted))
        except BaseException:
            # Nobody will commit these messages: they come back when their leases end.
            leases.stop()
            raise
        if self._siblings is not None and not all(map(leases.unbroken, range(len(messages)))):
            leases.stop()
            self._purge(seq, self.directory.path / offset.file)
            return start
        with self._lock:
            self._batches[seq] = Batch(seq, self.directory.path / offset.file, messages, leases)
        self._emitted += len(messages)
        self._backlog.received(len(messages))
        return offset

    def backlog(self) -> dict[str, Any] | None:
        """What is still to come, after the last `latest`; see `batches.backlog`."""
        with self._lock:
            seqs = {batch.seq: batch.oldest for batch in self._batches.values() if batch.seq > self._start.seq}
        oldest = min((each for each in seqs.values() if each is not None), default=None)
        return self._backlog.report(max(seqs, default=self._start.seq), oldest)

    def pieces(self, start: Offset, end: Offset) -> list[Span]:
        """Tasks of the batch between two offsets. Raises ManifestDamaged, TableForeign."""
        if start.seq == end.seq:
            return []
        if self._claims is not None:
            self._claims.claim(end.seq, end.file)
        batch = self._batches.get(end.seq)
        if batch is None or batch.path.name != end.file:
            path = self.directory.checked(end)
            batch = batches.load(end.seq, path, self._queue, self._options.lease, self._clock)
            self._take_up(batch)
            with self._lock:
                self._batches[end.seq] = batch
        with open_manifest(batch.path) as reader:
            parts = int(reader.num_record_batches)
        step = max(1, -(-parts // self._options.partitions))
        return [(str(batch.path), at, min(at + step, parts)) for at in range(0, parts, step)]

    def committed(self, start: Offset) -> None:
        """Everything up to `start` is in the sink: delete it."""
        with self._lock:
            due = [batch for batch in self._batches.values() if batch.seq <= start.seq]
        for batch in due:
            if batch.to_delete() or batch.is_done or not batch.is_tidied:
                self._deleter.submit(batch)

    def _in_order(self, messages: list[Received]) -> list[Received]:
        """By queue, and by sequence number on FIFO queues."""
        if self._queues is not None:
            self._queues.emitted(messages)
            messages.sort(key=lambda each: parted(each.id)[0])
        if self._queue.capabilities.native_fifo:
            messages.sort(key=lambda each: (parted(each.id)[0] if self._queues else "", each.sequence_number or 0))
        return messages

    def _wanted(self, rows: int | None) -> int:
        bound = self._options.max_rows or rows_default(self._queue.capabilities)
        wanted = bound if rows is None else min(rows, bound)
        if self._target is None:
            return wanted
        return max(0, min(wanted, self._target - self._emitted))

    def _fresh(self, wanted: int) -> dict[str, Received]:
        """New messages, by id. Messages that were seen before get their new handle."""
        fresh: dict[str, Received] = {}
        options = self._options
        room = self._room
        room.begin()
        if self._queues is not None:
            self._asked(partial(self._queues.plan, wanted))
        # The first messages received must be leased in time, and more than can be received within a lease can never be
        # held.
        until = self._clock.monotonic() + options.lease / _PARTS
        while len(fresh) < wanted and room.fits and self._clock.monotonic() < until:
            more = partial(
                gather, self._pool, self._queue, wanted - len(fresh), room,
                lease=options.lease, receivers=options.receivers, wait=0 if fresh else options.wait,
                is_over=lambda: self._clock.monotonic() >= until,
            )  # fmt: skip
            came = self._asked(more)
            if not came:
                break
            again = []
            with self._lock:
                batches = list(self._batches.values())
                for message in came:
                    known = next((batch for batch in batches if message.id in batch.places), None)
                    if known is None and message.id not in self._remembered:
                        fresh[message.id] = message
                        continue
                    room.free(message)
                    if known is not None:
                        known.renew(message)
                    else:
                        again.append(message)
            self._delete_remembered(again)
            for message in self._of_siblings(came, fresh):
                room.free(fresh.pop(message))
        return fresh

    def _of_siblings(self, came: list[Received], fresh: dict[str, Received]) -> list[str]:
        """Ids of messages that another drain of the group has taken. Those that it has committed are deleted."""
        if self._siblings is None:
            return []
        # A service that does not count says 0.
        redelivered = [each.id for each in came if each.receive_count != 1 and each.id in fresh]
        claims = self._siblings.claims(redelivered) if redelivered else {}
        done = [fresh[each].handle for each, is_committed in claims.items() if is_committed]
        if done:
            self._asked(lambda: self._queue.delete_batch(done))
        if left := len(claims) - len(done):
            log.info("queue %s: left %s to another drain of the group", self._queue.name, counted(left, "message"))
        return list(claims)

    def _delete_remembered(self, again: list[Received]) -> None:
        if not again:
            return
        answers = self._asked(lambda: self._queue.delete_batch([each.handle for each in again]))
        for message, answer in zip(again, answers, strict=True):
            if answer is None and message.lease_end > self._clock.monotonic():
                self._remembered.settle(message.id)

    def _adopt(self, start: Offset) -> None:
        """Load what earlier processes did up to `start`, and undo what they began beyond it."""
        self.directory.check_reach(start)
        for seq, path in self.directory.files("arrow"):
            if seq > start.seq:
                self._purge(seq, path)
        if self._is_adopted:
            return
        for seq, path in self.directory.files("arrow"):
            if not self.directory.is_committed(path):
                self._purge(seq, path)  # it came late, of a process that was taken for dead
            elif seq not in self._batches:
                batch = batches.load(seq, path, self._queue, self._options.lease, self._clock)
                self._take_up(batch)
                self._batches[seq] = batch
        self._remember_s = self._remember_seconds()
        for _, path in self.directory.files("ids"):
            self._remembered.add(path, path.read_text().split("\n"), modified(path))
        self._is_adopted = True

    def _take_up(self, batch: Batch) -> None:
        """Take over the batch's leases from another process."""
        if not batch.places:
            return
        self._asked(batch.leases.revive)
        batch.leases.start()

    def _purge(self, seq: int, path: Place) -> None:
        """Remove a manifest that Spark never logged: its messages were not emitted, and anyone may receive them."""
        with self._lock:
            batch = self._batches.get(seq)
            if batch is not None and batch.path == path:
                del self._batches[seq]
                batch.leases.stop()
        handles = [each.handle for each in batches.loaded(path)]
        path.unlink()
        count = counted(len(handles), "message")
        log.info("queue %s: a batch was never logged: %s to give back", self._queue.name, count)
        each_chunk(self._pool, self._release, handles, _RELEASED_ROWS)

    def _release(self, handles: list[str]) -> None:
        """Release what is still ours; a message that cannot be released comes back when its lease ends."""
        try:
            if self._queue.capabilities.batch_extend:
                self._queue.extend_batch([Extension(handle, 0) for handle in handles])
                return
            for handle in handles:
                with suppress(LeaseError, ReceiptInvalid):
                    self._queue.release(handle)
        except VeilError as error:
            log.info("queue %s: not released: %s", self._queue.name, error)

    def _batch_done(self, batch: Batch) -> None:
        ids = sorted(batch.doubtful)
        self.directory.keep_ids(batch.path, ids)
        with self._lock:
            self._remembered.add(batch.path.with_suffix(".ids"), ids, self._clock.wall())
            self._batches.pop(batch.seq, None)

    def _remember_seconds(self) -> float:
        if self._options.remember is not None:
            return self._options.remember
        return self._asked(self._queue.stats).retention or REMEMBER_SECONDS

    def _asked(self, call: Any) -> Any:
        """The queue's answer; retries for `patience`. Raises SourceUnreachable."""
        end = self._clock.monotonic() + self._options.patience
        while True:
            try:
                return call()
            except VeilError as error:
                if not may_succeed_later(error) or self._clock.monotonic() >= end:
                    raise SourceUnreachable(
                        f"Queue {self._queue.name} does not answer as it should: {error}.",
                        "Run the query again: it goes on where it was.",
                    ) from error
            time.sleep(_PAUSE_SECONDS)


def _check_lease(options: DrainOptions, queue: Queue) -> None:
    able = queue.capabilities
    if not able.lease_min <= options.lease <= able.lease_max:
        raise OptionInvalid(
            f"lease={options.lease:g} cannot be.",
            f"{able.protocol} takes {able.lease_min:g} to {able.lease_max:g} seconds.",
        )
