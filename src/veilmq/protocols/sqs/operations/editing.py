"""Operations that change a part of a setting: they read it, change it, and write it if nobody else was faster.

Strategy: the first command only asks how the queue stands, but as a change, so that the caller needs the grant to
change and no other; each further one is a compare-and-set. Whoever loses that race tries again with what the winner
left, so that somebody always wins.
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
"""What to change of a queue that stands like that; nothing: empty. Raises Refusal."""
_NEVER: Final[SettingsChange] = {"tags": None}
"""No queue has it: nothing is changed, and the outcome tells how the queue stands."""


def plan_edit(asked: Asked, queue_url: str | None, edit: Edit) -> Plan:
    """Begin an edit of that queue."""
    command = ChangeQueue(queue=asked.queue(queue_url), origin=asked.caller.origin, change={}, expected=_NEVER)
    return (command,), edit


def answer_edit(call: Call, outcomes: Sequence[Outcome]) -> results.Empty | Call:
    """Nothing but success; or the next try."""
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
