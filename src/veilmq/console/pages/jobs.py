"""Jobs: acts on all messages that a filter matches, carried out by the server; their list, their progress, their end.

Strategy: a job is always counted first (a dry run), so that the button that starts it names what it does and to how
many. The filter is the one of the queue's page, from its address.
"""

from typing import Any, Final

from starlette.responses import Response

from veilmq.console.calls import ApiRefused
from veilmq.console.pages.queue import FILTERS, PATH, key_of
from veilmq.console.pages.queue_acts import queue_page
from veilmq.console.sessions import Done
from veilmq.console.showing import count, number
from veilmq.console.visit import Page, Visit

ACTS: Final = {
    "delete": ("Delete", "deletes them for good"),
    "move": ("Move", "moves them to another queue"),
    "redrive": ("Redrive", "moves dead letters back to where they came from, or to another queue"),
    "release": ("Release", "ends the leases of those in flight, so that others can receive them at once"),
}
JOBS_A_PAGE: Final = 50
_ONE: Final = "/console/jobs/{job}"
_WAITING: Final = frozenset({"running", "cancelling"})


async def jobs(visit: Visit) -> Response:
    """A page of jobs, newest first."""
    members = {"account": visit.account, "after": visit.members.get("after"), "limit": JOBS_A_PAGE}
    found = await visit.api.get("/api/v1/jobs", **members)
    after = found["after"] if found["more"] else None
    return visit.show("jobs.html", jobs=found["jobs"], after=after, nav="jobs")


async def job(visit: Visit) -> Response:
    """One job."""
    return await _job_page(visit, None)


async def _job_page(visit: Visit, error: ApiRefused | None) -> Response:
    found = await _found(visit)
    return visit.show(
        "job.html",
        200 if error is None else error.status,
        job=found,
        is_waiting=found["status"] in _WAITING,
        does=ACTS.get(found["act"], (found["act"].capitalize(), ""))[0],
        wrong=None if error is None else error.message,
        nav="jobs",
    )


async def _found(visit: Visit) -> Any:
    return await visit.api.get(f"/api/v1/jobs/{visit.request.path_params['job']}")


async def news(visit: Visit) -> Response:
    """The progress of one."""
    found = await _found(visit)
    cells = {name: count(found[name]) for name in ("seen", "matched", "done", "failed", "total")}
    return visit.news(cells | {"status": found["status"]}, is_over=found["status"] not in _WAITING)


async def begin_form(visit: Visit) -> Response:
    """What to do with the messages that match."""
    given = {name: visit.members.get(name, "") for name in FILTERS} | visit.members
    return await queue_page(visit, "begin.html", None, given, acts=ACTS, filters=FILTERS)


async def begin(visit: Visit) -> Response:
    """Begin a job: first one that counts alone, and from its page the real one."""
    key = key_of(visit)

    async def work(given: dict[str, str], once: str) -> Done:
        chosen: dict[str, Any] = {name: given[name] for name in FILTERS if given.get(name)}
        for name in ("age_us_min", "receives_min"):
            if name in chosen:
                chosen[name] = number(name, chosen[name])
        wanted: dict[str, Any] = {
            "act": given.get("act", ""),
            "queue": {"account": key.account, "region": key.region, "name": key.name},
            "filter": chosen,
            "dry_run": "confirmed" not in given,
        }
        if given.get("destination"):
            wanted["destination"] = {"account": key.account, "region": key.region, "name": given["destination"]}
        if given.get("rate"):
            wanted["rate"] = number("rate", given["rate"])
        made = await visit.api.act("POST", "/api/v1/jobs", wanted, once)
        return Done("Counting." if made["dry_run"] else "The job has begun.", f"/console/jobs/{made['id']}")

    async def refused(given: dict[str, str], error: ApiRefused) -> Response:
        empty = dict.fromkeys(FILTERS, "")
        return await queue_page(visit, "begin.html", error, empty | given, acts=ACTS, filters=FILTERS)

    return await visit.act(work, refused)


async def cancel(visit: Visit) -> Response:
    """End a job; what it did stays done."""

    async def work(given: dict[str, str], once: str) -> Done:
        ended = await visit.api.act("POST", f"/api/v1/jobs/{visit.request.path_params['job']}/cancel", {}, once)
        return Done(f"The job ends; {count(ended['done'])} messages are done.", f"/console/jobs/{ended['id']}")

    return await visit.act(work, lambda given, error: _job_page(visit, error))


JOB_PAGES: Final = (
    Page("/console/jobs", jobs),
    Page(_ONE, job),
    Page(_ONE + "/news", news, is_polled=True),
    Page(_ONE + "/cancel", cancel, "POST"),
    Page(PATH + "/job", begin_form),
    Page(PATH + "/job", begin, "POST"),
)
