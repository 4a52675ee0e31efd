"""The reference model's order: whose turn it is, among all messages of a queue.

Strategy: as reference.py: look at everything, each time. A standard queue without groups is one whose only tenant are
the messages without a group.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Protocol, TypeVar

from veilmq.model.queue import PRIORITY_DEFAULT
from veilmq.model.states import State

VISIBLE: Final = frozenset({State.READY, State.RETURNED})


class _Message(Protocol):
    state: State
    sequence: int
    priority: int
    group: str | None


M = TypeVar("M", bound=_Message)


def in_flight(messages: Sequence[M], group: str | None) -> list[M]:
    """Those of the group that are in flight."""
    return [message for message in messages if message.group == group and message.state is State.IN_FLIGHT]


def turns(fifo: bool, messages: Sequence[M], taken: Sequence[M], now: int) -> Iterator[M]:
    """What a receive meets, one after the other; the dead that nobody met are among it.

    The caller does something about each before it asks for the next: those that it put into `taken` are in flight.
    """
    return _by_group(messages) if fifo else _by_tenant(messages, taken)


def _by_group(messages: Sequence[M]) -> Iterator[M]:
    """FIFO: the groups of which none is in flight, by their first message; each until one is delayed."""
    lines: dict[str | None, list[M]] = {}
    for message in sorted(messages, key=lambda message: message.sequence):
        if message.state is not State.GONE:
            lines.setdefault(message.group, []).append(message)
    for group, line in list(lines.items()):
        if in_flight(messages, group):
            continue
        for message in line:
            if message.state is State.DELAYED:
                break
            yield message


def _tenant(message: _Message) -> str | None:
    return message.group if message.priority == PRIORITY_DEFAULT else None


def _by_tenant(messages: Sequence[M], taken: Sequence[M]) -> Iterator[M]:
    """Standard: urgent ones, then by turns of the tenants with the fewest in flight, then the rest."""
    met: list[M] = []
    while True:
        here = [one for one in messages if one.state in VISIBLE and one not in taken and one not in met]
        if not here:
            return
        flying = [_tenant(one) for one in messages if one.state is State.IN_FLIGHT or one in taken]
        highest = min(one.priority for one in here)
        turn = min(
            (one for one in here if one.priority == highest),
            key=lambda one: (flying.count(_tenant(one)), one.sequence),
        )
        yield turn
        met.append(turn)
