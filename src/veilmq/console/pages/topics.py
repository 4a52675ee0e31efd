"""Topics: their list, and one topic's fan-out: each subscription, where its copies go, and how its pushes stand."""

from typing import Any, Final

from starlette.responses import Response

from veilmq.console.pages.queue import key_of
from veilmq.console.visit import Page, Visit

TOPICS_A_PAGE: Final = 50
_PATH: Final = "/console/topics/{account}/{region}/{name}"


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


TOPIC_PAGES: Final = (Page("/console/topics", topics), Page(_PATH, topic))
