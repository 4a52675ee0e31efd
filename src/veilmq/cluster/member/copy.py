"""A server's copy of the shard's state, in its data directory: filled from a snapshot and the log, and kept up to date.

A copy may be lost: one that has diverged from the log is thrown away, and filled again.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from veilmq.cluster.postgres import Unfit, Unreachable
from veilmq.cluster.postgres.log.reading import LogDiverged, LogReader, LogTrimmed
from veilmq.cluster.postgres.ownership import Ownership, Sight
from veilmq.cluster.postgres.schema import Outdated
from veilmq.cluster.postgres.snapshots import Snapshots
from veilmq.model.settings.queue import QueueInfo
from veilmq.store.directory import COMMITTED, DATABASE, REDO
from veilmq.store.log import Diverged, Follower, FormatUnknown, NotOwner, SnapshotBad, together

_COPY: Final = (f"{DATABASE}-wal", f"{DATABASE}-shm", DATABASE, REDO, COMMITTED)

log = logging.getLogger("veilmq.cluster")


class Watch(NamedTuple):
    """Functions that a follower calls in its own thread, to report what it does."""

    opened: Callable[[Follower], object] = lambda follower: None
    """The copy was opened; or it was filled anew, and now has all of the log."""
    saw: Callable[[Sight], object] = lambda sight: None
    """It looked at the owner for the first time, or another server is the owner now."""
    learnt: Callable[[dict[int, QueueInfo | None]], object] = lambda queues: None
    """Queues that the copy has, or that were changed or deleted (None), by incarnation."""
    shared: Callable[[dict[str, bytes]], object] = lambda values: None
    """What all servers have, by name: when the copy was opened, and when one was changed."""


class Copy:
    """The copy in a directory, and what fills it."""

    def __init__(
        self,
        directory: Path,
        open_follower: Callable[[Path], Follower],
        snapshots: Snapshots,
        watch: "Watch | None" = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """between: called before each part of a snapshot and each page of the log. Raises what that raises,
        Unreachable, Unfit, and as the opening of a follower."""
        self._between = between
        self._watch = watch or Watch()
        self._directory = directory
        self._open = open_follower
        self._snapshots = snapshots
        self._bad: set[int] = set()
        """Snapshots that were no use."""
        self._filled_from: int | None = None
        """The snapshot that this copy began with."""
        self._trimmed = ""
        """Why the log alone cannot fill it."""
        self.lsn = 0
        """The last record that it has."""
        self.is_filling = False
        """Whether it was thrown away, and is being filled again. It then tells nobody how queues were: an old policy
        must not come back."""
        self._diverged = set[int]()
        """Records that did not fit."""
        self._forced_at = 0
        """The record that is applied although it does not fit; 0: none."""
        self.doubted_epoch = 0
        """Epoch of an owner whose record did not fit this copy, though the copy had been filled anew."""
        self._follower: Follower | None = None
        self._follower = self._filled()

    @property
    def follower(self) -> Follower:
        """What applies the records."""
        if self._follower is None:
            self._follower = self._filled()
        return self._follower

    def catch_up(self, reader: LogReader, ownership: Ownership | None = None) -> None:
        """Apply what the log has: all of it with `ownership`; without, a few records may have come meanwhile, for amid
        load there are always some. Raises Unreachable, Unfit.

        ownership: held already. It is given back if the copy cannot be brought up to date.
        """
        try:
            while self.read_on(reader) and (ownership is not None or self.is_filling or not reader.is_level):
                pass
        except BaseException:
            if ownership is not None:
                with suppress(NotOwner, Unreachable, Unfit):
                    ownership.hand_over("", None)
            raise

    def read_on(self, reader: LogReader) -> bool:
        """Apply the next page of the log; whether there may be more. Raises Unreachable, Unfit."""
        self._between()
        follower = self.follower
        try:
            entries = reader.read_on(follower.position)
            for part in together(entries):
                try:
                    changed = follower.apply(part, forced=self._forced_at, alone=self._diverged)
                finally:
                    for entry in part:
                        if entry.lsn == self._forced_at <= follower.position.lsn:
                            self.doubted_epoch = entry.epoch
                if changed.queues and not self.is_filling:
                    self._watch.learnt(follower.queues(changed.queues))
                if changed.shared and not self.is_filling:
                    self._watch.shared(follower.shared())
                self.lsn = follower.position.lsn
            if self.is_filling and reader.is_level:
                self.is_filling = False
                self._show(follower)
        except FormatUnknown as error:
            raise Outdated(f"{error} this server; its copy stays as it is") from error
        except (Diverged, LogDiverged, LogTrimmed) as error:
            if isinstance(error, Diverged) and self._is_owners_fault(follower.position.lsn + 1, error):
                return True
            self._doubt(error)
            self._trimmed = str(error) if isinstance(error, LogTrimmed) else ""
            self.throw_away(str(error))
            return True
        return bool(entries)

    def _is_owners_fault(self, lsn: int, error: Diverged) -> bool:
        """Whether the copy was filled anew since it diverged at this record. Then the owner's data is damaged, and the
        record is applied anyway: otherwise no server could follow any more."""
        if lsn not in self._diverged or lsn == self._forced_at:
            self._diverged.add(lsn)
            self._forced_at = 0
            return False
        self._forced_at = lsn
        log.error("record %d does not fit a copy filled anew, so its owner's is damaged: it is applied: %s", lsn, error)
        return True

    def _filled(self) -> Follower:
        """Open the copy, filled from a snapshot if there is none. Raises Unfit if that is needed and cannot be had."""
        while True:
            if not (self._directory / DATABASE).exists() and not self._fill() and self._trimmed:
                raise Unfit(f"{self._directory} cannot be filled: {self._trimmed}, and no snapshot can be read")
            try:
                return self._opened()
            except Diverged as error:
                self._doubt(error)
                self.throw_away(str(error))

    def _doubt(self, error: Exception) -> None:
        """The copy is no use: nor is the snapshot that it began with, unless only the log went on without it. One that
        0.1.0 wrote may have less than it names."""
        if self._filled_from is not None and (not isinstance(error, LogTrimmed) or self._filled_from >= self.lsn):
            self._bad.add(self._filled_from)

    def _opened(self) -> Follower:
        self._follower = follower = self._open(self._directory)
        self.lsn = follower.position.lsn
        if not self.is_filling:
            self._show(follower)
        return follower

    def _show(self, follower: Follower) -> None:
        self._watch.opened(follower)
        self._watch.learnt(follower.queues())
        self._watch.shared(follower.shared())

    def _fill(self) -> bool:
        """Put the newest good snapshot into the directory. Raises Unreachable, Unfit, OSError."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        part = self._directory / f"{DATABASE}.part"
        for snapshot in self._snapshots.list():
            if snapshot.lsn in self._bad:
                continue
            log.info("filling from the snapshot of record %d: %d bytes", snapshot.lsn, snapshot.size)
            try:
                self._snapshots.read(snapshot, part, self._between)
            except BaseException as error:
                part.unlink(missing_ok=True)
                if not isinstance(error, SnapshotBad):
                    raise
                log.error("%s: an older one is taken", error)
                self._bad.add(snapshot.lsn)
                continue
            part.chmod(0o600)
            part.rename(self._directory / DATABASE)
            self._filled_from = snapshot.lsn
            log.info("filled from the snapshot of record %d", snapshot.lsn)
            return True
        return False

    def throw_away(self, why: str) -> None:
        """Remove the copy; it is filled again when it is needed."""
        self.close()
        self._filled_from, self.is_filling, self.lsn = None, True, 0
        remove_copy(self._directory, why)

    def close(self) -> None:
        """Release the directory."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None


def remove_copy(directory: Path, why: str) -> None:
    """Remove a copy that nobody has open."""
    log.error("%s: %s: the copy is thrown away and filled again", directory, why)
    for name in _COPY:
        (directory / name).unlink(missing_ok=True)
