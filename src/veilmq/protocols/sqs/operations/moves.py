"""StartMessageMoveTask, CancelMessageMoveTask, ListMessageMoveTasks.

Strategy: queues are named by ARN here, and a task by a handle that holds its id and its source's ARN: both must be the
caller's own, which is checked before the engine is called. Source: the three operations in the SQS API Reference.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from veilmq.model.commands import CancelMove, ListMoves, StartMove
from veilmq.model.errors import QueueMissing
from veilmq.model.instant import milliseconds
from veilmq.model.moves import MOVES_PER_SECOND_MAX, TASKS_KEPT, MoveFailure, MoveInfo, MoveStatus
from veilmq.model.outcomes import MoveCancelled, MovesListed, MoveStarted, Outcome
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.sqs import errors, forms
from veilmq.protocols.sqs.addresses import arn, queue_of_arn
from veilmq.protocols.sqs.call import Asked, Call, Plan, sole
from veilmq.protocols.sqs.errors import Refusal, invalid_value, missing
from veilmq.protocols.sqs.forms import CancelMessageMoveTaskInput, ListMessageMoveTasksInput, StartMessageMoveTaskInput

_HANDLE: Final = re.compile(r"[A-Za-z0-9+/]{1,1024}={0,2}\Z")
_MISSING: Final = "The resource that you specified for the {name} parameter doesn't exist."
_FAILURES: Final = {
    MoveFailure.SOURCE_UNKNOWN: "CouldNotDetermineMessageSource",
    MoveFailure.QUEUE_MISSING: "AWS.SimpleQueueService.NonExistentQueue",
    MoveFailure.KIND_DIFFERS: "AWS.SimpleQueueService.UnsupportedOperation",
    MoveFailure.MESSAGE_TOO_LARGE: "InvalidParameterValue",
    MoveFailure.TOO_LONG: "TaskDurationExceeded",
}


class _Handle(msgspec.Struct, rename="camel"):
    task_id: UUID
    source_arn: str


def _queue(asked: Asked, name: str, text: str | None) -> QueueKey:
    """The queue of an ARN, which must be of this account and region."""
    if not text:
        raise missing(name)
    queue = queue_of_arn(text)
    if queue is None:
        form = "arn:<partition>:<service>:<region>:<account-id>:<resource-id>"
        raise Refusal(errors.INVALID_PARAMETER_VALUE, f"You must use this format to specify the {name}: {form}")
    caller = asked.caller
    if caller.verified and queue.account != caller.key.account:
        raise Refusal(errors.ACCESS_DENIED, f"Access to the resource {text} is denied.")
    if queue.region != caller.region:
        raise Refusal(errors.RESOURCE_NOT_FOUND, _MISSING.format(name=name))
    return queue


def plan_start(asked: Asked, given: StartMessageMoveTaskInput) -> Plan:
    """StartMessageMoveTask."""
    source = _queue(asked, "SourceArn", given.source_arn)
    destination = None
    if given.destination_arn:  # "If this field is left blank, the messages will be redriven back"
        destination = _queue(asked, "DestinationArn", given.destination_arn)
        if destination.account != source.account:
            raise invalid_value("DestinationArn", given.destination_arn, "It must be of the same account.")
    rate = given.max_number_of_messages_per_second
    if rate is not None and not 1 <= rate <= MOVES_PER_SECOND_MAX:
        reason = f"Must be between 1 and {MOVES_PER_SECOND_MAX}, if provided."
        raise invalid_value("MaxNumberOfMessagesPerSecond", rate, reason)
    command = StartMove(queue=source, origin=asked.caller.origin, destination=destination, rate_max=rate)
    return (command,), None


def answer_start(call: Call, outcomes: Sequence[Outcome]) -> forms.StartMessageMoveTaskResult:
    """StartMessageMoveTaskResult."""
    outcome = outcomes[0]
    if isinstance(outcome, QueueMissing):
        (command,) = call.commands
        assert isinstance(command, StartMove)
        name = "SourceArn" if outcome.queue == str(command.queue) else "DestinationArn"
        raise Refusal(errors.RESOURCE_NOT_FOUND, _MISSING.format(name=name))
    started: MoveStarted = sole(call, outcomes)
    return forms.StartMessageMoveTaskResult(_handle_of(started.info))


def plan_cancel(asked: Asked, given: CancelMessageMoveTaskInput) -> Plan:
    """CancelMessageMoveTask."""
    if not given.task_handle:
        raise missing("TaskHandle")
    handle = _read_handle(given.task_handle)
    source = _queue(asked, "SourceArn", handle.source_arn)
    return (CancelMove(queue=source, origin=asked.caller.origin, task=handle.task_id.bytes),), None


def answer_cancel(call: Call, outcomes: Sequence[Outcome]) -> forms.CancelMessageMoveTaskResult:
    """CancelMessageMoveTaskResult."""
    if isinstance(outcomes[0], QueueMissing):
        raise Refusal(errors.RESOURCE_NOT_FOUND, _MISSING.format(name="SourceArn"))
    cancelled: MoveCancelled = sole(call, outcomes)
    if cancelled.info is None:
        raise Refusal(errors.RESOURCE_NOT_FOUND, "Task does not exist.")
    if not cancelled.cancelled:
        status = cancelled.info.status.value.upper()
        text = f"Only a RUNNING message movement task can be cancelled; the status of this one is {status}."
        raise Refusal(errors.UNSUPPORTED_OPERATION, text)
    return forms.CancelMessageMoveTaskResult(cancelled.info.moved)


def plan_list(asked: Asked, given: ListMessageMoveTasksInput) -> Plan:
    """ListMessageMoveTasks; without MaxResults only the latest."""
    source = _queue(asked, "SourceArn", given.source_arn)
    count = 1 if given.max_results is None else given.max_results
    if not 1 <= count <= TASKS_KEPT:
        raise invalid_value("MaxResults", count, f"MaxResults must be an integer between 1 and {TASKS_KEPT}")
    return (ListMoves(queue=source, origin=asked.caller.origin, count_max=count),), None


def answer_list(call: Call, outcomes: Sequence[Outcome]) -> forms.ListMessageMoveTasksResult:
    """ListMessageMoveTasksResult."""
    if isinstance(outcomes[0], QueueMissing):
        raise Refusal(errors.RESOURCE_NOT_FOUND, _MISSING.format(name="SourceArn"))
    listed: MovesListed = sole(call, outcomes)
    return forms.ListMessageMoveTasksResult([_entry(info) for info in listed.tasks])


def _entry(info: MoveInfo) -> forms.MoveTaskEntry:
    return forms.MoveTaskEntry(
        status=info.status.value.upper(),
        source_arn=arn(info.source),
        approximate_number_of_messages_moved=info.moved,
        approximate_number_of_messages_to_move=info.to_move,
        started_timestamp=milliseconds(info.started),
        task_handle=_handle_of(info) if info.status is MoveStatus.RUNNING else None,
        destination_arn=None if info.destination is None else arn(info.destination),
        max_number_of_messages_per_second=info.rate_max,
        failure_reason=None if info.failure is None else _FAILURES[info.failure],
    )


def _handle_of(info: MoveInfo) -> str:
    return b64encode(msgspec.json.encode(_Handle(UUID(bytes=info.id), arn(info.source)))).decode()


def _read_handle(text: str) -> _Handle:
    if _HANDLE.match(text):
        try:
            handle = msgspec.json.decode(b64decode(text), type=_Handle)
        except ValueError:
            handle = None
        if handle is not None and queue_of_arn(handle.source_arn) is not None:
            return handle
    raise Refusal(errors.INVALID_PARAMETER_VALUE, "Value for parameter TaskHandle is invalid.")
