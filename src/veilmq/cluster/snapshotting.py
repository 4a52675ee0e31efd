"""Publishes snapshots of a shard, and vouches for those of other servers; in a thread beside a follower or the owner.

Strategy: a snapshot is published only of a copy that `veilmq check` finds in order, and whose tables another server
has, too: it says the digest of its own at some record, and the copy is brought to that record and compared. So what
rotted here is never published. A follower whose copy is not in order throws it away; so does one that differs from
another server, once, because one of both has rotted and its own is only a copy. The owner publishes late, when no
follower has, and without a proof only where no other server is.

A take-over must not wait for this: between any two parts of the work the thread looks whether it is to end.
"""

import logging
import shutil
import threading
from collections import deque
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from uuid import UUID

from veilmq.cluster.postgres import Postgres, Unfit, Unreachable
from veilmq.cluster.postgres.log.reading import LogDiverged, LogReader, LogTrimmed
from veilmq.cluster.postgres.snapshots import BYTES_PER_SECOND, Proof, Proofs, Snapshots
from veilmq.engine.directory import checkpoint, copy_checked, digest_of, open_follower
from veilmq.model.errors import StoreUnknown
from veilmq.model.wording import counted
from veilmq.store import Options
from veilmq.store.directory import DATABASE, DatabaseFailed, DatabaseUnusable, NotOurs
from veilmq.store.log import Diverged, Point, together

SNAPSHOT_BYTES: Final = 256 << 20
"""A snapshot is due when the log since the last one has so many bytes, and at least as many as the state: a server that
begins with nothing applies them in some seconds."""
LOOK_SECONDS: Final = 1.0
LOOKS_BETWEEN: Final = 10
"""After so many looks for a question it is seen whether a snapshot is due."""
LOOKS_BETWEEN_MAX: Final = 320
"""The same after attempts that failed: each copies and checks the whole database."""
_OWNER_LATER: Final = 1.5
"""By so much longer the log is before the owner writes one itself."""
_ALONE_SECONDS: Final = 20.0
"""If nobody has begun to answer for so long, there is no other server."""
_ANSWER_SECONDS: Final = 900.0
_OWNERS_SHARE: Final = 0.1
"""How much of its time the owner gives to a digest."""
_LOGGED_MAX: Final = 8
_PLACE: Final = "snapshot-"
_PATIENCE_SECONDS: Final = 0.5
_OPTIONS: Final = Options(reserve_bytes=0)

log = logging.getLogger("veilmq.cluster")


class Stopped(Exception):
    """It is to end."""


class Unproven(Exception):
    """No other server has answered."""


_PASSING: Final = (
    Unreachable, Unfit, Unproven, LogDiverged, LogTrimmed, DatabaseFailed, DatabaseUnusable, NotOurs, StoreUnknown,
    OSError,
)  # fmt: skip
"""What may be otherwise next time: a full disk is a DatabaseUnusable or a StoreUnknown where the copy is opened or
brought up to date."""


class Snapshotting:
    """One server's part. Start and close it once."""

    def __init__(
        self,
        postgres: Postgres,
        incarnation: UUID,
        name: str,
        directory: Path,
        *,
        owns: bool,
        bytes_min: int = SNAPSHOT_BYTES,
        alone_s: float = _ALONE_SECONDS,
    ) -> None:
        """name: this server's. directory: its copy, or the owner's data."""
        self._snapshots = Snapshots(postgres, incarnation)
        self._proofs = Proofs(postgres, incarnation, name)
        self._reader = LogReader(postgres, incarnation)
        self._directory = directory
        self._owns = owns
        self._bytes_min = bytes_min
        self._alone_s = alone_s
        self._ended = threading.Event()
        self._differed = ""
        """The server that a copy of this one differed from last."""
        self.damage_found = ""
        """Why the copy is to be thrown away. Who follows does, and clears it; an owner hands over first."""
        self._thread = threading.Thread(target=self._run, name="veilmq-snapshots", daemon=True)

    def start(self) -> None:
        """Begin."""
        for left in self._directory.glob(f"{_PLACE}*"):  # by a process that died
            shutil.rmtree(left, ignore_errors=True)
        self._thread.start()

    def close(self) -> None:
        """End soon; where PostgreSQL does not answer, later."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_SECONDS)
        else:
            self._disconnect()

    def _disconnect(self) -> None:
        self._proofs.close()
        self._reader.close()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._disconnect()

    def _work(self) -> None:
        with suppress(Unreachable, Unfit):
            self._proofs.release()  # what a process that died had claimed
        looks, due, pause = 0, LOOKS_BETWEEN, LOOKS_BETWEEN
        logged: deque[str] = deque(maxlen=_LOGGED_MAX)  # since it went well; what fails says one thing and another
        while not self._ended.wait(LOOK_SECONDS):
            looks += 1
            try:
                self.answer()
                if looks >= due:
                    due, pause = looks + pause, min(2 * pause, LOOKS_BETWEEN_MAX)  # if it fails
                    self.write()
                    due, pause = looks + LOOKS_BETWEEN, LOOKS_BETWEEN
                logged.clear()
            except Stopped:
                return
            except Diverged as error:
                self.damage_found = str(error)
                log.error("no snapshot: %s", error)
            except _PASSING as error:
                if str(error) not in logged:
                    log.warning("no snapshot: %s", error)
                    logged.append(str(error))

    def answer(self) -> None:
        """Vouch for another server's snapshot, if one asks. Raises as `write`."""
        database = self._directory / DATABASE
        if not database.exists():
            return
        with closing(digest_of(database)) as reading:
            claimed = self._proofs.claim(reading.position.lsn, owns=self._owns)
            if claimed is None:
                return
            try:
                self._proofs.answer(claimed, reading.position.lsn, reading.digest(self._rest))
            except BaseException:
                with suppress(Unreachable, Unfit):
                    self._proofs.release()  # else the asker waits for it
                raise
        log.info("said what the tables hold at record %d, for another server's snapshot", reading.position.lsn)

    def write(self) -> None:
        """Publish a snapshot if one is due.

        Raises Diverged if the copy is not in order; Unproven, Stopped, Unreachable, Unfit, DatabaseFailed, OSError.
        """
        if not self._is_due():
            return
        with self._snapshots.turn() as mine, TemporaryDirectory(dir=self._directory, prefix=_PLACE) as place:
            if not mine or not self._is_due():  # another server has written one just now
                return
            copy = Path(place, DATABASE)
            point = copy_checked(self._directory / DATABASE, copy, is_owner=True, step=self._go_on)
            point, verified_by = self._proven(point, Path(place))
            not_needed = self._snapshots.write(copy, point, verified_by, self._pace)
            log.info(
                "wrote a snapshot of record %d, %d bytes, %s",
                point.position.lsn, copy.stat().st_size,
                f"verified by {verified_by}" if verified_by else "which no other server could verify",
            )  # fmt: skip
            if dropped := self._reader.drop_below(not_needed):
                log.info("dropped %s of the log, up to record %d", counted(len(dropped), "segment"), not_needed)

    def _is_due(self) -> bool:
        size = (self._directory / DATABASE).stat().st_size
        due = max(self._bytes_min, size) * (_OWNER_LATER if self._owns else 1)
        return self._snapshots.log_bytes() >= due

    def _proven(self, point: Point, place: Path) -> tuple[Point, str]:
        """Bring the copy to the record at which another server answers, and compare. Returns what it then holds, and
        that server's name."""
        self._proofs.ask(point.position.lsn)
        proof = self._answered()
        if proof is None:
            return point, ""
        clock = point.clock
        with closing(open_follower(place, _OPTIONS)) as copy:
            while (missing := proof.lsn - copy.position.lsn) > 0:
                self._go_on()
                for part in together(self._reader.read(copy.position, min(missing, 1_000))):
                    copy.apply(part)
            position = copy.position
        checkpoint(place / DATABASE)  # the file alone is uploaded
        with closing(digest_of(place / DATABASE)) as reading:
            clock = reading.clock
            same = reading.digest(self._rest) == proof.digest
        if same:
            self._differed = ""
            return Point(position, clock), proof.by
        before, self._differed = self._differed, proof.by
        reason = f"the tables of {proof.by} are not as here at record {position.lsn}"
        if self._owns or before == proof.by:
            raise Unproven(f"{reason}: give {proof.by} an empty directory, after a hand-over if it owns the queues")
        raise Diverged(reason)

    def _answered(self) -> Proof | None:
        """What another server says; None: there is none, and this is the owner."""
        waited_s = alone_s = 0.0
        while True:
            proof = self._proofs.look()
            if proof.lsn:
                return proof
            alone_s = 0.0 if proof.by else alone_s + 0.1  # one that ends amid its answer leaves it to another
            if alone_s > self._alone_s:
                if self._owns:
                    return None
                raise Unproven("no other server has verified the copy")
            if waited_s >= _ANSWER_SECONDS:
                raise Unproven(f"{proof.by} has not verified the copy within {_ANSWER_SECONDS:g} s")
            self._go_on(0.1)
            waited_s += 0.1

    def _go_on(self, seconds: float = 0.0) -> None:
        if self._ended.wait(seconds) if seconds else self._ended.is_set():
            raise Stopped

    def _pace(self, size: int) -> None:
        self._go_on(size / BYTES_PER_SECOND)

    def _rest(self, worked_s: float) -> None:
        self._go_on(worked_s / _OWNERS_SHARE if self._owns else worked_s)
