"""Strict order over a queue that is only roughly ordered (the document's OrderedQueueWrapper).

Strategy: the sender numbers messages, durably before it sends them (sender.py); the receiver hands out only the next
number (receiving/); each keeps its count in a storage that one process at a time may hold (storage.py, and here a
table). Here are both sides as one `Queue`, so that other patterns can wrap it, and a loop that runs a handler on
received messages. A side with a storage works; a side without one raises CapabilityMissing. A peek shows bodies without
numbers. docs/patterns/ordered-queue.md.

The loop handles one message after the other, each acknowledged after its handler. In an ordered queue a failed handler
affects all later messages, so the user chooses: block (nothing later is handed out before it succeeds), dead-letter
(the order continues without it), or raise to the caller of the loop.

Numbers in a database table, over any DB-API driver (SQLite, PostgreSQL, MySQL): one row for each storage, changed only
by `UPDATE ... WHERE version = ?`: a process that lost the race changes nothing and gets an error. The row also names
the holder, with an expiry by the database's clock (records/holders.py). One connection, used by one thread at a time.
`saving` lends a cursor, so that the application's own rows and the acknowledged number are one transaction: then
nothing is done twice, wherever the process dies.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import StateInvalid, StorageLost
from veilmq.client.messages import Extension, Message, Peeked, Received, Sent
from veilmq.client.ordered.numbering import AttributeMarking, marking_of
from veilmq.client.ordered.receiving import OrderedReceiver
from veilmq.client.ordered.receiving.reorder import GapPolicy, Ordered
from veilmq.client.ordered.sender import OrderedSender
from veilmq.client.ordered.storage import LocalFile, ObjectStorage, OwnedStorage, StateLock, Storage
from veilmq.client.queue import Capabilities, HandleOnSend, Queue
from veilmq.client.records import tables
from veilmq.client.records.holders import HOLD_SECONDS, Owner
from veilmq.client.records.tables import (
    EXACT,
    TEXT,
    Connect,
    OneConnection,
    paramstyle_of,
    row_lock_of,
    table_name,
)
from veilmq.client.shared import body_of_copy, checks
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, VeilError
from veilmq.model.messages import Failure

__all__ = [
    "GapPolicy",
    "LocalFile",
    "ObjectStorage",
    "OnFailure",
    "Ordered",
    "OrderedQueue",
    "OrderedReceiver",
    "OrderedSender",
    "StateLock",
    "Storage",
    "TableStorage",
    "run",
]
NAME_CHARACTERS_MAX: Final = 120


class OrderedQueue(Wrapping):
    """A queue whose messages are received in the order of the calls that sent them.

    A receive returns one message at a time unless `in_hand_max` is larger. Leases are renewed automatically, so a
    receive without `lease` holds its message while this process lives.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        send_storage: Storage | None = None,
        receive_storage: Storage | None = None,
        marking: str = "auto",
        reset: bool = False,
        clock: Clock = SYSTEM,
        **receiving: Any,
    ) -> None:
        """receiving: the other options of `OrderedReceiver`. Raises like `OrderedSender` and `OrderedReceiver`;
        ParameterInvalid for an option of the receiving side without a receive_storage."""
        super().__init__(checks.queue(queue))
        if receiving and receive_storage is None:
            reason = "it is of the receiving side, and there is no receive_storage"
            raise ParameterInvalid(parameter=min(receiving), reason=reason)
        self._marking = marking_of(marking, queue.capabilities)
        self._sender: OrderedSender | None = None
        self._receiver: OrderedReceiver | None = None
        if receive_storage is not None:
            self._receiver = OrderedReceiver(
                queue, receive_storage, marking=marking, reset=reset, clock=clock, **receiving
            )
        try:
            if send_storage is not None:
                self._sender = OrderedSender(queue, send_storage, marking=marking, reset=reset, clock=clock)
        except BaseException:
            if self._receiver is not None:
                self._receiver.close()
            raise

    @property
    def sender(self) -> OrderedSender:
        """The sending side. Raises CapabilityMissing without a send_storage."""
        if self._sender is None:
            raise CapabilityMissing(capability="sending in order without a send_storage")
        return self._sender

    @property
    def receiver(self) -> OrderedReceiver:
        """The receiving side. Raises CapabilityMissing without a receive_storage."""
        if self._receiver is None:
            raise CapabilityMissing(capability="receiving in order without a receive_storage")
        return self._receiver

    @property
    def capabilities(self) -> Capabilities:
        """The queue's, except those that would break the order, and the attribute that carries the number."""
        inner = self.inner.capabilities
        return replace(
            inner,
            attributes_max=inner.attributes_max - isinstance(self._marking, AttributeMarking),
            receipts_rotate=False,
            handle_on_send=HandleOnSend.NEVER,
            body_replaceable=False,
            lease_total_max=None,
            lease_hints=False,
            ttl=False,
        )

    @property
    def closed(self) -> bool:
        """Whether the receiving side or the queue is closed."""
        return super().closed or (self._receiver is not None and self._receiver.closed)

    def send(self, message: str | Message) -> Sent:
        return replace(self.sender.send(message), handle=None)

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        results = self.sender.send_batch(messages)
        return [replace(each, handle=None) if isinstance(each, Sent) else each for each in results]

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        return [*self.receiver.receive(count_max, lease=lease, wait=wait)]

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        return self.receiver.extend(handle, lease, body=body)

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        results: list[str | VeilError] = []
        for each in checks.batch(extensions, "extensions"):
            try:
                results.append(self.extend(checks.extension(each).handle, each.lease))
            except VeilError as error:
                results.append(error)
        return results

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.receiver.release(handle, delay)

    def delete(self, handle: str) -> None:
        self.receiver.delete(handle)

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        return self.receiver.delete_batch(handles)

    def peek(self, count_max: int = 1) -> list[Peeked]:
        shown = self.inner.peek(count_max)
        read = [(each, self._marking.read(each)) for each in shown]
        return [each if found is None else found[1] for each, found in read]

    def interrupt(self) -> None:
        (self._receiver or self.inner).interrupt()

    def close(self) -> None:
        """Close both sides, then the queue."""
        for side in (self._receiver, self._sender):
            if side is not None:
                side.close()
        self.inner.close()


LOOK_SECONDS: Final = 1.0
"""How often the loop checks whether to stop."""

log = logging.getLogger("veilmq.ordered")


class OnFailure(StrEnum):
    """What happens after a handler fails."""

    BLOCK = "block"
    """Hand the message out again after the retry delay, and nothing later before it."""
    DEAD_LETTER = "dead-letter"
    """Send it to the dead letters, acknowledge it, and continue."""
    RAISE = "raise"
    """Release it; the handler's exception ends the loop."""


def run(
    receiver: OrderedReceiver | Queue,
    handler: Callable[[Ordered], object],
    *,
    on_failure: OnFailure | str = OnFailure.BLOCK,
    retry_delay: float = 1.0,
    dead_letters: Queue | None = None,
    stop: threading.Event | None = None,
    idle: float | None = None,
) -> int:
    """Call `handler` for each message in order until `stop` is set, the receiver is closed, or nothing came for `idle`
    seconds (None: for ever). Returns how many it handled. receiver: also an `OrderedQueue`, or a queue around one.
    Raises ParameterInvalid, CapabilityMissing without a receive_storage, the errors of `receive`, `delete` and
    `dead_letters.send`, and with OnFailure.RAISE the handler's.

    If the receiver is closed while a handler works, its message is not acknowledged: the next receiver gets it again.
    """
    source = _in_order(receiver)
    checks.function(handler, "handler")
    checks.not_negative(retry_delay, "retry_delay")
    checks.remaining(0 if idle is None else idle, "idle")
    policy = _policy(on_failure, dead_letters)
    stop = threading.Event() if stop is None else stop
    checks.object_with(stop, "stop", "is_set")
    handled = 0
    quiet = 0.0
    while not stop.is_set() and (idle is None or quiet < idle):
        look = LOOK_SECONDS if idle is None else min(LOOK_SECONDS, idle)
        messages = _next(source, look)
        if messages is None:
            break
        quiet = 0.0 if messages else quiet + look
        for message in messages:
            handled += _handled(source, message, handler, policy, retry_delay, dead_letters)
    return handled


def _in_order(given: Any) -> Any:
    """As given. Raises ParameterInvalid if its messages do not come from an OrderedReceiver; CapabilityMissing."""
    found = given
    while isinstance(found, Wrapping):
        found = found.receiver if isinstance(found, OrderedQueue) else found.inner
    if isinstance(found, OrderedReceiver):
        return given
    reason = f"must be an OrderedReceiver, an OrderedQueue or a queue around one, not {type(given).__name__}"
    raise ParameterInvalid(parameter="receiver", reason=reason)


def _next(receiver: OrderedReceiver, wait: float) -> list[Ordered] | None:
    """Messages that come within `wait` seconds; None after the receiver is closed."""
    try:
        return receiver.receive(wait=wait)
    except VeilError:
        if not receiver.closed:
            raise
        return None


def _handled(
    receiver: OrderedReceiver, message: Ordered, handler: Callable[[Ordered], object], policy: OnFailure,
    retry_delay: float, dead_letters: Queue | None,
) -> bool:  # fmt: skip
    """Returns whether the message is acknowledged. If anything raises, it is handed out again, at the latest by the
    next run."""
    done = False
    delay = 0.0
    try:
        try:
            handler(message)
        except Exception:
            if policy is OnFailure.RAISE:
                raise
            log.exception("number %d: its handler failed (%s)", message.number, policy)
            if dead_letters is None or policy is OnFailure.BLOCK:
                delay = retry_delay
                return False
            if receiver.closed:
                return False  # the next receiver gets it
            _send_on(dead_letters, message)
        done = _acknowledged(receiver, message)
    finally:
        if not done:
            with suppress(VeilError):  # it was acknowledged nevertheless, or the receiver is closed
                receiver.release(message.handle, delay)
    return done


def _acknowledged(receiver: OrderedReceiver, message: Ordered) -> bool:
    try:
        receiver.delete(message.handle)
    except VeilError as error:
        if not receiver.closed:
            raise
        log.warning("number %d is handled and not acknowledged: it comes again (%s)", message.number, error)
        return False
    return True


def _send_on(dead_letters: Queue, message: Ordered) -> None:
    can = dead_letters.capabilities
    dead_letters.send(
        Message(
            body_of_copy(message.body, can),
            attributes=message.attributes if can.attributes else {},
            type=message.type if can.attributes else None,
            group=(message.group or message.id) if can.native_fifo else None,
            deduplication_id=message.id if can.native_fifo else None,
        )
    )


def _policy(given: OnFailure | str, dead_letters: Queue | None) -> OnFailure:
    policy = checks.choice(given, OnFailure, "on_failure")
    if policy is OnFailure.DEAD_LETTER and dead_letters is None:
        raise ParameterInvalid(parameter="dead_letters", reason="is needed for on_failure=dead-letter")
    if dead_letters is not None:
        checks.queue(dead_letters, "dead_letters")
    return policy


class TableStorage(OwnedStorage):
    """A row of a table. Any thread, one at a time; the driver must allow its connection to change threads (sqlite3:
    check_same_thread=False).
    """

    def __init__(
        self,
        connect: Connect,
        name: str,
        *,
        table: str = "veilmq_numbers",
        create: bool = True,
        paramstyle: str | None = None,
        clock: Clock = SYSTEM,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        """connect: opens a connection. name: which row; sender and receiver need one each. create: create the table if
        it is missing. paramstyle: the driver's; None: ask its module. hold_seconds: after this long without a renewal
        another process may take over.

        Raises ParameterInvalid; later, the driver's errors.
        """
        if not 1 <= len(checks.text(name, "name")) <= NAME_CHARACTERS_MAX:
            reason = f"must have 1 to {NAME_CHARACTERS_MAX} characters, not {name!r}"
            raise ParameterInvalid(parameter="name", reason=reason)
        self.name = name
        self._table = table_name(table)
        self._create = create
        self._paramstyle = paramstyle if paramstyle is None else paramstyle_of(paramstyle, None)
        self._connection = OneConnection(connect)
        super().__init__(str(self), clock, hold_seconds)
        self._version = 0
        self._acquired = False

    def __str__(self) -> str:
        return f"table {self._table}, {self.name}"

    @property
    def ddl(self) -> str:
        """The statement that creates the table, for users who create their tables themselves."""
        return (
            f"CREATE TABLE IF NOT EXISTS {self._table} (name VARCHAR({NAME_CHARACTERS_MAX}) NOT NULL PRIMARY KEY,"
            f" version BIGINT NOT NULL, holder TEXT, state {TEXT}) {EXACT}"
        )

    def _take(self) -> None:
        """Raises StorageLost if another process was faster."""
        if self._create:
            self._make()
        with self._cursor() as cursor:
            self._look_at_clock(cursor)
            row = self._row(cursor)
            if row is None:
                # Two at once: the primary key admits one of them, and the driver's error stops the other.
                values = (self.name, _text(self._watch.owner()))
                self._run(cursor, f"INSERT INTO {self._table} VALUES (?, 1, ?, NULL)", values)
                self._version = 1
            else:
                self._version, holder, _ = row
                self._watch.admit(holder)
                self._change(cursor, "holder = ?", _text(self._watch.owner()))
        self._acquired = True

    def _make(self) -> None:
        try:
            with self._cursor() as cursor:
                self._run(cursor, self.ddl)
        except VeilError:
            raise
        except Exception:  # noqa: BLE001 drivers may raise anything
            # No right to create tables, or another process creates it now (PostgreSQL): it only matters that it exists.
            with self._cursor() as cursor:
                self._row(cursor)

    def _give_up(self) -> None:
        try:
            if self._acquired:
                with self._cursor() as cursor:
                    self._change(cursor, "holder = NULL")
        except StorageLost:
            pass
        finally:
            self._connection.close()
        self._acquired = False

    def _state_now(self) -> bytes | None:
        with self._cursor() as cursor:
            row = self._row(cursor)
        return None if row is None or row[2] is None else row[2].encode()

    def _write(self, state: bytes) -> None:
        with self._cursor() as cursor:
            self._store(cursor, state)

    @contextmanager
    def saving(self, state: bytes) -> Iterator[Any]:
        """See `Transactional.saving`. Raises like `save`.

        The hold cannot be renewed meanwhile, because the connection is lent. So the row is locked, and nobody takes
        over however long the block lasts. SQLite locks only on a change: there the lock begins with the cursor's first
        change.
        """
        self._watch.enter()
        with self._lock:
            self._watch.check_held()
            with self._cursor() as cursor:
                if row_lock := row_lock_of(self._connection.clock):
                    row = self._row(cursor, row_lock)
                    self._watch.check(None if row is None else row[1])
                yield cursor
                self._store(cursor, state)

    def _store(self, cursor: Any, state: bytes) -> None:
        self._change(cursor, "holder = ?, state = ?", _text(self._watch.owner()), state.decode())

    def _prolong(self) -> None:
        with self._cursor() as cursor:
            self._look_at_clock(cursor)
            self._change(cursor, "holder = ?", _text(self._watch.owner()))

    def _look_at_clock(self, cursor: Any) -> None:
        """Read the database's clock at every renewal, because two clocks drift apart over months."""
        if self._connection.clock is not None:
            self._run(cursor, f"SELECT {self._connection.clock}")
            self._watch.clock_reads(float(cursor.fetchone()[0]))

    def _row(self, cursor: Any, row_lock: str = "") -> tuple[int, Owner | None, str | None] | None:
        statement = f"SELECT version, holder, state FROM {self._table} WHERE name = ?{row_lock}"
        self._run(cursor, statement, (self.name,))
        row = cursor.fetchone()
        if row is None:
            return None
        version, holder, state = row
        try:
            owner = None if holder is None else msgspec.json.decode(holder, type=Owner)
        except (ValueError, RecursionError) as error:
            raise StateInvalid(storage=str(self), reason=f"holds something else: {error}") from None
        return version, owner, state

    def _change(self, cursor: Any, what: str, *values: object) -> None:
        """Write the next version, unless another process did."""
        statement = f"UPDATE {self._table} SET version = ?, {what} WHERE name = ? AND version = ?"
        self._run(cursor, statement, (self._version + 1, *values, self.name, self._version))
        if cursor.rowcount != 1:
            row = self._row(cursor)
            self._watch.check(None if row is None else row[1])
            assert row is not None
            # Our commit succeeded but its answer was lost: the data is ours, and only the version is unknown here.
            self._version = row[0]
            self._run(cursor, statement, (self._version + 1, *values, self.name, self._version))
            if cursor.rowcount != 1:
                raise StorageLost(storage=str(self), holder="another process")
        self._changed = True

    def _run(self, cursor: Any, statement: str, values: tuple[object, ...] = ()) -> None:
        tables.run(cursor, paramstyle_of(self._paramstyle, cursor), statement, values)

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        """A cursor in a transaction."""
        self._changed = False
        with self._connection.transaction() as cursor:
            yield cursor
        self._version += self._changed


def _text(owner: Owner) -> str:
    return msgspec.json.encode(owner).decode()
