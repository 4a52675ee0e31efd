"""Waits that are longer than the system can count (`threading.TIMEOUT_MAX`, 292 years), `math.inf` among them."""

import math
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.client.worker_stage import WAIT_S, Gate, Stage

from veilmq.client.keeper import Lease, LeaseKeeper
from veilmq.client.messages import Template
from veilmq.client.outbox import Outbox, Relay
from veilmq.client.receiver import Receiver
from veilmq.client.transaction import Times, TransactionQueue, Verdict
from veilmq.client.worker.job import Cancellation, Cause

LONG = 1e12


@pytest.fixture(params=[LONG, math.inf])
def wait(request: pytest.FixtureRequest) -> float:
    seconds: float = request.param
    return seconds


@pytest.fixture
def aside() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Runs calls in threads of their own, which have ended when the test has."""
    threads = []

    def run(call: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=call))
        threads[-1].start()

    yield run
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_receiver_waits_for_a_message(
    stage: Stage, wait: float, aside: Callable[[Callable[[], object]], None]
) -> None:
    with Receiver(stage.queue) as receiver:
        aside(lambda: stage.send("comes"))
        message = receiver.receive(timeout=wait)
        assert message is not None
        assert message.body == "comes"


@pytest.fixture
def held(stage: Stage) -> Lease:
    """The lease of a message, with a keeper of its own."""
    stage.send("a")
    keeper = LeaseKeeper(stage.queue)
    (message,) = stage.queue.receive(lease=30)
    return keeper.register(message)


def test_a_keeper_that_closes_waits_for_its_handlers(
    stage: Stage, held: Lease, wait: float, aside: Callable[[Callable[[], object]], None]
) -> None:
    aside(held.delete)
    held.keeper.close(deadline=wait)
    assert stage.nothing_left()


def test_a_handler_waits_for_the_loss_of_its_lease(
    held: Lease, wait: float, aside: Callable[[Callable[[], object]], None]
) -> None:
    aside(held.keeper.close)
    assert held.lost.wait(wait)


def test_a_handler_waits_for_its_cancellation(wait: float, aside: Callable[[Callable[[], object]], None]) -> None:
    token = Cancellation()
    aside(lambda: token.set(Cause.SHUTDOWN))
    assert token.wait(wait)


def test_a_worker_drains_until_its_handlers_are_through(stage: Stage) -> None:
    stage.send("a")
    gate = Gate(stage)
    worker = stage.worker(gate, drain=LONG, kill_after=LONG)
    worker.start()
    gate.wait_begun()
    worker.stop()
    gate.may.set()
    assert worker.join(WAIT_S)
    assert worker.counts is not None
    assert worker.counts.outcomes == {"done": 1}


def test_a_checker_and_a_relay_that_look_hardly_ever(stage: Stage, tmp_path: Path) -> None:
    stage.account.create("log", Template(retention=7 * 86_400))
    transactions = TransactionQueue(
        stage.queue, stage.account.queue("log"), lambda prepared: Verdict.COMMIT, times=Times(check_every=LONG)
    )
    outbox = Outbox()

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "shop.db", check_same_thread=False)

    with connect() as shop:
        for statement in outbox.ddl("sqlite"):
            shop.execute(statement)
    with transactions.checker, Relay(outbox, connect, stage.queue, check_every=LONG) as relay:
        outbox.add(shop.cursor(), "comes")
        shop.commit()
        relay.wake()
        assert [message.body for message in stage.queue.receive(wait=WAIT_S)] == ["comes"]
        names = {thread.name for thread in threading.enumerate()}
        assert {"veilmq transaction checker", "veilmq outbox relay"} <= names
    shop.close()
