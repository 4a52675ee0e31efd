"""What stands still on a FIFO queue: the visible messages behind one in flight or delayed, and who holds that one."""

from typing import Any

from tests.support.contract.stage import Stage, sending
from tests.support.sqlite import store_of

from veilmq import testing
from veilmq.model.commands import Sweep
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Extras, Report, Reported, failure_of, id_text
from veilmq.model.messages.states import Blocked
from veilmq.model.settings.queue import QueueKey
from veilmq.store.sqlite.messages import groups as module
from veilmq.store.sqlite.messages.groups import heads

RAISED = Report(Reported.RETRY, failure_of("raised", "ValueError", "no"))


def fifo(stage: Stage, name: str = "orders", **settings: Any) -> QueueKey:
    return stage.create(f"{name}.fifo", content_deduplication=True, **settings)


def send(stage: Stage, queue: QueueKey, group: str, count: int = 1) -> None:
    following = stage.following()
    stage.batch([sending(queue, f"{following}-{each}", extras=Extras(group=group)) for each in range(count)])


def blocked(stage: Stage, queue: QueueKey, shown_max: int = 100) -> Blocked:
    with stage.store.reader.look() as view:
        return view.blocked(stage.store.reader.queues[queue], stage.now, shown_max)


def shown(found: Blocked) -> list[tuple[str, int, int]]:
    """Group, how many wait, and since when."""
    return [(each.group, each.messages, each.since) for each in found.shown]


def expected(stage: Stage) -> dict[str, tuple[int, str]]:
    """By group how many wait, and for which message: by a walk through everything."""
    heads: dict[str, str] = {}
    found: dict[str, tuple[int, str]] = {}
    lines = [line["message"] for line in stage.factory.state(stage.store) if "message" in line]
    for each in sorted(lines, key=lambda message: message["sequence"]):
        group, is_hidden = each["group"], each["state"] in ("in flight", "delayed") and each["due"] > stage.now
        if is_hidden:
            heads.setdefault(group, each["id"])
        elif group in heads:
            found[group] = (found.get(group, (0, ""))[0] + 1, heads[group])
    return found


def test_what_is_blocked_is_what_a_walk_finds(stage: Stage) -> None:
    """After any sends, receives, deletes, extensions, releases, retries and ended leases."""
    queue, chance = fifo(stage), testing.chance(11)
    handles: list[str] = []
    seen = 0
    for step in range(400):
        act = chance.choice(["send", "send", "receive", "receive", "delete", "extend", "release", "retry", "later"])
        if act == "send":
            send(stage, queue, f"g{chance.randrange(6)}", chance.randrange(1, 5))
        elif act == "receive":
            lease_us = chance.choice([SECOND_US, MINUTE_US])
            handles += [each.handle for each in stage.receive(queue, chance.randrange(1, 6), lease_us=lease_us)]
        elif act == "later":
            stage.later(chance.randrange(2 * SECOND_US))
            if chance.random() < 0.5:
                stage.do(Sweep())
        elif handles:
            handle = handles.pop(chance.randrange(len(handles)))
            if act == "delete":
                stage.delete(queue, handle)
            else:
                lease_us = {"extend": HOUR_US, "release": 0, "retry": 10 * SECOND_US}[act]
                stage.extend(queue, handle, lease_us, report=RAISED if act == "retry" else None)
        found, walked = blocked(stage, queue), expected(stage)
        assert {each.group: (each.messages, id_text(each.head.id)) for each in found.shown} == walked, step
        assert (found.messages, found.groups) == (sum(count for count, _ in walked.values()), len(walked))
        assert found.is_all
        seen += len(walked) > 1
    assert seen > 50


def test_a_group_is_blocked_since_nothing_came_out_of_it(stage: Stage) -> None:
    """Not since its head was sent, and not before anybody waits: a group that moves is never blocked for long."""
    queue = fifo(stage)
    send(stage, queue, "a", 3)
    assert blocked(stage, queue) == Blocked(0, 0, [], True), "a receive would get them"
    stage.later(MINUTE_US)
    held = stage.take(queue, lease_us=MINUTE_US)
    received = stage.now
    for _ in range(3):
        stage.later(50 * SECOND_US)
        stage.extend(queue, held.handle, MINUTE_US)
    assert shown(blocked(stage, queue)) == [("a", 2, received)], "an extension is no progress"
    stage.delete(queue, held.handle)
    stage.take(queue, lease_us=HOUR_US)
    assert shown(blocked(stage, queue)) == [("a", 1, stage.now)], "the group has moved"
    moved = stage.now
    send(stage, queue, "b")
    stage.take(queue, lease_us=HOUR_US)
    stage.later(10 * MINUTE_US)
    send(stage, queue, "b")
    assert shown(blocked(stage, queue)) == [("a", 1, moved), ("b", 1, stage.now)], "nobody waited before"


def test_a_retry_holds_its_group_and_says_so(stage: Stage) -> None:
    queue = fifo(stage)
    send(stage, queue, "a", 2)
    stage.extend(queue, stage.take(queue).handle, 10 * MINUTE_US, report=RAISED)
    (group,) = blocked(stage, queue).shown
    assert (group.messages, group.head.ending, group.head.due) == (1, 2, stage.now + 10 * MINUTE_US)


def test_a_lease_that_has_ended_holds_nothing_back(stage: Stage) -> None:
    """Though no sweep has seen it yet: a receive would get the message."""
    queue = fifo(stage)
    send(stage, queue, "a", 2)
    stage.take(queue, lease_us=SECOND_US)
    stage.later(SECOND_US)
    assert blocked(stage, queue).messages == 0


def test_bounds_say_that_they_were_reached(stage: Stage, monkeypatch: Any) -> None:
    queue = fifo(stage)
    for group in range(4):
        send(stage, queue, f"g{group}", 3)
        stage.later(SECOND_US)
    for _ in range(4):
        stage.take(queue, lease_us=HOUR_US)
    live = store_of(stage).reader.queues[queue]
    with stage.store.reader.look() as view:
        execute = view._connection.execute  # type: ignore[attr-defined]
        found, is_all = heads(execute, live, stage.now, 3)
        assert (len(found), is_all) == (3, False)
        assert heads(execute, live, stage.now, 5)[1]
    monkeypatch.setattr(module, "COUNTED_MAX", 5)
    found = blocked(stage, queue, shown_max=2)
    assert (found.messages, found.groups, found.is_all) == (5, 4, False)
    assert [each.group for each in found.shown] == ["g0", "g1"]


def test_other_queues_are_not_looked_at(stage: Stage) -> None:
    """A standard queue with groups shares its workers fairly and locks nothing."""
    queue = stage.create("fair")
    for _ in range(3):
        stage.send(queue, extras=Extras(group="a"))
    stage.take(queue)
    assert blocked(stage, queue) == Blocked(0, 0, [], True)
