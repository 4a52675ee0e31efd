"""One queue of Alibaba Cloud MNS.

Strategy: sends and deletes go in batches of 16 and 64 KiB, changes of visibility one by one, a few at a time. MNS has
no lease of a receive: one that names a lease other than the queue's visibility timeout changes each message's at once,
and whose change fails is not handed out unless its lease still stands. It knows whole seconds, and no release below
one. The timeout is looked up when the queue is opened and again after a minute. Source: the MNS API, "Limits".
"""

import re
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final

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
    DeleteMessageRequest,
    DeleteMessageResponse,
    SendMessageResponse,
)

from veilmq.client import base64_bodies, checked
from veilmq.client.cancellable_wait import CancellableWaits
from veilmq.client.capabilities import Capabilities, HandleOnSend
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.cloud_queue import Believed, CloudQueue
from veilmq.client.errors import ServiceError, TransportError, may_have_happened
from veilmq.client.identity import ById, identity_of
from veilmq.client.messages import Extension, Message, Peeked, Received, Sent, Stats
from veilmq.client.mns.errors import Said, error_of
from veilmq.client.mns.receiving import peeked_of, received_of
from veilmq.client.mns.sending import DELAY_MAX, LEASE_MAX, MESSAGE_BYTES_MAX, Entry, entry_of, whole
from veilmq.client.mns.thread_clients import BatchRefused
from veilmq.client.prepared import attempt, through
from veilmq.client.requests import in_requests, split
from veilmq.client.unreadable import log, read_each, receive_readable
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseError,
    MessageGone,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)
from veilmq.model.reports import RELEASED, WORKING, Failure, Report, Reported

if TYPE_CHECKING:
    from veilmq.client.mns.account import MnsAccount

BATCH_MAX: Final = 16
WAIT_MAX: Final = 30
_HANDLE: Final = re.compile(r"[A-Za-z0-9._=+/~-]{1,1024}\Z")
"""The SDK pastes it into a URL as it is."""
_OF_ALL: Final = (QueueMissing, TransportError, ServiceError)
"""What is wrong with every entry of a batch if it is wrong with one."""


def capabilities_of(base64: bool) -> Capabilities:
    """What MNS can do on a queue."""
    return Capabilities(
        protocol="mns",
        body_bytes_max=MESSAGE_BYTES_MAX,
        batch_messages_max=BATCH_MAX,
        receive_messages_max=BATCH_MAX,
        lease_min=1,
        lease_max=LEASE_MAX,
        lease_total_max=None,
        wait_max=WAIT_MAX,
        delay_max=DELAY_MAX,
        batch_extend=False,
        receipts_rotate=True,
        handle_on_send=HandleOnSend.DELAYED,
        body_replaceable=False,
        retention_below_delay=True,
        base64_body=base64,
        attributes=True,
        peek=True,
        priorities=True,
        ttl=False,
        groups=False,
        native_fifo=False,
        native_topics=True,
        lease_hints=True,
        release_min=1,
    )


class MnsQueue(CloudQueue):
    """A `Queue` on MNS; made by `MnsAccount.queue`."""

    def __init__(self, account: "MnsAccount", name: str, clock: Clock = SYSTEM) -> None:
        self._account = account
        self._clock = clock
        self._base64 = account.base64
        self._polls = CancellableWaits(name)
        super().__init__(name, capabilities_of(account.base64), self._polls)
        self._visibility_timeout: Believed[int] = Believed(clock)

    @property
    def account(self) -> "MnsAccount":
        """The account it is of."""
        return self._account

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.identity`."""
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
        """SendMessage. A handle comes with a message that is delayed."""
        return self._send(entry_of(message, self._base64))

    def _send(self, entry: Entry) -> Sent:
        answer = self._call("send_message", entry.request(self._name), SendMessageResponse(), entry.size_bytes)
        return Sent(id=answer.message_id, handle=answer.receipt_handle or None)

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """BatchSendMessage, as often as it takes; without handles, because its answer has none."""
        entries = [
            attempt(lambda message: entry_of(message, self._base64), message) for message in checked.batch(messages)
        ]

        def in_batches(good: Sequence[Entry]) -> list[Sent | VeilError]:
            pieces = split(good, BATCH_MAX, MESSAGE_BYTES_MAX, lambda entry: entry.size_bytes)
            return list(in_requests(pieces, self._send_piece))

        return through(entries, in_batches)

    def _send_piece(self, entries: Sequence[Entry]) -> list[Sent | VeilError]:
        request = BatchSendMessageRequest(self._name, False)
        request.message_list = [entry.entry() for entry in entries]
        try:
            answer = self._call("batch_send_message", request, BatchSendMessageResponse())
        except BatchRefused as refused:
            told = [self._sent_or_error(fields, refused) for fields in refused.entries]
        except VeilError as error:
            if isinstance(error, _OF_ALL):
                raise
            # All were refused, with one error for all: each asked alone has its own.
            return self._account.singly.run(entries, self._send)
        else:
            told = [Sent(id=each.message_id) for each in answer.message_list]
        # An entry that the service forgets in its answer may have happened.
        return [*told, *[_untold() for _ in entries]][: len(entries)]

    def _sent_or_error(self, fields: dict[str, str], refused: BatchRefused) -> Sent | VeilError:
        if "MessageId" in fields:
            return Sent(id=fields["MessageId"])
        return self._entry_error(fields, refused)

    def _entry_error(self, fields: dict[str, str], refused: BatchRefused) -> VeilError:
        code, message = fields.get("ErrorCode", ""), fields.get("ErrorMessage", "")
        return error_of(Said(code, refused.status, refused.request_id, message, self._name))

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """BatchReceiveMessage. An empty list also if the queue is closed meanwhile."""
        self._check_open()
        self._check_count(count_max)
        whole("wait", wait, 0, WAIT_MAX)
        if lease is not None:
            whole("lease", lease, 1, LEASE_MAX)

        def polled(left: float) -> list[Received]:
            if not left:
                return self._take(count_max, lease, 0)
            seconds = whole("wait", left, 0, WAIT_MAX)
            return self._polls.wait(lambda: self._take(count_max, lease, seconds), self._release_late) or []

        if not self._base64:
            return polled(wait)

        def read(came: list[Received]) -> list[Received]:
            return read_each(came, base64_bodies.decoded, self._account.unreadable, self)

        return receive_readable(polled, read, wait, self._clock)

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
        """By id: the message with its new lease, as it came if the change certainly was not made, or None if its handle
        may be worth nothing."""

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
        """Nobody waits for these any more: let others have them soon."""
        for message in messages:
            try:
                self._updated(message.handle, 1, Report(Reported.RETRY, RELEASED))
            except VeilError as error:
                log.warning("queue %s: a message could not be released: %s", self._name, error)

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """ChangeMessageVisibility. Less than a second is one."""
        if body is not None:
            raise CapabilityMissing(capability="body_replaceable")
        return self._extend((handle, _lease("lease", lease)))

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """ChangeMessageVisibility for each, a few at a time."""

        def made(given: Extension) -> tuple[str, int]:
            extension = checked.extension(given)
            return _checked(extension.handle), _lease("lease", extension.lease)

        entries = [attempt(made, extension) for extension in extensions]
        return through(entries, lambda good: self._account.singly.run(good, self._extend))

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        """ChangeMessageVisibility to `delay` seconds, at least one."""
        self._check_open()
        self._updated(handle, _lease("delay", delay), Report(Reported.RETRY, failure or RELEASED))

    def _extend(self, entry: tuple[str, int]) -> str:
        self._check_open()
        return self._updated(*entry)

    def _updated(self, handle: str, seconds: int, report: Report = WORKING) -> str:
        request = ChangeMessageVisibilityRequest(self._name, _checked(handle), seconds)
        answer = self._ask("change_message_visibility", request, ChangeMessageVisibilityResponse(), report=report)
        return str(answer.receipt_handle)

    def delete(self, handle: str) -> None:
        """DeleteMessage. MessageGone also if the handle is stale: the service does not tell them apart."""
        self._call("delete_message", DeleteMessageRequest(self._name, _checked(handle)), DeleteMessageResponse())

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """BatchDeleteMessage, as often as it takes."""
        entries = [attempt(_checked, handle) for handle in handles]

        def in_batches(good: Sequence[str]) -> list[VeilError | None]:
            return list(in_requests(split(good, BATCH_MAX, MESSAGE_BYTES_MAX, len), self._delete_piece))

        return through(entries, in_batches)

    def _delete_piece(self, handles: Sequence[str]) -> list[VeilError | None]:
        request = BatchDeleteMessageRequest(self._name, list(handles))
        try:
            self._call("batch_delete_message", request, BatchDeleteMessageResponse())
        except BatchRefused as refused:
            failed = {fields.get("ReceiptHandle"): self._entry_error(fields, refused) for fields in refused.entries}
            return [failed.get(handle) for handle in handles]
        except VeilError as error:
            if isinstance(error, _OF_ALL):
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
        return base64_bodies.decoded_peeks(messages, self._name) if self._base64 else messages

    def stats(self) -> Stats:
        """GetQueueAttributes."""
        told = self.look()
        return Stats(
            visible=told.active_messages,
            delayed=told.delay_messages,
            in_flight=told.inactive_messages,
            visibility_timeout=told.visibility_timeout,
            retention=told.message_retention_period,
            delay=told.delay_seconds,
            # In whole seconds: a queue that is made again within the second is not told from the first.
            incarnation=str(told.create_time),
        )

    def look(self) -> Any:
        """The queue's attributes as the SDK gives them; its timeout is believed for a minute. Raises QueueMissing."""
        self._check_open()
        told = self._account.look(self._name)
        self._visibility_timeout.keep(told.visibility_timeout)
        return told

    def _call(self, method: str, request: Any, response: Any, size_bytes: int = 0) -> Any:
        self._check_open()
        return self._ask(method, request, response, size_bytes)

    def _ask(self, method: str, request: Any, response: Any, size_bytes: int = 0, report: Report | None = None) -> Any:
        return self._account.clients.call(method, request, response, self._name, size_bytes, report)


def _untold() -> TransportError:
    return TransportError(reason="the answer does not mention this entry", may_have_happened=True)


def _seconds(lease: float) -> int:
    return _lease("lease", min(lease, LEASE_MAX))


def _lease(parameter: str, seconds: float) -> int:
    """Whole seconds, at least one: MNS has no zero here. Raises ParameterInvalid."""
    return max(1, whole(parameter, seconds, 0, LEASE_MAX))


def _checked(handle: str) -> str:
    if not _HANDLE.match(checked.handle(handle)):
        raise ReceiptInvalid(reason="it is not one of MNS's")
    return handle
