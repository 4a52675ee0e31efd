"""Decides whether to read the sockets once more before a batch is taken.

Strategy: the more calls share a commit, the less each costs, and right after a commit the next calls of the clients
just answered are on their way. So the shell waits while turns of the loop bring more calls, for a few turns that bring
none, and never beyond a full batch or a few milliseconds (docs/decisions/0012-gathering.md). After a stall it waits
longer: commands that arrived during the stall must run before leases that ended during it are granted anew, and a loop
runs its timers before it reads its sockets.
"""

from typing import Final

from veilmq.model.instant import Instant

_QUIET_TURNS: Final = 3
"""After so many turns without a new call, several calls become a batch. A single call waits for one turn."""
_GATHER_US: Final = 5_000
"""No call waits longer for others."""
_CALLS_MAX: Final = 128
"""So many calls do not wait for more."""
_QUIET_TURNS_AFTER_STALL: Final = 8
"""The same after a stall; by then all that arrived during it is read. A new connection takes four turns."""
_TURNS_AFTER_STALL_MAX: Final = 2_000


class Gathering:
    """How long one shell waits for the calls of its next batch."""

    __slots__ = ("_backlog", "_quiet", "_since", "_turns")

    def __init__(self) -> None:
        self._since = Instant(0)
        self._end()

    def _end(self) -> None:
        self._turns = self._quiet = self._backlog = 0

    def goes_on(self, now: Instant, backlog: int, *, full: bool, stalled: bool) -> bool:
        """Whether to wait for another turn of the loop. After False the next call starts a new wait.

        backlog: pending calls. full: they fill a batch. stalled: the loop did not turn for long.
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
