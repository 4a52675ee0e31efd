"""Who holds the messages of a queue that are in flight, which others those hold back, and who waits to receive from it.

Strategy: pages seek by the index of due instants, as those of messages do, and lease nothing. Each client's names are
read once a page. Receives that wait are only in memory. What is blocked on a FIFO queue, the store finds by the
messages that hold it back.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from veilmq.admin.api.inputs import PAGE_MAX, PLACE
from veilmq.admin.api.views import shown_client
from veilmq.model.commands import CLIENT_NAME_CHARACTERS_MAX, Origin
from veilmq.model.errors import QueueMissing
from veilmq.model.events import LeaseEnding
from veilmq.model.instant import Instant
from veilmq.model.messages import id_text
from veilmq.model.messages.states import Blocked, HeldLease
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Reader, View
from veilmq.store.reader import QueueState

LOOKED_AT_MAX: Final = 10_000
"""Delayed and leased messages that one page looks at to find those that match."""
CLIENTS_MAX: Final = 100
"""Clients that wait: so many are named, those with the most receives first."""


class HoldersInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A page of a queue's messages in flight: those held by clients with this text in their names."""

    client: Annotated[str, Meta(max_length=CLIENT_NAME_CHARACTERS_MAX)] = ""
    after: Annotated[str, Meta(pattern=PLACE)] = ""
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 100


class BlockedInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How many of the blocked groups."""

    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 100


class Clients:
    """Shows origins; reads the names of each once."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._shown: dict[int, dict[str, Any]] = {}

    def shown(self, origin: int) -> dict[str, Any]:
        """The origin as `shown_client`; empty names if it is not known any more."""
        found = self._shown.get(origin)
        if found is None:
            names = self._view.origin_names(origin) or ("", "", "")
            found = self._shown[origin] = shown_client(*names)
        return found


def holder_page(reader: Reader, key: QueueKey, wanted: HoldersInput, now: Instant) -> dict[str, Any]:
    """Messages in flight whose holder matches, by due instant, behind the page that ended at `wanted.after`: {at,
    holders, after, looked_at}, as `message_page`. Blocks. Raises QueueMissing."""
    queue = reader.queues.get(key)
    if queue is None:
        raise QueueMissing(queue=str(key))
    found: list[dict[str, Any]] = []
    after, looked_at = None, 0
    with reader.look() as view:
        clients = Clients(view)
        for lease in _leases(view, queue, wanted):
            looked_at += 1
            holder = clients.shown(lease.origin) if lease.attempt else None
            if holder is not None and wanted.client in holder["client"]:
                found.append(_shown(lease, holder))
            if len(found) == wanted.limit or looked_at == LOOKED_AT_MAX:
                after = f"{lease.due}-{lease.sequence}"
                break
    return {"at": now, "holders": found, "after": after, "looked_at": looked_at}


def _leases(view: View, queue: QueueState, wanted: HoldersInput) -> Iterator[HeldLease]:
    """Every delayed or leased message behind `wanted.after`."""
    leading, _, trailing = wanted.after.partition("-")
    due, sequence = int(leading or -1), int(trailing or 0)
    chunk = PAGE_MAX if wanted.client else wanted.limit
    while True:
        listed = view.leases(queue, due, sequence, chunk)
        yield from listed
        if len(listed) < chunk:
            return
        due, sequence = listed[-1].due, listed[-1].sequence


def _shown(lease: HeldLease, holder: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": id_text(lease.id),
        "sequence": lease.sequence,
        "holder": holder,
        "granted": lease.granted,
        "due": lease.due,
        "receive_count": lease.attempt,
        "rotation": lease.rotation,
        "first_received": lease.first,
        "group": lease.group,
        "type": lease.type,
    }


def blocked_counts(reader: Reader, key: QueueKey, now: Instant) -> dict[str, Any] | None:
    """How many visible messages of how many groups nobody can receive yet: {messages, groups, complete}; None: the
    queue is no FIFO queue, so no message waits for another one. Blocks."""
    queue = reader.queues.get(key)
    if queue is None or not queue.settings.fifo:
        return None
    with reader.look() as view:
        return _counts(view.blocked(queue, now, 0))


def blocked_page(reader: Reader, key: QueueKey, wanted: BlockedInput, now: Instant) -> dict[str, Any]:
    """The same with the groups that have been blocked for longest, and who holds the message that each waits for: {at,
    messages, groups, complete, held}. Blocks. Raises QueueMissing."""
    queue = reader.queues.get(key)
    if queue is None:
        raise QueueMissing(queue=str(key))
    with reader.look() as view:
        found, clients = view.blocked(queue, now, wanted.limit), Clients(view)
        held = [
            {"group": each.group, "since": each.since, "messages": each.messages}
            | {"message": shown_head(each.head, clients), "retries": each.ending == LeaseEnding.RETRY}
            for each in found.shown
        ]
    return {"at": now} | _counts(found) | {"held": held}


def _counts(found: Blocked) -> dict[str, Any]:
    return {"messages": found.messages, "groups": found.groups, "complete": found.is_all}


def shown_head(head: HeldLease, clients: Clients) -> dict[str, Any]:
    """The message that a group waits for; the holder of a delayed one is null."""
    state = {"state": "in flight" if head.attempt else "delayed"}
    return _shown(head, clients.shown(head.origin) if head.attempt else None) | state


def shown_waiters(waits: Counter[Origin]) -> dict[str, Any]:
    """How many receives wait, and of which clients: {count, clients, more}."""
    clients = [
        shown_client(each.protocol, each.principal, each.client) | {"count": count}
        for each, count in waits.most_common(CLIENTS_MAX)
    ]
    return {"count": waits.total(), "clients": clients, "more": len(waits) > len(clients)}
