"""The patterns on queues that are FIFO themselves: in a data directory, and on a server.

What the patterns do by themselves on any queue, their own tests show; here the store's order and its deduplication take
part. A crash is an exception that no code catches; nothing of the dead side is used afterwards.
"""

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
from tests.client.clocks_apart import by

from veilmq.client.adapters.veil import VeilAccount
from veilmq.client.errors import PublishIncomplete, TransportError
from veilmq.client.messages import Message, Sent, Template
from veilmq.client.ordered import LocalFile, OrderedReceiver, OrderedSender
from veilmq.client.outbox import Outbox, Relay
from veilmq.client.queue import Account, Queue
from veilmq.client.topics import ID_ATTRIBUTE, Definitions, create_pull_topic
from veilmq.client.transaction import ATTRIBUTE, Form, Outcome, Prepared, Times, TransactionQueue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, VeilError
from veilmq.testing.client_contract import for_each
from veilmq.testing.client_contract.stage import MovableClock
from veilmq.testing.local import LocalServer

WINDOW = 300
"""Seconds for which a deduplication id is remembered."""
WEEK = 7 * 86_400
NUMBERS = count()
LOST = TransportError(reason="the answer was lost", may_have_happened=True)


class There(Protocol):
    account: Account
    clock: MovableClock

    def pass_time(self, seconds: float) -> None: ...


class OnServer:
    """An account of a server whose clock moves."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self.clock = MovableClock()
        address = urlsplit(server.sqs_url)
        self.account: Account = VeilAccount(address.hostname or "", address.port, clock=self.clock)

    def pass_time(self, seconds: float) -> None:
        self._server.advance(seconds=seconds)
        self.clock.advance(seconds)


@pytest.fixture(params=["embedded", "veil"])
def there(request: pytest.FixtureRequest) -> Iterator[There]:
    if request.param == "embedded":
        yield request.getfixturevalue("embedded")
    else:
        there = OnServer(request.getfixturevalue("server"))
        yield there
        there.account.close()


def made(there: There, name: str, fifo: bool = True) -> Queue:
    """A new queue."""
    name = f"{name}-{next(NUMBERS)}" + (".fifo" if fifo else "")
    there.account.create(name, Template(fifo=fifo, retention=WEEK))
    return there.account.queue(name)


def taken(queue: Queue) -> list[Any]:
    """All that there is, deleted."""
    came = []
    while messages := queue.receive(10):
        assert queue.delete_batch([message.handle for message in messages]) == [None] * len(messages)
        came += messages
    return came


def bodies(queue: Queue) -> list[str]:
    return [message.body for message in taken(queue)]


class Killed(BaseException):
    """The process is gone."""


class Trouble(Wrapping):
    """Sends arrive, and then `error` happens, once."""

    error: BaseException | None = None

    def send(self, message: str | Message) -> Sent:
        sent = self.inner.send(message)
        self._happen()
        return sent

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        results = self.inner.send_batch(messages)
        self._happen()
        return results

    def _happen(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


class TestOrdered:
    """Numbers and the store's own order."""

    @pytest.fixture
    def queue(self, there: There) -> Trouble:
        return Trouble(made(there, "ordered"))

    @pytest.fixture
    def sender(self, there: There, queue: Trouble, tmp_path: Path) -> Iterator[Callable[[], OrderedSender]]:
        sides: list[OrderedSender] = []

        def opened() -> OrderedSender:
            for side in sides:
                side.close()
            sides.append(OrderedSender(queue, LocalFile(tmp_path / "send"), clock=there.clock))
            return sides[-1]

        yield opened
        for side in sides:
            side.close()

    @pytest.fixture
    def receiver(self, there: There, queue: Trouble, tmp_path: Path) -> Iterator[Callable[..., OrderedReceiver]]:
        sides: list[OrderedReceiver] = []

        def opened(**options: Any) -> OrderedReceiver:
            for side in sides:
                side.close()
            storage = LocalFile(tmp_path / "receive")
            sides.append(OrderedReceiver(queue, storage, clock=there.clock, **options))
            return sides[-1]

        yield opened
        for side in sides:
            side.close()

    @staticmethod
    def drained(receiver: OrderedReceiver, count_max: int = 100_000) -> list[str]:
        came: list[str] = []
        while len(came) < count_max and (messages := receiver.receive()):
            receiver.delete(messages[0].handle)
            came.append(messages[0].body)
        return came

    def test_the_order_survives_both_sides_being_opened_again(
        self, sender: Callable[[], OrderedSender], receiver: Callable[..., OrderedReceiver]
    ) -> None:
        wanted = [str(number) for number in range(60)]
        sender().send_batch(wanted[:25])
        came = self.drained(receiver(), 7)
        second = sender()
        for body in wanted[25:30]:
            second.send(body)
        # One message is in hand, others are buffered, and all go back.
        assert receiver().receive()[0].body == wanted[7]
        second.send_batch(wanted[30:])
        assert came + self.drained(receiver()) == wanted

    def test_one_group_holds_the_order_and_numbers_are_its_deduplication_ids(
        self, queue: Trouble, sender: Callable[[], OrderedSender]
    ) -> None:
        side = sender()
        side.send_batch(["1", "2"])
        came = taken(queue)
        assert {message.group for message in came} == {"veilmq.ordered"}
        assert [message.deduplication_id for message in came] == [f"{side.epoch}.1", f"{side.epoch}.2"]

    def test_the_second_copy_of_a_lost_answer_is_absorbed(
        self, queue: Trouble, sender: Callable[[], OrderedSender], receiver: Callable[..., OrderedReceiver]
    ) -> None:
        queue.error = LOST
        results = sender().send_batch(["1", "2", "3"])
        assert all(isinstance(result, TransportError) for result in results)
        again = sender().send_batch(["1", "2", "3", "4"])
        assert [isinstance(each, Sent) and each.duplicate for each in again] == [True, True, True, False]
        assert queue.stats().visible == 4
        assert self.drained(receiver()) == ["1", "2", "3", "4"]

    def test_a_producer_that_died_after_its_send_sends_no_second_copy(
        self, queue: Trouble, sender: Callable[[], OrderedSender], receiver: Callable[..., OrderedReceiver]
    ) -> None:
        queue.error = Killed()
        with pytest.raises(Killed):
            sender().send("1")
        second = sender()
        assert [message.body for message in second.pending] == ["1"]
        second.send("2")
        assert queue.stats().visible == 2
        assert self.drained(receiver()) == ["1", "2"]

    def test_past_the_window_the_number_drops_the_second_copy(
        self,
        there: There,
        queue: Trouble,
        sender: Callable[[], OrderedSender],
        receiver: Callable[..., OrderedReceiver],
    ) -> None:
        queue.error = Killed()
        with pytest.raises(Killed):
            sender().send("1")
        there.pass_time(WINDOW + 1)
        sender().send("2")
        assert queue.stats().visible == 3
        assert self.drained(receiver()) == ["1", "2"]
        assert queue.stats().visible == 0

    def test_what_a_dead_receiver_held_comes_in_order(
        self,
        there: There,
        queue: Trouble,
        sender: Callable[[], OrderedSender],
        receiver: Callable[..., OrderedReceiver],
    ) -> None:
        wanted = [str(number) for number in range(15)]
        sender().send_batch(wanted)
        assert len(queue.receive(10, lease=30)) == 10
        side = receiver()
        assert side.receive() == []
        there.pass_time(31)
        assert self.drained(side) == wanted

    def test_other_groups_are_set_aside_and_block_nothing(
        self, queue: Trouble, sender: Callable[[], OrderedSender], receiver: Callable[..., OrderedReceiver]
    ) -> None:
        queue.send(Message("stranger", group="another", deduplication_id="s"))
        sender().send_batch(["1", "2"])
        aside: list[str] = []
        side = receiver(unreadable=lambda queue, message, error: aside.append(message.body))
        assert self.drained(side) == ["1", "2"]
        assert aside == ["stranger"]


class Ledger:
    """The application's own database."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def do(self, prepared: Prepared) -> bool:
        self.done.append(prepared.id)
        return True

    def check(self, prepared: Prepared) -> bool:
        return prepared.id in self.done


class TestTransaction:
    """A FIFO queue has no delay of a message's own, so the message waits in the log."""

    @pytest.fixture
    def ledger(self) -> Ledger:
        return Ledger()

    @staticmethod
    def opened(there: There, queue: Queue, log: Queue, ledger: Ledger, timeout: float = 60) -> TransactionQueue:
        return TransactionQueue(queue, log, ledger.check, times=Times(timeout=timeout), clock=there.clock)

    def test_it_is_logged_without_being_told(self, there: There, ledger: Ledger) -> None:
        queue, log = made(there, "orders"), made(there, "log", fifo=False)
        transactions = self.opened(there, queue, log, ledger)
        assert transactions.form is Form.LOGGED
        sent = transactions.send_transaction(Message("7", group="g"), ledger.do)
        assert sent.outcome is Outcome.COMMITTED
        assert (
            transactions.send_transaction(Message("8", group="g"), lambda prepared: False).outcome
            is Outcome.ROLLED_BACK
        )
        (message,) = taken(queue)
        assert (message.body, message.deduplication_id, message.attributes[ATTRIBUTE]) == ("7", sent.id, sent.id)
        there.pass_time(61)
        assert transactions.checker.run_once() == 0
        with pytest.raises(CapabilityMissing):
            TransactionQueue(queue, log, ledger.check, form=Form.HIDDEN, clock=there.clock)

    @pytest.mark.parametrize(("timeout", "copies"), [(60, 1), (600, 2)], ids=["within-the-window", "past-it"])
    def test_a_producer_that_died_after_its_commit_leaves_one_copy_within_the_window(
        self, there: There, ledger: Ledger, timeout: float, copies: int
    ) -> None:
        queue, log = Trouble(made(there, "orders")), made(there, "log", fifo=False)
        queue.error = Killed()
        with pytest.raises(Killed):
            self.opened(there, queue, log, ledger, timeout).send_transaction(Message("7", group="g"), ledger.do)
        there.pass_time(timeout + 1)
        checker = self.opened(there, queue, log, ledger, timeout).checker
        assert checker.run_once() == 1
        came = taken(queue)
        assert [message.body for message in came] == ["7"] * copies
        # The key by which consumers tell a copy, in any case.
        assert {message.attributes[ATTRIBUTE] for message in came} == set(ledger.done)

    def test_a_copy_is_dropped_after_the_first_was_consumed(self, there: There, ledger: Ledger) -> None:
        queue, log = Trouble(made(there, "orders")), made(there, "log", fifo=False)
        queue.error = Killed()
        with pytest.raises(Killed):
            self.opened(there, queue, log, ledger).send_transaction(Message("7", group="g"), ledger.do)
        assert bodies(queue) == ["7"]
        there.pass_time(61)
        assert self.opened(there, queue, log, ledger).checker.run_once() == 1
        assert bodies(queue) == []

    def test_the_applications_own_id_wins(self, there: There, ledger: Ledger) -> None:
        queue, log = made(there, "orders"), made(there, "log", fifo=False)
        transactions = self.opened(there, queue, log, ledger)
        for _ in range(2):
            given = Message("7", group="g", deduplication_id="order-7")
            assert transactions.send_transaction(given, ledger.do).outcome is Outcome.COMMITTED
        assert bodies(queue) == ["7"]

    @for_each(
        "message, parameter",
        [
            (Message("7"), "group"),
            (Message("7", group=""), "group"),
            (Message("7", group="g" * 129), "group"),
            (Message("7", group="g", deduplication_id="order 7"), "deduplication_id"),
            (Message("7", group="g", delay=1), "delay"),
        ],
        ids=["no-group", "empty-group", "long-group", "id-with-a-space", "delay"],
    )
    def test_what_the_queue_would_refuse_is_refused_before_the_operation(
        self, there: There, ledger: Ledger, message: Message, parameter: str
    ) -> None:
        queue, log = made(there, "orders"), made(there, "log", fifo=False)
        with pytest.raises(ParameterInvalid) as caught:
            self.opened(there, queue, log, ledger).send_transaction(message, ledger.do)
        assert caught.value.parameter == parameter
        assert ledger.done == []
        there.pass_time(61)
        assert bodies(queue) == bodies(log) == []


class TestTopic:
    """A publish's id is the deduplication id of the subscriptions that are FIFO queues."""

    @pytest.fixture
    def definitions(self, tmp_path: Path) -> Definitions:
        return Definitions(f"file://{tmp_path}/topics")

    def test_publishing_again_adds_no_copy_where_the_queue_is_fifo(
        self, there: There, definitions: Definitions
    ) -> None:
        fifo, plain = made(there, "news"), made(there, "news", fifo=False)
        topic = create_pull_topic(there.account, "news", [fifo.name, plain.name], definitions=definitions)
        first = topic.publish(Message("x", group="g"))
        again = topic.publish(Message("x", group="g"), id=first.id)
        topic.publish(Message("x", group="g"))
        assert [each.sent[fifo.name].duplicate for each in (first, again)] == [False, True]
        assert again.sent[fifo.name].id == first.sent[fifo.name].id
        assert len(bodies(fifo)) == 2
        # Elsewhere the copy is there, and names the publish.
        ids = [message.attributes[ID_ATTRIBUTE] for message in taken(plain)]
        assert (len(ids), ids.count(first.id)) == (3, 2)

    def test_an_answer_that_was_lost_is_made_good_without_a_copy(self, there: There, definitions: Definitions) -> None:
        fifo = Trouble(made(there, "news"))

        class Shaky(Wrapping):
            """The account, with this queue in its place."""

            def __init__(self) -> None:
                """There is no queue inside."""

            def queue(self, name: str) -> Queue:
                return fifo

        account: Any = Shaky()
        topic = create_pull_topic(account, "news", [fifo.name], definitions=definitions)
        fifo.error = LOST
        with pytest.raises(PublishIncomplete) as caught:
            topic.publish(Message("x", group="g"))
        assert topic.publish(Message("x", group="g"), id=caught.value.id).sent[fifo.name].duplicate
        assert bodies(fifo) == ["x"]

    def test_a_message_without_a_group_goes_nowhere(self, there: There, definitions: Definitions) -> None:
        fifo, plain = made(there, "news"), made(there, "news", fifo=False)
        topic = create_pull_topic(there.account, "news", [plain.name, fifo.name], definitions=definitions)
        with pytest.raises(ParameterInvalid) as caught:
            topic.publish("x")
        assert caught.value.parameter == "group"
        assert bodies(plain) == bodies(fifo) == []


class TestOutbox:
    """A row's id is the deduplication id."""

    def test_a_relay_that_died_after_sending_leaves_one_copy_in_order(self, there: There, tmp_path: Path) -> None:
        outbox = Outbox()

        def connect() -> sqlite3.Connection:
            # The database's clock is what the relays judge by, so it moves too.
            return by(there.clock.wall, sqlite3.connect(tmp_path / "application.db", check_same_thread=False))

        with contextlib.closing(connect()) as database:
            for statement in outbox.ddl():
                database.execute(statement)
            for number in range(12):
                outbox.add(database.cursor(), Message(str(number), group="g"))
            database.commit()
        queue = Trouble(made(there, "orders"))
        queue.error = Killed()
        first = Relay(outbox, connect, queue, clock=there.clock)
        with pytest.raises(Killed):
            first.run_once()
        there.pass_time(61)
        second = Relay(outbox, connect, queue, clock=there.clock)
        assert second.run_once() == 12
        for relay in (first, second):
            relay.close()
        assert bodies(queue) == [str(number) for number in range(12)]
