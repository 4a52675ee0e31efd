"""The inputs of `/api/v1`, as typed structs with ranges.

Strategy: msgspec checks types and ranges; its errors become ParameterInvalid with the path of the value. Unknown
members are refused, so that a misspelt setting is noticed. The ranges are the widest that any protocol allows, because
all protocols share a queue.

A filter of the history (`Wanted`) becomes `Chosen`, which is applied to each event's stored fields, before names are
joined or anything is written. Offsets count all events, so a reader continues at the same place whatever it filters
out.
"""

import re
from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from veilmq.model.errors import ParameterInvalid
from veilmq.model.events import Kind
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.message_type import TYPE_CHARACTERS_MAX
from veilmq.model.moves import JOB_RATE_MAX, MOVES_PER_SECOND_MAX, Act, Filter
from veilmq.model.settings.queue import TYPES_MAX, Adaptive, DeduplicationScope, QueueKey, RedrivePermission, XmlBody
from veilmq.store import View
from veilmq.store.reader import HOLD_S_MAX, MEASURES

_KINDS: Final = {kind.name.lower(): int(kind) for kind in Kind}
ENTRIES_MAX: Final = 100
WAIT_US_MAX: Final = 30 * SECOND_US
RATE_MAX: Final = 1_000_000
PAGE_MAX: Final = 1_000
TEXT_MAX: Final = 1_000
STEPS: Final = {"minute": (MINUTE_US, 60, 1_440), "hour": (HOUR_US, 24, 2_160)}
"""Of rollups: length, how many are shown by default and at most."""
INSTANT_MAX: Final = (1 << 53) - 1
_NAME: Final = r"^[A-Za-z0-9_-]{1,256}(\.fifo)?\Z"
_ACCOUNT: Final = r"^[0-9]{12}\Z"
ACCOUNT_OR_ALL: Final = r"^([0-9]{12}|\*)\Z"
_REGION: Final = r"^[a-z0-9-]{1,64}\Z"
QUEUE: Final = r"^(?:[0-9]{12}/[a-z0-9-]{1,64}/)?[A-Za-z0-9_-]{1,256}(\.fifo)?\Z"
_TYPE: Final = r"^(String|Number|Binary)(\..{1,240})?\Z"
_STATE: Final = r"^(visible|hidden)\Z"
PLACE: Final = r"^([0-9]{1,18}(-[0-9]{1,18})?)?\Z"
_TASKS: Final = r"^([0-9]{1,18}-[0-9a-f]{32})?\Z"
SEQUENCE: Final = r"^([0-9]{1,18})?\Z"
STATES: Final = ("visible", "delayed", "in flight", "quarantined")
_MESSAGE_STATE: Final = rf"^({'|'.join(STATES)}|in_flight)?\Z"
_MEASURE: Final = rf"^({'|'.join(MEASURES)})\Z"
_STEP: Final = r"^(minute|hour)\Z"
_START: Final = r"^([0-9]{1,18}|first|next|snapshot)\Z"
WORDS: Final = {
    _NAME: "Expected 1 to 256 letters, digits, `-` and `_`, for a FIFO queue with .fifo after them",
    _ACCOUNT: "Expected 12 digits",
    ACCOUNT_OR_ALL: "Expected 12 digits, or `*`",
    _REGION: "Expected 1 to 64 lower-case letters, digits and `-`",
    QUEUE: "Expected the name of a queue, or account/region/name",
    _TYPE: "Expected String, Number or Binary, with a dot and a label after it if you like",
    _STATE: "Expected visible or hidden",
    _MESSAGE_STATE: f"Expected one of {', '.join(STATES)}",
    **dict.fromkeys((PLACE, SEQUENCE, _TASKS), "Expected what the page before gave as `after`"),
    _MEASURE: f"Expected one of {', '.join(MEASURES)}",
    _STEP: "Expected minute or hour",
    _START: "Expected an offset, first, next or snapshot",
}
"""What each pattern allows, for error messages."""
Name = Annotated[str, Meta(pattern=_NAME)]
"""A name that some protocol allows: SQS up to 80 characters, Azure 63, MNS 120 (formerly 256)."""
Lease = Annotated[int, Meta(ge=0, le=7 * DAY_US)]
Delay = Annotated[int, Meta(ge=0, le=7 * DAY_US)]
Count = Annotated[int, Meta(ge=1, le=ENTRIES_MAX)]
Handle = Annotated[str, Meta(min_length=1, max_length=2_048)]
Account = Annotated[str, Meta(pattern=_ACCOUNT)]
Region = Annotated[str, Meta(pattern=_REGION)]
MessageState = Annotated[str, Meta(pattern=_MESSAGE_STATE)]
T = TypeVar("T")
_WHERE: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MEMBER: Final = re.compile(r"field `(?P<name>[^`]*)`")
_REGEX: Final = "matching regex "
_BOUND: Final = re.compile(r"Expected `(?:int|float)` (?P<sign>[<>])= (?P<bound>\d+)(?:\.0)?")
ENUMS: Final[dict[str, type[StrEnum]]] = {
    "permission": RedrivePermission,
    "deduplication_scope": DeduplicationScope,
    "xml_body": XmlBody,
    "adaptive": Adaptive,
    "act": Act,
}
"""The choices, by member."""
_UNITS: Final = (("d", DAY_US), ("h", HOUR_US), ("m", MINUTE_US), ("s", SECOND_US))
_WORDS_SHOWN: Final = {repr(pattern): words for pattern, words in WORDS.items()}
"""The same, by the patterns as msgspec's errors show them."""


def kinds_of(text: str) -> frozenset[int] | None:
    """Kinds from a comma-separated list; None for an empty text. Raises ParameterInvalid."""
    names = [name for each in text.split(",") if (name := each.strip().replace(" ", "_"))]
    for name in names:
        if name not in _KINDS:
            raise ParameterInvalid(parameter="kind", reason=f"{name!r} is none of {', '.join(sorted(_KINDS))}")
    return frozenset(_KINDS[name] for name in names) or None


class Wanted(NamedTuple):
    """The requested filter; None in a field: no filter."""

    kinds: frozenset[int] | None = None
    queue: str | None = None
    """A name in any account and region, or account/region/name; includes deleted queues."""
    message: bytes | None = None

    def chosen(self, view: View) -> "Chosen | None":
        """What decides about stored events; None if all are wanted."""
        if self == (None, None, None):
            return None
        queues = None
        if self.queue is not None:
            queues = frozenset(view.incarnations_named(*self.queue.split("/")))
        return Chosen(self.kinds, queues, self.message)


class Chosen(NamedTuple):
    """The filter with queues by incarnation."""

    kinds: frozenset[int] | None
    queues: frozenset[int] | None
    message: bytes | None

    def takes(self, kind: int, queue: int | None, message: bytes | None, detail: dict[str, Any] | None) -> bool:
        """Whether the event is wanted; an event that moves a message belongs to both queues."""
        if self.kinds is not None and kind not in self.kinds:
            return False
        if self.queues is not None and queue not in self.queues:
            target = detail.get("target") if detail else None
            if not isinstance(target, int) or target not in self.queues:
                return False
        if self.message is None or message == self.message:
            return True
        return detail is not None and detail.get("target_message") == self.message.hex()


class _Input(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Members of a JSON object, or of a query string."""


class Nothing(_Input):
    """No member at all."""


class KeyInput(_Input):
    """The three parts of a queue's path."""

    account: Account
    region: Region
    name: Name


class RedriveInput(_Input):
    """The dead-letter queue, in the queue's own account and region: its name, or account, region and name as shown."""

    target: Name | KeyInput
    receive_count_max: Annotated[int, Meta(ge=1, le=65_535)]


class RedriveAllowInput(_Input):
    """Which queues of the same account and region may name this one."""

    permission: RedrivePermission
    sources: Annotated[list[Name | KeyInput], Meta(max_length=10)] = []


class SettingsInput(_Input):
    """Settings of a queue; null removes a redrive policy."""

    visibility_timeout_us: Lease | UnsetType = UNSET
    delay_us: Delay | UnsetType = UNSET
    retention_us: Annotated[int, Meta(ge=MINUTE_US, le=15 * DAY_US)] | UnsetType = UNSET
    wait_us: Annotated[int, Meta(ge=0, le=WAIT_US_MAX)] | UnsetType = UNSET
    message_bytes_max: Annotated[int, Meta(ge=1_024, le=1_048_576)] | UnsetType = UNSET
    redrive: RedriveInput | UnsetType | None = UNSET
    redrive_allow: RedriveAllowInput | UnsetType | None = UNSET
    content_deduplication: bool | UnsetType = UNSET
    deduplication_scope: DeduplicationScope | UnsetType = UNSET
    throughput_per_group: bool | UnsetType = UNSET
    xml_body: XmlBody | UnsetType = UNSET
    alias: Annotated[str, Meta(max_length=63)] | UnsetType | None = UNSET
    adaptive: Adaptive | UnsetType = UNSET
    first_lease_min_us: Annotated[int, Meta(ge=SECOND_US, le=7 * DAY_US)] | UnsetType | None = UNSET
    receives_per_second_max: Annotated[int, Meta(ge=1, le=RATE_MAX)] | UnsetType | None = UNSET
    tags: Annotated[dict[str, str], Meta(max_length=50)] | UnsetType = UNSET


class ChangeInput(SettingsInput):
    """Settings to change, if the queue still has the version that the caller saw."""

    if_version: Annotated[str, Meta(min_length=1, max_length=64)] | UnsetType = UNSET


class CreateInput(SettingsInput):
    """Settings of a new queue; the others get their defaults."""

    fifo: bool | UnsetType = UNSET


class AttributeInput(_Input):
    """A message attribute; the value of a Binary one is base64."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    value: str
    type: Annotated[str, Meta(pattern=_TYPE)] = "String"


class MessageInput(_Input):
    """A message to send. Durations are in microseconds; null means the queue's own."""

    body: str
    delay_us: Delay | None = None
    ttl_us: Annotated[int, Meta(ge=SECOND_US)] | None = None
    priority: Annotated[int, Meta(ge=1, le=16)] | None = None
    group: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    deduplication_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    type: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    attributes: Annotated[list[AttributeInput], Meta(max_length=10)] = []


class SendInput(_Input):
    """Messages to send, independent of each other."""

    messages: Annotated[list[MessageInput], Meta(min_length=1, max_length=ENTRIES_MAX)]


class ReceiveInput(_Input):
    """How many to lease, for how long, and how long to wait for the first."""

    count: Count = 1
    lease_us: Lease | None = None
    wait_us: Annotated[int, Meta(ge=0, le=WAIT_US_MAX)] | None = None


class DeleteInput(_Input):
    """Handles of messages to delete."""

    handles: Annotated[list[Handle], Meta(min_length=1, max_length=ENTRIES_MAX)]


class ExtendInput(_Input):
    """Handles of leases to end `lease_us` from now; 0 releases."""

    handles: Annotated[list[Handle], Meta(min_length=1, max_length=ENTRIES_MAX)]
    lease_us: Lease


class PlanInput(_Input):
    """Learnt first leases: for all messages, and by type."""

    lease_us: Annotated[int, Meta(ge=SECOND_US, le=7 * DAY_US)] | None = None
    by_type: Annotated[
        dict[Annotated[str, Meta(max_length=TYPE_CHARACTERS_MAX)], Annotated[int, Meta(ge=SECOND_US, le=7 * DAY_US)]],
        Meta(max_length=TYPES_MAX),
    ] = {}
    floor_us: Annotated[int, Meta(ge=0, le=7 * DAY_US)] = 0
    why: Annotated[str, Meta(max_length=1_000)] = ""


class MoveInput(_Input):
    """Where the messages of a dead-letter queue go (null: back to their source), and how many per second."""

    destination: Name | None = None
    """In the same account and region."""
    rate_max: Annotated[int, Meta(ge=1, le=MOVES_PER_SECOND_MAX)] | None = None


class CancelMoveInput(_Input):
    """The task to end, by its id."""

    task: str


class PeekInput(_Input):
    """How many to look at."""

    count: Count = 10


class ListInput(_Input):
    """Which queues, after which name. Account `*` means all accounts and regions; then `after` is a key.

    A key as text is `account/region/name`.
    """

    account: Annotated[str, Meta(pattern=ACCOUNT_OR_ALL)] | None = None
    region: Region | None = None
    prefix: Annotated[str, Meta(max_length=256)] = ""
    after: Annotated[str, Meta(max_length=320)] = ""
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_MAX


class MovesInput(ListInput):
    """Tasks of which queues, after which page."""

    after: Annotated[str, Meta(pattern=_TASKS)] = ""


class QuarantineInput(ListInput):
    """Damaged messages of which queues, after which page."""

    after: Annotated[str, Meta(pattern=SEQUENCE)] = ""
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 100


class DropInput(_Input):
    """Ids of messages to delete from quarantine."""

    messages: Annotated[list[str], Meta(min_length=1, max_length=ENTRIES_MAX)]


class FilterInput(_Input, omit_defaults=True):
    """Which messages of a queue."""

    type: str | None = None
    group: str | None = None
    age_us_min: Annotated[int, Meta(ge=0, le=INSTANT_MAX)] = 0
    receives_min: Annotated[int, Meta(ge=0, le=INSTANT_MAX)] = 0
    text: Annotated[str, Meta(min_length=1, max_length=TEXT_MAX)] | None = None
    """In the body."""

    @property
    def filter(self) -> Filter:
        """The same for the store."""
        return Filter(
            type=self.type,
            group=self.group,
            age_us_min=self.age_us_min,
            receives_min=self.receives_min,
            text=self.text,
        )


class PageInput(FilterInput):
    """A page of a queue's messages: the visible ones, or those delayed or in flight; only those that match."""

    state: Annotated[str, Meta(pattern=_STATE)] = "visible"
    after: Annotated[str, Meta(pattern=PLACE)] = ""
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 100


class JobInput(_Input):
    """What to do to all messages of a queue that match."""

    act: Act
    queue: Name | KeyInput
    destination: Name | KeyInput | None = None
    """In the same account and region."""
    filter: FilterInput = msgspec.field(default_factory=FilterInput)
    rate: Annotated[int, Meta(ge=1, le=JOB_RATE_MAX)] | None = None
    dry_run: bool = False


class SpanInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename={"start": "from", "end": "to"}):
    """Minutes or hours that begin from `from` on and before `to` (default: up to now)."""

    start: Annotated[int, Meta(ge=0, le=INSTANT_MAX)] | None = None
    end: Annotated[int, Meta(ge=0, le=INSTANT_MAX)] | None = None

    def numbers(self, now: int, step: str, count: int, named: str) -> range:
        """Numbers of the minutes or hours since 1970; without `from`, the last `count`. named: the member that gave the
        count. Raises ParameterInvalid if the span is empty or too long."""
        step_us, _, most = STEPS[step]
        end = min(now // step_us, (now if self.end is None else self.end - 1) // step_us) + 1
        start = end - count if self.start is None else self.start // step_us
        if end <= start or (self.start is not None and self.end is not None and self.end <= self.start):
            raise ParameterInvalid(parameter="from", reason="it is not before `to` and now")
        if end - start > most:
            parameter = named if self.start is None else "from"
            raise ParameterInvalid(parameter=parameter, reason=f"at most {most} {step}s are shown at once")
        return range(start, end)


class RollupsInput(SpanInput, kw_only=True):
    """Minutes or hours of a queue; without `from` the last `limit` of them (default: 60 or 24)."""

    step: Annotated[str, Meta(pattern=_STEP)] = "minute"
    limit: Annotated[int, Meta(ge=1, le=2_160)] | None = None

    def span(self, now: int) -> range:
        """See `numbers`."""
        return self.numbers(now, self.step, self.limit or STEPS[self.step][1], "limit")


class WorstInput(_Input):
    """How many of the worst queues by what, of which account (`*`: all) and region (default: all)."""

    by: Annotated[str, Meta(pattern=_MEASURE)] = "oldest"
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 20
    account: Annotated[str, Meta(pattern=ACCOUNT_OR_ALL)] | None = None
    region: Region | None = None


class EventsInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename={"start": "from"}):
    """Events of `limit` offsets from `from` on (an offset, `first`, `snapshot` or `next`); wait up to `follow` s.

    hold: protect what comes from there on against trimming for so many seconds. Filters: `queue` (a name, or
    account/region/name), `kind` (several with commas between), `message`.
    """

    start: Annotated[str, Meta(pattern=_START)] = "first"
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    follow: Annotated[float, Meta(ge=0, le=60)] = 0.0
    hold: Annotated[float, Meta(ge=0, le=HOLD_S_MAX)] = 0.0
    queue: Annotated[str, Meta(pattern=QUEUE)] | None = None
    kind: Annotated[str, Meta(max_length=1_000)] = ""
    message: str | None = None

    def chosen(self) -> Wanted:
        """The filter of these events. Raises ParameterInvalid."""
        message = None if self.message is None else message_id(self.message, "message")
        return Wanted(kinds_of(self.kind), self.queue, message)


class TraceInput(_Input):
    """How many of the events that no index covers are searched, newest first."""

    scan: Annotated[int, Meta(ge=1, le=20_000_000)] = 2_000_000


class FindInput(TraceInput):
    """One message by its id."""

    bodies: bool = False


class SendsInput(TraceInput, kw_only=True):
    """Messages by a deduplication id, of all queues or of one (a name, or account/region/name)."""

    deduplication_id: Annotated[str, Meta(min_length=1, max_length=128)]
    queue: Annotated[str, Meta(pattern=QUEUE)] | None = None


def decode(raw: bytes, shape: type[T]) -> T:
    """The JSON object in a body; an empty body is an empty object. Raises ParameterInvalid."""
    try:
        return msgspec.json.decode(raw or b"{}", type=shape)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ParameterInvalid(parameter="body", reason=f"not JSON: {error}") from None


def convert(members: Any, shape: type[T]) -> T:
    """Convert the members of a query string, whose values are all text. Raises ParameterInvalid."""
    try:
        return msgspec.convert(members, type=shape, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def queue_key(account: str, region: str, name: str) -> QueueKey:
    """The queue that a path names. Raises ParameterInvalid for an impossible name."""
    checked = convert({"account": account, "region": region, "name": name}, KeyInput)
    return QueueKey(checked.account, checked.region, checked.name)


def message_id(text: str, parameter: str = "message_id") -> bytes:
    """The id in 32 hexadecimal digits, with or without the hyphens of a UUID. Raises ParameterInvalid."""
    digits = text.replace("-", "")
    if not re.fullmatch(r"[0-9a-fA-F]{32}", digits):
        raise ParameterInvalid(parameter=parameter, reason="32 hexadecimal digits, or a UUID, are needed")
    return bytes.fromhex(digits)


def _invalid(text: str) -> ParameterInvalid:
    """msgspec's message, split into the value's path and the problem."""
    found = _WHERE.match(text)
    assert found is not None
    what, path = found["what"], found["path"] or ""
    member = _MEMBER.search(what)
    if member is not None:
        path = f"{path}.{member['name']}" if path else member["name"]
    reason = _WORDS_SHOWN.get(what.partition(_REGEX)[2]) or _bound(what, path) or _choice(what, path) or what
    return ParameterInvalid(parameter=path or "body", reason=reason)


def _choice(what: str, path: str) -> str | None:
    """The message with the possible choices."""
    if not what.startswith("Invalid enum value "):
        return None
    return f"{what}: expected one of {', '.join(ENUMS[path.rpartition('.')[2]])}"


def _bound(what: str, path: str) -> str | None:
    """The message with the range in words; a duration also as people write it, such as `30d`."""
    found = _BOUND.fullmatch(what)
    if found is None:
        return None
    words, bound = f"Expected {'at most' if found['sign'] == '<' else 'at least'}", int(found["bound"])
    if not path.endswith("_us") or not bound:
        return f"{words} {bound}"
    exact = f"{bound} microseconds"
    shown = next((f"{bound // unit_us}{unit} ({exact})" for unit, unit_us in _UNITS if bound % unit_us == 0), exact)
    return f"{words} {shown}"
