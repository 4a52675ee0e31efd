"""Who holds a queue's messages, who waits for some, and what each client did in the last hour."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.admin.conftest import client
from tests.admin.server import Keys, got, running
from tests.admin.test_failures import fail

from veilmq.model.settings.access import AccessKey, Action, Grant

ORDERS = "/api/v1/queues/000000000000/us-east-1/orders"
A, B = "veilmq/0.1.0 (host-a; pid 17)", "veilmq/0.1.0 (mailer of eu)"
MINUTE = 60_000_000


def receive(http: httpx.Client, who: str, count: int = 1, **members: Any) -> list[dict[str, Any]]:
    answer = http.post(ORDERS + "/receive", json={"count": count, **members}, headers={"User-Agent": who})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["messages"]
    return found


def send(http: httpx.Client, count: int, **members: Any) -> None:
    messages = [{"body": str(number), **members} for number in range(count)]
    assert http.post(ORDERS + "/messages", json={"messages": messages}).status_code == 200


def holders(http: httpx.Client, **members: Any) -> dict[str, Any]:
    return got(http, ORDERS + "/holders", **members)


@pytest.fixture
def orders(http: httpx.Client) -> httpx.Client:
    """Two messages that A has, one that B has, one that waits and one that is delayed."""
    assert http.put(ORDERS).status_code == 201
    send(http, 1, delay_us=MINUTE)
    send(http, 4)
    receive(http, A, 2, lease_us=2 * MINUTE)
    receive(http, B, lease_us=3 * MINUTE)
    return http


def test_each_message_in_flight_has_its_holder(orders: httpx.Client) -> None:
    found = holders(orders)
    assert [each["holder"]["client"] for each in found["holders"]] == [A, A, B]
    first, last = found["holders"][0], found["holders"][-1]
    assert first["holder"] == {
        "protocol": "admin",
        "principal": "admin",
        "client": A,
        "host": "host-a",
        "process": 17,
        "name": None,
    }
    assert (last["holder"]["host"], last["holder"]["name"]) == (None, "mailer of eu")
    assert first["due"] - first["granted"] == 2 * MINUTE
    assert first["granted"] <= found["at"] < first["due"]
    assert first["receive_count"] == 1
    whole = orders.get(f"/api/v1/messages/{first['id']}").json()["places"][0]
    assert whole["holder"] == first["holder"]
    assert orders.get(ORDERS).json()["counts"]["in_flight"] == 3, "nothing was leased"


def test_who_gave_a_message_back_for_a_retry_does_not_hold_it(orders: httpx.Client, server: Any) -> None:
    message = fail(server, orders, "wrong", "orders")
    held = {each["id"]: each for each in holders(orders)["holders"]}
    assert held[message]["holder"]["principal"] == "worker", "who had it"
    assert [each["retries"] for each in held.values()] == [False, False, False, True]
    (place,) = got(orders, f"/api/v1/messages/{message}")["places"]
    assert (place["state"], place["retries"]) == ("in flight", True)
    mine = {each["principal"]: each for each in workers(orders, messages=9)["workers"]}["worker"]
    assert (mine["failed"], mine["holds"], mine["oldest_granted"], mine["messages"]) == (1, 0, None, [])


def test_who_received_a_message_again_holds_it(orders: httpx.Client) -> None:
    assert orders.post("/api/v1/clock", json={"advance_us": 2 * MINUTE + 1}).status_code == 200
    assert len(receive(orders, "curl/8", 4, lease_us=MINUTE)) == 4
    found = holders(orders)["holders"]
    assert sorted((each["holder"]["client"], each["receive_count"]) for each in found) == [
        ("curl/8", 1),
        ("curl/8", 1),
        ("curl/8", 2),
        ("curl/8", 2),
        (B, 1),
    ]


def test_pages_by_key_and_by_client(orders: httpx.Client) -> None:
    whole = [each["id"] for each in holders(orders)["holders"]]
    paged, after = [], ""
    while after is not None:
        page = holders(orders, limit=1, after=after)
        paged += [each["id"] for each in page["holders"]]
        after = page["after"]
    assert paged == whole
    mine = holders(orders, client="mailer", limit=1)
    assert [each["id"] for each in mine["holders"]] == whole[2:]
    assert holders(orders, client="nobody")["holders"] == []


def test_a_page_says_that_it_was_stopped(orders: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veilmq.admin.holders.LOOKED_AT_MAX", 2)
    page = holders(orders, client="mailer")
    assert (page["holders"], page["looked_at"]) == ([], 2)
    assert len(holders(orders, client="mailer", after=page["after"])["holders"]) == 1


def test_receives_that_wait_are_counted_by_client(http: httpx.Client) -> None:
    assert http.put(ORDERS).status_code == 201
    assert holders(http)["waiters"] == {"count": 0, "clients": [], "more": False}
    waiting = [threading.Thread(target=receive, args=(http, who), kwargs={"wait_us": 20_000_000}) for who in (A, A, B)]
    for each in waiting:
        each.start()
    ends = time.monotonic() + 20
    while (found := holders(http)["waiters"])["count"] < 3:
        assert time.monotonic() < ends
    assert [(each["client"], each["count"]) for each in found["clients"]] == [(A, 2), (B, 1)]
    send(http, 3)
    for each in waiting:
        each.join()


def test_who_may_not_peek_learns_nothing(tmp_path: Path) -> None:
    worker = AccessKey("worker", "secret", "111111111111", grants=(Grant(frozenset({Action.RECEIVE})),))
    with running(tmp_path / "data", Keys(worker)) as server, client(server) as http:
        path = "/api/v1/queues/111111111111/us-east-1/jobs"
        assert http.put(path).status_code == 201
        assert httpx.get(f"{server.url}{path}/holders", auth=("worker", "secret")).status_code == 403
        assert http.get("/api/v1/queues/111111111111/us-east-1/none/holders").status_code == 404


def workers(http: httpx.Client, **members: Any) -> dict[str, Any]:
    return got(http, "/api/v1/workers", **members)


def test_what_each_client_does_and_holds(orders: httpx.Client) -> None:
    (mine,) = receive(orders, A, lease_us=2 * MINUTE)
    headers = {"User-Agent": A}
    orders.post(ORDERS + "/delete", json={"handles": [mine["handle"]]}, headers=headers)
    orders.post(ORDERS + "/delete", json={"handles": [mine["handle"]]}, headers=headers)
    found = workers(orders)
    assert (found["more"], found["left_out"], found["holds_complete"]) == (False, 0, True)
    by_client = {each["client"]: each for each in found["workers"]}
    a, b = by_client[A], by_client[B]
    assert (a["host"], a["process"], b["name"]) == ("host-a", 17, "mailer of eu")
    assert {name: a[name] for name in ("received", "deleted", "refused", "holds")} == {
        "received": 3,
        "deleted": 1,
        "refused": 1,
        "holds": 2,
    }
    assert (b["received"], b["holds"], b["waits"]) == (1, 1, 0)
    assert found["since"] <= b["oldest_granted"] <= a["last_seen"] <= found["at"]
    assert a["per_minute"]["received"] > 2 * b["per_minute"]["received"] > 0
    assert [each["client"] for each in workers(orders, client="mailer")["workers"]] == [B]
    assert orders.post("/api/v1/clock", json={"advance_us": 4 * MINUTE}).status_code == 200
    receive(orders, "curl/8", lease_us=180 * MINUTE)
    later = {each["client"]: each for each in workers(orders)["workers"]}
    assert [(later[each]["holds"], later[each]["lease_expired"]) for each in (A, B)] == [(0, 2), (0, 1)]
    assert later[A]["last_seen"] == a["last_seen"], "its lease ended without it"
    assert orders.post("/api/v1/clock", json={"advance_us": 70 * MINUTE}).status_code == 200
    assert [each["client"] for each in workers(orders)["workers"]] == ["curl/8"], "it holds what it received"


def test_only_who_sees_all_events_sees_workers(tmp_path: Path) -> None:
    def key(name: str, account: str, *queues: str) -> AccessKey:
        return AccessKey(name, "secret", account, grants=(Grant(frozenset(Action), queues),))

    whole, part = key("whole", "111111111111", "*"), key("part", "111111111111", "orders-*")
    other = key("other", "222222222222", "*")
    with running(tmp_path / "data", Keys(whole, part, other)) as server:
        for each in (whole, other):
            path = f"{server.url}/api/v1/queues/{each.account}/us-east-1/jobs"
            auth = (each.id, "secret")
            assert httpx.put(path, auth=auth).status_code == 201
            httpx.post(path + "/messages", json={"messages": [{"body": "x"}]}, auth=auth)
            httpx.post(path + "/receive", json={"count": 1}, auth=auth)
        answers = {name: httpx.get(f"{server.url}/api/v1/workers", auth=(name, "secret")) for name in ("whole", "part")}
        assert [each["principal"] for each in answers["whole"].json()["workers"]] == ["whole"]
        assert answers["part"].status_code == 403
        with client(server) as http:
            assert len(workers(http)["workers"]) == 2


def test_what_each_holds_is_named_oldest_first(orders: httpx.Client) -> None:
    found = {each["client"]: each for each in workers(orders, messages=1)["workers"]}
    (mine,) = found[A]["messages"]
    first = holders(orders)["holders"][0]
    queue = {"account": "000000000000", "region": "us-east-1", "name": "orders"}
    assert mine == {"queue": queue, "receive_count": 1} | {name: first[name] for name in ("id", "granted", "due")}
    assert found[A]["holds"] == 2
    assert workers(orders)["workers"][0]["messages"] == []


def test_of_one_queue_those_that_hold_or_wait(orders: httpx.Client) -> None:
    other = ORDERS.replace("orders", "other")
    assert orders.put(other).status_code == 201
    orders.post(other + "/messages", json={"messages": [{"body": "x"}]})
    orders.post(other + "/receive", json={}, headers={"User-Agent": "curl/8"})
    orders.post(other + "/receive", json={}, headers={"User-Agent": A})
    for name in ("other", "000000000000/us-east-1/other"):
        (only,) = workers(orders, queue=name, messages=5)["workers"]
        assert (only["client"], only["holds"]) == ("curl/8", 1)
        assert [each["queue"]["name"] for each in only["messages"]] == ["other"]
    assert {each["client"] for each in workers(orders, queue="orders")["workers"]} == {A, B}
    assert orders.get("/api/v1/workers", params={"queue": "none"}).status_code == 404
    assert orders.get("/api/v1/workers", params={"queue": "a/b"}).json()["field"] == "queue"


def test_workers_are_sorted_by_what_is_asked_for(orders: httpx.Client) -> None:
    (one,) = receive(orders, "curl/8")
    orders.post(ORDERS + "/delete", json={"handles": [one["handle"]]}, headers={"User-Agent": "curl/8"})
    first = {by: workers(orders, sort=by)["workers"][0]["client"] for by in ("seen", "holds", "oldest", "rate")}
    assert first == {"seen": "curl/8", "holds": A, "oldest": A, "rate": "curl/8"}
    assert [each["client"] for each in workers(orders, sort="oldest")["workers"]] == [A, B, "curl/8"]
    wrong = orders.get("/api/v1/workers", params={"sort": "name"}).json()
    assert (wrong["field"], wrong["message"][:25]) == ("sort", "expected one of seen, hol")


FIFO = "/api/v1/queues/000000000000/us-east-1/orders.fifo"


@pytest.fixture
def still(http: httpx.Client) -> list[str]:
    """The ids of a FIFO queue's messages: of two groups A has the first, of one two more wait; a third one is free."""
    assert http.put(FIFO, json={"fifo": True, "content_deduplication": True}).status_code == 201
    messages = [{"body": str(number), "group": group} for number, group in enumerate("aaabc")]
    sent = http.post(FIFO + "/messages", json={"messages": messages}).json()["messages"]
    for _ in range(2):
        taken = http.post(FIFO + "/receive", json={"count": 1, "lease_us": 5 * MINUTE}, headers={"User-Agent": A})
        assert len(taken.json()["messages"]) == 1
    return [each["id"] for each in sent]


def test_what_stands_still_and_who_holds_it(http: httpx.Client, still: list[str]) -> None:
    http.post("/api/v1/clock", json={"advance_us": MINUTE})
    found = got(http, FIFO + "/blocked")
    assert (found["messages"], found["groups"], found["complete"]) == (2, 1, True)
    (group,) = found["held"]
    assert (group["group"], group["messages"], group["retries"]) == ("a", 2, False)
    assert MINUTE <= found["at"] - group["since"] < 2 * MINUTE
    head = group["message"]
    assert (head["id"], head["state"], head["holder"]["host"], head["receive_count"]) == (
        still[0],
        "in flight",
        "host-a",
        1,
    )
    assert head["due"] - head["granted"] == 5 * MINUTE
    shown = got(http, FIFO)
    assert shown["blocked"] == {"messages": 2, "groups": 1, "complete": True}
    assert shown["counts"]["visible"] == 3, "as the protocols count them"
    listed = {each["id"]: each.get("blocked_by") for each in got(http, FIFO + "/messages")["messages"]}
    assert listed == {still[1]: head, still[2]: head, still[4]: None}
    for message, blocked_by in ((still[0], None), (still[2], head), (still[4], None)):
        (place,) = got(http, f"/api/v1/messages/{message}")["places"]
        assert place.get("blocked_by") == blocked_by


def test_what_was_given_back_before_the_message_in_flight_is_not_blocked(http: httpx.Client) -> None:
    assert http.put(FIFO, json={"fifo": True, "content_deduplication": True}).status_code == 201
    http.post(FIFO + "/messages", json={"messages": [{"body": body, "group": "a"} for body in "123"]})
    first, second = http.post(FIFO + "/receive", json={"count": 2, "lease_us": MINUTE}).json()["messages"]
    http.post(FIFO + "/extend", json={"handles": [first["handle"]], "lease_us": 0})
    listed = got(http, FIFO + "/messages")["messages"]
    assert [each.get("blocked_by", {}).get("id") for each in listed] == [None, second["id"]]
    assert got(http, FIFO)["blocked"]["messages"] == 1


def test_a_queue_that_is_no_fifo_queue_blocks_nothing(orders: httpx.Client) -> None:
    assert got(orders, ORDERS)["blocked"] is None
    assert got(orders, ORDERS + "/blocked")["held"] == []
    assert orders.get(ORDERS + "none/blocked").status_code == 404


def test_who_may_not_peek_sees_how_many_are_blocked_and_not_which(tmp_path: Path) -> None:
    allowed = frozenset({Action.CREATE_QUEUE, Action.DESCRIBE_QUEUE})
    key = AccessKey("viewer", "secret", "000000000000", grants=(Grant(allowed),))
    with running(tmp_path / "data", Keys(key)) as server:
        with httpx.Client(base_url=server.url, auth=("viewer", "secret")) as asking:
            assert asking.put(FIFO, json={"fifo": True}).status_code == 201
            assert got(asking, FIFO)["blocked"]["messages"] == 0
            assert asking.get(FIFO + "/blocked").status_code == 403
