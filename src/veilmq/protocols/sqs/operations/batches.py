"""Shared by the three batch operations: entries are checked and answered one by one.

Strategy: an error of the batch refuses the request, an error of an entry fails only that entry. Source: "Error"
sections of the batch operations in the SQS API Reference.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from veilmq.model.commands import AnyCommand
from veilmq.model.errors import QueueMissing, VeilError
from veilmq.model.outcomes import Outcome
from veilmq.model.queue import QueueKey
from veilmq.protocols.sqs import errors, limits
from veilmq.protocols.sqs.call import Asked, Call, Entry
from veilmq.protocols.sqs.errors import Refusal, fault_of, missing
from veilmq.protocols.sqs.results import BatchResultErrorEntry


class _HasId(Protocol):
    @property
    def id(self) -> str | None: ...


HasId = TypeVar("HasId", bound=_HasId)


def plan_entries(
    asked: Asked, queue: QueueKey, given: list[HasId] | None, name: str, command_of: Callable[[HasId], AnyCommand]
) -> tuple[tuple[AnyCommand, ...], list[Entry]]:
    """Commands of the valid entries, and all entries. `name`: an entry's name in the Query form."""
    if not given:
        raise Refusal(errors.EMPTY_BATCH_REQUEST, f"There should be at least one {name} in the request.")
    if len(given) > limits.ENTRIES_MAX:
        text = f"Maximum number of entries per request are {limits.ENTRIES_MAX}. You have sent {len(given)}."
        raise Refusal(errors.TOO_MANY_ENTRIES, text)
    seen = set()
    for number, entry in enumerate(given, 1):
        if entry.id is None:
            raise missing(f"{name}.{number}.Id")
        if not limits.ENTRY_ID.match(entry.id):
            text = "A batch entry id can only contain alphanumeric characters, hyphens and underscores."
            raise Refusal(errors.INVALID_BATCH_ENTRY_ID, f"{text} It can be at most 80 letters long.")
        if entry.id in seen:
            raise Refusal(errors.BATCH_ENTRY_IDS_NOT_DISTINCT, f"Id {entry.id} repeated.")
        seen.add(entry.id)
    commands: list[AnyCommand] = []
    entries = []
    for entry in given:
        identity = entry.id or ""
        try:
            commands.append(command_of(entry))
        except Refusal as refusal:
            entries.append(Entry(identity, -1, refusal))
        else:
            entries.append(Entry(identity, len(commands) - 1))
    if not commands:
        asked.refused_batch = queue
    return tuple(commands), entries


def check_whole(call: Call, outcomes: Sequence[Outcome]) -> None:
    """Raises Refusal if the whole batch failed: its queue is missing, or the server did none of it."""
    refusals = []
    for command, outcome in zip(call.commands, outcomes, strict=True):
        if not isinstance(outcome, VeilError):
            return
        refusal = fault_of(outcome, command)
        if isinstance(outcome, QueueMissing):
            raise refusal
        refusals.append(refusal)
    if refusals and not any(refusal.fault.sender for refusal in refusals):
        raise refusals[0]


def failed(entry: Entry, refusal: Refusal) -> BatchResultErrorEntry:
    """The entry's result under Failed."""
    return BatchResultErrorEntry(entry.id, refusal.fault.sender, refusal.fault.code, refusal.message)
