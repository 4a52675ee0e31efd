"""What clients did in the last hour: counted whatever the batches are, and bounded."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.contract.stage import Stage
from tests.support.sqlite import SqliteFactory, store_of

from veilmq import testing
from veilmq.model.commands import Delete, Extend, Origin, Receive, Sweep
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Delivery, Report, Reported, failure_of
from veilmq.model.outcomes import Received
from veilmq.store.rollups import CLIENT_COUNTS
from veilmq.store.sqlite.batch import rollups

FAILED = Report(Reported.RETRY, failure_of("raised", "ValueError", "no"))
BUSY = Report(Reported.RETRY, failure_of("busy"))


def worker(number: int) -> Origin:
    return Origin("veil", "key", f"worker {number}")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    stage.create("jobs", visibility_timeout_us=20 * SECOND_US)
    yield stage
    stage.store.close()


def receive(stage: Stage, number: int, count: int = 1) -> list[Delivery]:
    """What the worker of that number receives."""
    (queue,) = stage.store.reader.queues
    outcome = stage.do(Receive(queue=queue, origin=worker(number), count_max=count))
    assert isinstance(outcome, Received)
    return outcome.messages


def told(stage: Stage) -> dict[str, dict[str, int]]:
    """Counts by client name."""
    seen = stage.store.reader.seen_clients(stage.now)
    names = {number: origin.client for origin, number in store_of(stage)._writer.origins.items()}
    found: dict[str, Counter[str]] = {}
    for window in seen.windows:
        for origin, counts in window.items():
            found.setdefault(names[origin], Counter()).update(dict(zip(CLIENT_COUNTS, counts, strict=True)))
    return {name: {what: count for what, count in each.items() if count} for name, each in found.items()}


def test_each_client_has_its_own_counts(stage: Stage) -> None:
    (queue,) = stage.store.reader.queues
    chance, expected = testing.chance(5), {f"worker {number}": Counter[str]() for number in range(5)}
    for _ in range(120):
        for _ in range(3):
            stage.send(queue)
        number = chance.randrange(5)
        own, origin = expected[f"worker {number}"], worker(number)
        for message in receive(stage, number, 3):
            own["received"] += 1
            given = {"queue": queue, "origin": origin, "handle": message.handle, "arrived": stage.now}
            match chance.randrange(5):
                case 0:
                    own["deleted"] += 1
                    stage.do(Delete(**given))
                case 1:
                    own["extended"] += 1
                    stage.do(Extend(lease_us=HOUR_US * 5, **given))
                case 2:
                    own["failed"] += 1
                    stage.do(Extend(lease_us=HOUR_US * 5, report=FAILED, **given))
                case 3:
                    own["released"] += 1
                    stage.do(Extend(lease_us=HOUR_US * 5, report=BUSY, **given))
                case 4:
                    own["lease_expired"] += 1
        stage.later(21 * SECOND_US)
        stage.do(Sweep())
    assert told(stage) == {name: dict(each) for name, each in expected.items()}


def test_an_hour_is_kept(stage: Stage) -> None:
    (queue,) = stage.store.reader.queues
    stage.send(queue)
    begun = stage.now
    receive(stage, 1)
    assert told(stage)["worker 1"] == {"received": 1}
    stage.later(HOUR_US - 6 * MINUTE_US)
    assert told(stage)["worker 1"] == {"received": 1}
    stage.later(12 * MINUTE_US)
    assert told(stage) == {}
    assert begun < stage.store.reader.seen_clients(stage.now).since <= stage.now


def test_the_number_of_clients_is_bounded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollups, "CLIENTS_MAX", 10)
    (queue,) = stage.store.reader.queues
    for number in range(15):
        stage.send(queue)
        (message,) = receive(stage, number)
        stage.delete(queue, message.handle)
    seen = stage.store.reader.seen_clients(stage.now)
    assert (len(seen.seen), len(told(stage)), seen.left_out) == (10, 10, 5 + 15), "who deleted came too late"
    stage.later(2 * HOUR_US)
    stage.send(queue)
    receive(stage, 99)
    assert "worker 99" in told(stage), "who is gone makes room"


def test_what_clients_hold_survives_a_kill_and_is_bounded(stage: Stage) -> None:
    (queue,) = stage.store.reader.queues
    for _ in range(4):
        stage.send(queue)
    stage.send(queue, delay_us=MINUTE_US)
    mine = receive(stage, 1, 3)
    stage.later(SECOND_US)
    receive(stage, 2)
    stage.reopen(kill=True)
    with stage.store.reader.look() as view:
        held, oldest, is_all = view.held_by_origin(100, 2)
        names = {view.origin_names(number)[2]: number for number in held}  # type: ignore[index]
        assert {name: held[number] for name, number in names.items()} == {
            "worker 1": (3, stage.now - SECOND_US),
            "worker 2": (1, stage.now),
        }
        assert is_all
        assert [each.id for each in oldest[names["worker 1"]]] == [each.id for each in mine[:2]]
        assert oldest[names["worker 2"]][0][2:] == (stage.now, stage.now + 20 * SECOND_US, 1)
        held, oldest, is_all = view.held_by_origin(2)
        assert (sum(count for count, _ in held.values()) <= 2, oldest, is_all) == (True, {}, False)
        stage.create("idle")
        (idle,) = (each for key, each in stage.store.reader.queues.items() if key.name == "idle")
        assert view.held_by_origin(100, 2, idle) == ({}, {}, True)
