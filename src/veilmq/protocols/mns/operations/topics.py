"""CreateTopic, SetTopicAttributes, GetTopicAttributes, DeleteTopic, ListTopic, PublishMessage.

Strategy: as for queues. A publish is one command, and the store sends all copies with it. Attributes for mail and short
messages are accepted and ignored: no subscription can have such an endpoint here.
"""

from collections.abc import Sequence
from hashlib import md5 as md5_of
from typing import Any

from veilmq.model.commands import ChangeTopic, CreateTopic, DeleteTopic, DescribeTopic, ListTopics, Publish
from veilmq.model.errors import TopicMissing
from veilmq.model.instant import seconds
from veilmq.model.outcomes import Outcome, Published, TopicCreated, TopicDescribed, TopicsListed
from veilmq.model.settings.topic import TopicInfo
from veilmq.protocols import Response
from veilmq.protocols.mns import limits
from veilmq.protocols.mns.call import Asked, Call, Plan, answer_nothing, sole
from veilmq.protocols.mns.errors import malformed
from veilmq.protocols.mns.fields import (
    Page,
    document,
    elements,
    marker_of,
    members,
    members_of,
    number,
    read_page,
    read_root,
    tag,
)
from veilmq.protocols.mns.operations.messages import read_body, read_extras
from veilmq.protocols.mns.operations.queues import located, logging_label, logging_text
from veilmq.protocols.xml import escape


def _read_change(asked: Asked) -> dict[str, Any]:
    fields = members_of(asked.request.body, "Topic")
    change: dict[str, Any] = {}
    if "MaximumMessageSize" in fields:
        size = number(fields["MaximumMessageSize"], limits.MESSAGE_BYTES_MIN, limits.MESSAGE_BYTES_MAX, "bytes")
        change["message_bytes_max"] = size
    if "LoggingEnabled" in fields:
        labels = logging_label(fields["LoggingEnabled"])
        change["labels"] = {name: value for name, value in labels.items() if value}
    return change


def plan_create(asked: Asked) -> Plan:
    """CreateTopic."""
    return (CreateTopic(topic=asked.topic(), origin=asked.caller.origin, change=_read_change(asked)),), None


def answer_create(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """201, or 204 if the topic existed with the same attributes; both have a Location."""
    created: TopicCreated = sole(call, outcomes)
    return located(call, f"/topics/{created.info.key.name}", created.created)


def plan_change(asked: Asked) -> Plan:
    """SetTopicAttributes: attributes that are not named stay."""
    return (ChangeTopic(topic=asked.topic(), origin=asked.caller.origin, change=_read_change(asked)),), None


def plan_describe(asked: Asked) -> Plan:
    """GetTopicAttributes."""
    return (DescribeTopic(topic=asked.topic(), origin=asked.caller.origin),), None


def answer_describe(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with all attributes."""
    described: TopicDescribed = sole(call, outcomes)
    info = described.info
    return document("Topic", elements({"TopicName": info.key.name} | _attributes(info)))


def _attributes(info: TopicInfo) -> dict[str, str]:
    return {
        "CreateTime": str(seconds(info.created)),
        "LastModifyTime": str(seconds(info.modified)),
        "MaximumMessageSize": str(info.settings.message_bytes_max),
        "MessageRetentionPeriod": str(limits.TOPIC_RETENTION_SECONDS),
        "MessageCount": str(info.waiting),
        "LoggingEnabled": logging_text(info.settings.labels),
    }


def plan_delete(asked: Asked) -> Plan:
    """DeleteTopic, with its subscriptions."""
    return (DeleteTopic(topic=asked.topic(), origin=asked.caller.origin),), None


def answer_delete(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """204, also if there was none."""
    if isinstance(outcomes[0], TopicMissing):
        return Response(204, None, b"")
    return answer_nothing(call, outcomes)


def plan_list(asked: Asked) -> Plan:
    """ListTopic. The memo: the page."""
    page = read_page(asked)
    key = asked.caller.key
    command = ListTopics(
        origin=asked.caller.origin,
        account=key.account,
        region=key.home_region,
        prefix=page.prefix,
        after=page.after,
        count_max=page.count_max,
    )
    return (command,), page


def answer_list(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with URLs and names, and the attributes if they were asked for."""
    listed: TopicsListed = sole(call, outcomes)
    page: Page = call.memo
    start = call.asked.url("/topics/")
    entries = []
    for info in listed.topics:
        fields = {"TopicURL": start + info.key.name, "TopicName": info.key.name}
        entries.append(f"<Topic>{elements(fields | _attributes(info) if page.with_meta else fields)}</Topic>")
    return document("Topics", "".join(entries) + marker_of([info.key.name for info in listed.topics], listed.more))


def plan_publish(asked: Asked) -> Plan:
    """PublishMessage."""
    topic = asked.topic()
    root = read_root(asked.request.body)
    if root.name != "Message":
        raise malformed("the document must be a Message")
    fields = members(root)
    body, raw = read_body(fields.get("MessageBody"))
    extras, more_bytes = read_extras(fields, tag(fields["MessageTag"]) if "MessageTag" in fields else None)
    command = Publish(
        topic=topic,
        origin=asked.caller.origin,
        body=body,
        md5=md5_of(raw, usedforsecurity=False).digest(),
        size_bytes=len(raw) + more_bytes,
        extras=extras,
    )
    return (command,), None


def answer_publish(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """201 with the id that the notifications name."""
    published: Published = sole(call, outcomes)
    (command,) = call.commands
    assert isinstance(command, Publish)
    text = (
        f"<MessageId>{published.id.hex().upper()}</MessageId>"
        f"<MessageBodyMD5>{command.md5.hex().upper()}</MessageBodyMD5>"
    )
    if command.extras.group is not None:
        text += f"<MessageGroupId>{escape(command.extras.group)}</MessageGroupId>"
    return document("Message", text, 201)
