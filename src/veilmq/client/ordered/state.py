"""The state that sender and receiver keep across restarts.

Strategy: one small JSON document each, tagged with its role, so that a storage of the other side, of another queue, or
written by another program is refused. The sender's document contains the bodies of open messages, as msgpack in base64:
protect the storage like the queue.
"""

from typing import TypeVar

import msgspec

from veilmq.client.encoding import original, plain
from veilmq.client.errors import QueueRecreated, StateInvalid
from veilmq.client.messages import Message


class Pending(msgspec.Struct, frozen=True):
    """A numbered message that was sent and may have arrived."""

    number: int
    message: bytes
    """msgpack of the caller's message."""
    void: bool = False


class SenderState(msgspec.Struct, tag="ordered sender", kw_only=True):
    """All numbers below `next` are given out; those in `pending` may not have arrived."""

    queue: str
    incarnation: str | None
    epoch: int
    next: int = 1
    pending: list[Pending] = []


class ReceiverState(msgspec.Struct, tag="ordered receiver", kw_only=True):
    """All numbers below `next` are acknowledged, except the skipped ones."""

    queue: str
    incarnation: str | None
    epoch: int | None = None
    """None: the epoch of the next message that comes."""
    next: int = 1
    done: list[int] = []
    """Acknowledged numbers beyond `next`."""
    skipped: list[tuple[int, int]] = []
    """First and last number of each gap that was given up: a message that still comes is late, not a duplicate."""


State = TypeVar("State", SenderState, ReceiverState)


def decode(kind: type[State], data: bytes, storage: str) -> State:
    """The state in `data`. Raises StateInvalid."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise StateInvalid(storage=storage, reason=f"holds no state of this kind: {error}") from None


def check_queue(state: SenderState | ReceiverState, queue: str, incarnation: str | None, storage: str) -> None:
    """Raises StateInvalid (the numbers belong to another queue), QueueRecreated."""
    if state.queue != queue:
        raise StateInvalid(storage=storage, reason=f"holds the numbers of queue {state.queue}, not of {queue}")
    if None not in (state.incarnation, incarnation) and state.incarnation != incarnation:
        raise QueueRecreated(queue=queue, was=str(state.incarnation), found=str(incarnation))


def packed(message: Message) -> bytes:
    """A message in `Pending`'s form. Raises ParameterInvalid for an attribute that no queue can carry."""
    return msgspec.msgpack.encode(plain(message))


def unpacked(data: bytes) -> Message:
    """The message that was packed."""
    return original(msgspec.msgpack.decode(data, type=Message))
