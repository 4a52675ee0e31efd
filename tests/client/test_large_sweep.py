"""A sweep takes what crashes left, and never the object of a message that lives."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.large import MARGIN, LargeMessageQueue, ObjectStore, SharedBodies
from veilmq.client.messages import Message, Template
from veilmq.client.queue import Queue
from veilmq.client.records import Found
from veilmq.client.unreadable import DeadLetters, keep
from veilmq.model.errors import ParameterInvalid
from veilmq.testing.client_contract import for_each

LARGE = "x" * 70_000
DAY = 86_400.0
_buckets = itertools.count()


@pytest.fixture
def store(embedded: EmbeddedClient) -> ObjectStore:
    added = embedded.clock

    class Dated(ObjectStore):
        """The store's clock is the one that the test moves; memory:// reads the system's."""

        def __init__(self, url: str) -> None:
            super().__init__(url)
            self.written: dict[str, float] = {}

        def put(self, key: str, content: bytes) -> None:
            super().put(key, content)
            self.written[key] = added.wall()

        def list(self, below: str) -> Iterator[Found]:
            for found in super().list(below):
                yield Found(found.key, found.size_bytes, self.written.get(found.key, found.modified))

    return Dated(f"memory://sweep{next(_buckets)}/large")


@pytest.fixture
def queue(embedded: EmbeddedClient, store: ObjectStore) -> LargeMessageQueue:
    embedded.account.create("orders", Template(retention=DAY))
    return LargeMessageQueue(embedded.account.queue("orders"), store, unreadable=keep, clock=embedded.clock)


def keys(store: ObjectStore, below: str = "orders") -> list[str]:
    return [found.key for found in store.list(below)]


def test_what_expired_goes_and_what_lives_stays(
    embedded: EmbeddedClient, queue: LargeMessageQueue, store: ObjectStore
) -> None:
    queue.send(LARGE)
    embedded.pass_time(DAY + MARGIN - 10)
    queue.send(LARGE)
    assert queue.sweep(DAY + MARGIN).objects == 0
    embedded.pass_time(20)
    swept = queue.sweep(DAY + MARGIN)
    assert (swept.objects, swept.size_bytes, swept.left) == (1, 70_000, 1)
    (message,) = queue.receive(10)
    assert message.body == LARGE
    assert queue.sweep(DAY + MARGIN).objects == 0, "a message in flight lives too"


@for_each("older_than", [0, DAY, DAY + MARGIN - 1, float("nan"), -1])
def test_an_age_that_a_live_message_may_have_is_refused(
    embedded: EmbeddedClient, queue: LargeMessageQueue, store: ObjectStore, older_than: float
) -> None:
    queue.send(LARGE)
    embedded.pass_time(3 * DAY)
    stored = keys(store)
    with pytest.raises(ParameterInvalid, match="older_than"):
        queue.sweep(older_than)
    assert keys(store) == stored


def test_a_message_that_lives_longer_than_its_queue_says(
    embedded: EmbeddedClient, queue: LargeMessageQueue, store: ObjectStore
) -> None:
    queue.send(Message(LARGE, ttl=5 * DAY))
    embedded.pass_time(4 * DAY)
    assert queue.sweep(DAY + MARGIN).left == 1
    assert queue.receive()[0].body == LARGE
    embedded.pass_time(DAY + 2 * MARGIN)
    assert queue.sweep(DAY + MARGIN).objects == 1


def test_dead_letters_count_on_top(embedded: EmbeddedClient, queue: LargeMessageQueue) -> None:
    embedded.account.create("dead", Template(retention=3 * DAY))
    dead = embedded.account.queue("dead")
    with pytest.raises(ParameterInvalid, match="345600"):
        queue.sweep(2 * DAY, [dead])
    assert queue.sweep(4 * DAY + MARGIN, [dead]).objects == 0


def test_a_queue_that_does_not_tell_its_retention(embedded: EmbeddedClient, store: ObjectStore) -> None:
    embedded.account.create("orders", Template(retention=DAY))

    class Silent(LargeMessageQueue):
        def stats(self):  # type: ignore[no-untyped-def]
            import msgspec

            return msgspec.structs.replace(super().stats(), retention=None)

    inner = Silent(embedded.account.queue("orders"), store, unreadable=keep)
    with pytest.raises(ParameterInvalid, match="retention"):
        LargeMessageQueue(inner, store, unreadable=keep, body_bytes_max=4 << 30).sweep(1e9)
    named = LargeMessageQueue(inner, store, unreadable=keep, body_bytes_max=4 << 30, retention=DAY)
    assert named.sweep(DAY + MARGIN).objects == 0


def test_only_its_own_objects(embedded: EmbeddedClient, queue: LargeMessageQueue, store: ObjectStore) -> None:
    embedded.account.create("orders-2", Template(retention=30 * DAY))
    other = LargeMessageQueue(embedded.account.queue("orders-2"), store, unreadable=keep, clock=embedded.clock)
    other.send(LARGE)
    embedded.pass_time(2 * DAY)
    assert queue.sweep(DAY + MARGIN).objects == 0
    assert other.receive()[0].body == LARGE


def test_the_younger_age_counts(embedded: EmbeddedClient, queue: LargeMessageQueue, store: Any) -> None:
    queue.send(LARGE)
    (key,) = keys(store)
    embedded.pass_time(3 * DAY)
    store.written[key] = embedded.clock.wall()  # a sender whose clock is three days slow
    assert queue.sweep(DAY + MARGIN).objects == 0
    store.written[key] = 0.0  # a store whose clock is wrong
    assert queue.sweep(DAY + MARGIN).objects == 1


class TestShared:
    @pytest.fixture
    def queues(self, embedded: EmbeddedClient) -> list[Queue]:
        for name in ("a", "b", "c", "dead"):
            embedded.account.create(name, Template(retention=DAY))
        return [embedded.account.queue(name) for name in ("a", "b", "c")]

    def publish(self, store: ObjectStore, queues: list[Queue], message: str | Message) -> None:
        names = [queue.name for queue in queues]
        for queue, each in zip(queues, SharedBodies(store, "news")(message, names), strict=True):
            queue.send(each)

    def test_it_lives_until_the_last_subscriber(
        self, embedded: EmbeddedClient, queues: list[Queue], store: ObjectStore
    ) -> None:
        self.publish(store, queues, LARGE)
        assert len(keys(store, "topic=news")) == 4
        readers = [LargeMessageQueue(queue, store, unreadable=keep) for queue in queues]
        for left, reader in zip((3, 2, 0), readers, strict=True):
            (message,) = reader.receive()
            assert message.body == LARGE
            reader.delete(message.handle)
            assert len(keys(store, "topic=news")) == left

    def test_what_fits_into_every_queue_needs_no_object(self, queues: list[Queue], store: ObjectStore) -> None:
        fits = "x" * 45_000
        self.publish(store, queues, fits)
        assert keys(store, "topic=news") == []
        assert [queue.receive()[0].body for queue in queues] == [fits] * 3
        self.publish(store, queues, f"{fits}x")
        assert len(keys(store, "topic=news")) == 4

    @pytest.mark.parametrize("reader", ["team@eu", "a/b", "a b", "x" * 121])
    def test_a_reader_whose_pointer_no_consumer_would_follow_is_refused(self, store: ObjectStore, reader: str) -> None:
        with pytest.raises(ParameterInvalid, match="subscriptions"):
            SharedBodies(store, "news")(LARGE, ["a", reader])
        assert keys(store, "topic=news") == []

    def test_one_that_never_deletes_is_swept(
        self, embedded: EmbeddedClient, queues: list[Queue], store: ObjectStore
    ) -> None:
        topic = SharedBodies(store, "news", clock=embedded.clock)
        for queue, each in zip(queues, topic(LARGE, ["a", "b", "c"]), strict=True):
            queue.send(each)
        with pytest.raises(ParameterInvalid, match="older_than"):
            topic.sweep(DAY, queues)
        embedded.pass_time(DAY + 2 * MARGIN)
        assert topic.sweep(DAY + MARGIN, queues).objects == 4

    def test_dead_letters_of_one_reader_do_not_take_it_from_the_others(
        self, embedded: EmbeddedClient, queues: list[Queue], store: ObjectStore
    ) -> None:
        self.publish(store, queues, LARGE)
        dead = DeadLetters(embedded.account.queue("dead"))
        LargeMessageQueue(queues[0], ObjectStore("memory://elsewhere/x"), unreadable=dead).receive()
        assert LargeMessageQueue(queues[1], store, unreadable=keep).receive()[0].body == LARGE
