"""The simulated machine's disk: `FaultDisk` in memory, which dies at a step, and is slow and full when it is told to.

Strategy: all files lie in a directory on tmpfs. Each call of the disk is a step; `dies_in` counts them down, and at the
last one the process is dead: this call and all later ones fail, and nobody gets an answer any more. What it left is
decided then: after a kill all that was written, after a power cut what `FaultDisk.after_cut` draws. Bits flip at rest.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.simulation.loop import Time
from tests.support.faults import FaultDisk, Image

from veilmq.store.files import Job
from veilmq.testing import Random

DAMAGED = ("veilmq.db", "veilmq.db-wal", "redo", "committed")
"""The files in which bits flip."""


@contextmanager
def in_memory() -> Iterator[Path]:
    """A path for a data directory, on tmpfs where there is one."""
    shared = Path("/dev/shm")
    root = tempfile.mkdtemp(prefix="veilmq-simulation-", dir=shared if shared.is_dir() else None)
    try:
        yield Path(root, "data")
    finally:
        shutil.rmtree(root, ignore_errors=True)


class LaterJob:
    """Work that runs when its instant comes, or when somebody waits for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def run(self) -> None:
        """Run it, unless it has run."""
        work, self._work = self._work, None
        if work is not None:
            work()

    def is_alive(self) -> bool:
        """See `Job.is_alive`."""
        return self._work is not None

    def join(self, timeout: float | None = None) -> None:
        """See `Job.join`: with a timeout too, the work may end in time."""
        self.run()


class SimulatedDisk(FaultDisk):
    """The disk of one world."""

    def __init__(self, name: str, directory: Path, time: Time, chance: Random) -> None:
        super().__init__(name)
        self.directory = directory
        self.dies_in: int | None = None
        self.died: Callable[[], None] = lambda: None
        self.slow_us_max = 0
        self.later: Callable[[float, Callable[[], None]], object] = lambda seconds, work: None
        """The running loop's `call_later`."""
        self._amid: LaterJob | None = None
        """Runs amid another call, as a thread would."""
        self._amid_in = 0
        self._time = time
        self._chance = chance
        self.syncing = self._take_time

    def count(self, call: str) -> None:
        """See `FaultDisk.count`."""
        if self.dies_in is not None and not self.dead:
            self.dies_in -= 1
            if self.dies_in <= 0:
                self.dead = True
                self.died()
        if self._amid is not None and not self.dead:
            self._amid_in -= 1
            if self._amid_in <= 0:
                job, self._amid = self._amid, None
                job.run()
        if self.dead or self.failure is not None or self.struck:
            super().count(call)
        else:
            self.calls[call] += 1

    def _take_time(self, path: str) -> None:
        if self.slow_us_max:
            self._time.spend(int(self._chance.random() ** 3 * self.slow_us_max))

    def beside(self, work: Callable[[], None], name: str) -> Job:
        """See `Disk.beside`."""
        job = LaterJob(work)
        if self._amid is None and self._chance.random() < 0.5:
            self._amid, self._amid_in = job, self._chance.randint(1, 40)
            return job

        def run() -> None:
            with self._time.apart():
                job.run()

        self.later(self._chance.random() * 0.05, run)
        return job

    def revive(self, *, power: bool) -> None:
        """The next process may begin. power: the power was cut."""
        if power:
            left = self.after_cut(self.directory, self._chance.getrandbits(32))
            for path in self.directory.iterdir():
                if path.name not in {"lock", "reserve"}:
                    path.unlink()
            for name, content in left.items():
                (self.directory / name).write_bytes(content)
            self.files = {str(self.directory / name): Image(content) for name, content in left.items()}
            self.named, self.renamed = dict(self.files), []
        self.dead, self.dies_in, self.failure, self._amid = False, None, None, None

    def flip(self) -> str:
        """Flip one bit at rest, and say where."""
        sizes = {name: path.stat().st_size for name in DAMAGED if (path := self.directory / name).exists()}
        name = self._chance.choice([name for name, size in sizes.items() if size])
        path = self.directory / name
        content = bytearray(path.read_bytes())
        used = max((at for at, byte in enumerate(content) if byte), default=0) if name == "redo" else len(content) - 1
        at, bit = self._chance.randint(0, used), self._chance.randint(0, 7)
        content[at] ^= 1 << bit
        path.write_bytes(content)
        image = self.files.get(str(path))
        if image is not None:
            image.synced, image.pending = content, []
        return f"bit {bit} of byte {at} of {len(content)} in {name}"
