"""/api/v1/queues/.../failures: causes over minutes, stored or not, and errors' lines only for who may read them."""

from pathlib import Path
from typing import Any

import httpx
from tests.admin.conftest import client
from tests.admin.server import OPTIONS, Keys, got, running

from veilmq.model.commands import Extend, Origin, Receive
from veilmq.model.messages.message import id_text
from veilmq.model.messages.reports import Report, Reported, failure_of
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.model.settings.queue import QueueKey
from veilmq.server.config.settings import Settings

ACCOUNT = "000000000000"
JOBS = f"/api/v1/queues/{ACCOUNT}/us-east-1/jobs"
MINUTE = 60_000_000


def fail(server: Any, http: httpx.Client, line: str) -> str:
    """A message is given back for an error; its id."""
    http.post(JOBS + "/messages", json={"messages": [{"body": "x"}]})
    queue, origin = QueueKey(ACCOUNT, "us-east-1", "jobs"), Origin("veil", "worker")
    report = Report(Reported.RETRY, failure_of("raised", "ValueError", line))

    async def give_back() -> str:
        (received,) = await server.shell.call(Receive(queue=queue, origin=origin, count_max=1))
        (message,) = received.messages
        given = {"handle": message.handle, "arrived": server.shell.now(), "report": report}
        await server.shell.call(Extend(queue=queue, origin=origin, lease_us=MINUTE * 60 * 24, **given))
        return id_text(message.id)

    return str(server.on_loop(give_back()))


def failures(http: httpx.Client, **members: Any) -> dict[str, Any]:
    return got(http, JOBS + "/failures", **members)


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


def test_nobody_sees_what_errors_said_where_nobody_may_read_bodies(tmp_path: Path) -> None:
    settings = Settings(admin_bodies=False)
    with running(tmp_path / "data", None, settings, OPTIONS) as server, client(server) as http:
        assert http.put(JOBS).status_code == 201
        fail(server, http, "the card of a customer")
        assert [each["error"] for each in failures(http)["causes"]] == [None]
