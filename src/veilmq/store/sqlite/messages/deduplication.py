"""Sends to FIFO queues: what may be sent; and deduplication: what was accepted in the last five minutes is not accepted
again.

Strategy: each accepted message has a row for exactly `WINDOW_US` from its send. Its key is a digest of the queue's
generation and the deduplication id, followed by a digest of the group. So one index answers whether the queue has seen
the id (by prefix) and whether the group has (by the whole key), and a change of scope forgets nothing. A row is as
small as its index entry. It outlives its message, and means nothing after a purge or to a later queue of the same name.
Rows are in the order of the sends, so the sweeper removes ended ones from the front. The sends of a batch are looked up
at once, and also compared with each other.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b, sha256
from typing import Final, NamedTuple

import apsw
import msgspec

from veilmq.model.commands import Send
from veilmq.model.errors import ParameterInvalid
from veilmq.model.events import Event, Kind
from veilmq.model.instant import MINUTE_US, Instant
from veilmq.model.outcomes import Outcome, Sent
from veilmq.model.settings.queue import DeduplicationScope
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.disk.rows import Row
from veilmq.store.sqlite.messages.groups import Joining

WINDOW_US: Final = 5 * MINUTE_US
_ID_BYTES: Final = 16
_GROUP_BYTES: Final = 8
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
    own_in_group = own + blake2b(group.encode(), digest_size=_GROUP_BYTES).digest()
    return Key(own_in_group if by_group else own, own_in_group)


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


Append = Callable[[LiveQueue, Send], Sent]
DELAY_REASON = "a FIFO queue has one delay for all its messages"
GROUP_REASON = "a message of a FIFO queue must have a group"
IDENTITY_REASON = "the queue does not deduplicate by content, so that a message must have a deduplication id"


def send_fifo(
    writer: Writer, asked: Sequence[tuple[LiveQueue, Send]], joining: Joining, append: Append
) -> list[Outcome]:
    """Accept the messages that are valid and not duplicates, in the order of the commands."""
    prepared = [_prepare(writer, queue, command) for queue, command in asked]
    names: dict[int, tuple[LiveQueue, set[str]]] = {}
    keys = []
    for (queue, _), ready in zip(asked, prepared, strict=True):
        if not isinstance(ready, ParameterInvalid):
            command, key = ready
            assert command.extras.group is not None
            names.setdefault(queue.generation, (queue, set()))[1].add(command.extras.group)
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
            sent = append(queue, command)
            window.took(command, key, sent)
        outcomes.append(sent)
    window.flush()
    return outcomes


def _prepare(writer: Writer, queue: LiveQueue, command: Send) -> tuple[Send, Key] | ParameterInvalid:
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
