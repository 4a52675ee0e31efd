"""/api/v1/queues/.../failures: causes over minutes, stored or not, and errors' lines only for who may read them."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.admin.conftest import client
from tests.admin.server import OPTIONS, Keys, got, running

from veilmq.model.commands import Extend, Origin, Receive
from veilmq.model.messages import Report, Reported, failure_of, id_text
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.model.settings.queue import QueueKey
from veilmq.server.config.settings import Settings

ACCOUNT = "000000000000"
JOBS = f"/api/v1/queues/{ACCOUNT}/us-east-1/jobs"
MINUTE = 60_000_000


def fail(server: Any, http: httpx.Client, line: str, name: str = "jobs") -> str:
    """A message is given back for an error; its id."""
    http.post(f"/api/v1/queues/{ACCOUNT}/us-east-1/{name}/messages", json={"messages": [{"body": "x"}]})
    queue, origin = QueueKey(ACCOUNT, "us-east-1", name), Origin("veil", "worker")
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
    assert http.get(JOBS + "/failures", params={"from": 5, "to": 3}).json()["field"] == "from"
    assert failures(http, **{"from": 3, "to": 5})["causes"] == [], "the first minute of 1970"


def all_failures(http: httpx.Client, **members: Any) -> dict[str, Any]:
    return got(http, "/api/v1/failures", **members)


def test_only_queues_that_failed_are_counted(server: Any, http: httpx.Client) -> None:
    """151 sends: the number has the byte by which rows with causes are looked for."""
    for name in ("jobs", "mails"):
        assert http.put(f"/api/v1/queues/{ACCOUNT}/us-east-1/{name}").status_code == 201
    fail(server, http, "no such shop")
    for count in (100, 51):
        messages = {"messages": [{"body": "x"}] * count}
        http.post(f"/api/v1/queues/{ACCOUNT}/us-east-1/mails/messages", json=messages)
    for _ in range(3):
        assert http.post("/api/v1/clock", json={"advance_us": MINUTE}).status_code == 200
    assert all_failures(http)["queues"] == 1


def test_causes_over_all_queues(server: Any, http: httpx.Client) -> None:
    assert all_failures(http)["causes"] == []
    for name in ("jobs", "mails"):
        assert http.put(f"/api/v1/queues/{ACCOUNT}/us-east-1/{name}").status_code == 201
    first = fail(server, http, "order 12345 is missing")
    for _ in range(3):
        assert http.post("/api/v1/clock", json={"advance_us": MINUTE}).status_code == 200
    fail(server, http, "no such shop", "mails")
    newest = fail(server, http, "order 67890 is missing", "mails")
    found = all_failures(http)
    assert (found["queues"], found["stopped"]) == (2, None)
    cause, other = found["causes"]
    assert (cause["error_type"], cause["count"], cause["queues_count"]) == ("ValueError", 2, 2)
    assert (cause["message"], cause["message"] != first) == (newest, True)
    assert {(each["name"], each["count"]) for each in cause["queues"]} == {("jobs", 1), ("mails", 1)}
    assert [each["name"] for each in other["queues"]] == ["mails"]
    assert [each["error"] for each in all_failures(http, prefix="jo")["causes"]] == ["order 12345 is missing"]
    assert [each["count"] for each in all_failures(http, minutes=2)["causes"]] == [1, 1]
    assert all_failures(http, limit=1)["other"]["failed"] == 1
    assert all_failures(http, region="eu-west-1")["causes"] == []
    assert http.get("/api/v1/failures", params={"account": "1"}).json()["field"] == "account"


def test_a_bound_stops_at_a_minute_and_says_so(
    server: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.put(JOBS).status_code == 201
    for line in ("first", "second", "third"):
        fail(server, http, line)
        for _ in range(3):
            assert http.post("/api/v1/clock", json={"advance_us": MINUTE}).status_code == 200
    whole = all_failures(http)
    assert (len(whole["causes"]), whole["stopped"]) == (3, None)
    for bound in ("ROLLUPS_MAX", "FAILING_MAX"):
        with monkeypatch.context() as patched:
            patched.setattr(f"veilmq.admin.holders.{bound}", 2)
            found = all_failures(http)
            assert {each["error"] for each in found["causes"]} == {"second", "third"}, bound
            second = next(each for each in found["causes"] if each["error"] == "second")
            assert found["stopped"] is not None, bound
            assert second["first"] - 5 * MINUTE < found["stopped"] <= second["first"] + MINUTE, bound


def test_a_key_sees_the_failures_of_its_queues(tmp_path: Path) -> None:
    described = frozenset({Action.DESCRIBE_QUEUE})
    part = AccessKey("part", "secret", ACCOUNT, grants=(Grant(described, ("jobs",)),))
    other = AccessKey("other", "secret", "222222222222", grants=(Grant(frozenset(Action)),))
    with running(tmp_path / "data", Keys(part, other), options=OPTIONS) as server, client(server) as http:
        for name in ("jobs", "mails"):
            assert http.put(f"/api/v1/queues/{ACCOUNT}/us-east-1/{name}").status_code == 201
            fail(server, http, "the card of a customer", name)
        with httpx.Client(base_url=server.url, auth=("part", "secret")) as reading:
            (cause,) = all_failures(reading)["causes"]
            assert (cause["error"], [each["name"] for each in cause["queues"]]) == (None, ["jobs"])
            assert reading.get("/api/v1/failures", params={"account": "*"}).status_code == 403
        with httpx.Client(base_url=server.url, auth=("other", "secret")) as reading:
            assert all_failures(reading)["causes"] == []
        assert [each["count"] for each in all_failures(http, account="*")["causes"]] == [2]


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
