"""A keeper that learns: what becomes of messages reaches the plan, and the plan's leases reach the queue."""

from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep
from typing import Any

import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Message, Template
from veilmq.client.queue import Queue
from veilmq.client.timeouts import AdaptiveTimeout, ThresholdTimeout
from veilmq.model.errors import LeaseError


@pytest.fixture
def client(embedded: EmbeddedClient) -> EmbeddedClient:
    return embedded


def work(client: Any, queue: Any, keeper: LeaseKeeper, seconds: float) -> None:
    """One message, worked on for so long by the movable clock."""
    queue.send(Message("job", type="resize"))
    (message,) = queue.receive(lease=30)
    lease = keeper.register(message)
    keeper.extend_due()
    left = seconds
    while left > 0:
        step = min(left, 5.0)
        client.pass_time(step)
        keeper.extend_due()
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


@pytest.fixture
def fifo(client: EmbeddedClient) -> Queue:
    """A queue on which a lease that has ended is over; on others the keeper would take it up again."""
    client.account.create("jobs.fifo", Template(fifo=True))
    return client.account.queue("jobs.fifo")


def job(number: int = 0) -> Message:
    return Message("job", group="g", deduplication_id=f"{number}")


def test_a_lost_lease_is_learnt(client: EmbeddedClient, fifo: Queue) -> None:
    queue = fifo
    plan = AdaptiveTimeout()
    before = plan.costs.crashes_per_second
    with LeaseKeeper(queue, plan=plan, clock=client.clock) as keeper:
        queue.send(job())
        (message,) = queue.receive(lease=5)
        lease = keeper.register(message, lease=5)
        client.pass_time(6)
        (other,) = queue.receive(lease=60)
        assert other.receive_count == 2
        keeper.extend_due()
        assert lease.lost.is_set()
        with pytest.raises(LeaseError):
            queue.delete(message.handle)
    # Held, and ended without a crash: the rate of crashes goes down, and a duplicate is on the books.
    assert plan.costs.crashes_per_second < before
    assert plan._duplicates > 0


def test_a_plan_that_raises_at_a_lost_lease_keeps_no_other_from_being_extended(
    client: EmbeddedClient, fifo: Queue
) -> None:
    def tell(timeout: float) -> None:
        raise RuntimeError

    plan = ThresholdTimeout(30, failures=1, margin=10, tell=tell, clock=client.clock)
    with LeaseKeeper(fifo, plan=plan, clock=client.clock) as keeper:
        fifo.send(job())
        fifo.send(Message("other", group="h", deduplication_id="h"))
        (message,) = fifo.receive(lease=5)
        lost = keeper.register(message, lease=5)
        (message,) = fifo.receive(lease=15)
        kept = keeper.register(message, lease=15)
        client.pass_time(6)
        keeper.extend_due()
        assert lost.lost.is_set()
        assert kept.remaining() > 10, "extended"
        kept.delete()


def test_a_plan_that_raises_when_it_hears_of_lateness_holds_nothing_up(client: EmbeddedClient, fifo: Queue) -> None:
    class Broken(AdaptiveTimeout):
        def late(self, seconds: float) -> None:
            raise RuntimeError

    with LeaseKeeper(fifo, plan=Broken(), clock=client.clock) as keeper:
        fifo.send(job())
        lease = keeper.register(fifo.receive(lease=15)[0], lease=15)
        client.pass_time(12)
        keeper.extend_due()
        assert lease.remaining() > 3, "extended"
        lease.delete()


def test_a_plan_that_blocks_when_it_hears_of_lateness_holds_no_lock(client: EmbeddedClient, fifo: Queue) -> None:
    """So the other leases are extended meanwhile."""
    asked = []

    class Blocking(AdaptiveTimeout):
        def late(self, seconds: float) -> None:
            asked.append(other.submit(lambda: keeper.stats).result(5))

    with ThreadPoolExecutor(1) as other, LeaseKeeper(fifo, plan=Blocking(), clock=client.clock) as keeper:
        fifo.send(job())
        lease = keeper.register(fifo.receive(lease=15)[0], lease=15)
        client.pass_time(12)
        keeper.extend_due()
        lease.delete()
    assert len(asked) == 1


def test_a_message_that_is_deleted_twice_is_learnt_once(client: EmbeddedClient) -> None:
    client.account.create("jobs")
    plan = AdaptiveTimeout()
    with LeaseKeeper(client.account.queue("jobs"), plan=plan, clock=client.clock) as keeper:
        keeper.queue.send("x")
        lease = keeper.register(keeper.queue.receive(lease=30)[0])
        lease.delete()
        learnt = plan._attempts
        lease.delete()
        assert plan._attempts == learnt


@pytest.mark.parametrize(("margin", "extended"), [(0, False), (10, True)])
def test_the_documents_rule_is_told_of_what_came_back(
    client: EmbeddedClient, fifo: Queue, margin: float, extended: bool
) -> None:
    queue = fifo
    plan = ThresholdTimeout(30, failures=2, margin=margin, clock=client.clock)
    with LeaseKeeper(queue, plan=plan, clock=client.clock) as keeper:
        for number in range(2):
            queue.send(job(number))
            (message,) = queue.receive(lease=30)
            client.pass_time(0.2)
            lease = keeper.register(message)
            keeper.extend_due()
            assert keeper.stats.extensions == 0
            assert plan.timeout == 30
            client.pass_time(31)  # nobody extended it, as in the document, or could not
            keeper.extend_due()
            assert lease.lost.wait(5)
            (again,) = queue.receive(lease=30)
            queue.delete(again.handle)
        end = monotonic() + 5
        while plan.timeout != 60:  # the keeper tells it in a thread
            assert monotonic() < end
            sleep(0.001)
        queue.send(job(2))
        (message,) = queue.receive(lease=60)
        lease = keeper.register(message)
        client.pass_time(55)
        keeper.extend_due()
        assert (keeper.stats.extensions == 1) is extended
        lease.delete()


def again(client: EmbeddedClient, queue: Any, keeper: LeaseKeeper, ends: str) -> None:
    """A message that is received twice: its first worker crashed, or gave it back."""
    queue.send("job")
    (message,) = queue.receive(lease=5)
    if ends == "crash":
        client.pass_time(6)
    else:
        keeper.register(message).release()
    (message,) = queue.receive(lease=30)
    assert message.receive_count == 2
    lease = keeper.register(message)
    client.clock.advance(1)
    lease.delete()


@pytest.mark.parametrize("ends", ["crash", "release"])
def test_crashes_are_learnt_from_what_comes_again(client: EmbeddedClient, ends: str) -> None:
    client.account.create("jobs")
    queue = client.account.queue("jobs")
    plan = AdaptiveTimeout()
    before = plan.costs.crashes_per_second
    with LeaseKeeper(queue, plan=plan, clock=client.clock) as keeper:
        for _ in range(20):
            again(client, queue, keeper, ends)
    # Twenty crashes, and no more than twenty seconds of work, beside a prior of three in six hours; or none.
    expected = 23 / (3 * 7_200) if ends == "crash" else before
    assert plan.costs.crashes_per_second == pytest.approx(expected, rel=0.05)


def test_what_closing_gives_back_is_no_crash(client: EmbeddedClient) -> None:
    client.account.create("jobs")
    queue = client.account.queue("jobs")
    plan = AdaptiveTimeout()
    before = plan.costs.crashes_per_second
    keeper = LeaseKeeper(queue, plan=plan, clock=client.clock)
    queue.send_batch(["job"] * 5)
    for message in queue.receive(5):
        keeper.register(message)
    keeper.close()
    with LeaseKeeper(queue, plan=plan, clock=client.clock) as another:
        for message in queue.receive(5):
            another.register(message).delete()
    assert plan.costs.crashes_per_second == pytest.approx(before, rel=0.01)


def test_a_quiet_year_does_not_make_workers_immortal(client: EmbeddedClient) -> None:
    client.account.create("jobs")
    queue = client.account.queue("jobs")
    plan = AdaptiveTimeout()
    queue.send("job")
    (message,) = queue.receive()
    for _ in range(1_000):
        plan.finished(message, 30_000)
    assert plan.costs.crashes_per_second == pytest.approx(1 / 72_000)
