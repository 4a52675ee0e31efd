"""A bridge: moves or copies messages from one queue to another, at least once.

Strategy: a few threads, each with one batch of up to ten messages in hand, so memory is bounded. A batch is received,
sent, and deleted at the source only when the target has acknowledged it; whatever ends the process in between, the
messages come back at the source when their leases end. A `LeaseKeeper` extends the leases while the target does not
answer. What the target refuses for good, and in a copy everything, stays leased until the end and is then given back,
so that it is not received again and again.

Duplicates: a message may be at the target twice if the answer to a send was lost, or the process was killed between the
answer and the delete. A FIFO target drops the second one within five minutes, because its deduplication id is made of
the source's message id (carrying.py). A message that was sent but could not be deleted is not sent again by this run.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from veilmq.client.bridge.carrying import carried
from veilmq.client.clock import SYSTEM, Clock, Stop
from veilmq.client.errors import ServiceError, TransportError, may_have_happened
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.keeper.lease import Lease
from veilmq.client.messages import Message, Received
from veilmq.client.queue import Queue, identity_of
from veilmq.client.shared import checks
from veilmq.model.errors import (
    CapabilityMissing,
    CapacityError,
    InFlightFull,
    LeaseError,
    MessageGone,
    ParameterInvalid,
    StoreError,
    VeilError,
)

BATCH: Final = 10
LEASE_MIN: Final = 2.0
"""Seconds; it is extended when half of it is over."""
WORKERS_MAX: Final = 64
REFUSED_MAX: Final = 1_000
"""Messages that the target refuses, before the bridge ends."""
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
    """End when nothing is visible, and nothing came back within one lease."""
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
    """By the target, for good; they stay at the source."""
    uncertain: int = 0
    """Sent again because an answer was lost: may be at the target twice."""
    undeleted: int = 0
    """Sent, but the source did not let go of them: they come back there."""
    reasons: dict[str, int] = {}
    """Why messages were refused."""


class Bridge:
    """One run from `source` to `target`. Both stay open. Raises ParameterInvalid, CapabilityMissing."""

    def __init__(self, source: Queue, target: Queue, options: Options, clock: Clock = SYSTEM) -> None:
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
        self._stop = Stop(clock)
        self._counts = Counts()
        self._known: set[str] = set()
        """Ids of messages that the target has, and that may come again."""
        self._idle_since: float | None = None
        self._failure: BaseException | None = None

    def counts(self) -> Counts:
        """What was done so far. Any thread."""
        with self._lock:
            return msgspec.structs.replace(self._counts, reasons=dict(self._counts.reasons))

    def stop(self) -> None:
        """Receive nothing more; what is in hand is still sent and deleted. Any thread."""
        self._stop.set()
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
            while not self._stop.is_set():
                allowed = self._pace.take(min(BATCH, self._source.capabilities.receive_messages_max), self._stop)
                if not allowed:
                    break
                received = self._receive(allowed)
                self._pace.give_back(allowed - len(received))
                if received:
                    self._idle_since = None
                    self._carry(received)
                elif self._options.until_empty and self._is_empty():
                    self.stop()
        except BaseException as error:  # noqa: BLE001 raised by run()
            self._failure = self._failure or error
            self.stop()

    def _receive(self, count: int) -> list[Received]:
        wait = min(_POLL_SECONDS, self._source.capabilities.wait_max)
        patience = _Patience(self._options.give_up_after, self._clock, self._stop)
        while not self._stop.is_set():
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
        """Whether nothing is left but what nobody gives out before one lease is over."""
        now = self._clock.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since > self._options.lease + _POLL_SECONDS:
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
        now = self._clock.wall()
        can, group, named = self._target.capabilities, self._options.group, self._options.named
        fresh = [lease for lease in leases if lease not in known]
        done: list[Lease] = []
        try:
            self._send([(lease, carried(lease.message, can, group, now, named=named)) for lease in fresh], done)
        finally:
            if self._options.copies:
                self._remember([lease.message.id for lease in done])
            else:
                self._delete([*known, *done])
        if self._options.copies and self._keeper.leases > COPIES_MAX:
            raise CapabilityMissing(capability=f"a copy of more than {COPIES_MAX} messages: their leases are all held")

    def _registered(self, message: Received) -> Lease | None:
        """None: its lease is over already, because this process or the answer was late; it comes back."""
        try:
            return self._keeper.register(message)
        except LeaseError:
            return None

    def _send(self, pending: list[tuple[Lease, Message]], done: list[Lease]) -> None:
        """Add to `done` those that the target acknowledged; the others stay leased."""
        patience = _Patience(self._options.give_up_after, self._clock, self._stop)
        while pending:
            try:
                outcomes = self._target.send_batch([message for _, message in pending])
            except VeilError as error:
                if not patience.goes_on(error):
                    raise
                continue
            again: list[tuple[Lease, Message]] = []
            failed: VeilError | None = None
            for (lease, message), outcome in zip(pending, outcomes, strict=True):
                if not isinstance(outcome, VeilError):
                    done.append(lease)
                    self._add(sent=1, duplicates=int(outcome.duplicate))
                elif _passes(outcome):
                    failed = outcome
                    again.append((lease, message))
                    self._add(uncertain=int(may_have_happened(outcome)))
                else:
                    self._refuse(outcome)
            if failed is not None and not patience.goes_on(failed):
                raise failed
            pending = again

    def _refuse(self, error: VeilError) -> None:
        """It stays leased until the end."""
        with self._lock:
            self._counts.refused += 1
            reason = f"{type(error).__name__}: {error}"
            reasons = self._counts.reasons
            if reason in reasons or len(reasons) < BATCH:
                reasons[reason] = reasons.get(reason, 0) + 1
            if self._counts.refused >= REFUSED_MAX:
                raise error

    def _delete(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._keeper.forget(lease)
        pending = leases
        patience = _Patience(self._options.lease / 2, self._clock, self._stop)
        while pending:
            try:
                outcomes = self._source.delete_batch([lease.handle for lease in pending])
            except VeilError as error:
                outcomes = [error] * len(pending)
            left = [each for each in zip(pending, outcomes, strict=True) if not _is_gone(each[1])]
            self._add(deleted=len(pending) - len(left))
            pending = [lease for lease, _ in left]
            failed = next((outcome for _, outcome in left if outcome is not None and _passes(outcome)), None)
            if pending and (failed is None or not patience.goes_on(failed)):
                self._remember([lease.message.id for lease in pending])
                self._add(undeleted=len(pending))
                return

    def _remember(self, ids: list[str]) -> None:
        with self._lock:
            if len(self._known) < _REMEMBERED_MAX:
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
        checks.positive(options.rate, "rate")
    if options.limit is not None:
        checks.at_least(options.limit, "limit", 1)
    checks.token(options.group, "group")
    if options.copies and source.capabilities.native_fifo:
        reason = "a FIFO queue gives out the rest of a group only when what it gave out before is deleted"
        raise CapabilityMissing(capability=f"a copy that leaves the messages in a FIFO queue: {reason}")


def _passes(error: VeilError) -> bool:
    """Whether the same call may succeed later."""
    return isinstance(error, TransportError | CapacityError | StoreError) or (
        isinstance(error, ServiceError) and error.retryable
    )


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
        if not _passes(error) or self._clock.monotonic() > self._end:
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
