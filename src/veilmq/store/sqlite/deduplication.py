"""Deduplication of sends on FIFO queues: what was taken in the last five minutes is not taken again.

Strategy: a row for each message that was taken, for exactly `WINDOW_US` from its send: found by a digest of the queue's
incarnation, the scope (the queue, or the message's group) and the deduplication id, so that a row is as small as its
index entry, outlives its message, and means nothing to a later queue of the same name. The rows' order is that of the
sends, so the sweeper takes the ended ones from the front. The sends of a batch are looked up in one go; those that the
batch itself took count too.
"""

from collections.abc import Sequence
from hashlib import blake2b, sha256
from typing import Final

import apsw
import msgspec

from veilmq.model.commands import Send
from veilmq.model.events import Event, Kind
from veilmq.model.instant import MINUTE_US, Instant
from veilmq.model.outcomes import Sent
from veilmq.model.queue import DeduplicationScope
from veilmq.store.sqlite.inserts import Row
from veilmq.store.sqlite.queues import LiveQueue
from veilmq.store.sqlite.writer import Writer

WINDOW_US: Final = 5 * MINUTE_US
_KEY_BYTES: Final = 16
_PACK: Final = msgspec.msgpack.Encoder()
_FIND: Final = (
    "SELECT d.key, d.sequence, d.ends, d.message, d.md5 FROM carray(?) c"
    " CROSS JOIN deduplication d ON d.key = c.value WHERE d.ends > ?"
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


def key_of(queue: LiveQueue, group: str | None, identity: str) -> bytes:
    """What the window knows the message by."""
    scope = group if queue.settings.deduplication_scope is DeduplicationScope.GROUP else None
    return blake2b(_PACK.encode((queue.incarnation, scope, identity)), digest_size=_KEY_BYTES).digest()


class Window:
    """What is in force for one set of sends; `flush` writes what they added."""

    def __init__(self, writer: Writer, keys: Sequence[bytes]) -> None:
        self._writer = writer
        self._new: list[Row] = []
        rows = writer.read(_FIND, (apsw.carray(tuple(keys)), writer.now)) if keys else []
        self._firsts = {key: First(*rest) for key, *rest in rows}

    def absorbed(self, queue: LiveQueue, command: Send, key: bytes) -> Sent | None:
        """The answer to a duplicate, and its event; None for a message that is to be taken."""
        first = self._firsts.get(key)
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

    def took(self, command: Send, key: bytes, sent: Sent) -> None:
        """The message was taken."""
        first = self._firsts[key] = First(sent.sequence, sent.sent + WINDOW_US, sent.id, command.md5)
        self._new.append((first.sequence, first.ends, key, first.message, first.md5))

    def flush(self) -> None:
        """Write what was taken; a row of the same key whose time is over goes."""
        if self._new:
            self._writer.insert_many(_INSERT, self._new)
