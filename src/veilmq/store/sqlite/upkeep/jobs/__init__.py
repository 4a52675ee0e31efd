"""Jobs: started and cancelled by commands, carried on by the sweeper.

Strategy: a job is one row, changed in the same batch that acts, so that after a crash it goes on where it was. It walks
through the messages in an order that their lives do not change, and keeps the last one that it looked at: so it acts
on each at most once. There are three walks. `_LINES` goes through the lines of the queue, by line and sequence; a
message in its line stays there while it is received and given back. `_BESIDE` goes through the messages that wait
beside their line (delayed once, or dead-lettered), which the index `lease_returned` lists by line. `_LEASES` goes
through all leases of the store by sequence, for a release. A step looks at `LOOKED_MAX` messages and acts on `ACTS_MAX`
of about `ACTS_BYTES_MAX` together, however many jobs there are.

What was sent after the start stays, and so does what is in flight, unless the act is to release it. On a FIFO queue a
message that matches but cannot be moved keeps all of its group that is behind it: a group never overtakes itself.
"""

from typing import Any, Final, NamedTuple

import apsw
import msgspec

from veilmq.model.commands import CancelJob, PurgeQueue, StartJob
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.model.events import Kind
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.messages import id_text
from veilmq.model.moves import (
    JOB_RATE_DEFAULT,
    JOB_RATE_MAX,
    JOBS_ACTIVE_MAX,
    JOBS_KEPT,
    TASK_US_MAX,
    Act,
    Filter,
    JobInfo,
    MoveFailure,
    MoveStatus,
)
from veilmq.model.outcomes import JobCancelled, JobStarted, Outcome, Purged
from veilmq.model.settings.queue import QueueKey
from veilmq.store import MIB
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue
from veilmq.store.sqlite.disk.rows import Row
from veilmq.store.sqlite.leases.expiry import expire, return_due
from veilmq.store.sqlite.leases.handles import release_all
from veilmq.store.sqlite.messages import Place, event_of, find_places, numbers
from veilmq.store.sqlite.messages.dead_letters import remove
from veilmq.store.sqlite.settings import queue_commands
from veilmq.store.sqlite.upkeep.jobs.move_tasks import allowance, move, used_at_start, wrong_destination

LOOKED_MAX: Final = 256
LEASES_MAX: Final = 4 * LOOKED_MAX
"""Looking at this many leases, also of other queues, counts as looking at `LOOKED_MAX` messages."""
ACTS_MAX: Final = 64
ACTS_BYTES_MAX: Final = MIB
"""Bodies that are moved, deleted or searched."""
_CHUNK: Final = 64
_LINES, _BESIDE, _LEASES = 0, 1, 2
_END_OF_LINE: Final = (1 << 63) - 1
_MOVES: Final = (Act.MOVE, Act.REDRIVE)
_UNDER_WAY: Final = "('running', 'cancelling')"
_ENCODER: Final = msgspec.msgpack.Encoder()
_KEY: Final = msgspec.msgpack.Decoder(QueueKey)
_FILTER: Final = msgspec.msgpack.Decoder(Filter)
_COLUMNS: Final = (
    "number, id, act, source, destination, filter, rate, dry_run, status, failure, origin, started, ended, used, last,"
    " walk, line, sequence, total, seen, matched, done, failed"
)
_ACTIVE: Final = f"SELECT {_COLUMNS} FROM job INDEXED BY job_active WHERE status IN {_UNDER_WAY} ORDER BY used, number"
_ACTIVE_COUNT: Final = f"SELECT count(*) FROM job INDEXED BY job_active WHERE status IN {_UNDER_WAY}"
_ACTIVE_OF: Final = f"SELECT id FROM job INDEXED BY job_active WHERE source = ? AND status IN {_UNDER_WAY}"
_INSERT: Final = f"INSERT INTO job ({_COLUMNS}) VALUES ({', '.join('?' * (_COLUMNS.count(',') + 1))})"
_KEEP: Final = (
    "UPDATE job SET status = ?, failure = ?, ended = ?, used = ?, walk = ?, line = ?, sequence = ?, seen = ?,"
    " matched = ?, done = ?, failed = ? WHERE number = ?"
)
_DROP: Final = (
    f"DELETE FROM job WHERE status NOT IN {_UNDER_WAY} AND number <= (SELECT number FROM job ORDER BY number DESC"
    " LIMIT 1 OFFSET ?)"
)
_SHOWN: Final = (
    "SELECT q.account, q.region, q.name, ifnull(o.principal, ''), "
    + ", ".join(f"j.{each}" for each in _COLUMNS.split(", "))
    + " FROM job j JOIN queue q ON q.incarnation = j.source LEFT JOIN origin o ON o.id = j.origin"
)
_IN_LINE: Final = (
    "SELECT sequence FROM message INDEXED BY message_line"
    " WHERE generation = ? AND line = ? AND in_line = 1 AND sequence > ? ORDER BY sequence LIMIT ?"
)
_NEXT_LINE: Final = (
    "SELECT min(line) FROM message INDEXED BY message_line WHERE generation = ? AND in_line = 1 AND line > ?"
    " AND line <= ?"  # a group that began later has a greater number
)
_RETURNED: Final = (
    "SELECT sequence FROM lease INDEXED BY lease_returned"
    " WHERE generation = ? AND hidden = 0 AND line = ? AND sequence > ? ORDER BY sequence LIMIT ?"
)
_NEXT_RETURNED: Final = (
    "SELECT min(line) FROM lease INDEXED BY lease_returned WHERE generation = ? AND hidden = 0 AND line > ?"
    " AND line <= ?"
)
_LEASED: Final = (
    "SELECT sequence, generation = ? AND hidden = 1 AND attempt > 0 AND granted <= ? FROM lease"
    " WHERE sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?"
)
_CONTAINING: Final = (
    "SELECT m.sequence FROM carray(?) c CROSS JOIN message m ON m.sequence = c.value WHERE instr(m.body, ?)"
)


class _Job(msgspec.Struct, gc=False):
    """A row of `job`."""

    number: int
    id: bytes
    act: Act
    source: int
    destination: bytes | None
    filter: bytes
    rate: int | None
    dry_run: int
    status: str
    failure: str | None
    origin: int
    started: int
    ended: int | None
    used: int
    last: int
    walk: int
    line: int
    sequence: int
    total: int
    seen: int = 0
    matched: int = 0
    done: int = 0
    failed: int = 0

    def info(self, source: QueueKey, principal: str) -> JobInfo:
        """The job as it is shown."""
        destination = None if self.destination is None else _KEY.decode(self.destination)
        failure = None if self.failure is None else MoveFailure(self.failure)
        ended = None if self.ended is None else Instant(self.ended)
        return JobInfo(
            self.id, Act(self.act), source, destination, _FILTER.decode(self.filter), self.rate, bool(self.dry_run),
            MoveStatus(self.status), failure, principal, Instant(self.started), ended,
            self.total, self.seen, self.matched, self.done, self.failed,
        )  # fmt: skip

    def end(self, now: Instant, status: MoveStatus, failure: MoveFailure | None = None) -> None:
        """The job has ended."""
        self.status, self.ended = status.value, now
        self.fail(failure)

    def fail(self, failure: MoveFailure | None) -> None:
        """Note the first reason."""
        if failure is not None and self.failure is None:
            self.failure = failure.value


def start(writer: Writer, command: StartJob, source: LiveQueue) -> Outcome:
    """Start a job: only its row is written, unless it is a purge."""
    wrong = _cannot_start(writer, source, command)
    if wrong is not None:
        return wrong
    rate = command.rate_max or JOB_RATE_DEFAULT
    job = _Job(
        writer.next_number("job"),
        writer.next_id(),
        command.act,
        source.incarnation,
        None if command.destination is None else _ENCODER.encode(command.destination),
        _ENCODER.encode(command.filter),
        command.rate_max,
        command.dry_run,
        MoveStatus.RUNNING.value,
        None,
        writer.origin(command.origin),
        writer.now,
        None,
        used_at_start(writer.now, rate),
        writer.mark.sequence,
        _LEASES if command.act is Act.RELEASE else _LINES,
        0,
        0,
        source.in_flight + (0 if command.act is Act.RELEASE else source.visible + source.delayed),
    )
    if command.act is Act.PURGE:
        _purge(writer, command, job, source)
    writer.write(_INSERT, _values(job))
    writer.write(_DROP, (JOBS_KEPT,))
    return JobStarted(job.info(source.key, command.origin.principal))


def _values(job: _Job) -> Row:
    values = msgspec.structs.astuple(job)
    return (*values[:2], str(job.act), *values[3:])


def _purge(writer: Writer, command: StartJob, job: _Job, source: LiveQueue) -> None:
    """A purge costs the same for one message and for a million, so it is done at once."""
    job.seen = job.matched = job.total
    if not command.dry_run:
        purged = queue_commands.purge(writer, PurgeQueue(queue=command.queue, origin=command.origin), source)
        assert isinstance(purged, Purged)
        job.done = purged.count
    job.end(writer.now, MoveStatus.COMPLETED)


def _cannot_start(writer: Writer, source: LiveQueue, command: StartJob) -> VeilError | None:
    wrong = _wrong_destination(writer, source, command) or _wrong_together(writer, source, command)
    if wrong is not None:
        return wrong
    running = writer.read_one(_ACTIVE_OF, (source.incarnation,))
    if running is not None:
        reason = f"job {id_text(running[0])} is running on this queue: wait until it ends, or cancel it"
        return ParameterInvalid(parameter="queue", reason=reason)
    ((active,),) = writer.read(_ACTIVE_COUNT, ())
    if active >= JOBS_ACTIVE_MAX:
        return ParameterInvalid(parameter="queue", reason=f"{active} jobs are running: wait until one ends")
    return None


def _wrong_destination(writer: Writer, source: LiveQueue, command: StartJob) -> VeilError | None:
    if command.destination is None:
        return ParameterInvalid(parameter="destination", reason="a move needs one") if command.act is Act.MOVE else None
    if command.act not in _MOVES:
        return ParameterInvalid(parameter="destination", reason=f"{command.act} has none")
    return wrong_destination(writer, source, command.destination, "queue")


def _wrong_together(writer: Writer, source: LiveQueue, command: StartJob) -> ParameterInvalid | None:
    if command.act is Act.PURGE and not command.filter.is_empty:
        reason = "a purge deletes all messages: to delete those that a filter matches, start a job with act `delete`"
        return ParameterInvalid(parameter="filter", reason=reason)
    if command.act is Act.PURGE and command.rate_max is not None:
        return ParameterInvalid(parameter="rate", reason="a purge is done at once")
    if command.act is Act.REDRIVE and source.key not in writer.queues.sources:
        return ParameterInvalid(parameter="queue", reason="it is nobody's dead-letter queue: use act `move`")
    if command.rate_max is not None and not 1 <= command.rate_max <= JOB_RATE_MAX:
        return ParameterInvalid(parameter="rate", reason=f"must be from 1 to {JOB_RATE_MAX}")
    return None


def cancel(writer: Writer, command: CancelJob) -> Outcome:
    """Make the sweeper end a job before it does anything more."""
    found = writer.read_one(f"{_SHOWN} WHERE j.id = ?", (command.job,))
    if found is None:
        return JobCancelled(None, cancelled=False)
    job = _Job(*found[4:])
    running = job.status == MoveStatus.RUNNING
    if running:
        job.status = MoveStatus.CANCELLING.value
        _keep(writer, job)
    return JobCancelled(job.info(QueueKey(*found[:3]), found[3]), running)


def every(connection: apsw.Connection) -> list[JobInfo]:
    """All jobs, newest first, for readers."""
    rows: list[Row] = connection.execute(f"{_SHOWN} ORDER BY j.number DESC").fetchall()
    return [_Job(*row[4:]).info(QueueKey(*row[:3]), row[3]) for row in rows]


def find(connection: apsw.Connection, id_: bytes) -> JobInfo | None:
    """The job of that id, for readers."""
    row: Any = connection.execute(f"{_SHOWN} WHERE j.id = ?", (id_,)).fetchone()
    return None if row is None else _Job(*row[4:]).info(QueueKey(*row[:3]), row[3])


def _keep(writer: Writer, job: _Job) -> None:
    values = (job.status, job.failure, job.ended, job.used, job.walk, job.line, job.sequence)
    writer.write(_KEEP, (*values, job.seen, job.matched, job.done, job.failed, job.number))


class _Room(msgspec.Struct):
    """What is left of a step, for all jobs together."""

    looks: int = LOOKED_MAX
    acts: int = ACTS_MAX
    bytes: int = ACTS_BYTES_MAX

    def is_left(self) -> bool:
        """Whether there is room for another message."""
        return self.looks > 0 and self.acts > 0 and self.bytes > 0


def carry_on(writer: Writer) -> bool:
    """Run one bounded step, first for the jobs that did least lately; returns whether another could follow at once."""
    more = False
    room = _Room()
    for row in writer.read(_ACTIVE, ()):
        job = _Job(*row)
        if job.status == MoveStatus.CANCELLING:
            job.end(writer.now, MoveStatus.CANCELLED)
            _keep(writer, job)
        elif writer.now - job.started >= TASK_US_MAX:
            job.end(writer.now, MoveStatus.FAILED, MoveFailure.TOO_LONG)
            _keep(writer, job)
        elif writer.refusal is None or job.act not in _MOVES:  # a move writes before it frees: wait for space
            more = not room.is_left() or _Step(writer, job, room).run() or more
    return more


class _Chunk(NamedTuple):
    """Some messages of one line, in the order of the walk."""

    places: list[Place]
    end: int
    """Where the walk goes on once all of them were looked at."""


class _Step:
    """One step of one job."""

    def __init__(self, writer: Writer, job: _Job, room: _Room) -> None:
        self._writer, self._job, self._room = writer, job, room
        self._queue = writer.queues.by_incarnation[job.source]
        self._filter = _FILTER.decode(job.filter)
        self._destination = None if job.destination is None else _KEY.decode(job.destination)
        self._detail: dict[str, object] = {"job": id_text(job.id)}

    def run(self) -> bool:
        """Look and act as far as rate and room allow; returns whether only the room ended it."""
        writer, job, room, queue = self._writer, self._job, self._room, self._queue
        rate = job.rate or JOB_RATE_DEFAULT
        used, allowed = allowance(job.used, rate, writer.now)
        if job.dry_run:
            allowed = ACTS_MAX
        if allowed <= 0:
            return False
        if writer.now >= queue.next_due and not job.dry_run and job.walk != _LEASES:
            return_due(writer, queue, LOOKED_MAX)
            if queue.next_due <= writer.now:
                return True
        left = allowed
        while left > 0 and room.is_left() and job.status == MoveStatus.RUNNING:
            chunk = self._next(min(_CHUNK, room.looks))
            if chunk is None:
                job.end(writer.now, MoveStatus.COMPLETED)
                break
            left -= self._take(self._cut(chunk), min(left, room.acts))
        job.used = used + (allowed - left) * SECOND_US // rate
        _keep(writer, job)
        return job.status == MoveStatus.RUNNING and left > 0

    def _next(self, count: int) -> _Chunk | None:
        """The next messages of the walk; None at its end."""
        job, queue, writer = self._job, self._queue, self._writer
        if job.walk == _LEASES:
            values = (queue.generation, job.started, job.sequence, job.last, LEASES_MAX)
            rows = writer.read(_LEASED, values)
            if not rows:
                return None
            held = [sequence for sequence, is_held in rows if is_held]
            self._room.looks -= len(rows) // 4
            return self._chunk(held[:count], held[count - 1] if len(held) > count else rows[-1][0])
        while True:
            rows_of, next_of = (_IN_LINE, _NEXT_LINE) if job.walk == _LINES else (_RETURNED, _NEXT_RETURNED)
            rows = writer.read(rows_of, (queue.generation, job.line, job.sequence, count)) if job.line else []
            sequences = [row[0] for row in rows if row[0] <= job.last]
            if sequences:
                return self._chunk(sequences, sequences[-1])
            ((line,),) = writer.read(next_of, (queue.generation, job.line, job.last + PRIORITY_LINES_MAX))
            job.sequence = 0
            if line is not None:
                job.line = line
            elif job.walk == _LINES:
                job.walk, job.line = _BESIDE, 0
            else:
                return None

    def _chunk(self, sequences: list[int], end: int) -> _Chunk:
        places = find_places(self._writer, sequences) if sequences else {}
        return _Chunk([places[sequence] for sequence in sequences if sequence in places], end)

    def _cut(self, chunk: _Chunk) -> _Chunk:
        """The first messages of the chunk that fit into the bytes left for this step, but at least one."""
        bytes_left = self._room.bytes
        for at, place in enumerate(chunk.places[:-1], 1):
            bytes_left -= place.body_bytes
            if bytes_left <= 0:
                return _Chunk(chunk.places[:at], place.sequence)
        return chunk

    def _take(self, chunk: _Chunk, acts_max: int) -> int:
        """Look at the messages, and act on up to `acts_max` of them; returns on how many."""
        job, room = self._job, self._room
        wanted, free, failed_before = self._wanted(chunk.places), list[Place](), job.failed
        end = chunk.end
        for place in chunk.places:
            room.looks -= 1
            job.sequence = place.sequence
            if job.walk == _BESIDE and place.in_line:
                continue  # it was looked at in its line
            job.seen += 1
            if self._is_expired(place) or place.sequence not in wanted:
                continue
            room.bytes -= place.body_bytes
            is_done = self._is_free(place) and self._do(place, free)
            if not is_done and job.act in _MOVES and self._queue.settings.fifo:
                end = _END_OF_LINE
                break
            if len(free) + job.failed - failed_before >= acts_max or job.status != MoveStatus.RUNNING:
                end = place.sequence
                break
        job.sequence = end
        self._act_on(free)
        return len(free) + job.failed - failed_before

    def _wanted(self, places: list[Place]) -> set[int]:
        """Those that the filter matches."""
        wanted, since = self._filter, self._job.started
        found = {
            each.sequence for each in places if wanted.admits(each.type, each.group, each.sent, each.attempt, since)
        }
        if wanted.text is None or not found:
            return found
        rows = self._writer.read(_CONTAINING, (numbers(sorted(found)), wanted.text.encode()))
        return {sequence for (sequence,) in rows}

    def _is_expired(self, place: Place) -> bool:
        """Whether the message is over; then it goes, as at any use."""
        writer, queue = self._writer, self._queue
        if place.expires(queue.settings.retention_us) > writer.expiry_now:
            return False
        if not self._job.dry_run:
            expire(writer, queue, place)
        return True

    def _is_free(self, place: Place) -> bool:
        """Whether the act may be done to the message now: an ended lease holds nothing."""
        is_held = bool(place.hidden) and place.due > self._writer.now
        return is_held and place.attempt > 0 if self._job.act == Act.RELEASE else not is_held

    def _do(self, place: Place, free: list[Place]) -> bool:
        """Move the message, or add it to those that are acted on together; returns whether that can be."""
        job = self._job
        job.matched += 1
        if job.dry_run:
            return True
        if job.act not in _MOVES:
            free.append(place)
            return True
        moved = move(self._writer, self._queue, place, self._destination, job.origin, self._detail)
        if moved is True:
            free.append(place)
            return True
        job.failed += 1
        if moved is not False:
            job.fail(moved)
            if self._destination is not None and moved is not MoveFailure.MESSAGE_TOO_LARGE:
                job.end(self._writer.now, MoveStatus.FAILED)
        return False

    def _act_on(self, places: list[Place]) -> None:
        writer, job, queue = self._writer, self._job, self._queue
        job.done += len(places)
        self._room.acts -= len(places)
        if not places or job.act in _MOVES:
            return
        if job.act == Act.RELEASE:
            release_all(writer, queue, places, job.origin, self._detail)
            return
        remove(writer, queue, *places)
        for place in places:
            writer.events.append(event_of(Kind.DELETED, writer.now, queue, job.origin, place, dict(self._detail)))
