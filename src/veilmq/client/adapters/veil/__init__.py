"""The veil adapter: our own server, through the VeilMQ operations.

Strategy: thin and fast. `connections` signs requests and sends them over sockets that stay open; `calls` makes a
queue's calls, maps errors, and converts the port's messages to the wire's and back; `queue` implements the port.
"""

from veilmq.client.adapters.veil.queue import VeilAccount, VeilQueue

__all__ = ["VeilAccount", "VeilQueue"]
