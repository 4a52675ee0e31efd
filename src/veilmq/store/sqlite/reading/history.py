"""Reads the history from disk and adds names.

Strategy: the writer appends one row per commit (batch/writer.py), the sweeper drops whole rows from the old end
(upkeep/trimming.py), and readers decode rows on connections of their own.
"""

from collections.abc import Iterator
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.commands import LeaseSource
from veilmq.model.events import Event, EventRecord, Kind, shown_detail
from veilmq.model.instant import Instant
from veilmq.model.messages.message import id_text
from veilmq.store.reader import View

_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
_KINDS: Final = {int(kind): kind.name.lower() for kind in Kind}
_SOURCES: Final = {int(source): source.name.lower() for source in LeaseSource}


def bounds(connection: apsw.Connection) -> tuple[int, int]:
    """First offset still in the history, and the next offset to be assigned."""
    first, following = connection.execute(
        "SELECT (SELECT min(offset) FROM history), (SELECT offset FROM mark)"
    ).fetchone() or (None, 0)
    return (following if first is None else first), following


def events_from(connection: apsw.Connection, start: int) -> Iterator[tuple[int, Event]]:
    """(offset, event) of all events from offset `start` on, as stored."""
    rows = connection.cursor().execute(
        "SELECT offset, events FROM history WHERE offset >="
        " coalesce((SELECT max(offset) FROM history WHERE offset <= ?), 0) ORDER BY offset",
        (start,),
    )
    for first, packed in rows:
        for place, event in enumerate(_EVENTS.decode(packed)):
            if first + place >= start:
                yield first + place, event


class Names:
    """Replaces the numbers in stored events by names; reads each name once."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._queues: dict[int, tuple[Any, ...]] = {}
        self._origins: dict[int, tuple[Any, ...]] = {}

    def _queue(self, incarnation: int | None) -> tuple[Any, ...]:
        if incarnation is None:
            return None, None, None
        found = self._queues.get(incarnation)
        if found is None:
            row = self._view.queue_names(incarnation)
            if row is None:
                return None, None, None
            found = self._queues[incarnation] = row
        return found

    def _origin(self, number: int | None) -> tuple[Any, ...]:
        if number is None:
            return None, None, None
        found = self._origins.get(number)
        if found is None:
            found = self._origins[number] = self._view.origin_names(number) or ("", "", "")
        return found

    def record(self, offset: int, event: Event) -> EventRecord:
        """The event with its names."""
        account, region, queue = self._queue(event.queue)
        protocol, principal, client = self._origin(event.origin)
        return EventRecord(
            offset=offset,
            kind=_KINDS.get(event.kind, str(event.kind)),
            at=Instant(event.at),
            account=account,
            region=region,
            queue=queue,
            incarnation=event.queue,
            protocol=protocol,
            principal=principal,
            client=client,
            message=None if event.message is None else id_text(event.message),
            sequence=event.sequence,
            attempt=event.attempt,
            rotation=event.rotation,
            lease_us=event.lease_us,
            source=None if event.source is None else _SOURCES[event.source],
            sent=event.sent,
            visible_since=event.visible_since,
            held_us=event.held_us,
            body_bytes=event.body_bytes,
            group=event.group,
            type=event.type,
            detail=shown_detail(event.kind, event.detail),
        )
