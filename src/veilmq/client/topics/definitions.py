"""Which topics there are: one small JSON object each, in a directory or bucket that all publishers can reach.

    {"topic": "news", "state": "ready", "created": ["a"],
     "form": "fan-out", "subscriptions": [{"name": "a", "queue": "a", "tags": ["urgent"], "encoding": "raw"}]}

Strategy: a queue has no place to keep such a list that every protocol lets us read, so it is kept beside the queues.
The object exists before the first queue is made and after the last one is deleted, and lists the queues that were made
for the topic as they are made: whatever a crash leaves can be deleted, and nothing else is.

Encodings: what a subscription gets is settled when it is made, and a base64 body says so in an attribute where there
are any. A reader says which it wants; what is not that is a typed error, never a guess. Source: the documents'
RawTopicMessage and getMessageBodyAsRawString; RFC 4648, section 4.
"""

import base64
import binascii
import secrets
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import structs

from veilmq.client.errors import EncodingMismatch, TopicExists, TopicMissing
from veilmq.client.messages import Peeked
from veilmq.client.objects import ObjectStore, is_key
from veilmq.client.sendable import text_bytes
from veilmq.model.errors import ParameterInvalid

ENCODING_ATTRIBUTE: Final = "veilmq.encoding"


class Encoding(StrEnum):
    """How a subscription gets bodies."""

    RAW = "raw"
    """As they were published."""
    BASE64 = "base64"
    """In base64 of their UTF-8, as MNS's own topics and older SDKs have them."""


def encoded(body: str, encoding: Encoding) -> str:
    """The body as a subscription gets it. Raises ParameterInvalid if it is not text."""
    raw = text_bytes(body)
    return body if encoding is Encoding.RAW else base64.b64encode(raw).decode()


def decoded(message: Peeked, encoding: Encoding | str) -> str:
    """The body as it was published, from a subscription of that encoding. Raises EncodingMismatch."""
    wanted = Encoding(encoding)
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
_DIRECTORY: Final = "topics"


class State(StrEnum):
    """How far the making of a topic got."""

    CREATING = "creating"
    READY = "ready"
    DELETING = "deleting"


class Form(StrEnum):
    """How a publish reaches the queues."""

    NATIVE = "native"
    """By a topic of the service's own: one request, to all queues or to none."""
    FAN_OUT = "fan-out"
    """By us: a batch a queue."""


class Subscription(msgspec.Struct, frozen=True):
    """A queue that gets what is published."""

    name: str
    queue: str
    """Its endpoint."""
    tags: tuple[str, ...] = ()
    """Gets messages with one of these tags; none: all."""
    encoding: Encoding = Encoding.RAW


class Definition(msgspec.Struct, frozen=True):
    """A topic."""

    topic: str
    subscriptions: tuple[Subscription, ...]
    state: State = State.READY
    created: tuple[str, ...] = ()
    """Queues that were made for it, and go with it."""
    form: Form = Form.FAN_OUT


class _Added(Definition, frozen=True):
    """A definition as it is first written: readers pass over the token, by which its writer knows it again."""

    token: str = ""


class Definitions:
    """The topics below one URL. Any thread; all calls raise ObjectStoreFailed."""

    def __init__(self, store: str | ObjectStore) -> None:
        """store: a URL as large messages take it, e.g. `file:///var/lib/app` or `s3://bucket/app`, the same for
        everybody who publishes. Raises ParameterInvalid, ModuleNotFoundError (without the extra `large`).
        """
        self._store = store if isinstance(store, ObjectStore) else ObjectStore(store)

    def add(self, definition: Definition) -> None:
        """Raises TopicExists. Of two who add at once one wins, on local files, memory and Amazon S3."""
        added = _Added(**structs.asdict(definition), token=secrets.token_hex(16))
        if not self._store.create(_key(definition.topic), msgspec.json.encode(added)):
            raise TopicExists(topic=definition.topic, reason="it was made at the same time")

    def write(self, definition: Definition) -> None:
        """Over what is there."""
        self._store.put(_key(definition.topic), msgspec.json.encode(definition))

    def find(self, topic: str) -> Definition | None:
        """The topic, in any state. Raises TopicExists if there is something else in its place."""
        raw = self._store.get(_key(topic))
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=Definition)
        except (ValueError, RecursionError) as error:
            raise TopicExists(topic=topic, reason=f"its definition cannot be read: {error}") from None

    def get(self, topic: str) -> Definition:
        """The topic, if it is ready. Raises TopicMissing, TopicExists (half made or half deleted)."""
        found = self.find(topic)
        if found is None:
            raise TopicMissing(topic=topic)
        if found.state is not State.READY:
            raise TopicExists(topic=topic, reason=f"it is {found.state}: create or delete it again")
        return found

    def remove(self, topic: str) -> None:
        """Twice is once."""
        self._store.remove(_key(topic))

    def names(self) -> list[str]:
        """The topics there are, in any state."""
        found = (each.key.rpartition("/")[2] for each in self._store.list(_DIRECTORY))
        return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


def _key(topic: Any) -> str:
    key = f"{_DIRECTORY}/{topic}.json"
    if not isinstance(topic, str) or not is_key(key) or "/" in topic or not 1 <= len(topic) <= NAME_CHARACTERS_MAX:
        reason = f"a name has 1 to {NAME_CHARACTERS_MAX} of A-Z a-z 0-9 . _ = @ + -"
        raise ParameterInvalid(parameter="topic", reason=reason)
    return key
