"""SQLite against the reference model: random commands, batches, rollbacks, sweeps and reopenings, with time passing.

Strategy: after each step the store must have answered as the model does, and hold as many messages; after a sweep they
must be in the same places. Peeks must show the same, and the history must obey the conservation law. With a history
that is cut short all the time, what it tells from its beginning, from each snapshot in it, and what is left of it must
give the state that the store says it has.
"""

import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.support.conservation import ledgers
from tests.support.contract.snapshots import Recording
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, expect, impossible, sending
from tests.support.reference import NO_BUCKET, Reference
from tests.support.sqlite import SMALL, SqliteFactory
from tests.support.transitions import SteppingFactory

from veilmq.model.commands import (
    AfterExpiry,
    AnyCommand,
    CancelMove,
    ChangeQueue,
    CheckClock,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    ListMoves,
    PurgeQueue,
    Receive,
    RevertPlan,
    StartMove,
    SuggestPlan,
    Undeliver,
)
from veilmq.model.errors import StoreFailed
from veilmq.model.events import Part
from veilmq.model.instant import DAY_US, FOREVER, HOUR_US, MINUTE_US, SECOND_US, Instant
from veilmq.model.messages import NO_EXTRAS, Extras, Failure, Report, Reported
from veilmq.model.messages.states import State
from veilmq.model.outcomes import Applied, ClockChecked, MovesListed, QueueDescribed
from veilmq.model.settings.queue import Adaptive, DeduplicationScope, LeasePlan, QueueInfo, QueueKey, RedrivePolicy
from veilmq.store.sqlite.leases.claims import DETOURS_MAX
from veilmq.store.sqlite.tools import check
from veilmq.testing.replaying import NotReplayable, Replaying, replay

DEAD, JOBS, OTHER = (QueueKey(ACCOUNT, REGION, name) for name in ("dead", "jobs", "other"))
DEAD_LINE, LINE = (QueueKey(ACCOUNT, REGION, name) for name in ("dead.fifo", "line.fifo"))
FIFO = (LINE, DEAD_LINE)
QUEUES = st.sampled_from([JOBS, JOBS, JOBS, OTHER, OTHER, DEAD, LINE, LINE, LINE, DEAD_LINE])
GROUPS = st.sampled_from([None, "a", "a", "b", "c"])
PASSING = st.sampled_from([0, 0, 0, 1, SECOND_US // 2, SECOND_US, 2 * SECOND_US, 10 * SECOND_US, MINUTE_US])
SPANS = st.sampled_from([0, 1, SECOND_US, 2 * SECOND_US, 30 * SECOND_US])
CHANGES = st.sampled_from(
    [
        {"retention_us": 5 * SECOND_US},
        {"retention_us": HOUR_US},
        {"delay_us": SECOND_US},
        {"delay_us": 0},
        {"visibility_timeout_us": SECOND_US},
        {"message_bytes_max": 3},
        {"message_bytes_max": 1_000},
        {"redrive": None},
        {"redrive": RedrivePolicy(DEAD, 1)},
        {"redrive": RedrivePolicy(OTHER, 2)},
        {"redrive": RedrivePolicy(DEAD_LINE, 1)},
        {"redrive": RedrivePolicy(LINE, 1)},
        {"content_deduplication": False},
        {"content_deduplication": True},
        {"deduplication_scope": DeduplicationScope.GROUP},
        {"deduplication_scope": DeduplicationScope.QUEUE},
        {"receives_per_second_max": 2},
        {"receives_per_second_max": None},
        {"adaptive": Adaptive.APPLY},
        {"adaptive": Adaptive.OFF},
        {"first_lease_min_us": SECOND_US},
    ]
)
PLANS = st.builds(
    LeasePlan,
    lease_us=st.sampled_from([None, 2 * SECOND_US, MINUTE_US]),
    by_type=st.sampled_from([{}, {"film": 5 * SECOND_US}, {"film": 2 * MINUTE_US}]),
)


RETRY = Report(Reported.RETRY, Failure("raised", "ValueError", "no"))
WORKING = Report(Reported.WORKING)


class StoreMachine(RuleBasedStateMachine):
    """The store and the model, step by step."""

    factory: type[SqliteFactory] = SteppingFactory
    options = SMALL

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(prefix="veilmq-machine-")
        self.stage = Recording(self.factory(Path(self.directory.name) / "data", self.options))
        self.reference = Reference()
        self.bodies = 0
        self.read = 0

    def teardown(self) -> None:
        self.stage.store.close()
        self.directory.cleanup()

    @initialize()
    def queues(self) -> None:
        self.run([CreateQueue(queue=DEAD, origin=TESTER), CreateQueue(queue=OTHER, origin=TESTER)])
        redrive = RedrivePolicy(DEAD, 2)
        self.run([CreateQueue(queue=JOBS, origin=TESTER, change={"redrive": redrive, "retention_us": MINUTE_US})])
        fifo = {"fifo": True, "content_deduplication": True}
        self.run([CreateQueue(queue=DEAD_LINE, origin=TESTER, change=fifo)])
        change = fifo | {"redrive": RedrivePolicy(DEAD_LINE, 2), "retention_us": HOUR_US}
        self.run([CreateQueue(queue=LINE, origin=TESTER, change=change)])

    def draw_command(self, data: st.DataObject) -> AnyCommand:
        kinds = ["send", "send", "send", "receive", "receive"]
        if self.reference.tickets:
            kinds += ["extend", "extend", "delete", "delete", "undeliver"]
        queue = data.draw(QUEUES, "queue")
        match data.draw(st.sampled_from(kinds), "kind"):
            case "send":
                self.bodies += 1
                fifo = queue in FIFO
                group = data.draw(GROUPS, "group") if fifo or queue == OTHER else None
                identity = data.draw(st.sampled_from([None, None, None, "x", "y"]), "id") if fifo else None
                kind = data.draw(st.sampled_from([None, None, "film"]), "type")
                hint_us = data.draw(st.sampled_from([None, None, None, SECOND_US, 30 * SECOND_US]), "hint")
                extras = Extras(group=group, deduplication_id=identity, type=kind, lease_hint_us=hint_us)
                return sending(
                    queue,
                    str(self.bodies),
                    priority=8 if fifo else data.draw(st.sampled_from([8, 8, 1, 16]), "priority"),
                    delay_us=data.draw(st.none() | (st.just(0) if fifo else SPANS), "delay"),
                    extras=NO_EXTRAS if extras == NO_EXTRAS else extras,
                    ttl_us=data.draw(st.sampled_from([None, None, SECOND_US, 20 * SECOND_US, FOREVER]), "ttl"),
                    wants_handle=data.draw(st.booleans(), "wants handle"),
                )
            case "receive":
                return self.draw_receive(data, queue)
            case kind:
                return self.draw_use(data, kind)

    def draw_use(self, data: st.DataObject, kind: str) -> AnyCommand:
        """A use of a handle, mostly of a recent one and in its own queue."""
        handles = list(self.reference.tickets)
        handle = data.draw(st.sampled_from(handles[-6:]) | st.sampled_from(handles), "handle")
        ticket = self.reference.tickets[handle]
        queue = data.draw(st.sampled_from([ticket.queue.key] * 4 + [OTHER]), "through")
        if kind == "undeliver":
            known = self.reference.current(handle, State.IN_FLIGHT) and ticket.message.due > self.stage.now
            return Undeliver(queue=ticket.queue.key, origin=TESTER, handles=(handle,) if known else ())
        arrived = Instant(self.stage.now - data.draw(st.sampled_from([0, 0, 1, SECOND_US]), "ago"))
        after_expiry = data.draw(st.sampled_from(AfterExpiry), "after expiry")
        if kind == "delete":
            return Delete(queue=queue, origin=TESTER, handle=handle, arrived=arrived, after_expiry=after_expiry)
        new = sending(queue, f"{self.bodies}!") if data.draw(st.booleans(), "new body") else None
        return Extend(
            queue=queue,
            origin=TESTER,
            handle=handle,
            arrived=arrived,
            after_expiry=after_expiry,
            lease_us=data.draw(SPANS, "lease"),
            report=data.draw(st.sampled_from([None, None, RETRY, WORKING]), "report"),
            rotate=data.draw(st.booleans(), "rotate"),
            lease_total_us_max=data.draw(st.sampled_from([None, 10 * SECOND_US]), "total"),
            body=None if new is None else new.body,
            md5=b"" if new is None else new.md5,
        )

    def draw_any(self, data: st.DataObject) -> AnyCommand:
        """Mostly something of every day."""
        on_a_queue = data.draw(st.sampled_from([False] * 9 + [True]), "on a queue")
        return self.draw_queue_command(data) if on_a_queue else self.draw_command(data)

    def draw_queue_command(self, data: st.DataObject) -> AnyCommand:
        """What is done to a queue as a whole."""
        queue = data.draw(QUEUES, "queue")
        match data.draw(st.sampled_from(["change", "change", "plan", "revert", "purge", "delete", "create", "move"])):
            case "change":
                return ChangeQueue(queue=queue, origin=TESTER, change=data.draw(CHANGES, "change"))
            case "plan":
                return SuggestPlan(queue=queue, origin=TESTER, plan=data.draw(PLANS, "plan"))
            case "revert":
                return RevertPlan(
                    queue=queue, origin=TESTER, made=data.draw(st.sampled_from([None, self.stage.now]), "made")
                )
            case "purge":
                return PurgeQueue(queue=queue, origin=TESTER)
            case "delete":
                return DeleteQueue(queue=queue, origin=TESTER)
            case "create":
                own = {"fifo": True} if queue in FIFO else {}
                return CreateQueue(queue=queue, origin=TESTER, change=data.draw(CHANGES, "change") | own)
            case _:
                return StartMove(queue=data.draw(st.sampled_from([DEAD, DEAD_LINE]), "source"), origin=TESTER)

    def run(self, commands: list[AnyCommand], order: list[int] | None = None) -> None:
        """Apply the commands to both, and compare."""
        applied = self.stage.batch(commands)
        self.reference.settle(applied.at)
        if order is None:
            order = self.stage.factory.order(self.stage.store, commands)  # type: ignore[attr-defined]
        for place in order:
            self.reference.judge(commands[place], applied.outcomes[place])
        self.read_history()

    def read_history(self) -> None:
        """What the store expired or moved since the last look."""
        events = self.stage.recorded[self.read :]
        self.read += len(events)
        self.reference.buried(event.sequence for event in events if event.kind == "expired")
        for event in events:
            if event.kind == "moved":
                self.reference.tasks.moved(event)
        moves = {event.sequence: event.detail["target_sequence"] for event in events if event.kind == "dead_lettered"}
        assert moves == self.reference.moves
        self.reference.moves = {}

    @rule(data=st.data(), passing=PASSING)
    def one(self, data: st.DataObject, passing: int) -> None:
        self.stage.later(passing)
        self.run([self.draw_command(data)])

    @rule(data=st.data(), passing=PASSING, count=st.integers(2, 6))
    def batch(self, data: st.DataObject, passing: int, count: int) -> None:
        self.stage.later(passing)
        self.run([self.draw_any(data) for _ in range(count)])

    @rule(data=st.data(), passing=PASSING, count=st.integers(1, 5))
    def rolled_back(self, data: st.DataObject, passing: int, count: int) -> None:
        self.stage.later(passing)
        store = self.stage.store
        if store.apply([self.draw_any(data) for _ in range(count)], self.stage.now).wrote:
            self.stage.factory.abandon(store)

    @rule(data=st.data(), passing=PASSING)
    def one_fails_amid(self, data: st.DataObject, passing: int) -> None:
        assume(self.reference.queues)
        self.stage.later(passing)
        commands = [self.draw_any(data), impossible(), self.draw_any(data)]
        self.judge_each(commands, self.stage.batch(commands))

    @rule(data=st.data(), passing=PASSING, count=st.integers(1, 5))
    def commit_fails(self, data: st.DataObject, passing: int, count: int) -> None:
        self.stage.later(passing)
        commands = [self.draw_any(data) for _ in range(count)]
        applied = self.stage.store.apply(commands, self.stage.now)
        if applied.wrote:
            self.stage.factory.abandon(self.stage.store)
        applied = self.stage.store.apply_each(commands, applied.at)
        self.stage.recorded += self.stage.events(len(self.stage.recorded))
        self.judge_each(commands, applied)

    def judge_each(self, commands: list[AnyCommand], applied: Applied) -> None:
        """Compare what was applied one by one."""
        for command, outcome in zip(commands, applied.outcomes, strict=True):
            self.reference.settle(applied.at)
            if command == impossible():
                assert type(outcome) is StoreFailed
            else:
                self.reference.judge(command, outcome)
        self.read_history()

    @rule(passing=PASSING, steps_max=st.sampled_from([1, 2, 256]))
    def sweep(self, passing: int, steps_max: int) -> None:
        self.sweep_after(passing, steps_max)

    def sweep_after(self, passing: int, steps_max: int = 256) -> None:
        """Let time pass, sweep, and compare."""
        self.stage.later(passing)
        self.stage.sweep(steps_max)
        self.swept()
        for key, queue in self.reference.queues.items():
            assert self.stage.counts(key) == queue.counts()

    def swept(self) -> None:
        """Learn what the sweeper did."""
        self.reference.settle(self.stage.now)
        self.read_history()
        for task in self.reference.tasks.under_way():
            (listed,) = self.stage.batch([ListMoves(queue=task.source.key, origin=TESTER)]).outcomes
            assert isinstance(listed, MovesListed)
            assert listed.tasks[0].id == task.id
            self.reference.tasks.told(task, listed.tasks[0])

    @rule(
        source=st.sampled_from([DEAD, DEAD, DEAD_LINE, DEAD_LINE, OTHER]),
        destination=st.sampled_from([None, None, None, OTHER, JOBS, LINE, DEAD]),
        rate=st.sampled_from([None, None, 1, 2]),
        passing=PASSING,
    )
    def start_move(self, source: QueueKey, destination: QueueKey | None, rate: int | None, passing: int) -> None:
        self.stage.later(passing)
        self.run([StartMove(queue=source, origin=TESTER, destination=destination, rate_max=rate)])

    @rule(data=st.data(), line=st.booleans(), rate=st.sampled_from([None, None, 1, 2]), passing=PASSING)
    def move_some(self, data: st.DataObject, line: bool, rate: int | None, passing: int) -> None:
        """Dead letters, a task, and what comes of it in the next seconds."""
        queue, dead, other = (LINE, DEAD_LINE, LINE) if line else (JOBS, DEAD, OTHER)
        group = data.draw(GROUPS, "group") or ("a" if line else None)
        for _ in range(data.draw(st.integers(1, 3), "dead letters")):
            self.bodies += 1
            self.run([sending(queue, str(self.bodies), extras=Extras(group=group) if group else NO_EXTRAS)])
            for _ in range(3):
                self.run([Receive(queue=queue, origin=TESTER, count_max=10, lease_us=0)])
        destination = data.draw(st.sampled_from([None, None, other]), "destination")
        self.run([StartMove(queue=dead, origin=TESTER, destination=destination, rate_max=rate)])
        tasks = self.reference.tasks.all
        if tasks and data.draw(st.sampled_from([False, False, True]), "cancel"):
            self.run([CancelMove(queue=dead, origin=TESTER, task=tasks[-1].id)])
        self.run([self.draw_command(data)])
        self.sweep_after(passing)
        self.sweep_after(2 * SECOND_US)

    @rule(data=st.data())
    def cancel_move(self, data: st.DataObject) -> None:
        assume(self.reference.tasks.all)
        task = data.draw(st.sampled_from(self.reference.tasks.all[-3:]), "task")
        self.run([CancelMove(queue=task.source.key, origin=TESTER, task=task.id)])

    def draw_receive(self, data: st.DataObject, queue: QueueKey) -> Receive:
        return Receive(
            queue=queue,
            origin=TESTER,
            count_max=data.draw(st.sampled_from([1, 1, 2, 10]), "count"),
            lease_us=data.draw(st.none() | SPANS, "lease"),
            wait_us=data.draw(st.sampled_from([None, None, SECOND_US]), "wait"),
            in_flight_max=data.draw(st.sampled_from([None, None, 2]), "in flight"),
            attempt_id=data.draw(st.sampled_from([None, "x", "y"]), "attempt") if queue in FIFO else None,
        )

    @rule(data=st.data(), messages=st.integers(1, 6), receives=st.integers(2, 5), passing=PASSING)
    def receives_share_a_batch(self, data: st.DataObject, messages: int, receives: int, passing: int) -> None:
        assume(JOBS in self.reference.queues)
        # A receive passes over so many dead messages at most.
        assume(sum(self.reference.queues[JOBS].counts()) <= DETOURS_MAX - 6)
        self.stage.later(passing)
        for _ in range(messages):
            self.bodies += 1
            self.run([sending(JOBS, str(self.bodies))])
        self.run([self.draw_receive(data, JOBS) for _ in range(receives)])
        self.run([Receive(queue=JOBS, origin=TESTER, count_max=3)])

    @rule(passing=PASSING, count=st.sampled_from([1, 3, 10]))
    def peek(self, passing: int, count: int) -> None:
        self.peek_after(passing, count)

    def peek_after(self, passing: int, count: int) -> None:
        """Let time pass, peek into every queue, and compare."""
        self.stage.later(passing)
        self.reference.settle(self.stage.now)
        for key in self.reference.queues:
            shown = [(one.sequence, one.body, one.receive_count) for one in self.stage.peek(key, count)]
            assert shown == [(one.sequence, one.body, one.attempt) for one in self.reference.peek(key)[:count]]

    @rule(busy=GROUPS, idle=GROUPS, count=st.integers(1, 10), passing=PASSING)
    def give_back_at_once(self, busy: str | None, idle: str | None, count: int, passing: int) -> None:
        for group, lease_us in ((busy, 30 * SECOND_US), (busy, 0), (idle, 0)):
            self.bodies += 1
            extras = Extras(group=group) if group else NO_EXTRAS
            self.run([sending(OTHER, str(self.bodies), extras=extras)])
            self.run([Receive(queue=OTHER, origin=TESTER, lease_us=lease_us)])
        for _ in range(count):
            self.stage.later(passing)
            self.run([Receive(queue=OTHER, origin=TESTER, lease_us=0)])
        self.peek_after(0, 10)
        self.run([Receive(queue=OTHER, origin=TESTER, count_max=3)])

    @rule()
    def listed(self) -> None:
        store = self.stage.store
        with store.reader.look() as view:
            for key, queue in self.reference.queues.items():
                live = store.reader.queues[key]  # type: ignore[attr-defined]
                found = view.visible(live, 0, 10_000)
                assert len(found) == live.visible
                assert {row.sequence for row in found} <= {message.sequence for message in queue.messages}
                first = found[len(found) // 2].sequence if found else 0
                assert [row.sequence for row in view.visible(live, first, 3)] == [
                    row.sequence for row in found if row.sequence > first
                ][:3]

    @rule(kill=st.booleans())
    def reopen(self, kill: bool) -> None:
        before = self.described()
        report = check(Path(self.directory.name) / "data" / "veilmq.db")
        assert report.problems == []
        self.restart(kill, 0)
        assert self.described() == before

    @rule(kill=st.booleans(), ahead_us=st.sampled_from([HOUR_US - MINUTE_US, 2 * HOUR_US, 10 * DAY_US]))
    def start_ahead(self, kill: bool, ahead_us: int) -> None:
        self.restart(kill, ahead_us)

    @rule(ahead_us=st.sampled_from([0, 0, HOUR_US]))
    def accept_clock(self, ahead_us: int) -> None:
        command = CheckClock(accept=True, ahead_us=ahead_us)
        self.reference.settle(self.stage.now)
        held_us = min(self.reference.held_us, ahead_us)
        assert self.stage.do(command) == ClockChecked(held_us, self.reference.held_us - held_us)
        self.reference.held_us = held_us

    def restart(self, kill: bool, ahead_us: int) -> None:
        """Close or kill the store, and open it with the clock ahead."""
        step_us = self.stage.now + ahead_us - self.stage.store.mark
        self.stage.reopen(kill=kill, clock_step_us_max=HOUR_US)
        self.stage.later(ahead_us)
        if step_us > HOUR_US:
            self.reference.held_us += step_us
        self.reference.settle(self.stage.now)
        assert self.stage.do(CheckClock()) == ClockChecked(self.reference.held_us, 0)
        for queue in self.reference.queues.values():
            queue.bucket = NO_BUCKET
            queue.patience.passed_over = 0

    @rule(queue=QUEUES, change=CHANGES, passing=PASSING)
    def change(self, queue: QueueKey, change: dict[str, int], passing: int) -> None:
        self.stage.later(passing)
        self.run([ChangeQueue(queue=queue, origin=TESTER, change=change)])

    @rule(data=st.data(), passing=PASSING)
    def plan(self, data: st.DataObject, passing: int) -> None:
        self.stage.later(passing)
        queue = data.draw(QUEUES, "queue")
        if data.draw(st.booleans(), "apply"):
            self.run([ChangeQueue(queue=queue, origin=TESTER, change={"adaptive": Adaptive.APPLY})])
        self.run([SuggestPlan(queue=queue, origin=TESTER, plan=data.draw(PLANS, "plan"))])

    @rule(queue=st.sampled_from([OTHER, JOBS, DEAD, LINE]), passing=PASSING, again=st.booleans())
    def delete_queue(self, queue: QueueKey, passing: int, again: bool) -> None:
        self.stage.later(passing)
        self.run([DeleteQueue(queue=queue, origin=TESTER)])
        if again:
            change = {"retention_us": HOUR_US} | ({"fifo": True} if queue in FIFO else {})
            self.run([CreateQueue(queue=queue, origin=TESTER, change=change)])

    @rule(queue=QUEUES, change=CHANGES)
    def create_queue(self, queue: QueueKey, change: dict[str, int]) -> None:
        change = change | ({"fifo": True} if queue in FIFO else {})
        self.run([CreateQueue(queue=queue, origin=TESTER, change=change)])

    @rule(queue=QUEUES, passing=PASSING)
    def purge_queue(self, queue: QueueKey, passing: int) -> None:
        self.stage.later(passing)
        self.run([PurgeQueue(queue=queue, origin=TESTER)])

    @invariant()
    def nothing_is_lost(self) -> None:
        """Neither from the queues nor from the history: it adds up to what they hold."""
        books = ledgers(self.stage.recorded)
        for key, info in self.described().items():
            assert info.counts.total == sum(self.reference.queues[key].counts())
            assert info.counts.total == books[info.incarnation].live

    def described(self) -> dict[QueueKey, QueueInfo]:
        """All queues as they stand, in one batch: it is asked for after every step."""
        keys = list(self.reference.queues)
        outcomes = self.stage.batch([DescribeQueue(queue=key, origin=TESTER) for key in keys]).outcomes
        return {key: expect(outcome, QueueDescribed).info for key, outcome in zip(keys, outcomes, strict=True)}


class SnapshotMachine(StoreMachine):
    """The same with a history that is always beyond its bounds."""

    options = msgspec.structs.replace(SMALL, history_bytes_max=2_000)

    def __init__(self) -> None:
        super().__init__()
        self.told = Replaying()
        self.begun: list[Replaying] = []
        self.followed = 0
        self.steps_max = 1

    def run(self, commands: list[AnyCommand], order: list[int] | None = None) -> None:
        """The snapshot goes on between the commands."""
        super().run(commands, order)
        if self.steps_max:
            self.stage.sweep_once(self.steps_max)
            self.swept()

    @rule(steps_max=st.sampled_from([0, 1, 1, 2]))
    def pace(self, steps_max: int) -> None:
        self.steps_max = steps_max

    @rule(steps_max=st.sampled_from([1, 5, 256]))
    def end(self, steps_max: int) -> None:
        self.stage.sweep_snapshot(steps_max)
        self.swept()

    @invariant()
    def the_history_gives_the_state(self) -> None:
        for event in self.stage.recorded[self.followed :]:
            if event.kind == "snapshot" and (event.detail or {})["part"] == Part.BEGIN:
                self.begun = [*self.begun[-5:], Replaying()]
            for each in (self.told, *self.begun):
                each.add(event)
        self.followed = len(self.stage.recorded)
        state, instant = self.stage.state(), self.stage.now
        assert self.told.state().at(instant) == state.at(instant)
        for each in self.begun:
            with suppress(NotReplayable):
                assert each.state().at(instant) == state.at(instant)
        assert replay(self.stage.left()).at(instant) == state.at(instant)


def play(machine: type[StoreMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_store_answers_as_the_reference_does() -> None:
    play(StoreMachine, examples=60, steps=40)


def test_a_batch_may_delete_the_queue_that_it_sends_to() -> None:
    machine = StoreMachine()
    machine.queues()
    sends = [sending(queue, queue.name, extras=Extras(group="a", deduplication_id="x")) for queue in (DEAD_LINE, LINE)]
    machine.run([*sends, DeleteQueue(queue=LINE, origin=TESTER), *map(msgspec.structs.replace, sends)])
    machine.nothing_is_lost()
    machine.teardown()


def test_a_history_cut_short_gives_the_state() -> None:
    play(SnapshotMachine, examples=20, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_store_answers_as_the_reference_does_for_long() -> None:
    play(StoreMachine, examples=80, steps=80)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_history_cut_short_gives_the_state_for_long() -> None:
    play(SnapshotMachine, examples=40, steps=80)
