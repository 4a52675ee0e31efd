"""What all queues behind a network share: name, capabilities, closing, and settings cached for a minute.

Strategy: what is specific to a protocol is in its adapter; only code that would be identical in each is here. The
object that holds the waiting calls (threads in an SDK's poll, a paced poll, or our own connections) is passed in, and
is closed with the queue.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from veilmq.client import checked
from veilmq.client.capabilities import Capabilities
from veilmq.client.clock import Clock
from veilmq.client.closing import Closing
from veilmq.client.errors import TransportError
from veilmq.client.messages import Received, Recommended
from veilmq.client.unreadable import log
from veilmq.model.errors import VeilError

BELIEVED_SECONDS: Final = 60.0
"""How long the settings that a queue reported are cached."""

Value = TypeVar("Value")
Opened = TypeVar("Opened", bound="CloudQueue")


class Believed(Generic[Value]):
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


class Waits(Protocol):
    """The calls that wait."""

    def interrupt(self) -> None:
        """Cancel all calls that wait now."""
        ...

    def close(self) -> None:
        """Cancel all calls that wait, and accept no more."""
        ...


class CloudQueue(Closing):
    """The part of a `Queue` that does not depend on the protocol."""

    def __init__(self, name: str, capabilities: Capabilities, waiting: Waits) -> None:
        self._name = name
        self._capabilities = capabilities
        self._waits = waiting
        self._closed = False

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._capabilities

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
        checked.whole(count_max, "count_max", 1, self._capabilities.receive_messages_max)

    def _give_each_back(self, messages: list[Received], give_back: Callable[[str], object]) -> None:
        """Give back messages whose receive was cancelled, by their handles."""
        for message in messages:
            try:
                give_back(message.handle)
            except VeilError as error:
                log.warning("queue %s: a message could not be released: %s", self._name, error)


class CloudAccount(Closing):
    """The part of an `Account` that does not depend on the protocol: its open queues, which it closes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: weakref.WeakSet[CloudQueue] = weakref.WeakSet()

    def _opened(self, queue: Opened) -> Opened:
        """Register a queue that was opened; return it."""
        with self._lock:
            self._queues.add(queue)
        return queue

    def _close_queues(self) -> None:
        with self._lock:
            queues = list(self._queues)
        for queue in queues:
            queue.close()
