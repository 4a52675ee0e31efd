"""Where the numbers live: each storage keeps what was saved, keeps others out, and fences who was overtaken."""

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import fsspec
import pytest
from tests.client.clocks_apart import HOUR, Apart, by, pass_time
from tests.client.numeric_driver import Numeric
from tests.client.test_forked import code_of, in_child
from tests.support.embedded import EmbeddedClient

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import StateInvalid, StorageHeld, StorageLost
from veilmq.client.ordered import LocalFile, ObjectStorage, OrderedReceiver, OrderedSender, StateLock, TableStorage
from veilmq.client.ordered.storage import LockedStorage
from veilmq.client.records.tables import rewritten
from veilmq.model.errors import CapabilityMissing, ParameterInvalid
from veilmq.testing.client_contract import for_each
from veilmq.testing.client_contract.stage import MovableClock


class TwoMethods:
    """A file, as a user may write a storage: no lock, nothing but load and save."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> bytes | None:
        return self.path.read_bytes() if self.path.exists() else None

    def save(self, state: bytes) -> None:
        self.path.write_bytes(state)


def connection(path: Path, paramstyle: str | None = None, clock: Clock = SYSTEM) -> Callable[[], sqlite3.Connection]:
    factory = Numeric if paramstyle == "numeric" else sqlite3.Connection
    return lambda: by(clock.wall, sqlite3.connect(path, check_same_thread=False, factory=factory))


def local(directory: Path, clock: MovableClock) -> LockedStorage:
    return LocalFile(directory / "numbers")


def table(directory: Path, clock: MovableClock) -> LockedStorage:
    return TableStorage(connection(directory / "numbers.db", clock=clock), "sender", clock=clock)


def objects(directory: Path, clock: MovableClock) -> LockedStorage:
    return ObjectStorage(f"file://{directory}/numbers", clock=clock)


def memory_objects(directory: Path, clock: MovableClock) -> LockedStorage:
    return ObjectStorage(f"memory://{directory.name}/numbers", clock=clock)


def two_methods(directory: Path, clock: MovableClock) -> LockedStorage:
    return StateLock(TwoMethods(directory / "numbers"), clock=clock)


Make = Callable[[Path, MovableClock], LockedStorage]
ALL: list[Make] = [local, table, objects, memory_objects, two_methods]
LEASED: list[Make] = [table, objects, memory_objects, two_methods]


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def made(tmp_path: Path, clock: MovableClock) -> Iterator[list[LockedStorage]]:
    made: list[LockedStorage] = []
    yield made
    for storage in made:
        storage.release()
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("make", ALL)
def test_what_was_saved_is_loaded(make: Make, tmp_path: Path, clock: MovableClock, made: list[LockedStorage]) -> None:
    first = make(tmp_path, clock)
    made.append(first)
    first.acquire()
    assert first.load() is None
    for number in range(3):
        first.save(b'{"next":%d}' % number)
    assert first.load() == b'{"next":2}'
    first.release()
    first.release()
    second = make(tmp_path, clock)
    made.append(second)
    second.acquire()
    assert second.load() == b'{"next":2}'


@pytest.mark.parametrize("make", ALL)
def test_a_second_holder_is_refused_until_the_first_lets_go(
    make: Make, tmp_path: Path, clock: MovableClock, made: list[LockedStorage]
) -> None:
    first, second = make(tmp_path, clock), make(tmp_path, clock)
    made += [first, second]
    first.acquire()
    first.save(b"{}")
    with pytest.raises(StorageHeld) as caught:
        second.acquire()
    assert f"pid {os.getpid()}" in caught.value.holder
    first.save(b"[1]")
    first.release()
    second.acquire()
    assert second.load() == b"[1]"


def overtakes(second: LockedStorage, first: LockedStorage, directory: Path, clock: MovableClock) -> None:
    """Of one that saved `[1]` just now and falls silent, when its hold has ended and not before; then it is fenced."""
    pass_time(directory, clock, 29)
    with pytest.raises(StorageHeld):
        second.acquire()
    pass_time(directory, clock, 2)
    second.acquire()
    assert second.load() == b"[1]"
    with pytest.raises(StorageLost):
        first.save(b"[2]")
    second.save(b"[3]")
    first.release()


@pytest.mark.parametrize("make", LEASED)
def test_a_silent_holder_is_overtaken_and_fenced(
    make: Make, tmp_path: Path, clock: MovableClock, made: list[LockedStorage]
) -> None:
    first, second = make(tmp_path, clock), make(tmp_path, clock)
    made += [first, second]
    first.acquire()
    first.save(b"[1]")
    overtakes(second, first, tmp_path, clock)
    assert second.load() == b"[3]"
    second.save(b"[4]")
    second.release()
    third = make(tmp_path, clock)
    made.append(third)
    third.acquire()
    assert third.load() == b"[4]"


@pytest.mark.parametrize("make", LEASED)
def test_a_save_renews_the_hold(make: Make, tmp_path: Path, clock: MovableClock, made: list[LockedStorage]) -> None:
    first, second = make(tmp_path, clock), make(tmp_path, clock)
    made += [first, second]
    first.acquire()
    for _ in range(4):
        pass_time(tmp_path, clock, 20)
        first.save(b"{}")
    with pytest.raises(StorageHeld):
        second.acquire()


def test_an_idle_holder_renews_by_itself(tmp_path: Path) -> None:
    renewed = threading.Event()

    class Watched(TwoMethods):
        saves = 0

        def save(self, state: bytes) -> None:
            super().save(state)
            self.saves += 1
            if self.saves >= 4:
                renewed.set()

    storage = StateLock(Watched(tmp_path / "numbers"), hold_seconds=0.05)
    storage.acquire()
    assert renewed.wait(30)
    storage.release()


def hold(make: Make, directory: Path, ready: Connection) -> None:
    """In a process of its own: take the storage, and never let go."""
    storage = make(directory, MovableClock())
    storage.acquire()
    storage.save(b"[7]")
    ready.send(True)
    signal.pause()


@pytest.mark.parametrize("make", [local, table, objects, two_methods])
def test_a_dead_holder_is_followed_at_once(
    make: Make, tmp_path: Path, clock: MovableClock, made: list[LockedStorage]
) -> None:
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=hold, args=(make, tmp_path, there))
    child.start()
    assert here.recv()
    storage = make(tmp_path, clock)
    made.append(storage)
    with pytest.raises(StorageHeld, match=f"pid {child.pid}"):
        storage.acquire()
    child.kill()
    child.join()
    storage.acquire()
    assert storage.load() == b"[7]"


def test_a_full_disk_leaves_no_lock_behind(tmp_path: Path) -> None:
    storage = LocalFile(tmp_path / "numbers")

    def work() -> bool:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="File too large"):
            storage.acquire()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        storage.acquire()
        return True

    assert code_of(in_child(work)) == 0


def test_a_forked_child_may_not_write_the_file(tmp_path: Path) -> None:
    storage = LocalFile(tmp_path / "numbers")
    storage.acquire()
    storage.save(b"[1]")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            storage.save(b"[2]")
        except StorageHeld:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.load() == b"[1]"
    storage.release()


@pytest.mark.parametrize("make", LEASED)
def test_a_forked_child_neither_saves_nor_releases_what_its_parent_holds(
    make: Make, tmp_path: Path, clock: MovableClock, made: list[LockedStorage]
) -> None:
    """It would count on under the parent's name: two messages with one number."""
    storage = make(tmp_path, clock)
    made.append(storage)
    storage.acquire()
    storage.save(b'{"of":"parent"}')
    held = f"pid {os.getpid()}"

    def work() -> bool:
        refused = 0
        for call in (lambda: storage.save(b'{"of":"child"}'), storage.acquire, storage.load):
            try:
                call()
            except StorageHeld as error:
                refused += error.holder == held
        storage.release()
        return refused == 3

    assert code_of(in_child(work)) == 0
    with pytest.raises(StorageHeld):
        make(tmp_path, clock).acquire()
    assert storage.load() == b'{"of":"parent"}'
    storage.save(b'{"of":"parent still"}')


def test_a_crash_while_writing_leaves_the_state_before(tmp_path: Path) -> None:
    storage = LocalFile(tmp_path / "numbers")
    storage.acquire()
    storage.save(b"[1]")
    (tmp_path / "numbers.new").write_bytes(b"[2")
    assert storage.load() == b"[1]"
    storage.save(b"[3]")
    assert (tmp_path / "numbers").read_bytes() == b"[3]"
    storage.release()


def test_the_object_of_a_holder_that_died_before_its_first_save_hides_nothing(
    tmp_path: Path, clock: MovableClock
) -> None:
    first = ObjectStorage(tmp_path / "numbers", clock=clock)
    first.acquire()
    first.save(b"[1]")
    first.release()
    (tmp_path / "numbers.000000000002").write_bytes(b"{}")
    second = ObjectStorage(f"file://{tmp_path}/numbers", clock=clock)
    second.acquire()
    assert second.load() == b"[1]"
    second.release()
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.000000000003"]


@pytest.mark.parametrize("state", [None, b"[0]"])
def test_two_that_begin_at_once_are_not_both_let_in(tmp_path: Path, clock: MovableClock, state: bytes | None) -> None:
    """The second one creates the same generation: exclusive creation lets one of them in. Or it finds that the object
    which it was about to read is gone, since the first one took over."""
    if state is not None:
        earlier = ObjectStorage(f"memory://{tmp_path.name}/numbers", clock=clock)
        earlier.acquire()
        earlier.save(state)
        earlier.release()
    first = ObjectStorage(f"memory://{tmp_path.name}/numbers", clock=clock)
    second = ObjectStorage(f"memory://{tmp_path.name}/numbers", clock=clock)
    listing = second._generations

    def late() -> list[int]:
        found = listing()
        second._generations = listing  # type: ignore[method-assign]
        first.acquire()
        return found

    second._generations = late  # type: ignore[method-assign]
    with pytest.raises(StorageHeld):
        second.acquire()
    first.save(b"[1]")
    first.release()
    fsspec.filesystem("memory").store.clear()


def test_two_rows_of_a_table_are_two_storages(tmp_path: Path, clock: MovableClock) -> None:
    sender, receiver = (TableStorage(connection(tmp_path / "n.db"), name, clock=clock) for name in ("s", "r"))
    sender.acquire()
    receiver.acquire()
    sender.save(b"[1]")
    assert receiver.load() is None
    sender.release()
    receiver.release()


def test_a_broken_connection_is_made_again(tmp_path: Path, clock: MovableClock) -> None:
    storage = TableStorage(connection(tmp_path / "n.db"), "s", clock=clock)
    storage.acquire()
    storage.save(b"[1]")
    with pytest.raises(sqlite3.OperationalError), storage.saving(b"[2]") as cursor:
        cursor.execute("nonsense")
    assert storage.load() == b"[1]"
    storage.save(b"[3]")
    assert storage.load() == b"[3]"
    storage.release()


def test_a_commit_whose_answer_was_lost_is_known_by_its_holder(tmp_path: Path, clock: MovableClock) -> None:
    class Losing(sqlite3.Connection):
        lose = False

        def commit(self) -> None:
            super().commit()
            if self.lose:
                Losing.lose = False
                raise sqlite3.OperationalError("the answer was lost")

    storage = TableStorage(
        lambda: sqlite3.connect(tmp_path / "n.db", check_same_thread=False, factory=Losing),
        "s", clock=clock, paramstyle="qmark",
    )  # fmt: skip
    storage.acquire()
    Losing.lose = True
    with pytest.raises(sqlite3.OperationalError):
        storage.save(b"[1]")
    storage.save(b"[2]")
    storage.save(b"[3]")
    assert storage.load() == b"[3]"
    storage.release()


@for_each(
    "options, parameter",
    [
        ({"table": "a; DROP TABLE b"}, "table"),
        ({"name": ""}, "name"),
        ({"hold_seconds": 0}, "hold_seconds"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, options: dict[str, object], parameter: str) -> None:
    with pytest.raises(ParameterInvalid) as caught:
        TableStorage(connection(tmp_path / "n.db"), **({"name": "s"} | options))
    assert caught.value.parameter == parameter


def test_autocommit_is_refused(tmp_path: Path) -> None:
    made = sqlite3.connect(tmp_path / "n.db", isolation_level=None)
    with pytest.raises(ParameterInvalid, match="autocommit"):
        TableStorage(lambda: made, "s").acquire()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        made.execute("SELECT 1")


@pytest.mark.parametrize("written", ["nonsense", '{"x":' + "[" * 5_000])
@pytest.mark.parametrize("make", LEASED)
def test_what_somebody_else_wrote_is_told(make: Make, tmp_path: Path, clock: MovableClock, written: str) -> None:
    storage = make(tmp_path, clock)
    storage.acquire()
    storage.save(b"{}")
    storage.release()
    if make is table:
        with sqlite3.connect(tmp_path / "numbers.db") as there:
            there.execute("UPDATE veilmq_numbers SET holder = ?", (written,))
        there.close()
    elif make is memory_objects:
        fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/numbers.000000000001", written.encode())
    else:
        (path,) = tmp_path.iterdir()
        path.write_text(written)
    with pytest.raises(StateInvalid):
        make(tmp_path, clock).acquire()
    fsspec.filesystem("memory").store.clear()


@for_each(
    "paramstyle, text, values",
    [
        ("qmark", "UPDATE t SET a = ? WHERE b = ?", (1, "x")),
        ("numeric", "UPDATE t SET a = :1 WHERE b = :2", (1, "x")),
        ("format", "UPDATE t SET a = %s WHERE b = %s", (1, "x")),
        ("pyformat", "UPDATE t SET a = %(p1)s WHERE b = %(p2)s", {"p1": 1, "p2": "x"}),
        ("named", "UPDATE t SET a = :p1 WHERE b = :p2", {"p1": 1, "p2": "x"}),
    ],
)
def test_parameters_are_written_as_the_driver_wants_them(paramstyle: str, text: str, values: object) -> None:
    assert rewritten("UPDATE t SET a = ? WHERE b = ?", (1, "x"), paramstyle) == (text, values)


@pytest.mark.parametrize("paramstyle", ["named", "numeric", None])
def test_the_drivers_paramstyle_is_used(
    tmp_path: Path, clock: MovableClock, paramstyle: str | None, embedded: EmbeddedClient
) -> None:
    storage = TableStorage(connection(tmp_path / "n.db", paramstyle), "s", clock=clock, paramstyle=paramstyle)
    embedded.account.create("orders")
    with OrderedSender(embedded.account.queue("orders"), storage, clock=embedded.clock) as sender:
        sender.send("1")
        assert sender.next_number == 2


# The acknowledgement in the application's own transaction.


def test_the_applications_rows_and_the_acknowledgement_are_one_transaction(
    tmp_path: Path, embedded: EmbeddedClient
) -> None:
    embedded.account.create("orders")
    queue = embedded.account.queue("orders")
    path = tmp_path / "application.db"
    with sqlite3.connect(path) as there:
        there.execute("CREATE TABLE done (body TEXT)")
    with OrderedSender(queue, LocalFile(tmp_path / "send"), clock=embedded.clock) as sender:
        sender.send_batch(["1", "2"])

    def opened() -> OrderedReceiver:
        storage = TableStorage(connection(path), "receiver", clock=embedded.clock)
        return OrderedReceiver(queue, storage, clock=embedded.clock)

    with opened() as receiver:
        (first,) = receiver.receive()
        with pytest.raises(sqlite3.OperationalError), receiver.acknowledging(first.handle) as cursor:
            cursor.executescript("BEGIN; INSERT INTO done VALUES ('never'); nonsense")
        assert there.execute("SELECT * FROM done").fetchall() == []
        assert receiver.next_number == 1
        with receiver.acknowledging(first.handle) as cursor:
            cursor.execute("INSERT INTO done VALUES (?)", (first.body,))
        assert receiver.next_number == 2
    with opened() as receiver:
        (second,) = receiver.receive()
        with receiver.acknowledging(second.handle) as cursor:
            cursor.execute("INSERT INTO done VALUES (?)", (second.body,))
    assert there.execute("SELECT body FROM done").fetchall() == [("1",), ("2",)]
    there.close()
    assert queue.stats().visible == queue.stats().in_flight == 0


def test_who_was_overtaken_leaves_no_rows_either(tmp_path: Path, clock: MovableClock) -> None:
    path = tmp_path / "application.db"
    with contextlib.closing(sqlite3.connect(path)) as there:
        there.execute("CREATE TABLE done (body TEXT)")
        first, second = (TableStorage(connection(path, clock=clock), "receiver", clock=clock) for _ in range(2))
        first.acquire()
        clock.advance(31)
        second.acquire()
        with pytest.raises(StorageLost), first.saving(b"[1]") as cursor:
            cursor.execute("INSERT INTO done VALUES ('1')")
        assert there.execute("SELECT * FROM done").fetchall() == []
        assert second.load() is None
        first.release()
        second.release()


def test_a_file_has_no_transaction(tmp_path: Path, embedded: EmbeddedClient) -> None:
    embedded.account.create("orders")
    queue = embedded.account.queue("orders")
    with OrderedReceiver(queue, LocalFile(tmp_path / "receive"), clock=embedded.clock) as receiver:
        with pytest.raises(CapabilityMissing), receiver.acknowledging("1.1.1"):
            pass


def test_what_is_no_storage_is_refused(embedded: EmbeddedClient) -> None:
    embedded.account.create("orders")
    with pytest.raises(ParameterInvalid, match="load"):
        OrderedSender(embedded.account.queue("orders"), object())  # type: ignore[arg-type]


def test_the_state_is_readable(tmp_path: Path, embedded: EmbeddedClient) -> None:
    embedded.account.create("orders")
    with OrderedSender(embedded.account.queue("orders"), LocalFile(tmp_path / "send"), clock=embedded.clock) as sender:
        sender.send("1")
        state = json.loads((tmp_path / "send").read_bytes())
        assert state == {
            "type": "ordered sender", "queue": "orders", "incarnation": "1", "epoch": sender.epoch, "next": 2,
            "pending": [],
        }  # fmt: skip


@pytest.mark.parametrize("apart", [-HOUR, HOUR])
@pytest.mark.parametrize("make", [table, objects, memory_objects])
def test_a_holder_is_overtaken_when_it_fell_silent_whatever_our_clocks_are(
    make: Make, apart: float, tmp_path: Path, clock: MovableClock, made: list[LockedStorage]
) -> None:
    first, second = make(tmp_path, clock), make(tmp_path, clock)
    second._watch._clock = Apart(clock, apart)  # type: ignore[attr-defined]
    made += [first, second]
    first.acquire()
    for passes in (20, 20):
        pass_time(tmp_path, clock, passes)
        first.save(b"[1]")
    overtakes(second, first, tmp_path, clock)
    with pytest.raises(StorageHeld):
        first.acquire()


@pytest.mark.parametrize("make", [table, objects])
def test_a_holder_of_an_older_version_is_judged_by_the_end_that_it_wrote(
    make: Make, tmp_path: Path, clock: MovableClock, made: list[LockedStorage]
) -> None:
    storage = make(tmp_path, clock)
    made.append(storage)
    storage.acquire()
    storage.save(b"[1]")
    storage.release()
    until = clock.wall() + 30
    owner = json.dumps({"token": "0123456789abcdef", "pid": 1, "place": "elsewhere", "until": until})
    if make is table:
        with contextlib.closing(sqlite3.connect(tmp_path / "numbers.db")) as there, there:
            there.execute("UPDATE veilmq_numbers SET holder = ?", (owner,))
    else:
        (tmp_path / "numbers.000000000001").write_text(f'{{"owner":{owner},"state":[1]}}')
    with pytest.raises(StorageHeld, match="pid 1 on elsewhere"):
        storage.acquire()
    pass_time(tmp_path, clock, 31)
    storage.acquire()
    assert storage.load() == b"[1]"


def test_a_store_that_tells_no_time_is_judged_by_our_own(
    tmp_path: Path, clock: MovableClock, made: list[LockedStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = objects(tmp_path, clock), objects(tmp_path, clock)
    made += [first, second]
    monkeypatch.setattr("veilmq.client.records._MODIFIED", ())
    first.acquire()
    with pytest.raises(StorageHeld):
        second.acquire()
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.000000000001"]
    clock.advance(31)
    second.acquire()
