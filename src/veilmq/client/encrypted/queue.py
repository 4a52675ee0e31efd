"""A queue that encrypts bodies when they are sent and decrypts them when they are received.

Strategy: a body is a compact JWE bound to the queue's name (`cipher`); there is no plain-text fallback in either
direction. A message that cannot be decrypted goes to the policy, and the receive continues. Attributes, group, type,
deduplication id and delay are needed by the queue: they stay plain and are not authenticated. Source: the seed
documents' SecurityQueue.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import Final

import msgspec

from veilmq.client import checks
from veilmq.client.batches import attempt, send_prepared
from veilmq.client.checks import as_message, text_bytes
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.encrypted.cipher import Cipher
from veilmq.client.encrypted.keys import Keyring
from veilmq.client.errors import Undecryptable
from veilmq.client.messages import Message, Peeked, Received, Sent
from veilmq.client.queue import ById, Capabilities, Queue, identity_of
from veilmq.client.unreadable import Policy, checked_policy, log, read_each, receive_readable
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import MessageTooLarge, ParameterInvalid, VeilError

_NAME_CHARACTERS_MAX: Final = 256


class EncryptedQueue(Wrapping):
    """A `Queue` of encrypted bodies over any queue; attributes stay plain. Thread-safe."""

    def __init__(
        self,
        inner: Queue,
        keys: Keyring,
        *,
        unreadable: Policy,
        algorithms: Collection[str] = ("A256GCM",),
        bound_to: str | None = None,
        accepts: Collection[str] = (),
        clock: Clock = SYSTEM,
    ) -> None:
        """keys: `Keys` or `KeyFile`: all decrypt, the newest encrypts. unreadable: what to do with a message that
        cannot be decrypted: `DeadLetters(queue)`, `keep` or a function of (inner queue, message, Undecryptable).
        algorithms: which algorithms (`ALGORITHMS`) keys may have. bound_to: the name that bodies are bound to; None:
        the queue's. accepts: further accepted names, for a dead-letter queue to which messages are moved.

        Raises ParameterInvalid, ModuleNotFoundError (without the extra `encryption`).
        """
        super().__init__(inner)
        if isinstance(accepts, str):
            raise ParameterInvalid(parameter="accepts", reason="must be a collection of names")
        name = inner.name if bound_to is None else bound_to
        if not 1 <= len(name) <= _NAME_CHARACTERS_MAX:
            raise ParameterInvalid(parameter="bound_to", reason=f"must have 1 to {_NAME_CHARACTERS_MAX} characters")
        self._cipher = Cipher(keys, algorithms, name, accepts)
        self._policy = checked_policy(unreadable, inner)
        self._clock = clock

    @property
    def capabilities(self) -> Capabilities:
        """Those of `inner`, except the largest body: encryption leaves less room."""
        inner = self.inner.capabilities
        characters = inner.body_bytes_max // 4 * 3 if inner.base64_body else inner.body_bytes_max
        largest = self._cipher.body_bytes_max(characters)
        largest = largest // 3 * 4 if inner.base64_body else largest
        return msgspec.structs.replace(inner, body_bytes_max=largest, body_bytes_min=0)

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`: the inner queue, with keys, names and policy."""
        cipher, policy = self._cipher.identity, identity_of(self._policy)
        return type(self), identity_of(self.inner), cipher, policy, ById(self._clock)

    def send(self, message: str | Message) -> Sent:
        """See `Queue.send`. The size for MessageTooLarge is that of the encrypted body."""
        return self.inner.send(self._encrypted(message))

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """See `Queue.send_batch`."""
        return send_prepared(self.inner, [attempt(self._encrypted, message) for message in checks.batch(messages)])

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """See `Queue.receive`. Messages that cannot be decrypted go to the policy, and the receive continues."""
        return receive_readable(
            lambda left: self.inner.receive(count_max, lease=lease, wait=left),
            lambda came: read_each(came, self._decrypted, self._policy, self.inner),
            wait,
            self._clock,
        )

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """See `Queue.extend`."""
        return self.inner.extend(handle, lease, body=None if body is None else self._jwe(body))

    def peek(self, count_max: int = 1) -> list[Peeked]:
        """See `Queue.peek`. Leaves out messages that cannot be decrypted."""
        found = []
        for message in self.inner.peek(count_max):
            try:
                body = self._cipher.decrypt(message.body, message.id)
                found.append(msgspec.structs.replace(message, body=body))
            except Undecryptable as error:
                log.warning("queue %s: %s", self.name, error)
        return found

    def _encrypted(self, given: str | Message) -> Message:
        message = as_message(given)
        if self.inner.capabilities.native_fifo and message.deduplication_id is None:
            reason = "is needed: no two encrypted bodies are alike, so the queue cannot compare them"
            raise ParameterInvalid(parameter="deduplication_id", reason=reason)
        return msgspec.structs.replace(message, body=self._jwe(message.body))

    def _jwe(self, body: str) -> str:
        raw = text_bytes(body)
        can = self.inner.capabilities
        size_bytes = self._cipher.encrypted_bytes(len(raw))
        if can.base64_body:
            size_bytes = (size_bytes + 2) // 3 * 4
        if size_bytes > can.body_bytes_max:
            raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=can.body_bytes_max)
        return self._cipher.encrypt(raw)

    def _decrypted(self, message: Received) -> Received:
        return msgspec.structs.replace(message, body=self._cipher.decrypt(message.body, message.id))
