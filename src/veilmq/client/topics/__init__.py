"""Topics whose subscribers pull: every subscription is a queue.

Strategy: `definitions` stores which topics exist and their subscriptions, durably and for all publishers; it also
encodes bodies, raw or base64. `topic` creates and deletes topics, and publishes, through a topic of the service's own
where it has one (`Capabilities.native_topics`). Source: the documents' CloudPullTopic.
"""

from veilmq.client.topics.definitions import Definition, Definitions, Encoding, Form, Subscription, decoded
from veilmq.client.topics.topic import (
    ID_ATTRIBUTE,
    Published,
    PullTopic,
    create_pull_topic,
    delete_pull_topic,
    open_pull_topic,
)

__all__ = [
    "ID_ATTRIBUTE",
    "Definition",
    "Definitions",
    "Encoding",
    "Form",
    "Published",
    "PullTopic",
    "Subscription",
    "create_pull_topic",
    "decoded",
    "delete_pull_topic",
    "open_pull_topic",
]
