"""`veilmq quarantine`, through a server and straight on a directory, and what the server shows of it."""

import base64
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from tests.admin import server as admin
from tests.support.commands import WAYS, Run, reaching
from tests.support.contract.stage import Stage
from tests.support.sqlite import SqliteFactory

from veilmq.model.messages import Attribute, Extras, id_text
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.server.clock import wall

ACCOUNT, REGION = "000000000000", "us-east-1"
PATH = f"/api/v1/queues/{ACCOUNT}/{REGION}"
BEARER = {"Authorization": f"Bearer {admin.TOKEN}"}
BODIES = ("first \u20ac", "second", "third")


class Damaged(NamedTuple):
    """A directory with damaged messages: two of `orders`, which were received, and one of `orders-2`."""

    path: Path
    ids: list[str]


def staged(path: Path) -> Stage:
    """A stage at the present time: a server that goes on with its directory must not find everything expired."""
    stage = Stage(SqliteFactory(path))
    stage.later(wall() - stage.now)
    return stage


@pytest.fixture
def damaged(tmp_path: Path) -> Damaged:
    stage = staged(tmp_path / "data")
    orders, other = (stage.create(name, ACCOUNT, REGION) for name in ("orders", "orders-2"))
    extras = Extras((Attribute("a", "String", "b"),), type="film")
    sent = [stage.send(queue, body, extras=extras) for queue, body in zip((orders, orders, other), BODIES, strict=True)]
    stage.store.close()
    for each in sent:
        stage.factory.damage(each.sequence)
    stage.store = stage.factory.open()
    stage.send(orders, "sound")
    for queue in (orders, other):
        stage.receive(queue, 10, lease_us=0)
    stage.store.close()
    return Damaged(tmp_path / "data", [id_text(each.id) for each in sent])


@pytest.fixture(params=WAYS)
def veilmq(request: pytest.FixtureRequest, run: Run, damaged: Damaged) -> Iterator[Run]:
    """The command in this process, either way."""
    with reaching(request.param, run, damaged.path) as reached:
        yield reached


def test_a_list_shows_what_was_expected_and_what_is_there(
    veilmq: Run, damaged: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("veilmq.admin.api.inputs.PAGE_MAX", 2)
    listed = veilmq("quarantine", "list", "--all", "--json").json
    assert [(each["name"], each["id"]) for each in listed] == list(
        zip(("orders", "orders", "orders-2"), damaged.ids, strict=True)
    )
    for each, body in zip(listed, BODIES, strict=True):
        assert each["md5"] == md5(body.encode()).hexdigest() != each["md5_now"]
        assert each["body_bytes"] == len(body.encode())
        assert "body_base64" not in each
    assert len(veilmq("quarantine", "list", "--prefix", "orders-", "--json").json) == 1
    shown = veilmq("quarantine", "list").out
    assert damaged.ids[0] in shown
    assert "MD5 now" in shown
    assert veilmq("quarantine", "list", "--prefix", "none").err == "no messages in quarantine\n"


def test_an_export_is_whole_and_changes_nothing(veilmq: Run, damaged: Damaged, tmp_path: Path) -> None:
    exported = veilmq("quarantine", "export")
    assert exported.err == "exported 3 messages\n"
    for each, body in zip(exported.json, BODIES, strict=True):
        raw = base64.b64decode(each["body_base64"])
        assert raw != body.encode()
        assert md5(raw).hexdigest() == each["md5_now"]
        assert (each["type"], each["attributes"]) == ("film", [{"name": "a", "type": "String", "value": "b"}])
        assert each["id"] in damaged.ids
    file = tmp_path / "damaged.jsonl"
    assert veilmq("quarantine", "export", "--to", str(file)).err == f"exported 3 messages to {file}\n"
    assert file.read_text() == exported.out
    assert file.stat().st_mode & 0o777 == 0o600
    again = veilmq("quarantine", "export", "--to", str(file))
    assert (again.code, "it exists already" in again.err) == (2, True)
    assert veilmq("quarantine", "export", "--to", str(tmp_path / "none" / "x")).code == 2
    assert sorted(path.name for path in tmp_path.glob("*.jsonl*")) == ["damaged.jsonl"]
    assert len(veilmq("quarantine", "list", "--json").json) == 3


def test_a_drop_is_asked_for_and_the_books_balance(veilmq: Run, damaged: Damaged) -> None:
    first, second, third = damaged.ids
    unasked = veilmq("quarantine", "drop", "orders", first)
    assert (unasked.code, "--yes" in unasked.err) == (2, True)
    for neither in ((), (first, "--all")):
        assert veilmq("quarantine", "drop", "orders", *neither, "--yes").code == 2
    assert len(veilmq("quarantine", "list", "--json").json) == 3
    mixed = veilmq("quarantine", "drop", "orders", first, third, "--yes")
    assert (mixed.code, mixed.out) == (1, "dropped 1 message of orders from quarantine\n")
    assert f"refused: message {third} is not in quarantine in {ACCOUNT}/{REGION}/orders\n" in mixed.err
    assert veilmq("quarantine", "drop", "orders", "nonsense", "--yes").code == 2
    check = veilmq("check", "--json")
    (report,) = check.json
    assert (check.code, report["books"]) == (1, "balanced")
    assert [problem["kind"] for problem in report["problems"]] == ["quarantine"] * 2
    assert veilmq("quarantine", "drop", "orders", "--all", "--yes").code == 0
    assert veilmq("quarantine", "drop", "orders", "--all", "--yes").err == "no message of orders is in quarantine\n"
    assert veilmq("quarantine", "drop", "none", "--all", "--yes").code == 1
    assert [each["id"] for each in veilmq("quarantine", "list", "--json").json] == [third]
    assert veilmq("quarantine", "drop", "orders-2", third, "--yes", "--json").json == [{"id": third}]
    assert veilmq("check").code == 0
    kinds = [event["kind"] for event in veilmq("trace", second, "--json").json[0]["events"]]
    assert kinds == ["sent", "quarantined", "quarantine_dropped", "operator_command"]


def samples(http: httpx.Client) -> dict[str, float]:
    lines = http.get("/metrics").text.splitlines()
    pairs = [line.rpartition(" ") for line in lines if "quarantine" in line and not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def test_the_metrics_count_it(tmp_path: Path) -> None:
    stage = staged(tmp_path / "data")
    queue = stage.create("orders", ACCOUNT, REGION)
    sent = [stage.send(queue, body) for body in BODIES]
    stage.store.close()
    for each in sent:
        stage.factory.damage(each.sequence)
    gauge, counter = "veilmq_quarantined_messages", 'veilmq_quarantine_events_total{event="%s"}'
    of_queue = f'veilmq_queue_events_total{{account="{ACCOUNT}",event="quarantined",queue="orders",region="{REGION}"}}'
    with admin.running(tmp_path / "data") as server, httpx.Client(base_url=server.url, headers=BEARER) as http:
        found = samples(http)
        assert [found[name] for name in (gauge, counter % "quarantined", counter % "quarantine_dropped")] == [0, 0, 0]
        assert http.post(f"{PATH}/orders/receive").json() == {"messages": []}
        found = samples(http)
        assert [found[name] for name in (gauge, counter % "quarantined", of_queue)] == [3, 3, 3]
        dropped = http.post(f"{PATH}/orders/quarantine/drop", json={"messages": [id_text(sent[0].id)]})
        assert (dropped.status_code, dropped.json()) == (200, {"results": [{}]})
        found = samples(http)
        assert [found[name] for name in (gauge, counter % "quarantined", counter % "quarantine_dropped")] == [2, 3, 1]


def test_a_key_sees_what_it_may_peek_and_drops_what_it_may_purge(damaged: Damaged) -> None:
    peeks, purges = Grant(frozenset({Action.PEEK}), ("orders-*",)), Grant(frozenset({Action.PURGE}), ("orders",))
    keys = admin.Keys(
        AccessKey("peeker", "secret", ACCOUNT, grants=(peeks,)),
        AccessKey("purger", "secret", ACCOUNT, grants=(purges,)),
    )
    first, _, third = damaged.ids
    with admin.running(damaged.path, keys) as server, httpx.Client(base_url=server.url) as http:
        for path in ("/api/v1/quarantine", "/api/v1/quarantine/export"):
            assert http.get(path).status_code == 401
            assert http.get(path, auth=("purger", "secret")).status_code == 403
            assert http.get(f"{path}?account=*", auth=("peeker", "secret")).status_code == 403
            seen = http.get(path, auth=("peeker", "secret")).json()
            assert [each["id"] for each in seen["messages"]] == [third]
            assert len(http.get(path, headers=BEARER).json()["messages"]) == 3
            assert http.get(f"{path}?after=x", headers=BEARER).json()["field"] == "after"
        drop = f"{PATH}/orders/quarantine/drop"
        assert http.post(drop, json={"messages": [first]}, auth=("peeker", "secret")).status_code == 403
        refused = http.post(drop, json={"messages": [third]}, auth=("purger", "secret"))
        assert (refused.status_code, refused.json()["field"]) == (400, "messages")
        for wrong in ({}, {"messages": []}, {"messages": [first] * 101}, {"messages": ["x"]}):
            assert http.post(drop, json=wrong, headers=BEARER).status_code == 400
        assert http.post(drop, json={"messages": [first]}, auth=("purger", "secret")).status_code == 200
