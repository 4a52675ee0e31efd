"""Topics of a data directory.

Strategy: commands on the shell. A batch of publishes is one call; each message reaches all its queues or none, in one
transaction. The names follow MNS's rules, so that a server that serves the directory later shows the topics.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from veilmq.client.adapters.embedded import translation
from veilmq.client.adapters.embedded.translation import MESSAGES_MAX
from veilmq.client.messages import Message
from veilmq.client.queue import TAG_CHARACTERS_MAX, NativePublished, NativeSubscription, are_names
from veilmq.client.shared import attempt, through
from veilmq.model import outcomes
from veilmq.model.commands import (
    AnyCommand,
    CreateTopic,
    DeleteTopic,
    DescribeQueue,
    ListSubscriptions,
    Origin,
    Publish,
    Subscribe,
)
from veilmq.model.errors import QueueMissing, SubscriptionExists, TopicExists, TopicMissing, VeilError
from veilmq.model.messages import id_text
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import ContentFormat, SubscriptionSettings, TopicKey

_PAGE: Final = 1_000


class EmbeddedTopics:
    """See `NativeTopics`; made by `EmbeddedAccount.topics`."""

    def __init__(
        self, account: str, region: str, origin: Origin, run: Callable[[Sequence[AnyCommand]], list[Any]]
    ) -> None:
        """run: returns the outcomes of commands. Raises TransportError."""
        self._account, self._region, self._origin = account, region, origin
        self._run = run

    def fits(self, topic: str, subscriptions: Collection[NativeSubscription]) -> bool:
        """See `NativeTopics`. False for a FIFO queue, which needs a group for each message."""
        return are_names(topic, subscriptions) and not any(each.queue.endswith(".fifo") for each in subscriptions)

    def carries(self, message: Message) -> bool:
        return (
            message.delay is None
            and message.ttl is None
            and message.priority is None
            and (message.tag is None or len(message.tag) <= TAG_CHARACTERS_MAX)
        )

    def create(self, topic: str, queues: Collection[str]) -> bool:
        described = [
            self._one(DescribeQueue(queue=self._queue(queue), origin=self._origin), topic, queue) for queue in queues
        ]
        change = {"message_bytes_max": min(each.info.settings.message_bytes_max for each in described)}
        key = self._key(topic)
        (made,) = self._run([CreateTopic(topic=key, origin=self._origin, change=change)])
        if isinstance(made, TopicExists):
            return False  # exists with another limit: its subscriptions decide whether it is the same
        if isinstance(made, VeilError):
            raise made
        return bool(made.created)

    def subscriptions(self, topic: str) -> list[NativeSubscription]:
        command = ListSubscriptions(topic=self._key(topic), origin=self._origin, count_max=_PAGE)
        listed: outcomes.SubscriptionsListed = self._one(command, topic)
        return [
            NativeSubscription(
                each.name, "" if each.settings.queue is None else each.settings.queue.name, each.settings.filter_tag
            )
            for each in listed.subscriptions
        ]

    def subscribe(self, topic: str, subscription: NativeSubscription) -> None:
        name, queue, tag = subscription
        settings = SubscriptionSettings(
            endpoint=f"acs:mns:{self._region}:{self._account}:queues/{queue}",
            queue=self._queue(queue),
            content_format=ContentFormat.SIMPLIFIED,
            filter_tag=tag,
        )
        self._one(Subscribe(topic=self._key(topic), origin=self._origin, name=name, settings=settings), topic, queue)

    def delete(self, topic: str) -> None:
        (outcome,) = self._run([DeleteTopic(topic=self._key(topic), origin=self._origin)])
        if isinstance(outcome, VeilError) and not isinstance(outcome, TopicMissing):
            raise outcome

    def publish(self, topic: str, messages: Sequence[Message]) -> list[NativePublished | VeilError]:
        made = [attempt(lambda message: self._publish(topic, message), message) for message in messages]

        def run(commands: Sequence[Publish]) -> list[NativePublished | VeilError]:
            found: list[Any] = []
            for start in range(0, len(commands), MESSAGES_MAX):
                found += self._run(commands[start : start + MESSAGES_MAX])
            return [
                self._translated(each, topic, "")
                if isinstance(each, VeilError)
                else NativePublished(id_text(each.id), each.copies)
                for each in found
            ]

        return through(made, run)

    def _publish(self, topic: str, message: Message) -> Publish:
        send = translation.send_command(self._queue(topic), self._origin, message, fifo=False)
        return Publish(
            topic=self._key(topic), origin=self._origin, body=send.body, md5=send.md5, size_bytes=send.size_bytes,
            extras=send.extras,
        )  # fmt: skip

    def _one(self, command: AnyCommand, topic: str, queue: str = "") -> Any:
        (outcome,) = self._run([command])
        if isinstance(outcome, VeilError):
            raise self._translated(outcome, topic, queue)
        return outcome

    def _translated(self, error: VeilError, topic: str, queue: str) -> VeilError:
        """The error in the client's terms."""
        if isinstance(error, TopicMissing):
            return TopicMissing(topic=topic)
        if isinstance(error, SubscriptionExists):
            return SubscriptionExists(topic=topic, subscription=error.subscription, setting=error.setting)
        return QueueMissing(queue=queue) if isinstance(error, QueueMissing) else error

    def _key(self, topic: str) -> TopicKey:
        return TopicKey(self._account, self._region, topic)

    def _queue(self, name: str) -> QueueKey:
        return QueueKey(self._account, self._region, name)
