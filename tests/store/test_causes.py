"""Why messages failed: by cause, in each minute of a queue, bounded, and kept over restarts and kills."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.store.test_rollups import DEAD, JOBS, over, rows
from tests.support.contract.stage import Stage
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.model.commands import Sweep
from veilmq.model.instant import SECOND_US
from veilmq.model.messages import ERROR_CHARACTERS_MAX, TYPE_CHARACTERS_MAX, Report, Reported, failure_of
from veilmq.model.settings.queue import RedrivePolicy
from veilmq.store.rollups import (
    CAUSES_MAX,
    COUNTS,
    DEAD_LETTERED,
    FAILED,
    LEASE_EXPIRED,
    LINE_CHARACTERS_MAX,
    Rollup,
    Seen,
)

_ROW_BYTES_MAX = CAUSES_MAX * (4 * (TYPE_CHARACTERS_MAX + LINE_CHARACTERS_MAX) + 64) + 8_192


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    stage.create("dead")
    stage.create("jobs", redrive=RedrivePolicy(DEAD, 1), visibility_timeout_us=SECOND_US)
    yield stage
    stage.store.close()


def fail(stage: Stage, error_type: str, line: str) -> bytes:
    """A message is given back for an error, and goes to the dead letters."""
    stage.send(JOBS)
    taken = stage.take(JOBS)
    stage.extend(JOBS, taken.handle, 0, report=Report(Reported.RETRY, failure_of("raised", error_type, line)))
    assert stage.receive(JOBS) == []
    return taken.id


def causes(rollup: Rollup) -> list[tuple[str, str, str, int]]:
    found = rollup.causes.found.values()
    return sorted((COUNTS[each.kind], each.error_type, each.error, each.count) for each in found)


def seen(stage: Stage) -> list[Rollup]:
    """Of the queue's minutes: those that are stored, then the others."""
    (queue,) = (queue for key, queue in stage.store.reader.queues.items() if key == JOBS)
    stored = [
        rollup for (_, incarnation), rollup in rows(stage, "rollup_minute").items() if incarnation == queue.incarnation
    ]
    return stored + list(stage.store.reader.unstored(queue.incarnation).values())


def test_failures_of_a_minute_by_cause(stage: Stage) -> None:
    begun = stage.now
    for number in range(1_000, 1_005):
        stage.later(SECOND_US)
        newest = fail(stage, "KeyError", f"order {number} is missing")
    fail(stage, "HttpError", "the shop answers 404")
    fail(stage, "HttpError", "the shop answers 500")
    stage.send(JOBS)
    stage.take(JOBS)
    stage.later(2 * SECOND_US)
    stage.do(Sweep())
    assert stage.receive(JOBS) == []
    (live,) = seen(stage)
    assert causes(live) == [
        ("dead_lettered", "", "", 1),
        ("dead_lettered", "HttpError", "the shop answers 404", 1),
        ("dead_lettered", "HttpError", "the shop answers 500", 1),
        ("dead_lettered", "KeyError", "order 1004 is missing", 5),
        ("failed", "HttpError", "the shop answers 404", 1),
        ("failed", "HttpError", "the shop answers 500", 1),
        ("failed", "KeyError", "order 1004 is missing", 5),
        ("lease_expired", "", "", 1),
    ]
    example = next(each for each in live.causes.found.values() if (each.kind, each.count) == (FAILED, 5))
    assert (example.message, example.first, example.newest) == (newest, begun + SECOND_US, begun + 5 * SECOND_US)
    over(stage)
    (stored,) = seen(stage)
    assert causes(stored) == causes(live)
    assert [each.causes.found for each in rows(stage, "rollup_hour").values()] == [{}, {}], "hours have no causes"


def test_a_kill_loses_no_cause_and_counts_none_twice(stage: Stage) -> None:
    fail(stage, "KeyError", "stored")
    over(stage)
    fail(stage, "KeyError", "in memory")
    before = [causes(each) for each in seen(stage)]
    stage.reopen(kill=True)
    stage.do(Sweep())
    assert (
        [causes(each) for each in seen(stage)]
        == before
        == [
            [("dead_lettered", "KeyError", text, 1), ("failed", "KeyError", text, 1)]
            for text in ("stored", "in memory")
        ]
    )


def test_what_a_minute_keeps_of_failures_is_bounded(stage: Stage) -> None:
    """The longest texts of four bytes a character, more of them than are kept; the rest is counted."""
    for number in range(CAUSES_MAX):
        fail(stage, chr(0x1F600 + number) * TYPE_CHARACTERS_MAX, chr(0x1F600) * ERROR_CHARACTERS_MAX)
    over(stage)
    (stored,) = seen(stage)
    assert (
        len(stored.causes.found)
        == CAUSES_MAX
        < 2 * CAUSES_MAX
        == stored.numbers[FAILED] + stored.numbers[DEAD_LETTERED]
    )
    assert {len(each.error) for each in stored.causes.found.values()} == {LINE_CHARACTERS_MAX}
    assert len(stored.packed()) <= _ROW_BYTES_MAX


def test_no_line_is_kept_if_the_server_keeps_none(tmp_path: Path) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data", msgspec.structs.replace(SMALL, error_lines=False)))
    stage.create("dead")
    stage.create("jobs", redrive=RedrivePolicy(DEAD, 1))
    fail(stage, "KeyError", "secret")
    assert causes(seen(stage)[0]) == [("dead_lettered", "KeyError", "", 1), ("failed", "KeyError", "", 1)]
    stage.store.close()


def test_many_leases_that_end_at_once_are_one_cause(stage: Stage) -> None:
    for number in range(20):
        stage.send(JOBS, str(number))
    last = stage.receive(JOBS, 20)[-1]
    stage.later(2 * SECOND_US)
    stage.do(Sweep())
    (live,) = seen(stage)
    assert list(live.causes.found.values()) == [Seen(LEASE_EXPIRED, "", "", 20, last.due, last.due, last.id)]
