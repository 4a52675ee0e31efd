"""Document 003's rule of counting failed deletes, unchanged.

Strategy: count the deletes that fail because the message was redelivered. When enough of them failed within a window,
raise the timeout and report it to the senders. The timeout is never lowered. Source: document 003, "counting at the
worker roles how many times message deletes are failing ... communicate that back to the front-end web roles".
"""

import math
import threading
from collections import deque
from collections.abc import Callable

from veilmq.client import checked
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Received
from veilmq.model.errors import ParameterInvalid


class ThresholdTimeout:
    """A plan (`veilmq.client.keeper.states.Plan`) with one growing timeout. Thread-safe."""

    def __init__(
        self,
        timeout: float = 30,
        *,
        failures: int = 5,
        window: float = 3_600,
        factor: float = 2.0,
        longest: float = 43_200,
        margin: float = 0,
        tell: Callable[[float], object] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """After `failures` failed deletes within `window` seconds, the timeout is multiplied by `factor`.

        timeout, longest, margin: seconds. With a margin of 0 a keeper never extends, as in the document. tell: called
        with each new timeout, in the thread whose delete failed; it passes the timeout to the senders, which set it as
        their messages' `lease_hint`. Raises ParameterInvalid for invalid values.
        """
        if checked.positive(timeout, "timeout") > checked.positive(longest, "longest", may_be_endless=True):
            raise ParameterInvalid(parameter="timeout", reason=f"{timeout!r} is above longest, {longest!r}")
        checked.at_least(failures, "failures", 1)
        checked.positive(window, "window", may_be_endless=True)
        if checked.number(factor, "factor", 1, math.inf) == 1:
            raise ParameterInvalid(parameter="factor", reason=f"{factor!r} is not above 1")
        checked.not_negative(margin, "margin")
        if tell is not None:
            checked.function(tell, "tell")
        self.timeout = timeout
        self._failures_max = failures
        self._window = window
        self._factor = factor
        self._longest = longest
        self._margin = margin
        self._tell = tell
        self._clock = clock
        self._failed: deque[float] = deque()
        self._lock = threading.Lock()

    @property
    def margin(self) -> float:
        """Seconds before a lease's end at which it is extended."""
        return self._margin

    def first_lease(self, message: Received) -> float:
        """Seconds; the same for every message."""
        return self.timeout

    def next_lease(self, message: Received, held: float) -> float:
        """Seconds; the same for every extension."""
        return self.timeout

    def finished(self, message: Received, held: float) -> None:
        """Ignored: the delete succeeded."""

    def lost(self, message: Received, held: float) -> None:
        """A delete failed because the message was redelivered."""
        now = self._clock.monotonic()
        with self._lock:
            self._failed.append(now)
            while self._failed[0] < now - self._window:
                self._failed.popleft()
            before = self.timeout
            if len(self._failed) >= self._failures_max:
                self._failed.clear()
                self.timeout = min(self.timeout * self._factor, self._longest)
            raised = self.timeout
        if raised != before and self._tell is not None:
            self._tell(raised)

    def vanished(self, message: Received, held: float) -> None:
        """Ignored: a crash does not count."""

    def late(self, seconds: float) -> None:
        """Ignored: a late extension does not count."""
