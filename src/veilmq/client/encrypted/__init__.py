"""Bodies that only key holders can read or write: compact JWE over any queue.

Strategy: `keys` has the keys and their file; `queue` the pattern and the form of a body (RFC 7516, through joserfc).
Source: the documents' SecurityQueue and SecurityKeyGenerator.
"""

from veilmq.client.encrypted.keys import ALGORITHMS, Key, KeyFile, Keyring, Keys, add_key, new_key
from veilmq.client.encrypted.queue import EncryptedQueue

__all__ = ["ALGORITHMS", "EncryptedQueue", "Key", "KeyFile", "Keyring", "Keys", "add_key", "new_key"]
