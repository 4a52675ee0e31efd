"""What is looked at twice a second, however many push subscriptions there are: nothing, as long as none has changed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from veilmq.cli.push_room import _Subscriptions
from veilmq.cli.serve import _tell_end_of_pushes
from veilmq.model.commands import ChangeSubscription, CreateTopic, DeleteTopic, Subscribe, Unsubscribe
from veilmq.model.topic import RetryStrategy, SubscriptionSettings, TopicKey
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing.contract.stage import ACCOUNT, REGION, TESTER, Stage
from veilmq.testing.sqlite import SqliteFactory

NEWS, SPORTS = TopicKey(ACCOUNT, REGION, "news"), TopicKey(ACCOUNT, REGION, "sports")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    playing = Stage(SqliteFactory(tmp_path / "data"))
    yield playing
    playing.store.close()


def subscribe(stage: Stage, topic: TopicKey, name: str, **settings: Any) -> None:
    stage.do(CreateTopic(topic=topic, origin=TESTER))
    given = SubscriptionSettings(endpoint="there", **settings)
    stage.do(Subscribe(topic=topic, origin=TESTER, name=name, settings=given))


def test_a_change_gives_a_new_object_and_nothing_else_does(stage: Stage) -> None:
    subscriptions = _Subscriptions(cast(SqliteStore, stage.store).topics)
    seen = [subscriptions()]
    assert seen == [{}]

    def changed() -> list[tuple[TopicKey, str]]:
        now = subscriptions()
        assert all(now is not each for each in seen)
        assert subscriptions() is now
        seen.append(now)
        return sorted(now, key=str)

    url = "http://there.example/"
    subscribe(stage, NEWS, "pushed", url=url)
    assert changed() == [(NEWS, "pushed")]
    subscribe(stage, SPORTS, "queued", queue=stage.create())
    assert changed() == [(NEWS, "pushed")]
    subscribe(stage, SPORTS, "pushed", url=url)
    assert changed() == [(NEWS, "pushed"), (SPORTS, "pushed")]
    stage.send(stage.create("another"))
    assert subscriptions() is seen[-1]

    strategy = RetryStrategy.EXPONENTIAL_DECAY
    stage.do(ChangeSubscription(topic=NEWS, origin=TESTER, name="pushed", change={"strategy": strategy}))
    assert changed() == [(NEWS, "pushed"), (SPORTS, "pushed")]
    assert seen[-1][NEWS, "pushed"].strategy is strategy
    stage.do(Unsubscribe(topic=SPORTS, origin=TESTER, name="pushed"))
    assert changed() == [(NEWS, "pushed")]
    stage.do(DeleteTopic(topic=NEWS, origin=TESTER))
    assert changed() == []


def test_pushes_that_end_by_a_bug_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """The task is waited for at the shutdown alone."""

    async def end_by(error: BaseException) -> None:
        async def pushing() -> None:
            raise error

        task = asyncio.create_task(pushing())
        task.add_done_callback(_tell_end_of_pushes)
        await asyncio.wait([task])
        await asyncio.sleep(0)

    asyncio.run(end_by(asyncio.CancelledError()))
    assert not caplog.records
    bug = ZeroDivisionError("a bug")
    asyncio.run(end_by(bug))
    (told,) = caplog.records
    assert "no pushes any more" in told.getMessage()
    assert told.exc_info is not None
    assert told.exc_info[1] is bug
