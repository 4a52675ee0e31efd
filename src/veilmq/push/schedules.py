"""When a failed push is tried again: the two strategies, as tables (MNS, NotifyStrategy).

BACKOFF_RETRY: 3 retries, each after a random 10 to 20 s. EXPONENTIAL_DECAY_RETRY: 176 retries, after 1, 2, 4 ... 256 s
and then 512 s each, together 86,015 s.
"""

from typing import Final

from veilmq.model.instant import SECOND_US
from veilmq.model.topic import ATTEMPTS_MAX, RetryStrategy

BACKOFF_SECONDS: Final = (10, 20)
_DOUBLINGS: Final = 9
_LONGEST_S: Final = 512


def delay_us(strategy: RetryStrategy, attempt: int, chance: float) -> int | None:
    """How long after failure number `attempt` (from 1) the next attempt is due; None: that was the last one.

    chance: 0 to 1; the place of a random delay in its range.
    """
    if attempt >= ATTEMPTS_MAX[strategy]:
        return None
    if strategy is RetryStrategy.BACKOFF:
        shortest, longest = BACKOFF_SECONDS
        return int((shortest + (longest - shortest) * chance) * SECOND_US)
    return (1 << (attempt - 1) if attempt <= _DOUBLINGS else _LONGEST_S) * SECOND_US
