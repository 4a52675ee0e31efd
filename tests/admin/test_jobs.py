"""/api/v1/jobs: bulk acts on the server, over HTTP."""

import json
import time
from typing import Any

import httpx
import pytest
from tests.admin.conftest import client
from tests.admin.server import Keys

from veilmq.model.settings.access import AccessKey, Action, Grant

QUEUES = "/api/v1/queues/000000000000/us-east-1"
ORDERS = {"account": "000000000000", "region": "us-east-1", "name": "orders"}
JOBS = "/api/v1/jobs"


@pytest.fixture
def orders(http: httpx.Client) -> httpx.Client:
    for name in ("orders", "other"):
        assert http.put(f"{QUEUES}/{name}").status_code == 201
    messages = [{"body": f"order {number}", "type": "ab"[number % 2]} for number in range(100)]
    assert http.post(QUEUES + "/orders/messages", json={"messages": messages}).status_code == 200
    return http


def start(http: httpx.Client, act: str, key: str | None = None, **members: Any) -> dict[str, Any]:
    headers = {} if key is None else {"Idempotency-Key": key}
    answer = http.post(JOBS, json={"act": act, "queue": "orders"} | members, headers=headers)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ended(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """Let the server's time pass until the job has ended."""
    for _ in range(100):
        assert http.post("/api/v1/clock", json={"advance_us": 1_000_000}).status_code == 200
        found: dict[str, Any] = http.get(f"{JOBS}/{job['id']}").json()
        if found["status"] not in ("running", "cancelling"):
            return found
    raise AssertionError("the job finds no end")


def test_a_job_is_started_shown_and_listed_and_stands_in_the_history(orders: httpx.Client) -> None:
    job = start(orders, "delete", queue=ORDERS, filter={"type": "a", "text": "order"}, rate=1_000)
    assert job | {"id": "", "started": 0, "status": ""} == {
        "id": "", "act": "delete", "queue": ORDERS, "destination": None, "filter": {"type": "a", "text": "order"},
        "rate": 1_000, "dry_run": False, "status": "", "failure": None, "principal": "admin", "started": 0,
        "ended": None, "total": 100, "seen": 0, "matched": 0, "done": 0, "failed": 0,
    }  # fmt: skip
    done = ended(orders, job)
    assert (done["status"], done["seen"], done["matched"], done["done"], done["failed"]) == (
        "completed",
        100,
        50,
        50,
        0,
    )
    assert done["ended"] >= done["started"]
    assert orders.get(QUEUES + "/orders").json()["counts"]["total"] == 50
    listed = orders.get(JOBS).json()
    assert listed == {"jobs": [done], "more": False, "after": None}
    lines = orders.get("/api/v1/events?from=first&queue=orders").text.splitlines()
    told = [json.loads(line) for line in lines]
    (command,) = (each for each in told if each["kind"] == "operator_command" and each["detail"]["act"] == "start_job")
    assert command["detail"]["job"] == job["id"]
    assert command["detail"]["asked"]["filter"] == {"type": "a", "text": "order"}
    deleted = [each for each in told if each["kind"] == "deleted"]
    assert {(each["principal"], each["detail"]["job"]) for each in deleted} == {("admin", job["id"])}
    traced = orders.get(f"/api/v1/trace/{deleted[0]['message']}").json()["events"]
    assert traced[-1]["detail"] == {"job": job["id"]}


def test_a_job_that_is_started_twice_with_one_id_is_one(orders: httpx.Client) -> None:
    jobs = [start(orders, "move", "once", destination="other", filter={"type": "a"}) for _ in range(2)]
    assert jobs[0] == jobs[1]
    assert ended(orders, jobs[0])["done"] == 50
    assert start(orders, "move", "once", destination="other", filter={"type": "a"}) == jobs[0]
    refused = orders.post(JOBS, json={"act": "purge", "queue": "orders"}, headers={"Idempotency-Key": "once"})
    assert refused.status_code == 422
    assert orders.get(QUEUES + "/other").json()["counts"]["total"] == 50
    purged = start(orders, "purge")
    assert (purged["status"], purged["done"]) == ("completed", 50)


def test_a_dry_run_says_how_many(orders: httpx.Client) -> None:
    before = orders.get("/api/v1/snapshot").text.partition("\n")[2]
    job = ended(orders, start(orders, "delete", dry_run=True, filter={"type": "b"}))
    assert (job["dry_run"], job["matched"], job["done"]) == (True, 50, 0)
    assert orders.get("/api/v1/snapshot").text.partition("\n")[2] == before


def test_a_job_is_cancelled_once(orders: httpx.Client) -> None:
    job = start(orders, "delete", rate=1)
    cancel = f"{JOBS}/{job['id']}/cancel"
    assert [orders.post(cancel, headers={"Idempotency-Key": "c"}).status_code for _ in range(2)] == [200, 200]
    assert ended(orders, job)["status"] == "cancelled"
    again = orders.post(cancel)
    assert (again.status_code, again.json()["field"]) == (400, "job")
    for answer in (orders.get(f"{JOBS}/{'0' * 32}"), orders.post(f"{JOBS}/{'0' * 32}/cancel")):
        assert (answer.status_code, answer.json()["error"]) == (404, "job_missing")


def test_move_tasks_of_sqs_are_in_the_same_list(orders: httpx.Client) -> None:
    redrive = {"redrive": {"target": "orders", "receive_count_max": 1}}
    assert orders.patch(QUEUES + "/other", json=redrive).status_code == 200
    job = ended(orders, start(orders, "release"))
    task = orders.post(QUEUES + "/orders/move", json={"destination": "other", "rate_max": 1}).json()
    page = orders.get(JOBS, params={"limit": 1}).json()
    assert ([each["id"] for each in page["jobs"]], page["more"]) == ([task["id"]], True)
    assert (page["jobs"][0]["act"], page["jobs"][0]["total"]) == ("redrive", 100)
    following = orders.get(JOBS, params={"limit": 1, "after": page["after"]}).json()
    assert following == {"jobs": [job], "more": False, "after": None}
    assert orders.post(f"{JOBS}/{task['id']}/cancel").json()["status"] == "cancelling"


def test_a_job_is_looked_up_and_not_searched_in_the_list(orders: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    redrive = {"redrive": {"target": "orders", "receive_count_max": 1}}
    assert orders.patch(QUEUES + "/other", json=redrive).status_code == 200
    task = orders.post(QUEUES + "/orders/move", json={"destination": "other", "rate_max": 1}).json()["id"]
    job = start(orders, "delete", queue="other", dry_run=True)["id"]
    monkeypatch.setattr("veilmq.admin.api.operator.all_jobs", lambda reader: [])
    for each, act in ((task, "redrive"), (job, "delete")):
        assert orders.get(f"{JOBS}/{each}").json()["act"] == act
    assert orders.post(f"{JOBS}/{task}/cancel").json()["status"] == "cancelling"
    assert orders.delete(QUEUES + "/orders").status_code == 200
    assert orders.get(f"{JOBS}/{task}").status_code == 404, "its queue is gone"


def test_what_cannot_be_is_refused(orders: httpx.Client) -> None:
    for members, status, field in (
        ({"act": "explode"}, 400, "act"),
        ({"act": "move"}, 400, "destination"),
        ({"act": "delete", "rate": 0}, 400, "rate"),
        ({"act": "delete", "filter": {"colour": "red"}}, 400, "filter.colour"),
        ({"act": "delete", "filter": {"age_us_min": 10**30}}, 400, "filter.age_us_min"),
        ({"act": "delete", "filter": {"receives_min": 10**30}}, 400, "filter.receives_min"),
        ({"act": "purge", "filter": {"type": "a"}}, 400, "filter"),
        ({"act": "redrive"}, 400, "queue"),
        ({"act": "delete", "queue": "none"}, 404, None),
        ({"act": "move", "destination": ORDERS | {"account": "111111111111"}}, 400, "destination"),
    ):
        answer = orders.post(JOBS, json={"queue": "orders"} | members)
        assert (answer.status_code, answer.json()["field"]) == (status, field), members
    assert orders.get(JOBS).json()["jobs"] == []


def test_a_key_needs_the_grant_of_the_act_where_it_acts(running: Any, tmp_path: Any) -> None:
    account = "111111111111"

    def key(name: str, *actions: Action, queues: tuple[str, ...] = ("orders",)) -> AccessKey:
        return AccessKey(name, "s" * 20, account, grants=(Grant(frozenset(actions), queues),))

    keys = Keys(
        key("PURGES", Action.PURGE),
        key("PEEKS", Action.PURGE, Action.PEEK),
        key("MOVES", Action.MOVE, Action.DESCRIBE_QUEUE),
        key("SENDS", Action.MOVE, Action.SEND, queues=("orders", "other")),
        key("STRANGER", Action.DESCRIBE_QUEUE, Action.PURGE, queues=("other",)),
    )
    with running(tmp_path / "data", keys) as server, client(server) as token:
        for name in ("orders", "other"):
            assert token.put(f"/api/v1/queues/{account}/us-east-1/{name}").status_code == 201

        def asks(name: str, act: str, **members: Any) -> int:
            body = {"act": act, "queue": "orders", "dry_run": True} | members
            answer = token.post(JOBS, json=body, auth=(name, "s" * 20))
            if answer.status_code == 201:  # until it has ended no other may begin
                deadline = time.perf_counter() + 10
                while token.get(f"{JOBS}/{answer.json()['id']}").json()["status"] == "running":
                    assert time.perf_counter() < deadline
            return answer.status_code

        assert [asks("PURGES", act) for act in ("delete", "purge", "release", "redrive")] == [201, 201, 201, 403]
        text = {"filter": {"text": "secret"}}
        assert (asks("PURGES", "delete", **text), asks("PEEKS", "delete", **text)) == (403, 201)
        assert [asks(name, "move", destination="other") for name in ("MOVES", "SENDS", "PURGES")] == [403, 201, 403]
        assert asks("STRANGER", "delete") == 403
        job = token.get(JOBS).json()["jobs"][0]["id"]
        seen = {
            name: len(token.get(JOBS, auth=(name, "s" * 20)).json().get("jobs", ())) for name in ("MOVES", "STRANGER")
        }
        assert (seen["MOVES"] > 0, seen["STRANGER"]) == (True, 0)
        assert token.get(f"{JOBS}/{job}", auth=("STRANGER", "s" * 20)).status_code == 404
        assert token.post(f"{JOBS}/{job}/cancel", auth=("STRANGER", "s" * 20)).status_code == 404
