"""The idempotency guard: work that is done is not done again.

Strategy: a record for each key says "in progress" or "done, with this result". Pure functions over the stored record
make every decision (`judge`, `finished`, `prolonged`, `abandoned`); the new record is written only if the one that the
decision was made on is still there (veilmq.client.records). A record in progress can be taken over by a later delivery
of the same message (the queue has fenced off the earlier one), and by anybody after its `until`; everybody else waits.
Each takeover raises the fence, and only the holder of the newest fence may finish. If the guard is `Prolonging`, a
handler that extends its lease extends `until` too.

In a directory: for the processes of one machine. In a table: claims end by the database's clock, so the machines'
clocks need not agree; if the table is in the database that the handler writes to, both survive the same crashes.

Source: document 003, 3 ("idempotent and resume-able").
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard, runtime_checkable

import msgspec
from msgspec.structs import replace

from veilmq.client.records import FileRecords, Records, Seen
from veilmq.client.records.tables import Connect, TableRecords
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import Closing
from veilmq.model.errors import Overloaded

_TRIES: Final = 20


class Claim(msgspec.Struct, frozen=True):
    """Who wants to do the work of a key, and until when."""

    owner: str
    """Queue and message id."""
    attempt: int
    """Receive count of the message."""
    now: float
    """Unix seconds."""
    until: float
    """Unix seconds: from then on the owner cannot hold its message."""


class Record(msgspec.Struct, frozen=True):
    """What is stored for a key."""

    fence: int
    owner: str
    attempt: int
    until: float
    done: bool = False
    result: Any = None
    """Any JSON value."""


class Begun(msgspec.Struct, frozen=True):
    """The claim was granted: do the work, then call `finish` or `abandon` with this fence."""

    fence: int


class Done(msgspec.Struct, frozen=True):
    """The work is done already."""

    result: Any


class Busy(msgspec.Struct, frozen=True):
    """Somebody else is doing the work."""

    until: float
    """Unix seconds: by then the work is done or may be taken over."""


Answer = Begun | Done | Busy


class Superseded(Exception):
    """A newer claim took over the key: this result was not stored."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"{self.key} was taken over by a newer delivery"


class Guard(Protocol):
    """Records by key. Safe for any thread and process. Implementations raise their storage's errors."""

    def begin(self, key: str, claim: Claim) -> Answer:
        """Claim the key. The check and the claim are one atomic step."""

    def finish(self, key: str, fence: int, result: Any) -> None:
        """Store the result durably. Raises Superseded, and TypeError if JSON cannot represent the result."""

    def abandon(self, key: str, fence: int) -> None:
        """The work was not done: the next delivery may begin. Does nothing if the fence is not the newest."""


@runtime_checkable
class Prolonging(Protocol):
    """An optional ability of a guard. Without it a claim ends when the lease ended at the start of the work."""

    def prolong(self, key: str, fence: int, now: float, until: float) -> None:
        """The owner holds its message at least until `until`; both times as in `Claim`. Raises Superseded."""


def judge(record: Record | None, claim: Claim) -> Record | Done | Busy:
    """The answer to a claim: the record to write, or why the claim is refused."""
    if record is None:
        return Record(fence=1, owner=claim.owner, attempt=claim.attempt, until=claim.until)
    if record.done:
        return Done(record.result)
    later = record.owner == claim.owner and record.attempt < claim.attempt
    if not later and claim.now < record.until:
        return Busy(record.until)
    return Record(fence=record.fence + 1, owner=claim.owner, attempt=claim.attempt, until=claim.until)


def _is_held(record: Record | None, fence: int) -> TypeGuard[Record]:
    """Whether the work is in progress under this fence."""
    return record is not None and record.fence == fence and not record.done


def finished(record: Record | None, key: str, fence: int, result: Any) -> Record:
    """The record of finished work. Raises Superseded."""
    if not _is_held(record, fence):
        raise Superseded(key)
    return replace(record, done=True, result=result)


def prolonged(record: Record | None, key: str, fence: int, until: float) -> Record | None:
    """The record of a claim that lasts until `until`; None: there is nothing to write. Raises Superseded."""
    if not _is_held(record, fence):
        raise Superseded(key)
    return replace(record, until=until) if until > record.until else None


def abandoned(record: Record | None, fence: int) -> Record | None:
    """The record of a key that the next delivery may begin at once; None: there is nothing to write."""
    if not _is_held(record, fence):
        return None
    return replace(record, owner="", until=0.0)


class RecordGuard:
    """A guard over any records. All calls raise the errors of the records, and Overloaded if too many want one key at
    the same time.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def begin(self, key: str, claim: Claim) -> Answer:
        answer: Answer | Record

        def decide(record: Record | None, now: float | None) -> Record | None:
            nonlocal answer
            ahead = _ahead(now, claim.now)
            answer = judge(record, replace(claim, now=claim.now + ahead, until=claim.until + ahead))
            if isinstance(answer, Busy):
                answer = Busy(answer.until - ahead)
            return answer if isinstance(answer, Record) else None

        self._change(key, decide)
        return Begun(answer.fence) if isinstance(answer, Record) else answer

    def finish(self, key: str, fence: int, result: Any) -> None:
        self._change(key, lambda record, _: finished(record, key, fence, result))

    def prolong(self, key: str, fence: int, now: float, until: float) -> None:
        self._change(key, lambda record, there: prolonged(record, key, fence, until + _ahead(there, now)))

    def abandon(self, key: str, fence: int) -> None:
        self._change(key, lambda record, _: abandoned(record, fence))

    def _change(self, key: str, decide: Callable[[Record | None, float | None], Record | None]) -> None:
        """Write what `decide` returns for the record and the storage's time, unless that is None; decide again if the
        record changed meanwhile."""
        for _ in range(_TRIES):
            seen: Seen = self._records.look(key)
            after = decide(None if seen.content is None else _decoded(seen.content), seen.now)
            if after is None or self._records.replace(key, seen.content, msgspec.json.encode(after), after.fence):
                return
        raise Overloaded(limit=_TRIES)


class DirectoryGuard(RecordGuard):
    """A guard in a directory. All calls raise OSError. Done records stay until `sweep`."""

    def __init__(self, directory: Path | str) -> None:
        self._files = FileRecords(directory)
        self.directory = self._files.directory
        super().__init__(self._files)

    def sweep(self, before: float) -> int:
        """Delete records that are done or overdue and were last written before `before` (Unix seconds). Returns how
        many. Raises ParameterInvalid."""
        checks.remaining(before, "before")

        def is_over(content: bytes) -> bool:
            record = _decoded(content)
            return record.done or record.until < before

        return self._files.prune(is_over, before)


class TableGuard(RecordGuard, Closing):
    """A guard in a table. All calls raise the driver's errors, and Overloaded if too many want one key at the same
    time.

    connect: makes a new connection; each thread keeps one and reconnects when it is lost. table: created if missing.
    paramstyle: the driver's, if the driver does not name it. Raises ParameterInvalid, the driver's errors. Close it
    after its workers: after that all calls raise ParameterInvalid.
    """

    def __init__(self, connect: Connect, table: str = "veilmq_guard", paramstyle: str | None = None) -> None:
        self._table = TableRecords(connect, table, paramstyle, owner="guard")
        super().__init__(self._table)

    def close(self) -> None:
        """Close the connections of all threads. If the driver binds a connection to its thread (sqlite3, unless
        check_same_thread=False), that one is closed when the thread ends. Idempotent."""
        self._table.close()


def _ahead(there: float | None, now: float) -> float:
    """Seconds that the storage's clock is ahead of ours, rounded to milliseconds: no more is needed."""
    return 0.0 if there is None else round(there - now, 3)


def _decoded(content: bytes) -> Record:
    return msgspec.json.decode(content, type=Record)
