"""A step of the clock that nobody has accepted: in /health, in the metrics, and accepted through the port."""

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.admin.server import OPTIONS, TOKEN
from tests.support.contract.stage import ACCOUNT, REGION, TESTER

from veilmq.model.commands import CreateQueue
from veilmq.model.instant import DAY_US, SECOND_US, Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.server.clock import wall
from veilmq.store.sqlite.store import SqliteStore


def test_an_unaccepted_step_is_a_warning_until_it_is_accepted(
    running: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "veilmq.clock")
    store = SqliteStore(tmp_path / "data", OPTIONS)
    before = Instant(wall() - 10 * DAY_US)
    store.apply([CreateQueue(queue=QueueKey(ACCOUNT, REGION, "jobs"), origin=TESTER)], before)
    store.commit()
    store.close()
    with running(tmp_path / "data") as server, httpx.Client(base_url=server.url, timeout=30) as http:
        http.headers["Authorization"] = f"Bearer {TOKEN}"
        http.get("/api/v1/queues/000000000000/us-east-1/jobs")
        ready = http.get("/health/ready")
        assert ready.status_code == 200
        assert "veilmq clock accept" in ready.json()["warnings"]["clock_step"]
        assert http.get("/api/v1/clock").json()["unaccepted_us"] >= 10 * DAY_US
        assert "veilmq_clock_unaccepted_seconds 864" in http.get("/metrics").text
        once = {"Idempotency-Key": "once"}
        accepted = http.post("/api/v1/clock/accept", headers=once).json()
        assert accepted["accepted_us"] >= 10 * DAY_US
        assert accepted["held_us"] == 0
        seconds = accepted["accepted_us"] // SECOND_US
        assert http.post("/api/v1/clock/accept", headers=once).json() == accepted
        logged = [record.getMessage() for record in caplog.records if record.name == "veilmq.clock"]
        assert logged == [f"the clock was {seconds} s ahead of the data: accepted by the admin token"]
        assert http.get("/health/ready").json()["warnings"] == {}
        assert "veilmq_clock_unaccepted_seconds 0.0" in http.get("/metrics").text
        assert http.post("/api/v1/clock/accept").json() == {"accepted_us": 0, "held_us": 0}
        assert http.post("/api/v1/clock/accept", json={"no": 1}).status_code == 400
