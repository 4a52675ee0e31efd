"""Topics and subscriptions in a store's memory."""

import msgspec

from veilmq.model.instant import Instant
from veilmq.model.topic import SubscriptionInfo, SubscriptionSettings, TopicKey, TopicSettings

Topics = dict[TopicKey, "LiveTopic"]


class LiveSubscription(msgspec.Struct, frozen=True):
    """An existing subscription."""

    id: int
    name: str
    created: Instant
    modified: Instant
    settings: SubscriptionSettings

    def info(self, topic: TopicKey) -> SubscriptionInfo:
        """The subscription as protocols show it."""
        return SubscriptionInfo(topic, self.name, self.created, self.modified, self.settings)


class LiveTopic(msgspec.Struct):
    """An existing topic."""

    key: TopicKey
    incarnation: int
    created: Instant
    modified: Instant
    settings: TopicSettings
    subscriptions: dict[str, LiveSubscription] = {}
