"""What the tests of the transaction queue share: a user's database, queues of each form, and a network that fails."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.embedded import EmbeddedClient

from veilmq.client.errors import TransportError
from veilmq.client.messages import Message, Received, Sent, Template
from veilmq.client.queue import Capabilities, HandleOnSend, Queue
from veilmq.client.transaction import Prepared, TransactionQueue, Verdict
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import VeilError
from veilmq.model.messages import Failure

HOUR = 3_600.0


class Ledger:
    """The user's own database: which operations are done. It outlives every crash."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.undone: list[str] = []
        self.asked = 0
        self.answer: Verdict | None = None

    def do(self, prepared: Prepared) -> bool:
        self.done.append(prepared.id)
        return True

    def refuse(self, prepared: Prepared) -> bool:
        return False

    def check(self, prepared: Prepared) -> Verdict:
        self.asked += 1
        if self.answer is not None:
            return self.answer
        return Verdict.COMMIT if prepared.id in self.done else Verdict.ROLLBACK

    def undo(self, prepared: Prepared, error: VeilError) -> None:
        self.done.remove(prepared.id)
        self.undone.append(prepared.id)


class NoHandle(Wrapping):
    """A queue like SQS: a send returns no handle, and nothing ends before its delay."""

    changes_bodies = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(
            self.inner.capabilities, handle_on_send=HandleOnSend.NEVER, retention_below_delay=False, ttl=False
        )

    def send(self, message: str | Message) -> Sent:
        return replace(self.inner.send(message), handle=None)


class Azure(Wrapping):
    """Handles on every send, but what is abandoned would appear; no attributes."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, retention_below_delay=False, attributes=False)


KINDS: dict[str, Callable[[Queue], Queue]] = {"hidden": Wrapping, "sqs": NoHandle, "azure": Azure}


class Place:
    """A queue, its log, and a user's database; a `TransactionQueue` over them for each life of a producer."""

    def __init__(self, embedded: EmbeddedClient, kind: str, number: str = "") -> None:
        self.embedded = embedded
        self.kind = kind
        week = Template(retention=7 * 24 * HOUR)
        for name in (f"orders{number}", f"log{number}"):
            embedded.account.create(name, week)
        self.queue: Queue = KINDS[kind](embedded.account.queue(f"orders{number}"))
        self.log: Queue = KINDS[kind](embedded.account.queue(f"log{number}"))
        self.ledger = Ledger()
        self.lost: list[str] = []

    def opened(self, queue: Queue | None = None, log: Queue | None = None, **options: Any) -> TransactionQueue:
        return TransactionQueue(
            queue or self.queue, log or self.log, self.ledger.check,
            on_lost=lambda prepared: self.lost.append(prepared.id), clock=self.embedded.clock, **options,
        )  # fmt: skip

    def consumed(self) -> list[Received]:
        """Everything that a consumer gets, deleted."""
        came: list[Received] = []
        while messages := self.queue.receive(10):
            for message in messages:
                self.queue.delete(message.handle)
            came += messages
        return came

    def bodies(self) -> list[str]:
        return [message.body for message in self.consumed()]

    def left(self) -> int:
        """Entries in the log."""
        stats = self.log.stats()
        return stats.visible + (stats.delayed or 0) + (stats.in_flight or 0)


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


class Network:
    """What stands between a process and its queues. Call number `step` fails as `how` says; it has `fired` then."""

    def __init__(self, step: int = 0, how: str = "") -> None:
        self.step = step
        self.how = how
        self.calls = 0
        self.dead = False
        self.fired = False

    def over(self, queue: Queue) -> Queue:
        return Line(queue, self)

    def pass_on(self, call: Callable[[], Any]) -> Any:
        if self.dead:
            raise Killed
        self.calls += 1
        if self.how == "cut from here" and 0 < self.step <= self.calls:
            self.fired = True
            raise TransportError(reason="unreachable", may_have_happened=False)
        if self.calls != self.step:
            return call()
        if self.how in {"killed after", "answer lost"}:
            call()
        self.fired = True
        if self.how.startswith("killed"):
            self.dead = True
            raise Killed
        raise TransportError(reason=self.how, may_have_happened=self.how != "unreachable")


class Line(Wrapping):
    changes_bodies = False

    def __init__(self, inner: Queue, network: Network) -> None:
        super().__init__(inner)
        self.network = network

    def send(self, message: str | Message) -> Sent:
        return self.network.pass_on(lambda: self.inner.send(message))

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        return self.network.pass_on(lambda: self.inner.receive(count_max, lease=lease))

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.network.pass_on(lambda: self.inner.release(handle, delay, failure=failure))

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        return self.network.pass_on(lambda: self.inner.extend(handle, lease, body=body))

    def delete(self, handle: str) -> None:
        self.network.pass_on(lambda: self.inner.delete(handle))


FAILURES = ["killed before", "killed after", "answer lost", "request lost, perhaps", "unreachable", "cut from here"]


def suffix(how: str, step: int) -> str:
    """Of the names of the queues of a case."""
    return f"-{FAILURES.index(how)}-{step}"


def run(process: Callable[[], object]) -> None:
    """A process that may be killed, or give up."""
    try:
        process()
    except (Killed, TransportError):
        pass


def left_behind(place: Place, done: bool = True) -> str:
    """A producer dies after its operation (or before it), with its entry in the log."""
    network = Network()

    def do(prepared: Prepared) -> bool:
        if done:
            place.ledger.do(prepared)
        network.dead = True
        raise Killed

    queue = place.opened(network.over(place.queue), network.over(place.log))
    with pytest.raises(Killed):
        queue.send_transaction("order 7", do)
    return place.ledger.done[-1] if done else ""
