"""SecurityQueue and SecurityKeyGenerator (document 002, encrypted transfer).

Strategy: ours is EncryptedQueue: a standard format (JWE), a queue's messages bound to its name, keys that can be
changed. A plain-text message that somebody sent by mistake stops nothing.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from veilmq.client.documents.exceptions import documented
from veilmq.client.documents.queues import AnyQueue, MessageQueue, queue_of
from veilmq.client.encrypted.keys import ALGORITHMS, Key, KeyFile, Keys, add_key, new_key
from veilmq.client.encrypted.queue import EncryptedQueue
from veilmq.model.errors import ParameterInvalid

_DEFAULT: Final = "A256GCM"
_JAVA: Final = {"AES": _DEFAULT, "AES/GCM/NOPADDING": _DEFAULT}
"""Java's name, in upper case -> ours."""
_WEAK: Final = frozenset({"DES", "DESEDE", "TRIPLEDES", "BLOWFISH", "RC2", "RC4", "ARCFOUR"})


def _algorithm_of(name: Any) -> str:
    """Our name of it; Java's names are taken, too. Raises ParameterInvalid."""
    if not isinstance(name, str):
        raise ParameterInvalid(parameter="algorithm", reason=f"must be text, not {type(name).__name__}")
    ours = _JAVA.get(name.upper(), name)
    if ours in ALGORITHMS:
        return ours
    why = "is too weak and not offered" if name.upper() in _WEAK else "is not offered"
    reason = f"{name[:40]} {why}: take AES (which is {_DEFAULT}), or one of {', '.join(ALGORITHMS)}"
    raise ParameterInvalid(parameter="algorithm", reason=reason)


class SecurityKeyGenerator:
    """Makes keys. algorithm: one of ours, or Java's AES, which is A256GCM."""

    @staticmethod
    def generate(algorithm: str = _DEFAULT) -> Key:
        """A new key, in memory. Raises ParameterInvalid."""
        return new_key(_algorithm_of(algorithm))

    @staticmethod
    def generateToFile(path: str | Path, algorithm: str = _DEFAULT) -> KeyFile:
        """A new key in a file of mode 0600; the older ones in it go on decrypting. Raises ParameterInvalid."""
        add_key(path, new_key(_algorithm_of(algorithm)))
        return KeyFile(path)


@documented
class SecurityQueue(MessageQueue):
    """putMessage encrypts, popMessage decrypts."""

    def __init__(
        self,
        queue: AnyQueue,
        key: Key | Keys | KeyFile,
        algorithm: str | AnyQueue | None = None,
        deadLetterQueue: AnyQueue | None = None,
    ) -> None:
        """algorithm: the only one that is allowed; None: each key's own, whichever the generator made it for.
        deadLetterQueue: where a message goes that cannot be decrypted; without one it stays in the queue and comes
        again. The third argument may also be the dead-letter queue.

        Raises ParameterInvalid, also if the newest key is for another algorithm than that.
        """
        if algorithm is not None and not isinstance(algorithm, str):
            if deadLetterQueue is not None:
                raise ParameterInvalid(parameter="algorithm", reason=f"must be text, not {type(algorithm).__name__}")
            algorithm, deadLetterQueue = None, algorithm
        allowed = ALGORITHMS if algorithm is None else (_algorithm_of(algorithm),)
        with ExitStack() as undo:
            inner = undo.enter_context(queue_of(queue))
            if deadLetterQueue is not None:
                self._dead_letters = undo.enter_context(queue_of(deadLetterQueue))
            keys = Keys(key) if isinstance(key, Key) else key
            self.queue = EncryptedQueue(inner, keys, unreadable=self._set_aside(), algorithms=allowed)
            undo.pop_all()
