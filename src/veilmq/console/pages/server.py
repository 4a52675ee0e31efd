"""The server: whether it is ready, its clock, every setting with what it means; its cluster, and a hand-over; accounts
with keys and grants; topics with each subscription, where its copies go, and how its pushes stand. And who works on it:
each client of the last hour with what it holds, how fast it is, and how often it failed, and why messages of all queues
failed.

Strategy: settings that differ from their defaults come first. Secrets and the places of secrets are not shown, for the
API does not show them.

Workers and failures are what `/api/v1/workers` and `/api/v1/failures` know, which filter, sort and add up; nothing is
counted here. A cell of the page is named by the client, so that the script finds it again. Failures are not polled: to
add them up reads many rollups.
"""

from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

import veilmq
from veilmq.console import ApiRefused
from veilmq.console.pages.queue import key_of
from veilmq.console.sessions import Done, hashed
from veilmq.console.showing import count, duration, rate
from veilmq.console.visit import Page, Visit
from veilmq.server.config.settings import FIELDS, Address

PATH: Final = "/console/server"
CLUSTER: Final = "/console/cluster"
ACCOUNTS_A_PAGE: Final = 50
TOPICS_A_PAGE: Final = 50
_TOPIC: Final = "/console/topics/{account}/{region}/{name}"
NEAR: Final = 0.9
"""From this share of a limit on an account needs a look."""
_COUNTED: Final = {"queues": "queues and pushes", "topics": "topics", "subscriptions": "subscriptions"}
WORKERS: Final = "/console/workers"
WORKERS_SHOWN_MAX: Final = 200
HELD_SHOWN_MAX: Final = 20
CAUSES_SHOWN_MAX: Final = 200
SPANS: Final = {60: "hour", 360: "6 hours", 1_440: "day"}
"""Of failures, in minutes."""
SORTS: Final = {
    "seen": "seen last",
    "holds": "most held",
    "oldest": "oldest lease",
    "rate": "fastest",
    "failed": "most failures",
    "lease_expired": "most leases that ran out",
}


async def server(visit: Visit) -> Response:
    """The page."""
    return await _server_page(visit, None)


async def _server_page(visit: Visit, error: ApiRefused | None) -> Response:
    health = await visit.api.get("/health/ready")
    settings, clock = None, None
    if visit.may("settings"):
        found = await visit.api.get("/api/v1/settings")
        settings = sorted((_setting(*each) for each in found["settings"].items()), key=lambda each: not each["differs"])
        clock = await visit.api.get("/api/v1/clock")
    return visit.show(
        "server.html",
        200 if error is None else error.status,
        health=health,
        settings=settings,
        clock=clock,
        version=veilmq.__version__,
        wrong=None if error is None else error.message,
        nav="server",
    )


def _setting(name: str, value: Any) -> dict[str, Any]:
    field = FIELDS.get(name)
    default = None if field is None else field.default
    plain = str(default) if isinstance(default, Address) else list(default) if isinstance(default, tuple) else default
    return {
        "name": name,
        "value": _text(value),
        "differs": _text(value) != _text(plain),
        "help": "" if field is None else field.help,
    }


def _text(value: Any) -> str:
    if value is None or value == []:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


async def accept_clock(visit: Visit) -> Response:
    """Say that the machine's clock is right."""

    async def work(given: dict[str, str], once: str) -> Done:
        answer = await visit.api.act("POST", "/api/v1/clock/accept", {}, once)
        return Done(f"A step of {duration(answer['accepted_us'])} was accepted.", PATH)

    return await visit.act(work, lambda given, error: _server_page(visit, error))


async def cluster(visit: Visit) -> Response:
    """Servers, owner, lag, snapshots, log, standbys."""
    return await _cluster_page(visit, "cluster.html", None)


async def hand_over_form(visit: Visit) -> Response:
    """What a hand-over does, before it is asked for."""
    return await _cluster_page(visit, "handover.html", None, visit.members.get("to", ""))


async def _cluster_page(visit: Visit, template: str, error: ApiRefused | None, to: str = "") -> Response:
    found = await visit.api.get("/api/v1/cluster")
    return visit.show(
        template,
        200 if error is None else error.status,
        found=found,
        to=to,
        wrong=None if error is None else error.message,
        nav="cluster",
    )


async def hand_over(visit: Visit) -> Response:
    """Ask for it."""

    async def work(given: dict[str, str], once: str) -> Done:
        to = given.get("to", "")
        await visit.api.act("POST", "/api/v1/cluster/handover", {"to": to}, once)
        return Done(f"The owner was asked to hand over to {to or 'another server'}.", CLUSTER)

    return await visit.act(work, lambda given, error: _cluster_page(visit, "handover.html", error, given.get("to", "")))


async def accounts(visit: Visit) -> Response:
    """The accounts that the session may see, with their keys and grants."""
    found = await _accounts(visit)
    shares = {name: (label, found["limits"][name]) for name, label in _COUNTED.items()}
    return visit.show("accounts.html", found=found, shares=shares, near=NEAR, nav="accounts")


async def export_accounts(visit: Visit) -> Response:
    """The same, as JSON or CSV: a row for each account."""
    return visit.download("accounts", (await _accounts(visit))["accounts"])


async def _accounts(visit: Visit) -> dict[str, Any]:
    members = {"after": visit.members.get("after"), "limit": ACCOUNTS_A_PAGE}
    found: dict[str, Any] = await visit.api.get("/api/v1/accounts", **members)
    return found


async def topics(visit: Visit) -> Response:
    """A page of topics by name."""
    members = visit.members
    found = await visit.api.get(
        "/api/v1/topics",
        account=visit.account,
        prefix=members.get("prefix"),
        after=members.get("after"),
        limit=TOPICS_A_PAGE,
    )
    after = found["after"] if found["more"] else None
    return visit.show("topics.html", topics=[_counted(each) for each in found["topics"]], after=after, nav="topics")


def _counted(topic: dict[str, Any]) -> dict[str, Any]:
    """The topic with what its subscriptions are, and which of them need a look."""
    subscriptions = topic["subscriptions"]
    pushes = [each for each in subscriptions if each["push"] is not None]
    waiting = sum(each["push"]["waiting"]["total"] for each in pushes if each["push"]["waiting"])
    down = sum(each["push"].get("available") is False for each in pushes)
    return topic | {"pushes": len(pushes), "waiting": waiting, "down": down}


async def topic(visit: Visit) -> Response:
    """One topic."""
    key = key_of(visit)
    found = await visit.api.get(f"/api/v1/topics/{key.account}/{key.region}/{key.name}")
    return visit.show("topic.html", topic=_counted(found), nav="topics")


SERVER_PAGES: Final = (
    Page(PATH, server),
    Page(PATH + "/clock", accept_clock, "POST"),
    Page(CLUSTER, cluster),
    Page(CLUSTER + "/handover", hand_over_form),
    Page(CLUSTER + "/handover", hand_over, "POST"),
    Page("/console/topics", topics),
    Page(_TOPIC, topic),
    Page("/console/accounts", accounts),
    Page("/console/accounts/export", export_accounts),
)


_ABOVE_THE_FORM: Final = (400, 404)
"""Statuses of what was typed wrong."""


async def workers(visit: Visit) -> Response:
    """The page."""
    found, news, wrong, status = None, "", None, 200
    try:
        found = await _found(visit)
        news = urlencode(visit.members | {"rows": _mark(found)})
    except ApiRefused as error:
        if error.status not in _ABOVE_THE_FORM:
            raise
        wrong, status = error.words, error.status
    asked = {name: visit.members.get(name, "") for name in ("client", "queue", "sort")}
    shown: dict[str, Any] = {"found": found, "asked": asked, "wrong": wrong, "news": news}
    return visit.show("workers.html", status, sorts=SORTS, held_shown_max=HELD_SHOWN_MAX, nav="workers", **shown)


async def news(visit: Visit) -> Response:
    """The cells of the page that may have changed."""
    found = await _found(visit)
    mark = _mark(found)
    is_same = found.get("more") or mark == visit.members.get("rows", mark)
    cells = {"others": "" if is_same else "Others are here now: load the page again."}
    for each in found["workers"]:
        for name in ("holds", "waits", "failed", "lease_expired", "refused"):
            cells[f"{each['cell']}:{name}"] = count(each[name])
        cells[f"{each['cell']}:rate"] = rate(each["per_minute"]["deleted"])
        cells[f"{each['cell']}:seen"] = str(each["last_seen"] or "")
        cells[f"{each['cell']}:oldest"] = str(each["oldest_granted"] or "")
    return visit.news(cells)


def _mark(found: dict[str, Any]) -> str:
    """Another one if there are other workers."""
    return hashed(repr(sorted(each["cell"] for each in found["workers"]))).hex()[:12]


async def export(visit: Visit) -> Response:
    """What the page shows, as JSON or CSV."""
    return visit.download("workers", [_without_cell(each) for each in (await _found(visit))["workers"]])


def _without_cell(worker: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in worker.items() if name != "cell"}


async def _found(visit: Visit) -> dict[str, Any]:
    """The workers that the address asks for, each with what names its cells."""
    members = visit.members
    asked = {name: members.get(name) for name in ("client", "queue", "sort")}
    bounds = {"messages": HELD_SHOWN_MAX, "limit": WORKERS_SHOWN_MAX}
    found: dict[str, Any] = await visit.api.get("/api/v1/workers", **asked, **bounds)
    for each in found["workers"]:
        each["cell"] = f"{each['protocol']}/{each['principal']}/{each['client']}"
    return found


async def failures(visit: Visit) -> Response:
    """Why messages of all queues failed."""
    minutes, found = await _failures(visit)
    prefix = visit.members.get("prefix", "")
    return visit.show("failures.html", found=found, minutes=minutes, spans=SPANS, prefix=prefix, nav="failures")


async def export_failures(visit: Visit) -> Response:
    """What the page shows, as JSON or CSV."""
    return visit.download("failures", (await _failures(visit))[1]["causes"])


async def _failures(visit: Visit) -> tuple[int, dict[str, Any]]:
    given = visit.members.get("minutes", "")
    minutes = int(given) if given in map(str, SPANS) else min(SPANS)
    asked = {"account": visit.account, "prefix": visit.members.get("prefix"), "limit": CAUSES_SHOWN_MAX}
    return minutes, await visit.api.get("/api/v1/failures", minutes=minutes, **asked)


WORKER_PAGES: Final = (
    Page("/console/failures", failures),
    Page("/console/failures/export", export_failures),
    Page(WORKERS, workers),
    Page(WORKERS + "/news", news, is_polled=True),
    Page(WORKERS + "/export", export),
)
