"""Topics and subscriptions as a store has them in memory."""

import msgspec

from veilmq.model.instant import Instant
from veilmq.model.topic import SubscriptionInfo, SubscriptionSettings, TopicKey, TopicSettings

Topics = dict[TopicKey, "LiveTopic"]


class LiveSubscription(msgspec.Struct, frozen=True):
    """One subscription that exists."""

    id: int
    name: str
    created: Instant
    modified: Instant
    settings: SubscriptionSettings

    def info(self, topic: TopicKey) -> SubscriptionInfo:
        """As a protocol sees it."""
        return SubscriptionInfo(topic, self.name, self.created, self.modified, self.settings)


class LiveTopic(msgspec.Struct):
    """One topic that exists."""

    key: TopicKey
    incarnation: int
    created: Instant
    modified: Instant
    settings: TopicSettings
    subscriptions: dict[str, LiveSubscription] = {}
