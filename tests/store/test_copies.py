"""The copies of one publish: each is what `render` makes, and what they have in common is made once."""

from hashlib import md5
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, expect
from tests.support.sqlite import SqliteFactory

from veilmq.model.commands import CreateTopic, Publish, Subscribe
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Published, Subscribed
from veilmq.model.settings import topic as topics
from veilmq.model.settings.topic import ContentFormat, Copies, Notification, SubscriptionSettings, TopicKey, render

TOPIC = TopicKey(ACCOUNT, REGION, "news")
FORMS = st.sampled_from([ContentFormat.XML, ContentFormat.JSON])
NAMES = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3)
BODY = st.text(max_size=20)


@given(FORMS, BODY, st.one_of(st.none(), BODY), NAMES)
@example(ContentFormat.XML, "<SubscriptionName>x</SubscriptionName>", "<SubscriptionName>", ["a", "b"])
@example(ContentFormat.JSON, '"SubscriptionName":"x"', '"SubscriptionName":"', ['"', "b"])
@example(ContentFormat.XML, "\r\n<&>\u00e9\U0001f600", None, ["<&\r>"])
def test_a_copy_is_what_its_subscription_is_told(
    form: ContentFormat, body: str, tag: str | None, names: list[str]
) -> None:
    told = Notification(TOPIC, "", "0A", body, "0B", tag, Instant(1_000))
    copies = Copies(told, form)
    for name in names:
        text = render(msgspec.structs.replace(told, subscription=name), form)
        assert copies.of(name) == (text, md5(text.encode(), usedforsecurity=False).digest())


def test_a_publish_renders_once_a_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    stage.do(CreateTopic(topic=TOPIC, origin=TESTER))
    for number in range(30):
        queue = stage.create(f"queue-{number}")
        settings = SubscriptionSettings(
            endpoint="queue", queue=queue, content_format=list(ContentFormat)[number % len(ContentFormat)]
        )
        expect(stage.do(Subscribe(topic=TOPIC, origin=TESTER, name=f"s{number}", settings=settings)), Subscribed)
    rendered: list[ContentFormat] = []

    def noted(notification: Notification, form: ContentFormat) -> str:
        rendered.append(form)
        return render(notification, form)

    monkeypatch.setattr(topics, "render", noted)
    body = "hello"
    publish = Publish(topic=TOPIC, origin=TESTER, body=body, md5=md5(body.encode()).digest(), size_bytes=5)
    assert expect(stage.do(publish), Published).copies == 30
    assert sorted(rendered) == ["JSON", "XML"]
    stage.store.close()
