"""The port that every adapter offers and every pattern stands on.

Strategy: one `Queue`, small enough to wrap. A handle is one opaque string that carries all that a later call needs
(Azure's message id with its pop receipt, a large message's object), so that any process can use it. A batch returns one
result or one error an entry, in order, and raises for no entry; it raises only if nothing of it can have happened. What
a queue cannot do is CapabilityMissing before any I/O.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from veilmq.client.capabilities import Capabilities
from veilmq.client.messages import Extension, Message, Peeked, Received, Recommended, Sent, Stats, Template
from veilmq.model.errors import VeilError
from veilmq.model.reports import Failure


class Queue(Protocol):
    """A queue of some cloud, server or directory; also every pattern over one. Safe to call from many threads.

    All calls raise QueueMissing, TransportError (unreachable, or outcome unknown), ServiceError (what the cloud said
    that we have no word for) and, of the calls' own, what they name.
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
        """The place it lives in, for patterns that need more queues."""
        ...

    def send(self, message: str | Message) -> Sent:
        """Durable when this returns. Raises MessageTooLarge, ParameterInvalid, CapabilityMissing, CapacityError."""
        ...

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """Any number; split into requests of `Capabilities.batch_messages_max` and of the protocol's size."""
        ...

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """Up to `count_max` messages, each leased for `lease` seconds.

        None: for the sender's `lease_hint`, else, on our server and in directories, for what an applied plan says, else
        for the queue's visibility timeout. 0, where the service has it: the lease is over at once.

        Waits up to `wait` seconds for the first one; 0 never waits, whatever the queue's own setting is. More than
        `Capabilities.receive_messages_max` is ParameterInvalid.
        """
        ...

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """The lease ends `lease` seconds from now; returns the handle to use next.

        `body` replaces the body where `Capabilities.body_replaceable`. After the lease's end the message is held again
        if nobody else received it; on FIFO queues and MNS that is LeaseExpired. Raises LeaseExpired, LeaseTaken,
        MessageGone, ReceiptInvalid.
        """
        ...

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """Any number, as few requests as the protocol allows; the handle to use next, or an error, an entry."""
        ...

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        """Give the message back, visible after `delay` seconds. Raises as `extend` does.

        `failure`: why, for our server's history; a request of its own is not made for it, and clouds ignore it.
        """
        ...

    def delete(self, handle: str) -> None:
        """Done with it. Raises LeaseTaken, MessageGone or LeaseExpired where the protocol tells, ReceiptInvalid."""
        ...

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """Any number; None for each that is done."""
        ...

    def peek(self, count_max: int = 1) -> list[Peeked]:
        """Look without a lease. Raises CapabilityMissing where the protocol has no peek."""
        ...

    def stats(self) -> Stats:
        """The queue as it stands."""
        ...

    def recommended(self) -> Recommended | None:
        """First leases that were learnt for this queue, for producers and people; None where nobody can tell or
        nothing was published yet. Our server and directories tell."""
        ...

    def interrupt(self) -> None:
        """End the receives that wait in other threads: they return at once, with nothing unless a message was on its
        way. The queue stays open; what a poll that cannot be ended still brings is released. Raises nothing."""
        ...

    def close(self) -> None:
        """Let connections go; a parked receive of another thread ends. Twice is once."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Account(Protocol):
    """A place with queues: a data directory, or one account and region of a server or cloud."""

    def queue(self, name: str) -> Queue:
        """A queue that exists. Raises QueueMissing."""
        ...

    def capabilities(self, name: str) -> Capabilities:
        """What a queue of that name can do, whether it is there or not. No I/O."""
        ...

    def create(self, name: str, template: Template | None = None) -> bool:
        """Make sure the queue exists; True if it did not. Raises QueueExists if its settings differ."""
        ...

    def delete(self, name: str) -> None:
        """Delete the queue with all its messages. Raises QueueMissing."""
        ...

    def names(self, prefix: str = "") -> list[str]:
        """The queues there are, by name."""
        ...

    def close(self) -> None:
        """Let connections go, those of its queues too."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
