"""A table of messages that are sent if and only if the user's own SQL transaction commits.

Strategy: `Outbox.add` writes a row through the user's cursor, in the user's transaction. A `Relay` sends committed rows
and marks them. If it dies in between, the row is sent again with the same id, which travels as deduplication id on a
FIFO queue and as an attribute where the queue has them. Relays share a table: each holds its rows for a time, by the
database's clock. The SQL runs on SQLite, PostgreSQL and MySQL, with any DB-API driver (PEP 249).

Source: document 002, "transaction messages" (the same promise, from a database).
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, TypeVar

from msgspec.structs import replace

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Message, Sent, from_text, to_text
from veilmq.client.queue import Queue
from veilmq.client.records.tables import Connect, OneConnection, paramstyle_of, run, table_name
from veilmq.client.shared import checks
from veilmq.client.shared.checks import as_message, attributes_room, text_bytes
from veilmq.client.shared.lifetimes import Anew, Closing
from veilmq.client.shared.outages import Outages
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid, VeilError
from veilmq.model.messages import first_forbidden_character

ATTRIBUTE: Final = "veilmq.outbox"
"""The row's id, on the message: an idempotency key for consumers."""
ID_CHARACTERS_MAX: Final = 120
_POSITIONS: Final = {
    "sqlite": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "postgresql": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "mysql": "BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY",
}
_FREE: Final = "{unsent} AND failure IS NULL AND (holder IS NULL OR held_until < {now})"
_TRIES: Final = 3
_TROUBLE_MAX: Final = 10
"""Batches with temporary errors in one look. One of which nothing could be sent counts for half of them."""
_LOOKS_MAX: Final = 100
"""Batches of rows that all must wait, before the relay looks no further."""

Found = TypeVar("Found")

log = logging.getLogger("veilmq.outbox")


class Outbox:
    """The table. Shares nothing between calls; any thread."""

    def __init__(self, *, table: str = "veilmq_outbox", paramstyle: str | None = None) -> None:
        """paramstyle: the driver's; None: read from its module. Raises ParameterInvalid."""
        self.table = table_name(table)
        self._paramstyle = paramstyle if paramstyle is None else paramstyle_of(paramstyle, None)

    def ddl(self, dialect: str = "sqlite") -> tuple[str, ...]:
        """The statements that create the table and its index. dialect: sqlite, postgresql or mysql.

        Raises ParameterInvalid.
        """
        position = _POSITIONS.get(dialect)
        if position is None:
            raise ParameterInvalid(parameter="dialect", reason=f"must be one of {', '.join(_POSITIONS)}")
        # MySQL's TEXT ends at 64 KiB, and its default collations treat `order-a` and `ORDER-A` as the same id.
        text = "LONGTEXT" if dialect == "mysql" else "TEXT"
        exact = " CHARACTER SET utf8mb4 COLLATE utf8mb4_bin" if dialect == "mysql" else ""
        float_ = "DOUBLE PRECISION"
        schema, _, name = self.table.rpartition(".")
        index, on = f"{self.table.replace('.', '_')}_unsent", self.table
        if dialect == "sqlite" and schema:  # there the index has the schema, and not the table
            index, on = f"{self.table}_unsent", name
        return (
            f"CREATE TABLE {self.table} (position {position}, id VARCHAR({ID_CHARACTERS_MAX}) NOT NULL UNIQUE,"
            f" message {text} NOT NULL, holder VARCHAR(64), held_until {float_}, sent {float_}, failure {text}){exact}",
            f"CREATE INDEX {index} ON {on} (sent, position)",
        )

    def add(self, cursor: Any, message: str | Message, *, deduplication_id: str | None = None) -> str:
        """Write a message in the cursor's transaction; return its id, which the message carries.

        deduplication_id: the application's own id, else the message's, else a new one; a second row with the same id is
        the driver's IntegrityError. Raises ParameterInvalid, and what the driver raises.
        """
        whole = as_message(message)
        text_bytes(whole.body)
        if deduplication_id is not None:
            deduplication_id = checks.text(deduplication_id, "deduplication_id")
        identity = deduplication_id or whole.deduplication_id or secrets.token_hex(16)
        if len(identity) > ID_CHARACTERS_MAX:
            reason = f"must have at most {ID_CHARACTERS_MAX} characters"
            raise ParameterInvalid(parameter="deduplication_id", reason=reason)
        if first_forbidden_character(identity) is not None:
            raise ParameterInvalid(parameter="deduplication_id", reason="has a character that is not allowed in XML")
        statement = f"INSERT INTO {self.table} (id, message) VALUES (?, ?)"
        self.run(cursor, statement, (identity, to_text(replace(whole, deduplication_id=None))))
        return identity

    def run(self, cursor: Any, statement: str, values: Sequence[object] = ()) -> Any:
        """Execute a statement written with `?`; return the cursor."""
        return run(cursor, paramstyle_of(self._paramstyle, cursor), statement, values)


class Failure(NamedTuple):
    """A row that its queue refuses permanently."""

    id: str
    reason: str


class _Row(NamedTuple):
    position: int
    id: str
    text: str

    @property
    def group(self) -> str | None:
        """The message's group; None also if the row holds no message."""
        message = from_text(self.text)
        return None if message is None else message.group


class Relay(Closing, Anew):
    """Sends the rows of an outbox. Run it in a thread (`start`), or call `run_once`; any number may share a table.

    One relay sends in the order of the rows' positions. On a FIFO queue, a row that could not be sent holds back the
    later rows of its group; elsewhere it is sent after the others of its batch.
    """

    def __init__(
        self,
        outbox: Outbox,
        connect: Connect,
        queue: Queue,
        *,
        batch: int = 100,
        hold: float = 60.0,
        check_every: float = 1.0,
        clock: Clock = SYSTEM,
    ) -> None:
        """connect: makes a connection that may be used by several threads (sqlite3: check_same_thread=False). batch:
        rows per transaction. hold: seconds for which a relay holds its rows; must exceed the time to send them.
        check_every: seconds between two looks of the thread. Raises ParameterInvalid."""
        checks.at_least(batch, "batch", 1)
        checks.positive(hold, "hold")
        checks.positive(check_every, "check_every", may_be_endless=True)
        if not isinstance(outbox, Outbox):
            raise ParameterInvalid(parameter="outbox", reason=f"must be an Outbox, not {type(outbox).__name__}")
        self._outbox = outbox
        self._connection = OneConnection(connect)
        self._queue = checks.queue(queue)
        self._batch = batch
        self._hold = hold
        self._check_every = check_every
        self._clock = clock
        self._here()

    def _begin(self) -> None:
        self._connection.leave()
        self._holder = secrets.token_hex(16)
        self._past = 0
        """Up to this position the last look came, where too much failed."""
        self._passed: set[str] = set()
        """Groups of a FIFO queue of which rows up to there wait."""
        self._outages = Outages(log, "outbox", self._clock)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def _alone(self) -> threading.Lock:
        """This process's lock."""
        self._here()
        return self._lock

    def run_once(self) -> int:
        """Send all committed rows that no other relay holds; return how many were sent.

        Rows that the queue refuses permanently are marked with the reason and not tried again. Raises the first
        temporary error, what the driver raises, and what the application's own code in a pattern raised at a row; rows
        that were sent are marked. The rows behind those that failed are tried, too, until of two batches nothing was
        sent, or of ten not all: the next look tries the first batch again, and then goes on from there.
        """
        return self._work_off(lambda: False)

    def _work_off(self, ends: Callable[[], bool]) -> int:
        """Work until nothing is left or `ends` returns True."""
        sent = after = 0
        left = _TROUBLE_MAX
        failed: Exception | None = None
        waiting: set[str] = set()
        with self._alone():
            while not ends():
                if not (rows := self._take(after, waiting)):
                    self._past, self._passed = 0, set()
                    break
                results = self._send(rows)
                self._mark(rows, results)
                done = sum(isinstance(result, Sent) for result in results)
                sent, after = sent + done, rows[-1].position
                pairs = zip(rows, results, strict=True)
                errors = [(row, each) for row, each in pairs if not isinstance(each, Sent) and not _hopeless(each)]
                if not errors:
                    continue
                failed = failed or errors[0][1]
                waiting |= self._groups(row for row, _ in errors)
                left -= 1 if done else _TROUBLE_MAX // 2
                if left <= 0:
                    self._past, self._passed = after, waiting
                    break
                if not done:
                    after, waiting = max(after, self._past), waiting | self._passed
            if failed is not None:
                raise failed
        return sent

    def _groups(self, rows: Iterable[_Row]) -> set[str]:
        """Whose order counts, of these rows."""
        fifo = self._queue.capabilities.native_fifo
        return {group for row in rows if fifo and (group := row.group) is not None}

    def failures(self, count_max: int = 100) -> list[Failure]:
        """Rows that the queue refuses permanently. Raises ParameterInvalid."""
        checks.at_least(count_max, "count_max", 1)
        statement = (
            f"SELECT id, failure FROM {self._outbox.table} WHERE failure IS NOT NULL ORDER BY position"
            f" LIMIT {count_max:d}"
        )
        with self._alone(), self._connection.transaction() as cursor:
            return [Failure(*row) for row in self._outbox.run(cursor, statement).fetchall()]

    def retry(self, identity: str) -> bool:
        """Try a failed row again; False if there is none with that id. Raises ParameterInvalid."""
        identity = checks.text(identity, "identity")
        statement = f"UPDATE {self._outbox.table} SET failure = NULL WHERE id = ? AND failure IS NOT NULL"
        with self._alone(), self._connection.transaction() as cursor:
            return bool(self._outbox.run(cursor, statement, (identity,)).rowcount == 1)

    def prune(self, older_than: float) -> int:
        """Delete rows that were sent more than `older_than` seconds ago; return how many. Raises ParameterInvalid."""
        checks.remaining(older_than, "older_than")

        def delete(cursor: Any) -> int:
            statement = f"DELETE FROM {self._outbox.table} WHERE sent < {self._now()} - ?"
            return int(self._outbox.run(cursor, statement, (older_than,)).rowcount)

        with self._alone():
            return self._tried(delete)

    def wake(self) -> None:
        """Look at once: something was committed."""
        self._wake.set()

    def start(self) -> None:
        """Look every `check_every` seconds, in a thread of its own. Idempotent."""
        self._alone()
        if self._thread is None:
            self._closing = False
            thread = threading.Thread(target=self._run, name="veilmq outbox relay", daemon=True)
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """End the thread after its current rows, and close the connection; the queue stays open. Idempotent."""
        lock = self._alone()
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with lock:
            self._connection.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def _now(self) -> str:
        """The SQL expression for Unix seconds: the database's clock, which all relays share, or else our own."""
        return self._connection.clock or repr(self._clock.wall())

    def _run(self) -> None:
        while not self._closing:
            try:
                self._work_off(lambda: self._closing)
                self._outages.worked("sending")
            except Exception as error:  # noqa: BLE001 drivers raise any; the next look opens a new connection
                self._outages.failed("sending", error)
            self._wake.wait(min(self._check_every, threading.TIMEOUT_MAX))
            self._wake.clear()

    def _take(self, after: int, waiting: set[str]) -> list[_Row]:
        """Hold the next rows behind this position; fewer if other relays hold some of them. waiting: groups of a FIFO
        queue of which no row may be sent; those behind a row that somebody holds are added."""
        table = self._outbox.table

        def hold(cursor: Any) -> list[_Row]:
            now = self._now()
            # Select by the row's key alone: InnoDB would otherwise lock the index entry on `sent` before the row, and
            # `_mark` locks the row first.
            free = _FREE.format(unsent="COALESCE(sent, -1) = -1", now=now)
            update = f"UPDATE {table} SET holder = ?, held_until = {now} + ? WHERE position = ? AND {free}"
            mine = []
            for row in found:
                groups = self._groups([row])
                if groups & waiting:
                    continue
                values = (self._holder, self._hold, row.position)
                if self._outbox.run(cursor, update, values).rowcount == 1:
                    mine.append(row)
                else:  # somebody has held it since the look, and what follows comes after it
                    waiting.update(groups)
            return mine

        # Two transactions: under a strict isolation level, what the first one saw would block the update.
        found = self._tried(lambda cursor: self._look(cursor, after, waiting))
        return self._tried(hold) if found else []

    def _look(self, cursor: Any, after: int, waiting: set[str]) -> list[_Row]:
        """The next rows that may be sent: on a FIFO queue none behind a row of its group that somebody holds, a relay
        that sends it, died, or could not mark what it sent. Looks on while all must wait.

        There one statement says of each row whether it is held: between two of them it could be let go.
        """
        fifo = self._queue.capabilities.native_fifo
        is_free = f"(holder IS NULL OR held_until < {self._now()})"
        held, wanted = (f"CASE WHEN {is_free} THEN 1 ELSE 0 END", "") if fifo else ("1", f" AND {is_free}")
        select = (
            f"SELECT position, id, message, {held} FROM {self._outbox.table} WHERE sent IS NULL AND failure IS NULL"
            f"{wanted} AND position > ? ORDER BY position LIMIT {self._batch:d}"
        )
        for _ in range(_LOOKS_MAX):
            rows = self._outbox.run(cursor, select, (after,)).fetchall()
            found = []
            for *columns, free in rows:
                row = _Row(*columns)
                groups = self._groups([row])
                if free and not groups & waiting:
                    found.append(row)
                else:
                    waiting.update(groups)
            if found or len(rows) < self._batch:
                return found
            after = rows[-1][0]
        return []

    def _tried(self, work: Callable[[Any], Found]) -> Found:
        """Run `work` in a transaction, and retry after a driver's error: a deadlock, a concurrent change, a lost
        connection. A sent row that cannot be marked would be sent again."""
        for left in reversed(range(_TRIES)):
            try:
                with self._connection.transaction() as cursor:
                    return work(cursor)
            except Exception as error:
                if isinstance(error, VeilError) or not left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _send(self, rows: Sequence[_Row]) -> list[Sent | Exception]:
        """One result a row. Rows of one group are sent one after the other, because a service may refuse one message of
        a batch and accept the next. After a temporary failure, the rest of the group waits and gets the same result."""
        unreadable = ParameterInvalid(parameter="message", reason="the row holds no message")
        results: list[Sent | Exception] = [unreadable] * len(rows)
        read = {place: from_text(row.text) for place, row in enumerate(rows)}
        whole = {place: self._marked(rows[place], message) for place, message in read.items() if message is not None}
        lines, turn = self._lines(whole), 0
        while lines:
            going = []
            for line, result in zip(lines, self._sent([whole[line[turn]] for line in lines]), strict=True):
                stops = not isinstance(result, Sent) and not _hopeless(result)
                for place in line[turn:] if stops else line[turn : turn + 1]:
                    results[place] = result
                if not stops and len(line) > turn + 1:
                    going.append(line)
            lines, turn = going, turn + 1
        return results

    def _lines(self, messages: Mapping[int, Message]) -> list[list[int]]:
        """Indexes of the rows, in lists that must keep their order; only a FIFO queue's groups have such an order."""
        fifo = self._queue.capabilities.native_fifo
        lines: dict[int | str, list[int]] = {}
        for place, message in messages.items():
            lines.setdefault(place if message.group is None or not fifo else message.group, []).append(place)
        return list(lines.values())

    def _sent(self, messages: Sequence[Message]) -> Sequence[Sent | Exception]:
        try:
            return self._queue.send_batch(messages)
        except VeilError as error:
            return [error] * len(messages)
        except Exception as error:  # noqa: BLE001 the application's own code in a pattern: a rule for routes, a keyring
            if len(messages) == 1 or self._closing:
                return [error] * len(messages)
            return [result for message in messages for result in self._sent([message])]

    def _marked(self, row: _Row, message: Message) -> Message:
        """The message with its id, where the queue can carry it and the message has room for it."""
        capabilities = self._queue.capabilities
        if capabilities.attributes and (attributes_room(message, capabilities) or ATTRIBUTE in message.attributes):
            message = replace(message, attributes={**message.attributes, ATTRIBUTE: row.id})
        return replace(message, deduplication_id=row.id) if capabilities.native_fifo else message

    def _mark(self, rows: Sequence[_Row], results: Sequence[Sent | Exception]) -> None:
        table = self._outbox.table
        mine = "WHERE position = ? AND holder = ?"

        def mark(cursor: Any) -> None:
            values: tuple[str, ...]
            for row, result in zip(rows, results, strict=True):
                if isinstance(result, Sent):
                    what, values = f"sent = {self._now()}", ()
                elif _hopeless(result):
                    log.error("row %s of %s can never be sent: %s", row.id, table, result)
                    what, values = "failure = ?", (str(result),)
                else:
                    what, values = "held_until = NULL", ()
                statement = f"UPDATE {table} SET holder = NULL, {what} {mine}"
                self._outbox.run(cursor, statement, (*values, row.position, self._holder))

        self._tried(mark)


def _hopeless(error: Exception) -> bool:
    """Whether this message can never be sent, whatever happens to the queue, to the keys of one that encrypts, and to
    the function `by` of one that routes."""
    if isinstance(error, ParameterInvalid) and error.parameter in ("keys", "by"):
        return False
    return isinstance(error, ParameterInvalid | MessageTooLarge | CapabilityMissing)
