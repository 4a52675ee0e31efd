"""Subscriptions that change, go and come back while the room waits for them or pushes."""

import asyncio
from typing import Any

import pytest
from stage import NEWS, TESTER, Endpoint, Stage, until

from veilmq.model.commands import ChangeSubscription, Receive, Unsubscribe
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.topic import RetryStrategy
from veilmq.push import endpoints
from veilmq.push.endpoints import UNAVAILABLE_AFTER
from veilmq.server.shell import Shell

REFUSES = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"


async def parked(stage: Stage, subscriptions: int = 1) -> None:
    """Return when the room waits for messages of so many."""
    await until(lambda: len(stage.shell.engine.waiting) == subscriptions)


def test_what_comes_after_a_change_is_pushed_by_the_changed_settings(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(REFUSES) as endpoint:
            await stage.subscribe("s", endpoint.url)
            await parked(stage)
            change = {"strategy": RetryStrategy.EXPONENTIAL_DECAY}
            await stage.do(ChangeSubscription(topic=NEWS, origin=TESTER, name="s", change=change))
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            pauses = [each.lease_us for each in stage.events() if each.kind == "released_for_retry"]
            assert pauses == [SECOND_US]  # the first of this strategy; of the one before it is ten to twenty seconds

    play(test)


class Held:
    """A shell that the room's first receive reaches late."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self.reached, self.released = asyncio.Event(), asyncio.Event()

    async def call(self, *commands: Any) -> list[Any]:
        if isinstance(commands[0], Receive):
            self.reached.set()
            await self.released.wait()
        return await self._shell.call(*commands)

    def arrived(self) -> Instant:
        return self._shell.arrived()


def test_a_subscription_of_the_same_name_leads_to_its_own_endpoint(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as before, Endpoint() as after:
            await stage.subscribe("s", before.url)
            await stage.room.stop()
            stage.engine = held = Held(stage.shell)
            await stage.open()
            await held.reached.wait()
            await stage.do(Unsubscribe(topic=NEWS, origin=TESTER, name="s"))
            await stage.subscribe("s", after.url)
            await stage.publish()
            held.released.set()
            await stage.drained("s")
            assert (len(before.got), len(after.got)) == (0, 1)

    play(test, look_s=3_600)


def test_a_subscription_of_the_same_name_does_not_wait_for_the_endpoint_before(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "PAUSE_SECONDS_MIN", 3_600.0)
    monkeypatch.setattr(endpoints, "PAUSE_SECONDS_MAX", 3_600.0)

    async def test(stage: Stage) -> None:
        async with Endpoint(REFUSES) as before, Endpoint() as after:
            await stage.subscribe("s", before.url)
            for _ in range(UNAVAILABLE_AFTER):
                await stage.publish()
            await until(lambda: bool(stage.room.unavailable()))
            await stage.do(Unsubscribe(topic=NEWS, origin=TESTER, name="s"))
            await stage.subscribe("s", after.url)
            await stage.publish()
            await until(lambda: len(after.got) == 1)

    play(test)


def test_who_unsubscribed_while_a_push_waits_for_its_turn_gets_no_more(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(REFUSES) as endpoint:
            for name in ("a", "b", "c", "goes"):
                await stage.subscribe(name, endpoint.url)
            await parked(stage, 4)
            await stage.publish()
            # One call at a time: the fourth waits until the pause after these is over.
            await until(lambda: len(stage.pushes()) == UNAVAILABLE_AFTER)
            await stage.do(Unsubscribe(topic=NEWS, origin=TESTER, name="goes"))
            await stage.publish()
            await until(lambda: len(endpoint.got) > UNAVAILABLE_AFTER)
            assert not any(b"<SubscriptionName>goes<" in each.body for each in endpoint.got)

    play(test)


@pytest.mark.slow
def test_hundreds_of_subscriptions_of_one_endpoint_take_turns(play: Any) -> None:
    """Nobody is forgotten, and whoever ends a call wakes those alone who can go on."""

    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            for number in range(100):
                await stage.subscribe(f"s{number}", f"{endpoint.url}&s={number}")
            for number in range(5):
                await stage.publish(str(number))
            await until(lambda: len(endpoint.got) == 500)
            assert {each.target.partition("&s=")[2] for each in endpoint.got} == {str(number) for number in range(100)}
            assert endpoint.most <= 4

    play(test)
