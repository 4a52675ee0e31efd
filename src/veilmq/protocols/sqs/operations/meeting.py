"""CreateQueue of a queue that is there, and differs in a label: whether it differs in its words alone.

Strategy: the store compares labels as texts, because it understands none. If one differs, the queue is asked for its
own, and those that mean the same are sent again in its words; a text that anybody ever stored is so met by any other of
the same meaning. Source: CreateQueue in the SQS API Reference ("the exact names and values of all the queue's
attributes").
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
    """The call that met another queue, and what it is refused with unless the other is the same."""

    call: Call
    refused: QueueExists


def compared(call: Call, outcomes: Sequence[Outcome]) -> Call | None:
    """The call that asks how the queue words its labels, if a CreateQueue was refused for one that it names."""
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
