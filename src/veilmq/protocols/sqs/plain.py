"""Plain messages in one step each, where there is an accelerator: their commands, and their answers in JSON.

Strategy: a plain message has a body of printable ASCII, and nothing else. The commands of plain entries are made at
once, and an answer in which every entry succeeded is written without a result of the service model. Each of these
returns None for anything else; then the operation (messages.py) does it. It decides what is right: the tests in
tests/accelerator hold the two together.
"""

from collections.abc import Sequence
from typing import Final

from veilmq.accelerator import shortcut
from veilmq.model.commands import Delete, Send
from veilmq.model.messages import NO_EXTRAS, Delivery
from veilmq.model.outcomes import Deleted, Outcome, Received, Sent
from veilmq.protocols.sqs.call import Call, Entry
from veilmq.protocols.sqs.forms import DeleteEntry, SendEntry, SendMessageInput

PLAIN_SEND: Final = shortcut("plain_send", Send, NO_EXTRAS, SendMessageInput)
"""(input, queue, origin): the command. For a standard queue, and without a trace header."""
PLAIN_SENDS: Final = shortcut("plain_sends", Send, NO_EXTRAS, SendEntry, Entry)
"""(entries of the input, queue, origin): the commands, and the entries. As above."""
PLAIN_DELETES: Final = shortcut("plain_deletes", Delete, DeleteEntry, Entry)
"""(entries of the input, queue, origin, arrived, after_expiry): the commands, and the entries."""
SENT_JSON: Final = shortcut("sent_json", Send, Sent, NO_EXTRAS)
ENTRIES_JSON: Final = shortcut("entries_json", Send, Sent, NO_EXTRAS, Entry, Deleted)
RECEIVED_JSON: Final = shortcut("received_json", Delivery)


def sent_json(call: Call, outcomes: Sequence[Outcome]) -> bytes | None:
    """SendMessageResult."""
    return None if SENT_JSON is None else SENT_JSON(call.commands, outcomes)


def sends_json(call: Call, outcomes: Sequence[Outcome]) -> bytes | None:
    """SendMessageBatchResult, if all were sent."""
    return None if ENTRIES_JSON is None else ENTRIES_JSON(call.memo.entries, call.commands, outcomes)


def deleted_json(call: Call, outcomes: Sequence[Outcome]) -> bytes | None:
    """The answer of DeleteMessage, which has no result."""
    return b"" if type(outcomes[0]) is Deleted else None


def deletes_json(call: Call, outcomes: Sequence[Outcome]) -> bytes | None:
    """DeleteMessageBatchResult, if all were deleted."""
    return None if ENTRIES_JSON is None else ENTRIES_JSON(call.memo, call.commands, outcomes)


def received_json(call: Call, outcomes: Sequence[Outcome]) -> bytes | None:
    """ReceiveMessageResult, if no attributes are wanted."""
    if RECEIVED_JSON is None or call.memo is not None or type(outcomes[0]) is not Received:
        return None
    body: bytes | None = RECEIVED_JSON(outcomes[0].messages)
    return body
