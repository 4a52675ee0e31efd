"""Sends to FIFO queues: required fields, deduplication, and the group that a message joins.

Strategy: all sends of a batch to FIFO queues are handled together, so that their groups and deduplication ids are read
in one statement each. A refused or absorbed send leaves only its event; the others are appended like any message
(sends.py), in the order of the commands. Source: SendMessage in the SQS API Reference.
"""

from collections.abc import Callable, Sequence

import msgspec

from veilmq.model.commands import Send
from veilmq.model.errors import ParameterInvalid
from veilmq.model.outcomes import Outcome, Sent
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.messages.deduplication import Key, Window, identity_of, key_of
from veilmq.store.sqlite.messages.groups import Joining

Append = Callable[[LiveQueue, Send], Sent]
DELAY_REASON = "a FIFO queue has one delay for all its messages"
GROUP_REASON = "a message of a FIFO queue must have a group"
IDENTITY_REASON = "the queue does not deduplicate by content, so that a message must have a deduplication id"


def send_fifo(
    writer: Writer, asked: Sequence[tuple[LiveQueue, Send]], joining: Joining, append: Append
) -> list[Outcome]:
    """Accept the messages that are valid and not duplicates, in the order of the commands."""
    prepared = [_prepare(writer, queue, command) for queue, command in asked]
    names: dict[int, tuple[LiveQueue, set[str]]] = {}
    keys = []
    for (queue, _), ready in zip(asked, prepared, strict=True):
        if not isinstance(ready, ParameterInvalid):
            command, key = ready
            assert command.extras.group is not None
            names.setdefault(queue.generation, (queue, set()))[1].add(command.extras.group)
            keys.append(key)
    for queue, wanted in names.values():
        joining.find(queue, wanted)
    window = Window(writer, keys)
    outcomes: list[Outcome] = []
    for (queue, _), ready in zip(asked, prepared, strict=True):
        if isinstance(ready, ParameterInvalid):
            outcomes.append(ready)
            continue
        command, key = ready
        sent = window.absorbed(queue, command, key)
        if sent is None:
            sent = append(queue, command)
            window.took(command, key, sent)
        outcomes.append(sent)
    window.flush()
    return outcomes


def _prepare(writer: Writer, queue: LiveQueue, command: Send) -> tuple[Send, Key] | ParameterInvalid:
    """The command with its deduplication id, and its key; or what is wrong with the command."""
    extras = command.extras
    group = extras.group
    if group is None:
        return ParameterInvalid(parameter="group", reason=GROUP_REASON)
    if command.delay_us:
        return ParameterInvalid(parameter="delay_us", reason=DELAY_REASON)
    identity = identity_of(queue, command)
    if identity is None:
        return ParameterInvalid(parameter="deduplication_id", reason=IDENTITY_REASON)
    if extras.deduplication_id is None:
        extras = msgspec.structs.replace(extras, deduplication_id=identity)
        command = msgspec.structs.replace(command, extras=extras, delay_us=None)
    elif command.delay_us is not None:  # a delay of 0 means none of its own: the queue's delay applies
        command = msgspec.structs.replace(command, delay_us=None)
    return command, key_of(queue, group, identity)
