"""A machine that has no thread to give for a moment ("can't start new thread"): whoever asks is told, and what had to
start is started the next time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from tests.client.worker_stage import WAIT_S, Stage

from veilmq.client.clock import SYSTEM
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Message
from veilmq.client.receiver import Receiver
from veilmq.client.routed import RoutedQueue
from veilmq.client.shared.threads import Alarm, CallbackThread

Shortage = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    @contextmanager
    def none() -> Iterator[None]:
        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            yield

    return none


def test_a_keeper_keeps_what_it_took_and_nothing_else(stage: Stage, shortage: Shortage) -> None:
    stage.send("a", "b")
    first, second = stage.queue.receive(2, lease=20)
    with LeaseKeeper(stage.queue, visibility_timeout=60, interval=20, minimal_life=5) as keeper:
        with shortage(), pytest.raises(RuntimeError, match="new thread"):
            keeper.register(first)
        assert keeper.leases == 0
        keeper.register(second)  # due at once
        end = SYSTEM.monotonic() + WAIT_S
        while not keeper.stats.extensions and SYSTEM.monotonic() < end:
            threading.Event().wait(0.01)
        assert keeper.stats.extensions == 1
        assert keeper.leases == 1


def test_who_is_told_is_told_all_the_same(shortage: Shortage) -> None:
    told: list[str] = []
    again = threading.Event()
    thread = CallbackThread("callbacks")
    with shortage():
        thread.run_soon([lambda: told.append("now")])
    assert told == ["now"]
    thread.run_soon([again.set])
    assert again.wait(WAIT_S)


def test_a_timer_starts_with_the_next_call(shortage: Shortage) -> None:
    rung = threading.Event()
    alarm = Alarm(SYSTEM, "alarm")
    with shortage(), pytest.raises(RuntimeError, match="new thread"):
        alarm.at(SYSTEM.monotonic(), rung.set)
    alarm.at(SYSTEM.monotonic(), rung.set)
    assert rung.wait(WAIT_S)
    alarm.close()


def test_a_receiver_promises_nothing_to_who_is_not_served(stage: Stage, shortage: Shortage) -> None:
    with Receiver(stage.queue) as receiver:
        with shortage(), pytest.raises(RuntimeError, match="new thread"):
            receiver.receive(WAIT_S)
        stage.send("x")
        message = receiver.receive(WAIT_S)
        assert message is not None
        assert message.body == "x"


def test_every_queue_of_a_routed_one_is_polled_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    routed = RoutedQueue({"film": stage.make("films", visibility_timeout=30)}, stage.queue)
    start, refused = threading.Thread.start, threading.Event()

    def once(self: threading.Thread) -> None:
        if not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", once)
    assert routed.receive(wait=0.3) == []
    assert refused.is_set()
    monkeypatch.undo()
    for kind in ("film", "mail"):
        sender = threading.Timer(0.1, routed.send, [Message(kind, type=kind)])
        sender.start()
        (message,) = routed.receive(wait=20)
        assert message.body == kind
        routed.delete(message.handle)
        sender.join()
