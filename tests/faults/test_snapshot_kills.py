"""A server that is killed amid a snapshot of its history, again and again: what is left of it gives the state.

Strategy: the server's history is one second long, so that a snapshot is begun twice a second; whoever follows the
events sees its begin, and kills the server before its end can have come. Then the directory is opened: the events that
are left, replayed, must be what the store holds.
"""

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.model.events import EventRecord, HistoryTrimmed
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing.local import ServerProcess
from veilmq.testing.replaying import replay, state_of

QUEUE = "/api/v1/queues/000000000000/us-east-1/jobs"
MESSAGES = 5_000
"""About twenty steps of a snapshot."""
ROUNDS = 4
"""At least: whoever sees a snapshot's begin late, as on a busy machine, may kill after its end. So on until one hit."""
ROUNDS_MAX = 40


def connected(server: ServerProcess) -> httpx.Client:
    token = (server.data / "admin-token").read_text().strip()
    return httpx.Client(base_url=server.admin, headers={"Authorization": f"Bearer {token}"}, timeout=30)


class Worker(threading.Thread):
    """Sends, receives and deletes until the server is gone."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(daemon=True)
        self._server = server

    def run(self) -> None:
        with connected(self._server) as http:
            try:
                while True:
                    self._work(http)
            except httpx.TransportError:
                pass

    def _work(self, http: httpx.Client) -> None:
        http.post(QUEUE + "/messages", json={"messages": [{"body": "a"}] * 10})
        found = http.post(QUEUE + "/receive", json={"count": 10, "lease_us": 3_600_000_000}).json()["messages"]
        handles = [message["handle"] for message in found]
        http.post(QUEUE + "/delete", json={"handles": handles[:8]})
        http.post(QUEUE + "/extend", json={"handles": handles[8:], "lease_us": 0})


def kill_amid_a_snapshot(server: ServerProcess, after: int) -> None:
    """Follow the events until one begins a snapshot, after so many others ended."""
    with connected(server) as http:
        start = "next"
        while True:
            try:
                answer = http.get("/api/v1/events", params={"from": start, "follow": 5})
            except httpx.RemoteProtocolError:  # what it read was trimmed meanwhile
                start = "next"
                continue
            if answer.status_code == 410:
                start = "next"
                continue
            events = [json.loads(line) for line in answer.text.splitlines()]
            parts = [event["detail"]["part"] for event in events if event["kind"] == "snapshot"]
            after -= parts.count("end")
            if parts and parts[-1] != "end" and after <= 0:
                server.kill()
                return
            start = answer.headers["veilmq-next-offset"]


def left_of(store: SqliteStore, factory: SqliteFactory) -> list[EventRecord]:
    try:
        return factory.history(store, 0, 1_000_000)
    except HistoryTrimmed as trimmed:
        return factory.history(store, trimmed.first_offset, 1_000_000)


@pytest.mark.slow
def test_what_is_left_of_the_history_gives_the_state(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--history-s-max", "1")
    factory = SqliteFactory(server.data, SMALL)
    void, firsts = 0, list[int]()
    for turn in range(ROUNDS_MAX):
        if turn >= ROUNDS and void:
            break
        server.start()
        if not turn:
            with connected(server) as http:
                http.put(QUEUE)
                for _ in range(MESSAGES // 100):
                    http.post(QUEUE + "/messages", json={"messages": [{"body": "at first"}] * 100}).raise_for_status()
        Worker(server).start()
        kill_amid_a_snapshot(server, turn % 2)
        store = factory.open()
        events, state, instant = left_of(store, factory), state_of(factory.state(store)), store.mark
        store.close()
        assert len(state.messages) >= MESSAGES
        assert replay(events).at(instant) == state.at(instant)
        firsts.append(events[0].offset)
        void += _last_part(events) != "end"
    assert void, "the server was killed amid a snapshot"
    assert firsts == sorted(firsts)
    assert firsts[-1] > 0, "the history was trimmed"


def _last_part(events: list[EventRecord]) -> Any:
    return [(event.detail or {})["part"] for event in events if event.kind == "snapshot"][-1]
