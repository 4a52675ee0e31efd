"""The operations on one queue: turns a request's members into commands, and their outcomes into JSON.

Strategy: one row of `OPERATIONS` each: the method and path at the admin port, the action that a key must be granted,
and two pure functions. The server's routes, the command line's HTTP calls and its calls on a directory all read this
table.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from hashlib import md5
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET

from veilmq.admin.api import Refused, described, inputs, views
from veilmq.model import commands
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.model.instant import Instant
from veilmq.model.messages import NO_EXTRAS, Attribute, Extras, first_forbidden_character
from veilmq.model.outcomes import (
    Deleted,
    Extended,
    MoveCancelled,
    MoveStarted,
    Outcome,
    Purged,
    QueueChanged,
    QueueCreated,
    QueueDeleted,
    QueueDescribed,
    Received,
    Sent,
    TemplateKept,
    TemplatesListed,
)
from veilmq.model.settings.access import Action
from veilmq.model.settings.queue import (
    PRIORITY_DEFAULT,
    TEMPLATE_BYTES_MAX,
    DropTemplate,
    KeepTemplate,
    LeasePlan,
    ListTemplates,
    QueueKey,
    RedriveAllowPolicy,
    RedrivePolicy,
    SettingsChange,
)


class Asked(NamedTuple):
    """The queue, the caller, and when the request arrived."""

    queue: QueueKey
    origin: commands.Origin
    arrived: Instant


class NamedInput(inputs.Nothing, kw_only=True):
    """The name of a template."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class TemplateInput(NamedInput):
    """A message to keep under a name."""

    message: inputs.MessageInput


class RevertInput(inputs.Nothing, kw_only=True):
    """Why the plan in force is taken back, and which: nothing is changed if another is in force by now."""

    why: Annotated[str, msgspec.Meta(max_length=1_000)] = ""
    made: Annotated[int, msgspec.Meta(ge=0, le=inputs.INSTANT_MAX)] | None = None


class Operation(NamedTuple):
    """One operation on one queue, at `method` /api/v1/queues/ACCOUNT/REGION/NAME + `suffix`."""

    name: str
    method: str
    suffix: str
    action: Action
    shape: type[Any]
    plan: Callable[[Asked, Any], Sequence[commands.AnyCommand]]
    """Raises ParameterInvalid."""
    show: Callable[[Sequence[Outcome]], dict[str, Any]]
    """Raises the outcome if it is an error; with several, the first one if none succeeded."""


def _describe(asked: Asked, _: inputs.Nothing) -> Sequence[commands.AnyCommand]:
    return (commands.DescribeQueue(queue=asked.queue, origin=asked.origin),)


def _create(asked: Asked, wanted: inputs.CreateInput) -> Sequence[commands.AnyCommand]:
    return (commands.CreateQueue(queue=asked.queue, origin=asked.origin, change=_change_of(asked.queue, wanted)),)


def _change(asked: Asked, wanted: inputs.ChangeInput) -> Sequence[commands.AnyCommand]:
    version = None if wanted.if_version is UNSET else wanted.if_version
    change = _change_of(asked.queue, wanted)
    return (commands.ChangeQueue(queue=asked.queue, origin=asked.origin, change=change, if_version=version),)


def _change_of(queue: QueueKey, wanted: inputs.SettingsInput) -> SettingsChange:
    change: SettingsChange = {
        name: value
        for name in wanted.__struct_fields__
        if name != "if_version" and (value := getattr(wanted, name)) is not UNSET
    }
    for text in (text for tag in change.get("tags", {}).items() for text in tag):
        _check_name("tags", text)
    redrive = change.get("redrive")
    if isinstance(redrive, inputs.RedriveInput):
        target = neighbour("redrive.target", queue, redrive.target)
        change["redrive"] = RedrivePolicy(target, redrive.receive_count_max)
    allow = change.get("redrive_allow")
    if isinstance(allow, inputs.RedriveAllowInput):
        change["redrive_allow"] = RedriveAllowPolicy(
            allow.permission,
            tuple(
                neighbour(f"redrive_allow.sources[{place}]", queue, each) for place, each in enumerate(allow.sources)
            ),
        )
    return change


def neighbour(path: str, queue: QueueKey, given: str | inputs.KeyInput) -> QueueKey:
    """A queue of the same account and region, by its name or as shown. Raises ParameterInvalid."""
    if isinstance(given, str):
        return _sibling(queue, given)
    if (given.account, given.region) != (queue.account, queue.region):
        reason = f"must be a queue of the same account and region, {queue.account}/{queue.region}"
        raise ParameterInvalid(parameter=path, reason=reason)
    return _sibling(queue, given.name)


def _sibling(queue: QueueKey, name: str) -> QueueKey:
    return QueueKey(queue.account, queue.region, name)


def _remove(asked: Asked, _: inputs.Nothing) -> Sequence[commands.AnyCommand]:
    return (commands.DeleteQueue(queue=asked.queue, origin=asked.origin),)


def _purge(asked: Asked, _: inputs.Nothing) -> Sequence[commands.AnyCommand]:
    return (commands.PurgeQueue(queue=asked.queue, origin=asked.origin),)


def _drop(asked: Asked, wanted: inputs.DropInput) -> Sequence[commands.AnyCommand]:
    return [
        commands.DropQuarantined(
            queue=asked.queue, origin=asked.origin, message=inputs.message_id(message, f"messages[{place}]")
        )
        for place, message in enumerate(wanted.messages)
    ]


def _suggest(asked: Asked, wanted: inputs.PlanInput) -> Sequence[commands.AnyCommand]:
    plan = LeasePlan(lease_us=wanted.lease_us, by_type=wanted.by_type, floor_us=wanted.floor_us, why=wanted.why)
    return (commands.SuggestPlan(queue=asked.queue, origin=asked.origin, plan=plan),)


def _revert(asked: Asked, wanted: RevertInput) -> Sequence[commands.AnyCommand]:
    made = None if wanted.made is None else Instant(wanted.made)
    return (commands.RevertPlan(queue=asked.queue, origin=asked.origin, why=wanted.why, made=made),)


def _send(asked: Asked, wanted: inputs.SendInput) -> Sequence[commands.AnyCommand]:
    return [_send_of(asked, place, message) for place, message in enumerate(wanted.messages)]


def _send_of(asked: Asked, place: int, message: inputs.MessageInput) -> commands.Send:
    forbidden = first_forbidden_character(message.body)
    if forbidden is not None:
        reason = f"character {forbidden} (U+{ord(message.body[forbidden]):04X}) is not allowed in a body"
        raise ParameterInvalid(parameter=f"messages[{place}].body", reason=reason)
    names = {"group": message.group, "deduplication_id": message.deduplication_id, "type": message.type}
    for field, name in names.items():
        _check_name(f"messages[{place}].{field}", name)
    attributes = tuple(
        _attribute_of(f"messages[{place}].attributes[{number}]", each) for number, each in enumerate(message.attributes)
    )
    if len({each.name for each in attributes}) < len(attributes):
        raise ParameterInvalid(parameter=f"messages[{place}].attributes", reason="two of them have one name")
    extras = NO_EXTRAS
    if attributes or message.group or message.deduplication_id or message.type:
        extras = Extras(attributes, message.group, message.deduplication_id, type=message.type)
    body = message.body.encode()
    return commands.Send(
        queue=asked.queue,
        origin=asked.origin,
        body=message.body,
        md5=md5(body, usedforsecurity=False).digest(),
        size_bytes=len(body) + sum(each.size_bytes for each in attributes),
        priority=PRIORITY_DEFAULT if message.priority is None else message.priority,
        delay_us=message.delay_us,
        ttl_us=message.ttl_us,
        extras=extras,
    )


def _keep_template(asked: Asked, wanted: TemplateInput) -> Sequence[commands.AnyCommand]:
    _check_name("name", wanted.name)
    if wanted.message.deduplication_id is not None:
        raise ParameterInvalid(parameter="message.deduplication_id", reason="a template is sent more than once")
    try:
        _send_of(asked, 0, wanted.message)
    except ParameterInvalid as error:
        parameter = error.parameter.removeprefix("messages[0].")
        raise ParameterInvalid(parameter=f"message.{parameter}", reason=error.reason) from None
    message = encode(wanted.message)
    if len(message) > TEMPLATE_BYTES_MAX:
        reason = f"a template has at most {TEMPLATE_BYTES_MAX} bytes as JSON"
        raise ParameterInvalid(parameter="message", reason=reason)
    return (KeepTemplate(queue=asked.queue, name=wanted.name, message=message, principal=asked.origin.principal),)


def _drop_template(asked: Asked, wanted: NamedInput) -> Sequence[commands.AnyCommand]:
    return (DropTemplate(queue=asked.queue, name=wanted.name),)


def _templates(asked: Asked, _: inputs.Nothing) -> Sequence[commands.AnyCommand]:
    return (ListTemplates(queue=asked.queue),)


def _check_name(path: str, name: str | None) -> None:
    """Check that every protocol can carry the name."""
    if name is not None and first_forbidden_character(name) is not None:
        raise ParameterInvalid(parameter=path, reason="a character of it is not allowed")


def _attribute_of(path: str, given: inputs.AttributeInput) -> Attribute:
    _check_name(f"{path}.name", given.name)
    _check_name(f"{path}.type", given.type)
    if not given.type.startswith("Binary"):
        if first_forbidden_character(given.value) is not None:
            raise ParameterInvalid(parameter=f"{path}.value", reason="a character of it is not allowed")
        return Attribute(given.name, given.type, given.value)
    try:
        return Attribute(given.name, given.type, base64.b64decode(given.value, validate=True))
    except (binascii.Error, ValueError) as error:
        raise ParameterInvalid(parameter=f"{path}.value", reason=f"not base64: {error}") from None


def _receive(asked: Asked, wanted: inputs.ReceiveInput) -> Sequence[commands.AnyCommand]:
    return (
        commands.Receive(
            queue=asked.queue,
            origin=asked.origin,
            count_max=wanted.count,
            lease_us=wanted.lease_us,
            wait_us=wanted.wait_us or 0,
        ),
    )


def _extend(asked: Asked, wanted: inputs.ExtendInput) -> Sequence[commands.AnyCommand]:
    return [
        commands.Extend(
            queue=asked.queue,
            origin=asked.origin,
            handle=handle,
            lease_us=wanted.lease_us,
            arrived=asked.arrived,
            after_expiry=commands.AfterExpiry.ALLOW,
        )
        for handle in wanted.handles
    ]


def _delete(asked: Asked, wanted: inputs.DeleteInput) -> Sequence[commands.AnyCommand]:
    return [
        commands.Delete(queue=asked.queue, origin=asked.origin, handle=handle, arrived=asked.arrived)
        for handle in wanted.handles
    ]


def _move(asked: Asked, wanted: inputs.MoveInput) -> Sequence[commands.AnyCommand]:
    destination = None if wanted.destination is None else _sibling(asked.queue, wanted.destination)
    return (
        commands.StartMove(queue=asked.queue, origin=asked.origin, destination=destination, rate_max=wanted.rate_max),
    )


def _cancel_move(asked: Asked, wanted: inputs.CancelMoveInput) -> Sequence[commands.AnyCommand]:
    return (commands.CancelMove(queue=asked.queue, origin=asked.origin, task=inputs.message_id(wanted.task, "task")),)


def _peek(asked: Asked, wanted: inputs.PeekInput) -> Sequence[commands.AnyCommand]:
    return (commands.Peek(queue=asked.queue, origin=asked.origin, count_max=wanted.count),)


def _first(outcomes: Sequence[Outcome]) -> Outcome:
    (outcome,) = outcomes
    if isinstance(outcome, VeilError):
        raise outcome
    return outcome


def _show_queue(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    outcome = _first(outcomes)
    assert isinstance(outcome, QueueDescribed | QueueChanged | QueueCreated)
    if isinstance(outcome, QueueChanged) and not outcome.changed:
        words = f"someone else changed queue {outcome.info.key.name} meanwhile: look at its settings, and try again"
        raise Refused(409, "queue_changed", words, version=outcome.info.version)
    shown = views.shown_queue(outcome.info)
    if isinstance(outcome, QueueDescribed):
        shown["is_dead_letter_queue"] = outcome.is_dead_letter_queue
    return shown | {"new": outcome.created} if isinstance(outcome, QueueCreated) else shown


def _show_count(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    outcome = _first(outcomes)
    assert isinstance(outcome, Purged | QueueDeleted)
    return {"count": outcome.count}


def _show_templates(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    outcome = _first(outcomes)
    assert isinstance(outcome, TemplatesListed)
    return {
        "templates": [
            {"name": each.name, "message": msgspec.json.decode(each.message), "kept": each.kept, "by": each.principal}
            for each in outcome.templates
        ]
    }


def _show_kept(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    outcome = _first(outcomes)
    return {"new": outcome.new} if isinstance(outcome, TemplateKept) else {}


def _show_messages(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    outcome = _first(outcomes)
    assert isinstance(outcome, Received)
    return {"messages": [views.shown_delivery(message) for message in outcome.messages]}


def _show_move(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    outcome = _first(outcomes)
    assert isinstance(outcome, MoveStarted | MoveCancelled)
    if outcome.info is None:
        raise ParameterInvalid(parameter="task", reason="the queue has no such move task")
    if isinstance(outcome, MoveCancelled) and not outcome.cancelled:
        reason = f"only a running task can be cancelled: this one is {outcome.info.status}"
        raise ParameterInvalid(parameter="task", reason=reason)
    return views.shown_move(outcome.info)


def _show_each(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    if all(isinstance(outcome, VeilError) for outcome in outcomes):
        _first(outcomes[:1])
    return [_show_one(outcome) for outcome in outcomes]


def _show_one(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, VeilError):
        return described(outcome)
    if isinstance(outcome, Sent):
        return views.shown_sent(outcome)
    if isinstance(outcome, Extended):
        return {"handle": outcome.handle, "due": outcome.due}
    assert isinstance(outcome, Deleted)
    return {}


def _show_sent(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {"messages": _show_each(outcomes)}


def _show_results(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {"results": _show_each(outcomes)}


_TABLE: Final = (
    Operation("describe", "GET", "", Action.DESCRIBE_QUEUE, inputs.Nothing, _describe, _show_queue),
    Operation("create", "PUT", "", Action.CREATE_QUEUE, inputs.CreateInput, _create, _show_queue),
    Operation("change", "PATCH", "", Action.CHANGE_QUEUE, inputs.ChangeInput, _change, _show_queue),
    Operation("remove", "DELETE", "", Action.DELETE_QUEUE, inputs.Nothing, _remove, _show_count),
    Operation("suggest", "PUT", "/plan", Action.CHANGE_QUEUE, inputs.PlanInput, _suggest, _show_queue),
    Operation("revert", "POST", "/plan/revert", Action.CHANGE_QUEUE, RevertInput, _revert, _show_queue),
    Operation("purge", "POST", "/purge", Action.PURGE, inputs.Nothing, _purge, _show_count),
    Operation("drop", "POST", "/quarantine/drop", Action.PURGE, inputs.DropInput, _drop, _show_results),
    Operation("send", "POST", "/messages", Action.SEND, inputs.SendInput, _send, _show_sent),
    Operation("templates", "GET", "/templates", Action.SEND, inputs.Nothing, _templates, _show_templates),
    Operation("keep_template", "PUT", "/templates", Action.SEND, TemplateInput, _keep_template, _show_kept),
    Operation("drop_template", "POST", "/templates/drop", Action.SEND, NamedInput, _drop_template, _show_kept),
    Operation("receive", "POST", "/receive", Action.RECEIVE, inputs.ReceiveInput, _receive, _show_messages),
    Operation("extend", "POST", "/extend", Action.EXTEND, inputs.ExtendInput, _extend, _show_results),
    Operation("delete", "POST", "/delete", Action.DELETE, inputs.DeleteInput, _delete, _show_results),
    Operation("move", "POST", "/move", Action.MOVE, inputs.MoveInput, _move, _show_move),
    Operation("cancel_move", "POST", "/move/cancel", Action.MOVE, inputs.CancelMoveInput, _cancel_move, _show_move),
    Operation("peek", "GET", "/peek", Action.PEEK, inputs.PeekInput, _peek, _show_messages),
)
OPERATIONS: Final = {operation.name: operation for operation in _TABLE}
OF_MESSAGES: Final = frozenset({"send", "receive", "extend", "delete"})
"""Operations that the history records for each message; only with a client's id also as a command of an operator."""

OF_BODIES: Final = frozenset({"receive", "peek", "templates"})
"""Operations whose answer has bodies in it."""

encode: Final = msgspec.json.Encoder().encode
"""JSON of what `show` gives."""
