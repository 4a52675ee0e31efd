"""Message move tasks: started, cancelled and listed by commands, carried on by the sweeper.

Strategy: a task is one row, changed in the same batch that moves its messages, so that after a crash it goes on where
it was. A step moves at most `STEP_MESSAGES_MAX` messages of about `STEP_BYTES_MAX` together, however many tasks there
are, and no more for a task than its rate allows. Of each group it takes the first message, so that the order in a group
is kept. A moved message is a new one (id, sent instant, receive count), as on AWS. Messages sent to the source after
the task began, and messages in flight, stay. Source: "Configuring a dead-letter queue redrive" in the SQS Developer
Guide.
"""

from typing import Any, Final

import apsw
import msgspec

from veilmq.model.commands import CancelMove, ListMoves, StartMove
from veilmq.model.errors import MovesFull, ParameterInvalid, QueueMissing
from veilmq.model.events import Kind
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.moves import (
    MOVES_PER_SECOND_MAX,
    TASK_US_MAX,
    TASKS_ACTIVE_MAX,
    TASKS_KEPT,
    MoveFailure,
    MoveInfo,
    MoveStatus,
)
from veilmq.model.outcomes import MoveCancelled, MovesListed, MoveStarted, Outcome
from veilmq.model.settings.queue import QueueKey
from veilmq.store import MIB
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue
from veilmq.store.sqlite.disk.rows import Row, intact, pack_extras
from veilmq.store.sqlite.leases.expiry import expire, return_due
from veilmq.store.sqlite.messages import Place, event_of, find_places, read_stored
from veilmq.store.sqlite.messages.dead_letters import put_elsewhere, quarantine
from veilmq.store.sqlite.messages.groups import update_rows

STEP_MESSAGES_MAX: Final = 64
STEP_BYTES_MAX: Final = MIB
TASK_MESSAGES: Final = 8
"""How many messages a task counts as in a step, beside those that it moves."""
_ENCODER: Final = msgspec.msgpack.Encoder()
_KEY: Final = msgspec.msgpack.Decoder(QueueKey)
_COLUMNS: Final = "number, id, source, destination, rate, status, failure, origin, started, used, last, moved, to_move"
_ACTIVE: Final = (
    f"SELECT {_COLUMNS} FROM move_task INDEXED BY move_task_active WHERE status IN ('running', 'cancelling')"
    " ORDER BY used, number"
)
_ACTIVE_OF: Final = (
    "SELECT count(*) FROM move_task INDEXED BY move_task_active CROSS JOIN queue ON incarnation = source"
    " WHERE status IN ('running', 'cancelling') AND account = ? AND region = ?"
)
_LATEST: Final = f"SELECT {_COLUMNS} FROM move_task WHERE source = ? ORDER BY number DESC LIMIT ?"
_SHOWN: Final = (
    f"SELECT account, region, name, {', '.join(f't.{each}' for each in _COLUMNS.split(', '))} FROM move_task t"
    " JOIN queue ON incarnation = t.source WHERE deleted IS NULL"
)
_IN_LINE: Final = (
    "SELECT sequence FROM message INDEXED BY message_line"
    " WHERE generation = ? AND line = ? AND in_line = 1 AND sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?"
)
_RETURNED: Final = (
    "SELECT sequence FROM lease INDEXED BY lease_returned"
    " WHERE generation = ? AND hidden = 0 AND line = ? AND sequence <= ? ORDER BY sequence LIMIT ?"
)
_OF_GROUPS: Final = (
    "SELECT free FROM message_group INDEXED BY message_group_free"
    " WHERE generation = ? AND free IS NOT NULL AND free <= ? ORDER BY held, since, turn, free LIMIT ?"
)
_RETURNED_OF_TENANTS: Final = (
    "SELECT sequence FROM lease INDEXED BY lease_returned"
    " WHERE generation = ? AND hidden = 0 AND line > ? AND sequence <= ? LIMIT ?"
)
"""Messages that `_OF_GROUPS` misses, because their tenant has a later message that has waited longer."""


class _Task(msgspec.Struct, gc=False):
    """A row of `move_task`."""

    number: int
    id: bytes
    source: int
    destination: bytes | None
    rate: int | None
    status: str
    failure: str | None
    origin: int
    started: int
    used: int
    last: int
    moved: int
    to_move: int

    def info(self, source: QueueKey) -> MoveInfo:
        """The task as protocols show it."""
        destination = None if self.destination is None else _KEY.decode(self.destination)
        failure = None if self.failure is None else MoveFailure(self.failure)
        status, started = MoveStatus(self.status), Instant(self.started)
        return MoveInfo(self.id, source, destination, self.rate, status, started, self.moved, self.to_move, failure)


def start(writer: Writer, command: StartMove, source: LiveQueue) -> Outcome:
    """Start a task: only its row is written."""
    wrong = _cannot_start(writer, source, command)
    if wrong is not None:
        return wrong
    if source.next_due <= writer.now:
        return_due(writer, source, STEP_MESSAGES_MAX)
    rate = command.rate_max or MOVES_PER_SECOND_MAX
    destination = None if command.destination is None else _ENCODER.encode(command.destination)
    status = MoveStatus.RUNNING.value
    writer.write(
        "INSERT INTO move_task (number, id, source, destination, rate, status, origin, started, used, last, moved,"
        " to_move) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
        (
            writer.next_number("move_task"),
            writer.next_id(),
            source.incarnation,
            destination,
            command.rate_max,
            status,
            writer.origin(command.origin),
            writer.now,
            used_at_start(writer.now, rate),
            writer.mark.sequence,
            source.visible,
        ),
    )
    writer.write(
        "DELETE FROM move_task WHERE source = ?1 AND number NOT IN"
        " (SELECT number FROM move_task WHERE source = ?1 ORDER BY number DESC LIMIT ?2)",
        (source.incarnation, TASKS_KEPT),
    )
    return MoveStarted(_latest(writer, source, 1)[0].info(source.key))


def _cannot_start(
    writer: Writer, source: LiveQueue, command: StartMove
) -> ParameterInvalid | QueueMissing | MovesFull | None:
    if command.rate_max is not None and not 1 <= command.rate_max <= MOVES_PER_SECOND_MAX:
        return ParameterInvalid(parameter="rate_max", reason=f"must be from 1 to {MOVES_PER_SECOND_MAX}")
    if source.key not in writer.queues.sources:
        return ParameterInvalid(parameter="source", reason="Source queue must be configured as a Dead Letter Queue.")
    wrong = None if command.destination is None else wrong_destination(writer, source, command.destination, "source")
    if wrong is not None:
        return wrong
    latest = _latest(writer, source, 1)
    if latest and latest[0].status in {MoveStatus.RUNNING, MoveStatus.CANCELLING}:
        reason = (
            "There is already a task running. Only one active task is allowed for a source queue arn at a given time."
        )
        return ParameterInvalid(parameter="source", reason=reason)
    ((active,),) = writer.read(_ACTIVE_OF, (source.key.account, source.key.region))
    return MovesFull(account=source.key.account, limit=TASKS_ACTIVE_MAX) if active >= TASKS_ACTIVE_MAX else None


def wrong_destination(
    writer: Writer, source: LiveQueue, key: QueueKey, named: str
) -> ParameterInvalid | QueueMissing | None:
    """Why messages cannot be moved to that queue; None if they can. named: what the caller calls the source."""
    destination = writer.queues.by_key.get(key)
    if destination is None:
        return QueueMissing(queue=str(key))
    if destination is source:
        return ParameterInvalid(parameter="destination", reason=f"it is the {named} itself")
    if destination.settings.fifo != source.settings.fifo:
        return ParameterInvalid(parameter="destination", reason=f"it is not of the same kind as the {named}")
    return None


def cancel(writer: Writer, command: CancelMove, source: LiveQueue) -> Outcome:
    """Make the sweeper end a task before it moves anything more."""
    for task in _latest(writer, source, TASKS_KEPT):
        if task.id == command.task:
            running = task.status == MoveStatus.RUNNING
            if running:
                task.status = MoveStatus.CANCELLING
                _keep(writer, task)
            return MoveCancelled(task.info(source.key), running)
    return MoveCancelled(None, cancelled=False)


def list_moves(writer: Writer, command: ListMoves, source: LiveQueue) -> Outcome:
    """The latest tasks of a source."""
    return MovesListed([task.info(source.key) for task in _latest(writer, source, command.count_max)])


def _latest(writer: Writer, source: LiveQueue, count_max: int) -> list[_Task]:
    return [_Task(*row) for row in writer.read(_LATEST, (source.incarnation, count_max))]


def every(connection: apsw.Connection, count_max: int) -> list[MoveInfo]:
    """The latest tasks of all existing queues, newest first, for readers."""
    rows: list[tuple[Any, ...]] = connection.execute(f"{_SHOWN} ORDER BY number DESC LIMIT ?", (count_max,)).fetchall()
    return [_Task(*row[3:]).info(QueueKey(*row[:3])) for row in rows]


def find(connection: apsw.Connection, id_: bytes) -> MoveInfo | None:
    """The task of that id, for readers."""
    row: Any = connection.execute(f"{_SHOWN} AND t.id = ?", (id_,)).fetchone()
    return None if row is None else _Task(*row[3:]).info(QueueKey(*row[:3]))


class _Room(msgspec.Struct):
    """What is left of a step, for all tasks together."""

    messages: int = STEP_MESSAGES_MAX
    bytes: int = STEP_BYTES_MAX

    def is_left(self) -> bool:
        """Whether there is room for another message."""
        return self.messages > 0 and self.bytes > 0


def carry_on(writer: Writer) -> bool:
    """Run one bounded step, first for the tasks that moved least lately; returns whether another could follow at
    once."""
    more = False
    room = _Room()
    for row in writer.read(_ACTIVE, ()):
        task = _Task(*row)
        if task.status == MoveStatus.CANCELLING:
            task.status = MoveStatus.CANCELLED
            _keep(writer, task)
        elif writer.now - task.started >= TASK_US_MAX:
            task.status, task.failure = MoveStatus.FAILED, MoveFailure.TOO_LONG.value
            _keep(writer, task)
        elif writer.refusal is None:  # a move writes before it frees: wait for space, as sends do
            more = not room.is_left() or _step(writer, task, writer.queues.by_incarnation[task.source], room) or more
    return more


def used_at_start(now: Instant, rate: int) -> int:
    """Until when the rate is used up as a task starts: the time of one message ago, so that the first may move at
    once."""
    return now - -(-SECOND_US // rate)


def allowance(used: int, rate: int, now: Instant) -> tuple[int, int]:
    """Until when the rate counts as used up, and how many messages it allows since then. Unused rate is lost: a server
    that was down for an hour must not move everything at once."""
    used = max(used, now - SECOND_US - SECOND_US // rate)
    return used, (now - used) * rate // SECOND_US


def _keep(writer: Writer, task: _Task) -> None:
    writer.write(
        "UPDATE move_task SET status = ?, failure = ?, used = ?, moved = ? WHERE number = ?",
        (str(task.status), task.failure, task.used, task.moved, task.number),
    )


def _step(writer: Writer, task: _Task, source: LiveQueue, room: _Room) -> bool:
    """Move what the rate and the step's room allow; returns whether only the room ended it."""
    rate = task.rate or MOVES_PER_SECOND_MAX
    used, allowed = allowance(task.used, rate, writer.now)
    if allowed <= 0:
        return False
    if writer.now >= source.next_due:
        return_due(writer, source, STEP_MESSAGES_MAX)
    moved = 0
    destination = None if task.destination is None else _KEY.decode(task.destination)
    while moved < allowed and room.is_left() and task.failure is None:
        found = _next(writer, source, task.last, min(allowed - moved, room.messages))
        if not found:
            task.status = MoveStatus.COMPLETED
            break
        for place in found:
            room.messages -= 1
            if place.expires(source.settings.retention_us) <= writer.expiry_now:
                expire(writer, source, place)
                continue
            room.bytes -= place.body_bytes
            outcome = move(writer, source, place, destination, task.origin)
            if isinstance(outcome, MoveFailure):
                task.status, task.failure = MoveStatus.FAILED, outcome.value
                break
            moved += outcome
            if room.bytes <= 0:
                break
    task.moved += moved
    task.used = used + moved * SECOND_US // rate
    room.messages -= TASK_MESSAGES
    _keep(writer, task)
    return task.status == MoveStatus.RUNNING and moved < allowed


def _next(writer: Writer, source: LiveQueue, last: int, count: int) -> list[Place]:
    """Up to `count` visible messages, the most urgent first and of those the oldest; of each group only the first."""
    generation = source.generation
    sequences: list[int] = []
    for priority in sorted(range(1, PRIORITY_LINES_MAX + 1) if source.returned else source.ready):
        cursor = source.cursors.get(priority, 0)
        rows: list[Row] = []
        if source.ready.get(priority):
            rows += writer.read(_IN_LINE, (generation, priority, cursor, last, count))
        if source.returned:
            rows += writer.read(_RETURNED, (generation, priority, last, count))
        sequences += sorted(row[0] for row in rows)
        if len(sequences) >= count:
            break
    if source.groups is not None and len(sequences) < count:
        update_rows(writer, source)
        rows = writer.read(_OF_GROUPS, (generation, last, count))
        if not rows and not source.settings.fifo:
            rows = writer.read(_RETURNED_OF_TENANTS, (generation, PRIORITY_LINES_MAX, last, count))
        sequences += [row[0] for row in rows]
    if not sequences:
        return []
    places = find_places(writer, sequences[:count])
    return [places[sequence] for sequence in sequences[:count] if sequence in places]


def move(
    writer: Writer,
    source: LiveQueue,
    place: Place,
    destination: QueueKey | None,
    origin: int,
    detail: dict[str, object] | None = None,
) -> bool | MoveFailure:
    """Move one visible message to the end of its line in its destination, or return why that cannot be; False if its
    body is damaged: then it is quarantined. detail: more of it for the history."""
    (message,) = read_stored(writer, (place.sequence,))
    extras = intact(message, message.failure)
    if extras is None:
        quarantine(writer, source, place)
        return False
    target = extras.dead_letter_source if destination is None else destination
    if target is None:
        return MoveFailure.SOURCE_UNKNOWN
    to = writer.queues.by_key.get(target)
    if to is None:
        return MoveFailure.QUEUE_MISSING
    if to.settings.fifo != source.settings.fifo:
        return MoveFailure.KIND_DIFFERS
    if place.body_bytes + sum(each.size_bytes for each in extras.attributes) > to.settings.message_bytes_max:
        return MoveFailure.MESSAGE_TOO_LARGE
    if message.packed is not None:
        extras = msgspec.structs.replace(
            extras, dead_letter_source=None, dead_first_received=None, dead_receives=0, error_type="", error=""
        )
        message.packed = pack_extras(extras)
    message.id, message.sent = writer.next_id(), writer.now
    moved = put_elsewhere(writer, source, place, to, message) | {"target_message": message.id.hex()} | (detail or {})
    writer.index.add(message.id)
    writer.events.append(event_of(Kind.MOVED, writer.now, source, origin, place, moved))
    return True
