"""One queue of our own server.

Strategy: Send, Extend and Delete are batches on the wire and a single one is a batch of one. Delete and Extend may go
out twice after a broken connection, because twice is as good as once; a Delete that then finds the message gone has
done its work. `lease_end` counts from the grant: from when the request left, and what the server says it then waited.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final

from veilmq.client import checked
from veilmq.client.capabilities import Capabilities, HandleOnSend
from veilmq.client.clock import Clock
from veilmq.client.cloud_queue import CloudQueue
from veilmq.client.errors import TransportError
from veilmq.client.messages import Extension, Message, Peeked, Received, Recommended, Sent, Stats
from veilmq.client.prepared import as_message, attempt, through
from veilmq.client.queue_attributes import FIFO_SUFFIX
from veilmq.client.requests import in_requests, split
from veilmq.client.unreadable import log
from veilmq.client.veil.calls import Calls, Operation, operation
from veilmq.client.veil.messages import peeked_of, received_of, sent_of, wire_bytes, wire_of
from veilmq.model.errors import CapabilityMissing, MessageGone, MessageTooLarge, ParameterInvalid, VeilError
from veilmq.model.reports import Failure, Report, report_of
from veilmq.protocols.sqs.operations import veil_shapes as shapes

if TYPE_CHECKING:
    from veilmq.client.veil.account import VeilAccount

_SEND: Final = operation("VeilMQ.Send", shapes.SendResult, repeatable=False)
_RECEIVE: Final = operation("VeilMQ.Receive", shapes.MessagesResult, repeatable=False, brings_leases=True)
_EXTEND: Final = operation("VeilMQ.Extend", shapes.FailuresResult, repeatable=True)
_DELETE: Final = operation("VeilMQ.Delete", shapes.FailuresResult, repeatable=True)
_PEEK: Final = operation("VeilMQ.Peek", shapes.MessagesResult, repeatable=True)
DESCRIBE: Final = operation("VeilMQ.DescribeQueue", shapes.DescribeQueueResult, repeatable=True)


def capabilities_of(name: str) -> Capabilities:
    """What our server can do on a queue of that name."""
    fifo = name.endswith(FIFO_SUFFIX)
    return Capabilities(
        protocol="veil",
        body_bytes_max=shapes.REQUEST_BYTES_MAX,
        batch_messages_max=shapes.ENTRIES_MAX,
        receive_messages_max=shapes.RECEIVE_COUNT_MAX,
        lease_min=0.001,
        lease_max=shapes.LEASE_SECONDS_MAX,
        lease_total_max=None,
        wait_max=shapes.WAIT_SECONDS_MAX,
        delay_max=0 if fifo else shapes.DELAY_SECONDS_MAX,
        batch_extend=True,
        receipts_rotate=False,
        handle_on_send=HandleOnSend.ALWAYS,
        body_replaceable=True,
        retention_below_delay=True,
        base64_body=False,
        attributes=True,
        peek=True,
        priorities=not fifo,
        ttl=True,
        groups=True,
        native_fifo=fifo,
        native_topics=False,
        lease_hints=True,
        tags=True,
        extends_late=not fifo,
    )


class VeilQueue(CloudQueue):
    """A `Queue` on our server; made by `VeilAccount.queue`."""

    def __init__(self, account: "VeilAccount", calls: Calls, name: str, path: str, clock: Clock) -> None:
        """`path`: how the server is told which queue: `name` or `account/name`."""
        super().__init__(name, capabilities_of(name), calls)
        self._account = account
        self._calls = calls
        self._path = path
        self._clock = clock

    @property
    def account(self) -> "VeilAccount":
        """The account it is of."""
        return self._account

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.identity`."""
        return self._account.identity, self._path

    def send(self, message: str | Message) -> Sent:
        """VeilMQ.Send of one."""
        wire = _fitting(message, self._capabilities)
        result = self._send([wire], len(wire.body or ""))[0]
        if isinstance(result, VeilError):
            raise result
        return result

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """VeilMQ.Send, as often as it takes."""

        def made(message: str | Message) -> tuple[shapes.MessageIn, int]:
            wire = _fitting(message, self._capabilities)
            return wire, wire_bytes(wire)

        def in_batches(good: Sequence[tuple[shapes.MessageIn, int]]) -> list[Sent | VeilError]:
            pieces = split(good, shapes.ENTRIES_MAX, shapes.REQUEST_BYTES_MAX, lambda entry: entry[1])
            return list(in_requests(pieces, self._send_piece))

        return through([attempt(made, message) for message in checked.batch(messages)], in_batches)

    def _send_piece(self, entries: Sequence[tuple[shapes.MessageIn, int]]) -> list[Sent | VeilError]:
        return self._send([wire for wire, _ in entries], sum(size for _, size in entries))

    def _send(self, messages: list[shapes.MessageIn], size_bytes: int) -> list[Sent | VeilError]:
        given = shapes.SendInput(queue=self._path, messages=messages, want_handles=True)
        done = self._calls.call(_SEND, given, size_bytes=size_bytes)
        if len(done.result.results) != len(messages):
            raise _other_count()
        return [sent_of(line) if line.error is None else done.failure_of(line.error) for line in done.result.results]

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """VeilMQ.Receive. An empty list also if the queue is closed or interrupted meanwhile."""
        self._check_count(count_max)
        checked.seconds(wait, "wait", 0, shapes.WAIT_SECONDS_MAX)
        if lease is not None:
            _check_lease(lease)
        given = shapes.ReceiveInput(queue=self._path, count_max=count_max, lease=lease, wait=wait)
        was_open, interrupts = not self._calls.closed, self._calls.interrupts
        started = self._clock.monotonic()
        try:
            answer = self._calls.call(_RECEIVE, given, wait).result
        except TransportError:
            if (was_open and self._calls.closed) or (wait and self._calls.interrupts != interrupts):
                return []  # the server gives back what it was about to hand out
            raise
        if self._calls.closed:
            self._give_back([message.handle for message in answer.messages])
            return []
        granted_by = started + answer.waited
        return [received_of(message, granted_by, lease) for message in answer.messages]

    def _give_back(self, handles: list[str]) -> None:
        """The queue is closed, and nobody waits for these any more: let others have them at once."""
        if not handles:
            return
        entries = [shapes.ExtendEntry(handle=handle, lease=0) for handle in handles]
        try:
            self._calls.late(_EXTEND, shapes.ExtendInput(queue=self._path, entries=entries))
        except VeilError as error:
            log.warning("queue %s: messages could not be released: %s", self._name, error)

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """VeilMQ.Extend of one; with `body`, Azure's Update Message."""
        _check_lease(lease)
        if body is not None:
            checked.body(body)
        self._change(shapes.ExtendEntry(handle=checked.handle(handle), lease=lease, body=body))
        return handle

    def _change(self, entry: shapes.ExtendEntry, report: Report | None = None) -> None:
        given = shapes.ExtendInput(queue=self._path, entries=[entry])
        self._raise_first(self._failures(_EXTEND, given, report))

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """VeilMQ.Extend, as often as it takes. The handles stay as they are."""

        def made(given: Extension) -> shapes.ExtendEntry:
            extension = checked.extension(given)
            _check_lease(extension.lease)
            return shapes.ExtendEntry(handle=extension.handle, lease=extension.lease)

        def in_batches(good: Sequence[shapes.ExtendEntry]) -> list[VeilError | None]:
            return list(in_requests(split(good, shapes.ENTRIES_MAX, 0, lambda entry: 0), self._extend_piece))

        errors = through([attempt(made, extension) for extension in extensions], in_batches)
        return [
            extension.handle if error is None else error for extension, error in zip(extensions, errors, strict=True)
        ]

    def _extend_piece(self, entries: Sequence[shapes.ExtendEntry]) -> list[VeilError | None]:
        failures = self._failures(_EXTEND, shapes.ExtendInput(queue=self._path, entries=list(entries)))
        return [failures.get(index) for index in range(len(entries))]

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        """VeilMQ.Extend to `delay` seconds."""
        checked.seconds(delay, "delay", 0, shapes.LEASE_SECONDS_MAX)
        self._change(shapes.ExtendEntry(handle=checked.handle(handle), lease=delay), report_of(delay, failure))

    def delete(self, handle: str) -> None:
        """VeilMQ.Delete of one."""
        self._raise_first(self._delete([checked.handle(handle)]))

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """VeilMQ.Delete, as often as it takes."""

        def in_batches(good: Sequence[str]) -> list[VeilError | None]:
            return list(in_requests(split(good, shapes.ENTRIES_MAX, 0, lambda handle: 0), self._delete_piece))

        return through([attempt(checked.handle, handle) for handle in handles], in_batches)

    def _delete_piece(self, handles: Sequence[str]) -> list[VeilError | None]:
        failures = self._delete(list(handles))
        return [failures.get(index) for index in range(len(handles))]

    def _delete(self, handles: list[str]) -> dict[int, VeilError]:
        return self._failures(_DELETE, shapes.DeleteInput(queue=self._path, handles=handles))

    def peek(self, count_max: int = 1) -> list[Peeked]:
        """VeilMQ.Peek."""
        self._check_count(count_max)
        answer = self._calls.call(_PEEK, shapes.PeekInput(queue=self._path, count_max=count_max)).result
        return [peeked_of(message) for message in answer.messages]

    def stats(self) -> Stats:
        """VeilMQ.DescribeQueue."""
        described = self._calls.call(DESCRIBE, shapes.QueueInput(queue=self._path)).result
        return Stats(
            visible=described.visible,
            delayed=described.delayed,
            in_flight=described.in_flight,
            visibility_timeout=described.visibility_timeout,
            retention=described.retention,
            delay=described.delay,
            incarnation=str(described.incarnation),
        )

    def recommended(self) -> Recommended | None:
        """VeilMQ.DescribeQueue."""
        described = self._calls.call(DESCRIBE, shapes.QueueInput(queue=self._path)).result
        plan = described.plan
        return None if plan is None else Recommended(plan.lease, plan.by_type, plan.why, plan.applied)

    def _failures(
        self, kind: Operation, given: shapes.ExtendInput | shapes.DeleteInput, report: Report | None = None
    ) -> dict[int, VeilError]:
        """What was not done, by place in the request."""
        done = self._calls.call(kind, given, report=report)
        if not done.result.failures:
            return {}
        failures = {each.index: done.failure_of(each.error) for each in done.result.failures}
        if done.again and kind is _DELETE:
            return {index: error for index, error in failures.items() if not isinstance(error, MessageGone)}
        return failures

    @staticmethod
    def _raise_first(failures: dict[int, VeilError]) -> None:
        if failures:
            raise failures[0]


def _fitting(given: str | Message, able: Capabilities) -> shapes.MessageIn:
    """The message on the wire. What no server of ours does, what is too large and what has no UTF-8 is refused here."""
    message = given if isinstance(given, str) else as_message(given)
    if not isinstance(message, str):
        if message.deduplication_id is not None and not able.native_fifo:
            raise CapabilityMissing(capability="deduplication")
        if message.priority is not None and not able.priorities:
            raise CapabilityMissing(capability="priorities")
    wire = wire_of(message)
    body = wire.body or ""
    if len(body) > shapes.REQUEST_BYTES_MAX:
        raise MessageTooLarge(size_bytes=wire_bytes(wire), limit_bytes=shapes.REQUEST_BYTES_MAX)
    if not body.isascii():
        try:
            body.encode()
        except UnicodeEncodeError as error:
            raise ParameterInvalid(parameter="body", reason=f"has no UTF-8 form: {error.reason}") from error
    return wire


def _check_lease(lease: float) -> None:
    checked.seconds(lease, "lease", 0, shapes.LEASE_SECONDS_MAX)


def _other_count() -> TransportError:
    return TransportError(reason="the answer has another number of results", may_have_happened=True)
