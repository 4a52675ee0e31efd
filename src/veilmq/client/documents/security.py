"""SecurityQueue and SecurityKeyGenerator (document 002, encrypted transfer).

Strategy: ours is EncryptedQueue: a standard format (JWE), a queue's messages bound to its name, keys that can be
changed. A plain-text message that somebody sent by mistake stops nothing.
"""

from pathlib import Path

from veilmq.client.documents.exceptions import documented
from veilmq.client.documents.queues import AnyQueue, MessageQueue, queue_of
from veilmq.client.encrypted.keys import ALGORITHMS, Key, KeyFile, Keys, add_key, new_key
from veilmq.client.encrypted.queue import EncryptedQueue
from veilmq.client.unreadable import DeadLetters, keep


class SecurityKeyGenerator:
    """Makes keys."""

    @staticmethod
    def generate(algorithm: str = "A256GCM") -> Key:
        """A new key, in memory."""
        return new_key(algorithm)

    @staticmethod
    def generateToFile(path: str | Path, algorithm: str = "A256GCM") -> KeyFile:
        """A new key in a file of mode 0600; the older ones in it go on decrypting."""
        add_key(path, new_key(algorithm))
        return KeyFile(path)


@documented
class SecurityQueue(MessageQueue):
    """putMessage encrypts, popMessage decrypts."""

    def __init__(
        self,
        queue: AnyQueue,
        key: Key | Keys | KeyFile,
        deadLetterQueue: AnyQueue | None = None,
        *,
        algorithm: str | None = None,
    ) -> None:
        """deadLetterQueue: where a message goes that cannot be decrypted; without one it stays in the queue and comes
        again. algorithm: the only one that is allowed; None: each key's own, whichever the generator made it for.

        Raises ParameterInvalid, also if the newest key is for another algorithm than that.
        """
        self.queue = EncryptedQueue(
            queue_of(queue),
            Keys(key) if isinstance(key, Key) else key,
            unreadable=keep if deadLetterQueue is None else DeadLetters(queue_of(deadLetterQueue)),
            algorithms=ALGORITHMS if algorithm is None else (algorithm,),
        )
