"""The veil adapter: an account on our own server, through the VeilMQ operations, and its queues. connections.py signs
requests and sends them over sockets that stay open; calls.py makes the calls and converts messages.

Strategy: Send, Extend and Delete are batches on the wire; a single call is a batch of one. Delete and Extend are
idempotent, so they may be repeated after a broken connection; a repeated Delete that finds the message gone has
succeeded. `lease_end` counts from the grant: the instant when the request left, plus the wait that the server reports.

The account: one pool of connections and one signer; each queue has its own calls over them. The key decides the
account; `account` names another one where the server allows it (development mode).
"""

import ssl
from collections.abc import Hashable, Sequence
from typing import Final

from veilmq.client.adapters.cloud import EXTEND_SECONDS, CloudAccount, CloudQueue, creation_attributes, names_on_pages
from veilmq.client.adapters.veil.calls import (
    Calls,
    Operation,
    operation,
    peeked_of,
    received_of,
    sent_of,
    wire_bytes,
    wire_of,
)
from veilmq.client.adapters.veil.connections import Endpoint, Pool, Signer
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import TransportError
from veilmq.client.messages import Extension, Message, Peeked, Received, Recommended, Sent, Stats, Template
from veilmq.client.queue import ById, Capabilities, HandleOnSend, fingerprint
from veilmq.client.shared import batched, checks
from veilmq.client.shared.checks import as_message
from veilmq.client.unreadable import log
from veilmq.model.errors import CapabilityMissing, MessageGone, MessageTooLarge, ParameterInvalid, VeilError
from veilmq.model.messages import Failure, Report, report_of
from veilmq.model.settings.access import HOME_REGION_DEFAULT
from veilmq.model.settings.queue import FIFO_SUFFIX
from veilmq.protocols.sqs import veil
from veilmq.protocols.sqs.forms import CreateQueueInput, ListQueuesInput, ListQueuesResult

__all__ = ["VeilAccount", "VeilQueue"]

_SEND: Final = operation("VeilMQ.Send", veil.SendResult, repeatable=False)
_RECEIVE: Final = operation("VeilMQ.Receive", veil.MessagesResult, repeatable=False, brings_leases=True)
_EXTEND: Final = operation("VeilMQ.Extend", veil.FailuresResult, repeatable=True, seconds_max=EXTEND_SECONDS)
_DELETE: Final = operation("VeilMQ.Delete", veil.FailuresResult, repeatable=True)
_PEEK: Final = operation("VeilMQ.Peek", veil.MessagesResult, repeatable=True)
DESCRIBE: Final = operation("VeilMQ.DescribeQueue", veil.DescribeQueueResult, repeatable=True)


def capabilities_of(name: str) -> Capabilities:
    """What our server can do on a queue of that name."""
    fifo = checks.text(name, "name").endswith(FIFO_SUFFIX)
    return Capabilities(
        protocol="veil",
        body_bytes_max=veil.REQUEST_BYTES_MAX,
        batch_messages_max=veil.ENTRIES_MAX,
        receive_messages_max=veil.RECEIVE_COUNT_MAX,
        lease_min=0.001,
        lease_max=veil.LEASE_SECONDS_MAX,
        wait_max=veil.WAIT_SECONDS_MAX,
        delay_max=0 if fifo else veil.DELAY_SECONDS_MAX,
        batch_extend=True,
        handle_on_send=HandleOnSend.ALWAYS,
        body_replaceable=True,
        retention_below_delay=True,
        attributes=True,
        peek=True,
        priorities=not fifo,
        ttl=True,
        groups=True,
        native_fifo=fifo,
        lease_hints=True,
        tags=True,
        extends_late=not fifo,
    )


class VeilQueue(CloudQueue["VeilAccount"]):
    """A `Queue` on our server; made by `VeilAccount.queue`."""

    def __init__(self, account: "VeilAccount", calls: Calls, name: str, path: str, clock: Clock) -> None:
        """`path`: the queue in requests: `name` or `account/name`."""
        super().__init__(account, name, capabilities_of(name), calls, clock)
        self._calls = calls
        self._path = path

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`."""
        return self._account.identity, self._path

    def send(self, message: str | Message) -> Sent:
        """VeilMQ.Send of one."""
        wire = _fitting(message, self._capabilities)
        result = self._send([wire], len(wire.body or ""))[0]
        if isinstance(result, VeilError):
            raise result
        return result

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """VeilMQ.Send, as often as needed."""

        def made(message: str | Message) -> tuple[veil.MessageIn, int]:
            wire = _fitting(message, self._capabilities)
            return wire, wire_bytes(wire)

        return batched(
            checks.batch(messages),
            made,
            self._send_piece,
            veil.ENTRIES_MAX,
            veil.REQUEST_BYTES_MAX,
            lambda entry: entry[1],
        )

    def _send_piece(self, entries: Sequence[tuple[veil.MessageIn, int]]) -> list[Sent | VeilError]:
        return self._send([wire for wire, _ in entries], sum(size for _, size in entries))

    def _send(self, messages: list[veil.MessageIn], size_bytes: int) -> list[Sent | VeilError]:
        given = veil.SendInput(queue=self._path, messages=messages, want_handles=True)
        done = self._calls.call(_SEND, given, size_bytes=size_bytes)
        if len(done.result.results) != len(messages):
            raise _other_count()
        return [sent_of(line) if line.error is None else done.failure_of(line.error) for line in done.result.results]

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """VeilMQ.Receive. Also returns an empty list if the queue is closed or interrupted meanwhile."""
        self._check_count(count_max)
        checks.seconds(wait, "wait", 0, veil.WAIT_SECONDS_MAX)
        if lease is not None:
            _check_lease(lease)
        given = veil.ReceiveInput(queue=self._path, count_max=count_max, lease=lease, wait=wait)
        was_open, interrupts = not self._calls.closed, self._calls.interrupts
        started = self._clock.monotonic()
        try:
            answer = self._calls.call(_RECEIVE, given, wait).result
        except TransportError:
            if (was_open and self._calls.closed) or (wait and self._calls.interrupts != interrupts):
                return []  # the server gives back the messages that it was about to return
            raise
        if self._calls.closed:
            self._give_back([message.handle for message in answer.messages])
            return []
        granted_by = started + answer.waited
        return [received_of(message, granted_by, lease) for message in answer.messages]

    def _give_back(self, handles: list[str]) -> None:
        """Give back messages of a queue that was closed meanwhile, so that others can have them at once."""
        if not handles:
            return
        entries = [veil.ExtendEntry(handle=handle, lease=0) for handle in handles]
        try:
            self._calls.late(_EXTEND, veil.ExtendInput(queue=self._path, entries=entries))
        except VeilError as error:
            log.warning("queue %s: messages could not be released: %s", self._name, error)

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """VeilMQ.Extend of one; with `body`, Azure's Update Message."""
        _check_lease(lease)
        if body is not None:
            checks.body(body)
        self._change(veil.ExtendEntry(handle=checks.handle(handle), lease=lease, body=body))
        return handle

    def _change(self, entry: veil.ExtendEntry, report: Report | None = None) -> None:
        given = veil.ExtendInput(queue=self._path, entries=[entry])
        self._raise_first(self._failures(_EXTEND, given, report))

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """VeilMQ.Extend, as often as needed. The handles do not change."""

        def made(given: Extension) -> veil.ExtendEntry:
            extension = checks.extension(given)
            _check_lease(extension.lease)
            return veil.ExtendEntry(handle=extension.handle, lease=extension.lease)

        extensions = checks.batch(extensions, "extensions")
        errors = batched(extensions, made, self._extend_piece, veil.ENTRIES_MAX)
        return [
            extension.handle if error is None else error for extension, error in zip(extensions, errors, strict=True)
        ]

    def _extend_piece(self, entries: Sequence[veil.ExtendEntry]) -> list[VeilError | None]:
        failures = self._failures(_EXTEND, veil.ExtendInput(queue=self._path, entries=list(entries)))
        return [failures.get(index) for index in range(len(entries))]

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        """VeilMQ.Extend to `delay` seconds."""
        checks.seconds(delay, "delay", 0, veil.LEASE_SECONDS_MAX)
        self._change(veil.ExtendEntry(handle=checks.handle(handle), lease=delay), report_of(delay, failure))

    def delete(self, handle: str) -> None:
        """VeilMQ.Delete of one."""
        self._raise_first(self._delete([checks.handle(handle)]))

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """VeilMQ.Delete, as often as needed."""
        return batched(checks.batch(handles, "handles"), checks.handle, self._delete_piece, veil.ENTRIES_MAX)

    def _delete_piece(self, handles: Sequence[str]) -> list[VeilError | None]:
        failures = self._delete(list(handles))
        return [failures.get(index) for index in range(len(handles))]

    def _delete(self, handles: list[str]) -> dict[int, VeilError]:
        return self._failures(_DELETE, veil.DeleteInput(queue=self._path, handles=handles))

    def peek(self, count_max: int = 1) -> list[Peeked]:
        """VeilMQ.Peek."""
        self._check_count(count_max)
        answer = self._calls.call(_PEEK, veil.PeekInput(queue=self._path, count_max=count_max)).result
        return [peeked_of(message) for message in answer.messages]

    def stats(self) -> Stats:
        """VeilMQ.DescribeQueue."""
        described = self._calls.call(DESCRIBE, veil.QueueInput(queue=self._path)).result
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
        described = self._calls.call(DESCRIBE, veil.QueueInput(queue=self._path)).result
        plan = described.plan
        return None if plan is None else Recommended(plan.lease, plan.by_type, plan.why, plan.applied)

    def _failures(
        self, kind: Operation, given: veil.ExtendInput | veil.DeleteInput, report: Report | None = None
    ) -> dict[int, VeilError]:
        """The errors, by index in the request."""
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


def _fitting(given: str | Message, able: Capabilities) -> veil.MessageIn:
    """The message on the wire. Refuses what none of our servers supports, what is too large and what has no UTF-8."""
    message = given if isinstance(given, str) else as_message(given)
    if not isinstance(message, str):
        if message.deduplication_id is not None and not able.native_fifo:
            raise CapabilityMissing(capability="deduplication")
        if message.priority is not None and not able.priorities:
            raise CapabilityMissing(capability="priorities")
    wire = wire_of(message)
    body = wire.body or ""
    if len(body) > veil.REQUEST_BYTES_MAX:
        raise MessageTooLarge(size_bytes=wire_bytes(wire), limit_bytes=veil.REQUEST_BYTES_MAX)
    if not body.isascii():
        try:
            body.encode()
        except UnicodeEncodeError as error:
            raise ParameterInvalid(parameter="body", reason=f"has no UTF-8 form: {error.reason}") from error
    return wire


def _check_lease(lease: float) -> None:
    checks.seconds(lease, "lease", 0, veil.LEASE_SECONDS_MAX)


def _other_count() -> TransportError:
    return TransportError(reason="the answer has another number of results", may_have_happened=True)


PORT_DEFAULT: Final = 9324
TIMEOUT_SECONDS: Final = 30.0
CONNECT_TIMEOUT_SECONDS: Final = 5.0
_NOBODY: Final = "veilmq"
"""Key id and secret if none are given: development mode accepts any."""
_PAGE_MAX: Final = 1_000

_CREATE_QUEUE: Final = operation("VeilMQ.CreateQueue", veil.CreateQueueResult, repeatable=True)
_DELETE_QUEUE: Final = operation("VeilMQ.DeleteQueue", veil.PurgeQueueResult, repeatable=False)
_LIST: Final = operation("AmazonSQS.ListQueues", ListQueuesResult, repeatable=True)


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class VeilAccount(CloudAccount):
    """An `Account` on our server. Safe for threads; after a fork the child opens connections of its own."""

    def __init__(
        self,
        host: str,
        port: int | None = None,
        key: str | None = None,
        secret: str | None = None,
        *,
        tls: bool | ssl.SSLContext = False,
        region: str = HOME_REGION_DEFAULT,
        account: str | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_SECONDS,
        connect_timeout: float = CONNECT_TIMEOUT_SECONDS,
        retries: bool = True,
        others: Sequence[tuple[str, int | None]] = (),
        clock: Clock = SYSTEM,
    ) -> None:
        """Opens no connection yet.

        `others`: host and port of further servers of the same cluster, to go on to when one fails.
        `tls`: True verifies by the system's authorities; a context by its own. `account`: 12 digits, if not the key's.
        `token`: of temporary credentials. `timeout`: seconds for an answer, in addition to a receive's wait; an
        extension has `EXTEND_SECONDS` at most.
        `retries`: False repeats nothing that may have happened. Raises ParameterInvalid.
        """
        super().__init__(host if port is None else f"{host}:{port}")
        places = [(each, PORT_DEFAULT if at is None else at) for each, at in ((host, port), *others)]
        if any(not each or "/" in each or each.count(":") == 1 for each, _ in places):
            raise ParameterInvalid(
                parameter="host", reason="is a name or an address alone; a URL is what connect() takes"
            )
        if (key is None) is not (secret is None):
            raise ParameterInvalid(parameter="secret", reason="key and secret need each other")
        checks.positive(timeout, "timeout")
        checks.positive(connect_timeout, "connect_timeout")
        given = key or _NOBODY, secret or _NOBODY, region, token, clock
        try:
            endpoints = [Endpoint(*each, Signer(_shown(*each), *given)) for each in places]
        except ValueError as error:
            raise ParameterInvalid(parameter="account", reason=str(error)) from error
        context = ssl.create_default_context() if tls is True else tls or None
        self.identity = (
            "veil", tuple((each.lower(), at) for each, at in places), region,
            ById(context) if isinstance(tls, ssl.SSLContext) else tls,
            fingerprint(key or _NOBODY, secret or _NOBODY, token), ById(clock),
        )  # fmt: skip
        """See `veilmq.client.queue`."""
        self._pool = Pool(endpoints, context, connect_timeout, clock)
        self._timeout = timeout
        self._clock = clock
        self._retries, self._has_key = retries, key is not None
        self._prefix = "" if account is None else f"{account}/"
        self._calls = self._new_calls("")

    def _new_calls(self, name: str) -> Calls:
        return Calls(self._pool, self._timeout, name, self._retries, has_key=self._has_key)

    def queue(self, name: str) -> VeilQueue:
        """An existing queue. Raises QueueMissing."""
        name = checks.text(name, "name")
        calls = self._new_calls(name)
        path = self._prefix + name
        calls.call(DESCRIBE, veil.QueueInput(queue=path))
        return self._opened(VeilQueue(self, calls, name, path, self._clock))

    def capabilities(self, name: str) -> Capabilities:
        return capabilities_of(name)

    def create(self, name: str, template: Template | None = None) -> bool:
        """VeilMQ.CreateQueue. Raises QueueExists, QueueDeletedRecently, ParameterInvalid."""
        name, template = checks.text(name, "name"), checks.template(template)
        attributes = creation_attributes(name, template, self.arn)
        given = CreateQueueInput(queue_name=name, attributes=attributes, tags=dict(template.tags) or None)
        done = self._new_calls(name).call(_CREATE_QUEUE, given)
        return bool(done.result.created or done.again)

    def arn(self, name: str) -> str:
        """The queue's ARN, which names its region, its account and itself. Raises QueueMissing."""
        name = checks.text(name, "name")
        found = self._new_calls(name).call(DESCRIBE, veil.QueueInput(queue=self._prefix + name)).result
        return f"arn:aws:sqs:{found.region}:{found.account}:{found.name}"

    def delete(self, name: str) -> None:
        """VeilMQ.DeleteQueue. Raises QueueMissing."""
        name = checks.text(name, "name")
        self._new_calls(name).call(_DELETE_QUEUE, veil.QueueInput(queue=self._prefix + name))

    def names(self, prefix: str = "") -> list[str]:
        """ListQueues, all pages."""
        prefix = checks.text(prefix, "prefix")

        def page(token: str | None) -> tuple[list[str], str | None]:
            given = ListQueuesInput(queue_name_prefix=prefix or None, max_results=_PAGE_MAX, next_token=token)
            listed = self._calls.call(_LIST, given).result
            return listed.queue_urls or [], listed.next_token

        return names_on_pages(page)

    def close(self) -> None:
        """Close the queues and all connections."""
        self._pool.close()
        self._calls.close()
        self._close_queues()
