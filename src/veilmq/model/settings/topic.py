"""A topic and its subscriptions: names, settings, state, and the forms of a notification.

Strategy: a subscription either sends a published message to a queue, or pushes it to a URL from a hidden queue of its
own, so both are ordinary sends. A hidden queue's name contains a `/`, which no protocol allows. A message in it is the
published body unchanged; its form is made when it is pushed. If a queue is the endpoint, the form is made in the
transaction of the publish and stored as the body. Source: docs/mns.md, "Topics and subscriptions".
"""

import json
from collections.abc import Callable
from enum import StrEnum
from hashlib import md5
from html import escape
from typing import Any, Final

import msgspec

from veilmq.model.instant import DAY_US, Instant
from veilmq.model.settings.queue import QueueKey

NOTIFICATION_NAMESPACE: Final = "http://mns.aliyuncs.com/doc/v1/"
TOPIC_RETENTION_US: Final = DAY_US
"""How long a push is tried at most: the retention of a topic (MNS: one day)."""

SETTINGS_QUEUES: Final = frozenset({"azure/service", "mns/account"})
"""Hidden queues without a subscription; their labels hold a protocol's settings of an account."""


class TopicKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The full name of a topic: account id of 12 digits, region, name, byte-exact. Topics and queues have separate
    names."""

    account: str
    region: str
    name: str

    def __str__(self) -> str:
        return f"{self.account}/{self.region}/{self.name}"


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Everything an owner sets on a topic."""

    message_bytes_max: int = 65_536
    labels: dict[str, str] = {}


class ContentFormat(StrEnum):
    """How a published message looks to a subscription (MNS NotifyContentFormat)."""

    XML = "XML"
    JSON = "JSON"
    SIMPLIFIED = "SIMPLIFIED"


class RetryStrategy(StrEnum):
    """When a failed push is tried again (MNS NotifyStrategy); veilmq.push.endpoints has the schedules."""

    BACKOFF = "BACKOFF_RETRY"
    EXPONENTIAL_DECAY = "EXPONENTIAL_DECAY_RETRY"


ATTEMPTS_MAX: Final = {RetryStrategy.BACKOFF: 4, RetryStrategy.EXPONENTIAL_DECAY: 177}
"""How often a push is tried, including the first attempt."""


class PushResult(StrEnum):
    """The result of one attempt to push."""

    DELIVERED = "delivered"
    FAILED = "failed"
    """Another attempt follows."""
    EXHAUSTED = "exhausted"
    """It was the last attempt."""


class SubscriptionSettings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a subscription's copies go and how. Exactly one of `queue` and `url` is set."""

    endpoint: str
    """The endpoint as the owner wrote it."""
    queue: QueueKey | None = None
    url: str | None = None
    content_format: ContentFormat = ContentFormat.XML
    strategy: RetryStrategy = RetryStrategy.BACKOFF
    filter_tag: str | None = None
    """Only messages with this tag; None: all."""
    dead_letter_queue: QueueKey | None = None
    """Where a push goes after its last attempt or its expiry; None: it is deleted."""
    pushes_per_second_max: int | None = None
    """Attempts to push, retries included; None: no bound. Only with `url`; copies to a queue are made with the
    publish."""


class TopicInfo(msgspec.Struct, frozen=True, gc=False):
    """A topic as it stands; `incarnation` differs for one that was deleted and created again."""

    key: TopicKey
    incarnation: int
    created: Instant
    modified: Instant
    settings: TopicSettings
    subscriptions: int = 0
    waiting: int = 0
    """Copies in its hidden queues."""


class SubscriptionInfo(msgspec.Struct, frozen=True, gc=False):
    """The current state of a subscription."""

    topic: TopicKey
    name: str
    created: Instant
    modified: Instant
    settings: SubscriptionSettings


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


Topics = dict[TopicKey, LiveTopic]


def hidden_queue(topic: TopicKey, subscription: str) -> QueueKey:
    """The queue that holds a push subscription's copies. No protocol can name it, and no listing shows it."""
    name = f"{topic.name}/{subscription}"
    return QueueKey(topic.account, topic.region, f"{name}/" if name in SETTINGS_QUEUES else name)


def is_hidden(name: str) -> bool:
    """Whether a queue's name is one of `hidden_queue`."""
    return "/" in name


class Notification(msgspec.Struct, frozen=True, gc=False):
    """One published message, as a subscription gets it."""

    topic: TopicKey
    subscription: str
    message_id: str
    """Upper-case hex, as MNS returns it to the publisher."""
    body: str
    body_md5: str
    """Upper-case hex, of the body as it was published."""
    tag: str | None
    published: Instant


def render(notification: Notification, form: ContentFormat) -> str:
    """The body of a push or of a queue's message, in one of MNS's forms."""
    if form is ContentFormat.SIMPLIFIED:
        return notification.body
    fields = _fields(notification)
    if form is ContentFormat.JSON:
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    inner = "".join(f"<{name}>{_text(value)}</{name}>" for name, value in fields.items())
    return (
        f'<?xml version="1.0" encoding="utf-8"?><Notification xmlns="{NOTIFICATION_NAMESPACE}">{inner}</Notification>'
    )


class Copies:
    """One published message in one form for many subscriptions: the text is made once, and only the subscription's name
    differs."""

    def __init__(self, notification: Notification, form: ContentFormat) -> None:
        """The notification's own subscription name is ignored."""
        text = render(msgspec.structs.replace(notification, subscription=""), form)
        begin, self._escaped = _NAMES[form]
        at = text.index(begin) + len(begin)  # the first occurrence: text that users can choose comes later
        self._before, self._after = text[:at], text[at:]
        self._after_bytes = self._after.encode()
        self._md5 = md5(self._before.encode(), usedforsecurity=False)

    def of(self, subscription: str) -> tuple[str, bytes]:
        """The body for that subscription, and its MD5."""
        name = self._escaped(subscription)
        digest = self._md5.copy()
        digest.update(name.encode())
        digest.update(self._after_bytes)
        return f"{self._before}{name}{self._after}", digest.digest()


def _fields(notification: Notification) -> dict[str, Any]:
    fields = {
        "TopicOwner": notification.topic.account,
        "TopicName": notification.topic.name,
        "Subscriber": notification.topic.account,
        "SubscriptionName": notification.subscription,
        "MessageId": notification.message_id,
        "Message": notification.body,
        "MessageMD5": notification.body_md5,
        "MessageTag": notification.tag,
        "PublishTime": str(notification.published // 1_000),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _text(value: str) -> str:
    """Escape XML text, and carriage returns too: a parser reads a bare one as a line feed."""
    return escape(value, quote=False).replace("\r", "&#13;")


def _quoted(value: str) -> str:
    """The value as JSON writes it between quotes."""
    return json.dumps(value, ensure_ascii=False)[1:-1]


_NAMES: Final[dict[ContentFormat, tuple[str, Callable[[str], str]]]] = {
    ContentFormat.XML: ("<SubscriptionName>", _text),
    ContentFormat.JSON: ('"SubscriptionName":"', _quoted),
}
"""The text before the subscription's name in each form, and how the name is escaped."""
