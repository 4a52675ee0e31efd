"""An error that nobody thought of is told, and ends nothing."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from stage import Endpoint, Stage, until

from veilmq.model.commands import Extend, Receive
from veilmq.model.instant import SECOND_US, Instant
from veilmq.push.room import SupervisedTask
from veilmq.server.shell import Shell


class Bug(Exception):
    """None that anybody catches."""


def bugs(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those that the log has with their traces, however it is formatted."""
    found = [record.exc_info[1] for record in caplog.records if record.exc_info]
    return [str(error) for error in found if isinstance(error, Bug)]


class Faulty:
    """A shell one of whose calls fails: the first with such a command."""

    def __init__(self, shell: Shell, kind: type) -> None:
        self._shell, self._kind = shell, kind
        self.failed = False

    async def call(self, *commands: Any) -> list[Any]:
        if isinstance(commands[0], self._kind) and not self.failed:
            self.failed = True
            raise Bug("of the shell")
        return await self._shell.call(*commands)

    def arrived(self) -> Instant:
        return self._shell.arrived()


def test_a_subscription_is_served_again(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.room.stop()
            stage.engine = Faulty(stage.shell, Receive)
            await stage.open()
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: len(endpoint.got) == 1)
            assert "pushing 000000000000/us-east-1/news/s failed with an error and restarts in 0.05 s" in caplog.text
            assert "of the shell" in bugs(caplog)

    play(test, pause_s=0.05)


def test_subscriptions_are_looked_for_again(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test(stage: Stage) -> None:
        look: Callable[[], Any] = stage.subscriptions
        looks = 0

        def failing() -> Any:
            nonlocal looks
            looks += 1
            if looks == 2:
                raise Bug("of the look")
            return look()

        async with Endpoint() as endpoint:
            await stage.room.stop()
            stage.subscriptions = failing  # type: ignore[method-assign]
            await stage.open()
            await until(lambda: looks > 2)
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: len(endpoint.got) == 1)
            assert bugs(caplog) == ["of the look"]

    play(test, pause_s=0.05)


def test_a_push_that_cannot_be_settled_is_made_again(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n") as endpoint:
            await stage.room.stop()
            stage.engine = Faulty(stage.shell, Extend)
            await stage.open()
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: "a push failed with an error" in caplog.text)
            await stage.advance(31)
            await until(lambda: len(stage.pushes()) == 1)
            assert len(endpoint.got) == 2

    play(test)


def test_a_bug_in_a_call_is_a_failed_attempt_of_nobody_and_told_once(
    play: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(host: str) -> list[str]:
        raise Bug(host)

    async def test(stage: Stage) -> None:
        url = "http://receiver.example/"
        await stage.subscribe("s", url)
        for _ in range(3):
            await stage.publish()
        await until(lambda: len(stage.pushes()) == 3)
        assert {each.detail["error"] for each in stage.pushes()} == {"Bug: receiver.example"}
        pauses = [each.lease_us for each in stage.events() if each.kind == "released_for_retry"]
        assert min(pauses) >= 10 * SECOND_US
        assert stage.room.state(url)["failures"] == 0
        assert caplog.text.count("because of an error in this server") == 1
        assert bugs(caplog) == ["receiver.example"]

    play(test, resolve=failing)


def test_who_was_ended_stays_ended(caplog: pytest.LogCaptureFixture) -> None:
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        raise Bug

    async def test() -> None:
        lasting = SupervisedTask(work, "it", pause_s=0.01)
        await until(lambda: begun >= 3)
        lasting.cancel()
        await lasting.ended()
        ended = begun
        await asyncio.sleep(0.05)
        assert begun == ended

    asyncio.run(test())
    assert "it failed with an error" in caplog.text
