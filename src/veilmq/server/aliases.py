"""Aliases of queues: replaces them in commands by the queues' own names.

Strategy: the queue of a command, and the queues in its settings (dead letters, the endpoint of a subscription), are
looked up in one place, before grants are checked. Everything after that sees one name per queue. The endpoint text that
an owner wrote stays unchanged.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from veilmq.model.commands import AnyCommand, ChangeQueue, ChangeSubscription, CreateQueue, Subscribe
from veilmq.model.queue import QueueKey

Aliases = Mapping[QueueKey, QueueKey]
"""Alias -> the queue's own name."""

NO_ALIASES: Final[Aliases] = MappingProxyType({})
_NO_QUEUE: Final = QueueKey("", "", "")


def call_by_own_names(commands: Sequence[AnyCommand], aliases: Aliases) -> None:
    """Change the commands in place."""
    for command in commands:
        own = aliases.get(getattr(command, "queue", _NO_QUEUE))
        if own is not None:
            command.queue = own  # type: ignore[union-attr]
        settle = _SETTINGS.get(type(command))
        if settle is not None:
            settle(command, aliases)


def _queue(command: CreateQueue | ChangeQueue, aliases: Aliases) -> None:
    redrive = command.change.get("redrive")
    if redrive is not None and redrive.target in aliases:
        target = aliases[redrive.target]
        command.change = command.change | {"redrive": msgspec.structs.replace(redrive, target=target)}


def _subscribe(command: Subscribe, aliases: Aliases) -> None:
    settings = command.settings
    named = {"queue": settings.queue, "dead_letter_queue": settings.dead_letter_queue}
    own = {name: aliases[key] for name, key in named.items() if key is not None and key in aliases}
    if own:
        command.settings = msgspec.structs.replace(settings, **own)


def _change_subscription(command: ChangeSubscription, aliases: Aliases) -> None:
    own = aliases.get(command.change.get("dead_letter_queue") or _NO_QUEUE)
    if own is not None:
        command.change = command.change | {"dead_letter_queue": own}


_SETTINGS: Final[dict[type, Callable[[Any, Aliases], None]]] = {
    CreateQueue: _queue,
    ChangeQueue: _queue,
    Subscribe: _subscribe,
    ChangeSubscription: _change_subscription,
}
