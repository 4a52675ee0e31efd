"""Guards, outboxes and storages in a real PostgreSQL, whose clock counts: machines' own differ by an hour."""

import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest
from tests.client.clocks_apart import HOUR, Apart
from tests.client.postgres import emptied, postgres
from tests.support.embedded import EmbeddedClient

from veilmq.client.clock import SYSTEM
from veilmq.client.errors import StorageHeld, StorageLost
from veilmq.client.ordered import TableStorage
from veilmq.client.outbox import Outbox, Relay
from veilmq.client.queue import Queue
from veilmq.client.worker import TableGuard
from veilmq.client.worker.guard import Begun, Busy, Claim, Done, Superseded

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
        # Over by more than the millisecond to which a guard reads the server's clock.
        assert guard.begin("order 8", claim("a", there(), -0.01)) == Begun(1)
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
    assert len(holder._take(0, set())) == 2
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


def together(count: int, work: Callable[[int], None]) -> list[BaseException]:
    """The errors of so many threads that begin at the same moment."""
    errors: list[BaseException] = []
    ready = threading.Barrier(count)

    def one(number: int) -> None:
        ready.wait(20)
        try:
            work(number)
        except psycopg.Error as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return errors


def test_nobody_takes_over_amid_a_transaction_however_long(connect: Connect) -> None:
    def impatient() -> "psycopg.Connection[tuple[object, ...]]":
        there = connect()
        there.execute("SET lock_timeout = '100ms'")
        there.commit()
        return there

    holder = TableStorage(connect, "receiver", hold_seconds=0.2)
    standby = TableStorage(impatient, "receiver", hold_seconds=0.2, create=False)
    holder.acquire()
    try:
        with holder.saving(b"1") as cursor:
            cursor.execute("SELECT pg_sleep(0.5)")  # the application's own work, longer than the hold
            with pytest.raises(psycopg.errors.LockNotAvailable):
                standby.acquire()
        assert holder.load() == b"1"
    finally:
        holder.release()
    standby.acquire()
    standby.release()


def test_who_was_overtaken_learns_it_before_its_work(connect: Connect) -> None:
    holder = TableStorage(connect, "receiver")
    holder.acquire()
    with connect() as there:
        there.execute("UPDATE veilmq_numbers SET version = version + 1, holder = NULL")
    there.close()
    with pytest.raises(StorageLost), holder.saving(b"1"):
        raise AssertionError("it may not begin")
    holder.release()


def test_of_many_that_make_one_table_none_fails(connect: Connect) -> None:
    """`CREATE TABLE IF NOT EXISTS` of two at once: the server tells one of them that a type's name is taken."""

    def take(number: int) -> None:
        storage = TableStorage(connect, f"row {number}")
        storage.acquire()
        storage.release()

    assert together(6, lambda _: TableGuard(connect).close()) == []
    assert together(6, take) == []


def test_a_table_that_is_there_takes_no_right_to_make_it(connect: Connect) -> None:
    TableGuard(connect).close()
    maker = TableStorage(connect, "s")
    maker.acquire()
    maker.release()
    with connect() as there:
        there.execute("DROP ROLE IF EXISTS worker")
        there.execute("CREATE ROLE worker")
        there.execute("GRANT USAGE ON SCHEMA public TO worker")
        there.execute("GRANT SELECT, INSERT, UPDATE ON veilmq_guard, veilmq_numbers TO worker")

    def restricted(role: str = "worker") -> "psycopg.Connection[tuple[object, ...]]":
        connection = connect()
        connection.execute(f"SET SESSION AUTHORIZATION {role}".encode())
        connection.commit()
        return connection

    with TableGuard(restricted) as guard:
        assert guard.begin("k", claim("a", SYSTEM.wall())) == Begun(1)
    storage = TableStorage(restricted, "s")
    storage.acquire()
    storage.save(b"[1]")
    storage.release()
    with pytest.raises(psycopg.errors.UndefinedTable):
        TableGuard(restricted, "missing")
    with connect() as there:
        there.execute("DROP OWNED BY worker")
        there.execute("DROP ROLE worker")


def test_what_the_server_closed_is_opened_again(connect: Connect, orders: Queue) -> None:
    def restart() -> None:
        with connect() as there:
            there.execute(
                "SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )

    outbox = Outbox()
    with connect() as there:
        for statement in outbox.ddl("postgresql"):
            there.execute(statement)
    relay = Relay(outbox, connect, orders)
    assert relay.run_once() == 0
    with TableGuard(connect) as guard:
        assert guard.begin("k", claim("a", SYSTEM.wall())) == Begun(1)
        with connect() as there:
            outbox.add(there.cursor(), "1")
        restart()
        guard.finish("k", 1, "done")
        assert relay.run_once() == 1
        assert guard.begin("k", claim("b", SYSTEM.wall())) == Done("done")
    relay.close()


def test_keys_that_postgresql_would_not_take_are_kept(connect: Connect) -> None:
    keys = ["x" * 256, "x" * 256 + "y", "k", "k\0", "k "]
    with TableGuard(connect) as guard:
        assert [guard.begin(key, claim("a", SYSTEM.wall())) for key in keys] == [Begun(1)] * len(keys)
