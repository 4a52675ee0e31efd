"""Keeps received messages durably before Spark learns of them: one manifest per micro-batch, under a unique name.

    00000000000000000012-<token>.arrow        messages and handles of offset 12
    00000000000000000012-<token>.ids          its ids that must stay known after the manifest is gone
    query.json                                the query and queue that the directory belongs to
    lock

Strategy: a manifest is written as a whole, synced with its directory, and never changed; its offset contains its
SHA-256. Names are never reused, so that an orphan of a crash is never mistaken for the batch that was logged. The
directory is local, with an flock, or in an object store, with a hold (`places`): `query.json` then is in the objects of
the hold, so saving it shows whether another process has taken over. The token begins with the number of the hold. A
process that finds a manifest of a greater number is over: it removes nothing, and receives nothing more.

The columns of a drained message are here too, for Arrow and for Spark. A manifest holds these and the handle, in
exactly the types that Spark's Arrow reader expects, so that a plain drain passes record batches on without touching a
row.
"""

import base64
import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import AttributeValue, Received
from veilmq.pipeline import places
from veilmq.pipeline.errors import DirectoryForeign, DirectoryTaken, DirectoryUnwritable, ManifestDamaged
from veilmq.pipeline.places import Place, PlaceFailed, PlaceTaken

ROWS_PER_BATCH: Final = 1_000
BYTES_PER_BATCH: Final = 16 << 20
"""Approximate bytes of a record batch: Java loads each as a whole, and would do so with a thousand large bodies."""
LOCK_SECONDS: Final = 15.0
"""A killed query's process needs a moment to exit."""
OWNER: Final = "query.json"
_NAME: Final = re.compile(r"(\d{20})-([0-9a-f]{8})[0-9a-f]{8}\.(arrow|ids)\Z")
_MEND: Final = (
    "Restore it from a backup. Without it the batch cannot be repeated; its messages are still in the queue, so that a "
    "new checkpoint with a new directory drains them."
)
SPARK_SCHEMA: Final = (
    "`id` string, `body` string, `attributes` map<string, string>, `type` string, `group` string, "
    "`sequence` decimal(38, 0), `sent` timestamp_ltz, `receive_count` int, `batch` bigint, `position` int"
)
"""`sequence` is the FIFO sequence number (up to 128 bits); `batch` and `position` say where in which manifest a row
is."""
ARROW_SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("body", pa.string()),
        ("attributes", pa.map_(pa.string(), pa.field("value", pa.string(), True))),
        ("type", pa.string()),
        ("group", pa.string()),
        ("sequence", pa.decimal128(38, 0)),
        ("sent", pa.timestamp("us", "UTC")),
        ("receive_count", pa.int32()),
        ("batch", pa.int64()),
        ("position", pa.int32()),
    ]
)
QUEUE: Final = pa.field("queue", pa.string())
"""The column that a drain of many queues has besides."""
MANIFEST_SCHEMA: Final = ARROW_SCHEMA.append(pa.field("handle", pa.string())).append(QUEUE)


class Offset(NamedTuple):
    """A stream's offset: everything up to the manifest number `seq`."""

    seq: int = 0
    file: str = ""
    sha256: str = ""

    @classmethod
    def read(cls, given: Any) -> "Offset":
        """From Spark's dict. Raises ManifestDamaged."""
        try:
            return cls(int(given["seq"]), str(given["file"]), str(given["sha256"]))
        except (KeyError, TypeError, ValueError):
            raise ManifestDamaged(f"The checkpoint has the offset {given!r}.", "Is it of another source?") from None


class _Owner(msgspec.Struct):
    queue: str
    begun: bool = False
    """A batch was committed."""
    reach: int = 0
    """The last committed batch. Its manifest is gone, and a sink that has its number takes no other batch for it."""
    files: list[str] = []
    """Names of committed batches' manifests, those that are there still and perhaps others. What a process writes that
    was taken for dead is none of them."""


class Directory:
    """The manifest directory of one query, locked until `close`, the end of the process, or, in an object store, 30 s
    after it could last be renewed.
    """

    def __init__(self, path: Place, queue: str, *, lock_seconds: float | None = None, clock: Clock = SYSTEM) -> None:
        """`queue`: the queue that is drained. Raises DirectoryTaken, DirectoryForeign."""
        self.path = path
        with writing(path):
            places.make(path, 0o700)
        if lock_seconds is None:
            lock_seconds = LOCK_SECONDS if isinstance(path, Path) else LOCK_SECONDS + places.HOLD_SECONDS
        try:
            with writing(path):
                self._lock = places.lock_of(path, OWNER, places.Patience(lock_seconds, clock))
        except PlaceTaken as error:
            self._taken(error.wrong)
        try:
            self._owner = self._own(queue)
        except BaseException:
            self.close()
            raise

    def _taken(self, holder: str) -> NoReturn:
        mend = "Stop that one, or give each query its own directory."
        raise DirectoryTaken(f"{self.path} is used by another query ({holder}).", mend) from None

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def begin(self, start: Offset) -> None:
        """Everything up to `start` is committed. Raises DirectoryForeign if that is impossible, DirectoryUnwritable."""
        if start.seq > self._owner.reach:
            left = [name for name in self._owner.files if (self.path / name).exists()]
            self._owner = _Owner(self._owner.queue, True, start.seq, [*left, start.file])
            self._write_owner()
        elif not start.seq and self._owner.begun:
            raise DirectoryForeign(
                f"{self.path} is of a query that has come further than this one, which begins anew.",
                "Bring its checkpoint back, or give the new query an empty directory.",
            )

    def check_reach(self, start: Offset) -> None:
        """Check that at most one manifest lies beyond the query's start. Raises DirectoryForeign if its checkpoint went
        back."""
        reach = [seq for seq, _ in self.files("arrow") if seq > start.seq + 1]
        reach += [seq for seq, _ in self.files("ids") if seq > start.seq]
        reach += [self._owner.reach] if self._owner.reach > start.seq else []
        if reach:
            raise DirectoryForeign(
                f"{self.path} has come to batch {max(reach)}, and the checkpoint only to {start.seq}.",
                "Bring the newest checkpoint back, or give the query an empty directory.",
            )

    def write(self, seq: int, table: Any) -> Offset:
        """Durable when this returns. Raises DirectoryUnwritable."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, MANIFEST_SCHEMA) as writer:
            for start, stop in cuts(pc.binary_length(table.column("body")).to_pylist()):
                writer.write_table(table.slice(start, stop - start), ROWS_PER_BATCH)
        content = sink.getvalue()
        # A local lock has no number: the kernel sees to it that nobody else is at work.
        token = f"{self._lock.number:08x}{secrets.token_hex(4)}" if self._lock.number else secrets.token_hex(8)
        name = f"{seq:020}-{token}.arrow"
        put(self.path / name, content)
        if self._lock.number:  # was it held until now?
            try:
                self._write_owner()
            except DirectoryTaken:
                (self.path / name).unlink(missing_ok=True)
                raise
        return Offset(seq, name, hashlib.sha256(content).hexdigest())

    def files(self, kind: str) -> list[tuple[int, Place]]:
        """Number and path of each `arrow` or `ids`, in order. Raises DirectoryTaken if another process has written
        some since this one took the lock."""
        found = [(each, path) for path in self.path.iterdir() if (each := _NAME.match(path.name))]
        if self._lock.number and any(int(each[2], 16) > self._lock.number for each, _ in found):
            self._taken("another process")
        found.sort(key=lambda each: each[1].name)
        return [(int(each[1]), path) for each, path in found if each[3] == kind]

    def is_committed(self, path: Place) -> bool:
        """Whether a manifest is that of a committed batch."""
        return path.name in self._owner.files

    def checked(self, offset: Offset) -> Place:
        """The manifest of an offset, checked against its digest. Raises ManifestDamaged."""
        path = self.path / offset.file
        if not _NAME.match(offset.file):
            raise ManifestDamaged(f"The checkpoint names {offset.file!r}.", "Is it of another source?")
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ManifestDamaged(f"{path} cannot be read: {error.strerror}.", _MEND) from None
        if found != offset.sha256:
            raise ManifestDamaged(f"{path} is not what was written.", _MEND)
        return path

    def keep_ids(self, path: Place, ids: Sequence[str]) -> None:
        """Replace a manifest by the ids that must stay known."""
        if ids:
            put(path.with_suffix(".ids"), "\n".join(ids).encode())
        path.unlink(missing_ok=True)

    def _own(self, queue: str) -> _Owner:
        content = self._lock.load()
        if content is None:
            self._owner = _Owner(queue)
            self._write_owner()
            return self._owner
        owner = _decoded(self.path, content)
        if owner.queue != queue:
            raise DirectoryForeign(
                f"{self.path} is of a query that drains {owner.queue}, not {queue}.",
                "Give each query its own directory.",
            )
        return owner

    def _write_owner(self) -> None:
        try:
            with writing(self.path):
                self._lock.save(msgspec.json.encode(self._owner))
        except PlaceTaken as error:
            self._taken(error.wrong)
        except PlaceFailed as error:
            raise _unwritable(self.path, error) from error


def numbered(directory: Path, kind: str) -> list[tuple[int, Path]]:
    """Number and path of each `arrow` or `ids` in a directory of another query, in order."""
    found = [(each, path) for path in sorted(directory.iterdir()) if (each := _NAME.match(path.name))]
    return [(int(each[1]), path) for each, path in found if each[3] == kind]


def read_owner(directory: Path) -> tuple[str, int]:
    """What another query drains, and the last batch that it has committed. Raises DirectoryForeign."""
    try:
        owner = _decoded(directory, (directory / OWNER).read_bytes())
    except OSError as error:
        mend = "Restore it from a backup."
        raise DirectoryForeign(f"{directory / OWNER} cannot be read: {error.strerror}.", mend) from None
    return owner.queue, owner.reach


def _decoded(directory: Place, content: bytes) -> _Owner:
    try:
        return msgspec.json.decode(content, type=_Owner)
    except (ValueError, RecursionError):
        mend = "Give the query an empty directory."
        raise DirectoryForeign(f"{directory / OWNER} is not ours.", mend) from None


def put(path: Place, content: Any) -> None:
    """Write a file atomically and durably. Raises DirectoryUnwritable."""
    try:
        with writing(path.parent):
            places.put(path, content)
    except PlaceFailed as error:
        raise _unwritable(path.parent, error) from error


@contextmanager
def writing(directory: Place) -> Iterator[None]:
    """Turns an OSError into DirectoryUnwritable."""
    try:
        yield
    except OSError as error:
        raise _unwritable(directory, error) from error


def _unwritable(directory: Place, error: OSError | PlaceFailed) -> DirectoryUnwritable:
    mend = "Run the query again when it can: it goes on."
    if isinstance(error, PlaceFailed):
        return DirectoryUnwritable(error.wrong, mend)
    return DirectoryUnwritable(f"{directory} cannot be written: {error.strerror}.", mend)


def cuts(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The row ranges that form one record batch each, by the lengths of their bodies."""
    start = size = 0
    for place, length in enumerate(lengths):
        if place > start and (place - start == ROWS_PER_BATCH or size + length > BYTES_PER_BATCH):
            yield start, place
            start, size = place, 0
        size += length
    yield start, len(lengths)


def open_manifest(path: Place) -> Any:
    """A reader of its record batches, memory-mapped if it is local. Raises ManifestDamaged, PlaceFailed."""
    try:
        return pa.ipc.open_file(pa.memory_map(str(path)) if isinstance(path, Path) else places.source(path))
    except (OSError, pa.ArrowException) as error:
        raise ManifestDamaged(f"{path} cannot be read: {error}.", _MEND) from None


def is_taken(path: Place) -> bool:
    """Whether a query is using the manifests there."""
    if isinstance(path, Path) and not (path / places.LOCK).exists():
        return False
    try:
        places.lock_of(path, OWNER, places.Patience(0)).release()
    except PlaceTaken:
        return True
    return False


def table_of(messages: Sequence[Received], batch: int, parted: Callable[[str], tuple[str, str]] | None = None) -> Any:
    """The rows of a manifest. `parted`: the queue's name and the id, where ids hold both; None: one queue."""
    ids, queues = [each.id for each in messages], pa.nulls(len(messages), pa.string())
    if parted is not None:
        queues = pa.array([parted(each)[0] for each in ids], pa.string())
        ids = [parted(each)[1] for each in ids]
    columns = [
        pa.array(ids, pa.string()),
        pa.array([each.body for each in messages], pa.string()),
        pa.array([_texts(each.attributes) for each in messages], ARROW_SCHEMA.field("attributes").type),
        pa.array([each.type for each in messages], pa.string()),
        pa.array([each.group for each in messages], pa.string()),
        pa.array([each.sequence_number for each in messages], pa.decimal128(38, 0)),
        pa.array([None if each.sent is None else round(each.sent * 1e6) for each in messages], pa.int64()).cast(
            pa.timestamp("us", "UTC")
        ),
        pa.array([each.receive_count for each in messages], pa.int32()),
        pa.repeat(pa.scalar(batch, pa.int64()), len(messages)),
        pa.array(range(len(messages)), pa.int32()),
        pa.array([each.handle for each in messages], pa.string()),
        queues,
    ]
    return pa.Table.from_arrays(columns, schema=MANIFEST_SCHEMA)


def _texts(attributes: Any) -> list[tuple[str, str]]:
    return [(name, _text(value)) for name, value in attributes.items()] if attributes else []


def _text(value: AttributeValue) -> str:
    """Bytes as base64, numbers in Python's notation."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
