"""The reference model's move tasks: when one may begin, what it may move, and when it may report completion.

Strategy: the store chooses when it moves what; the model learns of every move from its event and checks it. A task that
reports completion has left nothing behind that it could have moved.
"""

from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec
from tests.support.reference_groups import VISIBLE

from veilmq.model.commands import CancelMove, StartMove
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.model.events import EventRecord
from veilmq.model.instant import Instant
from veilmq.model.messages.states import State
from veilmq.model.moves import TASK_US_MAX, MoveFailure, MoveInfo, MoveStatus
from veilmq.model.outcomes import MoveCancelled, MoveStarted, Outcome
from veilmq.model.settings.queue import QueueKey

if TYPE_CHECKING:
    from tests.support.reference import Message, Queue, Reference

_UNDER_WAY: Final = frozenset({MoveStatus.RUNNING, MoveStatus.CANCELLING})


class Task(msgspec.Struct, eq=False):
    """One move task."""

    id: bytes
    source: "Queue"
    destination: QueueKey | None
    last: int
    """Messages that came later stay."""
    started: Instant
    status: MoveStatus = MoveStatus.RUNNING
    moved: int = 0


class Tasks:
    """All tasks of the model."""

    def __init__(self, reference: "Reference") -> None:
        self._reference = reference
        self.all: list[Task] = []

    def under_way(self) -> list[Task]:
        """Those of queues that exist and that have not ended."""
        queues = self._reference.queues
        return [task for task in self.all if task.status in _UNDER_WAY and queues.get(task.source.key) is task.source]

    def start(self, command: StartMove, outcome: Outcome) -> None:
        """Judge a StartMove."""
        queues = self._reference.queues
        source = queues.get(command.queue)
        if source is None:
            assert type(outcome) is QueueMissing, outcome
            return
        policies = [queue.settings.redrive for queue in queues.values()]
        wrong = not any(policy is not None and policy.target == command.queue for policy in policies)
        if not wrong and command.destination is not None:
            destination = queues.get(command.destination)
            if destination is None:
                assert type(outcome) is QueueMissing, outcome
                return
            wrong = destination is source or destination.settings.fifo != source.settings.fifo
        if wrong or any(task.source is source for task in self.under_way()):
            assert type(outcome) is ParameterInvalid, outcome
            return
        assert isinstance(outcome, MoveStarted), outcome
        info = outcome.info
        assert (info.status, info.moved) == (MoveStatus.RUNNING, 0)
        self.all.append(Task(info.id, source, command.destination, self._reference.top, info.started))

    def cancel(self, command: CancelMove, outcome: Outcome) -> None:
        """Judge a CancelMove of a task that the model knows."""
        source = self._reference.queues.get(command.queue)
        if source is None:
            assert type(outcome) is QueueMissing, outcome
            return
        assert isinstance(outcome, MoveCancelled), outcome
        for task in self.all:
            if task.id == command.task and task.source is source and outcome.info is not None:
                assert outcome.cancelled is (task.status is MoveStatus.RUNNING)
                if outcome.cancelled:
                    task.status = MoveStatus.CANCELLING
                return
        assert (outcome.info, outcome.cancelled) == (None, False)

    def moved(self, event: EventRecord) -> None:
        """The store reports that it moved a message: it must have been that message's turn."""
        message = self._named(event.sequence)
        (task,) = [task for task in self.under_way() if task.source is message.queue]
        assert task.status is MoveStatus.RUNNING, "a cancelled task moves nothing"
        assert message in self._movable(task)
        target = self._reference.queues[self._target(task, message)]
        assert event.detail is not None
        sequence = event.detail["target_sequence"]
        assert sequence > self._reference.top
        message.step("move")
        task.moved += 1
        self._reference.top = sequence
        new = type(message)(
            target, message.body, message.priority, self._reference.now, message.own_expiry, State.READY,
            self._reference.now,
        )  # fmt: skip
        new.sequence, new.group, new.id = sequence, message.group, UUID(event.detail["target_message"]).bytes
        new.type, new.lease_hint_us = message.type, message.lease_hint_us
        target.messages.append(new)

    def told(self, task: Task, info: MoveInfo) -> None:
        """The store's report on a running task, after a sweep."""
        assert info.moved == task.moved
        if task.status is MoveStatus.CANCELLING:
            assert info.status is MoveStatus.CANCELLED
        elif self._reference.now - task.started >= TASK_US_MAX:
            assert (info.status, info.failure) == (MoveStatus.FAILED, MoveFailure.TOO_LONG)
        elif info.status is MoveStatus.COMPLETED:
            assert self._movable(task) == []
        elif info.status is MoveStatus.FAILED:
            assert any(self._failure(task, message) is info.failure for message in self._movable(task))
        else:
            assert info.status is MoveStatus.RUNNING
        task.status = info.status

    def _named(self, sequence: int | None) -> "Message":
        queues = self._reference.queues.values()
        (message,) = [one for queue in queues for one in queue.messages if one.sequence == sequence]
        return message

    def _movable(self, task: Task) -> "list[Message]":
        """What the task could move now."""
        messages = task.source.messages
        found = []
        for one in messages:
            if one.state not in VISIBLE or one.sequence > task.last or one.expires() <= self._reference.expiry_now:
                continue
            if task.source.settings.fifo:
                alive = [other for other in messages if other.group == one.group and other.state is not State.GONE]
                if any(other.sequence < one.sequence for other in alive):
                    continue
            found.append(one)
        return found

    def _target(self, task: Task, message: "Message") -> QueueKey:
        key = message.came_from if task.destination is None else task.destination
        assert key is not None
        return key

    def _failure(self, task: Task, message: "Message") -> MoveFailure | None:
        key = message.came_from if task.destination is None else task.destination
        if key is None:
            return MoveFailure.SOURCE_UNKNOWN
        to = self._reference.queues.get(key)
        if to is None:
            return MoveFailure.QUEUE_MISSING
        if to.settings.fifo != task.source.settings.fifo:
            return MoveFailure.KIND_DIFFERS
        return MoveFailure.MESSAGE_TOO_LARGE if len(message.body) > to.settings.message_bytes_max else None
