"""An account of Azure Queue Storage, and its queues.

Strategy: only a receive is a batch in this service, so other batches are single requests, a few at a time. There is no
long poll, so waiting is polling. The service has whole seconds: fractions are rounded up, but `lease_end` is computed
from what was asked. Settings that the service lacks are kept in the queue's metadata (`settings`), read when the queue
is opened and again after a minute. Source: Queue Storage REST API; "Scalability and performance targets".

The account: a thin layer over a QueueServiceClient. The status of Create Queue shows whether the queue existed, and the
service compares all metadata. The port compares only what the template names, so after a refused creation we read the
metadata. Source: "Create Queue", "List Queues".
"""

import re
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

from veilmq.client import checks
from veilmq.client.adapters.azure.calls import MESSAGE_BYTES_MAX, UnderWay, call
from veilmq.client.adapters.azure.messages import (
    Entry,
    content_of,
    entry_of,
    handle_of,
    keep_line_ends,
    lease_of,
    parts_of,
    peeked_of,
    received_of,
    settle,
)
from veilmq.client.adapters.azure.settings import (
    DELAY_MAX,
    LEASE_MAX,
    NEVER,
    Settings,
    differing,
    metadata_of,
    settings_of,
    with_incarnation,
)
from veilmq.client.adapters.cloud import Believed, CloudAccount, CloudQueue, decoded_peeks, receive_decoded
from veilmq.client.batches import Singly
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Extension, Message, Peeked, Received, Sent, Stats, Template
from veilmq.client.queue import ById, Capabilities, HandleOnSend, fingerprint, identity_of
from veilmq.client.unreadable import Policy, keep
from veilmq.client.waits import PacedPolls
from veilmq.model.errors import ParameterInvalid, QueueExists, VeilError
from veilmq.model.reports import REPORT_HEADER, WORKING, Failure, Report, report_of, write_header

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


class AzureQueue(CloudQueue):
    """A `Queue` on Azure Queue Storage; made by `AzureAccount.queue`."""

    def __init__(self, account: "AzureAccount", client: Any, clock: Clock = SYSTEM) -> None:
        self._account = account
        self.client = client
        self._clock = clock
        self._base64 = account.base64
        self._polls = PacedPolls(clock)
        super().__init__(str(client.queue_name), capabilities_of(account.base64), self._polls)
        self._settings: Believed[Settings] = Believed(clock)

    @property
    def account(self) -> "AzureAccount":
        """The account that it belongs to."""
        return self._account

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
        entry = settle(entry, self._known())
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

        return self._account.singly.batched(extensions, made, lambda entry: self._update(*entry))

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
            headers=headers,
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
        return self._account.singly.batched(handles, checks.handle, self.delete)

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
        client too."""
        super().__init__()
        self.client = client
        self.base64 = base64
        self.unreadable = unreadable
        self.singly = Singly("azure")
        self.under_way = UnderWay(client.close if owns_client else _nothing)
        self._clock = clock

    def queue(self, name: str) -> AzureQueue:
        """An existing queue. Raises QueueMissing."""
        queue = AzureQueue(self, self.client.get_queue_client(_checked_name(name)), self._clock)
        queue.look()
        return self._opened(queue)

    def capabilities(self, name: str) -> Capabilities:
        """See `Account.capabilities`."""
        return capabilities_of(self.base64)

    def create(self, name: str, template: Template | None = None) -> bool:
        """Create Queue; True if it is new. Raises QueueExists, QueueDeletedRecently, ParameterInvalid."""
        wanted = metadata_of(template or Template())
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
        self.call(self.client.get_queue_client(_checked_name(name)).delete_queue, name)

    def names(self, prefix: str = "") -> list[str]:
        """List Queues, all pages."""
        return self.call(self._listed, "", prefix=prefix)

    def call(self, operation: Callable[..., T], queue: str, **given: Any) -> T:
        """See `azure.calls.call`. Raises TransportError once the account is closed."""
        with self.under_way.call():
            return call(operation, queue, **given)

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
    if not _QUEUE_NAME.match(name) or len(name) not in _NAME_CHARACTERS:
        raise ParameterInvalid(parameter="name", reason="must be 3 to 63 of a-z, 0-9 and single hyphens between them")
    return name
