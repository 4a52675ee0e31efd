"""Workers: each client of the last hour with what it holds, how fast it is, and how often it failed; and why messages
of all queues failed.

Strategy: what `/api/v1/workers` and `/api/v1/failures` know, which filter, sort and add up; nothing is counted here. A
cell of the page is named by the client, so that the script finds it again. Failures are not polled: to add them up
reads many rollups.
"""

from typing import Any, Final

from starlette.responses import Response

from veilmq.console.showing import count, rate
from veilmq.console.visit import Page, Visit

PATH: Final = "/console/workers"
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


async def workers(visit: Visit) -> Response:
    """The page."""
    found = await _found(visit)
    asked = {name: visit.members.get(name, "") for name in ("client", "queue", "sort")}
    return visit.show(
        "workers.html", found=found, asked=asked, sorts=SORTS, held_shown_max=HELD_SHOWN_MAX, nav="workers"
    )


async def news(visit: Visit) -> Response:
    """The cells of the page that may have changed."""
    found = await _found(visit)
    cells = {"workers": count(len(found["workers"]))}
    for each in found["workers"]:
        for name in ("holds", "waits", "failed", "lease_expired", "refused"):
            cells[f"{each['cell']}:{name}"] = count(each[name])
        cells[f"{each['cell']}:rate"] = rate(each["per_minute"]["deleted"])
        cells[f"{each['cell']}:seen"] = str(each["last_seen"] or "")
    return visit.news(cells)


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
    Page(PATH, workers),
    Page(PATH + "/news", news, is_polled=True),
    Page(PATH + "/export", export),
)
