"""Limits the requests per second of an account, if the operator set a bound.

Strategy: a token bucket per account, which fills at the rate and holds one second's worth. A request takes one token or
is refused with RequestThrottled. An account without requests for a second has a full bucket, which is dropped.
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
        # In units of one second divided by the rate, to stay in integers: tokens used, and tokens available now.
        there = now * self._rate
        used = max(self._used.get(account, 0), there - SECOND_US * self._rate) + SECOND_US
        if used > there:
            return False
        if account in self._used:
            self._used[account] = used
        else:
            self._used.keep(account, used)
        return True
