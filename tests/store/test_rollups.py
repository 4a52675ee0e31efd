"""Rollups: what the store says of each minute and hour is what its history says, whatever happened to the process."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.store.test_history_index import live
from tests.support.contract.stage import ACCOUNT, REGION, Stage, sending
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq import testing
from veilmq.model.commands import Sweep
from veilmq.model.events import Event, Kind
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, SECOND_US, Instant
from veilmq.model.messages import Report, Reported, failure_of
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store.rollups import COUNTS, HOLDS, STEPS, WAITS, Rollup, State, middle_us, step_of, unpacked
from veilmq.store.sqlite.batch import rollups
from veilmq.store.sqlite.batch.rollups import PERIOD_SHIFT
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.tools import check
from veilmq.store.sqlite.upkeep import rollups as upkeep

JOBS, DEAD = QueueKey(ACCOUNT, REGION, "jobs"), QueueKey(ACCOUNT, REGION, "dead")
NAMES = {
    Kind.SENT: "sent",
    Kind.RECEIVED: "received",
    Kind.DELETED: "deleted",
    Kind.RELEASED: "released",
    Kind.LEASE_EXPIRED: "lease_expired",
    Kind.DEAD_LETTERED: "dead_lettered",
    Kind.DELETE_REFUSED: "delete_refused",
    Kind.EXPIRED: "expired",
}
EVENTS = msgspec.msgpack.Decoder(list[Event])
Counted = dict[tuple[int, int], dict[str, int]]
"""By number of the minute or hour and incarnation of the queue: what happened, without zeros."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    stage.create("dead")
    stage.create("jobs", redrive=RedrivePolicy(DEAD, 2))
    yield stage
    stage.store.close()


def rows(stage: Stage, table: str) -> dict[tuple[int, int], Rollup]:
    """The stored rollups, by period and incarnation."""
    with store_of(stage).readers.lend() as connection:
        found: Any = connection.execute(f"SELECT id, numbers FROM {table}").fetchall()
    return {divmod(id_, 1 << PERIOD_SHIFT): unpacked(packed) for id_, packed in found}


def counts(rollup: Rollup) -> dict[str, int]:
    return {name: rollup.numbers[key] for key, name in enumerate(COUNTS) if rollup.numbers.get(key)}


def told(stage: Stage) -> Counted:
    """What the store says of all minutes, stored or not."""
    found = {place: counts(rollup) for place, rollup in rows(stage, "rollup_minute").items()}
    for queue in stage.store.reader.queues.values():
        for minute, rollup in stage.store.reader.unstored(queue.incarnation).items():
            assert (minute, queue.incarnation) not in found
            found[minute, queue.incarnation] = counts(rollup)
    return {place: each for place, each in found.items() if each}


def recounted(stage: Stage, period_us: int = MINUTE_US) -> Counted:
    """The same, counted in the history."""
    with store_of(stage).readers.lend() as connection:
        batches: Any = connection.execute("SELECT at, events FROM history").fetchall()
    found: dict[tuple[int, int], Counter[str]] = {}
    for at, packed in batches:
        for event in EVENTS.decode(packed):
            places = [(event.queue, NAMES.get(Kind(event.kind)))]
            if event.kind in {Kind.DEAD_LETTERED, Kind.MOVED}:
                places.append((event.detail["target"], "arrived"))  # type: ignore[index]
            for incarnation, name in places:
                if name is not None and incarnation is not None:
                    found.setdefault((at // period_us, incarnation), Counter())[name] += 1
    return {place: dict(each) for place, each in found.items()}


def over(stage: Stage) -> None:
    """The minute ends, and sweeps store it."""
    stage.later(MINUTE_US)
    for _ in range(100):
        stage.do(Sweep())


def test_minutes_and_hours_are_what_the_history_says(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through rollbacks, restarts and kills, also amid the storing of a minute."""
    monkeypatch.setattr(upkeep, "ROWS_MIN", 1)
    monkeypatch.setattr(upkeep, "CATCH_UP_EVENTS", 7)
    chance = testing.chance(3)
    for _ in range(12):
        live(stage, chance, 50)
        if chance.random() < 0.5:
            stage.later(MINUTE_US)
            stage.do(Sweep())
            stage.reopen(kill=chance.random() < 0.7)
    over(stage)
    expected = recounted(stage)
    kinds = {name for each in expected.values() for name in each}
    assert kinds == set(COUNTS) - {"released", "failed", "expired"}, "everything that this life has"
    assert told(stage) == expected
    hours = {place: counts(rollup) for place, rollup in rows(stage, "rollup_hour").items()}
    assert {place: each for place, each in hours.items() if each} == recounted(stage, HOUR_US)
    summed: dict[tuple[int, int], Rollup] = {}
    for (minute, incarnation), rollup in sorted(rows(stage, "rollup_minute").items()):
        summed.setdefault((minute // 60, incarnation), Rollup()).merge(rollup)
    stored = rows(stage, "rollup_hour")
    assert {place: (each.numbers, each.state) for place, each in summed.items()} == {
        place: (each.numbers, each.state) for place, each in stored.items()
    }, "the histograms are added, too, and an hour ends as its last minute"


def test_a_kill_loses_nothing_of_the_present_minute_and_counts_nothing_twice(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many events that wait are counted between two batches."""
    store, pending = store_of(stage), store_of(stage)._writer.rollups.pending
    monkeypatch.setattr(rollups, "EVENTS_MAX", pending + 20)
    for number in range(20):
        assert not store.work_ahead()
        stage.send(JOBS, str(number))
    assert store.work_ahead()
    assert store._writer.rollups.pending == 0
    stage.delete(JOBS, stage.take(JOBS).handle)
    over(stage)
    stage.send(JOBS, "in the next minute")
    before = told(stage)
    stage.reopen(kill=True)
    stage.do(Sweep())
    assert told(stage) == before == recounted(stage)


def test_a_kill_amid_the_storing_of_a_minute_counts_nothing_twice(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "ROWS_MIN", 1)
    for queue in (JOBS, DEAD, JOBS):
        stage.send(queue)
    stage.later(MINUTE_US)
    stage.do(Sweep())
    assert len(rows(stage, "rollup_minute")) == 1
    stage.reopen(kill=True)
    over(stage)
    hours = {place: counts(rollup) for place, rollup in rows(stage, "rollup_hour").items()}
    assert hours == recounted(stage, HOUR_US)
    assert told(stage) == recounted(stage)


def test_given_back_and_failed_are_told_apart(stage: Stage) -> None:
    for number in range(3):
        stage.send(JOBS, str(number))
    one, two, three = stage.receive(JOBS, 3)
    stage.do(stage.releasing(JOBS, one.handle))
    raised = Report(Reported.RETRY, failure_of("raised", "ValueError", "no"))
    busy = Report(Reported.RETRY, failure_of("busy"))
    stage.extend(JOBS, two.handle, SECOND_US, report=raised)
    stage.extend(JOBS, three.handle, SECOND_US, report=busy)
    (found,) = [each for each in told(stage).values() if "received" in each]
    assert found == {"sent": 3, "received": 3, "released": 2, "failed": 1}


def test_a_row_says_what_the_queue_held_and_how_long_messages_waited(stage: Stage) -> None:
    incarnation = stage.describe(JOBS).incarnation
    for number in range(30):
        stage.send(JOBS, str(number))
    first_sent = stage.now
    stage.later(2 * SECOND_US)
    taken = stage.receive(JOBS, 10)
    stage.later(5 * SECOND_US)
    for each in taken[:9]:
        stage.delete(JOBS, each.handle)
    minute = stage.now // MINUTE_US
    over(stage)
    row = rows(stage, "rollup_minute")[minute, incarnation]
    assert row.state == State(21, 1, first_sent)
    for what, exact_us in (("waits", 2 * SECOND_US), ("holds", 5 * SECOND_US)):
        times = row.times(what)
        assert times is not None
        assert list(times) == ["p50", "p95", "p99"]
        assert all(abs(each - exact_us) <= exact_us / 16 + 64 for each in times.values())


def test_both_ways_to_find_a_step_agree_within_the_error_that_is_promised() -> None:
    chance = testing.chance(5)
    times = [0, 1, 1_023, 1_024, (1 << 42) - 1_025, 1 << 43] + [int(2 ** chance.uniform(0, 43)) for _ in range(5_000)]
    start = Instant(1 << 50)
    waits = [Event(Kind.RECEIVED, Instant(start + time), 1, visible_since=start) for time in times]
    holds = [Event(Kind.DELETED, start, 1, held_us=time) for time in times]
    many, few = Rollup(), Rollup()
    for events in (waits, holds):
        many.add(events, bytes(event.kind for event in events))
        for event in events:
            few.add([event], bytes([event.kind]))
    assert many.numbers == few.numbers
    for first in (WAITS, HOLDS):
        assert Counter({key - first: n for key, n in few.numbers.items() if first <= key < first + STEPS}) == Counter(
            map(step_of, times)
        )
    within = [time for time in times if time < 1 << 41]
    assert all(abs(middle_us(step_of(time)) - time) <= time / 16 + 64 for time in within)


def test_old_and_too_many_rows_go_and_the_sizes_are_right(tmp_path: Path) -> None:
    options = msgspec.structs.replace(SMALL, rollup_minutes_us_max=HOUR_US, rollup_hours_us_max=DAY_US)
    stage = Stage(SqliteFactory(tmp_path / "data", options))
    queues = [stage.create(f"q{number}") for number in range(50)]

    def a_minute() -> None:
        stage.batch([sending(queue) for queue in queues])
        stage.later(MINUTE_US)
        for _ in range(3):
            stage.do(Sweep())

    for _ in range(65):
        a_minute()
    assert len({period for period, _ in rows(stage, "rollup_minute")}) == 60
    held = _bytes(stage)
    assert held["rollup_minute"] > 0
    stage.factory.options = msgspec.structs.replace(options, rollup_bytes_max=held["rollup_minute"])  # type: ignore[attr-defined]
    stage.reopen()
    for _ in range(20):
        a_minute()
    assert _bytes(stage)["rollup_minute"] <= held["rollup_minute"] // 2
    stage.later(2 * DAY_US)
    for _ in range(50):
        stage.do(Sweep())
    assert rows(stage, "rollup_minute") == rows(stage, "rollup_hour") == {}
    _bytes(stage)
    stage.store.close()


def _bytes(stage: Stage) -> dict[str, int]:
    """The bytes of each table as the store reckons them, which must be right."""
    found = {}
    with store_of(stage).readers.lend() as connection:
        for table, where in (("rollup_minute", "id < 1 << 40"), ("rollup_hour", "id >= 1 << 40")):
            real: Any = connection.execute(f"SELECT count(*), ifnull(sum(length(numbers)), 0) FROM {table}").fetchone()
            (kept,) = connection.execute(
                f"SELECT ifnull(sum(rows), 0), ifnull(sum(bytes), 0) FROM rollup_period WHERE {where}"
            ).fetchall()
            assert kept == (real[0], real[1] + upkeep.ROW_BYTES * real[0])
            found[table] = kept[1]
    return found


def test_rows_of_deleted_queues_go_and_no_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "DROPPED_MAX", 2)
    for number in range(5):
        stage.send(JOBS, str(number))
        stage.send(DEAD, str(number))
        over(stage)
    kept = stage.describe(DEAD).incarnation
    stage.drop(JOBS)
    stage.do(Sweep())
    stage.reopen(kill=True)
    over(stage)
    for table in ("rollup_minute", "rollup_hour"):
        assert {incarnation for _, incarnation in rows(stage, table)} == {kept}
    _bytes(stage)
    with store_of(stage).readers.lend() as connection:
        assert connection.execute("SELECT garbage FROM rollup_mark").get == 0


def test_a_damaged_rollup_is_told_and_stops_nothing(stage: Stage) -> None:
    stage.send(JOBS)
    over(stage)
    database = store_of(stage).directory.database
    stage.store.close()
    assert check(database).problems == []
    connection = connect(database)
    connection.execute("UPDATE rollup_hour SET numbers = x'93'")
    connection.execute("DELETE FROM rollup_minute")
    connection.close()
    found = [problem.text for problem in check(database).problems]
    assert len(found) == 3, found  # two queues have an hour that cannot be read
    assert "rollup_hour cannot be read" in found[0]
    assert "-2 rollups more than noted" in found[-1]
    stage.open()
    stage.send(JOBS)
    over(stage)
    stage.do(Sweep())
    assert [counts(rollup) for rollup in rows(stage, "rollup_minute").values()] == [{"sent": 1}]


def test_events_of_an_instant_that_cannot_be_stop_no_start(stage: Stage) -> None:
    """A flipped bit has made it; at a start the events of the last minute are read again."""
    stage.send(JOBS)
    database = store_of(stage).directory.database
    stage.store.close()
    connection = connect(database)
    connection.execute("UPDATE history SET at = at | 1 << 60")
    connection.close()
    stage.open()
    over(stage)
    assert rows(stage, "rollup_minute") == {}, "counted nowhere"


def test_an_undone_sweep_stores_its_rows_again(stage: Stage) -> None:
    stage.send(JOBS)
    stage.later(MINUTE_US)
    stage.store.apply([Sweep()], stage.now)
    stage.factory.abandon(stage.store)
    assert rows(stage, "rollup_minute") == {}
    over(stage)
    assert told(stage) == recounted(stage)
    _bytes(stage)


def test_what_was_there_before_the_rollups_is_not_counted(tmp_path: Path) -> None:
    """A history of before the migration is not read."""
    stage = Stage(SqliteFactory(tmp_path / "data"))
    stage.create("jobs")
    stage.send(JOBS)
    stage.do(Sweep())
    store = store_of(stage)
    store._writer.connection.execute("UPDATE rollup_mark SET offset = (SELECT offset FROM mark)")
    stage.reopen(kill=True)
    stage.do(Sweep())
    assert told(stage) == {}
    stage.store.close()
