"""Did it help: matched hours before and after a plan, a verdict that chance seldom makes, and a plan taken back."""

import json
import urllib.request
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.pipeline.histories_stage import event, frame, received, table_of

from veilmq.pipeline.events.reading import ServerHistory
from veilmq.pipeline.jobs.attempts import attempts
from veilmq.pipeline.jobs.plan_changes import changes, compared, helped, hours, is_worse, reason
from veilmq.pipeline.publish import publish, take_back
from veilmq.testing.for_each import for_each
from veilmq.testing.local import LocalServer

HOUR_US = 3_600_000_000
AT = 20_000 * 24
"""An hour, at midnight."""
QUEUE = ("000000000000", "us-east-1", "q")
NAMED = dict(zip(("account", "region", "queue"), QUEUE, strict=True))


def period(random: Any, first: int, count: int, twice: Any) -> list[dict[str, Any]]:
    """Hours with about 60 messages each; `twice` gives the share that is done again at an hour of the day."""
    rows = []
    for hour in range(first, first + count):
        messages = 1 + random.poisson(60 * (1 + 0.8 * np.sin(hour / 24 * 2 * np.pi)))
        crashes = random.poisson(messages * 0.01)
        rows.append(NAMED | {
            "type": None, "hour": hour, "messages": float(messages), "crashes": float(crashes), "extensions": 0.0,
            "redone": float(random.poisson(messages * twice(hour % 24))), "crash_span_s": crashes * 30.0,
            "work_s": messages * 10.0, "work_squares": messages * 150.0,
        })  # fmt: skip
    return rows


def change(at: int = AT, what: str = "suggested") -> dict[str, Any]:
    return NAMED | {"at": at * HOUR_US, "what": what, "in_force": True, "made": 5, "why": "it was planned"}


def verdict(seed: int, before: Any, after: Any, *, days: int = 3, happened: Any = None) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    rows = [*period(random, AT - 24 * days, 24 * days, before), *period(random, AT + 1, 48, after)]
    return compared(pd.DataFrame(rows), pd.DataFrame(happened or [change()]))


@for_each(("factor", "said"), [(3.0, "worse"), (0.2, "better")])
def test_a_large_difference_is_told(factor: float, said: str) -> None:
    found = verdict(1, lambda hour: 0.03, lambda hour: 0.03 * factor)
    assert found["verdict"] == said
    assert found["change_low"] <= found["change"] <= found["change_high"]
    assert found["change"] == pytest.approx(120 * 0.03 * (factor - 1), rel=0.25)
    assert is_worse(found) == (said == "worse")


def test_chance_takes_no_plan_back() -> None:
    found = [verdict(seed, lambda hour: 0.03, lambda hour: 0.03)["verdict"] for seed in range(60)]
    assert found.count("worse") <= 1
    assert found.count("no difference") >= 50


def test_hours_are_compared_with_the_same_hours() -> None:
    """Here nights are ten times as bad as days; after the change there was a night alone."""
    random = np.random.default_rng(2)
    by_day = lambda hour: 0.1 if hour < 12 else 0.01  # noqa: E731
    rows = [
        *period(random, AT - 72, 72, by_day),
        *period(random, AT + 1, 11, by_day),
        *period(random, AT + 24, 1, by_day),
    ]
    found = compared(pd.DataFrame(rows), pd.DataFrame([change()]))
    assert (found["hours"], found["verdict"]) == (12, "no difference")


def test_the_change_before_ends_the_comparison() -> None:
    """What was before it was under another plan; two hours are too few."""
    found = verdict(1, lambda hour: 0.03, lambda hour: 0.1, happened=[change(AT - 3), change()])
    assert (found["hours"], found["verdict"]) == (2, "too few")
    assert not is_worse(found)


def test_a_plan_that_came_by_a_revert_is_not_taken_back() -> None:
    found = verdict(1, lambda hour: 0.03, lambda hour: 0.1, happened=[change(what="reverted")])
    assert found["verdict"] == "worse"
    assert not is_worse(found)


def test_hours_and_changes_come_from_events(spark: Any) -> None:
    applied = {"plan": "suggested", "applied": {"lease_us": 9, "made": 77, "why": "40 attempts"}}
    late = [
        received(7_300, sequence=2, lease=5),
        event("delete_refused", 7_310, sequence=2, detail={"reason": "stale"}),
    ]
    events = [
        received(10), event("deleted", 30), *late, received(7_306, attempt=2, sequence=2),
        event("deleted", 7_320, 2, sequence=2),
        event("queue_changed", 7_400, 0, sequence=None, detail=applied),
        event("queue_changed", 7_500, 0, sequence=None, detail={"plan": "suggested", "suggested": {"lease_us": 9}}),
        event("queue_changed", 7_600, 0, sequence=None, detail={"plan": "reverted", "applied": None, "why": "slow"}),
    ]  # fmt: skip
    table = frame(spark, table_of(sorted(events, key=lambda each: each["at"])))
    by_hour, changed = hours(attempts(table)), changes(table)
    rows = {row.hour: row for row in by_hour.collect()}
    assert (rows[0].messages, rows[0].work_s, rows[2].messages, rows[2].redone) == (1, 20, 1, 1)
    told = [(row.what, row.in_force, row.made, row.why) for row in changed.orderBy("at").collect()]
    assert told == [("suggested", True, 77, "40 attempts"), ("reverted", False, None, "slow")]
    (row,) = helped(by_hour, changed).collect()
    assert (row.what, row.verdict, row.changed) == ("reverted", "too few", 7_600_000_000)


def test_the_server_takes_the_plan_back_once_and_says_why(veilmq_server: LocalServer) -> None:
    token = (veilmq_server.process.data / "admin-token").read_text().strip()
    where = f"{veilmq_server.admin_url}/api/v1/queues/{'/'.join(QUEUE)}"

    def ask(method: str, members: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        body = None if members is None else json.dumps(members).encode()
        with urllib.request.urlopen(urllib.request.Request(where, body, headers, method=method), timeout=30) as answer:
            return json.load(answer)

    with veilmq_server.connect("q"):
        ask("PATCH", {"adaptive": "apply"})
        plan = {"lease_us": 90_000_000, "by_type": {}, "floor_us": 0, "why": ""}
        assert publish({QUEUE: plan}, veilmq_server.admin_url, token) == {QUEUE: "applied"}
        made = ask("GET")["plan"]["applied"]["made"]
        history = ServerHistory(veilmq_server.admin_url, token)
        start = history.bounds()[1]
        why = reason(verdict(1, lambda hour: 0.03, lambda hour: 0.1))
        for _ in range(2):
            assert take_back({QUEUE: (made, why)}, veilmq_server.admin_url, token) == {QUEUE: "taken back"}
        assert ask("GET")["plan"]["applied"] is None
        assert publish({QUEUE: plan}, veilmq_server.admin_url, token) == {QUEUE: "suggested"}
        details = [
            each for batch in history.read(start, history.bounds()[1]) for each in batch.column("detail").to_pylist()
        ]
    reverted = [json.loads(each) for each in details if each and '"reverted"' in each and "why" in json.loads(each)]
    assert [each["why"] for each in reverted] == [why]
    assert why.startswith("it got worse: a message cost ")
