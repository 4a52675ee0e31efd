"""Publishing: one message to every subscription that wants it.

Strategy: if the service has its own topic for this, a publish is one request to it, which reaches all queues or none.
For messages that it cannot carry, and everywhere else, a publish is one batch for each queue, to all queues at the same
time. Every copy carries the publish's id: on a FIFO queue as deduplication id, so that publishing again with that id
adds no second copy; elsewhere as an attribute, by which a consumer can drop duplicates. Failures are reported by
subscription, and only these need to be published again. Source: the documents' CloudPullTopic.publishMessage.

Native topics: used only if the service can do all that the pull topic asks: one tag a subscription, bodies unchanged
and the same for all, and queues without wrappers, because a native publish would bypass a wrapper.
"""

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import msgspec

from veilmq.client.batches import attempt, send_prepared
from veilmq.client.checks import as_message, check_sendable, text_bytes
from veilmq.client.errors import EncodingMismatch, PublishIncomplete
from veilmq.client.messages import Message, Sent
from veilmq.client.queue import Account, NativePublished, NativeSubscription, NativeTopics, Queue
from veilmq.client.threads import Closing, DaemonPool
from veilmq.client.topics.definitions import (
    ENCODING_ATTRIBUTE,
    Definition,
    Definitions,
    Encoding,
    Form,
    State,
    Subscription,
    encoded,
)
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, QueueMissing, VeilError


def natively(subscriptions: Iterable[Subscription]) -> list[NativeSubscription]:
    """The subscriptions in the service's form."""
    return [NativeSubscription(each.name, each.queue, each.tags[0] if each.tags else None) for each in subscriptions]


def native_topics_of(
    account: Account, definition: Definition, bodies: Any, queues: Collection[Queue] | None = None
) -> NativeTopics | None:
    """The service's topics if they can serve this one. Raises QueueMissing, if the queues are not given."""
    topics = _topics_of(account)
    if topics is None or _unfit(topics, definition, bodies) is not None:
        return None
    found: Sequence[Queue] = (
        [account.queue(each.queue) for each in definition.subscriptions] if queues is None else list(queues)
    )
    serves = all(each.capabilities.native_topics and each.account is account for each in found)
    return topics if serves else None


def check_fits(account: Account, definition: Definition, bodies: Any) -> None:
    """Raises CapabilityMissing if the service's own topics cannot serve this one."""
    topics = _topics_of(account)
    reason = "native_topics" if topics is None else _unfit(topics, definition, bodies)
    if reason is not None:
        raise CapabilityMissing(capability=reason)


def delete_native(account: Account, definition: Definition) -> None:
    """Delete the service's topic of this definition, if it exists. Raises what the service does."""
    topics = _topics_of(account)
    if definition.form is Form.NATIVE and topics is not None:
        topics.delete(definition.topic)


def _topics_of(account: Account) -> NativeTopics | None:
    offered = getattr(account, "topics", None)
    return None if offered is None else offered()


def _unfit(topics: NativeTopics, definition: Definition, bodies: Any) -> str | None:
    """What the definition needs that the service's topics cannot do; None if nothing."""
    if bodies is not None:
        return "native topics with bodies that differ"
    if any(each.encoding is not Encoding.RAW for each in definition.subscriptions):
        return "native topics with an encoding of a subscription's own"
    if any(len(each.tags) > 1 for each in definition.subscriptions):
        return "native topics with several tags of a subscription"
    fits = topics.fits(definition.topic, natively(definition.subscriptions))
    return None if fits else "native topics with such names, tags or queues"


ID_ATTRIBUTE: Final = "veilmq.id"
"""Carries the publish's id."""
ID_CHARACTERS_MAX: Final = 128
"""SQS's limit on a deduplication id."""
_THREADS_MAX: Final = 8

Bodies = Callable[[Message, Sequence[str]], Sequence[Message]]
"""Takes a message and its subscriptions, returns one message for each (`large.SharedBodies`)."""


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
        """bodies: makes the copies of a message, if they differ. Raises QueueMissing."""
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
        return self._publish(messages, None, None, encoding)

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
        targets = self._targets(to, None if encoding is None else Encoding(encoding))

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
            unknown = [name for name in to if name not in known]
            if isinstance(to, str) or unknown:
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
