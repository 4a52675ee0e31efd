"""audit: a true history has no findings; each way of falsifying one has.

An audit takes a second, whatever is in it: false histories are audited together, each as queues of its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.pipeline.histories_stage import Event, S, event, extended, frame, received, resumed, retried, sent, table_of
from tests.support.histories import Workload, history, lognormal

from veilmq.client.adapters.connect import connect
from veilmq.model.errors import VeilError
from veilmq.pipeline.errors import HistoryGap
from veilmq.pipeline.events.reading import ServerHistory
from veilmq.pipeline.jobs.audit import RULES, audit, known
from veilmq.testing import chance
from veilmq.testing.for_each import for_each
from veilmq.testing.local import ServerProcess

TRUE: list[Event] = [
    event("queue_created", 1, None, sequence=None),
    sent(10),
    sent(11, sequence=2),
    received(12),
    extended(30),
    received(31, sequence=2),
    event("lease_expired", 60),
    received(61, attempt=2, visible_since=60 * S),
    event("delete_refused", 62, detail={"reason": "stale"}),
    event("deleted", 63, attempt=2),
    event("released", 64, lease_us=0, sequence=2),
    received(65, attempt=2, sequence=2, visible_since=64 * S),
    event("lease_expired", 95, attempt=2, sequence=2),
    event("dead_lettered", 96, attempt=2, sequence=2, detail={"target": 2, "target_sequence": 3}),
    received(97, sequence=3, incarnation=2, queue="dead"),
    sent(98, sequence=4),
    sent(99, sequence=5),
    event("purged", 100, None, sequence=None, detail={"count": 2, "watermark": 5}),
]
"""Two messages, one of them dead-lettered, and two that are purged."""


def held(sequence: int, attempt: int, due: int) -> Event:
    """A message of a snapshot, under a lease."""
    return free(sequence, attempt) | {"state": "in flight", "rotation": 0, "due": due * S}


def free(sequence: int, attempt: int) -> Event:
    """A message of a snapshot, visible."""
    return {"sequence": sequence, "state": "visible", "receive_count": attempt}


def told(at: int, *messages: Event) -> Event:
    """A part of a snapshot."""
    return event("snapshot", at, None, sequence=None, detail={"part": "messages", "messages": list(messages)})


def edge(part: str, at: int, **more: Any) -> Event:
    """Its begin or end."""
    return event("snapshot", at, None, sequence=None, incarnation=None, queue=None, detail={"part": part} | more)


TRIMMED: list[Event] = [
    sent(20, sequence=3),
    received(21, sequence=3),
    edge("begin", 22, last=6),
    event("deleted", 23, attempt=4, sequence=2),
    told(24, held(3, 1, due=51), free(4, 2)),
    event("deleted", 25, sequence=3),
    sent(26, sequence=7),
    told(27, free(5, 0), free(6, 7)),
    edge("end", 28, begin=32),
    received(29, attempt=3, sequence=4),
    received(30, sequence=7),
    event("lease_expired", 59, attempt=3, sequence=4),
    event("deleted", 60, sequence=7),
    received(61, sequence=5),
    event("purged", 70, None, sequence=None, detail={"count": 3, "watermark": 7}),
]
"""What is left from offset 30 on. When its snapshot began there were six messages; one left before it was told."""


def trimmed(*changes: Callable[[list[Event]], None]) -> list[Event]:
    events = [dict(each) for each in TRIMMED]
    for change in changes:
        change(events)
    return [{"offset": at + 30} | each for at, each in enumerate(events)]


def without(place: int) -> Callable[[list[Event]], None]:
    return lambda events: events.__delitem__(place)


def twice(place: int) -> Callable[[list[Event]], None]:
    return lambda events: events.insert(place, dict(events[place]))


def changed(place: int, **to: Any) -> Callable[[list[Event]], None]:
    return lambda events: events[place].update(to)


FALSE: dict[str, tuple[Callable[[list[Event]], None], str]] = {
    "nothing is false": (lambda events: None, ""),
    "a send is lost": (without(1), "received was sent"),
    "a send is there twice": (twice(1), "sent once"),
    "sequences do not grow": (changed(1, sequence=9), "sent once"),
    "a delete is there twice": (twice(9), "left once"),
    "a message rises": (lambda events: events.append(received(101, attempt=3)), "no resurrection"),
    "a receive is lost": (without(3), "receive count"),
    "a receive count stays": (changed(7, attempt=1), "receive count"),
    "two leases at a time": (without(6), "one lease"),
    "received before it is visible": (changed(7, visible_since=62 * S), "visible"),
    "a stale handle deletes": (changed(9, attempt=1), "stale handles"),
    "a lease ends early": (changed(6, at=50 * S), "lease end"),
    "a current handle is refused": (changed(8, attempt=2), "refused rightly"),
    "a purge miscounts": (changed(17, detail={"count": 3, "watermark": 5}), "conservation"),
    "a purge forgets": (changed(17, detail={"count": 1, "watermark": 5}), "conservation"),
    "a message leaves a queue that is empty": (
        lambda events: events.append(event("expired", 101, 0, sequence=7)),
        "conservation",
    ),
    "a snapshot tells another count": (lambda events: events.insert(10, told(63, held(2, 2, due=61))), "snapshot"),
    "a snapshot tells of what left": (lambda events: events.insert(10, told(63, free(1, 2))), "snapshot"),
    "a snapshot tells of what never came": (lambda events: events.insert(10, told(63, free(9, 0))), "snapshot"),
    "a snapshot gives a lease back": (lambda events: events.insert(10, told(63, free(2, 1))), "snapshot"),
    "a snapshot tells another lease": (lambda events: events.insert(10, told(63, held(2, 1, due=99))), "snapshot"),
    "an offset is there twice": (lambda events: events[5].update(offset=4), "offsets"),
    "an offset is missing": (lambda events: [each.update(offset=at + 30) for at, each in enumerate(events) if at > 9],
                             "offsets"),
}  # fmt: skip


APART = 10_000
"""Offsets between two histories that are audited together."""
PIECE_ROWS = 2
"""So small that what a piece leaves to the next counts in each of them."""


def rules(spark: Any, events: list[Event]) -> set[str]:
    return {row.rule for row in audit(frame(spark, table_of(events))).collect()}


def falsified(name: str) -> list[Event]:
    return told_falsely(TRUE, FALSE[name][0])


def told_falsely(true: list[Event], falsify: Callable[[list[Event]], None]) -> list[Event]:
    events = [dict(each) for each in true]
    falsify(events)
    return [{"offset": at, "incarnation": 1} | each for at, each in enumerate(events)]


@pytest.fixture(scope="module")
def broken(spark: Any) -> dict[str, list[Any]]:
    """The findings in each false history, but for those of offsets; those of retries have names of their own."""
    histories = {name: falsified(name) for name in FALSE}
    histories |= {f"retries: {name}": told_falsely(RETRIED, falsify) for name, (falsify, _) in RETRIED_FALSE.items()}
    together: list[Event] = []
    for number, history_of_one in enumerate(histories.values()):
        for each in history_of_one:
            detail = each.get("detail")
            if detail and "target" in detail:
                detail = detail | {"target": detail["target"] + 10 * number}
            moved = {"incarnation": each["incarnation"] + 10 * number, "offset": each["offset"] + APART * number}
            together.append(each | moved | {"detail": detail})
    rows = audit(frame(spark, table_of(together)), piece_rows=PIECE_ROWS).collect()
    return {
        name: [row for row in rows if row.offset // APART == number and row.rule != "offsets"]
        for number, name in enumerate(histories)
    }


def test_a_true_history_has_no_findings(broken: dict[str, list[Any]]) -> None:
    assert broken["nothing is false"] == []


@pytest.mark.slow
def test_a_true_history_has_none_of_offsets_either(spark: Any) -> None:
    assert rules(spark, TRUE) == set()


@for_each(("name", "rule"), [(name, rule) for name, (_, rule) in FALSE.items() if rule not in {"", "offsets"}])
def test_a_false_history_is_found_out(broken: dict[str, list[Any]], name: str, rule: str) -> None:
    assert rule in {row.rule for row in broken[name]}


RETRIED: list[Event] = [
    sent(10),
    received(12),
    retried(20, 10, "raised"),
    event("retry_due", 30),
    received(31, attempt=2, visible_since=30 * S),
    extended(35, attempt=2, lease=5),
    event("expired_after_change", 40, attempt=2),
    resumed(45, attempt=2),
    retried(50, 0, "asked", attempt=2),
    received(51, attempt=3, visible_since=50 * S),
    retried(52, 60, None, attempt=3),
    extended(60, attempt=3),
    event("lease_expired", 90, attempt=3),
    received(91, attempt=4, visible_since=90 * S),
    retried(92, 60, None, attempt=4),
    event("deleted", 93, attempt=4),
]
RETRIED_FALSE: dict[str, tuple[Callable[[list[Event]], None], set[str]]] = {
    "nothing": (lambda events: None, set()),
    "received before the retry is due": (without(3), {"one lease"}),
    "a retry is due early": (changed(3, at=25 * S), {"lease end"}),
    "a changed lease ends late": (changed(6, at=41 * S), {"lease end"}),
    "taken up again before it ended": (without(6), {"one lease"}),
    "a stale handle gives back": (changed(8, attempt=1), {"stale handles"}),
}


@for_each("name", RETRIED_FALSE)
def test_retries_and_resumed_leases_are_judged(broken: dict[str, list[Any]], name: str) -> None:
    assert {row.rule for row in broken[f"retries: {name}"]} == RETRIED_FALSE[name][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing", "received before the retry is due"])
def test_a_history_of_retries_is_judged_alone(spark: Any, name: str) -> None:
    falsify, found = RETRIED_FALSE[name]
    assert rules(spark, told_falsely(RETRIED, falsify)) == found


@pytest.mark.parametrize(
    "name", [pytest.param("an offset is there twice", marks=pytest.mark.slow), "an offset is missing"]
)
def test_offsets_that_do_not_follow_are_found_out(spark: Any, name: str) -> None:
    assert "offsets" in rules(spark, falsified(name))


def test_every_rule_has_a_history_that_breaks_it() -> None:
    assert {rule for _, rule in FALSE.values()} == {"", *RULES}
    page = Path(__file__).parents[2] / "docs" / "pipeline.md"
    assert f"breaks one of {len(RULES)} rules" in page.read_text()


def test_a_finding_says_where(broken: dict[str, list[Any]]) -> None:
    name = "a delete is there twice"
    number = list(FALSE).index(name)
    (row,) = [each for each in broken[name] if each.rule == "left once"]
    assert (row.offset, row.incarnation) == (10 + APART * number, 1 + 10 * number)
    assert (row.queue, row.sequence, row.attempt) == ("q", 1, 2)
    assert row.said == "deleted of attempt 2 after a receive of attempt 2"


@pytest.mark.slow
def test_a_history_that_was_trimmed_is_judged_by_what_it_shows(spark: Any) -> None:
    events = [each | {"offset": at} for at, each in enumerate(TRUE)]
    assert rules(spark, events[9:]) == set()
    events.insert(10, dict(events[9]))
    assert {"left once", "offsets"} <= rules(spark, events[9:])


@pytest.mark.slow
def test_a_history_that_was_trimmed_is_known_from_its_snapshot_on(spark: Any) -> None:
    assert rules(spark, trimmed()) == set()
    purged = event("purged", 24, None, sequence=None, detail={"count": 9, "watermark": 1})
    amid = trimmed(changed(8, detail={"part": "end", "begin": 32}), lambda events: events.insert(5, purged))
    assert rules(spark, amid) == set()


@pytest.mark.slow
def test_a_trimmed_history_that_is_false_is_found_out(spark: Any) -> None:
    events = trimmed(
        changed(4, detail=told(24, held(3, 2, due=51), free(4, 2))["detail"]),
        changed(9, attempt=4),
        changed(13, attempt=2),
        changed(14, detail={"count": 4, "watermark": 7}),
        without(6),
    )
    found = {(row.offset, row.rule) for row in audit(frame(spark, table_of(events))).collect()}
    assert found >= {
        (34, "snapshot"),
        (38, "receive count"),
        (39, "received was sent"),
        (42, "receive count"),
        (43, "conservation"),
    }


@pytest.mark.slow
def test_a_servers_history_is_true_after_it_was_trimmed(spark: Any, tmp_path: Path) -> None:
    """And without a send after its snapshot it is not."""
    server = ServerProcess(tmp_path, "--history-bytes-max", "40000").start()
    try:
        token = (server.data / "admin-token").read_text().strip()
        live = ServerHistory(server.admin, token)
        for number in range(20):
            _work(server, chance(number), f"work{number}", steps=300)
            table = _all_of(live)
            sent = _sent_behind_snapshots(table)
            if table["offset"][0].as_py() and sent:
                break
    finally:
        server.stop()
    assert table["offset"][0].as_py() > 0
    lost = sent[0]
    events = frame(spark, table)
    reach = known(events)
    assert 0 < reach.begin < reach.end < table["offset"][-1].as_py()
    assert audit(events).collect() == []
    assert reach.end < lost
    without_it = frame(spark, table.filter(pc.field("offset") != lost))
    assert {row.rule for row in audit(without_it).collect()} >= {"offsets", "received was sent"}


def _all_of(live: ServerHistory) -> pa.Table:
    """Asked anew while the oldest events are trimmed between the question for the bounds and that for the events."""
    for _ in range(100):
        bounds = live.bounds()
        try:
            return pa.Table.from_batches(list(live.read(*bounds)))
        except HistoryGap:
            assert live.bounds().first > bounds.first
    raise AssertionError("Events are trimmed faster than they can be read.")


def _sent_behind_snapshots(table: pa.Table) -> list[int]:
    """Offsets of the sends behind the last row of a snapshot, of messages that were received."""
    rows = table.select(["offset", "kind", "sequence"]).to_pylist()
    last = max((row["offset"] for row in rows if row["kind"] == "snapshot"), default=-1)
    received = {row["sequence"] for row in rows if row["kind"] == "received"}
    return [
        row["offset"] for row in rows if row["kind"] == "sent" and row["offset"] > last and row["sequence"] in received
    ]


@pytest.mark.slow
def test_made_up_histories_are_true(spark: Any) -> None:
    workloads = [
        Workload("a", lognormal(20, 1), "t", 300, lease=20.0, receives_max=3),
        Workload("b", lognormal(40, 1), "u", 300, extend=20.0, crashes_per_second=1 / 200),
        Workload("b", lognormal(40, 1), None, 300, gives_up=30.0, crashes_per_second=1 / 200),
    ]
    table = history(workloads, seed=3)
    assert audit(frame(spark, table)).collect() == []
    assert audit(frame(spark, table.slice(500, 800))).collect() == []


@pytest.mark.slow
def test_a_servers_history_is_true(spark: Any, tmp_path: Path) -> None:
    """Sends, receives, extensions, releases, late and stale deletes, and dead letters, at random."""
    server = ServerProcess(tmp_path).start()
    try:
        _work(server, chance(11))
        token = (server.data / "admin-token").read_text().strip()
        events = spark.read.format("veilmq-events").option("server", server.admin).option("token", token).load()
        kinds = {row.kind for row in events.select("kind").distinct().collect()}
        found = audit(events).collect()
    finally:
        server.stop()
    assert kinds >= {
        "sent", "received", "extended", "released", "lease_expired", "deleted", "delete_refused", "dead_lettered",
        "queue_deleted",
    }  # fmt: skip
    assert found == []


def _work(server: ServerProcess, random: Any, name: str = "work", steps: int = 1_200) -> None:
    address = server.sqs.removeprefix("http://")
    from veilmq.client.messages import Template

    with connect(f"veil://{address}/dead", template=Template()):
        pass
    template = Template(dead_letter_queue="dead", receive_count_max=3)
    with connect(f"veil://{address}/{name}", template=template) as queue:
        handles: list[str] = []
        for step in range(steps):
            draw = random.random()
            try:
                if draw < 0.3:
                    queue.send(f"{step}")
                elif draw < 0.6:
                    taken = queue.receive(random.randint(1, 4), lease=random.choice([0.02, 0.05, 60.0]))
                    handles += [each.handle for each in taken]
                elif handles and draw < 0.75:
                    queue.delete(random.choice(handles))
                elif handles and draw < 0.88:
                    queue.extend(random.choice(handles), random.choice([0.02, 30.0]))
                elif handles:
                    queue.release(handles.pop(random.randrange(len(handles))))
            except VeilError:
                continue
        account = queue.account
        account.delete(name)
