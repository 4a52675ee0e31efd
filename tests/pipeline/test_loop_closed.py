"""The closed loop on a real server: published, shown with reasons, in force by the owner's leave, kept by clients."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.pipeline.histories_stage import event, extended, frame, received, table_of

from veilmq.cli import main
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Message
from veilmq.client.timeouts import PublishedPlan
from veilmq.pipeline.events.reading import ServerHistory
from veilmq.pipeline.jobs.attempts import partials
from veilmq.pipeline.publish import publish
from veilmq.pipeline.publish.plans import floors, plans_of
from veilmq.testing.local import LocalServer

QUEUE = ("000000000000", "us-east-1", "jobs")
S = 1_000_000
Run = Callable[..., str]


def plans(floor_us: int = 0, **leases_s: float) -> dict[Any, Any]:
    """As `timeouts` would give them; the name `all` is no type."""
    rows = [
        {
            "account": QUEUE[0], "region": QUEUE[1], "queue": QUEUE[2], "type": None if kind == "all" else kind,
            "attempts": 500.0, "first_lease_s": None, "timeout_s": seconds, "timeout_at_least_s": None,
            "today_renewed": False, "today_lease_s": 30.0,
        }
        for kind, seconds in leases_s.items()
    ]  # fmt: skip
    return plans_of(rows, {QUEUE: floor_us})


def token(server: LocalServer) -> str:
    return (server.process.data / "admin-token").read_text().strip()


def tell(server: LocalServer, found: dict[Any, Any]) -> str:
    return publish(found, server.admin_url, token(server))[QUEUE]


@pytest.fixture
def plan_command(
    veilmq_server: LocalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """`veilmq queues plan jobs ...`: what it prints."""
    monkeypatch.setenv("VEILMQ_ADMIN", veilmq_server.admin_url)
    monkeypatch.setenv("VEILMQ_TOKEN_FILE", str(veilmq_server.process.data / "admin-token"))

    def command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["veilmq", "queues", "plan", "jobs", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert not ended.value.code, err
        return out

    return command


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_server_shows_what_it_would_set_and_why(veilmq_server: LocalServer, plan_command: Run) -> None:
    with veilmq_server.connect("jobs"):
        assert "nothing was published" in plan_command()
        assert tell(veilmq_server, plans(floor_us=40 * S, all=90, film=600, icon=2)) == "suggested"
        said = words(plan_command())
        assert said[0] == "jobs: adaptive = suggest, visibility timeout 30 s, plans never shorter"
        assert "all others 1.5 min 1.5 min - -" in said
        assert "film 10 min 10 min - -" in said
        assert "icon 2 s 30 s - -" in said
        assert "why: all messages: 500 attempts; film: 500 attempts; icon: 500 attempts" in " ".join(said)
        assert said[-1] == "not below 40 s: twice the longest interval at which a client extended"
        # A shorter minimum by the owner lets plans shorten, but not below what a foreign heartbeat needs.
        said = words(plan_command("--first-lease-min", "1s"))
        assert "icon 2 s 40 s - -" in said


def test_it_is_in_force_by_the_owners_leave_and_can_be_taken_back(
    veilmq_server: LocalServer, plan_command: Run
) -> None:
    history = ServerHistory(veilmq_server.admin_url, token(veilmq_server))
    (_, start) = history.bounds()  # the server was others' before
    with veilmq_server.connect("jobs") as queue:
        plan_command("--adaptive", "apply")
        assert tell(veilmq_server, plans(all=90)) == "applied"
        assert tell(veilmq_server, plans(all=200)) == "applied"
        assert "all others 3.33 min 3.33 min 3.33 min 1.5 min" in words(plan_command())
        # A fifth more or less is no change.
        assert tell(veilmq_server, plans(all=210)) == "applied"
        assert json.loads(plan_command("--json"))["applied"]["lease_us"] == 200 * S
        said = words(plan_command("--revert"))
        assert "all others 3.5 min - 1.5 min 3.33 min" in said
        assert said[-1].startswith("a plan like it was taken back")
        plan_command("--adaptive", "off")
        assert "nothing was published" in plan_command()
        assert "adaptive = off" in tell(veilmq_server, plans(all=90))
        assert queue.recommended() is None
    told = [
        json.loads(detail)
        for batch in history.read(start, history.bounds()[1])
        for kind, detail in zip(batch.column("kind").to_pylist(), batch.column("detail").to_pylist(), strict=True)
        if kind == "queue_changed" and detail
    ]
    applied = [each["applied"]["lease_us"] for each in told if each.get("applied")]
    assert applied == [90 * S, 200 * S, 90 * S], "every change is an event"


def test_a_keeper_takes_its_leases_from_there(veilmq_server: LocalServer) -> None:
    history = ServerHistory(veilmq_server.admin_url, token(veilmq_server))
    (_, start) = history.bounds()
    with veilmq_server.connect("jobs") as queue:
        tell(veilmq_server, plans(all=60, film=300))
        with LeaseKeeper(queue, plan=PublishedPlan(queue)) as keeper:
            queue.send_batch([Message("a", type="film"), Message("b")])
            # Five seconds are less than the plan's margin, so the keeper extends at once.
            leases = [keeper.register(message) for message in queue.receive(10, lease=5)]
            keeper.extend_due()
            for lease in leases:
                lease.delete()
    extensions = {
        kind: lease_us
        for batch in history.read(start, history.bounds()[1])
        for event_kind, kind, lease_us in zip(
            *(batch.column(name).to_pylist() for name in ("kind", "type", "lease_us")), strict=True
        )
        if event_kind == "extended"
    }
    assert extensions == {"film": 300 * S, None: 60 * S}


def test_floors_are_twice_the_longest_interval_between_extensions(spark: Any) -> None:
    steady = [received(100), extended(110), extended(120), extended(145), event("deleted", 150)]
    other = [received(100, queue="other", sequence=2), event("deleted", 190, queue="other", sequence=2)]
    for each in [*steady, *other]:
        each["message"] = f"m{each.get('sequence', 1)}"
    rows = floors(frame(spark, table_of([*steady, *other]))).collect()
    assert [(row.queue, row.floor_us) for row in rows] == [("q", 50 * S)]
    earlier = partials(frame(spark, table_of([*steady[:3], *other[:1]])))
    rows = floors(frame(spark, table_of([*steady[3:], *other[1:]])), earlier).collect()
    assert [(row.queue, row.floor_us) for row in rows] == [("q", 50 * S)], "between the two looks"


def test_rows_of_pandas_say_missing_in_their_own_way(spark: Any) -> None:
    import pandas as pd

    rows = pd.DataFrame(
        [
            {"account": "0", "region": "r", "queue": "q", "type": None, "attempts": 90.0, "first_lease_s": 12.0,
             "timeout_s": None, "timeout_at_least_s": 40.0, "today_renewed": False, "today_lease_s": 30.0},
            {"account": "0", "region": "r", "queue": "q", "type": float("nan"), "attempts": 9.0, "first_lease_s": None,
             "timeout_s": None, "timeout_at_least_s": None, "today_renewed": None, "today_lease_s": None},
            {"account": "0", "region": "r", "queue": "q", "type": "film", "attempts": 90.0, "first_lease_s": 12.0,
             "timeout_s": 50.0, "timeout_at_least_s": None, "today_renewed": True, "today_lease_s": 30.0},
        ]
    )  # fmt: skip
    (plan,) = plans_of(rows.to_dict("records"), {}).values()
    assert (plan["lease_us"], plan["by_type"]) == (40 * S, {"film": 12 * S})
