"""The outcomes of commands. Errors (model/errors.py) are outcomes too and are returned instead of these.

Strategy: one struct per command, with everything that any protocol shows of it, in the engine's units.
"""

from typing import Any

import msgspec

from veilmq.model.errors import VeilError
from veilmq.model.instant import Instant
from veilmq.model.messages import Delivery
from veilmq.model.moves import JobInfo, MoveInfo
from veilmq.model.settings.queue import QueueInfo, QueueKey, Template, XmlBody
from veilmq.model.settings.topic import SubscriptionInfo, TopicInfo


class Result(msgspec.Struct, gc=False):
    """What a command has done; an error stands in its place."""


class Sent(Result):
    """The message is durable."""

    id: bytes
    sequence: int
    sent: Instant
    visible: Instant
    expires: Instant
    handle: str = ""
    """Handle of attempt 0, if asked for."""
    duplicate: bool = False
    """Absorbed by deduplication: id and sequence are the first message's."""


class Received(Result):
    """Messages in delivery order; empty if there was none."""

    messages: list[Delivery]
    wait_us: int = 0
    """How long an empty receive may wait, by the command or the queue."""
    xml_body: XmlBody = XmlBody.TEXT
    """How XML protocols write the bodies of this queue."""
    capped: bool = False
    """The receive's own cap on messages in flight limited it: there may be messages for others."""
    cut: bool = False
    """Nothing was looked for, because the batch had delivered all the bytes that it may: try again in the next one."""
    waited_us: int = 0
    """For how long the receive had waited when its messages were granted, by the clock of whoever carried it out."""


class Extended(Result):
    """The lease's new end, and the handle to use next (the same one where handles do not rotate)."""

    handle: str
    due: Instant


class Deleted(Result):
    """The message is gone for good."""


class Undelivered(Result):
    """How many of the handles were still current."""

    released: int


class QueueCreated(Result):
    """The queue exists; `created` is False if it did before."""

    info: QueueInfo
    created: bool


class QueueChanged(Result):
    """The queue after the command."""

    info: QueueInfo
    changed: bool = True
    """False: a setting did not have the expected value, or the queue has another version, and nothing was changed."""


class QueueDeleted(Result):
    """How many messages were deleted with it."""

    count: int


class Purged(Result):
    """How many messages were deleted."""

    count: int


class TemplateKept(Result):
    """new: there was none of that name."""

    new: bool


class TemplatesListed(Result):
    """All of a queue, by name."""

    templates: list[Template]


class QueueDescribed(Result):
    """The queue as it stands."""

    info: QueueInfo
    is_dead_letter_queue: bool = True
    """Whether a queue, hidden or not, names it for its dead letters; True of an owner whose release does not say."""


class QueuesListed(Result):
    """Queues by name; `more` if others follow the last one."""

    queues: list[QueueInfo]
    more: bool


class Swept(Result):
    """Rows touched; `more` if the bound cut the work short."""

    steps: int
    more: bool
    unhurried: bool = False
    """A snapshot of the history is being taken: more work comes soon, but none at once."""


class ClockChecked(Result):
    """How far the expiry clock is behind the lease clock, and how much of that the command has just accepted."""

    held_us: int
    accepted_us: int


class Recorded(Result):
    """The history has recorded it."""


class Shared(Result):
    """The value that there is now."""

    value: bytes
    """May be a secret."""

    def __repr__(self) -> str:
        return "Shared()"


class MoveStarted(Result):
    """The task runs until it is done."""

    info: MoveInfo


class MoveCancelled(Result):
    """The task's current state; None if the queue has no such task. `cancelled` is False if it had ended before."""

    info: MoveInfo | None
    cancelled: bool


class MovesListed(Result):
    """Tasks, newest first."""

    tasks: list[MoveInfo]


class JobStarted(Result):
    """The job runs until it is done; a purge is done already."""

    info: JobInfo


class JobCancelled(Result):
    """The job's current state; None if there is no such job. `cancelled` is False if it had ended before."""

    info: JobInfo | None
    cancelled: bool


class Operated(Result):
    """The outcomes of an operator's commands, now or when the command was first carried out."""

    outcomes: list[Any]
    repeated: bool = False
    """Nothing ran: the command was carried out before."""
    mismatch: bool = False
    """Nothing ran: the id is another command's."""


class TopicCreated(Result):
    """The topic exists; `created` is False if it did before."""

    info: TopicInfo
    created: bool


class TopicDescribed(Result):
    """The topic as it stands."""

    info: TopicInfo


class TopicsListed(Result):
    """Topics by name; `more` if others follow the last one."""

    topics: list[TopicInfo]
    more: bool


class Published(Result):
    """The message is durable in every queue that gets it."""

    id: bytes
    """16 bytes: the message's id in its notifications; each copy has one of its own."""
    published: Instant
    copies: int


class Subscribed(Result):
    """The subscription exists; `created` is False if it did before."""

    info: SubscriptionInfo
    created: bool


class SubscriptionDescribed(Result):
    """The subscription as it stands."""

    info: SubscriptionInfo


class SubscriptionsListed(Result):
    """Subscriptions by name; `more` if others follow the last one."""

    subscriptions: list[SubscriptionInfo]
    more: bool


Outcome = Result | VeilError


class Applied(msgspec.Struct, gc=False):
    """A batch that a store applied: its instant, and one outcome per command, in order.

    `visible` and `next_due` are only hints for waking parked receives.
    """

    at: Instant
    outcomes: list[Outcome]
    wrote: bool
    """False: nothing to commit."""
    visible: dict[QueueKey, int] = {}
    """How many messages became visible, by queue."""
    next_due: Instant | None = None
    """No later than the earliest instant at which a lease or delay ends; None: nothing is hidden."""
