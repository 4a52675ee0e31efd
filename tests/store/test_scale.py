"""What a step costs does not grow with what there is: queues, names, history, tasks, leases that end together.

Strategy: work is counted, not timed: statements that SQLite runs, the plans it makes of them, events that one batch
writes, and dictionaries that refuse to be walked through.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, expect, sending
from tests.support.sqlite import SqliteFactory

from veilmq.model.commands import (
    AnyCommand,
    CancelMove,
    ChangeQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    ListMoves,
    ListQueues,
    Receive,
    StartMove,
    Sweep,
)
from veilmq.model.events import HistoryTrimmed
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.moves import MOVES_PER_SECOND_MAX, MoveStatus
from veilmq.model.outcomes import MovesListed, MoveStarted, QueueDescribed, QueuesListed, Received
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.model.settings.topic import is_hidden
from veilmq.store.sqlite.batch import queues
from veilmq.store.sqlite.batch.queues import OrderedNames
from veilmq.store.sqlite.leases.claims import DETOURS_MAX, DETOURS_MIN, DETOURS_OF_BATCH
from veilmq.store.sqlite.leases.expiry import RETURNS_MIN, RETURNS_OF_BATCH
from veilmq.store.sqlite.loading import load_queues
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.upkeep import LOOKS_MAX
from veilmq.store.sqlite.upkeep.jobs import move_tasks
from veilmq.testing.for_each import for_each

BATCH = 250
LEASE_US = 30 * SECOND_US
ALLOWED_SCANS = {
    "mark",
    "garbage",
    "quarantine",
    "snapshot",
    "move_task_active",
    "job",
    "c",
    "carray",
    "(subquery-1)",
}
"""Of one row, of next to nothing, of what is under way, and of what a command itself brought."""


ORDERED = r"(min|max)\((offset|sequence|number|generation)\)"


class Unwalked(dict[Any, Any]):
    """May be asked for a key, and nothing else."""

    def _refuse(self) -> NoReturn:
        raise AssertionError("somebody goes through all of it")

    __iter__ = keys = values = items = _refuse  # type: ignore[assignment]


def connection_of(stage: Stage) -> apsw.Connection:
    return cast(SqliteStore, stage.store)._writer.connection


def queues_of(stage: Stage) -> queues.Queues:
    return cast(SqliteStore, stage.store)._writer.queues


@contextmanager
def statements(connection: apsw.Connection) -> Iterator[list[str]]:
    """What the connection runs meanwhile."""
    run: list[str] = []

    def note(_cursor: Any, statement: str, _values: Any) -> bool:
        run.append(statement)
        return True

    connection.exec_trace = note
    try:
        yield run
    finally:
        connection.exec_trace = None


def make(stage: Stage, count: int, name: Callable[[int], str] = "queue-{:05d}".format, **change: Any) -> list[QueueKey]:
    """Queues with those names."""
    keys = [QueueKey(ACCOUNT, REGION, name(number)) for number in range(count)]
    for at in range(0, count, BATCH):
        stage.batch([CreateQueue(queue=key, origin=TESTER, change=change) for key in keys[at : at + BATCH]])
    return keys


def fill(stage: Stage, queue: QueueKey, count: int) -> None:
    for at in range(0, count, BATCH):
        stage.batch([sending(queue, str(number)) for number in range(at, min(count, at + BATCH))])


def leased(stage: Stage, queue: QueueKey, count: int) -> None:
    """So many messages, all in flight, under leases that end together."""
    fill(stage, queue, count)
    assert len(stage.receive(queue, count, lease_us=LEASE_US)) == count


def moved_after(stage: Stage, start: int) -> int:
    return sum(kind == "moved" for kind in stage.kinds(start))


def test_after_a_start_each_step_looks_into_a_few_queues(stage: Stage) -> None:
    keys = make(stage, 1_000)
    stage.batch([sending(key) for key in keys])
    stage.reopen()
    with statements(connection_of(stage)) as run:
        assert stage.sweep_once().more
    assert len(run) < 4 * LOOKS_MAX
    assert stage.sweep() >= 1_000 // LOOKS_MAX - 1
    stage.later(5 * DAY_US)
    stage.sweep()
    assert stage.kinds().count("expired") == 1_000


def test_looking_at_a_deep_queue_takes_no_statement_a_message(stage: Stage) -> None:
    fill(stage, stage.create(), 500)
    stage.reopen()
    with statements(connection_of(stage)) as run:
        stage.sweep_once()
    assert len(run) < 25  # as many for 5 messages


def test_a_queue_that_is_looked_at_for_days_leaves_nothing_behind(stage: Stage) -> None:
    for key in make(stage, 3):
        stage.send(key)
    stage.reopen()
    for _ in range(200):
        stage.later(MINUTE_US)
        stage.sweep()
    assert len(queues_of(stage).expiry) <= 2 * 3


@for_each("which", ["due", "expiry"], fresh="stage")
def test_bounds_that_fall_and_fall_are_forgotten_but_for_the_last(stage: Stage, which: str) -> None:
    known = queues_of(stage)
    for key in make(stage, 3):
        for instant in range(20_000, 0, -1):
            getattr(known, f"lower_{which}")(known.by_key[key], instant)
    bounds: queues.Bounds = getattr(known, which)
    assert len(bounds) <= queues.STALE_MAX + 2 * 3 + 1
    assert set(bounds.due(1)) == {queue.incarnation for queue in known.by_key.values()}


def test_opening_takes_no_statement_a_queue(stage: Stage) -> None:
    def taken() -> int:
        with statements(connection_of(stage)) as run:
            load_queues(connection_of(stage))
        return len(run)

    few = taken()
    for key in make(stage, 300):
        stage.send(key)
    assert taken() == few


def test_a_name_is_made_and_dropped_without_a_look_at_the_others(stage: Stage) -> None:
    known = queues_of(stage)
    known.aliases = Unwalked(known.aliases)
    known.by_key = Unwalked(known.by_key)
    first = stage.create("First_", alias="the-first")
    second = stage.create("Second_", alias="the-second")
    stage.change(first, alias="another")
    stage.drop(second)
    third = stage.create("Third_", alias="the-second", redrive=RedrivePolicy(first, 1))
    expect(stage.do(StartMove(queue=first, origin=TESTER, destination=third)), MoveStarted)
    listed = ListQueues(origin=TESTER, account=ACCOUNT, region=REGION, names="[a-z-]+", count_max=1)
    assert [info.key for info in expect(stage.do(listed), QueuesListed).queues] == [first]
    listed = ListQueues(origin=TESTER, account=ACCOUNT, region=REGION, dead_letter_target=first)
    assert [info.key for info in expect(stage.do(listed), QueuesListed).queues] == [third]


def test_a_page_looks_at_the_queues_that_it_shows(stage: Stage) -> None:
    make(stage, 1_000)
    known = queues_of(stage)
    seen: list[QueueKey] = []

    class Watched(dict[QueueKey, queues.LiveQueue]):
        def __getitem__(self, key: QueueKey) -> queues.LiveQueue:
            seen.append(key)
            return super().__getitem__(key)

    known.by_key = Watched(known.by_key)
    for account, after in ((ACCOUNT, "queue-00500"), (None, f"{ACCOUNT}/{REGION}/queue-00500")):
        seen.clear()
        command = ListQueues(origin=TESTER, account=account, region=REGION, after=after, count_max=10)
        outcome = expect(stage.do(command), QueuesListed)
        assert [info.key.name for info in outcome.queues] == [f"queue-00{number}" for number in range(501, 511)]
        assert outcome.more
        assert len(seen) == 11


NAMES = st.text("ab-_/", min_size=1, max_size=3)


@given(
    st.sets(st.tuples(st.sampled_from(("1", "2")), st.sampled_from(("r", "r-1")), NAMES), max_size=12),
    st.data(),
)
def test_names_come_in_the_order_of_their_keys_as_text(tuples: set[tuple[str, str, str]], data: st.DataObject) -> None:
    keys = [QueueKey(*parts) for parts in tuples]
    names = OrderedNames()
    for key in keys:
        names.add(key)
    for key in data.draw(st.sets(st.sampled_from(keys)) if keys else st.just(set())):
        list(names.following((key.account, key.region), "", ""))  # sorts
        names.remove(key)
        keys.remove(key)
    prefix, after = data.draw(st.one_of(st.just(""), NAMES)), data.draw(st.one_of(st.just(""), NAMES))
    found = [
        QueueKey(*place, name) for place in names.places(None, None) for name in names.following(place, prefix, after)
    ]
    wanted = [key for key in keys if key.name.startswith(prefix) and key.name > after]
    assert found == sorted(wanted, key=str)
    assert bool(names) is bool(keys)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(NAMES, st.one_of(st.none(), st.text("abc", min_size=3, max_size=3))), max_size=8),
    st.one_of(st.just(""), NAMES),
    st.one_of(
        st.just(""), NAMES, st.sampled_from((f"{ACCOUNT}/", f"{ACCOUNT}/{REGION}", f"{ACCOUNT}/{REGION}/a", "1"))
    ),
    st.sampled_from((None, "[a-]+")),
    st.booleans(),
    st.integers(1, 4),
)
def test_pages_are_those_of_a_list_that_is_sorted_each_time(
    tmp_path_factory: pytest.TempPathFactory,
    named: list[tuple[str, str | None]],
    prefix: str,
    after: str,
    names: str | None,
    everywhere: bool,
    count_max: int,
) -> None:
    stage = Stage(SqliteFactory(tmp_path_factory.mktemp("list") / "data"))
    for name, alias in named:
        key = QueueKey(ACCOUNT, REGION, name)
        stage.do(
            CreateQueue(queue=key, origin=TESTER, change={} if alias is None or is_hidden(name) else {"alias": alias})
        )
    command = ListQueues(
        origin=TESTER,
        account=None if everywhere else ACCOUNT,
        region=None if everywhere else REGION,
        prefix=prefix,
        after=after,
        names=None if everywhere else names,
        count_max=count_max,
    )
    shown = sorted(
        (text, queue.key)
        for queue in queues_of(stage).by_key.values()
        if (text := shown_as(queue, command)) is not None
        and (queue.key.name if everywhere else text).startswith(prefix)
        and text > after
    )
    outcome = expect(stage.do(command), QueuesListed)
    assert [info.key for info in outcome.queues] == [key for _, key in shown[:count_max]]
    assert outcome.more is (len(shown) > count_max)
    stage.store.close()


def shown_as(queue: queues.LiveQueue, command: ListQueues) -> str | None:
    if is_hidden(queue.key.name):
        return None
    if command.account is None:
        return str(queue.key)
    allowed = command.names is None or not set(queue.key.name) - set("a-")
    return queue.key.name if allowed else queue.settings.alias


def test_what_is_rolled_back_is_not_listed(stage: Stage) -> None:
    first, second = stage.create("first"), stage.create("second")
    stage.change(first, redrive=RedrivePolicy(second, 1))
    all_of_them = ListQueues(origin=TESTER, account=ACCOUNT, region=REGION)
    sources = ListQueues(origin=TESTER, account=ACCOUNT, region=REGION, dead_letter_target=second)

    def shown(command: ListQueues) -> list[str]:
        return [info.key.name for info in expect(stage.do(command), QueuesListed).queues]

    def undone(*commands: AnyCommand) -> None:
        assert stage.store.apply(commands, stage.now).wrote
        stage.factory.abandon(stage.store)
        assert shown(all_of_them) == ["first", "second"]
        assert shown(sources) == ["first"]

    third = QueueKey(ACCOUNT, REGION, "third")
    undone(CreateQueue(queue=third, origin=TESTER, change={"redrive": RedrivePolicy(second, 2)}))
    undone(ChangeQueue(queue=first, origin=TESTER, change={"redrive": None}))
    undone(DeleteQueue(queue=first, origin=TESTER))
    undone(ChangeQueue(queue=first, origin=TESTER, change={"redrive": None}), DeleteQueue(queue=first, origin=TESTER))
    stage.change(first, redrive=None)
    assert shown(sources) == []


def test_leases_that_end_together_are_shared_out_among_batches(stage: Stage) -> None:
    queue, receives = stage.create(), 100
    leased(stage, queue, 4_000)
    stage.later(LEASE_US)
    start = stage.following()
    command = Receive(queue=queue, origin=TESTER, count_max=10, lease_us=LEASE_US)
    outcomes = stage.batch([command] * receives).outcomes
    assert [len(expect(outcome, Received).messages) for outcome in outcomes] == [10] * receives
    ended = stage.kinds(start).count("lease_expired")
    assert RETURNS_OF_BATCH <= ended <= RETURNS_OF_BATCH + receives * RETURNS_MIN

    start = stage.following()
    described = stage.batch([DescribeQueue(queue=queue, origin=TESTER)] * receives).outcomes
    counts = expect(described[-1], QueueDescribed).info.counts
    assert stage.kinds(start).count("lease_expired") <= RETURNS_OF_BATCH + receives * RETURNS_MIN
    assert counts.total == 4_000


def test_one_look_alone_finds_as_much_as_ever(stage: Stage) -> None:
    queue = stage.create()
    leased(stage, queue, 900)
    stage.later(LEASE_US)
    assert stage.counts(queue) == (900, 0, 0)


def test_messages_on_their_way_to_the_dead_letters_are_shared_out_among_batches(stage: Stage) -> None:
    dead = stage.create("dead")
    queue, receives = stage.create("jobs", redrive=RedrivePolicy(dead, 1)), 50
    leased(stage, queue, 2_000)
    stage.later(LEASE_US)
    stage.sweep()
    start = stage.following()
    stage.batch([Receive(queue=queue, origin=TESTER)] * receives)
    gone = stage.kinds(start).count("dead_lettered")
    assert DETOURS_OF_BATCH <= gone <= DETOURS_OF_BATCH + DETOURS_MAX + receives * DETOURS_MIN
    while stage.counts(queue)[0]:
        assert stage.receive(queue) == []
    assert stage.counts(dead) == (2_000, 0, 0)


def test_one_step_is_shared_by_all_move_tasks(stage: Stage) -> None:
    count, each = 20, 40
    for number in range(count):
        dead = stage.create(f"dead-{number}")
        queue = stage.create(f"jobs-{number}", redrive=RedrivePolicy(dead, 1))
        fill(stage, dead, each)
        expect(stage.do(StartMove(queue=dead, origin=TESTER, destination=queue)), MoveStarted)
    stage.later(SECOND_US)
    start = stage.following()
    assert stage.sweep_once().more
    assert 0 < moved_after(stage, start) <= move_tasks.STEP_MESSAGES_MAX
    for _ in range(count):
        stage.sweep_once()
    assert {info.status for info in tasks(stage, count)} <= {MoveStatus.RUNNING, MoveStatus.COMPLETED}
    assert all(info.moved for info in tasks(stage, count))
    stage.sweep()
    assert {info.status for info in tasks(stage, count)} == {MoveStatus.COMPLETED}
    assert moved_after(stage, start) == count * each


def tasks(stage: Stage, count: int) -> list[Any]:
    keys = [QueueKey(ACCOUNT, REGION, f"dead-{number}") for number in range(count)]
    listed = [stage.do(ListMoves(queue=key, origin=TESTER, count_max=1)) for key in keys]
    return [info for outcome in listed for info in expect(outcome, MovesListed).tasks]


def test_a_slow_task_does_not_hold_up_the_others(stage: Stage) -> None:
    for number, rate in enumerate((1, None)):
        dead = stage.create(f"dead-{number}")
        queue = stage.create(f"jobs-{number}", redrive=RedrivePolicy(dead, 1))
        fill(stage, dead, 300)
        expect(stage.do(StartMove(queue=dead, origin=TESTER, destination=queue, rate_max=rate)), MoveStarted)
    stage.later(SECOND_US)
    stage.sweep()
    slow, fast = tasks(stage, 2)
    assert slow.moved <= 2
    assert fast.moved == min(300, MOVES_PER_SECOND_MAX)


def test_no_statement_reads_a_whole_table(stage: Stage) -> None:
    """Every statement of a varied life is planned again, and none may go through what grows."""
    with statements(connection_of(stage)) as run:
        live(stage)
    plans = {statement: plan_of(connection_of(stage), statement) for statement in set(run)}
    scans = [(step, statement) for statement, plan in plans.items() for step in plan if is_scan(step, statement)]
    assert scans == []


def live(stage: Stage) -> None:
    """A bit of everything that a server does while it runs."""
    dead = stage.create("dead")
    queue = stage.create("jobs", redrive=RedrivePolicy(dead, 1), alias=None)
    line, gone = stage.create("line.fifo"), stage.create("gone")
    for target in (queue, line):
        fields = [{"extras": Extras(group=f"g{n % 3}", deduplication_id=str(n))} for n in range(12)]
        stage.batch([sending(target, **each) for each in fields])
    stage.batch([sending(queue, priority=1 + n % 4, delay_us=n % 2 * SECOND_US, ttl_us=HOUR_US) for n in range(12)])
    for target in (queue, line):
        messages = stage.receive(target, 10, lease_us=LEASE_US, attempt_id="again" if target is line else None)
        stage.extend(target, messages[0].handle, LEASE_US)
        stage.batch([Delete(queue=target, origin=TESTER, handle=m.handle, arrived=stage.now) for m in messages[1:3]])
        stage.counts(target)
    stage.later(LEASE_US)
    stage.sweep()
    stage.receive(queue, 10)
    expect(stage.do(StartMove(queue=dead, origin=TESTER, destination=queue)), MoveStarted)
    stage.do(CancelMove(queue=dead, origin=TESTER, task=bytes(16)))
    stage.later(SECOND_US)
    stage.sweep()
    stage.change(line, delay_us=SECOND_US)
    stage.purge(dead)
    stage.drop(gone)
    again = CreateQueue(queue=gone, origin=TESTER, cooldown_us=MINUTE_US)
    stage.do(again)
    for _ in range(3):
        stage.later(4 * DAY_US)
        stage.sweep_snapshot()
        stage.batch([again, sending(queue), Sweep()])
    stage.sweep_snapshot()
    stage.do(again)
    with pytest.raises(HistoryTrimmed):
        stage.events()


def plan_of(connection: apsw.Connection, statement: str) -> list[str]:
    if not statement.startswith(("SELECT", "INSERT", "UPDATE", "DELETE")):
        return []
    count = statement.count("?")
    cursor = connection.cursor()
    try:
        return [row[3] for row in cursor.execute("EXPLAIN QUERY PLAN " + statement, (None,) * count)]
    except apsw.BindingsError as error:
        needed = int(str(error).split("uses ")[1].split(" ")[0])
        return [row[3] for row in cursor.execute("EXPLAIN QUERY PLAN " + statement, (None,) * needed)]


def is_scan(step: str, statement: str) -> bool:
    """Whether a table that grows is read from end to end.

    A limit ends a scan that follows the table's own order. A search for nothing in particular is one for the least or
    greatest: at once by an order that there is, else from end to end.
    """
    words = step.split()
    if step.endswith("-ROW VALUES CLAUSE"):  # the rows that an insert brings along
        return False
    if words[1] in ALLOWED_SCANS or words[-1] in ALLOWED_SCANS:
        return False
    if words[0] == "SCAN":
        return " LIMIT " not in statement
    return words[0] == "SEARCH" and "(" not in step and re.search(ORDERED, statement) is None
