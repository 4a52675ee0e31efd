"""The embedded adapter: a data directory's queues in this process, without a server.

Strategy: one thread owns the directory's engine and store (`shell`), shared by all who open the directory in this
process (`directories`). Callers' threads only submit commands and wait (`queue`). `translation` converts messages
between both sides; `limits` has the limits.
"""

from veilmq.client.adapters.embedded.queue import EmbeddedAccount, EmbeddedQueue

__all__ = ["EmbeddedAccount", "EmbeddedQueue"]
