"""/api/v1/queues against a real engine and store, over HTTP."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.admin.server import TOKEN, Keys, running

from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.server.config.settings import Settings
from veilmq.testing.for_each import for_each

QUEUES = "/api/v1/queues/000000000000/us-east-1"
ORDERS = f"{QUEUES}/orders"
SECOND = 1_000_000


@pytest.fixture
def orders(http: httpx.Client) -> httpx.Client:
    assert http.put(ORDERS).status_code == 201
    return http


def send(http: httpx.Client, *bodies: str, **members: Any) -> list[dict[str, Any]]:
    answer = http.post(ORDERS + "/messages", json={"messages": [{"body": body} | members for body in bodies]})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["messages"]
    return found


def receive(http: httpx.Client, **members: Any) -> list[dict[str, Any]]:
    answer = http.post(ORDERS + "/receive", json=members)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["messages"]
    return found


def test_a_queue_is_created_changed_and_deleted(http: httpx.Client) -> None:
    assert http.put(QUEUES + "/failed").status_code == 201
    settings = {"visibility_timeout_us": 5 * SECOND, "redrive": {"target": "failed", "receive_count_max": 3}}
    created = http.put(ORDERS, json=settings)
    assert created.status_code == 201
    assert created.json()["settings"]["redrive"]["target"]["name"] == "failed"
    assert http.put(ORDERS, json=settings).status_code == 200
    conflict = http.put(ORDERS, json={"delay_us": 1})
    assert (conflict.status_code, conflict.json()["data"]["setting"]) == (409, "delay_us")
    changed = http.patch(ORDERS, json={"redrive": None, "tags": {"team": "billing"}}).json()["settings"]
    assert (changed["redrive"], changed["tags"]) == (None, {"team": "billing"})
    assert changed["visibility_timeout_us"] == 5 * SECOND
    send(http, "a", "b")
    assert http.delete(ORDERS).json() == {"count": 2}
    assert http.get(ORDERS).status_code == 404


def test_what_was_read_can_be_sent_back(http: httpx.Client) -> None:
    """All settings, but for those that creation alone takes, and the protocols' own."""
    http.put(QUEUES + "/dead.fifo", json={"fifo": True})
    given = {
        "visibility_timeout_us": 5 * SECOND,
        "delay_us": SECOND,
        "retention_us": 3_600 * SECOND,
        "wait_us": 2 * SECOND,
        "message_bytes_max": 2_048,
        "redrive": {"target": "dead.fifo", "receive_count_max": 3},
        "redrive_allow": {"permission": "byQueue", "sources": ["a.fifo", "b.fifo"]},
        "fifo": True,
        "content_deduplication": True,
        "deduplication_scope": "messageGroup",
        "throughput_per_group": True,
        "xml_body": "base64",
        "alias": "orders",
        "adaptive": "apply",
        "first_lease_min_us": SECOND,
        "receives_per_second_max": 7,
        "tags": {"team": "billing"},
    }
    assert http.put(ORDERS + ".fifo", json=given).status_code == 201
    read = http.get(ORDERS + ".fifo").json()["settings"]
    del read["labels"]
    assert read.keys() == given.keys()
    assert http.put(ORDERS + ".fifo", json=read).status_code == 200
    changed = {name: value for name, value in read.items() if name != "fifo"}
    assert http.patch(ORDERS + ".fifo", json=changed).json()["settings"] == read | {"labels": {}}
    copied = http.put(QUEUES + "/copy.fifo", json=read | {"alias": None})
    assert copied.json()["settings"] == read | {"alias": None, "labels": {}}
    http.put(QUEUES + "/plain")
    plain = http.get(QUEUES + "/plain").json()["settings"]
    del plain["labels"], plain["fifo"]
    assert http.patch(QUEUES + "/plain", json=plain).json()["settings"] == plain | {"labels": {}, "fifo": False}


def test_a_message_lives_its_life(orders: httpx.Client) -> None:
    (sent,) = send(
        orders, "body \u00e9\r\n", attributes=[{"name": "n", "type": "Binary", "value": "AAE="}], type="order"
    )
    (message,) = receive(orders, count=10, lease_us=60 * SECOND)
    assert (message["id"], message["body"], message["type"]) == (sent["id"], "body \u00e9\r\n", "order")
    assert message["attributes"] == [{"name": "n", "type": "Binary", "value": "AAE="}]
    assert receive(orders) == []
    extended = orders.post(ORDERS + "/extend", json={"handles": [message["handle"]], "lease_us": 120 * SECOND})
    assert extended.json()["results"][0]["due"] > message["due"]
    orders.post(ORDERS + "/extend", json={"handles": [message["handle"]], "lease_us": 0})
    (again,) = receive(orders)
    assert again["receive_count"] == 2
    stale = orders.post(ORDERS + "/delete", json={"handles": [message["handle"]]})
    assert (stale.status_code, stale.json()["error"]) == (409, "LeaseTaken")
    both = orders.post(ORDERS + "/delete", json={"handles": [message["handle"], again["handle"]]})
    assert both.status_code == 200
    assert [each.get("error") for each in both.json()["results"]] == ["LeaseTaken", None]
    assert orders.get(ORDERS).json()["counts"]["total"] == 0


def test_one_entry_that_is_refused_takes_no_other_with_it(orders: httpx.Client) -> None:
    orders.patch(ORDERS, json={"message_bytes_max": 1_024})
    shown = send(orders, "a", "x" * 1_025, "b")
    assert [each.get("error") for each in shown] == [None, "MessageTooLarge", None]
    assert orders.post(ORDERS + "/messages", json={"messages": [{"body": "x" * 1_025}]}).status_code == 413


def test_a_peek_grants_nothing(orders: httpx.Client) -> None:
    send(orders, "a", "b")
    for _ in range(2):
        shown = orders.get(ORDERS + "/peek?count=5").json()["messages"]
        assert [(each["body"], each["receive_count"], "handle" in each) for each in shown] == [
            ("a", 0, False),
            ("b", 0, False),
        ]


def test_a_message_is_kept_under_a_name(orders: httpx.Client) -> None:
    attribute = {"name": "a", "value": "9007199254740993"}
    message = {"body": "paid \u00e9", "delay_us": 5, "type": "t", "attributes": [attribute]}
    kept = orders.put(ORDERS + "/templates", json={"name": "paid", "message": message})
    assert (kept.status_code, kept.json()) == (201, {"new": True})
    assert orders.put(ORDERS + "/templates", json={"name": "empty", "message": {"body": ""}}).json()["new"]
    assert orders.put(ORDERS + "/templates", json={"name": "paid", "message": message | {"type": "u"}}).json() == {
        "new": False
    }
    shown = orders.get(ORDERS + "/templates").json()["templates"]
    assert [(each["name"], each["by"]) for each in shown] == [("empty", "admin"), ("paid", "admin")]
    whole = {"ttl_us": None, "priority": None, "group": None, "deduplication_id": None, "type": "u"}
    assert shown[1]["message"] == message | whole | {"attributes": [attribute | {"type": "String"}]}
    assert orders.post(ORDERS + "/messages", json={"messages": [shown[1]["message"]]}).status_code == 200
    lines = orders.get("/api/v1/events?from=first&kind=operator_command").text.splitlines()
    told = [json.loads(line) for line in lines]
    assert [each["detail"]["act"] for each in told] == ["create", *["keep_template"] * 3]
    assert "9007199254740993" not in str(told), "the history has no body"
    for wrong, field in (
        ({"name": "", "message": message}, "name"),
        ({"name": "x" * 65, "message": message}, "name"),
        ({"name": "a\u0000", "message": message}, "name"),
        ({"name": "a", "message": message | {"body": "\u0000"}}, "message.body"),
        ({"name": "a", "message": message | {"deduplication_id": "once"}}, "message.deduplication_id"),
        ({"name": "a", "message": message | {"body": "x" * 70_000}}, "message"),
        ({"name": "a"}, "message"),
    ):
        refused = orders.put(ORDERS + "/templates", json=wrong)
        assert (refused.status_code, refused.json()["field"]) == (400, field)
    assert orders.post(ORDERS + "/templates/drop", json={"name": "paid"}).status_code == 200
    assert orders.post(ORDERS + "/templates/drop", json={"name": "paid"}).json()["field"] == "name"
    assert len(orders.get(ORDERS + "/templates").json()["templates"]) == 1


def test_templates_are_for_whoever_may_send_to_the_queue(tmp_path: Path) -> None:
    def key(name: str, action: Action, account: str = "000000000000") -> AccessKey:
        return AccessKey(name, "secret", account, grants=(Grant(frozenset({action}), ("orders",)),))

    keys = [key("sender", Action.SEND), key("looker", Action.PEEK), key("other", Action.SEND, "111111111111")]
    settings = Settings(admin_bodies=False)
    for bodies in (True, False):
        given = None if bodies else settings
        with running(tmp_path / str(bodies), Keys(*keys), given) as server, httpx.Client(base_url=server.url) as http:
            token = {"authorization": f"Bearer {TOKEN}"}
            http.put(ORDERS, headers=token)
            put = {"name": "n", "message": {"body": "needle"}}
            assert http.put(ORDERS + "/templates", json=put, auth=("sender", "secret")).status_code == 201
            read = http.get(ORDERS + "/templates", auth=("sender", "secret"))
            assert (read.status_code, "needle" in read.text) == ((200, True) if bodies else (403, False))
            for name in ("looker", "other"):
                for answer in (
                    http.get(ORDERS + "/templates", auth=(name, "secret")),
                    http.put(ORDERS + "/templates", json=put, auth=(name, "secret")),
                    http.post(ORDERS + "/templates/drop", json={"name": "n"}, auth=(name, "secret")),
                ):
                    assert (answer.status_code, "needle" in answer.text) == (403, False), name


def test_a_purge_leaves_nothing(orders: httpx.Client) -> None:
    send(orders, "a", "b", "c")
    receive(orders)
    send(orders, "d", delay_us=SECOND * 60)
    assert orders.post(ORDERS + "/purge").json() == {"count": 4}
    assert orders.get(ORDERS).json()["counts"] == {"visible": 0, "delayed": 0, "in_flight": 0, "total": 0}


@pytest.mark.parametrize("state", ["visible", "hidden"])
def test_pages_show_every_message_once(orders: httpx.Client, state: str) -> None:
    # Visible ones of two priorities, some of them come back; hidden ones in flight and delayed.
    for priority in (8, 3):
        send(orders, *(f"{priority}-{number}" for number in range(7)), priority=priority)
    for message in receive(orders, count=3):
        orders.post(ORDERS + "/extend", json={"handles": [message["handle"]], "lease_us": 0})
    leased = {message["id"] for message in receive(orders, count=4)}
    delayed = {message["id"] for message in send(orders, "x", "y", "z", delay_us=60 * SECOND)}
    seen: list[dict[str, Any]] = []
    after: str | None = ""
    pages = 0
    while after is not None:
        page = orders.get(ORDERS + "/messages", params={"state": state, "limit": 3, "after": after}).json()
        seen += page["messages"]
        after = page["after"]
        pages += 1
        assert pages < 20
    ids = {message["id"] for message in seen}
    assert len(ids) == len(seen)
    if state == "hidden":
        assert ids == leased | delayed
        assert {each["state"] for each in seen if each["id"] in leased} == {"in flight"}
        assert {each["state"] for each in seen if each["id"] in delayed} == {"delayed"}
    else:
        assert len(ids) == 10
        assert not ids & (leased | delayed)
        assert {each["state"] for each in seen} == {"visible"}
    assert all("body" not in each for each in seen)


def test_a_receive_waits_and_is_woken(orders: httpx.Client, server: Any) -> None:
    import threading

    found: list[dict[str, Any]] = []
    waiter = threading.Thread(target=lambda: found.extend(receive(orders, wait_us=25 * SECOND)))
    waiter.start()
    _until(lambda: len(server.shell.engine.waiting) == 1)
    with httpx.Client(base_url=server.url, headers=orders.headers) as other:
        send(other, "a")
    waiter.join(20)
    assert [message["body"] for message in found] == ["a"]


def test_a_client_that_hangs_up_while_it_waits_takes_no_message(orders: httpx.Client, server: Any) -> None:
    import json
    import socket

    body = json.dumps({"wait_us": 30 * SECOND})
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST {ORDERS}/receive HTTP/1.1\r\nHost: localhost\r\nAuthorization: {orders.headers['authorization']}"
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        _until(lambda: len(server.shell.engine.waiting) == 1)
    _until(lambda: len(server.shell.engine.waiting) == 0)
    send(orders, "a")
    assert [message["receive_count"] for message in receive(orders)] == [1]


@for_each(
    ("method", "path", "body", "field"),
    [
        ("PUT", ORDERS, '{"visibility_timeout_us": -1}', "visibility_timeout_us"),
        ("PUT", ORDERS, '{"visibility_timeout_us": "30"}', "visibility_timeout_us"),
        ("PUT", ORDERS, '{"visibilty": 1}', "visibilty"),
        ("PATCH", ORDERS, '{"fifo": true}', "fifo"),
        ("PATCH", ORDERS, '{"redrive": {"target": "a b", "receive_count_max": 1}}', "redrive.target"),
        ("PATCH", ORDERS, '{"redrive": {"target": "a"}}', "redrive.receive_count_max"),
        (
            "PATCH",
            ORDERS,
            '{"redrive": {"target": {"account": "000000000000", "region": "eu-west-1", "name": "a"},'
            ' "receive_count_max": 1}}',
            "redrive.target",
        ),
        (
            "PATCH",
            ORDERS,
            '{"redrive_allow": {"permission": "byQueue", "sources": ["b",'
            ' {"account": "111111111111", "region": "us-east-1", "name": "a"}]}}',
            "redrive_allow.sources[1]",
        ),
        ("PUT", ORDERS, "[]", "body"),
        ("PUT", ORDERS, "{", "body"),
        ("PUT", ORDERS, "\udcff", "body"),
        ("PUT", QUEUES + "/not%20a%20name", "", "name"),
        ("PUT", "/api/v1/queues/1/us-east-1/orders", "", "account"),
        ("PUT", "/api/v1/queues/000000000000/US/orders", "", "region"),
        ("POST", ORDERS + "/messages", "{}", "messages"),
        ("POST", ORDERS + "/messages", '{"messages": []}', "messages"),
        ("POST", ORDERS + "/messages", '{"messages": [{"body": 1}]}', "messages[0].body"),
        ("POST", ORDERS + "/messages", '{"messages": [{"body": "a"}, {"body": "b\\u0000"}]}', "messages[1].body"),
        ("POST", ORDERS + "/messages", '{"messages": [{"body": "\\ud800"}]}', "body"),
        ("POST", ORDERS + "/messages", '{"messages": [{"body": "a", "group": "\\u0000"}]}', "messages[0].group"),
        ("POST", ORDERS + "/messages", '{"messages": [{"body": "a", "type": "\\u0001"}]}', "messages[0].type"),
        (
            "POST",
            ORDERS + "/messages",
            '{"messages": [{"body": "a", "attributes": [{"name": "n", "value": "v", "type": "String.\\u001b"}]}]}',
            "messages[0].attributes[0].type",
        ),
        ("PATCH", ORDERS, '{"tags": {"\\u001b": "v"}}', "tags"),
        ("PATCH", ORDERS, '{"tags": {"k": "\\ufffe"}}', "tags"),
        ("PUT", ORDERS + "%0A", "{}", "name"),
        ("PUT", ORDERS.replace("us-east-1", "us-east-1%0A"), "{}", "region"),
        ("PUT", ORDERS.replace("000000000000", "000000000000%0A"), "{}", "account"),
        (
            "POST",
            ORDERS + "/messages",
            '{"messages": [{"body": "a", "deduplication_id": "\\ufffe"}]}',
            "messages[0].deduplication_id",
        ),
        (
            "POST",
            ORDERS + "/messages",
            '{"messages": [{"body": "a", "attributes": [{"name": "\\u0001", "value": "x"}]}]}',
            "messages[0].attributes[0].name",
        ),
        ("POST", ORDERS + "/messages", '{"messages": [{"body": "a", "priority": 17}]}', "messages[0].priority"),
        (
            "POST",
            ORDERS + "/messages",
            '{"messages": [{"body": "a", "attributes": [{"name": "n", "type": "Binary", "value": "?"}]}]}',
            "messages[0].attributes[0].value",
        ),
        (
            "POST",
            ORDERS + "/messages",
            '{"messages": [{"body": "a", "attributes": [{"name": "n", "value": "1"}, {"name": "n", "value": "2"}]}]}',
            "messages[0].attributes",
        ),
        ("POST", ORDERS + "/receive", '{"count": 101}', "count"),
        ("POST", ORDERS + "/receive", '{"wait_us": 30000001}', "wait_us"),
        ("POST", ORDERS + "/extend", '{"handles": ["x"]}', "lease_us"),
        ("POST", ORDERS + "/delete", '{"handles": []}', "handles"),
        ("GET", ORDERS + "/peek?count=x", "", "count"),
        ("GET", ORDERS + "/messages?state=all", "", "state"),
        ("GET", ORDERS + "/messages?after=-1", "", "after"),
        ("GET", ORDERS + "/messages?after=" + "9" * 19, "", "after"),
        ("GET", ORDERS + "/messages?state=hidden&after=1-" + "9" * 19, "", "after"),
        ("GET", "/api/v1/queues?limit=0", "", "limit"),
        ("GET", "/api/v1/events?from=-1", "", "from"),
        ("GET", "/api/v1/events?follow=61", "", "follow"),
        ("GET", "/api/v1/trace/xyz", "", "message_id"),
    ],
)
def test_a_bad_request_names_its_field(shared: httpx.Client, method: str, path: str, body: str, field: str) -> None:
    answer = shared.request(method, path, content=body.encode("utf-8", "surrogateescape"))
    assert answer.status_code == 400, answer.text
    shown = answer.json()
    assert (shown["error"], shown["field"]) == ("ParameterInvalid", field)
    assert shown["message"]


def test_a_forged_handle_is_told(orders: httpx.Client) -> None:
    answer = orders.post(ORDERS + "/delete", json={"handles": ["x" * 66]})
    assert (answer.status_code, answer.json()["error"]) == (400, "ReceiptInvalid")


def test_a_body_beyond_the_limit_is_refused_while_it_comes(orders: httpx.Client) -> None:
    pieces = (b" " * 1_000_000 for _ in range(9))
    answer = orders.put(ORDERS, content=pieces)
    assert (answer.status_code, answer.json()["error"]) == (413, "body_too_large")


def test_a_member_given_twice_is_refused(orders: httpx.Client) -> None:
    assert orders.get(ORDERS + "/peek?count=1&count=2").status_code == 400


def _until(condition: Any) -> None:
    """Wait for what another thread does, in steps too short to matter, for at most 20 s."""
    import threading
    import time

    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)
