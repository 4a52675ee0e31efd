"""What all queues behind a network share: name, capabilities, closing, settings cached for a minute, bodies in base64,
receives that wait.

Strategy: what is specific to a protocol is in its adapter; only code that would be identical in each is here. The
object that holds the waiting calls (threads in an SDK's poll, a paced poll, or our own connections) is passed in, and
is closed with the queue.

Base64 bodies, for the protocols whose SDKs send them: the adapter encodes and decodes by itself. A body that is not
base64 then fails alone, not with the whole response that it came in. It goes to the policy for unreadable messages and
is never returned as if it were decoded. Source: RFC 4648, section 4.

Creation: a `Template` as the attributes of SQS's CreateQueue; whole seconds, as in SQS. The service checks the ranges.
Source: CreateQueue in the SQS API Reference.

The client's name: part of each request, and so of each message's history. The process has one name, read when a
connection or a request is made. By default it holds host and process id, so a history shows which of many workers held
a message; `name_client` sets another name, or none.

`CancellableWaits`: an SDK cannot be interrupted in a long poll. So each waiting call runs on a pool thread of its own,
and the caller waits for its answer or for a cancellation, whichever comes first. After a cancellation (close, or an
exception in the caller's thread) the late answer goes to `late`, which releases its messages. The pool's threads are
daemons, so an open poll never delays the interpreter's exit.

`PacedPolls`: the service has no long poll, and is polled less and less often. The first pause is short, so that a
message that is just arriving is found at once. Each pause is twice the last, up to one second, so that an idle wait
costs at most one request a second. The last request is made when the wait ends. A close ends a pause at once, and
messages of a request still in progress are given back. An interruption ends it too, but the caller still gets that
answer.
"""

import base64
import binascii
import json
import logging
import os
import re
import select
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import ip_address
from queue import SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from veilmq import __version__
from veilmq.client.clock import Clock, sleeping_by
from veilmq.client.errors import TransportError, Undecodable
from veilmq.client.messages import Peeked, Received, Recommended, Template
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import Anew, Closing
from veilmq.client.shared.threads import DaemonPool
from veilmq.client.unreadable import Policy, read_each, receive_readable
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, VeilError
from veilmq.model.messages import first_forbidden_character
from veilmq.model.settings.queue import FIFO_SUFFIX

log = logging.getLogger("veilmq.client")

BELIEVED_SECONDS: Final = 60.0
"""How long the settings that a queue reported are cached."""
EXTEND_SECONDS: Final = 8.0
"""How long an extension waits for its answer. A keeper has half of a lease to extend it, 15 s by default: it needs time
for a second try on another connection."""

Value = TypeVar("Value")
Opened = TypeVar("Opened", bound="CloudQueue[Any]")
Owner = TypeVar("Owner", bound="CloudAccount")


class Cached(Generic[Value]):
    """A cached value, valid for `BELIEVED_SECONDS`. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: tuple[Value, float] | None = None

    def keep(self, value: Value) -> Value:
        """Cache a value that was just looked up; return it."""
        with self._lock:
            self._known = value, self._clock.monotonic() + BELIEVED_SECONDS
        return value

    def get(self, look: Callable[[], Value]) -> Value:
        """The cached value, or the result of `look`, which caches it itself."""
        with self._lock:
            known = self._known
        if known is not None and self._clock.monotonic() < known[1]:
            return known[0]
        return look()


ACCOUNT_CLOSED: Final = "the account is closed"


class Waits(Protocol):
    """The calls that wait."""

    def interrupt(self) -> None:
        """Cancel all calls that wait now."""

    def close(self) -> None:
        """Cancel all calls that wait, and accept no more."""


class CloudQueue(Closing, Generic[Owner]):
    """The part of a `Queue` that does not depend on the protocol."""

    def __init__(self, account: Owner, name: str, capabilities: Capabilities, waiting: Waits, clock: Clock) -> None:
        self._account = account
        self._clock = clock
        self._name = name
        self._capabilities = capabilities
        self._waits = waiting
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._capabilities

    @property
    def account(self) -> Owner:
        """The account that it belongs to."""
        return self._account

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def recommended(self) -> Recommended | None:
        """None: only our own server and directories recommend leases."""
        return None

    def interrupt(self) -> None:
        """End waiting receives without one more request; messages that still arrive are released."""
        self._waits.interrupt()

    def close(self) -> None:
        """End a waiting receive; messages that still arrive are released. The connections belong to the account."""
        self._closed = True
        self._waits.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(reason=f"queue {self._name} is closed", may_have_happened=False)

    def _check_count(self, count_max: int) -> None:
        checks.whole(count_max, "count_max", 1, self._capabilities.receive_messages_max)

    def _give_each_back(self, messages: list[Received], give_back: Callable[[str], object]) -> None:
        """Give back messages whose receive was cancelled, by their handles."""
        for message in messages:
            try:
                give_back(message.handle)
            except VeilError as error:
                log.warning("queue %s: a message could not be released: %s", self._name, error)


def names_on_pages(page: Callable[[str | None], tuple[Iterable[str], str | None]]) -> list[str]:
    """The names that end the URLs on all pages. `page`: given its mark, returns its URLs and the next page's mark."""
    names: list[str] = []
    mark: str | None = None
    while True:
        urls, mark = page(mark)
        names += [url.rpartition("/")[2] for url in urls]
        if not mark:
            return names


_USER: Final = re.compile("(?:^|(?<=//))[^/]*@")
"""User and password in a URL, or in a host."""


class CloudAccount(Closing):
    """The part of an `Account` that does not depend on the protocol: its open queues, which it closes."""

    def __init__(self, place: str) -> None:
        """place: where it is, for people: what may be secret before its host is removed."""
        self._place = _USER.sub("", place)
        self._lock = threading.Lock()
        self._closed = False
        self._queues: weakref.WeakSet[CloudQueue[Any]] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._place!r}{', closed' if self._closed else ''})"

    def _opened(self, queue: Opened) -> Opened:
        """Register a queue that was opened; return it. Raises TransportError once the account is closed."""
        with self._lock:
            self._check_open()
            self._queues.add(queue)
        return queue

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(reason=ACCOUNT_CLOSED, may_have_happened=False)

    def _close_queues(self) -> None:
        """Close the queues that are open, and open no more."""
        with self._lock:
            self._closed = True
            queues = list(self._queues)
        for queue in queues:
            queue.close()


def encode_base64(raw: bytes) -> str:
    """The text in UTF-8, as base64."""
    return base64.b64encode(raw).decode("ascii")


def _decode_base64(body: str, message: str) -> str:
    """The decoded text. Raises Undecodable; `message`: the id to name in it."""
    try:
        text = base64.b64decode(body.encode("ascii"), validate=True).decode()
    except (UnicodeError, binascii.Error):
        raise Undecodable(message=message, reason="its body is not base64 of text") from None
    if first_forbidden_character(text) is not None:
        raise Undecodable(message=message, reason="its decoded body has a character that XML 1.0 cannot carry")
    return text


def _decoded(message: Received) -> Received:
    """The message with its body decoded. Raises Undecodable."""
    return msgspec.structs.replace(message, body=_decode_base64(message.body, message.id))


def decoded_peeks(messages: list[Peeked], queue: str) -> list[Peeked]:
    """The messages that can be decoded."""
    found = []
    for message in messages:
        try:
            found.append(msgspec.structs.replace(message, body=_decode_base64(message.body, message.id)))
        except Undecodable as error:
            log.warning("queue %s: %s", queue, error)
    return found


def receive_decoded(
    queue: Queue, receive: Callable[[float], list[Received]], wait: float, policy: Policy, clock: Clock
) -> list[Received]:
    """What `receive` returns, decoded if the queue uses base64 bodies; `policy` gets the messages that are not
    base64."""
    if not queue.capabilities.base64_body:
        return receive(wait)
    return receive_readable(receive, lambda came: read_each(came, _decoded, policy, queue), wait, clock)


_SECONDS: Final = {
    "visibility_timeout": "VisibilityTimeout",
    "delay": "DelaySeconds",
    "retention": "MessageRetentionPeriod",
    "wait": "ReceiveMessageWaitTimeSeconds",
}


def creation_attributes(name: str, template: Template, arn_of: Callable[[str], str]) -> dict[str, str]:
    """Attributes of the queue to create. `arn_of`: asked for the template's dead-letter queue, if it names one.

    Raises ParameterInvalid naming the template's field, and what `arn_of` raises.
    """
    dead = template.dead_letter_queue
    dead_letter_arn = None if dead is None else arn_of(dead)
    attributes = {}
    for field, attribute in _SECONDS.items():
        value = getattr(template, field)
        if value is not None:
            if checks.not_negative(value, field) != int(value):
                raise ParameterInvalid(parameter=field, reason=f"must be whole seconds here, not {value}")
            attributes[attribute] = str(int(value))
    if template.message_bytes_max is not None:
        attributes["MaximumMessageSize"] = str(template.message_bytes_max)
    if template.fifo and not name.endswith(FIFO_SUFFIX):
        raise ParameterInvalid(parameter="name", reason=f"a FIFO queue's name must end in {FIFO_SUFFIX}: {name}")
    if name.endswith(FIFO_SUFFIX):
        attributes["FifoQueue"] = "true"
    if template.content_deduplication:
        if not name.endswith(FIFO_SUFFIX):
            raise ParameterInvalid(parameter="content_deduplication", reason="only a FIFO queue deduplicates")
        attributes["ContentBasedDeduplication"] = "true"
    if dead_letter_arn is not None:
        policy = {"deadLetterTargetArn": dead_letter_arn, "maxReceiveCount": template.receive_count_max}
        # The text that AWS shows: LocalStack compares the texts when a queue exists.
        attributes["RedrivePolicy"] = json.dumps(policy, separators=(",", ":"))
    return attributes


_NAME: Final = re.compile(r"[ -~]{0,100}")
_OF_HOST: Final = re.compile(r"[^A-Za-z0-9._-]")
_HOST_CHARACTERS_MAX: Final = 63


class _Naming:
    """The name set last; None: host and process id."""

    name: str | None = None


def name_client(name: str | None) -> None:
    """Set the name that this process reports from now on: up to 100 printable ASCII characters. An empty text reports
    the release only; None goes back to the default, host and process id. Raises ParameterInvalid."""
    if name is not None and (type(name) is not str or not _NAME.fullmatch(name)):
        raise ParameterInvalid(parameter="name", reason="must be of up to 100 printable ASCII characters")
    _Naming.name = name


def client_name() -> str:
    """`veilmq/VERSION (HOST; pid N)`, or the name set by `name_client`."""
    name = _Naming.name
    if name is None:
        host = _OF_HOST.sub("-", socket.gethostname())[:_HOST_CHARACTERS_MAX]
        name = f"{host}; pid {os.getpid()}"
    return f"veilmq/{__version__} ({name})" if name else f"veilmq/{__version__}"


Answer = TypeVar("Answer")


class _Job(Generic[Answer]):
    def __init__(self, call: Callable[[], Answer], late: Callable[[Answer], None]) -> None:
        self._call = call
        self._late = late
        self.reply: SimpleQueue[tuple[Answer | None, BaseException | None]] = SimpleQueue()
        self._once = threading.Lock()

    def claim(self) -> bool:
        """True for the first caller only, which may put the reply."""
        return self._once.acquire(blocking=False)

    def run(self) -> None:
        answer: Answer | None = None
        failure: BaseException | None = None
        try:
            answer = self._call()
        except BaseException as error:  # noqa: BLE001 raised in the thread that waits for the answer
            failure = error
        if self.claim():
            self.reply.put((answer, failure))
        elif answer is not None:
            try:
                self._late(answer)
            except VeilError as error:
                log.info("messages that came too late return when their leases end: %s", error)
        elif not isinstance(failure, VeilError):
            log.error("a call failed after its caller had stopped waiting", exc_info=failure)


class CancellableWaits(Anew):
    """The waiting calls of one queue."""

    def __init__(self, name: str) -> None:
        self._pool = DaemonPool(None, f"veilmq-poll-{name}")
        self._closed = False
        self._here()

    def wait(self, call: Callable[[], Answer], late: Callable[[Answer], None]) -> Answer | None:
        """Return the call's answer, or None if `interrupt` or `close` came first; the answer then goes to `late`.
        Raises what the call raises."""
        self._here()
        job = _Job(call, late)
        with self._lock:
            if self._closed:
                return None
            self._jobs.add(job)
        try:
            with suppress(RuntimeError):  # the pool is shut down: this wait was already cancelled
                self._pool.submit(job.run)
            answer, failure = job.reply.get()
        finally:
            job.claim()
            with self._lock:
                self._jobs.discard(job)
        if failure is not None:
            raise failure
        return answer

    def interrupt(self) -> None:
        """Cancel all calls that wait now."""
        self._here()
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            if job.claim():
                job.reply.put((None, None))

    def close(self) -> None:
        """Cancel all calls that wait, and accept no more."""
        self._closed = True
        self.interrupt()
        self._pool.shutdown()

    def _begin(self) -> None:
        """The parent's waits stay in the parent."""
        self._jobs: set[_Job[Any]] = set()
        self._lock = threading.Lock()


_PAUSE_MIN: Final = 0.05
PAUSE_MAX: Final = 1.0
"""Seconds between two requests."""


class PacedPolls:
    """The waits of one queue without long polls. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = sleeping_by(clock, threading.Condition())
        self._interrupts = 0
        self._closed = False

    def poll(
        self, ask: Callable[[], list[Received]], wait: float, give_back: Callable[[list[Received]], None]
    ) -> list[Received]:
        """Repeat `ask` until it returns messages or `wait` seconds are over; return the messages."""
        deadline = self._clock.monotonic() + wait
        interrupts = self._interrupts
        pause = _PAUSE_MIN
        while True:
            found = ask()
            if self._closed:
                give_back(found)
                return []
            left = deadline - self._clock.monotonic()
            if found or left <= 0:
                return found
            with self._changed:
                if self._interrupts == interrupts:
                    self._changed.wait(min(pause, left))
                if self._interrupts != interrupts:
                    return []
            pause = min(2 * pause, PAUSE_MAX)

    def interrupt(self) -> None:
        """End the current waits."""
        with self._changed:
            self._interrupts += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits, and start no more."""
        self._closed = True
        self.interrupt()


def check_poll() -> None:
    """Raises CapabilityMissing if a connection cannot be looked at before its use."""
    if not hasattr(select, "poll"):
        raise CapabilityMissing(
            capability="select.poll, which this Python has not (Windows; after eventlet's monkey_patch())"
        )


def is_here(endpoint: str | None) -> bool:
    """Whether an endpoint is this machine's: a proxy (`http_proxy`) would look for it on its own."""
    host = urlsplit(endpoint or "").hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
