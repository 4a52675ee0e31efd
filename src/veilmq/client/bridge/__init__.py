"""A bridge: moves or copies messages from one queue to another, at least once.

Strategy: a few threads, each with one batch of up to ten messages in hand, so memory is bounded. A batch is received,
sent, and deleted at the source only when the target has acknowledged it; whatever ends the process in between, the
messages come back at the source when their leases end. A `LeaseKeeper` extends the leases while the target does not
answer. What the target refuses for good, what the source's adapter cannot decode (`SetAside`), and in a copy
everything, stays leased until the end and is then given back, so that it is not received again and again.

Order: from one FIFO queue to another, a group's next message is sent when the target has answered for the one before.

Duplicates: a message may be at the target twice if the answer to a send was lost, or the process was killed between the
answer and the delete. A FIFO target drops the second one within five minutes, because its deduplication id is made of
the source's message id (carrying.py). A message that was sent but could not be deleted is not sent again by this run;
if it comes again, it is only deleted.

Two ends: `stop` (Ctrl-C) also shortens the patience with a queue that does not answer. `_ends_receiving` alone, set
when the source is empty, does not.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from veilmq.client.bridge.carrying import carried
from veilmq.client.clock import SYSTEM, Clock, Stop
from veilmq.client.errors import Undecodable, Unreadable, may_have_happened, may_succeed_later
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.keeper.lease import Lease
from veilmq.client.messages import Message, Received
from veilmq.client.queue import Queue, identity_of
from veilmq.client.shared import checks
from veilmq.model.errors import (
    CapabilityMissing,
    InFlightFull,
    LeaseError,
    MessageGone,
    ParameterInvalid,
    ReceiptInvalid,
    VeilError,
)

BATCH: Final = 10
LEASE_MIN: Final = 2.0
"""Seconds; it is extended when half of it is over."""
WORKERS_MAX: Final = 64
REFUSED_MAX: Final = 1_000
"""Messages that are refused, before the bridge ends."""
COPIES_MAX: Final = 100_000
"""Messages of one copy: all their leases are held until its end."""
_REMEMBERED_MAX: Final = 100_000
_LOOK_SECONDS: Final = 0.1
_POLL_SECONDS: Final = 1.0
_PAUSES: Final = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Seconds between attempts while a queue does not answer; the last one repeats."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a bridge works. Durations in seconds."""

    copies: bool = False
    """Leave the messages at the source: their leases are held until the end, and then given back."""
    lease: float = 60
    """Extended while the target does not answer. After a kill, messages come back when it ends."""
    workers: int = 4
    """Batches in hand at the same time."""
    rate: float | None = None
    """Messages a second."""
    limit: int | None = None
    """End after so many messages."""
    until_empty: bool = False
    """End when the source counts nothing but what is held here, or when nothing came for one lease."""
    group: str | None = None
    """Of messages without one, at a FIFO target; None: one for each message."""
    named: bool = False
    """Give each message the source's id as deduplication id, for a target that knows what to do with it."""
    give_up_after: float = 300
    """End when a queue has not answered for so long."""


class Counts(msgspec.Struct):
    """What was done so far, in messages."""

    received: int = 0
    sent: int = 0
    """Acknowledged by the target."""
    duplicates: int = 0
    """Of these: the target says that it had them already."""
    deleted: int = 0
    """At the source."""
    refused: int = 0
    """By the target, for good, or not decodable; they stay at the source."""
    uncertain: int = 0
    """Sent again because an answer was lost: may be at the target twice."""
    undeleted: int = 0
    """Sent, but still at the source, which did not let go of them: they come back there."""
    reasons: dict[str, int] = {}
    """Why messages were refused."""


class SetAside:
    """The policy (`veilmq.client.unreadable`) to open both accounts with: the bridge counts and holds such messages."""

    identity = "bridge"
    """See `veilmq.client.queue`."""

    def __init__(self) -> None:
        self.take: Callable[[Received, Unreadable], None] | None = None

    def __call__(self, queue: Queue, message: Received, error: Unreadable) -> None:
        """Hand it to the bridge, if one runs."""
        if self.take is not None:
            self.take(message, error)


class Bridge:
    """One run from `source` to `target`. Both stay open. Raises ParameterInvalid, CapabilityMissing."""

    def __init__(
        self, source: Queue, target: Queue, options: Options, clock: Clock = SYSTEM, aside: SetAside | None = None
    ) -> None:
        """aside: of the source's account; None: the bridge does not hear of what cannot be decoded."""
        check(source, options)
        if identity_of(source) == identity_of(target):
            raise ParameterInvalid(parameter="target", reason="is the same queue as the source")
        self._source, self._target, self._options, self._clock = source, target, options, clock
        self._keeper = LeaseKeeper(
            source, visibility_timeout=options.lease, interval=options.lease / 3, minimal_life=options.lease / 6,
            max_hold=source.capabilities.lease_total_max or 86_400.0, clock=clock,
        )  # fmt: skip
        self._pace = Pace(options.rate, options.limit, clock)
        self._lock = threading.Lock()
        self._stop, self._ends_receiving = Stop(clock), Stop(clock)
        self._counts = Counts()
        self._known: set[str] = set()
        """Ids of messages that the target has, and that may come again."""
        self._idle_since: float | None = None
        self._carrying = 0
        """Batches that the target does not have yet, or that are not deleted yet."""
        self._undeletable_since: float | None = None
        self._failure: BaseException | None = None
        if aside is not None:
            aside.take = self._hold

    def counts(self) -> Counts:
        """What was done so far. Any thread."""
        with self._lock:
            return msgspec.structs.replace(self._counts, reasons=dict(self._counts.reasons))

    def stop(self) -> None:
        """Receive nothing more; what is in hand is still sent and deleted. Any thread."""
        self._stop.set()
        self._end_receiving()

    def _end_receiving(self) -> None:
        self._ends_receiving.set()
        self._source.interrupt()

    def run(self, watch: Callable[[Counts], object] = lambda counts: None) -> Counts:
        """Run until `stop`, or as the options say. watch: called ten times a second, in this thread.

        Raises TransportError (a queue did not answer for too long), and what else a queue refuses for good.
        """
        threads = [
            threading.Thread(target=self._work, name=f"veilmq-bridge-{number}", daemon=True)
            for number in range(self._options.workers)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_LOOK_SECONDS)
                    watch(self.counts())
        finally:
            self.stop()
            self._keeper.close(release=True)
        if self._failure is not None:
            raise self._failure
        return self.counts()

    def _work(self) -> None:
        try:
            while not self._ends_receiving.is_set():
                most = min(BATCH, self._source.capabilities.receive_messages_max)
                allowed = self._pace.take(most, self._ends_receiving)
                if not allowed:
                    break
                received = self._receive(allowed)
                self._pace.give_back(allowed - len(received))
                if received:
                    self._count_batches(1)
                    try:
                        self._carry(received)
                    finally:
                        self._count_batches(-1)
                elif self._options.until_empty and self._is_empty():
                    self._end_receiving()
        except BaseException as error:  # noqa: BLE001 raised by run()
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.stop()

    def _count_batches(self, batches: int) -> None:
        """Count the batches in hand; the source is not idle."""
        with self._lock:
            self._carrying += batches
            self._idle_since = None

    def _receive(self, count: int) -> list[Received]:
        wait = min(_POLL_SECONDS, self._source.capabilities.wait_max)
        patience = _Patience(self._options.give_up_after, self._clock, self._ends_receiving)
        while not self._ends_receiving.is_set():
            try:
                return self._source.receive(count, lease=self._options.lease, wait=wait)
            except VeilError as error:
                if isinstance(error, InFlightFull) and self._options.copies:
                    reason = "no more messages may be in flight at the source; what was copied so far is at the target"
                    raise CapabilityMissing(capability=f"a longer copy: {reason}") from error
                if not patience.goes_on(error):
                    raise
        return []

    def _is_empty(self) -> bool:
        """Whether nothing is left but what nobody gives out before one lease is over. Not while a batch is in hand:
        its messages may come back."""
        now = self._clock.monotonic()
        with self._lock:
            if self._carrying:
                return False
            if self._idle_since is None:
                self._idle_since = now
            idle = now - self._idle_since
        if idle > self._options.lease + _POLL_SECONDS:
            return True
        try:
            stats = self._source.stats()
        except VeilError:
            return False
        return stats.visible + (stats.in_flight or 0) <= self._keeper.leases

    def _carry(self, received: Sequence[Received]) -> None:
        """Send the messages, and delete at the source what the target has."""
        leases = [lease for lease in map(self._registered, received) if lease is not None]
        with self._lock:
            self._counts.received += len(leases)
            known = [lease for lease in leases if lease.message.id in self._known]
        copy = partial(
            carried, target=self._target.capabilities, group=self._options.group, now=self._clock.wall(),
            named=self._options.named, source=self._source.capabilities,
        )  # fmt: skip
        fresh = [lease for lease in leases if lease not in known]
        done: list[Lease] = []
        try:
            self._send([(lease, copy(lease.message)) for lease in fresh], done)
        finally:
            if self._options.copies:
                self._remember([lease.message.id for lease in done])
            else:
                self._delete([*known, *done])
        if self._options.copies and self._keeper.leases > COPIES_MAX:
            raise CapabilityMissing(capability=f"a copy of more than {COPIES_MAX} messages: their leases are all held")

    def _hold(self, message: Received, error: Unreadable) -> None:
        """What cannot be decoded stays leased until the end, as what the target refuses."""
        if self._registered(message) is None:
            return
        self._add(received=1)
        try:
            self._refuse(error)
        except VeilError as failure:
            self._fail(failure)

    def _registered(self, message: Received) -> Lease | None:
        """None: its lease is over already, because this process or the answer was late; it comes back."""
        try:
            return self._keeper.register(message)
        except LeaseError:
            return None

    def _send(self, pending: list[tuple[Lease, Message]], done: list[Lease]) -> None:
        """Add to `done` those that the target acknowledged; the others stay leased."""
        patience = _Patience(self._options.give_up_after, self._clock, self._stop)
        in_order = self._source.capabilities.native_fifo and self._target.capabilities.native_fifo
        while pending:
            first, later = _by_turns(pending) if in_order else (pending, [])
            try:
                outcomes = self._target.send_batch([message for _, message in first])
            except VeilError as error:
                if not patience.goes_on(error):
                    raise
                continue
            again: list[tuple[Lease, Message]] = []
            failed: VeilError | None = None
            for (lease, message), outcome in zip(first, outcomes, strict=True):
                if not isinstance(outcome, VeilError):
                    done.append(lease)
                    self._add(sent=1, duplicates=int(outcome.duplicate))
                elif may_succeed_later(outcome):
                    failed = outcome
                    again.append((lease, message))
                    self._add(uncertain=int(may_have_happened(outcome)))
                else:
                    self._refuse(outcome)
            if failed is not None and not patience.goes_on(failed):
                raise failed
            pending = again + later

    def _refuse(self, error: VeilError) -> None:
        """It stays leased until the end. Raises the error if too many were refused."""
        with self._lock:
            self._counts.refused += 1
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, Undecodable):
                reason = f"{type(error).__name__}: {error.reason}; with base64=0 in the URLs, bodies go as they are"
            reasons = self._counts.reasons
            if reason in reasons or len(reasons) < BATCH:
                reasons[reason] = reasons.get(reason, 0) + 1
            if self._counts.refused >= REFUSED_MAX:
                raise error

    def _delete(self, leases: list[Lease]) -> None:
        """Raises what the source refuses for good, and what it answers for longer than `give_up_after`."""
        for lease in leases:
            self._keeper.forget(lease)
        pending = leases
        patience = _Patience(self._options.lease / 2, self._clock, self._stop)
        while pending:
            try:
                outcomes = self._source.delete_batch([lease.handle for lease in pending])
            except VeilError as error:
                outcomes = [error] * len(pending)
            left = [(lease, fault) for lease, fault in zip(pending, outcomes, strict=True) if not _is_gone(fault)]
            still = [lease for lease, _ in left]
            self._count_deleted([lease for lease in pending if lease not in still])
            pending = still
            faults = [fault for _, fault in left if fault is not None]
            final = next((each for each in faults if not may_succeed_later(each) and not _lost_lease(each)), None)
            failed = next(filter(may_succeed_later, faults), None)
            if pending and (final or failed is None or not patience.goes_on(failed)):
                self._count_undeleted([lease.message.id for lease in pending], faults[0])
                if final or (failed is not None and self._deletes_too_long()):
                    raise final or failed or faults[0]
                return

    def _count_deleted(self, leases: list[Lease]) -> None:
        with self._lock:
            back = self._known.intersection(lease.message.id for lease in leases)
            self._known -= back
            self._counts.undeleted -= len(back)
            self._counts.deleted += len(leases)
            if leases:
                self._undeletable_since = None

    def _count_undeleted(self, ids: list[str], error: VeilError) -> None:
        """Raises the error if too many are to be remembered."""
        with self._lock:
            self._counts.undeleted += len(set(ids) - self._known)
            self._known.update(ids)
            if len(self._known) > _REMEMBERED_MAX:
                raise error

    def _deletes_too_long(self) -> bool:
        """Whether no delete has succeeded for so long that it is no use to receive more."""
        now = self._clock.monotonic()
        with self._lock:
            if self._undeletable_since is None:
                self._undeletable_since = now
            return now - self._undeletable_since > self._options.give_up_after

    def _remember(self, ids: list[str]) -> None:
        with self._lock:
            self._known.update(ids)

    def _add(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + count)


def check(source: Queue, options: Options) -> None:
    """Raises ParameterInvalid, CapabilityMissing for what no bridge from this queue can do. No I/O."""
    checks.whole(options.workers, "workers", 1, WORKERS_MAX)
    checks.number(options.lease, "lease", max(source.capabilities.lease_min, LEASE_MIN), source.capabilities.lease_max)
    if options.rate is not None:
        checks.positive(options.rate, "rate", kind="number of messages a second")
    if options.limit is not None:
        checks.at_least(options.limit, "limit", 1)
    checks.token(options.group, "group")
    if options.copies and source.capabilities.native_fifo:
        reason = "a FIFO queue gives out the rest of a group only when what it gave out before is deleted"
        raise CapabilityMissing(capability=f"a copy that leaves the messages in a FIFO queue: {reason}")


def _lost_lease(error: VeilError) -> bool:
    """Whether only this lease has ended; some services call the handle invalid then."""
    return isinstance(error, LeaseError | ReceiptInvalid)


def _by_turns(pending: list[tuple[Lease, Message]]) -> tuple[list[tuple[Lease, Message]], list[tuple[Lease, Message]]]:
    """The first message of each group, and the others."""
    groups: set[str | None] = set()
    first: list[tuple[Lease, Message]] = []
    later: list[tuple[Lease, Message]] = []
    for each in pending:
        group = each[1].group
        (later if group in groups else first).append(each)
        groups.add(group)
    return first, later


def _is_gone(outcome: VeilError | None) -> bool:
    return outcome is None or isinstance(outcome, MessageGone)


class _Patience:
    """Pauses between attempts, until they last too long or the bridge stops."""

    def __init__(self, seconds: float, clock: Clock, stop: Stop) -> None:
        self._end = clock.monotonic() + seconds
        self._clock, self._stop = clock, stop
        self._number = 0

    def goes_on(self, error: VeilError) -> bool:
        """Pause; False if it is no use to try again."""
        if not may_succeed_later(error) or self._clock.monotonic() > self._end:
            return False
        pause = _PAUSES[min(self._number, len(_PAUSES) - 1)]
        self._number += 1
        return not self._stop.wait(pause) or self._number == 1


class Pace:
    """How many messages may be received now: by rate and by limit. Any thread."""

    def __init__(self, rate: float | None, limit: int | None, clock: Clock) -> None:
        self._rate, self._left, self._clock = rate, limit, clock
        self._lock = threading.Lock()
        self._tokens, self._at = 0.0, clock.monotonic()

    def take(self, most: int, stop: Stop) -> int:
        """Wait until at least one message may be received; 0 at the limit, and after a stop."""
        while not stop.is_set():
            with self._lock:
                count, pause = self._now(most)
                if count or not pause:
                    return count
            stop.wait(pause)
        return 0

    def give_back(self, count: int) -> None:
        """So many were not received."""
        with self._lock:
            self._tokens += count
            if self._left is not None:
                self._left += count

    def _now(self, most: int) -> tuple[int, float]:
        """How many may go, or seconds until one may."""
        if self._left is not None:
            most = min(most, self._left)
        if not most:
            return 0, 0.0
        if self._rate is not None:
            now = self._clock.monotonic()
            self._tokens = min(self._tokens + (now - self._at) * self._rate, max(1.0, min(self._rate, BATCH)))
            self._at = now
            if self._tokens < 1:
                return 0, (1 - self._tokens) / self._rate
            most = min(most, int(self._tokens))
            self._tokens -= most
        if self._left is not None:
            self._left -= most
        return most, 0.0
