"""Topics whose subscribers pull: every subscription is a queue.

Strategy: `definitions` is which topics there are and what their subscriptions are, durable and shared; `making` creates
and deletes them; `topic` publishes; `encoding` is raw or base64 bodies; `native` is where a topic of the service's own
serves (`Capabilities.native_topics`). Source: the documents' CloudPullTopic.
"""

from veilmq.client.topics.definitions import Definition, Definitions, Encoding, Form, Subscription, decoded
from veilmq.client.topics.making import create_pull_topic, delete_pull_topic, open_pull_topic
from veilmq.client.topics.topic import ID_ATTRIBUTE, Published, PullTopic

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
