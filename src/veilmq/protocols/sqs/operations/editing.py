"""Operations that change part of a setting: read it, change it, and write it if it did not change meanwhile.

Strategy: the first command only reads the queue, but as a change, so that the caller needs exactly the grant to change.
Each further one is a compare-and-set. A caller that loses the race tries again with the winner's value, so one caller
always makes progress.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from veilmq.model.commands import ChangeQueue
from veilmq.model.outcomes import Outcome, QueueChanged
from veilmq.model.queue import QueueInfo, SettingsChange
from veilmq.protocols.sqs import results
from veilmq.protocols.sqs.call import Asked, Call, Plan, sole
from veilmq.protocols.sqs.operations.authorize import note

Edit = Callable[[QueueInfo], SettingsChange]
"""The change for a queue in this state; empty: nothing. Raises Refusal."""
_NEVER: Final[SettingsChange] = {"tags": None}
"""An expectation that never holds: nothing is changed, and the outcome shows the queue."""


def plan_edit(asked: Asked, queue_url: str | None, edit: Edit) -> Plan:
    """Start an edit of the queue."""
    command = ChangeQueue(queue=asked.queue(queue_url), origin=asked.caller.origin, change={}, expected=_NEVER)
    return (command,), edit


def answer_edit(call: Call, outcomes: Sequence[Outcome]) -> results.Empty | Call:
    """An empty result, or the next attempt."""
    outcome: QueueChanged = sole(call, outcomes)
    if outcome.changed:
        note(call.endpoint, outcome.info)
        return results.EMPTY
    edit: Edit = call.memo
    change = edit(outcome.info)
    if not change:
        return results.EMPTY
    (asked,) = call.commands
    assert isinstance(asked, ChangeQueue)
    expected = {name: getattr(outcome.info.settings, name) for name in change}
    command = msgspec.structs.replace(asked, change=change, expected=expected)
    return msgspec.structs.replace(call, commands=(command,))
