"""What a user's own transaction writes is sent, and nothing else; whoever dies where, none is lost."""

import contextlib
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace
from tests.client.clocks_apart import HOUR, Apart, by
from tests.client.numeric_driver import Numeric
from tests.client.test_forked import code_of, in_child
from tests.support.embedded import EmbeddedClient

from veilmq.client.encrypted import EncryptedQueue, KeyFile, add_key, new_key
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Message, Sent, Template
from veilmq.client.outbox import ATTRIBUTE, Outbox, Relay, _Row
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.routed import RoutedQueue
from veilmq.client.shared.outages import EVERY_SECONDS, Outages
from veilmq.client.unreadable import keep
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import ParameterInvalid, QueueMissing, VeilError
from veilmq.testing.client_contract import for_each
from veilmq.testing.client_contract.stage import MovableClock

OUTBOX = Outbox()
Found = TypeVar("Found")


class Place:
    """An application's database with an outbox, and a queue."""

    def __init__(self, embedded: EmbeddedClient, path: Path) -> None:
        self.embedded = embedded
        self.path = path
        embedded.account.create("orders")
        self.queue: Queue = embedded.account.queue("orders")
        with contextlib.closing(self.connect()) as there:
            for statement in OUTBOX.ddl():
                there.execute(statement)
            there.execute("CREATE TABLE orders (number INTEGER)")
            there.commit()
        self.relays: list[Relay] = []

    def connect(self, paramstyle: str | None = None) -> sqlite3.Connection:
        factory = Numeric if paramstyle == "numeric" else sqlite3.Connection
        return by(self.embedded.clock.wall, sqlite3.connect(self.path, check_same_thread=False, factory=factory))

    def add(self, *messages: str | Message, commit: bool = True, **options: str) -> list[str]:
        """A transaction of the application."""
        with contextlib.closing(self.connect()) as there:
            cursor = there.cursor()
            cursor.execute("INSERT INTO orders VALUES (?)", (len(messages),))
            added = [OUTBOX.add(cursor, message, **options) for message in messages]
            if commit:
                there.commit()
        return added

    def relay(self, queue: Queue | None = None, **options: object) -> Relay:
        relay = Relay(OUTBOX, self.connect, queue or self.queue, **({"clock": self.embedded.clock} | options))
        self.relays.append(relay)
        return relay

    def rows(self, condition: str = "1") -> int:
        with contextlib.closing(self.connect()) as there:
            (count,) = there.execute(f"SELECT count(*) FROM veilmq_outbox WHERE {condition}").fetchone()
        return int(count)

    def bodies(self) -> list[str]:
        came = []
        while messages := self.queue.receive(100):
            came += [message.body for message in messages]
            self.queue.delete_batch([message.handle for message in messages])
        return came


@pytest.fixture
def place(embedded: EmbeddedClient, tmp_path: Path) -> Iterator[Place]:
    place = Place(embedded, tmp_path / "application.db")
    yield place
    for relay in place.relays:
        relay.close()


class Scripted(Wrapping):
    """The first batches end as told."""

    def __init__(self, inner: Queue, *script: Callable[[Queue, Sequence[Message]], list[Sent | VeilError]]) -> None:
        super().__init__(inner)
        self.script = list(script)

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        if self.script:
            return self.script.pop(0)(self.inner, [each for each in messages if isinstance(each, Message)])
        return self.inner.send_batch(messages)


class OwnCode(Wrapping):
    """A pattern with the application's own code: it knows a place for each type."""

    def __init__(self, inner: Queue, places: Mapping[str, int]) -> None:
        super().__init__(inner)
        self.places = places

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        assert all(self.places[each.type or "film"] >= 0 for each in messages if isinstance(each, Message))
        return self.inner.send_batch(messages)


class NotAsked(Wrapping):
    """Nothing is sent: a child may not use a data directory of its parent's."""

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        return [LOST] * len(messages)


LOST = TransportError(reason="the answer was lost", may_have_happened=True)


def sends_and_loses_the_answer(queue: Queue, messages: Sequence[Message]) -> list[Sent | VeilError]:
    queue.send_batch(messages)
    return [LOST] * len(messages)


def loses_the_second(queue: Queue, messages: Sequence[Message]) -> list[Sent | VeilError]:
    return [LOST if place == 1 else queue.send(message) for place, message in enumerate(messages)]


class Died(BaseException):
    pass


def dies(queue: Queue, messages: Sequence[Message]) -> list[Sent | VeilError]:
    raise Died


def is_missing(queue: Queue, messages: Sequence[Message]) -> list[Sent | VeilError]:
    raise QueueMissing(queue=queue.name)


def test_what_is_committed_is_sent_in_its_order(place: Place) -> None:
    place.add("1", "2")
    place.add(*[str(number) for number in range(3, 251)])
    assert place.relay(batch=20).run_once() == 250
    assert place.bodies() == [str(number) for number in range(1, 251)]
    assert place.relay().run_once() == 0
    assert place.rows("sent IS NOT NULL") == 250


class Native(Wrapping):
    """A FIFO queue of SQS, which takes some entries of a batch and fails others."""

    def __init__(self, inner: Queue, failing: list[str]) -> None:
        super().__init__(inner)
        self.failing = failing
        self.calls = 0

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        self.calls += 1
        return [self._one(message) for message in messages if isinstance(message, Message)]

    def _one(self, message: Message) -> Sent | VeilError:
        if message.body in self.failing:
            self.failing.remove(message.body)
            return LOST
        return self.inner.send(message)


@pytest.mark.parametrize("failing", [["a1"], ["a2"], ["a4"], ["a1", "b2"], ["b1", "b3", "a2"]])
def test_a_group_waits_for_a_row_that_failed(place: Place, failing: list[str]) -> None:
    place.embedded.account.create("orders.fifo", Template(fifo=True))
    place.queue = place.embedded.account.queue("orders.fifo")
    names = [f"{group}{number}" for number in range(1, 5) for group in "ab"]
    place.add(*[Message(name, group=name[0]) for name in names])
    queue = Native(place.queue, list(failing))
    relay = place.relay(queue, hold=HOUR)
    for _ in failing:
        if queue.failing:
            with pytest.raises(TransportError):
                relay.run_once()
    relay.run_once()
    assert place.rows("sent IS NULL") == 0
    came = place.bodies()
    for group in "ab":
        assert [body for body in came if body[0] == group] == [f"{group}{number}" for number in range(1, 5)]


def test_groups_of_one_row_are_one_batch(place: Place) -> None:
    place.embedded.account.create("orders.fifo", Template(fifo=True))
    place.add(*[Message("x", group=str(number)) for number in range(50)])
    queue = Native(place.embedded.account.queue("orders.fifo"), [])
    assert place.relay(queue).run_once() == 50
    assert queue.calls == 1


def test_without_groups_a_row_that_failed_comes_after_those_behind_it(place: Place) -> None:
    place.add("1", "2", "3", "4")
    relay = place.relay(Scripted(place.queue, loses_the_second), batch=3)
    with pytest.raises(TransportError):
        relay.run_once()
    relay.run_once()
    assert place.bodies() == ["1", "3", "4", "2"]


def test_what_is_rolled_back_is_not_sent(place: Place) -> None:
    place.add("never", commit=False)
    assert place.relay().run_once() == 0
    assert place.bodies() == []


def test_the_whole_message_is_kept(place: Place) -> None:
    whole = Message("7", attributes={"b": b"\0", "n": 1.5, "s": "x"}, priority=2, type="order", delay=5)
    (identity,) = place.add(whole)
    place.relay().run_once()
    assert place.bodies() == []
    place.embedded.pass_time(6)
    (message,) = place.queue.receive()
    assert (message.body, message.priority, message.type) == ("7", 2, "order")
    assert {**message.attributes} == {**whole.attributes, ATTRIBUTE: identity} | {
        name: value for name, value in message.attributes.items() if name.startswith("veilmq.type")
    }


def test_a_message_with_ten_attributes_is_sent_without_ours(place: Place) -> None:
    place.add(Message("full", attributes={str(number): "x" for number in range(10)}))
    place.relay().run_once()
    (message,) = place.queue.receive()
    assert ATTRIBUTE not in message.attributes
    assert place.rows("failure IS NOT NULL") == 0


def test_a_fifo_queue_gets_the_id_for_its_deduplication(place: Place) -> None:
    seen: list[Message] = []

    class Fifo(Wrapping):
        @property
        def capabilities(self) -> Capabilities:
            return replace(self.inner.capabilities, native_fifo=True, attributes=False)

        def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
            seen.extend(message for message in messages if isinstance(message, Message))
            return [Sent("x") for _ in messages]

    (first,) = place.add(Message("1", group="g"))
    place.add(Message("2", group="g", deduplication_id="mine"))
    place.add(Message("3", group="g"), deduplication_id="ours")
    place.relay(Fifo(place.queue)).run_once()
    assert [message.deduplication_id for message in seen] == [first, "mine", "ours"]
    assert all(not message.attributes for message in seen)


def test_an_id_stands_once(place: Place) -> None:
    place.add("1", deduplication_id="order 1")
    with pytest.raises(sqlite3.IntegrityError):
        place.add("1", deduplication_id="order 1")
    place.relay().run_once()
    with pytest.raises(sqlite3.IntegrityError):
        place.add("1", deduplication_id="order 1")


def test_a_lost_answer_sends_again_with_the_same_id(place: Place) -> None:
    identities = place.add("1", "2")
    relay = place.relay(Scripted(place.queue, sends_and_loses_the_answer))
    with pytest.raises(TransportError):
        relay.run_once()
    assert relay.run_once() == 2
    came = place.queue.receive(10)
    assert [message.attributes[ATTRIBUTE] for message in came] == identities * 2


def test_what_was_sent_of_a_broken_batch_is_not_sent_again(place: Place) -> None:
    place.add("1", "2", "3")
    relay = place.relay(Scripted(place.queue, loses_the_second))
    with pytest.raises(TransportError):
        relay.run_once()
    assert relay.run_once() == 1
    assert sorted(place.bodies()) == ["1", "2", "3"]


def test_a_missing_queue_marks_nothing_as_failed(place: Place) -> None:
    place.add("1")
    relay = place.relay(Scripted(place.queue, is_missing))
    with pytest.raises(QueueMissing):
        relay.run_once()
    assert relay.failures() == []
    assert relay.run_once() == 1


def test_a_message_that_is_refused_is_marked_and_blocks_nobody(place: Place) -> None:
    too_large = "x" * (place.queue.capabilities.body_bytes_max + 1)
    _, bad, _ = place.add("1", too_large, "3")
    with contextlib.closing(place.connect()) as there:
        there.execute("INSERT INTO veilmq_outbox (id, message) VALUES ('odd', 'no JSON')")
        there.commit()
    relay = place.relay()
    assert relay.run_once() == 2
    assert place.bodies() == ["1", "3"]
    assert [failure.id for failure in relay.failures()] == [bad, "odd"]
    assert "exceeds" in relay.failures()[0].reason
    assert relay.run_once() == 0
    assert relay.retry(bad)
    assert not relay.retry("nobody")
    assert relay.run_once() == 0
    assert len(relay.failures()) == 2


def test_a_key_that_is_not_allowed_is_no_fault_of_a_row(place: Place, tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", new_key())
    queue = EncryptedQueue(place.queue, KeyFile(tmp_path / "keys.json"), unreadable=keep)
    add_key(tmp_path / "keys.json", new_key("A128GCM"))
    place.add("1")
    relay = place.relay(queue)
    with pytest.raises(ParameterInvalid, match="keys"):
        relay.run_once()
    assert relay.failures() == []
    add_key(tmp_path / "keys.json", new_key())
    assert relay.run_once() == 1


def test_rows_of_a_dead_relay_are_taken_over(place: Place) -> None:
    place.add("1", "2")
    with pytest.raises(Died):
        place.relay(Scripted(place.queue, dies)).run_once()
    other = place.relay()
    assert other.run_once() == 0
    place.embedded.pass_time(61)
    assert other.run_once() == 2
    assert place.bodies() == ["1", "2"]


def test_rows_behind_those_of_a_dead_relay_wait_for_them(place: Place) -> None:
    place.embedded.account.create("orders.fifo", Template(fifo=True))
    place.queue = place.embedded.account.queue("orders.fifo")
    place.add(Message("a1", group="a"))
    with pytest.raises(Died):
        place.relay(Scripted(place.queue, dies)).run_once()
    place.add(Message("a2", group="a"), Message("b1", group="b"))
    other = place.relay()
    assert other.run_once() == 1
    assert place.bodies() == ["b1"]
    place.embedded.pass_time(61)
    assert other.run_once() == 2
    assert place.bodies() == ["a1", "a2"]


def test_a_group_that_waits_holds_up_no_other_one(place: Place) -> None:
    place.embedded.account.create("orders.fifo", Template(fifo=True))
    place.queue = place.embedded.account.queue("orders.fifo")
    place.add(Message("a0", group="a"))
    with pytest.raises(Died):
        place.relay(Scripted(place.queue, dies)).run_once()
    place.add(*[Message(f"a{number}", group="a") for number in range(1, 8)], Message("b", group="b"))
    other = place.relay(batch=3)
    assert other.run_once() == 1
    assert place.bodies() == ["b"]
    place.embedded.pass_time(61)
    assert other.run_once() == 8
    assert place.bodies() == [f"a{number}" for number in range(8)]


def test_rows_that_cannot_be_sent_hold_up_no_others(place: Place) -> None:
    account = place.embedded.account
    account.create("films")
    routed = RoutedQueue({"film": account.queue("films")}, place.queue)
    account.delete("films")
    place.add(*[Message(f"f{number}", type="film") for number in range(7)], "1", "2")
    relay = place.relay(routed, batch=2)
    for _ in range(4):
        with pytest.raises(QueueMissing):
            relay.run_once()
    assert place.bodies() == ["1", "2"]
    account.create("films")
    assert relay.run_once() == 7
    assert [message.body for message in account.queue("films").receive(10)] == [f"f{number}" for number in range(7)]

    # A row at which the application's own code raises holds up no others either, and itself only until that is mended.
    places = {"film": 0, "song": 1}
    routed = RoutedQueue({}, place.queue, by=lambda message: str(places[message.type or "film"]))
    place.add("1", Message("2", type="tune"), "3", *[Message(f"t{number}", type="tune") for number in range(12)])
    relay = place.relay(routed)
    with pytest.raises(ParameterInvalid, match="by: raised KeyError: 'tune'"):
        relay.run_once()
    assert place.bodies() == ["1", "3"]
    assert relay.failures() == []
    places["tune"] = 2
    assert relay.run_once() == 13
    place.bodies()
    del places["tune"]
    place.add(*[Message("t", type="tune") for _ in range(12)], Message("x" * (1 << 21)), "behind them")
    relay = place.relay(OwnCode(place.queue, places))
    with pytest.raises(KeyError, match="tune"):
        relay.run_once()
    assert (place.bodies(), len(relay.failures())) == (["behind them"], 1)


def test_a_route_that_is_away_slows_no_other(place: Place) -> None:
    """Rows of it are everywhere, and those that came back among them are tried again."""
    account = place.embedded.account
    for name in ("films", "songs"):
        account.create(name)
    routed = RoutedQueue({"film": account.queue("films"), "song": account.queue("songs")}, place.queue)
    for name in ("films", "songs"):
        account.delete(name)
    place.add(*[Message("x", type=kind) for kind in ["film"] * 5 + ["song"] * 4 + ["film"] * 5])
    relay = place.relay(routed, batch=2)
    for _ in range(5):
        with pytest.raises(QueueMissing):
            relay.run_once()
    account.create("songs")
    place.add(*[Message(str(number), type=None if number % 3 else "film") for number in range(9)])
    looks = 0
    while place.rows("sent IS NULL AND message NOT LIKE '%film%'"):
        looks += 1
        assert looks < 10
        with pytest.raises(QueueMissing):
            relay.run_once()
    assert place.bodies() == ["1", "2", "4", "5", "7", "8"]
    place.add("at once")
    with pytest.raises(QueueMissing):
        relay.run_once()
    account.create("films")
    assert relay.run_once() == 14


def test_after_an_outage_the_oldest_goes_first(place: Place) -> None:
    place.add(*"12345")
    relay = place.relay(Scripted(place.queue, *[is_missing] * 6), batch=1)
    for _ in range(3):
        with pytest.raises(QueueMissing):
            relay.run_once()
    assert relay.run_once() == 5
    assert place.bodies() == list("12345")


def test_a_group_waits_for_its_row_that_failed_and_no_other_does(place: Place) -> None:
    place.embedded.account.create("orders.fifo", Template(fifo=True))
    place.queue = place.embedded.account.queue("orders.fifo")
    place.add(*[Message(name, group=name[0]) for name in ("a1", "a2", "a3", "b1", "a4", "b2")])
    relay = place.relay(Native(place.queue, ["a1"]), batch=2)
    with pytest.raises(TransportError):
        relay.run_once()
    assert place.bodies() == ["b1", "b2"]
    assert relay.run_once() == 4
    assert place.bodies() == ["a1", "a2", "a3", "a4"]


def test_a_group_that_was_passed_in_an_earlier_look_waits_too(place: Place) -> None:
    """So many rows fail that a look ends; the next one tries the first again, and goes on behind those."""
    place.embedded.account.create("orders.fifo", Template(fifo=True))
    place.queue = place.embedded.account.queue("orders.fifo")
    names = ("a1", "b1", "c1", "b2", "c2", "d1")
    place.add(*[Message(name, group=name[0]) for name in names])
    relay = place.relay(Native(place.queue, ["a1", "b1", "a1"]), batch=1)
    for _ in range(2):
        with pytest.raises(TransportError):
            relay.run_once()
    assert place.bodies() == ["c1", "c2", "d1"]
    assert relay.run_once() == 3
    assert sorted(place.bodies()) == ["a1", "b1", "b2"]


def test_a_relay_that_was_too_slow_lets_nothing_go_that_another_one_holds(place: Place) -> None:
    def is_slow(queue: Queue, messages: Sequence[Message]) -> list[Sent | VeilError]:
        place.embedded.pass_time(61)
        with pytest.raises(Died):
            place.relay(Scripted(queue, dies)).run_once()
        return [LOST] * len(messages)

    place.add("1")
    with pytest.raises(TransportError):
        place.relay(Scripted(place.queue, is_slow)).run_once()
    assert place.relay().run_once() == 0


def test_relays_share_a_table(place: Place) -> None:
    place.add(*[str(number) for number in range(200)])
    relays = [place.relay(batch=7) for _ in range(3)]

    def work(relay: Relay) -> None:
        while place.rows("sent IS NULL"):
            with contextlib.suppress(sqlite3.OperationalError):  # locked for longer than its driver waits
                relay.run_once()

    threads = [threading.Thread(target=work, args=(relay,)) for relay in relays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(place.bodies(), key=int) == [str(number) for number in range(200)]


class Interrupted(Relay):
    """Before it holds the rows that it found, something else happens."""

    meanwhile: Callable[[], object] | None = None

    def _tried(self, work: Callable[[object], Found]) -> Found:
        found = super()._tried(work)
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return found


def test_two_relays_keep_the_order_of_a_group(place: Place) -> None:
    """The first one finds rows 1 and 2; the second finds all four, and the first one holds its two before it does."""
    place.embedded.account.create("orders.fifo", Template(fifo=True))
    queue = place.queue = place.embedded.account.queue("orders.fifo")
    place.add(*[Message(str(number), group="g") for number in (1, 2)])
    first, second = place.relay(queue), Interrupted(OUTBOX, place.connect, queue, clock=place.embedded.clock)
    place.relays.append(second)
    place.add(*[Message(str(number), group="g") for number in (3, 4)])
    held: list[list[_Row]] = []

    def others() -> None:
        first._batch = 2
        held.append(first._take(0, set()))

    second.meanwhile = others
    assert second.run_once() == 0
    assert [row.position for row in held[0]] == [1, 2]
    first._mark(held[0], first._send(held[0]))
    assert second.run_once() == 2
    assert place.bodies() == ["1", "2", "3", "4"]


def test_the_thread_sends_when_it_is_woken(place: Place) -> None:
    with place.relay(check_every=3_600) as relay:
        place.add("1")
        relay.wake()
        (message,) = place.queue.receive(wait=30)
    assert message.body == "1"


def test_a_queue_that_is_away_is_a_line_in_the_log(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.add("1")
    with place.relay(Scripted(place.queue, is_missing), check_every=3_600) as relay:
        while not caplog.records:
            pass
        relay.wake()
        assert place.queue.receive(wait=30)
    (record,) = caplog.records
    assert record.getMessage() == "outbox: sending failed: no queue orders"
    assert record.exc_info is None

    # Away for six seconds, and still a minute later, with an error of another kind, too. Then it is there again.
    caplog.clear()
    clock = MovableClock()
    outages = Outages(logging.getLogger("veilmq.outbox"), "outbox", clock)
    missing, bug = QueueMissing(queue="orders"), RuntimeError("gone")
    for pause, error in ((0, missing), (2, missing), (4, missing), (EVERY_SECONDS, missing), (3, bug), (3, bug)):
        clock.advance(pause)
        outages.failed("sending", error)
    outages.worked("sending")
    outages.worked("sending")
    assert [record.getMessage() for record in caplog.records] == [
        "outbox: sending failed: no queue orders",
        "outbox: sending failed: no queue orders (failures since the last line: 3)",
        "outbox: sending failed: gone",
        "outbox: sending works again (failures since the last line: 1)",
    ]
    levels = [(record.levelname, record.exc_info is not None) for record in caplog.records]
    assert levels == [("WARNING", False), ("WARNING", False), ("ERROR", True), ("WARNING", False)]

    # A service that throttles, and then refuses.
    caplog.clear()
    for code in ("Throttling", "Throttling", "AccessDenied", "Throttling"):
        outages.failed("receiving", ServiceError(code=code, status=400, request_id="", message="no"))
    assert [record.getMessage() for record in caplog.records] == [
        "outbox: receiving failed: Throttling: no (status 400)",
        "outbox: receiving failed: AccessDenied: no (status 400) (failures since the last line: 2)",
    ]

    # Every second try fails, for two minutes: two lines a minute, and each failure is in a number.
    caplog.clear()
    for _ in range(2 * int(EVERY_SECONDS)):
        clock.advance(1)
        outages.failed("sending", missing)
        outages.worked("sending")
    assert [record.getMessage() for record in caplog.records] == [
        "outbox: sending failed: no queue orders (failures since the last line: 54)",
        "outbox: sending works again (failures since the last line: 1)",
        "outbox: sending failed: no queue orders (failures since the last line: 59)",
        "outbox: sending works again (failures since the last line: 1)",
    ]


def test_old_rows_are_pruned(place: Place) -> None:
    place.add("1", "2")
    relay = place.relay()
    relay.run_once()
    place.add("3")
    place.embedded.pass_time(100)
    assert relay.prune(200) == 0
    assert relay.prune(50) == 2
    assert place.rows() == 1


def add_as(paramstyle: str | None, place: Place) -> Outbox:
    outbox = Outbox(paramstyle=paramstyle)
    with contextlib.closing(place.connect(paramstyle)) as there:
        outbox.add(there.cursor(), "1")
        there.commit()
    return outbox


@pytest.mark.parametrize("paramstyle", ["qmark", "numeric", "named", None])
def test_the_drivers_paramstyle_is_used(place: Place, paramstyle: str | None) -> None:
    outbox = add_as(paramstyle, place)
    relay = Relay(outbox, lambda: place.connect(paramstyle), place.queue, clock=place.embedded.clock)
    assert relay.run_once() == 1
    relay.close()
    assert place.bodies() == ["1"]


def with_its_connection(place: Place) -> object:
    """sqlite3's connections can be called, as no other driver's can."""
    with contextlib.closing(place.connect()) as there:
        return Relay(OUTBOX, there, place.queue)


@for_each(
    "make, parameter",
    [
        (lambda place: Outbox(table="a b"), "table"),
        (lambda place: OUTBOX.ddl("oracle"), "dialect"),
        (lambda place: add_as("other", place), "paramstyle"),
        (lambda place: place.add(Message(b"1")), "body"),
        (lambda place: place.add("1", deduplication_id="x" * 121), "deduplication_id"),
        (lambda place: place.add("1", deduplication_id="order 7\x01"), "deduplication_id"),
        (lambda place: place.relay(batch=0), "batch"),
        (lambda place: place.relay(hold=0), "hold"),
        (lambda place: place.relay(check_every=-1), "check_every"),
        (lambda place: Relay(OUTBOX, lambda: sqlite3.connect(place.path, isolation_level=None), place.queue).run_once(),
         "connect"),
        (lambda place: Relay(OUTBOX, place.path, place.queue), "connect"),  # type: ignore[arg-type]
        (with_its_connection, "connect"),
        (lambda place: Relay(OUTBOX, place.connect, place.embedded.account), "queue"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(place: Place, make: Callable[[Place], object], parameter: str) -> None:
    with pytest.raises(ParameterInvalid) as caught:
        make(place)
    assert caught.value.parameter == parameter
    assert place.rows() == 0


@for_each("dialect", ["sqlite", "postgresql", "mysql"])
def test_tables_are_made_for_each_dialect(dialect: str) -> None:
    table, index = Outbox(table="app.outbox").ddl(dialect)
    assert table.startswith("CREATE TABLE app.outbox (position ")
    if dialect != "sqlite":
        assert index == "CREATE INDEX app_outbox_unsent ON app.outbox (sent, position)"


def test_a_table_of_a_schema_is_made_on_sqlite() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as there:
        for statement in Outbox(table="main.outbox").ddl():
            there.execute(statement)
        (index,) = there.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL").fetchone()
    assert index == "outbox_unsent"


# A relay that is killed.

MORTAL = """
import os, signal, sqlite3, sys
from pathlib import Path
from veilmq.client.outbox import Outbox, Relay
from veilmq.client.wrapping import Wrapping
from tests.support.embedded import EmbeddedClient

directory, point = Path(sys.argv[1]), sys.argv[2]
class Mortal(Wrapping):
    def send_batch(self, messages):
        if point == "before": os.kill(os.getpid(), signal.SIGKILL)
        self.inner.send_batch(messages)
        os.kill(os.getpid(), signal.SIGKILL)
client = EmbeddedClient(directory / "embedded")
orders = Mortal(client.account.queue("orders"))
Relay(Outbox(), lambda: sqlite3.connect(directory / "application.db"), orders).run_once()
"""


@pytest.mark.parametrize(("point", "copies"), [("before", 1), ("after", 2)])
def test_a_killed_relay_loses_nothing(place: Place, tmp_path: Path, point: str, copies: int) -> None:
    identities = place.add("1", "2")
    place.embedded.account.close()
    done = subprocess.run([sys.executable, "-c", MORTAL, str(tmp_path), point], timeout=60, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    client = place.embedded = EmbeddedClient(tmp_path / "embedded")
    client.pass_time(61)
    queue = client.account.queue("orders")
    relay = Relay(OUTBOX, place.connect, queue, clock=client.clock)
    assert relay.run_once() == 2
    relay.close()
    assert [message.attributes[ATTRIBUTE] for message in queue.receive(10)] == identities * copies
    client.account.close()


def test_a_relay_that_is_closed_does_not_first_send_all_there_is(place: Place) -> None:
    place.add(*(f"{number}" for number in range(50)))
    sending, closing = threading.Event(), threading.Event()

    class Slow(Wrapping):
        def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
            sending.set()
            assert closing.wait(20)
            return self.inner.send_batch(messages)

    relay = place.relay(Slow(place.queue), batch=1)
    relay.start()
    assert sending.wait(20)
    closer = threading.Thread(target=relay.close)
    closer.start()
    while not relay._closing:
        closer.join(0.001)
    closing.set()
    closer.join(20)
    assert not closer.is_alive()
    assert place.rows("sent IS NULL") == 49
    assert relay.run_once() == 49


def test_a_forked_child_relays_over_a_connection_of_its_own(place: Place) -> None:
    relay = place.relay(NotAsked(place.queue))
    relay.start()
    assert relay.run_once() == 0
    parents = relay._connection._open()

    def work() -> bool:
        relay.start()
        relay.wake()
        running = relay._thread is not None and relay._thread.is_alive()
        relay.close()
        return running and relay._connection._open() is not parents

    assert code_of(in_child(work)) == 0
    assert relay._connection._open() is parents
    place.add("after")
    assert relay.failures() == []


def test_an_attribute_that_no_queue_can_carry_is_refused_in_the_transaction(place: Place) -> None:
    with pytest.raises(ParameterInvalid, match=r"attributes\['on'\]"):
        place.add(Message("x", {"on": True}))
    assert place.rows() == 0


def test_numbers_and_bytes_are_sent_as_they_were_given(place: Place) -> None:
    given = {"price": Decimal("0.12345678901234567890123456789"), "big": 10**37 + 1, "raw": bytearray(b"\0\xff")}
    place.add(Message("x", given))
    assert place.relay().run_once() == 1
    (message,) = place.queue.receive()
    assert {name: message.attributes[name] for name in given} == given


# Machines whose clocks differ.


class Meanwhile(Wrapping):
    """Something happens while a batch is being sent."""

    def __init__(self, inner: Queue, happens: Callable[[], object]) -> None:
        super().__init__(inner)
        self.happens = happens

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        self.happens()
        return self.inner.send_batch(messages)


@pytest.mark.parametrize("apart", [-HOUR, HOUR])
def test_a_relay_whose_clock_is_an_hour_off_takes_no_rows_that_are_held(place: Place, apart: float) -> None:
    place.add("1", "2")
    other = place.relay(clock=Apart(place.embedded.clock, apart))
    others: list[int] = []
    relay = place.relay(Meanwhile(place.queue, lambda: others.append(other.run_once())))
    assert (relay.run_once(), others) == (2, [0])
    assert place.bodies() == ["1", "2"]


@pytest.mark.parametrize("apart", [-HOUR, HOUR])
def test_a_dead_relay_s_rows_wait_no_hour_more_for_one_whose_clock_is_off(place: Place, apart: float) -> None:
    place.add("1")
    dead = place.relay()
    assert len(dead._take(0, set())) == 1
    dead._connection.close()
    other = place.relay(clock=Apart(place.embedded.clock, apart))
    place.embedded.pass_time(59)
    assert other.run_once() == 0
    place.embedded.pass_time(2)
    assert other.run_once() == 1
    assert place.rows(f"abs(sent - {place.embedded.clock.wall()}) < 60") == 1


def test_a_database_whose_clock_nobody_knows_is_judged_by_our_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("veilmq.client.records.tables._CLOCKS", ("no_clock_of_this_name()",))
    place.add("1")
    assert len(place.relay()._take(0, set())) == 1
    assert place.relay().run_once() == 0
    place.embedded.pass_time(61)
    assert place.relay().run_once() == 1
    assert place.relay().prune(-1) == 1
