"""What the server itself lacks is no endpoint's failure: the push waits, counts as no attempt, and is made later."""

import errno
import os
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from stage import Endpoint, Stage, until

from veilmq.model.settings.topic import PushResult
from veilmq.push import endpoints
from veilmq.push.network import local_exhaustion_of, local_exhaustion_of_lookup

EXHAUSTION_S = 0.05
NAME = "receiver.example"


class Resolver:
    """Resolves names to loopback, unless it has an error to raise."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked = 0

    def __call__(self, host: str) -> list[str]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return ["127.0.0.1"]


def refused(code: int) -> socket.gaierror:
    return socket.gaierror(code, "as the resolver says")


SHORTAGES = {
    "files": OSError(errno.EMFILE, "Too many open files"),
    "busy": OSError(errno.EBUSY, "Device or resource busy"),
    "resolver's memory": refused(socket.EAI_MEMORY),
    "memory": MemoryError(),
    "threads": RuntimeError("can't start new thread"),
    "no name server": refused(socket.EAI_AGAIN),
    "unknown error of the system": OSError(errno.ENOENT, "No such file or directory"),
}


@pytest.mark.parametrize("error", SHORTAGES.values(), ids=SHORTAGES)
def test_a_shortage_of_the_resolver_counts_as_no_attempt(
    play: Any, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    resolver = Resolver(error)

    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            url = endpoint.url.replace("127.0.0.1", NAME)
            await stage.subscribe("s", url)
            await stage.publish()
            told: list[str | None] = []
            for count in range(1, 8):  # more than the strategy has tries
                await until(lambda n=count: stage.room.calls_put_off >= n)  # type: ignore[misc]
                told.append(stage.room.local_exhaustion())
                await stage.advance(EXHAUSTION_S)
            assert any(told)
            assert "pushes wait, because this server cannot call" in caplog.text
            assert stage.room.state(url)["failures"] == 0
            resolver.error = None
            await stage.advance(EXHAUSTION_S)
            await until(lambda: len(endpoint.got) == 1)
            await stage.drained("s")
            assert stage.room.results == {PushResult.DELIVERED: 1}
            assert stage.room.calls_put_off >= 7
            assert stage.room.local_exhaustion() is None

    play(test, resolve=resolver, exhaustion_s=EXHAUSTION_S)


def test_a_name_that_no_name_server_knows_for_long_has_failed(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "DOUBT_SECONDS", 0.0)

    async def test(stage: Stage) -> None:
        url = f"http://{NAME}/"
        await stage.subscribe("s", url)
        await stage.publish()
        await until(lambda: len(stage.pushes()) == 1)
        assert "as the resolver says" in stage.pushes()[0].detail["error"]
        assert stage.room.state(url)["failures"] == 1

    play(test, resolve=Resolver(refused(socket.EAI_AGAIN)))


def test_doubt_has_an_end_and_a_new_beginning() -> None:
    endpoint = endpoints.Health()
    assert endpoint.doubts(1_000)
    assert endpoint.doubts(1_000 + endpoints.DOUBT_SECONDS - 1)
    assert not endpoint.doubts(1_000 + endpoints.DOUBT_SECONDS)
    endpoint.doubted_at = None
    assert endpoint.doubts(1_000 + endpoints.DOUBT_SECONDS)


def test_what_a_resolver_lacks_is_no_doubt() -> None:
    for code in (errno.EMFILE, errno.EBUSY, errno.EAGAIN):
        shortage = local_exhaustion_of_lookup(OSError(code, os.strerror(code)))
        assert shortage is not None
        assert not shortage.doubtful


def test_a_name_that_does_not_exist_has_failed() -> None:
    assert local_exhaustion_of_lookup(refused(socket.EAI_NONAME)) is None
    assert local_exhaustion_of_lookup(UnicodeError()) is None


def test_shortages_of_a_connection() -> None:
    def doubtful(code: int) -> bool | None:
        shortage = local_exhaustion_of(OSError(code, os.strerror(code)))
        return None if shortage is None else shortage.doubtful

    ours = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
    assert [doubtful(code) for code in ours] == [False] * len(ours)
    assert doubtful(errno.EADDRNOTAVAIL)
    theirs = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.ECONNRESET)
    assert [doubtful(code) for code in theirs] == [None] * len(theirs)


def test_what_waits_is_not_leased_again_and_again(play: Any) -> None:
    """A backlog of thousands would otherwise be leased and put off without a pause."""
    resolver = Resolver(SHORTAGES["files"])

    async def test(stage: Stage) -> None:
        await stage.subscribe("s", f"http://{NAME}/")
        for number in range(30):
            await stage.publish(str(number))
        await until(lambda: stage.room.calls_put_off == 1)
        for _ in range(20):  # a batch of the engine each, in which the room has time enough
            assert await stage.waiting("s") == 30
        assert stage.room.calls_put_off == 1
        assert resolver.asked == 1

    play(test, resolve=resolver, exhaustion_s=60)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_without_threads_a_push_waits(
    play: Any, host: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are looked up and pushes are signed by threads."""

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url.replace("127.0.0.1", host))
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", none_left)
                await stage.publish()
                await until(lambda: "pushes wait" in caplog.text)
            await stage.advance(EXHAUSTION_S)
            await until(lambda: len(endpoint.got) == 1)
            await stage.drained("s")
            assert stage.room.results == {PushResult.DELIVERED: 1}

    play(test, exhaustion_s=EXHAUSTION_S)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_without_files_a_push_waits(tmp_path: Path, host: str) -> None:
    """In a process of its own, so that nothing else in this one lacks files."""
    run = subprocess.run(
        [sys.executable, __file__, str(tmp_path), host], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (0, "waited and came\n"), run.stderr


def _without_files(directory: Path, host: str) -> None:
    """The program of that process."""
    import asyncio

    async def play() -> None:
        async with Stage(directory, exhaustion_s=EXHAUSTION_S) as stage, Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url.replace("127.0.0.1", host))
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            await stage.publish()
            await until(lambda: stage.room.calls_put_off > 2)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await stage.advance(EXHAUSTION_S)
            await until(lambda: len(endpoint.got) == 1)
            await stage.drained("s")
            assert stage.room.results == {PushResult.DELIVERED: 1}

    asyncio.run(play())
    sys.stdout.write("waited and came\n")


if __name__ == "__main__":
    _without_files(Path(sys.argv[1]), sys.argv[2])
