"""Stores: the protocol between the shell and whatever keeps the data, and a store's options. Each command that must be
atomic is one store command.

Strategy: a store takes a batch of concurrent commands and the instant to judge them by. It picks a serial order,
writes, and returns one outcome per command. `commit` makes the batch durable; it blocks, in whatever thread the shell
runs it. A store is what passes the contract suite (tests/support/contract). No higher room knows which store it has,
except `engine.directory` and the commands that work on a directory without a server. Everything outside the batches
reads through the store's `Reader` (reader.py).
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from veilmq.model.commands import AnyCommand, Peek
from veilmq.model.errors import StoreFailed
from veilmq.model.instant import DAY_US, HOUR_US, Instant
from veilmq.model.message_type import TYPE_ATTRIBUTE
from veilmq.model.outcomes import Applied, Outcome
from veilmq.store.directory import DataDirectory
from veilmq.store.files import REAL, Disk
from veilmq.store.reader import Reader, View

__all__ = ["MIB", "Options", "Reader", "RollbackLog", "Store", "View"]

MIB = 1 << 20
_LINE_EVERY_S: Final = 5.0
"""Seconds between two log lines about batches that were rolled back."""
_LATELY_S: Final = 30.0
"""How long `RollbackLog.lately` knows the last one."""


class RollbackLog:
    """Logs rolled-back batches, one line in a while: on a full disk, or without the log, every batch is rolled back.
    Knows why the last one was."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._count, self._due_s = 0, -math.inf
        self._reason, self._last_s = "", -math.inf

    def note(self, error: StoreFailed, now_s: float) -> None:
        """One more batch was rolled back. now_s: on a clock that never goes back."""
        self._count += 1
        self._reason, self._last_s = str(error), now_s
        if now_s >= self._due_s:
            self._due_s = now_s + _LINE_EVERY_S
            count = f"{self._count} batches were" if self._count > 1 else "a batch was"
            self._logger.error("%s rolled back and applied command by command: %s", count, error)
            self._count = 0

    def lately(self, now_s: float) -> str:
        """Why a batch was rolled back in the last seconds; empty: none was."""
        return self._reason if now_s < self._last_s + _LATELY_S else ""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the store; each name carries its unit. The defaults are for production; tests use smaller values."""

    history_us_max: int = 7 * DAY_US
    """Events older than this are trimmed."""
    clock_step_us_max: int = HOUR_US
    """If the first batch after opening is further ahead of the stored mark than this, the expiry clock does not take
    the step until somebody accepts it (store/sqlite/batch)."""
    history_bytes_max: int = 1024 * MIB
    """The oldest events beyond this size are trimmed."""
    rollup_minutes_us_max: int = DAY_US
    """Rollups of minutes are kept this long."""
    rollup_hours_us_max: int = 90 * DAY_US
    """Rollups of hours are kept this long."""
    rollup_bytes_max: int = 512 * MIB
    """The oldest rollups of minutes beyond half of this size are dropped, and those of hours beyond the other half."""
    reserve_bytes: int = 64 * MIB
    """Disk space held in reserve, given up when the disk is full."""
    floor_bytes: int = 256 * MIB
    """Sends and creates are refused below this much free space (at most 2 % of the file system)."""
    queues_per_account_max: int = 100_000
    """Beyond this many, an account creates no queue. Hidden queues count."""
    topics_per_account_max: int = 100_000
    """Beyond this many, an account creates no topic."""
    subscriptions_per_account_max: int = 100_000
    """Beyond this many, an account subscribes to nothing more."""
    checkpoint_bytes: int = 16 * MIB
    """WAL size at which a checkpoint begins."""
    redo_bytes: int = 4 * MIB
    """Size of the redo log; 0: no redo log, every batch is a SQLite transaction."""
    cache_bytes: int = 64 * MIB
    """Size of the writer's SQLite page cache."""
    migrates: bool = True
    """Whether a file of an older schema is migrated, after which its own release cannot open it, or refused."""
    schema: int | None = None
    """Version of the tables that a new file gets, where a log says which; an older file keeps its own until the log
    has a record of newer ones. None: the newest, to which an older file is migrated."""
    error_lines: bool = True
    """Keep the first line of the error with which a worker releases a message; otherwise only the error's type."""
    type_attribute: str = TYPE_ATTRIBUTE
    """The attribute with a message's type, for senders whose protocol has no other place for it."""
    type_pointer: str = ""
    """JSON pointer to the type in a body; "" means that bodies are not searched."""
    disorder: int = 0
    """By how many places messages of a standard queue may be delivered out of order (development)."""
    gives_up: Callable[[str], bool] | None = None
    """Called with what is damaged, a message or a page. True: stop instead of serving the rest, because these files are
    a copy that can be filled anew. None: they are the only copy."""
    disk: Disk = REAL
    """What the files are written to; another one injects faults."""
    synchronous: str = "FULL"
    """Any other value loses acknowledged commands in a power cut; only the test that proves this sets it."""


class Store(Protocol):
    """One batch at a time: apply, commit, apply, commit ... `query` may run beside it, in any thread."""

    @property
    def directory(self) -> DataDirectory:
        """Where the data is."""

    @property
    def reader(self) -> Reader:
        """Reads what was applied and committed."""

    @property
    def mark(self) -> Instant:
        """High-water mark of the lease clock, as last committed."""

    def apply(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        """Run the batch's statements. Nothing is durable, and no outcome may be sent, before `commit` returns.

        Raises StoreUnknown if the store failed and its state cannot be known: only `close` may be called after that.
        """

    def work_ahead(self) -> bool:
        """Between two batches: do part of the next one's work. Returns whether there was any; never raises."""

    @property
    def commit_takes_long(self) -> bool:
        """Whether the next `commit` may wait, or do more than make the batch durable. Then run it in a thread."""

    def begin_commit(self) -> int | None:
        """Begin to make the applied batch durable elsewhere, without waiting. Returns a descriptor that is readable
        when an answer has arrived: then call `commit_confirmed`. None: call `commit`."""

    def commit_confirmed(self) -> bool | None:
        """True: the batch is durable, and `commit` will not wait. False: `commit` must find out. None: no answer has
        arrived yet."""

    def commit(self) -> None:
        """Make the applied batch durable. Blocks. Raises StoreFailed (rolled back; the store can go on) or StoreUnknown
        (as in `apply`)."""

    def apply_each(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        """Apply and commit each command by itself, after a batch failed. Blocks; the outcomes are durable."""

    def query(self, command: Peek, now: Instant) -> Outcome:
        """Answer from committed state without changing anything. Blocks; any thread."""

    def close(self) -> None:
        """Release the files. A batch that was not committed is rolled back."""
