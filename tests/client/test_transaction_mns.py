"""The hidden form of transactions on MNS: half messages in the service, killed after every step on either side.

Strategy: one server, whose clock the tests move; producers and checkers are processes that kill themselves (SIGKILL)
after a given step. Whatever they did, in the end an operation is done if and only if its message was consumed, once.
The queue keeps messages for 47 h and half messages are delayed for 48 h, as the documents have it.
"""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from mns.account import Account as SdkAccount

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.client.transaction_sides import Application, Mortal, Steps

from veilmq.client.adapters.mns import MnsAccount
from veilmq.client.messages import Message, Received, Template
from veilmq.client.queue import Queue
from veilmq.client.transaction import ATTRIBUTE, Form, Outcome, TransactionQueue, Verdict
from veilmq.model.errors import MessageGone, ParameterInvalid
from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow
NEVER = 10_000
HOUR = 3_600
ORDERS, LOG = Template(retention=47 * HOUR), Template(retention=168 * HOUR)
_numbers = count()


@pytest.fixture
def account(server: LocalServer) -> Iterator[MnsAccount]:
    account = MnsAccount(SdkAccount(server.process.mns, "id", "secret"))
    yield account
    account.close()


def queues(account: MnsAccount, name: str) -> tuple[Queue, Queue]:
    account.create(f"{name}-orders", ORDERS)
    account.create(f"{name}-log", LOG)
    return account.queue(f"{name}-orders"), account.queue(f"{name}-log")


@pytest.fixture
def name() -> str:
    return f"t{next(_numbers)}"


def taken(server: LocalServer, queue: Queue) -> list[Received]:
    """All that there is, deleted. What was committed a moment ago is visible after a second."""
    server.advance(seconds=2)
    came: list[Received] = []
    while messages := queue.receive(10):
        came += messages
        queue.delete_batch([message.handle for message in messages])
    return came


def test_committed_rolled_back_and_left_to_the_checker(server: LocalServer, account: MnsAccount, name: str) -> None:
    orders, log = queues(account, name)
    done: list[str] = []
    transactions = TransactionQueue(orders, log, lambda prepared: prepared.id in done)
    assert transactions.form is Form.HIDDEN
    sent = transactions.send_transaction("7", lambda prepared: not done.append(prepared.id))  # type: ignore[func-returns-value]
    assert sent.outcome is Outcome.COMMITTED
    assert transactions.send_transaction("8", lambda prepared: False).outcome is Outcome.ROLLED_BACK

    def forgotten(prepared: object) -> Verdict:
        done.append(prepared.id)  # type: ignore[attr-defined]
        return Verdict.UNKNOWN

    assert transactions.send_transaction("9", forgotten).outcome is Outcome.PENDING
    assert [(each.body, each.attributes[ATTRIBUTE]) for each in taken(server, orders)] == [("7", sent.id)]
    server.advance(seconds=601)
    assert TransactionQueue(orders, log, lambda prepared: prepared.id in done).checker.run_once() == 1
    assert [each.body for each in taken(server, orders)] == ["9"]
    server.advance(hours=49)
    assert taken(server, orders) == taken(server, log) == []


def test_the_handle_of_the_send_works_while_the_message_is_hidden(
    server: LocalServer, account: MnsAccount, name: str
) -> None:
    orders, _ = queues(account, name)
    first, second = (orders.send(Message(body, delay=48 * HOUR)) for body in ("kept", "dropped"))
    assert first.handle is not None
    assert second.handle is not None
    orders.delete(second.handle)
    orders.release(first.handle)
    with pytest.raises(MessageGone):  # a change makes the handle before it stale: committed once
        orders.release(first.handle)
    assert [each.body for each in taken(server, orders)] == ["kept"]


def test_an_abandoned_half_message_is_never_seen(server: LocalServer, account: MnsAccount, name: str) -> None:
    orders, log = queues(account, name)
    transactions = TransactionQueue(orders, log, lambda prepared: Verdict.UNKNOWN)
    transactions.send_transaction("never", lambda prepared: Verdict.UNKNOWN)
    for _ in range(50):
        server.advance(hours=1)
        assert orders.receive() == []
    assert orders.stats().delayed == 0


def test_a_queue_that_would_show_half_messages_is_refused(account: MnsAccount, name: str) -> None:
    _, log = queues(account, name)
    account.create(f"{name}-long", LOG)
    with pytest.raises(
        ParameterInvalid, match=r"queue: its retention of .* s must be below the delay .* Template\(retention=\)"
    ):
        TransactionQueue(account.queue(f"{name}-long"), log, lambda prepared: True)


def killed(server: LocalServer, role: str, name: str, directory: Path, last: int) -> bool:
    """Run one program; whether it died after its step."""
    command = [sys.executable, __file__, role, server.process.mns, name, str(directory), str(last)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr
    return done.returncode != 0


def settled(server: LocalServer, account: MnsAccount, name: str, directory: Path) -> None:
    orders, log = queues(account, name)
    application = Application(directory, Steps(NEVER))
    transactions = TransactionQueue(orders, log, application.check)
    came: list[Received] = []
    for _ in range(3):
        server.advance(seconds=601)
        transactions.checker.run_once()
        came += taken(server, orders)
    server.advance(hours=49)
    assert taken(server, orders) == []
    done = [identity for (identity,) in application.connection.execute("SELECT id FROM done")]
    assert [message.attributes[ATTRIBUTE] for message in came] == done
    stats = log.stats()
    assert (stats.visible, stats.delayed, stats.in_flight) == (0, 0, 0)
    application.connection.close()


@pytest.mark.parametrize("last", [1, 2, 3, 4, 5])
def test_a_producer_that_is_killed(
    server: LocalServer, account: MnsAccount, name: str, tmp_path: Path, last: int
) -> None:
    assert killed(server, "produce", name, tmp_path, last)
    settled(server, account, name, tmp_path)


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_checker_that_is_killed(
    server: LocalServer, account: MnsAccount, name: str, tmp_path: Path, last: int
) -> None:
    assert killed(server, "produce", name, tmp_path, 3)
    server.advance(seconds=601)
    assert killed(server, "check", name, tmp_path, last)
    settled(server, account, name, tmp_path)


def test_a_producer_that_lives(server: LocalServer, account: MnsAccount, name: str, tmp_path: Path) -> None:
    assert not killed(server, "produce", name, tmp_path, NEVER)
    settled(server, account, name, tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "application.db")) as done:
        assert done.execute("SELECT count(*) FROM done").fetchone() == (1,)


def main() -> None:
    """One side of a transaction, which dies."""
    role, url, name, directory, last = sys.argv[1:]
    steps = Steps(int(last))
    account = MnsAccount(SdkAccount(url, "id", "secret"))
    application = Application(Path(directory), steps)
    orders, log = (Mortal(queue, steps) for queue in queues(account, name))
    transactions = TransactionQueue(orders, log, application.check)
    if role == "produce":
        transactions.send_transaction("order 7", application.do)
    else:
        transactions.checker.run_once()
    account.close()


if __name__ == "__main__":
    main()
