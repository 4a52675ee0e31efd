"""GET /api/v1/messages/ID: one message, in whatever state it is, without a lease."""

from hashlib import sha256
from typing import Any

import httpx
import pytest
from tests.admin.conftest import client
from tests.admin.server import Keys, got

from veilmq.model.commands import Extend, Origin, Receive
from veilmq.model.messages import Failure, Report, Reported
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.model.settings.queue import QueueKey
from veilmq.server.config.settings import Settings

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
    return got(http, f"/api/v1/messages/{message}", **query)


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


FIFO = f"{QUEUES}/lane.fifo"


def given(http: httpx.Client, name: str, body: str, **members: Any) -> str:
    message = {"body": body, "group": "a"} | members
    return str(http.post(f"{QUEUES}/{name}/messages", json={"messages": [message]}).json()["messages"][0]["id"])


def sends(http: httpx.Client, deduplication_id: str, **query: Any) -> list[tuple[str, str | None]]:
    """The messages with that deduplication id, and their states."""
    found = got(http, "/api/v1/messages", deduplication_id=deduplication_id, **query)
    assert found["complete"]
    return [(each["message"], each["state"]) for each in found["messages"]]


def test_messages_are_found_by_their_deduplication_id(http: httpx.Client) -> None:
    for name in ("lane.fifo", "other.fifo"):
        assert http.put(f"{QUEUES}/{name}", json={"fifo": True, "content_deduplication": True}).status_code == 201
    first = given(http, "lane.fifo", "1", deduplication_id="order/1 ü")
    assert sends(http, "order/1 ü") == [(first, "visible")]
    (taken,) = http.post(FIFO + "/receive", json={}).json()["messages"]
    assert sends(http, "order/1 ü") == [(first, "in flight")]
    http.post(FIFO + "/delete", json={"handles": [taken["handle"]]})
    assert sends(http, "order/1 ü") == [(first, None)], "from the history"
    assert given(http, "lane.fifo", "again", deduplication_id="order/1 ü") == first, "a duplicate is that message"
    other = given(http, "other.fifo", "1", deduplication_id="order/1 ü")
    assert sends(http, "order/1 ü") == [(other, "visible"), (first, None)]
    assert sends(http, "order/1 ü", queue="lane.fifo") == [(first, None)]
    assert sends(http, "order/1 ü", queue="000000000000/us-east-1/other.fifo") == [(other, "visible")]
    assert sends(http, "order/1") == []
    assert http.get("/api/v1/messages").json()["field"] == "deduplication_id"


def test_an_id_made_of_the_body_is_found_too(http: httpx.Client) -> None:
    assert http.put(FIFO, json={"fifo": True, "content_deduplication": True}).status_code == 201
    message = given(http, "lane.fifo", "hello")
    made = sha256(b"hello").hexdigest()
    assert sends(http, made, queue="lane.fifo") == [(message, "visible")]
    (taken,) = http.post(FIFO + "/receive", json={}).json()["messages"]
    assert taken["deduplication_id"] == made
    http.post(FIFO + "/delete", json={"handles": [taken["handle"]]})
    assert sends(http, made) == [(message, None)]


def test_a_key_finds_by_deduplication_id_what_it_may_peek_at(running: Any, tmp_path: Any) -> None:
    grants = (Grant(frozenset({Action.PEEK}), ("mine.fifo",)),)
    with running(tmp_path / "data", Keys(AccessKey("PEEKS", "s" * 20, "000000000000", grants=grants))) as server:
        with client(server) as token:
            for name in ("mine.fifo", "yours.fifo"):
                assert token.put(f"{QUEUES}/{name}", json={"fifo": True}).status_code == 201
                given(token, name, "a", deduplication_id="order-1")
            asking = {"auth": ("PEEKS", "s" * 20), "params": {"deduplication_id": "order-1"}}
            found = token.get("/api/v1/messages", **asking).json()["messages"]
            assert [each["name"] for each in found] == ["mine.fifo"]
            asking["params"]["queue"] = "yours.fifo"
            assert token.get("/api/v1/messages", **asking).json()["messages"] == []


def page(http: httpx.Client, **query: Any) -> tuple[list[int], dict[str, Any]]:
    """Sequences of a page of `orders`, by their place among those sent, and the page."""
    found = got(http, ORDERS + "/messages", **query)
    return [each["sequence"] for each in found["messages"]], found


def test_a_listing_shows_what_matches(orders: httpx.Client) -> None:
    for number in range(30):
        kind = {"type": "odd"} if number % 2 else {"group": "even"}
        send(orders, f"body {number}", priority=8, **kind)
    (first, *_), _ = page(orders)
    for query, places in (
        ({"type": "odd", "limit": 3}, [1, 3, 5]),
        ({"group": "even", "text": "body 1", "limit": 9}, [10, 12, 14, 16, 18]),
        ({"text": "body 29"}, [29]),
        ({"text": "body 29", "type": "even"}, []),
        ({"age_us_min": 3_600_000_000}, []),
        ({"receives_min": 1}, []),
    ):
        assert [each - first for each in page(orders, **query)[0]] == places, query
    orders.post(ORDERS + "/receive", json={"count": 2})
    assert page(orders, state="hidden", type="odd")[0] == [first + 1]
    assert len(page(orders, state="hidden", receives_min=1)[0]) == 2
    wrong = orders.get(ORDERS + "/messages", params={"text": ""})
    assert (wrong.status_code, wrong.json()["field"]) == (400, "text")


def test_a_listing_that_a_bound_stops_says_where_it_goes_on(
    orders: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from veilmq.admin.history import messages

    for number in range(40):
        send(orders, f"body {number}", type="rare" if number in {5, 35} else "usual")
    for name, most in (("LOOKED_AT_MAX", 10), ("SEARCHED_BYTES_MAX", 100)):
        with monkeypatch.context() as bound:
            bound.setattr(messages, name, most)
            found, looked_at, after = [], 0, ""
            pages = 0
            while after is not None:
                one, answer = page(orders, type="rare", text="body", after=after)
                found += one
                after = answer["after"]
                looked_at += answer["looked_at"]
                pages += 1
        assert (len(found), looked_at) == (2, 40), name
        assert pages > 2, name


def test_where_bodies_are_off_nobody_reads_them(running: Any, tmp_path: Any) -> None:
    """Neither the bodies, nor by a search in them, nor a worker's error, which may quote one."""
    with running(tmp_path / "data", settings=Settings(admin_bodies=False)) as server, client(server) as http:
        for name, settings in (("failed", {}), ("orders", {"redrive": {"target": "failed", "receive_count_max": 1}})):
            assert http.put(f"{QUEUES}/{name}", json=settings).status_code == 201
        sent = send(http, "secret")
        queue = QueueKey("000000000000", "us-east-1", "orders")
        tester = Origin("veil", "worker")
        receive = Receive(queue=queue, origin=tester, lease_us=60_000_000)
        (received,) = server.on_loop(server.shell.call(receive))
        failure = Failure("raised", "ValueError", "bad secret")
        retry = Extend(
            queue=queue, origin=tester, handle=received.messages[0].handle, lease_us=0, arrived=server.clock.now(),
            report=Report(Reported.RETRY, failure),
        )  # fmt: skip
        server.on_loop(server.shell.call(retry))
        server.on_loop(server.shell.call(receive))  # it is a dead letter now, with its last error
        for refused in (
            http.get(f"/api/v1/messages/{sent}", params={"bodies": "true"}),
            http.get(ORDERS + "/peek"),
            http.post(ORDERS + "/receive", json={}),
            http.get(ORDERS + "/messages", params={"text": "secret"}),
            http.get("/api/v1/quarantine/export"),
            http.post("/api/v1/jobs", json={"act": "delete", "queue": "orders", "filter": {"text": "secret"}}),
        ):
            assert (refused.status_code, refused.json()["error"]) == (403, "bodies_off"), refused.request.url
        found = place(http, sent)
        assert (found["name"], found["last_error"]) == ("failed", {"type": "ValueError"})
        shown = [http.get(QUEUES + "/failed/messages").text, http.get(f"/api/v1/trace/{sent}").text, *events(http)]
        assert "secret" not in "".join(shown)
        assert "ValueError" in "".join(shown)
