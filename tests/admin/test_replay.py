"""Replay: a snapshot at any offset and the events from there on give every later state; so do the events from 0 on, and
those from a snapshot in the history on."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.admin.server import OPTIONS, TOKEN

from veilmq.model.events import EventRecord
from veilmq.testing import chance
from veilmq.testing.replaying import State, replay, state_of

QUEUES = "/api/v1/queues/000000000000/us-east-1"
ORDERS = f"{QUEUES}/orders"


def asked(http: httpx.Client, start: int | str, limit: int) -> httpx.Response:
    """Events; asked for again if the answer is cut off: these histories are soon half as large again as their bound,
    and then a sweep spares no reader."""
    while True:
        with suppress(httpx.RemoteProtocolError):
            return http.get("/api/v1/events", params={"from": str(start), "limit": limit})


def events_of(http: httpx.Client, start: int | str, limit: int) -> list[EventRecord]:
    """Events as a program of somebody else's reads them."""
    answer = asked(http, start, limit)
    assert answer.status_code == 200, answer.text
    return [msgspec.json.decode(line, type=EventRecord) for line in answer.text.splitlines()]


def snapshot(http: httpx.Client) -> tuple[int, int, State]:
    """Offset, instant and state of a snapshot taken now."""
    answer = http.get("/api/v1/snapshot")
    assert answer.status_code == 200, answer.text
    shown = [json.loads(line) for line in answer.text.splitlines()]
    head = shown[0]["snapshot"]
    return head["offset"], head["at"], state_of(shown)


def told_alike(http: httpx.Client, start: str) -> tuple[int, State, list[EventRecord]]:
    """Instant and state of a snapshot taken now, and the events up to it. Taken again if the server, which trims
    meanwhile, has put a later snapshot than this one into its history."""
    while True:
        end, at, state = snapshot(http)
        events = [event for event in events_of(http, start, 1_000_000) if event.offset < end]
        if events_of(http, "snapshot", 1)[0].offset < end:
            return at, state, events


def act(http: httpx.Client, dice: Any, handles: list[str]) -> None:
    """Do one thing or another."""
    match dice.choice(
        ["send", "send", "send", "receive", "receive", "extend", "release", "delete", "purge", "recreate"]
    ):
        case "send":
            bodies = [{"body": "x" * dice.randint(1, 9)} for _ in range(dice.randint(1, 4))]
            if dice.random() < 0.2:
                bodies[0]["delay_us"] = 3_600_000_000
            http.post(ORDERS + "/messages", json={"messages": bodies})
        case "receive":
            answer = http.post(ORDERS + "/receive", json={"count": dice.randint(1, 5), "lease_us": 3_600_000_000})
            handles += [message["handle"] for message in answer.json()["messages"]]
        case "extend" | "release" as kind if handles:
            lease_us = 3_600_000_000 if kind == "extend" else 0
            http.post(ORDERS + "/extend", json={"handles": [dice.choice(handles)], "lease_us": lease_us})
        case "delete" if handles:
            http.post(ORDERS + "/delete", json={"handles": [dice.choice(handles)]})
        case "purge" if dice.random() < 0.2:
            http.post(ORDERS + "/purge")
        case "recreate" if dice.random() < 0.2:
            http.delete(ORDERS)
            http.put(ORDERS, json={"redrive": {"target": "failed", "receive_count_max": 2}})
        case _:
            pass


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_snapshot_and_what_came_after_it_give_the_state(http: httpx.Client, seed: int) -> None:
    dice = chance(seed)
    http.put(QUEUES + "/failed")
    http.put(ORDERS, json={"redrive": {"target": "failed", "receive_count_max": 2}})
    taken, handles = [(0, 0, State())], list[str]()
    for step in range(160):
        act(http, dice, handles)
        if step % 20 == 19:
            taken.append(snapshot(http))
    *starts, (end, at, state) = taken
    assert state.messages
    assert end > 100
    for offset, _, before in starts:
        events = events_of(http, offset, end - offset)
        assert len(events) == end - offset
        assert replay(events, before).at(at) == state.at(at), offset


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_history_gives_the_state_when_its_beginning_is_gone(running: Any, tmp_path: Path, seed: int) -> None:
    dice = chance(seed)
    options = msgspec.structs.replace(OPTIONS, history_bytes_max=8_000)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        running(tmp_path / "data", options=options) as server,
        httpx.Client(base_url=server.url, headers=headers) as http,
    ):
        http.put(QUEUES + "/failed")
        http.put(ORDERS, json={"redrive": {"target": "failed", "receive_count_max": 2}})
        handles = list[str]()
        while asked(http, "first", 1).headers["veilmq-first-offset"] == "0":
            for _ in range(20):
                act(http, dice, handles)
        for _ in range(40):
            act(http, dice, handles)
        for start in ("snapshot", "first"):
            at, state, events = told_alike(http, start)
            assert replay(events).at(at) == state.at(at)
        assert http.get("/api/v1/events", params={"from": "0"}).status_code == 410
