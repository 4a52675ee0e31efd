"""The veil adapter: our own server, through the VeilMQ operations.

Strategy: thin and fast. `calls` makes the bytes of a signed request and is a queue's way to the server, with our own
errors; `connections` carries them over sockets that stay open; `messages` turns the port's values into the wire's and
back; `queue` is the port.
"""

from veilmq.client.veil.queue import VeilAccount, VeilQueue

__all__ = ["VeilAccount", "VeilQueue"]
