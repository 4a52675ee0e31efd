"""/api/v1/topics and /api/v1/moves against a real engine and store, over HTTP."""

import json
from hashlib import md5
from threading import Thread
from typing import Any
from uuid import UUID

import httpx
import pytest
from tests.admin.server import Keys

from veilmq.admin.api.inputs import WorstInput
from veilmq.admin.rollups import Wanted, worst_at_once
from veilmq.model.commands import (
    CreateQueue,
    CreateTopic,
    Origin,
    Publish,
    Receive,
    Send,
    StartMove,
    Subscribe,
    Sweep,
)
from veilmq.model.errors import VeilError
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.model.settings.topic import SubscriptionSettings, TopicKey, hidden_queue
from veilmq.testing.for_each import for_each

TESTER = Origin("mns", "tester")
ACCOUNT, OTHER = "000000000000", "111111111111"
ORDERS, DEAD = QueueKey(ACCOUNT, "us-east-1", "orders"), QueueKey(ACCOUNT, "us-east-1", "dead")
URL = "http://203.0.113.7/hook"
TOPICS, MOVES = "/api/v1/topics", "/api/v1/moves"


class Room:
    """What the push room says, as others see it."""

    def state(self, url: str) -> dict[str, object]:
        return {"endpoint": url, "available": False, "failures": 7, "pause_us": 60_000_000, "last_error": "refused"}

    def unavailable(self) -> dict[str, str]:
        return {URL: "refused"}

    calls_put_off = 3

    def local_exhaustion(self) -> str | None:
        return "Too many open files"


def do(server: Any, *commands: Any) -> list[Any]:
    outcomes = server.on_loop(server.shell.call(*commands))
    assert not any(isinstance(outcome, VeilError) for outcome in outcomes), outcomes
    return outcomes  # type: ignore[no-any-return]


def topic(name: str, account: str = ACCOUNT, region: str = "us-east-1") -> TopicKey:
    return TopicKey(account, region, name)


@pytest.fixture
def news(server: Any) -> TopicKey:
    """A topic with a queue and a push, and one message."""
    key = topic("news")
    do(server, CreateTopic(topic=key, origin=TESTER), CreateQueue(queue=ORDERS, origin=TESTER))
    for name, settings in (
        ("by-queue", SubscriptionSettings(endpoint="orders", queue=ORDERS, filter_tag="t")),
        ("by-push", SubscriptionSettings(endpoint=URL, url=URL)),
    ):
        do(server, Subscribe(topic=key, origin=TESTER, name=name, settings=settings))
    digest = md5(b"x", usedforsecurity=False).digest()
    do(server, Publish(topic=key, origin=TESTER, body="x", md5=digest, size_bytes=1))
    return key


def test_a_topic_is_shown_with_its_subscriptions(server: Any, http: httpx.Client, news: TopicKey) -> None:
    found = http.get(TOPICS).json()
    (shown,) = found["topics"]
    assert (found["more"], found["after"], shown["name"]) == (False, None, "news")
    push, queue = shown["subscriptions"]
    assert (queue["name"], queue["settings"]["filter_tag"], queue["push"]) == ("by-queue", "t", None)
    assert queue["settings"]["queue"]["name"] == "orders"
    assert (push["name"], push["settings"]["endpoint"]) == ("by-push", URL)
    assert push["push"] == {"waiting": {"visible": 1, "delayed": 0, "in_flight": 0, "total": 1}}
    assert http.get(f"{TOPICS}/{ACCOUNT}/us-east-1/news").json() == shown


def test_the_owner_sees_what_is_wrong_with_an_endpoint(server: Any, http: httpx.Client, news: TopicKey) -> None:
    assert "veilmq_push_endpoints_slowed 0.0" in http.get("/metrics").text
    server.push_room = Room()
    state = http.get(f"{TOPICS}/{ACCOUNT}/us-east-1/news").json()["subscriptions"][0]["push"]
    assert (state["available"], state["last_error"], state["waiting"]["total"]) == (False, "refused", 1)
    assert "veilmq_push_endpoints_slowed 1.0" in http.get("/metrics").text


def test_what_the_server_lacks_for_pushes_is_shown(server: Any, http: httpx.Client) -> None:
    assert "veilmq_push_calls_put_off_total 0.0" in http.get("/metrics").text
    assert http.get("/health/ready").json()["warnings"] == {}
    server.push_room = Room()
    assert "veilmq_push_calls_put_off_total 3.0" in http.get("/metrics").text
    answer = http.get("/health/ready")
    assert answer.status_code == 200
    assert "cannot call: Too many open files" in answer.json()["warnings"]["pushes"]


def test_the_servers_own_waiting_for_pushes_is_nobodys_receive(server: Any, http: httpx.Client, news: TopicKey) -> None:
    queue = hidden_queue(news, "by-push")
    do(server, Receive(queue=queue, origin=TESTER))
    waiting = Thread(target=do, args=(server, Receive(queue=queue, origin=TESTER, wait_us=60_000_000)))
    waiting.start()
    while not len(server.shell.engine.waiting):
        http.get("/health/live")
    found = http.get("/metrics").text
    do(
        server,
        Publish(topic=news, origin=TESTER, body="x", md5=md5(b"x", usedforsecurity=False).digest(), size_bytes=1),
    )
    waiting.join()
    assert "veilmq_waiters 0.0" in found
    assert "veilmq_queues 1.0" in found


def test_the_worst_queues_of_a_directory_are_no_hidden_ones(server: Any, news: TopicKey) -> None:
    do(server, Send(queue=ORDERS, origin=TESTER, body="x", md5=md5(b"x", usedforsecurity=False).digest(), size_bytes=1))
    wanted = Wanted(WorstInput(), lambda _: True)
    found = worst_at_once(server.store.reader, ACCOUNT, wanted, server.shell.now())
    assert [each["name"] for each in found["queues"]] == ["orders"]


def test_pages_by_account_region_and_prefix(server: Any, http: httpx.Client) -> None:
    for account, region, name in (
        (ACCOUNT, "us-east-1", "a"),
        (ACCOUNT, "us-east-1", "ab"),
        (ACCOUNT, "eu-west-1", "a"),
        (OTHER, "us-east-1", "a"),
    ):
        do(server, CreateTopic(topic=topic(name, account, region), origin=TESTER))

    def names(**members: str) -> list[str]:
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            page = http.get(TOPICS, params={**members, "after": after, "limit": "1"}).json()
            found += [f"{each['account'][0]}/{each['region'][:2]}/{each['name']}" for each in page["topics"]]
            after = page["after"]
        return found

    assert names() == ["0/us/a", "0/us/ab"]
    assert names(prefix="ab") == ["0/us/ab"]
    assert names(region="eu-west-1") == ["0/eu/a"]
    assert names(account=OTHER) == ["1/us/a"]
    assert names(account="*") == ["0/eu/a", "0/us/a", "0/us/ab", "1/us/a"]


def test_a_topic_is_deleted_with_what_waits(server: Any, http: httpx.Client, news: TopicKey) -> None:
    where = f"{TOPICS}/{ACCOUNT}/us-east-1/news"
    assert [queue.name for queue in server.store.reader.queues] == ["orders", "news/by-push"]
    assert http.delete(where).json() == {}
    assert [queue.name for queue in server.store.reader.queues] == ["orders"]
    for method in ("GET", "DELETE"):
        answer = http.request(method, where)
        assert (answer.status_code, answer.json()["error"]) == (404, "TopicMissing")


def test_move_tasks_of_all_queues(server: Any, http: httpx.Client) -> None:
    redrive = {"redrive": RedrivePolicy(DEAD, 1)}
    do(server, CreateQueue(queue=DEAD, origin=TESTER))
    do(server, CreateQueue(queue=ORDERS, origin=TESTER, change=redrive))
    http.post(f"/api/v1/queues/{ACCOUNT}/us-east-1/orders/messages", json={"messages": [{"body": "x"}]})
    for _ in range(2):
        do(server, Receive(queue=ORDERS, origin=TESTER, count_max=1, lease_us=0, wait_us=0))
    assert http.get(MOVES).json() == {"moves": [], "more": False, "after": None}
    (started,) = do(server, StartMove(queue=DEAD, origin=TESTER))
    (shown,) = http.get(MOVES).json()["moves"]
    assert (shown["id"], shown["source"]["name"], shown["destination"]) == (
        str(UUID(bytes=started.info.id)),
        "dead",
        None,
    )
    assert (shown["to_move"], shown["failure"]) == (1, None)
    assert shown["status"] in {"running", "completed"}
    assert http.get(MOVES, params={"prefix": "orders"}).json()["moves"] == []
    assert http.get(MOVES, params={"account": "*"}).json()["moves"][0]["id"] == shown["id"]


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pages_show_every_move_task_once(server: Any, http: httpx.Client, limit: int) -> None:
    wanted = []
    for number in range(5):
        source, queue = (QueueKey(ACCOUNT, "us-east-1", f"{name}-{number}") for name in ("dead", "orders"))
        do(server, CreateQueue(queue=source, origin=TESTER))
        do(server, CreateQueue(queue=queue, origin=TESTER, change={"redrive": RedrivePolicy(source, 1)}))
        (started,) = do(server, StartMove(queue=source, origin=TESTER))
        wanted.insert(0, str(UUID(bytes=started.info.id)))
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        page = http.get(MOVES, params={"limit": limit, "after": after}).json()
        assert page["more"] is (page["after"] is not None)
        seen += [task["id"] for task in page["moves"]]
        after = page["after"]
        assert len(seen) <= len(wanted)
    assert seen == wanted
    assert http.get(MOVES, params={"after": "x"}).json()["field"] == "after"


def test_a_move_task_begins_and_ends(server: Any, http: httpx.Client) -> None:
    where = f"/api/v1/queues/{ACCOUNT}/us-east-1"
    for name, settings in (
        ("dead", {}),
        ("orders", {"redrive": {"target": "dead", "receive_count_max": 1}}),
        ("x", {}),
    ):
        http.put(f"{where}/{name}", json=settings)
    http.post(f"{where}/dead/messages", json={"messages": [{"body": "x"}] * 9})
    for body, field in (
        ({"rate_max": 0}, "rate_max"),
        ({"rate_max": 501}, "rate_max"),
        ({"destination": "a b"}, "destination"),
        ({"destination": "dead"}, "destination"),
        ({"to": "x"}, "to"),
    ):
        refused = http.post(f"{where}/dead/move", json=body)
        assert (refused.status_code, refused.json()["field"]) == (400, field)
    assert http.post(f"{where}/orders/move").json()["field"] == "source"
    assert http.post(f"{where}/dead/move", json={"destination": "none"}).status_code == 404
    assert http.get(MOVES).json()["moves"] == []
    begun = http.post(f"{where}/dead/move", json={"destination": "x", "rate_max": 1}).json()
    assert (begun["status"], begun["to_move"], begun["rate_max"]) == ("running", 9, 1)
    assert (begun["source"]["name"], begun["destination"]["name"]) == ("dead", "x")
    assert http.post(f"{where}/dead/move").json()["field"] == "source", "one at a time"
    for task, path in (("0" * 32, "dead"), (begun["id"], "x"), ("xyz", "dead")):
        refused = http.post(f"{where}/{path}/move/cancel", json={"task": task})
        assert (refused.status_code, refused.json()["field"]) == (400, "task")
    cancelled = http.post(f"{where}/dead/move/cancel", json={"task": begun["id"]}).json()
    assert (cancelled["id"], cancelled["status"]) == (begun["id"], "cancelling")
    server.on_loop(server.shell.call(Sweep()))
    (shown,) = http.get(MOVES).json()["moves"]
    assert (shown["id"], shown["status"]) == (begun["id"], "cancelled")
    again = http.post(f"{where}/dead/move/cancel", json={"task": begun["id"].replace("-", "")})
    assert "cancelled" in again.json()["message"]
    left = [http.get(f"{where}/{name}").json()["counts"]["total"] for name in ("dead", "x")]
    assert left == [9 - shown["moved"], shown["moved"]]


def test_a_trace_goes_over_a_move(server: Any, http: httpx.Client) -> None:
    """A move task gives the message another id; either leads to all that happened."""
    do(server, CreateQueue(queue=DEAD, origin=TESTER))
    do(server, CreateQueue(queue=ORDERS, origin=TESTER, change={"redrive": RedrivePolicy(DEAD, 1)}))
    orders = f"/api/v1/queues/{ACCOUNT}/us-east-1/orders"
    before = http.post(f"{orders}/messages", json={"messages": [{"body": "x"}]}).json()["messages"][0]["id"]
    for _ in range(2):
        do(server, Receive(queue=ORDERS, origin=TESTER, count_max=1, lease_us=0, wait_us=0))
    do(server, StartMove(queue=DEAD, origin=TESTER))
    (moved,) = http.post(f"{orders}/receive", json={"wait_us": 20_000_000}).json()["messages"]
    http.post(f"{orders}/delete", json={"handles": [moved["handle"]]})
    http.post(f"{orders}/delete", json={"handles": [moved["handle"]]})
    assert moved["id"] != before
    traces = [http.get(f"/api/v1/trace/{each}").json() for each in (before, moved["id"])]
    life = ["sent", "received", "lease_expired", "dead_lettered", "moved", "received", "deleted", "delete_refused"]
    assert [[event["kind"] for event in each["events"]] for each in traces] == [life, life]
    assert all(each["complete"] for each in traces)


def test_the_trace_of_what_was_published_begins_with_the_publish(
    server: Any, http: httpx.Client, news: TopicKey
) -> None:
    published = [json.loads(line) for line in http.get("/api/v1/events").text.splitlines()]
    (message,) = [event["message"] for event in published if event["kind"] == "published"]
    shown = http.get(f"/api/v1/trace/{message}").json()
    assert ([event["kind"] for event in shown["events"]], shown["complete"]) == (["published"], True)


def test_a_key_sees_what_it_was_granted(running: Any, tmp_path: Any) -> None:
    describe = (Grant(frozenset({Action.DESCRIBE_TOPICS})),)
    keys = Keys(AccessKey("reader", "s", ACCOUNT, grants=describe), AccessKey("nobody", "s", ACCOUNT))
    with running(tmp_path / "data", keys) as server, httpx.Client(base_url=server.url) as http:
        do(server, CreateTopic(topic=topic("news"), origin=TESTER))
        where = f"{TOPICS}/{ACCOUNT}/us-east-1/news"
        reader, nobody = (httpx.BasicAuth(name, "s") for name in ("reader", "nobody"))
        assert http.get(where, auth=reader).status_code == 200
        assert http.get(TOPICS, auth=reader).json()["topics"][0]["name"] == "news"
        assert http.delete(where, auth=reader).status_code == 403
        assert http.get(f"{TOPICS}/{OTHER}/us-east-1/news", auth=reader).status_code == 403
        assert http.get(TOPICS, auth=nobody).status_code == 403
        assert http.get(TOPICS).status_code == 401


def test_a_key_reaches_the_topics_of_its_grants_alone(running: Any, tmp_path: Any) -> None:
    own = Grant(frozenset({Action.DESCRIBE_TOPICS, Action.MANAGE_TOPICS}), ("news*",))
    keys = Keys(AccessKey("owner", "s", ACCOUNT, grants=(own,)))
    with running(tmp_path / "data", keys) as server, httpx.Client(base_url=server.url, auth=("owner", "s")) as http:
        for name in ("news", "pay"):
            do(server, CreateTopic(topic=topic(name), origin=TESTER))
        assert [each["name"] for each in http.get(TOPICS).json()["topics"]] == ["news"]
        for method in ("GET", "DELETE"):
            assert http.request(method, f"{TOPICS}/{ACCOUNT}/us-east-1/pay").status_code == 403
        assert topic("pay") in server.store.reader.topics
        assert http.delete(f"{TOPICS}/{ACCOUNT}/us-east-1/news").status_code == 200


@for_each("query", ["account=1", "limit=0", "limit=x", "odd=1"])
def test_bad_members_are_named(http: httpx.Client, query: str) -> None:
    for path in (TOPICS, MOVES):
        answer = http.get(f"{path}?{query}")
        assert (answer.status_code, answer.json()["field"]) == (400, query.partition("=")[0])
