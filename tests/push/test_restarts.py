"""Pushes that the server's own end cuts off: made again, and none of the tries that an endpoint has."""

from typing import Any

import pytest
from stage import NEWS, TESTER, Endpoint, Stage, until

from veilmq.model.commands import DescribeQueue
from veilmq.model.settings.topic import hidden_queue
from veilmq.testing.for_each import for_each

REFUSES = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
CUTS = 5
"""One more than BACKOFF_RETRY has tries."""


async def cut_off(stage: Stage, endpoint: Endpoint) -> None:
    """The server ends while its push hangs, and starts again, so many times."""
    for number in range(1, CUTS + 1):
        await until(lambda n=number: endpoint.now == n)  # type: ignore[misc]
        await stage.room.stop()
        await stage.open()
        await stage.advance(31)


@for_each("dead_letters", [False, True])
def test_a_push_that_was_cut_off_often_is_still_delivered(play: Any, dead_letters: bool) -> None:
    async def test(stage: Stage) -> None:
        dead = await stage.queue("dead")
        async with Endpoint(delay_s=60) as endpoint:
            await stage.subscribe("s", endpoint.url, dead_letter_queue=dead if dead_letters else None)
            await stage.publish("survivor")
            await cut_off(stage, endpoint)
            await until(lambda: endpoint.now == CUTS + 1)
            assert await stage.receive(dead) == []
            endpoint.delay_s = 0
            await stage.room.stop()
            await stage.open()
            await stage.advance(31)
            await stage.drained("s")
            assert b"survivor" in endpoint.got[0].body
            assert await stage.receive(dead) == []

    play(test)


@pytest.mark.slow
@pytest.mark.parametrize("dead_letters", [False, True])
def test_after_that_an_endpoint_that_fails_has_all_its_tries(play: Any, dead_letters: bool) -> None:
    async def test(stage: Stage) -> None:
        dead = await stage.queue("dead")
        async with Endpoint(REFUSES, delay_s=60) as endpoint:
            await stage.subscribe("s", endpoint.url, dead_letter_queue=dead if dead_letters else None)
            await stage.publish("poison")
            await cut_off(stage, endpoint)
            await until(lambda: endpoint.now == CUTS + 1)
            endpoint.delay_s = 0
            await stage.room.stop()
            await stage.open()
            await stage.advance(31)
            await stage.exhausted("s")
            assert len(endpoint.got) == 4
            assert stage.room.results == {"failed": 3, "exhausted": 1}
            assert [each.body for each in await stage.receive(dead)] == (["poison"] if dead_letters else [])

    play(test)


def test_what_waits_for_its_turn_at_the_end_comes_at_once_afterwards(play: Any) -> None:
    """Two subscriptions lease for one endpoint more than it takes at a time."""

    async def test(stage: Stage) -> None:
        async with Endpoint(delay_s=60) as endpoint:
            for name in ("a", "b"):
                await stage.subscribe(name, endpoint.url)
            await stage.room.stop()
            await stage.publish("survivor")
            await stage.open()
            await until(lambda: endpoint.now == 1)
            assert await leased(stage) == 2
            await stage.room.stop()
            assert await leased(stage) == 1, "the one under way"
            endpoint.delay_s = 0
            await stage.open()
            await until(lambda: len(endpoint.got) == 1)
            await stage.advance(31)
            await stage.drained("a")
            await stage.drained("b")
            assert stage.room.results == {"delivered": 2}

    play(test)


async def leased(stage: Stage) -> int:
    described = [await stage.do(DescribeQueue(queue=hidden_queue(NEWS, name), origin=TESTER)) for name in ("a", "b")]
    return sum(each.info.counts.in_flight for each in described)
