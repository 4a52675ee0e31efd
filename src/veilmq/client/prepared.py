"""What patterns do to messages before they go on: read them, check their text, and keep a batch in order.

Strategy: an entry that cannot be sent never leaves; its error takes its place in the answer, as the port promises.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from veilmq.client import checked
from veilmq.client.messages import Message, Sent
from veilmq.client.queue import Queue
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.model.message import first_forbidden_character

T = TypeVar("T")
R = TypeVar("R")


def as_message(given: Any) -> Message:
    """A str as the message with that body. Raises ParameterInvalid for anything else than the two, and for a message
    whose fields are not of their types."""
    if isinstance(given, Message):
        return checked.fields(given)
    if isinstance(given, str):
        return Message(given)
    raise ParameterInvalid(parameter="message", reason=f"must be a str or a Message, not {type(given).__name__}")


def text_bytes(body: Any) -> bytes:
    """The body in UTF-8. Raises ParameterInvalid if it is not text of XML 1.0 characters."""
    text = checked.body(body)
    at = first_forbidden_character(text)
    if at is not None:
        raise ParameterInvalid(parameter="body", reason=f"U+{ord(text[at]):04X} at index {at} is not allowed in XML")
    return text.encode()


def send_prepared(queue: Queue, prepared: Sequence[Message | VeilError]) -> list[Sent | VeilError]:
    """Send the messages as one batch; the errors stay where they are."""

    def send(messages: Sequence[Message]) -> list[Sent | VeilError]:
        return queue.send_batch(messages)

    return through(prepared, send)


def through(entries: Sequence[T | VeilError], call: Callable[[Sequence[T]], Sequence[R]]) -> list[R | VeilError]:
    """`call` with the entries that are no errors, and its results in their places."""
    good = [entry for entry in entries if not isinstance(entry, VeilError)]
    results = iter(call(good) if good else ())
    return [entry if isinstance(entry, VeilError) else next(results) for entry in entries]


def attempt(make: Callable[[T], R], given: T) -> R | VeilError:
    """What `make` makes of it, or the typed error that it raises."""
    try:
        return make(given)
    except VeilError as error:
        return error
