"""Logs the damaged messages that a batch put into quarantine: an ERROR line each, at most `LINES_MAX` a minute.

Strategy: a batch collects what it quarantined, and reports it when it is committed. A batch that is rolled back reports
nothing. A bad disk may damage a million messages: beyond the bound they are only counted, and the next line gives the
number.
"""

import logging
from datetime import UTC, datetime
from typing import Final, NamedTuple

from veilmq.model.instant import MINUTE_US, SECOND_US, Instant
from veilmq.model.messages import id_text
from veilmq.model.settings.queue import QueueKey

LINES_MAX: Final = 10
"""Lines within `WINDOW_US`."""
WINDOW_US: Final = MINUTE_US

logger = logging.getLogger("veilmq.store")


class CopyDamaged(Exception):
    """A message is damaged, and these files are to be given up for it: nothing of the batch is applied."""


class Damaged(NamedTuple):
    """A message that was quarantined."""

    queue: QueueKey
    id: bytes
    sent: Instant


class QuarantineLog:
    """What the open batch quarantined, and how many lines were logged lately."""

    def __init__(self) -> None:
        self.pending: list[Damaged] = []
        """Of the open batch."""
        self._window = Instant(-WINDOW_US)
        self._lines = self._unsaid = 0

    def report(self, now: Instant) -> None:
        """The batch is committed: log what it quarantined."""
        pending, self.pending = self.pending, []
        for damaged in pending:
            if now - self._window >= WINDOW_US:
                self._window, self._lines = now, 0
            if self._lines >= LINES_MAX:
                self._unsaid += 1
                continue
            self._lines += 1
            self._log(damaged)

    def _log(self, damaged: Damaged) -> None:
        more = f"; {self._unsaid} more were set apart since the last line" if self._unsaid else ""
        if self._lines == LINES_MAX:
            more += "; further ones of this minute are only counted"
        self._unsaid = 0
        text = (
            "queue %s: message %s, sent %s, is damaged and was set apart, so nobody receives it:"
            " see `veilmq quarantine list --all`%s"
        )
        logger.error(text, damaged.queue, id_text(damaged.id), _shown(damaged.sent), more)


def _shown(instant: Instant) -> str:
    """UTC; the number itself if no calendar has it, because damaged data may hold anything."""
    try:
        return datetime.fromtimestamp(instant / SECOND_US, UTC).isoformat(" ", "milliseconds").replace("+00:00", " UTC")
    except (ValueError, OverflowError, OSError):
        return f"{instant} us"
