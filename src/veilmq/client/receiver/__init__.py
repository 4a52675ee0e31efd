"""The receiver: hundreds of callers share one parked poll (the documents' MessageReceiver).

Strategy: a pure exchange decides who gets what and which requests to make (exchange.py); runner threads make them, and
callers wait as threads or as coroutines (receiver.py). docs/patterns/receiver.md explains it.
"""

from veilmq.client.receiver.receiver import AsyncReceiver, Receiver

__all__ = ["AsyncReceiver", "Receiver"]
