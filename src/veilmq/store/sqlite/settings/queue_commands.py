"""Commands on queues: create, change, delete, purge, describe; and their plans: store, put in force, revert.

Strategy: a command is checked first and writes afterwards; its changes in memory are undone with the batch. Purge and
delete touch no message: the old generation becomes garbage, which the sweeper collects. Lists are in
queue_lists.py.

A queue's plans are one small row, and one value in memory that claims use. Every change that can affect which plan is
in force (a suggestion, the owner's settings) ends in `reconsider_plans`, and each change of the plan in force is an
event.
"""

from collections.abc import Mapping
from copy import copy
from typing import Final

import apsw
import msgspec

from veilmq.model import commands, errors
from veilmq.model.events import Event, Kind
from veilmq.model.instant import Instant
from veilmq.model.outcomes import (
    Outcome,
    Purged,
    QueueChanged,
    QueueCreated,
    QueueDeleted,
    QueueDescribed,
)
from veilmq.model.settings.queue import (
    FIFO_SUFFIX,
    LEASE_SETTINGS,
    Adaptive,
    DeduplicationScope,
    PlanState,
    QueueKey,
    QueueSettings,
    RedriveAllowPolicy,
    RedrivePermission,
    SettingsChange,
    alias_key,
    effective,
    is_alias,
    is_held_back,
    same_leases,
    with_change,
)
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import SETTINGS_ENCODER, LiveQueue, Queues
from veilmq.store.sqlite.leases.expiry import look_for_due
from veilmq.store.sqlite.settings.fifo_delays import retime

_RETURNS_MAX: Final = 1_000


def create(writer: Writer, command: commands.CreateQueue) -> Outcome:
    """Create a queue; idempotent if the same queue exists."""
    settings = with_change(with_change(QueueSettings(), command.defaults), command.change)
    present = writer.queues.by_key.get(command.queue)
    if present is not None:
        wanted = settings if command.compare_all else with_change(present.settings, command.change)
        wanted = _with_unnamed(wanted, present.settings, command.change)
        difference = _difference(present.settings, wanted, command.change.get("labels", {}))
        if difference is not None:
            return errors.QueueExists(queue=str(command.queue), setting=difference)
        return QueueCreated(present.info(), created=False)
    refusal = _cannot_create(writer, command, settings)
    if refusal is not None:
        return refusal
    incarnation, generation = writer.next_number("queue"), writer.next_generation()
    key, now = command.queue, writer.now
    writer.write(
        "INSERT INTO queue (incarnation, account, region, name, generation, created, modified, settings)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (incarnation, key.account, key.region, key.name, generation, now, now, SETTINGS_ENCODER.encode(settings)),
    )
    queue = LiveQueue(key, incarnation, generation, now, settings)
    writer.queues.add(queue)
    writer.forget_queue()
    writer.undo(lambda: writer.queues.remove(queue))
    _record(writer, Kind.QUEUE_CREATED, command, queue, recorded_settings(key, settings))
    return QueueCreated(queue.info(), created=True)


def _difference(present: QueueSettings, wanted: QueueSettings, named: dict[str, str]) -> str | None:
    """The first setting that differs. If it is `labels`: the first label that differs, named ones first."""
    for name in QueueSettings.__struct_fields__:
        one, other = getattr(present, name), getattr(wanted, name)
        if one == other or (name == "redrive_allow" and _allowed(one) == _allowed(other)):
            continue
        if name == "labels":
            label: str = next(label for label in {**named, **one, **other} if one.get(label) != other.get(label))
            return label
        return name
    return None


def _allowed(allow: RedriveAllowPolicy | None) -> frozenset[QueueKey] | None:
    """The sources that it allows; None: all. Giving the default explicitly is the same as leaving it out."""
    if allow is None or allow.permission is RedrivePermission.ALLOW_ALL:
        return None
    return frozenset(allow.sources if allow.permission is RedrivePermission.BY_QUEUE else ())


def _with_unnamed(wanted: QueueSettings, present: QueueSettings, change: SettingsChange) -> QueueSettings:
    """Settings that no protocol can name count as different only if the command names them."""
    names = ("adaptive", "alias", "first_lease_min_us", "receives_per_second_max")
    own = {name: getattr(present, name) for name in names if name not in change}
    return msgspec.structs.replace(wanted, **own)


def _cannot_create(writer: Writer, command: commands.CreateQueue, settings: QueueSettings) -> errors.VeilError | None:
    kind = _wrong_kind(settings, command.queue.name.endswith(FIFO_SUFFIX))
    wrong = kind or _wrong_alias(writer, command.queue, settings.alias)
    if wrong is not None:
        return wrong
    if command.queue in writer.queues.aliases:
        return errors.QueueExists(queue=str(command.queue), setting=errors.NAME_TAKEN)
    if writer.refusal is not None:
        return copy(writer.refusal)
    if writer.queues.per_account[command.queue.account] >= writer.options.queues_per_account_max:
        return errors.QueuesFull(account=command.queue.account, limit=writer.options.queues_per_account_max)
    if settings.redrive is not None:
        refused = _redrive_refusal(writer, command.queue, settings)
        if refused is not None:
            return refused
    if command.cooldown_us:
        key = command.queue
        row = writer.read_one(
            "SELECT max(deleted) FROM queue INDEXED BY queue_deleted"
            " WHERE deleted > ? AND account = ? AND region = ? AND name = ?",
            (writer.now - command.cooldown_us, key.account, key.region, key.name),
        )
        if row is not None and row[0] is not None:
            return errors.QueueDeletedRecently(queue=str(key), wait_us=row[0] + command.cooldown_us - writer.now)
    return None


def _redrive_refusal(writer: Writer, source: QueueKey, settings: QueueSettings) -> errors.VeilError | None:
    """Whether the dead-letter queue exists, is of the same kind, and allows this source (SQS RedriveAllowPolicy).

    It may be the queue itself.
    """
    assert settings.redrive is not None
    target = writer.queues.by_key.get(settings.redrive.target)
    name = str(settings.redrive.target)
    if target is None:
        return errors.RedriveRefused(target=name, reason=errors.TARGET_MISSING)
    if target.settings.fifo != settings.fifo:
        return errors.RedriveRefused(target=name, reason="it is not of the same kind")
    allow = target.settings.redrive_allow
    if allow is None or allow.permission is RedrivePermission.ALLOW_ALL:
        return None
    if allow.permission is RedrivePermission.DENY_ALL or source not in allow.sources:
        return errors.RedriveRefused(target=name, reason="it does not allow this source")
    return None


def _wrong_kind(settings: QueueSettings, fifo: bool) -> errors.ParameterInvalid | None:
    """A setting that this kind of queue cannot have (SQS SetQueueAttributes, "FIFO queues")."""
    if settings.fifo is not fifo:
        return errors.ParameterInvalid(parameter="fifo", reason=KIND_REASON)
    per_group = settings.deduplication_scope is DeduplicationScope.GROUP
    given = {
        "content_deduplication": settings.content_deduplication,
        "deduplication_scope": per_group,
        "throughput_per_group": settings.throughput_per_group,
    }
    for name, is_set in given.items():
        if is_set and not fifo:
            return errors.ParameterInvalid(parameter=name, reason="only a FIFO queue has it")
    if settings.throughput_per_group and not per_group:
        return errors.ParameterInvalid(parameter="throughput_per_group", reason=THROUGHPUT_REASON)
    return None


def _wrong_alias(writer: Writer, key: QueueKey, alias: str | None) -> errors.VeilError | None:
    """Why the queue cannot have that alias."""
    if alias is None:
        return None
    if not is_alias(alias):
        return errors.ParameterInvalid(parameter="alias", reason=ALIAS_REASON)
    if is_alias(key.name):
        return errors.ParameterInvalid(parameter="alias", reason="every protocol allows the queue's own name")
    named = alias_key(key, alias)
    if named in writer.queues.by_key or writer.queues.aliases.get(named, key) != key:
        return errors.QueueExists(queue=str(named), setting=errors.NAME_TAKEN)
    return None


def change(writer: Writer, command: commands.ChangeQueue, queue: LiveQueue) -> Outcome:
    """Change some settings; the others stay."""
    if any(getattr(queue.settings, name) != value for name, value in command.expected.items()):
        return QueueChanged(queue.info(), changed=False)
    if command.if_version not in {None, queue.info().version}:
        return QueueChanged(queue.info(), changed=False)
    settings = with_change(queue.settings, command.change)
    wrong = _wrong_kind(settings, queue.settings.fifo) or _wrong_alias(writer, queue.key, settings.alias)
    if wrong is not None:
        return wrong
    if settings.redrive is not None and settings.redrive != queue.settings.redrive:
        if settings.redrive.target == queue.key and not command.own_dead_letters:
            return errors.RedriveRefused(target=str(queue.key), reason="it is the queue itself")
        refused = _redrive_refusal(writer, queue.key, settings)
        if refused is not None:
            return refused
    writer.touch(queue)
    queue.modified = Instant(max(writer.now, queue.modified + 1))  # no two changes make one version
    writer.write(
        "UPDATE queue SET settings = ?, modified = ? WHERE incarnation = ?",
        (SETTINGS_ENCODER.encode(settings), queue.modified, queue.incarnation),
    )
    detail: dict[str, object] = {"change": _plain(command.change)}
    if queue.modified != writer.now:
        detail["modified"] = queue.modified
    if settings.retention_us != queue.settings.retention_us:
        writer.queues.lower_expiry(queue, RETENTION_LOOK)
    if settings.fifo and settings.delay_us != queue.settings.delay_us:
        retime(writer, queue, queue.settings.delay_us, settings.delay_us)
        detail["delay_before_us"] = queue.settings.delay_us
    before = queue.settings.alias
    if settings.alias != before:
        writer.queues.set_alias(queue.key, settings.alias)
        writer.undo(lambda: writer.queues.set_alias(queue.key, before))
    policy = queue.settings.redrive
    if settings.redrive != policy:
        writer.queues.set_redrive(queue.key, settings.redrive)
        writer.undo(lambda: writer.queues.set_redrive(queue.key, policy))
    anew = any(getattr(settings, name) != getattr(queue.settings, name) for name in LEASE_SETTINGS)
    queue.settings = settings
    _record(writer, Kind.QUEUE_CHANGED, command, queue, detail)
    reconsider_plans(writer, queue, command.origin, anew=anew)
    return QueueChanged(queue.info())


def delete(writer: Writer, command: commands.DeleteQueue, queue: LiveQueue) -> Outcome:
    """Delete a queue; its messages become garbage."""
    writer.touch(queue)
    writer.write("INSERT INTO garbage VALUES (?)", (queue.generation,))
    writer.write("UPDATE queue SET deleted = ? WHERE incarnation = ?", (writer.now, queue.incarnation))
    for table in ("move_task", "job"):
        writer.write(f"DELETE FROM {table} WHERE source = ?", (queue.incarnation,))
    for table in ("plan", "send_template"):
        writer.write(f"DELETE FROM {table} WHERE incarnation = ?", (queue.incarnation,))
    gone = _emptied(writer, queue, queue.generation)
    writer.queues.remove(queue)
    writer.forget_queue()
    writer.undo(lambda: writer.queues.add(queue))
    _record(writer, Kind.QUEUE_DELETED, command, queue, gone)
    return QueueDeleted(gone["count"])


def purge(writer: Writer, command: commands.PurgeQueue, queue: LiveQueue) -> Outcome:
    """Remove all messages; messages sent from now on are not affected."""
    if queue.purged is not None and queue.purged + command.cooldown_us > writer.now:
        wait_us = queue.purged + command.cooldown_us - writer.now
        return errors.PurgeInProgress(queue=str(command.queue), wait_us=wait_us)
    writer.touch(queue)
    writer.write("INSERT INTO garbage VALUES (?)", (queue.generation,))
    gone = _emptied(writer, queue, writer.next_generation())
    queue.purged = writer.now
    writer.write(
        "UPDATE queue SET generation = ?, purged = ? WHERE incarnation = ?",
        (queue.generation, writer.now, queue.incarnation),
    )
    _record(writer, Kind.PURGED, command, queue, gone | {"watermark": writer.mark.sequence})
    return Purged(gone["count"])


def _emptied(writer: Writer, queue: LiveQueue, generation: int) -> dict[str, int]:
    """Empty the queue; how many messages went, and how many damaged ones that had left it for quarantine."""
    ((apart,),) = writer.read("SELECT count(*) FROM quarantine WHERE generation = ?", (queue.generation,))
    return {"count": queue.empty(generation)} | ({"quarantined": apart} if apart else {})


def describe(writer: Writer, command: commands.DescribeQueue, queue: LiveQueue) -> Outcome:
    """The queue's present state."""
    if queue.next_due <= writer.now:  # count as visible what a receive would see, whether a sweep has come or not
        look_for_due(writer, queue, _RETURNS_MAX)
    return QueueDescribed(queue.info(), queue.key in writer.queues.sources)


def _plain(change: SettingsChange) -> dict[str, object]:
    """Tags, labels and an access policy may hold anything: the history records that they changed, but not their
    values."""
    return {name: None if name in {"labels", "tags"} else value for name, value in change.items()}


def recorded_settings(key: QueueKey, settings: QueueSettings) -> dict[str, object]:
    """A queue's key and settings as the history records them, without tags and labels."""
    public = msgspec.structs.replace(settings, labels={}, tags={})
    return {"account": key.account, "region": key.region, "name": key.name, "settings": public}


def _record(
    writer: Writer,
    kind: Kind,
    command: commands.CreateQueue | commands.ChangeQueue | commands.DeleteQueue | commands.PurgeQueue,
    queue: LiveQueue,
    detail: Mapping[str, object],
) -> None:
    origin = writer.origin(command.origin)
    writer.events.append(Event(kind, writer.now, queue.incarnation, origin, detail=dict(detail)))


_PLANS = msgspec.msgpack.Decoder(PlanState)
_PACK_PLANS = msgspec.msgpack.Encoder()


def load_plans(connection: apsw.Connection, queues: Queues) -> None:
    """Load the queues' plans."""
    for incarnation, packed in connection.execute("SELECT incarnation, plans FROM plan"):
        queue = queues.by_incarnation.get(incarnation)
        if queue is not None:
            queue.plan = _PLANS.decode(packed)


def suggest_plan(writer: Writer, command: commands.SuggestPlan, queue: LiveQueue) -> Outcome:
    """Store a suggestion, and put it in force if the owner's settings say so."""
    if queue.settings.adaptive is Adaptive.OFF:
        return errors.CapabilityMissing(capability="plans on a queue with adaptive = off")
    writer.touch(queue)
    made = msgspec.structs.replace(command.plan, made=writer.now)
    queue.plan = msgspec.structs.replace(queue.plan, suggested=made)
    reconsider_plans(writer, queue, command.origin, suggested=True)
    return QueueChanged(queue.info())


def revert_plan(writer: Writer, command: commands.RevertPlan, queue: LiveQueue) -> Outcome:
    """Return to the previous plan; a second revert undoes the first. Without a previous plan, to the visibility
    timeout."""
    writer.touch(queue)
    before = queue.plan
    if command.made is not None and (before.applied is None or before.applied.made != command.made):
        return QueueChanged(queue.info())
    queue.plan = PlanState(
        suggested=before.suggested, applied=before.previous, previous=before.applied, reverted=before.applied
    )
    why: dict[str, object] = {"why": command.why} if command.why else {}
    _keep_plans(writer, queue, command.origin, {"plan": "reverted", "applied": queue.plan.applied, **why})
    return QueueChanged(queue.info())


def reconsider_plans(
    writer: Writer, queue: LiveQueue, origin: commands.Origin, *, suggested: bool = False, anew: bool = False
) -> None:
    """Put in force what suggestion and settings allow now. The queue must be touched before.

    anew: the owner decided about leases again, so a plan that was taken back may come back.
    """
    before = queue.plan
    settings = queue.settings
    known = before
    if anew and before.reverted is not None:
        known = msgspec.structs.replace(before, reverted=None)
    if settings.adaptive is Adaptive.OFF:
        after = PlanState(previous=known.applied or known.previous) if known.suggested or known.applied else known
    elif settings.adaptive is Adaptive.SUGGEST or known.suggested is None:
        after = known
        if known.applied is not None and settings.adaptive is Adaptive.SUGGEST:
            after = msgspec.structs.replace(known, applied=None, previous=known.applied)
    else:
        wanted = effective(known.suggested, known.applied, settings.visibility_timeout_us, settings.first_lease_min_us)
        after = known
        if not same_leases(wanted, known.applied) and not is_held_back(wanted, known):
            after = msgspec.structs.replace(known, applied=wanted, previous=known.applied)
    if after is before and not suggested:
        return
    queue.plan = after
    detail: dict[str, object] = {"plan": "suggested" if suggested else "reconsidered"}
    if suggested:
        detail["suggested"] = after.suggested
    if after.applied is not before.applied:
        detail["applied"] = after.applied
    _keep_plans(writer, queue, origin, detail)


def _keep_plans(writer: Writer, queue: LiveQueue, origin: commands.Origin, detail: dict[str, object]) -> None:
    writer.write("INSERT OR REPLACE INTO plan VALUES (?, ?)", (queue.incarnation, _PACK_PLANS.encode(queue.plan)))
    event = Event(Kind.QUEUE_CHANGED, writer.now, queue.incarnation, writer.origin(origin), detail=detail)
    writer.events.append(event)


ALIAS_REASON: Final = "expected 3 to 63 of a-z, 0-9 and single hyphens between them"
KIND_REASON: Final = f"true is needed with a name that ends in {FIFO_SUFFIX}, and refused with any other"
THROUGHPUT_REASON: Final = "the limit is per group only if deduplication is too"
RETENTION_LOOK: Final = 0
"""Expiry bound of a queue whose retention changed: the sweeper checks it at once."""
