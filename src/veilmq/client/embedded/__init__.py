"""The embedded adapter: a data directory's queues in this process, without a server.

Strategy: one thread owns the directory's engine and store (`shell`), whoever opens the directory again in this process
shares it (`directories`), and callers' threads only say commands and wait (`queue`). What a message looks
like on either side is `translation`; what can be asked for is `limits`.
"""

from veilmq.client.embedded.queue import EmbeddedAccount, EmbeddedQueue

__all__ = ["EmbeddedAccount", "EmbeddedQueue"]
