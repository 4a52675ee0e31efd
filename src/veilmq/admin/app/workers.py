"""`GET /api/v1/workers`: each client seen in the last hour, what it did, what it holds, and whether it waits.

Strategy: what clients did is counted in memory while batches are committed; what they hold is read from the leases, up
to a bound; who waits is in the waiting room. The three are joined by protocol, principal and client name.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin.answers import answer, caller_of, members_of
from veilmq.admin.api.errors import Refused
from veilmq.admin.api.inputs import convert
from veilmq.admin.api.views import shown_client
from veilmq.admin.service import Service
from veilmq.model.commands import CLIENT_NAME_CHARACTERS_MAX, SERVER, Origin
from veilmq.model.instant import MINUTE_US
from veilmq.model.settings.access import Action
from veilmq.store import Reader
from veilmq.store.rollups import CLIENT_COUNTS, SeenClients

WORKERS_MAX: Final = 10_000
LEASES_MAX: Final = 100_000
"""So many delayed and leased messages are looked at to find what clients hold."""
Names = tuple[str, str, str]
"""Protocol, principal, client."""


class WorkersInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Clients with this text in their names."""

    client: Annotated[str, Meta(max_length=CLIENT_NAME_CHARACTERS_MAX)] = ""
    limit: Annotated[int, Meta(ge=1, le=WORKERS_MAX)] = 1_000


class Worker(msgspec.Struct):
    """What is known of one client."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * len(CLIENT_COUNTS))
    recent: list[int] = msgspec.field(default_factory=lambda: [0] * len(CLIENT_COUNTS))
    seen: int = 0
    holds: int = 0
    oldest: int | None = None
    """Start of the oldest lease."""
    waits: int = 0


class Workers:
    """The route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """All of them."""
        return [Route("/api/v1/workers", self.listed, methods=["GET"])]

    async def listed(self, request: Request) -> Response:
        """The clients; to an access key, those of its account, if it may read the events of all its queues."""
        key = caller_of(request).key
        caller_of(request).check(Action.EVENTS)
        if key is not None and not key.allows(Action.EVENTS, "*"):
            raise Refused(403, "not_granted", f"the key was not granted {Action.EVENTS} on all queues")
        wanted = convert(members_of(request), WorkersInput)
        shell, keyring = self._service.shell, self._service.keyring

        def may_see(principal: str) -> bool:
            found = None if key is None else keyring.find(principal)
            return key is None or (found is not None and found.account == key.account)

        now = shell.now()
        seen, waits = self._service.reader.seen_clients(now), shell.engine.waiting.everybody()
        shown = await run_in_threadpool(worker_page, self._service.reader, seen, waits, wanted, may_see)
        return answer({"at": now} | shown)


def worker_page(
    reader: Reader, seen: SeenClients, waits: list[Origin], wanted: WorkersInput, may_see: Callable[[str], bool]
) -> dict[str, Any]:
    """Those that were seen last first: {since, recent_since, workers, more, left_out, holds_complete}. Blocks."""
    workers: dict[Names, Worker] = {}
    with reader.look() as view:
        held, holds_complete = view.held_by_origin(LEASES_MAX)
        known: dict[int, Worker] = {}
        for origin in seen.seen.keys() | held.keys():
            names = view.origin_names(origin)
            if names is not None:
                known[origin] = workers.setdefault((names[0], names[1], names[2]), Worker())
    for origin, worker in known.items():
        worker.counts, worker.recent = _summed(origin, seen.windows), _summed(origin, seen.windows[-2:])
        worker.seen = seen.seen.get(origin, 0)
        worker.holds, worker.oldest = held.get(origin, (0, None))
    for each, count in Counter(waits).items():
        worker = workers.setdefault((each.protocol, each.principal, each.client), Worker())
        worker.waits, worker.seen = count, seen.at
    chosen = [
        (names, worker)
        for names, worker in workers.items()
        if names[0] != SERVER.protocol and wanted.client in names[2] and may_see(names[1])
    ]
    chosen.sort(key=lambda each: (-each[1].seen, each[0]))
    minutes = max(1, seen.at - seen.recent_since) / MINUTE_US
    return {
        "since": seen.since,
        "recent_since": seen.recent_since,
        "workers": [_shown(*each, minutes) for each in chosen[: wanted.limit]],
        "more": len(chosen) > wanted.limit,
        "left_out": seen.left_out,
        "holds_complete": holds_complete,
    }


def _summed(origin: int, windows: Sequence[Mapping[int, list[int]]]) -> list[int]:
    found = [counts[origin] for counts in windows if origin in counts]
    return [sum(column) for column in zip(*found, strict=True)] if found else [0] * len(CLIENT_COUNTS)


def _shown(names: Names, worker: Worker, minutes: float) -> dict[str, Any]:
    return (
        shown_client(*names)
        | {
            "last_seen": worker.seen or None,
            "holds": worker.holds,
            "oldest_granted": worker.oldest,
            "waits": worker.waits,
        }
        | dict(zip(CLIENT_COUNTS, worker.counts, strict=True))
        | {"per_minute": {name: round(n / minutes, 3) for name, n in zip(CLIENT_COUNTS, worker.recent, strict=True)}}
    )
