"""Who commits, when the loop goes on, what is reported, and how it ends."""

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest

from veilmq.model.errors import StoreFailed, StoreUnknown
from veilmq.server.shell import committer as committer_module
from veilmq.server.shell.committer import LONG_US, SHORT_US, TRIED_EVERY, Committer

PATIENCE_SECONDS = 20


class Stage:
    """A committer of the running loop, its reports, and its clock, which stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []
        """What happened, one after the other."""
        self._reports: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.committer = Committer(asyncio.get_running_loop(), self._take, lambda: self.now)

    def _take(self, *report: Any) -> None:
        self.order.append("reported")
        self._reports.put_nowait(report)

    async def next(self) -> tuple[Any, ...]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._reports.get()

    async def on_the_loop(self, elapsed_us: float, *, takes_long: bool = False) -> bool:
        """Where a commit of that length was done."""

        def job() -> threading.Thread:
            self.now += elapsed_us / 1e6
            return threading.current_thread()

        self.committer.commit(job, takes_long=takes_long)
        error, thread, reported_us = await self.next()
        assert error is None
        assert reported_us == pytest.approx(elapsed_us, abs=1)
        return bool(thread is threading.current_thread())

    async def stop(self) -> None:
        await self.committer.stop(PATIENCE_SECONDS)


def staged(play: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        stage = Stage()
        await play(stage)
        await stage.stop()

    asyncio.run(run())


def test_short_commits_are_done_on_the_loop() -> None:
    async def play(stage: Stage) -> None:
        assert all([await stage.on_the_loop(SHORT_US) for _ in range(3 * TRIED_EVERY)])

    staged(play)


def test_a_slow_disk_does_not_hold_up_the_loop() -> None:
    async def play(stage: Stage) -> None:
        while await stage.on_the_loop(2 * SHORT_US):
            pass
        where = [await stage.on_the_loop(2 * SHORT_US) for _ in range(3 * TRIED_EVERY)]
        tried = [place for place, here in enumerate(where, 2) if here]
        assert tried == [TRIED_EVERY, 2 * TRIED_EVERY, 3 * TRIED_EVERY]

    staged(play)


def test_a_disk_that_is_fast_again_is_found_out() -> None:
    async def play(stage: Stage) -> None:
        assert await stage.on_the_loop(100 * SHORT_US)
        apart = 0
        while not (await stage.on_the_loop(SHORT_US / 2) and await stage.on_the_loop(SHORT_US / 2)):
            apart += 1
        assert apart > TRIED_EVERY
        assert await stage.on_the_loop(SHORT_US / 2)

    staged(play)


def test_one_long_commit_among_short_ones_changes_nothing() -> None:
    async def play(stage: Stage) -> None:
        for _ in range(10):
            assert all([await stage.on_the_loop(SHORT_US / 2) for _ in range(TRIED_EVERY)])
            assert await stage.on_the_loop(8 * SHORT_US)

    staged(play)


def test_a_commit_that_is_known_to_take_long_does_not_hold_up_the_loop() -> None:
    async def play(stage: Stage) -> None:
        assert not await stage.on_the_loop(100 * SHORT_US, takes_long=True)
        assert await stage.on_the_loop(SHORT_US / 2), "it says nothing about others"

    staged(play)


def test_at_the_end_no_commit_keeps_the_loop_from_its_deadline() -> None:
    async def play(stage: Stage) -> None:
        assert await stage.on_the_loop(SHORT_US / 2)
        stage.committer.leave_loop()
        assert not any([await stage.on_the_loop(SHORT_US / 2) for _ in range(2 * TRIED_EVERY)])

    staged(play)


@pytest.mark.parametrize("elapsed_us", [LONG_US + 1_000, SHORT_US])
def test_what_clients_did_during_a_long_commit_is_read_before_it_is_reported(
    elapsed_us: int, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def play() -> list[str]:
        stage = Stage()
        ours, theirs = socket.socketpair()
        heard = asyncio.Event()

        def hear() -> None:
            asyncio.get_running_loop().remove_reader(ours)
            stage.order.append("heard")
            heard.set()

        def job() -> None:
            stage.now += elapsed_us / 1e6
            theirs.send(b"gone")

        with ours, theirs:
            asyncio.get_running_loop().add_reader(ours, hear)
            await asyncio.sleep(0)
            stage.committer.commit(job)
            await stage.next()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await heard.wait()
        await stage.stop()
        return stage.order

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        order = runner.run(play())
    assert order == (["heard", "reported"] if elapsed_us > LONG_US else ["reported", "heard"])


def test_a_job_apart_has_begun_when_the_loop_goes_on() -> None:
    """The interpreter is given away to nobody who asks for it, as if the loop were busy."""
    interval = sys.getswitchinterval()

    async def play(stage: Stage) -> None:
        begun, begun_at_once = threading.Event(), False
        sys.setswitchinterval(PATIENCE_SECONDS)
        try:
            for _ in range(1_000):
                begun.clear()
                stage.committer.run_apart(begun.set)
                begun_at_once = begun.is_set()  # the loop waits for 1 ms at most, and the machine may be slower
                await stage.next()
                if begun_at_once:
                    break
            assert begun_at_once
        finally:
            sys.setswitchinterval(interval)

    staged(play)


def test_the_loop_goes_on_while_a_job_apart_lasts() -> None:
    async def play(stage: Stage) -> None:
        end = threading.Event()
        stage.committer.run_apart(lambda: end.wait(PATIENCE_SECONDS))
        end.set()  # if the loop waited for the job's end, it would be False
        assert await stage.next() == (None, True, 0)

    staged(play)


def test_a_commit_that_is_confirmed_elsewhere_ends_on_the_loop_and_any_other_on_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None: no whole answer yet. Without any the thread finds out."""

    async def play(stage: Stage) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for news, on_loop in (([None, None, True], True), ([None, False], False), ([], False)):
                # Where news comes, it comes in time, however busy the machine is.
                monkeypatch.setattr(committer_module, "CONFIRM_S", PATIENCE_SECONDS if news else 0.01)
                coming = iter(news)

                def confirmed(coming: Iterator[bool | None] = coming) -> bool | None:
                    ours.recv(1)
                    return next(coming)

                stage.committer.end_commit(ours.fileno(), confirmed, threading.current_thread)
                theirs.sendall(b"x" * len(news))
                error, thread, _ = await stage.next()
                assert error is None
                assert (thread is threading.current_thread()) == on_loop
                assert not asyncio.get_running_loop().remove_reader(ours)
                assert next(coming, "all read") == "all read"

    staged(play)


@pytest.mark.parametrize("apart", [False, True])
def test_every_failure_is_reported_and_ends_nothing(caplog: pytest.LogCaptureFixture, apart: bool) -> None:
    async def play(stage: Stage) -> None:
        run = stage.committer.run_apart if apart else stage.committer.commit
        for given in (StoreFailed(reason="full"), StoreUnknown(reason="io")):
            run(partial(raising, given))
            assert await stage.next() == (given, None, 0)
        run(partial(raising, ZeroDivisionError("odd")))
        error, result, _ = await stage.next()
        assert isinstance(error, StoreUnknown)
        assert (error.reason, result) == ("odd", None)
        assert "ZeroDivisionError" in caplog.text
        run(lambda: "done")
        assert await stage.next() == (None, "done", 0)

    staged(play)


def raising(error: Exception) -> None:
    raise error


def test_a_job_that_hangs_does_not_keep_it_from_stopping() -> None:
    async def play(stage: Stage) -> None:
        end = threading.Event()
        stage.committer.run_apart(end.wait)
        await stage.committer.stop(0.01)
        end.set()
        assert await stage.next() == (None, True, 0)

    staged(play)


def test_it_stops_though_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def play(stage: Stage) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            await stage.committer.stop(PATIENCE_SECONDS)

    staged(play)
