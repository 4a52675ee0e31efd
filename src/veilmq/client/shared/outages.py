"""What is logged of calls that fail again and again: a queue that is away for an hour must not fill the log.

Strategy: of each kind of call, the first failure is logged, and while it lasts one line every `EVERY_SECONDS`, which
says how many failures there were. The first success after it is logged too. If a call fails and works alternately, that
is one such pair of lines in `EVERY_SECONDS`.
"""

import logging
import threading
from typing import Final

from veilmq.client.clock import Clock
from veilmq.model.errors import VeilError

EVERY_SECONDS: Final = 60.0


class Outages:
    """The failing calls to `what` (a queue, for example). Any thread."""

    def __init__(self, log: logging.Logger, what: str, clock: Clock) -> None:
        self._log = log
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}
        """By call: how often it failed since its last success."""
        self._silent_until: dict[str, float] = {}
        self._logged: set[str] = set()
        """The calls whose failures since the last success are in the log."""

    def failed(self, call: str, error: BaseException) -> None:
        """The call failed. An error that is no VeilError is logged with its traceback."""
        with self._lock:
            failures = self._failures[call] = self._failures.get(call, 0) + 1
            now = self._clock.monotonic()
            if now < self._silent_until.get(call, now):
                return
            self._silent_until[call] = now + EVERY_SECONDS
            self._logged.add(call)
        often = f" ({failures} times so far)" if failures > 1 else ""
        trace = None if isinstance(error, VeilError) else error
        self._log.warning("%s: %s failed: %s%s", self._what, call, error, often, exc_info=trace)

    def worked(self, call: str) -> None:
        """The call succeeded."""
        if call not in self._failures:  # without the lock: nearly always
            return
        with self._lock:
            failures = self._failures.pop(call, 0)
            logged = call in self._logged
            self._logged.discard(call)
        if logged and failures > 1:
            self._log.warning("%s: %s works again, after %d failures", self._what, call, failures)
