"""Replay: a snapshot at any offset and the events from there on give every later state; so do the events from 0 on."""

import json
from typing import Any

import httpx
import pytest

from veilmq.testing.seeded import chance

QUEUES = "/api/v1/queues/000000000000/us-east-1"
ORDERS = f"{QUEUES}/orders"
KINDS = ("send", "send", "send", "receive", "receive", "extend", "release", "delete", "purge", "recreate")
State = dict[tuple[int, int], tuple[str, int]]
"""(incarnation, sequence) -> where the message is, and its attempt."""


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def snapshot(http: httpx.Client) -> tuple[int, State]:
    """Offset and messages of a snapshot taken now."""
    head, *rest = lines(http.get("/api/v1/snapshot"))
    held = [line["message"] for line in rest if "message" in line]
    return head["snapshot"]["offset"], {
        (each["incarnation"], each["sequence"]): (each["state"], each["receive_count"]) for each in held
    }


def replayed(state: State, events: list[dict[str, Any]]) -> State:
    """The state after these events."""
    state = dict(state)
    for event in events:
        queue, kind, detail = event["incarnation"], event["kind"], event["detail"] or {}
        key = (queue, event["sequence"])
        if kind == "sent":
            state[key] = ("delayed" if event["visible_since"] > event["at"] else "visible", 0)
        elif kind in {"received", "extended"}:
            state[key] = ("in flight" if event["attempt"] else "delayed", event["attempt"])
        elif kind in {"released", "lease_expired", "undelivered"}:
            state[key] = ("visible", event["attempt"])
        elif kind in {"deleted", "expired"}:
            del state[key]
        elif kind in {"dead_lettered", "moved"}:
            del state[key]
            state[detail["target"], detail["target_sequence"]] = ("visible", 0)
        elif kind == "purged":
            for each in [each for each in state if each[0] == queue and each[1] <= detail["watermark"]]:
                del state[each]
        elif kind == "queue_deleted":
            for each in [each for each in state if each[0] == queue]:
                del state[each]
    return state


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
    taken, handles = [(0, State())], list[str]()
    for step in range(160):
        act(http, dice, handles)
        if step % 20 == 19:
            taken.append(snapshot(http))
    *starts, (end, state) = taken
    assert state
    assert end > 100
    for offset, before in starts:
        events = lines(http.get("/api/v1/events", params={"from": str(offset), "limit": end - offset}))
        assert len(events) == end - offset
        assert replayed(before, events) == state, offset
