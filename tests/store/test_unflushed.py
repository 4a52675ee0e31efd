"""Unflushed messages: in memory and in the journal, and nowhere else until they must be; nobody sees the difference."""

import os
from collections.abc import Callable
from typing import Any

import apsw
import msgspec
import pytest
from tests.support.contract.stage import TESTER, Stage, bodies, expect, impossible, refused, sending
from tests.support.sqlite import store_of

from veilmq.admin.api.inputs import PageInput
from veilmq.admin.history.messages import message_page
from veilmq.model.commands import AfterExpiry, Delete, Peek, Receive
from veilmq.model.errors import InFlightFull, LeaseExpired, LeaseTaken, MessageGone, StoreUnknown
from veilmq.model.instant import DAY_US, HOUR_US, SECOND_US
from veilmq.model.messages import Attribute, Extras, id_text
from veilmq.model.outcomes import Deleted, Extended, Received
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store.directory import DatabaseUnusable
from veilmq.store.sqlite import store
from veilmq.store.sqlite.batch import memtable
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.disk.rows import INSERT_MESSAGE
from veilmq.store.sqlite.reading import oldest_sent, oldest_unflushed, peeks
from veilmq.store.sqlite.tools import check
from veilmq.testing.for_each import for_each


def rows_of(stage: Stage) -> tuple[int, int, int]:
    """Rows as committed: messages, leases, batches in the journal."""
    with store_of(stage).readers.lend() as connection:
        counts = [connection.execute(f"SELECT count(*) FROM {table}").get for table in ("message", "lease", "memtable")]
    return counts[0], counts[1], counts[2]


def open_without_journal(stage: Stage) -> None:
    connection = connect(store_of(stage).directory.database)
    connection.execute("DELETE FROM memtable")
    connection.close()
    stage.store = stage.factory.open()


def test_a_message_that_dies_unflushed_never_has_a_row(stage: Stage) -> None:
    queue = stage.create()
    stage.send(queue, "short")
    handle = stage.take(queue).handle
    assert rows_of(stage) == (0, 0, 1)
    expect(stage.delete(queue, handle), Deleted)
    assert rows_of(stage) == (0, 0, 1)
    stage.sweep()
    assert rows_of(stage) == (0, 0, 0)


def test_a_sweep_gives_each_its_rows(stage: Stage) -> None:
    queue = stage.create()
    for body in ("in flight", "waits"):
        stage.send(queue, body)
    held = stage.take(queue, lease_us=HOUR_US)
    stage.sweep()
    assert rows_of(stage) == (2, 1, 0)
    assert stage.counts(queue) == (1, 0, 1)
    expect(stage.delete(queue, held.handle), Deleted)
    assert bodies(stage.receive(queue, 10)) == ["waits"]


@for_each("deep", [0, memtable.DEPTH_MAX + 1], fresh="stage")
@for_each(
    "fields",
    [
        {},
        {"ttl_us": HOUR_US},
        {"priority": 1},
        {"body": "x" * (memtable.MESSAGE_BYTES_MAX + 1)},
        {"delay_us": HOUR_US},
        {"extras": Extras(group="g")},
        {"extras": Extras((Attribute("a", "Binary", bytes(memtable.MESSAGE_BYTES_MAX)),), type="large")},
    ],
    ids=lambda fields: str(fields)[:40],
    fresh="stage",
)
def test_who_begins_unflushed(stage: Stage, deep: int, fields: dict[str, Any]) -> None:
    queue = stage.create(message_bytes_max=1 << 20)
    stage.batch([sending(queue, "before") for _ in range(deep)])
    stage.sweep()
    stage.send(queue, **{"body": "hello"} | fields)
    unflushed = not deep and not fields.keys() & {"body", "delay_us", "extras"}
    assert rows_of(stage)[2] == unflushed


ENDS: dict[str, Callable[[Stage, QueueKey, str], object]] = {
    "killed": lambda stage, queue, handle: stage.reopen(kill=True),
    "closed": lambda stage, queue, handle: stage.reopen(),
    "swept": lambda stage, queue, handle: stage.sweep(),
    "extended": lambda stage, queue, handle: expect(stage.extend(queue, handle, HOUR_US), Extended),
    "a group came": lambda stage, queue, handle: stage.send(queue, "of a group", extras=Extras(group="g")),
    "settings changed": lambda stage, queue, handle: stage.change(queue, retention_us=2 * DAY_US),
    "another queue was purged": lambda stage, queue, handle: stage.purge(stage.create("other")),
    "a late handle": lambda stage, queue, handle: refused(
        stage.delete(queue, store_of(stage)._writer.receipts.seal(1, 3, 1, 1)), LeaseTaken
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_flushed_message_is_what_it_was(stage: Stage, end: str) -> None:
    queue = stage.create()
    for body in ("gone", "first", "second", "third"):
        stage.send(queue, body, extras=Extras(type=body))
    gone, first = stage.receive(queue, 2, lease_us=HOUR_US)
    expect(stage.delete(queue, gone.handle), Deleted)
    before = stage.factory.state(stage.store)[1:]
    assert rows_of(stage)[0] == 0
    ENDS[end](stage, queue, first.handle)
    assert rows_of(stage)[0] >= 3
    if end in {"killed", "closed", "swept", "a late handle"}:
        assert stage.factory.state(stage.store)[1:] == before
    assert stage.counts(queue)[2] == 1
    left = bodies(stage.receive(queue, 10))
    assert [body for body in left if body != "of a group"] == ["second", "third"]
    expect(stage.delete(queue, first.handle), Deleted)
    assert stage.counts(queue)[2] == len(left)


def test_receives_that_share_a_batch_get_what_each_alone_would(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = stage.create()

    def shared(*wanted: dict[str, Any]) -> list[Any]:
        received = [Receive(queue=queue, origin=TESTER, **fields) for fields in wanted]
        outcomes = stage.batch(received).outcomes
        return [
            each if isinstance(each, InFlightFull) else bodies(expect(each, Received).messages) for each in outcomes
        ]

    for number in range(6):
        stage.send(queue, str(number))
    assert shared({}, {"count_max": 2}, {"count_max": 9}, {}) == [["0"], ["1", "2"], ["3", "4", "5"], []]
    assert rows_of(stage)[0] == 0

    for number in range(6):
        stage.send(queue, str(number))
    refused = InFlightFull(queue=str(queue), limit=8)
    assert shared(*[{"in_flight_max": 8}] * 4) == [["0"], ["1"], refused, refused]
    assert rows_of(stage)[0] == 0
    assert shared(*[{"lease_us": 0}] * 3, {"count_max": 9}) == [["2"], ["3"], ["4"], ["5", "2", "3", "4"]]
    assert rows_of(stage)[0] == 12

    for text in ("ab", "cd", "ef"):
        stage.send(queue, text)
    monkeypatch.setattr(store, "DELIVERED_BYTES_MAX", 3)
    received = Receive(queue=queue, origin=TESTER)
    applied = stage.batch([received] * 4)
    assert [bodies(expect(each, Received).messages) for each in applied.outcomes] == [["ab"], ["cd"], [], []]
    assert [expect(each, Received).cut for each in applied.outcomes] == [False, False, True, True]
    assert applied.visible == {queue: 1}


def test_a_rollback_takes_it_back_to_where_it_was(stage: Stage) -> None:
    queue = stage.create()
    for body in ("first", "second"):
        stage.send(queue, body)
    handle = stage.take(queue, lease_us=HOUR_US).handle
    before, rows = stage.factory.state(stage.store), rows_of(stage)
    stage.store.apply(
        [sending(queue, "third"), stage.releasing(queue, handle), Receive(queue=queue, origin=TESTER, count_max=10)],
        stage.now,
    )
    stage.factory.abandon(stage.store)
    assert (stage.factory.state(stage.store), rows_of(stage)) == (before, rows)
    assert stage.counts(queue) == (1, 0, 1)
    assert bodies(stage.receive(queue, 10)) == ["second"]
    expect(stage.delete(queue, handle), Deleted)


def test_a_lease_that_ends_comes_back_behind_what_waits(stage: Stage) -> None:
    queue = stage.create(redrive=RedrivePolicy(stage.create("dead"), 2))
    for body in ("first", "second"):
        stage.send(queue, body)
    late = stage.take(queue, lease_us=SECOND_US)
    stage.later(SECOND_US + 1)
    stage.send(queue, "third")
    assert bodies(stage.receive(queue, 10, lease_us=SECOND_US)) == ["second", "first", "third"]
    refused(stage.delete(queue, late.handle), LeaseTaken)
    stage.later(SECOND_US + 1)
    assert bodies(stage.receive(queue, 10)) == ["second", "third"]
    assert bodies(stage.receive(QueueKey(queue.account, queue.region, "dead"), 10)) == ["first"]


def test_a_handle_of_a_lease_that_ended_is_judged_as_any(stage: Stage) -> None:
    queue = stage.create()
    stage.send(queue)
    handle = stage.take(queue, lease_us=SECOND_US).handle
    stage.later(SECOND_US)
    expect(stage.delete(queue, handle, arrived=stage.now - 1), Deleted)
    stage.send(queue)
    handle = stage.take(queue, lease_us=SECOND_US).handle
    stage.later(SECOND_US)
    refused(stage.delete(queue, handle, arrived=stage.now + 1, after_expiry=AfterExpiry.REFUSE), LeaseExpired)


def test_a_late_delete_may_be_refused(stage: Stage) -> None:
    queue = stage.create()
    stage.send(queue)
    handle = stage.take(queue, lease_us=SECOND_US).handle
    stage.later(SECOND_US)
    refused(stage.delete(queue, handle, arrived=stage.now + 1, after_expiry=AfterExpiry.REFUSE), LeaseExpired)


def test_priorities_and_rows_stand_in_one_order(stage: Stage) -> None:
    queue = stage.create()
    stage.send(queue, "2 of the tables", priority=2)
    stage.send(queue, "8 of the tables")
    stage.sweep()
    for priority in (8, 2, 1):
        stage.send(queue, f"{priority} unflushed", priority=priority)
    expected = ["1 unflushed", "2 of the tables", "2 unflushed", "8 of the tables", "8 unflushed"]
    assert bodies(stage.peek(queue)) == expected
    assert [body for _ in range(3) for body in bodies(stage.receive(queue, 2))] == expected


def test_one_that_expires_is_expired(stage: Stage) -> None:
    queue = stage.create()
    stage.send(queue, "mortal", ttl_us=HOUR_US)
    stage.send(queue, "lives")
    stage.later(HOUR_US)
    assert bodies(stage.peek(queue)) == ["lives"]
    assert bodies(stage.receive(queue, 10)) == ["lives"]
    assert "expired" in {event.kind for event in stage.events()}


def test_there_are_never_many(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = stage.create()
    for _ in range(memtable.BATCHES_MAX + 5):
        stage.send(queue)
    assert rows_of(stage) == (memtable.BATCHES_MAX + 1, 0, 4)
    monkeypatch.setattr(memtable, "MESSAGES_MAX", 10)
    stage.batch([sending(queue) for _ in range(11)])
    rows = memtable.BATCHES_MAX + 16
    assert rows_of(stage) == (rows, 0, 0)
    monkeypatch.setattr(memtable, "BYTES_MAX", 1_000)
    stage.send(queue, "x" * 500)
    assert rows_of(stage) == (rows, 0, 1)
    stage.send(queue, "x" * 501)
    assert rows_of(stage) == (rows + 2, 0, 0)
    monkeypatch.setattr(memtable, "EVENTS_MAX", 3)
    for left in (1, 2, 3, 4):
        stage.send(queue)
        assert rows_of(stage) == (rows + 2, 0, left)
    stage.send(queue)
    assert rows_of(stage) == (rows + 7, 0, 0)


def test_readers_see_it(stage: Stage) -> None:
    queue = stage.create()
    waits = stage.send(queue, "waits")
    stage.later(SECOND_US)
    stage.send(queue, "waits too", extras=Extras(type="kind"))
    stage.send(queue, "urgent", priority=1)
    held = stage.take(queue, lease_us=HOUR_US)
    store = store_of(stage)

    def pages() -> Any:
        shown = [
            message_page(store.reader, queue, PageInput(state=state, limit=10), stage.now)
            for state in ("visible", "hidden")
        ]
        first = message_page(store.reader, queue, PageInput(limit=1), stage.now)
        return shown, first, message_page(store.reader, queue, PageInput(after=first["after"], limit=1), stage.now)

    unflushed, report = pages(), check(store.directory.database)
    assert [each["sequence"] for each in unflushed[0][0]["messages"]] == [waits.sequence, waits.sequence + 1]
    assert [each["sequence"] for each in unflushed[0][1]["messages"]] == [held.sequence]
    with store.readers.lend() as connection:
        live = store.reader.queues[queue]
        assert oldest_unflushed(connection) == {live.generation: waits.sent}
        assert oldest_sent(connection.execute, live.generation, []) is None
    assert (report.messages, report.leases, report.problems, report.books) == (3, 1, [], "balanced")
    stage.sweep()
    assert pages() == unflushed


def test_the_oldest_message_is_seen_in_flight_too(stage: Stage) -> None:
    queue = stage.create()
    stage.send(queue, "long work")
    sent = stage.take(queue, lease_us=HOUR_US).sent
    stage.sweep()
    store = store_of(stage)
    live = store.reader.queues[queue]
    with store.readers.lend() as connection:
        assert oldest_sent(connection.execute, live.generation, list(live.ready)) == sent
    stage.send(queue, "new")
    assert bodies(stage.receive(queue, 10)) == ["new"]


def test_handles_of_a_message_are_judged_in_their_order(stage: Stage) -> None:
    queue = stage.create()
    early = stage.send(queue, wants_handle=True).handle
    late = stage.take(queue, lease_us=HOUR_US).handle
    outcomes = stage.batch(
        [Delete(queue=queue, origin=TESTER, handle=handle, arrived=stage.now) for handle in (early, late, late)]
    ).outcomes
    assert [type(outcome) for outcome in outcomes] == [LeaseTaken, Deleted, MessageGone]
    assert stage.counts(queue) == (0, 0, 0)
    sent = stage.send(queue)
    handle = stage.take(queue, lease_us=HOUR_US).handle
    stage.batch([Delete(queue=queue, origin=TESTER, handle=handle, arrived=stage.now)] * 2)
    assert [(event.kind, event.message) for event in stage.events()[-2:]] == [
        ("deleted", id_text(sent.id)),
        ("delete_refused", id_text(sent.id)),
    ]


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_reader_goes_through_so_many_events_and_bytes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, rolled_back: bool
) -> None:
    def grow() -> None:
        if rolled_back:
            stage.send(queue, "forgotten")
            stage.store.apply([sending(queue)], stage.now)
            stage.factory.abandon(stage.store)

    queue = stage.create()
    monkeypatch.setattr(memtable, "EVENTS_MAX", 20)
    stage.send(queue, "waits")
    grow()
    for _ in range(10):
        stage.send(queue, priority=1)
        expect(stage.delete(queue, stage.take(queue).handle), Deleted)
    assert rows_of(stage)[2] < 8
    stage.sweep()
    monkeypatch.setattr(memtable, "BYTES_MAX", 1_000)
    stage.send(queue, "x" * 900)
    grow()
    stage.send(queue, "x" * 900)
    assert rows_of(stage)[2] == 0


def test_what_is_read_back_is_classified(stage: Stage) -> None:
    queue = stage.create()
    stage.send(queue, "damaged on disk")
    store_of(stage).apply_log()
    connection = connect(store_of(stage).directory.database)
    connection.execute(
        "UPDATE memtable SET messages = ?", (connection.execute("SELECT messages FROM memtable").get[:-1] + b"?",)
    )
    connection.close()
    assert bodies(stage.peek(queue)) == []
    stage.batch([sending(queue, "whole"), impossible()])
    assert bodies(stage.receive(queue, 10)) == ["whole"]
    assert "quarantined" in {event.kind for event in stage.events()}


def test_a_peek_into_another_queue_reads_no_history(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.send(stage.create())
    other = stage.create("other")
    monkeypatch.setattr(memtable, "_packed", lambda connection, start: pytest.fail("it was read"))
    assert stage.peek(other) == []


def test_a_child_that_was_forked_writes_nothing(stage: Stage) -> None:
    queue = stage.create()
    stage.send(queue)
    child = os.fork()
    if child == 0:
        try:
            stage.store.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert rows_of(stage) == (0, 0, 1)
    assert bodies(stage.receive(queue)) == ["hello"]


def test_a_child_that_was_forked_may_not_use_it(stage: Stage) -> None:
    queue = stage.create()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            stage.store.apply([sending(queue, "the child's")], stage.now)
        except StoreUnknown:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def of_no_queue(connection: apsw.Connection, contents: list[Any]) -> None:
    contents[1] = 77
    connection.execute("UPDATE memtable SET messages = ?", (msgspec.msgpack.encode([contents]),))


def of_no_line(connection: apsw.Connection, contents: list[Any]) -> None:
    contents[3] = 0
    connection.execute("UPDATE memtable SET messages = ?", (msgspec.msgpack.encode([contents]),))


def of_no_batch(connection: apsw.Connection, contents: list[Any]) -> None:
    connection.execute("UPDATE memtable SET offset = offset + 100")


def in_the_tables_too(connection: apsw.Connection, contents: list[Any]) -> None:
    connection.execute(INSERT_MESSAGE, tuple(contents))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (of_no_queue, "but of no queue"),
        (in_the_tables_too, "and in the tables"),
        (of_no_line, "impossible values"),
        (of_no_batch, "the history has none"),
    ],
)
def test_a_journal_that_contradicts_the_tables_is_found(
    stage: Stage, damage: Callable[[apsw.Connection, list[Any]], None], told: str
) -> None:
    stage.send(stage.create())
    store_of(stage).apply_log()
    stage.factory.kill(stage.store)
    database = store_of(stage).directory.database
    connection = connect(database)
    (contents,) = msgspec.msgpack.decode(connection.execute("SELECT messages FROM memtable").get)
    damage(connection, contents)
    connection.close()
    assert told in str(msgspec.to_builtins(check(database).problems))
    if damage in {of_no_queue, in_the_tables_too}:
        with pytest.raises(DatabaseUnusable):
            stage.factory.open()
    open_without_journal(stage)


@pytest.mark.parametrize(
    ("damage", "told"), [(lambda packed: b"\xff", "cannot be read"), (lambda packed: packed[:-1] + b"?", "its body")]
)
def test_a_damaged_journal_is_found(stage: Stage, damage: Callable[[bytes], bytes], told: str) -> None:
    queue = stage.create()
    stage.send(queue, "damaged")
    store_of(stage).apply_log()
    stage.factory.kill(stage.store)
    database = store_of(stage).directory.database
    connection = connect(database)
    connection.execute(
        "UPDATE memtable SET messages = ?", (damage(connection.execute("SELECT messages FROM memtable").get),)
    )
    connection.close()
    assert told in str(msgspec.to_builtins(check(database).problems))
    if told == "its body":
        stage.store = stage.factory.open()
        assert stage.receive(queue) == []
        assert "quarantined" in {event.kind for event in stage.events()}
    else:
        with pytest.raises(DatabaseUnusable):
            stage.factory.open()
        open_without_journal(stage)


def test_a_peek_sees_what_there_was_before_the_first_group(stage: Stage) -> None:
    queue = stage.create()
    stage.send(queue, "unflushed")
    store = store_of(stage)
    with store.readers.lend() as connection:
        connection.execute("SELECT count(*) FROM mark").fetchall()
        stage.send(queue, "of a group", extras=Extras(group="g"))
        seen = peeks.peek(
            connection, store._writer.queues, Peek(queue=queue, origin=TESTER, count_max=10), stage.now, stage.now
        )
    assert bodies(expect(seen, Received).messages) == ["unflushed"]
    assert bodies(stage.peek(queue)) == ["unflushed", "of a group"]
