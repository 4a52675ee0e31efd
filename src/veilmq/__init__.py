"""VeilMQ: a durable message queue built around the visibility timeout.

A received message is veiled from everyone else for a lease; its worker extends the lease while it works and deletes
the message when it is done; a crashed worker's message comes back by itself. This package imports nothing by itself, so
that `import veilmq` costs nothing and works without any extra: import the rooms you need.
"""

__version__ = "0.1.0.dev0"
