"""What the server itself lacks is no endpoint's failure."""

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from stage import Endpoint, Stage, until

from veilmq.model.topic import PushResult
from veilmq.push.room import SHORTAGE_S


@contextmanager
def no_files_left() -> Iterator[None]:
    """Of this process; what is open stays open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_without_files_a_push_waits_and_counts_as_no_attempt(
    play: Any, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url.replace("127.0.0.1", host))
            with no_files_left():
                await stage.publish()
                await until(lambda: "pushes wait" in caplog.text)
            await stage.advance(SHORTAGE_S)
            await until(lambda: len(endpoint.got) == 1)
            await stage.drained("s")
            assert stage.room.results == {PushResult.DELIVERED: 1}

    play(test)


def test_without_threads_names_wait_too(
    play: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url.replace("127.0.0.1", "localhost"))
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", none_left)
                await stage.publish()
                await until(lambda: "pushes wait" in caplog.text)
            await stage.advance(SHORTAGE_S)
            await until(lambda: len(endpoint.got) == 1)
            await stage.drained("s")
            assert stage.room.results == {PushResult.DELIVERED: 1}

    play(test)
