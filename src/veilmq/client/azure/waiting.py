"""Waiting without a long poll: Queue Storage is asked again, more and more slowly.

Strategy: the first pause is short, so that a message that is on its way is found at once; each is twice the last, up to
one second, so that an idle wait costs at most a request a second. The last question is asked when the wait ends.
Closing ends a pause at once, and what a question that was under way still brings is given back.
"""

import threading
from collections.abc import Callable
from typing import Final

from veilmq.client.clock import Clock
from veilmq.client.messages import Received

_PAUSE_MIN: Final = 0.05
PAUSE_MAX: Final = 1.0
"""Seconds between two questions."""


class Waiting:
    """The waits of one queue. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._closed = threading.Event()

    def poll(
        self, ask: Callable[[], list[Received]], wait: float, give_back: Callable[[list[Received]], None]
    ) -> list[Received]:
        """What `ask` brings within `wait` seconds, or nothing."""
        deadline = self._clock.monotonic() + wait
        pause = _PAUSE_MIN
        while True:
            found = ask()
            if self._closed.is_set():
                give_back(found)
                return []
            left = deadline - self._clock.monotonic()
            if found or left <= 0:
                return found
            if self._closed.wait(min(pause, left)):
                return []
            pause = min(2 * pause, PAUSE_MAX)

    def close(self) -> None:
        """All waits end."""
        self._closed.set()
