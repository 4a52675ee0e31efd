"""Keeps a flood of refused requests from filling the log.

Strategy: of each reason, ten refusals a second have a line of their own; the others are counted, and a second after the
first of them one line says how many there were. A line is made only if it is written.
"""

import asyncio
import logging
from collections import Counter
from typing import Final

LINES_MAX: Final = 10
"""Lines a second of one reason."""
REASONS_MAX: Final = 100
"""Distinct reasons that are counted in one second; further ones count together."""
WINDOW_S: Final = 1.0
_OTHER: Final = "other"


class RefusalLog:
    """The refusals of one port. Use it on the loop."""

    def __init__(self, port: str, logger: logging.Logger) -> None:
        self._port = port
        self._logger = logger
        self._begun_s = float("-inf")
        self._seen: Counter[str] = Counter()
        """Refusals of this second, by reason."""
        self._hidden: Counter[str] = Counter()
        """Refusals without a line, since the last report."""
        self._timer: asyncio.TimerHandle | None = None

    def takes(self, reason: str) -> bool:
        """Whether to write a line for a refusal. Otherwise it is counted, and the count is written in a second."""
        if not self._logger.isEnabledFor(logging.INFO):
            return False
        loop = asyncio.get_running_loop()
        taken = self.takes_at(reason, loop.time())
        if not taken and self._timer is None:
            self._timer = loop.call_later(WINDOW_S, self.report)
        return taken

    def write(self, peer: str, status: int, reason: str, request_id: str | None = None) -> None:
        """Log a refusal that HTTP's rules or a bound demand, or count it."""
        if self.takes(f"{status} {reason}"):
            extra = {"request": request_id}
            self._logger.info("%s: refused %s: %d %s", self._port, peer, status, reason, extra=extra)

    def takes_at(self, reason: str, now_s: float) -> bool:
        """The same without a timer. now_s: seconds of any monotonic clock."""
        if now_s - self._begun_s >= WINDOW_S:
            self._begun_s = now_s
            self._seen.clear()
        if reason not in self._seen and len(self._seen) >= REASONS_MAX:
            reason = _OTHER
        self._seen[reason] += 1
        if self._seen[reason] <= LINES_MAX:
            return True
        self._hidden[reason] += 1
        return False

    def report(self) -> None:
        """Write how many refusals had no line."""
        self._timer = None
        hidden, self._hidden = self._hidden, Counter()
        for reason, count in hidden.items():
            self._logger.info("%s: refused %d more requests like these: %s", self._port, count, reason)
