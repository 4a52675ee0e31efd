"""The stage for the contract's cases: one store, one manual clock, and shortcuts for commands.

Strategy: a store under test comes as a `StoreFactory`: it opens the same data again and again, and does the few things
that no command can (read the history, damage a body, drop an applied batch). Each shortcut applies one batch of one
command and commits it, as the server would.
"""

from collections.abc import Iterator, Sequence
from hashlib import md5
from typing import Any, Final, Protocol, TypeVar

import pytest
from tests.support.clock import ManualClock

from veilmq.model.commands import (
    AnyCommand,
    ChangeQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    ListQueues,
    Origin,
    Peek,
    PurgeQueue,
    Receive,
    Send,
    Sweep,
)
from veilmq.model.errors import VeilError
from veilmq.model.events import EventRecord
from veilmq.model.instant import MINUTE_US, Instant
from veilmq.model.messages import Delivery
from veilmq.model.outcomes import Applied, Outcome, QueueCreated, QueueDescribed, Received, Sent, Swept
from veilmq.model.settings.queue import FIFO_SUFFIX, QueueInfo, QueueKey
from veilmq.store import Store
from veilmq.testing.replaying import State, state_of

ACCOUNT: Final = "000000000000"
REGION: Final = "us-east-1"
TESTER: Final = Origin("sqs", "tester", "contract")
SWEEPS_MAX: Final = 10_000

T = TypeVar("T")


class StoreFactory(Protocol):
    """What a store's tests bring to the contract (fixture `store_factory`): one set of data, empty at first."""

    def open(
        self,
        *,
        history_us_max: int | None = None,
        history_bytes_max: int | None = None,
        clock_step_us_max: int | None = None,
    ) -> Store:
        """Open the data, with the default bounds of the history or smaller ones. The store opened before was closed."""
        ...

    def kill(self, store: Store) -> None:
        """End the store as a killed process does: no clean shutdown, nothing committed."""
        ...

    def abandon(self, store: Store) -> None:
        """Roll back the batch that was applied, as after a commit that failed."""
        ...

    def history(self, store: Store, start: int, count_max: int) -> list[EventRecord]:
        """Events from offset `start`. Raises HistoryTrimmed."""
        ...

    def state(self, store: Store) -> list[dict[str, Any]]:
        """What `GET /api/v1/snapshot` shows, a dictionary each line."""
        ...

    def damage(self, sequence: int) -> None:
        """Flip one bit of the stored body. No store is open."""
        ...

    def rows(self, store: Store) -> int:
        """Message rows that the store still keeps, including those of purged and deleted queues."""
        ...


class Stage:
    """An open store and its clock."""

    def __init__(self, factory: StoreFactory) -> None:
        self.factory = factory
        self.clock = ManualClock()
        self.store = factory.open()
        self._made: list[QueueKey] = []

    def renew(self) -> None:
        """Delete the queues that `create` made, between two values of `for_each`. History and clock go on."""
        made, self._made = self._made, []
        for queue in made:
            self.drop(queue)

    @property
    def now(self) -> Instant:
        """The clock's instant."""
        return self.clock.now

    def later(self, duration_us: int) -> None:
        """Let time pass."""
        self.clock.advance(duration_us)

    def reopen(self, *, kill: bool = False, **bounds: int) -> None:
        """Close the store (or leave it as a killed process would) and open the same data."""
        if kill:
            self.factory.kill(self.store)
        else:
            self.store.close()
        self.open(**bounds)

    def open(self, **bounds: int) -> None:
        """Open the data of a store that was closed or killed."""
        self.store = self.factory.open(**bounds)

    def batch(self, commands: Sequence[AnyCommand]) -> Applied:
        """Apply and commit one batch."""
        applied = self.store.apply(commands, self.now)
        if applied.wrote:
            self.store.commit()
        return applied

    def do(self, command: AnyCommand) -> Outcome:
        """Apply and commit one command."""
        (outcome,) = self.batch([command]).outcomes
        return outcome

    def create(self, name: str = "jobs", account: str = ACCOUNT, region: str = REGION, **change: Any) -> QueueKey:
        """A new queue with these settings, FIFO if it has such a name."""
        key = QueueKey(account, region, name)
        if name.endswith(FIFO_SUFFIX):
            change = {"fifo": True} | change
        outcome = self.do(CreateQueue(queue=key, origin=TESTER, change=change))
        assert isinstance(outcome, QueueCreated), outcome
        assert outcome.created
        self._made.append(key)
        return key

    def change(self, queue: QueueKey, **change: Any) -> Outcome:
        """Set settings of a queue."""
        return self.do(ChangeQueue(queue=queue, origin=TESTER, change=change))

    def send(self, queue: QueueKey, body: str = "hello", **fields: Any) -> Sent:
        """Send a message that must be taken."""
        outcome = self.do(sending(queue, body, **fields))
        assert isinstance(outcome, Sent), outcome
        return outcome

    def receive(self, queue: QueueKey, count_max: int = 1, **fields: Any) -> list[Delivery]:
        """Lease messages; the receive itself must succeed."""
        outcome = self.do(Receive(queue=queue, origin=TESTER, count_max=count_max, **fields))
        assert isinstance(outcome, Received), outcome
        return outcome.messages

    def take(self, queue: QueueKey, **fields: Any) -> Delivery:
        """Lease one message that must be there."""
        (message,) = self.receive(queue, **fields)
        return message

    def extend(self, queue: QueueKey, handle: str, lease_us: int, **fields: Any) -> Outcome:
        """Extend or release; it arrives now unless `arrived` says otherwise."""
        fields.setdefault("arrived", self.now)
        return self.do(Extend(queue=queue, origin=TESTER, handle=handle, lease_us=lease_us, **fields))

    def releasing(self, queue: QueueKey, handle: str) -> Extend:
        """A release that arrives now."""
        return Extend(queue=queue, origin=TESTER, handle=handle, lease_us=0, arrived=self.now)

    def extending(self, queue: QueueKey, handle: str, lease_us: int, **fields: Any) -> Extend:
        """An extend that arrives now."""
        return Extend(queue=queue, origin=TESTER, handle=handle, lease_us=lease_us, arrived=self.now, **fields)

    def delete(self, queue: QueueKey, handle: str, **fields: Any) -> Outcome:
        """Delete by handle; it arrives now unless `arrived` says otherwise."""
        fields.setdefault("arrived", self.now)
        return self.do(Delete(queue=queue, origin=TESTER, handle=handle, **fields))

    def purge(self, queue: QueueKey, **fields: Any) -> Outcome:
        """Purge the queue."""
        return self.do(PurgeQueue(queue=queue, origin=TESTER, **fields))

    def drop(self, queue: QueueKey) -> Outcome:
        """Delete the queue."""
        return self.do(DeleteQueue(queue=queue, origin=TESTER))

    def describe(self, queue: QueueKey) -> QueueInfo:
        """The queue as it stands."""
        outcome = self.do(DescribeQueue(queue=queue, origin=TESTER))
        assert isinstance(outcome, QueueDescribed), outcome
        return outcome.info

    def counts(self, queue: QueueKey) -> tuple[int, int, int]:
        """Visible, delayed, in flight."""
        counts = self.describe(queue).counts
        return counts.visible, counts.delayed, counts.in_flight

    def peek(self, queue: QueueKey, count_max: int = 10) -> list[Delivery]:
        """Look at visible messages."""
        outcome = self.store.query(Peek(queue=queue, origin=TESTER, count_max=count_max), self.now)
        assert isinstance(outcome, Received), outcome
        return outcome.messages

    def sweep(self, steps_max: int = 256) -> int:
        """Sweep until nothing is left to do; returns how many batches it took."""
        for done in range(1, SWEEPS_MAX):
            outcome = self.do(Sweep(steps_max=steps_max))
            assert isinstance(outcome, Swept), outcome
            if not outcome.more:
                return done
        raise AssertionError("the sweeper finds no end")

    def sweep_snapshot(self, steps_max: int = 256) -> int:
        """Sweep until no snapshot is under way either; returns how many batches it took."""
        for done in range(1, SWEEPS_MAX):
            if not self.sweep_once(steps_max).unhurried:
                return done
        raise AssertionError("the snapshot finds no end")

    def sweep_once(self, steps_max: int = 256) -> Swept:
        """One step of the sweeper."""
        return expect(self.do(Sweep(steps_max=steps_max)), Swept)

    def sweep_expired(self) -> None:
        """Sweep, and again after the longest time that a sweep may postpone a second look at a queue."""
        self.sweep()
        self.later(MINUTE_US)
        self.sweep()

    def events(self, start: int = 0) -> list[EventRecord]:
        """The history from an offset on."""
        return self.factory.history(self.store, start, 1_000_000)

    def state(self) -> State:
        """The state that the store itself reports."""
        return state_of(self.factory.state(self.store))

    def kinds(self, start: int = 0) -> list[str]:
        """The kinds of the events from an offset on."""
        return [event.kind for event in self.events(start)]

    def following(self) -> int:
        """The offset that the next event will have."""
        events = self.events()
        return events[-1].offset + 1 if events else 0


def sending(queue: QueueKey, body: str = "hello", **fields: Any) -> Send:
    """A send of that body by `TESTER`."""
    encoded = body.encode()
    digest = md5(encoded, usedforsecurity=False).digest()
    given: dict[str, Any] = {"size_bytes": len(encoded), "origin": TESTER} | fields
    return Send(queue=queue, body=body, md5=digest, **given)


def bodies(messages: Sequence[Delivery]) -> list[str]:
    """The bodies of the messages, in order."""
    return [message.body for message in messages]


def expect(outcome: Outcome, kind: type[T]) -> T:
    """The outcome, which must be of that kind."""
    assert isinstance(outcome, kind), outcome
    return outcome


def refused(outcome: Outcome, kind: type[VeilError]) -> VeilError:
    """The error, which must be exactly of that kind."""
    assert type(outcome) is kind, outcome
    return outcome


def impossible() -> ListQueues:
    """A command that fails amid a batch, as a bug would: its prefix is no text (there must be a queue)."""
    return ListQueues(origin=TESTER, account=None, region=None, prefix=None)  # type: ignore[arg-type]


@pytest.fixture
def stage(store_factory: StoreFactory) -> Iterator[Stage]:
    """A fresh stage; its store is closed at the end."""
    playing = Stage(store_factory)
    yield playing
    playing.store.close()
