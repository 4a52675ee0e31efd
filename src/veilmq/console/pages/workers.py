"""Workers: each client of the last hour with what it holds, how fast it is, and how often it failed.

Strategy: what `/api/v1/workers` knows, which filters and sorts; nothing is counted here. A cell of the page is named by
the client, so that the script finds it again.
"""

from typing import Any, Final

from starlette.responses import Response

from veilmq.console.showing import count, rate
from veilmq.console.visit import Page, Visit

PATH: Final = "/console/workers"
WORKERS_SHOWN_MAX: Final = 200
HELD_SHOWN_MAX: Final = 20
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


WORKER_PAGES: Final = (
    Page(PATH, workers),
    Page(PATH + "/news", news, is_polled=True),
    Page(PATH + "/export", export),
)
