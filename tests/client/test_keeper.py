"""The lease keeper over a real queue in a data directory; time passes when the test says so."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.keeper import Lease, LeaseKeeper, Reason, State
from veilmq.client.messages import Extension, Message, Received, Template
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseExpired,
    LeaseTaken,
    ParameterInvalid,
    ReceiptInvalid,
    VeilError,
)
from veilmq.model.messages import Failure
from veilmq.testing.client_contract import for_each

UNREACHABLE = TransportError(reason="connection refused", may_have_happened=False)
LOST_ANSWER = TransportError(reason="the answer was lost", may_have_happened=True)
FORBIDDEN = ServiceError(code="AccessDenied", status=403, request_id="1", message="revoked")
SETTINGS = {"visibility_timeout": 30, "interval": 10, "minimal_life": 5}


class MovableClock:
    """Both of its times pass together, until the wall clock jumps."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.jumped = 0.0

    def monotonic(self) -> float:
        return 1_000 + self.passed

    def wall(self) -> float:
        return 1_700_000_000 + self.passed + self.jumped


class Faulty(Wrapping):
    """Extends, singly or in batches, run into what `fault` says for a handle."""

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.fault: Callable[[str], VeilError | None] = lambda handle: None
        self.extends = 0

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        self.extends += 1
        error = self.fault(handle)
        if error is not None:
            raise error
        return self.inner.extend(handle, lease, body=body)

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        self.extends += len(extensions)
        faults = [self.fault(extension.handle) for extension in extensions]
        answers = iter(
            self.inner.extend_batch(
                [extension for extension, fault in zip(extensions, faults, strict=True) if fault is None]
            )
        )
        return [next(answers) if fault is None else fault for fault in faults]


class Rotating(Wrapping):
    """Each extend voids the handle that it was given, as Azure's and MNS's do; one at a time, and no batches."""

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.rotations: dict[str, int] = {}
        self.calls: list[str] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, receipts_rotate=True, batch_extend=False)

    def newest(self, handle: str) -> str:
        inner, _, rotation = handle.rpartition("#")
        inner, rotation = (inner, rotation) if inner else (handle, "0")
        if self.rotations.get(inner, 0) != int(rotation):
            raise LeaseTaken(sequence=0, attempt=0)
        return inner

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        inner = self.newest(handle)
        self.entered.set()
        assert self.gate.wait(30)
        self.inner.extend(inner, lease, body=body)
        self.calls.append("extend")
        self.rotations[inner] = self.rotations.get(inner, 0) + 1
        return f"{inner}#{self.rotations[inner]}"

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        raise CapabilityMissing(capability="batch_extend")

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.inner.release(self.newest(handle), delay, failure=failure)
        self.calls.append("release")

    def delete(self, handle: str) -> None:
        self.inner.delete(self.newest(handle))
        self.calls.append("delete")


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def account(tmp_path: Path, clock: MovableClock) -> Iterator[EmbeddedAccount]:
    with EmbeddedAccount(tmp_path / "data", clock=clock) as account:
        account.create("jobs", Template(visibility_timeout=30))
        yield account


@pytest.fixture
def queue(account: EmbeddedAccount) -> Queue:
    return account.queue("jobs")


@pytest.fixture
def keeper(queue: Queue, clock: MovableClock) -> Iterator[LeaseKeeper]:
    with LeaseKeeper(queue, clock=clock, **SETTINGS) as keeper:
        yield keeper


@pytest.fixture
def wait(account: EmbeddedAccount, clock: MovableClock) -> Callable[..., None]:
    """Let seconds pass, a quarter at a time, with everything that is due in between."""

    def wait(seconds: float, *keepers: LeaseKeeper) -> None:
        for _ in range(int(seconds * 4)):
            clock.passed += 0.25
            for keeper in keepers:
                keeper.extend_due()
            account.apply_due()

    return wait


def received(queue: Queue, count: int = 1, lease: float | None = None) -> list[Received]:
    queue.send_batch([f"body {number}" for number in range(count)])
    messages = queue.receive(count, lease=lease)
    assert len(messages) == count
    return messages


def eventually(condition: Callable[[], object]) -> None:
    """For what another thread does in its own time."""
    for _ in range(3_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def test_work_of_ten_timeouts_is_seen_once(queue: Queue, keeper: LeaseKeeper, wait: Callable[..., None]) -> None:
    (message,) = received(queue)
    lease = keeper.register(message)
    for _ in range(10):
        wait(30, keeper)
        assert queue.receive(1) == []
        assert lease.state is State.HELD
        assert lease.remaining() > 14
    lease.delete()
    wait(60, keeper)
    assert queue.receive(1) == []
    assert queue.stats().in_flight == 0


def test_without_a_keeper_it_would_have_been_seen_again(queue: Queue, wait: Callable[..., None]) -> None:
    received(queue)
    wait(31)
    assert len(queue.receive(1)) == 1


def test_a_stuck_message_is_back_after_max_hold(
    queue: Queue, keeper: LeaseKeeper, wait: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = received(queue)
    with caplog.at_level(logging.WARNING, "veilmq.keeper"):
        lease = keeper.register(message, max_hold=100)
        wait(99, keeper)
        assert queue.receive(1) == []
        wait(2, keeper)
    assert lease.lost.reason is Reason.MAX_HOLD
    assert len(queue.receive(1)) == 1
    assert f"message {message.id} is let go in" in caplog.text


def test_prefetched_messages_are_kept_too(queue: Queue, keeper: LeaseKeeper, wait: Callable[..., None]) -> None:
    leases = [keeper.register(message) for message in received(queue, 10)]
    assert keeper.leases == 10
    wait(100, keeper)
    for lease in leases:
        lease.delete()
    stats = queue.stats()
    assert (stats.visible, stats.in_flight, keeper.leases) == (0, 0, 0)


def test_the_own_thread_extends_without_being_asked(queue: Queue, clock: MovableClock) -> None:
    with LeaseKeeper(queue, clock=clock, visibility_timeout=30, interval=0.1, minimal_life=25) as keeper:
        lease = keeper.register(received(queue)[0])
        clock.passed += 10
        eventually(lambda: lease.deadline == clock.monotonic() + 30)


def test_a_users_short_extension_ends_a_long_sleep_of_the_own_thread(queue: Queue, clock: MovableClock) -> None:
    faulty = Faulty(queue)

    def late(handle: str) -> None:
        """The answer comes when three quarters of the lease are over."""
        clock.passed += 15
        faulty.fault = lambda handle: None

    with LeaseKeeper(faulty, clock=clock, visibility_timeout=3600, interval=600, minimal_life=600) as keeper:
        lease = keeper.register(received(queue, lease=3600)[0])
        eventually(lambda: keeper._sleeps_until > clock.monotonic() + 500)
        faulty.fault = late
        lease.extend(20)
        eventually(lambda: lease.deadline == clock.monotonic() + 3600)


def test_a_delete_waits_for_the_extension_and_takes_its_handle(
    queue: Queue, clock: MovableClock, wait: Callable[..., None]
) -> None:
    rotating = Rotating(queue)
    with LeaseKeeper(rotating, clock=clock, **SETTINGS) as keeper:
        lease = keeper.register(received(rotating)[0])
        wait(40, keeper)
        rotating.entered.clear()
        rotating.gate.clear()
        clock.passed += 15
        extending = threading.Thread(target=keeper.extend_due)
        extending.start()
        eventually(rotating.entered.is_set)
        assert lease.state is State.EXTENDING
        deleting = threading.Thread(target=lease.delete)
        deleting.start()
        deleting.join(0.1)
        assert deleting.is_alive()
        rotating.gate.set()
        extending.join()
        deleting.join()
        assert lease.state is State.DONE
        wait(60, keeper)
    assert rotating.calls[-2:] == ["extend", "delete"]
    assert "#" in lease.handle


def test_release_takes_the_newest_handle_and_ends_the_keeping(
    queue: Queue, clock: MovableClock, wait: Callable[..., None]
) -> None:
    rotating = Rotating(queue)
    with LeaseKeeper(rotating, clock=clock, **SETTINGS) as keeper:
        lease = keeper.register(received(rotating)[0])
        wait(40, keeper)
        lease.release(delay=20)
        assert lease.state is State.DONE
        wait(19, keeper)
        assert queue.receive(1) == []
        wait(2, keeper)
        assert len(queue.receive(1)) == 1
        with pytest.raises(LeaseExpired):
            lease.extend(30)
    assert rotating.calls[-1] == "release"


def test_a_users_own_extension_stands(queue: Queue, keeper: LeaseKeeper, wait: Callable[..., None]) -> None:
    lease = keeper.register(received(queue)[0])
    lease.extend(600)
    wait(580, keeper)
    assert keeper.stats.extensions == 0
    wait(100, keeper)
    assert queue.receive(1) == []
    assert keeper.stats.extensions > 0


def test_a_refused_extension_of_the_users_is_raised_and_a_loss(
    queue: Queue, keeper: LeaseKeeper, wait: Callable[..., None]
) -> None:
    lease = keeper.register(received(queue)[0])
    queue.delete(lease.handle)
    with pytest.raises(VeilError):
        lease.extend(60)
    assert lease.lost.reason is Reason.GONE


def test_what_the_queue_cannot_do_leaves_the_lease_held(queue: Queue, keeper: LeaseKeeper) -> None:
    lease = keeper.register(received(queue)[0])
    if not queue.capabilities.body_replaceable:
        with pytest.raises(CapabilityMissing):
            lease.extend(60, body="half done")
    with pytest.raises(ParameterInvalid, match="seconds"):
        lease.extend(10_000_000)
    assert lease.state is State.HELD


def test_an_outage_that_passes_loses_nothing(queue: Queue, clock: MovableClock, wait: Callable[..., None]) -> None:
    faulty = Faulty(queue)
    with LeaseKeeper(faulty, clock=clock, **SETTINGS) as keeper:
        leases = [keeper.register(message) for message in received(queue, 10)]
        faulty.fault = lambda handle: UNREACHABLE
        wait(25, keeper)
        assert keeper.stats.failures >= 30
        assert faulty.extends <= 20 * len(leases), "pauses must grow"
        faulty.fault = lambda handle: None
        wait(30, keeper)
        assert [lease.state for lease in leases] == [State.HELD] * 10
        assert queue.receive(1) == []


@pytest.mark.parametrize("error", [UNREACHABLE, FORBIDDEN])
def test_an_outage_beyond_the_lease_is_told_and_harms_no_other(
    queue: Queue, clock: MovableClock, wait: Callable[..., None], error: VeilError
) -> None:
    faulty = Faulty(queue)
    told: list[Lease] = []
    with LeaseKeeper(faulty, clock=clock, on_lost=told.append, **SETTINGS) as keeper:
        first, second = (keeper.register(message) for message in received(queue, 2))
        mine: list[Lease] = []
        first.on_lost(mine.append)
        faulty.fault = lambda handle: error if handle == first.handle else None
        wait(31, keeper)
        eventually(lambda: told and mine)
        assert told == mine == [first]
        assert first.lost.is_set()
        assert first.lost.wait(0)
        assert (first.lost.reason, first.lost.error) == (Reason.EXPIRED, error)
        assert second.state is State.HELD
        wait(60, keeper)
        assert second.state is State.HELD
        late: list[Lease] = []
        first.on_lost(late.append)
        eventually(lambda: late)


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_wall_clock_that_jumps_loses_nothing(
    queue: Queue, keeper: LeaseKeeper, clock: MovableClock, wait: Callable[..., None], jump: float
) -> None:
    lease = keeper.register(received(queue)[0])
    wait(5, keeper)
    clock.jumped = jump
    wait(60, keeper)
    assert not lease.lost
    assert queue.receive() == []
    assert keeper.stats.extensions >= 3
    lease.delete()


def test_after_a_long_sleep_of_the_machine_a_lease_that_nobody_took_is_held_again(
    queue: Queue, keeper: LeaseKeeper, clock: MovableClock, wait: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    lease = keeper.register(received(queue)[0])
    clock.passed += 3_600
    keeper.extend_due()
    assert not lease.lost
    assert caplog.messages == []
    wait(60, keeper)
    assert (lease.state, keeper.stats.losses) == (State.HELD, {})
    assert queue.receive() == []
    lease.delete()


@pytest.mark.parametrize("fifo", [False, True])
def test_after_a_long_sleep_of_the_machine_what_is_gone_is_lost_and_new_ones_kept(
    account: EmbeddedAccount,
    clock: MovableClock,
    wait: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    fifo: bool,
) -> None:
    name = "jobs.fifo" if fifo else "others"
    account.create(name, Template(visibility_timeout=30, content_deduplication=fifo))
    queue = account.queue(name)
    queue.send(Message("body", group="g") if fifo else "body")
    with LeaseKeeper(queue, clock=clock, **SETTINGS) as keeper:
        lease = keeper.register(queue.receive()[0])
        if not fifo:
            queue.release(lease.handle)  # behind the keeper's back: somebody else has it when the machine wakes
            (taken,) = queue.receive(lease=7_200)
        clock.passed += 3_600
        keeper.extend_due()
        keeper.extend_due()
        assert lease.lost.reason is (Reason.EXPIRED if fifo else Reason.TAKEN)
        told = f"queue {name}: 1 lease lost, first message {lease.message.id}: {lease.lost.reason}"
        eventually(lambda: told in caplog.text)  # the keeper's own thread may have met it
        account.apply_due()
        again = keeper.register(queue.receive()[0] if fifo else taken)
        wait(60, keeper)
        assert not again.lost
        assert queue.receive() == []


def test_a_message_that_another_took_is_told(queue: Queue, clock: MovableClock, wait: Callable[..., None]) -> None:
    faulty = Faulty(queue)
    with LeaseKeeper(faulty, clock=clock, **SETTINGS) as keeper:
        lease = keeper.register(received(queue)[0])
        waiting = threading.Thread(target=lease.lost.wait)
        waiting.start()
        queue.release(lease.handle)
        assert len(queue.receive(1)) == 1
        wait(16, keeper)
        waiting.join(30)
        assert lease.lost.reason is Reason.TAKEN
        with pytest.raises(LeaseTaken):
            lease.delete()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_raises_stops_nobody(queue: Queue, clock: MovableClock, wait: Callable[..., None]) -> None:
    told: list[str] = []

    def tell(lease: Lease) -> None:
        told.append(lease.message.id)
        raise ZeroDivisionError("the handler's own fault")

    with LeaseKeeper(queue, clock=clock, on_lost=tell, **SETTINGS) as keeper:
        lost = [keeper.register(message) for message in received(queue, 5)]
        for lease in lost:
            queue.delete(lease.handle)
        kept = keeper.register(received(queue)[0])
        wait(40, keeper)
        eventually(lambda: len(told) == 5)
        wait(40, keeper)
        assert kept.state is State.HELD


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_adapter_that_breaks_costs_a_retry(queue: Queue, clock: MovableClock) -> None:
    faults = iter([True, True, False])

    class Broken(Wrapping):
        def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
            if next(faults, False):
                raise KeyError("a fault of the adapter")
            return self.inner.extend_batch(extensions)

    with LeaseKeeper(Broken(queue), clock=clock, visibility_timeout=30, interval=0.1, minimal_life=25) as keeper:
        lease = keeper.register(received(queue)[0])
        clock.passed += 10

        def extended() -> bool:
            clock.passed += 0.01
            return keeper.stats.extensions == 1

        eventually(extended)
        assert keeper.stats.failures == 2
        assert lease.state is State.HELD


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_deciding_thread_survives_a_fault_of_its_own(queue: Queue) -> None:
    class Failing(MovableClock):
        faults = 0

        def monotonic(self) -> float:
            if self.faults and threading.current_thread().name == "veilmq keeper jobs":
                self.faults -= 1
                raise KeyError("a fault of the clock")
            return super().monotonic()

    clock = Failing()
    with LeaseKeeper(queue, clock=clock, visibility_timeout=30, interval=0.1, minimal_life=25) as keeper:
        lease = keeper.register(received(queue, lease=30)[0])
        held = lease.deadline
        clock.faults = 2
        eventually(lambda: not clock.faults)
        clock.passed += 10
        eventually(lambda: lease.deadline > held)


def test_a_second_delete_or_release_does_nothing(queue: Queue, clock: MovableClock) -> None:
    rotating = Rotating(queue)
    with LeaseKeeper(rotating, clock=clock, **SETTINGS) as keeper:
        first, second = (keeper.register(message) for message in received(rotating, 2))
        for _ in range(2):
            first.delete()
            first.release()
            second.release()
            second.delete()
    assert rotating.calls == ["delete", "release"]
    assert queue.stats().visible == 1


@pytest.mark.parametrize("kept", [True, False])
def test_a_delete_that_was_done_and_repeated_in_vain_is_done(queue: Queue, clock: MovableClock, kept: bool) -> None:
    class Line(Wrapping):
        def delete(self, handle: str) -> None:
            if faults == [UNREACHABLE, LOST_ANSWER]:
                self.inner.delete(handle)
            if faults:
                raise faults.pop()
            self.inner.delete(handle)

    faults = [UNREACHABLE, LOST_ANSWER]
    with (
        LeaseKeeper(Line(queue), clock=clock, **SETTINGS)
        if kept
        else LeaseKeeper.passive(Line(queue), clock=clock) as keeper
    ):
        (message,) = received(queue)
        lease = keeper.register(message)
        for _ in range(2):
            with pytest.raises(TransportError):
                lease.delete()
        lease.delete()
    assert faults == []


def test_too_little_left_is_extended_before_the_handler_starts(
    queue: Queue, keeper: LeaseKeeper, clock: MovableClock, wait: Callable[..., None]
) -> None:
    (message,) = received(queue, lease=4)
    lease = keeper.register(message)
    assert lease.deadline == clock.monotonic() + 30
    wait(10)
    assert queue.receive(1) == []


def test_a_lease_that_is_meant_to_be_short_is_not_extended_at_once(queue: Queue, clock: MovableClock) -> None:
    faulty = Faulty(queue)
    with LeaseKeeper(faulty, clock=clock, **SETTINGS) as keeper:
        lease = keeper.register(received(queue, lease=4)[0], lease=4)
        assert (faulty.extends, lease.remaining()) == (0, 4)


def test_a_keeper_that_is_closed_meanwhile_takes_nothing(queue: Queue, clock: MovableClock) -> None:
    class Closing:
        margin = 2.0

        def first_lease(self, message: Received) -> float:
            keeper.close()
            return 8.0

        def next_lease(self, message: Received, held: float) -> float:
            return 8.0

    keeper = LeaseKeeper(queue, clock=clock, plan=Closing())
    with pytest.raises(ParameterInvalid, match="closed"):
        keeper.register(received(queue)[0])
    assert keeper.leases == 0


def test_too_late_is_lease_expired(queue: Queue, keeper: LeaseKeeper, wait: Callable[..., None]) -> None:
    (message,) = received(queue, lease=4)
    wait(5)
    assert len(queue.receive(1)) == 1
    with pytest.raises(LeaseExpired):
        keeper.register(message)
    assert keeper.leases == 0


def test_a_lease_of_its_own_length(queue: Queue, keeper: LeaseKeeper, wait: Callable[..., None]) -> None:
    lease = keeper.register(received(queue)[0], lease=300)
    keeper.extend_due()
    assert lease.remaining() == 300
    wait(310, keeper)
    assert queue.receive(1) == []
    with pytest.raises(ParameterInvalid, match="lease"):
        keeper.register(received(queue)[0], lease=-1)


def test_a_plan_decides_the_lengths(queue: Queue, clock: MovableClock, wait: Callable[..., None]) -> None:
    class Growing:
        margin = 2.0

        def first_lease(self, message: Received) -> float:
            return 8.0

        def next_lease(self, message: Received, held: float) -> float:
            return 4.0 + held

    with LeaseKeeper(queue, clock=clock, plan=Growing()) as keeper:
        lease = keeper.register(received(queue)[0])
        keeper.extend_due()
        assert lease.remaining() == 8
        wait(6, keeper)
        assert 9 <= lease.remaining() <= 10
        wait(60, keeper)
        assert queue.receive(1) == []
        assert keeper.stats.extensions <= 6


def test_close_gives_everything_back_at_once(queue: Queue, clock: MovableClock) -> None:
    keeper = LeaseKeeper(queue, clock=clock, **SETTINGS)
    leases = [keeper.register(message) for message in received(queue, 10)]
    keeper.close()
    keeper.close()
    assert queue.stats().visible == 10
    assert [lease.lost.reason for lease in leases] == [Reason.CLOSED] * 10
    queue.receive(10)
    with pytest.raises(ParameterInvalid, match="closed"):
        keeper.register(received(queue)[0])


def test_close_gives_back_what_rotates(queue: Queue, clock: MovableClock, wait: Callable[..., None]) -> None:
    rotating = Rotating(queue)
    keeper = LeaseKeeper(rotating, clock=clock, **SETTINGS)
    for message in received(rotating, 10):
        keeper.register(message)
    wait(20, keeper)
    keeper.close()
    assert queue.stats().visible == 10


def test_close_waits_for_handlers(queue: Queue, clock: MovableClock) -> None:
    keeper = LeaseKeeper(queue, clock=clock, **SETTINGS)
    lease = keeper.register(received(queue)[0])
    closing = threading.Thread(target=keeper.close, kwargs={"deadline": 60})
    closing.start()
    eventually(lambda: keeper._closing)
    assert not lease.lost
    lease.delete()
    closing.join(30)
    assert not closing.is_alive()
    assert not lease.lost
    assert queue.stats().in_flight == 0


def test_close_may_leave_them_to_their_leases(queue: Queue, clock: MovableClock) -> None:
    keeper = LeaseKeeper(queue, clock=clock, **SETTINGS)
    lease = keeper.register(received(queue)[0])
    keeper.close(release=False)
    assert lease.lost.reason is Reason.CLOSED
    assert queue.stats().in_flight == 1


def test_the_documents_calls_take_the_message_itself(queue: Queue, keeper: LeaseKeeper) -> None:
    first, second, third = received(queue, 3)
    for message in (first, second):
        keeper.register(message)
    keeper.extend(first, 60)
    keeper.delete(first)
    keeper.release(second)
    with pytest.raises(ParameterInvalid, match="does not hold it"):
        keeper.delete(third)
    for call in (keeper.register, keeper.delete, keeper.forget, lambda handle: keeper.extend(handle, 60)):
        with pytest.raises(ParameterInvalid, match="must be a Received, not str"):
            call(third.handle)
    assert keeper.leases == 0


def test_steady_extends_every_so_often(
    queue: Queue, account: EmbeddedAccount, clock: MovableClock, wait: Callable[..., None]
) -> None:
    with LeaseKeeper.steady(queue, clock=clock) as keeper:
        keeper.register(received(queue, lease=120)[0])
        wait(601, keeper)
        assert 10 <= keeper.stats.extensions <= 11
    with pytest.raises(ParameterInvalid, match="every"):
        LeaseKeeper.steady(queue, extend=60, every=60)


def test_stats_count_what_happened(queue: Queue, clock: MovableClock, wait: Callable[..., None]) -> None:
    faulty = Faulty(queue)
    with LeaseKeeper(faulty, clock=clock, **SETTINGS) as keeper:
        kept, gone = (keeper.register(message) for message in received(queue, 2))
        faulty.fault = lambda handle: ReceiptInvalid(reason="unknown") if handle == gone.handle else None
        wait(20, keeper)
        stats = keeper.stats
        assert (stats.leases, stats.registered, stats.extensions, stats.failures) == (1, 2, 1, 0)
        assert stats.losses == {"INVALID": 1}
        assert sum(stats.late) == 1
        assert kept.state is State.HELD


@for_each(
    "values, named",
    [
        ({"visibility_timeout": 15}, "visibility_timeout"),
        ({"visibility_timeout": 10_000_000}, "visibility_timeout"),
        ({"interval": 0}, "interval"),
        ({"senders": 0}, "senders"),
    ],
)
def test_parameters_that_cannot_work_are_refused_before_anything_starts(
    queue: Queue, values: dict[str, float], named: str
) -> None:
    with pytest.raises(ParameterInvalid) as refused:
        LeaseKeeper(queue, **{**SETTINGS, **values})
    assert refused.value.parameter == named


def test_a_passive_keeper_extends_only_what_its_handler_extends(
    queue: Queue, clock: MovableClock, wait: Callable[..., None]
) -> None:
    faulty = Faulty(queue)
    with LeaseKeeper.passive(faulty, clock=clock) as keeper:
        (message,) = received(queue, lease=30)
        lease = keeper.register(message)
        assert (lease.held_until, faulty.extends, keeper.leases) == (message.lease_end, 0, 0)
        lease.extend(60)
        assert (lease.remaining(), lease.held_until, faulty.extends) == (60, lease.deadline, 1)
        wait(61)
        (again,) = queue.receive(1, lease=30)
        told: list[Lease] = []
        lease.on_lost(told.append)
        with pytest.raises(LeaseTaken):
            lease.extend(60)
        assert told == [lease], "told in the thread that asked"
        keeper.register(again).delete()
    assert queue.stats().visible == 0
