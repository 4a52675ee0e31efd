"""The port: the interface that every adapter implements and every pattern uses.

Strategy: one `Queue`, small enough to wrap. A handle is one opaque string with everything that a later call needs
(Azure's message id with its pop receipt, a large message's object), so any process can use it. A batch returns one
result or one error for each entry, in order; it raises only if none of it can have happened. Something that a queue
cannot do raises CapabilityMissing before any I/O.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from veilmq.client.capabilities import Capabilities
from veilmq.client.messages import Extension, Message, Peeked, Received, Recommended, Sent, Stats, Template
from veilmq.model.errors import VeilError
from veilmq.model.reports import Failure


class Queue(Protocol):
    """A queue of some cloud, server or directory; also every pattern over one. Thread-safe.

    All calls raise QueueMissing, TransportError (unreachable, or outcome unknown), ServiceError (a refusal for which we
    have no own error), and the errors that each call names.
    """

    @property
    def name(self) -> str:
        """Its name, as the cloud has it."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do. No I/O."""
        ...

    @property
    def account(self) -> "Account":
        """The account that it belongs to, for patterns that need more queues."""
        ...

    def send(self, message: str | Message) -> Sent:
        """The message is durable when this returns. Raises MessageTooLarge, ParameterInvalid, CapabilityMissing,
        CapacityError."""
        ...

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """Any number; split into requests of at most `Capabilities.batch_messages_max` and the protocol's size
        limit."""
        ...

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """Up to `count_max` messages, each leased for `lease` seconds.

        lease=None: the sender's `lease_hint`; without one, on our server and in directories, the applied plan's lease;
        else the queue's visibility timeout. 0, where the service allows it: the lease ends at once.

        Waits up to `wait` seconds for the first message; 0 never waits, whatever the queue's own setting is. A count
        above `Capabilities.receive_messages_max` is ParameterInvalid.
        """
        ...

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """Let the lease end `lease` seconds from now; return the handle to use next.

        `body` replaces the body where `Capabilities.body_replaceable`. After the lease's end, the message is leased
        again if nobody else received it; on FIFO queues and MNS that is LeaseExpired. Raises LeaseExpired, LeaseTaken,
        MessageGone, ReceiptInvalid.
        """
        ...

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """Any number, in as few requests as the protocol allows; for each entry, the handle to use next or an error."""
        ...

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        """Give the message back, visible after `delay` seconds. Raises as `extend` does.

        `failure`: the reason, for our server's history; it never causes an extra request, and clouds ignore it.
        """
        ...

    def delete(self, handle: str) -> None:
        """Delete a message that is done. Raises LeaseTaken, MessageGone or LeaseExpired where the protocol reports it,
        ReceiptInvalid."""
        ...

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """Any number; None for each that was deleted."""
        ...

    def peek(self, count_max: int = 1) -> list[Peeked]:
        """Look without a lease. Raises CapabilityMissing where the protocol has no peek."""
        ...

    def stats(self) -> Stats:
        """The current state of the queue."""
        ...

    def recommended(self) -> Recommended | None:
        """The first leases learnt for this queue, for producers and people; None if nothing was published yet, or the
        service has no such feature. Our server and directories have it."""
        ...

    def interrupt(self) -> None:
        """End the receives that wait in other threads: they return at once, empty unless a message was on its way. The
        queue stays open. If a poll cannot be ended, the messages that it still returns are released. Raises nothing."""
        ...

    def close(self) -> None:
        """Close connections; a receive that waits in another thread ends. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Account(Protocol):
    """A set of queues: a data directory, or one account and region of a server or cloud."""

    def queue(self, name: str) -> Queue:
        """An existing queue. Raises QueueMissing."""
        ...

    def capabilities(self, name: str) -> Capabilities:
        """What a queue of that name can do, whether it exists or not. No I/O."""
        ...

    def create(self, name: str, template: Template | None = None) -> bool:
        """Make sure the queue exists; True if it is new. Raises QueueExists if its settings differ."""
        ...

    def delete(self, name: str) -> None:
        """Delete the queue with all its messages. Raises QueueMissing."""
        ...

    def names(self, prefix: str = "") -> list[str]:
        """The names of the queues."""
        ...

    def close(self) -> None:
        """Close connections, those of its queues too."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
