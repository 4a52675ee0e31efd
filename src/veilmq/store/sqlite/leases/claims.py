"""Receives: lease the first visible messages, for how long, and in which order.

Strategy: the candidates are the head of each line after its cursor, the unflushed messages, and the returned ones.
Among those with the lowest priority number, the one that has been visible longest goes first (`StoredMessage.turn`). A
message that was given back therefore waits behind those that were waiting already, and no message can keep others
waiting for ever. A candidate that has expired, is damaged or is due for the dead-letter queue is removed during the
claim, and the next candidate takes its place. The number of such removals per claim is bounded; the next claim handles
the rest.

How long a lease lasts (`Terms`) is set by the receiver, the sender's hint, the queue's plan, or the queue's setting.

For development, neighbouring messages of standard queues can be reordered on purpose (`disordered`), as clients see it
at queues spread over many servers: sometimes a message further back in the line is claimed first. Those before it
become returned messages that nobody received, like messages whose delay has ended, and go out next. So no message is
more than the window out of its place, and counts, histories and restarts need no special case. The random choice
follows from the sequences. Groups keep their order. Source: document 002, the run 1 3 2 5 4 7 6 of a plain queue.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Any, Final, TypeVar
from zlib import crc32

from veilmq.model.commands import SERVER, LeaseSource, Receive
from veilmq.model.errors import InFlightFull
from veilmq.model.events import Event, Kind
from veilmq.model.instant import Instant
from veilmq.model.messages import Delivery, Extras
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.settings.queue import RedrivePolicy
from veilmq.model.settings.topic import is_hidden
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue
from veilmq.store.sqlite.disk.rows import (
    INSERT_LEASE,
    LEASE_COLUMNS,
    MESSAGE_COLUMNS,
    LeaseRow,
    Unflushed,
    intact,
)
from veilmq.store.sqlite.leases.expiry import expire, look_for_due
from veilmq.store.sqlite.messages import MANY, STORED_COLUMNS, StoredMessage, Turn, flush, numbers
from veilmq.store.sqlite.messages.dead_letters import dead_letter, quarantine

DETOURS_MAX: Final = 64
"""How many candidates one receive may expire, quarantine or dead-letter."""
DETOURS_OF_BATCH: Final = 256
"""The same limit for all receives of a batch together; beyond it, `DETOURS_MIN` each."""
DETOURS_MIN: Final = 4
DETOUR_BYTES: Final = 32 * 1024
"""Each body of this size counts as one more candidate: moving or dropping it takes as long."""
RETURNS_MAX: Final = 256
"""How many ended leases one receive processes; the sweeper does the rest."""
_RECEIVED: Final = int(Kind.RECEIVED)

_READY: Final = (
    f"SELECT {MESSAGE_COLUMNS} FROM message m"
    " WHERE m.generation = ? AND m.line = ? AND m.in_line = 1 AND m.sequence > ? ORDER BY m.sequence LIMIT ?"
)
_RETURNED: Final = (
    f"SELECT {STORED_COLUMNS} FROM lease l INDEXED BY lease_turn JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND l.hidden = 0 ORDER BY l.line, l.due, l.turn, l.sequence LIMIT ?"
)
_LEASE_MANY: Final = (
    f"INSERT INTO lease ({LEASE_COLUMNS}) SELECT value, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12 FROM carray(?1)"
)
_GRANT_AGAIN: Final = (
    "UPDATE lease SET hidden = 1, due = ?2, attempt = attempt + 1, granted = ?3, first = ifnull(first, ?3),"
    " origin = ?4, turn = ?5, ending = 0 WHERE sequence IN (SELECT value FROM carray(?1))"
)


def receive(writer: Writer, queue: LiveQueue, command: Receive) -> Outcome:
    """Lease up to `count_max` messages; empty if none is visible."""
    if writer.now >= queue.next_due:
        look_for_due(writer, queue, RETURNS_MAX)
    wait_us = queue.settings.wait_us if command.wait_us is None else command.wait_us
    wanted = room(queue, command)
    if wanted <= 0:
        return capped(queue, wait_us)
    if not queue.visible:
        return Received([], wait_us)
    if queue.unflushed and (
        writer.expiry_now >= queue.next_expiry or writer.options.disorder or writer.memtable.unchecked
    ):
        flush(writer)
    line = _sole_line(queue)
    if line is not None:
        (unflushed,) = lease_unflushed(writer, queue, line, ((command, wanted),))
        _return_at_once(writer, queue)
        return Received(unflushed, wait_us, queue.settings.xml_body, wanted < command.count_max)
    granting = Granting(writer, queue, command)
    granted = granting.granted
    while len(granted) < wanted and queue.visible and granting.detours_left > 0 and writer.bytes_left > 0:
        if not _take(granting, writer, queue, command, wanted - len(granted)):
            break
    if queue.next_due <= writer.now:
        flush(writer, granting.given_back)
    if granting.detours_left <= 0 and queue.visible:
        queue.woken += 1
    return Received(granted, wait_us, queue.settings.xml_body, wanted < command.count_max)


def shared_line(writer: Writer, queue: LiveQueue) -> "deque[Unflushed] | None":
    """The line of unflushed messages that serves several receives of a batch, if nothing else is to be looked at."""
    if writer.now >= queue.next_due or writer.expiry_now >= queue.next_expiry or not queue.visible:
        return None
    return None if writer.options.disorder or writer.memtable.unchecked else _sole_line(queue)


def receive_alike(
    writer: Writer, queue: LiveQueue, line: deque[Unflushed], commands: Sequence[Receive]
) -> list[Outcome]:
    """The outcomes of as many of the first receives as a `shared_line` serves. All are of one client, and below their
    cap. For each it does what `receive` does."""
    leased = lease_unflushed(writer, queue, line, [(command, command.count_max) for command in commands])
    _return_at_once(writer, queue)
    settings = queue.settings
    return [
        Received(messages, settings.wait_us if command.wait_us is None else command.wait_us, settings.xml_body)
        for command, messages in zip(commands, leased, strict=False)
    ]


def _return_at_once(writer: Writer, queue: LiveQueue) -> None:
    """Unflushed messages that were leased for no time come back like any others."""
    if queue.next_due <= writer.now:
        flush(writer, writer.next_offset - 1)


def room(queue: LiveQueue, command: Receive) -> int:
    """How many messages the receive may lease under its cap on messages in flight; zero or less: none.

    A receive that the cap holds up is woken when a message in flight ends: see `LiveQueue.cap`.
    """
    cap = command.in_flight_max
    if cap is None or cap - queue.in_flight >= command.count_max:
        return command.count_max
    queue.cap = cap
    return cap - queue.in_flight


def capped(queue: LiveQueue, wait_us: int) -> Received | InFlightFull:
    """The answer at the cap on messages in flight: an error, but not for a long poll ("If you use long polling, Amazon
    SQS returns no error messages": Developer Guide, "Amazon SQS standard queue quotas")."""
    return Received([], wait_us, capped=True) if wait_us else InFlightFull(queue=str(queue.key), limit=queue.cap)


def _sole_line(queue: LiveQueue) -> "deque[Unflushed] | None":
    """The line of unflushed messages, if everything visible is in that one line."""
    if queue.returned or len(queue.unflushed) != 1 or any(queue.ready.values()):
        return None
    (line,) = queue.unflushed.values()
    return line


def _take(granting: "Granting", writer: Writer, queue: LiveQueue, command: Receive, count: int) -> bool:
    """Lease the first `count` messages, wherever they are stored; False if there was none."""
    found: Iterable[StoredMessage | Unflushed]
    disorder = writer.options.disorder
    if disorder:
        held = list(_by_turns(_lined(writer, queue, count + disorder), writer, queue, count + disorder))
        found = disordered(writer, queue, held, count, disorder)
    else:
        lined: list[StoredMessage | Unflushed] = [*_lined(writer, queue, count)]
        if queue.unflushed:
            lined += [each for line in queue.unflushed.values() for each in islice(line, count)]
            lined.sort(key=_order)
        found = _by_turns(lined, writer, queue, count) if queue.returned else lined[:count]
    candidate = None
    for candidate in found:
        if isinstance(candidate, Unflushed):
            waiting = queue.unflushed.get(candidate.row.priority)
            if not waiting or waiting[0] is not candidate:  # an earlier candidate caused a flush
                break
            granting.granted += lease_unflushed(writer, queue, waiting, ((command, 1),))[0]
        elif not granting.take(candidate) and _is_its_own_dead_letters(queue):
            break  # it may be here again, before the other candidates
        if granting.detours_left <= 0 or writer.bytes_left <= 0:
            break
    granting.write()
    return candidate is not None


def _is_its_own_dead_letters(queue: LiveQueue) -> bool:
    redrive = queue.settings.redrive
    return redrive is not None and redrive.target == queue.key


def _order(candidate: StoredMessage | Unflushed) -> tuple[int, int]:
    """The order of messages in lines."""
    found = candidate.row if isinstance(candidate, Unflushed) else candidate
    return found.priority, found.sequence


def _turn(candidate: StoredMessage | Unflushed) -> Turn:
    if isinstance(candidate, Unflushed):
        row = candidate.row
        return row.priority, row.sent, 0, row.sequence
    return candidate.turn()


Waiting = TypeVar("Waiting", StoredMessage, StoredMessage | Unflushed)


def _by_turns(lined: Iterable[Waiting], writer: Writer, queue: LiveQueue, count: int) -> list[Waiting]:
    """Merge messages in lines with returned ones. A line keeps its own order, whatever the instants of its messages:
    its cursor says how far it was claimed."""
    returned = [StoredMessage(*row) for row in writer.read(_RETURNED, (queue.generation, count))]
    return list(islice(merge(lined, returned, key=_turn), count))


def _lined(writer: Writer, queue: LiveQueue, count: int) -> list[StoredMessage]:
    """The first messages in the lines of the tables."""
    found: list[StoredMessage] = []
    for priority in queue.ready if len(queue.ready) == 1 else sorted(queue.ready):
        if queue.ready[priority]:
            values = (queue.generation, priority, queue.cursors.get(priority, 0), count - len(found))
            found += [StoredMessage(*row) for row in writer.read(_READY, values)]
            if len(found) >= count:
                break
    return found


def _stays(writer: Writer, queue: LiveQueue, candidate: StoredMessage) -> Extras | None:
    """The candidate's extras if it can be delivered; None if it was removed instead (expired, damaged or
    dead-lettered)."""
    settings = queue.settings
    own_expiry = candidate.own_expiry
    if (candidate.sent + settings.retention_us if own_expiry is None else own_expiry) <= writer.expiry_now:
        expire(writer, queue, candidate.place())
        return None
    extras = intact(candidate, candidate.failure)
    if extras is None:
        quarantine(writer, queue, candidate.place())
        return None
    redrive = settings.redrive
    if redrive is not None and candidate.attempt >= redrive.receive_count_max and _is_tried(queue, candidate, redrive):
        target = writer.queues.by_key.get(redrive.target)
        if target is not None:
            dead_letter(writer, queue, candidate.place(), target)
            return None
    return extras


def _is_tried(queue: LiveQueue, candidate: StoredMessage, redrive: RedrivePolicy) -> bool:
    """Whether a message with that many receives may be dead-lettered. Of pushes only failed ones count, which rotate
    the handle: a push cut off by the server's own stop does not count against the endpoint."""
    return not is_hidden(queue.key.name) or candidate.rotation >= redrive.receive_count_max


class Granting:
    """The leases of one receive; what they share is computed once."""

    __slots__ = ("_again", "_leases", "_origin", "_queue", "_terms", "_writer", "detours_left", "given_back", "granted")

    def __init__(self, writer: Writer, queue: LiveQueue, command: Receive) -> None:
        writer.touch(queue)
        self.granted: list[Delivery] = []
        self.detours_left = min(DETOURS_MAX, max(DETOURS_OF_BATCH - writer.detours, DETOURS_MIN))
        """How many more candidates may be removed instead of delivered."""
        self._writer = writer
        self._queue = queue
        self._origin = writer.origin(command.origin)
        self.given_back = writer.next_offset
        """The turn of messages that are leased for no time."""
        self._terms = Terms(writer.now, queue, command)
        self._leases: dict[tuple[int, Instant], list[int]] = {}
        """First leases that differ only in the message: sequences by line and due."""
        self._again: dict[Instant, list[int]] = {}
        """Later leases: sequences by due."""

    def take(self, candidate: StoredMessage) -> bool:
        """Lease the candidate to the receiver, unless it must be removed instead; it is then removed."""
        extras = _stays(self._writer, self._queue, candidate)
        if extras is None:
            cost = 1 + len(candidate.body) // DETOUR_BYTES
            self._writer.detours += cost
            self.detours_left -= cost
            return False
        self._grant(candidate, extras)
        return True

    def _grant(self, candidate: StoredMessage, extras: Extras) -> None:
        writer, queue = self._writer, self._queue
        now = writer.now
        writer.bytes_left -= len(candidate.body) + len(candidate.packed or b"")
        sequence, sent, rotation = candidate.sequence, candidate.sent, candidate.rotation
        attempt = candidate.attempt + 1
        lease_us, source, due = self._terms.of(candidate.type, extras)
        if candidate.leased:
            first = now if candidate.first is None else candidate.first
            visible_since = candidate.due
            self._again.setdefault(due, []).append(sequence)
            queue.returned -= 1
        else:
            line = candidate.line
            first, visible_since = now, sent
            self._leases.setdefault((line, due), []).append(sequence)
            if line <= PRIORITY_LINES_MAX:
                queue.cursors[line] = sequence
                queue.ready[line] -= 1
        queue.visible -= 1
        queue.in_flight += 1
        if due < queue.next_due:
            writer.queues.lower_due(queue, due)
        writer.events.append(Event(
            _RECEIVED, now, queue.incarnation, self._origin, candidate.id, sequence, attempt, rotation, lease_us,
            source, sent, visible_since, None, len(candidate.body), candidate.group, candidate.type,
        ))  # fmt: skip
        expires = sent + queue.settings.retention_us if candidate.own_expiry is None else candidate.own_expiry
        self.granted.append(Delivery(
            candidate.id, sequence, candidate.body.decode(), candidate.md5, extras, candidate.sender,
            candidate.priority, sent, Instant(expires), attempt, first,
            writer.receipts.seal(queue.incarnation, sequence, attempt, rotation), due, lease_us,
        ))  # fmt: skip

    def write(self) -> None:
        """Write the lease rows; leases that differ only in the message go into one statement. Call it before reading
        the tables for more candidates."""
        leases, self._leases = self._leases, {}
        now = self._writer.now
        few: list[LeaseRow] = []
        for (line, due), sequences in leases.items():
            turn = 0 if due > now else self.given_back
            alike = (self._queue.generation, line, 1, 1, due, 1, 0, now, now, self._origin, turn)
            if len(sequences) < MANY:
                few += [LeaseRow(sequence, *alike) for sequence in sequences]
            else:
                self._writer.write(_LEASE_MANY, (numbers(sequences), *alike))
        if few:
            self._writer.insert_many(INSERT_LEASE, few)
        again, self._again = self._again, {}
        for due, sequences in again.items():
            turn = 0 if due > now else self.given_back
            self._writer.write(_GRANT_AGAIN, (numbers(sequences), due, now, self._origin, turn))


_FROM_QUEUE: Final = int(LeaseSource.QUEUE)
_FROM_RECEIVE: Final = int(LeaseSource.RECEIVE)
_FROM_PLAN: Final = int(LeaseSource.PLAN)

Lease = tuple[int, int, Instant]
"""Length in microseconds, `LeaseSource`, end."""


class Terms:
    """What all leases of one receive share, computed once."""

    __slots__ = ("_now", "_plan", "named", "usual")

    def __init__(self, now: Instant, queue: LiveQueue, command: Receive) -> None:
        self._now = now
        self._plan = queue.plan.applied
        lease_us = command.lease_us
        self.named = lease_us is not None
        """Whether the receiver set the length: then nothing else counts."""
        if lease_us is None:
            lease_us = queue.settings.visibility_timeout_us
            self.usual: Lease = (lease_us, _FROM_QUEUE, Instant(now + lease_us))
        else:
            self.usual = (lease_us, _FROM_RECEIVE, Instant(now + lease_us))

    def of(self, kind: str | None, extras: Extras) -> Lease:
        """The first lease of a message of that type: its sender or the queue's plan may set another length."""
        if self.named:
            return self.usual
        lease_us = extras.lease_hint_us
        if lease_us is None and self._plan is not None:
            lease_us = self._plan.lease_of(kind)
        return self.usual if lease_us is None else (lease_us, _FROM_PLAN, Instant(self._now + lease_us))


def lease_unflushed(
    writer: Writer, queue: LiveQueue, line: deque[Unflushed], wanted: Sequence[tuple[Receive, int]]
) -> list[list[Delivery]]:
    """Lease messages from the head of a line of the queue to receives of one client, to each as many as it wants: to
    the first at least, and to the others while there are messages, and bytes of the batch. None of the messages may
    have expired."""
    writer.touch(queue)
    memtable, seal, events = writer.memtable, writer.receipts.seal, writer.events
    memtable.changed = True
    now, incarnation, origin = writer.now, queue.incarnation, writer.origin(wanted[0][0].origin)
    retention_us = queue.settings.retention_us
    held = memtable.held
    bytes_left = writer.bytes_left
    before, all_granted = len(line), list[list[Delivery]]()
    for command, count in wanted:
        terms = Terms(now, queue, command)
        lease_us, source, due = terms.usual
        lease = (due, now, origin)
        granted: list[Delivery] = []
        all_granted.append(granted)
        for _ in range(min(count, len(line))):
            unflushed = line.popleft()
            row, extras = unflushed.row, unflushed.extras
            sequence, sent, body = row.sequence, row.sent, row.body
            if not terms.named:
                lease_us, source, due = terms.of(row.type, extras)
                if due != lease[0]:
                    lease = (due, now, origin)
            unflushed.lease = lease
            handle = seal(incarnation, sequence, 1, 0)
            held[handle] = unflushed
            if due < queue.next_due:
                writer.queues.lower_due(queue, due)
            events.append(Event(
                _RECEIVED, now, incarnation, origin, row.id, sequence, 1, 0, lease_us, source, sent, sent, None,
                len(body), None, row.type,
            ))  # fmt: skip
            expires: Any = sent + retention_us if row.own_expiry is None else row.own_expiry
            granted.append(Delivery(
                row.id, sequence, body.decode(), row.md5, extras, row.sender, row.priority, sent,
                expires, 1, now, handle, due, lease_us,
            ))  # fmt: skip
            bytes_left -= len(body) if row.packed is None else len(body) + len(row.packed)
            if bytes_left <= 0:
                break
        if bytes_left <= 0 or not line or queue.next_due <= now:
            break
    writer.bytes_left = bytes_left
    taken = before - len(line)
    queue.visible -= taken
    queue.in_flight += taken
    return all_granted


def disordered(
    writer: Writer, queue: LiveQueue, candidates: Sequence[StoredMessage], count: int, window: int
) -> Iterator[StoredMessage]:
    """The first `count` candidates in the order of delivery. The queue must be touched before.

    Each must be taken before the next one is asked for: what steps aside for the next moves the line's cursor.
    """
    rest = list(candidates)
    while rest and count > 0:
        head = rest[0]
        place = 0
        if not head.leased:
            reach = 1
            while reach <= window and reach < len(rest) and _in_line(rest[reach], head):
                reach += 1
            place = crc32(head.sequence.to_bytes(8)) % reach
        for passed_over in rest[:place]:
            _step_aside(writer, queue, passed_over)
        count -= 1
        yield rest.pop(place)


def _in_line(candidate: StoredMessage, head: StoredMessage) -> bool:
    return not candidate.leased and candidate.line == head.line


def _step_aside(writer: Writer, queue: LiveQueue, candidate: StoredMessage) -> None:
    """Move the message out of its line; it stays visible and nobody has received it."""
    line, sent = candidate.line, candidate.sent
    origin = writer.origin(SERVER)
    lease = LeaseRow(candidate.sequence, queue.generation, line, 1, 0, sent, 0, 0, sent, None, origin)
    writer.write(INSERT_LEASE, lease)
    queue.cursors[line] = candidate.sequence
    queue.ready[line] -= 1
    queue.returned += 1
    candidate.leased = 1
    candidate.due = sent
