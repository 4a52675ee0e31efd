"""A visible message reaches whoever waits: random calls, cancellations and time, judged whenever the engine rests.

Strategy: when nothing is left to take and the clock stands still, a queue in which a receive would find something must
have nobody who waits; whoever was not answered is parked; nobody was answered twice, or got messages after hanging up.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import Shell
from tests.support.contract.stage import TESTER, sending

from veilmq.model.commands import (
    AnyCommand,
    ChangeQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    Peek,
    PurgeQueue,
    Receive,
    StartMove,
)
from veilmq.model.instant import HOUR_US, SECOND_US
from veilmq.model.messages import NO_EXTRAS, Extras
from veilmq.model.outcomes import Received
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.testing import chance

PLAIN, FAIR, LINE, DEAD = (QueueKey("000000000000", "us-east-1", name) for name in ("plain", "fair", "l.fifo", "dead"))
KEYS = (PLAIN, FAIR, LINE, DEAD)
KINDS = {
    "receive": 20,
    "send": 16,
    "extend": 8,
    "delete": 8,
    "change": 2,
    "create": 2,
    "drop": 1,
    "purge": 1,
    "move": 1,
}
CHANGES: list[dict[str, Any]] = [
    {"delay_us": 0},
    {"delay_us": SECOND_US},
    {"retention_us": SECOND_US},
    {"retention_us": HOUR_US},
    {"wait_us": 10 * SECOND_US},
    {"visibility_timeout_us": 0},
    {"visibility_timeout_us": SECOND_US},
    {"receives_per_second_max": 2},
    {"receives_per_second_max": None},
]


class Play:
    """One engine, and what its callers know."""

    def __init__(self, shell: Shell, seed: int) -> None:
        self.shell = shell
        self.draw = chance(seed)
        self.caps: list[int | None] = self.draw.choice([[None], [5], [None, 5]])
        """What the receives of this play have for a cap on messages in flight."""
        shell.limit(batch_messages_max=self.draw.choice([1, 10, 256]), sweep_steps_max=self.draw.choice([2, 256]))
        self.open: dict[Any, AnyCommand] = {}
        self.gone: set[Any] = set()
        self.handles: list[tuple[QueueKey, str]] = []
        for key in KEYS:
            shell.call(self.create(key))

    def create(self, key: QueueKey) -> CreateQueue:
        change: dict[str, Any] = {"fifo": True, "content_deduplication": True} if key == LINE else {}
        if key in {PLAIN, FAIR} and DEAD in self.shell.store.reader.queues:
            change = {"redrive": RedrivePolicy(DEAD, 2)}
        return CreateQueue(queue=key, origin=TESTER, change=change)

    def commands(self) -> list[AnyCommand]:
        draw = self.draw
        key = draw.choice(KEYS)
        match draw.choices(list(KINDS), list(KINDS.values()))[0]:
            case "receive":
                wait_us = draw.choice([0, SECOND_US, 20 * SECOND_US])
                attempt = draw.choice([None, None, None, "x"]) if key == LINE else None
                lease_us = draw.choice([None, 0, SECOND_US, 2 * SECOND_US])
                return [
                    Receive(
                        queue=key,
                        origin=TESTER,
                        count_max=draw.choice([1, 3, 10]),
                        lease_us=lease_us,
                        wait_us=wait_us,
                        in_flight_max=draw.choice(self.caps),
                        attempt_id=attempt,
                    )
                ]
            case "send":
                return [self.send(key) for _ in range(draw.choice([1, 1, 4]))]
            case "change":
                return [ChangeQueue(queue=key, origin=TESTER, change=draw.choice(CHANGES))]
            case "create":
                return [self.create(key)]
            case "drop":
                return [DeleteQueue(queue=key, origin=TESTER)]
            case "purge":
                return [PurgeQueue(queue=key, origin=TESTER)]
            case "move":
                return [StartMove(queue=DEAD, origin=TESTER, destination=draw.choice([None, FAIR]))]
            case kind:
                return [self.use(kind)] if self.handles else [self.send(key)]

    def send(self, key: QueueKey) -> AnyCommand:
        group = self.draw.choice("abc") if key in {FAIR, LINE} else None
        extras = Extras(group=group) if group else NO_EXTRAS
        delay_us = None if key == LINE else self.draw.choice([None, None, SECOND_US])
        ttl_us = self.draw.choice([None, None, SECOND_US])
        return sending(key, str(self.draw.random()), extras=extras, delay_us=delay_us, ttl_us=ttl_us)

    def use(self, kind: str) -> AnyCommand:
        key, handle = self.draw.choice(self.handles[-20:])
        now = self.shell.clock.now
        if kind == "delete":
            return Delete(queue=key, origin=TESTER, handle=handle, arrived=now)
        lease_us = self.draw.choice([0, SECOND_US, 5 * SECOND_US])
        return Extend(queue=key, origin=TESTER, handle=handle, lease_us=lease_us, arrived=now)

    def submit(self) -> None:
        commands = self.commands()
        self.open[self.shell.submit(*commands)] = commands[0]

    def hang_up(self) -> None:
        self.learn()
        ticket = self.draw.choice([None, *self.open])
        if ticket is not None and ticket not in self.gone:
            self.gone.add(ticket)
            self.shell.engine.cancel(ticket)

    def learn(self) -> None:
        for ticket in [ticket for ticket in self.open if ticket in self.shell.answers]:
            command, outcome = self.open.pop(ticket), self.shell.answers[ticket][0]
            if isinstance(command, Receive) and isinstance(outcome, Received):
                assert ticket not in self.gone or not outcome.messages
                self.handles += [(command.queue, message.handle) for message in outcome.messages]

    def step(self) -> None:
        for _ in range(self.draw.randrange(5)):
            self.submit()
        self.shell.clock.advance(self.draw.choice([0, 1, SECOND_US // 10, SECOND_US, 3 * SECOND_US]))
        batch = self.shell.engine.take_batch(self.shell.clock.now)
        if batch is not None:
            self.submit()
            if self.draw.random() < 0.3:
                self.hang_up()
            self.shell.give_back(batch)
        if self.draw.random() < 0.5:
            while self.shell.engine.next_due(self.shell.clock.now) <= self.shell.clock.now:
                self.shell.run()
            self.learn()
            self.judge()

    def judge(self) -> None:
        engine, store = self.shell.engine, self.shell.store
        for key in KEYS:
            if not engine.waiting.waits_for(key):
                continue
            queue = store.reader.queues[key]
            held_up = {waiter.command.in_flight_max for waiter in engine.waiting._lines[key]} == {5}
            if (held_up and queue.in_flight >= 5) or queue.settings.receives_per_second_max is not None:
                continue
            found = store.query(Peek(queue=key, origin=TESTER, count_max=1), self.shell.clock.now).messages
            redrive = queue.settings.redrive
            if found and redrive is not None and found[0].receive_count >= redrive.receive_count_max:
                continue  # a receive would not get it
            assert found == [], f"{key.name}: somebody waits"
        assert {ticket for ticket in self.open if ticket not in self.gone} <= engine.waiting.parked.keys()
        assert engine._gone == set()


def play(path: Path, seeds: range) -> None:
    for seed in seeds:
        shell = Shell(path / str(seed))
        play = Play(shell, seed)
        for _ in range(100):
            play.step()
        shell.store.close()


def test_nobody_waits_where_there_is_a_message(tmp_path: Path) -> None:
    play(tmp_path, range(6))


@pytest.mark.slow
def test_nobody_waits_where_there_is_a_message_for_long(tmp_path: Path) -> None:
    play(tmp_path, range(100, 160))
