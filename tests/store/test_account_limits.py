"""How many queues and topics an account may have. What is there already goes on, whatever the limit."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, expect, refused
from tests.support.contract.topics import create, subscribe, to_queue, to_url
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.model.commands import CreateQueue, CreateTopic, DeleteTopic, Subscribe
from veilmq.model.errors import AccountSubscriptionsFull, QueuesFull, TopicsFull
from veilmq.model.outcomes import QueueCreated, QueueDeleted, Subscribed, TopicCreated
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import SubscriptionSettings, TopicKey

LIMITED = msgspec.structs.replace(SMALL, queues_per_account_max=3, topics_per_account_max=2)
FULL = QueuesFull(account=ACCOUNT, limit=3)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(SqliteFactory(tmp_path / "data", LIMITED))
    yield stage
    stage.store.close()


def creating(name: str, account: str = ACCOUNT, region: str = REGION) -> CreateQueue:
    return CreateQueue(queue=QueueKey(account, region, name), origin=TESTER)


def test_the_queue_beyond_the_limit_is_refused_also_in_one_batch_and_in_another_region(stage: Stage) -> None:
    outcomes = stage.batch([creating(name) for name in "abcd"]).outcomes
    assert [type(outcome) for outcome in outcomes[:3]] == [QueueCreated] * 3
    assert outcomes[3] == FULL
    assert stage.do(creating("e", region="eu-west-1")) == FULL
    expect(stage.do(creating("a")), QueueCreated)
    expect(stage.do(creating("d", account="111111111111")), QueueCreated)
    expect(stage.drop(QueueKey(ACCOUNT, REGION, "b")), QueueDeleted)
    expect(stage.do(creating("d")), QueueCreated)
    assert stage.do(creating("b")) == FULL


def test_a_create_that_was_rolled_back_does_not_count(stage: Stage) -> None:
    for _ in range(5):
        stage.store.apply([creating("a"), creating("b")], stage.now)
        stage.factory.abandon(stage.store)
    for name in "abc":
        stage.create(name)


def test_a_start_with_more_queues_than_the_limit_serves_them_all(stage: Stage, tmp_path: Path) -> None:
    for name in "abc":
        stage.create(name)
    create(stage)
    stage.factory = SqliteFactory(
        tmp_path / "data", msgspec.structs.replace(LIMITED, queues_per_account_max=1, topics_per_account_max=1)
    )
    stage.reopen()
    for name in "abc":
        stage.send(QueueKey(ACCOUNT, REGION, name))
    refused(stage.do(creating("d")), QueuesFull)
    expect(create(stage), TopicCreated)
    refused(create(stage, TopicKey(ACCOUNT, REGION, "more")), TopicsFull)


def test_a_push_subscription_needs_a_queue_of_its_own(stage: Stage) -> None:
    create(stage)
    queue = stage.create("a")
    expect(subscribe(stage, "one", to_url()), Subscribed)
    expect(subscribe(stage, "two", to_url()), Subscribed)
    assert subscribe(stage, "three", to_url()) == FULL
    expect(subscribe(stage, "four", to_queue(queue)), Subscribed)


def test_the_topic_beyond_the_limit_is_refused(stage: Stage) -> None:
    keys = [TopicKey(ACCOUNT, REGION, name) for name in "abc"]
    outcomes = stage.batch([CreateTopic(topic=key, origin=TESTER) for key in keys]).outcomes
    assert outcomes[2] == TopicsFull(account=ACCOUNT, limit=2)
    expect(create(stage, TopicKey("111111111111", REGION, "c")), TopicCreated)
    stage.do(DeleteTopic(topic=keys[0], origin=TESTER))
    expect(create(stage, keys[2]), TopicCreated)


def test_the_subscription_beyond_the_limit_is_refused_whatever_its_topic(stage: Stage, tmp_path: Path) -> None:
    stage.factory = SqliteFactory(tmp_path / "data", msgspec.structs.replace(LIMITED, subscriptions_per_account_max=2))
    stage.reopen()
    queue, other = stage.create("a"), TopicKey(ACCOUNT, REGION, "other")
    expect(create(stage), TopicCreated)
    expect(create(stage, other), TopicCreated)
    expect(subscribe(stage, "one", to_queue(queue)), Subscribed)
    for _ in range(3):  # what was rolled back does not count
        stage.store.apply([subscribing("lost", to_queue(queue), other)], stage.now)
        stage.factory.abandon(stage.store)
    expect(stage.do(subscribing("two", to_queue(queue), other)), Subscribed)
    full = AccountSubscriptionsFull(account=ACCOUNT, limit=2)
    assert subscribe(stage, "three", to_queue(queue)) == full
    stage.reopen()
    assert subscribe(stage, "three", to_queue(queue)) == full
    expect(subscribe(stage, "one", to_queue(queue)), Subscribed)
    stage.do(DeleteTopic(topic=other, origin=TESTER))
    expect(subscribe(stage, "three", to_queue(queue)), Subscribed)
    assert subscribe(stage, "four", to_url()) == full


def subscribing(name: str, settings: SubscriptionSettings, topic: TopicKey) -> Subscribe:
    return Subscribe(topic=topic, origin=TESTER, name=name, settings=settings)
