"""The shell by itself, on a real store: what becomes of a call whose caller goes away."""

import asyncio
from pathlib import Path

import msgspec

from veilmq.engine import Engine
from veilmq.model.commands import CreateQueue, DescribeQueue, Receive
from veilmq.model.instant import HOUR_US, SECOND_US
from veilmq.model.outcomes import Received
from veilmq.model.queue import QueueKey
from veilmq.server.clock import LeaseClock
from veilmq.server.shell import Shell
from veilmq.testing.contract.stage import TESTER, sending
from veilmq.testing.sqlite import SqliteFactory

QUEUE = QueueKey("000000000000", "us-east-1", "jobs")
TAKE = Receive(queue=QUEUE, origin=TESTER, lease_us=HOUR_US, wait_us=SECOND_US)


async def wait_and_go(path: Path) -> list[str]:
    """A caller that goes while it waits; what the next receive gets."""
    store = SqliteFactory(path).open()
    shell = Shell(Engine(), store, LeaseClock())
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    waiting = asyncio.create_task(shell.call(msgspec.structs.replace(TAKE, wait_us=HOUR_US)))
    await asyncio.sleep(0)
    await shell.call(DescribeQueue(queue=QUEUE, origin=TESTER))
    assert len(shell.engine.waiting) == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    await shell.call(sending(QUEUE, "work"))
    (outcome,) = await shell.call(TAKE)
    assert isinstance(outcome, Received)
    await shell.stop(5)
    store.close()
    return [message.body for message in outcome.messages]


def test_a_caller_that_goes_while_it_waits_takes_nothing_with_it(tmp_path: Path) -> None:
    assert asyncio.run(wait_and_go(tmp_path / "data")) == ["work"]


async def take_and_go(path: Path) -> list[str]:
    """A caller that goes in the turn of the loop in which its messages come; what the next receive gets."""
    store = SqliteFactory(path).open()
    shell = Shell(Engine(), store, LeaseClock())
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    await shell.call(sending(QUEUE, "work"))

    async def send_away() -> None:
        await shell.call(DescribeQueue(queue=QUEUE, origin=TESTER))
        taking.cancel()

    sending_away = asyncio.create_task(send_away())
    taking = asyncio.create_task(shell.call(TAKE))
    await asyncio.wait([sending_away, taking])
    assert taking.cancelled()
    (outcome,) = await shell.call(TAKE)
    assert isinstance(outcome, Received)
    await shell.stop(5)
    assert shell.engine._gone == set()
    store.close()
    return [message.body for message in outcome.messages]


def test_an_answer_that_comes_as_its_caller_goes_is_given_back(tmp_path: Path) -> None:
    assert asyncio.run(take_and_go(tmp_path / "data")) == ["work"]


async def count_batches(path: Path, turns: int, calls_first: int) -> tuple[int, int]:
    """Calls that come at once, then one a turn of the loop; into how many batches they went, and after how many turns
    of the loop the first was answered."""
    store = SqliteFactory(path).open()
    shell = Shell(Engine(), store, LeaseClock())
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    before = shell.stats.batches
    calls = [asyncio.create_task(shell.call(sending(QUEUE))) for _ in range(calls_first)]
    waited = 0
    for _ in range(turns):
        await asyncio.sleep(0)
        calls.append(asyncio.create_task(shell.call(sending(QUEUE))))
        waited += not calls[0].done()
    while not calls[0].done():
        await asyncio.sleep(0)
        waited += 1
    await asyncio.gather(*calls)
    batches = shell.stats.batches - before
    await shell.stop(5)
    store.close()
    return batches, waited


def test_what_comes_in_successive_turns_of_the_loop_shares_a_commit(tmp_path: Path) -> None:
    batches, _ = asyncio.run(count_batches(tmp_path / "data", turns=20, calls_first=2))
    assert batches == 1


def test_a_call_alone_does_not_wait_for_others(tmp_path: Path) -> None:
    batches, waited = asyncio.run(count_batches(tmp_path / "data", turns=0, calls_first=1))
    assert batches == 1
    assert waited <= 5


def test_a_stream_of_calls_is_not_gathered_for_ever(tmp_path: Path) -> None:
    batches, waited = asyncio.run(count_batches(tmp_path / "data", turns=1_000, calls_first=2))
    assert 7 <= batches <= 10  # of 128 each
    assert waited < 140
