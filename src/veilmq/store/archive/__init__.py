"""A folder or object store that keeps snapshots and records: what is written there, and what a restore finds.

    LINEAGE/snapshots/LSN-TOKEN/manifest.json    what the parts are, and which record of the log the copy ends with
    LINEAGE/snapshots/LSN-TOKEN/00000            a part of the file, compressed
    LINEAGE/records/EPOCH-FIRST-LAST             consecutive records of one epoch, compressed

Strategy: an object is written whole and never changed. The manifest, which makes the other objects of an upload count,
is written last. So an upload that breaks off changes nothing, and leaves at most objects that no manifest names. Local
folders need no package; for everything else fsspec speaks to the store (extra `large`, and the store's own package).

A snapshot is a whole copy of the database; it counts only with its manifest. Each upload has a folder of its own, so
two of the same record never mix. A part that is missing or not as its SHA-256 in the manifest makes the snapshot bad,
and a reader takes another.

A lineage is one data directory, by the epoch of its history, or a cluster; within it, an epoch of the archive is a time
in which no record is missing. Each epoch begins with a snapshot. So a restore takes the newest snapshot from before its
instant, and the records of that snapshot's lineage and epoch that come after it.
"""

import re
import secrets
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from zlib import crc32

import msgspec

from veilmq.model.instant import SECOND_US, Instant
from veilmq.store.files import durable_write, make_directory
from veilmq.store.log import Entry, Held, Point, Position, RecordsEnd, SnapshotBad, SourceUnusable, checksum

_FAULTS: Final = {
    "s3": ("botocore.exceptions.BotoCoreError", "botocore.exceptions.ClientError", "aiohttp.ClientError"),
    "gs": ("aiohttp.ClientError", "gcsfs.retry.HttpError", "google.auth.exceptions.GoogleAuthError"),
    "abfs": ("azure.core.exceptions.AzureError",),
    "oss": ("oss2.exceptions.OssError",),
}
"""What a store's package raises besides OSError."""
_MISSING: Final = object()
_ALIASES: Final = {"s3a": "s3", "gcs": "gs", "az": "abfs", "abfss": "abfs", "adl": "abfs"}
PART_BYTES: Final = 4 * 1024 * 1024
"""Of the file, before compression."""
EPOCH_MIN: Final = 1 << 40
"""Epochs of archives are at least this: so a position shows whether a cluster or an archive has the records. The rest
is when it began, in Unix seconds."""
RECORDS: Final = "records"
_SNAPSHOTS: Final = "snapshots"
_PASSWORD: Final = re.compile(r"(?P<before>([\w+.-]+://|/*)[^/@:]*:)(?!//).*@", re.DOTALL)
"""In a URL, or in the path that fsspec makes of one."""
_MANIFEST: Final = "manifest.json"
FRAME: Final = struct.Struct("<QQII")
"""lsn, epoch, length of the record, CRC-32 of the record."""


class PlaceUnusable(Exception):
    """The URL cannot be used. The text says what to do."""


class PlaceFailed(OSError):
    """The store did not do it. Trying again may help."""


class Place(Protocol):
    """Objects below a URL, by keys with slashes. Any thread."""

    def write(self, key: str, content: bytes) -> None:
        """Write an object whole and durably. Raises PlaceFailed."""

    def read(self, key: str) -> bytes | None:
        """An object's content; None: it is not there. Raises PlaceFailed."""

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted, without those of nested folders' content. Raises PlaceFailed."""

    def remove(self, key: str) -> None:
        """Remove an object, or a folder with all in it, if it is there. Raises PlaceFailed."""


def shown_url(url: str) -> str:
    """A URL or path without the password in it."""
    found = _PASSWORD.match(url)
    return url if found is None else f"{found['before']}***@{url[found.end() :]}"


def place_at(url: str, *, is_new: bool = False) -> Place:
    """A path, file:///path, s3://bucket/prefix or whatever else fsspec knows. Raises PlaceUnusable.

    is_new: it will be written to. A folder may be missing, but not the one above it: that may be a mistyped path.
    """
    scheme, mark, rest = url.partition("://")
    if not mark or scheme == "file":
        path = Path(rest if mark else url)
        above = path.absolute().parent
        if is_new and _is_missing(above):
            reason = f"{above} is not there: check the path, or make it first: mkdir -p {above}"
            raise PlaceUnusable(f"{path} is not made, because {reason}")
        return Folder(path)
    try:
        import fsspec
        from fsspec.config import apply_config

        kind = fsspec.get_filesystem_class(_ALIASES.get(scheme, scheme))
        given = apply_config(kind, {"use_listings_cache": False})
        signature(kind.__init__).bind(None, **given)  # what is half made complains on stderr when it goes
        return Objects(kind(**given), scheme, url)
    except ModuleNotFoundError as error:
        advice = "pip install 'veilmq[large]', and s3fs for s3://"
        raise PlaceUnusable(f"{shown_url(url)}: the package {error.name} is missing: {advice}") from None
    except TypeError as error:
        raise PlaceUnusable(f"{shown_url(url)}: {scheme}:// needs more than a URL: {error}") from None
    except (ImportError, ValueError) as error:
        raise PlaceUnusable(f"{shown_url(url)}: {error}") from None


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # the first write to the place reports it, as where this user may not search a folder above
        pass
    return False


class Folder:
    """A local folder. See `Place`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, key: str, content: bytes) -> None:
        path = self._path / key
        try:
            make_directory(path.parent, 0o700, 0o700)
            durable_write(path, content)
        except OSError as error:
            raise PlaceFailed(f"{path}: {error.strerror}") from error

    def read(self, key: str) -> bytes | None:
        try:
            return (self._path / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise PlaceFailed(f"{self._path / key}: {error.strerror}") from error

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(each.name for each in (self._path / folder).iterdir() if not each.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise PlaceFailed(f"{self._path / folder}: {error.strerror}") from error

    def remove(self, key: str) -> None:
        path = self._path / key
        try:
            if path.is_dir():
                for each in path.iterdir():
                    self.remove(f"{key}/{each.name}")
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise PlaceFailed(f"{path}: {error.strerror}") from error


class Objects:
    """An object store, through fsspec. See `Place`."""

    def __init__(self, files: Any, scheme: str, url: str) -> None:
        self._files = files
        self._root = str(files._strip_protocol(url)).rstrip("/")
        self._hidden: dict[str, str] = {}
        """What a text may have of the password, with what stands there instead."""
        if found := _PASSWORD.match(self._root):
            before, password = found["before"], self._root[found.end("before") : found.end() - 1]
            self._hidden[f":{password}@"] = ":***@"
            if in_bucket := password.partition("/")[0]:  # where a store takes what is before the `/` for the bucket
                self._hidden[before + in_bucket] = f"{before}***"
        names = _FAULTS.get(_ALIASES.get(scheme, scheme), ())
        self._faults: tuple[type[BaseException], ...] = (
            OSError, EOFError, *(fault for name in names for fault in _class_of(name))
        )  # fmt: skip

    def write(self, key: str, content: bytes) -> None:
        if self._try(self._files.pipe_file, self._at(key), content) is _MISSING:
            raise PlaceFailed(f"{shown_url(self._at(key))}: there is no such bucket")

    def read(self, key: str) -> bytes | None:
        found = self._try(self._files.cat_file, self._at(key))
        return None if found is _MISSING else bytes(found)

    def list(self, folder: str) -> list[str]:
        found = self._try(self._files.ls, self._at(folder), detail=False)
        return [] if found is _MISSING else sorted({str(each).rstrip("/").rpartition("/")[2] for each in found})

    def remove(self, key: str) -> None:
        self._try(self._files.rm, self._at(key), recursive=True)

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _try(self, call: Any, *arguments: Any, **options: Any) -> Any:
        """`_MISSING` if it is not there."""
        try:
            return call(*arguments, **options)
        except FileNotFoundError:
            return _MISSING
        except self._faults as error:
            message = f"{arguments[0]}: {type(error).__name__}: {error}"
            for text, instead in self._hidden.items():
                message = message.replace(text, instead)
            raise PlaceFailed(message) from error


def _class_of(name: str) -> list[type[BaseException]]:
    """The class of that name, if its package is there."""
    module, _, attribute = name.rpartition(".")
    try:
        return [getattr(import_module(module), attribute)]
    except ImportError:
        return []


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
    """The part's SHA-256, and the compressed bytes that are stored."""
    return sha256(part).hexdigest(), zlib.compress(part, 1)


def write_file(file: Path, size: int, hashes: list[str], fetch: Callable[[int], bytes | None], name: str) -> None:
    """Write a snapshot's file as it was. fetch: returns the stored bytes of a part by its number; None: it is missing.

    Raises SnapshotBad, OSError: then remove the file.
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
    folder = f"{lineage}/{_SNAPSHOTS}/{point.position.lsn:016}-{secrets.token_hex(4)}"
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
    return [(folder, manifest) for folder, manifest in _manifests(place, lineage) if manifest is not None]


def _manifests(place: Place, lineage: str) -> Iterator[tuple[str, Manifest | None]]:
    """The same, and with None those with a damaged manifest, which count as none."""
    for name in reversed(place.list(f"{lineage}/{_SNAPSHOTS}")):
        folder = f"{lineage}/{_SNAPSHOTS}/{name}"
        content = place.read(f"{folder}/{_MANIFEST}")
        if content is not None:
            try:
                yield folder, msgspec.json.decode(content, type=Manifest)
            except msgspec.MsgspecError:
                yield folder, None


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
    for name in place.list(f"{lineage}/{_SNAPSHOTS}"):
        folder = f"{lineage}/{_SNAPSHOTS}/{name}"
        if folder not in kept and name[:16].isdigit() and int(name[:16]) < before:
            place.remove(folder)


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
    return sorted(found for name in place.list(f"{lineage}/{RECORDS}") if (found := segment_of(name)) is not None)


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


def keep(place: Place, lineage: str, content: bytes) -> Position:
    """Write records of one epoch, as `frame` makes them; returns the last one. Raises PlaceFailed."""
    entries = list(frames(content))
    last = entries[-1]
    place.write(f"{lineage}/{RECORDS}/{_of(entries).name}", zlib.compress(content, 1))
    return Position(last.lsn, last.epoch, checksum(last.record))


def name_of(content: bytes) -> str:
    """The name of the segment with these records; empty if there are none."""
    entries = list(frames(content))
    return _of(entries).name if entries else ""


def _of(entries: Sequence[Entry]) -> Segment:
    """The segment with these records."""
    return Segment(entries[0].epoch, entries[0].lsn, entries[-1].lsn)


def _order(held: Held) -> tuple[int, int, int]:
    """Within a lineage. A later epoch may have an earlier clock: one before may have begun with a clock that was
    ahead."""
    (lsn, epoch, _), clock = held.point
    return epoch, clock, lsn


def _born(epoch: int) -> Instant:
    """When an epoch of an archive began; 0 for one of a cluster."""
    return Instant(max(0, epoch - EPOCH_MIN) * SECOND_US)


_UNKNOWN: Final = Point(Position(0, 0, 0), Instant(0))
"""Of a snapshot with a damaged manifest."""


def _refuse(folder: str, _file: Path) -> Point:
    raise SnapshotBad(f"the snapshot {folder} has a damaged manifest")


_NO_SNAPSHOT: Final = (
    "it has no complete snapshot: none was finished yet, or each is without its manifest.json, which is written last"
)


class ArchiveSource:
    """An archive to restore from. See `Source`."""

    def __init__(self, place: Place, shown: str) -> None:
        """shown: how a user names it. Raises SourceUnusable."""
        self._place = place
        self._lineage = ""
        try:
            self._lineages = [name for name in place.list("") if place.list(f"{name}/{_SNAPSHOTS}")]
        except PlaceFailed as error:
            raise SourceUnusable(str(error)) from error
        if not self._lineages:
            raise SourceUnusable(f"there is no archive at {shown_url(shown)}")

    def snapshots(self) -> list[Held]:
        found: list[list[Held]] = []
        for lineage in self._lineages:
            some = [
                Held(_UNKNOWN, partial(_refuse, folder))
                if manifest is None
                else Held(manifest.point, partial(self._fetch, lineage, folder, manifest), _born(manifest.epoch))
                for folder, manifest in _manifests(self._place, lineage)
            ]
            found.append(sorted(some, key=_order, reverse=True))
        found.sort(key=lambda some: max((each.point.clock for each in some), default=0), reverse=True)
        together = [each for some in found for each in some]
        return sorted(together, key=lambda each: each.point != _UNKNOWN)  # unknown ones first: one may be the newest

    def _fetch(self, lineage: str, folder: str, manifest: Manifest, file: Path) -> Point:
        self._lineage = lineage
        return fetch(self._place, folder, manifest, file)

    def records(self, after: Position) -> Iterator[Entry]:
        """See `Source.records`: those of the lineage of the snapshot that was fetched last."""
        lineage, lsn = self._lineage, after.lsn
        if not lsn:
            if not (found := self.snapshots()):
                raise SourceUnusable(_NO_SNAPSHOT)
            since = min((held.point.clock for held in found if held.point.clock), default=None)
            raise SourceUnusable("there is nothing from before that instant", since)
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
        content = self._place.read(f"{lineage}/{RECORDS}/{segment.name}")
        try:
            yield from frames(zlib.decompress(content or b""))
        except zlib.error as error:
            raise RecordsEnd(f"{segment.name} is damaged: {error}") from error
