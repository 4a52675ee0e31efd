"""Lists of queues.

Strategy: a list is pages of sorted names (batch/queues.py), so a page starts where the one before ended. If a queue's
name is not legal in a protocol, the protocol shows the queue's alias: legal names and aliases are merged while listing.
"""

import re
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from typing import Final

from veilmq.model.commands import ListQueues
from veilmq.model.outcomes import Outcome, QueuesListed
from veilmq.model.settings.access import names_of
from veilmq.model.settings.queue import QueueKey, alias_key
from veilmq.model.settings.topic import is_hidden
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import AccountRegion, LiveQueue, OrderedNames, Queues

_NONE: Final = OrderedNames()


def list_queues(writer: Writer, command: ListQueues) -> Outcome:
    """A page of queues by key, or by the name that a protocol shows."""
    found = list(islice(_queues(writer.queues, command), command.count_max + 1))
    page = found[: command.count_max]
    return QueuesListed([queue.info() for queue in page], more=len(found) > len(page))


def _queues(queues: Queues, command: ListQueues) -> Iterator[LiveQueue]:
    target = command.dead_letter_target
    names = queues.names if target is None else queues.sources.get(target, _NONE)
    keys = _all_keys(names, command) if command.account is None else _keys_of_account(queues, names, command)
    return (queues.by_key[key] for key in keys)


def _all_keys(names: OrderedNames, command: ListQueues) -> Iterator[QueueKey]:
    """Keys in the order of their texts."""
    for place in names.places(None, command.region):
        start = f"{place[0]}/{place[1]}/"
        inside = command.after.startswith(start)
        if inside or command.after < start:
            after = command.after[len(start) :] if inside else ""
            for name in names.following(place, command.prefix, after):
                if not is_hidden(name):
                    yield QueueKey(*place, name)


def _keys_of_account(queues: Queues, names: OrderedNames, command: ListQueues) -> Iterator[QueueKey]:
    """Keys in the order of the names that the asking protocol shows."""
    allowed = None if command.names is None else re.compile(command.names)
    shown = []
    for place in names.places(command.account, command.region):
        shown.append(_own_names(names, command, place, allowed))
        if allowed is not None and command.by_alias:
            shown.append(_aliases(queues, command, place, allowed))
    for _, key in merge(*shown):
        yield key


def _own_names(
    names: OrderedNames, command: ListQueues, place: AccountRegion, allowed: re.Pattern[str] | None
) -> Iterator[tuple[str, QueueKey]]:
    for name in _granted(names, command, place):
        if not is_hidden(name) and (allowed is None or allowed.fullmatch(name)):
            yield name, QueueKey(*place, name)


def _granted(names: OrderedNames, command: ListQueues, place: AccountRegion) -> Iterator[str]:
    """The names that may be listed. Those that begin like no pattern are not looked at."""
    if command.granted is None:
        yield from names.following(place, command.prefix, command.after)
        return
    granted = names_of(command.granted)
    for beginning in granted.beginnings:
        if beginning.startswith(command.prefix) or command.prefix.startswith(beginning):
            for name in names.following(place, max(beginning, command.prefix, key=len), command.after):
                if granted.cover(name):
                    yield name


def _aliases(
    queues: Queues, command: ListQueues, place: AccountRegion, allowed: re.Pattern[str]
) -> Iterator[tuple[str, QueueKey]]:
    granted = None if command.granted is None else names_of(command.granted)  # each look-up hashes all patterns
    for alias in queues.alias_names.following(place, command.prefix, command.after):
        key = queues.aliases[alias_key(QueueKey(*place, alias), alias)]
        if (granted is None or granted.cover(key.name)) and not allowed.fullmatch(key.name):
            yield alias, key
