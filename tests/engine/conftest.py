"""A shell without I/O: the engine, a real SQLite store, and a clock that the test moves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.clock import ManualClock
from tests.support.contract.stage import TESTER, sending
from tests.support.sqlite import SqliteFactory

from veilmq.engine import Limits
from veilmq.engine.engine import Answer, Batch, Engine
from veilmq.model.commands import AnyCommand, CreateQueue, Receive
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.settings.queue import QueueKey

QUEUE = QueueKey("000000000000", "us-east-1", "jobs")


class Shell:
    """Loops as a shell does: take, apply, commit, give back."""

    def __init__(self, path: Path) -> None:
        self.factory = SqliteFactory(path)
        self.clock = ManualClock()
        self.store = self.factory.open()
        self.engine = Engine()
        self.answers: dict[Any, list[Outcome]] = {}
        self.order: list[Any] = []
        self._tickets = 0
        self.call(CreateQueue(queue=QUEUE, origin=TESTER))

    def limit(self, **bounds: int) -> None:
        """Start over with an engine of other limits."""
        self.engine = Engine(Limits(**bounds))

    def submit(self, *commands: AnyCommand, ticket: Any = None) -> Any:
        """Submit a call; returns its ticket."""
        self._tickets += 1
        ticket = ticket or f"t{self._tickets}"
        self.engine.submit(ticket, commands, self.clock.now)
        return ticket

    def give_back(self, batch: Batch) -> None:
        """Apply and commit the batch, and deliver what comes out."""
        applied = self.store.apply(batch.commands, self.clock.now)
        if applied.wrote:
            self.store.commit()
        self.deliver(self.engine.committed(batch, applied))

    def deliver(self, answers: list[Answer]) -> None:
        """Keep the answers; nobody may get two."""
        for ticket, outcomes in answers:
            assert ticket not in self.answers, f"{ticket} is answered twice"
            self.answers[ticket] = outcomes
            self.order.append(ticket)

    def run(self) -> None:
        """Run until there is nothing to take, and answer those who waited long enough."""
        for _ in range(1_000):
            batch = self.engine.take_batch(self.clock.now)
            if batch is None:
                break
            self.give_back(batch)
        else:
            raise AssertionError("the engine never rests")
        self.deliver(self.engine.expire_waiters(self.clock.now))

    def call(self, *commands: AnyCommand) -> list[Outcome]:
        """Submit, run, and return the answer."""
        ticket = self.submit(*commands)
        self.run()
        return self.answers[ticket]

    def later(self, duration_us: int) -> None:
        """Let time pass, and the engine notice."""
        self.clock.advance(duration_us)
        self.run()

    def send(self, *texts: str, queue: QueueKey = QUEUE, **fields: Any) -> list[Outcome]:
        """Send messages as one wire batch."""
        return self.call(*[sending(queue, text, **fields) for text in texts])

    def wait(self, ticket: str, wait_us: int | None, count_max: int = 1, queue: QueueKey = QUEUE, **fields: Any) -> str:
        """Submit a receive that may wait, and run."""
        receive = Receive(queue=queue, origin=TESTER, count_max=count_max, wait_us=wait_us, **fields)
        self.submit(receive, ticket=ticket)
        self.run()
        return ticket

    def got(self, ticket: str) -> list[str] | None:
        """The bodies that a receive was answered with; None: no answer yet."""
        if ticket not in self.answers:
            return None
        (outcome,) = self.answers[ticket]
        assert isinstance(outcome, Received), outcome
        return [message.body for message in outcome.messages]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path / "data")
    yield shell
    shell.store.close()
