"""The thread around the engine: group commit, interruption, a store that fails, the history, the clock."""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import msgspec
import pytest
from tests.support.embedded import EmbeddedClient
from tests.support.faults import FaultDisk, full, io_error
from tests.support.sqlite import SMALL, read_events

from veilmq.client.adapters.embedded import EmbeddedAccount, EmbeddedQueue, shell
from veilmq.client.adapters.embedded.shell import Call
from veilmq.client.adapters.embedded.translation import digest
from veilmq.client.errors import TransportError
from veilmq.client.messages import Extension, Message
from veilmq.model.commands import Receive, Send
from veilmq.model.errors import CapacityError, LeaseTaken, QueueMissing, StoreUnknown
from veilmq.model.events import EventRecord
from veilmq.model.outcomes import Received

PATIENCE_SECONDS = 20


@pytest.fixture
def on_disk(disk: FaultDisk, tmp_path: Path) -> Iterator[EmbeddedClient]:
    """An account whose files the disk can fail or hold up."""
    client = EmbeddedClient(tmp_path / "data", msgspec.structs.replace(SMALL, disk=disk))
    yield client
    disk.mend()
    client.account.close()


def made(client: EmbeddedClient) -> EmbeddedQueue:
    client.account.create("jobs")
    return client.account.queue("jobs")


def events(client: EmbeddedClient, start: int = 0) -> list[EventRecord]:
    with client.account._shell._store.reader.look() as view:
        return read_events(view, start, 1_000_000)


def commits(client: EmbeddedClient) -> int:
    """Commits that left events: one row of history each."""
    with client.account._shell._store.readers.lend() as connection:
        return int(connection.execute("SELECT count(*) FROM history").get)


def test_calls_that_come_during_a_commit_share_the_next_one(disk: FaultDisk, on_disk: EmbeddedClient) -> None:
    queue = made(on_disk)
    before = commits(on_disk)
    first, go = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        first.set()
        assert go.wait(PATIENCE_SECONDS)

    disk.syncing = hold
    with ThreadPoolExecutor(21) as pool:
        futures = [pool.submit(queue.send, "first")]
        assert first.wait(PATIENCE_SECONDS)
        futures += [pool.submit(queue.send, f"m{number}") for number in range(20)]
        while on_disk.account._shell._inbox.qsize() < 20:
            time.sleep(0.001)
        go.set()
        assert len({future.result().id for future in futures}) == 21
    assert commits(on_disk) - before == 2


def test_nothing_is_answered_before_it_is_synced(disk: FaultDisk, on_disk: EmbeddedClient) -> None:
    queue = made(on_disk)
    syncing, go = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        syncing.set()
        assert go.wait(PATIENCE_SECONDS)

    disk.syncing = hold
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(queue.send, "x")
        assert syncing.wait(PATIENCE_SECONDS)
        assert not future.done()
        assert queue.peek() == []
        go.set()
        future.result(PATIENCE_SECONDS)
    assert len(queue.peek()) == 1


@pytest.mark.parametrize("call", ["xSync", "xWrite"])
def test_a_store_that_failed_tells_everybody(disk: FaultDisk, on_disk: EmbeddedClient, call: str) -> None:
    queue = made(on_disk)
    queue.send("kept")
    held = queue.receive(lease=600)
    with ThreadPoolExecutor(4) as pool:
        parked = [pool.submit(queue.receive, wait=600) for _ in range(3)]
        while len(on_disk.account._shell._engine.waiting) < 3:
            time.sleep(0.001)
        disk.fail(call, io_error, for_good=True)
        with pytest.raises(StoreUnknown):
            queue.send("perhaps")
        for future in parked:
            with pytest.raises(StoreUnknown):
                future.result(PATIENCE_SECONDS)
    for again in (lambda: queue.send("x"), lambda: queue.delete(held[0].handle), queue.stats, queue.peek):
        with pytest.raises(StoreUnknown):
            again()
    disk.mend()
    directory = on_disk.account.directory
    on_disk.account.close()
    with EmbeddedAccount(directory, options=SMALL) as account:
        assert account.queue("jobs").stats().in_flight == 1  # what was acknowledged is there, and its lease holds


def test_a_full_disk_fails_one_call_and_lets_the_others_live(disk: FaultDisk, on_disk: EmbeddedClient) -> None:
    queue = made(on_disk)
    disk.fail("xWrite", full, for_good=True)
    with pytest.raises(CapacityError):
        queue.send("no room")
    disk.mend()
    on_disk.pass_time(5)
    queue.send("room again")
    assert [message.body for message in queue.receive(10)] == ["room again"]


def test_an_interrupted_receive_takes_nothing(embedded: EmbeddedClient) -> None:
    queue = made(embedded)
    waiting = embedded.account._shell._engine.waiting

    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    def knock() -> None:
        while not len(waiting):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        knocking = threading.Thread(target=knock)
        knocking.start()
        with pytest.raises(Interrupted):
            queue.receive(wait=600)
        knocking.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    queue.send("x")
    (message,) = queue.receive()
    assert message.receive_count == 1


def test_nor_does_one_that_is_interrupted_before_it_waits(
    embedded: EmbeddedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = made(embedded)
    shell = embedded.account._shell

    class Interrupting:
        """The shell's door: an interruption is handled as the first caller leaves it."""

        def __init__(self) -> None:
            self.callers = 0

        def __enter__(self) -> None:
            door.acquire()

        def __exit__(self, *_: object) -> None:
            door.release()
            self.callers += 1
            if self.callers == 1:
                raise KeyboardInterrupt

    door = shell._door
    monkeypatch.setattr(shell, "_door", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        queue.receive(wait=600)
    queue.send("x")
    (message,) = queue.receive()
    assert message.receive_count == 1


def test_what_an_interrupted_receive_had_got_is_released(embedded: EmbeddedClient) -> None:
    queue = made(embedded)
    queue.send("x")
    call = Call((Receive(queue=queue._key, origin=queue._origin, lease_us=600_000_000, wait_us=0),))
    (answer,) = embedded.account._shell.run(call)
    assert isinstance(answer, Received)
    embedded.account._shell.cancel(call, abandoned=True)
    (again,) = queue.receive(wait=600)
    assert again.receive_count == 2
    assert [event.kind for event in events(embedded)].count("undelivered") == 1


def test_wherever_a_receive_is_interrupted_its_message_goes_back(embedded: EmbeddedClient) -> None:
    """Python looks for signals as a function begins, and after each call of one in C."""
    queue = made(embedded)
    queue.send("x")
    rooms = str(Path(shell.__file__).parent), contextlib.__file__
    for place in itertools.count(1):
        places = itertools.count(1)

        def profile(frame: FrameType, event: str, arg: object) -> None:
            here = frame.f_code.co_filename.startswith(rooms)
            if here and event in {"call", "c_return"} and next(places) == place:  # noqa: B023 used within its turn
                raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            held = queue.receive(lease=600, wait=1)
        except KeyboardInterrupt:
            held = []
        finally:
            sys.setprofile(None)
        if held:
            break
        (back,) = queue.receive()
        queue.release(back.handle)
    assert place > 20


def test_extends_are_fenced_and_in_the_history(embedded: EmbeddedClient) -> None:
    queue = made(embedded)
    queue.send_batch([Message(f"m{number}", type="t") for number in range(1_000)])
    held = queue.receive(1_000, lease=120)
    lost = held[500]
    queue.release(lost.handle)
    (taken,) = queue.receive(lease=600)
    assert taken.id == lost.id
    start = events(embedded)[-1].offset + 1
    results = queue.extend_batch([Extension(message.handle, 600) for message in held])
    assert [place for place, result in enumerate(results) if not isinstance(result, str)] == [500]
    assert isinstance(results[500], LeaseTaken)
    told = [event for event in events(embedded, start) if event.kind in {"extended", "extend_refused"}]
    assert [event.kind for event in told].count("extended") == 999
    (refused,) = [event for event in told if event.kind == "extend_refused"]
    assert (refused.attempt, refused.detail) == (1, {"reason": "stale"})
    assert {(event.protocol, event.principal, event.type) for event in told} == {("embedded", "000000000000", "t")}
    assert {event.lease_us for event in told} == {600_000_000, None}
    embedded.pass_time(130)
    assert queue.receive(10) == []


def test_leases_end_while_nobody_calls(embedded: EmbeddedClient) -> None:
    queue = made(embedded)
    queue.send("x")
    queue.receive(lease=5)
    embedded.pass_time(6)
    assert [event.kind for event in events(embedded)][-1] == "lease_expired"
    assert queue.stats().visible == 1


def test_a_wall_clock_that_jumps_ends_no_lease(tmp_path: Path) -> None:
    class Clock:
        """Whose wall can be set."""

        jump = 0.0

        def monotonic(self) -> float:
            return time.clock_gettime(time.CLOCK_BOOTTIME)

        def wall(self) -> float:
            return time.time() + self.jump

    clock = Clock()
    with EmbeddedAccount(tmp_path / "data", clock=clock, options=SMALL) as account:
        account.create("jobs")
        queue = account.queue("jobs")
        queue.send("x")
        (message,) = queue.receive(lease=60)
        for clock.jump in (7_200.0, -7_200.0):
            account.apply_due()
            assert queue.receive() == []
        queue.delete(message.handle)
    with EmbeddedAccount(tmp_path / "data", clock=clock, options=SMALL) as account:
        assert account.queue("jobs").stats().in_flight == 0


def test_the_end_of_a_lease_counts_from_the_grant_and_not_from_the_call(embedded: EmbeddedClient) -> None:
    queue = made(embedded)
    with ThreadPoolExecutor(1) as pool:
        parked = pool.submit(queue.receive, lease=100, wait=600)
        while not len(embedded.account._shell._engine.waiting):
            time.sleep(0.001)
        embedded.pass_time(300)
        before = embedded.clock.monotonic()
        queue.send("x")
        (message,) = parked.result(PATIENCE_SECONDS)
    assert before <= message.lease_end - 100 <= embedded.clock.monotonic()


def test_a_closed_account_answers_who_waits(embedded: EmbeddedClient) -> None:
    queue = made(embedded)
    with ThreadPoolExecutor(3) as pool:
        parked = [pool.submit(queue.receive, wait=600) for _ in range(3)]
        while len(embedded.account._shell._engine.waiting) < 3:
            time.sleep(0.001)
        embedded.account.close()
        assert [future.result(PATIENCE_SECONDS) for future in parked] == [[], [], []]
    for call in (lambda: queue.send("x"), embedded.account.names, lambda: embedded.account.queue("jobs")):
        with pytest.raises(TransportError) as refused:
            call()
        assert not refused.value.may_have_happened


def test_a_deleted_queue_answers_who_waits(embedded: EmbeddedClient) -> None:
    queue = made(embedded)
    with ThreadPoolExecutor(1) as pool:
        parked = pool.submit(queue.receive, wait=600)
        while not len(embedded.account._shell._engine.waiting):
            time.sleep(0.001)
        embedded.account.delete("jobs")
        with pytest.raises(QueueMissing) as refused:
            parked.result(PATIENCE_SECONDS)
    assert refused.value.queue == "jobs"


def test_an_empty_body_that_is_stored_can_be_read(embedded: EmbeddedClient) -> None:
    """Azure's protocol and the admin port store such."""
    queue = made(embedded)
    send = Send(queue=queue._key, origin=queue._origin, body="", md5=digest(b""), size_bytes=0)
    embedded.account._shell.run(Call((send,)))
    assert [peeked.body for peeked in queue.peek()] == [""]
    (message,) = queue.receive()
    assert message.body == ""
    queue.delete(queue.extend(message.handle, 60, body="no longer"))
