"""/api/v1/queues/.../failures: causes over minutes, stored or not, and errors' lines only for who may read them."""

from pathlib import Path
from typing import Any

import httpx
from tests.admin.conftest import client
from tests.admin.server import OPTIONS, Keys, running

from veilmq.model.commands import Extend, Origin
from veilmq.model.messages.reports import Report, Reported, failure_of
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.model.settings.queue import QueueKey

ACCOUNT = "000000000000"
JOBS = f"/api/v1/queues/{ACCOUNT}/us-east-1/jobs"
MINUTE = 60_000_000


def fail(server: Any, http: httpx.Client, line: str) -> str:
    """A message is given back for an error; its id."""
    http.post(JOBS + "/messages", json={"messages": [{"body": "x"}]})
    (message,) = http.post(JOBS + "/receive", json={"lease_us": MINUTE * 1_000}).json()["messages"]
    report = Report(Reported.RETRY, failure_of("raised", "ValueError", line))

    async def give_back() -> None:
        command = Extend(
            queue=QueueKey(ACCOUNT, "us-east-1", "jobs"),
            origin=Origin("veil", "worker"),
            handle=message["handle"],
            lease_us=MINUTE * 60 * 24,
            arrived=server.shell.now(),
            report=report,
        )
        await server.shell.call(command)

    server.on_loop(give_back())
    return str(message["id"])


def failures(http: httpx.Client, **members: Any) -> dict[str, Any]:
    answer = http.get(JOBS + "/failures", params=members)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_causes_of_a_span(server: Any, http: httpx.Client) -> None:
    assert http.get(JOBS + "/failures").status_code == 404
    assert http.put(JOBS).status_code == 201
    assert failures(http)["causes"] == []
    fail(server, http, "order 12345 is missing")
    first = failures(http)
    for _ in range(3):
        assert http.post("/api/v1/clock", json={"advance_us": MINUTE}).status_code == 200
    fail(server, http, "no such shop")
    newest = fail(server, http, "order 67890 is missing")
    found = failures(http)
    cause, other = found["causes"]
    assert (cause["kind"], cause["error_type"], cause["count"]) == ("failed", "ValueError", 2)
    assert (cause["error"], cause["message"]) == ("order 67890 is missing", newest)
    assert cause["first"] == first["causes"][0]["first"] < cause["newest"]
    assert (other["error"], other["count"]) == ("no such shop", 1)
    assert found["other"] == {"failed": 0, "lease_expired": 0, "dead_lettered": 0}
    assert failures(http, limit=1)["other"]["failed"] == 1, "what the answer has no room for"
    assert failures(http, to=first["to"])["causes"] == first["causes"], "an earlier minute is as it was"
    assert sum(each["count"] for each in failures(http, minutes=2)["causes"]) == 2
    assert http.get(JOBS + "/failures", params={"minutes": 1_441}).json()["field"] == "minutes"


def test_who_may_not_read_bodies_sees_types_alone(tmp_path: Path) -> None:
    reader = AccessKey("reader", "secret", ACCOUNT, grants=(Grant(frozenset({Action.DESCRIBE_QUEUE})),))
    sender = AccessKey("sender", "secret", ACCOUNT, grants=(Grant(frozenset({Action.SEND})),))
    with running(tmp_path / "data", Keys(reader, sender), options=OPTIONS) as server, client(server) as http:
        assert http.put(JOBS).status_code == 201
        for line in ("the card of a customer", "another line"):
            fail(server, http, line)
        assert len(failures(http)["causes"]) == 2
        with httpx.Client(base_url=server.url, auth=("reader", "secret")) as reading:
            (alone,) = failures(reading)["causes"]
        assert (alone["error"], alone["error_type"], alone["count"]) == (None, "ValueError", 2)
        assert httpx.get(f"{server.url}{JOBS}/failures", auth=("sender", "secret")).status_code == 403
