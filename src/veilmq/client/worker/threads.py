"""Handlers in threads.

Strategy: each of N threads takes messages, calls the handler, settles, and takes the next.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from veilmq.client.worker.flow import Flow
from veilmq.client.worker.hand import Hand
from veilmq.client.worker.job import Job
from veilmq.client.worker.results import Result, call


class ThreadRunners:
    """Run `handler` on messages of `flow` until its line is closed."""

    def __init__(self, flow: Flow, handler: Callable[[Any], Any]) -> None:
        self._flow = flow
        self._handler = handler

    def start(self) -> None:
        """Returns once the handlers can run."""
        for number in range(1, self._flow.parameters.concurrency + 1):
            threading.Thread(target=self._run, name=f"veilmq worker {number}", daemon=True).start()

    def kill(self) -> None:
        """Shutdown, and handlers still run: threads cannot be ended, they end with the process."""

    def close(self) -> None:
        """Nothing is left to run."""

    def _run(self) -> None:
        while hands := self._flow.take():
            self._flow.work(hands, self._call)

    def _call(self, hands: Sequence[Hand]) -> list[Result]:
        clock = self._flow.clock
        jobs = [Job(hand.message, hand, hand.cancelled, hand.state, hand.deadline, clock) for hand in hands]
        return call(self._handler, jobs, self._flow.parameters.batch is not None)
