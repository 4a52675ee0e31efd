"""A log of acknowledged commands, compared with the store's content afterwards.

Strategy: a seeded workload sends, receives, deletes and does little else. Answers are recorded by message: `sent` when
the send was acknowledged, `deleted` when the delete was. A command whose answer never came may or may not have happened
and is recorded separately. `losses` reads every message that a reopened store holds.
"""

from collections.abc import Iterator
from typing import Final

import msgspec
from tests.support.contract.stage import TESTER, sending

from veilmq.model.commands import AnyCommand, Delete, Receive, Send, Sweep
from veilmq.model.errors import VeilError
from veilmq.model.instant import DAY_US, SECOND_US, Instant
from veilmq.model.messages import Delivery, Extras
from veilmq.model.outcomes import Deleted, Outcome, Received, Sent
from veilmq.model.settings.queue import FIFO_SUFFIX, QueueKey
from veilmq.store import Store
from veilmq.testing import chance

_LEASE_US: Final = 20 * SECOND_US


def everything_in(store: Store, queue: QueueKey, now: Instant) -> Iterator[Delivery]:
    """Receive all messages. now: late enough that no lease is left. Raises VeilError."""
    while True:
        receive = Receive(queue=queue, origin=TESTER, count_max=256, lease_us=DAY_US)
        applied = store.apply([receive], now)
        if applied.wrote:
            store.commit()
        (outcome,) = applied.outcomes
        if isinstance(outcome, VeilError):
            raise outcome
        assert isinstance(outcome, Received)
        if not outcome.messages:
            return
        yield from outcome.messages


class Log(msgspec.Struct):
    """What was acknowledged, by body; and the commands that were never answered."""

    sent: set[str] = msgspec.field(default_factory=set)
    deleted: set[str] = msgspec.field(default_factory=set)
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    """Receive counts reported to receivers."""
    sending: set[str] = msgspec.field(default_factory=set)
    deleting: set[str] = msgspec.field(default_factory=set)

    def losses(self, store: Store, queue: QueueKey, now: Instant) -> list[str]:
        """Every violation of the store's promise, as text; empty if there is none.

        Receives all messages, a day later, so that no lease is left.
        """
        held: dict[str, int] = {}
        later = Instant(max(now, store.mark) + DAY_US)
        try:
            held |= {message.body: message.receive_count for message in everything_in(store, queue, later)}
        except VeilError as error:
            return [f"the queue is gone: {error}"]
        lost = self.sent - self.deleted - self.deleting - held.keys()
        risen = self.deleted & held.keys()
        invented = held.keys() - self.sent - self.sending
        fallen = {body for body, count in self.counts.items() if body in held and held[body] <= count}
        return [
            *(f"{body} was acknowledged and is lost" for body in sorted(lost)),
            *(f"{body} was deleted and is back" for body in sorted(risen)),
            *(f"{body} was never sent" for body in sorted(invented)),
            *(f"the receive count of {body} fell" for body in sorted(fallen)),
        ]


class Workload:
    """Random batches on one queue, and the log of their answers."""

    def __init__(self, queue: QueueKey, seed: int, body_bytes: int = 40) -> None:
        self.queue = queue
        self.log = Log()
        self._chance = chance(seed)
        self._body_bytes = body_bytes
        self._handles: dict[str, str] = {}
        self._number = 0
        self._name = f"{seed:x}"

    def batch(self, now: Instant) -> list[AnyCommand]:
        """The next batch. Its commands stay open until `acknowledge`, or for ever."""
        commands: list[AnyCommand] = [self._command(now) for _ in range(self._chance.randint(1, 8))]
        for command in commands:
            if isinstance(command, Send):
                self.log.sending.add(command.body)
            elif isinstance(command, Delete):
                self.log.deleting.add(self._handles[command.handle])
        return commands

    def _command(self, now: Instant) -> AnyCommand:
        draw = self._chance.random()
        if draw < 0.1:
            return Sweep()
        if draw < 0.35:
            return Receive(queue=self.queue, origin=TESTER, count_max=self._chance.randint(1, 4), lease_us=_LEASE_US)
        if draw < 0.6 and self._handles:
            handle = self._chance.choice(list(self._handles))
            return Delete(queue=self.queue, origin=TESTER, handle=handle, arrived=now)
        self._number += 1
        body = f"{self._name}-{self._number}-".ljust(self._chance.randint(1, self._body_bytes), "x")
        if self.queue.name.endswith(FIFO_SUFFIX):
            extras = Extras(group=self._chance.choice("abc"), deduplication_id=str(self._number))
            return sending(self.queue, body, extras=extras)
        return sending(self.queue, body, delay_us=self._chance.choice([0, 0, SECOND_US]))

    def acknowledge(self, commands: list[AnyCommand], outcomes: list[Outcome]) -> None:
        """Record that these answers were sent."""
        for command, outcome in zip(commands, outcomes, strict=True):
            if isinstance(command, Send) and isinstance(outcome, Sent):
                self.log.sent.add(command.body)
            elif isinstance(command, Delete) and isinstance(outcome, Deleted):
                self.log.deleted.add(self._handles.pop(command.handle))
            elif isinstance(outcome, Received):
                for message in outcome.messages:
                    self._handles[message.handle] = message.body
                    self.log.counts[message.body] = message.receive_count
        self.log.deleting -= {
            self._handles[command.handle]
            for command in commands
            if isinstance(command, Delete) and command.handle in self._handles
        }
