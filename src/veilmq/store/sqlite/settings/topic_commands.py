"""Commands on topics and subscriptions; a publish with all its copies.

Strategy: a publish sends its copies through the room of sends, in its own batch. So a copy is handled like every
message, and either all copies are durable or none is. A copy that its queue cannot take (deleted meanwhile, or a FIFO
queue and no group) goes to the subscription's dead-letter queue; without one it is dropped. The history counts both.
"""

from collections.abc import Sequence
from copy import copy
from typing import Final, TypeVar

import msgspec

from veilmq.model import commands, errors
from veilmq.model.events import Event, Kind
from veilmq.model.messages import Extras
from veilmq.model.outcomes import (
    Deleted,
    Outcome,
    Published,
    Recorded,
    Sent,
    Subscribed,
    SubscriptionDescribed,
    SubscriptionsListed,
    TopicCreated,
    TopicDescribed,
    TopicsListed,
)
from veilmq.model.settings.access import names_of
from veilmq.model.settings.queue import QueueKey, RedrivePolicy, SettingsChange
from veilmq.model.settings.topic import (
    ATTEMPTS_MAX,
    TOPIC_RETENTION_US,
    ContentFormat,
    Copies,
    LiveSubscription,
    LiveTopic,
    Notification,
    SubscriptionSettings,
    TopicInfo,
    TopicSettings,
    hidden_queue,
)
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.messages import find_place, sends
from veilmq.store.sqlite.messages.dead_letters import dead_letter
from veilmq.store.sqlite.settings import queue_commands

SUBSCRIPTIONS_MAX: Final = 100
"""Per topic (MNS)."""
_COUNT: Final = "SELECT count(*) FROM topic WHERE account = ?"
_ENCODER: Final = msgspec.msgpack.Encoder()

Settings = TypeVar("Settings", TopicSettings, SubscriptionSettings)


def create(writer: Writer, command: commands.CreateTopic) -> Outcome:
    """Create a topic; idempotent if the same topic exists."""
    settings = msgspec.structs.replace(TopicSettings(), **command.change)
    key = command.topic
    present = writer.topics.get(key)
    if present is not None:
        setting = _difference(present.settings, settings)
        if setting is not None:
            return errors.TopicExists(topic=str(key), setting=setting)
        return TopicCreated(_info(writer, present), created=False)
    if writer.refusal is not None:
        return copy(writer.refusal)
    limit = writer.options.topics_per_account_max
    if len(writer.topics) >= limit and writer.read(_COUNT, (key.account,))[0][0] >= limit:
        return errors.TopicsFull(account=key.account, limit=limit)
    incarnation, now = writer.next_number("topic"), writer.now
    writer.write(
        "INSERT INTO topic (incarnation, account, region, name, created, modified, settings)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (incarnation, key.account, key.region, key.name, now, now, _ENCODER.encode(settings)),
    )
    topic = LiveTopic(key, incarnation, now, now, settings)
    writer.topics[key] = topic
    writer.undo(lambda: writer.topics.__delitem__(key))
    _record(writer, Kind.TOPIC_CREATED, command)
    return TopicCreated(_info(writer, topic), created=True)


def _difference(present: Settings, wanted: Settings) -> str | None:
    """The first setting that differs."""
    names = present.__struct_fields__
    return next((name for name in names if getattr(present, name) != getattr(wanted, name)), None)


def change(writer: Writer, command: commands.ChangeTopic) -> Outcome:
    """Change some settings."""
    topic = writer.topics.get(command.topic)
    if topic is None:
        return errors.TopicMissing(topic=str(command.topic))
    before = (topic.settings, topic.modified)
    settings = msgspec.structs.replace(topic.settings, **command.change)
    writer.write(
        "UPDATE topic SET settings = ?, modified = ? WHERE incarnation = ?",
        (_ENCODER.encode(settings), writer.now, topic.incarnation),
    )
    topic.settings, topic.modified = settings, writer.now
    writer.undo(lambda: _restore(topic, before))
    _record(writer, Kind.TOPIC_CHANGED, command)
    return TopicDescribed(_info(writer, topic))


def _restore(topic: LiveTopic, before: tuple[TopicSettings, int]) -> None:
    topic.settings, topic.modified = before  # type: ignore[assignment]


def delete(writer: Writer, command: commands.DeleteTopic) -> Outcome:
    """Delete a topic and its subscriptions."""
    topic = writer.topics.get(command.topic)
    if topic is None:
        return errors.TopicMissing(topic=str(command.topic))
    for subscription in list(topic.subscriptions.values()):
        _remove(writer, command, topic, subscription)
    writer.write("DELETE FROM topic WHERE incarnation = ?", (topic.incarnation,))
    del writer.topics[topic.key]
    writer.undo(lambda: writer.topics.__setitem__(topic.key, topic))
    _record(writer, Kind.TOPIC_DELETED, command)
    return Deleted()


def describe(writer: Writer, command: commands.DescribeTopic) -> Outcome:
    """The topic's present state."""
    topic = writer.topics.get(command.topic)
    return errors.TopicMissing(topic=str(command.topic)) if topic is None else TopicDescribed(_info(writer, topic))


def list_topics(writer: Writer, command: commands.ListTopics) -> Outcome:
    """A page of topics by name."""
    granted = None if command.granted is None else names_of(command.granted)
    names = sorted(
        (
            topic
            for key, topic in writer.topics.items()
            if key.account == command.account
            and key.region == command.region
            and key.name.startswith(command.prefix)
            and key.name > command.after
            and (granted is None or granted.cover(key.name))
        ),
        key=lambda topic: topic.key.name,
    )
    page = names[: command.count_max]
    return TopicsListed([_info(writer, topic) for topic in page], more=len(names) > len(page))


def subscribe(writer: Writer, command: commands.Subscribe) -> Outcome:
    """Add a subscription; idempotent if the same subscription exists."""
    topic = writer.topics.get(command.topic)
    if topic is None:
        return errors.TopicMissing(topic=str(command.topic))
    settings = command.settings
    present = topic.subscriptions.get(command.name)
    if present is not None:
        setting = _difference(present.settings, settings)
        if setting is not None:
            return errors.SubscriptionExists(topic=str(command.topic), subscription=command.name, setting=setting)
        return Subscribed(present.info(topic.key), created=False)
    refused = _cannot_subscribe(writer, topic, settings)
    if refused is not None:
        return refused
    if settings.url is not None:
        created = queue_commands.create(writer, _hidden(command, settings))
        if isinstance(created, errors.VeilError):
            return created
    number = writer.next_number("subscription")
    writer.write(
        "INSERT INTO subscription (id, topic, name, created, modified, settings) VALUES (?, ?, ?, ?, ?, ?)",
        (number, topic.incarnation, command.name, writer.now, writer.now, _ENCODER.encode(settings)),
    )
    subscription = LiveSubscription(number, command.name, writer.now, writer.now, settings)
    _put(writer, topic, subscription)
    _count(writer, topic.key.account, 1)
    _record(writer, Kind.SUBSCRIBED, command, {"subscription": command.name})
    return Subscribed(subscription.info(topic.key), created=True)


def _cannot_subscribe(writer: Writer, topic: LiveTopic, settings: SubscriptionSettings) -> errors.VeilError | None:
    if len(topic.subscriptions) >= SUBSCRIPTIONS_MAX:
        return errors.SubscriptionsFull(topic=str(topic.key), limit=SUBSCRIPTIONS_MAX)
    limit = writer.options.subscriptions_per_account_max
    if writer.queues.subscriptions[topic.key.account] >= limit:
        return errors.AccountSubscriptionsFull(account=topic.key.account, limit=limit)
    if settings.queue is not None:
        queue = writer.queues.by_key.get(settings.queue)
        if queue is None:
            return errors.QueueMissing(queue=str(settings.queue))
        if queue.settings.message_bytes_max < topic.settings.message_bytes_max:
            reason = f"takes {queue.settings.message_bytes_max} bytes, the topic {topic.settings.message_bytes_max}"
            return errors.ParameterInvalid(parameter="queue", reason=reason)
    return _wrong_policies(writer, settings)


def _wrong_policies(
    writer: Writer, settings: SubscriptionSettings, before: QueueKey | None = None
) -> errors.VeilError | None:
    """before: the dead-letter queue until now, which may have been deleted since."""
    target = settings.dead_letter_queue
    if target not in (None, before) and target not in writer.queues.by_key:
        return errors.QueueMissing(queue=str(target))
    if target is not None and target == settings.queue:
        return errors.ParameterInvalid(
            parameter="dead_letter_queue", reason="it must be another queue than the endpoint"
        )
    if settings.pushes_per_second_max is not None and settings.url is None:
        return errors.ParameterInvalid(parameter="pushes_per_second_max", reason="only pushes to a URL have a rate")
    return None


def _policies(settings: SubscriptionSettings) -> SettingsChange:
    """The settings that a subscription gives to its hidden queue."""
    target = settings.dead_letter_queue
    redrive = None if target is None else RedrivePolicy(target, ATTEMPTS_MAX[settings.strategy])
    return {"redrive": redrive, "receives_per_second_max": settings.pushes_per_second_max}


def _hidden(command: commands.Subscribe, settings: SubscriptionSettings) -> commands.CreateQueue:
    """The queue that holds a push subscription's copies."""
    change = {"retention_us": TOPIC_RETENTION_US} | _policies(settings)
    return commands.CreateQueue(queue=hidden_queue(command.topic, command.name), origin=command.origin, change=change)


def change_subscription(writer: Writer, command: commands.ChangeSubscription) -> Outcome:
    """Change some settings of a subscription."""
    found = _find(writer, command, command.name)
    if isinstance(found, errors.VeilError):
        return found
    topic, subscription = found
    settings = msgspec.structs.replace(subscription.settings, **command.change)
    if _policies(settings) != _policies(subscription.settings):
        before = subscription.settings.dead_letter_queue
        refused = _wrong_policies(writer, settings, before) or _change_hidden_queue(writer, command, settings)
        if refused is not None:
            return refused
    changed = msgspec.structs.replace(subscription, settings=settings, modified=writer.now)
    writer.write(
        "UPDATE subscription SET settings = ?, modified = ? WHERE id = ?",
        (_ENCODER.encode(settings), writer.now, subscription.id),
    )
    _put(writer, topic, changed)
    _record(writer, Kind.SUBSCRIPTION_CHANGED, command, {"subscription": command.name})
    return SubscriptionDescribed(changed.info(topic.key))


def _change_hidden_queue(
    writer: Writer, command: commands.ChangeSubscription, settings: SubscriptionSettings
) -> errors.VeilError | None:
    """Change the hidden queue, if there is one; on a refusal nothing has changed."""
    if settings.url is None:
        return None
    key = hidden_queue(command.topic, command.name)
    queue = writer.queues.by_key.get(key)
    if queue is None:
        return errors.QueueMissing(queue=str(key))
    change = commands.ChangeQueue(queue=key, origin=command.origin, change=_policies(settings))
    outcome = queue_commands.change(writer, change, queue)
    return outcome if isinstance(outcome, errors.VeilError) else None


def unsubscribe(writer: Writer, command: commands.Unsubscribe) -> Outcome:
    """Remove a subscription."""
    found = _find(writer, command, command.name)
    if isinstance(found, errors.VeilError):
        return found
    _remove(writer, command, *found)
    return Deleted()


def describe_subscription(writer: Writer, command: commands.DescribeSubscription) -> Outcome:
    """The subscription's present state."""
    found = _find(writer, command, command.name)
    return found if isinstance(found, errors.VeilError) else SubscriptionDescribed(found[1].info(found[0].key))


def list_subscriptions(writer: Writer, command: commands.ListSubscriptions) -> Outcome:
    """A page of subscriptions by name."""
    topic = writer.topics.get(command.topic)
    if topic is None:
        return errors.TopicMissing(topic=str(command.topic))
    names = sorted(name for name in topic.subscriptions if name.startswith(command.prefix) and name > command.after)
    page = names[: command.count_max]
    infos = [topic.subscriptions[name].info(topic.key) for name in page]
    return SubscriptionsListed(infos, more=len(names) > len(page))


def publish(writer: Writer, command: commands.Publish) -> Outcome:
    """Send a copy to every subscription whose filter tag matches."""
    topic = writer.topics.get(command.topic)
    if topic is None:
        return errors.TopicMissing(topic=str(command.topic))
    limit_bytes = topic.settings.message_bytes_max
    if command.size_bytes > limit_bytes:
        return errors.MessageTooLarge(size_bytes=command.size_bytes, limit_bytes=limit_bytes)
    if writer.refusal is not None:
        return copy(writer.refusal)
    message = writer.next_id()
    tag = command.extras.tag
    wanted = [
        subscription
        for subscription in topic.subscriptions.values()
        if subscription.settings.filter_tag is None or subscription.settings.filter_tag == tag
    ]
    begun = len(writer.events)
    copies = _copies(writer, command, wanted, message)
    outcomes = sends.send_all(writer, copies)
    sent, dead = _count_sent(outcomes), 0
    if sent < len(copies):
        dead = _count_sent(sends.send_all(writer, _dead_letters(wanted, copies, outcomes, message)))
    _name_published(writer.events[begun:], message)
    detail: dict[str, object] = {"copies": sent}
    if dead:
        detail["dead_lettered"] = dead
    if sent + dead < len(copies):
        detail["left_out"] = len(copies) - sent - dead
    _record(writer, Kind.PUBLISHED, command, detail, message, len(command.body.encode()))
    return Published(message, writer.now, sent)


def _count_sent(outcomes: Sequence[Outcome]) -> int:
    return sum(isinstance(outcome, Sent) for outcome in outcomes)


def _dead_letters(
    subscriptions: Sequence[LiveSubscription],
    copies: Sequence[commands.Send],
    outcomes: Sequence[Outcome],
    message: bytes,
) -> list[commands.Send]:
    """Sends of the copies that their queues could not take, to the dead-letter queues of their subscriptions."""
    return [
        msgspec.structs.replace(copy, queue=target, extras=_with_id(copy.extras, message, copy.queue))
        for subscription, copy, outcome in zip(subscriptions, copies, outcomes, strict=True)
        if not isinstance(outcome, Sent) and (target := subscription.settings.dead_letter_queue) is not None
    ]


def _name_published(events: Sequence[Event], message: bytes) -> None:
    """Add the published message's id to the event of each copy, which has an id of its own."""
    named = {"published": message.hex()}
    for event in events:
        event.detail = named if event.detail is None else {**event.detail, **named}


def record_push(writer: Writer, command: commands.RecordPush) -> Outcome:
    """Record one attempt to push a message. After its last attempt the message goes to the dead-letter queue, if
    any."""
    queue = writer.queues.by_key.get(command.queue)
    detail: dict[str, object] = {"status": command.status, "took_us": command.took_us}
    if command.error is not None:
        detail["error"] = command.error
    writer.events.append(
        Event(
            Kind.PUSHED,
            writer.now,
            None if queue is None else queue.incarnation,
            writer.origin(command.origin),
            message=command.message,
            sequence=command.sequence,
            attempt=command.attempt,
            detail=detail,
        )
    )
    if queue is not None:
        _give_up(writer, queue, command.sequence)
    return Recorded()


def _give_up(writer: Writer, queue: LiveQueue, sequence: int) -> None:
    """Dead-letter the message now. The next receive would do it too, but late: its endpoint may have to pause for a
    minute."""
    redrive = queue.settings.redrive
    target = None if redrive is None else writer.queues.by_key.get(redrive.target)
    place = None if target is None else find_place(writer, queue, sequence)
    if redrive is None or target is None or place is None or place.rotation < redrive.receive_count_max:
        return
    dead_letter(writer, queue, place, target)


def _copies(
    writer: Writer, command: commands.Publish, subscriptions: Sequence[LiveSubscription], message: bytes
) -> list[commands.Send]:
    """The send of each copy. Its size counts as that of the published message: the sender did not write the
    envelope."""
    body, digest, tag = command.body, command.md5, command.extras.tag
    origin, size_bytes = command.origin, command.size_bytes
    notification = Notification(command.topic, "", message.hex().upper(), body, digest.hex().upper(), tag, writer.now)
    forms: dict[ContentFormat, Copies] = {}
    hidden = _with_id(command.extras, message)
    copies = []
    for subscription in subscriptions:
        queue, form = subscription.settings.queue, subscription.settings.content_format
        extras, text, text_md5 = command.extras, body, digest
        if queue is None:
            queue, extras = hidden_queue(command.topic, subscription.name), hidden
        elif form is not ContentFormat.SIMPLIFIED:
            if form not in forms:
                forms[form] = Copies(notification, form)
            text, text_md5 = forms[form].of(subscription.name)
        copies.append(
            commands.Send(queue=queue, origin=origin, body=text, md5=text_md5, size_bytes=size_bytes, extras=extras)
        )
    return copies


def _with_id(extras: Extras, message: bytes, refused_by: QueueKey | None = None) -> Extras:
    """Put the published message's id into the copy: a push and a dead letter show it."""
    return msgspec.structs.replace(extras, published_id=message, dead_letter_source=refused_by)


def _find(
    writer: Writer, command: commands.TopicCommand, name: str
) -> tuple[LiveTopic, LiveSubscription] | errors.TopicMissing | errors.SubscriptionMissing:
    topic = writer.topics.get(command.topic)
    if topic is None:
        return errors.TopicMissing(topic=str(command.topic))
    subscription = topic.subscriptions.get(name)
    if subscription is None:
        return errors.SubscriptionMissing(topic=str(command.topic), subscription=name)
    return topic, subscription


def _put(writer: Writer, topic: LiveTopic, subscription: LiveSubscription) -> None:
    before = topic.subscriptions
    topic.subscriptions = before | {subscription.name: subscription}
    writer.undo(lambda: setattr(topic, "subscriptions", before))


def _remove(writer: Writer, command: commands.TopicCommand, topic: LiveTopic, subscription: LiveSubscription) -> None:
    before = topic.subscriptions
    if subscription.settings.url is not None:
        key = hidden_queue(topic.key, subscription.name)
        queue = writer.queues.by_key.get(key)
        if queue is not None:
            queue_commands.delete(writer, commands.DeleteQueue(queue=key, origin=command.origin), queue)
    writer.write("DELETE FROM subscription WHERE id = ?", (subscription.id,))
    topic.subscriptions = {name: other for name, other in before.items() if name != subscription.name}
    writer.undo(lambda: setattr(topic, "subscriptions", before))
    _count(writer, topic.key.account, -1)
    _record(writer, Kind.UNSUBSCRIBED, command, {"subscription": subscription.name})


def _count(writer: Writer, account: str, more: int) -> None:
    """The account has so many more subscriptions."""
    counts = writer.queues.subscriptions
    counts[account] += more
    writer.undo(lambda: counts.subtract({account: more}))


def _info(writer: Writer, topic: LiveTopic) -> TopicInfo:
    waiting = 0
    for subscription in topic.subscriptions.values():
        queue = writer.queues.by_key.get(hidden_queue(topic.key, subscription.name))
        if queue is not None:
            waiting += queue.info().counts.total
    settings, subscriptions = topic.settings, len(topic.subscriptions)
    return TopicInfo(topic.key, topic.incarnation, topic.created, topic.modified, settings, subscriptions, waiting)


def _record(
    writer: Writer,
    kind: Kind,
    command: commands.TopicCommand,
    detail: dict[str, object] | None = None,
    message: bytes | None = None,
    body_bytes: int | None = None,
) -> None:
    """Record an event without a queue: the topic's name is in the detail."""
    named: dict[str, object] = {"topic": str(command.topic)} | (detail or {})
    origin = writer.origin(command.origin)
    writer.events.append(Event(kind, writer.now, None, origin, message=message, body_bytes=body_bytes, detail=named))
