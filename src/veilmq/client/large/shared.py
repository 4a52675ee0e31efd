"""One object for all queues of a topic: it exists until the last subscriber has deleted its message.

    topic=TOPIC/STAMP/body              the object
    topic=TOPIC/STAMP/for-READER        an empty marker for each subscriber that has not deleted yet

Strategy: every subscriber's pointer names its own marker. A delete removes the message, then the marker, and then the
body if no other marker is left; two deletes that see this at once both remove the body, which is harmless. Markers are
written before the body, and the body before any pointer, so no pointer is without them. Objects left by a crash, or by
a subscriber that never got its message, are swept by age like any other object.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

from veilmq.client import checks
from veilmq.client.checks import as_message, text_bytes
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.large import pointer, sweeping
from veilmq.client.large.pointer import SHARED_BODY, Pointer, PointerFormat
from veilmq.client.large.sweeping import Swept, new_stamp
from veilmq.client.messages import Message
from veilmq.client.queue import Queue
from veilmq.client.records.objects import ObjectStore, is_key
from veilmq.model.errors import ParameterInvalid

_MARKER: Final = "for-"


class SharedBodies:
    """Stores a topic's large messages once for all its queues: the `bodies` of a `PullTopic`. Thread-safe."""

    def __init__(
        self, store: str | ObjectStore, topic: str, *, threshold_bytes: int = 65_536, clock: Clock = SYSTEM
    ) -> None:
        """threshold_bytes: UTF-8 bytes above which a body goes to the store. Raises ParameterInvalid."""
        checks.at_least(threshold_bytes, "threshold_bytes", 0)
        self._store = store if isinstance(store, ObjectStore) else ObjectStore(store)
        # No queue's name has an equals sign, so no queue's sweep removes these objects.
        self._directory = f"topic={topic}"
        if not is_key(self._directory):
            raise ParameterInvalid(parameter="topic", reason=f"must be a name, not {topic!r}")
        self._threshold_bytes, self._clock = threshold_bytes, clock

    def __call__(self, given: str | Message, readers: Sequence[str]) -> list[Message]:
        """A message for each reader: the given one if it is small, else one that points to the shared object.

        Raises ParameterInvalid, ObjectStoreFailed.
        """
        message = as_message(given)
        raw = text_bytes(message.body)
        if not readers or (
            len(raw) <= self._threshold_bytes and not pointer.must_be_stored(message.body, PointerFormat.OWN)
        ):
            return [message] * len(readers)
        directory = f"{self._directory}/{new_stamp(self._clock, message.ttl)}"
        for reader in readers:
            self._store.put(_marker(directory, reader), b"")
        key = f"{directory}/{SHARED_BODY}"
        self._store.put(key, raw)
        digest = hashlib.sha256(raw).hexdigest()
        return [
            pointer.written(Pointer(key, len(raw), digest, reader), message, self._store, PointerFormat.OWN)
            for reader in readers
        ]

    def sweep(self, older_than: float, queues: Sequence[Queue], dead_letters: Sequence[Queue] = ()) -> Swept:
        """Like `LargeMessageQueue.sweep`, for the topic's objects; `queues`: all that the topic ever published to."""
        if not queues:
            raise ParameterInvalid(parameter="queues", reason="there must be one at least")
        life = max(sweeping.longest_life(queue, None, dead_letters) for queue in queues)
        age = sweeping.checked_age(older_than, life)
        return sweeping.sweep(self._store, self._directory, age, self._clock.wall())


def drop(store: ObjectStore, key: str, reader: str) -> None:
    """Release the object for this reader. Raises ObjectStoreFailed; idempotent."""
    directory = key.rpartition("/")[0]
    store.remove(_marker(directory, reader))
    if not any(found.key.rpartition("/")[2].startswith(_MARKER) for found in store.list(directory)):
        store.remove(key)
        store.remove_directory(directory)


def _marker(directory: str, reader: str) -> str:
    return f"{directory}/{_MARKER}{reader}"
