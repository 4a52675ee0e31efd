"""How long a failed message, or a failed call, waits before it is tried again.

Strategy: exponential with jitter, and apart from the lease: a retry delay says when to try again, a lease says how long
a worker may be silent. Pure: the caller brings the chance.
"""

import secrets
from typing import Final

import msgspec

from veilmq.client import checked
from veilmq.model.errors import ParameterInvalid

_STEPS: Final = 1 << 30
_DOUBLINGS_MAX: Final = 64


def chance() -> float:
    """Evenly from 0 up to 1."""
    return secrets.randbelow(_STEPS) / _STEPS


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: `first`, then `factor` times the last one, never above `longest`; up to `jitter` of it is cut off.

    Raises ParameterInvalid when made of values that cannot work.
    """

    first: float = 1.0
    factor: float = 2.0
    longest: float = 300.0
    jitter: float = 0.5
    """Share of the delay that chance decides: 0 is none, 1 is from 0 to all of it."""

    def __post_init__(self) -> None:
        checked.positive(self.first, "first")
        checked.positive(self.longest, "longest")
        checked.number(self.factor, "factor", 1, 1_000)
        checked.number(self.jitter, "jitter", 0, 1)
        if self.longest < self.first:
            raise ParameterInvalid(parameter="longest", reason=f"{self.longest:g} s is below first = {self.first:g} s")

    def delay(self, tries: int, drawn: float) -> float:
        """Seconds to wait after the `tries`-th failure (from 1 on); `drawn` is the chance, from 0 up to 1."""
        power = min(max(tries, 1) - 1, _DOUBLINGS_MAX)
        return min(self.longest, self.first * self.factor**power) * (1 - self.jitter * drawn)
