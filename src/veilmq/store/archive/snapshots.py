"""Snapshots at a URL: whole copies of the database in parts, each with a manifest that is written last.

    LINEAGE/snapshots/LSN-TOKEN/manifest.json    what the parts are, and which record of the log the copy ends with
    LINEAGE/snapshots/LSN-TOKEN/00000            a part of the file, compressed

Strategy: a snapshot without its manifest is none. Each upload has a folder of its own, so two of the same record never
mix. A part that is missing or not as its SHA-256 in the manifest makes the snapshot bad, and a reader takes another.
"""

import secrets
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from veilmq.model.instant import Instant
from veilmq.store.archive import Place
from veilmq.store.log import Point, Position
from veilmq.store.log.restoring import Held, SnapshotBad

PART_BYTES: Final = 4 * 1024 * 1024
"""Of the file, before compression."""
FOLDER: Final = "snapshots"
_MANIFEST: Final = "manifest.json"


class Manifest(msgspec.Struct, kw_only=True):
    """What a snapshot is."""

    lsn: int
    epoch: int
    checksum: int
    clock: Instant
    format: int
    """Number of the state format."""
    size: int
    """Bytes of the file."""
    parts: list[str]
    """SHA-256 of each part of the file."""
    verified_by: str = ""
    """The server whose tables had the same digest at that record; empty: there was no other server."""

    @property
    def point(self) -> Point:
        """What the copy holds."""
        return Point(Position(self.lsn, self.epoch, self.checksum), self.clock)


def parts_of(file: Path) -> Iterator[bytes]:
    """The file in parts."""
    with file.open("rb") as opened:
        while part := opened.read(PART_BYTES):
            yield part


def compressed(part: bytes) -> tuple[str, bytes]:
    """The part's SHA-256, and what is kept of it."""
    return sha256(part).hexdigest(), zlib.compress(part, 1)


def write_file(file: Path, size: int, hashes: list[str], fetch: Callable[[int], bytes | None], name: str) -> None:
    """Write a snapshot's file as it was. fetch: what is kept of a part; None: it is missing.

    Raises SnapshotBad, OSError; the file is then to be removed.
    """
    try:
        with file.open("wb") as written:
            for number, expected in enumerate(hashes):
                kept = fetch(number)
                if kept is None:
                    raise SnapshotBad(f"{name} lacks part {number}")
                part = zlib.decompress(kept)
                if sha256(part).hexdigest() != expected:
                    raise SnapshotBad(f"part {number} of {name} is damaged")
                written.write(part)
    except zlib.error as error:
        raise SnapshotBad(f"{name} is damaged: {error}") from error
    if file.stat().st_size != size:
        raise SnapshotBad(f"{name} is not complete")


def upload(
    place: Place, lineage: str, file: Path, point: Point, *, state_format: int, pace: Callable[[int], object],
    verified_by: str = "",
) -> tuple[str, Manifest]:  # fmt: skip
    """Write a snapshot; returns its folder. pace: called with the size of each part. Raises PlaceFailed, OSError."""
    folder = f"{lineage}/{FOLDER}/{point.position.lsn:016}-{secrets.token_hex(4)}"
    hashes = []
    for number, part in enumerate(parts_of(file)):
        found, kept = compressed(part)
        hashes.append(found)
        place.write(f"{folder}/{number:05}", kept)
        pace(len(part))
    lsn, epoch, checksum = point.position
    manifest = Manifest(
        lsn=lsn, epoch=epoch, checksum=checksum, clock=point.clock, format=state_format, size=file.stat().st_size,
        parts=hashes, verified_by=verified_by,
    )  # fmt: skip
    place.write(f"{folder}/{_MANIFEST}", msgspec.json.encode(manifest))
    return folder, manifest


def snapshots(place: Place, lineage: str) -> list[tuple[str, Manifest]]:
    """All that are complete, with their folders, the newest first. Raises PlaceFailed."""
    found = []
    for name in reversed(place.list(f"{lineage}/{FOLDER}")):
        folder = f"{lineage}/{FOLDER}/{name}"
        content = place.read(f"{folder}/{_MANIFEST}")
        if content is not None:
            try:
                found.append((folder, msgspec.json.decode(content, type=Manifest)))
            except msgspec.MsgspecError:
                continue  # it is damaged: as one without
    return found


def fetch(place: Place, folder: str, manifest: Manifest, file: Path) -> Point:
    """Write a snapshot's file. Raises SnapshotBad, PlaceFailed, OSError."""
    write_file(
        file,
        manifest.size,
        manifest.parts,
        lambda number: place.read(f"{folder}/{number:05}"),
        f"the snapshot {folder}",
    )
    return manifest.point


def held(place: Place, folder: str, manifest: Manifest) -> Held:
    """The snapshot, for a restore."""
    return Held(manifest.point, lambda file: fetch(place, folder, manifest, file))


def remove_others(place: Place, lineage: str, kept: set[str], before: int) -> None:
    """Remove all folders of snapshots, complete or not, of records before that one, but those that are kept."""
    for name in place.list(f"{lineage}/{FOLDER}"):
        folder = f"{lineage}/{FOLDER}/{name}"
        if folder not in kept and name[:16].isdigit() and int(name[:16]) < before:
            place.remove(folder)
