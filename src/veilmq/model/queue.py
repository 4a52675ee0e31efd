"""A queue: its name, its settings, and what is known of it at a moment.

Strategy: the settings are the union of what the three clouds let an owner set, in one unit each, with SQS's defaults.
A protocol that has other defaults names them when it creates. What only a protocol understands (an access policy,
Azure metadata) is kept verbatim under `labels` and never read below the codecs.
"""

import re
from enum import StrEnum
from typing import Any, Final

import msgspec

from veilmq.model.instant import DAY_US, SECOND_US, Instant
from veilmq.model.plan import NO_PLAN, Adaptive, PlanState

FIFO_SUFFIX: Final = ".fifo"
"""Ends the names of FIFO queues, and of no others (SQS CreateQueue)."""
PRIORITY_MIN: Final = 1
"""Most urgent."""
PRIORITY_MAX: Final = 16
"""Least urgent (MNS SendMessage)."""
PRIORITY_DEFAULT: Final = 8
"""SQS and Azure send with this priority (MNS's default)."""


class QueueKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """What names a queue: account id of 12 digits, region, name, byte-exact."""

    account: str
    region: str
    name: str

    def __str__(self) -> str:
        return f"{self.account}/{self.region}/{self.name}"


_ALIAS: Final = re.compile(r"(?=.{3,63}\Z)[a-z0-9](?:-?[a-z0-9])*")


def is_alias(text: str) -> bool:
    """Whether the text is a name that every protocol allows, as an alias must be: Azure's rule is the closest."""
    return _ALIAS.fullmatch(text) is not None


class RedrivePolicy(msgspec.Struct, frozen=True, gc=False):
    """Where a message goes whose receive count would exceed `receive_count_max` (SQS RedrivePolicy, MNS DlqPolicy)."""

    target: QueueKey
    receive_count_max: int


class RedrivePermission(StrEnum):
    """Which queues may name this one as their dead-letter queue (SQS RedriveAllowPolicy)."""

    ALLOW_ALL = "allowAll"
    DENY_ALL = "denyAll"
    BY_QUEUE = "byQueue"


class RedriveAllowPolicy(msgspec.Struct, frozen=True, gc=False):
    """SQS RedriveAllowPolicy; `sources` counts only with BY_QUEUE."""

    permission: RedrivePermission
    sources: tuple[QueueKey, ...] = ()


class XmlBody(StrEnum):
    """How Azure and MNS clients' bodies are stored: as they come, or decoded from base64 (docs/azure.md)."""

    TEXT = "text"
    BASE64 = "base64"


class DeduplicationScope(StrEnum):
    """SQS DeduplicationScope and, through it, FifoThroughputLimit."""

    QUEUE = "queue"
    GROUP = "messageGroup"


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Everything an owner sets on a queue. Defaults are those of SQS."""

    visibility_timeout_us: int = 30 * SECOND_US
    delay_us: int = 0
    retention_us: int = 4 * DAY_US
    wait_us: int = 0
    message_bytes_max: int = 1_048_576
    redrive: RedrivePolicy | None = None
    redrive_allow: RedriveAllowPolicy | None = None
    fifo: bool = False
    content_deduplication: bool = False
    deduplication_scope: DeduplicationScope = DeduplicationScope.QUEUE
    throughput_per_group: bool = False
    xml_body: XmlBody = XmlBody.TEXT
    adaptive: Adaptive = Adaptive.SUGGEST
    alias: str | None = None
    """Another name for protocols in which the queue's own is not legal: see `is_alias`."""
    first_lease_min_us: int | None = None
    """The owner's leave to shorten first leases, down to this; None: they may only be lengthened."""
    receives_per_second_max: int | None = None
    """Messages that the queue hands out in a second, over all receivers; None: as many as there are."""
    labels: dict[str, str] = {}
    tags: dict[str, str] = {}


SettingsChange = dict[str, Any]
"""Field names of `QueueSettings` with their new values; what is not named stays (or is the default, on creation).

`labels` merges: a label that is not named stays, an empty value removes one.
"""


def with_change(settings: QueueSettings, change: SettingsChange) -> QueueSettings:
    """The settings after the change."""
    if "labels" in change:
        merged = settings.labels | change["labels"]
        change = change | {"labels": {name: value for name, value in merged.items() if value}}
    return msgspec.structs.replace(settings, **change)


def shown_name(info: "QueueInfo", allowed: re.Pattern[str]) -> str | None:
    """The name by which a protocol that allows such names knows the queue; None: not at all."""
    return info.key.name if allowed.fullmatch(info.key.name) else info.settings.alias


class QueueCounts(msgspec.Struct, frozen=True, gc=False):
    """How many messages of a queue are where. Dead ones that no sweep has met yet still count."""

    visible: int = 0
    delayed: int = 0
    in_flight: int = 0

    @property
    def total(self) -> int:
        """All messages that the queue holds."""
        return self.visible + self.delayed + self.in_flight


class QueueInfo(msgspec.Struct, frozen=True, gc=False):
    """A queue as it stands.

    `incarnation` differs for a queue that was deleted and created again under the same name.
    """

    key: QueueKey
    incarnation: int
    created: Instant
    modified: Instant
    settings: QueueSettings
    counts: QueueCounts
    plan: PlanState = NO_PLAN
