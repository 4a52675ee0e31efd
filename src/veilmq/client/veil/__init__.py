"""The veil adapter: our own server, through the VeilMQ operations.

Strategy: thin and fast. `signing` makes the bytes of a signed request, `connections` carries them over sockets that
stay open, `calls` is a queue's way to the server with the house's errors, `messages` turns the port's values into the
wire's and back, `account` and `queue` are the port.
"""

from veilmq.client.veil.account import VeilAccount
from veilmq.client.veil.queue import VeilQueue

__all__ = ["VeilAccount", "VeilQueue"]
