"""The pages of topics and of the server."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.admin import server as admin
from tests.console.conftest import Api, Clustered, Visitor
from tests.console.test_pages import plain

from veilmq.cluster.registry import Standby
from veilmq.model.commands import CreateTopic, Origin, Publish, Receive, Subscribe
from veilmq.model.errors import VeilError
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import SubscriptionSettings, TopicKey, hidden_queue
from veilmq.server.config.settings import Settings

TESTER = Origin("mns", "tester")
NEWS = TopicKey("000000000000", "us-east-1", "news")
URL = "http://203.0.113.7/<script>"


class Room:
    """What the push room says of an endpoint that is down, or soon will be."""

    available = False

    def state(self, url: str) -> dict[str, object]:
        return {
            "endpoint": url,
            "available": self.available,
            "failures": 7,
            "pause_us": 60_000_000,
            "last_error": "<b>refused",
        }

    def local_exhaustion(self) -> str | None:
        return None


def subscribe(server: Any, name: str, settings: SubscriptionSettings) -> None:
    (outcome,) = server.on_loop(server.shell.call(Subscribe(topic=NEWS, origin=TESTER, name=name, settings=settings)))
    assert not isinstance(outcome, VeilError), outcome


def test_a_topic_shows_where_each_copy_goes(server: Any, api: Api, visitor: Visitor) -> None:
    assert "There is no topic yet" in visitor.get("/console/topics").text
    api.create("orders")
    server.on_loop(server.shell.call(CreateTopic(topic=NEWS, origin=TESTER)))
    orders = QueueKey("000000000000", "us-east-1", "orders")
    subscribe(server, "to-queue", SubscriptionSettings(endpoint="acs:mns:...", queue=orders, filter_tag="vip"))
    subscribe(server, "to-web", SubscriptionSettings(endpoint=URL, url=URL))
    server.push_room = Room()
    page = visitor.get("/console/topics/000000000000/us-east-1/news").text
    assert "<script>" not in page.partition("</head>")[2]
    text = plain(page)
    assert "to-queue only with the tag vip goes to orders , a queue" in text
    assert "to-web goes to http://203.0.113.7/<script>" in text
    assert "× does not answer , 7 failures in a row last error <b>refused slowed 1 min between two calls" in text
    server.push_room.available = True
    text = plain(visitor.get("/console/topics/000000000000/us-east-1/news").text)
    assert "endpoint × fails , 7 failures in a row last error" in text, "no endpoint without a failure"
    server.push_room.available = False
    row = plain(visitor.get("/console/topics").text)
    assert "news 000000000000 us-east-1 2 1 0 1 " in row
    assert visitor.get("/console/topics/000000000000/us-east-1/none").status_code == 404

    # A copy that waits to be pushed leads to its topic: the queue that holds it has no page.
    digest = hashlib.md5(b"x").digest()
    publish = Publish(topic=NEWS, origin=TESTER, body="x", md5=digest, size_bytes=1)
    pushing = Receive(queue=hidden_queue(NEWS, "to-web"), origin=Origin("push", "push"), lease_us=3_600_000_000)
    server.on_loop(server.shell.call(publish))
    (received,) = server.on_loop(server.shell.call(pushing))
    message = f"/console/messages/{UUID(bytes=received.messages[0].id)}"
    with_body = visitor.post(message, data=visitor.fields(message)).text
    for shown in (visitor.get("/console/workers").text, with_body):
        assert '<a href="/console/topics/000000000000/us-east-1/news">news/to-web</a>' in shown
    assert "the server's pushes push push" in plain(visitor.get("/console/workers").text)
    assert "Download" in with_body
    assert "news/to-web" not in with_body.partition("Download")[2].partition("</section>")[0], "nobody can send there"


def test_the_server_shows_its_health_and_settings(server: Any, visitor: Visitor) -> None:
    page = visitor.get("/console/server").text
    assert "<code>iss</code> of the bearer tokens" in page
    text = plain(page)
    assert "✓ Ready no warning" in text
    assert "visibility" not in text
    assert "history_s_max 604800 Events older than this are trimmed." in text
    server.push_fault = "until a restart"
    assert "pushes nothing is pushed until a restart" in plain(visitor.get("/console/server").text)


def test_a_bug_of_a_page_is_counted_once(api: Api, visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    for number, place in enumerate(("veilmq.console.pages.server._setting", "veilmq.admin.app.shown_settings"), 1):
        with monkeypatch.context() as breaking:
            breaking.setattr(place, broken)
            answer = visitor.get("/console/server")
        assert (answer.status_code, "its log says why" in answer.text) == (500, True)
        assert f'veilmq_failures_total{{listener="admin"}} {number}.0' in api.client.get("/metrics").text


def test_a_step_of_the_clock_is_accepted_once(visitor: Visitor) -> None:
    fields = visitor.fields("/console/", "/console/sign-out")
    answers = [visitor.post("/console/server/clock", data=fields) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [303, 303]
    assert "A step of 0 s was accepted." in visitor.get(answers[1].headers["location"]).text


def test_who_may_not_see_the_server_sees_no_setting(tmp_path: Path) -> None:
    key = AccessKey("AKQ", "q-secret", "111111111111", grants=(Grant(frozenset({Action.LIST_QUEUES})),))
    with admin.running(tmp_path / "data", admin.Keys(key)) as server, Visitor(server) as visitor:
        visitor.sign_in(key="AKQ", secret="q-secret")
        page = visitor.get("/console/server").text
        assert "history_s_max" not in page
        assert "/console/topics" not in page
        assert visitor.get("/console/topics").status_code == 403
        fields = visitor.fields("/console/", "/console/sign-out")
        assert visitor.post("/console/server/clock", data=fields).status_code == 403


def test_accounts_show_keys_and_grants_and_no_secret(tmp_path: Path) -> None:
    hostile = "<script>*"
    sends = AccessKey("AKS", "s-secret", "111111111111", grants=(Grant(frozenset({Action.SEND}), (hostile, "b")),))
    sees = AccessKey("AKL", "l-secret", "222222222222", grants=(Grant(frozenset({Action.LIST_QUEUES})),))
    limits = Settings(queues_per_account_max=1)
    with admin.running(tmp_path / "data", admin.Keys(sends, sees), limits) as server, Visitor(server) as visitor:
        api = Api(server)
        assert api.client.put("/api/v1/queues/111111111111/us-east-1/orders").status_code == 201
        api.client.close()
        visitor.sign_in(secret=admin.TOKEN)
        page = visitor.get("/console/accounts").text
        assert "secret" not in page.partition("<main")[2]
        assert "A new key: veilmq keys new --into the credentials file" in plain(page)
        shown = r"111111111111 us-east-1 .*queues and pushes of 1 1 near the limit .*AKS access key send <script>\*, b"
        assert re.search(shown, plain(page)), plain(page)
        assert page.count("<script") == 1
        rows = visitor.get("/console/accounts/export?form=csv").text
        assert "secret" not in rows
        assert "111111111111" in rows
        visitor.cookies.clear()
        visitor.sign_in(key="AKL", secret="l-secret")
        own = plain(visitor.get("/console/accounts").text)
        assert "222222222222" in own
        assert "111111111111" not in own


def test_a_server_alone_has_no_cluster(visitor: Visitor) -> None:
    assert "/console/cluster" not in visitor.get("/console/").text
    assert visitor.get("/console/cluster").status_code == 404


def test_the_cluster_is_shown_and_handed_over_once(server: Any, api: Api, visitor: Visitor) -> None:
    server.cluster = cluster = Clustered()
    assert '<a href="/console/cluster"' in visitor.get("/console/").text
    page = visitor.get("/console/cluster").text
    assert "<two>" not in page
    text = plain(page)
    assert "✓ Owned by one, and a standby confirms" in text
    assert re.search(r"log 3(\.0)? MiB ?, 100 records snapshot record 90 ?, 2 h ago", text)
    assert "<two> follower 2 " in text
    assert "three drained 0 " in text
    assert "three is drained: veilmq cluster undrain three lets it own" in text
    assert "no other server could own" not in text
    assert page.count("Hand over to it") == 1  # neither to the owner nor to who is drained
    form = "/console/cluster/handover?to=%3Ctwo%3E"
    assert "one finishes the calls that it has, and <two> owns all queues" in plain(visitor.get(form).text)
    fields = visitor.fields(form, "/console/cluster/handover")
    answers = [visitor.post("/console/cluster/handover", data=fields) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [303, 303]
    assert cluster.asked == ["<two>"]
    assert "asked to hand over to <two>" in plain(visitor.get(answers[0].headers["location"]).text)
    events = [event for event in map(json.loads, api.client.get("/api/v1/events").text.splitlines())
              if event["kind"] == "operator_command"]  # fmt: skip
    assert [(event["detail"]["act"], event["detail"]["asked"]["to"]) for event in events] == [("hand_over", "<two>")]
    assert events[0]["detail"]["id"] == fields["once"]
    refused = visitor.post("/console/cluster/handover", data=fields | {"once": "0" * 32, "to": "three"})
    assert (refused.status_code, cluster.asked) == (400, ["<two>"])
    assert "server three is drained: name another one" in refused.text
    for cluster.alone in (False, True):  # the second one repeats the first, though no server could take the queues now
        asked = api.client.post("/api/v1/cluster/handover", json={}, headers={"Idempotency-Key": "mine"})
        assert asked.json() == {"asked": True, "to": ""}
    for _ in range(2):  # nothing is kept of a refused one
        asked = api.client.post("/api/v1/cluster/handover", json={}, headers={"Idempotency-Key": "another"})
        message = "no other server could own the queues: start one, or undrain one"
        assert (asked.status_code, asked.json()["message"]) == (400, message)
    asked = api.client.post("/api/v1/cluster/handover", json={"to": "one"}, headers={"Idempotency-Key": "mine"})
    assert asked.status_code == 422
    assert cluster.asked == ["<two>", ""]
    text = plain(visitor.get("/console/cluster").text)  # alone
    assert "<two> is silent: it is gone, or PostgreSQL does not take its reports. If it is gone, start it, or" in text
    assert "four is not running: start it, or veilmq cluster forget four if it will not come back" in text
    assert re.search(r"<two> silent 2 .*four not running 0 ", text), text
    assert "no other server could own the queues: nobody takes over if one is lost" in text
    for cluster.missing, sync, cluster.single_copy, said in (
        ("<db3>", "quorum", False, "commits are not confirmed: every client waits for standby <db3>."),
        ("", "", False, "may not see whether it confirms commits: grant it pg_monitor"),
        ("", "", True, "none confirms commits: losing PostgreSQL's machine loses messages"),
    ):
        cluster.standbys = [Standby("db2", sync, "streaming", 0.001)]
        text = plain(visitor.get("/console/cluster").text)
        assert (said in text, "Owned by" in text) == (True, False), text
    cluster.standbys = [Standby("db2", "sync", "streaming", 0.001, stands_still=True)]
    assert "db2 yes, sync streaming stands still" in plain(visitor.get("/console/cluster").text)
    (standby,) = api.client.get("/api/v1/cluster").json()["standbys"]
    assert (standby["stands_still"], standby["lag_us"]) == (True, None)
    cluster.alone = False
    for cluster.role in ("starting", "filling"):
        page = visitor.get("/console/cluster").text
        assert ("nobody takes over" in page, "Hand over to it" in page) == (True, False)
    assert "<two> fills its copy, which was thrown away: it cannot own the queues meanwhile" in plain(page)
    cluster.answers = False
    assert "PostgreSQL does not answer" in plain(visitor.get("/console/cluster").text)


def test_who_only_reads_changes_nothing_of_server_and_cluster(server: Any) -> None:
    server.cluster = cluster = Clustered()
    with Visitor(server) as visitor:
        visitor.sign_in(secret=admin.TOKEN, reads_only="on")
        assert "Hand over to it" not in visitor.get("/console/cluster").text
        fields = visitor.fields("/console/cluster/handover?to=%3Ctwo%3E", "/console/cluster/handover")
        assert visitor.post("/console/cluster/handover", data=fields).status_code == 403
        fields = visitor.fields("/console/", "/console/sign-out")
        assert visitor.post("/console/server/clock", data=fields).status_code == 403
    assert cluster.asked == []
