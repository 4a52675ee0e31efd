"""Routes of who uses the server: accounts, and the clients that work for them.

Strategy: an account is shown from the keys that the server uses, and from counts that the store keeps: keys, grants,
and how much it has of what it may have. What is shown of a key is its id and what it was granted: no secret, no session
token, no Azure key. Who may see all accounts needs `settings`; any other key sees itself and its account.

`GET /api/v1/workers` shows each client seen in the last hour, what it did, what it holds, and whether it waits. What
clients did is counted in memory while batches are committed; what they hold is read from the leases, up to a bound; who
waits is in the waiting room. The three are joined by protocol, principal and client name.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin.access import Caller
from veilmq.admin.answers import answer, caller_of, members_of
from veilmq.admin.api import Refused
from veilmq.admin.api.inputs import PAGE_MAX, QUEUE, Account, convert, queue_key
from veilmq.admin.api.views import shown_client, shown_key
from veilmq.model.commands import CLIENT_NAME_CHARACTERS_MAX, SERVER, Origin
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.model.instant import FOREVER, MINUTE_US
from veilmq.model.messages import id_text
from veilmq.model.settings.access import EVERYTHING, AccessKey, Action
from veilmq.server.auth import Account as KnownAccount
from veilmq.server.auth import Keys, home_region, knows
from veilmq.server.config.settings import Settings
from veilmq.server.service import Service
from veilmq.store import Reader
from veilmq.store.reader import AccountCounts, HeldBy, QueueState
from veilmq.store.rollups import CLIENT_COUNTS, SeenClients

NOTHING: Final = AccountCounts(0, 0, 0)


class AccountInput(Struct, kw_only=True, forbid_unknown_fields=True):
    """The account; default: the only one."""

    account: Account | None = None


class AccountsInput(AccountInput, kw_only=True):
    """A page of accounts by id, or one of them."""

    after: Account | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_MAX


class Accounts:
    """The routes."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service = service
        self._limits = AccountCounts(
            settings.queues_per_account_max, settings.topics_per_account_max, settings.subscriptions_per_account_max
        )._asdict()

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/v1/account", self.own, methods=["GET"]),
            Route("/api/v1/accounts", self.listed, methods=["GET"]),
        ]

    async def own(self, request: Request) -> Response:
        """The default account (null if there are several), its home region, and whether the credentials file has it."""
        caller, keys = caller_of(request), self._service.keyring
        account = convert(members_of(request), AccountInput).account or caller.home
        _check(caller, account)
        if account is None:
            accounts = [each.id for each in keys.accounts]
            return answer({"account": None, "region": None, "known": None, "accounts": accounts})
        region, known = home_region(keys, account), knows(keys, account)
        return answer({"account": account, "region": region, "known": known})

    async def listed(self, request: Request) -> Response:
        """The accounts that the caller may see: those of the credentials file, and others that have anything."""
        caller, keys = caller_of(request), self._service.keyring
        wanted = convert(members_of(request), AccountsInput)
        own = caller.key if caller.key is not None and not caller.may(Action.SETTINGS) else None
        account = wanted.account or (None if own is None else own.account)
        if own is not None:
            _check(caller, account)
        counts = self._service.reader.per_account()
        known = {each.id: each for each in keys.accounts}
        ids = sorted(known.keys() | counts.keys()) if account is None else [account]
        ids = [each for each in ids if each > (wanted.after or "")]
        page, more = ids[: wanted.limit], len(ids) > wanted.limit
        shown = [
            _shown_account(keys, each, known.get(each), own) | counts.get(each, NOTHING)._asdict() for each in page
        ]
        return answer(
            {
                "checks": keys.checks,
                "limits": self._limits,
                "accounts": shown,
                "more": more,
                "after": page[-1] if more else None,
            }
        )


def _check(caller: Caller, account: str | None) -> None:
    """Raises Refused (403) for a key of another account."""
    if caller.key is not None and account != caller.key.account:
        raise Refused(403, "not_granted", "the key is another account's")


def _shown_account(keys: Keys, account: str, known: KnownAccount | None, own: AccessKey | None) -> dict[str, Any]:
    """own: the only key to be shown; None: all of them."""
    shown: dict[str, Any] = {"id": account, "home_region": home_region(keys, account), "known": knows(keys, account)}
    if own is not None:
        return shown | {"azure_name": None, "azure_keys": 0, "keys": _shown_keys([own]), "identities": []}
    if known is None:
        return shown | {"azure_name": None, "azure_keys": 0, "keys": [], "identities": []}
    return shown | {
        "azure_name": known.azure_name,
        "azure_keys": len(known.azure_keys),
        "keys": _shown_keys(known.keys),
        "identities": _shown_keys(known.identities),
    }


def _shown_keys(keys: Iterable[AccessKey]) -> list[dict[str, Any]]:
    return [
        {
            "id": key.id,
            "temporary": key.session_token is not None,
            "everything": key.grants == EVERYTHING,
            "grants": [{"actions": sorted(each.actions), "queues": list(each.queues)} for each in key.grants],
        }
        for key in keys
    ]


WORKERS_MAX: Final = 10_000
LEASES_MAX: Final = 100_000
"""How many delayed and leased messages are looked at to find what clients hold."""
MESSAGES_MAX: Final = 20
"""How many of the messages that a client holds may be shown."""
_DELETED, _FAILED, _LOST = (CLIENT_COUNTS.index(each) for each in ("deleted", "failed", "lease_expired"))
Names = tuple[str, str, str]
"""Protocol, principal, client."""


class WorkersInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Clients with this text in their names; with `queue`, only those that hold messages of it or wait for some.
    `messages`: how many of the messages that each holds are shown."""

    client: Annotated[str, Meta(max_length=CLIENT_NAME_CHARACTERS_MAX)] = ""
    queue: Annotated[str, Meta(pattern=QUEUE)] | None = None
    sort: str = "seen"
    messages: Annotated[int, Meta(ge=0, le=MESSAGES_MAX)] = 0
    limit: Annotated[int, Meta(ge=1, le=WORKERS_MAX)] = 1_000


class Worker(msgspec.Struct):
    """What is known of one client."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * len(CLIENT_COUNTS))
    recent: list[int] = msgspec.field(default_factory=lambda: [0] * len(CLIENT_COUNTS))
    seen: int = 0
    holds: int = 0
    oldest: int | None = None
    """Start of the oldest lease."""
    messages: list[HeldBy] = []
    waits: int = 0


ORDERS: Final[dict[str, Callable[[Worker], int]]] = {
    "seen": lambda worker: worker.seen,
    "holds": lambda worker: worker.holds,
    "oldest": lambda worker: -(FOREVER if worker.oldest is None else worker.oldest),
    "rate": lambda worker: worker.recent[_DELETED],
    "failed": lambda worker: worker.counts[_FAILED],
    "lease_expired": lambda worker: worker.counts[_LOST],
}
"""By what clients are sorted: those with the most of it come first."""


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
        if wanted.sort not in ORDERS:
            raise ParameterInvalid(parameter="sort", reason=f"expected one of {', '.join(ORDERS)}")
        shell, keyring = self._service.shell, self._service.keyring
        queue = None if wanted.queue is None else self._queue(request, wanted.queue)

        def may_see(principal: str) -> bool:
            found = None if key is None else keyring.find(principal)
            return key is None or (found is not None and found.account == key.account)

        now = shell.now()
        waiting = shell.engine.waiting
        waits = Counter(waiting.everybody()) if queue is None else waiting.who_waits_for(queue.key)
        known = Known(self._service.reader.seen_clients(now), waits, queue)
        shown = await run_in_threadpool(worker_page, self._service.reader, known, wanted, may_see)
        return answer({"at": now} | shown)

    def _queue(self, request: Request, given: str) -> QueueState:
        """The queue of a key, or of a name in the caller's account. Raises QueueMissing."""
        keys, caller = self._service.keyring, caller_of(request)
        account, region, name = given.split("/") if "/" in given else (caller.whose(None), None, given)
        key = queue_key(account, home_region(keys, account) if region is None else region, name)
        caller.check(Action.EVENTS, key.account, key.name)
        found = self._service.reader.queues.get(key)
        if found is None:
            raise QueueMissing(queue=str(key))
        return found


class Known(NamedTuple):
    """What the loop knows: what clients did, who waits (of one queue, if only that is asked for)."""

    seen: SeenClients
    waits: Counter[Origin]
    queue: QueueState | None


def worker_page(reader: Reader, known: Known, wanted: WorkersInput, may_see: Callable[[str], bool]) -> dict[str, Any]:
    """{since, recent_since, workers, more, left_out, holds_complete}, in the order that is asked for. Blocks."""
    seen = known.seen
    workers, holds_complete = _workers(reader, known, wanted.messages)
    chosen = [
        (names, worker)
        for names, worker in workers.items()
        if names[0] != SERVER.protocol and wanted.client in names[2] and may_see(names[1])
        if known.queue is None or worker.holds or worker.waits
    ]
    order = ORDERS[wanted.sort]
    chosen.sort(key=lambda each: (-order(each[1]), -each[1].seen, each[0]))
    minutes = max(1, seen.at - seen.recent_since) / MINUTE_US
    return {
        "since": seen.since,
        "recent_since": seen.recent_since,
        "workers": [_shown(*each, minutes) for each in chosen[: wanted.limit]],
        "more": len(chosen) > wanted.limit,
        "left_out": seen.left_out,
        "holds_complete": holds_complete,
    }


def _workers(reader: Reader, known: Known, messages: int) -> tuple[dict[Names, Worker], bool]:
    seen = known.seen
    workers: dict[Names, Worker] = {}
    with reader.look() as view:
        held = view.held_by_origin(LEASES_MAX, messages, known.queue)
        origins: dict[int, Worker] = {}
        for origin in seen.seen.keys() | held.held.keys():
            names = view.origin_names(origin)
            if names is not None:
                origins[origin] = workers.setdefault((names[0], names[1], names[2]), Worker())
    for origin, worker in origins.items():
        worker.counts, worker.recent = _summed(origin, seen.windows), _summed(origin, seen.windows[-2:])
        worker.seen = seen.seen.get(origin, 0)
        worker.holds, worker.oldest = held.held.get(origin, (0, None))
        worker.messages = held.oldest.get(origin, [])
    for each, count in known.waits.items():
        worker = workers.setdefault((each.protocol, each.principal, each.client), Worker())
        worker.waits, worker.seen = count, seen.at
    return workers, held.is_all


def _summed(origin: int, windows: Sequence[Mapping[int, list[int]]]) -> list[int]:
    found = [counts[origin] for counts in windows if origin in counts]
    return [sum(column) for column in zip(*found, strict=True)] if found else [0] * len(CLIENT_COUNTS)


def _held(message: HeldBy) -> dict[str, Any]:
    times = {"granted": message.granted, "due": message.due, "receive_count": message.attempt}
    return {"id": id_text(message.id), "queue": shown_key(message.queue)} | times


def _shown(names: Names, worker: Worker, minutes: float) -> dict[str, Any]:
    return (
        shown_client(*names)
        | {
            "last_seen": worker.seen or None,
            "holds": worker.holds,
            "oldest_granted": worker.oldest,
            "messages": [_held(each) for each in worker.messages],
            "waits": worker.waits,
        }
        | dict(zip(CLIENT_COUNTS, worker.counts, strict=True))
        | {"per_minute": {name: round(n / minutes, 3) for name, n in zip(CLIENT_COUNTS, worker.recent, strict=True)}}
    )
