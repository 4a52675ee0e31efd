"""A keeper that learns: what becomes of messages reaches the plan, and the plan's leases reach the queue."""

from typing import Any

import pytest

from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Message
from veilmq.client.timeouts import AdaptiveTimeout
from veilmq.model.errors import LeaseError
from veilmq.testing.client_contract.embedded import EmbeddedClient


@pytest.fixture
def client(embedded: EmbeddedClient) -> EmbeddedClient:
    return embedded


def work(client: Any, queue: Any, keeper: LeaseKeeper, seconds: float) -> None:
    """One message, worked on for so long by the movable clock."""
    queue.send(Message("job", type="resize"))
    (message,) = queue.receive(lease=30)
    lease = keeper.register(message)
    keeper.settle()
    left = seconds
    while left > 0:
        step = min(left, 5.0)
        client.pass_time(step)
        keeper.settle()
        left -= step
    lease.delete()


def test_what_messages_take_is_learnt_by_type(client: EmbeddedClient) -> None:
    client.account.create("jobs")
    queue = client.account.queue("jobs")
    plan = AdaptiveTimeout()
    with LeaseKeeper(queue, plan=plan, clock=client.clock) as keeper:
        for _ in range(15):
            work(client, queue, keeper, 60)
    schedule = plan.schedule_of("resize")
    assert schedule is not plan.schedule_of("another type")
    assert queue.stats().in_flight == 0
    # All took a minute: no lease of the learnt schedule ends long before that, or long after.
    assert 5 < schedule.first < 150


def test_a_lost_lease_is_learnt(client: EmbeddedClient) -> None:
    client.account.create("jobs")
    queue = client.account.queue("jobs")
    plan = AdaptiveTimeout()
    before = plan.costs.crashes_per_second
    with LeaseKeeper(queue, plan=plan, clock=client.clock) as keeper:
        queue.send("job")
        (message,) = queue.receive(lease=5)
        lease = keeper.register(message, lease=5)
        client.pass_time(6)
        (other,) = queue.receive(lease=60)
        assert other.receive_count == 2
        keeper.settle()
        assert lease.lost.is_set()
        with pytest.raises(LeaseError):
            queue.delete(message.handle)
    # Held, and ended without a crash: the rate of crashes goes down, and a duplicate is on the books.
    assert plan.costs.crashes_per_second < before
    assert plan._duplicates > 0
