"""The veil adapter: our own server, through the VeilMQ operations.

Strategy: thin and fast. `calls` builds the bytes of a signed request, makes a queue's calls and maps errors;
`connections` sends them over sockets that stay open; `messages` converts the port's values to the wire's and back;
`queue` implements the port.
"""

from veilmq.client.adapters.veil.queue import VeilAccount, VeilQueue

__all__ = ["VeilAccount", "VeilQueue"]
