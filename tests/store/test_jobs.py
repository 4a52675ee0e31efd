"""Jobs against a count by hand: whatever a queue holds, each message that matches is acted on once, and no other."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.contract.jobs import balanced, finish, numbers, shown, start
from tests.support.contract.stage import TESTER, Stage, expect
from tests.support.sqlite import SqliteFactory, store_of

from veilmq.model.commands import StartJob
from veilmq.model.errors import ParameterInvalid
from veilmq.model.instant import HOUR_US, SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.moves import JOBS_ACTIVE_MAX, Act, Filter, MoveStatus
from veilmq.store.sqlite.tools import check
from veilmq.store.sqlite.upkeep import jobs

MESSAGE = st.fixed_dictionaries(
    {
        "type": st.sampled_from((None, "a", "b")),
        "group": st.sampled_from((None, "x", "y")),
        "priority": st.sampled_from((1, 8, 16)),
        "body": st.sampled_from(("plain", "a needle here", "x" * 3_000)),
        "state": st.sampled_from(("ready", "in flight", "returned", "delayed", "delay over", "lease over")),
    }
)
FILTER = st.builds(
    Filter,
    type=st.sampled_from((None, "a")),
    group=st.sampled_from((None, "x")),
    age_us_min=st.sampled_from((0, 30 * SECOND_US)),
    receives_min=st.sampled_from((0, 1)),
    text=st.sampled_from((None, "needle")),
)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    playing = Stage(SqliteFactory(tmp_path / "data"))
    yield playing
    playing.store.close()


def prepare(stage: Stage, given_messages: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Bring the messages into their states; each with its sequence."""
    queue = stage.create()
    sent = []
    for place, message in enumerate(given_messages):
        delay_us = {"delayed": HOUR_US, "delay over": SECOND_US}.get(message["state"])
        extras = Extras(group=message["group"], type=message["type"])
        named = stage.send(queue, message["body"], priority=message["priority"], delay_us=delay_us, extras=extras)
        if message["state"] in ("in flight", "returned", "lease over"):
            # The others are out of the way meanwhile.
            taken = {each.sequence: each for each in stage.receive(queue, 100, lease_us=SECOND_US)}
            own = taken.pop(named.sequence)
            for other in reversed(taken.values()):
                stage.extend(queue, other.handle, 0)
            if message["state"] == "in flight":
                stage.extend(queue, own.handle, HOUR_US)
            elif message["state"] == "returned":
                stage.extend(queue, own.handle, 0)
        sent.append((message, named.sequence))
        if place % 4 == 3:
            stage.later(10 * SECOND_US)
    stage.later(2 * SECOND_US)
    stage.sweep()
    return sent


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    given_messages=st.lists(MESSAGE, max_size=14),
    wanted=FILTER,
    act=st.sampled_from((Act.DELETE, Act.MOVE, Act.RELEASE)),
    kills=st.sets(st.integers(0, 6), max_size=3),
    chunk=st.sampled_from((1, 3, 64)),
)
def test_a_job_acts_on_what_a_count_by_hand_finds(
    monkeypatch: pytest.MonkeyPatch,
    given_messages: list[dict[str, Any]],
    wanted: Filter,
    act: Act,
    kills: set[int],
    chunk: int,
) -> None:
    monkeypatch.setattr(jobs, "_CHUNK", chunk)
    monkeypatch.setattr(jobs, "ACTS_MAX", chunk)
    with tempfile.TemporaryDirectory() as directory:
        stage = Stage(SqliteFactory(Path(directory, "data")))
        prepare(stage, given_messages)
        queue = stage.store.reader.queues
        (key,) = queue
        other = stage.create("other")
        before = {message["sequence"]: message for message in held(stage, key)}
        bodies = {}
        with stage.store.reader.look() as view:
            for sequence in before:
                found = view.message(queue[key].incarnation, sequence)
                assert found is not None
                bodies[sequence] = found.body.decode()
        free = ("in flight",) if act is Act.RELEASE else ("visible",)
        expected = {
            sequence
            for sequence, message in before.items()
            if message["state"] in free
            and wanted.type in (None, message.get("type"))
            and wanted.group in (None, message.get("group"))
            and message["sent"] <= stage.now - wanted.age_us_min
            and message["receive_count"] >= wanted.receives_min
            and (wanted.text is None or wanted.text in bodies[sequence])
        }
        fields = {"destination": other} if act is Act.MOVE else {}
        counted = finish(stage, start(stage, key, act, filter=wanted, dry_run=True, **fields))
        assert counted.matched == len(expected)
        job = start(stage, key, act, filter=wanted, **fields)
        for step in range(7):
            if shown(stage, job).status is not MoveStatus.RUNNING:
                break
            stage.sweep_once()
            if step in kills:
                stage.reopen(kill=True)
        ended = finish(stage, job)
        assert numbers(ended)[1:] == (len(expected), len(expected), 0)
        after = {message["sequence"]: message["state"] for message in held(stage, key)}
        if act is Act.RELEASE:
            assert {each for each in before if before[each]["state"] != after[each]} == expected
        else:
            assert before.keys() - after.keys() == expected
            assert len(held(stage, other)) == (len(expected) if act is Act.MOVE else 0)
        balanced(stage)
        assert check(store_of(stage).directory.database, is_owner=True).problems == []
        stage.store.close()


def held(stage: Stage, key: Any) -> list[dict[str, Any]]:
    """The messages of a queue, as a snapshot shows them."""
    incarnation = stage.store.reader.queues[key].incarnation
    lines = stage.factory.state(stage.store)
    return [line["message"] for line in lines if "message" in line and line["message"]["incarnation"] == incarnation]


def test_a_step_is_bounded_whatever_the_filter_skips(stage: Stage) -> None:
    queue = stage.create()
    for number in range(3 * jobs.LOOKED_MAX):
        stage.send(queue, str(number))
    job = start(stage, queue, Act.DELETE, filter=Filter(type="none"))
    stage.sweep_once()
    assert 0 < shown(stage, job).seen <= jobs.LOOKED_MAX
    other = stage.create("other")
    for _ in range(40):
        stage.send(other, "x" * 100_000)
    searched = start(stage, other, Act.DELETE, filter=Filter(text="y"), dry_run=True)
    ended = finish(stage, job)
    assert ended.matched == 0
    assert numbers(finish(stage, searched)) == (40, 0, 0, 0)


def test_at_most_so_many_jobs_are_under_way(stage: Stage) -> None:
    """One more is refused and leaves nothing; when one has ended, there is room for it."""
    queues = [stage.create(f"jobs-{number}") for number in range(JOBS_ACTIVE_MAX + 1)]
    under_way = [start(stage, queue, Act.DELETE) for queue in queues[:-1]]
    refused = expect(stage.do(StartJob(queue=queues[-1], origin=TESTER, act=Act.DELETE)), ParameterInvalid)
    assert refused.reason == f"{JOBS_ACTIVE_MAX} jobs are running: wait until one ends"
    with stage.store.reader.look() as view:
        assert len(list(view.jobs())) == JOBS_ACTIVE_MAX
    finish(stage, under_way[0])
    assert finish(stage, start(stage, queues[-1], Act.DELETE)).status is MoveStatus.COMPLETED
