"""Who leaves and who comes: a closed side writes, holds and takes nothing any more, and a forked child never did."""

import errno
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import fsspec
import pytest
from msgspec.structs import replace
from tests.client.ordered_stage import LOST, UNREACHED, Failing, Memory, bodies, drain
from tests.client.test_forked import code_of, in_child
from tests.client.test_ordered_storages import ALL, Make, connection
from tests.support.embedded import EmbeddedClient

from veilmq.client.errors import GapFound, StorageHeld, StorageLost, TransportError
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Message, Received, Sent
from veilmq.client.ordered import LocalFile, Ordered, OrderedQueue, OrderedReceiver, OrderedSender, TableStorage, run
from veilmq.client.ordered.storage import LockedStorage, Storage
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.unreadable import Unreadable
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import MessageGone, ParameterInvalid, VeilError
from veilmq.model.messages import Failure


class Sides:
    """One queue, whose two sides are opened on the storages that `make` makes."""

    def __init__(self, embedded: EmbeddedClient, directory: Path, make: Make, stack: ExitStack) -> None:
        embedded.account.create("orders")
        self.embedded = embedded
        self.queue: Queue = embedded.account.queue("orders")
        self._directory = directory
        self._make = make
        self._stack = stack

    def storage(self, name: str) -> LockedStorage:
        (self._directory / name).mkdir(exist_ok=True)
        return self._make(self._directory / name, self.embedded.clock)

    def sender(self, queue: Queue | None = None, storage: Storage | None = None) -> OrderedSender:
        side = OrderedSender(queue or self.queue, storage or self.storage("send"), clock=self.embedded.clock)
        return self._stack.enter_context(side)

    def receiver(
        self, queue: Queue | None = None, storage: Storage | None = None, **options: object
    ) -> OrderedReceiver:
        options = {"clock": self.embedded.clock} | options
        side = OrderedReceiver(queue or self.queue, storage or self.storage("receive"), **options)  # type: ignore[arg-type]
        return self._stack.enter_context(side)

    def visible(self) -> int:
        stats = self.queue.stats()
        assert not stats.in_flight
        return stats.visible


def local(directory: Path, clock: object) -> LockedStorage:
    return LocalFile(directory / "numbers")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def sides(embedded: EmbeddedClient, tmp_path: Path, stack: ExitStack) -> Sides:
    return Sides(embedded, tmp_path, local, stack)


@pytest.fixture(params=ALL)
def on_any(request: pytest.FixtureRequest, embedded: EmbeddedClient, tmp_path: Path, stack: ExitStack) -> Sides:
    """On each kind of storage."""
    return Sides(embedded, tmp_path, request.param, stack)


def refused(*calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(TransportError, match="is closed") as caught:
            call()
        assert not caught.value.may_have_happened


class Parking(Wrapping):
    """A receive that no interruption ends, and that brings a message when it is told."""

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.parked, self.goes_on = threading.Event(), threading.Event()

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        self.parked.set()
        assert self.goes_on.wait(20)
        return super().receive(count_max, lease=lease)

    def interrupt(self) -> None:
        pass


class Asked(Wrapping):
    """Tells of its first receive."""

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.asked = threading.Event()

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        self.asked.set()
        return super().receive(count_max, lease=lease, wait=wait)


def thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


# A storage.


@pytest.mark.parametrize("make", ALL)
def test_a_storage_is_saved_only_by_who_has_it(make: Make, sides: Sides, tmp_path: Path) -> None:
    first, second = make(tmp_path, sides.embedded.clock), make(tmp_path, sides.embedded.clock)
    with pytest.raises(StorageLost):
        first.save(b"[0]")
    first.acquire()
    with pytest.raises(StorageHeld):
        first.acquire()
    first.save(b"[1]")
    first.release()
    with pytest.raises(StorageLost):
        first.save(b"[2]")
    second.acquire()
    with pytest.raises(StorageLost):
        first.save(b"[3]")
    assert second.load() == b"[1]"
    second.release()


def test_a_table_lends_no_cursor_when_it_was_released(tmp_path: Path) -> None:
    storage = TableStorage(connection(tmp_path / "n.db"), "r")
    storage.acquire()
    storage.release()
    with pytest.raises(StorageLost), storage.saving(b"[1]"):
        raise AssertionError("lent")


# A sender.


def test_a_closed_sender_sends_nothing(on_any: Sides) -> None:
    leaver = on_any.sender()
    leaver.send("1")
    leaver.close()
    calls = (lambda: leaver.send("x"), lambda: leaver.send_batch(["x"]), leaver.settle, leaver.reset)
    refused(*calls)
    standby = on_any.sender()
    refused(*calls)
    standby.send("2")
    leaver.close()
    standby.send("3")
    assert drain(on_any.receiver()) == ["1", "2", "3"]


def test_a_closed_sender_leaves_a_storage_object_to_the_next_one(on_any: Sides) -> None:
    storage = on_any.storage("send")
    leaver = on_any.sender(storage=storage)
    with pytest.raises(StorageHeld):
        on_any.sender(storage=storage)
    leaver.send("1")
    leaver.close()
    standby = on_any.sender(storage=storage)
    leaver.close()
    refused(lambda: leaver.send("x"))
    standby.send("2")
    assert drain(on_any.receiver()) == ["1", "2"]


def test_a_close_waits_for_the_send_under_way(sides: Sides) -> None:
    sending, goes_on = threading.Event(), threading.Event()

    class Slow(Wrapping):
        def send(self, message: str | Message) -> Sent:
            sending.set()
            assert goes_on.wait(20)
            return super().send(message)

    leaver = sides.sender(Slow(sides.queue))
    sender = thread(lambda: leaver.send("1"))
    assert sending.wait(20)
    closer = thread(leaver.close)
    with pytest.raises(StorageHeld):
        sides.sender()
    goes_on.set()
    for each in (sender, closer):
        each.join(20)
    standby = sides.sender()
    assert standby.pending == []
    standby.send("2")
    assert drain(sides.receiver()) == ["1", "2"]


class Full(Memory):
    """Fails the save whose turn it is, before or after it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None
        self.written = False

    def save(self, state: bytes) -> None:
        if self.left is not None:
            self.left -= 1
        if self.left == -1:
            if self.written:
                super().save(state)
            raise OSError(errno.ENOSPC, "no space left")
        super().save(state)


class Tens(Wrapping):
    """Ten messages a request."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, batch_messages_max=10)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("left", range(5))
def test_a_batch_of_which_a_number_was_not_stored_may_be_sent_again(sides: Sides, left: int, written: bool) -> None:
    """The whole batch if it raised, else what failed. Three requests are four saves."""
    storage = Full()
    sender = sides.sender(Tens(sides.queue), storage)
    storage.left, storage.written = left, written
    todo: Sequence[str] = bodies(30)
    results: list[Sent | VeilError] = []
    try:
        results = sender.send_batch(todo)
        todo = [body for body, result in zip(todo, results, strict=True) if isinstance(result, VeilError)]
    except OSError:
        pass
    assert (storage.left >= 0) == (left == 4)
    storage.left = None
    assert all(isinstance(each, Sent) for each in sender.send_batch(todo))
    assert drain(sides.receiver()) == bodies(30)


def test_an_open_message_that_is_refused_in_the_end_is_told(sides: Sides) -> None:
    no = ParameterInvalid(parameter="body", reason="not that one")
    queue = Failing(sides.queue)
    sender = sides.sender(queue)
    queue.plan = [(LOST, False), (LOST, False)]
    sender.send_batch(["never", "2"])
    queue.plan = [(no, False)]
    assert [isinstance(each, Sent) for each in sender.send_batch(["never", "2"])] == [False, True]
    queue.plan = [(LOST, False)]
    with pytest.raises(TransportError):
        sender.send("never")
    queue.plan = [(no, False)]
    with pytest.raises(ParameterInvalid, match="not that one"):
        sender.settle()
    sender.settle()
    sender.send("4")
    assert drain(sides.receiver()) == ["2", "4"]


def test_a_second_attempt_that_was_not_made_does_not_undo_the_first(sides: Sides) -> None:
    queue = Failing(sides.queue)
    queue.plan = [(LOST, True), (UNREACHED, False)]
    sender = sides.sender(queue)
    for _ in range(2):
        with pytest.raises(TransportError) as caught:
            sender.send("1")
        assert caught.value.may_have_happened
    sender.send("1")
    sender.send("2")
    assert drain(sides.receiver()) == ["1", "2"]


# A receiver.


def test_a_closed_receiver_acknowledges_nothing(on_any: Sides) -> None:
    on_any.sender().send_batch(["A", "B"])
    leaver = on_any.receiver()
    (first,) = leaver.receive()
    leaver.close()
    assert leaver.closed
    calls = (
        lambda: leaver.delete(first.handle), lambda: leaver.delete_batch([first.handle]), leaver.reset,
        lambda: leaver.release(first.handle), lambda: leaver.extend(first.handle, 30),
        leaver.receive, lambda: leaver.receive(wait=20),
    )  # fmt: skip
    refused(*calls)
    standby = on_any.receiver()
    refused(*calls)
    assert drain(standby) == ["A", "B"]
    assert on_any.visible() == 0


def test_a_closed_receiver_lends_no_cursor(sides: Sides, tmp_path: Path) -> None:
    sides.sender().send("A")
    leaver = sides.receiver(storage=TableStorage(connection(tmp_path / "n.db"), "r"))
    (first,) = leaver.receive()
    leaver.close()

    def acknowledge() -> None:
        with leaver.acknowledging(first.handle):
            raise AssertionError("lent")

    refused(acknowledge)


@pytest.mark.parametrize("own", [True, False])
def test_a_close_ends_a_receive_that_waits(sides: Sides, own: bool) -> None:
    """And it takes nothing of what comes then."""
    queue, came = Asked(sides.queue), []
    with LeaseKeeper(queue, visibility_timeout=30, interval=10, minimal_life=5, clock=sides.embedded.clock) as keeper:
        receiver = sides.receiver(queue, keeper=None if own else keeper)
        waiting = thread(lambda: came.append(receiver.receive(wait=3_000)))
        assert queue.asked.wait(20)
        receiver.close()
        waiting.join(20)
        assert came == [[]]
        sides.sender().send("1")
        assert sides.visible() == 1


@pytest.mark.parametrize("own", [True, False])
def test_what_a_receive_brings_after_the_close_is_released(
    sides: Sides, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("veilmq.client.ordered.receiving.intake.END_SECONDS", 0)
    queue, came = Parking(sides.queue), []
    with LeaseKeeper(queue, visibility_timeout=30, interval=10, minimal_life=5, clock=sides.embedded.clock) as keeper:
        receiver = sides.receiver(queue, keeper=None if own else keeper)
        waiting = thread(lambda: came.append(receiver.receive(wait=3_000)))
        assert queue.parked.wait(20)
        receiver.close()
        sides.sender().send_batch(["1", "2"])
        queue.goes_on.set()
        waiting.join(20)
        assert came == [[]]
        assert sides.visible() == 2
        assert keeper.leases == 0


def test_a_close_waits_for_what_a_receive_brings(sides: Sides) -> None:
    """The one after it finds the message at once."""
    sides.sender().send("1")
    queue = Parking(sides.queue)
    receiver = sides.receiver(queue)
    waiting = thread(lambda: receiver.receive(wait=3_000))
    assert queue.parked.wait(20)
    closing = thread(receiver.close)
    with pytest.raises(StorageHeld):
        sides.receiver()
    queue.goes_on.set()
    closing.join(20)
    assert sides.visible() == 1
    waiting.join(20)
    assert drain(sides.receiver()) == ["1"]


def test_a_policy_may_close_the_receiver(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for itself."""
    monkeypatch.setattr("veilmq.client.ordered.receiving.intake.END_SECONDS", 3_600)

    told: list[Unreadable] = []

    def leave(queue: Queue, message: Received, error: Unreadable) -> None:
        told.append(error)
        queue.release(message.handle)
        receiver.close()

    sides.queue.send_batch(["no number", "none"])
    receiver = sides.receiver(unreadable=leave)
    assert receiver.receive() == []
    assert len(told) == 1
    assert sides.visible() == 2


def test_what_the_keeper_takes_during_the_close_is_released(sides: Sides) -> None:
    """Its lease is so short that the keeper extends it first; at that moment the receiver is closed."""

    class Leaving(Wrapping):
        def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
            receiver.close()
            return super().extend(handle, lease)

    sides.sender().send("1")
    queue = Leaving(sides.queue)
    with LeaseKeeper(queue, visibility_timeout=100, interval=40, minimal_life=40, clock=sides.embedded.clock) as keeper:
        receiver = sides.receiver(queue, keeper=keeper)
        assert receiver.receive() == []
        assert keeper.leases == 0
        assert sides.visible() == 1


def test_a_gap_is_nothing_to_who_leaves(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veilmq.client.ordered.receiving.intake.END_SECONDS", 0)
    sides.sender().send_batch(["1", "2"])
    _, second = sides.queue.receive(2, lease=1_000)
    sides.queue.release(second.handle)
    queue, came = Parking(sides.queue), []
    queue.goes_on.set()
    told: list[GapFound] = []
    with LeaseKeeper(queue, visibility_timeout=600, clock=sides.embedded.clock) as keeper:
        receiver = sides.receiver(queue, keeper=keeper, lease=600, gap_timeout=60, tell_gap=told.append)
        assert receiver.receive() == []
        assert receiver.buffered == 1
        queue.parked.clear()
        queue.goes_on.clear()
        sides.embedded.pass_time(61)
        waiting = thread(lambda: came.append(receiver.receive(wait=3_000)))
        assert queue.parked.wait(20)
        receiver.close()
        queue.goes_on.set()
        waiting.join(20)
    assert came == [[]]
    assert told == []


def test_what_a_failing_policy_leaves_is_released(sides: Sides) -> None:
    def fail(queue: Queue, message: Received, error: Unreadable) -> None:
        queue.release(message.handle)
        raise RuntimeError("a bug")

    sides.queue.send_batch(["no number", "none"])
    receiver = sides.receiver(unreadable=fail)
    with pytest.raises(RuntimeError, match="a bug"):
        receiver.receive()
    assert sides.visible() == 2


def test_what_the_keeper_refuses_is_released(sides: Sides) -> None:
    sides.sender().send("1")
    with LeaseKeeper(sides.queue, clock=sides.embedded.clock) as keeper:
        receiver = sides.receiver(keeper=keeper)
    assert receiver.receive() == []
    assert sides.visible() == 1


def test_what_cannot_be_released_is_not_kept_either(sides: Sides) -> None:
    """Its lease ends, and it comes back."""

    class Unreleasable(Wrapping):
        def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
            raise UNREACHED

    sides.sender().send_batch(["1", "2"])
    with LeaseKeeper(sides.queue, clock=sides.embedded.clock) as keeper:
        keeper.queue = Unreleasable(sides.queue)
        receiver = sides.receiver(keeper=keeper)
        receiver.receive()
        receiver.close()
        assert keeper.leases == 0


def test_what_is_acknowledged_and_not_deleted_is_given_back(sides: Sides) -> None:
    class Undeletable(Wrapping):
        def delete(self, handle: str) -> None:
            raise UNREACHED

    sides.sender().send_batch(["1", "2"])
    with LeaseKeeper(Undeletable(sides.queue), clock=sides.embedded.clock) as keeper:
        leaver = sides.receiver(keeper=keeper)
        (first,) = leaver.receive()
        leaver.delete(first.handle)
        leaver.close()
        assert sides.visible() == 2
    assert drain(sides.receiver()) == ["2"]


def test_a_close_waits_for_the_acknowledgement_under_way(sides: Sides, tmp_path: Path) -> None:
    def table() -> TableStorage:
        return TableStorage(connection(tmp_path / "n.db"), "r")

    sides.sender().send_batch(["1", "2"])
    leaver = sides.receiver(storage=table())
    (first,) = leaver.receive()
    with leaver.acknowledging(first.handle):
        closing = thread(leaver.close)
        closing.join(0.2)
        with pytest.raises(StorageHeld):
            sides.receiver(storage=table())
        assert sides.queue.stats().visible == 0
    closing.join(20)
    assert drain(sides.receiver(storage=table())) == ["2"]


def test_a_commit_whose_answer_was_lost_is_not_made_twice(sides: Sides, tmp_path: Path) -> None:
    """What the application wrote and the acknowledgement are there; only nobody said so."""

    class Losing(sqlite3.Connection):
        lose = False

        def commit(self) -> None:
            super().commit()
            if Losing.lose:
                Losing.lose = False
                raise sqlite3.OperationalError("the answer was lost")

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "n.db", check_same_thread=False, factory=Losing)

    def done() -> list[str]:
        return [body for (body,) in there.execute("SELECT body FROM done")]

    def work(message: Ordered) -> None:
        with receiver.acknowledging(message.handle) as cursor:
            cursor.execute("INSERT INTO done VALUES (?)", (message.body,))

    there = connect()
    there.execute("CREATE TABLE done (body TEXT)")
    sides.sender().send_batch(["1", "2", "3"])
    receiver = sides.receiver(storage=TableStorage(connect, "r", paramstyle="qmark"))
    (first,) = receiver.receive()
    with pytest.raises(RuntimeError), receiver.acknowledging(first.handle):
        raise RuntimeError("not committed")
    assert receiver.receive() == []
    Losing.lose = True
    with pytest.raises(sqlite3.OperationalError):
        work(first)
    with pytest.raises(MessageGone):
        work(first)
    (second,) = receiver.receive()
    Losing.lose = True
    with pytest.raises(sqlite3.OperationalError):
        work(second)
    receiver.release(second.handle)
    (third,) = receiver.receive()
    work(third)
    assert done() == ["1", "2", "3"]
    assert sides.visible() == 0
    there.close()


# A loop.


def test_a_loop_that_waits_ends_at_once(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veilmq.client.ordered.LOOK_SECONDS", 3_000)

    def ends(queue: Asked, receiver: OrderedReceiver | Queue) -> None:
        handled: list[int] = []
        loop = thread(lambda: handled.append(run(receiver, lambda message: None)))
        assert queue.asked.wait(20)
        receiver.close()
        loop.join(20)
        assert handled == [0]
        assert run(receiver, lambda message: None) == 0

    queue = Asked(sides.queue)
    ends(queue, sides.receiver(queue))
    for name, wrapped in (("both", lambda ordered: ordered), ("inner", Wrapping)):
        again = Asked(sides.embedded.account.queue(sides.queue.name))
        ordered = OrderedQueue(again, receive_storage=sides.storage(name), clock=sides.embedded.clock)
        ends(again, wrapped(ordered))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("policy", ["block", "dead-letter"])
def test_what_is_handled_during_the_close_is_the_next_receivers(sides: Sides, policy: str, fails: bool) -> None:
    sides.embedded.account.create("dead")
    dead = sides.embedded.account.queue("dead")
    sides.sender().send_batch(["1", "2"])
    leaver = sides.receiver()

    def handler(message: Ordered) -> None:
        leaver.close()
        if fails:
            raise RuntimeError("not today")

    assert run(leaver, handler, on_failure=policy, dead_letters=dead) == 0
    assert dead.stats().visible == 0
    assert drain(sides.receiver()) == ["1", "2"]


# A forked child.


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_use_neither_side_and_closes_nothing(on_any: Sides) -> None:
    """Though a thread of its parent's has the locks, for ever in the child."""
    sender, receiver = on_any.sender(), on_any.receiver()
    sender.send_batch(["1", "2"])
    (first,) = receiver.receive()

    def work() -> bool:
        refusals = 0
        calls = (
            lambda: sender.send("x"), lambda: sender.send_batch(["x"]), sender.settle, sender.reset,
            lambda: sender.pending, receiver.receive, lambda: receiver.delete(first.handle),
            lambda: receiver.release(first.handle), lambda: receiver.extend(first.handle, 9), receiver.reset,
        )  # fmt: skip
        for call in calls:
            try:
                call()
            except StorageHeld:
                refusals += 1
        sender.close()
        receiver.close()
        return refusals == len(calls)

    with sender._lock, receiver._acks, receiver._changed:
        child = in_child(work)
    assert code_of(child) == 0
    with pytest.raises(StorageHeld):
        on_any.sender()
    sender.send("3")
    receiver.delete(first.handle)
    assert drain(receiver) == ["2", "3"]


def test_a_file_that_a_child_released_is_its_parents_still(tmp_path: Path) -> None:
    storage = LocalFile(tmp_path / "numbers")
    storage.acquire()

    def work() -> bool:
        storage.release()
        try:
            storage.save(b"[2]")
        except StorageHeld:
            return True
        return False

    assert code_of(in_child(work)) == 0
    storage.save(b"[1]")
    storage.release()
