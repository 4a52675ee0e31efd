"""Snapshots in the history: the state can be replayed from each of them, and from what trimming leaves.

Strategy: a stage with a history that soon exceeds its bound. One step of the sweeper begins a snapshot and reports the
queues; everything after that happens during the snapshot. In the end three must agree: the events from the snapshot on,
all events there ever were, and the store itself.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
from tests.support.contract.stage import TESTER, Stage, StoreFactory, expect, sending

from veilmq.model.commands import AnyCommand, Delete, Extend, Receive, StartMove, Sweep
from veilmq.model.events import EventRecord, HistoryTrimmed, Part
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.outcomes import Applied, MoveStarted, Received
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.testing import chance
from veilmq.testing.for_each import for_each
from veilmq.testing.replaying import NotReplayable, replay

SMALL_BYTES: Final = 4_000
QUEUE_STEPS: Final = 4
"""Steps of the sweeper that a queue costs."""


class Recording(Stage):
    """A stage that keeps the events of each batch before any can be trimmed."""

    def __init__(self, factory: StoreFactory) -> None:
        super().__init__(factory)
        self.recorded: list[EventRecord] = []

    def batch(self, commands: Sequence[AnyCommand]) -> Applied:
        applied = super().batch(commands)
        self.recorded += self.events(len(self.recorded))
        return applied

    def left(self) -> list[EventRecord]:
        """What is left of the history."""
        try:
            return self.events()
        except HistoryTrimmed as trimmed:
            return self.events(trimmed.first_offset)


class Telling(Recording):
    """A recording whose history is trimmed."""

    def __init__(self, factory: StoreFactory) -> None:
        super().__init__(factory)
        self.reopen(history_bytes_max=SMALL_BYTES)

    def renew(self) -> None:
        """See `Stage.renew`; the sweeper forgets the queues too, so that the next snapshot tells as many steps."""
        super().renew()
        self.sweep_snapshot()

    def parts(self, kind: str) -> list[EventRecord]:
        """Events of all snapshots so far."""
        snapshots = [event for event in self.recorded if event.kind == "snapshot"]
        return [event for event in snapshots if (event.detail or {})["part"] == kind]

    def begin(self, queue: QueueKey, steps_max: int) -> int:
        """Make enough of a history, and take one step of a snapshot; its offset."""
        known = len(self.parts(Part.BEGIN))
        while len(self.parts(Part.BEGIN)) == known:
            self.do(Delete(queue=queue, origin=TESTER, handle=self.refused, arrived=self.now))
            self.sweep_once(steps_max)
        (begun,) = self.parts(Part.BEGIN)[known:]
        return begun.offset

    refused = ""
    """A useless handle: its refusal causes an event and nothing else."""

    def agree(self, begun: int) -> None:
        """Let the snapshot end; its report must match the store."""
        self.sweep_snapshot(steps_max=3)
        instant = self.now
        ended = self.parts(Part.END)[-1]
        assert ended.detail == {"part": "end", "begin": begun}
        state = self.state().at(instant)
        assert replay(self.recorded[begun:]).at(instant) == state
        assert replay(self.recorded).at(instant) == state
        assert replay(self.left()).at(instant) == state
        with pytest.raises(NotReplayable):
            replay(self.recorded[begun + 1 : ended.offset + 1])


def fill(stage: Telling, count: int = 8, **settings: Any) -> QueueKey:
    """A queue with that many messages, every second one with a time to live and first in line, and a used-up handle."""
    queue = stage.create(**settings)
    stage.send(queue, "deleted")
    stage.refused = stage.take(queue).handle
    stage.delete(queue, stage.refused)
    for number in range(count):
        own = {"priority": 3, "ttl_us": DAY_US} if number % 2 else {}
        stage.send(queue, str(number), **own)
    return queue


def deleted(stage: Telling, queue: QueueKey) -> None:
    for message in stage.receive(queue, 3):
        stage.delete(queue, message.handle)


def received(stage: Telling, queue: QueueKey) -> None:
    stage.receive(queue, 3, lease_us=HOUR_US)


def received_and_over(stage: Telling, queue: QueueKey) -> None:
    stage.receive(queue, 3, lease_us=1)
    stage.later(SECOND_US)
    stage.receive(queue, 1)


def dead_lettered(stage: Telling, queue: QueueKey) -> None:
    stage.change(queue, redrive=RedrivePolicy(QueueKey(queue.account, queue.region, "dead"), 1))
    stage.receive(queue, 3, lease_us=0)
    stage.later(1)
    stage.receive(queue, 1)


def moved(stage: Telling, queue: QueueKey) -> None:
    dead_lettered(stage, queue)
    dead = QueueKey(queue.account, queue.region, "dead")
    expect(stage.do(StartMove(queue=dead, origin=TESTER, destination=queue)), MoveStarted)
    stage.sweep()


def purged(stage: Telling, queue: QueueKey) -> None:
    stage.purge(queue)
    stage.send(queue, "after the purge")


def dropped(stage: Telling, queue: QueueKey) -> None:
    stage.drop(queue)
    stage.create(queue.name)


def expired(stage: Telling, queue: QueueKey) -> None:
    stage.change(queue, retention_us=MINUTE_US)
    stage.later(2 * MINUTE_US)
    stage.sweep()


def sent(stage: Telling, queue: QueueKey) -> None:
    stage.send(queue, "plain")
    stage.send(queue, "delayed", delay_us=HOUR_US)
    stage.send(queue, "urgent", priority=1, ttl_us=DAY_US)


def edited(stage: Telling, queue: QueueKey) -> None:
    message = stage.take(queue, lease_us=HOUR_US)
    new = sending(queue, "another body")
    stage.extend(queue, message.handle, HOUR_US, body=new.body, md5=new.md5, size_bytes=new.size_bytes, rotate=True)


AMID: Final[list[Callable[[Telling, QueueKey], None]]] = [
    deleted, received, received_and_over, dead_lettered, moved, purged, dropped, expired, sent, edited,
]  # fmt: skip


class TestSnapshots:
    """Snapshots."""

    @pytest.fixture
    def telling(self, store_factory: StoreFactory) -> Iterator[Telling]:
        """A fresh stage."""
        stage = Telling(store_factory)
        yield stage
        stage.store.close()

    def test_it_tells_of_every_queue_and_message(self, telling: Telling) -> None:
        queue = fill(telling, 3, delay_us=0)
        line = telling.create("line.fifo", content_deduplication=True)
        telling.send(line, "of a group", extras=Extras(group="g", type="t"))
        telling.send(queue, "delayed", delay_us=HOUR_US)
        telling.send(queue, "urgent", priority=1, ttl_us=DAY_US)
        telling.receive(queue, 2, lease_us=HOUR_US)
        telling.extend(queue, telling.take(queue).handle, 0)
        begun = telling.begin(queue, 256)
        telling.agree(begun)
        instant = telling.parts(Part.BEGIN)[-1].at
        state = telling.state().at(instant)
        named = {event.incarnation: (event.detail or {})["name"] for event in telling.parts(Part.QUEUE)}
        assert named == {telling.describe(key).incarnation: key.name for key in (queue, line)}
        told = {
            message["sequence"]: message | {"incarnation": event.incarnation}
            for event in telling.parts(Part.MESSAGES)
            for message in (event.detail or {})["messages"]
        }
        assert told.keys() == state.messages.keys()
        places = sorted(message["state"] for message in told.values())
        assert places == ["delayed", "in flight", "in flight", "visible", "visible", "visible"]
        grouped = next(message for message in told.values() if message.get("group") == "g")
        assert (grouped["type"], grouped["body_bytes"], grouped["receive_count"]) == ("t", 10, 0)

    @pytest.mark.parametrize("amid", AMID, ids=lambda amid: amid.__name__)
    @for_each("met", [0, 2, 5, 8], fresh="telling")
    def test_what_happens_amid_it_counts(self, telling: Telling, amid: Any, met: int) -> None:
        dead = telling.create("dead")
        queue = fill(telling)
        telling.send(dead, "dead before", priority=3, ttl_us=DAY_US)
        begun = telling.begin(queue, 2 * QUEUE_STEPS)
        if met:
            telling.sweep_once(met)
        amid(telling, queue)
        telling.agree(begun)

    def test_a_queue_that_was_not_told_yet_may_change_or_go(self, telling: Telling) -> None:
        queue = fill(telling)
        line = telling.create("line.fifo", content_deduplication=True, delay_us=MINUTE_US)
        gone, purged_ = telling.create("gone"), telling.create("purged")
        telling.send(gone)
        telling.send(purged_)
        telling.send(line, "one", extras=Extras(group="g"))
        dead = telling.create("dead.fifo")
        dying = telling.create("dying.fifo", content_deduplication=True, redrive=RedrivePolicy(dead, 1))
        telling.send(dying, "two lives", extras=Extras(group="g"))
        telling.take(dying, lease_us=0)
        telling.later(SECOND_US)
        begun = telling.begin(queue, 1)
        assert telling.receive(dying) == []
        telling.send(line, "two", extras=Extras(group="g"))
        telling.change(line, delay_us=HOUR_US)
        telling.change(queue, visibility_timeout_us=MINUTE_US)
        telling.drop(gone)
        telling.purge(purged_)
        telling.create("new")
        telling.agree(begun)

    @pytest.mark.parametrize("swept", [False, True])
    @for_each("delay_us", [0, SECOND_US, HOUR_US], fresh="telling")
    def test_a_fifo_queues_delay_acts_on_what_is_there(self, telling: Telling, delay_us: int, swept: bool) -> None:
        queue = fill(telling)
        line = telling.create("line.fifo", content_deduplication=True, delay_us=10 * SECOND_US)
        telling.send(line, "one", extras=Extras(group="a"))
        telling.later(11 * SECOND_US)
        telling.send(line, "two", extras=Extras(group="b"))
        if swept:
            telling.sweep()
        for each in (delay_us, MINUTE_US, delay_us, 2 * MINUTE_US):
            telling.change(line, delay_us=each)
            instant = telling.now
            assert replay(telling.recorded).at(instant) == telling.state().at(instant)
            telling.later(SECOND_US)
        telling.agree(telling.begin(queue, 256))

    @pytest.mark.parametrize("kill", [False, True])
    def test_what_was_under_way_is_void_after_a_restart(self, telling: Telling, kill: bool) -> None:
        queue = fill(telling)
        telling.agree(telling.begin(queue, QUEUE_STEPS))
        void = telling.begin(queue, QUEUE_STEPS + 2)
        whole = telling.left()[0].offset
        telling.reopen(kill=kill, history_bytes_max=SMALL_BYTES)
        instant = telling.now
        assert replay(telling.left()).at(instant) == telling.state().at(instant)
        assert telling.left()[0].offset == whole
        deleted(telling, queue)
        begun = telling.begin(queue, QUEUE_STEPS)
        assert begun > void
        telling.agree(begun)
        assert replay(telling.recorded[void:]).at(telling.now) == telling.state().at(telling.now)

    def test_a_step_that_is_rolled_back_is_taken_again(self, telling: Telling) -> None:
        queue = fill(telling)
        begun = telling.begin(queue, QUEUE_STEPS)
        for _ in range(3):
            assert telling.store.apply([Sweep(steps_max=5)], telling.now).wrote
            telling.factory.abandon(telling.store)
        telling.sweep_once(2)
        assert telling.store.apply([Sweep(steps_max=256)], telling.now).wrote
        telling.factory.abandon(telling.store)
        assert telling.parts(Part.END) == []
        telling.agree(begun)

    def test_a_history_that_is_trimmed_always_gives_the_state(self, telling: Telling) -> None:
        queue = fill(telling, 20)
        lengths = []
        for number in range(100):
            telling.send(queue, str(number))
            deleted(telling, queue) if number % 3 == 2 else received(telling, queue)
            telling.later(20 * MINUTE_US)
            telling.sweep_once(5)
            left = telling.left()
            lengths.append(len(left))
            assert replay(left).at(telling.now) == telling.state().at(telling.now)
        assert telling.left()[0].offset > 100
        assert max(lengths[50:]) < 2 * max(lengths[:50])

    def test_nothing_is_written_where_nothing_happens(self, telling: Telling) -> None:
        queue = fill(telling)
        telling.agree(telling.begin(queue, 256))
        count = len(telling.recorded)
        for _ in range(3):
            telling.sweep_snapshot()
            telling.later(100 * DAY_US)
        telling.reopen(history_bytes_max=SMALL_BYTES)
        telling.sweep_snapshot()
        assert all(event.kind in {"expired", "snapshot"} for event in telling.recorded[count:])
        telling.later(100 * DAY_US)
        count = len(telling.recorded)
        telling.sweep_snapshot()
        telling.sweep_snapshot()
        assert len(telling.recorded) == count

    def test_half_of_the_age_is_enough(self, stage: Stage) -> None:
        queue = stage.create()
        stage.reopen(history_us_max=2 * HOUR_US)
        stage.send(queue)
        stage.later(HOUR_US)
        stage.sweep_snapshot()
        assert "snapshot" not in stage.kinds()
        stage.later(1)
        stage.sweep_snapshot()
        assert stage.kinds().count("snapshot") == 4
        stage.send(queue)
        stage.later(2 * HOUR_US)
        while stage.sweep_once().more:
            pass
        left = [stage.factory.history(stage.store, at, 1) for at in (2, 6)]
        assert [one[0].offset for one in left] == [2, 6]
        with pytest.raises(HistoryTrimmed) as trimmed:
            stage.events(1)
        assert trimmed.value.first_offset == 2

    @pytest.mark.parametrize("seed", range(3))
    def test_many_messages_and_anything_amid(self, telling: Telling, seed: int) -> None:
        dice = chance(seed)
        dead = telling.create("dead")
        queue = fill(telling, 60, redrive=RedrivePolicy(dead, 3), retention_us=HOUR_US)
        handles: list[str] = []
        for _ in range(300):
            telling.later(dice.choice([0, 0, 0, SECOND_US, MINUTE_US]))
            command = _anything(telling, dice, queue, handles)
            outcome = telling.batch([command, Sweep(steps_max=dice.choice([1, 2, 3, 8]))]).outcomes[0]
            if isinstance(outcome, Received):
                handles += [message.handle for message in outcome.messages]
        for ended in telling.parts(Part.END):
            began = (ended.detail or {})["begin"]
            assert replay(telling.recorded[began:]).at(telling.now) == telling.state().at(telling.now)
        assert len(telling.parts(Part.END)) >= 3
        assert replay(telling.recorded).at(telling.now) == telling.state().at(telling.now)


def _anything(stage: Stage, dice: Any, queue: QueueKey, handles: list[str]) -> AnyCommand:
    """One command of the commonest."""
    lease_us = dice.choice([0, SECOND_US, MINUTE_US, HOUR_US])
    kind = dice.choice(["send", "send", "receive", "receive", "extend", "delete"])
    if kind == "send" or (not handles and kind != "receive"):
        ttl_us = dice.choice([None, None, MINUTE_US])
        return sending(queue, "x" * dice.randint(1, 9), delay_us=dice.choice([0, 0, lease_us]), ttl_us=ttl_us)
    if kind == "receive":
        return Receive(queue=queue, origin=TESTER, count_max=dice.randint(1, 4), lease_us=lease_us)
    handle = dice.choice(handles[-20:])
    if kind == "delete":
        return Delete(queue=queue, origin=TESTER, handle=handle, arrived=stage.now)
    return Extend(queue=queue, origin=TESTER, handle=handle, arrived=stage.now, lease_us=lease_us)
