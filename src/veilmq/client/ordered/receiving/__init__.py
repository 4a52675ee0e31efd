"""The receiving side: hands out messages in the order of their numbers, again and again until each is acknowledged.

Strategy: the thread that calls `receive` pulls, one at a time (intake.py). Messages that are ahead wait in a buffer
(reorder.py), with their leases held by a keeper. An acknowledgement is first made durable in the storage, and only then
is the message deleted: after a crash in between it comes back, and its number shows that it was done. A handle names
the place and the hand-out, so a stale handle changes nothing. Source: document 002, OrderedQueueWrapper. The document's
sample deletes first and so loses messages.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from veilmq.client.clock import SYSTEM, Clock, sleeping_by
from veilmq.client.errors import GapFound
from veilmq.client.keeper import LeaseKeeper, check_keeps
from veilmq.client.ordered.numbering import ReceiverState, Side, check_queue, decode, marking_of
from veilmq.client.ordered.receiving.intake import Intake
from veilmq.client.ordered.receiving.reorder import (
    FOREVER,
    Entry,
    GapPolicy,
    GapWatch,
    Ordered,
    Place,
    Reorder,
    give_back,
    place_of,
    shown,
)
from veilmq.client.ordered.storage import Storage, locked
from veilmq.client.queue import Queue
from veilmq.client.shared import checks
from veilmq.client.unreadable import Policy, checked_policy, keep
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseTaken,
    MessageGone,
    ParameterInvalid,
    VeilError,
)

GAP_SECONDS: Final = 300.0
LEASE_SECONDS: Final = 30.0
BUFFER_MAX: Final = 1_000
_REST_SECONDS_MAX: Final = 1.0
_REST_SECONDS_MIN: Final = 0.01

log = logging.getLogger("veilmq.ordered")


class OrderedReceiver(Side):
    """Hands out messages in order. One process holds the storage; its threads may receive.

    With `in_hand_max` 1, a message is handed out only after the previous one is acknowledged. It stays handed out until
    it is acknowledged (`delete`) or released, the hand-out's own lease ends, or the process ends. After `close` every
    call raises TransportError; in a forked child, StorageHeld.
    """

    _role = "receiver"

    def __init__(
        self,
        queue: Queue,
        storage: Storage,
        *,
        marking: str = "auto",
        lease: float = LEASE_SECONDS,
        gap_timeout: float | None = GAP_SECONDS,
        on_gap: GapPolicy | str = GapPolicy.WAIT,
        tell_gap: Callable[[GapFound], object] | None = None,
        unreadable: Policy = keep,
        in_hand_max: int = 1,
        buffer_max: int = BUFFER_MAX,
        reset: bool = False,
        keeper: LeaseKeeper | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """lease: seconds of each lease that the keeper renews; after a crash the buffered messages are visible within
        that time. gap_timeout: seconds before a missing number counts as a gap; None: never, which requires on_gap
        `wait`. on_gap: `wait` (and report it), `skip`, `raise`. tell_gap: called with each gap. unreadable: what to do
        with messages without a number, and with those that come after their gap was skipped: `DeadLetters(queue)`, a
        function, or `keep` (they come again). in_hand_max: the most messages handed out and not acknowledged. keeper:
        the user's own, over this queue.

        Raises StorageHeld, StateInvalid, QueueRecreated, ParameterInvalid, the errors of `stats` and of the storage.
        """
        capabilities = checks.queue(queue).capabilities
        checks.at_least(buffer_max, "buffer_max", 1)
        if checks.at_least(in_hand_max, "in_hand_max", 1) > buffer_max:
            reason = f"must be at most buffer_max = {buffer_max}, not {in_hand_max}"
            raise ParameterInvalid(parameter="in_hand_max", reason=reason)
        self.queue = queue
        read = marking_of(marking, capabilities)
        self._in_hand_max = in_hand_max
        self._clock = clock
        stats = queue.stats()
        self._gaps = GapWatch(checks.choice(on_gap, GapPolicy, "on_gap"), gap_timeout, tell_gap)
        self._gaps.check(lease, stats.retention)
        checked_policy(unreadable, queue)
        if keeper is not None:
            check_keeps(keeper, queue)
            self._keeper = keeper
        else:
            self._keeper = LeaseKeeper(
                queue, visibility_timeout=lease, interval=lease / 3, minimal_life=lease / 6, clock=clock
            )
        self._own_keeper = keeper is None
        self._changed = sleeping_by(clock, threading.Condition())
        self._acks = threading.Lock()
        """Serialises saves. Take it before `_changed`, never while holding `_changed`."""
        self._ended = False
        """Nothing is saved any more. Guarded by `_acks`."""
        self._unsure: tuple[Place, Entry, ReceiverState] | None = None
        """An acknowledgement whose transaction raised an error, and may be committed nevertheless."""
        self._attempts = self._interrupts = 0
        self._unlocked: tuple[int, int] | None = None
        """The missing number for which a FIFO group's messages were released."""
        self._storage = locked(storage, clock)
        self._storage.acquire()
        self._pid = self._this()
        try:
            self._reorder: Reorder[Entry] = Reorder(self._open(reset, stats.incarnation), buffer_max)
        except BaseException:
            self._storage.release()
            raise
        self._intake = Intake(queue, read, self._keeper, unreadable, lease, self._reorder, self._changed, clock)
        self._deletions = self._intake.deletions

    @property
    def next_number(self) -> int:
        """The lowest number that is not acknowledged."""
        return self._reorder.state.next

    @property
    def buffered(self) -> int:
        """How many messages wait for their turn."""
        return len(self._reorder.held)

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Ordered]:
        """The next messages in order; empty if the next one did not come within `wait` seconds or before `close`.

        lease: seconds until each is handed out again unless it is acknowledged or extended; None: not while this
        process lives. Raises GapFound, QueueRecreated, StorageLost, and like `Queue.receive`.
        """
        checks.at_least(count_max, "count_max", 1)
        checks.seconds(wait, "wait", 0, math.inf)
        if lease is not None:
            checks.positive(lease, "lease")
        self._enter()
        self._check_open()
        deadline = self._clock.monotonic() + wait
        rest = _REST_SECONDS_MIN
        interrupts = self._interrupts
        while True:
            self._acknowledge_voids()
            with self._changed:
                now = self._clock.monotonic()
                ready = [] if self._closed else self._hand_out(count_max, lease, now)
                left = deadline - now
                if ready or self._closed or self._interrupts != interrupts:
                    return ready
                if self._intake.busy or not self._wants_more():
                    if left <= 0:
                        return []
                    self._changed.wait(min(left, self._pause(now)))
                    continue
                pause = min(max(0.0, left), self._gaps.wait_max(now))
                self._intake.begin()
            came, early = self._intake.pull(pause)
            if came or self._closed:
                rest = _REST_SECONDS_MIN
            elif not self._mind_gap() and not self._ready():
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    return []
                if early:
                    with self._changed:
                        self._changed.wait(min(rest, left))
                    rest = min(rest * 2, _REST_SECONDS_MAX)

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """Keep it handed out for `lease` seconds from now; the keeper renews the queue's own lease. Raises like
        `delete`; CapabilityMissing for a body, ParameterInvalid for a lease that is no duration.
        """
        checks.not_negative(lease, "lease")
        if body is not None:
            raise CapabilityMissing(capability="replacing the body of an ordered message")
        self._enter()
        with self._changed:
            self._check_open()
            _, entry = self._find(handle)
            entry.until = self._clock.monotonic() + lease
        return handle

    def release(self, handle: str, delay: float = 0) -> None:
        """Hand it out again after `delay` seconds, and nothing later before it. Raises like `delete`; ParameterInvalid
        for a delay that is no duration."""
        checks.not_negative(delay, "delay")
        self._enter()
        with self._changed:
            self._check_open()
            place, entry = self._find(handle)
            entry.not_before = self._clock.monotonic() + delay
            self._reorder.give_back(place)
            self._changed.notify_all()

    def delete(self, handle: str) -> None:
        """Acknowledge durably, then delete the message.

        Raises LeaseTaken (it was handed out again), MessageGone (it was acknowledged before), ReceiptInvalid,
        StorageLost, and the storage's errors. If the queue cannot be reached, the message stays there and is dropped by
        its number when it comes back.
        """
        (error,) = self.delete_batch([handle])
        if error is not None:
            raise error

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """Acknowledge all, in one save. Returns None for each success, else the error that `delete` raises."""
        errors: list[VeilError | None] = []
        with self._deciding():
            found: dict[Place, Entry] = {}
            with self._changed:
                for handle in checks.batch(handles, "handles"):
                    try:
                        place, entry = self._find(handle)
                    except VeilError as error:
                        errors.append(error)
                        continue
                    found[place] = entry
                    errors.append(None)
                state = self._reorder.acknowledged(found.keys())
            if found:
                self._save(state)
                self._acknowledged(found, state)
        self._deletions.delete(entry.lease for entry in found.values())
        return errors

    @contextmanager
    def acknowledging(self, handle: str) -> Iterator[Any]:
        """A cursor of the storage's database: its writes and the acknowledgement are one transaction.

        If the block raises, neither happens, and the message stays handed out. If the commit raises, both may have
        happened: the next call checks, and MessageGone means that they did. Raises like `delete`; CapabilityMissing if
        the storage is not a table. No thread can acknowledge anything else meanwhile.
        """
        saving = getattr(self._storage, "saving", None)
        if saving is None:
            raise CapabilityMissing(capability=f"a transaction in {self._storage}")
        with self._deciding():
            with self._changed:
                place, entry = self._find(handle)
                state = self._reorder.acknowledged({place})
            try:
                with saving(msgspec.json.encode(state)) as cursor:
                    yield cursor
            except BaseException:
                self._unsure = place, entry, state
                raise
            self._acknowledged({place: entry}, state)
        self._deletions.delete([entry.lease])

    def reset(self, next_number: int = 1) -> None:
        """Forget all acknowledgements, and begin with `next_number` of the epoch of the next message that comes."""
        with self._deciding():
            state = self._fresh(self.queue.stats().incarnation)
            state.next = next_number
            self._save(state)
            with self._changed:
                entries = self._reorder.restart(state)
        for entry in entries:
            give_back(entry.lease)

    def interrupt(self) -> None:
        """Make receives that wait in other threads return now, also those of the queue itself."""
        with self._changed:
            self._interrupts += 1
            self._changed.notify_all()
        self.queue.interrupt()

    def close(self) -> None:
        """Give back what is buffered or handed out, and release the storage; the queue stays open. Idempotent; does
        nothing in a forked child.

        A waiting receive ends, and so does everybody else's wait at this queue object. Messages that it still brings
        are released. Waits for an acknowledgement in progress.
        """
        if self.inherited:
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._intake.close()
        try:
            self._intake.end()
        finally:
            with self._acks:
                self._ended = True
                try:
                    self._let_go()
                finally:
                    self._storage.release()

    def _let_go(self) -> None:
        with self._changed:
            entries = [*self._reorder.held.values(), *self._reorder.out.values()]
        if self._own_keeper:
            self._keeper.close()
        else:
            for entry in entries:
                give_back(entry.lease)
        self._deletions.close()

    def _open(self, reset: bool, incarnation: str | None) -> ReceiverState:
        data = self._storage.load()
        if data is not None:
            state = decode(ReceiverState, data, str(self._storage))
            if not reset:
                check_queue(state, self.queue.name, incarnation, str(self._storage))
                return state
        state = self._fresh(incarnation)
        self._save(state)
        return state

    def _fresh(self, incarnation: str | None) -> ReceiverState:
        return ReceiverState(queue=self.queue.name, incarnation=incarnation)

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Serialises saves, and refuses them after `close`. Raises TransportError, StorageHeld."""
        self._enter()
        with self._acks:
            if self._ended:
                raise self._is_closed()
            self._look_again()
            yield

    def _look_again(self) -> None:
        """With `_acks` held: check whether the acknowledgement that raised an error was committed."""
        if self._unsure is None:
            return
        place, entry, state = self._unsure
        data = self._storage.load()
        self._unsure = None
        if data is not None and decode(ReceiverState, data, str(self._storage)) == state:
            self._acknowledged({place: entry}, state)
            self._deletions.delete([entry.lease])

    def _save(self, state: ReceiverState) -> None:
        self._storage.save(msgspec.json.encode(state))

    def _acknowledged(self, found: dict[Place, Entry], state: ReceiverState) -> None:
        with self._changed:
            self._reorder.acknowledge(found.keys(), state)
            self._changed.notify_all()

    def _find(self, handle: str) -> tuple[Place, Entry]:
        """The place and the entry that the handle names. Raises ReceiptInvalid, LeaseTaken, MessageGone."""
        place, attempt = place_of(handle)
        entry = self._reorder.out.get(place)
        if entry is None and place not in self._reorder.held:
            raise MessageGone(sequence=place.number, attempt=attempt)
        if entry is None or entry.attempt != attempt:
            raise LeaseTaken(sequence=place.number, attempt=attempt)
        return place, entry

    def _wants_more(self) -> bool:
        """Whether a pull could bring a message that may go out now."""
        due = self._reorder.due()
        return len(self._reorder.out) < self._in_hand_max and (due is None or due not in self._reorder.held)

    def _ready(self) -> bool:
        with self._changed:
            return not self._wants_more()

    def _pause(self, now: float) -> float:
        """Seconds until something is due without a new event."""
        ends = [entry.until for entry in self._reorder.out.values()]
        due = self._reorder.due()
        if due is not None and due in self._reorder.held:
            ends.append(self._reorder.held[due].not_before)
        return min([end - now for end in ends if end > now] + [_REST_SECONDS_MAX])

    def _hand_out(self, count_max: int, lease: float | None, now: float) -> list[Ordered]:
        """With the lock held: hand out the messages that may go out now."""
        reorder = self._reorder
        for place in [place for place, entry in reorder.out.items() if entry.until <= now]:
            reorder.give_back(place)
        ready: list[Ordered] = []
        while len(ready) < count_max and len(reorder.out) < self._in_hand_max:
            due = reorder.due()
            entry = None if due is None else reorder.held.get(due)
            if due is None or entry is None or entry.void or entry.not_before > now:
                break
            if entry.lease.lost:
                reorder.forget(due, entry)
                break
            reorder.take()
            self._attempts += 1
            entry.hands += 1
            entry.attempt = self._attempts
            entry.until = FOREVER if lease is None else now + lease
            ready.append(shown(due, entry, now + self._keeper.parameters.max_hold))
        return ready

    def _acknowledge_voids(self) -> None:
        """Acknowledge void numbers when it is their turn."""
        if self._unsure is not None:
            with self._deciding():
                pass
        while not self._closed and (due := self._reorder.due()) is not None:
            entry = self._reorder.held.get(due)
            if entry is None or not entry.void:
                return
            with self._deciding():
                with self._changed:
                    state = self._reorder.acknowledged({due})
                self._save(state)
                self._acknowledged({due: entry}, state)
            self._deletions.delete([entry.lease])

    def _mind_gap(self) -> bool:
        """Handle a gap that has lasted for its timeout. Returns whether it is gone now. Raises GapFound,
        QueueRecreated."""
        now = self._clock.monotonic()
        with self._changed:
            gap = self._reorder.gap()
        if gap is not None and self.queue.capabilities.native_fifo and self._unlocked != (gap.epoch, gap.first):
            # The group is locked while we hold its later messages. Release them: then the queue starts with the missing
            # one.
            self._unlocked = gap.epoch, gap.first
            with self._changed:
                entries = self._reorder.let_go()
            for entry in entries:
                give_back(entry.lease)
            return True
        waited = self._gaps.over(gap, now)
        if gap is None or waited is None:
            return False
        state = self._reorder.state
        check_queue(state, self.queue.name, self.queue.stats().incarnation, str(self._storage))
        if not self._gaps.report(self.queue.name, gap, waited, now):
            return False
        with self._deciding():
            with self._changed:
                if self._reorder.gap() != gap:
                    return True
                state = self._reorder.skipped(gap)
            self._save(state)
            with self._changed:
                self._reorder.skip(state)
                self._changed.notify_all()
        return True
