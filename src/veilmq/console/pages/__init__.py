"""The start page: what needs a person, then queues; and the search by name or id. Here is also the list of all pages
and acts, for which each file beside this has those of one noun.

Strategy: one page of queues by name, never all of them. What changes is also answered as JSON, cell by cell, for the
page's script. Rates and sparklines are from the rollups of the listed queues alone.
"""

import re
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from veilmq.admin.api import Refused
from veilmq.admin.story import span
from veilmq.console import HOME
from veilmq.console.pages.acts import JOB_PAGES, QUEUE_ACTS
from veilmq.console.pages.message import MESSAGE_PAGES, sends_with
from veilmq.console.pages.queue import PAST_PAGES, QUEUE_PAGES, console_path
from veilmq.console.pages.server import SERVER_PAGES, WORKER_PAGES
from veilmq.console.pictures import sparkline
from veilmq.console.sessions import hashed
from veilmq.console.showing import blocked, count, duration, many, rate
from veilmq.console.visit import Page, Visit
from veilmq.model.instant import HOUR_US
from veilmq.model.settings.queue import QueueKey

QUEUES_A_PAGE: Final = 50
SPARK_MINUTES: Final = 60
RATE_MINUTES: Final = 5
"""So many are read for the rates alone."""
WORST_SHOWN_MAX: Final = 3
"""Queues of each measure."""
BLOCKED_ASKED: Final = 20
"""Of some of them it is usual that groups wait so long."""
OLD_US: Final = HOUR_US
_BAD: Final = (
    ("dead_lettered", 1, "dead letters in this hour and the last: {}"),
    ("failed", 1, "failures that workers reported in this hour and the last: {}"),
    ("lease_expired", 1, "leases that ran out in this hour and the last: {}; is its timeout right?"),
    ("oldest", OLD_US, "its oldest message is {} old"),
)
"""Measure, what is bad, and how it is said."""
_ID: Final = re.compile(r"[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NAMED_MAX: Final = 100
"""Characters of a search that the page repeats."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")


async def start(visit: Visit) -> Response:
    """The page."""
    listed = await _queues(visit, SPARK_MINUTES)
    sparks = {queue["incarnation"]: sparkline(queue["rates"]) for queue in listed["queues"]}
    wrong = await _wrong_timeouts(visit)
    needs = await _needs(visit) + await _worst(visit, wrong)
    news = urlencode(visit.members | {"timeouts": _mark(wrong)})
    return visit.show("start.html", sparks=sparks, needs=needs, news=news, nav="start", **listed)


async def news(visit: Visit) -> Response:
    """The cells of the page that may have changed."""
    listed = await _queues(visit, RATE_MINUTES)
    cells = {}
    for queue in listed["queues"]:
        name = f"{queue['account']}/{queue['region']}/{queue['name']}"
        for state in ("visible", "in_flight", "delayed"):
            cells[f"{name}:{state}"] = count(queue["counts"][state])
        cells[f"{name}:oldest"] = duration(queue["oldest_age_us"])
        for what, per_second in queue["rates"]["per_second"].items():
            cells[f"{name}:{what}"] = rate(per_second)
    mark = _mark(await _wrong_timeouts(visit))
    return visit.news(cells | {"timeouts": mark}, is_over=mark != visit.members.get("timeouts", mark))


async def _queues(visit: Visit, minutes: int) -> dict[str, Any]:
    members = visit.members
    prefix, after = members.get("prefix", ""), members.get("after", "")
    account = members.get("account") or visit.account
    bounds = {"limit": QUEUES_A_PAGE, "minutes": minutes}
    found = await visit.api.get("/api/v1/queues", prefix=prefix, after=after, account=account, **bounds)
    several = len({(queue["account"], queue["region"]) for queue in found["queues"]}) > 1
    return {
        "queues": found["queues"],
        "after": found["after"] if found["more"] else None,
        "prefix": prefix,
        "several": several,
    }


async def _needs(visit: Visit) -> list[dict[str, str]]:
    """What a person should look at, worst first: {level, what, why, href}."""
    health = await visit.api.get("/health/ready")
    found = [{"level": "bad", "what": what, "why": why, "href": ""} for what, why in health["reasons"].items()]
    found += [{"level": "warn", "what": what, "why": why, "href": ""} for what, why in health["warnings"].items()]
    if visit.may("peek"):
        apart = await visit.api.get("/api/v1/quarantine", account=visit.account, limit=1)
        if apart["messages"]:
            first = apart["messages"][0]
            found.append(
                {
                    "level": "bad",
                    "what": "damaged messages",
                    "why": f"{first['name']} has at least one in quarantine: `veilmq quarantine list` shows them",
                    "href": "",
                }
            )
    return found


async def _wrong_timeouts(visit: Visit) -> list[dict[str, Any]]:
    """Queues whose timeout is clearly wrong, by what was looked at so far; the next look begins behind this."""
    if not visit.may("describe-queue"):
        return []
    found = await visit.api.get("/api/v1/timeouts", account=visit.account, limit=WORST_SHOWN_MAX)
    return list(found["queues"])


def _mark(wrong: list[dict[str, Any]]) -> str:
    """Another one if the page is to say something else about timeouts."""
    shown = [(each["incarnation"], each["wrong"], each["recommended_us"], each["at_least_us"]) for each in wrong]
    return hashed(repr(shown)).hex()[:12]


async def _still(visit: Visit) -> list[dict[str, str]]:
    """The FIFO queues that stand still: those first in which a group has been blocked for longest."""
    ranked = await visit.api.get("/api/v1/worst", by="blocked", account=visit.account, limit=BLOCKED_ASKED)
    found = []
    for queue in ranked["queues"]:
        if queue["value"] >= queue["still_after_us"]:
            of = queue["blocked"]
            messages = f"{blocked(of)} message{'s' * (of['messages'] != 1)} of {many(of['groups'], 'group')}"
            why = f"{messages} blocked for up to {duration(queue['value'])}: others of their group are held"
            found.append(_need(queue, why, "#blocked"))
    return found[:WORST_SHOWN_MAX]


async def _worst(visit: Visit, wrong: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The queues that are worst by some measure, as far as that is bad, and those whose timeout is wrong."""
    found = await _still(visit) + [_of_timeout(each) for each in wrong]
    judged = {each["incarnation"] for each in wrong}
    for measure, least, words in _BAD:
        ranked = await visit.api.get("/api/v1/worst", by=measure, account=visit.account, limit=WORST_SHOWN_MAX)
        for queue in ranked["queues"]:
            if queue["value"] is None or queue["value"] < least:
                continue
            if measure == "lease_expired" and queue["incarnation"] in judged:
                continue
            if measure == "dead_lettered" and queue["dead_letters_to"] is not None:
                why = f"dead letters from {queue['name']} in this hour and the last: {count(queue['value'])}"
                found.append(_need(queue["dead_letters_to"], why, "#messages"))
                continue
            shown = duration(queue["value"]) if measure == "oldest" else count(queue["value"])
            found.append(_need(queue, words.format(shown), "#timeout" if measure == "lease_expired" else ""))
    return found


def _need(queue: dict[str, Any], why: str, part: str = "") -> dict[str, str]:
    href = console_path(QueueKey(queue["account"], queue["region"], queue["name"])) + part
    return {"level": "warn", "what": queue["name"], "why": why, "href": href}


def _of_timeout(queue: dict[str, Any]) -> dict[str, str]:
    best_us, least_us = queue["recommended_us"], queue["at_least_us"]
    # As `why` says it: 90 s, not 1 min 30 s.
    best = "to extend leases" if least_us is None else f"at least {span(least_us)}"
    best = best if best_us is None else span(best_us)
    wrong = queue["wrong"].replace("_", " ")
    named = {
        "queue": "its timeout",
        "receive": "the lease that receives ask for, now",
        "plan": "the lease of its plan, now",
    }[queue["by"]]
    why = f"{named} of {span(queue['lease_us'])} is {wrong}, {best} is recommended: {queue['why']}"
    return _need(queue, why, "#timeout")


async def find(visit: Visit) -> Response:
    """To the message of that id or deduplication id, or to the queues whose names begin so."""
    wanted = visit.members.get("q", "").strip()
    if _ID.fullmatch(wanted):
        return RedirectResponse(f"/console/messages/{wanted}", 303)
    if wanted and visit.may("peek"):
        sends = await sends_with(visit, wanted)
        if sends["messages"]:
            return visit.show("sends.html", sends=sends, may_be_name=_NAME.fullmatch(wanted) is not None, nav="message")
    if wanted and not _NAME.fullmatch(wanted):
        what = f"Nothing was found: no queue can be called {wanted[:_NAMED_MAX]}, and no message here has such an id."
        raise Refused(404, "not_found", what)
    return RedirectResponse(f"{HOME}?prefix={wanted}" if wanted else HOME, 303)


START_PAGES: Final = (
    Page("/console/", start),
    Page("/console/news", news, is_polled=True),
    Page("/console/find", find),
)


PAGES: Final[tuple[Page, ...]] = (
    *START_PAGES,
    *QUEUE_PAGES,
    *QUEUE_ACTS,
    *PAST_PAGES,
    *JOB_PAGES,
    *MESSAGE_PAGES,
    *WORKER_PAGES,
    *SERVER_PAGES,
)
