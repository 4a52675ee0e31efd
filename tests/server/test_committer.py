"""The thread that commits: when the loop goes on, what is reported, and how it ends."""

import asyncio
import threading
from typing import Any

import pytest

from veilmq.model.errors import StoreFailed, StoreUnknown
from veilmq.server.committer import Committer

PATIENCE_SECONDS = 20


class Reports:
    """What a committer of the running loop reported."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.committer = Committer(asyncio.get_running_loop(), self._take)

    def _take(self, *report: Any) -> None:
        self._queue.put_nowait(report)

    async def next(self) -> tuple[Any, ...]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._queue.get()


def test_the_loop_goes_on_while_a_job_lasts() -> None:
    asyncio.run(_the_loop_goes_on_while_a_job_lasts())


async def _the_loop_goes_on_while_a_job_lasts() -> None:
    reports, end = Reports(), threading.Event()
    reports.committer.begin(lambda: end.wait(PATIENCE_SECONDS))
    end.set()  # if the loop waited for the job's end, it would be False
    error, result, elapsed_us = await reports.next()
    assert (error, result) == (None, True)
    assert 0 <= elapsed_us < PATIENCE_SECONDS * 1_000_000
    await reports.committer.stop(PATIENCE_SECONDS)


def test_every_failure_is_reported_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(_every_failure_is_reported_and_ends_nothing(caplog))


async def _every_failure_is_reported_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    reports = Reports()
    for given in (StoreFailed(reason="full"), StoreUnknown(reason="io"), ZeroDivisionError("odd")):

        def fail(given: Exception = given) -> None:
            raise given

        reports.committer.begin(fail)
        error, result, _ = await reports.next()
        assert result is None
        if isinstance(given, ZeroDivisionError):
            assert isinstance(error, StoreUnknown)
            assert error.reason == "odd"
            assert "ZeroDivisionError" in caplog.text
        else:
            assert error is given
    reports.committer.begin(lambda: "done")
    assert (await reports.next())[:2] == (None, "done")
    await reports.committer.stop(PATIENCE_SECONDS)


def test_a_job_that_hangs_holds_up_nobody() -> None:
    asyncio.run(_a_job_that_hangs_holds_up_nobody())


async def _a_job_that_hangs_holds_up_nobody() -> None:
    reports, end = Reports(), threading.Event()
    reports.committer.begin(end.wait)
    await reports.committer.stop(0.01)
    end.set()
    assert (await reports.next())[:2] == (None, True)
