"""What a topic of MNS's own is made of, and what a publish to it carries."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from veilmq.client.adapters.connect import connect_account
from veilmq.client.adapters.mns.topics import MnsTopics
from veilmq.client.messages import Message, Template
from veilmq.client.queue import NativeSubscription
from veilmq.client.topics import Form, create_pull_topic
from veilmq.testing.client_contract import for_each
from veilmq.testing.local import LocalServer


@pytest.mark.slow
def test_queues_that_take_more_than_a_topic_may(server: LocalServer, tmp_path: Path) -> None:
    """SQS's default is 1 MiB."""
    with server.account() as other, connect_account(f"mns://a:b@{urlsplit(server.mns_url).netloc}") as account:
        for name in ("large-1", "large-2"):
            assert other.create(name, Template())
        options: Any = {"definitions": f"file://{tmp_path}", "form": Form.NATIVE}
        with create_pull_topic(account, "large", ["large-1", "large-2"], **options) as topic:
            topic.publish("x")
        assert [message.body for name in ("large-1", "large-2") for message in account.queue(name).receive(10)] == [
            "x",
            "x",
        ]


@for_each(
    "tag, carried",
    [("sport", True), ("紧急", True), ("a b", True), ("", False), ("x" * 17, False), (" a", False), ("a ", False),
     ("a\nb", False), ("a\tb", False), ("a\x7f", False)],
)  # fmt: skip
def test_tags_that_a_topic_carries(tag: str, carried: bool) -> None:
    nowhere: Any = None
    topics = MnsTopics(nowhere)
    assert topics.carries(Message("x", tag=tag)) is carried
    assert topics.fits("news", [NativeSubscription("a", "queue-a", tag)]) is carried
