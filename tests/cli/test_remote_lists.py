"""`veilmq topics list` and `veilmq moves list`, straight on a directory and through a server with a dead endpoint."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Run
from tests.support.sqlite import SMALL

from veilmq.model.commands import CreateQueue, CreateTopic, Origin, StartMove, Subscribe
from veilmq.model.errors import VeilError
from veilmq.model.instant import Instant
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.model.settings.topic import SubscriptionSettings, TopicKey
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing.local import LocalServer

TESTER = Origin("mns", "tester")
NEWS = TopicKey("000000000000", "us-east-1", "news")
ORDERS, DEAD = (QueueKey("000000000000", "us-east-1", name) for name in ("orders", "dead"))


def make(directory: Path) -> None:
    """A topic with a subscription, and a dead-letter queue with a move task."""
    store = SqliteStore(directory, SMALL)
    by_queue = SubscriptionSettings(endpoint="acs:mns:x:y:queues/orders", queue=ORDERS)
    commands: list[Any] = [
        CreateQueue(queue=DEAD, origin=TESTER),
        CreateQueue(queue=ORDERS, origin=TESTER, change={"redrive": RedrivePolicy(DEAD, 3)}),
        CreateTopic(topic=NEWS, origin=TESTER),
        Subscribe(topic=NEWS, origin=TESTER, name="to-orders", settings=by_queue),
        StartMove(queue=DEAD, origin=TESTER),
    ]
    for command in commands:
        (outcome,) = store.apply([command], Instant(10**15)).outcomes
        assert not isinstance(outcome, VeilError), outcome
        store.commit()
    store.close()


def test_on_a_directory(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    make(directory)
    where = ("--data", str(directory))
    code, out, _ = run("topics", "list", *where)
    assert code == 0
    for word in ("news", "to-orders", "acs:mns:x:y:queues/orders"):
        assert word in out
    (topic,) = (json.loads(line) for line in run("topics", "list", "--json", *where)[1].splitlines())
    assert [each["name"] for each in topic["subscriptions"]] == ["to-orders"]
    code, out, _ = run("moves", "list", *where)
    assert code == 0
    for word in ("dead", "where they came from", "0 of 0"):
        assert word in out
    (task,) = (json.loads(line) for line in run("moves", "list", "--all", "--json", *where)[1].splitlines())
    assert task["source"]["name"] == "dead"
    for noun, what in (("topics", "topics"), ("moves", "move tasks")):
        assert run(noun, "list", "--prefix", "z", *where) == (0, "", f"no {what}\n")


@pytest.mark.slow
def test_a_server_tells_of_an_endpoint_that_is_dead_and_reset_clears_it(run: Run, tmp_path: Path) -> None:
    with LocalServer.temporary("--push-allow", "127.0.0.0/8") as server:
        mns = server.process.mns

        def ask(method: str, path: str, body: str) -> None:
            urllib.request.urlopen(urllib.request.Request(mns + path, body.encode(), method=method), timeout=30).close()

        ask("PUT", "/topics/news", "<Topic/>")
        endpoint = "<Endpoint>http://127.0.0.1:1/hook</Endpoint>"
        ask("PUT", "/topics/news/subscriptions/dead", f"<Subscription>{endpoint}</Subscription>")
        for _ in range(3):
            ask("POST", "/topics/news/messages", "<Message><MessageBody>x</MessageBody></Message>")
        where = ("--admin", server.admin_url, "--token-file", str(server.process.data / "admin-token"))
        while True:
            (topic,) = (json.loads(line) for line in run("topics", "list", "--json", *where)[1].splitlines())
            push = topic["subscriptions"][0]["push"]
            if push.get("available") is False:
                break
        assert (push["failures"] >= 3, push["waiting"]["total"]) == (True, 3)
        assert "ClientConnectorError" in push["last_error"]
        assert "slowed to one in" in run("topics", "list", *where)[1]
        server.reset()
        assert run("topics", "list", *where) == (0, "", "no topics\n")
        assert "no queues" in run("queues", "list", "--all", *where)[2]
