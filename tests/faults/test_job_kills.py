"""A server that is killed amid a job, again and again, at random instants: no message is lost, or acted on twice.

Strategy: the job's start is sent again after each kill with one id, as a client does that lost the answer, so whatever
the first kill hit there is one job. The job's rate is so low that at least one kill comes while it runs, which the
test asserts. In the end the job's own numbers, the queues, the history and `check` must agree.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.sqlite import SMALL

from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check
from veilmq.testing import chance
from veilmq.testing.local import ServerProcess

QUEUES = "/api/v1/queues/000000000000/us-east-1"
MESSAGES = 3_000
HELD = 5
RATE = 500
"""Messages a second: the job runs for about 3 s."""
END_S = 60


def connected(server: ServerProcess) -> httpx.Client:
    token = (server.data / "admin-token").read_text().strip()
    return httpx.Client(base_url=server.admin, headers={"Authorization": f"Bearer {token}"}, timeout=30)


@contextmanager
def running(directory: Path) -> Iterator[ServerProcess]:
    """A server until the end, which may be its death."""
    server = ServerProcess(directory).start()
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def prepare(http: httpx.Client) -> list[str]:
    """Two queues, the messages, some of them in flight; returns the bodies of those."""
    for name in ("jobs", "other"):
        http.put(f"{QUEUES}/{name}", json={"visibility_timeout_us": 3_600_000_000})
    for first in range(0, MESSAGES, 100):
        sent = [{"body": str(number), "type": "ab"[number % 2]} for number in range(first, first + 100)]
        assert http.post(f"{QUEUES}/jobs/messages", json={"messages": sent}).status_code == 200
    held = http.post(f"{QUEUES}/jobs/receive", json={"count": HELD}).json()["messages"]
    return [message["body"] for message in held]


def start(http: httpx.Client, act: str) -> dict[str, Any]:
    members = {"act": act, "queue": "jobs", "filter": {"type": "a"}, "rate": RATE}
    if act == "move":
        members["destination"] = "other"
    answer = http.post("/api/v1/jobs", json=members, headers={"Idempotency-Key": "the-job"})
    assert answer.status_code == 201, answer.text
    job: dict[str, Any] = answer.json()
    return job


def asked(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """The job as it stands: a repeated start gets the first answer."""
    found: dict[str, Any] = http.get(f"/api/v1/jobs/{job['id']}").json()
    return found


def ended(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + END_S
    while True:
        found = asked(http, job)
        if found["status"] not in ("running", "cancelling"):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def live(directory: Path, act: str, kills: int, seed: int) -> None:
    draw = chance(seed)
    ids = set()
    done_at_starts = []
    with running(directory) as server, connected(server) as http:
        held = prepare(http)
    free = MESSAGES // 2 - sum(int(body) % 2 == 0 for body in held)
    for _ in range(kills):
        with running(directory) as server:
            with connected(server) as http:
                job = start(http, act)
                ids.add(job["id"])
                done_at_starts.append(asked(http, job)["done"])
                time.sleep(draw.random() * 0.4)
            server.kill()
    with running(directory) as server, connected(server) as http:
        job = start(http, act)
        done_at_starts.append(asked(http, job)["done"])
        job = ended(http, job)
        lines = http.get("/api/v1/events", params={"from": "first", "limit": 1_000_000}).text.splitlines()
        counts = {name: http.get(f"{QUEUES}/{name}").json()["counts"] for name in ("jobs", "other")}
    assert {job["id"]} == ids | {job["id"]}
    assert any(0 < done < free for done in done_at_starts[1:]), f"no kill came amid the job: {done_at_starts}"
    assert (job["status"], job["matched"], job["done"], job["failed"]) == ("completed", free, free, 0)
    events = [json.loads(line) for line in lines]
    kind = "moved" if act == "move" else "deleted"
    acted = Counter(event["message"] for event in events if event["kind"] == kind)
    assert (len(acted), max(acted.values())) == (free, 1)
    assert sum(event["kind"] == "operator_command" and "job" in event["detail"] for event in events) == 1
    assert counts["jobs"]["visible"] + counts["jobs"]["in_flight"] == MESSAGES - free
    assert counts["other"]["total"] == (free if act == "move" else 0)
    SqliteStore(directory / "data", SMALL).close()
    report = check(directory / "data" / "veilmq.db")
    assert (report.books, report.problems) == ("balanced", [])


def test_a_job_outlives_a_few_kills(tmp_path: Path) -> None:
    live(tmp_path, "move", kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("act", ["move", "delete"])
def test_a_job_outlives_many_kills(tmp_path: Path, act: str) -> None:
    for seed in range(2):
        directory = tmp_path / str(seed)
        directory.mkdir()
        live(directory, act, kills=3, seed=seed)
