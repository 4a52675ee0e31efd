"""Calls over the peer port: the same as on the owner itself, and nothing lost or held when a client or a peer goes."""

import asyncio
import socket
import ssl
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.certificate import CERTIFICATE, PRIVATE_KEY
from tests.support.clock import EPOCH
from tests.support.contract.stage import TESTER, bodies, expect, refused, sending
from tests.support.peers import (
    OTHER,
    QUEUE,
    THIRD,
    WAIT_S,
    Asked,
    Owner,
    Peers,
    RawPeer,
    StillClock,
    on_a_loop,
    peers,
)

from veilmq.cluster import Calls
from veilmq.cluster.peer import Limits
from veilmq.cluster.peer.caller import _Link
from veilmq.cluster.peer.frames import Call, Cancel, NotOwner, outcomes_of, unpacked
from veilmq.engine.long_polls import Unread
from veilmq.model.commands import (
    ChangeQueue,
    CheckClock,
    Delete,
    DescribeQueue,
    Extend,
    Operate,
    Peek,
    Receive,
)
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseExpired,
    MessageGone,
    Overloaded,
    QueueMissing,
    StoreFailed,
    StoreUnknown,
)
from veilmq.model.instant import HOUR_US, SECOND_US, Instant
from veilmq.model.messages import Extras
from veilmq.model.outcomes import Deleted, Extended, Operated, Outcome, QueueChanged, QueueDescribed, Received, Sent
from veilmq.model.settings.queue import FIFO_SUFFIX, QueueKey
from veilmq.server.http.handshakes import Handshakes

__all__ = ["peers"]

TAKE = Receive(queue=QUEUE, origin=TESTER, lease_us=HOUR_US, wait_us=0, count_max=10)
WAIT = msgspec.structs.replace(TAKE, wait_us=HOUR_US)
DESCRIBE = DescribeQueue(queue=QUEUE, origin=TESTER)
YEAR_US = 365 * 24 * HOUR_US


def bodies_of(outcome: Outcome) -> list[str]:
    return bodies(expect(outcome, Received).messages)


async def one(calls: Calls, command: Any) -> Outcome:
    async with asyncio.timeout(WAIT_S):
        (outcome,) = await calls.call(command)
    return outcome


async def live_a_life(calls: Calls) -> None:
    """What clients do with a queue."""
    sent = expect(await one(calls, sending(QUEUE, "work")), Sent)
    peeked = expect(await calls.query(Peek(queue=QUEUE, origin=TESTER)), Received)
    assert [each.id for each in peeked.messages] == [sent.id]
    (message,) = expect(await one(calls, TAKE), Received).messages
    assert (message.body, message.receive_count) == ("work", 1)
    extending = Extend(queue=QUEUE, origin=TESTER, handle=message.handle, lease_us=2 * HOUR_US, arrived=calls.arrived())
    assert expect(await one(calls, extending), Extended).handle == message.handle
    assert await calls.receive(TAKE, asyncio.Event()) == [Received([])]
    delete = Delete(queue=QUEUE, origin=TESTER, handle=message.handle, arrived=calls.arrived())
    assert [type(each) for each in await calls.call(delete, delete)] == [Deleted, MessageGone]
    nowhere = QueueKey("000000000000", "us-east-1", "nowhere")
    assert await one(calls, sending(nowhere, "work")) == QueueMissing(queue=str(nowhere))
    change = ChangeQueue(queue=QUEUE, origin=TESTER, change={"visibility_timeout_us": SECOND_US})
    asked = Operate(origin=TESTER, id="1", keeps=True, digest=b"1", act="a", asked={"a": [1]}, commands=(change,))
    for repeated in (False, True):
        operated = expect(await one(calls, asked), Operated)
        assert operated.repeated == repeated
        assert expect(operated.outcomes[0], QueueChanged).info.settings.visibility_timeout_us == SECOND_US
    assert expect(await one(calls, DESCRIBE), QueueDescribed).info.counts.total == 0


@on_a_loop
async def test_a_life_on_the_owner_itself(peers: Peers) -> None:
    owner = await peers.owner()
    await live_a_life(owner.shell)


@on_a_loop
async def test_a_caller_that_is_closed_while_it_connects_ends(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop closes what it has connected when nobody waits for it any more, and tells nobody."""
    owner = await peers.owner()
    caller = peers.caller(owner.port.address)
    made = _Link.connection_made

    def connection_made(link: _Link, transport: Any) -> None:
        made(link, transport)
        assert caller._task is not None
        caller._task.cancel()

    monkeypatch.setattr(_Link, "connection_made", connection_made)
    assert caller._task is not None
    await asyncio.wait([caller._task], timeout=WAIT_S)
    async with asyncio.timeout(WAIT_S):
        await caller.close()
    assert not caller.connected


@on_a_loop
async def test_a_life_over_the_peer_port(peers: Peers) -> None:
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address)
    await live_a_life(caller)
    assert (owner.port.peers, owner.port.calls, caller.calls) == (["other"], 0, 0)


@on_a_loop
async def test_tls_protects_what_is_passed_on(peers: Peers, tmp_path: Path) -> None:
    files = tmp_path / "certificate", tmp_path / "key"
    for file, text in zip(files, (CERTIFICATE, PRIVATE_KEY), strict=True):
        file.write_text(text)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    handshakes = Handshakes(context, "peer port", HOUR_US, lambda: 3)
    owner = await peers.owner(secured=handshakes.before)
    silent = [await asyncio.open_connection(*owner.port.address) for _ in range(4)]
    async with asyncio.timeout(WAIT_S):
        with suppress(ConnectionError):
            await silent[0][0].read()
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    await live_a_life(await peers.connected(owner.port.address, context=lambda: trusting))
    trusted = ssl.create_default_context()
    strict = peers.caller(owner.port.address, THIRD, context=lambda: trusted)
    await peers.until(lambda: strict.trouble)
    assert "certificate" in str(strict.trouble).lower()
    trusted = trusting  # its file was replaced
    await peers.until(lambda: strict.connected)
    plain = peers.caller(owner.port.address, THIRD)
    await peers.until(lambda: plain.trouble)
    handshakes.drop_all()
    for _, writer in silent:
        writer.close()


@on_a_loop
async def test_a_receive_waits_at_the_owner_and_another_peers_send_wakes_it(peers: Peers) -> None:
    owner = await peers.owner()
    waits, sends = await peers.connected(owner.port.address), await peers.connected(owner.port.address, THIRD)
    taking = Asked(WAIT)
    waits.submit(taking, waits.now())
    await peers.until(lambda: owner.parked)
    expect(await one(sends, sending(QUEUE, "work")), Sent)
    assert bodies_of((await taking.answered())[0]) == ["work"]


@on_a_loop
async def test_a_client_that_goes_while_its_receive_waits_takes_nothing(peers: Peers) -> None:
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address)
    waiting = asyncio.ensure_future(caller.call(WAIT))
    await peers.until(lambda: owner.parked)
    waiting.cancel()
    await peers.until(lambda: not owner.parked)
    await one(caller, sending(QUEUE, "work"))
    assert bodies_of(await one(caller, TAKE)) == ["work"]
    assert caller._under_way == {}


@on_a_loop
async def test_messages_that_cross_with_a_clients_going_are_given_back(peers: Peers) -> None:
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address)
    await one(caller, sending(QUEUE, "work"))
    taking = Asked(TAKE)
    caller.submit(taking, caller.now())
    await peers.until(lambda: owner.port.calls)
    await peers.until(lambda: not owner.port.calls)
    assert taking.outcomes is None, "the outcome is on its way"
    caller.cancel(taking)
    await peers.until(lambda: not caller._under_way)
    assert bodies_of(await one(caller, TAKE)) == ["work"]
    assert taking.outcomes is None


@on_a_loop
async def test_a_client_that_ends_its_input_waits_no_longer(peers: Peers) -> None:
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address)
    ended = asyncio.Event()
    receiving = asyncio.ensure_future(caller.receive(WAIT, ended))
    await peers.until(lambda: owner.parked)
    ended.set()
    assert await receiving == [Received([])]
    assert owner.parked == 0


@on_a_loop
async def test_what_waits_for_a_peer_that_is_gone_goes_to_others(peers: Peers) -> None:
    owner = await peers.owner()
    caller, other = await peers.connected(owner.port.address), await peers.connected(owner.port.address, THIRD)
    taking = Asked(WAIT)
    caller.submit(taking, caller.now())
    await peers.until(lambda: owner.parked)
    assert caller._link is not None
    caller._link.transport.abort()
    await peers.until(lambda: not owner.parked)
    assert [each[0] for each in peers.returned] == [taking], "it may wait at the next owner"
    await one(other, sending(QUEUE, "work"))
    assert bodies_of(await one(other, TAKE)) == ["work"]


async def receive_without_reading(peers: Peers, owner: Owner, count: int) -> tuple[RawPeer, socket.socket]:
    """A peer that asks for `count` messages and then does not read."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    raw.connect(owner.port.address)
    peer = await peers.raw_caller(owner.port.address, sock=raw)
    peer.transport.pause_reading()
    for id_ in range(count):
        peer.send(Call(id_ + 1, 0, (msgspec.structs.replace(TAKE, count_max=1),)))
    await peers.until(lambda: owner.port.calls)
    await peers.until(lambda: not owner.port.calls)
    return peer, raw


@on_a_loop
async def test_what_a_peer_does_not_read_is_counted_and_what_has_not_left_is_given_back(peers: Peers) -> None:
    owner = await peers.owner(Limits(write_buffer_bytes_max=1_024))
    large, count = "x" * 500_000, 40
    for _ in range(count):
        await owner.shell.call(sending(QUEUE, large))
    peer, raw = await receive_without_reading(peers, owner, count)
    unread = owner.shell.engine.unread
    assert unread.bytes > 500_000
    (connection,) = owner.port._connections
    kept = len(connection.unsent)
    assert kept > 1
    assert await owner.shell.call(TAKE) == [Received([])]
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.transport.abort()
    await peers.until(lambda: not owner.port.peers)
    assert unread.bytes == 0
    described = expect(await one(owner.shell, DESCRIBE), QueueDescribed)
    assert described.info.counts.visible == kept
    assert described.info.counts.in_flight == count - kept, "what has left may be with clients"


@on_a_loop
async def test_a_peer_that_reads_again_gets_all_and_is_owed_nothing(peers: Peers) -> None:
    owner = await peers.owner(Limits(write_buffer_bytes_max=1_024))
    large, count = "x" * 500_000, 40
    for _ in range(count):
        await owner.shell.call(sending(QUEUE, large))
    peer, _ = await receive_without_reading(peers, owner, count)
    assert owner.shell.engine.unread.bytes > 500_000
    peer.transport.resume_reading()
    await peers.until(lambda: len(peer.frames) == count)
    await peers.until(lambda: not owner.shell.engine.unread.bytes)
    assert {each.id for each in peer.frames} == set(range(1, count + 1))


@on_a_loop
async def test_calls_of_one_peer_have_a_bound(peers: Peers) -> None:
    owner = await peers.owner(Limits(calls_max=2))
    caller = await peers.connected(owner.port.address)
    first, second = Asked(WAIT), Asked(WAIT)
    for each in (first, second):
        caller.submit(each, caller.now())
    await peers.until(lambda: owner.parked == 2)
    assert await caller.call(DESCRIBE) == [Overloaded(limit=2)]
    caller.limits = Limits()
    raw = await peers.raw_caller(owner.port.address)
    assert await one(caller, DESCRIBE) == Overloaded(limit=2)
    raw.send(Call(1, 0, (DESCRIBE,)))
    assert type(unpacked((await raw.next()).outcomes)[0]) is QueueDescribed


@on_a_loop
async def test_a_server_that_is_not_the_owner_says_who_is(peers: Peers) -> None:
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address)
    waiting, sent = Asked(WAIT), Asked(sending(QUEUE, "work"))
    caller.submit(waiting, Instant(EPOCH + 5))
    await peers.until(lambda: owner.parked)
    owner.port.follow("10.0.0.9:9330")
    caller.submit(sent, Instant(EPOCH + 6))
    await peers.until(lambda: len(peers.returned) == 2)
    assert peers.returned == [
        (waiting, EPOCH + 5, "10.0.0.9:9330", False),
        (sent, EPOCH + 6, "10.0.0.9:9330", False),
    ]
    await peers.until(lambda: not owner.parked)
    counts = expect(await one(owner.shell, DESCRIBE), QueueDescribed).info.counts
    assert counts.total == 0, "the owner has not carried it out"
    owner.port.lead(owner.shell, owner.shell.engine.unread)
    caller.submit(*peers.returned[1][:2])
    assert type((await sent.answered())[0]) is Sent


@on_a_loop
async def test_a_lost_connection_ends_each_call_as_far_as_is_known(peers: Peers) -> None:
    address, arrived = await peers.raw_owner()
    caller = await peers.connected(address)
    owner = await arrived.get()
    sent, read, taking, gone, soon = (Asked(each) for each in (sending(QUEUE), DESCRIBE, WAIT, WAIT, WAIT))
    fifo = QueueKey(QUEUE.account, QUEUE.region, f"jobs{FIFO_SUFFIX}")
    once = Asked(*(sending(fifo, extras=Extras(deduplication_id=each)) for each in "ab"))
    # A standard queue drops no duplicate, and one of the others has no id.
    twice = [Asked(sending(QUEUE, extras=Extras(deduplication_id="a"))), Asked(*once.commands, sending(fifo))]
    for each in (sent, read, taking, gone, soon, once, *twice):
        caller.submit(each, caller.now())
    caller.cancel(gone)
    caller.answer_soon(soon)
    await peers.until(lambda: len(owner.frames) == 10)
    held = Asked(sending(QUEUE, "never left"))
    caller.submit(held, caller.now())  # written in the next turn
    caller._link.transport.abort()  # type: ignore[union-attr]
    await peers.until(lambda: not caller.connected)
    for each in (sent, *twice):
        assert type((await each.answered())[0]) is StoreUnknown
    assert await soon.answered() == [Received([])]
    assert [(each[0], each[3]) for each in peers.returned] == [
        (read, True),
        (taking, True),
        (once, True),
        (held, False),
    ]
    assert gone.outcomes is None
    assert caller.calls == 0
    await peers.until(lambda: caller.connected)


@on_a_loop
async def test_calls_wait_for_a_connection_but_not_for_ever(peers: Peers) -> None:
    owner = await peers.owner()
    address = owner.port.address
    caller = peers.caller(address)
    early, soon, gone = Asked(sending(QUEUE, "early")), Asked(WAIT), Asked(sending(QUEUE, "gone"))
    for each in (gone, early, soon):
        caller.submit(each, caller.now())
    caller.cancel(gone)
    caller.answer_soon(soon)
    assert not caller.connected
    assert type((await early.answered())[0]) is Sent
    assert len(await soon.answered()) == 1
    assert gone.outcomes is None
    nobody = peers.caller(("127.0.0.1", 1), limits=Limits(held_s_max=0.05))
    late = Asked(sending(QUEUE))
    nobody.submit(late, nobody.now())
    assert "cannot reach the owner at 127.0.0.1:1" in refused((await late.answered())[0], StoreFailed).reason
    closed = Asked(sending(QUEUE))
    nobody.submit(closed, nobody.now())
    await nobody.close()
    assert peers.returned == [(closed, nobody.now(), None, False)]


@on_a_loop
async def test_leases_are_judged_by_when_a_call_reached_its_server(peers: Peers) -> None:
    """The clocks of the two differ by years, and the call was under way while the lease ended."""
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address, clock=StillClock(Instant(EPOCH - YEAR_US)))
    theirs = caller._clock
    lease = msgspec.structs.replace(TAKE, lease_us=10 * SECOND_US, count_max=1)
    for body in ("in time", "late"):
        await one(caller, sending(QUEUE, body))
    first = expect(await one(caller, lease), Received).messages[0]
    second = expect(await one(caller, lease), Received).messages[0]
    began = caller.now()
    owner.clock.instant = Instant(owner.clock.instant + 11 * SECOND_US)
    theirs.instant = Instant(began + 2 * SECOND_US)  # type: ignore[attr-defined]
    extend = Extend(queue=QUEUE, origin=TESTER, handle=first.handle, lease_us=HOUR_US, arrived=began)
    expect(await one(caller, extend), Extended)
    late = Extend(queue=QUEUE, origin=TESTER, handle=second.handle, lease_us=HOUR_US, arrived=caller.now())
    refused(await one(caller, late), LeaseExpired)


@on_a_loop
async def test_a_receive_that_came_after_a_stall_of_the_owner_has_not_waited(peers: Peers) -> None:
    """A delete gets the benefit of the doubt; a client must not believe that its lease is so much longer."""
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address)
    await one(caller, sending(QUEUE))
    owner.clock.instant = Instant(owner.clock.instant + 5 * SECOND_US)
    received = expect(await one(caller, TAKE), Received)
    assert (len(received.messages), received.waited_us) == (1, 0)


@on_a_loop
async def test_a_receive_that_was_on_its_way_waits_for_the_rest_of_its_time(peers: Peers) -> None:
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address)
    taking = Asked(WAIT)
    caller.submit(taking, Instant(caller.now() - HOUR_US // 12))
    await peers.until(lambda: owner.parked)
    assert owner.shell.engine.waiting.next_deadline() == owner.shell.now() + 11 * HOUR_US // 12


@on_a_loop
async def test_a_peer_that_sends_what_is_no_frame_is_dropped_and_the_others_go_on(peers: Peers) -> None:
    owner = await peers.owner(Limits(frame_bytes_max=4_096))
    caller = await peers.connected(owner.port.address)
    large = (4_097).to_bytes(4, "big")
    same = [1, 1, 0, [msgspec.to_builtins(DESCRIBE)]]
    deep = b"\0\0\x08\0\x95\x01\x01\0\x91" + b"\x91" * 2_043
    text = b"\0\0\0\x06\xd9\x04\0\0\0\x80"
    taking = [1, 1, 0, [*same[3], msgspec.to_builtins(TAKE)]]
    for sends in (
        taking,
        large,
        deep,
        text,
        b"\0\0\0\x01\xc1",
        [9, 1],
        [1, 1, 0, []],
        [1, 1, 0, [{"type": "Sweep"}]],
        [same, same],
    ):
        raw = await peers.raw_caller(owner.port.address)
        if isinstance(sends, bytes):
            raw.transport.write(sends)
        else:
            for each in sends if sends[0] is same else [sends]:  # type: ignore[list-item]
                raw.send(each)
        async with asyncio.timeout(WAIT_S):
            await raw.gone.wait()
    assert owner.port.refused["garbage"] == 9
    assert type(await one(caller, DESCRIBE)) is QueueDescribed


@on_a_loop
async def test_what_does_not_fit_a_frame_is_answered_and_given_back(peers: Peers) -> None:
    owner = await peers.owner(Limits(frame_bytes_max=4_096))
    caller = await peers.connected(owner.port.address, limits=Limits(frame_bytes_max=2_048))
    assert "too large" in refused(await one(caller, sending(QUEUE, "x" * 2_048)), StoreFailed).reason
    await owner.shell.call(sending(QUEUE, "x" * 4_096))
    assert "too large" in refused(await one(caller, TAKE), StoreFailed).reason
    assert len(bodies_of(await one(owner.shell, TAKE))) == 1


@on_a_loop
async def test_a_peer_that_falls_silent_is_gone(peers: Peers) -> None:
    owner = await peers.owner(Limits(ping_s=0.02))
    raw = await peers.raw_caller(owner.port.address, Limits(ping_s=HOUR_US))
    alive = await peers.connected(owner.port.address, limits=Limits(ping_s=0.02))
    raw.send(Call(1, 0, (WAIT,)))
    await peers.until(lambda: owner.parked)
    async with asyncio.timeout(WAIT_S):
        await raw.gone.wait()
    assert owner.parked == 0
    assert alive.connected


@on_a_loop
async def test_a_server_that_connects_anew_has_lost_its_old_connection(peers: Peers) -> None:
    owner = await peers.owner()
    old = await peers.raw_caller(owner.port.address)
    old.send(Call(1, 0, (WAIT,)))
    await peers.until(lambda: owner.parked)
    await peers.raw_caller(owner.port.address)
    async with asyncio.timeout(WAIT_S):
        await old.gone.wait()
    assert owner.parked == 0
    assert owner.port.peers == ["third"]


@on_a_loop
async def test_no_call_is_read_of_a_peer_that_does_not_read(peers: Peers) -> None:
    owner = await peers.owner(Limits(write_buffer_bytes_max=1_024, backlog_bytes_max=100_000))
    large = {"labels": {"x": "y" * 100_000}}
    await owner.shell.call(ChangeQueue(queue=QUEUE, origin=TESTER, change=large))
    raw = await peers.raw_caller(owner.port.address)
    raw.transport.pause_reading()
    (connection,) = owner.port._connections
    asked = 0
    while not connection._reading_paused:
        asked += 1
        raw.send(Call(asked, 0, (DESCRIBE,)))
        await peers.until(lambda: connection._reading_paused or (not owner.port.calls and not raw.backlog_bytes))
    commands = owner.shell.stats.commands
    for _ in range(10):
        asked += 1
        raw.send(Call(asked, 0, (DESCRIBE,)))
    await one(await peers.connected(owner.port.address), DESCRIBE)
    assert owner.shell.stats.commands <= commands + 2
    raw.transport.resume_reading()
    await peers.until(lambda: len(raw.frames) == asked)


@on_a_loop
async def test_what_was_answered_leaves_before_the_port_closes(peers: Peers) -> None:
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address)
    sent, waiting = Asked(sending(QUEUE, "work")), Asked(WAIT)
    caller.submit(sent, caller.now())
    await peers.until(lambda: owner.port.calls)
    await peers.until(lambda: not owner.port.calls)
    assert sent.outcomes is None
    await owner.port.close()
    assert type((await sent.answered())[0]) is Sent
    await peers.until(lambda: not caller.connected)
    caller.submit(waiting, caller.now())
    await caller.close()
    assert [each[0] for each in peers.returned] == [waiting]


@on_a_loop
async def test_a_call_that_crosses_with_the_owners_going_is_passed_on(peers: Peers) -> None:
    """Nobody has carried it out; the one before it was answered."""
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address)
    done, crossing = Asked(sending(QUEUE, "done")), Asked(sending(QUEUE, "crossing"))
    caller.submit(done, caller.now())
    await done.answered()
    (connection,) = owner.port._connections
    connection.leave(ConnectionResetError("this server stops"))
    caller.submit(crossing, caller.now())
    await peers.until(lambda: peers.returned)
    assert peers.returned == [(crossing, EPOCH, None, False)]
    assert crossing.outcomes is None
    (described,) = await owner.shell.call(DESCRIBE)
    assert expect(described, QueueDescribed).info.counts.visible == 1


@on_a_loop
async def test_a_caller_that_retires_waits_for_answers(peers: Peers) -> None:
    """What is under way is answered by the server that has it; what has not left comes back at once."""
    address, arrived = await peers.raw_owner()
    caller = await peers.connected(address)
    owner = await arrived.get()
    sent = Asked(sending(QUEUE))
    caller.submit(sent, caller.now())
    await peers.until(lambda: len(owner.frames) == 1)
    retiring = asyncio.create_task(caller.retire(WAIT_S))
    await asyncio.sleep(0)
    owner.send(outcomes_of(owner.frames[0].id, [QueueMissing(queue="jobs")]))
    assert await sent.answered() == [QueueMissing(queue="jobs")]
    await retiring
    assert not caller.connected


@on_a_loop
async def test_a_call_that_the_shell_did_not_carry_out_is_handed_back(peers: Peers) -> None:
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address)
    waiting = Asked(WAIT)
    caller.submit(waiting, caller.now())
    await peers.until(lambda: owner.parked)
    (connection,) = owner.port._connections
    (call,) = connection.calls.values()
    owner.shell.cancel(call)
    for _ in range(2):
        call.hand_back("10.0.0.9:9330")
    await peers.until(lambda: peers.returned)
    assert peers.returned == [(waiting, EPOCH, "10.0.0.9:9330", False)]


@on_a_loop
async def test_a_cancel_that_comes_too_late_changes_nothing(peers: Peers) -> None:
    owner = await peers.owner()
    raw = await peers.raw_caller(owner.port.address)
    raw.send(Call(1, 0, (DESCRIBE,)))
    assert type(unpacked((await raw.next()).outcomes)[0]) is QueueDescribed
    raw.send(Cancel(1))
    raw.send(Call(2, 0, (WAIT,)))
    raw.send(Cancel(2))
    ended = await raw.next()
    assert (ended.id, ended.outcomes) == (2, [])
    owner.port.follow(None)
    raw.send(Call(3, 0, (DESCRIBE,)))
    assert await raw.next() == NotOwner(3, None)


@on_a_loop
async def test_an_owner_that_answers_no_call_or_too_little_is_dropped(peers: Peers) -> None:
    address, arrived = await peers.raw_owner()
    caller = await peers.connected(address)
    asked = Asked(sending(QUEUE), sending(QUEUE))
    caller.submit(asked, caller.now())
    owner = await arrived.get()
    call = await owner.next()
    owner.send([4, call.id, [["Deleted", {}]]])
    assert [type(each) for each in await asked.answered()] == [StoreUnknown, StoreUnknown]
    await peers.until(lambda: caller.connected)
    (await arrived.get()).send([4, 99, []])
    await peers.until(lambda: not caller.connected)
    assert "an answer to no call" in str(caller.trouble)


@on_a_loop
async def test_clients_of_this_server_that_do_not_read_get_no_more(peers: Peers) -> None:
    owner = await peers.owner()
    unread = Unread(100)
    caller = await peers.connected(owner.port.address, unread=unread)
    waiting = Asked(WAIT)
    caller.submit(waiting, caller.now())
    await peers.until(lambda: owner.parked)
    unread.add(QUEUE.account, 51)
    assert await one(caller, TAKE) == Overloaded(limit=100)
    await owner.shell.call(sending(QUEUE, "work"))
    assert await waiting.answered() == [Received([])]
    await peers.until(lambda: not caller.calls)
    unread.remove(QUEUE.account, 51)
    assert bodies_of(await one(caller, TAKE)) == ["work"]


@on_a_loop
async def test_what_is_the_owners_own_does_not_leave_this_server(peers: Peers) -> None:
    owner = await peers.owner()
    caller = await peers.connected(owner.port.address, OTHER)
    refused(await one(caller, CheckClock()), CapabilityMissing)
    assert caller.connected
