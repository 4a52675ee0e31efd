"""The MNS adapter, through aliyun-mns-sdk: an account and region of Alibaba Cloud MNS, or of a service with its
protocol, and its queues. calls.py makes the calls, with one client a thread, because the SDK's objects are not
thread-safe; it converts messages and alone handles the SDK's exceptions. topics.py has the service's own topics.

Strategy: sends and deletes go in batches of at most 16 messages and 64 KiB, changes of visibility one by one, a few at
a time. A receive in MNS cannot name a lease. So if the caller's lease differs from the queue's visibility timeout, the
receive changes each message's visibility at once; a message whose change fails is returned only if its lease is still
valid. MNS has whole seconds, and no release below one. The timeout is read when the queue is opened and again after a
minute. Source: the MNS API, "Limits".

The account: a thin layer over aliyun-mns-sdk. Of its Account, only the host and the credentials are used: each thread
has its own client. CreateQueue compares all attributes, with defaults for those that are left out. The port compares
only what the template names, so we read the attributes of an existing queue. Source: the pages of CreateQueue and
ListQueue.
"""

import re
from collections.abc import Hashable, Sequence
from typing import Any, Final

import msgspec
from mns.mns_request import (  # type: ignore[import-untyped]
    BatchDeleteMessageRequest,
    BatchDeleteMessageResponse,
    BatchPeekMessageRequest,
    BatchPeekMessageResponse,
    BatchReceiveMessageRequest,
    BatchReceiveMessageResponse,
    BatchSendMessageRequest,
    BatchSendMessageResponse,
    ChangeMessageVisibilityRequest,
    ChangeMessageVisibilityResponse,
    CreateQueueRequest,
    CreateQueueResponse,
    DeleteMessageRequest,
    DeleteMessageResponse,
    DeleteQueueRequest,
    DeleteQueueResponse,
    GetQueueAttributesRequest,
    GetQueueAttributesResponse,
    ListQueueRequest,
    ListQueueResponse,
    SendMessageResponse,
)

from veilmq.client.adapters.cloud import (
    Cached,
    CancellableWaits,
    CloudAccount,
    CloudQueue,
    decoded_peeks,
    names_on_pages,
    receive_decoded,
)
from veilmq.client.adapters.mns.calls import (
    DELAY_MAX,
    LEASE_MAX,
    MESSAGE_BYTES_MAX,
    BatchRefused,
    Entry,
    ThreadClients,
    entry_of,
    error_of,
    peeked_of,
    received_of,
)
from veilmq.client.adapters.mns.topics import MnsTopics
from veilmq.client.adapters.service_errors import Refusal
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import entry_unanswered, may_have_happened
from veilmq.client.messages import Extension, Message, Peeked, Received, Sent, Stats, Template
from veilmq.client.queue import ById, Capabilities, HandleOnSend, identity_of
from veilmq.client.shared import OF_ALL, Singly, batched, checks
from veilmq.client.unreadable import Policy, keep, log
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseError,
    MessageGone,
    ParameterInvalid,
    QueueExists,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)
from veilmq.model.messages import RELEASED, WORKING, Failure, Report, Reported

__all__ = ["MnsAccount", "MnsQueue"]

BATCH_MAX: Final = 16
WAIT_MAX: Final = 30
_HANDLE: Final = re.compile(r"[A-Za-z0-9._=+/~-]{1,1024}\Z")
"""The SDK pastes the handle into a URL unescaped."""


def capabilities_of(base64: bool) -> Capabilities:
    """What MNS can do on a queue."""
    return Capabilities(
        protocol="mns",
        body_bytes_max=MESSAGE_BYTES_MAX,
        batch_messages_max=BATCH_MAX,
        receive_messages_max=BATCH_MAX,
        lease_min=1,
        lease_max=LEASE_MAX,
        wait_max=WAIT_MAX,
        delay_max=DELAY_MAX,
        receipts_rotate=True,
        handle_on_send=HandleOnSend.DELAYED,
        retention_below_delay=True,
        base64_body=base64,
        attributes=True,
        fields_as_attributes=True,
        peek=True,
        priorities=True,
        native_topics=True,
        lease_hints=True,
        release_min=1,
    )


class MnsQueue(CloudQueue["MnsAccount"]):
    """A `Queue` on MNS; made by `MnsAccount.queue`."""

    def __init__(self, account: "MnsAccount", name: str, clock: Clock = SYSTEM) -> None:
        self._base64 = account.base64
        self._polls = CancellableWaits(name)
        super().__init__(account, name, capabilities_of(account.base64), self._polls, clock)
        self._visibility_timeout: Cached[int] = Cached(clock)

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`."""
        account = self._account
        return (
            "mns",
            account.clients.identity,
            self._name,
            self._base64,
            identity_of(account.unreadable),
            ById(self._clock),
        )

    def send(self, message: str | Message) -> Sent:
        """SendMessage. Returns a handle for a delayed message."""
        return self._send(entry_of(message, self._capabilities))

    def _send(self, entry: Entry) -> Sent:
        answer = self._call("send_message", entry.request(self._name), SendMessageResponse(), entry.size_bytes)
        return Sent(id=answer.message_id, handle=answer.receipt_handle or None)

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """BatchSendMessage, as often as needed; without handles, because the answer has none."""
        return batched(
            checks.batch(messages),
            lambda message: entry_of(message, self._capabilities),
            self._send_piece,
            BATCH_MAX,
            MESSAGE_BYTES_MAX,
            lambda entry: entry.size_bytes,
        )

    def _send_piece(self, entries: Sequence[Entry]) -> list[Sent | VeilError]:
        request = BatchSendMessageRequest(self._name, False)
        request.message_list = [entry.entry() for entry in entries]
        try:
            size_bytes = sum(entry.size_bytes for entry in entries)
            answer = self._call("batch_send_message", request, BatchSendMessageResponse(), size_bytes)
        except BatchRefused as refused:
            results: list[Sent | VeilError] = [self._sent_or_error(fields, refused) for fields in refused.entries]
        except VeilError as error:
            if isinstance(error, OF_ALL):
                raise
            # All were refused with one common error: sent alone, each gets its own error.
            return self._account.singly.run(entries, self._send)
        else:
            results = [Sent(id=each.message_id) for each in answer.message_list]
        # An entry that is missing in the answer may have been done.
        return [*results, *[entry_unanswered() for _ in entries]][: len(entries)]

    def _sent_or_error(self, fields: dict[str, str], refused: BatchRefused) -> Sent | VeilError:
        if "MessageId" in fields:
            return Sent(id=fields["MessageId"])
        return self._entry_error(fields, refused)

    def _entry_error(self, fields: dict[str, str], refused: BatchRefused) -> VeilError:
        code, message = fields.get("ErrorCode", ""), fields.get("ErrorMessage", "")
        status = 500 if code in _SERVERS else refused.status  # that of a batch is another
        return error_of(Refusal(code, status, refused.request_id, message, self._name))

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """BatchReceiveMessage. Also returns an empty list if the queue is closed meanwhile."""
        self._check_open()
        self._check_count(count_max)
        checks.whole_seconds(wait, "wait", 0, WAIT_MAX)
        if lease is not None:
            checks.whole_seconds(lease, "lease", 1, LEASE_MAX)

        def polled(left: float) -> list[Received]:
            if not left:
                return self._take(count_max, lease, 0)
            seconds = checks.whole_seconds(left, "wait", 0, WAIT_MAX)
            return self._polls.wait(lambda: self._take(count_max, lease, seconds), self._release_late) or []

        return receive_decoded(self, polled, wait, self._account.unreadable, self._clock)

    def _take(self, count_max: int, lease: float | None, wait: int) -> list[Received]:
        request = BatchReceiveMessageRequest(self._name, count_max, False, wait)
        held = self._visibility_timeout.get(lambda: int(self.look().visibility_timeout))
        started = self._clock.monotonic()
        try:
            answer = self._ask("batch_receive_message", request, BatchReceiveMessageResponse())
        except MessageGone:
            return []
        came = [received_of(entry, started + held) for entry in answer.message_list]
        wanted = [(message, hint if lease is None else lease) for message, hint in came]
        changes = [(message, each) for message, each in wanted if each is not None and _seconds(each) != held]
        if not changes:
            return [message for message, _ in wanted]
        changed = self._changed(changes)
        return [kept for message, _ in wanted if (kept := changed.get(message.id, message)) is not None]

    def _changed(self, changes: list[tuple[Received, float]]) -> dict[str, Received | None]:
        """By id: the message with its new lease; the message unchanged if the change certainly was not made; None if
        its handle may be invalid now."""

        def change(entry: tuple[Received, float]) -> Received:
            message, lease = entry
            started = self._clock.monotonic()
            handle = self._updated(message.handle, _seconds(lease))
            return msgspec.structs.replace(message, handle=handle, lease_end=started + lease)

        results: list[Received | VeilError]
        try:
            results = self._account.singly.run(changes, change)
        except VeilError as error:
            results = [error] * len(changes)
        kept: dict[str, Received | None] = {}
        for (message, _), result in zip(changes, results, strict=True):
            if not isinstance(result, VeilError):
                kept[message.id] = result
                continue
            log.warning("queue %s: the lease of message %s could not be changed: %s", self._name, message.id, result)
            lost = isinstance(result, LeaseError) or may_have_happened(result)
            kept[message.id] = None if lost else message
        return kept

    def _release_late(self, messages: list[Received]) -> None:
        """Release messages that nobody waits for any more, so that others can have them soon."""
        report = Report(Reported.RETRY, RELEASED)
        self._give_each_back(messages, lambda handle: self._updated(handle, 1, report))

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """ChangeMessageVisibility. The lease is rounded up to whole seconds, at least 1 s."""
        if body is not None:
            raise CapabilityMissing(capability="body_replaceable")
        return self._extend((handle, _lease("lease", lease)))

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """ChangeMessageVisibility for each, a few at a time."""

        def made(given: Extension) -> tuple[str, int]:
            extension = checks.extension(given)
            return _checked_handle(extension.handle), _lease("lease", extension.lease)

        return self._account.singly.batched(checks.batch(extensions, "extensions"), made, self._extend)

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        """ChangeMessageVisibility to `delay` seconds, at least one."""
        self._check_open()
        self._updated(handle, _lease("delay", delay), Report(Reported.RETRY, failure or RELEASED))

    def _extend(self, entry: tuple[str, int]) -> str:
        self._check_open()
        return self._updated(*entry)

    def _updated(self, handle: str, seconds: int, report: Report = WORKING) -> str:
        request = ChangeMessageVisibilityRequest(self._name, _checked_handle(handle), seconds)
        answer = self._ask("change_message_visibility", request, ChangeMessageVisibilityResponse(), report=report)
        return str(answer.receipt_handle)

    def delete(self, handle: str) -> None:
        """DeleteMessage. MessageGone also if the handle is stale: the service does not distinguish them."""
        self._call("delete_message", DeleteMessageRequest(self._name, _checked_handle(handle)), DeleteMessageResponse())

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """BatchDeleteMessage, as often as needed."""
        given = checks.batch(handles, "handles")
        return batched(given, _checked_handle, self._delete_piece, BATCH_MAX, MESSAGE_BYTES_MAX, len)

    def _delete_piece(self, handles: Sequence[str]) -> list[VeilError | None]:
        request = BatchDeleteMessageRequest(self._name, list(handles))
        try:
            self._call("batch_delete_message", request, BatchDeleteMessageResponse())
        except BatchRefused as refused:
            failed = {fields.get("ReceiptHandle"): self._entry_error(fields, refused) for fields in refused.entries}
            return [failed.get(handle) for handle in handles]
        except VeilError as error:
            if isinstance(error, OF_ALL):
                raise
            return self._account.singly.run(handles, self.delete)
        return [None] * len(handles)

    def peek(self, count_max: int = 1) -> list[Peeked]:
        """BatchPeekMessage."""
        self._check_count(count_max)
        request = BatchPeekMessageRequest(self._name, count_max, False)
        try:
            answer = self._call("batch_peek_message", request, BatchPeekMessageResponse())
        except MessageGone:
            return []
        messages = [peeked_of(entry) for entry in answer.message_list]
        return decoded_peeks(messages, self._name) if self._base64 else messages

    def stats(self) -> Stats:
        """GetQueueAttributes."""
        found = self.look()
        return Stats(
            visible=found.active_messages,
            delayed=found.delay_messages,
            in_flight=found.inactive_messages,
            visibility_timeout=found.visibility_timeout,
            retention=found.message_retention_period,
            delay=found.delay_seconds,
            # In whole seconds: a queue that is created again within the same second looks like the first one.
            incarnation=str(found.create_time),
        )

    def look(self) -> Any:
        """The queue's attributes from the SDK; caches its timeout for a minute. Raises QueueMissing."""
        self._check_open()
        found = self._account.look(self._name)
        self._visibility_timeout.keep(found.visibility_timeout)
        return found

    def _call(self, method: str, request: Any, response: Any, size_bytes: int = 0) -> Any:
        self._check_open()
        return self._ask(method, request, response, size_bytes)

    def _ask(self, method: str, request: Any, response: Any, size_bytes: int = 0, report: Report | None = None) -> Any:
        return self._account.clients.call(method, request, response, self._name, size_bytes, report)


_SERVERS: Final = frozenset({"InternalError", "InternalServerError"})
"""Codes of entries at which the server failed: they may have been done."""


def _seconds(lease: float) -> int:
    return _lease("lease", min(lease, LEASE_MAX))


def _lease(parameter: str, seconds: float) -> int:
    """Whole seconds, at least 1: MNS allows no 0 here. Raises ParameterInvalid."""
    return max(1, checks.whole_seconds(seconds, parameter, 0, LEASE_MAX))


def _checked_handle(handle: str) -> str:
    text = checks.handle(handle)
    if not _HANDLE.match(text):
        raise ReceiptInvalid(reason="it is not one of MNS's")
    return text


_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*\Z")
_PREFIX: Final = re.compile(r"[A-Za-z0-9-]*\Z")
_PAGE_MAX: Final = 1_000
_CREATED: Final = 201
_SETTINGS: Final = {
    "visibility_timeout": "visibility_timeout",
    "delay": "delay_seconds",
    "retention": "message_retention_period",
    "wait": "polling_wait_seconds",
    "message_bytes_max": "maximum_message_size",
}
"""A template's field -> the field of the SDK's requests and answers."""


class MnsAccount(CloudAccount):
    """An `Account` over aliyun-mns-sdk's `mns.account.Account`."""

    def __init__(
        self, account: Any, *, base64: bool = True, unreadable: Policy = keep, retries: bool = True,
        clock: Clock = SYSTEM,
    ) -> None:  # fmt: skip
        """base64: send bodies in base64, the default of the SDKs for Python and Java; False: unchanged, as the SDKs for
        Go and Node.js do. unreadable: with base64, the policy for received bodies that are not base64. retries: False
        keeps the SDK from sending a request again when a connection ends without an answer."""
        super().__init__(str(account.mns_client.host))
        self.base64 = base64
        self.unreadable = unreadable
        self.singly = Singly("mns")
        self.clients = ThreadClients(account, retries)
        self._clock = clock

    def queue(self, name: str) -> MnsQueue:
        """An existing queue. Raises QueueMissing."""
        queue = MnsQueue(self, _checked_name(name), self._clock)
        queue.look()
        return self._opened(queue)

    def capabilities(self, name: str) -> Capabilities:
        return capabilities_of(self.base64)

    def create(self, name: str, template: Template | None = None) -> bool:
        """CreateQueue; True if it is new. Raises QueueExists, QueueDeletedRecently, ParameterInvalid."""
        wanted = _wanted(checks.template(template))
        name = _checked_name(name)
        if self._agrees(name, wanted):
            return False
        request = CreateQueueRequest(name, **wanted)
        try:
            answer = self.call("create_queue", request, CreateQueueResponse(), name)
        except QueueExists:
            # Another creation came first, with other settings, which need not conflict with the ones that the template
            # names.
            if self._agrees(name, wanted):
                return False
            raise
        return bool(answer.status == _CREATED)

    def _agrees(self, name: str, wanted: dict[str, int]) -> bool:
        """Whether the queue exists with the wanted settings. Raises QueueExists if it exists with others."""
        try:
            there = self.look(name)
        except QueueMissing:
            return False
        for field, attribute in _SETTINGS.items():
            if attribute in wanted and getattr(there, attribute) != wanted[attribute]:
                raise QueueExists(queue=name, setting=field)
        return True

    def look(self, name: str) -> Any:
        """GetQueueAttributes: the SDK's answer. Raises QueueMissing."""
        request = GetQueueAttributesRequest(name)
        return self.call("get_queue_attributes", request, GetQueueAttributesResponse(), name)

    def delete(self, name: str) -> None:
        """DeleteQueue. Raises QueueMissing."""
        name = _checked_name(name)
        self.look(name)  # the service reports no error if there is no such queue
        self.call("delete_queue", DeleteQueueRequest(name), DeleteQueueResponse(), name)

    def names(self, prefix: str = "") -> list[str]:
        """ListQueue, all pages."""
        prefix = checks.text(prefix, "prefix")
        if not _PREFIX.match(prefix):
            return []

        def page(marker: str | None) -> tuple[list[str], str]:
            request = ListQueueRequest(prefix, _PAGE_MAX, marker or "")
            answer = self.call("list_queue", request, ListQueueResponse(), "")
            return answer.queueurl_list, answer.next_marker

        return names_on_pages(page)

    def call(self, method: str, request: Any, response: Any, queue: str) -> Any:
        """See `ThreadClients.call`. Raises TransportError once the account is closed; only what a queue still gives
        back goes past this check."""
        self._check_open()
        return self.clients.call(method, request, response, queue)

    def topics(self) -> MnsTopics:
        """The service's own topics, for pull topics."""
        return MnsTopics(self)

    def close(self) -> None:
        """Close the queues and all connections."""
        self._close_queues()
        self.singly.close()
        self.clients.close()


def _checked_name(name: str) -> str:
    """The name, which becomes part of a path. Raises ParameterInvalid."""
    text = checks.text(name, "name")
    if not _NAME.match(text):
        reason = "must have letters, digits and hyphens, and begin with a letter or digit"
        raise ParameterInvalid(parameter="name", reason=reason)
    return text


def _wanted(template: Template) -> dict[str, int]:
    """Arguments of CreateQueueRequest. Raises CapabilityMissing, ParameterInvalid naming the template's field."""
    if template.fifo or template.content_deduplication:
        raise CapabilityMissing(capability="native_fifo")
    if template.dead_letter_queue is not None or template.receive_count_max is not None:
        raise CapabilityMissing(capability="dead_letter_queue")
    if template.tags:
        raise CapabilityMissing(capability="queue tags")
    wanted = {}
    for field, argument in _SETTINGS.items():
        value = getattr(template, field)
        if value is None:
            continue
        if not isinstance(value, int | float) or type(value) is bool or not 0 <= value < 2**31 or value != int(value):
            raise ParameterInvalid(parameter=field, reason=f"must be a whole number, and not negative: {value!r}")
        wanted[argument] = int(value)
    return wanted
