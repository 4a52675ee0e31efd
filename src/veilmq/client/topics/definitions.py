"""Which topics exist: one small JSON object each, in a directory or bucket that all publishers can reach.

    {"topic": "news", "state": "ready", "created": ["a"],
     "form": "fan-out", "subscriptions": [{"name": "a", "queue": "a", "tags": ["urgent"], "encoding": "raw"}]}

Strategy: no place in a queue for such a list is readable in every protocol, so it is kept beside the queues. The object
is written before the first queue is created and removed after the last one is deleted. It lists each queue that was
created for the topic. So everything that a crash leaves can be deleted, and nothing else is.

Encodings: a subscription's encoding is fixed when it is created; a base64 body says so in an attribute, where
attributes exist. A reader names the encoding that it expects; any other is a typed error, never a guess. Source: the
documents' RawTopicMessage and getMessageBodyAsRawString; RFC 4648, section 4.

Native topics: used only if the service can do all that the pull topic asks: one tag a subscription, bodies unchanged
and the same for all, and queues without wrappers, because a native publish would bypass a wrapper.
"""

import base64
import binascii
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import structs

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import EncodingMismatch, SubscriptionExists, TopicExists, TopicMissing
from veilmq.client.messages import Peeked
from veilmq.client.queue import Account, NativeSubscription, NativeTopics, Queue
from veilmq.client.records import ObjectStore, is_key
from veilmq.client.shared import checks
from veilmq.client.shared.checks import text_bytes
from veilmq.model.errors import CapabilityMissing, ParameterInvalid

ENCODING_ATTRIBUTE: Final = "veilmq.encoding"


class Encoding(StrEnum):
    """How a subscription gets bodies."""

    RAW = "raw"
    """Unchanged."""
    BASE64 = "base64"
    """The UTF-8 in base64, as in MNS's own topics and older SDKs."""


def encoded(body: str, encoding: Encoding) -> str:
    """The body as a subscription gets it. Raises ParameterInvalid if it is not text."""
    raw = text_bytes(body)
    return body if encoding is Encoding.RAW else base64.b64encode(raw).decode()


def decoded(message: Peeked, encoding: Encoding | str) -> str:
    """The body as it was published, from a subscription of that encoding. Raises EncodingMismatch,
    ParameterInvalid."""
    wanted = checks.choice(encoding, Encoding, "encoding")
    marked = message.attributes.get(ENCODING_ATTRIBUTE, wanted)
    if marked != wanted:
        raise EncodingMismatch(wanted=wanted, reason=f"it is marked as {marked!r}")
    if wanted is Encoding.RAW:
        return message.body
    try:
        return base64.b64decode(message.body.encode("ascii"), validate=True).decode()
    except (UnicodeError, binascii.Error):
        raise EncodingMismatch(wanted=wanted, reason="it is not base64 of text") from None


NAME_CHARACTERS_MAX: Final = 120
CREATING_SECONDS: Final = 60.0
"""When a creation has not gone on for so long, its process is taken to have ended."""
_DIRECTORY: Final = "topics"


class State(StrEnum):
    """How far the creation of a topic has progressed."""

    CREATING = "creating"
    READY = "ready"
    DELETING = "deleting"


class Form(StrEnum):
    """How a publish reaches the queues."""

    NATIVE = "native"
    """Through a topic of the service's own: one request, to all queues or to none."""
    FAN_OUT = "fan-out"
    """By us: one batch for each queue."""


class Subscription(msgspec.Struct, frozen=True):
    """A queue that gets what is published."""

    name: str
    queue: str
    """Its endpoint."""
    tags: tuple[str, ...] = ()
    """Gets messages with one of these tags; empty: all."""
    encoding: Encoding = Encoding.RAW


class Definition(msgspec.Struct, frozen=True):
    """A topic."""

    topic: str
    subscriptions: tuple[Subscription, ...]
    state: State = State.READY
    created: tuple[str, ...] = ()
    """Queues that were created for the topic, and are deleted with it."""
    form: Form = Form.FAN_OUT
    changed: float = 0.0
    """Unix seconds at which its creation has come this far; 0: nobody creates it."""


class _Added(Definition, frozen=True):
    """A definition as it is first written: the writer recognises its own write by the token; readers ignore it."""

    token: str = ""


class Definitions:
    """The topics below one URL. Any thread; all calls raise ObjectStoreFailed."""

    def __init__(self, store: str | ObjectStore, clock: Clock = SYSTEM) -> None:
        """store: a URL as for large messages, e.g. `file:///var/lib/app` or `s3://bucket/app`; the same for all
        publishers. clock: says how long ago another process went on with a creation.

        Raises ParameterInvalid, ModuleNotFoundError (without the extra `large`).
        """
        self._store = store if isinstance(store, ObjectStore) else ObjectStore(store)
        self._clock = clock

    def now(self) -> float:
        """Unix seconds."""
        return self._clock.wall()

    def check_left(self, found: Definition) -> None:
        """Raises TopicExists if another process may be creating the topic now."""
        age = self.now() - found.changed
        if found.state is State.CREATING and 0 <= age < CREATING_SECONDS:
            left = f"if not, create it again in {CREATING_SECONDS - age:.0f} s, or delete it"
            raise TopicExists(topic=found.topic, reason=f"another process may be creating it: {left}")

    def add(self, definition: Definition) -> None:
        """Raises TopicExists. Of two concurrent calls one succeeds, on local files, memory and Amazon S3."""
        added = _Added(**structs.asdict(definition), token=secrets.token_hex(16))
        if not self._store.create(_key(definition.topic), msgspec.json.encode(added)):
            raise TopicExists(topic=definition.topic, reason="it was made at the same time")

    def write(self, definition: Definition) -> None:
        """Overwrite the definition."""
        self._store.put(_key(definition.topic), msgspec.json.encode(definition))

    def find(self, topic: str) -> Definition | None:
        """The topic, in any state. Raises TopicExists if something else is stored under its name."""
        raw = self._store.get(_key(topic))
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=Definition)
        except (ValueError, RecursionError) as error:
            raise TopicExists(topic=topic, reason=f"its definition cannot be read: {error}") from None

    def get(self, topic: str) -> Definition:
        """The topic, if it is ready. Raises TopicMissing, TopicExists (partly created or partly deleted)."""
        found = self.find(topic)
        if found is None:
            raise TopicMissing(topic=topic)
        if found.state is not State.READY:
            raise TopicExists(topic=topic, reason=f"it is {found.state}: create or delete it again")
        return found

    def remove(self, topic: str) -> None:
        """Idempotent."""
        self._store.remove(_key(topic))

    def names(self) -> list[str]:
        """The names of all topics, in any state."""
        found = (each.key.rpartition("/")[2] for each in self._store.list(_DIRECTORY))
        return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


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


def _key(topic: Any) -> str:
    key = f"{_DIRECTORY}/{topic}.json"
    if not isinstance(topic, str) or not is_key(key) or "/" in topic or not 1 <= len(topic) <= NAME_CHARACTERS_MAX:
        reason = f"a name has 1 to {NAME_CHARACTERS_MAX} of A-Z a-z 0-9 . _ = @ + -"
        raise ParameterInvalid(parameter="topic", reason=reason)
    return key


def subscriptions_of(
    queue_names: Sequence[str] | Mapping[str, str],
    tags: Mapping[str, Collection[str]],
    encodings: Mapping[str, Encoding | str],
) -> tuple[Subscription, ...]:
    """Raises ParameterInvalid."""
    names = checks.texts(queue_names, "queue_names")
    if not names:
        raise ParameterInvalid(parameter="queue_names", reason="must name one queue at least")
    queues = checks.texts(queue_names.values(), "queue_names") if isinstance(queue_names, Mapping) else names
    named = dict(zip(names, queues, strict=True))
    if len(named) != len(names) or len(set(named.values())) != len(named):
        raise ParameterInvalid(
            parameter="queue_names", reason="a queue is there twice: it would get every message twice"
        )
    wanted = {name: checks.texts(listed, f"tags[{name!r}]") for name, listed in checks.mapping(tags, "tags").items()}
    for parameter, given in (("tags", tags), ("encodings", encodings)):
        unknown = sorted(set(checks.texts(checks.mapping(given, parameter), parameter)) - set(named))
        if unknown:
            raise ParameterInvalid(parameter=parameter, reason=f"no subscription is called {unknown[0]!r}")
    for name, listed in wanted.items():
        if not all(listed):
            raise ParameterInvalid(parameter=f"tags[{name!r}]", reason="must not have an empty tag")
    for name, encoding in encodings.items():
        checks.choice(encoding, Encoding, f"encodings[{name!r}]")
    return tuple(
        Subscription(name, queue, tuple(sorted(wanted.get(name, ()))), Encoding(encodings.get(name, Encoding.RAW)))
        for name, queue in named.items()
    )


def check_same(there: Definition, wanted: Definition) -> None:
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
