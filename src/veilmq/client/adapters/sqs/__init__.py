"""The SQS adapter, through boto3: an account and region of Amazon SQS, or of a service with its protocol, and its
queues. calls.py makes the calls, converts messages, and alone handles botocore's exceptions.

Strategy: a batch of any length is cut at ten entries and 1 MiB; each entry's `Id` is its number in the request. A
receive always names its wait, even 0, so the queue's own setting is never used. SQS has whole seconds: fractions are
rounded up, but `lease_end` is computed from what was asked. A receive without a lease looks up the queue's visibility
timeout (cached for a minute), and applies senders' hints with one additional extension. Source: SQS API Reference.

The account: a thin layer over a boto3 client. Queue URLs come from SQS itself (GetQueueUrl) and are never constructed.
CreateQueue does not report whether it created the queue, so `create` asks before: of two concurrent callers, both may
get True.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

from veilmq.client.adapters.cloud import (
    Cached,
    CancellableWaits,
    CloudAccount,
    CloudQueue,
    creation_attributes,
    names_on_pages,
)
from veilmq.client.adapters.sqs.calls import Calls, Entry, entry_error, entry_of, member, new_clients, received_of
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import entry_unanswered, may_have_happened
from veilmq.client.messages import Extension, Message, Peeked, Received, Sent, Stats, Template
from veilmq.client.queue import ById, Capabilities
from veilmq.client.shared import batched, checks, in_requests
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, QueueMissing, VeilError
from veilmq.model.messages import WORKING, Failure, Report, report_of
from veilmq.model.settings.queue import FIFO_SUFFIX

__all__ = ["SqsAccount", "SqsQueue", "new_clients"]

ENTRIES_MAX: Final = 10
REQUEST_BYTES_MAX: Final = 1_048_576
_LEASE_MAX: Final = 43_200
_WAIT_MAX: Final = 20


def capabilities_of(name: str, wait_max: float = _WAIT_MAX) -> Capabilities:
    """What SQS can do on a queue of that name (Developer Guide, "Amazon SQS quotas").

    `extends_late` is not set: AWS also grants a late extend to a handle that another receive has superseded.
    """
    fifo = checks.text(name, "name").endswith(FIFO_SUFFIX)
    return Capabilities(
        protocol="sqs",
        body_bytes_max=REQUEST_BYTES_MAX,
        batch_messages_max=ENTRIES_MAX,
        receive_messages_max=ENTRIES_MAX,
        lease_min=1,
        lease_max=_LEASE_MAX,
        lease_total_max=_LEASE_MAX,
        wait_max=wait_max,
        delay_max=0 if fifo else 900,
        batch_extend=True,
        attributes=True,
        fields_as_attributes=True,
        groups=True,
        native_fifo=fifo,
        lease_hints=True,
    )


Given = TypeVar("Given")


class SqsQueue(CloudQueue["SqsAccount"]):
    """A `Queue` on SQS; made by `SqsAccount.queue`."""

    def __init__(self, account: "SqsAccount", calls: Calls, name: str, url: str, clock: Clock = SYSTEM) -> None:
        self._calls = calls
        self.url = url
        timeout = calls.client.meta.config.read_timeout
        # If the socket timed out before the poll, every empty answer would be an error.
        wait_max = _WAIT_MAX if timeout is None else max(0, min(_WAIT_MAX, timeout - 1))
        self._polls = CancellableWaits(name)
        super().__init__(account, name, capabilities_of(name, wait_max), self._polls, clock)
        self._visibility_timeout: Cached[float] = Cached(clock)

    @property
    def identity(self) -> Hashable | None:
        """See `veilmq.client.queue`."""
        credentials = self._calls.credentials()
        if credentials is None:
            return None
        meta = self._calls.client.meta
        return "sqs", meta.endpoint_url, meta.region_name, credentials, self.url, ById(self._clock)

    def send(self, message: str | Message) -> Sent:
        """SendMessage."""
        entry = entry_of(message, self._capabilities)
        answer = self._call("send_message", size_bytes=entry.size_bytes, **entry.given)
        return _sent(answer)

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """SendMessageBatch, as often as needed."""
        return batched(
            checks.batch(messages),
            lambda message: entry_of(message, self._capabilities),
            self._send_piece,
            ENTRIES_MAX,
            REQUEST_BYTES_MAX,
            lambda entry: entry.size_bytes,
        )

    def _send_piece(self, entries: Sequence[Entry]) -> list[Sent | VeilError]:
        sizes = [entry.size_bytes for entry in entries]
        try:
            return self._batch("send_message_batch", [entry.given for entry in entries], _sent, sizes)
        except ParameterInvalid as refused:
            # SQS refuses a whole FIFO batch if one message needs a deduplication id and has none. Nothing was sent, so
            # each is sent alone.
            if not self._capabilities.native_fifo:
                raise
            if len(entries) == 1:
                return [refused]
            return list(in_requests([[entry] for entry in entries], self._send_piece))

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """ReceiveMessage, with all attributes. Also returns an empty list if the queue is closed meanwhile."""
        self._check_open()
        self._check_count(count_max)
        checks.seconds(wait, "wait", 0, self._capabilities.wait_max)
        given: dict[str, Any] = {
            "MaxNumberOfMessages": count_max,
            "WaitTimeSeconds": math.ceil(wait),
            "MessageSystemAttributeNames": ["All"],
            "MessageAttributeNames": ["All"],
        }
        if lease is None:
            held = self._visibility_timeout.get(self._look_timeout_up)
        else:
            held = lease
            given["VisibilityTimeout"] = _lease_seconds(lease)
        started = self._clock.monotonic()
        if not wait:
            messages = self._call("receive_message", **given).get("Messages", [])
        else:
            messages = self._polls.wait(lambda: self._polled(given), self._release_late) or []
        received = [received_of(message, started, held) for message in messages]
        if lease is None:
            return self._honour_hints(received)
        return [message for message, _ in received]

    def _polled(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self._calls.call(
            "receive_message", self._name, QueueUrl=self.url, **given
        ).get("Messages", [])
        return messages

    def _release_late(self, messages: list[dict[str, Any]]) -> None:
        """Release messages that nobody waits for any more, so that others can have them at once."""
        if messages:
            entries = [{"ReceiptHandle": message["ReceiptHandle"], "VisibilityTimeout": 0} for message in messages]
            self._entries_call("change_message_visibility_batch", entries)

    def _honour_hints(self, received: list[tuple[Received, float | None]]) -> list[Received]:
        hinted = [
            Extension(message.handle, min(hint, self._capabilities.lease_max))
            for message, hint in received
            if hint is not None
        ]
        if not hinted:
            return [message for message, _ in received]
        started = self._clock.monotonic()
        try:
            results = self.extend_batch(hinted)
        except VeilError as error:
            results = [error] * len(hinted)
        ends = {message.handle: message.lease_end for message, _ in received}
        for extension, result in zip(hinted, results, strict=True):
            end = started + extension.lease
            if isinstance(result, str):
                ends[extension.handle] = end
            elif may_have_happened(result):
                ends[extension.handle] = min(end, ends[extension.handle])
        return [Received(**{**_fields(message), "lease_end": ends[message.handle]}) for message, _ in received]

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """ChangeMessageVisibility."""
        if body is not None:
            raise CapabilityMissing(capability="body_replaceable")
        self._change(handle, _lease_seconds(lease), WORKING)
        return handle

    def _change(self, handle: str, seconds: int, report: Report | None) -> None:
        given: dict[str, Any] = {"ReceiptHandle": checks.handle(handle), "VisibilityTimeout": seconds}
        with self._calls.reporting(report):
            self._call("change_message_visibility", **given)

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """ChangeMessageVisibilityBatch, as often as needed."""

        def made(given: Extension) -> dict[str, Any]:
            extension = checks.extension(given)
            return {"ReceiptHandle": extension.handle, "VisibilityTimeout": _lease_seconds(extension.lease)}

        extensions = checks.batch(extensions, "extensions")
        with self._calls.reporting(WORKING):
            results = self._entries("change_message_visibility_batch", extensions, made)
        return [
            extension.handle if result is None else result
            for extension, result in zip(extensions, results, strict=True)
        ]

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        """ChangeMessageVisibility to `delay` seconds."""
        self._change(handle, _lease_seconds(delay, "delay"), report_of(delay, failure))

    def delete(self, handle: str) -> None:
        """DeleteMessage. On a standard queue SQS does not report a stale handle."""
        self._call("delete_message", ReceiptHandle=checks.handle(handle))

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """DeleteMessageBatch, as often as needed."""
        return self._entries(
            "delete_message_batch",
            checks.batch(handles, "handles"),
            lambda given: {"ReceiptHandle": checks.handle(given)},
        )

    def peek(self, count_max: int = 1) -> list[Peeked]:
        """SQS has no peek."""
        raise CapabilityMissing(capability="peek")

    def stats(self) -> Stats:
        """GetQueueAttributes."""
        texts = member(self._call("get_queue_attributes", AttributeNames=["All"]), "Attributes")
        return Stats(
            visible=int(member(texts, "ApproximateNumberOfMessages")),
            delayed=int(member(texts, "ApproximateNumberOfMessagesDelayed")),
            in_flight=int(member(texts, "ApproximateNumberOfMessagesNotVisible")),
            visibility_timeout=self._visibility_timeout.keep(float(member(texts, "VisibilityTimeout"))),
            retention=float(member(texts, "MessageRetentionPeriod")),
            delay=float(member(texts, "DelaySeconds")),
            # In whole seconds, which is enough: SQS creates no queue of the same name within a minute.
            incarnation=member(texts, "CreatedTimestamp"),
        )

    def _call(self, method: str, *, size_bytes: int = 0, **given: Any) -> dict[str, Any]:
        self._check_open()
        return self._calls_for(method).call(method, self._name, size_bytes=size_bytes, QueueUrl=self.url, **given)

    def _calls_for(self, method: str) -> Calls:
        return self._account.extending if method.startswith("change_message_visibility") else self._calls

    def _entries(
        self, method: str, given: Sequence[Given], make: Callable[[Given], dict[str, Any]]
    ) -> list[VeilError | None]:
        return batched(given, make, lambda entries: self._batch(method, entries, _nothing), ENTRIES_MAX)

    def _batch(
        self, method: str, entries: Sequence[dict[str, Any]], read: Callable[[dict[str, Any]], Any],
        sizes: Sequence[int] = (),
    ) -> list[Any]:  # fmt: skip
        self._check_open()
        return self._entries_call(method, entries, read, sizes)

    def _entries_call(
        self, method: str, entries: Sequence[dict[str, Any]],
        read: Callable[[dict[str, Any]], Any] = lambda entry: None, sizes: Sequence[int] = (),
    ) -> list[Any]:  # fmt: skip
        """One batch request of at most ten entries: for each entry, in order, `read` of its result, or its error."""
        numbered = [{"Id": str(number), **entry} for number, entry in enumerate(entries)]
        calls = self._calls_for(method)
        answer = calls.call(method, self._name, size_bytes=sum(sizes), QueueUrl=self.url, Entries=numbered)
        # An entry that is missing in the answer may have been done.
        results: list[Any] = [entry_unanswered() for _ in entries]
        places = {entry["Id"]: place for place, entry in enumerate(numbered)}
        for entry in answer.get("Successful", ()):
            if (place := places.get(entry.get("Id"))) is not None:
                results[place] = read(entry)
        for entry in answer.get("Failed", ()):
            if (place := places.get(entry.get("Id"))) is not None:
                results[place] = entry_error(entry, answer, self._name, sizes[place] if sizes else 0)
        return results

    def _look_timeout_up(self) -> float:
        answer = self._call("get_queue_attributes", AttributeNames=["VisibilityTimeout"])
        return self._visibility_timeout.keep(float(member(member(answer, "Attributes"), "VisibilityTimeout")))


def _lease_seconds(lease: float, parameter: str = "lease") -> int:
    return checks.whole_seconds(lease, parameter, 0, _LEASE_MAX)


def _sent(answer: dict[str, Any]) -> Sent:
    sequence = answer.get("SequenceNumber")
    return Sent(id=member(answer, "MessageId"), sequence_number=None if sequence is None else int(sequence))


def _nothing(entry: dict[str, Any]) -> None:
    return None


def _fields(message: Received) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


_PAGE_MAX: Final = 1_000


class SqsAccount(CloudAccount):
    """An `Account` over a boto3 SQS client (`boto3.client("sqs", ...)`), which keeps its own retries and timeouts."""

    def __init__(
        self,
        client: Any,
        *,
        owner: str | None = None,
        owns_client: bool = False,
        extending: Any = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """`owner`: 12 digits, the account that owns the queues, if not the caller's. `extending`: another client, for
        ChangeMessageVisibility; None: the same. `owns_client`: close the clients too."""
        super().__init__(client.meta.endpoint_url)
        self.client = client
        self._owner = owner
        self._owns_client = owns_client
        self._clock = clock
        self._calls = Calls(client)
        self.extending = self._calls if extending is None else Calls(extending)

    def queue(self, name: str) -> SqsQueue:
        """An existing queue. Raises QueueMissing."""
        name = checks.text(name, "name")
        return self._opened(SqsQueue(self, self._calls, name, self._url(name), self._clock))

    def capabilities(self, name: str) -> Capabilities:
        return capabilities_of(name)

    def create(self, name: str, template: Template | None = None) -> bool:
        """CreateQueue; True if it is new. Raises QueueExists, QueueDeletedRecently, ParameterInvalid."""
        name, template = checks.text(name, "name"), checks.template(template)
        attributes = creation_attributes(name, template, self.arn)
        try:
            self._url(name)
        except QueueMissing:
            existed = False
        else:
            existed = True
        given: dict[str, Any] = {"tags": dict(template.tags)} if template.tags else {}
        self._call("create_queue", name, QueueName=name, Attributes=attributes, **given)
        return not existed

    def delete(self, name: str) -> None:
        """DeleteQueue. Raises QueueMissing."""
        name = checks.text(name, "name")
        self._call("delete_queue", name, QueueUrl=self._url(name))

    def names(self, prefix: str = "") -> list[str]:
        """ListQueues, all pages."""
        prefix = checks.text(prefix, "prefix")

        def page(token: str | None) -> tuple[list[str], str | None]:
            given = {"QueueNamePrefix": prefix, "NextToken": token}
            named: dict[str, Any] = {name: value for name, value in given.items() if value}
            answer = self._call("list_queues", "", MaxResults=_PAGE_MAX, **named)
            return answer.get("QueueUrls", []), answer.get("NextToken")

        return names_on_pages(page)

    def described(self, name: str) -> tuple[dict[str, Any], dict[str, str]]:
        """All of GetQueueAttributes, and the queue's tags. Raises QueueMissing."""
        url = self._url(name)
        attributes = self._call("get_queue_attributes", name, QueueUrl=url, AttributeNames=["All"])
        return attributes, self._call("list_queue_tags", name, QueueUrl=url).get("Tags", {})

    def _call(self, method: str, queue: str, **given: Any) -> dict[str, Any]:
        """See `Calls.call`. Raises TransportError once the account is closed; only what a queue still gives back goes
        past this check."""
        self._check_open()
        return self._calls.call(method, queue, **given)

    def close(self) -> None:
        """Close the queues; also the clients if we own them."""
        self._close_queues()
        for calls in {self._calls, self.extending}:
            calls.close()
            if self._owns_client:
                calls.client.close()

    def arn(self, name: str) -> str:
        """The queue's ARN. Raises QueueMissing."""
        name = checks.text(name, "name")
        answer = self._call("get_queue_attributes", name, QueueUrl=self._url(name), AttributeNames=["QueueArn"])
        arn: str = member(member(answer, "Attributes"), "QueueArn")
        return arn

    def _url(self, name: str) -> str:
        given: dict[str, Any] = {} if self._owner is None else {"QueueOwnerAWSAccountId": self._owner}
        url: str = member(self._call("get_queue_url", name, QueueName=name, **given), "QueueUrl")
        return url
