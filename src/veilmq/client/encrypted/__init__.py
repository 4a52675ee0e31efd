"""A queue that encrypts bodies when they are sent and decrypts them when they are received.

    {"alg": "dir", "enc": "A256GCM", "kid": "5f0c...", "queue": "orders"} . . iv . ciphertext . tag

Strategy: a body is a compact JWE (RFC 7516, section 7.1) bound to the queue's name; there is no plain-text fallback in
either direction. A message that cannot be decrypted goes to the policy, and the receive continues. Attributes, group,
type, deduplication id and delay are needed by the queue: they stay plain and are not authenticated. Source: the seed
documents' SecurityQueue. The keys and their file are in keys.py.

The cipher: direct encryption with a shared key (RFC 7518, section 4.5). The queue's name is in the protected header,
which the tag covers. A body is accepted only if its algorithm is its key's, is on the allow-list, and its queue is
ours; anything else is Undecryptable with a reason, whatever the bytes. Sizes are computed, so that a body that cannot
fit is refused before it is encrypted.
"""

import base64
import json
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Final

import msgspec

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.encrypted.keys import ALGORITHMS, Key, KeyFile, Keyring, Keys, add_key, new_key
from veilmq.client.errors import Undecryptable
from veilmq.client.messages import Message, Peeked, Received, Sent
from veilmq.client.queue import ById, Capabilities, Queue, identity_of
from veilmq.client.shared import attempt, checks, send_prepared
from veilmq.client.shared.checks import as_message, text_bytes
from veilmq.client.unreadable import Policy, checked_policy, log, read_each, receive_readable
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import MessageTooLarge, ParameterInvalid, VeilError

__all__ = ["ALGORITHMS", "EncryptedQueue", "Key", "KeyFile", "Keyring", "Keys", "add_key", "new_key"]

_NAME_CHARACTERS_MAX: Final = 256
_BLOCK_BYTES: Final = 16
_HEADER_BYTES_MAX: Final = 8_192
_BODY_BYTES_MAX: Final = 1 << 34
"""Lifts the library's own limit of 64 KiB: a received body is in memory already."""


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
        name = inner.name if bound_to is None else checks.text(bound_to, "bound_to")
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


class _NoKeys(Exception):
    """The keyring failed, which says nothing about the message."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


class Cipher:
    """Encrypts for one queue, and decrypts what was encrypted for it. Thread-safe."""

    def __init__(self, keys: Keyring, algorithms: Collection[str], bound_to: str, accepts: Collection[str]) -> None:
        """bound_to: the name for the header. accepts: other names that are accepted there.

        Raises ParameterInvalid, ModuleNotFoundError (without the extra `encryption`).
        """
        from joserfc import errors, jwe, registry

        class Registry(jwe.JWERegistry):
            max_protected_header_length = _HEADER_BYTES_MAX
            max_ciphertext_length = _BODY_BYTES_MAX

        algorithms = checks.texts(algorithms, "algorithms")
        if not algorithms:
            raise ParameterInvalid(parameter="algorithms", reason="must name one algorithm at least")
        for algorithm in algorithms:
            if algorithm not in ALGORITHMS:
                reason = f"{algorithm!r} is not one of {', '.join(ALGORITHMS)}"
                raise ParameterInvalid(parameter="algorithms", reason=reason)
        given: Any = keys
        if not callable(getattr(given, "find", None)) or isinstance(given, str | bytes):
            reason = f"must be Keys, a KeyFile(path) or an object with their methods, not {type(keys).__name__}"
            raise ParameterInvalid(parameter="keys", reason=reason)
        self._keys = keys
        self._algorithms = frozenset(algorithms)
        self._bound_to = bound_to
        self._accepted = frozenset([bound_to, *checks.texts(accepts, "accepts")])
        self._encrypt, self._decrypt = jwe.encrypt_compact, jwe.decrypt_compact
        self._registry = Registry(
            header_registry={"queue": registry.HeaderParameter("Name of the queue", "str", True)},
            algorithms=["dir", *algorithms],
        )
        # RecursionError: a forged header may be nothing but brackets.
        self._errors = (errors.JoseError, ValueError, RecursionError)
        self._imported: dict[str, tuple[Key, Any]] = {}
        self._check(keys.newest)

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`: everything that decides how a body is decrypted."""
        return identity_of(self._keys), self._algorithms, self._accepted

    def encrypt(self, body: bytes) -> str:
        """The JWE. Raises ParameterInvalid if the newest key's algorithm is not allowed."""
        key = self._keys.newest
        self._check(key)
        return self._encrypt(self._header(key), body, self._joserfc_key(key), registry=self._registry)

    def decrypt(self, body: str, message: str) -> str:
        """The plain body. `message` is the message's id, for the error. Raises Undecryptable, and what the keyring
        raises."""
        named: list[str] = []

        def find(found: Any) -> Any:
            return self._key_of(found.headers(), message, named)

        if body.count(".") != 4 or not body.startswith("e"):
            raise Undecryptable(message=message, reason="it is not encrypted", key_id=None)
        try:
            plain = self._decrypt(body, find, registry=self._registry).plaintext
            assert plain is not None
            return plain.decode()
        except _NoKeys as error:
            raise error.reason from None
        except UnicodeError:
            reason = "what was encrypted is not text"
        except self._errors as error:
            # Only the type of error: its text may quote the body.
            reason = f"it was changed, or is no JWE of ours ({type(error).__name__})"
        raise Undecryptable(message=message, reason=reason, key_id=named[0] if named else None)

    def encrypted_bytes(self, body_bytes: int) -> int:
        """Size in bytes of the JWE of a body of this size, under the newest key."""
        key = self._keys.newest
        iv, tag, padded = _form(key.algorithm)
        if padded:
            body_bytes += _BLOCK_BYTES - body_bytes % _BLOCK_BYTES
        return self._header_bytes(key) + 4 + _encoded(iv) + _encoded(body_bytes) + _encoded(tag)

    def body_bytes_max(self, encrypted_bytes_max: int) -> int:
        """Size of the largest body whose JWE has at most this many bytes."""
        key = self._keys.newest
        iv, tag, padded = _form(key.algorithm)
        room = encrypted_bytes_max - self._header_bytes(key) - 4 - _encoded(iv) - _encoded(tag)
        ciphertext = room // 4 * 3 + (room % 4) * 3 // 4
        if padded:
            ciphertext = ciphertext // _BLOCK_BYTES * _BLOCK_BYTES - 1
        return max(0, ciphertext)

    def _header(self, key: Key) -> dict[str, Any]:
        return {"alg": "dir", "enc": key.algorithm, "kid": key.id, "queue": self._bound_to}

    def _header_bytes(self, key: Key) -> int:
        return _encoded(len(json.dumps(self._header(key), separators=(",", ":"))))

    def _check(self, key: Key) -> None:
        if key.algorithm not in self._algorithms:
            reason = f"the newest key is for {key.algorithm}, which `algorithms` does not allow"
            raise ParameterInvalid(parameter="keys", reason=reason)

    def _joserfc_key(self, key: Key) -> Any:
        known = self._imported.get(key.id)
        if known is None or known[0] is not key:
            from joserfc.jwk import OctKey

            known = self._imported[key.id] = key, OctKey.import_key(key.secret)
        return known[1]

    def _key_of(self, header: dict[str, Any], message: str, named: list[str]) -> Any:
        """The key that the header names, after all checks of the header."""
        key_id = header.get("kid")
        if not isinstance(key_id, str):
            raise Undecryptable(message=message, reason="it names no key", key_id=None)
        named.append(key_id)
        try:
            key = self._keys.find(key_id)
        except Exception as error:
            raise _NoKeys(error) from error
        if key is None:
            raise Undecryptable(message=message, reason="we do not have its key", key_id=key_id)
        if header.get("alg") != "dir" or header.get("enc") != key.algorithm or key.algorithm not in self._algorithms:
            raise Undecryptable(message=message, reason="its algorithm is not allowed", key_id=key_id)
        if "crit" in header:
            # RFC 7516, 4.1.13. The library assumes a list of names, whatever it is.
            raise Undecryptable(message=message, reason="it asks for what we do not know", key_id=key_id)
        queue = header.get("queue")
        if not isinstance(queue, str) or queue not in self._accepted:
            raise Undecryptable(message=message, reason="it was encrypted for another queue", key_id=key_id)
        return self._joserfc_key(key)


def _form(algorithm: str) -> tuple[int, int, bool]:
    """Bytes of the initialization vector and of the tag, and whether the body is padded (RFC 7518, 5.2 and 5.3)."""
    if algorithm.endswith("GCM"):
        return 12, 16, False
    return 16, ALGORITHMS[algorithm] // 2, True


def _encoded(size_bytes: int) -> int:
    """Length in base64url without padding."""
    return (size_bytes * 4 + 2) // 3


def header_of(body: str) -> dict[str, Any]:
    """The protected header of a JWE, unchecked, for people who inspect a dead letter. Raises ValueError."""
    encoded = body.partition(".")[0]
    try:
        found = json.loads(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("the header is not an object")
    return found
