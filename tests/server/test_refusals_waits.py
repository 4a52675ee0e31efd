"""Receives that find no room to wait: counted by limit, and told once a minute for each queue."""

import logging

import pytest

from veilmq.engine import Limits
from veilmq.engine.long_polls import Unread, WaitingRoom
from veilmq.model.settings.queue import QueueKey
from veilmq.server.logs import QUEUES_MAX, QUIET_S, RefusedWaits

ORDERS, MAIL = (QueueKey("111111111111", "us-east-1", name) for name in ("orders", "mail"))


def watched(**limits: int) -> tuple[WaitingRoom, RefusedWaits]:
    bounds = Limits(**limits)
    room = WaitingRoom(bounds)
    return room, RefusedWaits(room, bounds, Unread(1))


def test_each_limit_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("parked_max", "parked_per_account_max", "parked_per_queue_max"):
        room, watch = watched(**{name: 0})
        assert not room.has_room(ORDERS)
        watch.look(0.0)
        assert {limit: count for limit, count in watch.refused.items() if count} == {name: 1}
        assert caplog.messages[-1] == (
            f"111111111111/us-east-1/orders: answered 1 receive empty instead of letting them wait: {name} is 0"
        )


def test_a_queue_is_told_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    room, watch = watched(parked_per_queue_max=0)
    for second in range(int(QUIET_S) + 1):
        room.has_room(ORDERS)
        room.has_room(ORDERS)
        if second == 30:
            room.has_room(MAIL)
        watch.look(float(second))
    assert [(line.split(":")[0][-6:], line.split(" ")[2]) for line in caplog.messages] == [
        ("orders", "2"),
        ("1/mail", "1"),
        ("orders", "120"),
    ]
    assert watch.refused["parked_per_queue_max"] == 123
    watch.look(10 * QUIET_S)
    assert len(caplog.messages) == 3, "a queue with room is not told of"


def test_queues_without_end_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    room, watch = watched(parked_per_queue_max=0)
    for number in range(3 * QUEUES_MAX):
        room.has_room(QueueKey("111111111111", "us-east-1", f"q{number}"))
    watch.look(0.0)
    assert len(caplog.messages) == QUEUES_MAX + 1
    assert caplog.messages[-1].startswith(f"other queues: answered {2 * QUEUES_MAX} receives empty")
    room.has_room(QueueKey("111111111111", "us-east-1", "q0"))
    room.has_room(QueueKey("111111111111", "us-east-1", "one more"))
    watch.look(1.0)
    assert len(caplog.messages) == QUEUES_MAX + 1
    watch.look(QUIET_S)
    assert len(caplog.messages) == QUEUES_MAX + 3
