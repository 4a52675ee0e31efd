"""Snapshots in the history as the admin port shows them: JSON lines, Arrow, cut to a key's own queues, traces."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pyarrow as pa
import pytest
from tests.admin.server import OPTIONS, TOKEN, Keys

from veilmq.admin import history
from veilmq.admin.history import feed
from veilmq.model.commands import Sweep
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.store.sqlite.reading.history import bounds

OWN, OTHER = "111111111111", "222222222222"
PATH = "/api/v1/queues/{}/us-east-1/orders"
READER = AccessKey(id="reader", account=OWN, secret="secret of reader", grants=(Grant(frozenset({Action.EVENTS})),))
NEIGHBOUR = AccessKey(id="neighbour", account=OTHER, secret="secret of neighbour", grants=())


@pytest.fixture(scope="module")
def told(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with a snapshot in its history, and an older one that is trimmed."""
    options = msgspec.structs.replace(OPTIONS, history_bytes_max=4_000)
    data = tmp_path_factory.mktemp("told") / "data"
    with running(data, Keys(READER, NEIGHBOUR), options=options) as server, whole(server) as http:
        for account in (OWN, OTHER):
            http.put(PATH.format(account)).raise_for_status()
        for _ in range(8):
            for account in (OWN, OTHER):
                bodies = [{"body": "a", "type": account}, {"body": "b", "delay_us": 3_600_000_000}]
                http.post(PATH.format(account) + "/messages", json={"messages": bodies}).raise_for_status()
                http.post(PATH.format(account) + "/receive").raise_for_status()
                sweep(server)
        # Until nothing is left to do: what the server itself would still trim, it would trim amid a test.
        held = None
        while held != (found := bounds_of(server)):
            held = found
            sweep(server)
        yield server


def sweep(server: Any) -> None:
    server.on_loop(server.shell.call(Sweep(steps_max=64)))


def bounds_of(server: Any) -> tuple[int, int]:
    with server.store.readers.lend() as connection:
        return bounds(connection)


def whole(server: Any) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30)


def scoped(server: Any) -> httpx.Client:
    token = b64encode(b"reader:secret of reader").decode()
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Basic {token}"}, timeout=30)


def events(http: httpx.Client, start: str = "snapshot") -> list[dict[str, Any]]:
    answer = http.get("/api/v1/events", params={"from": start})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_they_begin_where_the_newest_one_begins(told: Any) -> None:
    with whole(told) as http:
        first, *rest = events(http)
        assert (first["kind"], first["detail"]["part"]) == ("snapshot", "begin")
        (end,) = (each for each in rest if each["kind"] == "snapshot" and each["detail"]["part"] == "end")
        assert end["detail"]["begin"] == first["offset"]
        assert first["offset"] >= int(http.get("/api/v1/events").headers["veilmq-first-offset"]) > 0


def test_its_messages_are_those_of_the_state(told: Any) -> None:
    with whole(told) as http:
        messages = [message for each in events(http) for message in (each["detail"] or {}).get("messages", [])]
        held = [json.loads(line) for line in http.get("/api/v1/snapshot").text.splitlines()]
    state = {line["message"]["sequence"]: line["message"] for line in held if "message" in line}
    for message in messages:
        now = state[message["sequence"]]
        same = ("id", "priority", "sent", "body_bytes")
        assert {name: message[name] for name in same} == {name: now[name] for name in same}
        assert message["state"] in {"visible", "delayed", "in flight"}
        assert (message["state"] == "in flight") is (message["receive_count"] == 1)
    assert {message.get("type") for message in messages} == {None, OWN, OTHER}


def test_arrow_says_what_json_says(told: Any) -> None:
    with whole(told) as http:
        lines = events(http)
        answer = http.get("/api/v1/events", params={"from": "snapshot"}, headers={"Accept": feed.MEDIA_TYPE})
    rows = pa.ipc.open_stream(answer.content).read_all().to_pylist()
    assert [row["kind"] for row in rows] == [line["kind"] for line in lines]
    assert [row["detail"] and json.loads(row["detail"]) for row in rows] == [line["detail"] for line in lines]


def test_they_come_in_pieces_that_are_not_too_large(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with whole(told) as http:
        at_once = events(http, "first")
        monkeypatch.setattr(history, "_PIECE_BYTES_MAX", 300)
        assert events(http, "first") == at_once
    with told.store.reader.look() as view:
        start, end = at_once[0]["offset"], at_once[-1]["offset"] + 1
        assert start < history.piece_end(view, start, end) < end
        assert history.piece_end(view, end - 1, end) == end


def test_a_key_sees_that_it_happened_and_its_own_queues(told: Any) -> None:
    with scoped(told) as http, whole(told) as every:
        own = [each for each in events(http) if each["kind"] == "snapshot"]
        answer = http.get("/api/v1/events", params={"from": "snapshot"}, headers={"Accept": feed.MEDIA_TYPE})
        all_of_it = [each for each in events(every) if each["kind"] == "snapshot"]
    assert [each["detail"]["part"] for each in own] == ["begin", "queue", "messages", "end"]
    assert {each["account"] for each in own} == {None, OWN}
    assert own == [each for each in all_of_it if each["account"] != OTHER]
    assert OTHER not in json.dumps(own)
    rows = pa.ipc.open_stream(answer.content).read_all().to_pylist()
    assert {row["account"] for row in rows if row["kind"] == "snapshot"} == {None, OWN}


def test_a_trace_is_of_the_message_alone(told: Any) -> None:
    with whole(told) as http:
        held = [json.loads(line) for line in http.get("/api/v1/snapshot").text.splitlines()]
        message = next(line["message"] for line in held if line.get("message", {}).get("receive_count"))
        found = http.get(f"/api/v1/trace/{message['id']}").json()
    assert {event["kind"] for event in found["events"]} <= {"sent", "received"}


def test_without_one_the_beginning_is_where_the_state_begins(http: httpx.Client) -> None:
    http.put(PATH.format("000000000000"))
    answer = http.get("/api/v1/events", params={"from": "snapshot"})
    assert answer.headers["veilmq-start-offset"] == "0"
    assert answer.text == http.get("/api/v1/events").text
