"""The pull topic's promises over both forms, on every adapter: a topic of the service's own, and our fan-out.

Strategy: the same tests for each place. A place is an account with a form; the server's are slow.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import pytest
from mns.account import Account as SdkAccount
from tests.support.embedded import EmbeddedClient

from veilmq.client.adapters.connect import connect_account
from veilmq.client.adapters.mns import MnsAccount
from veilmq.client.errors import PublishIncomplete, SubscriptionExists, TopicExists, TopicMissing, TransportError
from veilmq.client.messages import Message, Template
from veilmq.client.queue import Account
from veilmq.client.topics import ID_ATTRIBUTE, Definitions, Form, PullTopic, create_pull_topic, open_pull_topic
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid, QueueMissing
from veilmq.testing.local import LocalServer

AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_numbers = itertools.count()
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    server = LocalServer(tmp_path_factory.mktemp("topics"), "--no-cooldowns")
    yield server
    server.stop()


class Place:
    """Where a topic is made."""

    def __init__(self, account: Account, form: Form, tmp_path: Path) -> None:
        self.account, self.form = account, form
        self.definitions = Definitions(f"file://{tmp_path}/definitions")
        self.names = [f"queue-{next(_numbers)}" for _ in range(3)]
        self.topic_name = f"t{next(_numbers)}"

    def make(self, **options: Any) -> PullTopic:
        given = {"create_queues": True, "form": self.form, "definitions": self.definitions} | options
        return create_pull_topic(self.account, self.topic_name, given.pop("queue_names", self.names), **given)

    def bodies(self) -> list[list[str]]:
        return [[message.body for message in self.account.queue(name).receive(10)] for name in self.names]

    def exist(self) -> list[str]:
        return [name for name in self.account.names("queue-") if name in self.names]


def account_of(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Any:
    if kind == "embedded":
        return EmbeddedClient(tmp_path / "embedded").account
    server: LocalServer = request.getfixturevalue("server")
    if kind == "mns raw":
        return MnsAccount(SdkAccount(server.process.mns, "id", "secret"), base64=False)
    azure = urlsplit(server.process.azure).netloc
    urls = {
        "mns": f"mns://id:secret@{urlsplit(server.process.mns).netloc}?tls=0",
        "veil": f"veil://{urlsplit(server.sqs_url).netloc}",
        "sqs": f"sqs://id:secret@{urlsplit(server.sqs_url).netloc}/000000000000/?region=us-east-1&tls=0",
        "azure": f"azure://:{quote(AZURE_KEY, safe='')}@{azure}/devstoreaccount1/?tls=0",
    }
    return connect_account(urls[kind])


PLACES = [
    pytest.param(("embedded", Form.NATIVE), id="embedded-native"),
    pytest.param(("embedded", Form.FAN_OUT), id="embedded-fan-out"),
    pytest.param(("mns", Form.NATIVE), id="mns-native", marks=SLOW),
    pytest.param(("mns raw", Form.NATIVE), id="mns-raw-native", marks=SLOW),
    pytest.param(("mns", Form.FAN_OUT), id="mns-fan-out", marks=SLOW),
]


ELSEWHERE = [pytest.param((kind, Form.FAN_OUT), id=f"{kind}-fan-out", marks=SLOW) for kind in ("veil", "sqs", "azure")]


@pytest.fixture(params=[*PLACES, *ELSEWHERE])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Places without attributes or tags, too."""
    kind, form = request.param
    account = account_of(request, kind, tmp_path)
    yield Place(account, form, tmp_path)
    account.close()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind, form = request.param
    account = account_of(request, kind, tmp_path)
    yield Place(account, form, tmp_path)
    account.close()


@pytest.fixture(params=[each for each in PLACES if each.values[0][1] is Form.NATIVE])
def native(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind, form = request.param
    account = account_of(request, kind, tmp_path)
    yield Place(account, form, tmp_path)
    account.close()


BODY = 'žluť <&> "\r\n" \U0001f600'


def test_everybody_gets_it(place: Place) -> None:
    topic = place.make()
    published = topic.publish(Message(BODY, {"colour": "red", "n": 7, "raw": b"\0\xff"}, type="paper", lease_hint=7))
    assert set(published.sent) == set(place.names)
    for name in place.names:
        (message,) = place.account.queue(name).receive(10)
        assert (message.body, message.type) == (BODY, "paper")
        assert message.attributes == {"colour": "red", "n": 7, "raw": b"\0\xff", ID_ATTRIBUTE: published.id}


def test_a_publisher_elsewhere_and_a_batch(anywhere: Place) -> None:
    anywhere.make()
    topic = open_pull_topic(anywhere.account, anywhere.topic_name, definitions=anywhere.definitions)
    answers = topic.publish_batch(["one", "t\x00o", Message("three"), *["more"] * 3])
    assert [type(answer).__name__ for answer in answers] == ["Published", "ParameterInvalid"] + ["Published"] * 4
    assert [sorted(each) for each in anywhere.bodies()] == [["more", "more", "more", "one", "three"]] * 3


def test_a_tag(place: Place) -> None:
    first, second, _ = place.names
    topic = place.make(tags={first: ["sport"], second: ["weather"]})
    published = [topic.publish(Message(body, tag=tag)) for body, tag in (("goal", "sport"), ("rain", "weather"))]
    published += [topic.publish("plain"), topic.publish(Message("other", tag="money"))]
    assert [len(each.sent) for each in published] == [2, 2, 1, 1]
    assert place.bodies() == [["goal"], ["rain"], ["goal", "rain", "plain", "other"]]


def test_what_a_publish_cannot_carry_still_arrives(place: Place) -> None:
    topic = place.make()
    topic.publish(Message("urgent", priority=1))
    topic.publish("some", to=place.names[:1])
    topic.publish(Message("long tag", tag="x" * 17))
    assert [sorted(each) for each in place.bodies()] == [["long tag", "some", "urgent"]] + [["long tag", "urgent"]] * 2
    topic.publish(Message("later", delay=600))
    assert place.bodies() == [[]] * 3


def test_what_is_too_large_reaches_none(place: Place) -> None:
    topic = place.make(template=Template(message_bytes_max=2_048))
    if place.account.queue(place.names[0]).capabilities.body_bytes_max > 2_048:
        limit_bytes = 65_536  # the adapter looks at the protocol's limit, and the service at the queue's
    else:
        limit_bytes = 2_048
    with pytest.raises((MessageTooLarge, PublishIncomplete)):
        topic.publish("x" * (limit_bytes + 1))
    with pytest.raises((MessageTooLarge, PublishIncomplete)):
        topic.publish("x" * 2_049)
    assert place.bodies() == [[]] * 3


def test_what_is_there_is_taken_only_if_it_is_the_same(anywhere: Place) -> None:
    anywhere.make()
    anywhere.make(queue_names=anywhere.names[::-1], form=None).publish("x")
    assert anywhere.bodies() == [["x"]] * 3
    with pytest.raises(SubscriptionExists):
        anywhere.make(tags={anywhere.names[0]: ["t"]})
    with pytest.raises(TopicExists):
        anywhere.make(queue_names=anywhere.names[:2])
    other = Form.FAN_OUT if anywhere.form is Form.NATIVE else Form.NATIVE
    with pytest.raises((TopicExists, CapabilityMissing), match=r"form|native_topics"):
        anywhere.make(form=other)


def test_delete_takes_what_it_made_and_no_more(anywhere: Place) -> None:
    mine = anywhere.names[1]
    anywhere.account.create(mine)
    topic = anywhere.make()
    topic.publish("x")
    topic.delete()
    assert anywhere.exist() == [mine]
    (message,) = anywhere.account.queue(mine).receive()
    assert message.body == "x"
    with pytest.raises(TopicMissing):
        open_pull_topic(anywhere.account, anywhere.topic_name, definitions=anywhere.definitions)
    anywhere.make().publish("again")
    assert anywhere.bodies() == [["again"]] * 3


def test_a_queue_that_is_missing_leaves_nothing(anywhere: Place) -> None:
    anywhere.account.create(anywhere.names[0])
    with pytest.raises(QueueMissing):
        anywhere.make(create_queues=False)
    assert (anywhere.exist(), anywhere.definitions.names()) == ([anywhere.names[0]], [])


class TestNative:
    """What only a topic of the service's own has."""

    def test_it_is_chosen_where_it_fits(self, native: Place) -> None:
        assert native.make(form=None)._definition.form is Form.NATIVE
        two = Place(native.account, native.form, Path("/nowhere"))
        two.definitions = native.definitions
        assert two.make(form=None, tags={two.names[0]: ["a", "b"]})._definition.form is Form.FAN_OUT
        for options in ({"tags": {two.names[0]: ["a", "b"]}}, {"encodings": {two.names[0]: "base64"}}):
            two.topic_name += "x"
            with pytest.raises(CapabilityMissing, match="native topics"):
                two.make(form="native", **options)
        with pytest.raises(ParameterInvalid, match="form"):
            two.make(form="other")

    def test_a_publish_is_one_message_of_the_service(self, native: Place) -> None:
        topic = native.make()
        published = topic.publish("x")
        assert len({sent.id for sent in published.sent.values()}) == 1
        assert {each.name for each in native.account.topics().subscriptions(native.topic_name)} == set(native.names)  # type: ignore[attr-defined]

    def test_queues_that_something_wraps_are_not_passed_by(self, native: Place) -> None:
        sent: list[str] = []

        class Marking(Wrapping):
            def send_batch(self, messages: Any) -> Any:
                sent.append(self.name)
                return super().send_batch(messages)

        class Wrapped:
            def queue(self, name: str) -> Any:
                return Marking(native.account.queue(name))

            def __getattr__(self, name: str) -> Any:
                return getattr(native.account, name)

        wrapped: Any = Wrapped()
        native.make()
        open_pull_topic(wrapped, native.topic_name, definitions=native.definitions).publish("x")
        assert sorted(sent) == sorted(native.names)
        native.topic_name += "x"
        made = create_pull_topic(wrapped, native.topic_name, native.names, definitions=native.definitions)
        assert made._definition.form is Form.FAN_OUT

    def test_a_topic_of_somebody_else_is_left_alone(self, native: Place) -> None:
        topics = native.account.topics()  # type: ignore[attr-defined]
        native.account.create("theirs") if "theirs" not in native.account.names("theirs") else None
        topics.create(native.topic_name, ["theirs"])
        theirs = topics.subscriptions(native.topic_name)
        from veilmq.client.queue import NativeSubscription

        topics.subscribe(native.topic_name, NativeSubscription("s", "theirs", None))
        with pytest.raises(TopicExists, match="subscription s"):
            native.make()
        assert theirs == []
        assert [each.name for each in topics.subscriptions(native.topic_name)] == ["s"]
        assert (native.exist(), native.definitions.names()) == ([], [])

    def test_a_crash_on_the_way_is_finished_or_deleted(self, native: Place) -> None:
        class Crash(BaseException):
            """As a kill."""

        def topics(left: int) -> Any:
            real = native.account.topics()  # type: ignore[attr-defined]

            class Crashing:
                def __getattr__(self, name: str) -> Any:
                    return getattr(real, name)

                def subscribe(self, *given: Any) -> None:
                    nonlocal left
                    if not left:
                        raise Crash
                    left -= 1
                    real.subscribe(*given)

            return Crashing()

        for left in (0, 2):
            native.topic_name += "x"
            patched = topics(left)
            native.account.topics = lambda patched=patched: patched  # type: ignore[attr-defined]
            with pytest.raises(Crash):
                native.make()
            del native.account.topics  # type: ignore[attr-defined]
            with pytest.raises(TopicExists, match="creating"):
                open_pull_topic(native.account, native.topic_name, definitions=native.definitions)
            found = native.definitions.find(native.topic_name)
            assert found is not None
            native.definitions.write(msgspec.structs.replace(found, changed=found.changed - 60))
            again = native.make(form=None if left else Form.FAN_OUT)
            again.publish("x")
            assert native.bodies() == [["x"]] * 3
            again.delete()
            assert native.exist() == []
            with pytest.raises(TopicMissing):
                native.account.topics().subscriptions(native.topic_name)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_an_answer_that_is_lost_is_published_again_under_its_id(native: Place) -> None:
    topic = native.make()
    lost = TransportError(reason="the answer was lost", may_have_happened=True)
    real = topic._native
    assert real is not None

    class Losing:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def publish(self, *given: Any) -> Any:
            real.publish(*given)
            raise lost

    topic._native = Losing()  # type: ignore[assignment]
    with pytest.raises(PublishIncomplete) as caught:
        topic.publish("x")
    assert set(caught.value.failed) == set(native.names)
    topic._native = real
    again = topic.publish("x", id=caught.value.id, to=caught.value.failed)
    for name in native.names:
        copies = native.account.queue(name).receive(10)
        assert [message.attributes[ID_ATTRIBUTE] for message in copies] == [again.id] * 2
