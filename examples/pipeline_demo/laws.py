"""The truth of the demo: six kinds of work, how long each takes, and how often its worker dies.

Strategy: a law is a mixture of parts whose distribution functions are known in closed form, so that its quantiles and
the best timeout for it can be computed beside what the pipeline found. Workers die at a constant rate while they work,
as in the planner's model. A film takes as long each time: if it outlives its lease once, it does so again, and counted
by lease long films would look like most films.
"""

from dataclasses import dataclass
from math import erfc, log, sqrt
from random import Random


@dataclass(frozen=True)
class Lognormal:
    """median: seconds. spread: the standard deviation of the logarithm."""

    median: float
    spread: float

    def longer(self, seconds: float) -> float:
        """The chance to take longer than `seconds` (more than 0)."""
        return 0.5 * erfc(log(seconds / self.median) / self.spread / sqrt(2))

    def draw(self, chance: Random) -> float:
        """Seconds."""
        return chance.lognormvariate(log(self.median), self.spread)


@dataclass(frozen=True)
class Uniform:
    """Between `low` and `high` seconds."""

    low: float
    high: float

    def longer(self, seconds: float) -> float:
        """The chance to take longer than `seconds`."""
        return min(max((self.high - seconds) / (self.high - self.low), 0.0), 1.0)

    def draw(self, chance: Random) -> float:
        """Seconds."""
        return chance.uniform(self.low, self.high)


@dataclass(frozen=True)
class Kind:
    """A message type: (share, part) of its law, shares adding up to 1, and a working worker's deaths a second."""

    name: str
    parts: tuple[tuple[float, Lognormal | Uniform], ...]
    deaths_per_second: float
    told: str
    """The law in words."""
    keeps: bool = False
    """A message takes as long each time it is worked on; else each attempt takes anew."""

    def longer(self, seconds: float) -> float:
        """The chance that the work takes longer than `seconds`."""
        return sum(share * part.longer(seconds) for share, part in self.parts)

    def takes(self, chance: Random) -> float:
        """Seconds that the work needs."""
        shares = [share for share, _ in self.parts]
        return chance.choices([part for _, part in self.parts], shares)[0].draw(chance)

    def dies_after(self, chance: Random) -> float:
        """Seconds until its worker dies, if the work takes so long."""
        return chance.expovariate(self.deaths_per_second) if self.deaths_per_second else float("inf")

    def quantile(self, share: float) -> float:
        """Seconds within which that share of the work is done."""
        low, high = 1e-3, 1e5
        while high / low > 1.0001:
            middle = sqrt(low * high)
            low, high = (middle, high) if self.longer(middle) > 1 - share else (low, middle)
        return high


KINDS = (
    Kind("thumbnail", ((1.0, Lognormal(1.5, 0.4)),), 0.04, "lognormal"),
    Kind("mail", ((1.0, Lognormal(4.0, 0.5)),), 0.015, "lognormal"),
    Kind("invoice", ((1.0, Uniform(8.0, 15.0)),), 0.0, "uniform, never crashes"),
    Kind("report", ((1.0, Lognormal(45.0, 0.3)),), 0.0015, "lognormal"),
    Kind("import", ((0.85, Lognormal(20.0, 0.3)), (0.15, Lognormal(240.0, 0.05))), 0.001, "two humps"),
    Kind("film", ((1.0, Uniform(150.0, 250.0)),), 0.0003, "uniform, its own", keeps=True),
)
