"""A queue of RabbitMQ as an end of a bridge, over AMQP 0-9-1 with pika (extra `amqp`).

    amqp://[user:password@]host[:port]/vhost?queue=NAME        amqps:// with TLS; message_ids=unique: see below

Strategy: one connection behind a lock, because pika's is for one thread. A lease is a delivery that is not
acknowledged: it lasts as long as the connection, and an extension only keeps that alive. A handle names connection and
delivery, so that one of a connection that was lost changes nothing. A send has returned when the broker has confirmed
it. What a bridge does not need (peek, a list of queues) raises CapabilityMissing.

Ids: applications may give several messages one message_id, or none. So a delivery gets an id of its own, and the
message_id is an attribute. With message_ids=unique the message_id is the id, which makes deduplication possible.

Sources: AMQP 0-9-1; RabbitMQ's "Consumer Acknowledgements and Publisher Confirms" and "Priority Queue Support".
"""

import base64
import json
import struct
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import pika
from msgspec.structs import replace
from pika.exceptions import AMQPError, ChannelClosedByBroker, NackError, ShortStringTooLong, UnroutableError

from veilmq.client.clock import SYSTEM
from veilmq.client.errors import TransportError
from veilmq.client.messages import Extension, Message, Peeked, Received, Recommended, Sent, Stats, Template
from veilmq.client.queue import Account, Capabilities
from veilmq.client.shared.checks import as_message, sendable
from veilmq.client.shared.lifetimes import Closing
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseTaken,
    ParameterInvalid,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)
from veilmq.model.messages import Failure

_MIB: Final = 1_048_576
_NOT_FOUND: Final = 404
_PERSISTENT: Final = 2
_POLL_SECONDS: Final = 0.1
_HEARTBEAT_SECONDS: Final = 60
_PRIORITY_DEFAULT: Final = 8
"""Ours; RabbitMQ's is 0, and its greater ones come first."""
_PROPERTIES: Final = ("content_type", "content_encoding", "correlation_id", "reply_to", "app_id", "message_id")
"""Become attributes of the same names, and properties again. A header beside one, of the same name, gets a prefix."""
_BESIDE: Final = "header_"
_SHORT_BYTES_MAX: Final = 255
"""A short string of AMQP: of a property, and the name of a header."""
_FRAME_REST_BYTES: Final = 20
"""Of the frame that holds a message's properties: what is not these."""
_DECIMAL_PLACES_MAX: Final = 255
_BASE64: Final = "content-encoding"
CAPABILITIES: Final = Capabilities(
    protocol="amqp",
    body_bytes_max=128 * _MIB,
    batch_messages_max=10,
    receive_messages_max=10,
    lease_min=1,
    lease_max=7 * 86_400,
    wait_max=20,
    delay_max=0,
    batch_extend=True,
    attributes=True,
    priorities=True,
    ttl=True,
    body_bytes_min=0,
)
Answer = TypeVar("Answer")


class RabbitAccount(Closing):
    """The queues of one virtual host. Any thread."""

    def __init__(self, parameters: Any, *, unique_ids: bool = False) -> None:
        """parameters: pika's. unique_ids: no two messages have the same message_id. Opens no connection yet."""
        self.parameters, self.unique_ids = parameters, unique_ids
        self._lock = threading.Lock()
        self._connection: Any = None
        self._channel: Any = None
        self.generation = 0
        """Of the connection: the deliveries of an earlier one are void."""

    def do(self, call: Callable[[Any], Answer], name: str = "") -> Answer:
        """What `call` returns of the open channel. Raises QueueMissing, TransportError."""
        with self._lock:
            opened = False
            try:
                if self._channel is None or not self._channel.is_open:
                    self._open()
                opened = True
                return call(self._channel)
            except ChannelClosedByBroker as error:
                self._forget()
                if error.reply_code == _NOT_FOUND:
                    raise QueueMissing(queue=name) from error
                raise ParameterInvalid(parameter="queue", reason=str(error.reply_text)) from error
            except (AMQPError, OSError) as error:
                self._forget()
                where = f"RabbitMQ at {self.parameters.host}:{self.parameters.port}"
                reason = str(error) or type(error).__name__
                reason = (
                    f"{where}: {reason}" if opened else f"{where} cannot be reached, or refuses the login: {reason}"
                )
                raise TransportError(reason=reason, may_have_happened=opened) from error

    def _open(self) -> None:
        self._forget()
        self._connection = pika.BlockingConnection(self.parameters)
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()
        self.generation += 1

    def _forget(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None and connection.is_open:
            try:
                connection.close()
            except (AMQPError, OSError):  # it was closing already
                return

    def queue(self, name: str) -> "RabbitQueue":
        """An existing queue. Raises QueueMissing."""
        queue = RabbitQueue(self, name)
        queue.stats()
        return queue

    def capabilities(self, name: str) -> Capabilities:
        """What a queue can do. No I/O."""
        del name
        return CAPABILITIES

    def create(self, name: str, template: Template | None = None) -> bool:
        """Declare it, durable. True: AMQP does not say whether it was there."""
        if template is not None:
            raise CapabilityMissing(capability="settings of a queue over AMQP")
        self.do(lambda channel: channel.queue_declare(name, durable=True), name)
        return True

    def delete(self, name: str) -> None:
        """Delete the queue with its messages."""
        self.do(lambda channel: channel.queue_delete(name), name)

    def names(self, prefix: str = "") -> list[str]:
        """AMQP has no list of queues."""
        raise CapabilityMissing(capability="a list of queues over AMQP")

    def close(self) -> None:
        """Close the connection: what was not acknowledged goes back."""
        with self._lock:
            self._forget()


class RabbitQueue(Closing):
    """See `veilmq.client.queue.Queue`; made by `RabbitAccount.queue`."""

    def __init__(self, account: RabbitAccount, name: str) -> None:
        self._account, self._name = account, name
        self._interrupts = 0

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return CAPABILITIES

    @property
    def account(self) -> Account:
        """Its virtual host."""
        return self._account

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`."""
        where = self._account.parameters
        return "amqp", where.host, where.port, where.virtual_host, self._name

    def send(self, message: str | Message) -> Sent:
        """Publish to the default exchange, and wait for the confirmation."""
        (result,) = self.send_batch([message])
        if isinstance(result, VeilError):
            raise result
        return result

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """Each is published and confirmed; after a broken connection the rest is not tried."""
        results: list[Sent | VeilError] = []
        for each in messages:
            if results and isinstance(results[-1], TransportError):
                results.append(TransportError(reason="not tried", may_have_happened=False))
                continue
            try:
                results.append(self._publish(each))
            except VeilError as error:
                if not results and isinstance(error, TransportError) and not error.may_have_happened:
                    raise
                results.append(error)
        return results

    def _publish(self, given: str | Message) -> Sent:
        message = as_message(given)
        body = sendable(replace(message, deduplication_id=None), CAPABILITIES).raw
        properties = properties_of(message)
        _check(properties, self._account.parameters.frame_max)

        def publish(channel: Any) -> None:
            channel.basic_publish("", self._name, body, properties, mandatory=True)

        try:
            self._account.do(publish, self._name)
        except TransportError as error:
            if isinstance(error.__cause__, UnroutableError):
                raise QueueMissing(queue=self._name) from error
            if isinstance(error.__cause__, NackError):
                reason = "RabbitMQ did not take it: is the queue full (x-overflow)?"
                raise TransportError(reason=reason, may_have_happened=False) from error
            raise
        return Sent(id=str(properties.message_id))

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """basic.get, as often as needed. The lease lasts as long as the connection."""
        end, interrupts = SYSTEM.monotonic() + wait, self._interrupts
        while True:
            found = self._account.do(lambda channel: self._got(channel, count_max, lease or 60), self._name)
            if found or SYSTEM.monotonic() >= end or self._interrupts != interrupts:
                return found
            time.sleep(_POLL_SECONDS)

    def _got(self, channel: Any, count_max: int, lease: float) -> list[Received]:
        found = []
        for _ in range(count_max):
            method, properties, body = channel.basic_get(self._name)
            if method is None:
                break
            handle = f"{self._account.generation}:{method.delivery_tag}"
            now = SYSTEM.monotonic()
            unique, again = self._account.unique_ids, bool(method.redelivered)
            found.append(received_of(properties, body, handle, now + lease, redelivered=again, unique_ids=unique))
        return found

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """Keep the connection alive."""
        if body is not None:
            raise CapabilityMissing(capability="body_replaceable")
        (result,) = self.extend_batch([Extension(handle, lease)])
        if isinstance(result, VeilError):
            raise result
        return result

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """Keep the connection alive; a delivery of an earlier connection has gone back. A lease of 0 releases."""
        released = [each.handle for each in extensions if not each.lease]
        lost = dict(zip(released, self._settle(released, _requeue), strict=True))
        now = self._account.generation
        results: list[str | VeilError] = []
        for each in extensions:
            fault = lost.get(each.handle)
            if fault is None and _tag_of(each.handle)[0] != now:
                fault = LeaseTaken(sequence=0, attempt=0)
            results.append(each.handle if fault is None else fault)
        return results

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        """basic.nack with requeue."""
        (error,) = self._settle([handle], _requeue)
        if error is not None:
            raise error

    def delete(self, handle: str) -> None:
        """basic.ack."""
        (error,) = self.delete_batch([handle])
        if error is not None:
            raise error

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """basic.ack for each."""
        return self._settle(handles, lambda channel, tag: channel.basic_ack(tag))

    def _settle(self, handles: Sequence[str], settle: Callable[[Any, int], None]) -> list[VeilError | None]:
        def each(channel: Any) -> list[VeilError | None]:
            results: list[VeilError | None] = []
            for generation, tag in map(_tag_of, handles):
                if generation != self._account.generation:
                    results.append(LeaseTaken(sequence=0, attempt=0))
                    continue
                settle(channel, tag)
                results.append(None)
            channel.connection.process_data_events(0)
            return results

        return self._account.do(each, self._name)

    def peek(self, count_max: int = 1) -> list[Peeked]:
        """AMQP has no peek."""
        raise CapabilityMissing(capability="peek")

    def stats(self) -> Stats:
        """Messages that are ready; AMQP does not report those that others hold. Raises QueueMissing."""
        declared = self._account.do(lambda channel: channel.queue_declare(self._name, passive=True), self._name)
        return Stats(visible=declared.method.message_count)

    def recommended(self) -> Recommended | None:
        """None."""
        return None

    def interrupt(self) -> None:
        """End a receive that waits."""
        self._interrupts += 1

    def close(self) -> None:
        """The connection belongs to the account."""
        self.interrupt()


def open_rabbitmq(url: str) -> tuple[RabbitAccount, str | None, bool]:
    """The account, the queue's name and whether it may be created, of a URL. Raises ParameterInvalid, which does not
    quote it."""
    try:
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query))
        name, create = given.pop("queue", None), given.pop("create", "0") == "1"
        ids = given.pop("message_ids", None)
        # pika takes the vhost / only in this form.
        path = parts.path if parts.path not in ("", "/") else "/%2F"
        given.setdefault("heartbeat", str(_HEARTBEAT_SECONDS))
        parameters = pika.URLParameters(urlunsplit(parts._replace(path=path, query=urlencode(given))))
    except (ValueError, TypeError, AttributeError):
        reason = "must look like amqp://USER:PASSWORD@HOST/VHOST?queue=NAME, with special characters percent-encoded"
        raise ParameterInvalid(parameter="url", reason=reason) from None
    if ids not in (None, "unique"):
        raise ParameterInvalid(parameter="url", reason="message_ids can only be unique: no two messages share one")
    return RabbitAccount(parameters, unique_ids=ids is not None), name, create


def _requeue(channel: Any, tag: int) -> None:
    channel.basic_nack(tag, requeue=True)


def _tag_of(handle: str) -> tuple[int, int]:
    generation, _, tag = handle.partition(":")
    if not (generation.isdecimal() and tag.isdecimal()):
        raise ReceiptInvalid(reason="it is no delivery of RabbitMQ")
    return int(generation), int(tag)


def received_of(
    properties: Any, body: bytes, handle: str, lease_end: float, *, redelivered: bool = False, unique_ids: bool = False
) -> Received:
    """A delivery as a message. A body that is no text becomes base64, and says so in an attribute.

    unique_ids: its message_id is its id; else that is new at each delivery. An expiration counts from now, because
    RabbitMQ does not report how much of it is over.
    """
    named = {name: found for name in _PROPERTIES if (found := getattr(properties, name))}
    headers = {name: value_of(value) for name, value in (properties.headers or {}).items()}
    attributes = {f"{_BESIDE}{name}" if name in named else name: value for name, value in headers.items()} | named
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text, attributes[_BASE64] = base64.b64encode(body).decode(), "base64"
    expires = None
    if properties.expiration is not None and str(properties.expiration).isdecimal():
        expires = SYSTEM.wall() + int(properties.expiration) / 1_000
    return Received(
        id=(properties.message_id if unique_ids else None) or uuid.uuid4().hex,
        body=text,
        attributes=attributes,
        receive_count=2 if redelivered else 1,
        sent=None if properties.timestamp is None else float(properties.timestamp),
        priority=None if not properties.priority else max(1, _PRIORITY_DEFAULT - int(properties.priority)),
        type=properties.type or None,
        expires=expires,
        handle=handle,
        lease_end=lease_end,
    )


def value_of(value: Any) -> Any:
    """A header as an attribute: text, numbers and bytes as they are, anything else as JSON."""
    if isinstance(value, str | int | float | Decimal | bytes) and not isinstance(value, bool):
        return value
    return json.dumps(value, default=str)


def header_of(value: Any) -> Any:
    """An attribute as a header: what AMQP has no type for (floats, numbers of many digits) as text."""
    if isinstance(value, Decimal) and not _is_short(value):
        return str(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value


def _is_short(value: Decimal) -> bool:
    """Whether it is a decimal of AMQP: an integer of 32 bits, and a count of places."""
    _, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or exponent > len(str(2**31)):
        return False
    raw = int("".join(map(str, digits)))
    while exponent < 0 and raw % 10 == 0 and raw:
        raw, exponent = raw // 10, exponent + 1
    return raw * 10 ** max(0, exponent) < 2**31 and -exponent <= _DECIMAL_PLACES_MAX


def properties_of(message: Message) -> Any:
    """A message's fields as AMQP properties. Its message_id is the attribute of that name, else the deduplication id,
    else a new one."""
    named = {
        name: value
        for name in _PROPERTIES
        if isinstance(value := message.attributes.get(name), str) and len(value.encode()) <= _SHORT_BYTES_MAX
    }
    headers: Mapping[str, Any] = {
        name: header_of(value) for name, value in message.attributes.items() if name not in named
    }
    urgent = 0 if message.priority is None else max(0, _PRIORITY_DEFAULT - message.priority)
    given: Mapping[str, Any] = {"message_id": message.deduplication_id or uuid.uuid4().hex} | named
    return pika.BasicProperties(
        delivery_mode=_PERSISTENT,
        headers=dict(headers) or None,
        priority=urgent or None,
        expiration=None if message.ttl is None else str(round(message.ttl * 1_000)),
        timestamp=int(SYSTEM.wall()),
        type=message.type,
        **given,
    )


def _check(properties: Any, frame_bytes_max: int) -> None:
    """Raises ParameterInvalid for what cannot be sent; later it would look like a broken connection."""
    try:
        size_bytes = sum(map(len, properties.encode()))
    except ShortStringTooLong:
        reason = f"over AMQP a name, and the message type, have at most {_SHORT_BYTES_MAX} bytes"
        raise ParameterInvalid(parameter="attributes", reason=reason) from None
    except (AMQPError, struct.error):
        raise ParameterInvalid(parameter="attributes", reason="AMQP cannot carry one of the values") from None
    if size_bytes + _FRAME_REST_BYTES > frame_bytes_max:
        reason = f"over AMQP they must fit into one frame of {frame_bytes_max} bytes"
        raise ParameterInvalid(parameter="attributes", reason=reason)
