"""Opens an engine and its store, or a follower, on a data directory: the one place of the engine that knows SQLite."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from veilmq.engine import Limits
from veilmq.engine.engine import Engine
from veilmq.model.instant import Instant
from veilmq.store import Options, Store
from veilmq.store.archive import place_at
from veilmq.store.archive.shipping import Archive, goes_to
from veilmq.store.log import Follower, Log
from veilmq.store.sqlite import disk
from veilmq.store.sqlite.disk import SqliteError, schema
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import backup

STATE_FORMAT: Final = schema.VERSION
"""What a record of a log means: the newest state format that this release works with."""
STATE_FORMAT_OLDEST: Final = schema.OLDEST_SERVED
"""The oldest one."""
DatabaseError: TypeAlias = SqliteError
"""What reading or closing a damaged database may raise."""


def open_directory(
    directory: Path,
    limits: Limits | None = None,
    options: Options | None = None,
    at_point: Callable[[str], None] = lambda point: None,
    log: Log | None = None,
    archive: Archive | None = None,
) -> tuple[Engine, Store]:
    """Open both; `at_point` is called at each of the store's `CRASH_POINTS`, and `log` makes the batches durable. The
    caller starts and closes the archive.

    Raises DirectoryHeld, DirectoryUnsafe, DatabaseUnusable, SchemaRefused (SchemaOlder: `Options.migrates`), NotOurs,
    SqliteTooOld, OSError, DatabaseError; with a log NotAppended, AppendUnknown.
    """
    store = SqliteStore(directory, options, at_point, log, archive)
    return Engine(limits), store


def archive_at(url: str, directory: Path, *, keep_us: int, every_s: float, wall: Instant) -> Archive:
    """What ships a data directory to a URL. Raises PlaceUnusable, OSError."""
    place = place_at(url, is_new=not goes_to(directory, url))  # else its disk may be away for now: changes wait
    return Archive(place, url, directory, backup.copy_exactly, keep_us=keep_us, every_s=every_s, wall=wall)


def open_follower(directory: Path, options: Options | None = None) -> Follower:
    """Open a directory that follows a log. Raises as `open_directory`."""
    return SqliteFollower(directory, options)


copy_checked: Final = backup.copy_checked
"""Copies a database to a file that a follower can open, and checks it."""
check_vacant: Final = backup.check_vacant
"""Raises DestinationTaken if anything but an empty directory is there."""
made_beside: Final = backup.made_beside
"""A new directory that takes its name when it is complete."""
digest_of: Final = backup.Reading
"""One state of a database, and its digest."""
is_full: Final = disk.is_full
"""Whether an error of a directory comes of a full disk."""
checkpoint: Final = backup.checkpoint
"""Brings what a follower has left in the WAL into the database."""
set_position: Final = backup.set_position
"""Lets a database follow a log, or none."""
renew: Final = backup.renew
"""Gives a database that nobody has open its own secret, as a backup has."""
