"""The worker's timer: what it calls and when, and that it holds nothing of what is through."""

import gc
import threading
import weakref
from typing import Any

import pytest
from tests.client.test_worker_clock import HOUR, eventually, worker
from tests.support.embedded import EmbeddedClient

from veilmq.client.messages import Template
from veilmq.client.shared.threads import Alarm
from veilmq.testing.client_contract.stage import MovableClock


class Body:
    """What a call holds."""


def test_calls_come_in_the_order_of_their_instants() -> None:
    clock = MovableClock()
    alarm = Alarm(clock, "test alarm")
    came: list[int] = []
    for number in (3, 1, 2):
        alarm.at(clock.monotonic() + 10 * number, lambda number=number: came.append(number))
    clock.advance(25)
    eventually(lambda: came == [1, 2])
    clock.advance(10)
    eventually(lambda: came == [1, 2, 3])
    alarm.close()


def test_a_cancelled_call_is_not_made_and_what_it_held_is_free_at_once() -> None:
    clock = MovableClock()
    alarm = Alarm(clock, "test alarm")
    made = threading.Event()
    body = Body()
    gone = weakref.ref(body)
    entry = alarm.at(clock.monotonic() + 10, lambda body=body: pytest.fail(f"{body} was not wanted"))
    alarm.at(clock.monotonic() + 20, made.set)
    del body
    entry.cancel()
    entry.cancel()
    assert gone() is None
    clock.advance(30)
    eventually(made.is_set)
    entry.cancel()
    alarm.close()


def test_the_line_is_no_longer_than_twice_what_is_wanted() -> None:
    clock = MovableClock()
    alarm = Alarm(clock, "test alarm")
    came: list[int] = []
    entries = [alarm.at(clock.monotonic() + 10 + number, lambda n=number: came.append(n)) for number in range(1_000)]
    for number, entry in enumerate(entries):
        if number % 10:
            entry.cancel()
    assert len(alarm._heap) <= 200
    clock.advance(2_000)
    eventually(lambda: came == list(range(0, 1_000, 10)))
    alarm.close()


@pytest.mark.parametrize("kind", ["threads", "async"])
@pytest.mark.parametrize("options", [{"keeper": False}, {}], ids=["alone", "keeper"])
def test_a_message_that_is_through_leaves_no_timer(
    embedded: EmbeddedClient, options: dict[str, Any], kind: str
) -> None:
    embedded.account.create("work", Template(visibility_timeout=30))
    queue = embedded.account.queue("work")
    queue.send_batch([str(number) for number in range(10)])
    hands: list[weakref.ref[Any]] = []

    def handler(job: Any) -> None:
        hands.append(weakref.ref(job._calls))
        if job.body == "1":
            job.extend(2 * HOUR)
        if job.body == "2":
            job.extend(HOUR / 2)

    async def coroutine(job: Any) -> None:
        hands.append(weakref.ref(job._calls))

    given = coroutine if kind == "async" else handler
    with worker(embedded, queue, given, kind=kind, lease=HOUR, stop_before_expiry=10, **options) as working:
        eventually(lambda: working.counts and working.counts.outcomes.get("done") == 10)
        assert working._run is not None
        assert working._run.ready.wait_until_free(30)
        alarm = working._run._flow.alarm
        assert [each for each in alarm._heap if each[2].call is not None] == []

        def free() -> bool:
            gc.collect()
            # A runner that waits for the next still has its last one.
            return sum(hand() is not None for hand in hands) <= 2

        eventually(free)
