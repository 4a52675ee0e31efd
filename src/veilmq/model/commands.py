"""The commands of the engine.

Strategy: a difference between clouds is a named field (`rotate`, `after_expiry`, `lease_total_us_max`); nothing below
the protocols asks which protocol it is. A wire batch is a tuple of commands. All are plain structs that could cross a
process boundary. `None` for a duration means the queue's own setting.
"""

from enum import IntEnum, StrEnum
from typing import Any, Final

import msgspec

from veilmq.model.instant import Instant
from veilmq.model.messages import NO_EXTRAS, Extras, Report
from veilmq.model.moves import Act, Filter
from veilmq.model.settings.access import SessionCommand, Share
from veilmq.model.settings.queue import PRIORITY_DEFAULT, LeasePlan, QueueKey, SettingsChange, TemplateCommand
from veilmq.model.settings.topic import SubscriptionSettings, TopicKey

CLIENT_NAME_CHARACTERS_MAX: Final = 256
COMMAND_ID_CHARACTERS_MAX: Final = 128


class Origin(msgspec.Struct, frozen=True, gc=False):
    """Who sent a command, and how; kept with every event."""

    protocol: str
    """`sqs`, `veil`, `azure`, `mns`, `admin`, `embedded` or `server`."""
    principal: str
    """The access key, SAS or account that was verified."""
    client: str = ""
    """User agent, cut at `CLIENT_NAME_CHARACTERS_MAX` characters."""


SERVER: Final = Origin("server", "server")
"""The origin of the server's own commands."""


class AfterExpiry(StrEnum):
    """Whether a handle still works after its lease has ended, if nobody else received the message."""

    ALLOW = "allow"
    REFUSE = "refuse"


class LeaseSource(IntEnum):
    """What decided a lease's length."""

    QUEUE = 1
    RECEIVE = 2
    EXTEND = 3
    PLAN = 4


class Command(msgspec.Struct, kw_only=True, gc=False):
    """Fields of all commands."""

    queue: QueueKey
    origin: Origin


class Send(Command, tag=True, kw_only=True, gc=False):
    """Append a message. Outcome `Sent`; errors QueueMissing, MessageTooLarge, DiskLow, ParameterInvalid.

    ParameterInvalid: for `from_xml` with a body that does not decode; for `must_appear` with a delay at least as long
    as the time to live; on a FIFO queue for a message without a group or deduplication id, or with its own delay.
    """

    body: str
    md5: bytes
    """MD5 of the body in UTF-8, 16 bytes."""
    size_bytes: int
    """What counts against the queue's limit: body, attribute names, types and values."""
    priority: int = PRIORITY_DEFAULT
    delay_us: int | None = None
    ttl_us: int | None = None
    """Own time to live; None: the queue's retention of the day."""
    extras: Extras = NO_EXTRAS
    wants_handle: bool = False
    """Return a handle of attempt 0 (Azure's put, MNS's delayed send)."""
    from_xml: bool = False
    """The body came in XML: a queue whose `xml_body` is base64 decodes it, and refuses a body that does not decode."""
    must_appear: bool = False
    """Refuse a message that would expire before it becomes visible (Azure's put)."""


class Receive(Command, tag=True, kw_only=True, gc=False):
    """Lease up to `count_max` messages. Outcome `Received`, empty if none; errors QueueMissing, InFlightFull,
    RateExceeded, AttemptNotRetryable."""

    count_max: int = 1
    lease_us: int | None = None
    wait_us: int | None = None
    """How long the engine may park it; None: the queue's `wait_us`, 0: never."""
    in_flight_max: int | None = None
    """The protocol's cap on messages in flight in the queue. At the cap, a receive that may wait, or from a FIFO queue,
    gets no message instead of an error."""
    attempt_id: str | None = None
    """SQS ReceiveRequestAttemptId."""


class Extend(Command, tag=True, kw_only=True, gc=False):
    """Set the end of a lease to `lease_us` from now; 0 releases. Outcome `Extended`.

    Errors QueueMissing, ReceiptInvalid, LeaseError; ParameterInvalid("lease_us") beyond `lease_total_us_max`;
    MessageTooLarge and ParameterInvalid("body"), as of `Send`.

    `arrived` is the instant at which the server began to read the request: a lease that ended after it was in time.
    """

    handle: str
    lease_us: int
    arrived: Instant
    after_expiry: AfterExpiry = AfterExpiry.REFUSE
    rotate: bool = False
    lease_total_us_max: int | None = None
    """Cap on the lease's end, counted from the grant (SQS: 12 h)."""
    message_id: bytes | None = None
    """Must match if it is given (Azure)."""
    body: str | None = None
    """Replaces the body (Azure Update Message, a worker's checkpoint); with its `md5` and `size_bytes`."""
    md5: bytes = b""
    size_bytes: int = 0
    from_xml: bool = False
    """As of `Send`."""
    report: Report | None = None
    """Why the sender extends, if it says so."""


class Delete(Command, tag=True, kw_only=True, gc=False):
    """Delete the message that a handle names. Outcome `Deleted`; errors QueueMissing, ReceiptInvalid, LeaseError."""

    handle: str
    arrived: Instant
    after_expiry: AfterExpiry = AfterExpiry.ALLOW
    message_id: bytes | None = None


class Undeliver(Command, tag=True, kw_only=True, gc=False):
    """The answer with these handles reached no client: release them at once. Outcome `Undelivered`."""

    handles: tuple[str, ...]


class CreateQueue(Command, tag=True, kw_only=True, gc=False):
    """Create a queue, or find the same one. Outcome `QueueCreated`.

    Errors QueueExists, QueueDeletedRecently, ParameterInvalid, RedriveRefused, QueuesFull, DiskLow.

    An existing queue is the same if the settings in `change` have those values; with `compare_all`, if all its settings
    equal what creation would set.
    """

    change: SettingsChange = {}
    defaults: SettingsChange = {}
    """Settings for creation that `change` does not name; never compared (Azure's retention of 7 days)."""
    compare_all: bool = False
    cooldown_us: int = 0


class ChangeQueue(Command, tag=True, kw_only=True, gc=False):
    """Set some settings. Outcome `QueueChanged`.

    Errors QueueMissing, ParameterInvalid, RedriveRefused, QueueExists (of the alias).
    """

    change: SettingsChange
    expected: SettingsChange = {}
    """Change nothing unless these settings have these values (`labels` and `tags`: all of them)."""
    if_version: str | None = None
    """Change nothing unless this is the queue's version (`QueueInfo.version`)."""
    own_dead_letters: bool = True
    """Whether the queue may become its own dead-letter queue, as SQS lets it and MNS does not."""


class DeleteQueue(Command, tag=True, kw_only=True, gc=False):
    """Delete the queue with all its messages. Outcome `QueueDeleted`; errors QueueMissing."""


class PurgeQueue(Command, tag=True, kw_only=True, gc=False):
    """Delete all messages, in flight and delayed ones too. Outcome `Purged`; errors QueueMissing, PurgeInProgress."""

    cooldown_us: int = 0


class DropQuarantined(Command, tag=True, kw_only=True, gc=False):
    """Delete a damaged message from quarantine. Outcome `Deleted`; errors QueueMissing, ParameterInvalid("messages")
    if it is not there."""

    message: bytes
    """Its id."""


class SuggestPlan(Command, tag=True, kw_only=True, gc=False):
    """Suggest first leases that were learnt from the history. Outcome `QueueChanged`.

    Errors QueueMissing, CapabilityMissing (the queue's `adaptive` is off).
    """

    plan: LeasePlan


class RevertPlan(Command, tag=True, kw_only=True, gc=False):
    """Apply the previous plan again; see `PlanState.reverted`. Outcome `QueueChanged`; errors QueueMissing."""

    why: str = ""
    made: Instant | None = None
    """Change nothing unless the plan in force was made then: a repeated call does not undo the first."""


class DescribeQueue(Command, tag=True, kw_only=True, gc=False):
    """Settings and counts. Outcome `QueueDescribed`; errors QueueMissing."""


class ListQueues(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """The queues of an account and region by name; with account None, all (admin). Outcome `QueuesListed`."""

    origin: Origin
    account: str | None
    region: str | None
    prefix: str = ""
    after: str = ""
    """Only names greater than this one; with account None, only keys as text (`account/region/name`)."""
    count_max: int = 1_000
    names: str | None = None
    """A regular expression of names that the protocol allows. A queue with another name is listed by its alias (if
    `by_alias`), or not at all. None: every queue by its own name."""
    by_alias: bool = True
    granted: tuple[str, ...] | None = None
    """Of one account only the queues whose own names match one of these shell patterns. None: all."""
    dead_letter_target: QueueKey | None = None
    """Only queues whose redrive policy names this one (SQS ListDeadLetterSourceQueues)."""


class Peek(Command, tag=True, kw_only=True, gc=False):
    """Look at visible messages without a lease: a query, answered from committed state, never parked, that changes
    nothing. Outcome `Received` with empty handles; errors QueueMissing."""

    count_max: int = 1


class Operate(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Commands of an operator, to run once, with an event that says who asked for what. Outcome `Operated`.

    If an outcome is kept under this id and principal, nothing runs and that is the answer.
    """

    origin: Origin
    id: str
    """Up to `COMMAND_ID_CHARACTERS_MAX` visible ASCII characters."""
    keeps: bool
    """Whether to keep the outcome. False: the id is the server's own, so nobody can repeat the command."""
    digest: bytes
    """Of what was asked. Another one under the same id is refused."""
    act: str
    asked: dict[str, Any]
    """For the history; nothing secret."""
    commands: tuple[Any, ...]
    """Of one kind; no `Receive`. Empty: nothing runs, and the outcome says whether the command ran before."""


class Sweep(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """One bounded step of cleanup: ended leases and delays, expired messages, old history. Outcome `Swept`."""

    steps_max: int = 256


class CheckClock(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Ask how far the expiry clock is held back, or say that the machine's clock is right. Outcome `ClockChecked`.

    Accepting lets the expiry clock catch up with wall time: messages and history that only a step of the clock kept
    expire.
    """

    accept: bool = False
    ahead_us: int = 0
    """How far the lease clock is ahead of wall time: the expiry clock stays that far behind it."""


class RecordPush(Command, tag=True, kw_only=True, gc=False):
    """Append one attempt to push a message of a hidden queue to the history. Outcome `Recorded`."""

    message: bytes
    sequence: int
    attempt: int
    status: int | None
    """The status that the endpoint answered; None: no answer."""
    error: str | None
    took_us: int


class RecordPeek(Command, tag=True, kw_only=True, gc=False):
    """Append to the history that somebody reads the body of a message by its id. Outcome `Recorded`."""

    message: bytes
    sequence: int


class RecordPolls(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Append the engine's poll counts of one minute to the history. Outcome `Recorded`."""

    polls: tuple["PollCount", ...]


class PollCount(msgspec.Struct, frozen=True, gc=False):
    """Receives of one queue and principal in one minute."""

    queue: QueueKey
    origin: Origin
    receives: int
    empty: int
    refused: int
    """Receives that could not wait because of a cap."""


class TopicCommand(msgspec.Struct, kw_only=True, gc=False):
    """Fields of all commands on one topic."""

    topic: TopicKey
    origin: Origin


class CreateTopic(TopicCommand, tag=True, kw_only=True, gc=False):
    """Create a topic, or find the same one (all settings compared). Outcome `TopicCreated`.

    Errors TopicExists, TopicsFull, DiskLow.
    """

    change: SettingsChange = {}


class ChangeTopic(TopicCommand, tag=True, kw_only=True, gc=False):
    """Set some settings. Outcome `TopicDescribed`; errors TopicMissing."""

    change: SettingsChange


class DeleteTopic(TopicCommand, tag=True, kw_only=True, gc=False):
    """Delete the topic, its subscriptions and its waiting pushes. Outcome `Deleted`; errors TopicMissing."""


class DescribeTopic(TopicCommand, tag=True, kw_only=True, gc=False):
    """Settings and counts. Outcome `TopicDescribed`; errors TopicMissing."""


class ListTopics(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """The topics of an account and region by name; the fields are as in ListQueues. Outcome `TopicsListed`."""

    origin: Origin
    account: str
    region: str
    prefix: str = ""
    after: str = ""
    count_max: int = 1_000
    granted: tuple[str, ...] | None = None


class Publish(TopicCommand, tag=True, kw_only=True, gc=False):
    """Send a copy to every subscription whose filter tag matches, atomically. Outcome `Published`.

    Errors TopicMissing, MessageTooLarge, DiskLow. The tag is in `extras`.
    """

    body: str
    md5: bytes
    """MD5 of the body in UTF-8, 16 bytes."""
    size_bytes: int
    extras: Extras = NO_EXTRAS


class Subscribe(TopicCommand, tag=True, kw_only=True, gc=False):
    """Add a subscription, or find the same one. Outcome `Subscribed`.

    Errors TopicMissing, SubscriptionExists, SubscriptionsFull, AccountSubscriptionsFull; QueueMissing or
    ParameterInvalid("queue") if its queue is missing or takes only smaller messages than the topic; QueueMissing if its
    dead-letter queue is missing; with a URL also the errors of `CreateQueue`.
    """

    name: str
    settings: SubscriptionSettings


class ChangeSubscription(TopicCommand, tag=True, kw_only=True, gc=False):
    """Set some settings; the endpoint stays. Outcome `SubscriptionDescribed`.

    Errors TopicMissing, SubscriptionMissing; QueueMissing, ParameterInvalid or RedriveRefused for settings that a
    push's hidden queue cannot have.
    """

    name: str
    change: SettingsChange


class Unsubscribe(TopicCommand, tag=True, kw_only=True, gc=False):
    """Remove a subscription and its waiting pushes. Outcome `Deleted`.

    Errors TopicMissing, SubscriptionMissing.
    """

    name: str


class DescribeSubscription(TopicCommand, tag=True, kw_only=True, gc=False):
    """One subscription. Outcome `SubscriptionDescribed`; errors TopicMissing, SubscriptionMissing."""

    name: str


class ListSubscriptions(TopicCommand, tag=True, kw_only=True, gc=False):
    """The subscriptions of a topic by name. Outcome `SubscriptionsListed`; errors TopicMissing."""

    prefix: str = ""
    after: str = ""
    count_max: int = 1_000


class StartMove(Command, tag=True, kw_only=True, gc=False):
    """Start moving the messages of `queue`, which must be a dead-letter queue. Outcome `MoveStarted`.

    Errors QueueMissing (of either queue), ParameterInvalid("source") if it is no dead-letter queue or a task is already
    running there, ParameterInvalid("destination") if it is the source or of another kind; MovesFull.
    """

    destination: QueueKey | None = None
    """None: each message goes back to the queue that dead-lettered it."""
    rate_max: int | None = None
    """Messages a second, 1 to `MOVES_PER_SECOND_MAX`; None: as fast as that."""


class CancelMove(Command, tag=True, kw_only=True, gc=False):
    """Cancel a task of `queue`; messages moved so far stay moved. Outcome `MoveCancelled`; errors QueueMissing."""

    task: bytes


class ListMoves(Command, tag=True, kw_only=True, gc=False):
    """The latest tasks of `queue`, newest first. Outcome `MovesListed`; errors QueueMissing."""

    count_max: int = 1


class StartJob(Command, tag=True, kw_only=True, gc=False):
    """Start a job on the messages of `queue` that the filter matches. Outcome `JobStarted`.

    Errors QueueMissing (of either queue), ParameterInvalid (what does not go together; another job is running there).
    """

    act: Act
    destination: QueueKey | None = None
    filter: Filter = Filter()
    rate_max: int | None = None
    """Messages a second to act on, 1 to `JOB_RATE_MAX`; None: `JOB_RATE_DEFAULT`."""
    dry_run: bool = False


class CancelJob(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Cancel a job; what it did stays done. Outcome `JobCancelled`."""

    origin: Origin
    job: bytes


QueueCommand = (
    Send
    | Receive
    | Extend
    | Delete
    | Undeliver
    | CreateQueue
    | ChangeQueue
    | DeleteQueue
    | PurgeQueue
    | DropQuarantined
    | DescribeQueue
    | SuggestPlan
    | RevertPlan
)
AnyTopicCommand = (
    CreateTopic
    | ChangeTopic
    | DeleteTopic
    | DescribeTopic
    | ListTopics
    | Publish
    | Subscribe
    | ChangeSubscription
    | Unsubscribe
    | DescribeSubscription
    | ListSubscriptions
)
MoveCommand = StartMove | CancelMove | ListMoves | StartJob | CancelJob
UpkeepCommand = Sweep | CheckClock | RecordPeek | RecordPolls | RecordPush | SessionCommand | TemplateCommand | Share
AnyCommand = Operate | QueueCommand | MoveCommand | ListQueues | Peek | UpkeepCommand | AnyTopicCommand
