"""The admin application: all routes, behind access control; here those for operators: health, settings, a check of
everything, and the clock, whose steps are accepted and which tests may move.

Strategy: each noun's routes are in its own file; this one adds the middleware and the table of errors. The caller runs
the application on uvicorn with `proxy_headers=False`: the socket decides who is a loopback peer.

A check is long and runs on a thread. Its response is JSON lines: each line is a step ({stage, done, total}), repeated
if no other follows for a while; the last is the result or the error, because the status was sent long before. The clock
moves only in development mode.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin import answers
from veilmq.admin.access import Access, Caller
from veilmq.admin.api import Refused, inputs, operator, views
from veilmq.admin.app.accounts import Accounts, Workers
from veilmq.admin.app.messages import Jobs, Messages, Quarantine
from veilmq.admin.app.queues import Queues, Topics
from veilmq.admin.history.copies import Copies
from veilmq.admin.history.feed import CopiedHistory, Feed
from veilmq.admin.metrics import Metrics
from veilmq.admin.timeouts.cache import Timeouts
from veilmq.model.errors import DiskLow, ParameterInvalid, StoreFailed, VeilError
from veilmq.model.events import HistoryTrimmed
from veilmq.model.instant import DAY_US, SECOND_US
from veilmq.model.outcomes import ClockChecked
from veilmq.model.settings.access import Action, Share
from veilmq.server.auth import Keys
from veilmq.server.clock import log as clock_log
from veilmq.server.cluster import Cluster, ClusterReport
from veilmq.server.config.settings import FIELDS, Address, Settings
from veilmq.server.service import Service
from veilmq.store.archive import shown_url
from veilmq.store.directory import DatabaseFailed, NotOurs, Progress
from veilmq.store.log import Follower

_CLOCK_STEP_S_SHOWN: Final = 60
"""A shorter step is no warning."""
_Endpoint = Callable[[Request], Awaitable[Response]]
_SECRET: Final = frozenset({"cluster", "credentials", "tls_key"})
"""Settings that are not shown: callers must not learn where secrets are."""


def create_app(service: Service, settings: Settings, token: str) -> Starlette:
    """The application over a running server. `token` (at least 16 characters) may do everything."""
    timeouts = Timeouts(service.reader)
    queues = Queues(service, timeouts)
    metrics = Metrics(service, queues.commands)
    copies = Copies(service)

    async def live(request: Request) -> Response:
        """200 while the loop runs."""
        return answers.answer({"live": True})

    async def ready(request: Request) -> Response:
        """200, or 503 with the problems by name. A warning alone does not take the server out of service."""
        reasons, warnings = _reasons(service), _warnings(service) | of_one_copy(settings)
        return answers.answer({"ready": not reasons, "reasons": reasons, "warnings": warnings}, 503 if reasons else 200)

    async def settings_of(request: Request) -> Response:
        """All settings but those that point to secrets."""
        answers.caller_of(request).check(Action.SETTINGS)
        return answers.answer({"settings": shown_settings(settings)})

    async def failed(request: Request, error: Exception) -> Response:
        """500, counted. A reader overtaken by trimming is not counted: it notices the truncated response."""
        if isinstance(error.__cause__, HistoryTrimmed):
            return await answers.trimmed(request, error.__cause__)
        count_failure(request)
        return await answers.failed(request, error)

    def count_failure(request: Request) -> None:
        """Once, though a page's bug may be one of the call that it made."""
        if not getattr(request.state, "is_counted", False):
            request.state.is_counted = True
            metrics.admin_failures += 1

    app = Starlette(
        routes=_one_a_path(
            Route("/health/live", live, methods=["GET"]),
            Route("/health/ready", ready, methods=["GET"]),
            Route("/metrics", metrics.endpoint, methods=["GET"]),
            Route("/api/v1/settings", settings_of, methods=["GET"]),
            *Accounts(service, settings).routes(),
            *queues.routes(),
            *Messages(service, timeouts).routes(),
            *Topics(service).routes(),
            *Jobs(service).routes(),
            *Quarantine(service).routes(),
            Feed(service.reader, service.shell).route(),
            *copies.routes(),
            *Upkeep(service, copies).routes(),
            *Workers(service).routes(),
            *ClusterRoutes(service).routes(),
        ),
        middleware=[_access(lambda: service.keyring, settings, token)],
        exception_handlers=_ERRORS | {Exception: failed},
    )
    # A redirect would lose the request's body, and not every client follows it.
    app.router.redirect_slashes = False
    app.state.count_failure = count_failure  # the console's bugs are counted, too
    return app


def create_copy_app(copy: Follower, keyring: Callable[[], Keys], settings: Settings, token: str) -> Starlette:
    """The events in this server's copy, while another server owns the queues."""
    return create_own_app([Feed(CopiedHistory(copy), None).route()], keyring, settings, token)


def create_own_app(routes: Sequence[Route], keyring: Callable[[], Keys], settings: Settings, token: str) -> Starlette:
    """What a server answers itself while another one owns the queues, behind the same access control."""
    return Starlette(
        routes=routes,
        middleware=[_access(keyring, settings, token)],
        exception_handlers=_ERRORS | {Exception: answers.failed},
    )


_ERRORS: Final[dict[Any, Any]] = {
    VeilError: answers.veil_error,
    Refused: answers.refused,
    HistoryTrimmed: answers.trimmed,
    HTTPException: answers.http_error,
}


def _access(keyring: Callable[[], Keys], settings: Settings, token: str) -> Middleware:
    return Middleware(
        Access,
        token=token,
        keyring=keyring,
        base_domain=settings.base_domain,
        origins=settings.cors_origins,
        names=settings.dev_host,
        bodies=settings.admin_bodies,
    )


def _one_a_path(*routes: Route) -> list[Route]:
    """Merge the routes of each path: a 405 must name all methods of the path (RFC 9110, 15.5.6), and Starlette names
    only those of the route that it found."""
    by_path: dict[str, dict[str, _Endpoint]] = {}
    for route in routes:
        methods = by_path.setdefault(route.path, {})
        methods |= dict.fromkeys(route.methods or (), route.endpoint)
    return [Route(path, _by_method(methods), methods=list(methods)) for path, methods in by_path.items()]


def _by_method(methods: Mapping[str, _Endpoint]) -> _Endpoint:
    async def endpoint(request: Request) -> Response:
        return await methods[request.method](request)

    return endpoint


def _reasons(service: Service) -> dict[str, str]:
    """Problems that keep the server from working."""
    broken = service.shell.broken
    if broken is not None:
        return {"store": str(broken)}
    refusal = service.reader.refusal
    if isinstance(refusal, DiskLow):
        free_bytes, needed_bytes = service.reader.directory.free_bytes(), service.reader.directory.needed_bytes()
        return {"disk": f"{free_bytes} bytes are free: sends and creates are refused until {needed_bytes} are"}
    return {} if refusal is None else {"database": f"{refusal.reason}: sends and creates are refused"}


def of_one_copy(settings: Settings) -> dict[str, str]:
    """The warning that a cluster may lose what it acknowledges."""
    if settings.cluster is None or not settings.single_copy:
        return {}
    text = "--single-copy: while no standby confirms commits, losing the machine of PostgreSQL loses messages"
    return {"single_copy": text}


def _warnings(service: Service) -> dict[str, str]:
    """Problems that an operator should fix."""
    found = {}
    if service.clock.ahead:
        ahead_s = service.clock.ahead_us // 1_000_000
        found["clock"] = f"the data is {ahead_s} s ahead of this machine's clock: set the clock"
    unaccepted_s = service.clock.unaccepted_us(service.reader.held_us) // 1_000_000
    if unaccepted_s > _CLOCK_STEP_S_SHOWN:
        found["clock_step"] = (
            f"the machine's clock is {unaccepted_s} s ahead of what the data has accepted, and nothing expires by that"
            " step: if the clock is right, `veilmq clock accept`"
        )
    if rolled_back := service.shell.rolled_back:
        found["writes"] = f"writes failed in the last seconds: {rolled_back}"
    if service.reader.pages_damaged:
        found["pages"] = "a page of veilmq.db does not match its checksum: run `veilmq check`"
    archive = service.archive
    if archive is not None and archive.trouble:
        found["archive"] = f"the archive lags by {archive.lag_s:.0f} s: {archive.trouble}"
    if service.push_fault is not None:
        found["pushes"] = f"nothing is pushed {service.push_fault}; the log says more"
    elif service.push_room is not None and (lacking := service.push_room.local_exhaustion()) is not None:
        found["pushes"] = f"pushes wait, because this server cannot call: {lacking}"
    return found


def shown_settings(settings: Settings) -> dict[str, Any]:
    """Every setting as a plain value, without secrets."""
    found = {
        name: "set" if name in _SECRET and getattr(settings, name) is not None else _plain(getattr(settings, name))
        for name in FIELDS
    }
    return found | {"archive": settings.archive and shown_url(settings.archive)}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Address) else msgspec.to_builtins(value, enc_hook=str)


_STEPS_KEPT_MAX: Final = 64
"""Steps kept for a slow reader; further ones are left out."""

_PAUSE_S: Final = 0.001
_BEAT_S: Final = 10.0
"""A step that takes longer is sent again, so that client and proxies see that the server is alive."""

Step = Callable[[str, int, int], None]


class HandOverInput(msgspec.Struct, forbid_unknown_fields=True):
    """Which server is to own the queues; empty: whichever is first."""

    to: Annotated[str, Meta(max_length=255)] = ""


def _check_change(caller: Caller) -> None:
    caller.check_change(Action.SETTINGS)


class ClusterRoutes:
    """How the cluster stands, and a hand-over. A server alone has none of it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/v1/cluster", self.shown, methods=["GET"]),
            Route("/api/v1/cluster/handover", self.hand_over, methods=["POST"]),
        ]

    async def shown(self, request: Request) -> Response:
        """Servers, owner, log, snapshots, standbys."""
        answers.caller_of(request).check(Action.SETTINGS)
        return answers.answer(shown_cluster(await self._cluster().report()))

    async def hand_over(self, request: Request) -> Response:
        """Ask the owner to hand over. It stands in the history, and is asked for once with one Idempotency-Key."""
        wanted = inputs.decode(await answers.body_of(request, _check_change) or b"{}", HandOverInput)
        cluster = self._cluster()
        found = (await cluster.report()).status
        why_not = "" if found is None else found.why_not_owner(wanted.to)
        refusal = ParameterInvalid(parameter="to", reason=why_not)
        if why_not and answers.command_id_of(request) is None:
            raise refusal
        asked = operator.Asked("hand_over", "cluster", wanted)
        share = Share(name=_HANDOVER, value=wanted.to.encode(), replaces=True)
        _, headers = await answers.carry_out(request, self._service.shell, asked, [] if why_not else [share])
        if not headers:
            if why_not:
                raise refusal
            try:
                await cluster.hand_over(wanted.to)
            except StoreFailed as error:
                text = "the owner may not have been asked: check who owns the queues, then use a new Idempotency-Key"
                raise StoreFailed(reason=f"{error.reason}; {text}") from error
        return answers.answer({"asked": True, "to": wanted.to}, headers=headers)

    def _cluster(self) -> Cluster:
        if self._service.cluster is None:
            raise Refused(404, "no_cluster", "this server is no part of a cluster")
        return self._service.cluster


_HANDOVER: Final = "handover"
"""To whom an operator wanted the queues handed over last, among what servers share."""


def shown_cluster(report: ClusterReport) -> dict[str, Any]:
    """A report as JSON. What PostgreSQL says is null while it does not answer."""
    found = report.status
    shown: dict[str, Any] = {
        "server": report.server,
        "owner": report.owner or None,
        "epoch": report.epoch,
        "peers": report.peers,
        "single_copy": report.single_copy,
        "confirming": 0 if found is None else found.confirming,
        "missing": "" if found is None else found.missing,
        "log": None,
        "snapshot": None,
        "servers": [],
        "standbys": [],
    }
    if found is None:
        return shown
    shown["log"] = {
        "records": found.records,
        "bytes": found.log_bytes,
        "segments": found.segments,
        "format": found.format,
        "lease_us": _us(found.lease_s),
        "renewed_us": _us(found.renewed_s),
        "owned": found.owned,
        "single_copy": found.single_copy,
    }
    if found.snapshot_age_s is not None:
        shown["snapshot"] = {"record": found.snapshot, "age_us": _us(found.snapshot_age_s)}
    shown["servers"] = [
        {
            "name": each.name,
            "address": each.address,
            "release": each.release,
            "role": each.role,
            "running": each.is_running,
            "drained": each.drained,
            "record": each.record,
            "lag_records": max(0, found.records - each.record),
            "seen_us": _us(each.seen_s),
        }
        for each in found.servers
    ]
    shown["standbys"] = [
        {
            "name": each.name,
            "sync": each.sync,
            "state": each.state,
            "lag_us": None if each.stands_still else _us(each.lag_s),
            "stands_still": each.stands_still,
        }
        for each in found.standbys
    ]
    return shown


def _us(seconds: float) -> int:
    return int(seconds * SECOND_US)


class ClockInput(msgspec.Struct, forbid_unknown_fields=True):
    """How far to move the clock."""

    advance_us: Annotated[int, Meta(ge=1, le=400 * DAY_US)]


class Upkeep:
    """The routes."""

    def __init__(self, service: Service, copies: Copies) -> None:
        self._service = service
        self._copies = copies

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/v1/check", self.check, methods=["POST"]),
            Route("/api/v1/clock", self.clock, methods=["GET"]),
            Route("/api/v1/clock", self.move_clock, methods=["POST"]),
            Route("/api/v1/clock/accept", self.accept_clock, methods=["POST"]),
        ]

    async def check(self, request: Request) -> Response:
        """Check everything, as `veilmq check` does."""
        body = await answers.body_of(request, lambda caller: caller.check(Action.BACKUP))
        inputs.decode(body or b"{}", inputs.Nothing)
        reader = self._service.reader
        if isinstance(refusal := reader.refusal, StoreFailed):
            raise refusal

        def look(step: Progress) -> dict[str, Any]:
            report: dict[str, Any] = msgspec.to_builtins(reader.check(step))
            return report

        def allow() -> None:
            answers.caller_now(request).check(Action.BACKUP)

        return answers.stream(_steps(look, self._copies, allow), answers.JSON_LINES)

    async def clock(self, request: Request) -> Response:
        """The current instant of the lease clock, and the step that nobody has accepted yet."""
        answers.caller_of(request).check(Action.SETTINGS)
        clock, held_us = self._service.clock, self._service.reader.held_us
        return answers.answer({"now": clock.now(), "unaccepted_us": clock.unaccepted_us(held_us)})

    async def accept_clock(self, request: Request) -> Response:
        """The machine's clock is right: let expire what only its step kept."""
        inputs.decode(await answers.body_of(request, _check_change) or b"{}", inputs.Nothing)
        asked = operator.Asked("accept_clock", "clock", inputs.Nothing())
        commands = [self._service.clock.accepting()]
        (outcome,), headers = await answers.carry_out(request, self._service.shell, asked, commands)
        if isinstance(outcome, ClockChecked) and outcome.accepted_us and not headers:  # they say that it ran before
            key = answers.caller_of(request).key
            by = "the admin token" if key is None else key.id
            clock_log.info("the clock was %d s ahead of the data: accepted by %s", outcome.accepted_us // SECOND_US, by)
        return answers.answer(views.shown_clock(outcome), headers=headers)

    async def move_clock(self, request: Request) -> Response:
        """Move the clock: everything that becomes due has happened when this answers."""
        wanted = inputs.decode(await answers.body_of(request, _check_change), ClockInput)
        answers.no_command_id(request)
        if self._service.keyring.checks:
            raise Refused(403, "clock_fixed", "the clock moves in development mode alone: start without --credentials")
        await self._service.shell.advance(self._service.clock, wanted.advance_us)
        return answers.answer({"now": self._service.clock.now()})


async def _steps(
    work: Callable[[Step], dict[str, Any]], copies: Copies, allow: Callable[[], None]
) -> AsyncIterator[bytes]:
    """The steps of `work` while it runs on a thread, then its result. It waits for its turn to read. allow: raises
    Refused if the caller may not have the result any more."""
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    left = threading.Event()
    last: tuple[str, int, int] | None = None

    def step(stage: str, done: int, total: int) -> None:
        nonlocal last
        if left.is_set():
            raise ConnectionAbortedError("the client hung up")
        if (stage, done, total) == last:
            return
        last = stage, done, total
        if steps.qsize() < _STEPS_KEPT_MAX:
            loop.call_soon_threadsafe(steps.put_nowait, {"stage": stage, "done": done, "total": total})
        # Reading row by row takes the interpreter back before the loop gets it, so yield to the loop.
        time.sleep(_PAUSE_S)

    def run() -> dict[str, Any]:
        try:
            return {"result": work(step)}
        except (OSError, DatabaseFailed, NotOurs) as error:
            return {"error": "failed", "message": str(error)}

    async def in_turn() -> dict[str, Any]:
        async with copies.reading():
            reading = asyncio.ensure_future(run_in_threadpool(run))
            try:
                found = await asyncio.shield(reading)
                allow()
                return found
            except Refused as refused:
                return {"error": refused.error, "message": refused.message}
            finally:
                left.set()
                await asyncio.wait([reading])  # its turn ends when it reads no more

    working = asyncio.ensure_future(in_turn())
    working.add_done_callback(lambda _: steps.put_nowait(None))
    try:
        shown: dict[str, Any] | None = {"stage": "waiting", "done": 0, "total": 0}
        while shown is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    shown = await steps.get()
            if shown is not None:
                yield msgspec.json.encode(shown) + b"\n"
        yield msgspec.json.encode(await working) + b"\n"
    finally:
        working.cancel()  # if the client is gone
