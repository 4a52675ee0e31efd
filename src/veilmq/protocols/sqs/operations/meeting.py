"""CreateQueue of an existing queue with a different label: checks whether both labels mean the same.

Strategy: the store compares labels as plain texts. If one differs, the queue's own labels are read, and the CreateQueue
is sent again with the stored text of every label that means the same. So a stored text matches any other text with the
same meaning. Source: CreateQueue in the SQS API Reference ("the exact names and values of all the queue's attributes").
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from veilmq.model.access import EVERYTHING
from veilmq.model.commands import CreateQueue, DescribeQueue
from veilmq.model.errors import QueueExists
from veilmq.model.outcomes import Outcome, QueueDescribed
from veilmq.protocols.sqs.attributes import spelled_as
from veilmq.protocols.sqs.call import Call, Operation
from veilmq.protocols.sqs.errors import fault_of
from veilmq.protocols.sqs.inputs import AnyInput


class _Held(NamedTuple):
    """The refused call, and its refusal unless the queue proves to be the same."""

    call: Call
    refused: QueueExists


def compared(call: Call, outcomes: Sequence[Outcome]) -> Call | None:
    """A call that reads the queue's labels, if a CreateQueue was refused because of one."""
    (command,), (outcome,) = call.commands, outcomes
    assert isinstance(command, CreateQueue)
    if not isinstance(outcome, QueueExists) or outcome.setting not in command.change.get("labels", ()):
        return None
    question = DescribeQueue(queue=command.queue, origin=command.origin)
    key = msgspec.structs.replace(call.key, grants=EVERYTHING)
    return msgspec.structs.replace(call, key=key, commands=(question,), row=_MEET, memo=_Held(call, outcome))


def _answer(call: Call, outcomes: Sequence[Outcome]) -> Call:
    held: _Held = call.memo
    (command,), (outcome,) = held.call.commands, outcomes
    assert isinstance(command, CreateQueue)
    if isinstance(outcome, QueueDescribed):
        labels = command.change["labels"]
        spelled = spelled_as(labels, outcome.info.settings.labels)
        if spelled != labels:
            again = msgspec.structs.replace(command, change=command.change | {"labels": spelled})
            return msgspec.structs.replace(held.call, commands=(again,))
    raise fault_of(held.refused, command)


_MEET: Final = Operation("Meet", AnyInput, lambda asked, given: ((), None), _answer)
