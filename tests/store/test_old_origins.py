"""Clients that nothing names any more leave the table of origins and the map in memory; no number is assigned twice."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.contract.stage import Stage, sending
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import Origin, Receive, Sweep
from veilmq.model.instant import HOUR_US, MINUTE_US
from veilmq.model.outcomes import Received
from veilmq.model.settings.queue import QueueKey
from veilmq.store.sqlite.tools import check
from veilmq.store.sqlite.upkeep import trimming

JOBS = QueueKey("000000000000", "us-east-1", "jobs")
CLIENTS = 60


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(trimming, "ORIGINS_KEPT", 10)
    monkeypatch.setattr(trimming, "DROPPED_MAX", 7)
    monkeypatch.setattr(trimming, "HISTORY_ROWS_MAX", 20)
    options = msgspec.structs.replace(SMALL, history_us_max=HOUR_US)
    stage = Stage(SqliteFactory(tmp_path / "data", options))
    stage.create()
    yield stage
    stage.store.close()


def client(name: object) -> Origin:
    return Origin("sqs", "key", f"sdk ({name})")


def visit(stage: Stage, *names: object) -> None:
    """Each client sends a message and deletes it."""
    for name in names:
        stage.batch([sending(JOBS, origin=client(name))])
        stage.delete(JOBS, stage.take(JOBS).handle)


def sweep(stage: Stage, count: int = 60) -> None:
    for _ in range(count):
        stage.do(Sweep())


def table(stage: Stage) -> dict[str, int]:
    rows = store_of(stage)._writer.connection.execute("SELECT client, id FROM origin")
    return {name: number for name, number in rows if name.startswith("sdk")}


def known(stage: Stage) -> set[str]:
    return {origin.client for origin in store_of(stage)._writer.origins if origin.client.startswith("sdk")}


def test_who_is_in_no_event_any_more_is_forgotten_and_gets_a_new_number(stage: Stage) -> None:
    visit(stage, *range(CLIENTS))
    before = table(stage)
    assert len(before) == CLIENTS
    sweep(stage)
    assert table(stage) == before, "the history names them all"
    stage.later(2 * HOUR_US)
    visit(stage, "new", 3)
    sweep(stage)
    assert table(stage) == {name: before.get(name, max(before.values()) + 1) for name in ("sdk (new)", "sdk (3)")}
    assert known(stage) == {"sdk (new)", "sdk (3)"}
    start = store_of(stage)._writer.mark.offset
    visit(stage, 5)
    assert table(stage)["sdk (5)"] > max(before.values()) + 1
    assert stage.events(start)[0].client == "sdk (5)"
    stage.reopen()
    assert known(stage) == {"sdk (new)", "sdk (3)", "sdk (5)"}


def test_the_greatest_number_stays_so_that_a_restart_does_not_assign_it_again(stage: Stage) -> None:
    stage.later(2 * HOUR_US)
    stage.batch([sending(JOBS)])
    sweep(stage, 1)  # the server, too, has its number now
    visit(stage, *range(CLIENTS))
    greatest = max(table(stage).values())
    stage.later(2 * HOUR_US)
    stage.batch([sending(JOBS)])
    sweep(stage)
    assert list(table(stage).values()) == [greatest]
    stage.reopen(kill=True)
    visit(stage, "new")
    assert table(stage)["sdk (new)"] == greatest + 1


def test_who_holds_a_lease_keeps_the_name_until_the_lease_has_ended(stage: Stage) -> None:
    stage.batch([sending(JOBS)])
    outcome = stage.do(Receive(queue=JOBS, origin=client("holder"), count_max=1, lease_us=5 * HOUR_US))
    assert isinstance(outcome, Received)
    assert outcome.messages
    visit(stage, *range(CLIENTS))
    stage.later(2 * HOUR_US)
    visit(stage, "new")
    sweep(stage)
    assert known(stage) == {"sdk (holder)", "sdk (new)"}
    stage.later(4 * HOUR_US)
    start = store_of(stage)._writer.mark.offset
    sweep(stage, 1)
    (expired,) = [event for event in stage.events(start) if event.kind == "lease_expired"]
    assert expired.client == "sdk (holder)"
    store = store_of(stage)
    stage.store.close()
    assert check(store.directory.database).problems == []
    stage.open()


def test_a_walk_that_is_rolled_back_begins_its_step_anew(stage: Stage) -> None:
    visit(stage, *range(CLIENTS))
    stage.later(2 * HOUR_US)
    visit(stage, "new")
    for _ in range(40):
        before = known(stage), table(stage)
        if store_of(stage).apply([Sweep()], stage.now).wrote:
            stage.factory.abandon(stage.store)
        assert (known(stage), table(stage)) == before
        sweep(stage, 1)
    assert known(stage) == {"sdk (new)"}
    assert set(table(stage)) == {"sdk (new)"}


def test_a_client_that_comes_back_in_the_batch_that_forgets_it_gets_a_number(stage: Stage) -> None:
    visit(stage, *range(CLIENTS))
    stage.later(2 * HOUR_US)
    stage.batch([sending(JOBS)])
    for _ in range(60):
        stage.batch([Sweep(), Receive(queue=JOBS, origin=client(7), count_max=1), sending(JOBS, origin=client(8))])
        stage.later(MINUTE_US)
    following = store_of(stage)._writer.mark.offset
    assert all(event.client for event in stage.events(following - 50))
    assert {"sdk (7)", "sdk (8)"} <= set(table(stage))
