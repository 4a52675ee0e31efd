"""A protocol's own topics, as an adapter that has them offers them to the pull topic.

Strategy: a few calls, all idempotent: what exists with the same settings is left alone. The service carries out a
publish, to every subscription that wants it or to none. Source: the page of PublishMessage (MNS).
"""

import re
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, Protocol

from veilmq.client.messages import Message
from veilmq.model.errors import VeilError


class NativeSubscription(NamedTuple):
    """A queue that gets what is published."""

    name: str
    queue: str
    tag: str | None
    """Gets messages with this tag; None: all."""


class NativePublished(NamedTuple):
    """The service has accepted the message."""

    id: str
    copies: int | None
    """How many queues got it, where the service reports it."""


class NativeTopics(Protocol):
    """The topics of an account. Any thread; all calls raise TransportError, ServiceError."""

    def fits(self, topic: str, subscriptions: Collection[NativeSubscription]) -> bool:
        """Whether the service allows these names and tags. No I/O."""
        ...

    def carries(self, message: Message) -> bool:
        """Whether a publish can carry everything in the message; it always carries tag and type. No I/O."""
        ...

    def create(self, topic: str, queues: Collection[str]) -> bool:
        """Make sure the topic exists; True if it is new. Its size limit is the smallest of these queues' limits.

        Raises QueueMissing.
        """
        ...

    def subscriptions(self, topic: str) -> list[NativeSubscription]:
        """All subscriptions; one that is not to a queue has an empty queue name. Raises TopicMissing."""
        ...

    def subscribe(self, topic: str, subscription: NativeSubscription) -> None:
        """Add it unless the same one exists. Raises TopicMissing, QueueMissing, SubscriptionExists."""
        ...

    def delete(self, topic: str) -> None:
        """Delete the topic with its subscriptions. Idempotent."""
        ...

    def publish(self, topic: str, messages: Sequence[Message]) -> list[NativePublished | VeilError]:
        """One result or error a message, in order."""
        ...


TAG_CHARACTERS_MAX: Final = 16
SUBSCRIPTIONS_MAX: Final = 100
"""Of a topic."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*\Z")
_TOPIC_CHARACTERS_MAX: Final = 120
_SUBSCRIPTION_CHARACTERS_MAX: Final = 255


def are_names(topic: str, subscriptions: Collection[NativeSubscription]) -> bool:
    """Whether these names are allowed."""
    return (
        _is_name(topic, _TOPIC_CHARACTERS_MAX)
        and len(subscriptions) <= SUBSCRIPTIONS_MAX
        and all(_is_name(each.name, _SUBSCRIPTION_CHARACTERS_MAX) for each in subscriptions)
        and all(each.tag is None or len(each.tag) <= TAG_CHARACTERS_MAX for each in subscriptions)
    )


def _is_name(name: str, characters_max: int) -> bool:
    return len(name) <= characters_max and _NAME.match(name) is not None
