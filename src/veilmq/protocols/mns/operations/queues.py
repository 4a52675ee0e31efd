"""CreateQueue, SetQueueAttributes, GetQueueAttributes, DeleteQueue, ListQueue.

Strategy: the settings that are numbers are rows of limits.py. An existing queue is the same if all its MNS attributes
are, after filling in defaults; other protocols' settings are not compared. Policies for dead letters and rates are an
extension of the document. Source: the pages of these operations; docs/mns.md.
"""

from collections.abc import Sequence
from typing import Any, Final

from veilmq.model.commands import ChangeQueue, CreateQueue, DeleteQueue, DescribeQueue, ListQueues
from veilmq.model.instant import seconds
from veilmq.model.outcomes import Outcome, QueueCreated, QueueDescribed, QueuesListed
from veilmq.model.settings.queue import QueueInfo, RedrivePolicy, shown_name
from veilmq.protocols import Element, Response
from veilmq.protocols.mns import limits
from veilmq.protocols.mns.addresses import arn, queue_of_text
from veilmq.protocols.mns.call import Asked, Call, Plan, sole
from veilmq.protocols.mns.errors import bad
from veilmq.protocols.mns.fields import (
    document,
    elements,
    listing,
    members,
    members_of,
    number,
    read_page,
    truth,
    word,
)

LOGGING: Final = "mns.logging"
"""The label that stores LoggingEnabled, which has no effect here."""
RATE_POLICY: Final = "TenantRateLimitPolicy"


def logging_label(element: Element | None) -> dict[str, str]:
    """The label of LoggingEnabled; empty: none. Raises Refusal."""
    return {LOGGING: "True" if element is not None and truth(element) else ""}


def logging_text(labels: dict[str, str]) -> str:
    """LoggingEnabled, as Python reads it."""
    return labels.get(LOGGING) or "False"


def _read_change(asked: Asked) -> dict[str, Any]:
    """The settings that the document names. Raises Refusal."""
    fields = members_of(asked.request.body, "Queue")
    change: dict[str, Any] = {}
    for name, row in limits.QUEUE_NUMBERS.items():
        if name in fields:
            change[row.setting] = number(fields[name], row.minimum, row.maximum, row.noun) * row.unit
    if "LoggingEnabled" in fields:
        change["labels"] = logging_label(fields["LoggingEnabled"])
    if "DlqPolicy" in fields:
        change["redrive"] = _redrive(asked, fields["DlqPolicy"])
    if RATE_POLICY in fields:
        change["receives_per_second_max"] = read_rate(fields[RATE_POLICY])
    return change


def read_rate(policy: Element) -> int | None:
    """Messages a second of a TenantRateLimitPolicy; None if it is not enabled. Raises Refusal: InvalidArgument."""
    fields = members(policy)
    if "Enabled" in fields and not truth(fields["Enabled"]):
        return None
    if "MaxReceivesPerSecond" not in fields:
        raise bad("MaxReceivesPerSecond", "it is required.")
    return number(fields["MaxReceivesPerSecond"], 1, limits.RATE_MAX)


def dead_letter_queue(asked: Asked, policy: Element) -> tuple[dict[str, Element], Any]:
    """The fields of an enabled DlqPolicy, and the queue that it names; None if it is not enabled. Raises Refusal."""
    fields = members(policy)
    if "Enabled" in fields and not truth(fields["Enabled"]):
        return fields, None
    target = fields.get("DeadLetterTargetQueue")
    queue = None if target is None else queue_of_text(asked.caller.key, word(target, limits.ENDPOINT_CHARACTERS_MAX))
    if queue is None:
        raise bad("DeadLetterTargetQueue", "it is the name or the ARN of a queue.")
    return fields, queue


def _redrive(asked: Asked, policy: Element) -> RedrivePolicy | None:
    fields, target = dead_letter_queue(asked, policy)
    if target is None:
        return None
    if target == asked.queue():  # under its alias the store finds it: `own_dead_letters`
        raise bad("DeadLetterTargetQueue", "a queue cannot be its own dead-letter queue.")
    if "MaxReceiveCount" not in fields:
        raise bad("MaxReceiveCount", "it is required.")
    return RedrivePolicy(target, number(fields["MaxReceiveCount"], 1, limits.RECEIVE_COUNT_MAX))


_DEFAULTS: Final[dict[str, Any]] = {row.setting: row.default * row.unit for row in limits.QUEUE_NUMBERS.values()} | {
    "labels": logging_label(None)
}


def plan_create(asked: Asked) -> Plan:
    """CreateQueue."""
    change = _DEFAULTS | _read_change(asked)
    return (CreateQueue(queue=asked.queue(), origin=asked.caller.origin, change=change),), None


def answer_create(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """201, or 204 if the queue existed with the same attributes; both have a Location."""
    created: QueueCreated = sole(call, outcomes)
    return located(call, f"/queues/{_name(created.info)}", created.created)


def located(call: Call, path: str, created: bool) -> Response:
    """The response to every creation. The Python SDK reads Location for every status."""
    location = call.asked.url(path).encode("latin-1")
    return Response(201 if created else 204, None, b"", ((b"Location", location),))


def plan_change(asked: Asked) -> Plan:
    """SetQueueAttributes: attributes that are not named stay."""
    queue, change = asked.queue(), _read_change(asked)
    return (ChangeQueue(queue=queue, origin=asked.caller.origin, change=change, own_dead_letters=False),), None


def plan_describe(asked: Asked) -> Plan:
    """GetQueueAttributes."""
    return (DescribeQueue(queue=asked.queue(), origin=asked.caller.origin),), None


def answer_describe(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with all attributes."""
    described: QueueDescribed = sole(call, outcomes)
    info = described.info
    known = elements({"QueueName": _name(info)} | _attributes(info))
    return document("Queue", known + _policy(info) + rate_policy(info.settings.receives_per_second_max))


def _attributes(info: QueueInfo) -> dict[str, str]:
    settings, counts = info.settings, info.counts
    numbers = {name: str(getattr(settings, row.setting) // row.unit) for name, row in limits.QUEUE_NUMBERS.items()}
    return {
        "CreateTime": str(seconds(info.created)),
        "LastModifyTime": str(seconds(info.modified)),
        **numbers,
        "ActiveMessages": str(counts.visible),
        "InactiveMessages": str(counts.in_flight),
        "DelayMessages": str(counts.delayed),
        "LoggingEnabled": logging_text(settings.labels),
    }


def _policy(info: QueueInfo) -> str:
    redrive = info.settings.redrive
    if redrive is None:
        return ""
    fields = {
        "Enabled": "True",
        "DeadLetterTargetQueue": arn(redrive.target),
        "MaxReceiveCount": str(redrive.receive_count_max),
    }
    # The Python SDK expects text as the first child of every element: the line break is that text.
    return f"<DlqPolicy>\n{elements(fields)}</DlqPolicy>"


def rate_policy(rate: int | None) -> str:
    """The element of a TenantRateLimitPolicy; empty without one."""
    if rate is None:
        return ""
    fields = {"Enabled": "True", "MaxReceivesPerSecond": str(rate)}
    return f"<{RATE_POLICY}>\n{elements(fields)}</{RATE_POLICY}>"


def _name(info: QueueInfo) -> str:
    """The queue's name or alias in MNS."""
    return shown_name(info, limits.NAME_WHOLE) or info.key.name


def plan_delete(asked: Asked) -> Plan:
    """DeleteQueue."""
    return (DeleteQueue(queue=asked.queue(), origin=asked.caller.origin),), None


def plan_list(asked: Asked) -> Plan:
    """ListQueue. The memo: the page."""
    page = read_page(asked)
    key = asked.caller.key
    command = ListQueues(
        origin=asked.caller.origin,
        account=key.account,
        region=key.home_region,
        prefix=page.prefix,
        after=page.after,
        count_max=page.count_max,
        names=limits.NAME_WHOLE.pattern,
    )
    return (command,), page


def answer_list(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with URLs and names, and the attributes if they were asked for."""
    listed: QueuesListed = sole(call, outcomes)
    found = [(_name(info), info) for info in listed.queues]
    return listing(call, "Queue", "/queues/", found, _attributes, more=listed.more)
