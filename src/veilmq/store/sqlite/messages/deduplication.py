"""Deduplication of sends on FIFO queues: what was taken in the last five minutes is not taken again.

Strategy: a row for each message that was taken, for exactly `WINDOW_US` from its send. Its key is a digest of the
queue's generation and the deduplication id, and behind that one of the group: so one index answers whether the queue
has had the id (keys that begin so) and whether the group has (that very key), and nothing is forgotten when the scope
changes. A row is as small as its index entry, outlives its message, and means nothing after a purge or to a later queue
of the same name. The rows' order is that of the sends, so the sweeper takes the ended ones from the front. The sends of
a batch are looked up in one go; those that the batch itself took count too.
"""

from collections.abc import Sequence
from hashlib import blake2b, sha256
from typing import Final, NamedTuple

import apsw
import msgspec

from veilmq.model.commands import Send
from veilmq.model.events import Event, Kind
from veilmq.model.instant import MINUTE_US, Instant
from veilmq.model.outcomes import Sent
from veilmq.model.queue import DeduplicationScope
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.disk.inserts import Row

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
    """The message that was taken."""

    sequence: int
    ends: int
    message: bytes
    md5: bytes


def identity_of(queue: LiveQueue, command: Send) -> str | None:
    """The deduplication id, the sender's or the SHA-256 of the body; None: there is none, and there must be one."""
    if command.extras.deduplication_id is not None:
        return command.extras.deduplication_id
    return sha256(command.body.encode()).hexdigest() if queue.settings.content_deduplication else None


class Key(NamedTuple):
    """What the window knows a message by."""

    wanted: bytes
    """Keys that begin so are of the same message."""
    own: bytes


def key_of(queue: LiveQueue, group: str, identity: str) -> Key:
    """The keys of a message."""
    own = blake2b(_PACK.encode((queue.generation, identity)), digest_size=_ID_BYTES).digest()
    by_group = queue.settings.deduplication_scope is DeduplicationScope.GROUP
    own_in_group = own + blake2b(group.encode(), digest_size=_GROUP_BYTES).digest()
    return Key(own_in_group if by_group else own, own_in_group)


class Window:
    """What is in force for one set of sends; `flush` writes what they added."""

    def __init__(self, writer: Writer, keys: Sequence[Key]) -> None:
        self._writer = writer
        self._new: list[Row] = []
        asked = {key.wanted for key in keys}
        rows = writer.read(_FIND, (apsw.carray(tuple(asked)), writer.now)) if asked else []
        self._firsts = {key: First(*rest) for key, *rest in rows}

    def absorbed(self, queue: LiveQueue, command: Send, key: Key) -> Sent | None:
        """The answer to a duplicate, and its event; None for a message that is to be taken."""
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
        """The message was taken."""
        first = self._firsts[key.wanted] = First(sent.sequence, sent.sent + WINDOW_US, sent.id, command.md5)
        self._new.append((first.sequence, first.ends, key.own, first.message, first.md5))

    def flush(self) -> None:
        """Write what was taken; a row of the same key whose time is over goes."""
        if self._new:
            self._writer.insert_many(_INSERT, self._new)
