"""A publish reaches every queue that wants it, or says which it did not reach; a topic is made whole or not at all."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.errors import (
    EncodingMismatch,
    ObjectStoreFailed,
    PublishIncomplete,
    SubscriptionExists,
    TopicExists,
    TopicMissing,
    TransportError,
)
from veilmq.client.large import LargeMessageQueue, ObjectStore, SharedBodies
from veilmq.client.messages import Message, Sent, Template
from veilmq.client.queue import Account, Queue
from veilmq.client.topics import (
    ID_ATTRIBUTE,
    Definition,
    Definitions,
    PullTopic,
    create_pull_topic,
    decoded,
    delete_pull_topic,
    open_pull_topic,
)
from veilmq.client.unreadable import keep
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import (
    CapabilityMissing,
    MessageTooLarge,
    ParameterInvalid,
    QueueExists,
    QueueMissing,
    VeilError,
)
from veilmq.testing.client_contract import for_each
from veilmq.testing.client_contract.stage import Text

NAMES = ["a", "b", "c"]
_buckets = itertools.count()


@pytest.fixture
def definitions() -> Definitions:
    return Definitions(f"memory://topics{next(_buckets)}/x")


@pytest.fixture
def account(embedded: EmbeddedClient) -> Account:
    return embedded.account


@pytest.fixture
def topic(account: Account, definitions: Definitions) -> PullTopic:
    return create_pull_topic(account, "news", NAMES, definitions=definitions, create_queues=True)


def bodies(account: Account, *names: str) -> list[list[str]]:
    return [[message.body for message in account.queue(name).receive(10)] for name in names]


class Wrapped:
    """An account whose queues are wrapped."""

    def __init__(self, account: Account, wrap: Any) -> None:
        self.account, self.wrap = account, wrap

    def queue(self, name: str) -> Queue:
        return self.wrap(self.account.queue(name))  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.account, name)


class TestPublish:
    def test_everybody_gets_it(self, account: Account, topic: PullTopic) -> None:
        published = topic.publish(Message("extra", {"colour": "red"}, type="paper"))
        assert set(published.sent) == set(NAMES)
        for name in NAMES:
            (message,) = account.queue(name).receive(10)
            assert (message.body, message.type) == ("extra", "paper")
            assert message.attributes == {"colour": "red", ID_ATTRIBUTE: published.id}

    def test_a_publisher_elsewhere(self, account: Account, topic: PullTopic, definitions: Definitions) -> None:
        open_pull_topic(account, "news", definitions=definitions).publish("x")
        assert bodies(account, *NAMES) == [["x"]] * 3

    def test_a_batch(self, account: Account, topic: PullTopic) -> None:
        answers = topic.publish_batch(["one", "t\x00o", Message("three")])
        assert [type(answer).__name__ for answer in answers] == ["Published", "ParameterInvalid", "Published"]
        assert bodies(account, *NAMES) == [["one", "three"]] * 3
        with pytest.raises(ParameterInvalid, match="messages"):
            topic.publish_batch("one")

    def test_a_batch_is_one_request_a_queue(self, account: Account, topic: PullTopic, definitions: Definitions) -> None:
        calls: list[int] = []

        class Counting(Wrapping):
            def send_batch(self, messages: Any) -> list[Sent | VeilError]:
                calls.append(len(messages))
                return super().send_batch(messages)

        wrapped: Any = Wrapped(account, Counting)
        open_pull_topic(wrapped, "news", definitions=definitions).publish_batch(["x"] * 7)
        assert calls == [7, 7, 7]

    def test_tags(self, account: Account, definitions: Definitions) -> None:
        names: Any = iter(NAMES)
        tags: Any = {"a": iter([Text("sport")]), "b": ["sport", "weather"]}
        topic = create_pull_topic(account, "news", names, definitions=definitions, create_queues=True, tags=tags)
        for body, tag in (("goal", "sport"), ("rain", "weather"), ("other", "money"), ("plain", None)):
            topic.publish(Message(body, tag=tag))
        assert bodies(account, *NAMES) == [["goal"], ["goal", "rain"], ["goal", "rain", "other", "plain"]]
        assert topic.publish(Message("x", tag="money"), to=["a"]).sent == {}
        one: Any = iter([Text("b")])
        assert set(topic.publish(Message("x", tag="sport"), to=one).sent) == {"b"}

    def test_subscriptions_called_otherwise_than_their_queues(self, account: Account, definitions: Definitions) -> None:
        topic = create_pull_topic(
            account, "news", {"left": "a", "right": "b"}, definitions=definitions, create_queues=True
        )
        assert set(topic.publish("x").sent) == {"left", "right"}
        assert topic.queue("left").name == "a"
        with pytest.raises(ParameterInvalid, match="subscription"):
            topic.queue("a")

    def test_one_object_for_all(self, account: Account, definitions: Definitions) -> None:
        store = ObjectStore(f"memory://topics{next(_buckets)}/large")
        topic = create_pull_topic(
            account, "news", NAMES, definitions=definitions, create_queues=True, bodies=SharedBodies(store, "news")
        )
        topic.publish("x" * 100_000)
        assert len([found for found in store.list("topic=news") if found.size_bytes]) == 1
        for name in NAMES:
            queue = LargeMessageQueue(account.queue(name), store, unreadable=keep)
            (message,) = queue.receive()
            assert message.body == "x" * 100_000
            queue.delete(message.handle)
        assert list(store.list("topic=news")) == []


class Unsteady(Wrapping):
    """Sends arrive, or not, as `trouble` says by queue."""

    trouble: dict[str, VeilError] = {}  # noqa: RUF012
    arrives: set[str] = set()  # noqa: RUF012
    seen: dict[str, set[str]] = {}  # noqa: RUF012

    @property
    def capabilities(self):  # type: ignore[no-untyped-def]
        return msgspec.structs.replace(self.inner.capabilities, native_fifo=self.name == "fifo")

    def send_batch(self, messages: Any) -> list[Sent | VeilError]:
        error = self.trouble.get(self.name)
        if error is not None and self.name not in self.arrives:
            return [error for _ in messages]
        answers = []
        for message in messages:
            # What SQS does for FIFO: an id that was seen adds nothing.
            known = Unsteady.seen.setdefault(self.name, set())
            is_new = message.deduplication_id is None or message.deduplication_id not in known
            known.add(message.deduplication_id)
            plain = msgspec.structs.replace(message, deduplication_id=None)
            answers.append(self.inner.send(plain) if is_new else Sent("old", duplicate=True))
        return answers if error is None else [error for _ in messages]


@pytest.fixture
def unsteady(account: Account, definitions: Definitions) -> Iterator[PullTopic]:
    wrapped: Any = Wrapped(account, Unsteady)
    yield create_pull_topic(wrapped, "unsteady", ["fifo", "plain", "good"], definitions=definitions, create_queues=True)
    Unsteady.trouble, Unsteady.arrives, Unsteady.seen = {}, set(), {}


class TestPartialFailure:
    def test_what_failed_is_named_and_published_again(self, account: Account, unsteady: PullTopic) -> None:
        Unsteady.trouble = {"plain": TransportError(reason="away", may_have_happened=False)}
        with pytest.raises(PublishIncomplete) as caught:
            unsteady.publish(Message("x", group="g"))
        error = caught.value
        assert str(error).endswith(f" did not reach plain ({Unsteady.trouble['plain']})")
        assert (set(error.done), set(error.failed)) == ({"fifo", "good"}, {"plain"})
        Unsteady.trouble = {}
        unsteady.publish(Message("x", group="g"), id=error.id, to=error.failed)
        assert bodies(account, "fifo", "plain", "good") == [["x"]] * 3

    def test_a_second_copy_is_dropped_by_the_queue_or_known_by_its_id(
        self, account: Account, unsteady: PullTopic
    ) -> None:
        lost = TransportError(reason="the answer was lost", may_have_happened=True)
        Unsteady.trouble, Unsteady.arrives = {"fifo": lost, "plain": lost}, {"fifo", "plain"}
        with pytest.raises(PublishIncomplete) as caught:
            unsteady.publish(Message("x", group="g"))
        Unsteady.trouble = {}
        published = unsteady.publish(Message("x", group="g"), id=caught.value.id)
        assert published.sent["fifo"].duplicate
        assert bodies(account, "fifo") == [["x"]]
        copies = account.queue("plain").receive(10)
        assert len(copies) == 2
        assert {message.attributes[ID_ATTRIBUTE] for message in copies} == {published.id}

    def test_the_messages_own_deduplication_id(self, account: Account, unsteady: PullTopic) -> None:
        for _ in range(2):
            published = unsteady.publish(Message("x", group="g", deduplication_id="order-7"))
        assert published.id == "order-7"
        assert bodies(account, "fifo") == [["x"]]

    def test_in_a_batch(self, unsteady: PullTopic) -> None:
        Unsteady.trouble = {"good": TransportError(reason="away", may_have_happened=False)}
        answers = unsteady.publish_batch([Message("x", group="g")] * 3)
        assert [type(answer) for answer in answers] == [PublishIncomplete] * 3
        assert len({answer.id for answer in answers if isinstance(answer, PublishIncomplete)}) == 3

    def test_a_queue_that_is_gone(self, account: Account, topic: PullTopic) -> None:
        account.delete("b")
        with pytest.raises(PublishIncomplete) as caught:
            topic.publish("x")
        assert isinstance(caught.value.failed["b"], QueueMissing)
        assert bodies(account, "a", "c") == [["x"]] * 2

    def test_what_one_queue_cannot_carry_reaches_none(self, account: Account, definitions: Definitions) -> None:
        class Poor(Wrapping):
            @property
            def capabilities(self):  # type: ignore[no-untyped-def]
                if self.name != "b":
                    return self.inner.capabilities
                return msgspec.structs.replace(self.inner.capabilities, attributes=False, body_bytes_max=100)

        wrapped: Any = Wrapped(account, Poor)
        topic = create_pull_topic(wrapped, "news", NAMES, definitions=definitions, create_queues=True)
        with pytest.raises(MessageTooLarge):
            topic.publish("x" * 101)
        with pytest.raises(CapabilityMissing, match="attributes"):
            topic.publish(Message("x", {"colour": "red"}))
        for hopeless in (Message(""), Message("x", delay=-1), Message("x", priority=99)):
            with pytest.raises(ParameterInvalid):
                topic.publish(hopeless)
        assert bodies(account, *NAMES) == [[]] * 3
        topic.publish("x")
        assert bodies(account, *NAMES) == [["x"]] * 3


class TestEncoding:
    @pytest.fixture
    def topic(self, account: Account, definitions: Definitions) -> PullTopic:
        return create_pull_topic(
            account, "news", ["a", "b"], definitions=definitions, create_queues=True, encodings={"b": "base64"}
        )

    def test_each_its_own(self, account: Account, topic: PullTopic) -> None:
        topic.publish("žluť")
        (raw,), (base64,) = account.queue("a").receive(), account.queue("b").receive()
        assert (raw.body, base64.body) == ("žluť", "xb5sdcWl")
        assert decoded(raw, "raw") == decoded(base64, "base64") == "žluť"

    def test_a_mismatch_is_never_a_guess(self, account: Account, topic: PullTopic) -> None:
        topic.publish("abcd")
        (raw,), (base64,) = account.queue("a").receive(), account.queue("b").receive()
        with pytest.raises(EncodingMismatch, match="marked"):
            decoded(base64, "raw")
        for body in ("žluť", "abc", "a b=", "/w=="):
            with pytest.raises(EncodingMismatch, match="not base64"):
                decoded(msgspec.structs.replace(raw, body=body), "base64")
        with pytest.raises(ParameterInvalid, match="encoding"):
            decoded(raw, "utf-7")

    def test_a_publisher_may_insist(self, account: Account, topic: PullTopic) -> None:
        with pytest.raises(EncodingMismatch, match="base64"):
            topic.publish("x", encoding="raw")
        assert bodies(account, "a", "b") == [[], []]
        topic.publish("x", encoding="raw", to=["a"])
        assert bodies(account, "a", "b") == [["x"], []]

    def test_not_with_bodies_that_are_pointers(self, account: Account, definitions: Definitions) -> None:
        with pytest.raises(ParameterInvalid, match="encodings"):
            create_pull_topic(
                account, "n", ["a"], definitions=definitions, encodings={"a": "base64"},
                bodies=SharedBodies("memory://x/y", "n"),
            )  # fmt: skip


class TestMaking:
    def test_it_is_opened_if_it_is_the_same(self, account: Account, topic: PullTopic, definitions: Definitions) -> None:
        create_pull_topic(account, "news", NAMES[::-1], definitions=definitions).publish("x")
        assert bodies(account, *NAMES) == [["x"]] * 3
        assert definitions.names() == ["news"]

    @pytest.mark.parametrize(
        ("change", "setting"),
        [
            ({"queue_names": {"a": "a", "b": "b", "c": "other"}}, "endpoint"),
            ({"tags": {"a": ["x"]}}, "tags"),
            ({"encodings": {"a": "base64"}}, "encoding"),
        ],
    )
    def test_a_subscription_that_differs(
        self, account: Account, topic: PullTopic, definitions: Definitions, change: dict[str, Any], setting: str
    ) -> None:
        options: dict[str, Any] = {"queue_names": NAMES, "create_queues": True, **change}
        with pytest.raises(SubscriptionExists) as caught:
            create_pull_topic(account, "news", definitions=definitions, **options)
        assert caught.value.setting == setting
        assert account.names() == NAMES

    @pytest.mark.parametrize("names", [["a", "b"], ["a", "b", "c", "d"], ["x"]])
    def test_a_topic_that_differs(
        self, account: Account, topic: PullTopic, definitions: Definitions, names: list[str]
    ) -> None:
        with pytest.raises(TopicExists):
            create_pull_topic(account, "news", names, definitions=definitions, create_queues=True)
        assert account.names() == NAMES

    @for_each(
        "options, parameter",
        [
            ({"queue_names": "a"}, "queue_names"),
            ({"queue_names": []}, "queue_names"),
            ({"queue_names": [7]}, "queue_names"),
            ({"queue_names": ["a", "a"]}, "queue_names"),
            ({"queue_names": {"x": "a", "y": "a"}}, "queue_names"),
            ({"tags": {"z": ["x"]}}, "tags"),
            ({"tags": {"a": "x"}}, "tags['a']"),
            ({"tags": {"a": [""]}}, "tags['a']"),
            ({"encodings": {"z": "raw"}}, "encodings"),
            ({"encodings": {"a": "rot13"}}, "encodings['a']"),
            ({"template": Template(), "create_queues": False}, "template"),
            ({"topic": ""}, "topic"),
            ({"topic": "../x"}, "topic"),
            ({"topic": "a b"}, "topic"),
            ({"topic": "x" * 121}, "topic"),
            ({"topic": None}, "topic"),
        ],
    )
    def test_bad_input_makes_nothing(
        self, account: Account, definitions: Definitions, options: dict[str, Any], parameter: str
    ) -> None:
        wanted = {"topic": "news", "queue_names": NAMES, "create_queues": True, **options}
        with pytest.raises(ParameterInvalid) as caught:
            create_pull_topic(account, definitions=definitions, **wanted)
        assert caught.value.parameter == parameter
        assert (account.names(), definitions.names()) == ([], [])

    def test_a_queue_that_is_missing(self, account: Account, definitions: Definitions) -> None:
        account.create("a")
        with pytest.raises(QueueMissing):
            create_pull_topic(account, "news", NAMES, definitions=definitions)
        assert (account.names(), definitions.names()) == (["a"], [])

    def test_an_error_on_the_way_takes_back_what_was_made(self, account: Account, definitions: Definitions) -> None:
        account.create("a")
        account.create("c", Template(visibility_timeout=77))
        with pytest.raises(QueueExists):
            create_pull_topic(
                account, "news", NAMES, definitions=definitions, create_queues=True,
                template=Template(visibility_timeout=30),
            )  # fmt: skip
        assert (account.names(), definitions.names()) == (["a", "c"], [])

    def test_a_template(self, account: Account, definitions: Definitions) -> None:
        create_pull_topic(
            account, "news", NAMES, definitions=definitions, create_queues=True, template=Template(retention=777)
        )
        assert {account.queue(name).stats().retention for name in NAMES} == {777}

    @pytest.mark.parametrize("after", [0, 1, 2, 3])
    def test_a_crash_on_the_way(self, account: Account, definitions: Definitions, after: int) -> None:
        class Crash(BaseException):
            """As a kill: nothing of ours runs after it."""

        class Crashing(Wrapped):
            left = after

            def create(self, name: str, template: Template | None = None) -> bool:
                if not self.left:
                    raise Crash
                self.left -= 1
                return account.create(name, template)

            def queue(self, name: str) -> Queue:
                raise Crash

        crashing: Any = Crashing(account, None)
        account.create("b")
        with pytest.raises(Crash):
            create_pull_topic(crashing, "news", NAMES, definitions=definitions, create_queues=True)
        with pytest.raises(TopicExists, match="creating"):
            open_pull_topic(account, "news", definitions=definitions)
        # It may have been no crash: another process is at it, and its queues are its own.
        left, names = definitions.find("news"), account.names()
        assert left is not None
        with pytest.raises(TopicExists, match="another process may be creating it: if not, create it again in"):
            create_pull_topic(account, "news", NAMES, definitions=definitions, create_queues=True)
        assert (definitions.find("news"), account.names()) == (left, names)
        definitions.write(msgspec.structs.replace(left, changed=left.changed - 60))
        again = create_pull_topic(account, "news", NAMES, definitions=definitions, create_queues=True)
        again.publish("x")
        again.delete()
        assert account.names() == ["b"], "what both tries made is gone, and nothing else"

    def test_two_at_once(self, account: Account, definitions: Definitions) -> None:
        class Late(Definitions):
            def find(self, topic: str) -> None:
                return None

        create_pull_topic(account, "news", NAMES, definitions=definitions, create_queues=True)
        with pytest.raises(TopicExists, match="same time"):
            create_pull_topic(account, "news", NAMES, definitions=Late(definitions._store), create_queues=True)
        assert account.names() == NAMES

    def test_a_definition_that_is_none(self, account: Account, topic: PullTopic, definitions: Definitions) -> None:
        for content in (b"", b"{}", b'{"topic":"\xff"}', json.dumps({"topic": "news", "subscriptions": 7}).encode()):
            definitions._store.put("topics/news.json", content)
            with pytest.raises(TopicExists, match="cannot be read"):
                open_pull_topic(account, "news", definitions=definitions)


class TestDelete:
    def test_only_what_was_made_for_it(self, account: Account, definitions: Definitions) -> None:
        account.create("b")
        account.queue("b").send("mine")
        topic = create_pull_topic(account, "news", NAMES, definitions=definitions, create_queues=True)
        topic.delete()
        assert account.names() == ["b"]
        assert bodies(account, "b") == [["mine"]]
        with pytest.raises(TopicMissing):
            open_pull_topic(account, "news", definitions=definitions)
        with pytest.raises(TopicMissing):
            delete_pull_topic(account, "news", definitions=definitions)

    def test_it_can_be_repeated(self, account: Account, topic: PullTopic, definitions: Definitions) -> None:
        account.delete("b")

        class Failing(Wrapped):
            def delete(self, name: str) -> None:
                raise TransportError(reason="away", may_have_happened=False)

        failing: Any = Failing(account, lambda queue: queue)
        with pytest.raises(TransportError):
            delete_pull_topic(failing, "news", definitions=definitions)
        for call in (open_pull_topic, lambda *arguments, **options: create_pull_topic(*arguments, NAMES, **options)):
            with pytest.raises(TopicExists, match="delet"):
                call(account, "news", definitions=definitions)
        delete_pull_topic(account, "news", definitions=definitions)
        assert (account.names(), definitions.names()) == ([], [])

    def test_definitions_that_are_away(self, account: Account, tmp_path: Any) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ObjectStoreFailed):
            create_pull_topic(account, "news", NAMES, definitions=f"file://{tmp_path}/file/x", create_queues=True)
        assert account.names() == []


class TestBadInput:
    @for_each(
        "options, parameter",
        [
            ({"to": ["z"]}, "to"),
            ({"to": "a"}, "to"),
            ({"id": "x" * 129}, "id"),
            ({"id": "é"}, "id"),
            ({"id": 7}, "id"),
            ({"message": Message("x", {ID_ATTRIBUTE: "mine"})}, "attributes"),
            ({"message": Message("\ud800")}, "body"),
            ({"message": 7}, "message"),
            ({"encoding": "utf-7"}, "encoding"),
        ],
    )
    def test_nothing_is_sent(self, account: Account, topic: PullTopic, options: dict[str, Any], parameter: str) -> None:
        with pytest.raises(ParameterInvalid) as caught:
            topic.publish(**{"message": "x", **options})
        assert caught.value.parameter == parameter
        assert bodies(account, *NAMES) == [[]] * 3


def test_a_definition_whose_answer_was_lost_is_ours(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(f"memory://topics{next(_buckets)}/x", pause=0.01)
    write, writes = store._files.pipe_file, itertools.count()

    def losing(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        if not next(writes):
            raise TimeoutError("the object is there, and nobody was told")

    monkeypatch.setattr(store._files, "pipe_file", losing)
    definitions = Definitions(store)
    create_pull_topic(account, "news", NAMES, definitions=definitions, create_queues=True)
    assert open_pull_topic(account, "news", definitions=definitions)


def test_a_definition_of_somebody_faster_is_not_ours(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in every word, and written between our first attempt, which failed, and the second."""
    url = f"memory://topics{next(_buckets)}/x"
    store, others = ObjectStore(url, pause=0.01), Definitions(url)
    write, writes = store._files.pipe_file, itertools.count()
    wanted = Definition("sports", ())

    def failing(*arguments: Any, **options: Any) -> None:
        if not next(writes):
            others.add(wanted)
            raise TimeoutError
        write(*arguments, **options)

    monkeypatch.setattr(store._files, "pipe_file", failing)
    with pytest.raises(TopicExists):
        Definitions(store).add(wanted)
