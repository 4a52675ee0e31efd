"""Guards, outboxes and storages in a real PostgreSQL, whose clock counts: machines' own differ by an hour."""

import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest
from tests.client.clocks_apart import HOUR, Apart
from tests.client.postgres import emptied, postgres

from veilmq.client.clock import SYSTEM
from veilmq.client.errors import StorageHeld
from veilmq.client.ordered import TableStorage
from veilmq.client.outbox import Outbox, Relay
from veilmq.client.queue import Queue
from veilmq.client.worker import TableGuard
from veilmq.client.worker.guard import Begun, Busy, Claim, Done, Superseded
from veilmq.testing.client_contract.embedded import EmbeddedClient

pytestmark = pytest.mark.xdist_group("postgres")

Connect = Callable[[], "psycopg.Connection[tuple[object, ...]]"]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres() as place:
        yield place


@pytest.fixture
def connect(server: str) -> Connect:
    place = emptied(server)
    return lambda: psycopg.connect(place)


def claim(owner: str, wall: float, seconds: float = 30) -> Claim:
    return Claim(owner, 1, wall, wall + seconds)


@pytest.mark.parametrize("apart", [-HOUR, HOUR])
def test_a_guard_s_claims_end_by_the_server_s_clock(connect: Connect, apart: float) -> None:
    here, there = SYSTEM.wall, Apart(SYSTEM, apart).wall
    with TableGuard(connect) as guard:
        assert guard.begin("order 7", claim("a", here())) == Begun(1)
        busy = guard.begin("order 7", claim("b", there()))
        assert isinstance(busy, Busy)
        assert busy.until - there() == pytest.approx(30, abs=10)
        assert guard.begin("order 8", claim("a", there(), 0)) == Begun(1)
        assert guard.begin("order 8", claim("b", here())) == Begun(2)
        guard.finish("order 8", 2, "done")
        assert guard.begin("order 8", claim("c", there())) == Done("done")
        with pytest.raises(Superseded):
            guard.finish("order 8", 1, "late")


def test_of_many_that_want_one_key_one_gets_it(connect: Connect) -> None:
    answers: list[object] = []
    with TableGuard(connect) as guard:
        work = [
            threading.Thread(target=lambda n=n: answers.append(guard.begin("k", claim(str(n), SYSTEM.wall()))))
            for n in range(8)
        ]
        for each in work:
            each.start()
        for each in work:
            each.join()
    assert [type(answer) for answer in sorted(answers, key=lambda answer: isinstance(answer, Busy))] == [
        Begun, *[Busy] * 7
    ]  # fmt: skip


@pytest.fixture
def orders(embedded: EmbeddedClient) -> Queue:
    embedded.account.create("orders")
    return embedded.account.queue("orders")


def bodies(queue: Queue) -> list[str]:
    return [message.body for message in queue.receive(10)]


@pytest.mark.parametrize("apart", [-HOUR, HOUR])
def test_an_outbox_is_relayed_once_by_machines_whose_clocks_differ(
    connect: Connect, orders: Queue, apart: float
) -> None:
    outbox = Outbox()
    with connect() as there:
        for statement in outbox.ddl("postgresql"):
            there.execute(statement)
        there.execute("CREATE TABLE orders (number INTEGER)")
    with connect() as there:
        there.execute("INSERT INTO orders VALUES (1)")
        for text in ("1", "2"):
            outbox.add(there.cursor(), text)
    with connect() as there:
        outbox.add(there.cursor(), "rolled back")
        there.rollback()
    holder = Relay(outbox, connect, orders)
    other = Relay(outbox, connect, orders, clock=Apart(SYSTEM, apart))
    assert len(holder._take()) == 2
    assert other.run_once() == 0
    with connect() as there:  # the holder died a while ago
        there.execute("UPDATE veilmq_outbox SET held_until = held_until - 100")
    assert other.run_once() == 2
    assert bodies(orders) == ["1", "2"]
    assert other.prune(-1) == 2
    for relay in (holder, other):
        relay.close()


@pytest.mark.parametrize("apart", [-HOUR, HOUR])
def test_a_storage_is_held_by_the_server_s_clock(connect: Connect, apart: float) -> None:
    first = TableStorage(connect, "sender")
    second = TableStorage(connect, "sender", clock=Apart(SYSTEM, apart))
    first.acquire()
    first.save(b'{"next":7}')
    with pytest.raises(StorageHeld):
        second.acquire()
    first.release()
    second.acquire()
    assert second.load() == b'{"next":7}'
    second.release()
