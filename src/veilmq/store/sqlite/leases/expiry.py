"""Ends leases, delays and messages whose time is over.

Strategy: what is due is applied by the next command that looks at it (a claim, a use of a handle) or by the sweeper,
whichever is first. It is recorded once, with the instant at which it was due.
"""

from typing import Final

from veilmq.model.commands import SERVER
from veilmq.model.events import ENDED_BY_ITSELF, Kind
from veilmq.model.instant import FOREVER, Instant
from veilmq.model.settings.topic import is_hidden
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import FIRST_DUE, LiveQueue
from veilmq.store.sqlite.messages import Place, event_of, flush, numbers, packed_places, read_places, uncount
from veilmq.store.sqlite.messages.dead_letters import dead_letter, remove

RETURNS_OF_BATCH: Final = 1_024
"""How many leases may be ended by the commands of one batch; beyond, `RETURNS_MIN` a command."""
RETURNS_MIN: Final = 16
_DUE: Final = packed_places(
    "(SELECT * FROM lease INDEXED BY lease_hidden WHERE generation = ? AND hidden = 1 AND due <= ? ORDER BY due"
    " LIMIT ?) l CROSS JOIN message m ON m.sequence = l.sequence"
)


def look_for_due(writer: Writer, queue: LiveQueue, count_max: int) -> None:
    """`return_due` within a batch's limit: the first commands of a batch end most of the due leases, the later ones no
    more than they need."""
    flush(writer)
    room = max(RETURNS_OF_BATCH - writer.returned, RETURNS_MIN)
    writer.returned += return_due(writer, queue, min(count_max, room))


def return_due(writer: Writer, queue: LiveQueue, count_max: int) -> int:
    """Make up to `count_max` messages visible whose lease or delay has ended; returns how many."""
    ended = read_places(writer, _DUE, (queue.generation, writer.now, count_max))
    writer.touch(queue)
    at_cap = queue.in_flight >= queue.cap
    if ended:
        sequences = numbers([each.sequence for each in ended])
        writer.write("UPDATE lease SET hidden = 0 WHERE sequence IN (SELECT value FROM carray(?))", (sequences,))
    for each in ended:
        if queue.groups is not None:
            queue.groups.leaves(each.line, in_flight=each.attempt > 0)
        if each.attempt == 0:
            queue.delayed -= 1
            continue
        queue.in_flight -= 1
        assert each.origin is not None
        event = event_of(ENDED_BY_ITSELF[each.ending], each.due, queue, each.origin, each)
        event.visible_since = each.due
        writer.events.append(event)
    queue.returned += len(ended)
    queue.visible += len(ended)
    if ended and (at_cap or not queue.settings.fifo):
        queue.woken += len(ended)
    queue.next_due = FOREVER
    ((following,),) = writer.read(FIRST_DUE, (queue.generation,))
    if following is not None:
        writer.queues.lower_due(queue, following)
    return len(ended)


def end_lease(writer: Writer, queue: LiveQueue, place: Place) -> None:
    """A late use of a handle that still counts: record the lease's end in the history before it."""
    writer.touch(queue)
    writer.write("UPDATE lease SET hidden = 0 WHERE sequence = ?", (place.sequence,))
    uncount(queue, place)
    origin = place.origin or writer.origin(SERVER)
    event = event_of(ENDED_BY_ITSELF[place.ending], place.due, queue, origin, place)
    event.visible_since = place.due
    writer.events.append(event)
    place.hidden = False
    queue.returned += 1
    queue.visible += 1
    queue.woken += not queue.settings.fifo  # on FIFO the use may still be refused


def expire(writer: Writer, queue: LiveQueue, *places: Place) -> None:
    """Remove messages whose retention or own time to live is over.

    An expired push goes to its subscription's dead-letter queue, if there is one (docs/mns.md, "Pushes").
    """
    redrive = queue.settings.redrive
    if redrive is not None and is_hidden(queue.key.name):
        target = writer.queues.by_key.get(redrive.target)
        if target is not None:
            for place in places:
                dead_letter(writer, queue, place, target, expired=True)
            return
    remove(writer, queue, *places)
    for place in places:
        at = Instant(place.expires(queue.settings.retention_us) + writer.held_us)
        writer.events.append(event_of(Kind.EXPIRED, at, queue, writer.origin(SERVER), place))
