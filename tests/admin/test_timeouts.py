"""/api/v1/queues/.../timeout: what a real store's leases say about a queue's timeout, under a manual clock."""

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import log
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.admin.server import OPTIONS, TOKEN, Keys, got, running
from tests.support.contract.stage import TESTER, Stage, sending
from tests.support.sqlite import SqliteFactory

from veilmq import testing
from veilmq.admin import timeouts
from veilmq.admin.timeouts import Granted, cache, read
from veilmq.admin.timeouts.cache import COSTLY_EVENTS, KEPT_MAX, KEPT_US, _is_too_short
from veilmq.estimate import Ended, Estimate
from veilmq.model.commands import AfterExpiry, Delete, LeaseSource, StartJob, Undeliver
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Report, Reported, failure_of
from veilmq.model.moves import Act
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.testing.for_each import for_each

QUEUES = "/api/v1/queues/000000000000/us-east-1"
JOBS = f"{QUEUES}/jobs"
QUEUE = QueueKey("000000000000", "us-east-1", "jobs")
LEASE_S = 30
MEDIAN_S = 20.0


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    stage.create("jobs", visibility_timeout_us=LEASE_S * SECOND_US)
    yield stage
    stage.store.close()


def found(stage: Stage, name: str = "jobs") -> list[Granted]:
    (queue,) = [each for key, each in stage.store.reader.queues.items() if key.name == name]
    with stage.store.reader.look() as view:
        return read(view, queue.incarnation, stage.now).leases


def work(stage: Stage, law: str, messages: int, seed: int) -> None:
    """Messages with lognormal work, a worker for each; one in twenty crashes. Who is late deletes all the same. What
    was received three times is a dead letter."""
    chance = testing.chance(seed)
    own = {stage.send(QUEUE, str(number)).id: chance.lognormvariate(log(MEDIAN_S), 0.7) for number in range(messages)}
    ends: list[tuple[int, int, str]] = []
    for tick in range(1_000):
        for each in stage.receive(QUEUE, 10):
            length = own[each.id] if law == "message" else chance.lognormvariate(log(MEDIAN_S), 0.7)
            if chance.random() > 0.05:
                heappush(ends, (stage.now + round(length * SECOND_US), tick, each.handle))
        if not ends and stage.counts(QUEUE)[2] == 0:
            return
        while ends and ends[0][0] <= stage.now:
            stage.delete(QUEUE, heappop(ends)[2])
        stage.later(SECOND_US)
    raise AssertionError("it never ends")


@for_each("law", ["message", "attempt"])
def test_the_truth_is_found_in_a_real_history(tmp_path: Path, law: str) -> None:
    stage = Stage(SqliteFactory(tmp_path / law))
    redrive = RedrivePolicy(stage.create("dead"), 3)
    stage.create("jobs", visibility_timeout_us=LEASE_S * SECOND_US, redrive=redrive)
    work(stage, law, 150, seed=5)
    leases = found(stage)
    estimate = Estimate([each.lease for each in leases])
    stage.store.close()
    assert estimate.messages == 150
    assert {each.source for each in leases} == {LeaseSource.QUEUE}
    assert estimate.reading == "crashes"
    assert estimate.law.longer is (law == "message")
    median = estimate.quantiles["p50"]
    assert median.low is not None
    assert median.high is not None
    assert median.low <= MEDIAN_S + 1, "a delete comes up to a second late"
    assert median.high >= MEDIAN_S
    if law == "message":
        assert (estimate.law.by_attempt.low or 0) > MEDIAN_S + 1, "what counting each lease would say"


def give_back(stage: Stage, handle: str, reason: str) -> None:
    report = Report(Reported.RETRY, failure_of(reason, "", ""))
    stage.extend(QUEUE, handle, 3_600 * SECOND_US, report=report)


def run_out(stage: Stage, seconds: int = 40) -> Stage:
    stage.later(seconds * SECOND_US)
    assert stage.counts(QUEUE)[2] == 0
    return stage


def granted_again(stage: Stage) -> Stage:
    run_out(stage).take(QUEUE)
    return stage


def extended(stage: Stage, handle: str, seconds: int) -> Stage:
    stage.extend(QUEUE, handle, seconds * SECOND_US)
    return stage


def purged(stage: Stage) -> None:
    stage.purge(QUEUE)
    stage.later(3_600 * SECOND_US)


def resumed(stage: Stage, handle: str) -> None:
    run_out(stage).extend(QUEUE, handle, 60 * SECOND_US, after_expiry=AfterExpiry.ALLOW)
    stage.later(10 * SECOND_US)
    stage.delete(QUEUE, handle)


def undelivered(stage: Stage, handle: str) -> None:
    stage.do(Undeliver(queue=QUEUE, origin=TESTER, handles=[handle]))


def by_job(stage: Stage, act: Act) -> None:
    stage.do(StartJob(queue=QUEUE, origin=TESTER, act=act))
    stage.later(20 * SECOND_US)
    stage.sweep()


def by_retention(stage: Stage) -> None:
    stage.change(QUEUE, retention_us=MINUTE_US)
    stage.later(MINUTE_US)
    stage.sweep_expired()


ENDS: dict[str, tuple[Callable[[Stage, str], object], tuple[Ended, float, float, bool] | None]] = {
    "deleted": (lambda stage, handle: stage.delete(QUEUE, handle), (Ended.DONE, 7, 30, False)),
    "failed": (lambda stage, handle: give_back(stage, handle, "raised"), (Ended.DONE, 7, 30, False)),
    "not begun": (lambda stage, handle: give_back(stage, handle, "busy"), (Ended.UNWORKED, 0, 30, False)),
    "stopped": (lambda stage, handle: give_back(stage, handle, "released"), (Ended.STOPPED, 7, 30, False)),
    "released": (lambda stage, handle: extended(stage, handle, 0), (Ended.STOPPED, 7, 30, False)),
    "undelivered": (undelivered, (Ended.UNWORKED, 0, 30, False)),
    "open": (lambda stage, handle: None, (Ended.OPEN, 7, 30, False)),
    "purged": (lambda stage, handle: purged(stage), None),
    "ran out": (lambda stage, handle: run_out(stage), (Ended.SILENT, 0, 30, False)),
    "extended, then ran out": (
        lambda stage, handle: run_out(extended(stage, handle, 60), 90), (Ended.SILENT, 7, 67, False),
    ),
    "deleted late": (lambda stage, handle: run_out(stage).delete(QUEUE, handle), (Ended.DONE, 47, 30, True)),
    "deleted too late": (
        lambda stage, handle: granted_again(stage).delete(QUEUE, handle), (Ended.DONE, 47, 30, True),
    ),
    "extended too late": (
        lambda stage, handle: extended(granted_again(stage), handle, 60), (Ended.STOPPED, 47, 30, True),
    ),
    "resumed": (resumed, (Ended.DONE, 57, 107, False)),
    "given back by a job": (lambda stage, handle: by_job(stage, Act.RELEASE), (Ended.STOPPED, 0, 30, False)),
    "extended, then given back by a job": (
        lambda stage, handle: by_job(extended(stage, handle, 60), Act.RELEASE), (Ended.STOPPED, 7, 67, False),
    ),
    "ran out, then deleted by a job": (
        lambda stage, handle: by_job(run_out(stage), Act.DELETE), (Ended.SILENT, 0, 30, False),
    ),
    "its retention was over": (
        lambda stage, handle: by_retention(extended(stage, handle, 600)), (Ended.STOPPED, 7, 607, False),
    ),
    "ran out, then its retention was over": (
        lambda stage, handle: by_retention(run_out(stage)), (Ended.SILENT, 0, 30, False),
    ),
    "shortened": (lambda stage, handle: run_out(extended(stage, handle, 5), 10), (Ended.STOPPED, 7, 12, False)),
}  # fmt: skip


def test_who_only_looks_is_no_worker(stage: Stage) -> None:
    """SQS has no peek: its clients receive for 0 s. One of them deletes what it sees."""
    for _ in range(3):
        stage.send(QUEUE)
    looks = [stage.take(QUEUE, lease_us=0) for _ in range(3)]
    stage.delete(QUEUE, looks[0].handle)
    stage.later(SECOND_US)
    works = [stage.take(QUEUE) for _ in range(2)]
    stage.later(7 * SECOND_US)
    for each in works:
        stage.delete(QUEUE, each.handle)
    leases = found(stage)
    ended = Counter((each.lease_us // SECOND_US, each.lease.ended) for each in leases)
    assert ended == {(0, Ended.DONE): 1, (0, Ended.UNWORKED): 2, (LEASE_S, Ended.DONE): 2}
    estimate = Estimate([each.lease for each in leases])
    assert (estimate.messages, estimate.finished, estimate.silent) == (3, 3, 0)
    assert timeouts.in_force(leases, LEASE_S * SECOND_US).lease_us == LEASE_S * SECOND_US


@for_each("what", ENDS)
def test_how_a_lease_ended(tmp_path: Path, what: str) -> None:
    """After 7 s of a lease of 30 s."""
    act, expected = ENDS[what]
    stage = Stage(SqliteFactory(tmp_path / what.replace(" ", "-")))
    stage.create("jobs", visibility_timeout_us=LEASE_S * SECOND_US)
    stage.send(QUEUE)
    handle = stage.take(QUEUE).handle
    stage.later(7 * SECOND_US)
    act(stage, handle)
    firsts = [each.lease for each in found(stage) if each.lease.attempt == 1]
    stage.store.close()
    assert [(each.ended, each.alive_s, each.until_s, each.late) for each in firsts] == ([expected] if expected else [])


def test_blocks_and_rows_do_not_matter(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lease is read once, whatever other queues do meanwhile and wherever a block ends."""
    other = stage.create("other")
    for _ in range(10):
        stage.batch([sending(queue, "x") for queue in (QUEUE, other) * 3])
        taken, _ = stage.receive(QUEUE, 3), stage.receive(other, 3)
        stage.later(SECOND_US)
        stage.batch([Delete(queue=QUEUE, origin=TESTER, handle=each.handle, arrived=stage.now) for each in taken])
    whole = found(stage)
    assert [each.lease.alive_s for each in whole] == [1.0] * 30
    assert all(each.lease.ended is Ended.OPEN for each in found(stage, "other"))
    for block in (1, 7, 64):
        monkeypatch.setattr(timeouts, "_BLOCK", block)
        assert found(stage) == whole
    monkeypatch.setattr(timeouts, "EVENTS_MAX", 60)
    assert 0 < len(found(stage)) < 30
    monkeypatch.undo()
    monkeypatch.setattr(timeouts, "_BLOCK", 12)
    monkeypatch.setattr(timeouts, "MESSAGES_ENOUGH", 3)
    assert 3 <= len(found(stage)) <= 6
    monkeypatch.undo()
    stage.later(timeouts.BACK_US_MAX + SECOND_US)
    stage.send(QUEUE, "today")
    assert found(stage) == [], "what was a day ago says nothing about today"


def live(
    http: httpx.Client, lengths_s: list[int], lease_us: int | None = None, queue: str = JOBS, **members: Any
) -> None:
    """All messages are received at once, and each is deleted after so long. 30 s is the lease; who is late deletes all
    the same."""
    http.post(queue + "/messages", json={"messages": [{"body": "x"} | members for _ in lengths_s]})
    taken = http.post(queue + "/receive", json={"count": len(lengths_s), "lease_us": lease_us}).json()["messages"]
    handles, past = [each["handle"] for each in taken], 0
    for length in sorted(set(lengths_s)):
        http.post("/api/v1/clock", json={"advance_us": (length - past) * SECOND_US})
        done = [handle for handle, each in zip(handles, lengths_s, strict=True) if each == length]
        assert http.post(queue + "/delete", json={"handles": done}).status_code == 200
        past = length


def test_the_answer(http: httpx.Client) -> None:
    assert http.get(JOBS + "/timeout").status_code == 404
    assert http.put(JOBS, json={"visibility_timeout_us": LEASE_S * SECOND_US}).status_code == 201
    nothing = got(http, JOBS + "/timeout")
    assert (nothing["advice"], nothing["recommended_us"], nothing["curve"]) == ("too_few", None, [])
    live(http, [5, 10, 15, 20] * 8, type="short")
    good = got(http, JOBS + "/timeout")
    assert good["advice"] == "keep"
    assert good["today"]["duplicates"]["value"] == 0
    assert good["work_us"]["p50"]["value"] == pytest.approx(10 * SECOND_US, rel=0.1)
    live(http, [50] * 8, type="long")
    told = got(http, JOBS + "/timeout", timeout_us=60 * SECOND_US)
    assert (told["advice"], told["messages"], told["finished"]) == ("raise", 40, 40)
    assert told["today"]["timeout_us"] == LEASE_S * SECOND_US
    assert told["today"]["duplicates"]["value"] == pytest.approx(0.2)
    low, high = told["today"]["duplicates"]["low"], told["today"]["duplicates"]["high"]
    assert low < 0.2 < high
    assert told["recommended_us"] == 90 * SECOND_US
    assert "20 % of the messages are started again" in told["why"]
    assert told["asked"]["timeout_us"] == 60 * SECOND_US
    assert told["asked"]["duplicates"]["value"] == 0
    assert told["asked"]["recovery_us"] > told["today"]["recovery_us"]
    assert told["leases"] == {
        "ended": 40, "ran_out": 8, "extended": 0, "by": {"queue": 40, "receive": 0, "plan": 0}, "of_today": 40,
        "of_today_ran_out": 8, "overdue": 0,
    }  # fmt: skip
    assert [each["duplicates"]["value"] for each in told["curve"]] == sorted(
        (each["duplicates"]["value"] for each in told["curve"]), reverse=True
    )
    assert [(each["type"], each["messages"]) for each in told["types"]] == [("short", 32), ("long", 8)]
    assert told["types"][0]["recommended_us"] == 30 * SECOND_US
    http.patch(JOBS, json={"visibility_timeout_us": 3_600 * SECOND_US})
    lower = got(http, JOBS + "/timeout")
    assert lower["advice"] == "lower"
    assert "a plan" not in lower["why"]
    assert lower["in_force"] == lower["today"] | {"by": "queue"}
    assert lower["change_us"] == lower["recommended_us"]
    live(http, [5, 20] * 25, lease_us=LEASE_S * SECOND_US)
    named = got(http, JOBS + "/timeout")
    assert named["leases"]["by"] == {"queue": 40, "receive": 50, "plan": 0}
    assert (named["today"]["timeout_us"], named["in_force"]["timeout_us"]) == (3_600 * SECOND_US, LEASE_S * SECOND_US)
    assert (named["in_force"]["by"], named["change_us"]) == ("receive", named["recommended_us"])
    assert "% of the messages are started again while their worker still works under 30 s" in named["why"]
    assert "56 % of the leases were as long as their receive asked for: change it there" in named["why"]
    assert "The queue's own timeout of 1 h has no effect" in named["why"]
    assert http.get(JOBS + "/timeout", params={"timeout_us": -1}).json()["field"] == "timeout_us"


def test_what_nobody_saw_is_not_recommended(http: httpx.Client) -> None:
    http.put(JOBS, json={"visibility_timeout_us": LEASE_S * SECOND_US})
    live(http, [5, 25] * 16)
    http.post(JOBS + "/messages", json={"messages": [{"body": "x"}] * 8})
    http.post(JOBS + "/receive", json={"count": 8})
    http.post("/api/v1/clock", json={"advance_us": 2 * LEASE_S * SECOND_US})
    told = got(http, JOBS + "/timeout")
    assert told["silent_were"] == "unknown"
    assert (told["advice"], told["recommended_us"], told["at_least_us"]) == ("extend", None, 45 * SECOND_US)
    assert "8 leases ran out without a sign of a worker" in told["why"]
    assert told["work_us"]["p99"]["value"] is None
    assert told["extend"]["every_us"] < told["extend"]["lease_us"]
    above = [each for each in told["curve"] if not each["seen"]]
    assert above
    assert all(each["duplicates"]["low"] == 0 < each["duplicates"]["high"] for each in above)


def test_where_no_timeout_suffices_workers_have_to_extend(http: httpx.Client) -> None:
    """Eight messages are still at work after 20 h, longer than any timeout that people set."""
    http.put(JOBS, json={"visibility_timeout_us": LEASE_S * SECOND_US})
    live(http, [5, 25] * 16)
    (late,) = http.post(JOBS + "/messages", json={"messages": [{"body": "x"}]}).json()["messages"]
    taken = http.post(JOBS + "/receive", json={}).json()["messages"][0]["handle"]
    http.post("/api/v1/clock", json={"advance_us": 50 * SECOND_US})
    http.post(JOBS + "/delete", json={"handles": [taken]})
    http.post(JOBS + "/messages", json={"messages": [{"body": "x"}] * 8})
    http.post(JOBS + "/receive", json={"count": 8, "lease_us": 2 * DAY_US})
    http.post("/api/v1/clock", json={"advance_us": 20 * HOUR_US})
    told = got(http, JOBS + "/timeout")
    assert [told[name] for name in ("advice", "recommended_us", "at_least_us", "change_us")] == ["extend", *[None] * 3]
    assert "(20 h). Let workers extend their leases every " in told["why"]
    sentence = got(http, f"/api/v1/trace/{late['id']}")["story"]["sentence"]
    assert "Longest work seen: 50 s; leases of " in sentence


def test_where_work_is_too_long_for_any_timeout_workers_have_to_extend(http: httpx.Client) -> None:
    """All work was seen to its end, and an eighth of it takes ten hours."""
    http.put(JOBS, json={"visibility_timeout_us": LEASE_S * SECOND_US})
    live(http, [10_800] * 28 + [36_000] * 4, lease_us=DAY_US)
    told = got(http, JOBS + "/timeout")
    assert [told[name] for name in ("advice", "recommended_us", "at_least_us", "change_us")] == ["extend", *[None] * 3]
    assert told["why"].startswith("12 % of the messages take longer than 9 h 36 min: no timeout is long enough for ")


def test_a_timeout_is_too_short_also_where_none_suffices() -> None:
    duplicates = {"low": 0.9}
    page = {
        "in_force": {"timeout_us": LEASE_S * SECOND_US, "duplicates": duplicates}, "recommended_us": None,
        "at_least_us": None, "advice": "extend", "leases": {"ran_out": 60, "extended": 0, "ended": 60},
    }  # fmt: skip
    assert _is_too_short(page)
    duplicates["low"] = 0.0
    assert not _is_too_short(page)


def test_an_answer_that_was_costly_is_given_for_a_minute(http: httpx.Client) -> None:
    http.put(JOBS, json={"visibility_timeout_us": LEASE_S * SECOND_US})
    for _ in range(8):
        live(http, [0] * 100)
    first = got(http, JOBS + "/timeout")
    assert first["events"] >= COSTLY_EVENTS
    live(http, [50] * 40)
    assert got(http, JOBS + "/timeout") == first
    asked = got(http, JOBS + "/timeout", timeout_us=SECOND_US)
    assert (asked["messages"], asked["asked"]["timeout_us"]) == (840, SECOND_US), "what nobody asked before is made"
    again = got(http, JOBS + "/timeout")
    assert again == asked | {"asked": None}
    http.patch(JOBS, json={"visibility_timeout_us": 2 * LEASE_S * SECOND_US})
    changed = got(http, JOBS + "/timeout")
    assert changed["today"]["timeout_us"] == 2 * LEASE_S * SECOND_US
    live(http, [0] * 10)
    assert got(http, JOBS + "/timeout") == changed
    http.post("/api/v1/clock", json={"advance_us": KEPT_US})
    assert got(http, JOBS + "/timeout")["messages"] == 850


def test_answers_and_verdicts_that_are_kept_are_bounded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes: it is made anew when somebody asks."""
    monkeypatch.setattr(cache, "COSTLY_EVENTS", 0)
    monkeypatch.setattr(cache, "VERDICTS_MAX", KEPT_MAX + 2)
    for number in range(KEPT_MAX + 3):
        stage.create(f"other-{number}")
    known, queues = cache.Timeouts(stage.store.reader), list(stage.store.reader.queues.values())
    with stage.store.reader.look() as view:
        for queue in queues:
            known.page(view, queue, stage.now)
        assert len(known._verdicts) == KEPT_MAX + 2
        made = [known.page(view, queue, stage.now + 1)["at"] - stage.now for queue in reversed(queues)]
    assert made == [0] * KEPT_MAX + [1] * 4


def test_a_message_is_told_what_its_queue_is_told(http: httpx.Client) -> None:
    http.put(JOBS, json={"visibility_timeout_us": LEASE_S * SECOND_US})

    def told() -> str:
        (late,) = http.post(JOBS + "/messages", json={"messages": [{"body": "x"}]}).json()["messages"]
        taken = http.post(JOBS + "/receive", json={}).json()["messages"][0]["handle"]
        http.post("/api/v1/clock", json={"advance_us": 50 * SECOND_US})
        assert http.post(JOBS + "/delete", json={"handles": [taken]}).status_code == 200
        sentence: str = got(http, f"/api/v1/trace/{late['id']}")["story"]["sentence"]
        return sentence

    assert told().endswith("Longest work seen: 50 s; a lease of 60 s or extending every 15 s avoids this.")
    live(http, [5, 10, 15, 20] * 8 + [50] * 8)
    of_queue = got(http, JOBS + "/timeout")
    assert of_queue["recommended_us"] == 90 * SECOND_US
    assert "a lease of 90 s, the best timeout for all messages of jobs, or leases of " in told()


def wrong_ones(http: httpx.Client, far: str = QUEUES) -> None:
    """`short`, a fifth of whose messages take longer than the timeout; `asked`, whose messages all take longer than the
    lease that receives ask for, and none longer than the timeout; `long`, where the message of a crashed worker
    waits for hours; and `right`, in which leases ran out, too."""
    for name, timeout_s, lengths_s, lease_us in (
        ("short", LEASE_S, [5, 10, 15, 20] * 8 + [50] * 8, None), ("long", 43_200, [1, 2] * 20, None),
        ("right", 60, [5, 30] * 20, None), ("asked", 45, [3] * 40, 2 * SECOND_US),
    ):  # fmt: skip
        assert http.put(f"{far}/{name}", json={"visibility_timeout_us": timeout_s * SECOND_US}).status_code == 201
        live(http, lengths_s, lease_us, queue=f"{far}/{name}")
    for name in ("long", "right"):
        http.post(f"{far}/{name}/messages", json={"messages": [{"body": "crash"}]})
        http.post(f"{far}/{name}/receive", json={})
    http.post("/api/v1/clock", json={"advance_us": 600 * SECOND_US})


def test_timeouts_that_are_clearly_wrong(http: httpx.Client) -> None:
    wrong_ones(http)
    assert got(http, "/api/v1/timeouts") == {"at": None, "queues": []}, "the request waits for nothing"
    told = next(each for _ in range(1_000) if (each := got(http, "/api/v1/timeouts"))["at"] is not None)
    assert [(each["name"], each["wrong"]) for each in told["queues"]] == [
        ("short", "too_short"), ("asked", "too_short"), ("long", "too_long"),
    ]  # fmt: skip
    short, asked, long = told["queues"]
    assert (asked["timeout_us"], asked["lease_us"], asked["by"]) == (45 * SECOND_US, 2 * SECOND_US, "receive")
    assert asked["recommended_us"] == 5 * SECOND_US
    for each in (short, asked, long):
        of_queue = got(http, f"{QUEUES}/{each['name']}/timeout")
        for name in ("recommended_us", "at_least_us"):
            assert each[name] == of_queue[name]
    assert (short["timeout_us"], short["recommended_us"]) == (LEASE_S * SECOND_US, 90 * SECOND_US)
    assert short["why"].startswith("20 % of the messages are started again")
    assert (long["timeout_us"], long["at_least_us"]) == (43_200 * SECOND_US, 900 * SECOND_US)
    assert "1 message is held for longer than any work took" in long["why"]
    assert got(http, f"{QUEUES}/long/timeout")["leases"]["overdue"] == 1
    http.patch(f"{QUEUES}/short", json={"visibility_timeout_us": 90 * SECOND_US})
    for name in ("asked", "long"):
        http.delete(f"{QUEUES}/{name}")
    assert got(http, "/api/v1/timeouts")["queues"] == []
    assert got(http, "/api/v1/timeouts", look=True, account="*")["queues"] == []
    assert http.get("/api/v1/timeouts", params={"limit": 0}).status_code == 400


def test_wrong_timeouts_are_shown_to_who_may_describe_the_queue(tmp_path: Path) -> None:
    everything = (Grant(frozenset(Action)),)
    own = AccessKey("own", "secret", "000000000000", grants=everything)
    short = AccessKey("short", "secret", "000000000000", grants=(Grant(frozenset({Action.DESCRIBE_QUEUE}), ("s*",)),))
    other = AccessKey("other", "secret", "111111111111", grants=everything)
    sender = AccessKey("sender", "secret", "000000000000", grants=(Grant(frozenset({Action.SEND})),))
    with running(tmp_path / "data", options=OPTIONS) as server, httpx.Client(base_url=server.url) as http:
        http.headers["authorization"] = f"Bearer {TOKEN}"
        wrong_ones(http)
        server.keyring = Keys(own, short, other, sender)
        for key, names in ((own, ["short", "asked", "long"]), (short, ["short"]), (other, [])):
            found = http.get("/api/v1/timeouts", params={"look": True}, auth=(key.id, "secret")).json()["queues"]
            assert [each["name"] for each in found] == names, key.id
        assert http.get("/api/v1/timeouts", auth=("sender", "secret")).status_code == 403
        assert http.get("/api/v1/timeouts", params={"account": "*"}, auth=("own", "secret")).status_code == 403


def test_who_may_see_it(tmp_path: Path) -> None:
    reader = AccessKey("reader", "secret", "000000000000", grants=(Grant(frozenset({Action.DESCRIBE_QUEUE})),))
    sender = AccessKey("sender", "secret", "000000000000", grants=(Grant(frozenset({Action.SEND})),))
    with running(tmp_path / "data", Keys(reader, sender), options=OPTIONS) as server:
        for name, status in (("reader", 404), ("sender", 403)):
            assert httpx.get(f"{server.url}{JOBS}/timeout", auth=(name, "secret")).status_code == status
