"""The reference model's order: which of a queue's messages is next.

Strategy: as in reference.py, search all messages each time. In a standard queue without groups, the messages without a
group are the only tenant.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from veilmq.model.messages.states import State
from veilmq.model.settings.queue import PRIORITY_DEFAULT

if TYPE_CHECKING:
    from tests.support.reference import Message

VISIBLE: Final = frozenset({State.READY, State.RETURNED})

Served = dict[str | None, tuple[int, int]]
"""FIFO: by group, when it was served last: the instant, and the turn then."""


class Attempt(msgspec.Struct, eq=False):
    """What a receive with an attempt id was given."""

    until: int
    leases: list[tuple["Message", int, int, int, str]]
    """Message, attempt, rotation, end of the lease, handle."""

    def holds(self, now: int, expiry_now: int) -> bool:
        """Whether every lease is as it was given."""
        return now < self.until and all(
            (message.state, message.attempt, message.rotation, message.due) == (State.IN_FLIGHT, *known)
            and message.expires() > expiry_now
            for message, *known, _ in self.leases
        )

    def has_changed(self, now: int, expiry_now: int) -> bool:
        """Whether a message is gone, or its lease was changed by a command."""
        for message, attempt, rotation, due, _ in self.leases:
            is_same_lease = (message.attempt, message.rotation) == (attempt, rotation)
            if message.state is State.GONE or message.expires() <= expiry_now:
                return True
            if message.due != due if is_same_lease else due > now:
                return True
        return False


class _Message(Protocol):
    state: State
    sequence: int
    priority: int
    group: str | None
    due: int
    turn: int


M = TypeVar("M", bound=_Message)


def in_flight(messages: Sequence[M], group: str | None) -> list[M]:
    """The group's messages in flight."""
    return [message for message in messages if message.group == group and message.state is State.IN_FLIGHT]


def forget_empty(served: Served, messages: Sequence[M]) -> None:
    """A group without messages is forgotten: it starts again."""
    groups = {message.group for message in messages if message.state is not State.GONE}
    for group in served.keys() - groups:
        del served[group]


def by_group(messages: Sequence[M], served: Served) -> Iterator[M]:
    """FIFO: the groups whose first message is visible, by how long they have waited since that or since they were
    served; each until one is in flight or delayed.

    What a receive meets, one after the other; the dead that nobody met are among it. The caller does something about
    each before it asks for the next.
    """
    lines: dict[str | None, list[M]] = {}
    for message in sorted(messages, key=lambda message: message.sequence):
        if message.state is not State.GONE:
            lines.setdefault(message.group, []).append(message)
    waiting = []
    for group, line in lines.items():
        head = line[0]
        if head.state in VISIBLE:
            since = max((head.due, head.turn), served.get(group, (0, 0)))
            waiting.append((since, head.sequence, group))
    for _, _, group in sorted(waiting):
        for message in lines[group]:
            if message.state not in VISIBLE:
                break
            yield message


def _waiting(message: _Message) -> tuple[int, int, int]:
    return message.due, message.turn, message.sequence


def _tenant(message: _Message) -> str | None:
    return message.group if message.priority == PRIORITY_DEFAULT else None


class Patience(msgspec.Struct):
    """Standard: how many messages went in a row before the one that has waited longest."""

    passed_over: int = 0


def by_tenant(messages: Sequence[M], taken: Sequence[M], patience: Patience) -> Iterator[M]:
    """Standard: urgent ones, then the tenants with the fewest in flight and of them the one that has waited longest,
    then the rest. The message that has waited longest of all tenants' is passed over 7 times in a row at most. As
    `by_group`; those that the caller put into `taken` are in flight."""
    met: list[M] = []
    while True:
        here = [one for one in messages if one.state in VISIBLE and one not in taken and one not in met]
        if not here:
            return
        flying = [_tenant(one) for one in messages if one.state is State.IN_FLIGHT or one in taken]
        highest = min(one.priority for one in here)
        here = sorted((one for one in here if one.priority == highest), key=_waiting)
        turn = min(here, key=lambda one: (flying.count(_tenant(one)), _waiting(one)))
        if highest == PRIORITY_DEFAULT and patience.passed_over == 7:
            turn = here[0]
        yield turn
        if highest == PRIORITY_DEFAULT:  # it counts when the caller has done something about it
            patience.passed_over = 0 if turn is here[0] else patience.passed_over + 1
        met.append(turn)
