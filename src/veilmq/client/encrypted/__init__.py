"""Bodies that only the holders of a key can read or make: compact JWE over any queue.

Strategy: `keys` is what there is to keep secret, and its file; `cipher` is the form of a body (RFC 7516, through
joserfc); `queue` is the pattern. Source: the documents' SecurityQueue and SecurityKeyGenerator.
"""

from veilmq.client.encrypted.keys import ALGORITHMS, Key, KeyFile, Keyring, Keys, add_key, new_key
from veilmq.client.encrypted.queue import EncryptedQueue

__all__ = ["ALGORITHMS", "EncryptedQueue", "Key", "KeyFile", "Keyring", "Keys", "add_key", "new_key"]
