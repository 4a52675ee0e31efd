"""How many requests an account may make in a second, if its operator set a bound.

Strategy: a bucket for each account that fills at the rate and holds a second's worth; a request takes one, or is
refused with RequestThrottled. Who sends nothing for a second costs nothing: its bucket is full again, and forgotten.
"""

from typing import Final

from veilmq.model.instant import SECOND_US, Instant
from veilmq.protocols.bounded import Bounded

_ACCOUNTS_MAX: Final = 4_096


class Throttle:
    """Counts by the lease clock."""

    def __init__(self, requests_per_second_max: int) -> None:
        self._rate = requests_per_second_max
        self._used: Bounded[str, int] = Bounded(_ACCOUNTS_MAX)

    def takes(self, account: str, now: Instant) -> bool:
        """Whether the account may make one more request now."""
        # In units of a second over the rate, so that all stays whole: what was used, and what there is by now.
        there = now * self._rate
        used = max(self._used.get(account, 0), there - SECOND_US * self._rate) + SECOND_US
        if used > there:
            return False
        if account in self._used:
            self._used[account] = used
        else:
            self._used.keep(account, used)
        return True
