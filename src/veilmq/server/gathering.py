"""When a batch begins: whether to look at the sockets once more before it is taken.

Strategy: the more calls share a commit, the less each costs, and right after a commit the next calls of those who were
just answered are on their way. So the shell waits while turns of the loop bring more, for a few turns that bring
nothing, and never beyond a full batch or a few milliseconds (docs/decisions/0012-gathering.md). After a stall it
waits longer: what arrived meanwhile must come before what ended meanwhile is handed out, and a loop turns to its
timers before its sockets.
"""

from typing import Final

from veilmq.model.instant import Instant

_QUIET_TURNS: Final = 3
"""Turns that bring nothing, after which several calls become a batch. A call alone waits for one."""
_GATHER_US: Final = 5_000
"""Nobody waits longer for others."""
_CALLS_MAX: Final = 128
"""So many calls wait for no more."""
_QUIET_TURNS_AFTER_STALL: Final = 8
"""The same after a stall: what arrived in it is read by then. A new connection takes four."""
_TURNS_AFTER_STALL_MAX: Final = 2_000


class Gathering:
    """The wait of one shell for the calls of its next batch."""

    __slots__ = ("_backlog", "_quiet", "_since", "_turns")

    def __init__(self) -> None:
        self._since = Instant(0)
        self._end()

    def _end(self) -> None:
        self._turns = self._quiet = self._backlog = 0

    def goes_on(self, now: Instant, backlog: int, *, full: bool, stalled: bool) -> bool:
        """Whether to wait for another turn of the loop; if not, the next call begins a new wait.

        backlog: calls that are there. full: no batch would take more. stalled: the loop did not turn for long.
        """
        if not self._turns:
            self._since = now
        self._turns += 1
        self._quiet = 0 if backlog > self._backlog else self._quiet + 1
        self._backlog = backlog
        if stalled:
            more = self._quiet < _QUIET_TURNS_AFTER_STALL and self._turns < _TURNS_AFTER_STALL_MAX
        elif full or backlog >= _CALLS_MAX or now - self._since >= _GATHER_US:
            more = False
        else:
            more = self._quiet < (_QUIET_TURNS if backlog > 1 else 1)
        if not more:
            self._end()
        return more
