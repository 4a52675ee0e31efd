"""Plans of queues: stored, put in force, reverted.

Strategy: a queue's plans are one small row, and one value in memory that claims use. Every change that can affect which
plan is in force (a suggestion, the owner's settings) ends in `reconsider`, and each change of the plan in force is an
event.
"""

import apsw
import msgspec

from veilmq.model.commands import Origin, RevertPlan, SuggestPlan
from veilmq.model.errors import CapabilityMissing, QueueMissing
from veilmq.model.events import Event, Kind
from veilmq.model.outcomes import Outcome, QueueChanged
from veilmq.model.settings.plan import Adaptive, PlanState, effective, same_leases
from veilmq.store.sqlite.batch.queues import LiveQueue, Queues
from veilmq.store.sqlite.batch.writer import Writer

_DECODER = msgspec.msgpack.Decoder(PlanState)
_ENCODER = msgspec.msgpack.Encoder()


def load(connection: apsw.Connection, queues: Queues) -> None:
    """Load the queues' plans."""
    for incarnation, packed in connection.execute("SELECT incarnation, plans FROM plan"):
        queue = queues.by_incarnation.get(incarnation)
        if queue is not None:
            queue.plan = _DECODER.decode(packed)


def suggest(writer: Writer, command: SuggestPlan) -> Outcome:
    """Store a suggestion, and put it in force if the owner's settings say so."""
    queue = writer.queue(command.queue)
    if queue is None:
        return QueueMissing(queue=str(command.queue))
    if queue.settings.adaptive is Adaptive.OFF:
        return CapabilityMissing(capability="plans on a queue with adaptive = off")
    writer.touch(queue)
    made = msgspec.structs.replace(command.plan, made=writer.now)
    queue.plan = msgspec.structs.replace(queue.plan, suggested=made)
    reconsider(writer, queue, command.origin, suggested=True)
    return QueueChanged(queue.info())


def revert(writer: Writer, command: RevertPlan) -> Outcome:
    """Return to the previous plan; a second revert undoes the first. Without a previous plan, to the visibility
    timeout."""
    queue = writer.queue(command.queue)
    if queue is None:
        return QueueMissing(queue=str(command.queue))
    writer.touch(queue)
    before = queue.plan
    queue.plan = PlanState(suggested=before.suggested, applied=before.previous, previous=before.applied)
    _keep(writer, queue, command.origin, {"plan": "reverted", "applied": queue.plan.applied})
    return QueueChanged(queue.info())


def reconsider(writer: Writer, queue: LiveQueue, origin: Origin, *, suggested: bool = False) -> None:
    """Put in force what suggestion and settings allow now. The queue must be touched before."""
    before = queue.plan
    settings = queue.settings
    if settings.adaptive is Adaptive.OFF:
        after = PlanState(previous=before.applied or before.previous) if before.suggested or before.applied else before
    elif settings.adaptive is Adaptive.SUGGEST or before.suggested is None:
        after = before
        if before.applied is not None and settings.adaptive is Adaptive.SUGGEST:
            after = msgspec.structs.replace(before, applied=None, previous=before.applied)
    else:
        wanted = effective(
            before.suggested, before.applied, settings.visibility_timeout_us, settings.first_lease_min_us
        )
        after = before
        if not same_leases(wanted, before.applied):
            after = msgspec.structs.replace(before, applied=wanted, previous=before.applied)
    if after is before and not suggested:
        return
    queue.plan = after
    detail: dict[str, object] = {"plan": "suggested" if suggested else "reconsidered"}
    if suggested:
        detail["suggested"] = after.suggested
    if after.applied is not before.applied:
        detail["applied"] = after.applied
    _keep(writer, queue, origin, detail)


def _keep(writer: Writer, queue: LiveQueue, origin: Origin, detail: dict[str, object]) -> None:
    writer.write("INSERT OR REPLACE INTO plan VALUES (?, ?)", (queue.incarnation, _ENCODER.encode(queue.plan)))
    event = Event(Kind.QUEUE_CHANGED, writer.now, queue.incarnation, writer.origin(origin), detail=detail)
    writer.events.append(event)
