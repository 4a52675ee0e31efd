"""The life of one message: its leases, moves and end, gathered from its events.

Strategy: a pure fold over the events of a trace, oldest first. A lease is known by its sequence and attempt: a message
that was moved has a new sequence, and attempts begin anew. What an event says later about a lease (a late delete, a
refused handle) is added to that lease. The sentence (`story`) and the picture of the console read the same life.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from veilmq.model.events import EventRecord
from veilmq.model.instant import Instant

_ENDINGS: Final = {
    "lease_expired": "expired",
    "expired_after_change": "released",
    "released": "released",
    "released_for_retry": "failed",
    "undelivered": "undelivered",
}
_LABEL_CHARACTERS_MAX: Final = 40
_NAMED: Final = re.compile(r"veilmq/\S+ \(([^()]{1,100})\)")


TimeoutOf = Callable[[int], Mapping[str, Any] | None]
"""What the leases of a queue say about its timeout, by incarnation; see `veilmq.admin.timeouts.timeout_page`."""


def unknown(incarnation: int) -> None:
    """Nothing is known of the queue's leases."""


class Refused(msgspec.Struct):
    """A handle that no longer counted."""

    at: Instant
    act: str
    """`delete` or `extend`."""
    reason: str
    who: str


class Lease(msgspec.Struct):
    """One receive's hold."""

    queue: str
    incarnation: int
    """Of the queue."""
    attempt: int
    who: str
    began: Instant
    due: Instant
    """When it ends, or would have ended."""
    lease_us: int
    """As granted."""
    waited_us: int | None = None
    """How long the message was visible before."""
    extended: list[Instant] = msgspec.field(default_factory=list)
    ended: Instant | None = None
    ending: str = ""
    """`expired`, `released`, `failed`, `undelivered`, `deleted`, or empty while it lasts."""
    expired: Instant | None = None
    """When it ran out, if it did, whatever came after."""
    resumed: Instant | None = None
    error: str = ""
    retry_at: Instant | None = None
    name: str = ""
    """Of its holder: its own name if no other lease had it, else by its turn."""
    refused: list[Refused] = msgspec.field(default_factory=list)

    @property
    def worked_us(self) -> int:
        """From the grant to the last sign of its holder: a delete or an extension, in time or not."""
        signs = [*self.extended, *(each.at for each in self.refused if each.act == "delete")]
        if self.ending in {"deleted", "failed"} and self.ended is not None:
            signs.append(self.ended)
        return max(signs, default=self.began) - self.began

    @property
    def late_delete(self) -> Refused | None:
        """The refused delete of its holder, if there is one."""
        return next((each for each in self.refused if each.act == "delete"), None)


class Move(msgspec.Struct):
    """From one queue to another. how: `dead_lettered` or `moved`."""

    at: Instant
    how: str
    source: str
    target: str
    who: str
    receives: int = 0
    error: str = ""


class Push(msgspec.Struct):
    """One attempt to push it to a subscription's endpoint."""

    at: Instant
    failure: str
    """Why it was not delivered; empty: it was."""


def _failure_of(detail: Mapping[str, Any]) -> str:
    status = int(detail.get("status") or 0)
    if detail.get("error"):
        return str(detail["error"])
    return "" if 200 <= status < 300 else f"status {status}"


class Life(msgspec.Struct):
    """Everything that a trace says of one message."""

    now: Instant
    is_complete: bool
    first: Instant
    """The first event that is kept."""
    queue: str
    """Where it is, or was last."""
    sent: Instant | None = None
    sender: str = ""
    visible: Instant | None = None
    """When its first delay ends."""
    published: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """What the publish says, if this is the id that it answered: `topic`, `copies`, perhaps `dead_lettered` and
    `left_out`. The copies have other ids."""
    leases: list[Lease] = msgspec.field(default_factory=list)
    moves: list[Move] = msgspec.field(default_factory=list)
    absorbed: list[Instant] = msgspec.field(default_factory=list)
    pushes: list[Push] = msgspec.field(default_factory=list)
    """Each attempt to push, and its result."""
    peeks: list[tuple[Instant, str]] = msgspec.field(default_factory=list)
    rescheduled: Instant | None = None
    """Until when its sender's handle delayed it."""
    quarantined: Instant | None = None
    end: str = ""
    """`deleted`, `expired`, `purged`, `queue_deleted`, `quarantine_dropped`; empty while it is there."""
    ended: Instant | None = None
    ended_by: str = ""
    count: int = 0
    """With how many others it was purged, itself included."""
    timeout_of: TimeoutOf = unknown

    @property
    def last(self) -> Lease | None:
        """The last lease."""
        return self.leases[-1] if self.leases else None

    @property
    def here(self) -> list[Lease]:
        """The leases since the last move."""
        moved = self.moves[-1].at if self.moves else 0
        return [lease for lease in self.leases if lease.began >= moved]


def life_of(events: Sequence[EventRecord], now: Instant, *, is_complete: bool, timeout_of: TimeoutOf = unknown) -> Life:
    """The life that these events record; there must be at least one."""
    life = Life(now=now, is_complete=is_complete, first=events[0].at, queue=events[0].queue or "")
    life.timeout_of = timeout_of
    by_attempt: dict[tuple[int | None, int | None], Lease] = {}
    for event in events:
        _take(life, by_attempt, event)
    often = Counter(lease.who for lease in life.leases)
    for turn, lease in enumerate(life.leases, 1):
        lease.name = lease.who if lease.who and often[lease.who] == 1 else f"receiver {turn}"
    return life


def label(event: EventRecord) -> str:
    """Who did it: the name that a client of ours gives itself, another's first word; at the admin port the key."""
    client = event.client or ""
    named = _NAMED.search(client)
    if named is not None:
        return named[1].replace(";", "")[:_LABEL_CHARACTERS_MAX]
    words = [] if event.protocol == "admin" else client.split()
    return (words[0] if words else event.principal or event.protocol or "")[:_LABEL_CHARACTERS_MAX]


def _take(life: Life, by_attempt: dict[tuple[int | None, int | None], Lease], event: EventRecord) -> None:
    kind, detail, at = event.kind, event.detail or {}, event.at
    lease = by_attempt.get((event.sequence, event.attempt))
    if kind == "sent":
        life.sent, life.sender, life.visible, life.queue = at, label(event), event.visible_since, event.queue or ""
    elif kind == "published":
        life.sent, life.sender, life.published = at, label(event), detail
    elif kind == "received":
        since = event.visible_since
        lease = Lease(
            queue=event.queue or "",
            incarnation=event.incarnation or 0,
            attempt=event.attempt or 0,
            who=label(event),
            began=at,
            due=Instant(at + (event.lease_us or 0)),
            lease_us=event.lease_us or 0,
            waited_us=None if since is None else max(0, at - since),
        )
        by_attempt[event.sequence, event.attempt] = lease
        life.leases.append(lease)
        life.queue = event.queue or life.queue
    elif kind in {"delete_refused", "extend_refused"}:
        if lease is not None:
            act = kind.removesuffix("_refused")
            lease.refused.append(Refused(at, act, str(detail.get("reason", "")), label(event)))
    elif kind in _ENDINGS or kind in {"extended", "lease_resumed", "retry_due"}:
        _take_lease(life, lease, event)
    else:
        _take_end(life, lease, event)


def _take_lease(life: Life, lease: Lease | None, event: EventRecord) -> None:
    """An event of a lease, or of the handle of a send."""
    kind, at = event.kind, event.at
    due = Instant(at + (event.lease_us or 0))
    if lease is None:
        if not event.attempt and kind in {"extended", "released"}:
            life.rescheduled = due
        return
    if kind == "lease_resumed":
        lease.resumed, lease.ended, lease.ending = at, None, ""
    if kind in {"extended", "lease_resumed"}:
        lease.extended.append(at)
        lease.due = due
    elif kind in _ENDINGS and not lease.ending:
        lease.ended, lease.ending = at, _ENDINGS[kind]
        if kind == "lease_expired":
            lease.expired = at
        if kind == "released_for_retry":
            lease.retry_at, lease.error = due, error_of(event.detail or {})


def _take_end(life: Life, lease: Lease | None, event: EventRecord) -> None:
    kind, at, detail = event.kind, event.at, event.detail or {}
    if kind in {"dead_lettered", "moved"}:
        target, receives = str(detail.get("target_queue") or ""), int(detail.get("receives") or 0)
        move = Move(at, kind, event.queue or "", target, label(event), receives, error_of(detail))
        life.moves.append(move)
        life.queue = target or life.queue
    elif kind == "duplicate_absorbed":
        life.absorbed.append(at)
    elif kind == "pushed":
        life.pushes.append(Push(at, _failure_of(detail)))
    elif kind == "peeked":
        life.peeks.append((at, label(event)))
    elif kind == "quarantined":
        life.quarantined = at
    elif kind in {"deleted", "expired", "purged", "queue_deleted", "quarantine_dropped"}:
        life.end, life.ended, life.ended_by = kind, at, label(event)
        life.count = int(detail.get("count") or 0)
        if kind == "deleted" and lease is not None:
            lease.ended, lease.ending = at, "deleted"


def error_of(detail: dict[str, object]) -> str:
    """What a worker said of its failure."""
    parts = (detail.get("error_type"), detail.get("error"))
    return ": ".join(str(part) for part in parts if part) or str(detail.get("reason") or "")
