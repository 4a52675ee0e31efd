"""Tasks that shall not end: one that ends by an error is begun again, and the log says why.

Strategy: an error here is a bug, and nobody waits for these tasks: without this a subscription would be pushed nothing
until a restart, and nothing would tell. The pause keeps an error that comes back at once from filling the log.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

PAUSE_S: Final = 10.0

log = logging.getLogger("veilmq.push")


class Lasting:
    """One task, on the running loop."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, pause_s: float = PAUSE_S) -> None:
        """work: what is done for ever. name: for the log. pause_s: from an error until the work begins again."""
        self._work = work
        self._name = name
        self._pause_s = pause_s
        self._over = False
        self._again: asyncio.TimerHandle | None = None
        self._begin()

    def cancel(self) -> None:
        """End it."""
        self._over = True
        if self._again is not None:
            self._again.cancel()
        self._task.cancel()

    async def ended(self) -> None:
        """Return when it has ended, which somebody has asked for."""
        await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("%s ended by an error, and begins again in %g s", self._name, self._pause_s, exc_info=error)
        if not self._over:
            self._again = asyncio.get_running_loop().call_later(self._pause_s, self._begin)
