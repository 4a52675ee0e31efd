"""A queue: its name, settings and counts; and the plans of recommended first leases, with the rules to apply them.

Strategy: the settings are the union of what the three clouds let an owner set, in one unit each, with SQS's defaults. A
protocol with other defaults names them when it creates a queue. Data of one protocol alone (an access policy, Azure
metadata) is kept verbatim under `labels` and never read below the codecs.

A plan is data with two uses. Clients read it and name their leases themselves. For clients that name none, the server
may use it for the first lease, by `effective`: a pure function of the suggestion, the owner's limits, and the plan in
force. The visibility timeout that the protocols show never changes. See docs/pipeline.md, "Closed loop", and
docs/admin-api.md, "Queues".
"""

import re
from enum import StrEnum
from typing import Any, Final

import msgspec

from veilmq.model.instant import DAY_US, SECOND_US, Instant

LEASE_US_MAX: Final = 7 * DAY_US
LEASE_US_MIN: Final = SECOND_US
HYSTERESIS: Final = 0.2
"""A lease in force changes only if the new one differs by more than this fraction."""
TYPES_MAX: Final = 1_000
LEASE_SETTINGS: Final = ("adaptive", "first_lease_min_us", "visibility_timeout_us")
"""With these an owner decides about leases."""


class Adaptive(StrEnum):
    """What the server does with suggestions for a queue."""

    OFF = "off"
    """Keeps none."""
    SUGGEST = "suggest"
    """Shows them."""
    APPLY = "apply"
    """Uses them for receives that name no lease."""


class LeasePlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """First leases of a queue, in microseconds."""

    lease_us: int | None = None
    """For messages of no type named below; None: the queue's visibility timeout."""
    by_type: dict[str, int] = {}
    floor_us: int = 0
    """Lower bound of all leases: twice the longest interval at which a client was seen to extend."""
    why: str = ""
    """For people: the number of attempts behind it, and what it would cost."""
    made: Instant = Instant(0)

    def lease_of(self, kind: str | None) -> int | None:
        """The lease of a message of that type."""
        return self.lease_us if kind is None else self.by_type.get(kind, self.lease_us)


class PlanState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All plans of a queue."""

    suggested: LeasePlan | None = None
    """The plan published last."""
    applied: LeasePlan | None = None
    """The plan in force; None: the visibility timeout alone."""
    previous: LeasePlan | None = None
    """The plan that was in force before."""
    reverted: LeasePlan | None = None
    """The plan that was taken back last: one like it is not put in force again, unless the owner's settings change."""


NO_PLAN: Final = PlanState()


def effective(
    suggested: LeasePlan, applied: LeasePlan | None, visibility_timeout_us: int, minimum_us: int | None
) -> LeasePlan:
    """The plan that may be applied: only leases longer than the visibility timeout, unless the owner set a minimum."""

    def judged(lease_us: int, in_force_us: int | None) -> int:
        least_us = visibility_timeout_us if minimum_us is None else max(minimum_us, suggested.floor_us)
        lease_us = min(max(lease_us, least_us, LEASE_US_MIN), LEASE_US_MAX)
        near = in_force_us is not None and abs(lease_us - in_force_us) <= HYSTERESIS * in_force_us
        if near and in_force_us is not None and in_force_us >= least_us:
            return in_force_us
        return lease_us

    lease_us = suggested.lease_us
    by_type = {
        kind: judged(wanted_us, None if applied is None else applied.by_type.get(kind))
        for kind, wanted_us in suggested.by_type.items()
    }
    return LeasePlan(
        lease_us=None if lease_us is None else judged(lease_us, None if applied is None else applied.lease_us),
        by_type=by_type,
        floor_us=suggested.floor_us,
        why=suggested.why,
        made=suggested.made,
    )


def is_held_back(wanted: LeasePlan, plans: PlanState) -> bool:
    """Whether the plan would bring back what was taken back: no lease differs from that by more than `HYSTERESIS`."""
    before = plans.reverted
    if before is None or (wanted.lease_us is None) != (before.lease_us is None):
        return False

    def alike(one_us: int | None, other_us: int | None) -> bool:
        return one_us == other_us or abs((one_us or 0) - (other_us or 0)) <= HYSTERESIS * (other_us or 0)

    kinds = {*wanted.by_type, *before.by_type}
    return alike(wanted.lease_us, before.lease_us) and all(
        alike(wanted.lease_of(kind), before.lease_of(kind)) for kind in kinds
    )


def same_leases(one: LeasePlan | None, other: LeasePlan | None) -> bool:
    """Whether two plans give the same leases."""
    if one is None or other is None:
        return one is other
    return one.lease_us == other.lease_us and one.by_type == other.by_type


FIFO_SUFFIX: Final = ".fifo"
"""Ends the names of FIFO queues, and of no others (SQS CreateQueue)."""
PRIORITY_MIN: Final = 1
"""Most urgent."""
PRIORITY_MAX: Final = 16
"""Least urgent (MNS SendMessage)."""
PRIORITY_DEFAULT: Final = 8
"""SQS and Azure send with this priority (MNS's default)."""


class QueueKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The full name of a queue: account id of 12 digits, region, name, byte-exact."""

    account: str
    region: str
    name: str

    def __str__(self) -> str:
        return f"{self.account}/{self.region}/{self.name}"


_ALIAS: Final = re.compile(r"(?=.{3,63}\Z)[a-z0-9](?:-?[a-z0-9])*")


def is_alias(text: str) -> bool:
    """Whether every protocol allows the text as a name, as an alias requires; Azure's rule is the strictest."""
    return _ALIAS.fullmatch(text) is not None


def alias_key(key: QueueKey, alias: str) -> QueueKey:
    """The key of a queue's alias, in the queue's account and region."""
    return QueueKey(key.account, key.region, alias)


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
    """How far a plan may shorten first leases; None: it may only lengthen them."""
    receives_per_second_max: int | None = None
    """Messages that the queue delivers per second to all receivers; None: no limit."""
    labels: dict[str, str] = {}
    tags: dict[str, str] = {}


SettingsChange = dict[str, Any]
"""Field names of `QueueSettings` with new values; other fields stay (on creation: get the default).

`labels` is merged: labels that are not named stay; an empty value removes a label.
"""


def with_change(settings: QueueSettings, change: SettingsChange) -> QueueSettings:
    """The settings after the change."""
    if "labels" in change:
        merged = settings.labels | change["labels"]
        change = change | {"labels": {name: value for name, value in merged.items() if value}}
    return msgspec.structs.replace(settings, **change)


def shown_name(info: "QueueInfo", allowed: re.Pattern[str]) -> str | None:
    """The queue's name in a protocol that allows such names; None: the protocol cannot show the queue."""
    return info.key.name if allowed.fullmatch(info.key.name) else info.settings.alias


class QueueCounts(msgspec.Struct, frozen=True, gc=False):
    """Counts of a queue's messages by state. Expired messages of any state count until a sweep removes them."""

    visible: int = 0
    delayed: int = 0
    in_flight: int = 0

    @property
    def total(self) -> int:
        """All messages that the queue holds."""
        return self.visible + self.delayed + self.in_flight


TEMPLATES_MAX: Final = 20
"""Of a queue."""
TEMPLATES_OF_ACCOUNT_MAX: Final = 500
TEMPLATE_BYTES_MAX: Final = 64 * 1024
"""Of its JSON."""
TEMPLATES_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of all of an account."""


class Template(msgspec.Struct, frozen=True, gc=False):
    """A message that is kept under a name, to be sent again."""

    name: str
    message: bytes
    """JSON, as the admin port takes it in a send."""
    kept: Instant
    principal: str


class KeepTemplate(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Keep a message under a name, to be sent again; it replaces the one of that name. Outcome `TemplateKept`.

    Errors QueueMissing; ParameterInvalid("name") if the queue or its account has as many as it may, or as many bytes.
    """

    queue: QueueKey
    name: str
    message: bytes
    principal: str


class DropTemplate(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Delete such a message. Outcome `Recorded`; errors QueueMissing, ParameterInvalid("name") if it is not there."""

    queue: QueueKey
    name: str


class ListTemplates(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Those of the queue by name. Outcome `TemplatesListed`; errors QueueMissing."""

    queue: QueueKey


TemplateCommand = KeepTemplate | DropTemplate | ListTemplates


class QueueInfo(msgspec.Struct, frozen=True, gc=False):
    """The current state of a queue.

    `incarnation` differs for a queue that was deleted and created again under the same name.
    """

    key: QueueKey
    incarnation: int
    created: Instant
    modified: Instant
    settings: QueueSettings
    counts: QueueCounts
    plan: PlanState = NO_PLAN
    purged: Instant | None = None
    """When all messages were deleted last."""

    @property
    def version(self) -> str:
        """Another one after each change of the settings: `modified` grows with each, even in one microsecond."""
        return f"{self.incarnation}-{self.modified}"
