"""Lives in which messages go from queue to queue: dead letters, move tasks, and copies of what is published.

Strategy: a moved message has a new id, and the publisher never learns those of the copies, so these lives are decided
by bodies, each of which is sent or published once: at the end one that was acknowledged is in one place, once, unless
somebody may have deleted it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from tests.simulation.clients import Client, Drawn, digest
from tests.simulation.plan import COPIES, DEAD, JOBS, TOPIC
from tests.support.contract.stage import TESTER, sending

from veilmq.checking.log import Kind, Operation, Outcome
from veilmq.model.commands import AnyCommand, CancelMove, CreateTopic, ListMoves, Publish, StartMove, Subscribe
from veilmq.model.moves import MoveStatus
from veilmq.model.outcomes import MovesListed
from veilmq.model.settings.topic import ContentFormat, SubscriptionSettings
from veilmq.server.shell import Shell

_SUBSCRIPTION: Final = SubscriptionSettings(endpoint="queue", queue=COPIES, content_format=ContentFormat.SIMPLIFIED)


async def make_topic(shell: Shell) -> None:
    """Make the topic, and let it copy to its queue."""
    await shell.call(CreateTopic(topic=TOPIC, origin=TESTER))
    await shell.call(Subscribe(topic=TOPIC, origin=TESTER, name="copies", settings=_SUBSCRIPTION))


class MovingClient(Client):
    """A client of these lives."""

    def _draw(self) -> Drawn:
        chance = self._chance
        draw = chance.random()
        if draw < 0.2:
            asked = [self._send(JOBS) for _ in range(chance.choice((1, 1, 3)))]
            return [command for command, _ in asked], [number for _, number in asked]
        if draw < 0.32:
            return self._publish()
        if draw < 0.62:
            return self._receive(chance.choice((JOBS, JOBS, JOBS, DEAD, COPIES)))
        if draw < 0.9:
            return self._use()
        return [self._move()], []

    def _publish(self) -> Drawn:
        self._book.bodies += 1
        body = f"b{self._book.bodies}.".ljust(int(self._chance.random() ** 2 * self._plan.body_bytes), "x")
        number = self._book.begin(self.name, Kind.SEND, COPIES, body=digest(body))
        asked = sending(JOBS, body)
        return [Publish(topic=TOPIC, origin=TESTER, body=body, md5=asked.md5, size_bytes=asked.size_bytes)], [number]

    def _move(self) -> AnyCommand:
        if self._book.tasks and self._chance.random() < 0.3:
            return CancelMove(queue=DEAD, origin=TESTER, task=self._chance.choice(self._book.tasks))
        rate = self._chance.choice((None, 1, 10))
        return StartMove(queue=DEAD, origin=TESTER, destination=self._chance.choice((None, JOBS)), rate_max=rate)


async def is_moving(shell: Shell) -> bool:
    """Whether a task is running; it is told to end."""
    (listed,) = await shell.call(ListMoves(queue=DEAD, origin=TESTER, count_max=10))
    assert isinstance(listed, MovesListed), listed
    running = [each for each in listed.tasks if each.status in {MoveStatus.RUNNING, MoveStatus.CANCELLING}]
    for each in running:
        await shell.call(CancelMove(queue=DEAD, origin=TESTER, task=each.id))
    return bool(running)


def misplaced(log: Sequence[Operation]) -> list[str]:
    """What was lost, is there twice, came back, or is there though it was refused."""
    bodies = {grant.lease: grant.body for each in log for grant in each.grants}
    granted, unsent = set(bodies.values()), set(bodies.values())
    bodies |= {each.lease: each.body for each in log if each.kind is Kind.SEND and each.lease is not None}
    deletes = [each for each in log if each.kind is Kind.DELETE and each.outcome is not Outcome.FAIL]
    maybe_deleted = {bodies[each.lease] for each in deletes if each.lease is not None and each.client != "drain"}
    gone = {
        bodies[each.lease]: each.returned or 0
        for each in deletes
        if each.outcome is Outcome.OK and each.lease is not None
    }
    drained = Counter(grant.body for each in log if each.client == "drain" for grant in each.grants)
    found = [
        f"{grant.body} was deleted and came back"
        for each in log
        for grant in each.grants
        if each.invoked > gone.get(grant.body, each.invoked)
    ]
    for each in log:
        if each.kind is not Kind.SEND:
            continue
        unsent.discard(each.body)
        if drained[each.body] > 1:
            found.append(f"{each.body} is there {drained[each.body]} times")
        if each.outcome is Outcome.OK and not drained[each.body] and each.body not in maybe_deleted:
            found.append(f"{each.body} was acknowledged and is lost: {each}")
        if each.outcome is Outcome.FAIL and each.body in granted:
            found.append(f"{each.body} was refused and is there: {each}")
    return [*found, *(f"{body} was sent by nobody" for body in sorted(unsent))]
