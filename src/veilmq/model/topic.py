"""A topic and its subscriptions: names, settings, what is known of them, and the forms of a notification.

Strategy: a subscription sends what is published to a queue, or pushes it to a URL from a hidden queue of its own, so
that both are sends and nothing else. A hidden queue's name holds a `/`, which no protocol's names may; a message in it
is the published body as it came, and its form is made when it is pushed. A queue that is the endpoint gets the form as
its message's body, made in the transaction of the publish. Source: docs/mns.md, "Topics and subscriptions".
"""

import json
from collections.abc import Callable
from enum import StrEnum
from hashlib import md5
from html import escape
from typing import Any, Final

import msgspec

from veilmq.model.instant import DAY_US, Instant
from veilmq.model.queue import QueueKey

NOTIFICATION_NAMESPACE: Final = "http://mns.aliyuncs.com/doc/v1/"
TOPIC_RETENTION_US: Final = DAY_US
"""How long a push is tried at most: what a topic keeps (MNS: one day)."""

SETTINGS_QUEUES: Final = frozenset({"azure/service", "mns/account"})
"""Hidden queues that are no subscription's: their labels are what a protocol keeps of an account."""


class TopicKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """What names a topic: account id of 12 digits, region, name, byte-exact. Topics and queues have separate names."""

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
    """When a push that failed is tried again (MNS NotifyStrategy): the schedules are push/'s."""

    BACKOFF = "BACKOFF_RETRY"
    EXPONENTIAL_DECAY = "EXPONENTIAL_DECAY_RETRY"


ATTEMPTS_MAX: Final = {RetryStrategy.BACKOFF: 4, RetryStrategy.EXPONENTIAL_DECAY: 177}
"""How often a push is tried, the first time included."""


class PushResult(StrEnum):
    """What became of one attempt to push."""

    DELIVERED = "delivered"
    FAILED = "failed"
    """Another attempt follows."""
    EXHAUSTED = "exhausted"
    """It was the last."""


class SubscriptionSettings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a subscription's copies go and how. Exactly one of `queue` and `url` is set."""

    endpoint: str
    """As the owner wrote it."""
    queue: QueueKey | None = None
    url: str | None = None
    content_format: ContentFormat = ContentFormat.XML
    strategy: RetryStrategy = RetryStrategy.BACKOFF
    filter_tag: str | None = None
    """Only messages with this tag; None: all."""
    dead_letter_queue: QueueKey | None = None
    """Where a push goes that was tried to the end, or expired; None: nowhere."""
    pushes_per_second_max: int | None = None
    """Attempts to push, retries included; None: no bound. Only with `url`: a queue's copies come with the publish."""


class TopicInfo(msgspec.Struct, frozen=True, gc=False):
    """A topic as it stands; `incarnation` differs for one that was deleted and created again."""

    key: TopicKey
    incarnation: int
    created: Instant
    modified: Instant
    settings: TopicSettings
    subscriptions: int = 0
    waiting: int = 0
    """Copies in the hidden queues of its pushes."""


class SubscriptionInfo(msgspec.Struct, frozen=True, gc=False):
    """A subscription as it stands."""

    topic: TopicKey
    name: str
    created: Instant
    modified: Instant
    settings: SubscriptionSettings


def hidden_queue(topic: TopicKey, subscription: str) -> QueueKey:
    """The queue in which a push subscription's copies wait. No protocol can name it, and no listing shows it."""
    name = f"{topic.name}/{subscription}"
    return QueueKey(topic.account, topic.region, f"{name}/" if name in SETTINGS_QUEUES else name)


def is_hidden(name: str) -> bool:
    """Whether a queue's name is one of `hidden_queue`."""
    return "/" in name


class Notification(msgspec.Struct, frozen=True, gc=False):
    """What a subscription is told of one published message."""

    topic: TopicKey
    subscription: str
    message_id: str
    """Upper-case hex, as MNS tells it to the publisher."""
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
    """What many subscriptions are told of one published message in one form: they differ by a name, and the rest of
    the text is made once."""

    def __init__(self, notification: Notification, form: ContentFormat) -> None:
        """The notification's own subscription does not count."""
        text = render(msgspec.structs.replace(notification, subscription=""), form)
        begin, self._escaped = _NAMES[form]
        at = text.index(begin) + len(begin)  # its first place: what anybody wrote freely comes behind it
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
    """A parser reads a bare carriage return as a line feed."""
    return escape(value, quote=False).replace("\r", "&#13;")


def _quoted(value: str) -> str:
    """As JSON has it between its quotes."""
    return json.dumps(value, ensure_ascii=False)[1:-1]


_NAMES: Final[dict[ContentFormat, tuple[str, Callable[[str], str]]]] = {
    ContentFormat.XML: ("<SubscriptionName>", _text),
    ContentFormat.JSON: ('"SubscriptionName":"', _quoted),
}
"""What stands before the subscription's name, and how that is written."""
