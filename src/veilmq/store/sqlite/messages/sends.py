"""Sends: what may be sent; append to the line, or hide until the delay ends; and deduplication on FIFO queues.

Strategy: an ordinary message starts unflushed (memtable.py). Any other takes one row, in `message`, or two if it is
delayed. Each takes one event. Rows are collected and written at the end, and what the messages of a wire batch share is
computed once.

What was accepted in the last five minutes is not accepted again. Each accepted message has a row for exactly
`WINDOW_US` from its send. Its key is a digest of the queue's generation and the deduplication id, followed by a digest
of the group. So one index answers whether the queue has seen the id (by prefix) and whether the group has (by the whole
key), and a change of scope forgets nothing. A row is as small as its index entry. It outlives its message, and means
nothing after a purge or to a later queue of the same name. Rows are in the order of the sends, so the sweeper removes
ended ones from the front. The sends of a batch are looked up at once, and also compared with each other.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any, Final, NamedTuple, TypeVar

import apsw
import msgspec

from veilmq.accelerator import shortcut
from veilmq.model.commands import Extend, Origin, Send
from veilmq.model.errors import MessageTooLarge, ParameterInvalid, QueueMissing
from veilmq.model.events import Event, Kind
from veilmq.model.instant import MINUTE_US, Instant, after
from veilmq.model.messages import NO_EXTRAS, decode_xml_body, marked_id
from veilmq.model.outcomes import Outcome, Sent
from veilmq.model.settings.queue import PRIORITY_DEFAULT, DeduplicationScope, QueueSettings, XmlBody
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.history_index import deduplication_name
from veilmq.store.sqlite.batch.memtable import DEPTH_MAX, MESSAGE_BYTES_MAX
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue
from veilmq.store.sqlite.disk.rows import (
    INSERT_LEASE,
    INSERT_MESSAGE,
    LeaseRow,
    MessageRow,
    Row,
    Unflushed,
    pack_extras,
)
from veilmq.store.sqlite.messages.groups import Joining, is_grouped

WINDOW_US: Final = 5 * MINUTE_US
_ID_BYTES: Final = 16
_GROUP_BYTES: Final = 8
GROUPS_REMEMBERED: Final = 4_096
"""Groups whose digests are kept in memory."""
_PACK: Final = msgspec.msgpack.Encoder()
_FIND: Final = (
    "SELECT c.value, d.sequence, d.ends, d.message, d.md5 FROM carray(?) c CROSS JOIN deduplication d ON d.sequence ="
    " (SELECT sequence FROM deduplication INDEXED BY deduplication_key WHERE ends > ?"
    f" AND key BETWEEN c.value AND CAST(c.value || x'{'FF' * _GROUP_BYTES}' AS BLOB) LIMIT 1)"
)
_INSERT: Final = "INSERT OR REPLACE INTO deduplication VALUES (?, ?, ?, ?, ?)"


class First(msgspec.Struct, gc=False):
    """The message that was accepted."""

    sequence: int
    ends: int
    message: bytes
    md5: bytes


def identity_of(queue: LiveQueue, command: Send) -> str | None:
    """The deduplication id: the sender's, or the SHA-256 of the body; None if it is required but missing."""
    if command.extras.deduplication_id is not None:
        return command.extras.deduplication_id
    return sha256(command.body.encode()).hexdigest() if queue.settings.content_deduplication else None


class Key(NamedTuple):
    """The keys under which a message is known in the window."""

    wanted: bytes
    """Prefix of the keys of duplicates."""
    own: bytes


def key_of(queue: LiveQueue, group: str, identity: str) -> Key:
    """The keys of a message."""
    own = blake2b(_PACK.encode((queue.generation, identity)), digest_size=_ID_BYTES).digest()
    by_group = queue.settings.deduplication_scope is DeduplicationScope.GROUP
    own_in_group = own + _digest_of(group)
    return Key(own_in_group if by_group else own, own_in_group)


@lru_cache(GROUPS_REMEMBERED)
def _digest_of(group: str) -> bytes:
    return blake2b(group.encode(), digest_size=_GROUP_BYTES).digest()


class Window:
    """The entries in force for one set of sends; `flush` writes the new ones."""

    def __init__(self, writer: Writer, keys: Sequence[Key]) -> None:
        self._writer = writer
        self._new: list[Row] = []
        asked = {key.wanted for key in keys}
        rows = writer.read(_FIND, (apsw.carray(tuple(asked)), writer.now)) if asked else []
        self._firsts = {key: First(*rest) for key, *rest in rows}

    def absorbed(self, queue: LiveQueue, command: Send, key: Key) -> Sent | None:
        """The answer to a duplicate, and record its event; None if the message is not a duplicate."""
        first = self._firsts.get(key.wanted)
        if first is None:
            return None
        writer = self._writer
        settings = queue.settings
        sent = Instant(first.ends - WINDOW_US)
        writer.events.append(
            Event(
                Kind.DUPLICATE_ABSORBED,
                writer.now,
                queue.incarnation,
                writer.origin(command.origin),
                first.message,
                first.sequence,
                sent=sent,
                body_bytes=len(command.body.encode()),
                group=command.extras.group,
                type=command.extras.type,
                detail={"same_body": first.md5 == command.md5},
            )
        )
        visible, expires = Instant(sent + settings.delay_us), Instant(sent + settings.retention_us)
        return Sent(first.message, first.sequence, sent, visible, expires, duplicate=True)

    def took(self, command: Send, key: Key, sent: Sent) -> None:
        """The message was accepted: add it."""
        first = self._firsts[key.wanted] = First(sent.sequence, sent.sent + WINDOW_US, sent.id, command.md5)
        self._new.append((first.sequence, first.ends, key.own, first.message, first.md5))

    def flush(self) -> None:
        """Write what was accepted, replacing ended rows of the same key."""
        if self._new:
            self._writer.insert_many(_INSERT, self._new)


Append = Callable[[LiveQueue, Send, bytes], Sent]
DELAY_REASON = "a FIFO queue has one delay for all its messages"
GROUP_REASON = "a message of a FIFO queue must have a group"
IDENTITY_REASON = "the queue does not deduplicate by content, so that a message must have a deduplication id"


def send_fifo(
    writer: Writer, asked: Sequence[tuple[LiveQueue, Send]], joining: Joining, append: Append
) -> list[Outcome]:
    """Accept the messages that are valid and not duplicates, in the order of the commands."""
    prepared = [_prepare(queue, command) for queue, command in asked]
    names: dict[int, tuple[LiveQueue, set[str]]] = {}
    keys = []
    for (queue, _), ready in zip(asked, prepared, strict=True):
        if not isinstance(ready, ParameterInvalid):
            command, key = ready
            assert command.extras.group is not None
            if queue.generation not in names:
                names[queue.generation] = (queue, set())
            names[queue.generation][1].add(command.extras.group)
            keys.append(key)
    for queue, wanted in names.values():
        joining.find(queue, wanted)
    window = Window(writer, keys)
    outcomes: list[Outcome] = []
    for (queue, _), ready in zip(asked, prepared, strict=True):
        if isinstance(ready, ParameterInvalid):
            outcomes.append(ready)
            continue
        command, key = ready
        sent = window.absorbed(queue, command, key)
        if sent is None:
            identity = command.extras.deduplication_id
            assert identity is not None
            message = marked_id(writer.next_id(), identity)
            writer.index.add(deduplication_name(message))
            sent = append(queue, command, message)
            window.took(command, key, sent)
        outcomes.append(sent)
    window.flush()
    return outcomes


def _prepare(queue: LiveQueue, command: Send) -> tuple[Send, Key] | ParameterInvalid:
    """The command with its deduplication id, and its key; or what is wrong with the command."""
    extras = command.extras
    group = extras.group
    if group is None:
        return ParameterInvalid(parameter="group", reason=GROUP_REASON)
    if command.delay_us:
        return ParameterInvalid(parameter="delay_us", reason=DELAY_REASON)
    identity = identity_of(queue, command)
    if identity is None:
        return ParameterInvalid(parameter="deduplication_id", reason=IDENTITY_REASON)
    if extras.deduplication_id is None:
        extras = msgspec.structs.replace(extras, deduplication_id=identity)
        command = msgspec.structs.replace(command, extras=extras, delay_us=None)
    elif command.delay_us is not None:  # a delay of 0 means none of its own: the queue's delay applies
        command = msgspec.structs.replace(command, delay_us=None)
    return command, key_of(queue, group, identity)


DEAD_REASON: Final = "the message would be dead before it is visible"
_SENT: Final = int(Kind.SENT)
_PLAIN_ROWS: Final = shortcut(
    "plain_rows", Send, NO_EXTRAS, MessageRow, Unflushed, Event, Sent, PRIORITY_DEFAULT, _SENT
)  # fmt: skip


def send_all(writer: Writer, commands: Sequence[Send]) -> list[Outcome]:
    """Append messages, in the order of the commands."""
    appending = _Appending(writer)
    append, types = appending.append, writer.types
    fifo: list[tuple[LiveQueue, Send]] = []
    outcomes = appending.append_plain(commands)
    while (done := len(outcomes)) < len(commands):
        command, before = commands[done], commands[done - 1]
        if done and (command.queue is not before.queue or command.origin is not before.origin):  # others begin
            outcomes += appending.append_plain(commands[done:])
            if len(outcomes) > done:
                continue
        queue = writer.queue(command.queue)
        if queue is None:
            outcomes.append(QueueMissing(queue=str(command.queue)))
            continue
        if command.from_xml:
            stored = as_stored(queue, command)
            if isinstance(stored, ParameterInvalid):
                outcomes.append(stored)
                continue
            command = stored
        command = types.typed(command)
        settings = queue.settings
        if command.size_bytes > settings.message_bytes_max:
            outcomes.append(MessageTooLarge(size_bytes=command.size_bytes, limit_bytes=settings.message_bytes_max))
        elif writer.refusal is not None:
            outcomes.append(copy(writer.refusal))
        elif command.must_appear and _dies_hidden(settings, command):
            outcomes.append(ParameterInvalid(parameter="ttl_us", reason=DEAD_REASON))
        elif settings.fifo:
            fifo.append((queue, command))
            outcomes.append(None)
        else:
            outcomes.append(append(queue, command))
    if fifo:
        taken = iter(send_fifo(writer, fifo, appending.joining, append))
        outcomes = [next(taken) if outcome is None else outcome for outcome in outcomes]
    appending.flush()
    return outcomes


def _dies_hidden(settings: QueueSettings, command: Send) -> bool:
    """Whether the message expires (own time to live or the queue's retention) before its delay ends."""
    life_us = settings.retention_us if command.ttl_us is None else command.ttl_us
    return life_us <= (settings.delay_us if command.delay_us is None else command.delay_us)


WithBody = TypeVar("WithBody", Send, Extend)


def as_stored(queue: LiveQueue, command: WithBody) -> WithBody | ParameterInvalid:
    """The command with its body as the queue's `xml_body` stores it."""
    if queue.settings.xml_body != XmlBody.BASE64 or command.body is None:
        return command
    decoded = decode_xml_body(command.body)
    if isinstance(decoded, ParameterInvalid):
        return decoded
    size_bytes = command.size_bytes - len(command.body.encode()) + decoded.size_bytes
    return msgspec.structs.replace(command, body=decoded.body, md5=decoded.md5, size_bytes=size_bytes)


class _Appending:
    """Appends messages to their lines, or hides them until their delay ends; `flush` writes their rows."""

    def __init__(self, writer: Writer) -> None:
        self.joining = Joining(writer)
        self._writer = writer
        self._messages: list[MessageRow] = []
        self._hidden: list[LeaseRow] = []
        self._depth = 0 if writer.options.disorder else DEPTH_MAX
        """An ordinary message starts unflushed if its queue is no deeper than this."""
        self._queue: LiveQueue | None = None
        self._sender: Origin | None = None

    def _meet(self, queue: LiveQueue, sender: Origin) -> None:
        """Compute once what the messages of a wire batch share."""
        writer, settings = self._writer, queue.settings
        writer.touch(queue)
        self._queue, self._sender = queue, sender
        self._origin = writer.origin(sender)
        self._delay_us = settings.delay_us
        self._expires = Instant(writer.now + settings.retention_us)

    def append_plain(self, commands: Sequence[Send]) -> list[Any]:
        """With the accelerator: append as many of the first messages as are plain, for one queue and from one sender.
        For each it does what `append` does."""
        if _PLAIN_ROWS is None or not commands:
            return []
        writer, opening = self._writer, commands[0]
        sender = opening.origin
        queue = writer.queue(opening.queue)
        if queue is None or queue.groups is not None or writer.refusal is not None or writer.types.reads_bodies:
            return []
        settings, room = queue.settings, self._depth - queue.visible
        if room <= 0 or settings.fifo or settings.delay_us:
            return []
        if opening.size_bytes > settings.message_bytes_max or opening.from_xml or opening.must_appear:
            return []  # it may be refused, and then its sender is not recorded
        self._meet(queue, sender)
        now, expires, before = writer.now, self._expires, writer.mark.sequence
        shared = (
            opening.queue, sender, queue.generation, queue.incarnation, self._origin, sender.principal, now,
            expires, before, min(MESSAGE_BYTES_MAX, settings.message_bytes_max),
        )  # fmt: skip
        first = commands if len(commands) <= room else commands[:room]
        ids = writer.ids(len(first))
        (rows, unflushed, events, sent), size_bytes = _PLAIN_ROWS(first, ids, shared)
        count = len(rows)
        if count:
            del ids[-count:]
            writer.mark.sequence += count
            writer.events += events
            writer.memtable.add_all(queue, rows, unflushed, size_bytes)
            queue.visible += count
            queue.woken += count
            if expires < queue.next_expiry:
                writer.queues.lower_expiry(queue, expires)
        return sent  # type: ignore[no-any-return]

    def append(self, queue: LiveQueue, command: Send, message: bytes | None = None) -> Sent:
        """Append one message that passed all checks. message: its id, if it is not just any."""
        sender = command.origin
        if queue is not self._queue or sender is not self._sender:
            self._meet(queue, sender)
        writer, origin = self._writer, self._origin
        now = writer.now
        extras = command.extras
        group = extras.group
        kind = extras.type
        priority = command.priority
        delay_us = self._delay_us if command.delay_us is None else command.delay_us
        own_expiry = None if command.ttl_us is None else after(now, command.ttl_us)
        expires = self._expires if own_expiry is None else own_expiry
        sequence = writer.next_sequence()
        if message is None:
            message = writer.next_id()
        body = command.body.encode()
        line = priority
        if group is not None and is_grouped(queue, priority):
            line = self.joining.join(queue, group, sequence, hidden=delay_us > 0)
        in_line = 0 if delay_us and not queue.settings.fifo else 1
        packed = None if extras is NO_EXTRAS else pack_extras(extras)
        row = MessageRow(
            sequence, queue.generation, line, in_line, priority, message, now, own_expiry, sender.principal, group,
            kind, packed, command.md5, body,
        )  # fmt: skip
        visible = now
        if delay_us:
            visible = self._hide(queue, row, delay_us)
        elif (
            group is None
            and queue.groups is None
            and queue.visible < self._depth
            and (size_bytes := row.size_bytes) <= MESSAGE_BYTES_MAX
        ):
            writer.memtable.add(queue, Unflushed(row, extras), size_bytes)
            queue.visible += 1
            queue.woken += 1
        else:
            self._append_row(queue, row)
        if expires < queue.next_expiry:
            writer.queues.lower_expiry(queue, expires)
        detail = detail_of(priority, own_expiry)
        # Positional: keyword arguments would take nearly a third more instructions.
        writer.events.append(Event(
            _SENT, now, queue.incarnation, origin, message, sequence, 0, 0, None, None, now, visible, None, len(body),
            group, kind, detail,
        ))  # fmt: skip
        handle = writer.receipts.seal(queue.incarnation, sequence, 0, 0) if command.wants_handle else ""
        return Sent(message, sequence, now, visible, expires, handle)

    def _hide(self, queue: LiveQueue, row: MessageRow, delay_us: int) -> Instant:
        """Store a delayed message; returns when its delay ends."""
        now = self._writer.now
        visible = Instant(now + delay_us)
        self._messages.append(row)
        self._hidden.append(
            LeaseRow(row.sequence, queue.generation, row.line, row.in_line, 1, visible, 0, 0, now, None, self._origin)
        )
        queue.delayed += 1
        self._writer.queues.lower_due(queue, visible)
        return visible

    def _append_row(self, queue: LiveQueue, row: MessageRow) -> None:
        """Append a message to its line, with a row at once."""
        self._messages.append(row)
        if row.line <= PRIORITY_LINES_MAX:
            queue.ready[row.line] = queue.ready.get(row.line, 0) + 1
        queue.visible += 1
        queue.woken += not queue.settings.fifo

    def flush(self) -> None:
        """Write the rows, those of new groups first."""
        self.joining.flush()
        if self._messages:
            self._writer.insert_many(INSERT_MESSAGE, [msgspec.structs.astuple(each) for each in self._messages])
        if self._hidden:
            self._writer.insert_many(INSERT_LEASE, self._hidden)


def detail_of(priority: int, own_expiry: int | None) -> dict[str, int] | None:
    """The detail of the event with which a message enters a queue; None for an ordinary message."""
    if own_expiry is None and priority == PRIORITY_DEFAULT:
        return None
    return {"priority": priority} if own_expiry is None else {"priority": priority, "expires": own_expiry}
