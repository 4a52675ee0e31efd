"""What a transaction is made of: its verdict, what the application sees of it, and its entry in the log.

Strategy: an entry is JSON and always carries the whole message, so that nothing that happens to the half message can
lose it. Source: document 002, "transaction messages", step 2.
"""

from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from veilmq.client.capabilities import Capabilities
from veilmq.client.message_text import original, plain
from veilmq.client.messages import Message
from veilmq.model.errors import ParameterInvalid

ATTRIBUTE: Final = "veilmq.transaction"
"""Where the queue has attributes, the message says which transaction it is of: an idempotency key for consumers."""
_VERSION: Final = 1


class Verdict(StrEnum):
    """What became of the local operation."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    """Not done, and it never will be."""
    UNKNOWN = "unknown"
    """Not decided yet: ask again."""


class Form(StrEnum):
    """How the message waits for the verdict."""

    HIDDEN = "hidden"
    """A half message in the queue, delayed beyond its own end; commit makes it visible."""
    LOGGED = "logged"
    """In the log alone; commit sends it."""


class Prepared(msgspec.Struct, frozen=True):
    """A transaction as `do_transaction` and `check_transaction` see it."""

    id: str
    message: Message
    handle: str | None
    """Of the half message."""
    prepared: float
    """Unix seconds by the producer's clock."""


class Entry(msgspec.Struct, frozen=True):
    """A transaction as the log keeps it."""

    version: int
    id: str
    form: Form
    message: Message
    handle: str | None
    prepared: float
    expires: float | None
    """No later than the half message's end, Unix seconds by the producer's clock."""

    def shown(self) -> Prepared:
        """For the application."""
        return Prepared(self.id, self.message, self.handle, self.prepared)


def made(transaction: str, form: Form, message: Message, handle: str | None, at: float, life: float | None) -> Entry:
    """A new entry. life: the half message's, in seconds."""
    return Entry(_VERSION, transaction, form, message, handle, at, None if life is None else at + life)


def encode(entry: Entry) -> str:
    """The body of a log message."""
    return msgspec.json.encode(replace(entry, message=plain(entry.message))).decode()


def decode(body: str) -> Entry | None:
    """The entry in a log message; None if it is none that we know."""
    try:
        entry = msgspec.json.decode(body, type=Entry)
        message = original(entry.message)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return replace(entry, message=message) if entry.version == _VERSION else None


def marked(entry: Entry, capabilities: Capabilities) -> Message:
    """The message as it is sent: with the transaction's id where the queue can carry it."""
    message = entry.message
    if capabilities.attributes:
        message = replace(message, attributes={**message.attributes, ATTRIBUTE: entry.id})
    if capabilities.native_fifo and message.deduplication_id is None:
        message = replace(message, deduplication_id=entry.id)
    return message


def verdict_of(given: object) -> Verdict:
    """True and False are commit and roll back, as in the document. Raises ParameterInvalid."""
    if isinstance(given, bool):
        return Verdict.COMMIT if given else Verdict.ROLLBACK
    try:
        return Verdict(str(given))
    except ValueError:
        reason = f"must be a Verdict, True or False, not {given!r}"
        raise ParameterInvalid(parameter="verdict", reason=reason) from None
