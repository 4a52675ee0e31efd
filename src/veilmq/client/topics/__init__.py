"""Topics whose subscribers pull: every subscription is a queue. Created completely or not at all, opened, published to,
and deleted. Which topics exist is in definitions.py.

Strategy, creation: the definition is written first, so that only one of two concurrent calls for the same topic
succeeds. Then the queues are created, each recorded in the definition; then the definition becomes ready. After an
error, everything that this call created is removed. After a crash, creating the topic again completes it, once it has
not gone on for a minute (before, another process may be at it), or deleting it removes the rest. An existing topic is
accepted only if it is the same. Source: the documents' createPullTopic(topicMeta, queueNameList, needCreateQueue,
queueMetaTemplate).

Publishing: if the service has its own topic for this, a publish is one request to it, which reaches all queues or none.
For messages that it cannot carry, and everywhere else, a publish is one batch for each queue, to all queues at the same
time. Every copy carries the publish's id: on a FIFO queue as deduplication id, so that publishing again with that id
adds no second copy; elsewhere as an attribute, by which a consumer can drop duplicates. Failures are reported by
subscription, and only these need to be published again. Source: the documents' CloudPullTopic.publishMessage.
"""

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from veilmq.client.errors import EncodingMismatch, PublishIncomplete, SubscriptionExists, TopicExists, TopicMissing
from veilmq.client.messages import Message, Sent, Template
from veilmq.client.queue import Account, NativePublished, NativeTopics, Queue
from veilmq.client.shared import attempt, checks, send_prepared
from veilmq.client.shared.checks import as_message, check_sendable, text_bytes
from veilmq.client.shared.lifetimes import Closing
from veilmq.client.shared.threads import DaemonPool
from veilmq.client.topics.definitions import (
    ENCODING_ATTRIBUTE,
    Definition,
    Definitions,
    Encoding,
    Form,
    State,
    Subscription,
    check_fits,
    check_same,
    decoded,
    delete_native,
    encoded,
    native_topics_of,
    natively,
    subscriptions_of,
)
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, QueueMissing, VeilError

__all__ = [
    "ID_ATTRIBUTE",
    "Definition",
    "Definitions",
    "Encoding",
    "Form",
    "Published",
    "PullTopic",
    "Subscription",
    "create_pull_topic",
    "decoded",
    "delete_pull_topic",
    "open_pull_topic",
]

ID_ATTRIBUTE: Final = "veilmq.id"
"""Carries the publish's id."""
ID_CHARACTERS_MAX: Final = 128
"""SQS's limit on a deduplication id."""
_THREADS_MAX: Final = 8

Bodies = Callable[[Message, Sequence[str]], Sequence[Message]]
"""Takes a message and its subscriptions, returns one message for each (`large.SharedBodies`)."""

log = logging.getLogger("veilmq.client")


class Published(msgspec.Struct, frozen=True):
    """All subscriptions that want the message have it."""

    id: str
    sent: dict[str, Sent]
    """By subscription."""


class _Copies(msgspec.Struct):
    """One published message in progress."""

    id: str
    given: Message
    messages: dict[str, Message]
    """By subscription."""
    results: dict[str, Sent | VeilError] = msgspec.field(default_factory=dict)


class PullTopic(Closing):
    """A topic whose subscriptions are queues; `create_pull_topic` and `open_pull_topic` make it. Any thread."""

    def __init__(
        self, account: Account, definitions: Definitions, definition: Definition, *, bodies: Bodies | None = None
    ) -> None:
        """bodies: makes the copies of a message, if they differ. Raises QueueMissing, ParameterInvalid."""
        checks.object_with(account, "account", "queue")
        checks.function_or_none(bodies, "bodies")
        self._account, self._definitions, self._definition = account, definitions, definition
        self._bodies = bodies
        self._queues = {each.name: account.queue(each.queue) for each in definition.subscriptions}
        self._native = None
        if definition.form is Form.NATIVE:
            self._native = native_topics_of(account, definition, bodies, self._queues.values())

    @property
    def name(self) -> str:
        """Of the topic."""
        return self._definition.topic

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        """As of when the topic was opened."""
        return self._definition.subscriptions

    def queue(self, subscription: str) -> Queue:
        """A subscription's queue, to receive from. Raises ParameterInvalid."""
        found = self._queues.get(subscription)
        if found is None:
            raise ParameterInvalid(parameter="subscription", reason=f"topic {self.name} has no {subscription!r}")
        return found

    def publish(
        self,
        message: str | Message,
        *,
        id: str | None = None,  # noqa: A002 - the port's name
        to: Collection[str] | None = None,
        encoding: Encoding | str | None = None,
    ) -> Published:
        """Send it to every subscription with a matching tag.

        id: of an earlier attempt, to publish again; None: the message's deduplication id, or a new one. to: these
        subscriptions only. encoding: the one that the subscriptions must have; None: each its own. Raises
        PublishIncomplete (with everything needed to try again). Before anything is sent, raises EncodingMismatch,
        ParameterInvalid, MessageTooLarge, CapabilityMissing, and what `bodies` raises.
        """
        (answer,) = self._publish([message], id, to, encoding)
        if isinstance(answer, VeilError):
            raise answer
        return answer

    def publish_batch(
        self, messages: Sequence[str | Message], *, encoding: Encoding | str | None = None
    ) -> list[Published | VeilError]:
        """Any number, as one batch for each queue; one result or error for each message, in order."""
        return self._publish(checks.batch(messages), None, None, encoding)

    def delete(self) -> None:
        """Delete the topic and the queues that were created for it, with their messages; other queues stay.

        Can be repeated after an error. Raises what `Account.delete` raises, except for a queue that no longer exists.
        """
        delete_topic(self._account, self._definitions, self._definition)

    def close(self) -> None:
        """Close the queues' connections."""
        for queue in self._queues.values():
            queue.close()

    def _publish(
        self,
        given: Sequence[str | Message],
        publish_id: str | None,
        to: Collection[str] | None,
        encoding: Encoding | str | None,
    ) -> list[Published | VeilError]:
        targets = self._targets(to, None if encoding is None else checks.choice(encoding, Encoding, "encoding"))

        def prepare(each: str | Message) -> _Copies:
            message = as_message(each)
            return self._copies(message, _checked_id(publish_id or message.deduplication_id), targets)

        copies = [attempt(prepare, each) for each in given]
        good = self._publish_natively([each for each in copies if not isinstance(each, VeilError)])
        names = [each.name for each in targets if any(each.name in one.messages for one in good)]
        if names:
            with DaemonPool(min(_THREADS_MAX, len(names)), f"veilmq-publish-{self.name}") as pool:
                for name, results in zip(names, pool.map(lambda name: self._send(name, good), names), strict=True):
                    for one, result in zip([one for one in good if name in one.messages], results, strict=True):
                        one.results[name] = result
        return [each if isinstance(each, VeilError) else self._outcome(each) for each in copies]

    def _publish_natively(self, copies: list[_Copies]) -> list[_Copies]:
        """Publish the messages that the service's own topic can carry to exactly these subscriptions; return the
        others."""
        native = self._native
        if native is None:
            return copies
        wanted = natively(self.subscriptions)
        mine = [
            each
            for each in copies
            if each.messages
            and native.carries(each.given)
            and each.messages.keys() == {one.name for one in wanted if one.tag in (None, each.given.tag)}
        ]
        if not mine:
            return copies
        messages = [msgspec.structs.replace(next(iter(each.messages.values())), tag=each.given.tag) for each in mine]
        try:
            results = native.publish(self.name, messages)
        except VeilError as error:
            results = [error] * len(mine)
        for each, result in zip(mine, results, strict=True):
            each.results = self._reached(each, result)
        return [each for each in copies if not any(each is one for one in mine)]

    def _reached(self, copies: _Copies, result: NativePublished | VeilError) -> dict[str, Sent | VeilError]:
        if isinstance(result, VeilError):
            return dict.fromkeys(copies.messages, result)
        reached: dict[str, Sent | VeilError] = dict.fromkeys(copies.messages, Sent(result.id))
        if result.copies is not None and result.copies < len(reached):
            for name in reached:
                gone = attempt(lambda name: self._queues[name].stats(), name)
                if isinstance(gone, VeilError):
                    reached[name] = gone
        return reached

    def _send(self, name: str, copies: Sequence[_Copies]) -> list[Sent | VeilError]:
        messages = [one.messages[name] for one in copies if name in one.messages]
        try:
            return send_prepared(self._queues[name], messages)
        except VeilError as error:
            return [error] * len(messages)

    def _outcome(self, copies: _Copies) -> Published | VeilError:
        failed = {name: result for name, result in copies.results.items() if isinstance(result, VeilError)}
        sent = {name: result for name, result in copies.results.items() if isinstance(result, Sent)}
        if not failed:
            return Published(copies.id, sent)
        return PublishIncomplete(topic=self.name, id=copies.id, done=tuple(sent), failed=failed)

    def _targets(self, to: Collection[str] | None, encoding: Encoding | None) -> list[Subscription]:
        known = {each.name: each for each in self.subscriptions}
        if to is not None:
            to = checks.texts(to, "to")
            unknown = [name for name in to if name not in known]
            if unknown:
                raise ParameterInvalid(parameter="to", reason=f"must be subscriptions of topic {self.name}: {unknown}")
        targets = [each for each in self.subscriptions if to is None or each.name in to]
        for each in targets:
            if encoding is not None and each.encoding is not encoding:
                reason = f"subscription {each.name} gets bodies in {each.encoding}"
                raise EncodingMismatch(wanted=encoding, reason=reason)
        return targets

    def _copies(self, message: Message, publish_id: str, targets: Sequence[Subscription]) -> _Copies:
        text_bytes(message.body)
        if ID_ATTRIBUTE in message.attributes or ENCODING_ATTRIBUTE in message.attributes:
            raise ParameterInvalid(parameter="attributes", reason=f"{ID_ATTRIBUTE}, {ENCODING_ATTRIBUTE} are reserved")
        wanted = [each for each in targets if not each.tags or message.tag in each.tags]
        names = [each.name for each in wanted]
        bodies = [message] * len(names) if self._bodies is None else self._bodies(message, names)
        return _Copies(
            publish_id,
            message,
            {each.name: self._copy(body, publish_id, each) for each, body in zip(wanted, bodies, strict=True)},
        )

    def _copy(self, message: Message, publish_id: str, target: Subscription) -> Message:
        """The message for one queue, with our attributes where the queue has them. Raises as `check_sendable`."""
        can = self._queues[target.name].capabilities
        body = encoded(message.body, target.encoding)
        added: dict[str, Any] = {}
        if can.attributes:
            added[ID_ATTRIBUTE] = publish_id
            if target.encoding is Encoding.BASE64:
                added[ENCODING_ATTRIBUTE] = str(Encoding.BASE64)
        copy = msgspec.structs.replace(
            message,
            body=body,
            attributes={**message.attributes, **added},
            # The tag has already decided who gets the message.
            tag=None,
            deduplication_id=publish_id if can.native_fifo else None,
        )
        check_sendable(copy, can)
        return copy


def delete_topic(account: Account, definitions: Definitions, definition: Definition) -> None:
    """See `PullTopic.delete`."""
    definitions.write(msgspec.structs.replace(definition, state=State.DELETING))
    delete_native(account, definition)
    for queue in definition.created:
        try:
            account.delete(queue)
        except QueueMissing:
            continue
    definitions.remove(definition.topic)


def _checked_id(given: Any) -> str:
    if given is None:
        return secrets.token_hex(16)
    if not isinstance(given, str) or not 1 <= len(given) <= ID_CHARACTERS_MAX or not given.isascii():
        reason = f"must be 1 to {ID_CHARACTERS_MAX} characters of ASCII"
        raise ParameterInvalid(parameter="id", reason=reason)
    return given


def create_pull_topic(
    account: Account,
    topic: str,
    queue_names: Sequence[str] | Mapping[str, str],
    *,
    definitions: Definitions | str,
    create_queues: bool = False,
    template: Template | None = None,
    tags: Mapping[str, Collection[str]] | None = None,
    encodings: Mapping[str, Encoding | str] | None = None,
    bodies: Bodies | None = None,
    form: Form | str | None = None,
) -> PullTopic:
    """Create the topic, or open it if the same one exists.

    queue_names: one queue for each subscription; a mapping for subscriptions whose names differ from their queues'.
    definitions: where topics are recorded, or its URL. create_queues: create missing queues, with the settings of
    `template`; they are deleted with the topic. tags, encodings: by subscription; default: all messages, raw. bodies:
    see `PullTopic`. form: None uses a topic of the service's own if it has them and the names, tags and encodings fit;
    for an existing topic, its own form.

    Raises ParameterInvalid; SubscriptionExists, TopicExists (a different one exists); QueueMissing (without
    create_queues); CapabilityMissing (form=native where it does not exist or cannot do this); what `Account.create`
    raises; ObjectStoreFailed. After any of them, nothing new is left.
    """
    checks.object_with(account, "account", "queue")
    where = definitions if isinstance(definitions, Definitions) else Definitions(definitions)
    checks.function_or_none(bodies, "bodies")
    subscriptions = subscriptions_of(queue_names, {} if tags is None else tags, {} if encodings is None else encodings)
    wanted = Definition(topic, subscriptions, State.CREATING, changed=where.now())
    if template is not None and not create_queues:
        raise ParameterInvalid(parameter="template", reason="is for queues that are made: create_queues=True")
    if bodies is not None and any(each.encoding is Encoding.BASE64 for each in wanted.subscriptions):
        raise ParameterInvalid(parameter="encodings", reason="bodies that are made by `bodies` are raw")
    chosen = None if form is None else checks.choice(form, Form, "form")
    if chosen is Form.NATIVE:
        check_fits(account, wanted, bodies)
    there = where.find(topic)
    if there is None:
        where.add(wanted)
    else:
        check_same(there, wanted)
        if chosen not in (None, there.form) and there.state is State.READY:
            raise TopicExists(topic=topic, reason=f"its form is {there.form}")
        if there.state is State.READY:
            return PullTopic(account, where, there, bodies=bodies)
        where.check_left(there)
        wanted = msgspec.structs.replace(wanted, created=there.created)
    making = _Making(account, where, wanted, there, bodies)
    try:
        if create_queues:
            making.make_queues(template)
        making.make_native(chosen)
        return making.end()
    except VeilError:
        making.take_back()
        raise


class _Making:
    """A topic being created, and which parts this call created: an error removes these."""

    def __init__(
        self, account: Account, where: Definitions, wanted: Definition, there: Definition | None, bodies: Bodies | None
    ) -> None:
        self._account = account
        self._where = where
        self._wanted = wanted
        self._there = there
        self._bodies = bodies
        self._queues: list[str] = []
        self._native = False

    def make_queues(self, template: Template | None) -> None:
        """Create the missing queues, each recorded when it is created."""
        for each in self._wanted.subscriptions:
            if self._account.create(each.queue, template):
                self._queues.append(each.queue)
                self._note(created=(*self._wanted.created, each.queue))

    def make_native(self, form: Form | None) -> None:
        """Create the service's own topic with its subscriptions, if the service can and `form` allows it.

        Raises CapabilityMissing, TopicExists, SubscriptionExists.
        """
        native = form is not Form.FAN_OUT and native_topics_of(self._account, self._wanted, self._bodies)
        if native:
            self._note(form=Form.NATIVE)  # recorded before the service creates it, so a crash leaves nothing unrecorded
            self._native = native.create(self._wanted.topic, [each.queue for each in self._wanted.subscriptions])
            _subscribe(native, self._wanted)
        elif form is Form.NATIVE:
            raise CapabilityMissing(capability="native_topics")
        elif self._there is not None:
            delete_native(self._account, self._there)  # an earlier call began in the other form

    def end(self) -> PullTopic:
        """Mark the definition as ready."""
        ready = msgspec.structs.replace(self._wanted, state=State.READY, changed=0.0)
        topic = PullTopic(self._account, self._where, ready, bodies=self._bodies)
        self._where.write(ready)
        return topic

    def take_back(self) -> None:
        """Undo what this call did. A failure to undo is logged, and the definition still lists what is left."""
        topic = self._wanted.topic
        if self._native:
            try:
                delete_native(self._account, self._wanted)
            except VeilError as error:
                log.error("topic %s of the service is half made, delete it: %s", topic, error)
        try:
            for queue in self._queues:
                with contextlib.suppress(QueueMissing):
                    self._account.delete(queue)
            if self._there is None:
                self._where.remove(topic)
            else:
                self._where.write(self._there)
        except VeilError as error:
            log.error("topic %s is half made, delete it: %s", topic, error)

    def _note(self, **changed: Any) -> None:
        self._wanted = msgspec.structs.replace(self._wanted, changed=self._where.now(), **changed)
        self._where.write(self._wanted)


def _subscribe(native: NativeTopics, wanted: Definition) -> None:
    """Raises TopicExists, SubscriptionExists if the service's topic of that name has other subscriptions."""
    ours = {each.name: each for each in natively(wanted.subscriptions)}
    for there in native.subscriptions(wanted.topic):
        mine = ours.get(there.name)
        if mine is None:
            raise TopicExists(topic=wanted.topic, reason=f"the service's has a subscription {there.name}, too")
        if there != mine:
            setting = "endpoint" if there.queue != mine.queue else "tags"
            raise SubscriptionExists(topic=wanted.topic, subscription=there.name, setting=setting)
    for each in ours.values():
        native.subscribe(wanted.topic, each)


def open_pull_topic(
    account: Account, topic: str, *, definitions: Definitions | str, bodies: Bodies | None = None
) -> PullTopic:
    """An existing topic. Raises TopicMissing, TopicExists (partly created or partly deleted), QueueMissing."""
    where = definitions if isinstance(definitions, Definitions) else Definitions(definitions)
    return PullTopic(account, where, where.get(topic), bodies=bodies)


def delete_pull_topic(account: Account, topic: str, *, definitions: Definitions | str) -> None:
    """Like `PullTopic.delete`, for a topic in any state, even after a crash. Raises TopicMissing, ParameterInvalid."""
    checks.object_with(account, "account", "queue")
    where = definitions if isinstance(definitions, Definitions) else Definitions(definitions)
    found = where.find(topic)
    if found is None:
        raise TopicMissing(topic=topic)
    delete_topic(account, where, found)
