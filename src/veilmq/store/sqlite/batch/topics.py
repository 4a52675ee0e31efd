"""The topics in memory, with their subscriptions.

Strategy: topics are few and change rarely. Each change writes its row, changes the value here, and registers an undo in
case the batch is rolled back.
"""

from typing import Final

import apsw
import msgspec

from veilmq.model.topic import SubscriptionSettings, TopicKey, TopicSettings
from veilmq.store.topics import LiveSubscription, LiveTopic, Topics

TOPIC_DECODER: Final = msgspec.msgpack.Decoder(TopicSettings)
SUBSCRIPTION_DECODER: Final = msgspec.msgpack.Decoder(SubscriptionSettings)
TOPICS_ENCODER: Final = msgspec.msgpack.Encoder()


def load(connection: apsw.Connection) -> Topics:
    """Load all topics."""
    topics: Topics = {}
    by_incarnation: dict[int, LiveTopic] = {}
    for incarnation, account, region, name, created, modified, settings in connection.execute(
        "SELECT incarnation, account, region, name, created, modified, settings FROM topic"
    ):
        key = TopicKey(account, region, name)
        topic = LiveTopic(key, incarnation, created, modified, TOPIC_DECODER.decode(settings))
        topics[key] = by_incarnation[incarnation] = topic
    for number, incarnation, name, created, modified, settings in connection.execute(
        "SELECT id, topic, name, created, modified, settings FROM subscription"
    ):
        found = LiveSubscription(number, name, created, modified, SUBSCRIPTION_DECODER.decode(settings))
        by_incarnation[incarnation].subscriptions[name] = found
    return topics
