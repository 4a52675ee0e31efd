"""The Azure adapter, through azure-storage-queue: an account of Azure Queue Storage, or of a service with its protocol,
its queues, and their settings. calls.py makes the calls, converts messages, and alone handles azure.core's exceptions.

Strategy: only a receive is a batch in this service, so other batches are single requests, a few at a time. There is no
long poll, so waiting is polling. The service has whole seconds: fractions are rounded up, but `lease_end` is computed
from what was asked. Source: Queue Storage REST API; "Scalability and performance targets".

The account: a thin layer over a QueueServiceClient. The status of Create Queue shows whether the queue existed, and the
service compares all metadata. The port compares only what the template names, so after a refused creation we read the
metadata. Source: "Create Queue", "List Queues".

Settings, kept in a queue's metadata because Queue Storage has none: what a template names is stored as `veilmq_*`
metadata, and every client of this adapter uses it: for a receive without a lease, or a send without a delay or time to
live. It is read when the queue is opened and again after a minute. Other clients of the queue do not know it. Metadata
that cannot be read counts as not set, because anybody may write it. A creation also stores a unique incarnation, so
that a queue that was deleted and created again differs from its predecessor.
"""

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar
from uuid import uuid4

import msgspec

from veilmq.client.adapters.azure.calls import (
    DELAY_MAX,
    LEASE_MAX,
    MESSAGE_BYTES_MAX,
    NEVER,
    TTL_MAX,
    Entry,
    UnderWay,
    call,
    content_of,
    entry_of,
    handle_of,
    keep_line_ends,
    lease_of,
    new_ids,
    parts_of,
    peeked_of,
    received_of,
    response_hook,
)
from veilmq.client.adapters.cloud import (
    EXTEND_SECONDS,
    Cached,
    CloudAccount,
    CloudQueue,
    PacedPolls,
    decoded_peeks,
    receive_decoded,
)
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Extension, Message, Peeked, Received, Sent, Stats, Template
from veilmq.client.queue import ById, Capabilities, HandleOnSend, fingerprint, identity_of
from veilmq.client.shared import Singly, checks
from veilmq.client.unreadable import Policy, keep
from veilmq.model.errors import (
    CapabilityMissing,
    MessageTooLarge,
    ParameterInvalid,
    QueueExists,
    VeilError,
)
from veilmq.model.messages import REPORT_HEADER, WORKING, Failure, Report, report_of, write_header

__all__ = ["AzureAccount", "AzureQueue"]

RECEIVE_MAX: Final = 32
_WAIT_MAX: Final = 30
LEASE_DEFAULT: Final = 30
"""Seconds; the default of Get Messages. Always sent, because an answer gives the lease's end by the service's clock
only."""
_SEND_NAMES: Final = {"visibilitytimeout": "delay", "messagettl": "ttl"}


def capabilities_of(base64: bool) -> Capabilities:
    """What Queue Storage can do."""
    return Capabilities(
        protocol="azure",
        body_bytes_max=MESSAGE_BYTES_MAX,
        batch_messages_max=1,
        receive_messages_max=RECEIVE_MAX,
        lease_min=1,
        lease_max=LEASE_MAX,
        wait_max=_WAIT_MAX,
        delay_max=DELAY_MAX,
        receipts_rotate=True,
        handle_on_send=HandleOnSend.ALWAYS,
        body_replaceable=True,
        base64_body=base64,
        peek=True,
        ttl=True,
        extends_late=True,
    )


_PREFIX: Final = "veilmq_"
_INCARNATION: Final = "veilmq_incarnation"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_RANGES: Final = {
    "visibility_timeout": (1, LEASE_MAX),
    "delay": (0, DELAY_MAX),
    "retention": (1, TTL_MAX),
    "message_bytes_max": (1, MESSAGE_BYTES_MAX),
}
"""Field of `Settings` and of `Template` -> least and most."""


class Settings(msgspec.Struct, frozen=True):
    """The settings in a queue's metadata. Seconds and bytes; None: the service's default."""

    visibility_timeout: int | None = None
    delay: int | None = None
    retention: int | None = None
    """-1: unlimited."""
    message_bytes_max: int | None = None
    incarnation: str | None = None


def metadata_of(template: Template) -> dict[str, str]:
    """The metadata of a queue to create. Raises CapabilityMissing, ParameterInvalid naming the template's field."""
    if template.fifo or template.content_deduplication:
        raise CapabilityMissing(capability="native_fifo")
    if template.dead_letter_queue is not None or template.receive_count_max is not None:
        raise CapabilityMissing(capability="dead_letter_queue")
    metadata: dict[str, Any] = dict(template.tags)
    for name, value in metadata.items():
        if not _NAME.match(name) or name.lower().startswith(_PREFIX):
            reason = f"{name!r} is no name of metadata: letters, digits and _, not beginning with {_PREFIX}"
            raise ParameterInvalid(parameter="tags", reason=reason)
        if not (
            isinstance(value, str) and value.isascii() and value.isprintable() and value == value.strip() and value
        ):
            raise ParameterInvalid(parameter="tags", reason=f"the value of {name} must be printable ASCII")
    for field in _RANGES:
        number = _setting(field, getattr(template, field))
        if number is not None:
            metadata[_PREFIX + field] = str(number)
    return metadata


def _setting(field: str, value: float | None) -> int | None:
    if value is None:
        return None
    if field == "retention" and value == math.inf:
        return NEVER
    least, most = _RANGES[field]
    if checks.number(value, field, least, most) != int(value):
        raise ParameterInvalid(parameter=field, reason=f"must be a whole number from {least} to {most}, not {value}")
    return int(value)


def with_incarnation(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata with a value that is unique to this creation."""
    return {**metadata, _INCARNATION: uuid4().hex}


def settings_of(metadata: Mapping[str, str]) -> Settings:
    """The settings that can be read from a queue's metadata."""
    found = {name.lower(): value for name, value in metadata.items()}
    numbers = {field: _number(field, found.get(_PREFIX + field, "")) for field in _RANGES}
    return Settings(**numbers, incarnation=found.get(_INCARNATION) or None)


def _number(field: str, text: str) -> int | None:
    if field == "retention" and text == str(NEVER):
        return NEVER
    least, most = _RANGES[field]
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) else -1
    return number if least <= number <= most else None


def differing(wanted: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """The first setting or tag that differs between what is wanted and the metadata of an existing queue."""
    there = {name.lower(): value for name, value in found.items()}
    for name, value in wanted.items():
        if there.get(name.lower()) != value:
            return name.removeprefix(_PREFIX)
    return None


def _with_settings(entry: Entry, settings: Settings) -> Entry:
    """The entry with the queue's own delay, time to live and size. Raises ParameterInvalid, MessageTooLarge."""
    limit_bytes = settings.message_bytes_max
    if limit_bytes is not None and entry.size_bytes > limit_bytes:
        raise MessageTooLarge(size_bytes=entry.size_bytes, limit_bytes=limit_bytes)
    given = dict(entry.given)
    if settings.delay is not None:
        given.setdefault("visibility_timeout", settings.delay)
    if settings.retention is not None:
        given.setdefault("time_to_live", settings.retention)
    delay, ttl = given.get("visibility_timeout", 0), given.get("time_to_live", NEVER)
    if delay >= ttl != NEVER:
        reason = f"must be below the time to live, {ttl} s: the message would be dead before it is visible"
        raise ParameterInvalid(parameter="delay", reason=reason)
    return Entry(given, entry.size_bytes)


class AzureQueue(CloudQueue["AzureAccount"]):
    """A `Queue` on Azure Queue Storage; made by `AzureAccount.queue`."""

    def __init__(self, account: "AzureAccount", client: Any, clock: Clock = SYSTEM) -> None:
        self.client = client
        self._base64 = account.base64
        self._polls = PacedPolls(clock)
        super().__init__(account, str(client.queue_name), capabilities_of(account.base64), self._polls, clock)
        self._settings: Cached[Settings] = Cached(clock)

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`."""
        credential = self.client.credential
        key = getattr(credential, "account_key", None)
        return (
            "azure", fingerprint(self.client.url), fingerprint(key) if isinstance(key, str) else ById(credential),
            self._base64, identity_of(self._account.unreadable), ById(self._clock),
        )  # fmt: skip

    def send(self, message: str | Message) -> Sent:
        """Put Message. `ttl=math.inf`: never expires. The handle updates and deletes until somebody receives the
        message."""
        return self._send(entry_of(message, self._capabilities))

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """Put Message for each, a few at a time: their order in the queue is not guaranteed."""
        return self._account.singly.batched(
            checks.batch(messages), lambda message: entry_of(message, self._capabilities), self._send
        )

    def _send(self, entry: Entry) -> Sent:
        self._check_open()
        entry = _with_settings(entry, self._known())
        sent = self._call(self.client.send_message, names=_SEND_NAMES, size_bytes=entry.size_bytes, **entry.given)
        return Sent(id=sent.id, handle=handle_of(sent.id, sent.pop_receipt))

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """Get Messages, repeated while it waits. Also returns an empty list if the queue is closed meanwhile."""
        self._check_open()
        self._check_count(count_max)
        checks.seconds(wait, "wait", 0, _WAIT_MAX)
        if lease is not None:
            lease_of("lease", lease, 1)

        def polled(left: float) -> list[Received]:
            with self._account.under_way.call():  # to its end: messages after the close are given back
                return self._polls.poll(partial(self._get, count_max, lease), left, self._give_back)

        return receive_decoded(self, polled, wait, self._account.unreadable, self._clock)

    def _get(self, count_max: int, lease: float | None) -> list[Received]:
        held = self._known().visibility_timeout or LEASE_DEFAULT if lease is None else lease
        started = self._clock.monotonic()
        page = self._call(self._page, count_max=count_max, visibility_timeout=lease_of("lease", held, 1))
        return [received_of(message, started + held) for message in page]

    def _page(self, count_max: int, **given: Any) -> list[Any]:
        pages = self.client.receive_messages(messages_per_page=count_max, max_messages=count_max, **given).by_page()
        return [message for page in islice(pages, 1) for message in page]

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """Update Message, with `body` as its new content. A lease may exceed the message's time to live; it expires
        anyway."""
        return self._update(handle, lease_of("lease", lease, 0), body)

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """Update Message for each, a few at a time."""

        def made(given: Extension) -> tuple[str, int]:
            extension = checks.extension(given)
            return extension.handle, lease_of("lease", extension.lease, 0)

        return self._account.singly.batched(
            checks.batch(extensions, "extensions"), made, lambda entry: self._update(*entry)
        )

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        """Update Message to `delay` seconds."""
        self._update(handle, lease_of("delay", delay, 0), report=report_of(delay, failure))

    def _update(self, handle: str, seconds: int, body: str | None = None, report: Report | None = WORKING) -> str:
        self._check_open()
        return self._updated(handle, seconds, body, report)

    def _updated(self, handle: str, seconds: int, body: str | None = None, report: Report | None = None) -> str:
        headers = {}
        if report is not None:
            headers[REPORT_HEADER.decode()] = write_header(report.reported, report.failure)
        message_id, receipt = parts_of(handle)
        content, size_bytes = (None, 0) if body is None else content_of(body, self._base64)
        updated = self._call(
            self.client.update_message, names={"visibilitytimeout": "lease"}, size_bytes=size_bytes, message=message_id,
            pop_receipt=receipt, content=content, visibility_timeout=seconds, raw_request_hook=keep_line_ends,
            headers=headers, **self._account.extend_timeouts,
        )  # fmt: skip
        return handle_of(message_id, updated.pop_receipt)

    def delete(self, handle: str) -> None:
        """Delete Message. MessageGone also if the receipt is stale: the service does not distinguish them."""
        self._check_open()
        message_id, receipt = parts_of(handle)
        self._call(self.client.delete_message, message=message_id, pop_receipt=receipt)

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """Delete Message for each, a few at a time."""
        self._check_open()
        return self._account.singly.batched(checks.batch(handles, "handles"), checks.handle, self.delete)

    def peek(self, count_max: int = 1) -> list[Peeked]:
        """Peek Messages."""
        self._check_open()
        self._check_count(count_max)
        messages = [peeked_of(each) for each in self._call(self.client.peek_messages, max_messages=count_max)]
        return decoded_peeks(messages, self.name) if self._base64 else messages

    def stats(self) -> Stats:
        """Get Queue Metadata. `visible` counts all messages; the other counts are not reported."""
        properties = self.look()
        settings = settings_of(properties.metadata or {})
        return Stats(
            visible=int(properties.approximate_message_count or 0),
            visibility_timeout=settings.visibility_timeout,
            retention=None if settings.retention == NEVER else settings.retention,
            delay=settings.delay,
            incarnation=settings.incarnation,
        )

    def look(self) -> Any:
        """The queue's properties from the SDK; caches its metadata for a minute. Raises QueueMissing."""
        self._check_open()
        properties = self._call(self.client.get_queue_properties)
        self._settings.keep(settings_of(properties.metadata or {}))
        return properties

    def _known(self) -> Settings:
        return self._settings.get(lambda: settings_of(self.look().metadata or {}))

    def _give_back(self, messages: list[Received]) -> None:
        """Give back messages of a queue that was closed meanwhile, so that others can have them at once."""
        self._give_each_back(messages, lambda handle: self._updated(handle, 0))

    def _call(self, operation: Any, **given: Any) -> Any:
        return self._account.call(operation, self.name, **given)


T = TypeVar("T")

_QUEUE_NAME: Final = re.compile(r"[a-z0-9](?:-?[a-z0-9])+\Z")
_NAME_CHARACTERS: Final = range(3, 64)


class AzureAccount(CloudAccount):
    """An `Account` over azure-storage-queue's QueueServiceClient, which keeps its own retries and timeouts."""

    def __init__(
        self, client: Any, *, base64: bool = False, unreadable: Policy = keep, owns_client: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:  # fmt: skip
        """base64: send bodies in base64, as SDKs of other languages and Azure Functions do; the default sends them
        unchanged. unreadable: with base64, the policy for received bodies that are not base64. owns_client: close the
        client too, and let Update Message wait for at most EXTEND_SECONDS, in place of the client's own timeouts."""
        super().__init__(client.url.partition("?")[0].rstrip("/"))  # what follows may be a SAS
        self.client = client
        self.base64 = base64
        self.unreadable = unreadable
        self.singly = Singly("azure")
        self.under_way = UnderWay(client.close if owns_client else _nothing)
        self.extend_timeouts = (
            {"connection_timeout": EXTEND_SECONDS, "read_timeout": EXTEND_SECONDS} if owns_client else {}
        )
        self._hook, self._ids = response_hook(client), new_ids()
        self._clock = clock

    def queue(self, name: str) -> AzureQueue:
        """An existing queue. Raises QueueMissing."""
        queue = AzureQueue(self, self.client.get_queue_client(_checked_name(name)), self._clock)
        queue.look()
        return self._opened(queue)

    def capabilities(self, name: str) -> Capabilities:
        return capabilities_of(self.base64)

    def create(self, name: str, template: Template | None = None) -> bool:
        """Create Queue; True if it is new. Raises QueueExists, QueueDeletedRecently, ParameterInvalid."""
        wanted = metadata_of(checks.template(template))
        self._check_open()
        queue = self.client.get_queue_client(_checked_name(name))
        try:
            self.call(queue.create_queue, name, creating=True, metadata=with_incarnation(wanted))
        except QueueExists:
            there = self.call(queue.get_queue_properties, name).metadata or {}
            setting = differing(wanted, there)
            if setting is not None:
                raise QueueExists(queue=name, setting=setting) from None
            return False
        return True

    def delete(self, name: str) -> None:
        """Delete Queue. Raises QueueMissing."""
        self._check_open()
        self.call(self.client.get_queue_client(_checked_name(name)).delete_queue, name)

    def names(self, prefix: str = "") -> list[str]:
        """List Queues, all pages."""
        self._check_open()
        return self.call(self._listed, "", prefix=checks.text(prefix, "prefix"))

    def call(self, operation: Callable[..., T], queue: str, **given: Any) -> T:
        """See `azure.calls.call`. Raises TransportError once the account is closed and nothing else is under way: what
        a queue still gives back goes on."""
        with self.under_way.call():
            return call(operation, queue, ids=self._ids, hook=self._hook, **given)

    def _listed(self, prefix: str, **given: Any) -> list[str]:
        return [queue.name for queue in self.client.list_queues(name_starts_with=prefix or None, **given)]

    def close(self) -> None:
        """Close the queues; also the client if we own it, once no call is in progress."""
        self._close_queues()
        self.singly.close()
        self.under_way.close()


def _nothing() -> None:
    """The client's owner closes it."""


def _checked_name(name: str) -> str:
    """The name, which becomes part of a path. Raises ParameterInvalid."""
    text = checks.text(name, "name")
    if not _QUEUE_NAME.match(text) or len(text) not in _NAME_CHARACTERS:
        raise ParameterInvalid(parameter="name", reason="must be 3 to 63 of a-z, 0-9 and single hyphens between them")
    return text
