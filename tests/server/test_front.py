"""Calls that wait for an owner: passed on when there is one, answered when there is none for too long."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.server.test_shell import QUEUE, TAKE
from tests.support.contract.stage import TESTER, sending
from tests.support.peers import OTHER, SECRET, Asked, Peers, StillClock, on_a_loop, peers
from tests.support.sqlite import SqliteFactory

from veilmq.cluster.peer.caller import Caller
from veilmq.engine.engine import Engine
from veilmq.model.commands import AfterExpiry, CreateQueue, Delete, DescribeQueue, Peek
from veilmq.model.errors import LeaseExpired, StoreFailed, StoreUnknown
from veilmq.model.instant import HOUR_US, SECOND_US, Instant
from veilmq.model.messages import Extras
from veilmq.model.outcomes import QueueDescribed, Received, Sent
from veilmq.model.settings.queue import FIFO_SUFFIX, QueueKey
from veilmq.server.clock import LeaseClock
from veilmq.server.cluster import front as room
from veilmq.server.cluster.front import Front
from veilmq.server.shell import Shell

__all__ = ["peers"]


def play(path: Path, scene: Callable[[Front, Shell], Awaitable[Any]]) -> Any:
    """Run the scene with a front that nobody is behind, and a shell that is not the owner's yet."""

    async def run() -> Any:
        store, clock = SqliteFactory(path).open(), LeaseClock()
        shell = Shell(Engine(), store, clock)
        shell.start()
        await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))

        def nobody(*_: object) -> Any:
            raise AssertionError("there is no other server")

        front = Front(clock, nobody)
        try:
            return await scene(front, shell)
        finally:
            await front.close()
            await shell.stop(5)
            store.close()

    return asyncio.run(run())


def test_what_waits_for_an_owner_is_passed_on(tmp_path: Path) -> None:
    """Also where this server's clock is set by the take-over: a call is as old as it was."""

    async def scene(front: Front, shell: Shell) -> Any:
        send, take = (asyncio.create_task(front.call(each)) for each in (sending(QUEUE), TAKE))
        await asyncio.sleep(0)
        assert front.held == 2
        shell._clock.advance(HOUR_US)  # type: ignore[attr-defined]
        front.lead(shell)
        return [*await send, *await take]

    sent, received = play(tmp_path / "data", scene)
    assert isinstance(sent, Sent)
    assert isinstance(received, Received)
    assert len(received.messages) == 1


def test_a_delete_that_came_late_is_late_when_a_take_over_sets_the_clock(tmp_path: Path) -> None:
    """It came while nobody owned the shard, by a clock that was an hour behind that of the owner before."""

    async def scene(front: Front, shell: Shell) -> Any:
        await shell.call(sending(QUEUE))
        (received,) = await shell.call(TAKE)
        assert isinstance(received, Received)
        clock: LeaseClock = shell._clock  # type: ignore[assignment]
        clock.advance(HOUR_US + SECOND_US)  # the lease is over
        delete = Delete(
            queue=QUEUE, origin=TESTER, handle=received.messages[0].handle, arrived=Instant(clock.now() - HOUR_US),
            after_expiry=AfterExpiry.REFUSE,
        )  # fmt: skip
        deleting = asyncio.create_task(front.call(delete))
        await asyncio.sleep(0)
        front.clock_moved(HOUR_US)
        front.lead(shell)
        return await deleting

    (outcome,) = play(tmp_path / "data", scene)
    assert isinstance(outcome, LeaseExpired)


def test_without_an_owner_calls_fail_after_a_while_and_too_many_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "HELD_SECONDS", 0.2)
    monkeypatch.setattr(room, "HELD_MAX", 2)

    async def scene(front: Front, shell: Shell) -> Any:
        describe = DescribeQueue(queue=QUEUE, origin=TESTER)
        *waiting, beyond = [asyncio.create_task(front.call(describe)) for _ in range(3)]
        refused = await beyond
        assert front.held == 2
        assert not any(each.done() for each in waiting)
        outcomes = [outcome for each in waiting for outcome in await each]
        return [*refused, *outcomes, await front.query(Peek(queue=QUEUE, origin=TESTER))]

    outcomes = play(tmp_path / "data", scene)
    assert len(outcomes) == 4
    assert {type(outcome) for outcome in outcomes} == {StoreFailed}


@on_a_loop
async def test_what_may_have_been_carried_out_is_unknown_if_it_fails_the_second_time(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deduplicated send, whose owner was lost with it, runs again at the next one; but none comes. One that had never
    left was certainly not carried out."""
    monkeypatch.setattr(room, "HELD_SECONDS", 0.2)
    address, arrived = await peers.raw_owner()
    fifo = QueueKey(QUEUE.account, QUEUE.region, f"jobs{FIFO_SUFFIX}")
    front = Front(StillClock(), lambda at, returned: Caller(at, OTHER, SECRET, StillClock(), returned))
    front.follow(address)
    owner = await arrived.get()
    assert front.caller is not None
    caller = front.caller
    await peers.until(lambda: caller.connected)
    sent, gone = (Asked(sending(fifo, extras=Extras(deduplication_id=each))) for each in "ab")
    read = Asked(DescribeQueue(queue=QUEUE, origin=TESTER))
    for each in (sent, gone, read):
        front.submit(each, front.now())
    await peers.until(lambda: len(owner.frames) == 3)
    front.follow(None)
    await owner.close()
    await peers.until(lambda: front.held == 3)
    front.cancel(gone)
    held = Asked(sending(fifo, extras=Extras(deduplication_id="c")))
    front.submit(held, front.now())
    for each, error in ((sent, StoreUnknown), (read, StoreFailed), (held, StoreFailed)):
        assert type((await each.answered())[0]) is error
    assert gone.outcomes is None
    await front.close()


@on_a_loop
async def test_a_call_does_not_go_round_for_ever(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a server that owns the shard no more, where nobody can learn who does."""
    monkeypatch.setattr(room, "HELD_SECONDS", 0.3)
    owner = await peers.owner()
    front = Front(StillClock(), lambda at, returned: Caller(at, OTHER, SECRET, StillClock(), returned))
    front.follow(owner.port.address)
    caller = front.caller
    assert caller is not None
    await peers.until(lambda: caller.connected)
    owner.port.follow(None)
    asked = Asked(DescribeQueue(queue=QUEUE, origin=TESTER))
    front.submit(asked, front.now())
    assert type((await asked.answered())[0]) is StoreFailed
    await front.close()


def test_a_peek_waits_for_an_owner_and_looks_there(tmp_path: Path) -> None:
    async def scene(front: Front, shell: Shell) -> Any:
        await shell.call(sending(QUEUE))
        looking = asyncio.create_task(front.query(Peek(queue=QUEUE, origin=TESTER)))
        gone = asyncio.create_task(front.query(Peek(queue=QUEUE, origin=TESTER)))
        await asyncio.sleep(0)
        assert front.held == 2
        front.lead(shell)
        gone.cancel()
        return await looking

    assert len(play(tmp_path / "data", scene).messages) == 1


def test_a_peek_that_waited_and_fails_is_answered(tmp_path: Path) -> None:
    """Its owner's store is closed again when the read begins."""

    async def scene(front: Front, _: Shell) -> Any:
        looking = asyncio.create_task(front.query(Peek(queue=QUEUE, origin=TESTER)))
        await asyncio.sleep(0)
        store = SqliteFactory(tmp_path / "closed").open()
        shell = Shell(Engine(), store, LeaseClock())
        store.close()
        front.lead(shell)
        async with asyncio.timeout(5):
            return await looking

    assert isinstance(play(tmp_path / "data", scene), StoreFailed)


def test_clients_that_go_while_they_wait_for_an_owner_leave_nothing(tmp_path: Path) -> None:
    """One hangs up; another ends its input, and gets an empty answer."""

    async def scene(front: Front, shell: Shell) -> Any:
        gone, ended = asyncio.create_task(front.call(sending(QUEUE))), asyncio.Event()
        half = asyncio.create_task(front.receive(TAKE, ended))
        await asyncio.sleep(0)
        gone.cancel()
        ended.set()
        await asyncio.wait([gone])
        (received,) = await half
        assert front.held == 0
        front.lead(shell)
        return received, *await front.call(DescribeQueue(queue=QUEUE, origin=TESTER))

    received, described = play(tmp_path / "data", scene)
    assert received == Received([])
    assert isinstance(described, QueueDescribed)
    assert described.info.counts.visible == 0


def test_a_shell_that_was_left_still_answers_what_it_has(tmp_path: Path) -> None:
    async def scene(front: Front, shell: Shell) -> Any:
        front.lead(shell)
        had = asyncio.create_task(front.call(TAKE))
        await asyncio.sleep(0)
        front.follow(None)
        had.cancel()
        await asyncio.wait([had])
        front.forget_left()
        front.cancel(Asked(TAKE))  # one that was answered as its client went
        return len(shell.engine.waiting)

    assert play(tmp_path / "data", scene) == 0
