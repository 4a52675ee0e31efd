"""Records in an archive: how they are kept, and what a restore finds there.

    LINEAGE/records/EPOCH-FIRST-LAST    consecutive records of one epoch, compressed

Strategy: a lineage is one data directory, by the epoch of its history; within it, an epoch of the archive is a time in
which no record is missing. Each epoch begins with a snapshot. So a restore takes the newest snapshot from before its
instant, and the records of that snapshot's lineage and epoch that come after it.
"""

import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from veilmq.store.archive import Place, PlaceFailed
from veilmq.store.archive.snapshots import FOLDER as SNAPSHOTS
from veilmq.store.archive.snapshots import Manifest, fetch, snapshots
from veilmq.store.log import Entry, Point, Position
from veilmq.store.log.restoring import Held, RecordsEnd, SourceUnusable

FOLDER: Final = "records"
FRAME: Final = struct.Struct("<QQII")
"""lsn, epoch, length of the record, CRC-32 of the record."""


class Segment(NamedTuple):
    """What the name of an object says."""

    epoch: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """As it is kept."""
        return f"{self.epoch:016}-{self.first:016}-{self.last:016}"


def segment_of(name: str) -> Segment | None:
    """None: it is something else."""
    parts = name.split("-")
    return Segment(*map(int, parts)) if len(parts) == 3 and all(part.isdigit() for part in parts) else None


def segments(place: Place, lineage: str) -> list[Segment]:
    """All of a lineage, in their order. Raises PlaceFailed."""
    return sorted(found for name in place.list(f"{lineage}/{FOLDER}") if (found := segment_of(name)) is not None)


def frame(entry: Entry) -> bytes:
    """The record with its head."""
    return FRAME.pack(entry.lsn, entry.epoch, len(entry.record), crc32(entry.record)) + entry.record


def frames(content: bytes) -> Iterator[Entry]:
    """The records that are whole, up to the first that is not."""
    at = 0
    while at + FRAME.size <= len(content):
        lsn, epoch, length, crc = FRAME.unpack_from(content, at)
        at += FRAME.size + length
        record = content[at - length : at]
        if len(record) < length or crc32(record) != crc:
            return
        yield Entry(lsn, epoch, record)


def keep(place: Place, lineage: str, content: bytes) -> Segment:
    """Write records, as `frame` makes them. Raises PlaceFailed."""
    entries = list(frames(content))
    found = Segment(entries[0].epoch, entries[0].lsn, entries[-1].lsn)
    place.write(f"{lineage}/{FOLDER}/{found.name}", zlib.compress(content, 1))
    return found


def _order(held: Held) -> tuple[int, int, int]:
    (lsn, epoch, _), clock = held.point
    return clock, epoch, lsn


class ArchiveSource:
    """An archive to restore from. See `Source`."""

    def __init__(self, place: Place, shown: str) -> None:
        """shown: how a user names it. Raises SourceUnusable."""
        self._place = place
        self._lineage = ""
        try:
            self._lineages = [name for name in place.list("") if place.list(f"{name}/{SNAPSHOTS}")]
        except PlaceFailed as error:
            raise SourceUnusable(str(error)) from error
        if not self._lineages:
            raise SourceUnusable(f"there is no archive at {shown}")

    def snapshots(self) -> list[Held]:
        """See `Source.snapshots`."""
        found: list[Held] = []
        for lineage in self._lineages:
            for folder, manifest in snapshots(self._place, lineage):
                found.append(Held(manifest.point, partial(self._fetch, lineage, folder, manifest)))
        return sorted(found, key=_order, reverse=True)

    def _fetch(self, lineage: str, folder: str, manifest: Manifest, file: Path) -> Point:
        self._lineage = lineage
        return fetch(self._place, folder, manifest, file)

    def records(self, after: Position) -> Iterator[Entry]:
        """See `Source.records`: of the snapshot that was fetched last."""
        lineage, lsn = self._lineage, after.lsn
        if not lsn:
            raise SourceUnusable("there is nothing from before that instant")
        for segment in segments(self._place, lineage):
            if segment.epoch != after.epoch or segment.last <= lsn:
                continue
            if segment.first > lsn + 1:
                raise RecordsEnd(f"the archive lacks the records {lsn + 1} to {segment.first - 1}")
            for entry in self._entries(lineage, segment):
                if entry.lsn > lsn:
                    lsn = entry.lsn
                    yield entry
            if lsn < segment.last:
                raise RecordsEnd(f"{segment.name} is damaged")

    def _entries(self, lineage: str, segment: Segment) -> Iterator[Entry]:
        content = self._place.read(f"{lineage}/{FOLDER}/{segment.name}")
        try:
            yield from frames(zlib.decompress(content or b""))
        except zlib.error as error:
            raise RecordsEnd(f"{segment.name} is damaged: {error}") from error
