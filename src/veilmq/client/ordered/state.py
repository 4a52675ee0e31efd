"""What sender and receiver keep between two lives.

Strategy: one small JSON document each, of a kind that names its role, so that a storage given to the wrong side, to
another queue, or written by something else is told and not believed. Bodies that are still under way are in it, as
msgpack in base64: the storage deserves the queue's own care.
"""

from typing import TypeVar

import msgspec

from veilmq.client.errors import QueueRecreated, StateInvalid
from veilmq.client.message_text import original, plain
from veilmq.client.messages import Message


class Pending(msgspec.Struct, frozen=True):
    """A message with its number: on its way, and perhaps there."""

    number: int
    message: bytes
    """msgpack of the message as the caller gave it."""
    void: bool = False


class SenderState(msgspec.Struct, tag="ordered sender", kw_only=True):
    """All numbers below `next` are given out; those in `pending` may not have arrived."""

    queue: str
    incarnation: str | None
    epoch: int
    next: int = 1
    pending: list[Pending] = []


class ReceiverState(msgspec.Struct, tag="ordered receiver", kw_only=True):
    """All numbers below `next` are acknowledged, but for the skipped ones."""

    queue: str
    incarnation: str | None
    epoch: int | None = None
    """None: that of the first message to come."""
    next: int = 1
    done: list[int] = []
    """Acknowledged numbers beyond `next`."""
    skipped: list[tuple[int, int]] = []
    """First and last number of each gap that was given up: what still comes of it is late, and no duplicate."""


State = TypeVar("State", SenderState, ReceiverState)


def decode(kind: type[State], data: bytes, storage: str) -> State:
    """The state in `data`. Raises StateInvalid."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise StateInvalid(storage=storage, reason=f"holds no state of this kind: {error}") from None


def check_queue(state: SenderState | ReceiverState, queue: str, incarnation: str | None, storage: str) -> None:
    """Raises StateInvalid (the numbers of another queue), QueueRecreated."""
    if state.queue != queue:
        raise StateInvalid(storage=storage, reason=f"holds the numbers of queue {state.queue}, not of {queue}")
    if None not in (state.incarnation, incarnation) and state.incarnation != incarnation:
        raise QueueRecreated(queue=queue, was=str(state.incarnation), found=str(incarnation))


def packed(message: Message) -> bytes:
    """A message as `Pending` keeps it. Raises ParameterInvalid for an attribute that no queue can carry."""
    return msgspec.msgpack.encode(plain(message))


def unpacked(data: bytes) -> Message:
    """The message that `packed` got."""
    return original(msgspec.msgpack.decode(data, type=Message))
