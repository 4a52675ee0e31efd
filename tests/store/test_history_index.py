"""The index of the history: it finds all that a look through the whole history finds, and is trimmed with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage
from tests.support.sqlite import SqliteFactory, store_of

from veilmq import testing
from veilmq.admin.history import Scope
from veilmq.admin.history.trace import Trace, sends_with, trace
from veilmq.model.commands import StartMove, Sweep
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store.reader import Span
from veilmq.store.sqlite.batch import history_index
from veilmq.store.sqlite.reading import SqliteView
from veilmq.store.sqlite.tools import check

JOBS, DEAD = QueueKey(ACCOUNT, REGION, "jobs"), QueueKey(ACCOUNT, REGION, "dead")
BLOCK = 40
ALL = 10**9


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(history_index, "BLOCK_EVENTS", BLOCK)
    stage = Stage(SqliteFactory(tmp_path / "data"))
    stage.create("dead")
    stage.create("jobs", redrive=RedrivePolicy(DEAD, 2))
    yield stage
    stage.store.close()


ACTS = {
    "send": 3,
    "receive": 2,
    "delete": 2,
    "stale": 1,
    "later": 1,
    "purge": 0.1,
    "move": 0.4,
    "reopen": 0.1,
    "kill": 0.1,
    "undone": 0.1,
}
"""What clients and operators do, and how often."""


def live(stage: Stage, chance: testing.Random, steps: int) -> None:
    """Clients use two queues, with dead letters, moves back, purges and refused handles; the store starts anew now and
    then."""
    handles: list[str] = []
    for step, act in enumerate(chance.choices(list(ACTS), list(ACTS.values()), k=steps)):
        match act:
            case "send":
                stage.send(JOBS, f"body {step}")
            case "receive":
                handles += [each.handle for each in stage.receive(JOBS, lease_us=10 * SECOND_US)]
            case "delete" if handles:
                stage.delete(JOBS, handles[-1])
            case "stale" if handles:
                stage.delete(JOBS, chance.choice(handles))
            case "later":
                stage.later(7 * SECOND_US)
                stage.sweep()
            case "purge":
                stage.purge(chance.choice((JOBS, DEAD)))
            case "move":
                stage.do(StartMove(origin=TESTER, queue=DEAD))
            case "undone":
                stage.store.apply([Sweep()], stage.now)
                stage.factory.abandon(stage.store)
            case _:
                stage.reopen(kill=act == "kill")


def some_ids(stage: Stage) -> list[bytes]:
    """Of every third message, and of those that were moved."""
    events = stage.events()
    sent = [event.message for event in events if event.kind == "sent"][::3]
    moved = [event.message for event in events if event.kind == "moved"]
    return [bytes.fromhex(each.replace("-", "")) for each in dict.fromkeys(sent + moved) if each]


def traced(stage: Stage, message: bytes, scan_max: int = ALL) -> Trace:
    with store_of(stage).reader.look() as view:
        return trace(view, message, scan_max, Scope())


def blocks(stage: Stage) -> list[tuple[int, int]]:
    with store_of(stage).readers.lend() as connection:
        rows = connection.execute("SELECT id, until FROM history_index WHERE id < 1 << 48 ORDER BY id")
        return [(first, until) for first, until in rows]


def test_a_trace_finds_what_reading_everything_finds(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(stage, testing.chance(1), 500)
    stage.do(Sweep())
    messages = some_ids(stage)
    found = [traced(stage, message) for message in messages]
    assert len(blocks(stage)) > 5
    least = min(each.scanned for each in found)
    monkeypatch.setattr(SqliteView, "spans", lambda view, *_: [Span(*view.bounds(), indexed=False)])
    everything = [traced(stage, message) for message in messages]
    assert [each.events for each in found] == [each.events for each in everything]
    assert [each.places for each in found] == [each.places for each in everything]
    kinds = {event.kind for each in found for event in each.events}
    assert {"sent", "dead_lettered", "delete_refused", "purged"} <= kinds, "the history has something of everything"
    assert any(len({event.message for event in each.events} - {None}) > 1 for each in found), "and a message moved"
    assert least < everything[0].scanned / 3
    stage.store.close()
    assert check(tmp_path / "data" / "veilmq.db").problems == []
    stage.open()


def test_of_events_that_it_does_not_cover_the_newest_are_read(stage: Stage) -> None:
    for number in range(3 * BLOCK):
        stage.send(JOBS, str(number))
    stage.do(Sweep())
    newest = stage.send(JOBS, "newest")
    assert traced(stage, newest.id, 0).events == []
    assert traced(stage, newest.id, 1).complete
    first = bytes.fromhex((stage.events(2)[0].message or "").replace("-", ""))
    assert traced(stage, first, 0).complete, "it is in the index"


def test_a_message_whose_send_was_trimmed_is_found_in_the_snapshot(stage: Stage) -> None:
    sent = stage.send(JOBS, "old")
    stage.reopen(history_bytes_max=10_000)
    for number in range(150):
        stage.send(DEAD, str(number))
        stage.delete(DEAD, stage.take(DEAD).handle)
        stage.do(Sweep())
    found = traced(stage, sent.id)
    assert (found.events, found.complete) == ([], False)
    assert list(found.places) == [sent.sequence]


def test_it_is_trimmed_with_the_history_and_counts_against_its_bound(stage: Stage) -> None:
    stage.reopen(history_bytes_max=20_000)
    for number in range(250):
        stage.send(JOBS, str(number))
        stage.delete(JOBS, stage.take(JOBS).handle)
        stage.do(Sweep())
    with store_of(stage).readers.lend() as connection:
        first = connection.execute("SELECT min(offset) FROM history").get
        (kept,) = connection.execute("SELECT sum(length(events)) FROM history").fetchall()[0]
        (index,) = connection.execute("SELECT sum(length(names)) FROM history_index").fetchall()[0]
    assert first
    assert all(until > first for _, until in blocks(stage))
    assert kept + index < 21_000


def test_a_file_from_before_the_index_is_read_whole_until_its_events_are_trimmed(stage: Stage) -> None:
    old = stage.send(JOBS, "old")
    for number in range(20 * BLOCK):
        stage.send(JOBS, str(number))
    store_of(stage)._writer.connection.execute("DELETE FROM history_index")
    stage.reopen()
    stage.later(MINUTE_US)
    for number in range(3 * BLOCK):
        stage.send(JOBS, str(number))
        stage.do(Sweep())
    assert len(blocks(stage)) > 1
    assert blocks(stage)[0][0] > 20 * BLOCK, "what was there is too much to be indexed at once"
    assert traced(stage, old.id).complete
    assert not traced(stage, old.id, 10 * BLOCK).complete


def test_a_block_that_was_rolled_back_is_written_again(stage: Stage) -> None:
    messages = [stage.send(JOBS, str(number)).id for number in range(BLOCK + 1)]
    assert blocks(stage) == []
    stage.store.apply([Sweep()], stage.now)
    stage.factory.abandon(stage.store)
    assert blocks(stage) == []
    stage.do(Sweep())
    assert len(blocks(stage)) == 1
    assert all(traced(stage, message, 0).complete for message in messages)


def test_a_send_is_found_by_its_deduplication_id(stage: Stage, tmp_path: Path) -> None:
    """After kills, rollbacks and restarts, whatever became of the message."""
    queue, chance = stage.create("lane.fifo"), testing.chance(4)
    sent: list[tuple[str, bytes]] = []
    for step in range(120):
        identity = f"order-{step % 100}"
        found = stage.send(queue, str(step), extras=Extras(group="a", deduplication_id=identity))
        sent += [] if found.duplicate else [(identity, found.id)]
        if step % 3 == 0:
            stage.delete(queue, stage.take(queue).handle)
        if step % 10 == 9:
            stage.later(40 * SECOND_US)
            stage.store.apply([Sweep()], stage.now)
            stage.factory.abandon(stage.store)
            stage.reopen(kill=chance.random() < 0.5)
        if step == 99:
            stage.later(10 * MINUTE_US)
    with stage.store.reader.look() as view:
        (last,) = [span for span in view.spans_of_sends("nobody") if not span.indexed]
        assert last.start > 4 * BLOCK, "most of it is indexed"
        for identity in sorted({each for each, _ in sent}):
            events, scanned, complete = sends_with(view, identity, ALL)
            assert [event.message for event in events] == [message for of, message in sent[::-1] if of == identity]
            assert complete
            assert scanned <= last.stop - last.start + 4 * BLOCK
        assert sends_with(view, "order-1000", ALL)[0] == []
    stage.store.close()
    assert check(tmp_path / "data" / "veilmq.db").problems == []
    stage.open()
