"""Who holds the messages of a queue that are in flight, which others those hold back, and who waits to receive from it;
and why messages failed, of one queue and of all.

Strategy: pages seek by the index of due instants, as those of messages do, and lease nothing. Each client's names are
read once a page. Receives that wait are only in memory. What is blocked on a FIFO queue, the store finds by the
messages that hold it back.

Failures come from the minutes of the rollups, as for a chart: those that are not stored from memory on the loop, the
others after that, and one that is in both counts once. Causes are added up over minutes and queues. What no cause has,
because a minute had too many or the answer is full, is counted by kind as `other`. Over all queues the rows of the
minutes are read, newest first, up to a bound: nothing walks through the queues, and the answer says at which minute it
stopped.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from veilmq.admin.api.inputs import ACCOUNT_OR_ALL, PAGE_MAX, PLACE, STEPS, Region, SpanInput
from veilmq.admin.api.views import shown_client, shown_key
from veilmq.admin.rollups import LivePart
from veilmq.model.commands import CLIENT_NAME_CHARACTERS_MAX, Origin
from veilmq.model.errors import QueueMissing
from veilmq.model.events import LeaseEnding
from veilmq.model.instant import MINUTE_US, Instant
from veilmq.model.messages import id_text
from veilmq.model.messages.states import Blocked, HeldLease
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import is_hidden
from veilmq.store import Reader, View
from veilmq.store.reader import QueueState, Worst
from veilmq.store.rollups import COUNTS, DEAD_LETTERED, FAILED, LEASE_EXPIRED, Cause, Rollup, Seen

LOOKED_AT_MAX: Final = 10_000
"""Delayed and leased messages that one page looks at to find those that match."""
CLIENTS_MAX: Final = 100
"""How many waiting clients are named: those with the most receives."""
KINDS: Final = (FAILED, LEASE_EXPIRED, DEAD_LETTERED)
ROLLUPS_MAX: Final = 200_000
"""How many rollups, each of a queue and a minute, are looked at to find those with failures."""
FAILING_MAX: Final = 10_000
"""How many rollups with failures are added up."""
QUEUES_NAMED_MAX: Final = 10
"""How many queues are named for each cause: those with the most failures."""


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
        "retries": lease.ending == LeaseEnding.RETRY,
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
            | {"message": shown_head(each.head, clients), "retries": each.head.ending == LeaseEnding.RETRY}
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


class FailuresInput(SpanInput, kw_only=True):
    """Causes of failures in a span, by default the last `minutes`."""

    minutes: Annotated[int, Meta(ge=1, le=STEPS["minute"][2])] = STEPS["minute"][1]
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 50

    def span(self, now: int) -> range:
        """Numbers of the minutes. Raises ParameterInvalid."""
        return self.numbers(now, "minute", self.minutes, "minutes")


class AllFailuresInput(FailuresInput, kw_only=True):
    """The same for the queues of an account (`*`: all) and region (default: all) whose names begin with `prefix`."""

    account: Annotated[str, Meta(pattern=ACCOUNT_OR_ALL)] | None = None
    region: Region | None = None
    prefix: Annotated[str, Meta(max_length=256)] = ""


class _Sum:
    """Causes, added up."""

    def __init__(self) -> None:
        self.causes: dict[Cause, Seen] = {}
        self.queues: dict[Cause, Counter[int]] = {}
        """How often in each queue, by incarnation."""
        self.counts = Counter[int]()

    def add(self, rollup: Rollup, incarnation: int, *, lines: bool) -> None:
        """lines: whether the caller may see what errors of this queue said."""
        for kind in KINDS:
            self.counts[kind] += rollup.numbers.get(kind, 0)
        for seen in rollup.causes.found.values():
            if not lines:
                seen.error = ""
            cause = seen.cause()
            self.queues.setdefault(cause, Counter())[incarnation] += seen.count
            if cause in self.causes:
                self.causes[cause].add(seen)
            else:
                self.causes[cause] = seen

    def most(self, limit: int) -> tuple[list[tuple[Cause, Seen]], dict[str, int]]:
        """The causes with the most failures; and by kind, how many failures belong to none of these."""
        shown = sorted(self.causes.items(), key=lambda each: (-each[1].count, -each[1].newest))[:limit]
        other = {COUNTS[kind]: self.counts[kind] for kind in KINDS}
        for _, each in shown:
            other[COUNTS[each.kind]] -= each.count
        return shown, other


def failure_page(reader: Reader, live: LivePart, wanted: FailuresInput, *, lines: bool) -> dict[str, Any]:
    """The causes with the most failures: {account, region, name, incarnation, from, to, causes, other, lines}. Blocks.
    Raises ParameterInvalid. lines: whether the caller may see what errors said."""
    span = wanted.span(live.now)
    with reader.look() as view:
        minutes = view.rollups(live.queue.incarnation, span.start, span.stop - 1, hours=False).found
    minutes |= {number: each for number, each in live.minutes.items() if number in span and number not in minutes}
    found = _Sum()
    for _, rollup in sorted(minutes.items()):
        found.add(rollup, live.queue.incarnation, lines=lines)
    shown, other = found.most(wanted.limit)
    return shown_key(live.queue.key) | {
        "incarnation": live.queue.incarnation,
        "from": span.start * MINUTE_US,
        "to": span.stop * MINUTE_US,
        "causes": [_shown_cause(each, lines) for _, each in shown],
        "other": other,
        "lines": lines,
    }


class Unstored(NamedTuple):
    """What only memory knows of all queues. Made on the loop."""

    now: int
    minutes: dict[tuple[int, int], Rollup]
    """Those with failures, by minute and incarnation."""
    queues: Worst

    @classmethod
    def of(cls, reader: Reader, now: int) -> "Unstored":
        """All of it."""
        return cls(now, reader.unstored_failing(FAILING_MAX), reader.worst)


class Rights(NamedTuple):
    """Which queues a caller may see, and of which what errors said."""

    sees: Callable[[QueueKey], bool]
    reads: Callable[[QueueKey], bool]


def all_failures_page(
    reader: Reader, unstored: Unstored, account: str, wanted: AllFailuresInput, may: Rights
) -> dict[str, Any]:
    """The causes with the most failures over all queues: {from, to, stopped, queues, causes, other}, each cause with
    the queues. Blocks. Raises ParameterInvalid."""
    span = wanted.span(unstored.now)
    with reader.look() as view:
        stored = view.failing_rollups(span.start, span.stop - 1, ROLLUPS_MAX, FAILING_MAX)
    rollups = {place: each for place, each in unstored.minutes.items() if place[0] in span} | stored.found
    stopped = stored.stopped
    if len(unstored.minutes) == FAILING_MAX:
        stopped = max(stopped or 0, min(minute for minute, _ in unstored.minutes))
    keys: dict[int, QueueKey] = {}
    for incarnation in {incarnation for _, incarnation in rollups}:
        queue = unstored.queues.queue(incarnation)
        if queue is not None and _is_wanted(queue.key, account, wanted) and may.sees(queue.key):
            keys[incarnation] = queue.key
    readable = {incarnation for incarnation, key in keys.items() if may.reads(key)}
    found = _Sum()
    for (_, incarnation), rollup in sorted(rollups.items()):
        if incarnation in keys:
            found.add(rollup, incarnation, lines=incarnation in readable)
    shown, other = found.most(wanted.limit)
    return {
        "from": span.start * MINUTE_US,
        "to": span.stop * MINUTE_US,
        "stopped": None if stopped is None else (stopped + 1) * MINUTE_US,
        "queues": len(keys),
        "causes": [
            _shown_cause(each, bool(found.queues[cause].keys() & readable)) | _shown_queues(found.queues[cause], keys)
            for cause, each in shown
        ],
        "other": other,
    }


def _is_wanted(key: QueueKey, account: str, wanted: AllFailuresInput) -> bool:
    return (
        account in ("*", key.account)
        and wanted.region in (None, key.region)
        and key.name.startswith(wanted.prefix)
        and not is_hidden(key.name)
    )


def _shown_queues(counts: Counter[int], keys: dict[int, QueueKey]) -> dict[str, Any]:
    named = counts.most_common(QUEUES_NAMED_MAX)
    return {
        "queues": [shown_key(keys[incarnation]) | {"count": count} for incarnation, count in named],
        "queues_count": len(counts),
    }


def _shown_cause(seen: Seen, lines: bool) -> dict[str, Any]:
    return {
        "kind": COUNTS[seen.kind],
        "error_type": seen.error_type,
        "error": seen.error if lines else None,
        "count": seen.count,
        "first": seen.first,
        "newest": seen.newest,
        "message": id_text(seen.message),
    }
