"""The arithmetic of the lease clock, which decides everything in a store. It reads no clock itself.

Strategy: the lease clock follows a clock that runs on while the machine sleeps and that nobody sets. Once a second a
new linear piece begins where the last one ended. Its slope bends towards wall time by at most 500 parts in a million,
so a jump of the wall clock shifts no lease's end by more than that. `Piece` is the arithmetic, in integers;
`LeaseClock` joins the pieces; each edge (server/clock.py, client/adapters/embedded) supplies the readings of the two
clocks.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from veilmq.model.commands import CheckClock
from veilmq.model.instant import SECOND_US, Instant

SLEW_PPM_MAX: Final = 500
AHEAD_US_MAX: Final = 60 * SECOND_US
"""If the lease clock is further ahead of wall time than this, operators are warned."""
PIECE_NS: Final = 1_000_000_000
_PPM: Final = 1_000_000


class Piece(NamedTuple):
    """One linear piece: from `start` at `boot_ns` on, `slope` millionths of a microsecond per microsecond.

    behind_us: how far wall time was ahead of the lease clock where the piece begins (negative: behind).
    """

    start: Instant
    boot_ns: int
    slope: int
    behind_us: int

    def at(self, boot_ns: int) -> Instant:
        """The instant at a reading of the boot clock. After its second the piece keeps its slope until it meets wall
        time."""
        elapsed_ns = boot_ns - self.boot_ns
        if elapsed_ns <= PIECE_NS:
            return Instant(self.start + elapsed_ns * self.slope // (_PPM * 1_000))
        slewed_us = min(abs(self.behind_us), elapsed_ns * SLEW_PPM_MAX // (_PPM * 1_000))
        return Instant(self.start + elapsed_ns // 1_000 + (slewed_us if self.behind_us > 0 else -slewed_us))

    def next(self, boot_ns: int, wall: Instant) -> "Piece":
        """The piece that begins at that reading, when wall time is `wall`."""
        return piece(self.at(boot_ns), boot_ns, wall)


def piece(start: Instant, boot_ns: int, wall: Instant) -> Piece:
    """The piece from `start` on, bent towards `wall` without passing it within a second."""
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
        """Continue from the store's mark if that is later than now. Call once, when the store is open."""
        now = self.now()
        if mark > now:
            self._begin(piece(mark, self._boot_ns(), self._wall()))

    def take_over(self, at: Instant) -> None:
        """Continue another machine's lease clock, which stood there, whatever this machine's wall time is."""
        self._begin(piece(at, self._boot_ns(), self._wall()))

    def now(self) -> Instant:
        """The current instant of the lease clock."""
        elapsed = self._boot_ns() - self._since
        if elapsed > PIECE_NS:
            self._begin(self._piece.next(self._since + elapsed, self._wall()))
            return self._start
        return self._start + elapsed * self._slope // 1_000_000_000  # type: ignore[return-value]  # several a request

    def advance(self, duration_us: int) -> None:
        """Jump forward, for tests of long durations; wall time counts as moved too."""
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
        """Whether it is so far ahead that operators must be warned."""
        return self.ahead_us > AHEAD_US_MAX

    def accepting(self) -> CheckClock:
        """The command that says: wall time is right, whatever step it took."""
        return CheckClock(accept=True, ahead_us=self.ahead_us if self.ahead else 0)

    def unaccepted_us(self, held_us: int) -> int:
        """How far an expiry clock that is held back by so much is behind wall time; 0 if wall time was set back
        since."""
        return max(0, held_us - self.ahead_us)

    def _begin(self, following: Piece) -> None:
        self._piece = following
        # `now` is called several times a request: its own attributes are faster than the piece's.
        self._start, self._since, self._slope = following.start, following.boot_ns, following.slope
