"""A flood of refused requests writes ten lines a second for each reason, and then how many there were."""

import asyncio
import logging

import pytest

from veilmq.server.logs import REASONS_MAX, REFUSED_LINES_MAX, RefusalLog

LOGGER = logging.getLogger("veilmq.port")


def test_ten_lines_a_second_of_each_reason_and_then_the_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RefusalLog("sqs", LOGGER)
    taken = [log.takes_at("403 AccessDenied", 5.0 + number / 1_000) for number in range(500)]
    assert taken == [True] * REFUSED_LINES_MAX + [False] * (500 - REFUSED_LINES_MAX)
    assert log.takes_at("400 MissingParameter", 5.9)
    assert not log.takes_at("403 AccessDenied", 5.9)
    log.report()
    assert caplog.messages == ["sqs: refused 491 more requests like these: 403 AccessDenied"]
    log.report()
    assert len(caplog.messages) == 1
    assert log.takes_at("403 AccessDenied", 6.0)


def test_dropped_connections_are_counted_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RefusalLog("admin", LOGGER, "dropped", "connection")
    for _ in range(REFUSED_LINES_MAX + 2):
        log.takes_at("the port is full", 1.0)
    log.report()
    assert caplog.messages == ["admin: dropped 2 more connections like these: the port is full"]


def test_reasons_without_end_count_as_one() -> None:
    log = RefusalLog("sqs", LOGGER)
    taken = [log.takes_at(f"reason {number}", 1.0) for number in range(10 * REASONS_MAX)]
    assert taken.count(True) == REASONS_MAX + REFUSED_LINES_MAX


def test_the_count_is_written_though_no_refusal_follows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RefusalLog("sqs", LOGGER)

    async def flood() -> None:
        asked = [log.takes("403") for _ in range(REFUSED_LINES_MAX + 3)]
        assert asked.count(True) == REFUSED_LINES_MAX
        async with asyncio.timeout(20):
            while not caplog.messages:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(flood())
    assert caplog.messages == ["sqs: refused 3 more requests like these: 403"]


def test_a_level_that_hides_refusals_counts_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    log = RefusalLog("sqs", LOGGER)
    assert not any(log.takes("403") for _ in range(50))
