"""The lease clock, by which everything in a store is judged: its arithmetic, without a clock.

Strategy: the lease clock is a line over a clock that runs on while the machine sleeps and that nobody sets. Once a
second a new piece of the line begins where the last one ended, its slope bent towards wall time by at most 500 parts in
a million; so a wall clock that jumps moves no lease's end by more than that. `Piece` is the arithmetic, in integers;
`LeaseClock` is the line, and each edge (server/clock.py, client/embedded) brings the two readings it is drawn from.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from veilmq.model.instant import SECOND_US, Instant

SLEW_PPM_MAX: Final = 500
AHEAD_US_MAX: Final = 60 * SECOND_US
"""A lease clock further ahead of wall time than this is told to people."""
PIECE_NS: Final = 1_000_000_000
_PPM: Final = 1_000_000


class Piece(NamedTuple):
    """A stretch of the line: from `start` at `boot_ns` on, `slope` millionths of a microsecond each microsecond.

    behind_us: how far wall time was ahead of the line where the piece begins (negative: behind it).
    """

    start: Instant
    boot_ns: int
    slope: int
    behind_us: int

    def at(self, boot_ns: int) -> Instant:
        """The instant at a reading of the boot clock. Beyond the piece's second the slope lasts until wall is met."""
        elapsed_ns = boot_ns - self.boot_ns
        if elapsed_ns <= PIECE_NS:
            return Instant(self.start + elapsed_ns * self.slope // (_PPM * 1_000))
        slewed_us = min(abs(self.behind_us), elapsed_ns * SLEW_PPM_MAX // (_PPM * 1_000))
        return Instant(self.start + elapsed_ns // 1_000 + (slewed_us if self.behind_us > 0 else -slewed_us))

    def next(self, boot_ns: int, wall: Instant) -> "Piece":
        """The piece that begins at that reading, when wall time is `wall`."""
        return piece(self.at(boot_ns), boot_ns, wall)


def piece(start: Instant, boot_ns: int, wall: Instant) -> Piece:
    """The line from `start` on, bent towards `wall` so as not to pass it within a second."""
    behind_us = wall - start
    return Piece(start, boot_ns, _PPM + max(-SLEW_PPM_MAX, min(SLEW_PPM_MAX, behind_us)), behind_us)


class LeaseClock:
    """Never backwards, at most 500 ppm off the boot clock. Belongs to one thread."""

    __slots__ = ("_boot_ns", "_moved_us", "_piece", "_read_wall", "_since", "_slope", "_start")

    def __init__(self, read_wall: Callable[[], Instant], read_boot_ns: Callable[[], int]) -> None:
        """read_wall: wall time; read_boot_ns: nanoseconds since some past instant, never backwards."""
        self._read_wall = read_wall
        self._boot_ns = read_boot_ns
        self._moved_us = 0
        self._begin(piece(read_wall(), read_boot_ns(), read_wall()))

    def start(self, mark: Instant) -> None:
        """Go on from the store's mark, if that is later than now. Call once, when the store is open."""
        now = self.now()
        if mark > now:
            self._begin(piece(mark, self._boot_ns(), self._wall()))

    def now(self) -> Instant:
        """The instant to judge by."""
        elapsed = self._boot_ns() - self._since
        if elapsed > PIECE_NS:
            self._begin(self._piece.next(self._since + elapsed, self._wall()))
            return self._start
        return Instant(self._start + elapsed * self._slope // 1_000_000_000)

    def advance(self, duration_us: int) -> None:
        """Jump forward, for tests of what takes hours; from then on wall time counts as moved along."""
        now = self.now()
        self._moved_us += duration_us
        self._begin(piece(Instant(now + duration_us), self._boot_ns(), self._wall()))

    def _wall(self) -> Instant:
        return Instant(self._read_wall() + self._moved_us)

    @property
    def ahead_us(self) -> int:
        """How far the clock was ahead of wall time when last compared (once a second); 0 if it was not."""
        return max(0, -self._piece.behind_us)

    @property
    def ahead(self) -> bool:
        """Whether it is so far ahead that people must be told."""
        return self.ahead_us > AHEAD_US_MAX

    def _begin(self, following: Piece) -> None:
        self._piece = following
        # `now` is called several times a request: attributes of its own are faster than the piece's.
        self._start, self._since, self._slope = following.start, following.boot_ns, following.slope
