"""SecurityQueue and SecurityKeyGenerator (document 002, encrypted transfer).

Strategy: ours is EncryptedQueue: a standard format (JWE), a queue's messages bound to its name, keys that can be
changed. A plain-text message that somebody sent by mistake goes to the dead letters and stops nothing.
"""

from pathlib import Path

from veilmq.client.closing import Closing
from veilmq.client.documents.messages import Message
from veilmq.client.encrypted.keys import Key, KeyFile, Keys, add_key, new_key
from veilmq.client.encrypted.queue import EncryptedQueue
from veilmq.client.queue import Queue
from veilmq.client.unreadable import DeadLetters


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


class SecurityQueue(Closing):
    """putMessage encrypts, popMessage decrypts."""

    def __init__(self, queue: Queue, key: Key | Keys | KeyFile, deadLetterQueue: Queue) -> None:
        """deadLetterQueue: where a message goes that cannot be decrypted."""
        keys = Keys(key) if isinstance(key, Key) else key
        self.queue = EncryptedQueue(queue, keys, unreadable=DeadLetters(deadLetterQueue))

    def putMessage(self, message: Message) -> Message:
        """Encrypt and send."""
        message.message_id = self.queue.send(message.message_body).id
        return message

    def popMessage(self, waitSeconds: float = 0) -> Message | None:
        """Receive and decrypt one; None if nothing came."""
        found = self.queue.receive(wait=waitSeconds)
        return Message.of(found[0]) if found else None

    def deleteMessage(self, receiptHandle: str) -> None:
        """Done with it."""
        self.queue.delete(receiptHandle)

    def close(self) -> None:
        """Let the queue go."""
        self.queue.close()
