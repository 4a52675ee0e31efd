"""CreateTopic, SetTopicAttributes, GetTopicAttributes, DeleteTopic, ListTopic, PublishMessage; Subscribe,
SetSubscriptionAttributes, GetSubscriptionAttributes, Unsubscribe, ListSubscriptionByTopic.

Strategy: as for queues. A publish is one command, and the store sends all copies with it. Attributes for mail and short
messages are accepted and ignored: no subscription can have such an endpoint here.

A subscription's endpoint is parsed once, to a queue of the caller or a URL; its text is stored as the owner wrote it.
Source: the pages of these operations, NotifyStrategy and NotifyContentFormat.
"""

from collections.abc import Sequence
from enum import StrEnum
from hashlib import md5 as md5_of
from typing import Any, TypeVar

import msgspec

from veilmq.model import commands
from veilmq.model.instant import seconds
from veilmq.model.outcomes import (
    Outcome,
    Published,
    Subscribed,
    SubscriptionDescribed,
    SubscriptionsListed,
    TopicCreated,
    TopicDescribed,
    TopicsListed,
)
from veilmq.model.settings.topic import ContentFormat, RetryStrategy, SubscriptionInfo, SubscriptionSettings, TopicInfo
from veilmq.protocols import Element, Response, escape
from veilmq.protocols.mns import errors, limits
from veilmq.protocols.mns.addresses import arn, read_endpoint
from veilmq.protocols.mns.call import Asked, Call, Plan, sole
from veilmq.protocols.mns.errors import Refusal, bad, malformed
from veilmq.protocols.mns.fields import (
    document,
    elements,
    listing,
    members,
    members_of,
    number,
    read_page,
    read_root,
    tag,
)
from veilmq.protocols.mns.operations.messages import read_body, read_extras
from veilmq.protocols.mns.operations.queues import (
    RATE_POLICY,
    dead_letter_queue,
    located,
    logging_label,
    logging_text,
    rate_policy,
    read_rate,
)

Choice = TypeVar("Choice", bound=StrEnum)


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
    return (commands.CreateTopic(topic=asked.topic(), origin=asked.caller.origin, change=_read_change(asked)),), None


def answer_create(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """201, or 204 if the topic existed with the same attributes; both have a Location."""
    created: TopicCreated = sole(call, outcomes)
    return located(call, f"/topics/{created.info.key.name}", created.created)


def plan_change(asked: Asked) -> Plan:
    """SetTopicAttributes: attributes that are not named stay."""
    return (commands.ChangeTopic(topic=asked.topic(), origin=asked.caller.origin, change=_read_change(asked)),), None


def plan_describe(asked: Asked) -> Plan:
    """GetTopicAttributes."""
    return (commands.DescribeTopic(topic=asked.topic(), origin=asked.caller.origin),), None


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
    return (commands.DeleteTopic(topic=asked.topic(), origin=asked.caller.origin),), None


def plan_list(asked: Asked) -> Plan:
    """ListTopic. The memo: the page."""
    page = read_page(asked)
    key = asked.caller.key
    command = commands.ListTopics(
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
    found = [(info.key.name, info) for info in listed.topics]
    return listing(call, "Topic", "/topics/", found, _attributes, more=listed.more)


def plan_publish(asked: Asked) -> Plan:
    """PublishMessage."""
    topic = asked.topic()
    root = read_root(asked.request.body)
    if root.name != "Message":
        raise malformed("the document must be a Message")
    fields = members(root)
    body, raw = read_body(fields.get("MessageBody"))
    extras, more_bytes = read_extras(fields, tag(fields["MessageTag"]) if "MessageTag" in fields else None)
    command = commands.Publish(
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
    assert isinstance(command, commands.Publish)
    text = (
        f"<MessageId>{published.id.hex().upper()}</MessageId>"
        f"<MessageBodyMD5>{command.md5.hex().upper()}</MessageBodyMD5>"
    )
    if command.extras.group is not None:
        text += f"<MessageGroupId>{escape(command.extras.group)}</MessageGroupId>"
    return document("Message", text, 201)


def _one_of(element: Element, kind: type[Choice]) -> Choice:
    text = "" if element.children else element.text
    for value in kind:
        if value.value == text:
            return value
    raise bad(element.name, f"it is one of {', '.join(value.value for value in kind)}.")


def _read_subscription_change(asked: Asked, fields: dict[str, Element]) -> dict[str, Any]:
    """The settings in the document besides the endpoint. Raises Refusal."""
    change: dict[str, Any] = {}
    if "NotifyStrategy" in fields:
        change["strategy"] = _one_of(fields["NotifyStrategy"], RetryStrategy)
    if "NotifyContentFormat" in fields:
        change["content_format"] = _one_of(fields["NotifyContentFormat"], ContentFormat)
    if "FilterTag" in fields:
        change["filter_tag"] = tag(fields["FilterTag"])
    if "DlqPolicy" in fields:
        change["dead_letter_queue"] = dead_letter_queue(asked, fields["DlqPolicy"])[1]
    if RATE_POLICY in fields:
        change["pushes_per_second_max"] = read_rate(fields[RATE_POLICY])
    return change


def plan_subscribe(asked: Asked) -> Plan:
    """Subscribe."""
    topic, name = asked.topic(), asked.subscription()
    fields = members_of(asked.request.body, "Subscription")
    endpoint = fields.get("Endpoint")
    if endpoint is None or endpoint.children or not endpoint.text:
        raise Refusal(errors.ENDPOINT_INVALID, "Endpoint is required.")
    settings = read_endpoint(asked.caller.key, endpoint.text)
    settings = msgspec.structs.replace(settings, **_read_subscription_change(asked, fields))
    return (commands.Subscribe(topic=topic, origin=asked.caller.origin, name=name, settings=settings),), None


def answer_subscribe(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """201, or 204 if the subscription existed with the same attributes; both have a Location."""
    subscribed: Subscribed = sole(call, outcomes)
    info = subscribed.info
    return located(call, f"/topics/{info.topic.name}/subscriptions/{info.name}", subscribed.created)


def plan_change_subscription(asked: Asked) -> Plan:
    """SetSubscriptionAttributes: the endpoint and its content format stay. An empty FilterTag removes the filter."""
    fields = members_of(asked.request.body, "Subscription")
    for name in ("Endpoint", "NotifyContentFormat"):
        if name in fields:
            raise bad(name, "it cannot be changed.")
    tag = fields.get("FilterTag")
    unfiltered = tag is not None and not tag.children and not tag.text
    if unfiltered:
        del fields["FilterTag"]
    command = commands.ChangeSubscription(
        topic=asked.topic(),
        origin=asked.caller.origin,
        name=asked.subscription(),
        change=_read_subscription_change(asked, fields) | ({"filter_tag": None} if unfiltered else {}),
    )
    return (command,), None


def plan_describe_subscription(asked: Asked) -> Plan:
    """GetSubscriptionAttributes."""
    command = commands.DescribeSubscription(topic=asked.topic(), origin=asked.caller.origin, name=asked.subscription())
    return (command,), None


def answer_describe_subscription(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with all attributes."""
    described: SubscriptionDescribed = sole(call, outcomes)
    info = described.info
    return document("Subscription", elements(_subscribed(info)) + _policies(info.settings))


def _subscribed(info: SubscriptionInfo) -> dict[str, str]:
    settings = info.settings
    fields = {
        "TopicOwner": info.topic.account,
        "TopicName": info.topic.name,
        "Subscriber": info.topic.account,
        "SubscriptionName": info.name,
        "Endpoint": settings.endpoint,
        "NotifyStrategy": settings.strategy.value,
        "NotifyContentFormat": settings.content_format.value,
        "CreateTime": str(seconds(info.created)),
        "LastModifyTime": str(seconds(info.modified)),
    }
    if settings.filter_tag is not None:
        fields["FilterTag"] = settings.filter_tag
    return fields


def _policies(settings: SubscriptionSettings) -> str:
    text = rate_policy(settings.pushes_per_second_max)
    if settings.dead_letter_queue is not None:
        policy = {"Enabled": "True", "DeadLetterTargetQueue": arn(settings.dead_letter_queue)}
        # As for a queue, the line break is for the Python SDK.
        text += f"<DlqPolicy>\n{elements(policy)}</DlqPolicy>"
    return text


def plan_unsubscribe(asked: Asked) -> Plan:
    """Unsubscribe."""
    return (commands.Unsubscribe(topic=asked.topic(), origin=asked.caller.origin, name=asked.subscription()),), None


def plan_list_subscriptions(asked: Asked) -> Plan:
    """ListSubscriptionByTopic. The memo: the page."""
    page = read_page(asked)
    command = commands.ListSubscriptions(
        topic=asked.topic(),
        origin=asked.caller.origin,
        prefix=page.prefix,
        after=page.after,
        count_max=page.count_max,
    )
    return (command,), page


def answer_list_subscriptions(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with URLs and names, and the attributes if they were asked for (the Go SDK does)."""
    listed: SubscriptionsListed = sole(call, outcomes)
    place = f"/topics/{call.asked.place.name}/subscriptions/"
    found = [(info.name, info) for info in listed.subscriptions]
    return listing(call, "Subscription", place, found, _subscribed, more=listed.more)
