"""The time machine: at every instant the history gives what the store said then, and between two what changed."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.admin import past
from veilmq.admin.api import Refused
from veilmq.admin.api.inputs import STATES
from veilmq.admin.past import PastInput, past_page
from veilmq.model.commands import StartMove
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Extras, Failure, Report, Reported
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store.sqlite.batch import history_index
from veilmq.testing import chance

QUEUES = [QueueKey(ACCOUNT, REGION, name) for name in ("orders", "dead", "line.fifo", "tenants")]
ORDERS, DEAD, LINE, TENANTS = QUEUES
RETRY = Report(Reported.RETRY, Failure("Timeout", "no answer"))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    playing = Stage(SqliteFactory(tmp_path / "data"))
    yield playing
    playing.store.close()


def at(stage: Stage, instant: int, queue: QueueKey = ORDERS, **wanted: Any) -> dict[str, Any]:
    """The queue as it was at that instant."""
    return past_page(stage.store.reader, queue, PastInput(at=instant, **{"limit": 1_000} | wanted), stage.now)


def said(stage: Stage) -> dict[QueueKey, dict[int, Any]]:
    """What the store says now of each message of each queue, with what time alone has ended."""
    found: dict[QueueKey, dict[int, Any]] = {}
    state = stage.state().at(stage.now)
    for queue in state.queues.values():
        found[QueueKey(queue["account"], queue["region"], queue["name"])] = {}
    for message in state.messages.values():
        queue = state.queues[message["incarnation"]]
        due, name = message.get("due") or 0, message["state"]
        if (message.get("expires") or due + 1) <= stage.now and name != "quarantined":
            continue
        name = "visible" if name == "in flight" and due <= stage.now else name
        told: dict[str, Any] = {"state": name, "id": message["id"], "expires": message.get("expires")}
        told |= {each: message.get(each) for each in ("sent", "group", "type", "body_bytes", "priority")}
        if name != "quarantined":
            told |= {"receive_count": message["receive_count"], "first_received": message.get("first_received")}
        if name in {"in flight", "delayed"}:
            told["due"] = due
        key = QueueKey(queue["account"], queue["region"], queue["name"])
        found[key][message["sequence"]] = told
    return found


def compared(message: dict[str, Any]) -> dict[str, Any]:
    """What `said` says of a message."""
    left_out = {"granted", "holder", "sequence", "before", "events"}
    if message["state"] == "quarantined":
        left_out |= {"receive_count", "first_received"}
    return {name: value for name, value in message.items() if name not in left_out}


class Life:
    """What clients and operators do, by chance."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage, self.dice = stage, chance(seed)
        self.held: list[tuple[QueueKey, str]] = []
        stage.create("dead", retention_us=HOUR_US)
        self.make()
        stage.create(LINE.name, content_deduplication=False, retention_us=HOUR_US)
        stage.create("tenants", retention_us=HOUR_US)

    def make(self) -> None:
        redrive = RedrivePolicy(DEAD, 2)
        self.stage.create("orders", visibility_timeout_us=20 * SECOND_US, retention_us=10 * MINUTE_US, redrive=redrive)

    def step(self) -> None:
        stage, dice = self.stage, self.dice
        queue = dice.choice([ORDERS, ORDERS, LINE, TENANTS, DEAD])
        acts = [self.send, self.send, self.send, self.receive, self.receive, self.use, self.use, self.use, self.rarely]
        dice.choice(acts)(queue)
        if dice.random() < 0.3:
            stage.sweep_once()
        stage.later(dice.choice([1, 1, SECOND_US, 7 * SECOND_US, 40 * SECOND_US]))

    def send(self, queue: QueueKey) -> None:
        dice, fields = self.dice, dict[str, Any]()
        for _ in range(dice.randint(1, 4)):
            if queue in (LINE, TENANTS):
                fields["extras"] = Extras(group=dice.choice("abc"), deduplication_id=str(dice.random()), type="t")
            elif dice.random() < 0.4:
                fields["delay_us"] = dice.choice([5 * SECOND_US, MINUTE_US])
            if dice.random() < 0.2:
                fields["ttl_us"] = dice.choice([5 * SECOND_US, MINUTE_US])
            if queue == ORDERS and dice.random() < 0.2:
                fields["priority"] = 1
            self.stage.send(queue, "x" * dice.randint(1, 9), **fields)

    def receive(self, queue: QueueKey) -> None:
        lease_us = self.dice.choice([SECOND_US, 15 * SECOND_US, MINUTE_US])
        found = self.stage.receive(queue, self.dice.randint(1, 5), lease_us=lease_us)
        self.held += [(queue, each.handle) for each in found]

    def use(self, _: QueueKey) -> None:
        stage, dice = self.stage, self.dice
        if not self.held:
            return
        queue, handle = dice.choice(self.held)
        match dice.randint(0, 6):
            case 0:
                stage.extend(queue, handle, MINUTE_US)
            case 1:
                stage.extend(queue, handle, SECOND_US)
            case 2:
                stage.extend(queue, handle, 0)
            case 3:
                stage.extend(queue, handle, dice.choice([0, 20 * SECOND_US]), report=RETRY)
            case 4:
                stage.extend(queue, handle, 10 * SECOND_US, body="other", md5=b"0" * 16, size_bytes=5)
            case _:
                stage.delete(queue, handle)

    def rarely(self, queue: QueueKey) -> None:
        stage, dice = self.stage, self.dice
        match dice.randint(0, 7):
            case 0:
                stage.purge(queue)
            case 1:
                stage.drop(ORDERS)
                stage.later(1)
                self.make()
            case 2:
                stage.change(LINE, delay_us=dice.choice([0, 5 * SECOND_US, 50 * SECOND_US]))
            case 3:
                stage.change(queue, retention_us=dice.choice([MINUTE_US, HOUR_US]))
            case 4:
                stage.do(StartMove(queue=DEAD, origin=TESTER, destination=ORDERS))
                stage.sweep()
            case _:
                pass


@pytest.mark.parametrize("seed", range(3))
def test_at_every_instant_it_is_what_the_store_said_then(stage: Stage, seed: int) -> None:
    life, told = Life(stage, seed), dict[int, dict[QueueKey, dict[int, Any]]]()
    for _ in range(150):
        life.step()
        told[stage.now] = said(stage)
        stage.later(1)
    stage.sweep_expired()
    met = Counter[str]()
    for instant, queues in told.items():
        queue = life.dice.choice(QUEUES)
        found = at(stage, instant, queue)
        messages = {each["sequence"]: compared(each) for each in found["messages"]}
        assert messages == queues[queue], (instant, queue)
        met.update(each["state"] for each in messages.values())
        assert (found["at"], found["complete"], found["after"]) == (instant, True, None)
    assert min(met[state] for state in ("visible", "delayed", "in flight")) > 5, met
    for _ in range(60):
        _compare_two(stage, life, told)


def _compare_two(stage: Stage, life: Life, told: dict[int, dict[QueueKey, dict[int, Any]]]) -> None:
    first, second = sorted(life.dice.sample(list(told), 2))
    queue = life.dice.choice([DEAD, LINE, TENANTS])
    before, later = told[first][queue], told[second][queue]
    found = at(stage, first, queue, until=second)
    for name, states in (("then", before), ("later", later)):
        counts = Counter(each["state"] for each in states.values())
        expected = {state.replace(" ", "_"): counts[state] for state in STATES}
        assert {each: found[name][each] for each in expected} == expected, (first, second, queue)
    touched = {each["sequence"]: each for each in found["messages"]}
    for sequence in before.keys() | later.keys():
        was, is_ = (states[sequence]["state"] if sequence in states else None for states in (before, later))
        if sequence in touched:
            each = touched[sequence]
            assert each["before"] == was, (first, second, sequence)
            assert is_ in {each["state"], None}, (first, second, sequence)
            assert each["events"]
        else:
            assert was == is_, (first, second, sequence)
    new = [each for each in touched.values() if each["events"].keys() & {"sent", "arrived"}]
    assert len(new) == found["changes"].get("sent", 0) + found["changes"].get("arrived", 0)
    back = [each for each in touched.values() if each["before"] is None and each not in new]
    if any(each["state"] != "purged" for each in back):
        assert "queue_changed" in found["changes"], "a longer retention brings back what no sweep had taken"
    left = [each for each in touched.values() if each["state"] not in STATES]
    gone = ("deleted", "expired", "purged", "dead_lettered", "moved", "queue_deleted")
    assert len(left) == sum(found["changes"].get(each, 0) for each in gone), found["changes"]


def test_it_begins_at_a_snapshot_and_says_what_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_index, "BLOCK_EVENTS", 16)
    options = msgspec.structs.replace(SMALL, history_bytes_max=12_000)
    stage = Stage(SqliteFactory(tmp_path / "data", options))
    stage.create()
    jobs, told = QueueKey(ACCOUNT, REGION, "jobs"), {}
    first, snapshots, number = 0, [], 0
    while first == 0 or len(snapshots) < 2:  # the older one is found by the index
        number += 1
        assert number < 500
        stage.send(jobs, "x" * (number % 50))
        if number % 10:
            stage.delete(jobs, stage.take(jobs, lease_us=MINUTE_US).handle)
        told[stage.now] = said(stage)[jobs]
        stage.later(SECOND_US)
        stage.sweep()
        with stage.store.reader.look() as view:
            first, _ = view.bounds()
            snapshots = view.snapshots()
    covered = snapshots[0][1]
    for instant, messages in told.items():
        if instant < covered:
            with pytest.raises(Refused) as refusal:
                at(stage, instant, jobs)
            assert (refusal.value.status, refusal.value.data) == (410, {"since": covered})
        else:
            found = at(stage, instant, jobs)
            assert {each["sequence"]: compared(each) for each in found["messages"]} == messages, instant
            assert found["covers_from"] == covered
    assert covered < snapshots[1][1]
    stage.store.close()


def test_what_time_ended_does_not_wait_for_a_sweep(stage: Stage) -> None:
    queue = stage.create(visibility_timeout_us=10 * SECOND_US)
    stage.send(queue, "leased")
    stage.take(queue)
    stage.send(queue, "delayed", delay_us=10 * SECOND_US)
    stage.send(queue, "expires", ttl_us=10 * SECOND_US)
    start = stage.now
    stage.later(10 * SECOND_US)
    stage.do(StartMove(queue=queue, origin=TESTER, destination=queue))  # refused; but it is later now
    answers = []
    for _ in range(2):
        answers.append([at(stage, start + after, queue) for after in (10 * SECOND_US - 1, 10 * SECOND_US)])
        two = at(stage, start, queue, until=start + 10 * SECOND_US)
        assert two["changes"] == {"expired": 1, "lease_expired": 1}
        assert [each["events"] for each in two["messages"]] == [{"lease_expired": 1}, {"delay_over": 1}, {"expired": 1}]
        assert two["became"] == {"visible": 2, "expired": 1}
        stage.later(SECOND_US)
        stage.sweep_expired()
        assert at(stage, start + 10 * SECOND_US, queue, until=stage.now)["changes"] == {}
    before, after = answers[0]
    assert [each["state"] for each in before["messages"]] == ["in flight", "delayed", "visible"]
    assert [each["state"] for each in after["messages"]] == ["visible", "visible"]
    assert [page["then"] for page in answers[1]] == [page["then"] for page in answers[0]]
    holder = before["messages"][0]["holder"]
    assert (holder["protocol"], holder["principal"], holder["client"]) == ("sqs", "tester", "contract")


def test_it_comes_by_page_and_by_state(stage: Stage) -> None:
    queue = stage.create()
    for number in range(7):
        stage.send(queue, str(number), delay_us=MINUTE_US if number % 2 else 0)
    seen, after = [], ""
    while after is not None:
        page = at(stage, stage.now, queue, limit=2, after=after)
        seen += [each["sequence"] for each in page["messages"]]
        after = page["after"]
    assert len(seen) == len(set(seen)) == 7
    delayed = at(stage, stage.now, queue, state="delayed")
    assert {each["state"] for each in delayed["messages"]} == {"delayed"}
    assert delayed["then"] == {"visible": 4, "delayed": 3, "in_flight": 0, "quarantined": 0, "oldest_sent": stage.now}
    stage.take(queue)
    for state in ("in flight", "in_flight"):
        (taken,) = at(stage, stage.now, queue, state=state)["messages"]
        assert taken["state"] == "in flight"


def test_a_bound_stops_it_and_it_says_at_which_instant(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = stage.create()
    instants = []
    for number in range(20):
        stage.send(queue, str(number))
        instants.append(stage.now)
        stage.later(SECOND_US)
    stopped = at(stage, instants[-1], queue, scan=5)
    assert (stopped["complete"], stopped["at"], stopped["then"]["visible"]) == (False, instants[3], 4)
    assert stopped["asked"] == {"at": instants[-1], "until": None}
    stopped = at(stage, instants[1], queue, until=instants[-1], scan=5)
    assert (stopped["complete"], stopped["until"], stopped["changes"]) == (False, instants[3], {"sent": 2})
    stopped = at(stage, instants[10], queue, until=instants[-1], scan=5)
    assert (stopped["at"], stopped["until"], stopped["changes"]) == (instants[3], None, None)
    monkeypatch.setattr(past, "MESSAGES_MAX", 10)
    assert at(stage, instants[-1], queue)["at"] == instants[9]


def test_a_name_has_had_several_queues(stage: Stage) -> None:
    before = stage.now
    stage.later(1)
    queue = stage.create("orders")
    stage.send(queue, "of the first")
    first = stage.now
    stage.later(SECOND_US)
    stage.drop(queue)
    between = stage.now
    stage.later(SECOND_US)
    stage.create("orders")
    assert at(stage, first)["then"]["visible"] == 1
    assert at(stage, stage.now)["then"]["visible"] == 0
    assert at(stage, first, until=between)["became"] == {"deleted with its queue": 1}
    for instant in (before, between):
        with pytest.raises(QueueMissing):
            at(stage, instant)
    assert at(stage, first - stage.now, until=0)["asked"] == {"at": first, "until": stage.now}
    for instant, until in ((stage.now + 1, None), (stage.now, stage.now - 1), (-stage.now - 1, None), (-5, 1)):
        with pytest.raises(ParameterInvalid):
            at(stage, instant, until=until)


def test_over_http_it_needs_the_grant_of_the_events(http: httpx.Client) -> None:
    path = "/api/v1/queues/000000000000/us-east-1/orders"
    http.put(path)
    http.post(f"{path}/messages", json={"messages": [{"body": "a"}]})
    now = http.get("/api/v1/queues").json()
    assert now["queues"]
    events = [line for line in http.get("/api/v1/events").text.splitlines() if '"kind":"sent"' in line]
    sent = msgspec.json.decode(events[0])["at"]
    found = http.get(f"{path}/past", params={"at": sent})
    assert found.status_code == 200, found.text
    assert found.json()["then"]["visible"] == 1
    assert http.get(f"{path}/past", params={"at": 1}).status_code == 404
    assert http.get(f"{path}/past", params={"at": sent, "state": "gone"}).status_code == 400
