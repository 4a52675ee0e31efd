"""Creates a topic completely or not at all, and opens an existing one.

Strategy: the definition is written first, so that only one of two concurrent calls for the same topic succeeds. Then
the queues are created, each recorded in the definition; then the definition becomes ready. After an error, everything
that this call created is removed. After a crash, creating the topic again completes it, or deleting it removes the
rest. An existing topic is accepted only if it is the same. Source: the documents' createPullTopic(topicMeta,
queueNameList, needCreateQueue, queueMetaTemplate).
"""

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from veilmq.client.errors import SubscriptionExists, TopicExists, TopicMissing
from veilmq.client.messages import Template
from veilmq.client.queue import Account, NativeTopics
from veilmq.client.topics.definitions import Definition, Definitions, Encoding, Form, State, Subscription
from veilmq.client.topics.topic import (
    Bodies,
    PullTopic,
    check_fits,
    delete_native,
    delete_topic,
    native_topics_of,
    natively,
)
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, QueueMissing, VeilError

log = logging.getLogger("veilmq.client")


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
    where = definitions if isinstance(definitions, Definitions) else Definitions(definitions)
    wanted = Definition(topic, _subscriptions(queue_names, tags or {}, encodings or {}), State.CREATING)
    if template is not None and not create_queues:
        raise ParameterInvalid(parameter="template", reason="is for queues that are made: create_queues=True")
    if bodies is not None and any(each.encoding is Encoding.BASE64 for each in wanted.subscriptions):
        raise ParameterInvalid(parameter="encodings", reason="bodies that are made by `bodies` are raw")
    chosen = None if form is None else _checked_form(form)
    if chosen is Form.NATIVE:
        check_fits(account, wanted, bodies)
    there = where.find(topic)
    if there is None:
        where.add(wanted)
    else:
        _check_same(there, wanted)
        if chosen not in (None, there.form) and there.state is State.READY:
            raise TopicExists(topic=topic, reason=f"its form is {there.form}")
        if there.state is State.READY:
            return PullTopic(account, where, there, bodies=bodies)
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
        ready = msgspec.structs.replace(self._wanted, state=State.READY)
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
        self._wanted = msgspec.structs.replace(self._wanted, **changed)
        self._where.write(self._wanted)


def _checked_form(form: Any) -> Form:
    if form not in set(Form):
        raise ParameterInvalid(parameter="form", reason=f"must be native or fan-out, not {form!r}")
    return Form(form)


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
    """Like `PullTopic.delete`, for a topic in any state, even after a crash. Raises TopicMissing."""
    where = definitions if isinstance(definitions, Definitions) else Definitions(definitions)
    found = where.find(topic)
    if found is None:
        raise TopicMissing(topic=topic)
    delete_topic(account, where, found)


def _subscriptions(
    queue_names: Sequence[str] | Mapping[str, str],
    tags: Mapping[str, Collection[str]],
    encodings: Mapping[str, Encoding | str],
) -> tuple[Subscription, ...]:
    """Raises ParameterInvalid."""
    if isinstance(queue_names, str) or not queue_names:
        raise ParameterInvalid(parameter="queue_names", reason="must be names of queues, one at least")
    named = dict(queue_names) if isinstance(queue_names, Mapping) else {name: name for name in queue_names}
    if len(named) != len(queue_names) or len(set(named.values())) != len(named):
        raise ParameterInvalid(
            parameter="queue_names", reason="a queue is there twice: it would get every message twice"
        )
    for parameter, given in (("tags", tags), ("encodings", encodings)):
        unknown = sorted(set(given) - set(named))
        if unknown:
            raise ParameterInvalid(parameter=parameter, reason=f"no subscription is called {unknown[0]!r}")
    for name, listed in tags.items():
        if isinstance(listed, str) or not all(listed):
            raise ParameterInvalid(parameter=f"tags[{name!r}]", reason="must be a collection of tags")
    for name, encoding in encodings.items():
        if encoding not in set(Encoding):
            raise ParameterInvalid(parameter=f"encodings[{name!r}]", reason=f"must be raw or base64, not {encoding!r}")
    return tuple(
        Subscription(name, queue, tuple(sorted(tags.get(name, ()))), Encoding(encodings.get(name, Encoding.RAW)))
        for name, queue in named.items()
    )


def _check_same(there: Definition, wanted: Definition) -> None:
    """Raises SubscriptionExists, TopicExists."""
    topic = there.topic
    if there.state is State.DELETING:
        raise TopicExists(topic=topic, reason="it is half deleted: delete it again")
    theirs = {each.name: each for each in there.subscriptions}
    for mine in wanted.subscriptions:
        other = theirs.pop(mine.name, None)
        if other is None:
            raise TopicExists(topic=topic, reason=f"it has no subscription {mine.name}")
        for setting, one, another in (
            ("endpoint", mine.queue, other.queue),
            ("tags", mine.tags, other.tags),
            ("encoding", mine.encoding, other.encoding),
        ):
            if one != another:
                raise SubscriptionExists(topic=topic, subscription=mine.name, setting=setting)
    if theirs:
        raise TopicExists(topic=topic, reason=f"it has the subscription {min(theirs)}, too")
