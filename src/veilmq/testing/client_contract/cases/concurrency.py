"""Calls from many threads, and what ends them: a closed queue does nothing more, an interrupted one goes on."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Unfinished
from functools import partial
from typing import Any, Final

import pytest

from veilmq.client.errors import TransportError
from veilmq.client.queue import Queue
from veilmq.testing.client_contract.stage import LONG, PATIENCE_SECONDS, Stage

_TURNS: Final = 20
"""Interruptions within `PATIENCE_SECONDS`."""
THREADS = 8
EACH = 12


class TestClosing:
    """Close and interrupt."""

    def test_a_closed_queue_does_nothing_more(self, stage: Stage) -> None:
        queue = stage.create()
        held = stage.held(queue)
        queue.close()
        queue.close()
        for call in (lambda: queue.send("x"), queue.receive, lambda: queue.delete(held.handle), queue.stats):
            with pytest.raises(TransportError) as refused:
                call()
            assert not refused.value.may_have_happened

    def test_other_queues_of_the_account_go_on(self, stage: Stage) -> None:
        queue = stage.create()
        again = stage.account.queue(queue.name)
        queue.close()
        again.send("x")
        assert len(stage.empty(again)) == 1

    def test_a_with_block_closes(self, stage: Stage) -> None:
        with stage.create() as queue:
            queue.send("x")
        with pytest.raises(TransportError):
            queue.send("y")

    def test_an_interruption_ends_waits_and_nothing_else(self, stage: Stage) -> None:
        queue = stage.create()
        queue.interrupt()
        waits = [stage.aside(lambda: queue.receive(lease=LONG, wait=stage.wait(queue))) for _ in range(3)]
        assert [_interrupted(queue, waited) for waited in waits] == [[]] * 3
        waited = stage.aside(lambda: queue.receive(lease=LONG, wait=stage.wait(queue)))
        queue.send("x")
        (message,) = waited()
        assert message.body == "x"
        queue.delete(message.handle)

    def test_an_interruption_loses_no_message(self, stage: Stage) -> None:
        queue = stage.create()
        came: list[str] = []
        for number in range(10):
            waited = stage.aside(lambda: queue.receive(lease=LONG, wait=stage.wait(queue)))
            queue.send(str(number))
            queue.interrupt()
            for message in _interrupted(queue, waited):
                came.append(message.body)
                queue.delete(message.handle)
        while len(came) < 10:
            (message,) = stage.aside(lambda: queue.receive(lease=LONG, wait=stage.wait(queue)))()
            came.append(message.body)
            queue.delete(message.handle)
        assert sorted(came) == [str(number) for number in range(10)]

    def test_who_waits_comes_back(self, stage: Stage) -> None:
        queue = stage.create()
        waited = stage.aside(lambda: queue.receive(wait=stage.wait(queue)))
        queue.close()
        try:
            assert waited() == []
        except TransportError:
            pass
        other = stage.account.queue(queue.name)
        other.send("x")
        # The abandoned poll may still be parked in the server; it gives back what it receives.
        assert len(stage.aside(lambda: other.receive(wait=stage.wait(other)))()) == 1


def _interrupted(queue: Queue, waited: Callable[..., Any]) -> list[Any]:
    """The result of a receive that is interrupted until it ends: it may not have begun to wait the first time."""
    for _ in range(_TURNS):
        queue.interrupt()
        try:
            return list(waited(PATIENCE_SECONDS / _TURNS))
        except Unfinished:
            continue
    raise AssertionError("it waits on")


class TestThreads:
    """A queue is safe to call from many threads."""

    def test_what_some_send_others_receive_once(self, stage: Stage) -> None:
        queue = stage.create()

        def send(thread: int) -> None:
            for number in range(EACH):
                queue.send(f"{thread}-{number}")

        def take(thread: int) -> list[str]:
            bodies = []
            while received := queue.receive(2, lease=LONG, wait=1):
                for message in received:
                    handle = queue.extend(message.handle, LONG)
                    queue.delete(handle)
                    bodies.append(message.body)
                    done.append(message.id)
                if len(done) >= THREADS * EACH:
                    break
            return bodies

        done: list[str] = []
        with ThreadPoolExecutor(2 * THREADS) as pool:
            sending = [pool.submit(partial(send, thread)) for thread in range(THREADS)]
            for future in sending:
                future.result()
            taking = [pool.submit(partial(take, thread)) for thread in range(THREADS)]
            bodies = Counter(body for future in taking for body in future.result())
        assert bodies == Counter(f"{thread}-{number}" for thread in range(THREADS) for number in range(EACH))
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)
