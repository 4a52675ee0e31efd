"""The reference model's settings: creations, changes and plans, and what they allow a receive.

Strategy: as reference.py. Whether a change is right is asked in the store's order, so that of two wrong things the same
one is named. What `model/settings/queue.py` says a plan may become is taken from there.
"""

from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING

import msgspec

from veilmq.model.commands import ChangeQueue, CreateQueue, Receive, RevertPlan, SuggestPlan
from veilmq.model.errors import (
    CapabilityMissing,
    ParameterInvalid,
    QueueExists,
    RateExceeded,
    RedriveRefused,
    VeilError,
)
from veilmq.model.instant import SECOND_US
from veilmq.model.messages.states import State
from veilmq.model.outcomes import Outcome, QueueChanged, QueueCreated
from veilmq.model.settings.queue import (
    LEASE_SETTINGS,
    Adaptive,
    DeduplicationScope,
    PlanState,
    QueueSettings,
    effective,
    is_held_back,
    same_leases,
)

if TYPE_CHECKING:
    from tests.support.reference import Message, Queue, Reference


def create(reference: "Reference", command: CreateQueue, outcome: Outcome) -> None:
    """Judge a CreateQueue."""
    settings = QueueSettings(**command.change)
    present = reference.queues.get(command.queue)
    refusal = _refusal(reference, settings) if present is None else None
    if refusal is not None:
        assert type(outcome) is refusal, outcome
    elif present is None:
        assert isinstance(outcome, QueueCreated)
        assert outcome.created
        reference.add(command.queue, settings)
    elif all(getattr(present.settings, name) == value for name, value in command.change.items()):
        assert isinstance(outcome, QueueCreated)
        assert not outcome.created
    else:
        assert type(outcome) is QueueExists, outcome


def change(reference: "Reference", command: ChangeQueue, outcome: Outcome) -> None:
    """Judge a ChangeQueue."""
    queue = reference.named(command.queue, outcome)
    if queue is None:
        return
    before = queue.settings
    settings = msgspec.structs.replace(before, **command.change)
    refusal = _refusal(reference, settings, before)
    if refusal is not None:
        assert type(outcome) is refusal, outcome
        return
    if any(getattr(settings, name) != getattr(before, name) for name in LEASE_SETTINGS):
        queue.plan = msgspec.structs.replace(queue.plan, reverted=None)
    queue.settings = settings
    if settings.fifo and settings.delay_us != before.delay_us:
        _retime(reference, queue, before.delay_us)
    _reconsider(queue)
    assert isinstance(outcome, QueueChanged), outcome
    assert (outcome.info.settings, outcome.info.plan) == (queue.settings, queue.plan)


def _refusal(
    reference: "Reference", settings: QueueSettings, before: QueueSettings | None = None
) -> type[VeilError] | None:
    own = settings.content_deduplication or settings.deduplication_scope is DeduplicationScope.GROUP
    if own and not settings.fifo:
        return ParameterInvalid
    redrive = settings.redrive
    if redrive is None or (before is not None and before.redrive == redrive):
        return None
    target = reference.queues.get(redrive.target)
    wrong = target is None or target.settings.fifo != settings.fifo
    return RedriveRefused if wrong else None


def _retime(reference: "Reference", queue: "Queue", old_us: int) -> None:
    """FIFO: the queue's delay acts on all that nobody received, unless a handle has set another."""
    for message in queue.messages:
        due = message.sent + queue.settings.delay_us
        if message.attempt or message.state is State.GONE:
            continue
        if message.state is not State.READY and message.due != message.sent + old_us:
            continue
        if message.state is State.DELAYED:
            message.due = due
            if due <= reference.now:
                message.step("delay ends")
        elif due > reference.now and queue.settings.delay_us > old_us:
            message.due = due
            message.step("delay is raised (FIFO)")
        elif due <= reference.now and message.state is State.RETURNED:
            message.due = due


def plan(reference: "Reference", command: SuggestPlan | RevertPlan, outcome: Outcome) -> None:
    """Judge a SuggestPlan or a RevertPlan."""
    queue = reference.named(command.queue, outcome)
    if queue is None:
        return
    before = queue.plan
    if isinstance(command, RevertPlan):
        if command.made is None or (before.applied is not None and before.applied.made == command.made):
            queue.plan = PlanState(
                suggested=before.suggested,
                applied=before.previous,
                previous=before.applied,
                reverted=before.applied,
            )
    elif queue.settings.adaptive is Adaptive.OFF:
        assert type(outcome) is CapabilityMissing, outcome
        return
    else:
        suggested = msgspec.structs.replace(command.plan, made=reference.now)
        queue.plan = msgspec.structs.replace(before, suggested=suggested)
        _reconsider(queue)
    assert isinstance(outcome, QueueChanged), outcome
    assert outcome.info.plan == queue.plan


def _reconsider(queue: "Queue") -> None:
    """What is in force by the suggestion and the settings."""
    known, settings = queue.plan, queue.settings
    wanted = None
    if settings.adaptive is Adaptive.OFF and known.suggested is None and known.applied is None:
        return
    if settings.adaptive is Adaptive.APPLY:
        if known.suggested is None:
            return
        wanted = effective(known.suggested, known.applied, settings.visibility_timeout_us, settings.first_lease_min_us)
    held = wanted is not None and is_held_back(wanted, known)
    if not same_leases(wanted, known.applied) and not held:
        known = msgspec.structs.replace(known, applied=wanted, previous=known.applied)
    queue.plan = PlanState(previous=known.previous) if settings.adaptive is Adaptive.OFF else known


def lease_us(message: "Message", command: Receive) -> int:
    """For how long a receive leases the message."""
    queue = message.queue
    applied = queue.plan.applied
    planned_us = None if applied is None else applied.lease_of(message.type)
    wishes = (command.lease_us, message.lease_hint_us, planned_us)
    return next((wish for wish in wishes if wish is not None), queue.settings.visibility_timeout_us)


def _level(queue: "Queue", rate: int, now: int) -> Fraction:
    """How many messages the queue may hand out now; below 0: it was ahead of its rate."""
    known, level, at = queue.bucket
    return min(Fraction(rate), level + Fraction((now - at) * rate, SECOND_US)) if known == rate else Fraction(rate)


def within(queue: "Queue", command: Receive, outcome: Outcome, now: int) -> Receive | None:
    """The receive with what is left of the queue's rate; None if it was refused, as it must be."""
    rate = queue.settings.receives_per_second_max
    if rate is None:
        return command
    left = floor(_level(queue, rate, now))
    if left <= 0 and queue.counts()[0]:
        assert type(outcome) is RateExceeded, outcome
        return None
    return msgspec.structs.replace(command, count_max=min(command.count_max, max(left, 1)))


def handed(queue: "Queue", count: int, now: int) -> None:
    """So many messages were handed out."""
    rate = queue.settings.receives_per_second_max
    if rate is not None and count:
        queue.bucket = (rate, _level(queue, rate, now) - count, now)
