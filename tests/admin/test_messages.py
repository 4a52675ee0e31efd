"""GET /api/v1/messages/ID: one message, in whatever state it is, without a lease."""

from typing import Any

import httpx
import pytest
from tests.admin.conftest import client
from tests.admin.server import Keys

from veilmq.model.settings.access import AccessKey, Action, Grant

QUEUES = "/api/v1/queues/000000000000/us-east-1"
ORDERS = f"{QUEUES}/orders"


@pytest.fixture
def orders(http: httpx.Client) -> httpx.Client:
    assert http.put(QUEUES + "/failed").status_code == 201
    settings = {"redrive": {"target": "failed", "receive_count_max": 1}, "visibility_timeout_us": 30_000_000}
    assert http.put(ORDERS, json=settings).status_code == 201
    return http


def send(http: httpx.Client, body: str, **members: Any) -> str:
    answer = http.post(ORDERS + "/messages", json={"messages": [{"body": body} | members]})
    return str(answer.json()["messages"][0]["id"])


def find(http: httpx.Client, message: str, **query: Any) -> dict[str, Any]:
    answer = http.get(f"/api/v1/messages/{message}", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def place(http: httpx.Client, message: str, **query: Any) -> dict[str, Any]:
    (only,) = find(http, message, **query)["places"]
    assert isinstance(only, dict)
    return only


def events(http: httpx.Client) -> list[str]:
    return http.get("/api/v1/events", params={"from": "first"}).text.splitlines()


def test_a_message_is_found_in_every_state(orders: httpx.Client) -> None:
    attributes = [{"name": "a", "type": "String", "value": "b"}]
    sent = send(orders, "hello", type="order", attributes=attributes)
    found = place(orders, sent)
    assert (found["account"], found["name"], found["state"]) == ("000000000000", "orders", "visible")
    assert (found["id"], found["type"], found["attributes"], found["receive_count"]) == (sent, "order", attributes, 0)
    assert "body" not in found
    delayed = send(orders, "later", delay_us=60_000_000)
    assert place(orders, delayed)["state"] == "delayed"
    (message,) = orders.post(ORDERS + "/receive", json={}).json()["messages"]
    found = place(orders, sent)
    assert (found["state"], found["due"], found["receive_count"]) == ("in flight", message["due"], 1)
    assert found["holder"]["protocol"] == "admin"
    orders.post(ORDERS + "/extend", json={"handles": [message["handle"]], "lease_us": 0})
    found = place(orders, sent)
    assert (found["state"], found["receive_count"]) == ("visible", 1)
    assert orders.post(ORDERS + "/receive", json={}).json()["messages"] == []
    found = place(orders, sent)
    assert (found["name"], found["dead_letter_receives"], found["state"]) == ("failed", 1, "visible")
    (dead,) = orders.post(QUEUES + "/failed/receive", json={}).json()["messages"]
    orders.post(QUEUES + "/failed/delete", json={"handles": [dead["handle"]]})
    gone = find(orders, sent)
    assert (gone["places"], gone["last"]["kind"], gone["complete"]) == ([], "deleted", True)
    orders.post(ORDERS + "/purge")
    assert find(orders, delayed)["last"]["kind"] == "purged"
    assert find(orders, "0" * 32) | {"scanned": 0} == {
        "message": "00000000-0000-0000-0000-000000000000",
        "complete": False,
        "scanned": 0,
        "places": [],
        "last": None,
    }


def test_looking_changes_nothing_and_a_body_that_is_read_leaves_an_event(orders: httpx.Client) -> None:
    sent = send(orders, "secret of a customer \u20ac")
    before = events(orders)
    for form in (sent, sent.replace("-", ""), sent.replace("-", "").upper()):
        assert place(orders, form)["md5"]
    assert events(orders) == before
    assert place(orders, sent, bodies="true")["body"] == "secret of a customer \u20ac"
    assert place(orders, sent)["receive_count"] == 0
    (read,) = events(orders)[len(before) :]
    assert '"kind":"peeked"' in read
    assert sent in read
    assert '"principal":"admin"' in read
    assert "secret" not in read


def test_a_key_finds_what_it_may_peek_at(running: Any, tmp_path: Any) -> None:
    keys = Keys(
        AccessKey("PEEKS", "s" * 20, "111111111111", grants=(Grant(frozenset({Action.PEEK}), ("orders",)),)),
        AccessKey("SENDS", "s" * 20, "111111111111", grants=(Grant(frozenset({Action.SEND})),)),
    )
    with running(tmp_path / "data", keys) as server, client(server) as token:
        for name in ("orders", "mail"):
            assert token.put(f"/api/v1/queues/111111111111/us-east-1/{name}").status_code == 201
        answers = [
            token.post(f"/api/v1/queues/111111111111/us-east-1/{name}/messages", json={"messages": [{"body": name}]})
            for name in ("orders", "mail")
        ]
        orders, mail = (answer.json()["messages"][0]["id"] for answer in answers)
        peeks = {"auth": ("PEEKS", "s" * 20)}
        assert len(token.get(f"/api/v1/messages/{orders}?bodies=true", **peeks).json()["places"]) == 1
        hidden = token.get(f"/api/v1/messages/{mail}?bodies=true", **peeks).json()
        assert (hidden["places"], hidden["last"]) == ([], None)
        assert token.get(f"/api/v1/messages/{orders}", auth=("SENDS", "s" * 20)).status_code == 403
