"""What the tests of the ordered queue share: a queue with both sides' files, and sends that fail as told."""

from collections.abc import Sequence
from pathlib import Path

from tests.support.embedded import EmbeddedClient

from veilmq.client.errors import TransportError
from veilmq.client.messages import Message, Sent
from veilmq.client.ordered import LocalFile, OrderedQueue, OrderedReceiver, OrderedSender
from veilmq.client.queue import Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import VeilError


class Memory:
    """A storage of two methods, as a user may bring one."""

    def __init__(self) -> None:
        self.state: bytes | None = None
        self.saves = 0

    def load(self) -> bytes | None:
        return self.state

    def save(self, state: bytes) -> None:
        self.state = state
        self.saves += 1


class Place:
    """One queue, with both sides' files, where either side can be closed and opened again."""

    def __init__(self, embedded: EmbeddedClient, directory: Path) -> None:
        self.embedded = embedded
        self.directory = directory
        embedded.account.create("orders")
        self.queue: Queue = embedded.account.queue("orders")
        self.open: list[OrderedSender | OrderedReceiver] = []

    def sender(self, queue: Queue | None = None, **options: object) -> OrderedSender:
        side = OrderedSender(queue or self.queue, LocalFile(self.directory / "send"), clock=self.clock, **options)
        self.open.append(side)
        return side

    def receiver(self, queue: Queue | None = None, **options: object) -> OrderedReceiver:
        side = OrderedReceiver(
            queue or self.queue, LocalFile(self.directory / "receive"), **({"clock": self.clock} | options)
        )
        self.open.append(side)
        return side

    def close(self) -> None:
        for side in self.open:
            side.close()

    @property
    def clock(self):
        return self.embedded.clock


def drain(receiver: OrderedReceiver | OrderedQueue, count_max: int = 1) -> list[str]:
    """Receive and acknowledge until nothing comes."""
    bodies = []
    while messages := receiver.receive(count_max):
        for message in messages:
            receiver.delete(message.handle)
            bodies.append(message.body)
    return bodies


def bodies(count: int, first: int = 1) -> list[str]:
    return [str(number) for number in range(first, first + count)]


class Failing(Wrapping):
    """Sends fail as told: `plan` has, for each send, an error or None, and whether the message gets through."""

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.plan: list[tuple[VeilError | None, bool]] = []
        self.sent: list[Message] = []

    def send(self, message: str | Message) -> Sent:
        assert isinstance(message, Message)
        self.sent.append(message)
        error, through = self.plan.pop(0) if self.plan else (None, True)
        sent = self.inner.send(message) if through else None
        if error is not None:
            raise error
        assert sent is not None
        return sent

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        results: list[Sent | VeilError] = []
        for message in messages:
            try:
                results.append(self.send(message))
            except VeilError as error:
                results.append(error)
        return results


LOST = TransportError(reason="the answer was lost", may_have_happened=True)
UNREACHED = TransportError(reason="unreachable", may_have_happened=False)
