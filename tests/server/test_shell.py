"""The shell by itself, on a real store: callers that go away, what shares a commit, stalls, and how it stops."""

import asyncio
import hmac
import logging
import os
import socket
import struct
import threading
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.clock import EPOCH
from tests.support.contract.stage import TESTER, sending
from tests.support.faults import FaultDisk, full
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.engine.engine import Engine
from veilmq.model.commands import CreateQueue, Delete, DescribeQueue, Peek, Receive
from veilmq.model.errors import DiskLow, StoreFailed, StoreUnknown
from veilmq.model.instant import HOUR_US, SECOND_US, Instant
from veilmq.model.outcomes import Outcome, QueueDescribed, Received, Sent
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols import Response, azure
from veilmq.protocols.sqs.codec import Call, Codec, Endpoint
from veilmq.server.auth import DevelopmentKeyring, Hosts
from veilmq.server.auth.tokens import NoTokens
from veilmq.server.clock import LeaseClock
from veilmq.server.http.listener import Listener, listen
from veilmq.server.port import Port
from veilmq.server.shell import Shell
from veilmq.store import RollbackLog
from veilmq.store.sqlite.batch.memtable import BATCHES_MAX
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing.for_each import for_each

ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""That of development mode, as Azurite's."""
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


class Speechless(Codec):
    """It cannot write what a receive got."""

    def encode(self, call: Call, outcomes: Sequence[Outcome]) -> Response | Call:
        raise ValueError("no text has this form")


class Aimless(Codec):
    """What is to follow a call has no command."""

    def encode(self, call: Call, outcomes: Sequence[Outcome]) -> Response | Call:
        return msgspec.structs.replace(call, commands=())


@asynccontextmanager
async def connected(
    path: Path, codec: Callable[[DevelopmentKeyring, Endpoint], Any], origins: Sequence[str] | None = ()
) -> AsyncIterator[tuple[Shell, Port, Listener, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a port, of SQS if the codec is."""
    store = SqliteFactory(path).open()
    shell = Shell(Engine(), store, LeaseClock())
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    keyring = DevelopmentKeyring()
    port = Port("sqs", codec(keyring, Endpoint()), shell, shell.engine.unread, keyring, Hosts([], origins))
    listener = await listen("127.0.0.1", 0, port.handle)
    yield shell, port, listener, *await asyncio.open_connection(*listener.address[:2])
    await listener.close_gracefully(1)
    await shell.stop(5)
    store.close()


def ask(writer: asyncio.StreamWriter, body: bytes, head: bytes = b"Connection: close\r\n") -> None:
    head += b"Host: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    writer.write(b"POST / HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body))


async def taken(shell: Shell) -> list[str]:
    """What the next receive gets."""
    (outcome,) = await shell.call(TAKE)
    assert isinstance(outcome, Received)
    return [message.body for message in outcome.messages]


RECEIVE = b"Action=ReceiveMessage&QueueUrl=/000000000000/jobs"


async def receive_in_vain(path: Path, codec: type[Codec] = Speechless) -> list[str]:
    """A request whose answer cannot be written; what the next receive gets."""
    async with connected(path, codec) as (shell, _, _, reader, writer):
        await shell.call(sending(QUEUE, "work"))
        ask(writer, RECEIVE)
        assert (await reader.read()).startswith(b"HTTP/1.1 500 ")
        writer.close()
        return await taken(shell)


async def receive_and_fail(path: Path) -> list[str]:
    """A request that cannot go on; what the next receive gets."""
    return await receive_in_vain(path, Aimless)


async def hang_up(path: Path) -> list[str]:
    """A client that resets its connection while its receive waits; what the next receive gets."""
    look = DescribeQueue(queue=QUEUE, origin=TESTER)
    async with connected(path, Codec) as (shell, port, _, _, writer), asyncio.timeout(20):
        ask(writer, RECEIVE + b"&WaitTimeSeconds=20")
        while not port.waiting:
            await shell.call(look)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        while port.waiting:
            await shell.call(look)
        await shell.call(sending(QUEUE, "work"))
        return await taken(shell)


@for_each("play", [wait_and_go, take_and_go, receive_in_vain, receive_and_fail, hang_up])
def test_a_caller_that_goes_takes_nothing_with_it(
    tmp_path: Path, play: Callable[[Path], Coroutine[Any, Any, list[str]]]
) -> None:
    """Nor does an answer that cannot be written."""
    assert asyncio.run(play(tmp_path / play.__name__)) == ["work"]


async def keep_place(path: Path) -> list[int]:
    """How many connections of strangers there are after each of three requests on one."""
    async with connected(path, Codec) as (_, _, listener, reader, writer), asyncio.timeout(20):
        found = []
        for body in (b"Action=Nonsense", b"Action=ListQueues", b"Action=Nonsense"):
            ask(writer, body, b"")
            await reader.readuntil(b"Response>")
            found.append(len(listener.strangers))
        writer.close()
        return found


async def keep_place_of_azure(path: Path) -> list[int]:
    """The same; the first two read CORS rules for a page without a key."""

    def codec(keyring: DevelopmentKeyring, _: Endpoint) -> azure.Codec:
        return azure.Codec(keyring, azure.Endpoint(), NoTokens())

    account = b"/devstoreaccount1"
    version = b"x-ms-version: 2026-02-06\r\n"
    page = version + b"Origin: https://a.example\r\n"
    named = b"x-ms-date:%s\nx-ms-version:2026-02-06\n" % formatdate(usegmt=True).encode()
    text = b"GET\n\n\n\n" + named + 2 * account + b"?comp=list"
    signature = b64encode(hmac.digest(b64decode(ACCOUNT_KEY), text, "sha256"))
    key = named.replace(b"\n", b"\r\n") + b"Authorization: SharedKeyLite %s:%s\r\n" % (account[1:], signature)
    async with connected(path, codec, None) as (_, _, listener, reader, writer), asyncio.timeout(20):
        found = []
        for line, head, end in (
            (b"OPTIONS " + account, page + b"Access-Control-Request-Method: GET\r\n", b"</Error>"),
            (b"GET " + account + b"?comp=list", page, b"</Error>"),
            (b"GET " + account + b"?comp=list", key, b"</EnumerationResults>"),
        ):
            writer.write(line + b" HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n")
            await reader.readuntil(end)
            found.append(len(listener.strangers))
        writer.close()
        return found


def test_a_request_with_a_valid_key_keeps_its_connection_s_place(tmp_path: Path) -> None:
    assert asyncio.run(keep_place(tmp_path / "sqs")) == [1, 0, 0]
    assert asyncio.run(keep_place_of_azure(tmp_path / "azure")) == [1, 1, 0]


class JumpingClock:
    """Stands still but for jumps."""

    def __init__(self) -> None:
        self.instant = EPOCH

    def now(self) -> Instant:
        return self.instant


async def count_batches(path: Path, turns: int, calls_first: int) -> tuple[int, int]:
    """Calls that come at once, then one a turn of the loop; into how many batches they went, and after how many turns
    of the loop the first was answered."""
    store = SqliteFactory(path).open()
    # However slow disk and machine are: commits on the loop, batches of full size, and nobody has waited too long.
    shell = Shell(Engine(), store, JumpingClock(), stopwatch=lambda: 0.0, cpu_time=lambda: 0.0)
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
    assert waited == 4  # two turns for the call and its answer, one to look for others


def test_a_stream_of_calls_is_not_gathered_for_ever(tmp_path: Path) -> None:
    batches, waited = asyncio.run(count_batches(tmp_path / "data", turns=1_000, calls_first=2))
    assert 7 <= batches <= 10  # of 128 each
    assert waited < 140


async def fill_the_memtable(path: Path) -> list[tuple[int, int]]:
    """The last two batches before one that flushes, that one, and the last before another one, which a stop follows at
    once: of how many the database knows nothing, and how many are in the journal, some turns of the loop after each."""
    store = SqliteFactory(path).open()
    shell = Shell(Engine(), store, JumpingClock())
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    writer, states = store._writer, []
    for _ in range(BATCHES_MAX + 1):
        await shell.call(sending(QUEUE))
        for _ in range(4):
            await asyncio.sleep(0)
        states.append((len(writer.redo.unapplied), writer.memtable.batches))
    for _ in range(BATCHES_MAX):
        await shell.call(sending(QUEUE))
    await shell.stop(5)
    states.append((len(writer.redo.unapplied), writer.memtable.batches))
    store.close()
    return states[-4:]


def test_the_log_is_applied_before_the_batch_that_flushes(tmp_path: Path) -> None:
    """In a turn of the loop of its own, because the two together take long; but not while the shell stops."""
    *states, stopped = asyncio.run(fill_the_memtable(tmp_path / "data"))
    assert states == [(BATCHES_MAX - 1, BATCHES_MAX - 1), (0, BATCHES_MAX), (0, 0)]
    assert stopped == (BATCHES_MAX, BATCHES_MAX)


async def act_after_a_stall(path: Path) -> list[str]:
    """A lease ends while the loop stands still, and its delete is read some turns after the stall; what is left."""
    store = SqliteFactory(path).open()
    clock = JumpingClock()
    shell = Shell(Engine(), store, clock, stopwatch=lambda: 0.0)
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    await shell.call(sending(QUEUE, "work"))
    (taken,) = await shell.call(msgspec.structs.replace(TAKE, lease_us=SECOND_US))
    assert isinstance(taken, Received)
    clock.instant = Instant(clock.instant + 2 * SECOND_US)
    again = asyncio.create_task(shell.call(msgspec.structs.replace(TAKE, wait_us=0)))
    for _ in range(5):
        await asyncio.sleep(0)
    delete = Delete(queue=QUEUE, origin=TESTER, handle=taken.messages[0].handle, arrived=shell.arrived())
    await shell.call(delete)
    (left,) = await again
    assert isinstance(left, Received)
    await shell.stop(5)
    store.close()
    return [message.body for message in left.messages]


def test_after_a_stall_what_arrived_in_it_comes_before_what_ended_in_it(tmp_path: Path) -> None:
    assert asyncio.run(act_after_a_stall(tmp_path / "data")) == []


class Noting:
    """A ticket that notes when it is answered."""

    def __init__(self, notes: list[str]) -> None:
        self.commands = [sending(QUEUE)]
        self.notes = notes
        self.answered = asyncio.Event()

    def answer(self, outcomes: list[Outcome]) -> None:
        self.notes.append("answered")
        self.answered.set()


async def arrive_around_a_stall(path: Path) -> list[int]:
    """How long ago what is read had arrived, after a turn of the loop that took so many seconds."""
    store = SqliteFactory(path).open()
    clock = JumpingClock()
    shell = Shell(Engine(), store, clock, stopwatch=lambda: 0.0)
    shell.start()
    ages = []
    for seconds in (1, 2):
        await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
        clock.instant = Instant(clock.instant + seconds * SECOND_US)
        ages.append((clock.instant - shell.arrived()) // SECOND_US)
    await shell.stop(5)
    store.close()
    return ages


def test_what_is_read_after_a_stall_counts_as_come_before_it(tmp_path: Path) -> None:
    assert asyncio.run(arrive_around_a_stall(tmp_path / "data")) == [0, 2]


async def note_the_order(path: Path) -> list[str]:
    """What comes when a message is sent."""
    notes: list[str] = []
    store = SqliteStore(path, SMALL, notes.append)
    shell = Shell(Engine(), store, LeaseClock())
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    notes.clear()
    ticket = Noting(notes)
    shell.submit(ticket, shell.now())
    await ticket.answered.wait()
    noted = list(notes)
    await shell.stop(5)
    store.close()
    return noted


def test_nothing_is_answered_before_it_is_committed(tmp_path: Path) -> None:
    noted = asyncio.run(note_the_order(tmp_path / "data"))
    assert noted.index("after commit") < noted.index("answered")


async def answer_without_a_lease(path: Path) -> list[Outcome]:
    """What a read, an empty receive, one that had waited, a peek and a send say when the lease has ended."""
    store = SqliteFactory(path).open()
    holds = True
    shell = Shell(Engine(), store, LeaseClock(), holds=lambda: holds)
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    # Long enough that its wait does not end before the lease has, however busy the machine is.
    waiting = asyncio.create_task(shell.call(msgspec.structs.replace(TAKE, wait_us=500_000)))
    (described,) = await shell.call(DescribeQueue(queue=QUEUE, origin=TESTER))
    assert isinstance(described, QueueDescribed)
    holds = False
    outcomes = [await shell.query(Peek(queue=QUEUE, origin=TESTER)), *await waiting]
    for command in (
        DescribeQueue(queue=QUEUE, origin=TESTER),
        msgspec.structs.replace(TAKE, wait_us=0),
        sending(QUEUE),
    ):
        outcomes += await shell.call(command)
    await shell.stop(5)
    store.close()
    return outcomes


def test_what_no_commit_confirmed_is_answered_only_while_the_lease_runs(tmp_path: Path) -> None:
    *unconfirmed, sent = asyncio.run(answer_without_a_lease(tmp_path / "data"))
    assert {type(outcome) for outcome in unconfirmed} == {StoreFailed}
    assert isinstance(sent, Sent)


async def send_on_a_full_disk(path: Path, disk: FaultDisk) -> tuple[Outcome, Outcome, int, int]:
    """What a send says while the disk is full, and one after it; how many messages there are then, and how many batches
    were rolled back."""
    store = SqliteStore(path, msgspec.structs.replace(SMALL, disk=disk))
    shell = Shell(Engine(), store, LeaseClock())
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    disk.fail("xWrite", full, for_good=True)
    (refused,) = await shell.call(sending(QUEUE))
    disk.mend()
    store._disk_looked = Instant(0)  # long ago
    (sent,) = await shell.call(sending(QUEUE))
    (described,) = await shell.call(DescribeQueue(queue=QUEUE, origin=TESTER))
    assert isinstance(described, QueueDescribed)
    await shell.stop(5)
    store.close()
    return refused, sent, described.info.counts.visible, shell.stats.rolled_back


def test_a_commit_that_fails_is_told_to_who_asked(tmp_path: Path, disk: FaultDisk) -> None:
    refused, sent, visible, rolled_back = asyncio.run(send_on_a_full_disk(tmp_path / "data", disk))
    assert isinstance(refused, DiskLow)
    assert isinstance(sent, Sent)
    assert (visible, rolled_back) == (1, 1)


def test_batches_that_are_rolled_back_are_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """While a full disk or a lost log fails one batch after the other."""
    rollbacks = RollbackLog(logging.getLogger("veilmq.shell"))
    for _ in range(3):
        rollbacks.note(StoreFailed(reason="no room"), 100.0)
    rollbacks.note(StoreFailed(reason="still none"), 105.0)
    said = [record.getMessage() for record in caplog.records if "rolled back" in record.getMessage()]
    assert [each.partition(" rolled")[0] for each in said] == ["a batch was", "3 batches were"]
    assert "no room" in said[0]
    assert "still none" in said[1]
    assert (rollbacks.lately(134.0), rollbacks.lately(135.0)) == ("not done: still none", "")


async def stop_and_watch(path: Path) -> tuple[set[str], set[str]]:
    """The threads that committed before a stop, and in it."""
    threads: list[str] = []

    def at_point(point: str) -> None:
        if point == "before commit":
            threads.append(threading.current_thread().name)

    store = SqliteStore(path, SMALL, at_point)
    shell = Shell(Engine(), store, LeaseClock(), stopwatch=lambda: 0.0)
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    before = set(threads)
    threads.clear()
    last = asyncio.create_task(shell.call(sending(QUEUE)))
    await asyncio.sleep(0)
    await shell.stop(5)
    await last
    store.close()
    return before, set(threads)


def test_a_stop_keeps_its_deadline_though_commits_were_short(tmp_path: Path) -> None:
    before, within = asyncio.run(stop_and_watch(tmp_path / "data"))
    assert before == {threading.current_thread().name}
    assert within == {"veilmq-commit"}


async def stop_after_a_failure(path: Path) -> None:
    """The store fails after a receive was counted for the history."""
    broken = False

    def at_point(point: str) -> None:
        if broken and point == "before commit":
            raise OSError("the disk is gone")

    store = SqliteStore(path, SMALL, at_point)
    shell = Shell(Engine(), store, LeaseClock())
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    await shell.call(msgspec.structs.replace(TAKE, wait_us=0))
    broken = True
    (refused,) = await shell.call(sending(QUEUE))
    assert isinstance(refused, StoreUnknown)
    assert shell.engine.polls, "there is something to record"
    await shell.stop(1)
    store.close()


async def ask_as_the_directory_goes(path: Path, how: str) -> None:
    """What a look at the disk meets, or a bug, leaves no call without an answer."""
    store = SqliteStore(path, SMALL)
    shell = Shell(Engine(), store, LeaseClock())
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=TESTER))
    if how == "a look at the disk":
        os.rename(path, path.with_name("elsewhere"))
        store._disk_looked = Instant(0)  # long ago
    else:
        store._check_usable = lambda: 1 / 0  # type: ignore[method-assign]
    (refused,) = await asyncio.wait_for(shell.call(sending(QUEUE)), 10)
    assert isinstance(refused, StoreUnknown)
    assert shell.failed.done()
    if how == "a bug":
        del store._check_usable  # the store would go on
    (refused,) = await asyncio.wait_for(shell.call(sending(QUEUE)), 10)
    assert isinstance(refused, StoreUnknown)
    await shell.stop(1)
    store.close()


@pytest.mark.parametrize("how", ["a look at the disk", "a bug"])
def test_a_store_that_raises_leaves_no_call_without_an_answer(tmp_path: Path, how: str) -> None:
    asyncio.run(ask_as_the_directory_goes(tmp_path / "data", how))


def test_a_store_that_failed_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(stop_after_a_failure(tmp_path / "data"))
    assert "the disk is gone" in caplog.text
    assert "shut-down" not in caplog.text
