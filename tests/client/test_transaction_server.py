"""Ordered queues, transactions and outboxes over the adapters for servers, FIFO queues too."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config

from veilmq.client.adapters.sqs import SqsAccount
from veilmq.client.adapters.veil import VeilAccount
from veilmq.client.messages import Message, Template
from veilmq.client.ordered import LocalFile, OrderedQueue
from veilmq.client.queue import Account, Queue
from veilmq.client.transaction import ATTRIBUTE, Form, Outcome, Prepared, Times, TransactionQueue, Verdict
from veilmq.testing.client_contract.stage import MovableClock
from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow
NUMBERS = count()
WEEK = 7 * 86_400


class There:
    """An account of a server, with a clock that moves both sides."""

    def __init__(self, server: LocalServer, protocol: str) -> None:
        self.server = server
        self.clock = MovableClock()
        self.account: Account
        if protocol == "veil":
            address = urlsplit(server.sqs_url)
            self.account = VeilAccount(address.hostname or "", address.port, clock=self.clock)
        else:
            client = boto3.client(
                "sqs", endpoint_url=server.sqs_url, region_name="us-east-1", aws_access_key_id="any",
                aws_secret_access_key="any", config=Config(retries={"total_max_attempts": 1}),
            )  # fmt: skip
            self.account = SqsAccount(client, owns_client=True, clock=self.clock)

    def queue(self, name: str, fifo: bool = False) -> Queue:
        name = f"{name}-{next(NUMBERS)}" + (".fifo" if fifo else "")
        self.account.create(name, Template(retention=WEEK, fifo=fifo))
        return self.account.queue(name)

    def pass_time(self, seconds: float) -> None:
        self.server.advance(seconds=seconds)
        self.clock.advance(seconds)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    server = LocalServer(tmp_path_factory.mktemp("server"), "--simulate", "disorder=3")
    yield server
    server.stop()


@pytest.fixture(params=["veil", "sqs"])
def there(request: pytest.FixtureRequest, server: LocalServer) -> Iterator[There]:
    there = There(server, request.param)
    yield there
    there.account.close()


def taken(queue: Queue) -> list[tuple[str, object]]:
    """Body and transaction of all that there is, deleted."""
    came = []
    while messages := queue.receive(10):
        came += [(message.body, message.attributes.get(ATTRIBUTE)) for message in messages]
        queue.delete_batch([message.handle for message in messages])
    return came


@pytest.mark.parametrize("fifo", [False, True])
def test_the_order_is_strict(there: There, fifo: bool, tmp_path: Path) -> None:
    queue = there.queue("ordered", fifo)
    bodies = [str(number) for number in range(60)]
    sides = {"send_storage": LocalFile(tmp_path / "send"), "receive_storage": LocalFile(tmp_path / "receive")}
    ordered = OrderedQueue(queue, **sides, clock=there.clock, in_hand_max=10)
    ordered.send_batch(bodies[:40])
    for body in bodies[40:]:
        ordered.send(body)
    came = []
    while messages := ordered.receive(10, wait=1):
        came += [message.body for message in messages]
        assert ordered.delete_batch([message.handle for message in messages]) == [None] * len(messages)
    assert came == bodies
    ordered.receiver.close()
    ordered.sender.close()


class Ledger:
    def __init__(self) -> None:
        self.done: list[str] = []

    def do(self, prepared: Prepared) -> Verdict:
        self.done.append(prepared.id)
        return Verdict.COMMIT

    def do_and_forget(self, prepared: Prepared) -> Verdict:
        self.done.append(prepared.id)
        return Verdict.UNKNOWN

    def check(self, prepared: Prepared) -> bool:
        return prepared.id in self.done


def test_a_transaction_is_committed_or_rolled_back(there: There) -> None:
    queue, log, ledger = there.queue("orders"), there.queue("log"), Ledger()
    transactions = TransactionQueue(queue, log, ledger.check, clock=there.clock)
    assert transactions.form is (Form.HIDDEN if queue.capabilities.protocol == "veil" else Form.LOGGED)
    sent = transactions.send_transaction(Message("7", attributes={"n": 1}), ledger.do)
    assert sent.outcome is Outcome.COMMITTED
    assert transactions.send_transaction("8", lambda prepared: False).outcome is Outcome.ROLLED_BACK
    assert taken(queue) == [("7", sent.id)]
    there.pass_time(601)
    assert transactions.checker.run_once() == 0
    there.pass_time(49 * 3_600)
    assert taken(queue) == taken(log) == []


def test_the_checker_finishes_what_another_began(there: There) -> None:
    queue, log, ledger = there.queue("orders"), there.queue("log"), Ledger()
    begun = TransactionQueue(queue, log, ledger.check, clock=there.clock)
    sent = begun.send_transaction("7", ledger.do_and_forget)
    assert begun.send_transaction("8", lambda prepared: Verdict.UNKNOWN).outcome is Outcome.PENDING
    other = TransactionQueue(queue, log, ledger.check, clock=there.clock)
    assert other.checker.run_once() == 0
    assert taken(queue) == []
    there.pass_time(601)
    assert other.checker.run_once() == 2
    assert taken(queue) == [("7", sent.id)]
    assert taken(log) == []


@pytest.mark.parametrize(("timeout", "copies"), [(60, 1), (600, 2)])
def test_a_fifo_queue_drops_the_second_copy_within_its_window(there: There, timeout: float, copies: int) -> None:
    """Logged: the producer committed, and died before it erased the entry."""
    queue, log, ledger = there.queue("orders", fifo=True), there.queue("log"), Ledger()

    def do(prepared: Prepared) -> Verdict:
        queue.send(Message("7", group="g", deduplication_id=prepared.id))
        return ledger.do_and_forget(prepared)

    times = Times(timeout=timeout)
    transactions = TransactionQueue(queue, log, ledger.check, form=Form.LOGGED, times=times, clock=there.clock)
    transactions.send_transaction(Message("7", group="g"), do)
    there.pass_time(timeout + 1)
    assert transactions.checker.run_once() == 1
    assert [body for body, _ in taken(queue)] == ["7"] * copies
