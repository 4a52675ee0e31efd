"""Topics: a publish creates all of its copies or none, and a copy is a message like any other."""

import json
from hashlib import md5
from itertools import product
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from tests.support.contract.stage import (
    ACCOUNT,
    REGION,
    TESTER,
    Stage,
    bodies,
    expect,
    impossible,
    refused,
)

from veilmq.model.commands import (
    ChangeQueue,
    ChangeSubscription,
    ChangeTopic,
    CreateTopic,
    DeleteTopic,
    DescribeQueue,
    DescribeSubscription,
    DescribeTopic,
    Extend,
    ListQueues,
    ListSubscriptions,
    ListTopics,
    Publish,
    Receive,
    RecordPush,
    Subscribe,
    Unsubscribe,
)
from veilmq.model.errors import (
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    QueueMissing,
    StoreFailed,
    SubscriptionExists,
    SubscriptionMissing,
    SubscriptionsFull,
    TopicExists,
    TopicMissing,
)
from veilmq.model.instant import HOUR_US, SECOND_US
from veilmq.model.messages import Extras, id_text, rotation_of
from veilmq.model.outcomes import (
    Deleted,
    Extended,
    Outcome,
    Published,
    QueueDescribed,
    QueuesListed,
    Subscribed,
    SubscriptionDescribed,
    SubscriptionsListed,
    TopicCreated,
    TopicDescribed,
    TopicsListed,
)
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import (
    ATTEMPTS_MAX,
    NOTIFICATION_NAMESPACE,
    TOPIC_RETENTION_US,
    ContentFormat,
    RetryStrategy,
    SubscriptionSettings,
    TopicKey,
    hidden_queue,
)
from veilmq.testing.for_each import for_each

NEWS = TopicKey(ACCOUNT, REGION, "news")


def create(stage: Stage, topic: TopicKey = NEWS, **change: Any) -> Outcome:
    return stage.do(CreateTopic(topic=topic, origin=TESTER, change=change))


def to_queue(queue: QueueKey, **settings: Any) -> SubscriptionSettings:
    given: dict[str, Any] = {"content_format": ContentFormat.SIMPLIFIED} | settings
    return SubscriptionSettings(endpoint=f"queues/{queue.name}", queue=queue, **given)


def to_url(**settings: Any) -> SubscriptionSettings:
    return SubscriptionSettings(endpoint="http://127.0.0.1/n", url="http://127.0.0.1/n", **settings)


def subscribe(stage: Stage, name: str, settings: SubscriptionSettings, topic: TopicKey = NEWS) -> Outcome:
    return stage.do(Subscribe(topic=topic, origin=TESTER, name=name, settings=settings))


def publishing(body: str = "hello", topic: TopicKey = NEWS, **extras: Any) -> Publish:
    encoded = body.encode()
    digest = md5(encoded, usedforsecurity=False).digest()
    return Publish(topic=topic, origin=TESTER, body=body, md5=digest, size_bytes=len(encoded), extras=Extras(**extras))


class TestTopics:
    """Topics and subscriptions."""

    def test_every_subscribed_queue_gets_one_copy(self, stage: Stage) -> None:
        queues = [stage.create(f"q{number}") for number in range(3)]
        create(stage)
        for queue in queues:
            assert expect(subscribe(stage, queue.name, to_queue(queue)), Subscribed).created
        published = expect(stage.do(publishing("hello", tag="t")), Published)
        assert published.copies == 3
        for queue in queues:
            (message,) = stage.receive(queue, 10)
            assert (message.body, message.extras.tag) == ("hello", "t")

    def test_a_filter_tag_lets_only_its_messages_pass(self, stage: Stage) -> None:
        every, tagged = stage.create("every"), stage.create("tagged")
        create(stage)
        subscribe(stage, "every", to_queue(every))
        subscribe(stage, "tagged", to_queue(tagged, filter_tag="red"))
        for body, tag in (("a", None), ("b", "red"), ("c", "blue")):
            stage.do(publishing(body, tag=tag))
        assert bodies(stage.receive(every, 10)) == ["a", "b", "c"]
        assert bodies(stage.receive(tagged, 10)) == ["b"]

    def test_a_queue_gets_the_form_that_its_subscription_asks_for(self, stage: Stage) -> None:
        xml, plain, text = stage.create("xml"), stage.create("json"), stage.create("text")
        create(stage)
        subscribe(stage, "x", to_queue(xml, content_format=ContentFormat.XML))
        subscribe(stage, "j", to_queue(plain, content_format=ContentFormat.JSON))
        subscribe(stage, "s", to_queue(text))
        body = 'a <b> & "c"\r\n\u00fc'
        published = expect(stage.do(publishing(body, tag="t")), Published)
        expected = {
            "TopicOwner": ACCOUNT,
            "TopicName": "news",
            "Subscriber": ACCOUNT,
            "MessageId": published.id.hex().upper(),
            "Message": body,
            "MessageMD5": md5(body.encode(), usedforsecurity=False).hexdigest().upper(),
            "MessageTag": "t",
            "PublishTime": str(published.published // 1_000),
        }
        root = ElementTree.fromstring(stage.take(xml).body)
        assert root.tag == f"{{{NOTIFICATION_NAMESPACE}}}Notification"
        fields = {child.tag.partition("}")[2]: child.text for child in root}
        assert fields == expected | {"SubscriptionName": "x"}
        assert json.loads(stage.take(plain).body) == expected | {"SubscriptionName": "j"}
        assert stage.take(text).body == body

    def test_a_push_waits_in_a_hidden_queue(self, stage: Stage) -> None:
        create(stage)
        subscribe(stage, "push", to_url())
        published = expect(stage.do(publishing("hello")), Published)
        hidden = hidden_queue(NEWS, "push")
        message = stage.take(hidden)
        assert (message.body, message.extras.published_id) == ("hello", published.id)
        assert expect(stage.do(DescribeTopic(topic=NEWS, origin=TESTER)), TopicDescribed).info.waiting == 1
        for account in (ACCOUNT, None):
            listed = stage.do(ListQueues(origin=TESTER, account=account, region=REGION))
            assert expect(listed, QueuesListed).queues == []

    @pytest.mark.parametrize("met", ["a receive", "a handle", "a sweep"])
    @for_each(("tried", "target"), list(product([False, True], ["there", "none", "gone"])), fresh="stage")
    def test_a_push_that_expires_is_dead_lettered_once(self, stage: Stage, met: str, tried: bool, target: str) -> None:
        stage.do(DeleteTopic(topic=NEWS, origin=TESTER))  # of the case before
        start = stage.following()
        dead = stage.create("dead")
        create(stage)
        subscribe(stage, "push", to_url() if target == "none" else to_url(dead_letter_queue=dead))
        stage.do(publishing("too late"))
        hidden = hidden_queue(NEWS, "push")
        handle = stage.take(hidden, lease_us=HOUR_US).handle if tried or met == "a handle" else ""
        if target == "gone":
            stage.drop(dead)
        stage.later(TOPIC_RETENTION_US)
        if met == "a handle":
            refused(stage.delete(hidden, handle), MessageGone)
        elif met == "a receive":
            assert stage.receive(hidden) == []
        else:
            stage.sweep()
        stage.sweep()
        assert stage.counts(hidden) == (0, 0, 0)
        ended = [event for event in stage.events(start) if event.kind in {"expired", "dead_lettered"}]
        assert [event.kind for event in ended] == ["dead_lettered" if target == "there" else "expired"]
        if target != "gone":
            found = stage.receive(dead, 10)
            assert bodies(found) == (["too late"] if target == "there" else [])
            assert [message.extras.dead_letter_source for message in found] == [hidden] * len(found)

    def test_a_push_is_given_up_for_its_failures_and_not_for_its_leases(self, stage: Stage) -> None:
        dead = stage.create("dead")
        create(stage)
        asked = DescribeQueue(queue=dead, origin=TESTER)
        assert not expect(stage.do(asked), QueueDescribed).is_dead_letter_queue
        subscribe(stage, "push", to_url(dead_letter_queue=dead))
        assert expect(stage.do(asked), QueueDescribed).is_dead_letter_queue
        stage.do(publishing("hello"))
        hidden = hidden_queue(NEWS, "push")
        tries = ATTEMPTS_MAX[RetryStrategy.BACKOFF]
        for _ in range(2 * tries):  # the server ends in mid-push
            stage.take(hidden, lease_us=SECOND_US)
            stage.later(SECOND_US)
        for failures in range(1, tries + 1):
            handle = stage.take(hidden).handle
            assert rotation_of(handle) == failures - 1
            expect(stage.extend(hidden, handle, SECOND_US, rotate=True), Extended)
            stage.later(SECOND_US)
        assert stage.receive(hidden) == []
        assert (stage.counts(hidden), bodies(stage.receive(dead))) == ((0, 0, 0), ["hello"])

    def test_a_push_that_was_tried_to_the_end_is_moved_with_its_record(self, stage: Stage) -> None:
        dead = stage.create("dead")
        create(stage)
        subscribe(stage, "push", to_url(dead_letter_queue=dead))
        published = expect(stage.do(publishing("hello")), Published)
        hidden = hidden_queue(NEWS, "push")
        tries = ATTEMPTS_MAX[RetryStrategy.BACKOFF]
        for attempt in range(1, tries + 1):
            assert stage.receive(dead) == []
            message = stage.take(hidden)
            extend = Extend(
                queue=hidden, origin=TESTER, handle=message.handle, lease_us=SECOND_US, arrived=stage.now, rotate=True
            )
            record = RecordPush(
                queue=hidden, origin=TESTER, message=message.id, sequence=message.sequence, attempt=attempt,
                status=500, error="no", took_us=1,
            )  # fmt: skip
            stage.batch([extend, record])
            if attempt < tries:
                stage.later(SECOND_US)
        assert stage.counts(hidden) == (0, 0, 0)
        (moved,) = stage.receive(dead)
        assert (moved.body, moved.extras.published_id) == ("hello", published.id)
        assert stage.kinds().count("dead_lettered") == 1

    def test_unsubscribing_ends_the_copies_and_the_hidden_queue(self, stage: Stage) -> None:
        queue = stage.create("q")
        create(stage)
        subscribe(stage, "queue", to_queue(queue))
        subscribe(stage, "push", to_url())
        for name in ("queue", "push"):
            expect(stage.do(Unsubscribe(topic=NEWS, origin=TESTER, name=name)), Deleted)
        assert expect(stage.do(publishing()), Published).copies == 0
        assert stage.receive(queue) == []
        with_hidden = stage.do(Receive(queue=hidden_queue(NEWS, "push"), origin=TESTER))
        refused(with_hidden, QueueMissing)

    def test_deleting_a_topic_takes_its_subscriptions_along(self, stage: Stage) -> None:
        create(stage)
        subscribe(stage, "push", to_url())
        expect(stage.do(DeleteTopic(topic=NEWS, origin=TESTER)), Deleted)
        refused(stage.do(publishing()), TopicMissing)
        refused(stage.do(Receive(queue=hidden_queue(NEWS, "push"), origin=TESTER)), QueueMissing)
        assert expect(create(stage), TopicCreated).info.subscriptions == 0

    def test_creating_twice_meets_the_same_topic_or_says_what_differs(self, stage: Stage) -> None:
        first = expect(create(stage, message_bytes_max=2_048), TopicCreated)
        again = expect(create(stage, message_bytes_max=2_048), TopicCreated)
        assert (first.created, again.created) == (True, False)
        assert first.info == again.info
        error = refused(create(stage), TopicExists)
        assert error == TopicExists(topic=str(NEWS), setting="message_bytes_max")

    def test_subscribing_twice_meets_the_same_or_says_what_differs(self, stage: Stage) -> None:
        queue = stage.create("q")
        create(stage)
        subscribe(stage, "s", to_queue(queue))
        assert not expect(subscribe(stage, "s", to_queue(queue)), Subscribed).created
        error = refused(subscribe(stage, "s", to_queue(queue, filter_tag="red")), SubscriptionExists)
        assert error == SubscriptionExists(topic=str(NEWS), subscription="s", setting="filter_tag")

    def test_what_cannot_be_subscribed_is_refused(self, stage: Stage) -> None:
        create(stage)
        refused(subscribe(stage, "s", to_queue(QueueKey(ACCOUNT, REGION, "none"))), QueueMissing)
        refused(subscribe(stage, "s", to_url(dead_letter_queue=QueueKey(ACCOUNT, REGION, "none"))), QueueMissing)
        small = stage.create("small", message_bytes_max=1_024)
        refused(subscribe(stage, "s", to_queue(small)), ParameterInvalid)
        refused(subscribe(stage, "s", to_url(), TopicKey(ACCOUNT, REGION, "other")), TopicMissing)
        for number in range(100):
            expect(subscribe(stage, str(number), to_url()), Subscribed)
        refused(subscribe(stage, "one too many", to_url()), SubscriptionsFull)

    def test_a_message_over_the_topics_limit_changes_nothing(self, stage: Stage) -> None:
        queue = stage.create("q")
        create(stage, message_bytes_max=1_024)
        subscribe(stage, "s", to_queue(queue, content_format=ContentFormat.XML))
        refused(stage.do(publishing("x" * 1_025)), MessageTooLarge)
        assert expect(stage.do(publishing("x" * 1_024)), Published).copies == 1
        assert len(stage.receive(queue, 10)) == 1

    def test_a_deleted_queue_is_left_out(self, stage: Stage) -> None:
        gone, there = stage.create("gone"), stage.create("there")
        create(stage)
        subscribe(stage, "gone", to_queue(gone))
        subscribe(stage, "there", to_queue(there))
        stage.drop(gone)
        assert expect(stage.do(publishing()), Published).copies == 1
        assert stage.events()[-1].detail == {"topic": str(NEWS), "copies": 1, "left_out": 1}

    @for_each("why", ["deleted", "too small"], fresh="stage")
    def test_what_a_queue_cannot_take_is_a_dead_letter(self, stage: Stage, why: str) -> None:
        bad, dead = stage.create("bad"), stage.create("dead")
        create(stage)
        subscribe(stage, "s", to_queue(bad, dead_letter_queue=dead))
        if why == "deleted":
            stage.drop(bad)
        else:
            stage.do(ChangeQueue(queue=bad, origin=TESTER, change={"message_bytes_max": 1_024}))
        published = expect(stage.do(publishing("x" * 1_025)), Published)
        assert published.copies == 0
        assert stage.events()[-1].detail == {"topic": str(NEWS), "copies": 0, "dead_lettered": 1}
        (message,) = stage.receive(dead, 10)
        assert (message.body, message.extras.dead_letter_source) == ("x" * 1_025, bad)
        assert message.extras.published_id == published.id
        stage.drop(dead)
        assert expect(stage.do(publishing("x" * 1_025)), Published).copies == 0
        assert stage.events()[-1].detail == {"topic": str(NEWS), "copies": 0, "left_out": 1}

    def test_a_queue_is_not_its_own_dead_letter_queue(self, stage: Stage) -> None:
        queue = stage.create("q")
        create(stage)
        refused(subscribe(stage, "s", to_queue(queue, dead_letter_queue=queue)), ParameterInvalid)
        subscribe(stage, "s", to_queue(queue))
        change = ChangeSubscription(topic=NEWS, origin=TESTER, name="s", change={"dead_letter_queue": queue})
        refused(stage.do(change), ParameterInvalid)

    def test_a_rate_changes_though_the_dead_letter_queue_is_gone(self, stage: Stage) -> None:
        dead = stage.create("dead")
        create(stage)
        subscribe(stage, "s", to_url(dead_letter_queue=dead))
        stage.drop(dead)
        for change, kind in (
            ({"pushes_per_second_max": 5}, SubscriptionDescribed),
            ({"dead_letter_queue": msgspec.structs.replace(dead, name="nowhere")}, QueueMissing),
        ):
            changed = stage.do(ChangeSubscription(topic=NEWS, origin=TESTER, name="s", change=change))
            assert isinstance(changed, kind)

    def test_a_copy_says_of_which_message_it_is_one(self, stage: Stage) -> None:
        queue = stage.create("q")
        create(stage)
        subscribe(stage, "queue", to_queue(queue))
        subscribe(stage, "push", to_url())
        published = expect(stage.do(publishing()), Published)
        sent = [event for event in stage.events() if event.kind == "sent"]
        assert [event.detail for event in sent] == [{"published": id_text(published.id)}] * 2
        assert id_text(published.id) not in {event.message for event in sent}

    def test_changes_are_seen_and_survive_a_reopening(self, stage: Stage) -> None:
        queue = stage.create("q")
        create(stage)
        subscribe(stage, "s", to_queue(queue))
        stage.later(5)
        stage.do(ChangeTopic(topic=NEWS, origin=TESTER, change={"message_bytes_max": 4_096}))
        change = {"strategy": RetryStrategy.EXPONENTIAL_DECAY}
        stage.do(ChangeSubscription(topic=NEWS, origin=TESTER, name="s", change=change))
        seen = []
        for _ in range(2):
            topic = expect(stage.do(DescribeTopic(topic=NEWS, origin=TESTER)), TopicDescribed).info
            one = expect(
                stage.do(DescribeSubscription(topic=NEWS, origin=TESTER, name="s")), SubscriptionDescribed
            ).info
            assert (topic.settings.message_bytes_max, topic.modified - topic.created) == (4_096, 5)
            assert (one.settings.strategy, one.modified - one.created) == (RetryStrategy.EXPONENTIAL_DECAY, 5)
            seen.append((topic, one))
            stage.reopen(kill=True)
        assert seen[0] == seen[1]
        assert expect(stage.do(publishing()), Published).copies == 1

    def test_missing_names_are_told_apart(self, stage: Stage) -> None:
        refused(stage.do(DescribeTopic(topic=NEWS, origin=TESTER)), TopicMissing)
        refused(stage.do(ChangeTopic(topic=NEWS, origin=TESTER, change={})), TopicMissing)
        refused(stage.do(DeleteTopic(topic=NEWS, origin=TESTER)), TopicMissing)
        refused(stage.do(ListSubscriptions(topic=NEWS, origin=TESTER)), TopicMissing)
        refused(stage.do(DescribeSubscription(topic=NEWS, origin=TESTER, name="s")), TopicMissing)
        create(stage)
        for command in (DescribeSubscription, Unsubscribe):
            refused(stage.do(command(topic=NEWS, origin=TESTER, name="s")), SubscriptionMissing)
        refused(stage.do(ChangeSubscription(topic=NEWS, origin=TESTER, name="s", change={})), SubscriptionMissing)

    def test_listings_come_in_pages(self, stage: Stage) -> None:
        for name in ("b", "a2", "a1", "c"):
            create(stage, TopicKey(ACCOUNT, REGION, name))
        create(stage, TopicKey("222222222222", REGION, "a0"))
        for name in ("s1", "s2", "r"):
            subscribe(stage, name, to_url(), TopicKey(ACCOUNT, REGION, "a1"))
        listing = ListTopics(origin=TESTER, account=ACCOUNT, region=REGION, prefix="a", count_max=1)
        first = expect(stage.do(listing), TopicsListed)
        assert ([topic.key.name for topic in first.topics], first.more) == (["a1"], True)
        listing.after = "a1"
        second = expect(stage.do(listing), TopicsListed)
        assert ([topic.key.name for topic in second.topics], second.more) == (["a2"], False)
        granted = ListTopics(origin=TESTER, account=ACCOUNT, region=REGION, granted=("a2", "c*"))
        found = expect(stage.do(granted), TopicsListed)
        assert [topic.key.name for topic in found.topics] == ["a2", "c"]
        some = ListSubscriptions(topic=TopicKey(ACCOUNT, REGION, "a1"), origin=TESTER, prefix="s", count_max=1)
        page = expect(stage.do(some), SubscriptionsListed)
        assert ([each.name for each in page.subscriptions], page.more) == (["s1"], True)
        some.after = "s1"
        page = expect(stage.do(some), SubscriptionsListed)
        assert ([each.name for each in page.subscriptions], page.more) == (["s2"], False)

    def test_a_batch_that_fails_leaves_no_topic_behind(self, stage: Stage) -> None:
        stage.create("q")
        outcomes = stage.batch([CreateTopic(topic=NEWS, origin=TESTER), impossible()]).outcomes
        assert expect(outcomes[0], TopicCreated).created
        assert type(outcomes[1]) is StoreFailed
        # The batch was rolled back and its commands applied one by one: the topic was created once.
        assert stage.kinds().count("topic_created") == 1
        assert not expect(create(stage), TopicCreated).created

    def test_what_was_rolled_back_is_forgotten(self, stage: Stage) -> None:
        create(stage)
        subscribe(stage, "s", to_url())
        for command in (
            DeleteTopic(topic=NEWS, origin=TESTER),
            Unsubscribe(topic=NEWS, origin=TESTER, name="s"),
            ChangeTopic(topic=NEWS, origin=TESTER, change={"message_bytes_max": 1_024}),
            Subscribe(topic=NEWS, origin=TESTER, name="t", settings=to_url()),
            CreateTopic(topic=TopicKey(ACCOUNT, REGION, "new"), origin=TESTER),
        ):
            stage.store.apply([command], stage.now)
            stage.factory.abandon(stage.store)
            info = expect(stage.do(DescribeTopic(topic=NEWS, origin=TESTER)), TopicDescribed).info
            assert (info.subscriptions, info.settings.message_bytes_max) == (1, 65_536)
        refused(stage.do(DescribeTopic(topic=TopicKey(ACCOUNT, REGION, "new"), origin=TESTER)), TopicMissing)
        assert expect(stage.do(publishing()), Published).copies == 1

    def test_the_history_tells_of_topics(self, stage: Stage) -> None:
        queue = stage.create("q")
        start = stage.following()
        create(stage)
        subscribe(stage, "s", to_queue(queue))
        stage.do(publishing("hello"))
        stage.do(Unsubscribe(topic=NEWS, origin=TESTER, name="s"))
        stage.do(DeleteTopic(topic=NEWS, origin=TESTER))
        kinds = ["topic_created", "subscribed", "sent", "published", "unsubscribed", "topic_deleted"]
        assert stage.kinds(start) == kinds
        assert stage.events(start)[3].detail == {"topic": str(NEWS), "copies": 1}
