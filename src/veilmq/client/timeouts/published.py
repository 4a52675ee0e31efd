"""A plan that others learnt: what the pipeline published on the server, for this queue.

Strategy: asked for now and then through `Queue.recommended`, which both our adapters answer; between two questions the
last answer holds, and where nobody published anything a steady heartbeat does. A type's first lease is also the length
of each extension: the pipeline chose it with renewals in mind.
"""

import threading

from veilmq.client import checked
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Received, Recommended
from veilmq.client.queue import Queue
from veilmq.model.errors import ParameterInvalid, VeilError


class PublishedPlan:
    """A plan (`veilmq.client.keeper.plan.Plan`) from the server. Any thread."""

    def __init__(
        self, queue: Queue, *, default: float = 30.0, margin: float = 15.0, every: float = 300.0, clock: Clock = SYSTEM
    ) -> None:
        """default: seconds of a lease where nothing is published. margin: seconds before its end at which a lease is
        extended. every: seconds between two questions. Raises ParameterInvalid; what that raises is raised by the
        first question, here, and passed over later.
        """
        if not checked.positive(margin, "margin") < checked.positive(default, "default"):
            raise ParameterInvalid(parameter="margin", reason=f"must be above 0 and below default = {default:g} s")
        checked.positive(every, "every", may_be_endless=True)
        self._queue = queue
        self._default = default
        self._margin = margin
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._found = queue.recommended()
        self._asked = clock.monotonic()

    @property
    def margin(self) -> float:
        """Seconds before a lease's end at which it is extended."""
        return self._margin

    def first_lease(self, message: Received) -> float:
        """Seconds."""
        found = self._current()
        lease = None
        if found is not None:
            lease = found.by_type.get(message.type, found.lease) if message.type is not None else found.lease
        return max(self._default if lease is None else lease, self._margin * 2)

    def next_lease(self, message: Received, held: float) -> float:
        """Seconds; the first lease again."""
        return self.first_lease(message)

    def _current(self) -> Recommended | None:
        now = self._clock.monotonic()
        with self._lock:
            if now - self._asked < self._every:
                return self._found
            self._asked = now
        try:
            self._found = self._queue.recommended()
        except VeilError:
            return self._found  # the plan of before is better than none
        return self._found
