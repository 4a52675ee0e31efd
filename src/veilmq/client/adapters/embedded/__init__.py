"""The embedded adapter: a data directory's queues in this process, without a server.

Strategy: one thread owns the directory's engine and store, shared by all who open the directory in this process
(`shell`). Callers' threads only submit commands and wait (`queue`, `topics`). `translation` has the limits, and
converts messages between both sides.
"""

from veilmq.client.adapters.embedded.queue import EmbeddedAccount, EmbeddedQueue

__all__ = ["EmbeddedAccount", "EmbeddedQueue"]
