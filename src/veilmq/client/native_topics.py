"""Topics of a protocol's own, as an adapter that has them offers them to the pull topic.

Strategy: a handful of calls, each of which can be repeated: what is there and the same is left as it is. A publish is
the service's to carry out, to every subscription that wants it or to none. Source: the page of PublishMessage (MNS).
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
    """The service has it."""

    id: str
    copies: int | None
    """How many queues got it, where the service tells."""


class NativeTopics(Protocol):
    """The topics of an account. Any thread; all calls raise TransportError, ServiceError."""

    def fits(self, topic: str, subscriptions: Collection[NativeSubscription]) -> bool:
        """Whether the service allows these names and tags. No I/O."""
        ...

    def carries(self, message: Message) -> bool:
        """Whether a publish can carry all that the message says; its tag and type are carried. No I/O."""
        ...

    def create(self, topic: str, queues: Collection[str]) -> bool:
        """Make sure the topic exists; True if it did not. It takes what the smallest of these queues takes.

        Raises QueueMissing.
        """
        ...

    def subscriptions(self, topic: str) -> list[NativeSubscription]:
        """Those to queues, and others under an empty queue. Raises TopicMissing."""
        ...

    def subscribe(self, topic: str, subscription: NativeSubscription) -> None:
        """Add it, or meet the same. Raises TopicMissing, QueueMissing, SubscriptionExists."""
        ...

    def delete(self, topic: str) -> None:
        """Delete the topic with its subscriptions; twice is once."""
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
    """Whether they are allowed."""
    return (
        _is_name(topic, _TOPIC_CHARACTERS_MAX)
        and len(subscriptions) <= SUBSCRIPTIONS_MAX
        and all(_is_name(each.name, _SUBSCRIPTION_CHARACTERS_MAX) for each in subscriptions)
        and all(each.tag is None or len(each.tag) <= TAG_CHARACTERS_MAX for each in subscriptions)
    )


def _is_name(name: str, characters_max: int) -> bool:
    return len(name) <= characters_max and _NAME.match(name) is not None
