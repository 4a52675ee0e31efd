"""Supervised tasks: a task that fails is logged and restarted.

Strategy: an error here is a bug, and nobody awaits these tasks. Without supervision a subscription would silently get
no pushes until a restart. The pause keeps an error that comes back at once from filling the log.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

PAUSE_S: Final = 10.0

log = logging.getLogger("veilmq.push")


class SupervisedTask:
    """One task, on the running loop."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, pause_s: float = PAUSE_S) -> None:
        """work: runs for ever. name: for the log. pause_s: from an error until the restart."""
        self._work = work
        self._name = name
        self._pause_s = pause_s
        self._over = False
        self._again: asyncio.TimerHandle | None = None
        self._begin()

    def cancel(self) -> None:
        """End the task."""
        self._over = True
        if self._again is not None:
            self._again.cancel()
        self._task.cancel()

    async def ended(self) -> None:
        """Wait until the task has ended after `cancel`."""
        await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("%s failed with an error and restarts in %g s", self._name, self._pause_s, exc_info=error)
        if not self._over:
            self._again = asyncio.get_running_loop().call_later(self._pause_s, self._begin)
