"""The answers about timeouts that are kept for a while, for whoever asks next.

Strategy: an answer that took many events costs some 100 ms of CPU, and a minute later it would be about the same: so it
is given again, until it is a minute old or the timeout is another one. One that took few events costs little, and a
single lease may change it: so it is made anew each time. An answer says when it was made (`at`). The page of a queue
and the sentence about one of its messages take the same answer, so they say the same.
"""

from threading import Lock
from typing import Any, Final

from veilmq.admin.timeouts import TimeoutInput, timeout_page
from veilmq.model.instant import MINUTE_US
from veilmq.store import Reader, View
from veilmq.store.reader import QueueState

KEPT_US: Final = MINUTE_US
KEPT_MAX: Final = 64
"""Answers; one has some 10 KiB."""
COSTLY_EVENTS: Final = 2_000
_TODAY: Final = TimeoutInput()


class Timeouts:
    """What is known of the queues' timeouts. Any thread; one answer is made at a time."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._making = Lock()
        self._kept: dict[int, dict[str, Any]] = {}
        """By incarnation, the oldest first."""

    def page(self, view: View, queue: QueueState, now: int, wanted: TimeoutInput = _TODAY) -> dict[str, Any]:
        """See `timeout_page`. Blocks."""
        with self._making:
            kept = self._kept.get(queue.incarnation)
            if wanted == _TODAY and kept is not None and _holds(kept, queue, now):
                return kept
            page = timeout_page(view, queue, wanted, now)
            self._keep(page)
            return page

    def of(self, view: View, incarnation: int, now: int) -> dict[str, Any] | None:
        """The same of a queue that may be gone."""
        queue = self._reader.worst.queue(incarnation)
        return None if queue is None else self.page(view, queue, now)

    def _keep(self, page: dict[str, Any]) -> None:
        self._kept.pop(page["incarnation"], None)
        if page["events"] < COSTLY_EVENTS:
            return
        self._kept[page["incarnation"]] = page | {"asked": None}
        if len(self._kept) > KEPT_MAX:
            del self._kept[next(iter(self._kept))]


def _holds(page: dict[str, Any], queue: QueueState, now: int) -> bool:
    """Whether the answer is still given."""
    at, today_us = int(page["at"]), int(page["today"]["timeout_us"])
    return 0 <= now - at < KEPT_US and today_us == queue.settings.visibility_timeout_us
