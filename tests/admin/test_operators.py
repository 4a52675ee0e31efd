"""Commands that act once: the header Idempotency-Key of /api/v1, and what the history says."""

import json
from typing import Any

import httpx
from tests.admin.conftest import client
from tests.admin.server import Keys

from veilmq.model.settings.access import AccessKey, Action, Grant

QUEUES = "/api/v1/queues/000000000000/us-east-1"
ORDERS = f"{QUEUES}/orders"


def key(text: str) -> dict[str, str]:
    return {"Idempotency-Key": text}


def events(http: httpx.Client) -> list[dict[str, Any]]:
    return [json.loads(line) for line in http.get("/api/v1/events", params={"from": "first"}).text.splitlines()]


def test_a_call_that_is_repeated_is_answered_as_before_and_acts_once(http: httpx.Client) -> None:
    for _ in range(2):
        created = http.put(ORDERS, json={"delay_us": 0}, headers=key('"make it"'))
        assert (created.status_code, created.json()["error"]) == (400, "idempotency_key_invalid")
    first = http.put(ORDERS, json={"tags": {"a": "b"}}, headers=key('"make-it"'))
    again = http.put(ORDERS, json={"tags": {"a": "b"}}, headers=key("make-it"))
    assert (first.status_code, again.status_code, again.json()) == (201, 201, first.json())
    assert ("idempotent-replayed" in first.headers, again.headers["idempotent-replayed"]) == (False, "true")
    sent = [http.post(ORDERS + "/messages", json={"messages": [{"body": "a"}]}, headers=key("s")) for _ in range(3)]
    assert sent[0].json() == sent[1].json() == sent[2].json()
    assert http.get(ORDERS).json()["counts"]["total"] == 1
    purged = [http.post(ORDERS + "/purge", headers=key("p")).json() for _ in range(2)]
    assert purged == [{"count": 1}, {"count": 1}]


def test_a_change_to_an_older_version_is_refused_and_a_repeated_one_is_not(http: httpx.Client) -> None:
    seen = http.put(ORDERS).json()["version"]
    first = http.patch(ORDERS, json={"delay_us": 1, "if_version": seen}, headers=key("a"))
    assert (first.status_code, first.json()["settings"]["delay_us"]) == (200, 1)
    late = [http.patch(ORDERS, json={"delay_us": 2, "if_version": seen}, headers=key("b")) for _ in range(2)]
    assert [(each.status_code, each.json()["error"]) for each in late] == [(409, "queue_changed")] * 2
    assert late[0].json()["data"] == {"version": first.json()["version"]}
    assert "someone else changed queue orders meanwhile" in late[0].json()["message"]
    for version in (seen, first.json()["version"]):
        again = http.patch(ORDERS, json={"delay_us": 1, "if_version": version}, headers=key("a"))
        assert (again.status_code, again.json()) == (200, first.json()), "whoever repeats it may have looked again"
    new = http.patch(ORDERS, json={"delay_us": 2, "if_version": first.json()["version"]}, headers=key("b"))
    assert (new.status_code, new.json()["settings"]["delay_us"]) == (200, 2), "what was refused is not kept"
    assert [each["detail"]["act"] for each in events(http) if each["kind"] == "operator_command"] == [
        "create", "change", "change",
    ]  # fmt: skip
    assert http.put(QUEUES + "/new", json={"if_version": seen}).status_code == 400


def test_an_id_of_another_call_is_refused(http: httpx.Client) -> None:
    http.put(ORDERS)
    http.put(QUEUES + "/other")
    assert http.post(ORDERS + "/purge", headers=key("1")).status_code == 200
    for refused in (
        http.post(QUEUES + "/other/purge", headers=key("1")),
        http.delete(ORDERS, headers=key("1")),
        http.patch(ORDERS, json={"delay_us": 5}, headers=key("1")),
    ):
        assert (refused.status_code, refused.json()["error"]) == (422, "idempotency_key_reused")
    assert http.get(ORDERS).json()["settings"]["delay_us"] == 0


def test_what_is_no_id_is_refused_and_so_is_one_where_it_means_nothing(http: httpx.Client) -> None:
    http.put(ORDERS)
    for text in ("", "a b", '"', '"a', 'a"b', "\u00e9".encode().decode("latin-1"), "x" * 129, '""'):
        answer = http.post(ORDERS + "/purge", headers=[(b"Idempotency-Key", text.encode("latin-1"))])  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["error"]) == (400, "idempotency_key_invalid"), text
    twice = http.post(ORDERS + "/purge", headers=[("Idempotency-Key", "a"), ("Idempotency-Key", "b")])  # type: ignore[arg-type]
    assert twice.status_code == 400
    for path in (ORDERS + "/receive", "/api/v1/clock"):
        refused = http.post(path, json={"advance_us": 1} if "clock" in path else {}, headers=key("1"))
        assert (refused.status_code, refused.json()["error"]) == (400, "idempotency_key_refused")
    assert http.post(ORDERS + "/purge", headers=key("x" * 128)).status_code == 200
    assert http.post(ORDERS + "/purge", headers=key(r'"a\"b\\"')).status_code == 200


def test_the_history_has_the_command_without_what_nobody_else_must_read(http: httpx.Client) -> None:
    http.put(ORDERS, json={"tags": {"owner": "secret tag"}, "delay_us": 0}, headers=key("make"))
    http.post(ORDERS + "/messages", json={"messages": [{"body": "secret body"}]}, headers=key("send"))
    http.post(ORDERS + "/messages", json={"messages": [{"body": "another"}]})
    (message,) = http.post(ORDERS + "/receive", json={}).json()["messages"]
    http.post(ORDERS + "/delete", json={"handles": [message["handle"]]}, headers=key("delete"))
    http.delete(ORDERS)
    told = [each for each in events(http) if each["kind"] == "operator_command"]
    assert "secret" not in json.dumps(told)
    assert message["handle"] not in json.dumps(told)
    target = {"target": "000000000000/us-east-1/orders"}
    assert [(each["detail"]["act"], each["detail"]["asked"]) for each in told] == [
        ("create", target | {"tags": None, "delay_us": 0}),
        ("send", target | {"messages": 1}),
        ("delete", target | {"handles": 1}),
        ("remove", target),
    ]
    assert [each["detail"]["id"] for each in told[:3]] == ["make", "send", "delete"]
    assert len(told[3]["detail"]["id"]) == 32
    assert {(each["protocol"], each["principal"], each["queue"]) for each in told} == {("admin", "admin", "orders")}
    traced = http.get(f"/api/v1/trace/{message['id']}").json()["events"]
    assert [each["kind"] for each in traced] == ["sent", "operator_command", "received", "deleted", "operator_command"]


def test_topics_and_the_clock_take_an_id_too(http: httpx.Client) -> None:
    for _ in range(2):
        assert http.post("/api/v1/clock/accept", headers=key("clock")).json()["accepted_us"] == 0
    missing = http.delete("/api/v1/topics/000000000000/us-east-1/none", headers=key("topic"))
    assert (missing.status_code, missing.json()["error"]) == (404, "TopicMissing")
    told = [each["detail"]["act"] for each in events(http) if each["kind"] == "operator_command"]
    assert told == ["accept_clock"]


def test_two_keys_may_use_one_id_and_see_the_commands_of_their_queues(running: Any, tmp_path: Any) -> None:
    may = Grant(frozenset({Action.PURGE, Action.EVENTS}), ("orders",))
    keys = Keys(*(AccessKey(name, "s" * 20, "111111111111", grants=(may,)) for name in ("ONE", "TWO")))
    with running(tmp_path / "data", keys) as server, client(server) as token:
        orders = "/api/v1/queues/111111111111/us-east-1/orders"
        for name in ("orders", "mail"):
            assert token.put(f"/api/v1/queues/111111111111/us-east-1/{name}").status_code == 201
        for name in ("ONE", "TWO"):
            answer = token.post(orders + "/purge", headers=key("1"), auth=(name, "s" * 20))
            assert (answer.status_code, "idempotent-replayed" in answer.headers) == (200, False)
        lines = token.get("/api/v1/events?from=first", auth=("ONE", "s" * 20)).text.splitlines()
        told = [json.loads(line) for line in lines]
        assert {each["queue"] for each in told} == {"orders"}
        assert [each["principal"] for each in told if each["kind"] == "operator_command"] == ["admin", "ONE", "TWO"]
